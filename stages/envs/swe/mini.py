"""The environment `swe-mini`: our own bugs in small packages, in SWE-bench's shape, without engine, clones or keys.

Its rows are in mini.jsonl: a bug that we planted in a released package, which the package's tests do not notice, and
our tests, which do. The rows hold no code of the packages except the context of the patches: pip fetches the source
distributions once, and their SHA-256 is compared. The delivered tree is the distribution with the gold patch applied in
reverse; tests are run by a pytest that pip fetches once, too.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from composer_stages.envs import folders
from composer_stages.envs.base import Split, Task
from composer_stages.envs.repo import runner, trees
from composer_stages.envs.repo.grading import TestRuntime
from composer_stages.envs.repo.session import RepoEnvironment
from composer_stages.envs.repo.task import Export, RepoTask
from composer_stages.envs.repo.trees import extract_archive
from composer_stages.envs.swe import instances
from composer_stages.envs.swe.instance_tasks import OpenLimited, instance_task, task_of
from composer_stages.envs.swe.specs import HERE, EnvironmentSpec, instance_tests
from composer_stages.envs.task_table import order_rows
from composer_stages.errors import BadInput, UsageError
from composer_stages.runs import store
from composer_stages.runs.activity import activity
from composer_stages.runs.kinds import Row
from composer_stages.terms import REPOSITORY
from composer_stages.words import Sentence

ROWS = Path(__file__).with_name("mini.jsonl")
CACHE = Path.home() / ".cache" / "composer" / "swe-mini"
COLUMNS = ("split", "sdist", "sdist_sha256")
"""The columns of a row in addition to those of SWE-bench's classic shape."""
PYTEST = "pytest==8.4.2"
"""The release under which the lists of the rows were made; boltons' conftest.py does not load in pytest 9."""
FETCH_S = 600
"""Seconds for one run of pip."""
OWN_OPTIONS = ("-o", "addopts=")
"""Leave out a package's own options of pytest, which may ask for plugins."""


def fetch_sdist(row: Mapping[str, Any], cache: Path) -> Path:
    """Return the row's source distribution, fetched where it is missing; `BadInput` where its digest differs."""
    path, package = cache / "sdists" / row["sdist"], row["repo"].partition("/")[2]

    def fetch(target: Path) -> str:
        with trees.scratch() as folder:
            (folder / "wanted.txt").write_text(f"{package}=={row['version']} --hash=sha256:{row['sdist_sha256']}\n")
            options = ["--no-deps", "--no-binary", package, "--require-hashes", "-r", str(folder / "wanted.txt")]
            return _pip("download", *options, "--dest", str(target.parent))

    _fetch(path, fetch, f"The source distribution {path.name}", Sentence("envs.swe.put-file-into", folder=path.parent))
    if (digest := store.file_sha256(path)) != row["sdist_sha256"]:
        raise BadInput("envs.swe.wrong-sdist", path=path, digest=digest, row_digest=row["sdist_sha256"])
    return path


def pytest_folder(cache: Path) -> Path:
    """Return the folder of the fetched pytest, whose compiled files are those of this Python."""
    return cache / f"pytest-python-{HERE}-{store.digest([sys.version, PYTEST])[:8]}"


def fetch_pytest(cache: Path) -> Path:
    """Return a folder with the pytest that the lists of the rows were made with, fetched where it is missing."""
    path = pytest_folder(cache)
    way_out = Sentence("envs.swe.let-pip-find-it")
    _fetch(path, lambda target: _pip("install", "--target", str(target), PYTEST), PYTEST, way_out)
    return path


def _fetch(path: Path, fetch: Callable[[Path], str], package: str, way_out: str) -> None:
    """Fetch a file or folder where it is missing; `fetch` writes its target, or returns why it cannot."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Runs in several processes share the cache.
    with FileLock(path.parent / "lock"):
        if path.exists():
            return
        with trees.scratch() as folder, activity(f"fetching {path.name}"):
            reason = fetch(folder / path.name)
            if reason or not (folder / path.name).exists():
                raise UsageError("envs.swe.fetch-failed", package=package, reason=reason, way_out=way_out)
            # Renamed last: an interrupted download or copy must leave nothing at `path`.
            partial = path.with_name(f"{path.name}.part")
            shutil.rmtree(partial, ignore_errors=True)
            partial.unlink(missing_ok=True)
            shutil.move(folder / path.name, partial)
            partial.rename(path)


def _pip(*arguments: str) -> str:
    """Run pip; return the last line of its error, or an empty string."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=FETCH_S)
    except subprocess.TimeoutExpired:
        return f"no end within {FETCH_S} s"
    return (done.stderr.strip().splitlines() or ["no reason given"])[-1] if done.returncode else ""


