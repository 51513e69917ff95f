"""Tasks as Harbor folders: what they hold, what stays hidden, and that their verifier gives 1, 0 and nothing else."""

import json
import shutil
import subprocess
import tomllib
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from needs import needs, skip_without
from support import real_harbor
from support.own_tasks import RowGrader

from composer_stages.envs import folders as folders_, load
from composer_stages.envs.base import Task
from composer_stages.envs.bash import fenced
from composer_stages.envs.harbor import task_folder
from composer_stages.envs.harbor.env import HarborEnv
from composer_stages.envs.harbor.write import BASE_IMAGE, folder_name, write_task, write_tasks
from composer_stages.envs.repo import trees
from composer_stages.envs.repo.grading import TestOutcomes, grade_tree
from composer_stages.envs.repo.guest import composer_verify
from composer_stages.envs.repo.task import Export, Packs, RepoTask
from composer_stages.envs.tasks.env import TasksEnv
from composer_stages.errors import BadInput, UsageError
from composer_stages.sandbox import Sandbox
from composer_stages.swebench.lists import Statuses, TestLists
from composer_stages.terms import TWIN
from tests.stages.envs.harbor.exported import differing, play

ADD = "def add(a, b):\n    return a {} b\n"
TESTS = "from sums import add\n\ndef test_add():\n    assert add(2, 3) == 5\n"
ROWS: list[dict[str, Any]] = [
    {
        "id": "ids",
        "family": "sums",
        "prompt": 'Let add() add. "Quotes", \\ and é\u2028\n\nTwo lines.',
        "files": {
            "sums.py": ADD.format("-"),
            "tests/test_old.py": "def test_old():\n    assert True\n",
            "run.sh": "#!/bin/sh\n",
        },
        "tests": ["tests/test_sums.py"],
        "hidden": {"tests/test_sums.py": TESTS},
        "solution": {"sums.py": ADD.format("+"), "run.sh": None},
        "split": "train",
    },
    {
        "id": "command",
        "prompt": "Let add() add.",
        "files": {"sums.py": ADD.format("-"), "test_check.py": "import sums\nassert sums.add(1, 1) == 2\n"},
        "test": "python3 test_check.py",
        "solution": {"sums.py": ADD.format("+")},
        "split": "eval",
    },
]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Task]]:
    """The path of rows, and their tasks."""
    path = tmp_path_factory.mktemp("rows") / "my.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    environment = TasksEnv(path=str(path))
    return str(path), [*environment.tasks("train", 1, 0), *environment.tasks("eval", 1, 0)]


