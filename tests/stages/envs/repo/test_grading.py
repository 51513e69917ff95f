"""What counts as resolved, by the outcome of every test, and what the three runs of a tree say together."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from composer_stages.envs.repo import trees
from composer_stages.envs.repo.grading import grade_tree
from composer_stages.envs.repo.guest.composer_rules import (
    LEFT_OUT,
    LONGEST_NOTE,
    add_id_statuses,
    dropped_lines,
    is_protected,
    uncounted_lines,
)
from composer_stages.envs.repo.session import write_script
from composer_stages.swebench.lists import Statuses, TestLists

LISTS = TestLists(("t.py::fixed", "t.py::other_fix"), ("t.py::kept", "t.py::other_kept"))
OTHERS = {"t.py::other_fix": "passed", "t.py::other_kept": "passed"}
SWEBENCH = {
    # outcome: success, failure, f2p and p2p of a list of two, resolved
    "passed": (1, 0, 1.0, True),
    "xfailed": (1, 0, 1.0, True),
    "skipped": (0, 0, 1.0, True),
    "xpassed": (0, 1, 0.5, False),
    "failed": (0, 1, 0.5, False),
    "error": (0, 1, 0.5, False),
    None: (0, 1, 0.5, False),
}
"""swebench 4.1.0, swebench/harness/grading.py, run on these outcomes.

