"""TRL around our environments: what is recorded is what its loss would see; tools are what TRL takes for tools."""

import gc
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from support.environments import BreakingEnv, GuessEnv, NeverGradedEnv, RequiringEnv
from support.models import tiny_model, tiny_tokenizer
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer

from composer_stages.backends.ranks import Ranks
from composer_stages.envs.bash import ActionError
from composer_stages.envs.kata.env import KataEnv
from composer_stages.errors import InfrastructureError, UsageError
from composer_stages.integrations.mini_swe_agent import message
from composer_stages.integrations.trl import (
    RolloutFunction,
    ToolEnvironment,
    environment_reward,
    prompts_per_batch,
    rollouts,
    tool_environments,
)
from composer_stages.policy.base import PolicyConfig
from composer_stages.policy.local import LocalPolicy
from composer_stages.rollouts import trace
from composer_stages.training.config import Optimisation
from composer_stages.training.trl_arguments import trl_config

TASKS = GuessEnv().tasks("train", 2, 0)


def policy() -> LocalPolicy:
    tokenizer = tiny_tokenizer("ab")
    return LocalPolicy(tiny_model(vocabulary=len(tokenizer)), tokenizer, PolicyConfig(model="tiny", max_tokens=12))


def function() -> RolloutFunction:
    return RolloutFunction(GuessEnv, TASKS, max_steps=2, max_tokens=12)


def arguments(folder: Path, tokens: int) -> GRPOConfig:
    size = Optimisation(steps=1, prompts_per_step=2, generations=3)
    return trl_config(str(folder), size, seed=0, temperature=1.0, max_completion=tokens, device="cpu")


def trained(held: LocalPolicy, args: GRPOConfig, play: RolloutFunction, **more: Any) -> GRPOTrainer:
    """TRL's own trainer after its training on the tasks of a rollout function."""
    about = {"processing_class": held.tokenizer, "train_dataset": Dataset.from_list(play.rows)}
    trainer = GRPOTrainer(model=held.model, args=args, **about, **more)
    trainer.train()
    return trainer


