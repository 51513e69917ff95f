"""What imports lost or counted twice: text that is no UTF-8, ids in file names, reports next door, copies, own runs."""

import json
import shutil
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from needs import REAL, needs
from support.foreign import INSTANCE, PATCH, document, jsonl

from stages import export
from stages.errors import BadInput
from stages.import_traces import Config
from stages.runs import runner
from stages.runs.kinds import ORIGIN, ROLLOUT
from stages.runs.run import Run

LONG = "I read the file, find the comparison that is the wrong way round, and turn it. " * 3


def imported(root: Path, *paths: Path, **more: object) -> Run:
    config = Config(paths=[str(path) for path in paths], **more)
    return Run(runner.execute("import", {}, config, root=root / "artifacts").path)


def chat(answer: str, **more: object) -> dict[str, object]:
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]
    return {"instance_id": INSTANCE, "messages": said, "resolved": True, **more}


@pytest.mark.parametrize("nested", [False, True])
def test_text_that_is_no_utf8_loses_its_row_alone(tmp_path: Path, nested: bool) -> None:
    """Arrow does not check text when it reads a file, so that one bad string shows in the middle of an import."""
    number = 2500  # more than one batch
    answers = [f"{LONG}{at}".encode() for at in range(number)]
    answers[1300] = b"not \xff\xfe text"
    offsets = pa.py_buffer(
        pa.array([0, *[sum(map(len, answers[: at + 1])) for at in range(number)]], pa.int32()).buffers()[1]
    )
    texts = pa.Array.from_buffers(pa.string(), number, [None, offsets, pa.py_buffer(b"".join(answers))])
    roles = pa.array(["assistant"] * number)
    message = pa.StructArray.from_arrays([roles, texts], ["role", "content"])
    lists = pa.ListArray.from_arrays(pa.array(range(number + 1), pa.int32()), message)
    plain = {"prompt": pa.array([f"q{at}" for at in range(number)]), "reward": pa.array([1.0] * number)}
    table = pa.table({**plain, "completion": lists if nested else texts})
    pq.write_table(table, tmp_path / "rows.parquet")
    run = imported(tmp_path, tmp_path / "rows.parquet")
    assert len(run.rows(ROLLOUT)) == number - 1
    (drop,) = json.loads((run.path / "drops.json").read_text())
    assert drop["reason"] == "not_utf8" and drop["line"] == 1301 and drop["file"].endswith("rows.parquet")


@pytest.mark.parametrize("given", ["", "preds", "preds/all_preds.jsonl"])
def test_a_report_of_sb_cli_next_door_judges(tmp_path: Path, given: str) -> None:
    lines = [{"instance_id": f"owner__repo-{at}", "model_name_or_path": "m", "model_patch": PATCH} for at in range(3)]
    jsonl(tmp_path / "in" / "preds" / "all_preds.jsonl", *lines)
    report = {"resolved_ids": ["owner__repo-1"], "unresolved_ids": ["owner__repo-0", "owner__repo-2"]}
    document(tmp_path / "in" / "sb-cli-reports" / "swe-bench_lite__test__mine.json", report)
    found = {row["task_id"]: row["reward"] for row in imported(tmp_path, tmp_path / "in" / given).rows(ROLLOUT)}
    assert found == {"owner__repo-0": 0.0, "owner__repo-1": 1.0, "owner__repo-2": 0.0}


