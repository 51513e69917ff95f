"""A model that brings Python code of its own: nobody is asked whether to run it, and it is not run."""

import io
import json
from pathlib import Path

import pytest
from support.models import save_tiny

from stages.errors import BadInput
from stages.policy.base import PolicyConfig
from stages.policy.local import load_model, load_tokenizer
from stages.training.plan import model_shape

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
    with pytest.raises(BadInput, match=r"brings code of its own, which is not run\."):
        load_model(config, cache=tmp_path, listener=lambda *told: None)
    assert not ran.exists()


def test_the_code_of_a_tokenizer_is_not_run(config: PolicyConfig, ran: Path) -> None:
    with pytest.raises(BadInput, match=r"brings code of its own, which is not run\."):
        load_tokenizer(config.model, config)
    assert not ran.exists()


def test_a_dry_run_runs_no_code_of_a_model(config: PolicyConfig, ran: Path) -> None:
    assert model_shape(config) is None and not ran.exists()
