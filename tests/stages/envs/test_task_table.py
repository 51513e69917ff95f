"""Rows of files of JSON lines, plain and compressed."""

import gzip
from pathlib import Path

import pytest

from stages.envs.task_table import read_rows
from stages.errors import BadInput


def test_rows_plain_and_gzipped(tmp_path: Path) -> None:
    text = '{"a": 1, "b": NaN}\n\n{"a": "\u2028", "b": -Infinity}\n'
    (tmp_path / "rows.jsonl").write_text(text)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    expected = [{"a": 1, "b": None}, {"a": "\u2028", "b": None}]
    assert read_rows(tmp_path / "rows.jsonl") == read_rows(tmp_path / "rows.jsonl.gz") == expected


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"a": 1}\n{"a": \n', r"line 2: it is not JSON \(Expecting value in column 7\)"),
        (b'{"a": 1}\n[1]\n', r"line 2: it is '\[1\]', not a JSON object"),
        (b"[" * 100_000, "line 1: it is not JSON"),
        (b"\xff", "is damaged"),
    ],
)
def test_what_is_no_row_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(BadInput, match=said):
        read_rows(tmp_path / "rows.jsonl")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"cannot be read \(No such file"):
        read_rows(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n' * 999)[:-20])
    with pytest.raises(BadInput, match="is damaged"):
        read_rows(tmp_path / "rows.jsonl.gz")