def plant(row: Mapping[str, Any], sdist: Path, target: Path) -> None:
    """Write the distribution with the bug into an empty folder.

    `BadInput` where the patch does not fit, or the commit of the tree is not that of the row.
    """
    with trees.scratch() as folder, trees.scratch() as patch_folder:
        tree, patch = extract_archive(sdist, folder), patch_folder / "patch"
        patch.write_text(row["patch"])
        try:
            trees.git(tree, "apply", "--reverse", str(patch))
        except RuntimeError as error:
            raise BadInput(
                "envs.swe.patch-does-not-fit", instance=row["instance_id"], sdist=row["sdist"], error=error
            ) from None
        folders.copy(tree, target)
        commit = trees.commit(tree)
    if commit != row["base_commit"]:
        raise BadInput(
            "envs.swe.wrong-base-commit", instance=row["instance_id"], commit=commit, row_commit=row["base_commit"]
        )


class SweMiniEnv(RepoEnvironment):
    """Implements Environment, ComparesOutcomes, HasSolutions, HasSize and Packs.

    `path`: a file of rows in the shape of `mini.jsonl`, which is the default; the column `split` is the row's
    split, and no package is in both. `instances`: only these ids. `cache`: the folder for what is fetched,
    ~/.cache/composer/swe-mini by default. `max_chars`: of a longer output the agent sees head and tail.
    """

    name = "swe-mini"
    sampling_unit = REPOSITORY

    def __init__(
        self,
        sandbox: str = "bubblewrap",
        path: str = "",
        instances: Sequence[str] = (),
        cache: str = "",
        max_chars: int = 10_000,
    ) -> None:
        self.sandbox, self.max_chars = sandbox, max_chars
        self._path, self._only = path or str(ROWS), tuple(instances)
        self._cache = Path(cache).absolute() if cache else CACHE

    def size(self, split: Split) -> int:
        """Return the number of instances of a split."""
        return len(self._rows(split))

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        """Return the first `count` instances under a seed, and fetch what they need where it is missing."""
        rows = order_rows(self._rows(split), seed, "instance_id")[:count]
        fetch_pytest(self._cache)
        for row in rows:
            fetch_sdist(row, self._cache)
        return [task_of(row, self.name, split) for row in rows]

    def _rows(self, split: Split) -> list[Row]:
        """Return the rows of a split, or the named ones among them."""
        rows = instances.load(Path(self._path))
        for row in rows:
            if lacking := [name for name in COLUMNS if not row.get(name)]:
                raise BadInput(
                    "envs.swe.row-without-sdist", path=self._path, instance=row["instance_id"], columns=lacking
                )
        return instances.select_instances([row for row in rows if row["split"] == split], self._only, self._path)

    def repo_task(self, task: Task) -> RepoTask:
        """Set up the distribution with its bug, and pytest; both are fetched where they are missing."""
        row, pytest = task.data, fetch_pytest(self._cache)
        sdist = fetch_sdist(row, self._cache)

        def opener(delivered: Path) -> OpenLimited:
            copies = runner.copies_on_host(runner.packages_of(delivered))
            return lambda folder, limits: runner.open_package_sandbox(
                self.sandbox, folder, limits, None, hidden=copies, options=OWN_OPTIONS, pinned=pytest
            )

        def deliver(target: Path) -> None:
            plant(row, sdist, target)

        spec, key = EnvironmentSpec(HERE), (sdist, store.digest(dict(row)))
        task_tree = instance_task(row, spec, key, deliver, opener, python=TestRuntime.python)
        tests = (path for path in instance_tests(row, spec).files if path in task_tree.hidden)
        provenance = {name: row[name] for name in ("repo", "version", "sdist", "sdist_sha256", "base_commit")}
        return replace(task_tree, export=Export("", ("-q", *OWN_OPTIONS, *tests), 600.0, (PYTEST,), provenance))
