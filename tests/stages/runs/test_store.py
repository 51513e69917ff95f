"""Sealed files are whole or absent, equal rows give equal bytes, damage is named with file and line."""

import gzip
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.errors import BadInput, UsageError
from stages.runs import store
from stages.runs.records import PAIR, TASK, Kind
from stages.runs.store import Journal

ROWS = [
    {"task_id": f"t{i}", "env": "e", "split": "train", "family": "f", "prompt": "p", "data_json": "{}"}
    for i in range(3)
]


def test_equal_lines_give_equal_bytes(tmp_path: Path) -> None:
    for name in "ab":
        store.seal_lines(tmp_path / f"{name}.jsonl.gz", [b'{"x":1}', b'{"x":2}'])
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()
    assert list(store.read_lines(tmp_path / "a.jsonl.gz")) == [{"x": 1}, {"x": 2}]


def test_truncated_gzip_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    store.seal_lines(path, [b'{"x":"%d"}' % i for i in range(5000)])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BadInput, match=r"a\.jsonl\.gz is damaged after line"):
        list(store.read_lines(path))


def test_malformed_line_is_named_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"x":1}\n{"x":\n'))
    with pytest.raises(BadInput, match="line 2, is not valid JSON"):
        list(store.read_lines(path))


def test_table_round_trip_and_kind(tmp_path: Path) -> None:
    entry = store.write_table(tmp_path / "tasks.parquet", TASK, ROWS)
    assert entry["rows"] == 3 and entry["kind"] == "task/1"
    assert store.read_table(tmp_path / "tasks.parquet", TASK) == ROWS
    assert pq.read_schema(tmp_path / "tasks.parquet").equals(TASK.schema)


def test_an_all_null_column_keeps_its_type(tmp_path: Path) -> None:
    store.write_table(tmp_path / "t.parquet", TASK, [{**ROWS[0], "prompt": None}])
    assert pq.read_schema(tmp_path / "t.parquet").field("prompt").type == pa.string()


def test_another_kind_is_refused(tmp_path: Path) -> None:
    store.write_table(tmp_path / "tasks.parquet", TASK, ROWS)
    with pytest.raises(BadInput, match="holds task/1 records, but pair/3 is needed"):
        store.read_table(tmp_path / "tasks.parquet", PAIR)


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    store.write_table(tmp_path / "tasks.parquet", Kind("task", 7, TASK.columns), ROWS)
    with pytest.raises(BadInput, match="task/7, written by a newer Composer"):
        store.read_table(tmp_path / "tasks.parquet", TASK)


def test_foreign_parquet_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1]}), tmp_path / "x.parquet")
    with pytest.raises(BadInput, match="not written by Composer"):
        store.read_table(tmp_path / "x.parquet", TASK)


def test_rows_must_fit_their_kind(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"missing \['prompt'\], unknown \['promt'\]"):
        store.write_table(
            tmp_path / "t.parquet", TASK, [{**{k: v for k, v in ROWS[0].items() if k != "prompt"}, "promt": ""}]
        )


def test_wall_columns_do_not_enter_the_content(tmp_path: Path) -> None:
    kind = Kind("task", 1, {**TASK.columns, "wall_s": pa.float64()}, frozenset({"wall_s"}))
    entries = [store.write_table(tmp_path / f"{s}.parquet", kind, [{**ROWS[0], "wall_s": s}]) for s in (1.0, 2.0)]
    assert entries[0]["content_sha256"] == entries[1]["content_sha256"]
    assert entries[0]["sha256"] != entries[1]["sha256"]


def test_journal_keeps_what_was_appended(tmp_path: Path) -> None:
    journal = Journal(tmp_path, shard_size=2)
    for i in range(5):
        journal.append([(f"u{i}", {"value": i}, False)])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000000.jsonl.gz", "000001.jsonl.gz", "000002.jsonl.open"]
    assert [r["value"] for r in Journal(tmp_path, shard_size=2).records()] == [0, 1, 2, 3, 4]


def test_a_torn_line_counts_as_not_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([("a", {"value": 1}, False), ("b", {"value": 2}, False)])
    path = tmp_path / "000000.jsonl.open"
    os.truncate(path, path.stat().st_size - 5)
    reopened = Journal(tmp_path)
    assert reopened.finished("a") and not reopened.finished("b")
    reopened.append([("b", {"value": 3}, False)])
    assert [r["value"] for r in Journal(tmp_path).records()] == [1, 3]


def test_a_retried_unit_counts_with_its_last_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([("a", {"value": 0}, True)])
    assert not journal.finished("a")
    journal.append([("a", {"value": 1}, False)])
    assert journal.finished("a") and [r["value"] for r in Journal(tmp_path).records()] == [1]


def test_an_open_file_whose_sealed_twin_exists_is_not_read_twice(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([("a", {"value": 1}, False)])
    opened = (tmp_path / "000000.jsonl.open").read_bytes()
    journal.seal()
    (tmp_path / "000000.jsonl.open").write_bytes(opened)
    assert [r["value"] for r in Journal(tmp_path).records()] == [1]


def test_a_failed_append_leaves_no_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "a.open"
    store.append_lines(path, [b"whole"])
    import resource
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            store.append_lines(path, [b"x" * 100])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == b"whole\n"
