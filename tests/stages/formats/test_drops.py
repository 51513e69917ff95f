"""What an import loses, counts once, or refuses to unpack, and how it says so."""

import gzip
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.transcripts import INSTANCE, PATCH, assistant, document, imported, jsonl, prediction, read, submitted, user

from composer_stages import export
from composer_stages.errors import BadInput
from composer_stages.formats import files, importing, readers
from composer_stages.formats.reading import FileCount
from composer_stages.formats.reports import Sidecars
from composer_stages.runs import runner
from composer_stages.runs.kinds import ORIGIN, ROLLOUT
from composer_stages.runs.run import Manifest, Run, RunWriter

LONG = "I read the file, find the comparison that is the wrong way round, and turn it. " * 3


def chat(answer: str, **more: object) -> dict[str, object]:
    return {"instance_id": INSTANCE, "messages": [user("q"), assistant(answer)], "resolved": True, **more}


def drops_of(run: Run) -> list[dict[str, Any]]:
    return json.loads((run.path / "drops.json").read_text())


@pytest.mark.parametrize("nested", [False, True])
def test_invalid_utf8_drops_only_its_row(tmp_path: Path, nested: bool) -> None:
    """Arrow does not check text when it reads a file, so that one bad string shows in the middle of an import."""
    number = 30
    answers = [f"{LONG}{at}".encode() for at in range(number)]
    answers[13] = b"not \xff\xfe text"
    ends = [0, *accumulate(map(len, answers))]
    buffers = [None, pa.array(ends, pa.int32()).buffers()[1], pa.py_buffer(b"".join(answers))]
    texts = pa.Array.from_buffers(pa.string(), number, buffers)
    message = pa.StructArray.from_arrays([pa.array(["assistant"] * number), texts], ["role", "content"])
    lists = pa.ListArray.from_arrays(pa.array(range(number + 1), pa.int32()), message)
    plain = {"prompt": pa.array([f"q{at}" for at in range(number)]), "reward": pa.array([1.0] * number)}
    table = pa.table({**plain, "completion": lists if nested else texts})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=8)  # several batches
    run = imported(tmp_path, tmp_path / "rows.parquet")
    assert len(run.rows(ROLLOUT)) == number - 1
    (drop,) = drops_of(run)
    assert drop["reason"] == "not_utf8" and drop["line"] == 14 and drop["file"].endswith("rows.parquet")


def test_a_copied_file_and_a_repeated_line_count_once(tmp_path: Path) -> None:
    jsonl(tmp_path / "in" / "a.jsonl", chat(LONG), chat(LONG), chat(LONG + "x"), chat(LONG))
    (tmp_path / "in" / "backup").mkdir()
    shutil.copy(tmp_path / "in" / "a.jsonl", tmp_path / "in" / "backup" / "other.jsonl")
    run = imported(tmp_path, tmp_path / "in")
    assert len(run.rows(ROLLOUT)) == 2 and run.manifest.counts["dropped_duplicate"] == 6
    assert "it copies" in (run.path / "report.txt").read_text()


def test_equal_short_answers_are_separate_samples(tmp_path: Path) -> None:
    """Independent samples of a short answer are often the same word; times tell long ones apart."""
    jsonl(tmp_path / "a.jsonl", chat("yes"), chat("yes"), chat("no"))
    run = imported(tmp_path, tmp_path / "a.jsonl")
    assert len(run.rows(ROLLOUT)) == 3
    assert "own: 1 rollout, short and alike in every word with another" in (run.path / "report.txt").read_text()


def test_equal_patches_count_twice_and_a_repeated_prediction_once(tmp_path: Path) -> None:
    line, second = (prediction(name, PATCH + LONG) for name in (INSTANCE, "owner__repo-13"))
    jsonl(tmp_path / "in" / "m" / "all_preds.jsonl", line, second)
    jsonl(tmp_path / "in" / "m.2" / "all_preds.jsonl", line)
    assert len(imported(tmp_path, tmp_path / "in").rows(ROLLOUT)) == 3
    jsonl(tmp_path / "twice.jsonl", line, line)
    assert len(imported(tmp_path, tmp_path / "twice.jsonl").rows(ROLLOUT)) == 1


