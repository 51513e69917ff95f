"""Rows of files of JSON lines, plain and compressed, and of Parquet."""

import gzip
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from composer_stages.envs.task_table import read_rows
from composer_stages.errors import BadInput


def test_rows_plain_and_gzipped(tmp_path: Path) -> None:
    text = '{"a": 1, "b": NaN}\n\n{"a": "\u2028", "b": -Infinity}\n'
    (tmp_path / "rows.jsonl").write_text(text)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    expected = [{"a": 1, "b": None}, {"a": "\u2028", "b": None}]
    pq.write_table(pa.Table.from_pylist([{**row, "a": str(row["a"])} for row in expected]), tmp_path / "rows.parquet")
    assert read_rows(tmp_path / "rows.parquet") == [{"a": "1", "b": None}, {"a": "\u2028", "b": None}]
    assert read_rows(tmp_path / "rows.jsonl") == read_rows(tmp_path / "rows.jsonl.gz") == expected
    assert read_rows(tmp_path / "rows.jsonl", measured=False)[1] == {"a": "\u2028", "b": -math.inf}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.jsonl", b'{"a": 1}\n{"a": \n', r"line 2: it is not JSON \(Expecting value in column 7\)"),
        ("rows.jsonl", b'{"a": 1}\n[1]\n', r"line 2: it is '\[1\]', not a JSON object"),
        ("rows.jsonl", b'{"a": 1e999}', "the number 1e999 would be read as inf"),
        ("rows.jsonl", b'{"a": [-2.5e-400]}', "the number -2.5e-400 would be read as -0.0"),
        ("rows.jsonl", b'{"a": 1, "b": {"c": 1, "c": 2}}', "the field 'c' stands in one object twice"),
        ("rows.jsonl", b"[" * 100_000, "line 1: it is nested 100,000 levels deep"),
        ("rows.jsonl", b"\xff", "is damaged"),
        ("rows.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 999, mtime=0)[:-20], "is damaged"),
        ("rows.jsonl", None, r"cannot be read \(No such file"),
        ("rows.parquet", None, r"cannot be read \(No such file"),
        ("rows.parquet", b"x", "is no Parquet file"),
    ],
)
def test_what_is_no_row_is_named(tmp_path: Path, name: str, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=said):
        read_rows(tmp_path / name)
