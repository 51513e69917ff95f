"""Measured numbers in the documents come from the records of the benchmarks, and go with them."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.documents import BIN, DOCUMENTS, FENCE, ROOT

from benchmarks import records

RECORDS = ROOT / "benchmarks" / "results"
MEASURED = [path for path in DOCUMENTS if "import records\n" in path.read_text()]
GENERATED = re.compile(r"<!-- \[\[\[cog.*?<!-- \[\[\[end\]\]\] -->", re.S)
CAPTION = re.compile(r"^!\[[^\]]*\]\([^)]*\)\n\n\*.*?\*$", re.M | re.S)
TYPED = re.compile(
    r"\d+(?:\.\d+)? times\b|(?<![\w.])0?\.\d+\b|\d+(?:\.\d+)? ?%(?! interval)|\[[-+−]?\d[\d.]*, [-+−]?\d"
    r"|\b(?:half|third|quarter|fifth|tenth)s? (?:of|as|the)\b|\b(?:twice|three times) as\b"
)
"""What a measured ratio looks like: 1.8 times, 0.56, 23 %, [0.4, 0.7], a third of, twice as fast."""


def generated(folder: Path, path: Path) -> subprocess.CompletedProcess[str]:
    """Make the generated parts of a document anew in a copy, from the records in a folder."""
    copy = folder / path.name
    shutil.copy(path, copy)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COMPOSER_BENCHMARK_RESULTS": str(folder / "results")}
    tool = [BIN / "cog", "-r", path.name]
    return subprocess.run(tool, capture_output=True, text=True, cwd=folder, env=env)


def asked_for(path: Path) -> list[tuple[str, str]]:
    """The claims that a document asks for: name of the record, and words."""
    calls = re.findall(r'records\.show\(cog, """\n(.*?)\n"""\)', path.read_text(), re.S)
    lines = [line.partition(" => ")[0].partition(": ") for call in calls for line in call.splitlines()]
    return [(name, words) for name, _, words in lines]


def withdraw(folder: Path, name: str, words: str) -> None:
    """Delete a claim from a copy of the records."""
    path = folder / f"{name}.json"
    kept = [claim for claim in json.loads(path.read_text()) if claim["claim"] != words]
    path.write_text(json.dumps(kept))


def test_a_number_that_is_withdrawn_disappears_from_the_page_and_stops_what_still_asks_for_it(tmp_path: Path) -> None:
    shutil.copytree(RECORDS, tmp_path / "results")
    page, asking = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "scale.md"
    shutil.copy(asking, tmp_path)
    name, words = asked_for(asking)[0]
    withdraw(tmp_path / "results", name, words)
    assert generated(tmp_path, page).returncode == 0
    before, after = (set(path.read_text().splitlines()) for path in (page, tmp_path / page.name))
    rows = [line for line in before - after if line.startswith("| ")]
    assert rows and all(words in line for line in rows) and not any(words in line for line in after)
    done = generated(tmp_path, asking)
    (line,) = f"{done.stdout}{done.stderr}".removeprefix("Cogging scale.md").strip().splitlines()
    assert done.returncode != 0 and (tmp_path / "scale.md").read_text() == asking.read_text()
    assert f"scale.md asks for a claim that benchmarks/results/{name}.json does not hold" in line and words in line


def test_a_record_that_is_withdrawn_disappears_with_its_section(tmp_path: Path) -> None:
    shutil.copytree(RECORDS, tmp_path / "results")
    (tmp_path / "results" / "house.json").unlink()
    (tmp_path / "results" / "help.json").write_text("[]")
    assert generated(tmp_path, ROOT / "docs" / "benchmarks.md").returncode == 0
    text = (tmp_path / "benchmarks.md").read_text()
    assert (
        "## train_step\n" in text and "## house\n" not in text and "## help\n" not in text and "trl --help" not in text
    )


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.name)
def test_a_record_that_cannot_be_used_ends_the_generation_in_one_sentence(tmp_path: Path, path: Path) -> None:
    shutil.copytree(RECORDS, tmp_path / "results")
    name = asked_for(path)[0][0] if asked_for(path) else "pairs"
    claims = json.loads((tmp_path / "results" / f"{name}.json").read_text())
    claims[0]["value"] = "fast"
    (tmp_path / "results" / f"{name}.json").write_text(json.dumps(claims))
    done = generated(tmp_path, path)
    (line,) = f"{done.stdout}{done.stderr}".removeprefix(f"Cogging {path.name}").strip().splitlines()
    assert done.returncode != 0 and f"{name}.json, claim 1: value: Input should be a valid number" in line


def test_the_page_has_a_row_for_every_claim() -> None:
    rows = (ROOT / "docs" / "benchmarks.md").read_text().partition("## All records")[2].splitlines()
    for path in RECORDS.glob("*.json"):
        for claim in records.read(path):
            assert sum(row.startswith(f"| {claim.claim} | ") for row in rows) == 1, claim.claim


@pytest.mark.parametrize(
    ("change", "row"),
    [
        ({}, "| 0.5 [0.4, 0.7] | 9 | at most 0.7: met |"),
        ({"interval": None, "value": 1234567, "unit": "MB", "goal": None, "met": None}, "| 1,234,567 MB | 9 |  |"),
        ({"interval": [0.4, 0.8], "met": False}, "| 0.5 [0.4, 0.8] | 9 | at most 0.7: **not shown** |"),
        ({"goal": "<= 0.3", "met": False}, "at most 0.3: **missed** |"),
        ({"interval": None, "value": 2e-7, "goal": "<= 0.00001"}, "| 2e-7 | 9 | at most 0.00001: met |"),
        ({"kind": "registered", "registration": "0123abc"}, "registered at 0123abc"),
    ],
)
def test_a_row_says_what_the_claim_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object], row: str
) -> None:
    claim = {"claim": "time of ours beside theirs", "value": 0.5, "unit": "", "interval": [0.4, 0.7], "n": 9}
    claim |= {"date": "2026-11-22", "commit": "89abcde", "machine": "a CPU", "command": "python benchmarks/x.py"}
    claim |= {"kind": "exploratory", "registration": None, "goal": "<= 0.7", "met": True}
    (tmp_path / "x.json").write_text(json.dumps([{**claim, **change}]))
    monkeypatch.setenv("COMPOSER_BENCHMARK_RESULTS", str(tmp_path))
    assert row in records.page() and "2026-11-22 at 89abcde" in records.page()


def typed(text: str) -> list[str]:
    """Ratios outside generated parts, blocks, code, addresses, and the caption of the first figure."""
    for left_out in (GENERATED, CAPTION, FENCE, re.compile(r"`[^`\n]*`"), re.compile(r"\]\([^)]*\)")):
        text = left_out.sub("", text)
    return TYPED.findall(text)


@pytest.mark.parametrize("page", ["README.md", "docs/comparison.md", "docs/status.md"])
def test_no_measured_ratio_is_typed_into_a_page(page: str) -> None:
    assert typed((ROOT / page).read_text()) == [], "put the claim into a record, and let `./dev docs` quote it"


@pytest.mark.parametrize(
    "sentence",
    [
        "A DPO step takes 0.56 of TRL's time.",
        "It is 1.24 times as fast as Opacus.",
        "three losses in one step .67 of three separate steps",
        "a divergence takes a quarter to a third of TRL's time",
        "It takes 22 % less.",
        "a gain of +19.4 points [+0.7, +38.8]",
        "It is twice as fast.",
    ],
)
def test_a_typed_ratio_is_found(sentence: str) -> None:
    text = (ROOT / "README.md").read_text()
    assert typed(text.replace("## Install", f"{sentence}\n\n## Install", 1))