def test_an_exported_folder_is_imported_without_its_manifest(tmp_path: Path) -> None:
    jsonl(tmp_path / "in" / "a.jsonl", chat(LONG), chat(LONG + "x"))
    before = imported(tmp_path, tmp_path / "in")
    config = export.Config(format="verifiers")
    written = runner.execute("export", {"rollouts": before}, config, root=tmp_path / "artifacts").path
    for path in (written, written.parent):
        again = imported(tmp_path, path)
        assert len(again.rows(ROLLOUT)) == 2 and again.manifest.summary["dropped"] == {}
        assert again.manifest.summary["files"] == 1
    with pytest.raises(BadInput, match="holds no files of these kinds"):
        imported(tmp_path, before.path)


def test_a_reward_without_a_completion_is_kept_and_explained(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{at}", "completion": "" if at else LONG, "reward": float(at > 1)} for at in range(4)]
    jsonl(tmp_path / "results.jsonl", *rows)
    run = imported(tmp_path, tmp_path / "results.jsonl")
    assert [row["reward"] for row in run.rows(ROLLOUT)] == [0.0, None, None, None]
    values = [json.loads(row["extra_json"]).get("recorded_reward") for row in run.rows(ORIGIN)]
    assert values == [None, 0.0, 1.0, 1.0]
    text = (run.path / "report.txt").read_text()
    assert "3 rollouts have a reward and no completion (1 of 0, 2 of 1)" in text and "recorded_reward" in text


def archive(path: Path, *samples: bytes | Iterable[bytes]) -> Path:
    """An Inspect log with samples a, b, ...; one as pieces is written piece by piece."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        file.writestr("header.json", json.dumps({"eval": {"model": "m", "task": "t"}, "version": 2}))
        for name, sample in zip("abc", samples, strict=False):
            with file.open(f"samples/{name}.json", "w") as member:
                member.writelines([sample] if isinstance(sample, bytes) else sample)
    return path


@pytest.mark.parametrize("damage", ["nested", "encrypted", "unknown compression"])
def test_a_damaged_sample_of_an_archive_is_dropped_alone(tmp_path: Path, damage: str) -> None:
    complete = json.dumps({"id": "one", "epoch": 1, "messages": [user("q"), assistant(LONG)], "scores": {}}).encode()
    path = archive(tmp_path / "log.eval", complete, b"[" * 100_000 if damage == "nested" else complete + b" ")
    data = bytearray(path.read_bytes())
    # Bytes of flags and of the method of compression, in the local header and in the directory.
    first, last = data.find(b"samples/b.json"), data.rfind(b"samples/b.json")
    for magic, name, flags in ((b"PK\x03\x04", first, 6), (b"PK\x01\x02", last, 8)):
        start = data.rfind(magic, 0, name)
        data[start + flags] |= damage == "encrypted"
        data[start + flags + 2] = 77 if damage == "unknown compression" else data[start + flags + 2]
    path.write_bytes(data)
    run = imported(tmp_path, path)
    assert len(run.rows(ROLLOUT)) == 1
    (drop,) = drops_of(run)
    assert drop["reason"] == "damaged_record" and "samples/b.json" in drop["detail"]


@pytest.mark.parametrize("depth", [200, 300, 100_000])
@pytest.mark.parametrize("where", ["message", "extra"])
def test_a_record_that_is_nested_too_deeply_is_dropped_alone(tmp_path: Path, depth: int, where: str) -> None:
    deep = "[" * depth + "]" * depth
    text = json.dumps(chat(LONG + "deep", info="DEEP") if where == "extra" else chat("DEEP")).replace('"DEEP"', deep)
    run = imported(tmp_path, jsonl(tmp_path / "a.jsonl", chat(LONG), text))
    assert 1 <= len(run.rows(ROLLOUT)) <= 2 and len(run.rows(ROLLOUT)) + len(drops_of(run)) == 2


# What several files hold counts once; what only resembles it counts as often as it is there.

IDS = ["a__b-1", "a__b-2"]


def sources(run: Run) -> list[str]:
    return sorted(row["source"] for row in run.rows(ROLLOUT))


def test_predictions_beside_their_trajectories_count_once(tmp_path: Path) -> None:
    for instance in IDS:
        submitted(tmp_path / "in" / "trajs", instance, PATCH + "\n", instance=instance)
    jsonl(tmp_path / "in" / "all_preds.jsonl", *map(prediction, IDS))
    run = imported(tmp_path, tmp_path / "in")
    assert sources(run) == ["mini-swe-agent"] * 2 and run.manifest.counts["dropped_duplicate"] == 2
    assert run.manifest.counts["traces"] == 4


@pytest.mark.parametrize("rows", [[prediction(i) for i in IDS], [chat(LONG + i, instance_id=i) for i in IDS]])
def test_json_beside_jsonl_counts_once(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    jsonl(tmp_path / "in" / "preds.jsonl", *rows)
    by_id = {row["instance_id"]: row for row in rows}
    document(tmp_path / "in" / "preds.json", by_id if "model_patch" in rows[0] else rows)
    assert len(imported(tmp_path, tmp_path / "in").rows(ROLLOUT)) == 2


def test_other_models_patches_and_runs_are_no_duplicates(tmp_path: Path) -> None:
    submitted(tmp_path / "in" / "trajs", IDS[0], PATCH, instance=IDS[0])
    jsonl(tmp_path / "in" / "other.jsonl", prediction(IDS[0], "another patch", "n"))
    jsonl(tmp_path / "in" / "elsewhere" / "all_preds.jsonl", prediction(IDS[0]))
    jsonl(tmp_path / "in" / "again" / "all_preds.jsonl", prediction(IDS[0], PATCH, "n"))
    assert sources(imported(tmp_path, tmp_path / "in")) == ["mini-swe-agent", *["swebench-preds"] * 3]


@pytest.mark.slow
def test_workers_give_the_same_import_as_one_process(tmp_path: Path) -> None:
    """Samples of a task over several files, duplicates, secrets, damaged lines, reports, and a file of no format."""
    folder = tmp_path / "in"
    for instance in IDS:
        submitted(folder / "trajs", instance, PATCH + "\n", instance=instance)
        submitted(folder / "again", instance, "another patch", instance=instance)
    jsonl(folder / "all_preds.jsonl", *map(prediction, IDS), prediction("a__b-3", "password=hunter2hunter2"))
    document(folder / "m.run.json", {"resolved_ids": [IDS[0]], "unresolved_ids": [IDS[1]]})
    rows = [{"instance_id": i, "messages": [assistant(i * 3)], "resolved": True} for i in IDS]
    for name in ("one", "two"):
        jsonl(folder / name / "data.jsonl", *rows).open("a").write("{torn\n")
    document(folder / "two" / "odd.json", {"nobody": "knows"})
    in_process, in_workers = imported(tmp_path / "here", folder), imported(tmp_path / "there", folder, on="processes:2")
    assert in_workers.manifest.content == in_process.manifest.content
    assert in_workers.manifest.counts == in_process.manifest.counts
    assert in_workers.manifest.summary == in_process.manifest.summary
    assert in_workers.read_file("report.txt") == in_process.read_file("report.txt")
    assert in_process.manifest.counts["dropped_duplicate"] > 2 and in_process.manifest.summary["reports"]["judged"] > 1


def test_a_file_that_a_worker_did_not_finish_is_read_again(tmp_path: Path) -> None:
    path = submitted(tmp_path / "in", IDS[0], PATCH)
    (source,), (reader,) = files.find([str(path)]), readers("mini-swe-agent")
    record = Manifest(composer="", stage="import", stage_version=2, fingerprint="")
    out, count = RunWriter(tmp_path / "run", record, cache=tmp_path), FileCount(source.label, "", source.sha256)
    importing.read_into_journal(source, reader, Sidecars(), out)
    # Without a reader it would be dropped.
    remaining = list(importing.read_rollouts(source, None, Sidecars(), count, out))
    assert count.traces == count.records == 1 and isinstance(remaining[0], importing.ReadRollout)
    torn = RunWriter(tmp_path / "torn", record, cache=tmp_path)
    torn.write_all([(f"{importing.unit_of(source)}/1", {"drop": {}}, False)])
    assert list(importing.read_rollouts(source, reader, Sidecars(), FileCount("", "", ""), torn)) == remaining


# Small files that unpack to much are refused at a stated limit, or read piece by piece, in bounded memory.

MB = 2**20
MEASURE = """
import json, sys
from pathlib import Path
from composer_stages.formats import files
from support.transcripts import read

def peak():  # not ru_maxrss, which begins with the peak of the process that started this one
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

def taken(work):
    before = peak()
    return [*work(), (peak() - before) // 1024]

def imported():
    found, drops, _ = read(Path(sys.argv[1]))
    return len(found), [drop.reason for drop in drops]

def records():  # of a table, whose rows are made a few at a time
    (source,) = files.find(sys.argv[1:])
    return sum(1 for _ in source.records()), []

print(json.dumps(taken(records if sys.argv[1].endswith(".parquet") else imported)))
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


def measured(path: Path) -> tuple[int, list[str], int]:
    """Rollouts, reasons of drops, and the peak memory of reading a file in MB, in a process of its own."""
    where = os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parents[3])])
    words, env = [sys.executable, "-c", MEASURE, str(path)], {**os.environ, "PYTHONPATH": where}
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, env=env)
    assert done.returncode == 0, done.stderr
    counts, reasons, peak = json.loads(done.stdout)
    return counts, reasons, peak


