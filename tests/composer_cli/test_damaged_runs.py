"""Runs that were damaged, cut short or written by a newer version: each is found, refused or begun anew."""

import json
import os
from pathlib import Path

import pytest
from support.runs import rewritten

from composer_stages.errors import BadInput
from composer_stages.redaction import secret_in
from composer_stages.runs import store
from composer_stages.runs.run import Manifest, Run, RunWriter, write_manifest


def test_a_deleted_latest_is_found_by_the_names(run_command, own_runs):
    (own_runs / "collect" / "latest").unlink()
    code, _, err = run_command("extract-pairs", "--artifacts", own_runs, "--dry-run")
    assert code == 0 and "reads" in err
    assert run_command("show", "collect", "--artifacts", own_runs)[0] == 0


def test_a_folder_whose_name_is_not_utf_8_is_refused_by_name(run_command, own_runs):
    folder = own_runs.rename(own_runs.with_name(os.fsdecode(b"runs\xff")))
    for words in (
        ("show", "collect"),
        ("show", folder / "collect" / "latest"),
        ("query", "select 1"),
        ("report",),
        ("extract-pairs", "--dry-run"),
        ("collect", "--env", "kata", "--policy", "reference", "--dry-run"),
    ):
        code, _, err = run_command(*words, "--artifacts", folder)
        assert code == 2 and "runs\\xff" in err and "is not UTF-8" in err.splitlines()[-1], words


def test_a_report_on_a_damaged_table_is_refused(run_command, own_runs):
    table = next((own_runs / "collect").glob("2*/steps.parquet"))
    table.write_bytes(table.read_bytes()[:-100])
    code, _, err = run_command("report", "collect", "--artifacts", own_runs)
    assert code == 4 and "steps.parquet has " in err


def test_runs_of_a_newer_stage_are_refused(run_command, own_runs):
    path = next((own_runs / "collect").glob("2*/manifest.json"))
    rewritten(path, lambda fields: fields | {"stage_version": 99})
    code, _, err = run_command("extract-pairs", "--artifacts", own_runs, "-s", "seed=7")
    assert code == 4 and "version 99 of collect" in err


def test_an_empty_manifest_is_begun_anew_with_clean(run_command, own_runs, tmp_path):
    path = next((own_runs / "extract-pairs").glob("2*/manifest.json"))
    path.write_text("")
    assert run_command("extract-pairs", "--artifacts", own_runs)[0] == 4
    code, _, err = run_command("extract-pairs", "--artifacts", own_runs, "--clean")
    assert code == 3, err


def flip(path: Path) -> None:
    """Change one digit, or the byte in the middle, and leave the size as it is."""
    data = bytearray(path.read_bytes())
    digits = [at for at, byte in enumerate(data) if bytes([byte]).isdigit()]
    at = digits[len(digits) // 2] if digits and path.suffix == ".json" else len(data) // 2
    data[at] = ord("1") if data[at] != ord("1") else ord("2")
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["config.json", "rollouts.parquet"])
def test_a_changed_byte_is_named_with_its_file_and_run(run_command, own_runs, name):
    folder = (own_runs / "collect" / "latest").resolve()
    flip(folder / name)
    code, out, _ = run_command("status", "--artifacts", own_runs)
    line = next(line for line in out.splitlines() if line.startswith(f"collect/{folder.name}"))
    assert code == 0 and " damaged " in line and f"{name} has changed since it was written" in line
    code, out, err = run_command("show", "collect", "--artifacts", own_runs)
    assert code == 4 and f"{folder}: {name} has changed since it was written" in err and str(folder) in out
    code, out, err = run_command("show", "collect", "--artifacts", own_runs, "--json")
    assert code == 4 and json.loads(out)["damage"] == f"{name} has changed since it was written"