def chosen(ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    return [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]


def test_records_equal_trls_training_batch(tmp_path: Path):
    play = function()
    (held,) = rollouts(policy(), play, samples=3, folder=str(tmp_path), seed=0, skip=lambda batch: False)
    records = play.records()
    assert len(records) == 6 and {record["rollout"]["source"] for record in records} == {"trl"}
    ids, mask = held["completion_ids"], held["completion_mask"]
    whole = [a + b for a, b in zip(chosen(held["prompt_ids"], held["prompt_mask"]), chosen(ids, mask), strict=True)]
    last = [record["steps"][-1]["completion_token_ids"] for record in records]
    assert whole == [trace.prompt_ids(r["steps"])[-1] + end for r, end in zip(records, last, strict=True)]
    own = [[i for step in record["steps"] for i in step["completion_token_ids"]] for record in records]
    assert chosen(ids, mask * held["tool_mask"]) == own
    rewards = torch.tensor([record["rollout"]["reward"] for record in records]).view(2, 3)
    assert torch.equal(held["advantages"].view(2, 3).sign(), (rewards - rewards.mean(1, keepdim=True)).sign())


def test_finished_batches_are_skipped(tmp_path: Path):
    play = function()
    assert not [*rollouts(policy(), play, samples=3, folder=str(tmp_path), seed=0, skip=lambda batch: True)]
    assert play.latest == []


def test_batches_cover_all_tasks():
    assert [prompts_per_batch(n) for n in (25, 24, 7, 23, 1)] == [5, 8, 7, 1, 1]


def test_a_whole_training_step_with_trls_own_trainer(tmp_path: Path):
    play, held = function(), policy()
    trainer = trained(held, arguments(tmp_path, 24), play, reward_funcs=environment_reward, rollout_func=play)
    rewards = [rollout.grade.reward for rollout in play.latest]
    assert trainer.state.log_history[0]["reward"] == pytest.approx(sum(rewards) / 6)
    assert all(rollout.wall_s > 0 for rollout in play.latest)


def test_tasks_that_open_alike_and_prompts_of_no_task_are_refused():
    with pytest.raises(UsageError, match="Only 2 of 4"):
        RolloutFunction(GuessEnv, GuessEnv().tasks("train", 4, 0), max_steps=2, max_tokens=12)
    with pytest.raises(UsageError, match="is the opening of no task"):
        function()([[{"role": "user", "content": "say c"}]], trainer=None)


class Half(Ranks):
    """One of two processes, each with half of the copies of a prompt."""

    def gather(self, value: Any) -> list[Any]:
        return [value, value]


def held(policy: LocalPolicy, **more: Any) -> Any:
    """What a rollout function reads of a trainer."""
    accelerator, state = SimpleNamespace(unwrap_model=lambda model: model), SimpleNamespace(global_step=0)
    args = SimpleNamespace(temperature=5.0, **more.pop("args", {}))
    about = {"model": policy.model, "processing_class": policy.tokenizer, "accelerator": accelerator, "state": state}
    return SimpleNamespace(**about, args=args, **more)


def test_processes_sample_the_copies_of_a_prompt_apart() -> None:
    shares = []
    for rank in (None, 0, 1):
        ranks = None if rank is None else Half(rank, 2)
        play = RolloutFunction(GuessEnv, TASKS, max_steps=1, max_tokens=12, ranks=ranks)
        copies = [play.rows[0]["prompt"]] * (8 if rank is None else 4)
        shares.append(play(copies, held(policy()))["completion_ids"])
    assert shares[1] + shares[2] == shares[0] and shares[1] != shares[2]


def test_arguments_that_would_have_no_effect_are_refused_and_the_templates_settings_hold() -> None:
    play, local = function(), policy()
    prompts = [play.rows[0]["prompt"]]
    for args in ({"top_p": 0.9}, {"generation_kwargs": {"num_beams": 2}}):
        with pytest.raises(UsageError, match=f"{next(iter(args))} = .* would have no effect"):
            play(prompts, held(local, args=args))
    local.tokenizer.chat_template = "{% if loud %}b{% endif %}" + local.tokenizer.chat_template
    trainer = held(
        local,
        args={"top_p": 1.0, "top_k": -1, "min_p": 0.0, "generation_kwargs": {}},
        chat_template_kwargs={"loud": True},
    )
    loud, plain = (play(prompts, one)["prompt_ids"][0] for one in (trainer, held(local)))
    assert loud == local.tokenizer.convert_tokens_to_ids(["b"]) + plain


def test_trl_finds_one_tool_and_its_schema():
    public = {name for name in vars(ToolEnvironment) if not name.startswith("_")}
    assert public == {"reset", "act", "get_reward"}
    schema = get_json_schema(ToolEnvironment(GuessEnv(), TASKS, str).act)["function"]
    assert list(schema["parameters"]["properties"]) == ["action"]


def test_a_tool_environment_plays_a_rollout():
    one = tool_environments(GuessEnv, TASKS)()
    with pytest.raises(RuntimeError, match="reset"):
        one.act("a")
    assert one.reset(task_id="guess-1", prompt=[], other=1) is None
    assert one.act("b") == "foo: command not found" and one.act("x") and one.get_reward() == 0.5
    with pytest.raises(RuntimeError, match="answered"):
        one.act("b")


def test_a_tool_environment_of_commands_cleans_up_after_itself():
    made: list[KataEnv] = []

    def make() -> KataEnv:
        made.append(KataEnv())
        return made[-1]

    one = tool_environments(make, KataEnv().tasks("train", 1, 0), message)()
    one.reset(task_id=KataEnv().tasks("train", 1, 0)[0].task_id)
    assert "def " in one.act("cat solution.py") and one.get_reward() == 0.0
    folder = made[0]._folder
    assert folder is not None and folder.is_dir()
    del one
    gc.collect()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("environment", "task"), [(NeverGradedEnv, "guess-1"), (BreakingEnv, "guess-0"), (RequiringEnv, "guess-0")]
)
def test_an_ungraded_rollout_has_no_reward(environment: type, task: str):
    one = tool_environments(environment, TASKS)()
    one.reset(task_id=task)
    with suppress(InfrastructureError):
        one.act("a")
    assert one.get_reward() is None


def test_a_command_with_a_fence_is_refused_without_ending_the_rollout():
    one = tool_environments(GuessEnv, TASKS, message)()
    one.reset(task_id="guess-1")
    with pytest.raises(ActionError):
        one.act("cat <<X\n```\nX")
    assert one.act("b") and one.get_reward() > 0


def test_trl_resets_tool_environments_and_asks_them_for_the_reward(tmp_path: Path):
    held = policy()
    held.tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    factory = tool_environments(GuessEnv, TASKS)
    trainer = trained(held, arguments(tmp_path, 8), function(), environment_factory=factory)
    assert trainer.state.log_history[0]["rewards/ToolEnvironment/mean"] == 0.0
