"""Rows of tasks: every bad one is reported with its line, no path leads out, and a family is in one split."""

import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.refusals import refused
from support.transcripts import jsonl

from composer_stages.envs import task_table
from composer_stages.envs.task_table import DIVIDED_BY, MOST_REPORTED, family_of, split_rows
from composer_stages.envs.tasks import rows, tables
from composer_stages.errors import BadInput, UsageError

GOOD: dict[str, Any] = {"prompt": "Write answer.txt.", "test": "test -f answer.txt"}
OTHER = {**GOOD, "prompt": "Write an answer."}


def written(folder: Path, *given: dict[str, Any]) -> str:
    """A file of rows."""
    return str(jsonl(folder / "my.jsonl", *given))


def test_a_row_needs_a_prompt_and_a_test_and_gets_an_id(tmp_path: Path) -> None:
    first, second = rows.load(written(tmp_path, GOOD, {**OTHER, "id": "mine", "family": "f"}))
    assert first["id"].startswith("task-") and second["id"] == "mine"
    assert family_of(first) == first["id"] and family_of(second) == "f"
    assert rows.load(written(tmp_path, GOOD))[0]["id"] == first["id"], "an id is that of the row, not of its place"
    labelled = {**GOOD, "family": "f", "split": "eval"}
    assert rows.load(written(tmp_path, labelled))[0]["id"] == first["id"], "in another split it is the same task"


