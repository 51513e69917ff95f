"""Rows of tables as their author wrote them: JSON text as values, and without the nulls that a table adds.

In a table all rows have the fields of each: a struct holds null for a field that its row does not have.
"""

from contextlib import suppress
from typing import Any

from composer_stages import json_text
from composer_stages.errors import BadInput
from composer_stages.runs.kinds import Row

AS_TEXT = ("files", "hidden", "solution", "calls", "script")
"""Columns that may be JSON text."""
VALUES = ("args", "kwargs", "returns")
"""Fields of a call in which a null may be a value."""


def parse_row(row: Row, types: Any = ()) -> Row:
    """Return a row without added nulls; JSON text and lists of pairs are values.

    types: the fields of the Arrow schema, which tell which parts are JSON. `BadInput` names a null that may stand for
    a value.
    """
    parsed: Row = {}
    for name, value in row.items():
        if name in AS_TEXT and isinstance(value, str):
            parsed[name] = value
            with suppress(ValueError):  # what is no JSON is refused by TaskRow, with the value
                parsed[name] = json_text.loads(value)
            continue
        kind = next((field.type for field in types if field.name == name), None)
        is_map = hasattr(kind, "key_type")  # of which one without keys is an empty list
        pairs = isinstance(value, list) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value)
        if pairs and (is_map or value):
            parsed[name] = dict(value)
        else:
            _refuse_ambiguous(row, name, value)
            parsed[name] = _without_nulls(value, kind)
    for call in parsed.get("calls") or () if isinstance(row.get("calls"), list) else ():
        if isinstance(call, dict) and not call.get("raises"):
            call.setdefault("returns", None)  # of a column that holds nothing else
    return parsed


def _refuse_ambiguous(row: Row, name: str, value: Any) -> None:
    """Raise BadInput for a null that may say that a file is deleted, or be an argument or a result."""
    has_files = row.get("archive") or row.get("git") or isinstance(row.get("files"), str)
    delivered = row["files"] if isinstance(row.get("files"), dict) else {}
    nulls = []
    if name == "solution" and isinstance(value, dict):
        nulls = [
            path for path, text in value.items() if text is None and (has_files or delivered.get(path) is not None)
        ]
    elif name == "calls" and isinstance(value, list):
        parts = ((part, call.get(part)) for call in value if isinstance(call, dict) for part in VALUES)
        nulls = [f"{part}.{path}" for part, part_value in parts for path in _nulls(part_value)]
    if nulls:
        raise BadInput("envs.tasks.null-in-table", column=name, path=nulls[0])


def _nulls(value: Any) -> list[str]:
    """Return the paths of nulls in the structs of a value."""
    if isinstance(value, dict):
        inside = [f"{key}.{path}" for key, item in value.items() for path in _nulls(item)]
        return [key for key, item in value.items() if item is None] + inside
    return [path for item in value for path in _nulls(item)] if isinstance(value, list) else []


def _without_nulls(value: Any, kind: Any) -> Any:
    """Return a part of a row without the nulls of its structs, and with what its JSON text says."""
    if isinstance(value, str) and getattr(kind, "extension_name", "") == "arrow.json":
        return json_text.loads(value)
    if isinstance(value, dict):
        fields = {} if kind is None else {field.name: field.type for field in kind}
        return {name: _without_nulls(item, fields.get(name)) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item, getattr(kind, "value_type", None)) for item in value]
    return value