def test_a_changed_digit_in_a_manifest_is_named_and_resume_writes_it_anew(run_command, own_runs):
    folder = (own_runs / "extract-pairs" / "latest").resolve()
    rows = Run(folder).manifest.content
    flip(folder / "manifest.json")
    code, out, _ = run_command("status", "--artifacts", own_runs)
    assert code == 0 and f"{folder}/manifest.json has changed since it was written" in out
    for words in (["show", "extract-pairs"], ["extract-pairs", "--dry-run"], ["report", "extract-pairs"]):
        code, _, err = run_command(*words, "--artifacts", own_runs)
        assert code == 4 and f"{folder}/manifest.json has changed" in err and "--resume" in err, words
    code, _, err = run_command("extract-pairs", "--artifacts", own_runs, "--resume")
    assert code == 3, err
    assert Run(folder).manifest.content == rows and Run(folder).damage("bytes") is None
    assert len(list((folder / "logs").glob("damaged-manifest-*.json"))) == 1


@pytest.mark.parametrize("kept", ["the later", "the earlier"])
def test_a_key_that_occurs_twice_in_a_manifest_is_damage(run_command, own_runs, kept):
    """The seal is computed of what a parser returns, which is the later value: here the true one, or the other."""
    path = (own_runs / "collect" / "latest").resolve() / "manifest.json"
    true = next(line for line in path.read_text().splitlines() if line.startswith('  "cost_usd"'))
    other = '  "cost_usd": 0.125,'
    path.write_text(path.read_text().replace(true, "\n".join((other, true) if kept == "the later" else (true, other))))
    for words in (["show", "collect"], ["extract-pairs", "--dry-run"]):
        code, _, err = run_command(*words, "--artifacts", own_runs)
        assert code == 4 and "manifest.json is not valid JSON (the key 'cost_usd' occurs twice)" in err, err
    assert "occurs twice" in run_command("status", "--artifacts", own_runs)[1]


def test_every_byte_is_checked_where_it_is_asked_for(run_command, own_runs):
    assert run_command("status", "--check", "--artifacts", own_runs)[0] == 0
    folder = (own_runs / "collect" / "latest").resolve()
    unit = next((folder / "steps").glob("*.jsonl.gz"))
    flip(unit)
    assert "damaged" not in run_command("status", "--artifacts", own_runs)[1]
    code, out, err = run_command("status", "--check", "--artifacts", own_runs)
    assert code == 4 and f"steps/{unit.name} has changed since it was written" in err and "1 of " in err
    code, out, _ = run_command("status", "--check", "--json", "--artifacts", own_runs)
    assert code == 4 and [run["status"] for run in json.loads(out)["runs"]].count("damaged") == 1


def test_a_changed_digit_in_the_ledger_of_a_complete_run_is_named_on_check(run_command, own_runs):
    """What a complete run has paid is in its manifest; nobody read its ledger again."""
    ledger = (own_runs / "collect" / "latest").resolve() / "ledger.jsonl"
    first, *others = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join([first.replace(b'"call":1,', b'"call":2,'), *others]))
    code, _, err = run_command("status", "--check", "--artifacts", own_runs)
    assert code == 4 and "ledger.jsonl, line 1, has changed since it was written" in err, err


def ledger_of(usd):
    """The bytes of a ledger with one call that cost this."""
    lines = ({"call": 1, "reserved": 1.0}, {"call": 1, "settled": usd})
    return b"".join(store.checked(store.encode(line)) + b"\n" for line in lines)


@pytest.mark.parametrize("left", [None, ledger_of(0.25)])
def test_lines_that_are_missing_at_the_end_of_a_ledger_stop_the_run(run_command, own_runs, left):
    """Without them the next attempt would have their money a second time under --max-cost."""
    folder = (own_runs / "extract-pairs" / "latest").resolve()
    rewritten(folder / "manifest.json", lambda fields: fields | {"status": "interrupted", "files": {}, "cost_usd": 0.5})
    if left:
        (folder / "ledger.jsonl").write_bytes(left)
    code, _, err = run_command("extract-pairs", "--artifacts", own_runs, "--resume")
    assert code == 4 and f"holds {0.25 if left else 0:.4f} USD, and 0.5000 USD were paid" in err, err
    (folder / "ledger.jsonl").write_bytes(ledger_of(0.5))
    code, _, err = run_command("extract-pairs", "--artifacts", own_runs, "--resume")
    assert code == 3, err


