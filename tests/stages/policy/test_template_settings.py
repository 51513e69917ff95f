"""Settings of a chat template reach every rendering of a conversation."""

from pathlib import Path

import pytest
from probe_faults.loophole_world import TEMPLATE, WORDS, tiny_qwen3, tokenizer
from pydantic import ValidationError

from stages.messages import following_ids, opening_ids
from stages.policy.base import PolicyConfig, Turn
from stages.policy.local import LocalPolicy
from stages.probe.rows import token_row

THINKING = TEMPLATE + "{% if enable_thinking is defined and enable_thinking is false %}so {% endif %}"
ASKED = [{"role": "user", "content": "task d1 d2"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose template ends a prompt with "so" where thinking is off, as Qwen3's does with an empty block."""
    words = tokenizer()
    words.chat_template = THINKING
    tiny_qwen3(hidden=16, vocab=len(WORDS)).save_pretrained(tmp_path / "model")
    words.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def load(folder: Path, **settings: bool) -> LocalPolicy:
    config = PolicyConfig(model=str(folder), max_tokens=2, chat_template_kwargs=settings)
    return LocalPolicy.open(config, cache=folder.parent, listener=lambda *_: None)


def test_a_setting_is_in_what_the_model_is_asked_and_in_every_other_rendering(folder: Path) -> None:
    plain, off = load(folder), load(folder, enable_thinking=False)
    so = WORDS.index("so")
    words = off.tokenizer
    assert off.sample([Turn(ASKED, 0)])[0].prompt_ids[-1] == so != plain.sample([Turn(ASKED, 0)])[0].prompt_ids[-1]
    assert opening_ids(words, ASKED)[-1] == so == following_ids(words, ASKED)[-1]
    assert token_row(words, ASKED, "fix d2").prompt_ids[-1] == so
    assert words.apply_chat_template(ASKED, add_generation_prompt=True)["input_ids"][-1] == so
    assert plain.facts()["chat_template_sha256"] != off.facts()["chat_template_sha256"]


def test_a_checkpoint_keeps_the_setting_and_takes_it_once(folder: Path, tmp_path: Path) -> None:
    off = load(folder, enable_thinking=False)
    off.model.save_pretrained(tmp_path / "trained")
    off.tokenizer.save_pretrained(tmp_path / "trained")
    again = load(tmp_path / "trained", enable_thinking=False)
    assert again.tokenizer.chat_template == off.tokenizer.chat_template
    assert load(tmp_path / "trained").tokenizer.chat_template == off.tokenizer.chat_template


def test_a_setting_must_have_a_templates_name() -> None:
    with pytest.raises(ValidationError):
        PolicyConfig(chat_template_kwargs={"x %}": True})