BAD = {
    "no test": ({"prompt": "p"}, "it has no test. Give it one"),
    "two tests": ({**GOOD, "tests": ["t.py::a"]}, "it has tests and test. Give it one"),
    "a call without a result": ({"prompt": "p", "calls": [{"function": "a:b"}]}, "give either returns, a value, or"),
    "a call with two results": (
        {"prompt": "p", "calls": [{"function": "a:b", "returns": 1, "raises": "KeyError"}]},
        "give either returns, a value, or",
    ),
    "a function without a module": (
        {"prompt": "p", "calls": [{"function": "b", "returns": 1}]},
        "calls.0.function: it should be a module and a function, such as shapes",
    ),
    "what is no literal": (
        {"prompt": "p", "calls": [{"function": "a:b", "args": [[{"$python": "set(1"}]], "returns": 1}]},
        "calls.0.args: $python should be the text of a Python literal",
    ),
    "a sentence as an exception": (
        {"prompt": "p", "calls": [{"function": "a:b", "raises": "no int"}]},
        "calls.0.raises: it should match the pattern",
    ),
    "a script that shows nothing": ({"prompt": "p", "script": [{"command": "true"}]}, "give stdout, files or both"),
    "a column of another program": (
        {"instruction": "p", "test": "true"},
        "instruction: rows have no such field; did you mean prompt?",
    ),
    "an unknown column": ({**GOOD, "promt": "p"}, "promt: rows have no such field; did you mean prompt?"),
    "no prompt": ({"test": "true"}, "prompt: it is missing"),
    "an empty prompt": ({**GOOD, "prompt": ""}, "prompt: it should not be empty"),
    "a number as a prompt": ({**GOOD, "prompt": 3}, "prompt: it should be text"),
    "a path that leads out": ({**GOOD, "files": {"../a": "x"}}, "is not a path below the task's folder"),
    "an absolute path": ({**GOOD, "hidden": {"/etc/passwd": "x"}}, "is not a path below the task's folder"),
    "a path into git": ({**GOOD, "files": {"a/.git/hooks/post-checkout": "x"}}, "is a file of version control"),
    "a path with a null byte": ({**GOOD, "solution": {"a\0b": "x"}}, "is not a path below"),
    "a path that is too deep": ({**GOOD, "files": {"d/" * 200 + "a": "x"}}, "too long or too deep"),
    "an option as a test": ({"prompt": "p", "tests": ["--collect-only"]}, "is not an id of pytest"),
    "a test out of the folder": ({"prompt": "p", "tests": ["../t.py::test_a"]}, "is not a path below"),
    "a path of Windows": ({**GOOD, "files": {"pkg\\a.py": "x"}}, "has a backslash; write folders with /"),
    "a path in two ways": ({**GOOD, "hidden": {"a": "x", "./a": "y"}}, "'a' is written twice, in two ways"),
    "a test with a null byte": ({**GOOD, "test": "true\0"}, "holds the character NUL"),
    "a file in a file": ({**GOOD, "files": {"a": "x", "a/b/c": "y"}}, "'a/b/c' lies in another file of the row"),
    "half of a character": ({**GOOD, "files": {"a": "\ud800"}}, "half of a character"),
    "the same task again": (
        {**GOOD, "id": "other", "family": "f"},
        "line 2: it is the task of line 1 again; remove one",
    ),
    "the same task with another solution": (
        {**GOOD, "prompt": f"{GOOD['prompt']}\n", "solution": {"answer.txt": ""}, "timeout_s": 9},
        "line 2: it is the task of line 1 again; remove one",
    ),
    "a commit without git": ({**GOOD, "commit": "0123456789"}, "git and commit belong together"),
    "no hex commit": ({**GOOD, "git": ".", "commit": "--output=/tmp/x"}, "commit: it should match the pattern ^("),
    "an id with a slash": ({**GOOD, "id": "a/b"}, "id: it should match the pattern ^["),
    "no time": ({**GOOD, "timeout_s": 0}, "timeout_s: it should be greater than 0"),
    "another split": ({**GOOD, "split": "test"}, "split: it should be 'train' or 'eval'"),
    "an archive that is not there": ({**GOOD, "archive": "a.tar.gz"}, "there is no archive"),
    "a repository that is not there": ({**GOOD, "git": "repo", "commit": "0123456"}, "there is no git repository"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_named_with_its_place_and_the_reason(tmp_path: Path, name: str) -> None:
    row, reason = BAD[name]
    with pytest.raises(BadInput, match=r"my.jsonl: 1 row cannot be used") as refused:
        rows.load(written(tmp_path, GOOD, row))
    assert "- line 2: " in str(refused.value) and reason in str(refused.value)


def test_ids_of_tests_are_those_that_pytest_reports(tmp_path: Path) -> None:
    """`./tests/test_a.py::test_a` ran, and was another test than the `tests/test_a.py::test_a` that passed."""
    ids = ["./tests//test_a.py::test_a[x//y]", "tests/test_b.py"]
    (row,) = rows.load(written(tmp_path, {"prompt": "p", "tests": ids}))
    assert row["tests"] == ["tests/test_a.py::test_a[x//y]", "tests/test_b.py"]


def test_all_bad_rows_and_lines_are_reported_at_once(tmp_path: Path) -> None:
    same = [{**GOOD, "id": "same", "prompt": f"{n}"} for n in range(3)]
    path = Path(written(tmp_path, *same, *[{"prompt": ""}] * 30))
    with pytest.raises(BadInput) as refused:
        rows.load(str(path))
    lines = str(refused.value).splitlines()
    assert lines[0].endswith("32 rows cannot be used:")
    assert lines[1].endswith("it has the id 'same' of line 1; change the id or remove one")
    assert len(lines) == 1 + MOST_REPORTED + 1 and lines[-1] == "- and 12 more"
    path.write_text(f'{json.dumps(GOOD)}\n\n{{"prompt": \n[1]\n{json.dumps({"prompt": ""})}\n')
    with pytest.raises(BadInput) as refused:
        rows.load(str(path))
    heads = [line.split(":")[0] for line in str(refused.value).splitlines()[1:]]
    assert "- line 3: it is not JSON (Expecting value in column 12)\n- line 4: it is '[1]'" in str(refused.value)
    assert heads == ["- line 3", "- line 4", "- line 5"], "counted as an editor counts, with the empty line"


def test_tables_may_hold_mappings_as_json_and_nulls(tmp_path: Path) -> None:
    files = [json.dumps({"a.py": "x = 1"}), None]
    table = pa.table({"prompt": ["p", "q"], "files": files, "test": ["true", "true"], "family": [None, "f"]})
    pq.write_table(table, tmp_path / "my.parquet")
    first, second = rows.load(str(tmp_path / "my.parquet"))
    assert first["files"] == {"a.py": "x = 1"} and second["files"] == {} and second["family"] == "f"


CALL = {"function": "a:f", "args": [1], "returns": 2}
BOTH = [CALL | {"kwargs": {"x": 1}, "returns": {"k": 1}}, {"function": "a:f", "raises": "ValueError"}]
SCRIPTS = [{"command": "a", "stdout": "1"}, {"command": "b", "files": {"out": "1"}, "stdin": "2"}]


@pytest.mark.parametrize(
    "written_rows",
    [
        [
            {"prompt": p, "files": {f: ""}, "solution": {f: "1"}, "test": "true"}
            for p, f in (("p", "a.py"), ("q", "b.py"))
        ],
        [{"prompt": "p", "calls": BOTH}, {"prompt": "q", "calls": [CALL | {"returns": None}]}],
        [{"prompt": "p", "calls": json.dumps([CALL | {"kwargs": {"x": None}, "returns": [{"k": None}]}])}],
        [{"prompt": "p", "script": SCRIPTS}],
    ],
)
def test_a_table_gives_the_rows_that_were_written(tmp_path: Path, written_rows: list[dict]) -> None:
    """Structs have null for the fields of other rows; Arrow's type of JSON is text."""
    decoded = [
        {k: json.loads(v) if k == "calls" and isinstance(v, str) else v for k, v in r.items()} for r in written_rows
    ]
    ours = [{**row, "folder": ""} for row in rows.load(written(tmp_path, *decoded))]
    pq.write_table(pa.Table.from_pylist(written_rows), tmp_path / "my.parquet")
    assert [{**row, "folder": ""} for row in rows.load(str(tmp_path / "my.parquet"))] == ours


@pytest.mark.parametrize(
    ("row", "path"),
    [
        ({"calls": [CALL | {"kwargs": {"x": 1, "y": None}}]}, "kwargs.y"),
        ({"calls": [CALL | {"returns": [{"k": {"a": 1, "b": None}}]}]}, "returns.k.b"),
        ({"test": "true", "files": {"a.py": ""}, "solution": {"a.py": None, "b.py": ""}}, "a.py"),
        ({"test": "true", "archive": "a.zip", "solution": {"a.py": None, "b.py": ""}}, "a.py"),
    ],
)
def test_a_null_of_a_table_that_may_be_a_value_is_named(row: dict, path: str) -> None:
    refused(lambda: tables.parse_row(row), BadInput, code="envs.tasks.null-in-table", path=path)


def test_a_map_without_keys_is_read(tmp_path: Path) -> None:
    files = pa.array([[], [("a.py", "x")]], pa.map_(pa.string(), pa.string()))
    pq.write_table(pa.table({"prompt": ["p", "q"], "test": ["true"] * 2, "files": files}), tmp_path / "my.parquet")
    assert [row["files"] for row in rows.load(str(tmp_path / "my.parquet"))] == [{}, {"a.py": "x"}]


def test_json_of_arrow_is_read(tmp_path: Path) -> None:
    values = pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"k": null}', '"{}"']))
    calls = pa.StructArray.from_arrays([pa.array(["a:f", "a:g"]), values], names=["function", "returns"])
    table = pa.table({"prompt": ["p"], "calls": pa.ListArray.from_arrays([0, 2], calls)})
    pq.write_table(table, tmp_path / "my.parquet")
    [row] = rows.load(str(tmp_path / "my.parquet"))
    assert [call["returns"] for call in row["calls"]] == [{"k": None}, "{}"]


def test_values_of_calls_tell_rows_apart_and_an_id_is_that_of_a_row(tmp_path: Path) -> None:
    values = [math.inf, -math.inf, math.nan, None, 10**30, 10**30 + 1]
    given = [{"prompt": "p", "calls": [{"function": "a:f", "returns": value}]} for value in values]
    assert len({row["id"] for row in rows.load(written(tmp_path, *given))}) == len(values)
    with pytest.raises(BadInput, match="line 7: it is the task of line 3 again"):
        rows.load(written(tmp_path, *given, given[2]))
    plain = {"args": [1, [2.5, None, {"b": True}]], "kwargs": {"$set": {"a": -3}}, "returns": 2**63}
    (row,) = rows.load(written(tmp_path, {"prompt": "p", "calls": [{"function": "a:f", **plain}]}))
    assert row["id"] == "task-9389add7ba3c", "as it was before numbers of other kinds could be held"


def test_nan_in_a_column_is_no_value_as_pandas_writes_it(tmp_path: Path) -> None:
    (row,) = rows.load(written(tmp_path, {**GOOD, "solution": math.nan, "family": math.nan}))
    assert row["solution"] is None and row["family"] == ""


def test_integers_of_more_digits_than_python_reads_are_refused_with_the_limit(tmp_path: Path) -> None:
    (tmp_path / "my.jsonl").write_text('{"prompt": "p", "calls": [{"function": "a:f", "returns": ' + "9" * 5000 + "}]}")
    with pytest.raises(BadInput, match=r"line 1: it is not JSON \(Exceeds the limit \(4300 digits\)"):
        rows.load(str(tmp_path / "my.jsonl"))


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("calls", [{"function": "a:f", "returns": Decimal("1.5")}], r"row 1: it holds what JSON cannot .*Decimal"),
        ("files", "[" * 20_000 + "]" * 20_000, "row 1: files: it should be a table"),
    ],
)
def test_a_value_of_a_table_that_json_lacks_is_named(tmp_path: Path, column: str, value: object, reason: str) -> None:
    table = pa.table({"prompt": ["p"], column: [value], **({} if column == "calls" else {"test": ["true"]})})
    pq.write_table(table, tmp_path / "my.parquet")
    with pytest.raises(BadInput, match=reason):
        rows.load(str(tmp_path / "my.parquet"))


