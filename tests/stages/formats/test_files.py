"""Foreign files: found, read record by record, and kept as far as they are sound."""

import gzip
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest
from support.transcripts import assistant, document, jsonl, read, user

from composer_stages.errors import BadInput
from composer_stages.formats import files
from composer_stages.formats.base import Drop

GOOD = {"id": 0, "prompt": [user("q")], "completion": [assistant("a")], "reward": 1.0}
TORN = '{"id": 1, "prom'


def test_bad_and_foreign_lines_are_dropped_with_their_numbers(tmp_path: Path) -> None:
    """Also where the first line, by which the format could be told, is torn."""
    lines = [TORN, GOOD, "", TORN, {"something": "else"}, {**GOOD, "completion": 7}, GOOD, "[1, 2]", "null"]
    rollouts, drops, count = read(jsonl(tmp_path / "results.jsonl", *lines))
    assert len(rollouts) == 2 and count.records == 8
    assert [(d.line, d.reason) for d in drops] == [
        (1, "not_json"), (4, "not_json"), (5, "foreign_record"), (6, "malformed_record"), (8, "foreign_record"),
        (9, "not_json"),
    ]  # fmt: skip
    assert "column" in drops[1].detail and "something" in drops[2].detail
    assert all(d.file.endswith("results.jsonl") for d in drops)


def test_values_of_wrong_types_or_too_deep_drop_only_their_record(tmp_path: Path) -> None:
    deep: list[object] = []
    for _ in range(300):
        deep = [deep]
    changes = ({"reward": "high"}, {"stop_condition": 7}, {"prompt": [{"role": 1}]}, {"info": deep})
    odd = [{**GOOD, **change} for change in changes]
    rollouts, drops, _ = read(jsonl(tmp_path / "results.jsonl", GOOD, *odd, GOOD))
    reasons = [*["malformed_record"] * 3, "too_deep"]
    assert len(rollouts) == 2 and [(d.line, d.reason) for d in drops] == [*zip((2, 3, 4, 5), reasons, strict=True)]
    assert "reward is 'high'" in drops[0].detail and "deeper" in drops[3].detail


DEEP = "[" * 20_000 + "]" * 20_000
CALL = {**assistant("a"), "tool_calls": [DEEP]}
SAMPLE = f'{{"id": 1, "epoch": 1, "messages": [], "x": {DEEP}}}'


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda to: jsonl(to / "a.jsonl", GOOD, f'{{"info": {DEEP}}}'), "too_deep"),
        (lambda to: jsonl(to / "a.jsonl.gz", GOOD, f'{{"info": {DEEP}}}'), "too_deep"),
        (lambda to: jsonl(to / "a.json", f'{{"version": 2, "samples": [{SAMPLE}]}}'), "too_deep"),
        (lambda to: jsonl(to / "a.jsonl", GOOD | {"completion": [CALL]}), "too_deep"),
        (lambda to: eval_archive(to / "a.eval", "samples/1.json"), "damaged_record"),
        (lambda to: eval_archive(to / "a.eval", "header.json"), "damaged_record"),
    ],
    ids=["a line", "a packed line", "a document", "text in a column", "a sample", "a header"],
)
def test_a_record_that_would_overflow_a_stack_is_a_drop(
    tmp_path: Path, make: Callable[[Path], Path], reason: str
) -> None:
    _, drops, _ = read(make(tmp_path))
    assert [drop.reason for drop in drops] == [reason] and "20,00" in drops[0].detail


def eval_archive(path: Path, deep: str) -> Path:
    """An archive of Inspect with two members, of which one is nested deeply."""
    with ZipFile(path, "w") as archive:
        for name in ("header.json", "samples/1.json"):
            archive.writestr(name, SAMPLE if name == deep else "{}")
    return path


def test_a_report_of_wrong_types_is_an_unknown_file(tmp_path: Path) -> None:
    document(tmp_path / "report.json", {"resolved": [{"a": 1}, 2]})
    jsonl(tmp_path / "results.jsonl", GOOD)
    rollouts, drops, _ = read(tmp_path)
    assert len(rollouts) == 1 and [d.reason for d in drops] == ["unknown_format"]


def test_a_truncated_gzip_file_gives_its_complete_records(tmp_path: Path) -> None:
    rows = [{**GOOD, "answer": f"{number:05}" * 50} for number in range(400)]
    path = jsonl(tmp_path / "results.jsonl.gz", *rows)
    path.write_bytes(path.read_bytes()[:-400])
    rollouts, drops, _ = read(path)
    assert 0 < len(rollouts) < 400 and drops[-1].reason == "damaged_file" and drops[-1].line >= len(rollouts)


def test_a_truncated_document_is_one_drop_at_the_line_where_it_ends(tmp_path: Path) -> None:
    path = document(tmp_path / "a.traj.json", [user("q")])
    path.write_text(path.read_text()[:-10])
    (drop,) = files.find([str(path)])[0].records()
    assert isinstance(drop, Drop) and drop.reason == "not_json" and drop.line > 1


def test_lfs_pointers_unknown_and_damaged_files_are_dropped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 3\n")
    (tmp_path / "b.jsonl").write_text("\n\n")
    jsonl(tmp_path / "c.jsonl", {"x": 1}, {"x": 2})
    (tmp_path / "d.parquet").write_bytes(b"PAR1 torn")
    jsonl(tmp_path / "e.jsonl", GOOD)
    rollouts, drops, _ = read(tmp_path)
    assert len(rollouts) == 1
    assert [d.reason for d in drops] == ["git_lfs_pointer", "unknown_format", "unknown_format", "damaged_file"]


def test_arrays_of_records_and_single_lines_are_read_alike(tmp_path: Path) -> None:
    assert len(read(document(tmp_path / "a.json", [GOOD, GOOD]))[0]) == 2
    assert len(read(document(tmp_path / "b.json", GOOD, indent=None))[0]) == 1


def test_files_are_found_by_path_folder_and_pattern_each_once(tmp_path: Path) -> None:
    for name in ("x/results.jsonl", "y/results.jsonl", "y/notes.txt"):
        jsonl(tmp_path / name, GOOD)
    document(tmp_path / "x" / "metadata.json", {"env": "e", "model": "m"})
    beside = [source.label for source in files.find([str(tmp_path / "x" / "results.jsonl")])]
    assert beside == ["x/results.jsonl", "x/metadata.json"]  # what lies beside a file is looked at too
    labels = [source.label for source in files.find([str(tmp_path), str(tmp_path / "y")])]
    assert labels == [f"{tmp_path.name}/{name}" for name in ("x/metadata.json", "x/results.jsonl", "y/results.jsonl")]
    assert [source.label for source in files.find([str(tmp_path / "y" / "*.jsonl")])] == ["y/results.jsonl"]


def test_missing_paths_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("nowhere", "empty"):
        with pytest.raises(BadInput, match=name):
            files.find([str(tmp_path / name)])
    monkeypatch.chdir(tmp_path)
    Path("messages.jsonl").touch()
    for wrong, meant in (("mesages.jsonl", r"messages\.jsonl"), ("mesages", "messages")):
        with pytest.raises(BadInput, match=f"Did you mean '{meant}'"):
            files.find([wrong])


def test_digests_depend_on_content_and_not_on_paths(tmp_path: Path) -> None:
    first, second = jsonl(tmp_path / "a.jsonl.gz", GOOD), jsonl(tmp_path / "b" / "a.jsonl.gz", GOOD)
    assert gzip.decompress(first.read_bytes()) == gzip.decompress(second.read_bytes())
    assert files.find([str(first)])[0].sha256 == files.find([str(second)])[0].sha256
