"""Tables are of one kind, equal rows give equal bytes and digests, and a table is never all in memory."""

import io
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from composer_stages.errors import BadInput, UsageError
from composer_stages.runs import store, tables
from composer_stages.runs.kinds import PAIR, TASK, Kind, Row

ROWS = [
    {"task_id": f"t{i}", "env": "e", "split": "train", "family": "f", "prompt": "p", "data_json": "{}"}
    for i in range(3)
]


def read(path: Path, kind: Kind) -> list[Row]:
    return list(tables.scan_table(path, kind).rows())


def test_table_round_trip_and_kind(tmp_path: Path) -> None:
    entry = tables.write_table(tmp_path / "tasks.parquet", TASK, ROWS)
    assert entry["rows"] == 3 and entry["kind"] == "task/1"
    assert read(tmp_path / "tasks.parquet", TASK) == ROWS
    assert pq.read_schema(tmp_path / "tasks.parquet").equals(TASK.schema)


def test_tables_of_another_kind_of_a_newer_version_and_of_others_are_refused(tmp_path: Path) -> None:
    tables.write_table(tmp_path / "pairs", PAIR, [])
    tables.write_table(tmp_path / "newer", Kind("task", 7, TASK.columns), ROWS)
    pq.write_table(pa.table({"x": [1]}), tmp_path / "foreign")
    for name, words in (
        ("pairs", "holds pair/1 records, but task/1 is needed"),
        ("newer", "task/7, written by a newer Composer"),
        ("foreign", "not written by Composer"),
    ):
        with pytest.raises(BadInput, match=words):
            read(tmp_path / name, TASK)


def test_rows_must_fit_their_kind(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"missing \['prompt'\], unknown \['promt'\]"):
        tables.write_table(
            tmp_path / "t.parquet", TASK, [{**{k: v for k, v in ROWS[0].items() if k != "prompt"}, "promt": ""}]
        )


def test_wall_columns_do_not_enter_the_content(tmp_path: Path) -> None:
    kind = Kind("task", 1, {**TASK.columns, "wall_s": "float"}, frozenset({"wall_s"}))
    entries = [tables.write_table(tmp_path / f"{s}.parquet", kind, [{**ROWS[0], "wall_s": s}]) for s in (1.0, 2.0)]
    assert entries[0]["content_sha256"] == entries[1]["content_sha256"]
    assert entries[0]["sha256"] != entries[1]["sha256"]


def task(number: int, prompt: str = "p") -> dict[str, Any]:
    return {**ROWS[0], "task_id": f"t{number}", "prompt": prompt}


@pytest.mark.parametrize("number", [0, 1, 8191, 8192, pytest.param(20_000, marks=pytest.mark.slow)])
def test_rows_that_come_one_by_one_give_the_bytes_and_the_digest_of_a_whole_table(tmp_path: Path, number: int) -> None:
    rows = [task(i) for i in range(number)]
    sink = io.BytesIO()
    whole = pa.Table.from_pylist(rows, schema=TASK.schema)
    pq.write_table(whole, sink, compression="zstd", row_group_size=8192)
    for name, given in (("list", rows), ("iterator", iter(rows)), ("batches", iter(whole.to_batches(1000)))):
        entry = tables.write_table(tmp_path / name, TASK, given)
        assert (tmp_path / name).read_bytes() == sink.getvalue()
        assert entry["content_sha256"] == store.digest(rows) and entry["rows"] == number


def test_row_groups_are_bounded_in_bytes(tmp_path: Path) -> None:
    tables.write_table(tmp_path / "t", TASK, (task(i, chr(65 + i) * 10_000_000) for i in range(4)))
    metadata = pq.read_metadata(tmp_path / "t")
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [3, 1]
    assert [row["task_id"] for row in tables.scan_table(tmp_path / "t", TASK).rows()] == [f"t{i}" for i in range(4)]


def test_nothing_is_there_where_a_row_cannot_be_had(tmp_path: Path) -> None:
    def rows() -> Iterator[Row]:
        yield task(0)
        raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        tables.write_table(tmp_path / "t", TASK, rows())
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    tables.write_table(tmp_path / "t", TASK, (task(i, str(i) * 50) for i in range(20_000)))
    data = bytearray((tmp_path / "t").read_bytes())
    data[1000:60_000] = bytes(59_000)
    (tmp_path / "t").write_bytes(data)
    with pytest.raises(BadInput, match="cannot be read as Parquet"):
        read(tmp_path / "t", TASK)


def test_what_was_read_is_let_go(tmp_path: Path) -> None:
    """Text that does not pack: a reader that keeps the bytes of the file it went through grows by all of them."""
    noise = random.Random(0)
    tables.write_table(tmp_path / "t", TASK, (task(i, noise.randbytes(300).hex()) for i in range(65_000)))
    packed, before = (tmp_path / "t").stat().st_size, pa.total_allocated_bytes()
    held = [pa.total_allocated_bytes() - before for _ in tables.scan_table(tmp_path / "t", TASK).batches()]
    assert max(held) < packed / 2


PROGRAM = """
import resource, sys
from pathlib import Path
from composer_stages.runs import tables
from composer_stages.runs.kinds import TASK
rows = lambda: ({name: str(i) * 400 for name in TASK.columns} for i in range(int(sys.argv[2])))
tables.write_table(Path(sys.argv[1]), TASK, rows())
assert sum(1 for _ in tables.scan_table(Path(sys.argv[1]), TASK).rows()) == int(sys.argv[2])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_table(tmp_path: Path) -> None:
    def peak(rows: int) -> int:
        words = [sys.executable, "-c", PROGRAM, str(tmp_path / "t"), str(rows)]
        return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)

    small, large = peak(6_000), peak(60_000)  # some 60 and 700 MB of text
    assert large < small + 100_000


def test_a_column_that_there_is_not_is_refused_by_name(tmp_path: Path) -> None:
    tables.write_table(tmp_path / "tasks.parquet", TASK, ROWS)
    scan = tables.scan_table(tmp_path / "tasks.parquet", TASK)
    assert scan.arrow(["family", "task_id"]).column_names == ["family", "task_id"]
    for read_columns in (scan.arrow, scan.pandas):
        with pytest.raises(UsageError, match="tasks has no column 'task'; it has task_id, env, "):
            read_columns(["task", "family"])