@pytest.mark.parametrize("left", [b"", ledger_of(0.25)])
def test_calls_that_a_ledger_has_lost_are_told_from_the_units(tmp_path, left):
    """A killed attempt has written no cost into its manifest, so that only the units know of its calls."""

    def opened(**limit):
        record = Manifest(composer="", stage="collect", stage_version=1, fingerprint="")
        return RunWriter(tmp_path, record, cache=tmp_path, listener=lambda what, *_: told.append(what), **limit)

    told, first = [], opened()
    for call in (1, 2, 3):
        held = first.budget.hold(0.5)
        first.budget.write([held.line, {"call": call, "settled": 0.25}])
        first.write(f"unit-{call}", {"answer": {}})
    first.budget.hold(0.5)  # not durable yet, so that no unit may count on it
    first.write("unit-4", {"answer": {}})
    again = opened(max_cost=9)
    again.require_whole_ledger()
    assert again.budget.spent == 0.75 and not told
    (tmp_path / "ledger.jsonl").write_bytes(left)
    lacks = f"ledger.jsonl lacks {2 if left else 3} calls"
    with pytest.raises(BadInput, match=rf"{lacks} .* the limit cannot be kept.*--max-cost"):
        opened(max_cost=9).require_whole_ledger()
    goes_on = opened()
    goes_on.require_whole_ledger()
    assert lacks in told[0] and goes_on.manifest.summary == {"calls_missing_in_ledger": 2 if left else 3}
    assert goes_on.budget.hold(0.5).call == 4


def test_a_checkpoint_of_another_size_is_damaged_and_one_of_other_bytes_on_check(tmp_path):
    record = Manifest(composer="", stage="train", stage_version=1, fingerprint="")
    out = RunWriter(tmp_path, record, cache=tmp_path)
    out.checkpoint(lambda folder: (folder / "weights").write_bytes(bytes(200_000)))
    record.files = out.sealed_files()
    write_manifest(tmp_path, record)
    weights = tmp_path / "checkpoint" / "weights"
    flip(weights)
    assert Run(tmp_path).damage() is None
    assert Run(tmp_path).damage("bytes") == "checkpoint/weights has changed since it was written"
    weights.write_bytes(bytes(10))
    said = "checkpoint/weights has 10 bytes and had 200,000 when it was written"
    assert Run(tmp_path).damage("sizes") == said


def test_units_of_an_unfinished_run_are_checked_too(run_command, own_runs):
    folder = (own_runs / "collect" / "latest").resolve()
    rewritten(folder / "manifest.json", lambda fields: fields | {"status": "interrupted", "files": {}})
    flip(next((folder / "steps").glob("*.jsonl.gz")))
    code, _, err = run_command("status", "--check", "--artifacts", own_runs)
    # A flipped bit is noticed by the checksum at the end, or before that by a line that is no JSON any more.
    assert code == 4 and "Restore it, or delete its run folder" in err and str(folder / "steps") in err


@pytest.mark.parametrize("name", ["../../secret.parquet", "/etc/passwd", "a/../../b", ""])
def test_a_manifest_cannot_name_files_outside_its_folder(run_command, own_runs, name):
    """A run may come from anyone: its tables are read, and published, by these names."""

    def moved(fields):
        return fields | {"outputs": {**fields["outputs"], "tasks": {**fields["outputs"]["tasks"], "file": name}}}

    rewritten((own_runs / "collect" / "latest").resolve() / "manifest.json", moved)
    code, _, err = run_command("show", "collect", "--artifacts", own_runs)
    assert code == 4 and "is not a file inside the run's folder" in err


def test_a_key_in_a_run_does_not_make_its_manifest_look_damaged(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_KEY", 'sk-"quoted"/\\e')
    secret = secret_in("SOME_KEY")
    record = Manifest(composer="", stage="collect", stage_version=1, fingerprint="", reason=f"key {secret}")
    write_manifest(tmp_path, record)
    assert secret not in (tmp_path / "manifest.json").read_text() and "redacted" in Run(tmp_path).manifest.reason
