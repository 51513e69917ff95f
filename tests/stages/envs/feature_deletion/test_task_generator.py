"""Tasks made from a real package, by running its tests in a real sandbox."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.refusals import refused
from support.removals import removal

from composer_stages.envs import folders
from composer_stages.envs.feature_deletion import rows
from composer_stages.envs.feature_deletion.definitions import definitions
from composer_stages.envs.feature_deletion.package import unpack
from composer_stages.envs.feature_deletion.selection import Removal
from composer_stages.envs.feature_deletion.task_generator import PackageShingles, TaskGenerator
from composer_stages.envs.feature_deletion.worker import TestRunJob, TestWorker, measure_baseline
from composer_stages.envs.repo import trees
from composer_stages.errors import BadInput
from composer_stages.runs.kinds import Row
from tests.stages.envs.feature_deletion.conftest import PACKAGES

CLASSIC = {
    *("repo", "instance_id", "base_commit", "patch", "test_patch", "problem_statement", "hints_text", "created_at"),
    *("version", "FAIL_TO_PASS", "PASS_TO_PASS", "environment_setup_commit"),
}
NEWER = {"image", "eval_script", "log_parser", "eval_type"}


def test_baseline_maps_lines_to_tests(generator: TaskGenerator) -> None:
    baseline = generator.baseline
    assert len(baseline.stable) == 9 and baseline.files == ("tests/test_books.py", "tests/test_words.py")
    line = next(n for n, text in enumerate(generator.texts["shelf/words.py"].split("\n"), 1) if "upper()" in text)
    assert baseline.lines["shelf/words.py"][line] == {
        "tests/test_words.py::test_initials",
        "tests/test_words.py::test_no_author",
        "tests/test_books.py::TestShelf::test_label",
    }


def test_accepted_rows_have_the_shape_of_swe_bench(accepted: dict[str, Row]) -> None:
    assert {row["removal"] for row in accepted.values()} == {"function", "cluster", "class"} and len(accepted) == 4
    for row in accepted.values():
        assert set(row) >= CLASSIC | NEWER
        assert not [name for name, value in row.items() if isinstance(value, float)], "nothing that was measured"
        assert json.loads(row["FAIL_TO_PASS"]) and json.loads(row["PASS_TO_PASS"])
        assert not set(json.loads(row["FAIL_TO_PASS"])) & set(json.loads(row["PASS_TO_PASS"]))
    assert len({row["instance_id"] for row in accepted.values()}) == len(accepted)


def test_lists_are_the_outcomes_without_the_code(accepted: dict[str, Row]) -> None:
    row = accepted["shorten"]
    assert json.loads(row["FAIL_TO_PASS"]) == [
        "tests/test_books.py::TestShelf::test_label",
        "tests/test_words.py::test_shorten",
    ]
    assert "tests/test_words.py::test_titled[war" in json.loads(row["PASS_TO_PASS"])


def test_patch_restores_the_package(accepted: dict[str, Row], generator: TaskGenerator, tmp_path: Path) -> None:
    row = accepted["Shelf"]
    folders.copy(generator.package.root, tmp_path)
    trees.apply(rows.delivered_files(row, generator.package), tmp_path)
    assert set(trees.changes(generator.package.root, tmp_path)) == {"shelf/books.py"}
    (tmp_path / "patch").write_text(row["patch"])
    trees.git(tmp_path, "apply", "patch")
    (tmp_path / "patch").unlink()
    assert trees.changes(generator.package.root, tmp_path) == {}


def test_statement_quotes_a_test_and_no_code(accepted: dict[str, Row]) -> None:
    said = accepted["initials"]["problem_statement"]
    assert "initials in shelf/words.py" in said and "def test_" in said and "letters_of_names" not in said


@pytest.mark.slow
def test_both_scopes_agree_where_coverage_alone_decides(accepted: dict[str, Row], generator: TaskGenerator) -> None:
    made = next(generator.make([removal(generator, "shorten")], "covering"))
    assert made.row == accepted["shorten"]


SOURCE: str = PACKAGES["module"]
"""Different code in every module: a copy in another one would be a leak."""
APPENDED = {
    "imported": "FOUR = imported(2)\n",
    "copied": SOURCE.format(name="copied").replace("def copied", "def again"),
}
"""What modules hold besides the removed function."""


@pytest.fixture(scope="module")
def doubtful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TaskGenerator]:
    """A generator on modules that give no task, each for a reason of its own."""
    top, root = tmp_path_factory.mktemp("doubtful"), tmp_path_factory.mktemp("root")
    for name, test in PACKAGES["rejected"].items():
        (top / f"{name}.py").write_text(SOURCE.format(name=name) + APPENDED.get(name, ""))
        (top / f"test_{name}.py").write_text(f"import time, {name} as m\n\n{test}")
    (top / "test_flaky.py").write_text(PACKAGES["flaky"].format(host=str(top)))
    with TaskGenerator(unpack(top, root), "bubblewrap") as generator:
        yield generator


def test_rejected_removals_name_the_reason(doubtful: TaskGenerator) -> None:
    made = doubtful.make([removal(doubtful, name) for name in PACKAGES["rejected"]])
    assert {one.removal.parts[0].qualname: one.reason for one in made} == PACKAGES["reasons"]


@pytest.mark.slow
def test_hanging_tests_are_set_aside(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/partly.py").write_text(SOURCE.format(name="partly") + "FOUR = 4\n")
    (tmp_path / "in/test_partly.py").write_text(PACKAGES["partly"])
    with TaskGenerator(unpack(tmp_path / "in", tmp_path / "root"), "bubblewrap") as generator:
        (made,) = generator.make([removal(generator, "partly")])
    row = made.row
    assert row is not None, made.reason
    hanging = ["test_partly.py::test_for_ever_in_c", "test_partly.py::test_waits"]
    assert row["set_aside"] == hanging and {f"--deselect={name}" for name in hanging} <= set(row["options"])
    assert json.loads(row["FAIL_TO_PASS"]) == ["test_partly.py::test_fails"]
    assert json.loads(row["PASS_TO_PASS"]) == ["test_partly.py::test_other"]


def test_endless_test_is_reported_as_hanging(tmp_path: Path) -> None:
    (tmp_path / "test_calc.py").write_text(
        "import time\n\ndef test_for_ever():\n    time.sleep(600)\n\ndef test_it():\n    assert 1\n"
    )
    with TestWorker("bubblewrap", tmp_path) as worker:
        (done,) = worker.run([TestRunJob(("--rootdir=.", "-q", "test_calc.py"), timeout_s=60.0, hang_s=2.0)])
    assert done.hanging == {"test_calc.py::test_for_ever"} and done.passed == {"test_calc.py::test_it"}
    assert not done.timed_out


def test_baseline_leaves_out_unstable_tests(doubtful: TaskGenerator) -> None:
    assert {name for name in doubtful.baseline.stable if "flaky" in name} == {"test_flaky.py::test_sandboxed"}


def test_a_package_without_passing_tests_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test_calc.py").touch()
    with TestWorker("bubblewrap", tmp_path) as worker:
        for file, text, code in HOPELESS:
            (worker.tree / file).write_text(text)
            refused(lambda: measure_baseline(worker), BadInput, code=f"envs.feature_deletion.{code}")


HOPELESS = (
    ("test_calc.py", "import nowhere_to_be_found\ndef test_it(): pass\n", "modules-missing"),
    ("conftest.py", "import nowhere_to_be_found\n", "modules-missing"),
)


def test_crashed_job_does_not_affect_the_next(generator: TaskGenerator) -> None:
    options = ("--rootdir=.", "-q", "-p", "no:cacheprovider", "tests/test_words.py")
    dies = {"shelf/words.py": "import os\nos._exit(0)\n"}
    lost, fine = generator.worker.run([TestRunJob(options, dies), TestRunJob(options)])
    assert lost.outcomes == {} and lost.status == -1 and len(fine.passed) == 5


def test_copies_of_removed_code_are_found() -> None:
    path, mean = "pkg/maths.py", SOURCE.format(name="mean")
    twice = mean + mean.replace("def mean", "def average")

    def copies(removed: tuple[str, ...], text: str, **others: str) -> list[str]:
        parts = tuple(one for one in definitions(path, text) if one.qualname in removed)
        removal = Removal("function", "easy", "train", parts)
        files = {path: text, **others}
        searched = PackageShingles({name: trees.TreeFile(content.encode()) for name, content in files.items()})
        return searched.copies(removal, removal.writes({path: text}))

    assert copies(("mean",), mean, readme="mean\n") == []
    assert copies(("mean",), mean, **{"build/lib/maths.py": mean}) == ["build/lib/maths.py"]
    assert copies(("mean",), twice) == [path]
    assert copies(("mean", "average"), twice) == []
