"""Transcripts as ids: joined, never tokenised again."""

from pathlib import Path

import pytest
from probe_faults.loophole_world import TEMPLATE, tokenizer

from composer_stages.errors import BadInput
from composer_stages.policy.base import PolicyConfig
from composer_stages.policy.local import load_tokenizer
from composer_stages.probe.extract_vhack import Pair
from composer_stages.probe.rows import rendered_row, token_row

TASK = {"role": "user", "content": "task d1 d2"}
SAID = [
    {"role": "assistant", "content": "fix d2"},
    {"role": "user", "content": "ok"},
    {"role": "assistant", "content": "run ok"},
]


def test_ids_are_joined_and_observations_are_not_the_policys_own() -> None:
    words, prompt = tokenizer(), [TASK]
    row = token_row(words, prompt, SAID)
    assert words.decode(row.prompt_ids) == "user task d1 d2 assistant"
    assert words.decode(row.completion_ids) == "fix d2 end user ok assistant run ok end"
    assert row.own == [True] * 3 + [False] * 3 + [True] * 3
    assert token_row(words, prompt, "fix d2").own == [True] * 3
    with pytest.raises(BadInput, match="begins and ends"):
        token_row(words, prompt, SAID[:2])


def test_settings_of_the_template_reach_every_rendering_of_the_probe(tmp_path: Path) -> None:
    """As Qwen3's empty think block does: in prompts, between turns, in pairs, and in rollouts that give text alone."""
    words = tokenizer()
    words.chat_template = TEMPLATE + "{% if enable_thinking is defined and enable_thinking is false %}so {% endif %}"
    words.save_pretrained(tmp_path)
    off = load_tokenizer(
        str(tmp_path), PolicyConfig(model=str(tmp_path), chat_template_kwargs={"enable_thinking": False})
    )
    plain = load_tokenizer(str(tmp_path), PolicyConfig(model=str(tmp_path)))
    row = rendered_row(off, [[TASK], [TASK, *SAID[:2]]], [{"action": "fix d2"}, {"action": "run ok"}])
    assert off.decode(row.prompt_ids) == "user task d1 d2 assistant so"
    assert off.decode(row.completion_ids) == "fix d2 end user ok assistant so run ok end"
    assert row.own == [True] * 3 + [False] * 4 + [True] * 3
    assert row == token_row(off, [TASK], SAID) != token_row(plain, [TASK], SAID)
    for side in Pair("p", [TASK], SAID, "fix d2").rows(off):
        assert off.decode(side.prompt_ids).endswith("assistant so")
