"""The environment `swe-mini`: our own bugs in small packages, in SWE-bench's shape, without engine, clones or keys.

Its rows are in mini.jsonl: a bug that we planted in a released package, which the package's tests do not notice, and
our tests, which do. The rows hold no code of the packages except the context of the patches: pip fetches the source
distributions once, and their SHA-256 is compared.

`prepare` makes what an instance needs once, in a cache: `sdists/` holds what pip fetched; `repos/` a bare repository
for every package with one commit for every instance, which is the distribution with the bug and has no history;
`venvs/` one environment with the test runner, and a link to it for every package.
"""

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from stages.envs.base import Split, Task
from stages.envs.repo import trees
from stages.envs.repo.task import Export, RepoTask
from stages.envs.repo.trees import extract_archive
from stages.envs.swe import instances, venvs
from stages.envs.swe.env import SweEnv
from stages.envs.swe.instances import has_commit, touched_paths
from stages.errors import BadInput, UsageError
from stages.runs import store
from stages.runs.activity import doing
from stages.runs.kinds import Row
from stages.sandbox.bubblewrap import TESTBED

ROWS = Path(__file__).with_name("mini.jsonl")
CACHE = Path.home() / ".cache" / "composer" / "swe-mini"
SDISTS, REPOS, VENVS = "sdists", "repos", "venvs"
RUNNER = ("pytest==8.4.2", "pytest-cov==7.1.0")
"""One of the packages has its coverage measured by its own configuration."""
COLUMNS = ("split", "sdist", "sdist_sha256")
"""The columns of a row in addition to those of SWE-bench's classic shape."""
PIP = ("pip", "--disable-pip-version-check", "--quiet")
FETCH_S = 600
"""Seconds for one run of pip."""


def prepare(row: Mapping[str, Any], cache: Path) -> None:
    """Make the base commit and the environment of a row where they are missing.

    `UsageError` where pip cannot fetch them, `BadInput` where a distribution is not the one that the row is made from.
    """
    (cache / VENVS).mkdir(parents=True, exist_ok=True)
    # Runs in several processes share the cache.
    with FileLock(cache / "lock"):
        prepare_repository(row, cache)
        _prepare_environment(row, cache / VENVS)


def prepare_repository(row: Mapping[str, Any], cache: Path) -> None:
    """Put the row's base commit into the bare repository of its package.

    It is the source distribution with the bug: the gold patch is applied in reverse. `BadInput` where the patch does
    not fit, or the commit is not that of the row.
    """
    for name in (SDISTS, REPOS):
        (cache / name).mkdir(parents=True, exist_ok=True)
    bare = cache / REPOS / f"{row['repo'].replace('/', '__')}.git"
    if not bare.exists():
        trees.git(cache, "init", "--quiet", "--bare", "--initial-branch=main", str(bare))
    if has_commit(bare, row["base_commit"]):
        return
    sdist = _fetched_sdist(row, cache / SDISTS)
    with trees.scratch() as folder, trees.scratch() as patch_folder:
        tree, patch = extract_archive(sdist, folder), patch_folder / "patch"
        patch.write_text(row["patch"])
        try:
            trees.git(tree, "apply", "--reverse", str(patch))
        except RuntimeError as error:
            raise BadInput(
                f"The patch of {row['instance_id']} does not fit {row['sdist']}: {error}. Correct the row."
            ) from None
        commit = trees.commit(tree)
        trees.git(bare, "fetch", "--quiet", str(tree), f"+main:refs/heads/{row['instance_id']}")
    if commit != row["base_commit"]:
        raise BadInput(
            f"The base commit of {row['instance_id']} is {commit} here and {row['base_commit']} in its row. "
            "Correct the row, whose patches or distribution have changed."
        )


