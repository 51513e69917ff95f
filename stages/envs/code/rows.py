"""Problems from files or the hub: the formats that are recognised, the splits, and what cannot be asked.

A format is recognised by the columns of a row:

| columns | format |
| --- | --- |
| `test_list`, `code`, `text` or `prompt` | MBPP, its sanitised form, and MBPP+ as `evalplus/mbppplus` (with `test`) |
| `entry_point`, `test`, `canonical_solution` | HumanEval, and HumanEval+ as `evalplus/humanevalplus` |
| `entry_point`, `base_input`, `plus_input` | HumanEval+ as EvalPlus' own file: the solution gives the results |
| `prompt`, `tests` | rows of the user's own, with `solution` and `entry_point` where there are any |
"""

import ast
import builtins
import doctest
import math
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_stages.envs.base import Split
from composer_stages.envs.code.testing import CannotAsk, check_test
from composer_stages.envs.programs import statements
from composer_stages.envs.task_table import HUB_SPLITS, hub_rows, is_held_out, meant_field, no_such_field, read_rows
from composer_stages.errors import BadInput, Refusal
from composer_stages.runs import store
from composer_stages.runs.kinds import Row
from composer_stages.words import Sentence

MBPP = Path(__file__).parent / "mbpp.jsonl.gz"
"""All 974 problems as published (google-research/google-research, mbpp/mbpp.jsonl; Austin et al. 2021, CC BY 4.0)."""
EXAMINED = 20
"""Rows with ids of MBPP that are held against it."""
MBPP_IDS: dict[Split, range] = {"train": range(601, 975), "eval": range(11, 511)}
"""MBPP's published splits (Austin et al. 2021): 1 to 10 are for prompts, 511 to 600 for validation."""
ALL_OF_MBPP = range(1, 975)
INSTRUCTION = "Reply with the function in one Python code block and nothing else."
SPECIAL = frozenset({"find_zero"})
"""Functions of HumanEval+ whose results EvalPlus accepts by a rule of their own."""


class UnknownFormat(Refusal):
    """A row fits none of the formats; the text is the reason."""


@dataclass(frozen=True)
class CodeProblem:
    """One function to write.

    task: what the agent is asked. shown: assertions that stand in the task; test: all that decide. before: code that
    the task gives, which stands in front of every answer. solution: a program, empty where there is none. inputs:
    positional arguments for which an answer has to return what the solution does, within `tolerance`, instead of a
    test. refused: why the problem cannot be asked, as far as its row shows.
    """

    problem_id: str
    task: str
    function: str
    shown: str = ""
    test: str = ""
    before: str = ""
    solution: str = ""
    inputs: tuple[tuple[Any, ...], ...] = ()
    tolerance: float = 0.0
    refused: str = ""
    mbpp_id: int | None = None


@dataclass(frozen=True)
class CodeProblems:
    """The problems of a split, and the reasons of those that are left out, by their ids."""

    usable: Sequence[CodeProblem]
    left_out: Mapping[str, str]


def load(split: Split, path: str, eval_path: str) -> CodeProblems:
    """Return the problems of a split, each once, in the order of the source.

    With both paths each is one split, and no problem may be in both. Of a single source MBPP is split by its published
    ids, a data set of the hub by its splits, where it has both, and any other by a digest of the task. `BadInput` names
    a row that is in none of the formats.
    """
    problems, splits = read_problems(path, _parts(path))
    if eval_path:
        held_out, _ = read_problems(eval_path, _parts(eval_path))
        if both := {problem.task for problem in problems} & {problem.task for problem in held_out}:
            raise BadInput("envs.code.problems-in-both-files", num_both=len(both), path=path, eval_path=eval_path)
        problems = problems if split == "train" else held_out
    else:
        is_mbpp = _is_mbpp(problems)
        problems = [one for one in problems if _is_in(one, split, splits.get(one.problem_id), is_mbpp=is_mbpp)]
    usable, left_out = [], {}
    for problem in problems:
        try:
            _check(problem)
        except CannotAsk as reason:
            left_out[problem.problem_id] = str(reason)
        else:
            usable.append(problem)
    return CodeProblems(usable, left_out)


def _check(problem: CodeProblem) -> None:
    """Raise CannotAsk for a problem that cannot be asked."""
    if problem.refused:
        raise CannotAsk(problem.refused)
    if problem.test:
        check_test(problem.test, problem.function, problem.before)


