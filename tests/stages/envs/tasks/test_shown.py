"""What shows a result that a row expects: an argument of another call, the prompt, a file; and what does not."""

from pathlib import Path
from typing import Any

import pytest
from support.refusals import refused
from support.transcripts import jsonl

from composer_stages import collect
from composer_stages.envs.repo.trees import TreeFile
from composer_stages.envs.tasks import shown, values
from composer_stages.errors import UsageError

CALL: dict[str, Any] = {"kwargs": {}, "raises": ""}


def find(
    calls: list[tuple[str, Any, Any]], script: list[dict[str, Any]], prompt: str = "", **files: str
) -> dict[str, str]:
    """What shows which result of calls (function, argument, result) and scripts; "" where nothing is left to decide."""
    row = {
        "calls": [
            {**CALL, "function": f"m:{name}", "args": [given], "returns": result} for name, given, result in calls
        ],
        "script": [{"stdin": "", "stdout": None, "files": {}, **one} for one in script],
    }
    results = [*shown.expected_results(row, row["calls"], values.test_names(row))]
    places = shown.find_shown(results, prompt, {name: TreeFile(text.encode()) for name, text in files.items()})
    found = {result.test.partition(":")[0]: where.partition(":")[0] for result, where in places.items()}
    return {"": ""} | found if shown.decide_nothing(results, places) else found


@pytest.mark.parametrize(
    ("given", "returns", "told"),
    [
        ("abc", "abc", True),
        ("to abc.", "abc", True),
        ({"a": ["abc"]}, "abc", True),
        ({"abc": 2}, "abc", True),
        ([7, 8], 8, True),
        ([[1, 2], 3], [1, 2], True),
        ("cba", 1, False),
        ("b", "c", False),
        (81, 8, False),
        (True, 1, False),
    ],
)
@pytest.mark.parametrize("other", ["f", "g"])
def test_what_another_call_is_given_is_told(given: Any, returns: Any, told: bool, other: str) -> None:
    assert bool(find([("f", "x", returns), (other, given, 0)], [])) == told
    assert not find([("f", given, returns)], []), "its own argument is its input"


@pytest.mark.parametrize(
    ("command", "stdin", "stdout", "told"),
    [
        ("python3 n.py --decode=cba", "", "cba\n", True),
        ("python3 n.py 7 x", "", "7\n", True),
        ("python3 n.py", "a 7.\n", "7", True),
        ("python7 n.py 17 7.5", "77", "7", False),
        ("python3 n.py 1", "", "1\n", False),
    ],
)
def test_what_words_or_input_of_another_script_hold_is_told(command: str, stdin: str, stdout: str, told: bool) -> None:
    script = {"command": "python3 n.py", "stdout": stdout}
    assert bool(find([], [script, {"command": f"{command} ", "stdin": stdin, "files": {"o": "1"}}])) == told
    assert not find([], [{**script, "stdin": stdin}]), "its own words are its input"


@pytest.mark.parametrize(
    ("text", "returns", "told"),
    [
        ("It gives 4125.", 4125, True),
        ("m.f(2) == 8", 8, True),
        (">>> f('q')\n'x7q'", "x7q", True),
        ("f([3, 1]) is [1,3]", [1, 3], True),
        ('f gives {"a": 2.5}', {"a": 2.5}, True),
        ("f gives {'a' : 2.5 }", {"a": 2.5}, True),
        ("f gives (1, [3,\n 4])", [1, [3, 4]], True),
        ("8 is what f(2) gives", 8, True),
        ("It gives 4,125 or 4_125.", 4125, True),
        ("two\n    lines", "two\nlines", True),
        ("def f(x): return 8 - x", 8, False),
        ("It gives 41250 or 1.4125.", 4125, False),
        ("Write 8 functions.", 8, False),
        ("f gives true or 1", True, False),
        ("f is short", "or", False),
        ("f(2)", [], False),
        ("f(x) is x[1]", [1], False),
    ],
)
def test_what_the_prompt_or_a_file_holds_is_told(text: str, returns: Any, told: bool) -> None:
    assert bool(find([("f", "x", returns)], [], text)) == bool(find([("f", "x", returns)], [], note=text)) == told
    assert not told or find([("f", "x", returns)], [], note=text)["call 1"] == "note"


EXAMPLE = "f('x') is 4125."


@pytest.mark.parametrize(
    ("calls", "script", "prompt", "found"),
    [
        ([("f", "x", 4125), ("f", "y", 3)], [], EXAMPLE, {"call 1": "the prompt"}),
        ([("f", "x", 4125), ("f", "y", 4125)], [], EXAMPLE, {"": "", "call 1": "the prompt", "call 2": "the prompt"}),
        ([("f", "x", 4125), ("f", "y", True), ("f", "z", [])], [], EXAMPLE, {"": "", "call 1": "the prompt"}),
        ([("f", "ab", "ba"), ("g", "ba", "ab")], [], "", {"": "", "call 1": "call 2", "call 2": "call 1"}),
        ([("f", "ab", "ba"), ("g", "ba", "ab"), ("f", "cde", "edc")], [], "", {"call 1": "call 2", "call 2": "call 1"}),
        ([("f", "x", True), ("f", "y", None)], [], "f gives True or None.", {}),
        ([("f", "x", 4125)], [{"command": "python3 n.py 9", "stdout": "81"}], EXAMPLE, {"call 1": "the prompt"}),
        (
            [],
            [{"command": "python3 n.py", "stdout": "4125", "files": {"o": "81"}}],
            EXAMPLE,
            {"script 1": "the prompt"},
        ),
    ],
)
def test_a_shown_result_is_a_visible_test_and_the_others_decide(
    calls: list[Any], script: list[Any], prompt: str, found: dict[str, str]
) -> None:
    assert find(calls, script, prompt) == found


ROWS = {
    "calls": {"calls": [{"function": "m:f", "args": [3], "returns": 6}]},
    "told": {"prompt": "f(3) is 60.", "calls": [{"function": "m:f", "args": [3], "returns": 60}]},
    "example": {
        "prompt": "f(4) is 60.",
        "calls": [{"function": "m:f", "args": [given], "returns": 15 * given} for given in (4, 5)],
    },
    "pytest": {"tests": ["test_m.py"], "hidden": {"test_m.py": "def test(): pass"}},
}


def test_a_task_says_before_any_rollout_on_what_ground_it_can_pass(tmp_path: Path) -> None:
    named = ({"id": name, "prompt": f"{name}: write m.py.", "split": "train", **row} for name, row in ROWS.items())
    env = {"name": "tasks", "path": str(jsonl(tmp_path / "my.jsonl", *named))}
    (line,) = (line for line in collect.Config(env=env, tasks=4).check() if line.startswith("grounds: "))
    assert "2 of 4 tasks" in line and "told (shown: the prompt" in line and "pytest (its tests run" in line
    assert "example" not in line
    strict = collect.Config(env={**env, "require": "values"}, tasks=4)
    refused(strict.check, UsageError, code="envs.tasks-by-report", num_tasks=4)
