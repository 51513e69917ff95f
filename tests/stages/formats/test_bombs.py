"""Small files that unpack to much: refused at a stated limit, or read piece by piece, in bounded memory."""

import gzip
import json
import resource
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.foreign import read

MB = 2**20
MEASURE = """
import json, resource, sys
from support.foreign import read
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
from pathlib import Path
found, drops, _ = read(Path(sys.argv[1]))
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([len(found), [drop.reason for drop in drops], (after - before) // 1024]))
"""


def record(megabytes: int, text: bytes = b"a") -> Iterator[bytes]:
    """One row of chat messages with an answer of so many megabytes."""
    yield b'{"instance_id":"o__r-1","messages":[{"role":"user","content":"q"},{"role":"assistant","content":"'
    yield from [text * MB] * megabytes
    yield b'"}],"resolved":true}'


def packed(path: Path, *parts: bytes) -> Path:
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.writelines(parts)
    return path


def archive(path: Path, megabytes: int) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        file.writestr("header.json", '{"version":2,"eval":{"model":"m","task":"t"}}')
        with file.open("samples/1_epoch_1.json", "w") as member:
            member.write(b'{"id":1,"epoch":1,"messages":[{"role":"assistant","content":"')
            for _ in range(megabytes):
                member.write(b"a" * MB)
            member.write(b'"}]}')
    return path


def measured(path: Path) -> tuple[int, list[str], int]:
    """Rollouts, reasons of drops, and the peak memory of reading a file in MB, in a process of its own."""
    where = str(Path(__file__).resolve().parents[2])
    code = f"import sys; sys.path[:0] = [{where!r}, {str(Path(where).parent)!r}]\n{MEASURE}"
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found, reasons, peak = json.loads(done.stdout)
    return found, reasons, peak


@pytest.mark.slow
def test_a_long_line_is_dropped_with_the_limit_and_the_lines_after_it_are_read(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.jsonl.gz", *record(0), b"\n", *record(100), b"\n", *record(0, b"b"), b"\n")
    found, reasons, peak = measured(path)
    assert (found, reasons) == (2, ["too_large"]) and peak < 400
    _, drops, _ = read(path)
    assert drops[0].line == 2 and "a record may have 64 MiB" in drops[0].detail


@pytest.mark.slow
def test_a_large_document_is_dropped_with_the_limit(tmp_path: Path) -> None:
    lines = b'{"a":[' + b"0," * 50 + b"0]},\n"
    path = packed(tmp_path / "a.json.gz", b"[\n", *[lines * 10_000] * 100, b"{}]\n")
    found, reasons, peak = measured(path)
    assert (found, reasons) == (0, ["too_large"]) and peak < 400


def test_a_large_sample_of_an_archive_is_dropped_unread(tmp_path: Path) -> None:
    found, reasons, peak = measured(archive(tmp_path / "log.eval", 100))
    assert (found, reasons) == (0, ["damaged_record"]) and peak < 100


def test_a_long_value_that_all_rows_share_is_read_a_few_rows_at_a_time(tmp_path: Path) -> None:
    """Parquet stores it once: 400 rows of a megabyte are a file of some kilobytes."""
    rows = {"prompt": [f"q{at}" for at in range(400)], "completion": ["a" * MB] * 400, "reward": [1.0] * 400}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    assert (tmp_path / "rows.parquet").stat().st_size < MB
    numbers = [number for number, _ in only(tmp_path / "rows.parquet")]
    assert numbers == list(range(1, 401))


def only(path: Path) -> Iterator[tuple[int, object]]:
    from stages.formats import files

    (source,) = files.find([str(path)])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for item in source.records():
        assert isinstance(item, tuple)
        yield item
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024 < 500


@pytest.mark.parametrize("broken", [b"no json\n", b"\n"])
def test_json_lines_with_a_broken_first_line_are_still_read(tmp_path: Path, broken: bytes) -> None:
    path = packed(tmp_path / "a.jsonl.gz", broken, *record(0), b"\n", *record(0, b"b"), b"\n")
    found, drops, _ = read(path)
    assert len(found) == 2 and [drop.reason for drop in drops] == ["not_json"] * bool(broken.strip())


@pytest.mark.parametrize("name", ["_" * 20_000, "a__" * 20_000, "a__b-1x" * 3_000, "-1" * 10_000])
def test_a_long_id_is_read_in_time(tmp_path: Path, name: str) -> None:
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"instance_id": name, "messages": said, "resolved": True}) + "\n")
    began = time.process_time()
    assert len(read(tmp_path / "a.jsonl")[0]) == 1
    assert time.process_time() - began < 2