def _is_mbpp(problems: Sequence[CodeProblem]) -> bool:
    """Return whether problems with MBPP's ids ask for its functions: rows of the user's own have its shape as well."""
    numbered = [problem for problem in problems if problem.mbpp_id in ALL_OF_MBPP]
    numbered = numbered[:: -(-len(numbered) // EXAMINED) or 1]
    published = {row["task_id"]: row for row in read_rows(MBPP, measured=False)} if numbered else {}
    rows = [published[problem.mbpp_id] for problem in numbered]
    same = sum(_mbpp(row).function == problem.function for row, problem in zip(rows, numbered, strict=True))
    return 2 * same > len(numbered)


def _is_in(problem: CodeProblem, split: Split, named: Split | None, *, is_mbpp: bool) -> bool:
    if is_mbpp and problem.mbpp_id in ALL_OF_MBPP:
        return problem.mbpp_id in MBPP_IDS[split]
    return named == split if named else is_held_out(store.digest(problem.task)) == (split == "eval")


def _parts(path: str) -> dict[str, list[Row]]:
    """Return the rows of a source, by the splits of a data set of the hub."""
    file = Path(path).expanduser()
    is_hub = not file.exists() and not file.suffix and path.count("/") == 1
    return hub_rows(path, Sentence("envs.code.name-a-file")) if is_hub else {"": read_rows(file, measured=False)}


def read_problems(path: str, parts: Mapping[str, list[Row]]) -> tuple[list[CodeProblem], dict[str, Split]]:
    """Return the problems of a source, each once, and their splits, by id, where it has both."""
    problems: dict[str, CodeProblem] = {}
    splits: dict[str, Split] = {}
    has_both = {HUB_SPLITS[name] for name in parts if name in HUB_SPLITS} == {"train", "eval"}
    seen: set[str] = set()
    for number, (part, row) in enumerate(((part, row) for part, rows in parts.items() for row in rows), 1):
        try:
            problem = _problem(row)
        except UnknownFormat as error:
            raise BadInput("envs.code.row-not-usable", path=path, number=number, error=error) from None
        # A problem that comes twice counts once.
        if (content := store.digest([problem.task, problem.test])) in seen:
            continue
        seen.add(content)
        if problems.setdefault(problem.problem_id, problem) is not problem:
            raise BadInput("envs.code.repeated-id", path=path, number=number, problem_id=problem.problem_id)
        if has_both and part in HUB_SPLITS:
            splits[problem.problem_id] = HUB_SPLITS[part]
    if not problems:
        raise BadInput("envs.code.no-rows", path=path)
    return list(problems.values()), splits


# The formats.


def _problem(row: Row) -> CodeProblem:
    """Parse a row of any of the formats; UnknownFormat with the reason where it fits none."""
    if "test_list" in row:
        return _mbpp(row)
    if "base_input" in row:
        return _evalplus(row)
    if "entry_point" in row and "test" in row:
        return CodeProblem(**_signature(row), test=_text(row, "test"))  # HumanEval
    if "prompt" in row and "tests" in row:
        return _own(row)
    meant = {name: near for name in row for near in meant_field(name, OWN) if near not in row}
    raise UnknownFormat("envs.code.unknown-format", columns=list(row), meant=meant)


def _mbpp(row: Row) -> CodeProblem:
    tests, solution = _texts(row, "test_list"), _text(row, "code")
    before = [*(_texts(row, "test_imports") if row.get("test_imports") else ()), row.get("test_setup_code") or ""]
    test = _text(row, "test") if row.get("test") else "\n".join([*before, *tests])
    prompt_tests = "\n".join([*before, _first(tests)])
    number = row.get("task_id")
    if isinstance(number, str | float) and re.fullmatch(r"\d{1,3}(\.0)?", str(number)):  # of a column with a null
        number = int(float(number))
    return _of_assertions(
        str(number) if number is not None else "",
        _text(row, "text" if "text" in row else "prompt"),
        tests,
        solution,
        shown=prompt_tests,
        test=test,
        mbpp_id=number if type(number) is int else None,
    )


OWN = ("prompt", "tests", "solution", "entry_point", "id")
"""Fields of a row of the user's own."""


def _own(row: Row) -> CodeProblem:
    for name in row:
        if name not in OWN:
            raise UnknownFormat(no_such_field(name, OWN))
    tests = _texts(row, "tests")
    solution = _text(row, "solution") if row.get("solution") is not None else ""
    function = _entry_point(row) if row.get("entry_point") is not None else ""
    name = _text(row, "id") if row.get("id") is not None else ""
    return _of_assertions(name, _text(row, "prompt"), tests, solution, function=function, test="\n".join(tests))


def _of_assertions(
    name: str,
    text: str,
    tests: Sequence[str],
    solution: str,
    *,
    test: str,
    shown: str = "",
    function: str = "",
    mbpp_id: int | None = None,
) -> CodeProblem:
    """Return a problem that shows its first assertion after the text of the task."""
    refused = ""
    try:
        function = function or _function(tests, solution)
    except CannotAsk as reason:
        refused = str(reason)
    task = f"{text.strip()}\n{_first(tests).strip()}"
    shown = shown or _first(tests)
    if (maker := function.rpartition(".")[0]) and not refused:  # tests call a method by its name alone
        test, shown = (part.replace(f"{maker}.", "") for part in (test, shown))
    return CodeProblem(
        name or store.digest([task, test])[:12],
        task,
        function,
        shown,
        test,
        solution=solution,
        refused=refused,
        mbpp_id=mbpp_id,
    )


def _first(tests: Sequence[str]) -> str:
    """Return the first assertion of a list, with the imports and values in front of it."""
    count = next((count for count, test in enumerate(tests, 1) if _asserts(test)), 1)
    return "\n".join(tests[:count])


def _asserts(test: str) -> bool:
    return any(isinstance(node, ast.Assert) for statement in _statements(test) for node in ast.walk(statement))


def _evalplus(row: Row) -> CodeProblem:
    inputs = [*_list(row, "base_input"), *_list(row, "plus_input")]
    if not inputs or not all(isinstance(arguments, list) for arguments in inputs):
        raise UnknownFormat("envs.code.inputs-not-lists")
    signature = _signature(row)
    refused = ""
    if signature["function"] not in {node.name for node in _functions(_text(row, "prompt"))}:  # MBPP+: a text alone
        refused = Sentence("envs.code.inputs-without-types")
    elif signature["function"] in SPECIAL:
        refused = Sentence("envs.code.special-comparison")
    tolerance = row.get("atol") or 0
    if not isinstance(tolerance, int | float) or not abs(tolerance) < math.inf:
        raise UnknownFormat("envs.code.tolerance-not-finite", tolerance=tolerance)
    return CodeProblem(**signature, inputs=tuple(map(tuple, inputs)), tolerance=float(tolerance), refused=refused)


def _signature(row: Row) -> dict[str, Any]:
    """Return the parts of a problem whose prompt is the beginning of a program."""
    prompt, function, solution = _text(row, "prompt"), _entry_point(row), _text(row, "canonical_solution")
    task = f"```python\n{prompt.strip()}\n```"
    return {
        "problem_id": str(row.get("task_id") or store.digest(task)[:12]).replace("/", "-"),
        "task": task,
        "function": function,
        "shown": _examples(prompt, function),
        "before": _before(prompt, function),
        "solution": program if statements(program := prompt + solution) else solution,
    }


def _entry_point(row: Row) -> str:
    """Return the function that a row names; of a method, as LeetCode's rows have it, the call on a new object."""
    text = _text(row, "entry_point").strip()
    if (parts := re.fullmatch(r"([^\W\d]\w*)(?:(?:\(\))?\.([^\W\d]\w*))?", text)) is None:
        raise UnknownFormat("envs.code.not-a-function", text=text[:60])
    return f"{parts[1]}().{parts[2]}" if parts[2] else text


def _examples(prompt: str, function: str) -> str:
    """Return the examples of a docstring (>>> f(1), 2) as assertions, of those that can be asked."""
    examples = []
    with suppress(ValueError):  # of a docstring with indentation that doctest does not take
        written = next((ast.get_docstring(node) for node in _functions(prompt) if node.name == function), None)
        for example in doctest.DocTestParser().get_examples(written or ""):
            text = f"assert {example.source.strip()} == {example.want.strip()}"
            with suppress(CannotAsk):
                check_test(text, function, prompt)
                examples.append(text)
    return "\n".join(examples)


def _before(prompt: str, function: str) -> str:
    """Return the lines of a prompt before its function: imports and functions that it may use.

    All lines where it holds no such function, and none of a prompt that is no Python.
    """
    name = function.partition("(")[0]
    definitions = statements(prompt) or _statements(f"{prompt}\n    pass\n")  # without a docstring it is no program
    for node in definitions:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return "".join(prompt.splitlines(keepends=True)[: node.lineno - 1 - len(node.decorator_list)])
    return prompt if definitions else ""


def _function(tests: Sequence[str], solution: str) -> str:
    """Return the name of the function that all assertions call; of several the first that the solution defines."""
    tests = [test for test in tests if _asserts(test)] or tests
    classes = {node.name for node in _statements(solution) if isinstance(node, ast.ClassDef)} or {"Solution"}
    called = [[name for node in _statements(test) for name in _called(node, classes)] for test in tests]
    in_all = [name for name in dict.fromkeys(called[0]) if all(name in names for names in called)]
    defined = {node.name for node in _functions(solution)}
    candidates = [name for name in in_all if name in defined] or [
        name for name in in_all if not hasattr(builtins, name)
    ]
    if not candidates:
        raise CannotAsk("envs.code.no-common-function")
    return candidates[0]


def _called(node: ast.AST, classes: Collection[str]) -> list[str]:
    """Return the names of functions that a test calls, and of methods of new objects: Solution().twoSum."""
    called = [inner.func for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    texts = map(ast.unparse, called)
    return [text for text in texts if text.isidentifier() or text.partition("().")[0] in classes]


def _functions(source: str) -> list[ast.FunctionDef]:
    return [node for node in _statements(source) if isinstance(node, ast.FunctionDef)]


def _statements(source: str) -> list[ast.stmt]:
    return statements(source) or []


def _text(row: Row, name: str) -> str:
    if not isinstance(value := row.get(name), str) or not value.strip():
        raise UnknownFormat("envs.code.not-a-text", name=name, value=value)
    return value


def _list(row: Row, name: str) -> list[Any]:
    if not isinstance(value := row.get(name), list):
        raise UnknownFormat(f"{name} is {value!r:.40}, not a list")
    return value


def _texts(row: Row, name: str) -> list[str]:
    values = _list(row, name)
    if not values or not all(isinstance(text, str) and text.strip() for text in values):
        raise UnknownFormat("envs.code.not-a-list-of-texts", name=name, column=values)
    return values