@pytest.fixture(scope="module")
def folders(tasks: tuple[str, list[Task]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tasks as folders."""
    path, found = tasks
    folder = tmp_path_factory.mktemp("harbor") / "out"
    told: list[str] = []
    write_tasks("tasks", {"path": path}, found, folder, BASE_IMAGE, told.append)
    assert told == ["ids", "command"]
    return folder


def test_a_folder_holds_what_harbor_asks_for_and_the_hidden_tests_in_tests_alone(folders: Path) -> None:
    task = folders / "ids"
    assert (task / "instruction.md").read_text() == ROWS[0]["prompt"]
    config = tomllib.loads((task / "task.toml").read_text())
    assert config["schema_version"] == "1.4" and config["task"]["name"] == "composer/ids"
    assert config["metadata"] == {"task_id": "ids", "family": "sums", "split": "train", "environment": "tasks"}
    assert config["environment"]["network_mode"] == "no-network" and config["verifier"]["timeout_sec"] == 120.0
    holding = sorted(str(path.relative_to(task)) for path in task.rglob("*.py") if "test_add" in path.read_text())
    assert holding == ["tests/hidden/tests/test_sums.py"]
    assert (task / "environment/testbed/run.sh").stat().st_mode & 0o100 and (
        task / "tests/test.sh"
    ).stat().st_mode & 0o100
    assert sorted(path.name for path in (task / "tests/originals").rglob("*.py")) == ["test_old.py"]
    assert "COPY testbed/ /testbed/" in (task / "environment/Dockerfile").read_text()


def assert_equal_again(env: str, options: dict[str, Any], tasks: Sequence[Task], folder: Path) -> None:
    """Assert that tasks which were exported into a folder are the same when they are read again, file by file."""
    found, problems = task_folder.load(str(folder))
    read = {one.config.metadata["task_id"]: one.folder for one in found}
    assert problems == [] and set(read) == {task.task_id for task in tasks} and len(found) == len(tasks)
    with closing(load(env, options)) as environment:
        assert isinstance(environment, Packs)
        for task in tasks:
            environment.reset(task)
            assert differing(read[task.task_id], task, environment.packed()) == [], task.task_id


def test_they_are_read_again_as_the_same_tasks(folders: Path, tasks: tuple[str, list[Task]], tmp_path: Path) -> None:
    assert_equal_again("tasks", {"path": tasks[0]}, tasks[1], folders)
    kata = load("kata", {}).tasks("train", 1, 0) + load("kata", {}).tasks("eval", 1, 0)
    write_tasks("kata", {}, kata, tmp_path / "kata", BASE_IMAGE, lambda name: None)
    assert_equal_again("kata", {}, kata, tmp_path / "kata")
    # And what an agent finds on the machine of such a task is the same again.
    with closing(HarborEnv(path=str(folders), runs_in="bubblewrap")) as env:
        (again,) = env.tasks("train", 1, 0)
        assert (again.prompt, again.split, again.family) == (ROWS[0]["prompt"], "train", "sums")
        env.reset(again)
        seen = env.step(fenced("find . -type f | sort; cat $(find . -type f | sort); find . -perm /100 -type f"))
    files = sorted(ROWS[0]["files"].items())
    listed, texts = "".join(f"./{name}\n" for name, _ in files), "".join(text for _, text in files)
    assert seen.content == f"{listed}{texts}./run.sh\n[exit 0]"


CHANGES = {
    "prompt": ("instruction.md", "Two", "Three"),
    "family": ("task.toml", 'family = "sums"', 'family = "other"'),
    "split": ("task.toml", 'split = "train"', 'split = "eval"'),
    "files": ("environment/testbed/sums.py", "a - b", "a * b"),
    "hidden tests": ("tests/hidden/tests/test_sums.py", "== 5", "== 6"),
    "tests that decide": ("tests/task.json", "tests/test_sums.py", "tests/test_old.py"),
    "solution": ("solution/solve.sh", "set -e", "exit 0"),
}


def test_a_change_of_any_part_is_a_difference(folders: Path, tasks: tuple[str, list[Task]], tmp_path: Path) -> None:
    with closing(TasksEnv(path=tasks[0])) as environment:
        environment.reset(tasks[1][0])
        for part, (path, old, new) in CHANGES.items():
            folder = Path(shutil.copytree(folders / "ids", tmp_path / part))
            text = (folder / path).read_text()
            (folder / path).write_text(text.replace(old, new))
            assert old in text and part in differing(folder, tasks[1][0], environment.packed())


@pytest.mark.slow
def test_bugs_of_swe_mini_are_read_again_as_they_were(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("many")
    cache = folder / "cache"
    try:
        bugs = load("swe-mini", {"cache": str(cache)}).tasks("eval", 6, 0)
    except UsageError as error:
        pytest.skip(f"nothing can be fetched on this machine: {error}")
    write_tasks("swe-mini", {"cache": str(cache)}, bugs, folder / "mini", BASE_IMAGE, lambda name: None)
    assert_equal_again("swe-mini", {"cache": str(cache)}, bugs, folder / "mini")


PLAYS: dict[str, tuple[str, str]] = {
    "nothing": ("ids", ""),
    "nothing of a command": ("command", ""),
    "tests that were replaced": ("command", "echo pass > test_check.py"),
    "hidden tests that were guessed": (
        "ids",
        "mkdir -p tests; for n in sums old; do echo 'def test_add(): pass' > tests/test_$n.py; done",
    ),
    "a conftest and configuration": (
        "ids",
        "printf '[pytest]\\naddopts = --collect-only\\n' > pytest.ini; echo 'import os; os._exit(0)' > conftest.py",
    ),
    "a plugin of one's own": (
        "ids",
        "for n in pytest composer_outcomes composer_rules json _pytest; do echo 'import os; os._exit(0)' > $n.py; done",
    ),
    "a reward that was there before": (
        "ids",
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; mkdir /logs/verifier/reward.json",
    ),
    "a link in the way": ("ids", "rm -rf tests sums.py; ln -s / tests; ln -s /etc/passwd sums.py"),
    "code that ends the process": ("ids", "echo 'import os; os._exit(0)' > sums.py"),
    "code that writes the reward when it is graded": (
        "ids",
        "printf 'import os\\nif not os.fork():\\n    os.setsid()\\n    import time\\n    for _ in range(40):\\n"
        '        open("/logs/verifier/reward.json", "w").write(\'{"reward": 1.0}\')\\n        time.sleep(.05)\\n'
        "    os._exit(0)\\nadd = lambda a, b: 0\\n' > sums.py",
    ),
    "code that hides the outcome": ("ids", "echo 'import pytest; pytest.skip(allow_module_level=True)' > sums.py"),
    "the solution": ("ids", ""),
    "the solution of a command": ("command", ""),
}
PLAYS["the solution, and modules with the names of standard ones"] = (
    "ids",
    "for name in json socket statistics; do echo 'import os; os._exit(0)' > $name.py; done; echo 3 > statistics.txt",
)
QUICK = (
    "the solution",
    "the solution, and modules with the names of standard ones",
    "nothing of a command",
    "a reward that was there before",
    "code that hides the outcome",
)


@pytest.mark.parametrize("name", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in PLAYS])
def test_the_verifier_gives_what_was_deserved(folders: Path, name: str) -> None:
    task, agent = PLAYS[name]
    solve = name.startswith("the solution")
    found = play(folders / task, solve=solve, agent=agent)
    assert found is not None and found["reward"] == float(solve), found
    assert all(isinstance(value, float) for value in found.values())


def no_sandbox(folder: Path) -> Sandbox:
    raise AssertionError(folder)


def no_tests(folder: Path) -> TestOutcomes:
    raise AssertionError(folder)


LEAVES = {
    "links, modes and folders": "ln -s sums.py latest; ln -s / root; mkdir -p a/b; chmod 700 a; chmod 600 sums.py",
    "deleted": "rm -r sums.py data pyproject.toml link empty; ln -s sums.py empty",
    "a file in place of a folder": "rm -r data; echo 1 > data; rm sums.py; mkdir -p sums.py/inner",
    "a link in place of tests": "mv tests mine; ln -s mine tests; ln -s sums.py conftest.py; ln -s mine json",
    "a link in the way of a hidden file": "ln -s / more; echo 1 > tests/data.bin",
    "other sections": "printf '[project]\nname = \"b\"\n[tool.pytest]\nx = 1\n' > pyproject.toml",
    "sections about tests": "printf '[tool.pytest]\nx = 2\n' > pyproject.toml; printf '[pytest]\n' > tox.ini",
    "caches and history": "mkdir -p .git .tox .cache a/__pycache__; for d in .git .cache a; do echo 1 > $d/x; done",
    "compiled code": "for n in evil libadd data/old; do echo 2 > $n.so; done; echo 1 > x.pyc",
    "python's own": "mkdir json; for n in json/__init__.py json.py sitecustomize.py a.pth; do echo 1 > $n; done",
}


@pytest.mark.parametrize("name", LEAVES)
def test_the_verifier_grades_the_tree_that_grading_here_does(name: str, tmp_path: Path) -> None:
    delivered, left, rebuilt = (tmp_path / folder for folder in ("delivered", "left", "rebuilt"))
    for path, text in {
        "sums.py": ADD,
        "tests/test_old.py": TESTS,
        "data/old.so": "1",
        "data/x": "1",
        "pyproject.toml": '[project]\nname = "a"\n[tool.pytest]\nx = 1\n',
    }.items():
        (delivered / path).parent.mkdir(parents=True, exist_ok=True)
        (delivered / path).write_text(text)
    (delivered / "empty").mkdir()
    (delivered / "link").symlink_to("data")
    (delivered / "tests" / "expected").symlink_to("test_old.py")
    folders_.copy(delivered, left)
    subprocess.run(["bash", "-c", LEAVES[name]], cwd=left, check=True)
    hidden = {"tests/test_new.py": trees.TreeFile(b"1"), "more/test_it.py": trees.TreeFile(b"2"), "data/x": None}
    lists = TestLists(("test",), ())
    packed = RepoTask(delivered, lists, no_sandbox, no_tests, hidden, export=Export(), commands="make libadd.so")
    write_task(Task("t", "tasks", "train", "f", "Do it.", {}), packed, tmp_path / "out", BASE_IMAGE)
    task = json.loads((tmp_path / "out" / "tests" / "task.json").read_text())
    rebuilt.mkdir()
    dropped = composer_verify.rebuild(task, str(left), str(rebuilt), str(tmp_path / "out" / "tests"))
    differences = []

    def run(tree: Path) -> Statuses:
        trees.apply(hidden, tree)
        differences.append(trees.changes(tree, rebuilt))
        return {}

    verdict = grade_tree(delivered, left, lists, run, is_requested=lambda name: name == "libadd.so")
    assert differences[0] == {} and set(dropped) == {path for path, file in verdict.dropped.items() if file}


def test_names_are_harbors_and_no_two_are_alike() -> None:
    taken: set[str] = set()
    made = [folder_name(one, taken) for one in ("a/b:c", "a-b-c", "A-B-C", "..", "x" * 300, "../../etc", "é")]
    assert made[0] == "a-b-c" and len({one.casefold() for one in made}) == len(made)
    assert all(one.strip("._-") and "/" not in one and ".." not in one and len(one) < 120 for one in made), made


def test_a_task_without_a_solution_leaves_without_one(tmp_path: Path) -> None:
    row = {name: value for name, value in ROWS[0].items() if name != "solution"}
    with closing(RowGrader(tmp_path, {"ids": row})) as graded:
        graded.env.reset(graded.tasks["ids"])
        write_task(graded.tasks["ids"], graded.env.packed(), tmp_path / "out", BASE_IMAGE)
    assert not (tmp_path / "out" / "solution").exists()
    assert task_folder.read(tmp_path / "out").steps[0].solution is None


def test_what_cannot_leave_is_refused(tmp_path: Path, tasks: tuple[str, list[Task]]) -> None:
    path, found = tasks
    with pytest.raises(UsageError, match="Tasks of 'gsm8k' cannot be exported"):
        write_tasks("gsm8k", {}, [], tmp_path / "out", BASE_IMAGE, print)
    with pytest.raises(UsageError, match="is not empty"):
        write_tasks("tasks", {"path": path}, found, Path(path).parent, BASE_IMAGE, print)
    environment = TasksEnv(path=path)
    environment.reset(found[0])
    with pytest.raises(BadInput, match="is an impossible variant"):
        write_task(Task(f"a{TWIN}", "e", "train", "f", "p"), environment.packed(), tmp_path / "twin", BASE_IMAGE)
    environment.close()


@pytest.mark.slow
def test_generated_tasks_leave_with_solution_and_verifier(tmp_path: Path) -> None:
    write_tasks("kata", {}, load("kata", {}).tasks("train", 2, 0), tmp_path / "kata", BASE_IMAGE, lambda name: None)
    assert_verifiers_agree(tmp_path / "kata", 2)


def assert_verifiers_agree(tasks: Path, number: int) -> None:
    """Assert that the verifiers of exported tasks pass their solutions, and nothing else; Harbor reads each."""
    found = sorted(tasks.iterdir())
    assert len(found) == number
    for folder in found:
        solved, nothing = play(folder, solve=True), play(folder, solve=False)
        assert solved and nothing and (solved["reward"], nothing["reward"]) == (1.0, 0.0), folder.name
    skip_without("harbor")
    names = [line.split()[0] for line in real_harbor.judged(found)]
    assert names == [f"composer/{folder.name}" for folder in found]


@needs("harbor")
@pytest.mark.slow
def test_harbors_own_models_accept_the_folders(folders: Path) -> None:
    paths = [folders / row["id"] for row in ROWS]
    lengths = [str(len(row["prompt"])) for row in ROWS]
    assert [line.split()[1] for line in real_harbor.judged(paths)] == lengths
    (folders / "command" / "tests" / "test.sh").rename(folders / "command" / "tests" / "test.away")
    with pytest.raises(AssertionError, match=r"test\.sh"):
        real_harbor.judged(paths)
    (folders / "command" / "tests" / "test.away").rename(folders / "command" / "tests" / "test.sh")
