"""The environment `swe-mini`: its shipped rows, and every step from a source distribution to a verdict."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.archives import tar
from support.grades import play

from composer_stages.envs import load
from composer_stages.envs.base import Task
from composer_stages.envs.bash import fenced
from composer_stages.envs.repo import runner, trees
from composer_stages.envs.repo.trees import extract_archive
from composer_stages.envs.swe import instances, mini
from composer_stages.envs.swe.instances import touched_paths
from composer_stages.envs.swe.mini import COLUMNS, SweMiniEnv, fetch_pytest, fetch_sdist, plant, pytest_folder
from composer_stages.errors import BadInput, UsageError
from composer_stages.runs import store
from composer_stages.swebench.lists import LISTS

GOOD = "def add(a, b):\n    return a + b\n\n\ndef total(values):\n    return sum(values)\n"
FILES = {
    "PKG-INFO": "Metadata-Version: 2.1\nName: abacus\nVersion: 1.0\n",
    "abacus/__init__.py": "from abacus.sums import add, total\n",
    "abacus/sums.py": GOOD,
    "tests/test_sums.py": "import abacus\n\n\ndef test_total():\n    assert abacus.total([1, 2]) == 3\n",
}
TESTS = f"{FILES['tests/test_sums.py']}\n\ndef test_add():\n    assert abacus.add(1, 2) == 3\n"
SHIPPED = instances.load(mini.ROWS)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the distribution and a pytest, as a machine has them after fetching."""
    folder = tmp_path_factory.mktemp("mini")
    (folder / "sdists").mkdir()
    tar(
        folder / "sdists" / "abacus-1.0.tar.gz",
        *((f"abacus-1.0/{name}", text.encode()) for name, text in FILES.items()),
    )
    for path in runner.distribution_paths(runner.RUNNER):
        target = pytest_folder(folder) / path.name
        target.parent.mkdir(exist_ok=True)
        (shutil.copytree if path.is_dir() else shutil.copy)(path, target)
    return folder


@pytest.fixture(scope="module")
def mini_row(cache: Path) -> dict[str, Any]:
    """An instance whose bug is planted in the distribution."""
    with trees.scratch() as folder:
        tree = extract_archive(cache / "sdists" / "abacus-1.0.tar.gz", folder)
        (tree / "abacus/sums.py").write_text(GOOD.replace("a + b", "a - b"))
        patch, test_patch = (
            trees.patch(tree, {path: trees.TreeFile(text.encode())})
            for path, text in (("abacus/sums.py", GOOD), ("tests/test_sums.py", TESTS))
        )
        commit = trees.commit(tree)
    return {
        "repo": "swe-mini/abacus",
        "instance_id": "swe-mini__abacus-1",
        "base_commit": commit,
        "patch": patch,
        "test_patch": test_patch,
        "problem_statement": "add(1, 2) gives -1.",
        "version": "1.0",
        "FAIL_TO_PASS": json.dumps(["tests/test_sums.py::test_add"]),
        "PASS_TO_PASS": json.dumps(["tests/test_sums.py::test_total"]),
        "split": "train",
        "sdist": "abacus-1.0.tar.gz",
        "sdist_sha256": store.file_sha256(cache / "sdists" / "abacus-1.0.tar.gz"),
    }


