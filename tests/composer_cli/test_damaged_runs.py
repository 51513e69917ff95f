"""Runs that were damaged, cut short or written by a newer version: each is found, refused or begun anew."""

import re
import shutil
from pathlib import Path

import pytest


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    """A copy of finished runs."""
    return Path(shutil.copytree(made, tmp_path / "runs", symlinks=True))


def test_a_deleted_latest_is_found_by_the_names(say, runs):
    (runs / "collect" / "latest").unlink()
    code, _, err = say("extract-pairs", "--artifacts", runs, "--dry-run")
    assert code == 0 and "reads" in err
    assert say("show", "collect", "--artifacts", runs)[0] == 0


def test_a_report_on_a_damaged_table_is_refused(say, runs):
    table = next((runs / "collect").glob("2*/steps.parquet"))
    table.write_bytes(table.read_bytes()[:-100])
    code, _, err = say("report", "collect", "--artifacts", runs)
    assert code == 4 and "steps has changed since it was written" in err


def test_runs_of_a_newer_stage_are_refused(say, runs):
    path = next((runs / "collect").glob("2*/manifest.json"))
    path.write_text(re.sub(r'"stage_version": \d+', '"stage_version": 99', path.read_text()))
    code, _, err = say("extract-pairs", "--artifacts", runs, "-s", "seed=7")
    assert code == 4 and "version 99 of collect" in err


def test_an_empty_manifest_is_begun_anew_with_clean(say, runs, tmp_path):
    path = next((runs / "extract-pairs").glob("2*/manifest.json"))
    path.write_text("")
    assert say("extract-pairs", "--artifacts", runs)[0] == 4
    code, _, err = say("extract-pairs", "--artifacts", runs, "--clean")
    assert code == 0, err


def test_a_gate_without_tokens_does_not_call_them_ok(made):
    report = next((made / "collect").glob("2*/report.txt")).read_text()
    assert "not recorded" in next(line for line in report.splitlines() if "ids as many as log-probs" in line)
