"""Where settings leave something open, the model's size decides, and what was set stays."""

import tomllib
from pathlib import Path

import pytest
from transformers import Qwen3Config

from stages.policy.base import PolicyConfig
from stages.train import Config
from stages.training.plan import resolve

ROOT = Path(__file__).parents[3]


@pytest.fixture
def larger(tmp_path: Path) -> PolicyConfig:
    """A config.json of some twenty million parameters."""
    sizes = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 3}
    Qwen3Config(**sizes, num_attention_heads=8, architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)
    return PolicyConfig(model=str(tmp_path), max_tokens=64)


def chosen(policy: PolicyConfig, **more: object) -> tuple[object, ...]:
    return tuple(resolve(Config(policy=policy, optimisation=more), 1).facts().values())


def test_embedded_and_small_models_are_trained_as_ever(tiny: Path) -> None:
    assert chosen(PolicyConfig()) == (0, 2e-4, 64, False)
    assert chosen(PolicyConfig(model=str(tiny))) == (0, 2e-4, 64, False)


def test_larger_models_get_an_adapter_a_small_rate_and_recomputed_activations(larger: PolicyConfig) -> None:
    assert chosen(larger) == (16, 1e-5, 8, True)
    whole = resolve(Config(policy=larger, adapter={"rank": 0}), 1)
    assert whole.facts() == {
        "adapter_rank": 0,
        "learning_rate": 1e-6,
        "micro_batch": 8,
        "gradient_checkpointing": True,
    }


def test_what_was_set_stays(larger: PolicyConfig) -> None:
    said = {"learning_rate": 3e-5, "micro_batch": 2, "gradient_checkpointing": False}
    assert chosen(larger, **said) == (16, 3e-5, 2, False)


def test_the_example_keeps_its_rate_to_its_own_model(larger: PolicyConfig) -> None:
    preset = tomllib.loads((ROOT / "examples/gsm8k.toml").read_text())["stage"]
    for entry in (entry["config"] for entry in preset if entry["stage"] == "train"):
        rates = [chosen(policy, **entry["optimisation"])[1] for policy in (PolicyConfig(**entry["policy"]), larger)]
        assert rates == [1e-3, 1e-5]
