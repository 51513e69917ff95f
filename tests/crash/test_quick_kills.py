"""One stage under every signal, on a disk that fails and in power cuts: the short version of `test_random_kills.py`."""

import json
from pathlib import Path
from typing import Any

import pytest
from needs import needs
from support.disturbances import (
    FULL,
    READ_ONLY,
    SIGNALS,
    Outcome,
    Work,
    contents,
    cut_power,
    disturb,
    finish,
    in_own_mounts,
    name_of,
    on_failing_disk,
    preload,
)

from composer_stages import import_traces


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Work, float, dict[str, Any]]:
    """An import, how many seconds it takes undisturbed, and what comes of it."""
    place = tmp_path_factory.mktemp("quick")
    preload("composer_stages.formats.importing", "pyarrow.parquet")
    said = [{"role": "user", "content": "Mend it."}, {"role": "assistant", "content": "Mended. " * 50}] * 6
    rows = [{"messages": said, "task_id": f"t-{i % 9}", "resolved": i % 3 == 0, "run_id": str(i)} for i in range(60)]
    (place / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    work = Work("import", import_traces.Config(paths=[str(place / "chats.jsonl")], model="m"))
    lasts_s = finish(work, place / "whole")
    return work, lasts_s, contents(place / "whole")


def test_every_signal(imported: tuple[Work, float, dict[str, Any]], outcome: Outcome, tmp_path: Path) -> None:
    work, lasts_s, expected = imported
    disturb(outcome, work, tmp_path, SIGNALS, lasts_s, seed=1)
    assert outcome.disturbed == dict.fromkeys(map(name_of, SIGNALS), 1)
    assert outcome.roots and all(contents(root) == expected for root in outcome.roots)


def test_a_disk_that_fails(imported: tuple[Work, float, dict[str, Any]], tmp_path: Path) -> None:
    work, lasts_s, expected = imported
    disturbed, found = in_own_mounts(on_failing_disk, work, tmp_path, [FULL, READ_ONLY], lasts_s, 2)
    assert disturbed == {FULL: 1, READ_ONLY: 1} and found and all(one == expected for one in found)


@needs("compiler")
def test_power_cuts(imported: tuple[Work, float, dict[str, Any]], outcome: Outcome, tmp_path: Path) -> None:
    work, _, expected = imported
    cut_power(outcome, work, tmp_path, 4, 3, expected)
    assert outcome.hard >= 4 and outcome.roots