@pytest.mark.parametrize(
    ("content", "code", "written"),
    [
        (json.dumps([GOOD, OTHER], indent=1), "envs.file-is-one-document", None),
        (json.dumps(GOOD, indent=1), "envs.file-is-one-document", None),
        (f"{json.dumps(GOOD)},\n{json.dumps(OTHER)},\n", "envs.line-not-json-at", "comma"),
        (f"{GOOD}\n", "envs.line-not-json-at", "python"),
        ('{"prompt": None}\n', "envs.line-not-json-at", "python"),
        ('{"prompt": "x"\n', "envs.line-not-json-at", ""),
    ],
)
def test_what_is_no_object_a_line_is_refused_with_what_it_is(
    tmp_path: Path, content: str, code: str, written: str | None
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(BadInput) as raised:
        task_table.read_rows(path, measured=False)
    assert (raised.value.code, raised.value.values.get("written")) == (code, written)


@pytest.mark.parametrize("path", ["my.txt", "no/such/file.csv", "folder"])
def test_what_is_no_file_of_rows_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises((UsageError, BadInput), match=r"Name a"):
        rows.load(str(tmp_path / path))


def test_families_are_divided_by_a_seed_and_never_in_both(tmp_path: Path) -> None:
    given = [{**GOOD, "prompt": f"Task {n}.", "id": f"t{n}", "family": f"f{n // 5}"} for n in range(40)]
    loaded = rows.load(written(tmp_path, *given))
    parts = split_rows(loaded, 0, 0.25)
    families = {split: {row["family"] for row in part} for split, part in parts.items()}
    assert (len(families["train"]), len(families["eval"])) == (6, 2) and not families["train"] & families["eval"]
    assert split_rows(loaded[::-1], 0, 0.25)["eval"][::-1] == parts["eval"], "the order of rows changes nothing"
    assert [row[DIVIDED_BY] for row in parts["train"]] == [{"split_seed": 0, "eval_share": 0.25}] * 30
    assert len(split_rows(loaded, 0, 0)["train"]) == 40 and split_rows(loaded, 0, 0)["eval"] == []
    by_seed = {frozenset(row["family"] for row in split_rows(loaded, n, 0.25)["eval"]) for n in range(6)}
    assert len(by_seed) > 1
    assert len(split_rows(loaded, 0, 0.001)["eval"]) == 5 and len(split_rows(loaded, 0, 0.999)["train"]) == 5


def test_given_splits_are_kept_and_must_be_whole(tmp_path: Path) -> None:
    loaded = rows.load(written(tmp_path, {**GOOD, "id": "a", "split": "train"}, {**OTHER, "id": "b", "split": "eval"}))
    (held_out,) = split_rows(loaded, 0, 0.25)["eval"]
    assert held_out["id"] == "b" and DIVIDED_BY not in held_out
    with pytest.raises(UsageError, match="1 of 2 tasks have a split"):
        split_rows([loaded[0], {**loaded[1], "split": None}], 0, 0.25)
    with pytest.raises(UsageError, match="'f' is in both splits"):
        split_rows([{**row, "family": "f"} for row in loaded], 0, 0.25)
    alone = split_rows([{**row, "family": "f", "split": None} for row in loaded], 0, 0.25)
    assert (len(alone["train"]), alone["eval"]) == (2, [])


def test_a_thousand_rows_are_read_split_and_compared(tmp_path: Path) -> None:
    given = [{**GOOD, "prompt": f"Write answer {n}.", "family": f"f{n % 100}"} for n in range(1_000)]
    loaded = rows.load(written(tmp_path, *given))
    assert len({row["id"] for row in loaded}) == 1_000
    sides = [{row["id"] for row in split_rows(loaded, seed, 0.25)["eval"]} for seed in (0, 0, 1, 2)]
    assert [len(side) for side in sides] == [250] * 4 and sides[0] == sides[1]
    # Two draws of a quarter share a sixteenth on average.
    assert all(10 < len(sides[0] & other) < 130 for other in sides[2:]), [len(sides[0] & other) for other in sides]
    with pytest.raises(BadInput, match="500 rows cannot be used") as refused:
        rows.load(written(tmp_path, *given, *given[::2]))
    assert "line 1001: it is the task of line 1 again" in str(refused.value)