def _fetched_sdist(row: Mapping[str, Any], folder: Path) -> Path:
    """Return the row's source distribution, fetched where it is missing; `BadInput` where its digest differs."""
    path: Path = folder / row["sdist"]
    package = row["repo"].partition("/")[2]
    if not path.exists():
        wanted = f"{package}=={row['version']} --hash=sha256:{row['sdist_sha256']}\n"
        with trees.scratch() as scratch:
            (scratch / "wanted.txt").write_text(wanted)
            options = ["--no-deps", "--no-binary", package, "--require-hashes", "-r", str(scratch / "wanted.txt")]
            # Not into `folder`: an interrupted download must leave no partial file there.
            reason = _run_module(sys.executable, *PIP, "download", *options, "--dest", str(scratch))
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


def _prepare_environment(row: Mapping[str, Any], folder: Path) -> None:
    """Link the environment of the row's package to the shared one, and build that first where it is missing.

    The shared environment holds the test runner, finds packages at /testbed and /testbed/src, and has no pip.
    """
    shared = folder / shared_name()
    if not (shared / venvs.DONE).exists():
        shutil.rmtree(shared, ignore_errors=True)
        python = shared / "venv" / "bin" / "python"
        with doing(f"installing {', '.join(RUNNER)}"):
            reason = _run_module(sys.executable, "venv", str(shared / "venv"))
            reason = reason or _run_module(str(python), *PIP, "install", *RUNNER)
        if reason:
            raise UsageError(
                f"The environment for tests of swe-mini cannot be built ({reason}). It is built once: connect to a "
                "package index, or let pip find the packages without one (PIP_NO_INDEX, PIP_FIND_LINKS)."
            )
        # They vendor packages, which could be those of an instance.
        _run_module(str(python), *PIP, "uninstall", "--yes", "pip", "setuptools")
        # In place of an installation: a package is found in the tree, so no environment holds a copy of it.
        for site in shared.glob("venv/lib/python*/site-packages"):
            (site / "testbed.pth").write_text(f"{TESTBED}\n{TESTBED}/src\n")
        (shared / venvs.DONE).write_text("")
    link = folder / venvs.name_of(row)
    if not link.is_symlink() or link.resolve() != shared.resolve():
        link.unlink(missing_ok=True)
        link.symlink_to(shared.name)


def shared_name() -> str:
    """Return the name of the shared environment, which depends on this Python and the test runner."""
    return f"python-{sys.version_info.major}.{sys.version_info.minor}-{store.digest(RUNNER)[:8]}"


def _run_module(python: str, *arguments: str) -> str:
    """Run `python -m` with these arguments; return the last line of its error, or an empty string."""
    command = [python, "-m", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=FETCH_S)
    except subprocess.TimeoutExpired:
        return f"no end within {FETCH_S} s"
    return (done.stderr.strip().splitlines() or ["no reason given"])[-1] if done.returncode else ""


class SweMiniEnv(SweEnv):
    """Implements Environment, ComparesOutcomes, HasSolutions, HasSize and Packs.

    `path`: a file of rows in the shape of `mini.jsonl`, which is the default; the column `split` is the row's
    split, and no package is in both. `instances`: only these ids. `cache`: the folder for what is
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

    def size(self, split: Split) -> int:
        """Return the number of instances of a split."""
        return len(self._chosen(split))

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        """Return the first `count` instances under a seed, and fetch and build what they need where it is missing."""
        found = super().tasks(split, count, seed)
        for task in found:
            prepare(task.data, self._cache)
        return found

    def repo_task(self, task: Task) -> RepoTask:
        """Set up the distribution with its bug, fetched and built where it is missing."""
        row = task.data
        prepare(row, self._cache)
        made = super().repo_task(task)
        files = [path for path in touched_paths(row["test_patch"]) if path in made.hidden]
        return replace(
            made,
            export=Export(
                # Without the package's own options, which may ask for plugins: pytest alone is sure to be there.
                arguments=("-q", "-o", "addopts=", *files),
                requirements=RUNNER[:1],
                provenance={name: row[name] for name in ("repo", "version", "sdist", "sdist_sha256", "base_commit")},
            ),
        )

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
        return rows  # A missing mirror is no obstacle: `prepare` makes it.
