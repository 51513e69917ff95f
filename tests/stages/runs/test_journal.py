"""A journal keeps what was appended, once a unit, and reads it in any order without holding it."""

import os
from pathlib import Path
from typing import Any

import pytest

from composer_stages.errors import BadInput
from composer_stages.runs import store
from composer_stages.runs.store import SHARD_BYTES, Journal, read_units


def test_a_torn_line_counts_as_not_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([("a", {"value": 1}, False), ("b", {"value": 2}, False)])
    path = tmp_path / "000000.jsonl.open"
    os.truncate(path, path.stat().st_size - 5)
    reopened = Journal(tmp_path)
    assert reopened.finished("a") and not reopened.finished("b")
    reopened.append([("b", {"value": 3}, False)])
    assert [r["value"] for r in Journal(tmp_path).records()] == [1, 3]


def test_a_changed_byte_of_a_line_is_refused_with_its_number(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for number in range(3):
        journal.append([(f"u{number}", {"reward": 0.5}, False)])
    path = tmp_path / "000000.jsonl.open"
    whole = path.read_bytes()
    start, end = whole.index(b"\n") + 1, whole.rindex(b"\n", 0, -1)
    for place in range(start, end):  # the second line
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(BadInput, match=r"line 2, is not a line of a journal .*\. Delete that line"):
            Journal(tmp_path)
        with pytest.raises(BadInput, match="line 2, "):
            list(read_units(tmp_path))


@pytest.mark.parametrize("line", [b"3", b'{"unit":"a"}', b"\xff"])
def test_a_line_without_a_check_value_is_refused_with_its_number(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "000000.jsonl.open").write_bytes(store.checked(b'{"unit":"a"}') + b"\n" + line + b"\n")
    with pytest.raises(BadInput, match=r"000000\.jsonl\.open, line 2, is not a line of a journal"):
        Journal(tmp_path)


def test_an_open_file_whose_sealed_twin_exists_is_not_read_twice(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([("a", {"value": 1}, False)])
    opened = (tmp_path / "000000.jsonl.open").read_bytes()
    journal.seal()
    (tmp_path / "000000.jsonl.open").write_bytes(opened)
    assert [r["value"] for r in Journal(tmp_path).records()] == [1]


def filled(folder: Path, order: list[int], shard_size: int = 3) -> Journal:
    journal = Journal(folder, shard_size=shard_size)
    for i in order:
        journal.append([(f"u{i}", {"value": i}, i == 5)])
    return journal


ORDER = [3, 1, 4, 0, 5, 2, 6]


@pytest.mark.parametrize("asked", [ORDER, [0, 1, 2, 3, 4, 5, 6], [6, 0], [2, 2], []])
def test_units_are_read_in_the_order_in_which_they_are_asked_for(tmp_path: Path, asked: list[int]) -> None:
    names = [f"u{i}" for i in asked] + ["absent"]
    written = filled(tmp_path, ORDER)
    for journal in (written, Journal(tmp_path, shard_size=3)):
        assert [record["value"] for record in journal.read(names)] == asked
        assert [record["value"] for record in journal.records()] == ORDER
        assert [(journal.get(f"u{i}") or {})["value"] for i in asked] == asked
        assert journal.get("absent") is None and len(journal) == 7
        assert not journal.finished("u5") and journal.finished("u6")
    assert {path.suffix for path in tmp_path.iterdir()} == {".gz", ".open"}  # what was spooled is gone


def test_reading_goes_on_while_units_are_appended(tmp_path: Path) -> None:
    journal = filled(tmp_path, ORDER)
    records = journal.records()
    first = next(records)["value"]
    for i in range(7, 12):
        journal.append([(f"u{i}", {"value": i}, False)])
    assert [first, *(record["value"] for record in records)] == ORDER


def test_a_retried_unit_keeps_its_place(tmp_path: Path) -> None:
    journal = filled(tmp_path, ORDER)
    journal.append([("u5", {"value": 50}, False)])
    for one in (journal, Journal(tmp_path, shard_size=3)):
        assert [record["value"] for record in one.records()] == [3, 1, 4, 0, 50, 2, 6]
        assert one.finished("u5")


def test_what_is_there_is_looked_at_once(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    filled(tmp_path, ORDER)
    Journal(tmp_path, shard_size=3, look=seen.append)
    assert [record["value"] for record in seen] == ORDER


def test_an_open_file_is_bounded_in_bytes(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for i in range(3):
        journal.append([(f"u{i}", {"value": "x" * (SHARD_BYTES // 2)}, False)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000000.jsonl.gz", "000001.jsonl.open"]
