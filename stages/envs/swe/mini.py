"""The environment `swe-mini`: bugs of our own in small packages, in SWE-bench's shape, without engine, clones or keys.

Its rows lie beside this file: a bug that we planted in a released package, which the tests beside it do not notice,
and tests of ours that do. No code of the packages is among them but the context of the patches: the source
distributions are fetched once, by pip, and held against their SHA-256.
"""

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from stages.envs.base import Split, Task
from stages.envs.repo import trees
from stages.envs.repo.trees import extract_archive
from stages.envs.swe import instances, venvs
from stages.envs.swe.env import SweEnv
from stages.envs.swe.instance_runtime import InstanceRuntime
from stages.errors import BadInput, UsageError
from stages.runs import store
from stages.runs.records import Row
from stages.sandbox.bubblewrap import TESTBED

# ---- mini_sources
# What an instance of `swe-mini` needs, made once in a cache: source distribution, mirror, environment for its tests.
#
# `sdists/` holds what pip fetched; `repos/` a bare repository for every package with one commit for every instance,
# which
# is the distribution with the bug and has no history; `venvs/` one environment with the test runner, and a link to
# it for
# every package.

SDISTS, REPOS, VENVS = "sdists", "repos", "venvs"
RUNNER = ("pytest==8.4.2", "pytest-cov==7.1.0")
"""One of the packages has its coverage measured by its own configuration."""
COLUMNS = ("split", "sdist", "sdist_sha256")
"""What a row has beside the columns of SWE-bench's classic shape."""
FETCH_S = 600
"""Seconds for one run of pip."""


def prepare(row: Mapping[str, Any], cache: Path) -> None:
    """Make what is missing of what a row needs.

    `UsageError` where pip cannot fetch it, `BadInput` where a distribution is not the one that the row is made from.
    """
    (cache / VENVS).mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "lock"):
        repository(row, cache)
        _environment(row, cache / VENVS)


def repository(row: Mapping[str, Any], cache: Path) -> None:
    """Put the row's base commit, made from its source distribution, into the bare repository of its package."""
    for name in (SDISTS, REPOS):
        (cache / name).mkdir(parents=True, exist_ok=True)
    bare = cache / REPOS / f"{row['repo'].replace('/', '__')}.git"
    if not bare.exists():
        trees.git(cache, "init", "--quiet", "--bare", "--initial-branch=main", str(bare))
    if _has(bare, row["base_commit"]):
        return
    sdist = _sdist(row, cache / SDISTS)
    with trees.scratch() as folder:
        tree = extract_archive(sdist, folder)
        planted(row, tree)
        commit = trees.commit(tree)
        trees.git(bare, "fetch", "--quiet", str(tree), f"+main:refs/heads/{row['instance_id']}")
    if commit != row["base_commit"]:
        raise BadInput(
            f"The base commit of {row['instance_id']} is {commit} here and {row['base_commit']} in its row. "
            "Correct the row, whose patches or distribution have changed."
        )


def planted(row: Mapping[str, Any], tree: Path) -> None:
    """Plant the bug in an unpacked distribution: the gold patch backwards. `BadInput` where it does not fit."""
    with trees.scratch() as folder:
        (folder / "patch").write_text(row["patch"])
        try:
            trees.git(tree, "apply", "--reverse", str(folder / "patch"))
        except RuntimeError as error:
            raise BadInput(
                f"The patch of {row['instance_id']} does not fit {row['sdist']}: {error}. Correct the row."
            ) from None


def _has(bare: Path, commit: str) -> bool:
    try:
        trees.git(bare, "cat-file", "-e", f"{commit}^{{commit}}")
    except RuntimeError:
        return False
    return True


def _sdist(row: Mapping[str, Any], folder: Path) -> Path:
    """The row's source distribution, fetched where it is not there."""
    path: Path = folder / row["sdist"]
    package = row["repo"].partition("/")[2]
    if not path.exists():
        wanted = f"{package}=={row['version']} --hash=sha256:{row['sdist_sha256']}\n"
        with trees.scratch() as scratch:
            (scratch / "wanted.txt").write_text(wanted)
            options = ["--no-deps", "--no-binary", package, "--require-hashes", "-r", str(scratch / "wanted.txt")]
            # Elsewhere first: a download that is broken off leaves no half of a file.
            reason = _pip(sys.executable, "download", *options, "--dest", str(scratch))
            if reason or not (scratch / path.name).exists():
                raise UsageError(
                    f"The source distribution {path.name} cannot be fetched ({reason or 'pip gave another file'}). It "
                    f"is needed once: connect to a package index, or put the file into {folder}."
                )
            shutil.move(scratch / path.name, path)
    if (found := store.file_sha256(path)) != row["sdist_sha256"]:
        raise BadInput(
            f"{path} has the SHA-256 {found}, not {row['sdist_sha256']}. Delete it, and it is fetched again."
        )
    return path