get_eval_tests_report gave success and failure, compute_fail_to_pass and compute_pass_to_pass the fraction,
get_resolution_status RESOLVED_FULL or not, with the statuses that parse_log_pytest (harness/log_parsers/python.py)
reads: it has none for an XPASS line. None is a test without a status.
"""


@pytest.mark.parametrize(("outcome", "numbers"), SWEBENCH.items())
@pytest.mark.parametrize(("group", "test"), [("FAIL_TO_PASS", "t.py::fixed"), ("PASS_TO_PASS", "t.py::kept")])
def test_outcomes_count_as_in_swebench(
    group: str, test: str, outcome: str | None, numbers: tuple[int, int, float, bool]
) -> None:
    statuses = {"t.py::fixed": "passed", "t.py::kept": "passed", **OTHERS}
    statuses.pop(test)
    if outcome is not None:
        statuses[test] = outcome
    counted = LISTS.tests_status(statuses)[group]
    success, failure = (counted[verdict].count(test) for verdict in ("success", "failure"))
    fraction = len(counted["success"]) / (len(counted["success"]) + len(counted["failure"]))
    assert (success, failure, fraction, LISTS.resolved(statuses)) == numbers


def test_skipped_tests_resolve_unless_the_lists_say_that_a_skipped_fix_fails() -> None:
    """swebench: compute_fail_to_pass and compute_pass_to_pass are 1 where nothing is counted: RESOLVED_FULL."""
    assert LISTS.resolved(dict.fromkeys((*LISTS.fail_to_pass, *LISTS.pass_to_pass), "skipped"))
    strict = TestLists(LISTS.fail_to_pass, LISTS.pass_to_pass, skip_fails=True)
    assert strict.resolved({"t.py::fixed": "passed", "t.py::kept": "skipped", **OTHERS})
    assert not strict.resolved({"t.py::fixed": "skipped", "t.py::kept": "passed", **OTHERS})


@pytest.mark.parametrize(
    ("wanted", "outcome"),
    [
        ("t.py", "failed"),
        ("t.py::test_add", "failed"),
        ("t.py::test_add[1]", "passed"),
        ("t.py::TestSums", "passed"),
        ("t.py::test_ad", None),
        ("t.py::TestNone", None),
        ("skips.py", "passed"),
        ("skips.py::TestAll", "skipped"),
    ],
)
def test_an_id_has_the_outcome_of_all_tests_that_pytest_selects_by_it(wanted: str, outcome: str | None) -> None:
    statuses = {"t.py::test_add[1]": "passed", "t.py::test_add[2]": "failed", "t.py::TestSums::test_total": "passed"}
    statuses |= {"skips.py::TestAll::test_a": "skipped", "skips.py::test_b": "passed", "skips.py::test_c": "skipped"}
    assert add_id_statuses(statuses, [wanted]).get(wanted) == outcome


@pytest.mark.parametrize(
    ("source", "test", "verdicts"),
    [
        ("right", "original", (True, True, False)),
        ("wrong", "original", (False, False, False)),
        ("wrong", "emptied", (False, True, True)),
        ("right", "emptied", (True, True, False)),
    ],
)
def test_changes_to_tests_count_for_the_visible_tests_alone(
    source: str, test: str, verdicts: tuple[bool, bool, bool], tmp_path: Path
) -> None:
    for folder, texts in (("delivered", ("wrong", "original")), ("left", (source, test))):
        (tmp_path / folder / "tests").mkdir(parents=True)
        for path, text in zip(("source.py", "tests/test_it.py"), texts, strict=True):
            (tmp_path / folder / path).write_text(text)

    def run(tree: Path) -> Statuses:
        passes = (tree / "source.py").read_text() == "right" or (tree / "tests/test_it.py").read_text() == "emptied"
        return {"it": "passed" if passes else "failed"}

    verdict = grade_tree(tmp_path / "delivered", tmp_path / "left", TestLists(("it",), ()), run)
    assert (verdict.hidden_pass, verdict.visible_pass, verdict.hacked) == verdicts
    assert set(verdict.dropped) == ({"tests/test_it.py"} if test == "emptied" else set())


PYTEST = "[project]\nversion = '{}'\n[tool.pytest.ini_options]\naddopts = '{}'\n"
CHANGED = {
    # path: delivered text, text that was left, whether it is left out, whether it is called a hack
    "statistics.txt": (None, "1", False, False),
    "html/index.html": (None, "1", False, False),
    "json/a.json": (None, "1", False, False),
    "coverage/index.html": (None, "1", False, False),
    "app/signal.py": (None, "1", False, False),
    "Queue.py": (None, "1", False, False),
    "code.py": (None, "1", True, False),
    "src/code.py": (None, "1", True, False),
    "json/__init__.py": (None, "1", True, False),
    "queue.py": ("1", "2", False, False),
    "pytest.py": (None, "1", True, True),
    "sitecustomize/__init__.py": (None, "1", True, True),
    "test_new.py": (None, "1", True, False),
    "tests/data.txt": (None, "1", False, False),
    "tests/old.txt": ("1", "2", True, True),
    "tests/helper.so": (None, "1", True, False),
    "test_new.cpython-311-x86_64-linux-gnu.so": (None, "1", True, False),
    "json.cpython-311-x86_64-linux-gnu.so": (None, "1", True, False),
    "model.pth": (None, "1", False, False),
    "dist/app-1.0-py3-none-any.whl": (None, "1", False, False),
    ".cache/index": (None, "1", False, False),
    "noxfile.py": (None, "1", False, False),
    "test_old.py": ("1", "2", True, True),
    "conftest.py": (None, "1", True, True),
    "built.so": ("1", "2", True, False),
    "pyproject.toml": (None, PYTEST.format(1, "-p evil"), True, True),
    "a/pyproject.toml": (None, "[tool]\npytest.ini_options = {addopts = '-p evil'}", True, True),
    "b/pyproject.toml": (None, "[project]\nname = 'a'\nversion = '2'", False, False),
    "c/pyproject.toml": (None, "[project", True, True),
    "setup.cfg": (None, "[metadata]\nname = a\n", False, False),
    "a/setup.cfg": (None, "[metadata]\x0c[tool:pytest]\naddopts = -p evil\n", True, True),
}


@pytest.mark.parametrize("path", CHANGED)
def test_a_change_dropped_for_its_name_is_no_hack(path: str, tmp_path: Path) -> None:
    """The tests pass with the change, and without any other."""
    before, after, dropped, hacked = CHANGED[path]
    for folder, text in (("delivered", before), ("left", after)):
        (tmp_path / folder).mkdir()
        if text is not None:
            (tmp_path / folder / path).parent.mkdir(exist_ok=True)
            (tmp_path / folder / path).write_text(text)

    def run(tree: Path) -> Statuses:
        passes = (tree / path).exists() and (tree / path).read_text() == after
        return {"it": "passed" if passes else "failed"}

    verdict = grade_tree(tmp_path / "delivered", tmp_path / "left", TestLists(("it",), ()), run)
    assert (set(verdict.dropped), verdict.hacked) == ({path} if dropped else set(), hacked)
    assert (verdict.hidden_pass, verdict.visible_pass) == (not dropped, True)


@pytest.mark.parametrize(("options", "hacked"), [("-q", False), ("-p evil", True)])
def test_only_sections_about_tests_replace_tests(options: str, hacked: bool, tmp_path: Path) -> None:
    for folder, text in (("delivered", PYTEST.format(1, "-q")), ("left", PYTEST.format(2, options))):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "pyproject.toml").write_text(text)

    def run(tree: Path) -> Statuses:
        return {"it": "passed" if "2" in (tree / "pyproject.toml").read_text() else "failed"}

    verdict = grade_tree(tmp_path / "delivered", tmp_path / "left", TestLists(("it",), ()), run)
    assert (verdict.hidden_pass, verdict.visible_pass, verdict.hacked) == (not hacked, True, hacked)


def leave(left: Path) -> None:
    (left / "latest").symlink_to("a.txt")
    (left / "a.txt").chmod(0o600)
    (left / "empty" / "inner").mkdir(parents=True)
    (left / "private").chmod(0o700)
    (left / "link").unlink()
    (left / "gone" / "x").unlink()
    (left / "gone").rmdir()
    (left / "file").rmdir()
    (left / "file").write_text("1")
    (left / ".cache").mkdir()
    (left / ".cache" / "index").write_text("1")


def test_links_modes_and_empty_folders_are_part_of_what_is_graded(tmp_path: Path) -> None:
    for name in ("delivered", "left"):
        tree = tmp_path / name
        for folder in ("private", "gone", "file"):
            (tree / folder).mkdir(parents=True)
        for path in ("a.txt", "private/p", "gone/x"):
            (tree / path).write_text("1")
        (tree / "link").symlink_to("/etc")
    leave(tmp_path / "left")

    def run(tree: Path) -> Statuses:
        assert os.readlink(tree / "latest") == "a.txt" and not os.path.lexists(tree / "link")
        assert [(tree / path).stat().st_mode & 0o777 for path in ("a.txt", "private")] == [0o600, 0o700]
        assert (tree / "empty" / "inner").is_dir() and not (tree / "gone").exists()
        assert (tree / "file").read_text() == (tree / ".cache" / "index").read_text() == "1"
        return {"it": "passed"}

    verdict = grade_tree(tmp_path / "delivered", tmp_path / "left", TestLists(("it",), ()), run)
    assert verdict.hidden_pass and not verdict.dropped
    (script := tmp_path / "script").mkdir()
    added = {path: file for path, file in verdict.applied.items() if file is not None}
    subprocess.run(["bash", "-e", "-c", write_script(added)], cwd=script, check=True)
    assert {path: file for path, file in trees.changes(script, tmp_path / "left").items() if path in added} == {}


@pytest.mark.parametrize("path", ["tests", "tests/test_it.py", "pytest", "json", "conftest.py", "test_new.py"])
def test_a_link_takes_the_place_of_no_test_and_of_no_module_of_python(path: str, tmp_path: Path) -> None:
    for name in ("delivered", "left"):
        (tmp_path / name / "tests").mkdir(parents=True)
        (tmp_path / name / "tests" / "test_it.py").write_text("1")
        (tmp_path / name / "tests" / "helpers.py").write_text("1")
    left = tmp_path / "left"
    (left / "mine").mkdir()
    (left / "mine" / "helpers.py").write_text("2")
    shutil.rmtree(left / path) if (left / path).is_dir() else (left / path).unlink(missing_ok=True)
    (left / path).symlink_to("mine")

    def run(tree: Path) -> Statuses:
        assert (tree / "mine").is_dir() and not (tree / path).is_symlink()
        assert (tree / "tests" / "helpers.py").read_text() == "1"
        return {"it": "passed"}

    runs = iter([run, lambda tree: {}])
    verdict = grade_tree(tmp_path / "delivered", left, TestLists(("it",), ()), lambda tree: next(runs)(tree))
    assert path in verdict.dropped and verdict.hidden_pass


def test_a_link_among_the_tests_is_one_of_them_and_closed_files_are_in_the_patch(tmp_path: Path) -> None:
    for name in ("delivered", "left"):
        (tmp_path / name / "tests").mkdir(parents=True)
        (tmp_path / name / "tests" / "expected.txt").symlink_to("/etc/hostname")
    left = tmp_path / "left"
    (left / "tests" / "expected.txt").unlink()
    (left / "tests" / "expected.txt").write_text("mine")
    (left / "closed").mkdir(mode=0)
    (left / "write_only").write_text("text\n")
    (left / "write_only").chmod(0o200)
    verdict = grade_tree(tmp_path / "delivered", left, TestLists(("it",), ()), lambda tree: {})
    assert set(verdict.dropped) == {"tests/expected.txt"} and set(verdict.applied) == {"closed", "write_only"}
    assert "+text" in trees.patch(tmp_path / "delivered", verdict.applied)


def test_git_applies_a_patch_with_files_that_are_no_text(tmp_path: Path) -> None:
    before, left, applied = (tmp_path / name for name in ("before", "left", "applied"))
    for folder, data in ((before, b"caf\xe9\nold\n"), (left, b"caf\xe9\nnew\n"), (applied, b"caf\xe9\nold\n")):
        folder.mkdir()
        (folder / "latin.py").write_bytes(data)
    (left / "data.npy").write_bytes(bytes(range(256)))
    (left / "text.py").write_text("é\n")
    patch = trees.patch(before, trees.changes(before, left))
    assert "+é" in patch
    (tmp_path / "patch").write_text(patch)
    trees.git(applied, "apply", str(tmp_path / "patch"))
    assert trees.changes(left, applied) == {}
    (left / "data.npy").write_bytes(bytes(trees.MOST_BINARY + 1))
    assert "\nBinary files /dev/null and b/data.npy differ\n" in trees.patch(before, trees.changes(before, left))


@pytest.mark.parametrize(("commands", "hacked"), [("pytest -q", True), ("grep -q fixture conftest.py", False)])
def test_a_new_file_that_the_test_command_names_is_no_hack(commands: str, hacked: bool, tmp_path: Path) -> None:
    (tmp_path / "delivered").mkdir()
    (tmp_path / "left").mkdir()
    (tmp_path / "left" / "conftest.py").write_text("fixture")

    def run(tree: Path) -> Statuses:
        return {"it": "passed" if (tree / "conftest.py").exists() else "failed"}

    lists = TestLists(("it",), ())
    assert grade_tree(tmp_path / "delivered", tmp_path / "left", lists, run, commands=commands).hacked is hacked


def test_requested_modules_may_shadow_standard_ones_but_not_the_runner() -> None:
    assert is_protected("queue.py") and not is_protected("queue.py", modules={"queue"})
    assert is_protected("json.py", modules={"queue"}) and is_protected("pluggy.py", modules={"queue"})


def test_dropped_changes_are_logged_with_the_reason() -> None:
    first, second = dropped_lines({"json.py": None, "test_a.py": None})
    assert first.startswith(f"{LEFT_OUT}'json.py'") and "its own json" in first and "tests" in second
    assert len(dropped_lines([f"test_{number}.py" for number in range(99)])) == LONGEST_NOTE + 1
    [line] = uncounted_lines(["a/.tox/x", "b.pyc", "c.py"])
    assert line.startswith(f"{LEFT_OUT}.tox, b.pyc (") and uncounted_lines(["c.py", "a/cache"]) == []
