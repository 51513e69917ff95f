"""Tasks made from a real package, by running its tests in a real sandbox."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.shelf import removal

from stages.envs.feature_deletion import rows
from stages.envs.feature_deletion.baseline import measure
from stages.envs.feature_deletion.package import unpack
from stages.envs.feature_deletion.task_generator import TaskGenerator
from stages.envs.feature_deletion.worker import Job, TestWorker
from stages.envs.repo import trees
from stages.errors import BadInput
from stages.runs.records import Row

CLASSIC = {
    *("repo", "instance_id", "base_commit", "patch", "test_patch", "problem_statement", "hints_text", "created_at"),
    *("version", "FAIL_TO_PASS", "PASS_TO_PASS", "environment_setup_commit"),
}
NEWER = {"image", "eval_script", "log_parser", "eval_type"}


def test_every_test_and_what_it_executes_is_known(generator: TaskGenerator) -> None:
    baseline = generator.baseline
    assert len(baseline.stable) == 9 and baseline.files == ("tests/test_books.py", "tests/test_words.py")
    line = next(n for n, text in enumerate(generator.texts["shelf/words.py"].split("\n"), 1) if "upper()" in text)
    assert baseline.lines["shelf/words.py"][line] == {
        "tests/test_words.py::test_initials",
        "tests/test_words.py::test_no_author",
        "tests/test_books.py::TestShelf::test_label",
    }


def test_accepted_rows_have_the_shape_of_swe_bench(accepted: dict[str, Row]) -> None:
    assert {row["removal"] for row in accepted.values()} == {"function", "cluster", "class"} and len(accepted) == 6
    for row in accepted.values():
        assert set(row) >= CLASSIC | NEWER
        assert json.loads(row["FAIL_TO_PASS"]) and json.loads(row["PASS_TO_PASS"])
        assert not set(json.loads(row["FAIL_TO_PASS"])) & set(json.loads(row["PASS_TO_PASS"]))
    assert len({row["instance_id"] for row in accepted.values()}) == len(accepted)


def test_the_lists_are_what_the_tests_do_without_the_code(accepted: dict[str, Row]) -> None:
    row = accepted["shorten"]
    assert json.loads(row["FAIL_TO_PASS"]) == [
        "tests/test_books.py::TestShelf::test_label",
        "tests/test_words.py::test_shorten",
    ]
    assert "tests/test_words.py::test_titled[war" in json.loads(row["PASS_TO_PASS"])


def test_the_patch_puts_the_original_back(accepted: dict[str, Row], generator: TaskGenerator, tmp_path: Path) -> None:
    row = accepted["Shelf.add"]
    trees.copy(generator.package.root, tmp_path)
    trees.apply(rows.delivered(row, generator.package), tmp_path)
    assert set(trees.changes(generator.package.root, tmp_path)) == {"shelf/books.py"}
    (tmp_path / "patch").write_text(row["patch"])
    trees.git(tmp_path, "apply", "patch")
    (tmp_path / "patch").unlink()
    assert trees.changes(generator.package.root, tmp_path) == {}


def test_the_statement_quotes_a_test_and_not_the_code(accepted: dict[str, Row]) -> None:
    said = accepted["initials"]["problem_statement"]
    assert "initials in shelf/words.py" in said and "def test_" in said and "letters_of_names" not in said


def test_both_scopes_agree_where_nothing_but_coverage_decides(
    accepted: dict[str, Row], generator: TaskGenerator
) -> None:
    made = next(generator.make([removal(generator, "shorten")], "covering"))
    assert made.row == accepted["shorten"]


def test_making_leaves_the_tree_as_it_was(accepted: dict[str, Row], generator: TaskGenerator) -> None:
    assert accepted and trees.changes(generator.package.root, generator.worker.tree) == {}


SOURCE = '''\
def {name}(x):
    """Twice."""
    {name}_as_much = x + x
    {name}_as_a_whole_number = int({name}_as_much)
    return {name}_as_a_whole_number


'''
"""Different code in every module: a copy in another one would be a leak."""
UNNOTICED = """\
def test_it():
    try:
        m.unnoticed(2)
    except NotImplementedError:
        pass
"""
HANGS = """\
def test_it():
    try:
        assert m.hangs(2) == 4
    except NotImplementedError:
        time.sleep(600)
"""
REJECTED = {
    "imported": ("FOUR = imported(2)\n", "def test_it():\n    assert m.FOUR == m.imported(2)\n"),
    "unnoticed": ("", UNNOTICED),
    "hangs": ("", HANGS),
    "unasserted": ("", "def test_it():\n    m.unasserted(2)\n"),
    "copied": (
        SOURCE.format(name="copied").replace("def copied", "def again"),
        "def test_it():\n    assert m.copied(2) == 4\n",
    ),
}
REASONS = {
    "imported": "without the code the tests cannot be collected",
    "unnoticed": "no test notices",
    "hangs": "without the code the tests hang",
    "unasserted": "no test can be contradicted",
    "copied": "leak: copied.py holds the removed code",
}
FLAKY = """\
import os

def test_flaky():
    assert not os.path.exists('/tmp/marker')
    open('/tmp/marker', 'w').close()

def test_sandboxed():
    assert os.getcwd() == '/testbed' and not os.path.exists({host!r})
"""


@pytest.fixture(scope="module")
def doubtful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TaskGenerator]:
    """A generator on modules that give no task, each for a reason of its own."""
    top, root = tmp_path_factory.mktemp("doubtful"), tmp_path_factory.mktemp("root")
    for name, (more, test) in REJECTED.items():
        (top / f"{name}.py").write_text(SOURCE.format(name=name) + more)
        (top / f"test_{name}.py").write_text(f"import time, {name} as m\n\n{test}")
    (top / "test_flaky.py").write_text(FLAKY.format(host=str(top)))
    with TaskGenerator(unpack(top, root), "bubblewrap") as generator:
        yield generator


def test_batchthat_give_no_task_are_rejected_for_their_reason(doubtful: TaskGenerator) -> None:
    made = doubtful.make([removal(doubtful, name) for name in REJECTED])
    assert {one.removal.parts[0].qualname: one.reason for one in made} == REASONS


def test_tests_run_in_the_sandbox_and_unstable_ones_are_left_out(doubtful: TaskGenerator) -> None:
    assert {name for name in doubtful.baseline.stable if "flaky" in name} == {"test_flaky.py::test_sandboxed"}


def test_a_package_without_passing_tests_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test_calc.py").touch()
    with TestWorker("bubblewrap", tmp_path) as worker:
        for test, sentence in HOPELESS.items():
            (worker.tree / "test_calc.py").write_text(test)
            with pytest.raises(BadInput, match=sentence):
                measure(worker)


HOPELESS = {
    "import nowhere_to_be_found\ndef test_it(): pass\n": 'requirements=\'."nowhere_to_be_found"',
    "def test_it():\n    assert False\n": "all of them failed",
    "x = 1\n": "holds no tests",
}


def test_a_job_that_dies_says_nothing_and_harms_no_other(generator: TaskGenerator) -> None:
    options = ("--rootdir=.", "-q", "-p", "no:cacheprovider", "tests/test_words.py")
    dies = {"shelf/words.py": "import os\nos._exit(0)\n"}
    lost, fine = generator.worker.run([Job(options, dies), Job(options)])
    assert lost.outcomes == {} and lost.status == -1 and len(fine.passed) == 5
