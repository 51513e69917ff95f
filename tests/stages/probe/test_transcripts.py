"""Transcripts as ids: joined, never tokenised again."""

import json
from pathlib import Path

import pytest
from probe_faults.loophole_world import TEMPLATE, tokenizer
from support.chat_forms import FULL, byte_tokenizer

from composer_stages.errors import BadInput
from composer_stages.policy.base import PolicyConfig
from composer_stages.policy.local import load_tokenizer
from composer_stages.probe.extract_vhack import HackPairsConfig, Pair, load_pairs
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


def test_pairs_of_ones_own_keep_calls_thoughts_and_tools(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}
    call = {"type": "function", "function": {"name": "ls", "arguments": {"dir": "d1"}}}
    said = {"role": "assistant", "content": None, "reasoning_content": "why", "tool_calls": [call]}
    prompt = [{"role": "user", "content": [{"type": "text", "text": "task d1"}]}]
    item = {"prompt": prompt, "hack": [said], "clean": [SAID[0]], "tools": [tool]}
    (tmp_path / "pairs.json").write_text(json.dumps([item] * 4))
    pair, *_ = load_pairs(HackPairsConfig(source=str(tmp_path / "pairs.json"), count=2, held_out=2), 0)
    made = byte_tokenizer(FULL, "<|im_end|>", ["<|im_start|>"])
    hack, clean = pair.rows(made)
    opening = made.decode(hack.prompt_ids)
    assert opening.startswith("<|im_start|>system\ntools") and '"name": "ls"' in opening and "task d1" in opening
    assert made.decode(hack.completion_ids) == '<think>\nwhy\n</think>\n\n<call>ls {"dir": "d1"}</call><|im_end|>'
    assert made.decode(clean.completion_ids) == "fix d2<|im_end|>"