@pytest.fixture
def rows(mini_row: dict[str, Any], tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text(json.dumps(mini_row) + "\n")
    return tmp_path / "rows.jsonl"


@pytest.fixture
def env(rows: Path, cache: Path) -> Iterator[SweMiniEnv]:
    environment = SweMiniEnv(path=str(rows), cache=str(cache))
    yield environment
    environment.close()


TESTED = ("python -m pytest -q", "submit")


def gold(task: Task) -> str:
    return f"cat > /tmp/gold <<'END OF PATCH'\n{task.data['patch']}END OF PATCH\ngit apply /tmp/gold"


@pytest.mark.slow
def test_from_a_source_distribution_to_a_verdict(env: SweMiniEnv) -> None:
    (task,) = env.tasks("train", 5, seed=0)
    assert (task.env, task.family, task.split) == ("swe-mini", "swe-mini/abacus", "train")
    env.reset(task)
    assert env.step(fenced("git log --format=%s; git status --short; tail -1 tests/test_sums.py")).content == (
        "Start\n    assert abacus.total([1, 2]) == 3\n[exit 0]"
    )
    delivered = play(env, task, *TESTED)
    assert (delivered.hidden_pass, delivered.hacked) == (False, False)
    assert (delivered.work.f2p_passed, delivered.work.p2p_passed) == (0, 1)
    fixed = play(env, task, gold(task), *TESTED)
    assert (fixed.hidden_pass, fixed.hacked, fixed.reward, fixed.protocol_ok) == (True, False, 1.0, True)


def test_a_split_holds_its_own_rows_alone(env: SweMiniEnv) -> None:
    assert env.tasks("eval", 5, seed=0) == []


def test_a_row_that_does_not_fit_its_distribution_is_refused(
    mini_row: dict[str, Any], cache: Path, tmp_path: Path
) -> None:
    distribution = cache / "sdists" / "abacus-1.0.tar.gz"
    with pytest.raises(BadInput, match="The base commit of swe-mini__abacus-1 is"):
        plant({**mini_row, "base_commit": "0" * 40}, distribution, tmp_path)
    other = mini_row["patch"].replace("a + b", "b + a")
    with pytest.raises(BadInput, match=r"The patch of swe-mini__abacus-1 does not fit abacus-1.0.tar.gz"):
        plant({**mini_row, "patch": other}, distribution, tmp_path)
    (tmp_path / "sdists").mkdir()
    (tmp_path / "sdists" / mini_row["sdist"]).write_bytes(b"something else")
    with pytest.raises(BadInput, match=r"abacus-1.0.tar.gz has the SHA-256 .*Delete it"):
        fetch_sdist(mini_row, tmp_path)


@pytest.mark.parametrize("column", COLUMNS)
def test_a_row_without_its_distribution_is_refused(mini_row: dict[str, Any], tmp_path: Path, column: str) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({**mini_row, column: ""}))
    with pytest.raises(BadInput, match=rf"row swe-mini__abacus-1, has no {column}\..* `--env swe-lite`"):
        SweMiniEnv(path=str(tmp_path / "rows.jsonl"), cache=str(tmp_path)).tasks("train", 1, seed=0)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pip, as it is, told that there is no index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)


@pytest.mark.usefixtures("offline")
@pytest.mark.slow
def test_without_a_connection_one_sentence_says_what_is_needed(mini_row: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"abacus-1.0.tar.gz cannot be fetched \(.+\)\. It is needed once"):
        fetch_sdist(mini_row, tmp_path)
    with pytest.raises(UsageError, match=r"pytest==.* cannot be fetched \(.+\)\. It is needed once"):
        fetch_pytest(tmp_path)
    assert not pytest_folder(tmp_path).exists()


def test_the_shipped_rows_are_whole() -> None:
    assert len(SHIPPED) == 12 and len({row["instance_id"] for row in SHIPPED}) == 12
    sides = {side: {row["repo"] for row in SHIPPED if row["split"] == side} for side in ("train", "eval")}
    assert sides["train"] and sides["eval"] and not sides["train"] & sides["eval"]
    for row in SHIPPED:
        assert all(json.loads(row[name]) for name in LISTS)
        assert re.fullmatch("[0-9a-f]{64}", row["sdist_sha256"]) and re.fullmatch("[0-9a-f]{40}", row["base_commit"])
        assert not set(touched_paths(row["patch"])) & set(touched_paths(row["test_patch"]))
        assert sum(line.startswith("-") for line in row["test_patch"].splitlines()) == 1, "tests are only added"


@pytest.mark.slow
@pytest.mark.timeout(1200)  # twelve rollouts of four runs of tests on a busy machine
@pytest.mark.parametrize("split", ["train", "eval"])
def test_every_instance_is_unresolved_as_delivered_and_resolved_with_gold(
    split: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    env = load("swe-mini", {"cache": str(tmp_path_factory.mktemp("cache"))})
    try:
        tasks = env.tasks(split, 12, seed=0)
    except UsageError as error:
        pytest.skip(f"nothing can be fetched on this machine: {error}")
    assert len(tasks) == sum(row["split"] == split for row in SHIPPED)
    for task in tasks:
        fail, keep = (json.loads(task.data[name]) for name in LISTS)
        delivered, fixed = play(env, task, *TESTED), play(env, task, gold(task), *TESTED)
        assert (delivered.hidden_pass, delivered.work.f2p_passed, delivered.work.p2p_passed) == (False, 0, len(keep))
        assert (fixed.hidden_pass, fixed.visible_pass, fixed.hacked) == (True, True, False), task.task_id
        assert (fixed.work.f2p_passed, fixed.work.p2p_passed) == (len(fail), len(keep))
    env.close()
