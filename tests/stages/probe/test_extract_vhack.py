"""Hack/clean pairs from a function or a file."""

import json
from pathlib import Path
from typing import Any

import pytest
from probe_faults.loophole_world import PAIR_SOURCE, hack_clean_pairs, tokenizer

from composer_stages.errors import BadInput, UsageError
from composer_stages.probe.extract_vhack import HackPairsConfig, load_pairs


def test_pairs_come_from_a_function_or_a_file_and_too_few_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pairs.json").write_text(
        json.dumps([{"prompt": "user task d1 d2 assistant", "hack": "run ok", "clean": "fix d2"}] * 4)
    )
    config = HackPairsConfig(source=str(tmp_path / "pairs.json"), count=2, held_out=2)
    hack, clean = load_pairs(config, 0)[0].rows(tokenizer())
    assert len(hack.completion_ids) == 3 and clean.prompt_ids == hack.prompt_ids
    before = config.identity()
    (tmp_path / "pairs.json").write_text(json.dumps([{"prompt": "x", "hack": "y"}] * 4))
    assert config.identity() != before
    with pytest.raises(BadInput, match="no clean"):
        load_pairs(config, 0)
    assert len(load_pairs(HackPairsConfig(source=PAIR_SOURCE, count=3, held_out=2), 0)) == 5
    with pytest.raises(UsageError, match="not a file of pairs"):
        load_pairs(HackPairsConfig(source="nowhere"), 0)
    with pytest.raises(UsageError, match="asked for"):
        load_pairs(HackPairsConfig(source="tests.stages.probe.test_extract_vhack:two_pairs", count=3), 0)


def two_pairs(count: int, seed: int) -> list[dict[str, Any]]:
    return hack_clean_pairs(2, seed)
