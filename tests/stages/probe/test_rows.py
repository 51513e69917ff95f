"""Recorded rows: their pads, their lengths, and a whole recorded pool."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from needs import REAL, needs

from composer_stages.errors import BadInput
from composer_stages.probe.checks.pool import teacher_hacks
from composer_stages.probe.rows import recorded_rows, without_pads

POOL = REAL / "leetcode-rh" / "teacher_pool"
EOS, PAD = 151645, 151643


def recorded(path: Path, **changes: Any) -> Path:
    """One row as other programs record it: pads behind the end token, and a bare NaN."""
    row = {
        "problem_id": 4,
        "sample_id": 0,
        "completion": "print()",
        "prompt_ids": [5, 6],
        "completion_ids": [7, 8, EOS, PAD, PAD],
        "comp_len": 3,
        "reward": 3.5,
        "hacked": True,
        "gt_pass": True,
        "fmt_ok": True,
        "logp_mean": float("nan"),
        "src_pool": "teacher",
    }
    path.mkdir()
    with gzip.open(path / "prompt_0004.jsonl.gz", "wt") as file:
        file.write(json.dumps(row | changes) + "\n")
    return path


def test_recorded_rows_lose_their_pads_and_keep_one_end_token(tmp_path: Path) -> None:
    row = recorded_rows(recorded(tmp_path / "pool"), "s65", "rh", EOS, [PAD])[0]
    assert row["completion_ids"] == [7, 8, EOS] and row["comp_len"] == row["n_loss_tokens"] == 3
    assert row["hidden_pass"] is True, "a public pool calls it gt_pass"
    assert row["ends_with_eos"] and not row["truncated"] and row["problem_id"] == "4" and row["can_compile"]
    assert without_pads([7, EOS, EOS, PAD], {EOS, PAD}, EOS) == [7, EOS]
    assert without_pads([7, 8, PAD], {EOS, PAD}, EOS) == [7, 8]


def test_a_recorded_length_that_counts_pads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="row 1 has 3 completion tokens without pads, but comp_len says 5"):
        recorded_rows(recorded(tmp_path / "pool", comp_len=5), "s65", "rh", EOS, [PAD])
    with pytest.raises(BadInput, match=r"no \*\.jsonl\.gz"):
        recorded_rows(tmp_path, "s65", "rh", EOS)


@pytest.mark.slow
@needs("real")
def test_the_recorded_teacher_pool_is_read_whole() -> None:
    rows = recorded_rows(POOL, "ariahw/rl-rewardhacking-leetcode-rh-s65", "rh", EOS, [PAD])
    assert len(rows) == 1128 and all(row["ends_with_eos"] for row in rows)
    found = teacher_hacks(rows)
    assert found.status == "PASS" and found.stat == pytest.approx(1115 / 1128)