def shared_value(path: Path, rows: int) -> Path:
    """Rows with the same megabyte, which Parquet stores once: a file of some kilobytes."""
    completions = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), ["a" * MB])
    prompts = pa.array([f"q{at}" for at in range(rows)])
    pq.write_table(pa.table({"prompt": prompts, "completion": completions, "reward": pa.array([1.0] * rows)}), path)
    assert path.stat().st_size < MB
    return path


SAMPLE = [b'{"id":1,"epoch":1,"messages":[{"role":"assistant","content":"', *[b"a" * MB] * 100, b'"}]}']
NUMBERS = [b"[\n", *[(b'{"a":[' + b"0," * 50 + b"0]},\n") * 10_000] * 100, b"{}]\n"]
LINES = [*record(0), b"\n", *record(100), b"\n", *record(0, b"b"), b"\n"]


@pytest.mark.parametrize(
    ("make", "expected", "most_mb"),
    [
        pytest.param(lambda to: packed(to / "a.jsonl.gz", *LINES), (2, ["too_large"]), 400, marks=pytest.mark.slow),
        pytest.param(lambda to: packed(to / "a.json.gz", *NUMBERS), (0, ["too_large"]), 400, marks=pytest.mark.slow),
        (lambda to: archive(to / "log.eval", SAMPLE), (0, ["damaged_record"]), 100),
        (lambda to: shared_value(to / "rows.parquet", 300), (300, []), 150),
    ],
    ids=["a line", "a document", "a sample of an archive", "a value that all rows share"],
)
def test_files_that_unpack_to_much_are_read_in_bounded_memory(
    tmp_path: Path, make: Callable[[Path], Path], expected: tuple[int, list[str]], most_mb: int
) -> None:
    """A document that is refused is not held in memory, and the lines after a refused line are read."""
    *counts, peak = measured(make(tmp_path))
    assert tuple(counts) == expected and peak < most_mb


@pytest.mark.parametrize("name", ["_" * 20_000, "a__" * 20_000, "a__b-1x" * 3_000, "-1" * 10_000])
def test_a_long_id_is_read_in_time(tmp_path: Path, name: str) -> None:
    path, began = jsonl(tmp_path / "a.jsonl", chat("a", instance_id=name)), time.process_time()
    assert len(read(path)[0]) == 1
    assert time.process_time() - began < 5