def test_a_repeated_line_counts_once(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", chat(LONG), chat(LONG), chat(LONG + "x"), chat(LONG))
    run = imported(tmp_path, tmp_path / "a.jsonl")
    assert len(run.rows(ROLLOUT)) == 2 and run.manifest.counts["dropped_duplicate"] == 2
    assert "it copies" in (run.path / "report.txt").read_text()


def test_a_copied_file_counts_once_whatever_it_is_called(tmp_path: Path) -> None:
    jsonl(tmp_path / "in" / "a.jsonl", chat("yes"), chat("no"))
    (tmp_path / "in" / "backup").mkdir()
    shutil.copy(tmp_path / "in" / "a.jsonl", tmp_path / "in" / "backup" / "other.jsonl")
    run = imported(tmp_path, tmp_path / "in")
    assert len(run.rows(ROLLOUT)) == 2 and run.manifest.counts["dropped_duplicate"] == 2


def test_short_answers_that_are_alike_are_samples(tmp_path: Path) -> None:
    """Independent samples of a short answer are often the same word; times tell long ones apart."""
    jsonl(tmp_path / "a.jsonl", chat("yes"), chat("yes"), chat("no"))
    run = imported(tmp_path, tmp_path / "a.jsonl")
    assert len(run.rows(ROLLOUT)) == 3
    assert "own: 1 rollout, short and alike in every word with another" in (run.path / "report.txt").read_text()


def test_equal_patches_of_two_samples_are_two_and_a_repeated_prediction_is_one(tmp_path: Path) -> None:
    line = {"instance_id": INSTANCE, "model_name_or_path": "m", "model_patch": PATCH + LONG}
    other = {**line, "instance_id": "owner__repo-13"}
    jsonl(tmp_path / "in" / "m" / "all_preds.jsonl", line, other)
    jsonl(tmp_path / "in" / "m.2" / "all_preds.jsonl", line)
    assert len(imported(tmp_path, tmp_path / "in").rows(ROLLOUT)) == 3
    jsonl(tmp_path / "twice.jsonl", line, line)
    assert len(imported(tmp_path, tmp_path / "twice.jsonl").rows(ROLLOUT)) == 1


def test_the_folder_of_an_own_export_is_imported_without_its_manifest(tmp_path: Path) -> None:
    jsonl(tmp_path / "in" / "a.jsonl", chat(LONG), chat(LONG + "x"))
    before = imported(tmp_path, tmp_path / "in")
    config = export.Config(format="verifiers")
    written = runner.execute("export", {"rollouts": before}, config, root=tmp_path / "artifacts").path
    for place in (written, written.parent):
        again = imported(tmp_path, place)
        assert len(again.rows(ROLLOUT)) == 2 and again.manifest.summary["dropped"] == {}
        assert again.manifest.summary["files"] == 1
    with pytest.raises(BadInput, match="neither a file nor a folder with files to import"):
        imported(tmp_path, before.path)


def test_a_reward_without_a_completion_is_kept_and_explained(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{at}", "completion": "" if at else LONG, "reward": float(at > 1)} for at in range(4)]
    jsonl(tmp_path / "results.jsonl", *rows)
    run = imported(tmp_path, tmp_path / "results.jsonl")
    assert [row["reward"] for row in run.rows(ROLLOUT)] == [0.0, None, None, None]
    kept = [json.loads(row["extra_json"]).get("recorded_reward") for row in run.rows(ORIGIN)]
    assert kept == [None, 0.0, 1.0, 1.0]
    said = (run.path / "report.txt").read_text()
    assert "3 rollouts have a reward and no completion (1 of 0, 2 of 1)" in said and "recorded_reward" in said


@needs("real")
def test_real_verifiers_rows_without_a_completion_are_explained(tmp_path: Path) -> None:
    said = (imported(tmp_path, REAL / "trajectories" / "verifiers").path / "report.txt").read_text()
    assert "150 rollouts have a reward and no completion (150 of 0)" in said


def archive(path: Path, samples: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("header.json", json.dumps({"eval": {"model": "m", "task": "t"}, "version": 2}))
        for name, sample in samples.items():
            file.writestr(f"samples/{name}.json", sample)
    return path


@pytest.mark.parametrize("damage", ["nested", "encrypted", "unknown compression"])
def test_a_bad_sample_of_an_archive_is_lost_alone(tmp_path: Path, damage: str) -> None:
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": LONG}]
    whole = json.dumps({"id": "one", "epoch": 1, "messages": said, "scores": {}}).encode()
    path = archive(tmp_path / "log.eval", {"a": whole, "b": b"[" * 100_000 if damage == "nested" else whole + b" "})
    data = bytearray(path.read_bytes())
    for magic, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # of the local headers and of the directory
        at = data.rfind(b"samples/b.json") if magic == b"PK\x01\x02" else data.find(b"samples/b.json")
        start = data.rfind(magic, 0, at)
        data[start + flags] |= damage == "encrypted"
        data[start + flags + 2] = 77 if damage == "unknown compression" else data[start + flags + 2]
    path.write_bytes(data)
    run = imported(tmp_path, path)
    assert len(run.rows(ROLLOUT)) == 1
    (drop,) = json.loads((run.path / "drops.json").read_text())
    assert drop["reason"] == "damaged_record" and "samples/b.json" in drop["detail"]


@pytest.mark.parametrize("depth", [200, 300, 900, 100_000])
@pytest.mark.parametrize("where", ["message", "extra"])
def test_a_record_that_is_nested_too_deeply_is_lost_alone(tmp_path: Path, depth: int, where: str) -> None:
    deep = "[" * depth + "]" * depth
    text = json.dumps(chat(LONG + "deep", DEEP="DEEP") if where == "extra" else chat("DEEP"))
    text = text.replace('"DEEP": "DEEP"', f'"info": {deep}') if where == "extra" else text.replace('"DEEP"', deep)
    (tmp_path / "a.jsonl").write_text(json.dumps(chat(LONG)) + "\n" + text + "\n")
    run = imported(tmp_path, tmp_path / "a.jsonl")
    assert 1 <= len(run.rows(ROLLOUT)) <= 2
    assert len(run.rows(ROLLOUT)) + len(json.loads((run.path / "drops.json").read_text())) == 2
