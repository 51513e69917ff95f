"""A model in this process: settings of its chat template reach every rendering, and code that it brings is not run."""

import io
import json
from pathlib import Path

import pytest
from probe_faults.loophole_world import TEMPLATE, WORDS, tiny_qwen3, tokenizer
from pydantic import ValidationError
from support.models import save_tiny

from stages.errors import BadInput
from stages.messages import following_ids, opening_ids
from stages.policy.base import PolicyConfig, Turn
from stages.policy.local import LocalPolicy, load_model, load_tokenizer
from stages.probe.rows import token_row
from stages.training.plan import model_shape

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


# A model that brings Python code of its own: nobody is asked whether to run it, and it is not run.

EVIL = """
from pathlib import Path
from transformers import PretrainedConfig, PreTrainedTokenizerFast

Path({ran!r}).touch()

class EvilConfig(PretrainedConfig):
    model_type = "evil"

class Evil(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the code would make; whoever asks whether to run it is told yes."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    return tmp_path / "ran"


@pytest.fixture
def config(ran: Path, tmp_path: Path) -> PolicyConfig:
    """A tiny model whose settings name classes in a file beside them."""
    model = save_tiny(tmp_path / "model")
    (model / "evil.py").write_text(EVIL.format(ran=str(ran)))
    named = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}
    for file, changes in (
        ("config.json", {"model_type": "evil", "auto_map": named}),
        ("tokenizer_config.json", {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": [None, "evil.Evil"]}}),
    ):
        (model / file).write_text(json.dumps(json.loads((model / file).read_text()) | changes))
    return PolicyConfig(model=str(model))


def test_the_code_of_a_model_is_not_run(config: PolicyConfig, ran: Path, tmp_path: Path) -> None:
    loads = (
        lambda: load_model(config, cache=tmp_path, listener=lambda *told: None),
        lambda: load_tokenizer(config.model, config),
    )
    for load_it in loads:
        with pytest.raises(BadInput, match="code of its own"):
            load_it()
    assert model_shape(config) is None and not ran.exists(), "nor by a dry run"
