"""A plan: what settings leave open is chosen by the size of the model; what cannot be trained is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.environments import GuessEnv
from support.models import tiny_tokenizer
from transformers import Gemma2Config, Qwen3Config

from composer_stages import train
from composer_stages.envs.skills.env import SkillsEnv
from composer_stages.errors import UsageError
from composer_stages.messages import opening_ids
from composer_stages.policy.base import PolicyConfig
from composer_stages.runs.run import Inputs
from composer_stages.train import Config
from composer_stages.training.memory import GIB, TAKEN, choose_passes, estimate_memory
from composer_stages.training.model_shape import ASSUMED, PROMPT_TOKENS, QUESTIONS, SESSIONS, Prompts, measure_prompts
from composer_stages.training.plan import TrainPlan, resolve
from composer_stages.training.refusals import refusals


@pytest.fixture
def larger(tmp_path: Path) -> PolicyConfig:
    """A config.json of some twenty million parameters."""
    sizes = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 8}
    Qwen3Config(**sizes, architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)
    return PolicyConfig(model=str(tmp_path), max_tokens=64)


def chosen(policy: PolicyConfig, **more: object) -> tuple[object, ...]:
    """Rank of the adapter, learning rate, rollouts a pass, whether activations are recomputed and prompts shared."""
    return tuple(resolve(Config(policy=policy, optimisation=more), 1).facts().values())


def test_small_models_are_trained_whole_in_one_pass(tiny: Path) -> None:
    assert chosen(PolicyConfig()) == (0, 2e-4, 64, False, False)
    assert chosen(PolicyConfig(model=str(tiny))) == (0, 2e-4, 64, False, False)


def test_larger_models_get_an_adapter_a_small_rate_and_recomputed_activations(larger: PolicyConfig) -> None:
    assert chosen(larger) == (16, 4e-4, 8, True, True)
    whole = resolve(Config(policy=larger, adapter={"rank": 0}), 1)
    assert tuple(whole.facts().values()) == (0, 1e-6, 8, True, True)


@pytest.mark.parametrize(("billions", "rate"), [(0.29, 4e-4), (0.31, 1e-4), (0.99, 1e-4), (1.01, 1e-5)])
def test_an_adapter_s_rate_is_one_that_was_tried_at_its_size(tmp_path: Path, billions: float, rate: float) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    Qwen3Config(vocab_size=int(billions * 1e9 / 64), tie_word_embeddings=True, **sizes).save_pretrained(tmp_path)
    found = resolve(Config(policy={"model": str(tmp_path)}, adapter={"rank": 4}), 1)
    assert found.config.optimisation.learning_rate == rate


def test_prompts_are_shared_where_every_layer_sees_the_whole_row(tmp_path: Path, larger: PolicyConfig) -> None:
    shared = {"distribution": {"sharding": "fsdp2"}, "adapter": {"rank": 0}}
    assert resolve(Config(policy=larger, **shared), 2).facts()["shared_prompts"] is False, "gradients in shares"
    frozen = {**shared, "adapter": {"rank": 4}}
    assert resolve(Config(policy=larger, **frozen), 2).facts()["shared_prompts"] is True, "the base has no gradients"
    assert chosen(larger, shared_prompts=False)[-1] is False
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2, "vocab_size": 32768}
    windowed = Gemma2Config(**sizes, num_attention_heads=8, num_key_value_heads=8, head_dim=64, sliding_window=64)
    windowed.save_pretrained(tmp_path)
    assert chosen(PolicyConfig(model=str(tmp_path)))[-1] is False


def passes(plan: TrainPlan) -> tuple[int | None, bool | None]:
    size = plan.config.optimisation
    return size.micro_batch, size.gradient_checkpointing


def test_default_passes_are_the_fastest_that_fit(larger: PolicyConfig) -> None:
    """Of 2 x 8 rollouts of 64 tokens after prompts of 500, which each pass computes again."""
    config = Config(policy=larger, optimisation={"prompts_per_step": 2})
    before, prompts = resolve(config, 1), Prompts(500, measured=1, tasks=9, answers=1)
    found = {}
    for free in (2.2, 3.0, 3.8, 8.1):
        plan = choose_passes(before, prompts, int(free * GIB))
        found[free] = passes(plan)
        assert (estimate_memory(plan).total <= TAKEN * free * GIB) == (free > 2.2)
    assert found == {2.2: (1, True), 3.0: (4, True), 3.8: (16, True), 8.1: (16, False)}
    assert passes(choose_passes(before, prompts, None)) == (8, True), "memory that is not known"
    small = Config(optimisation=GROUPS)
    assert passes(choose_passes(resolve(small, 1), prompts, 2**40)) == (16, False), "as ever"


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({"micro_batch": 2}, (2, False)),
        ({"gradient_checkpointing": True}, (16, True)),
        ({"micro_batch": 4, "gradient_checkpointing": True}, (4, True)),
    ],
)
def test_passes_set_by_the_user_are_kept(larger: PolicyConfig, given: dict[str, Any], chosen: tuple[int, bool]) -> None:
    config = Config(policy=larger, optimisation={"prompts_per_step": 2, **given})
    assert passes(choose_passes(resolve(config, 1), Prompts(50), 2**40)) == chosen


def test_one_answer_is_all_that_an_environment_of_questions_takes(larger: PolicyConfig) -> None:
    config = Config(policy=larger, optimisation={"loss_type": "dr_grpo"})
    plan = choose_passes(resolve(config, 1), Prompts(50, answers=1), None)
    assert plan.rollout_tokens == 64 and plan.max_completion == 8 * 64, "a loss divides by the settings' length"


def test_settings_of_the_user_are_kept(larger: PolicyConfig) -> None:
    said = {"learning_rate": 3e-5, "micro_batch": 2, "gradient_checkpointing": False}
    assert chosen(larger, **said) == (16, 3e-5, 2, False, True)


HERE = "http://127.0.0.1:8000/v1"
GROUPS = {"prompts_per_step": 4, "generations": 4}
SHARES = {"distribution": {"sharding": "fsdp2"}, "adapter": {"rank": 0}}


def served(*others: str, address: str | None = HERE, rank: int = 4, **optimisation: int) -> dict[str, Any]:
    return {
        "policy": {"model": "vllm:m", "device": "cpu", "base_url": address},
        "distribution": {"servers": others},
        "adapter": {"rank": rank},
        "optimisation": optimisation,
    }


TWO = {"processes": 2}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no-pairs": ({"weights": {"dpo": 1}}, {}),
    "pairs-unused": ({}, {"pairs": True}),
    "direction-and-dora": ({"adapter": {"dora": True}}, {"direction": 9}),
    "bnpo-of-processes": ({"optimisation": {**GROUPS, "loss_type": "bnpo"}}, TWO),
    "mean-per-pass": ({"trl": {"entropy_coef": 0.1}}, TWO),
    "head-of-trl": ({"trl": {"cast_lm_head_to_fp32": True}}, {}),
    "dropout-of-channels": ({"adapter": {"dropout": 0.1}, "weights": {"sdpo": 1}}, {}),
    "mean-per-part": ({"trl": {"top_entropy_quantile": 0.2}, "optimisation": {"max_tokens_per_micro_batch": 99}}, {}),
    "prompts-not-shared": ({"optimisation": {**GROUPS, "prompts_per_step": 3}}, TWO),
    "micro-batch-not-divided": ({"optimisation": {**GROUPS, "micro_batch": 3}}, {}),
    "shares-of-dora": ({**SHARES, "adapter": {"dora": True}}, TWO),
    "shares-of-hint-teacher": ({**SHARES, "hints": {"teacher": "ema"}, "weights": {"sdpo": 1}}, TWO),
    "shares-of-cosines": ({**SHARES, "optimisation": {"gradient_cosine_every": 2}}, TWO),
    "shares-of-optimiser": ({**SHARES, "trl": {"optim": "adafactor"}}, TWO),
    "no-server-address": (served(address=None), TWO),
    "too-many-servers": (served(HERE, HERE), TWO),
    "shared-server-stale": (served(max_staleness=1), TWO),
}
"""By the code of the refusal: settings, and further facts of the plan."""


def codes(settings: dict[str, Any], **more: Any) -> list[str]:
    """The codes of all refusals of a plan with these settings."""
    plan = TrainPlan(Config(**settings), None, small=False, rollout_tokens=1, **more)
    return [refusal.code.removeprefix("training.") for refusal in refusals(plan)]


@pytest.mark.parametrize("code", REFUSED)
def test_each_refusal_has_a_code(code: str) -> None:
    settings, more = REFUSED[code]
    assert codes(settings, **more) == [code]
    if more == TWO and code != "too-many-servers":
        assert code not in codes(settings), "one process is not refused for several"


def test_an_adapter_is_refused_as_reference_and_behind_a_server(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    reference = {"policy": {"model": str(tmp_path)}, "optimisation": {"beta": 0.1}}
    assert codes(reference) == ["reference-of-adapter"]
    assert codes({"policy": {"model": f"vllm:{tmp_path}"}, "adapter": {"rank": 4}}) == ["server-on-adapter"]


def test_planning_refuses_what_training_refuses(tiny: Path) -> None:
    asleep = {"model": f"vllm:{tiny}", "server": {"args": {"enable-sleep-mode": True}}}
    with pytest.raises(UsageError, match=r"optimisation\.max_staleness"):
        train.plan(Inputs(), Config(policy=asleep, optimisation={"max_staleness": 1}))


def test_a_micro_batch_larger_than_the_share_is_cut() -> None:
    resolve(Config(optimisation={**GROUPS, "micro_batch": 16}), 2)


@pytest.mark.parametrize("shots", [0, 8])
def test_the_longest_prompt_of_questions_is_measured_with_its_examples(shots: int) -> None:
    environment, tokenizer = SkillsEnv(shots=shots), tiny_tokenizer()
    tasks = environment.tasks("train", 60, 0)
    found = measure_prompts(environment, tasks, tokenizer, "none")
    longest = sorted(tasks, key=lambda task: len(task.prompt))[-QUESTIONS:]
    assert found == Prompts(
        max(len(opening_ids(tokenizer, environment.reset(task))) for task in longest), QUESTIONS, 60, answers=1
    )
    assert str(found).endswith(f"{found.tokens:,} tokens, measured on 32 of 60 tasks")


def test_sessions_are_set_up_for_few_tasks_and_containers_for_none() -> None:
    class Contained(GuessEnv):
        sandbox = "container"

    environment, seen = GuessEnv(), list[Any]()
    tasks = [replace(task, prompt="x" * number) for number, task in enumerate(environment.tasks("train", 9, 0))]
    reset = environment.reset
    environment.reset = lambda task: (seen.append(task), reset(task))[1]  # type: ignore[method-assign]
    assert measure_prompts(environment, tasks, tiny_tokenizer(), "none").measured == SESSIONS
    assert seen == tasks[:-3:-1]
    assert measure_prompts(Contained(), tasks, tiny_tokenizer(), "none") == Prompts(PROMPT_TOKENS, 0, 9)
    assert "assumed" in str(ASSUMED)