def _environment(row: Mapping[str, Any], folder: Path) -> None:
    """Link the environment of the row's package to the one that all of them share, built where it is not there."""
    shared = folder / shared_name()
    if not (shared / venvs.DONE).exists():
        shutil.rmtree(shared, ignore_errors=True)
        _build(shared)
    link = folder / venvs.name_of(row)
    if not link.is_symlink() or link.resolve() != shared.resolve():
        link.unlink(missing_ok=True)
        link.symlink_to(shared.name)


def shared_name() -> str:
    """What the environment that all packages share is called: it follows from this Python and the test runner."""
    return f"python-{sys.version_info.major}.{sys.version_info.minor}-{store.digest(RUNNER)[:8]}"


def _build(place: Path) -> None:
    """A virtual environment with the test runner that finds packages at /testbed and /testbed/src, and has no pip."""
    python = place / "venv" / "bin" / "python"
    done = subprocess.run([sys.executable, "-m", "venv", str(place / "venv")], capture_output=True, text=True)
    reason = _last_line(done) if done.returncode else _pip(str(python), "install", *RUNNER)
    if reason:
        raise UsageError(
            f"The environment for tests of swe-mini cannot be built ({reason}). It is built once: connect to a package "
            "index, or let pip find the packages without one (PIP_NO_INDEX, PIP_FIND_LINKS)."
        )
    _pip(str(python), "uninstall", "--yes", "pip", "setuptools")
    for site in place.glob("venv/lib/python*/site-packages"):
        (site / "testbed.pth").write_text(f"{TESTBED}\n{TESTBED}/src\n")
    (place / venvs.DONE).write_text("")


def _pip(python: str, *arguments: str) -> str:
    """Run a command of pip; returns why it failed, or nothing."""
    command = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=FETCH_S)
    except subprocess.TimeoutExpired:
        return f"no end within {FETCH_S} s"
    return _last_line(done) if done.returncode else ""


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip().splitlines() or ["no reason given"])[-1]


ROWS = Path(__file__).with_name("mini.jsonl")
CACHE = Path.home() / ".cache" / "composer" / "swe-mini"


class SweMiniEnv(SweEnv):
    """Implements Environment and ComparesOutcomes.

    `path`: a file of rows in the shape of `mini.jsonl`, which is the default; the column `split` says on which side of
    a split a row lies, and no package lies on both. `instances`: only these ids. `cache`: the folder for what is
    fetched and built once, ~/.cache/composer/swe-mini by default. `max_chars`: of a longer output the agent sees head
    and tail.
    """

    name = "swe-mini"

    def __init__(
        self,
        sandbox: str = "bubblewrap",
        path: str = "",
        instances: Sequence[str] = (),
        cache: str = "",
        max_chars: int = 10_000,
    ) -> None:
        self._cache = Path(cache).absolute() if cache else CACHE
        super().__init__(
            sandbox,
            path or str(ROWS),
            instances=instances,
            repos=str(self._cache / REPOS),
            venvs=str(self._cache / VENVS),
            runs_in="local",
            max_chars=max_chars,
        )

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        """The first `count` instances under a seed; what they need is fetched and built here, if it is not there."""
        found = super().tasks(split, count, seed)
        for task in found:
            prepare(task.data, self._cache)
        return found

    def _rows(self, split: Split) -> list[Row]:
        rows = instances.load(Path(self._path))
        for row in rows:
            if lacking := [name for name in COLUMNS if not row.get(name)]:
                raise BadInput(
                    f"{self._path}, row {row['instance_id']}, has no {', '.join(lacking)}. Rows of swe-mini name their "
                    "source distribution; for others use `--env swe-lite`."
                )
        return [row for row in rows if row["split"] == split]

    def _possible(self, rows: list[Row]) -> list[Row]:
        return rows

    def _opened(self, row: Row) -> InstanceRuntime:
        prepare(row, self._cache)
        return super()._opened(row)
