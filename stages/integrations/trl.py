"""Environments for TRL's GRPOTrainer.

An environment is a `rollout_func` that plays complete rollouts, or a tool environment:

    play = RolloutFunction(KataEnv, KataEnv().tasks("train", 25, 0), max_steps=8, max_tokens=64)
    rows = Dataset.from_list(play.rows)
    GRPOTrainer(model, reward_funcs=environment_reward, rollout_func=play, train_dataset=rows, ...)

The first is what `composer train` does and keeps token ids and log-probs as they were sampled. The second lets TRL run
its own loop of tool calls; TRL drops what overflows `max_completion_length` after the tool has run, and ends silently
at a message without a call.

Contracts read from huggingface/trl 1.16.0, `trl/trainer/grpo_trainer.py` (`_generate`,
`_generate_and_score_completions`).
"""

import copy
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback
from trl.trainer.grpo_trainer import GRPOTrainer

from composer_stages.backends.ranks import Ranks, join
from composer_stages.envs import boundary
from composer_stages.envs.base import Environment, Task
from composer_stages.errors import InfrastructureError, UsageError
from composer_stages.messages import Message, pin_settings
from composer_stages.policy import available
from composer_stages.policy.base import PolicyConfig
from composer_stages.policy.local import LocalPolicy, device
from composer_stages.rollouts import recording
from composer_stages.rollouts.agent_loop import LiveRollout, play
from composer_stages.rollouts.trace import RolloutPayload, state_sha256
from composer_stages.runs.kinds import Row
from composer_stages.training.config import Optimisation
from composer_stages.training.rollouts import environment_reward, planned, trl_columns
from composer_stages.training.trl_arguments import trl_config
from composer_stages.words import Sentence

UNSHAPED: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, -1, None),
    "min_p": (None, 0.0),
    "repetition_penalty": (1.0,),
    "generation_kwargs": (None, {}),
}
"""Fields of GRPOConfig that shape a distribution, and the values with which they do not: log-probs are exact."""

__all__ = ["RolloutFunction", "ToolEnvironment", "environment_reward", "tool_environments"]


class RolloutFunction:
    """TRL's `rollout_func` around any environment.

    TRL passes prompts only, so a task is found by its opening messages. `rows` is the dataset: {"prompt": opening
    messages, "task_id"}. `max_steps`: actions of a rollout. `max_tokens`: of one action. `model`: the name in
    records, if not that of the loaded one. `ranks`: the processes, if not those of torchrun. `latest` holds the
    rollouts of the last call, in TRL's order.
    """

    def __init__(
        self,
        make: Callable[[], Environment],
        tasks: Sequence[Task],
        *,
        max_steps: int,
        max_tokens: int,
        seed: int = 0,
        model: str | None = None,
        before_turn: Callable[[], None] = lambda: None,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks
        self._max_tokens, self._model, self._sandbox = max_tokens, model, make().sandbox
        self._make, self._seed, self._max_steps, self._before_turn = make, seed, max_steps, before_turn
        self.latest: list[LiveRollout] = []
        with closing(make()) as environment:
            self.rows: list[Row] = [{"prompt": environment.reset(task), "task_id": task.task_id} for task in tasks]
        self._known = {state_sha256(row["prompt"]): task for row, task in zip(self.rows, tasks, strict=True)}
        if len(self._known) < len(tasks):
            raise UsageError("integrations.equal-openings", num_openings=len(self._known), num_tasks=len(tasks))

    def __call__(self, prompts: list[list[Message]], trainer: Any) -> dict[str, list[Any]]:
        """Play one rollout a prompt with the model under training.

        Returns columns: token ids, log-probs (nats), mask of own tokens, rewards. `UsageError` for a prompt of no task,
        and for arguments of the trainer that sample otherwise than by temperature.
        """
        started, keys = time.monotonic(), [state_sha256(prompt) for prompt in prompts]
        for key, prompt in zip(keys, prompts, strict=True):
            if key not in self._known:
                raise UsageError("integrations.unknown-prompt", prompt=str(prompt)[:200])
        for name, neutral in UNSHAPED.items():
            if (given := getattr(trainer.args, name, neutral[0])) not in neutral:
                raise UsageError("integrations.sampling-unread", name=name, value=given)
        # TRL parts the copies of a prompt among processes: each process counts those of the processes before it.
        ranks = self._ranks or join()
        everywhere, here = ranks.gather(keys), ranks.rank
        begin = sum(map(len, everywhere[:here]))
        tasks = [self._known[key] for keys_there in everywhere for key in keys_there]
        rollouts = planned(tasks, self._seed, trainer.state.global_step)[begin : begin + len(keys)]
        tokenizer = trainer.processing_class
        if settings := getattr(trainer, "chat_template_kwargs", None):
            tokenizer = copy.copy(tokenizer)  # TRL's own rendering has the settings as arguments
            pin_settings(tokenizer, settings, None)
        model = trainer.accelerator.unwrap_model(trainer.model)
        named = self._model or getattr(model.config, "_name_or_path", "") or "model under training"
        config = PolicyConfig(model=named, temperature=trainer.args.temperature, max_tokens=self._max_tokens)
        self._policy = LocalPolicy(model, tokenizer, config)
        trainer.eos_token_ids = sorted(self._policy.model_facts.end_ids)  # TRL tells by them what was cut off
        self.latest = play(self._make, self._policy, rollouts, max_steps=self._max_steps, before_turn=self._before_turn)
        for rollout in self.latest:  # played in one batch: each gets an equal part of its time
            rollout.wall_s = (time.monotonic() - started) / len(prompts)
        return trl_columns(self.latest, trainer.processing_class)

    def records(self) -> list[RolloutPayload]:
        """Return the last call as `collect` would store it: a journal record a rollout, with rollout and step rows."""
        return [recording.payload(e, self._policy, sandbox=self._sandbox, source="trl") for e in self.latest]


class ToolEnvironment:
    """An object of TRL's `environment_factory`: `act` is the only tool, the reward is the environment's own grade."""

    _BROKEN = "the environment broke"

    def __init__(self, environment: Environment, tasks: Sequence[Task], wrap: Callable[[str], str]) -> None:
        self._environment, self._wrap = environment, wrap
        self._tasks = {task.task_id: task for task in tasks}
        self._stopped: str | None = "reset() comes first"
        # TRL closes nothing, and makes a tool of every public method, so that there can be no close().
        self._closing = weakref.finalize(self, environment.close)

    def reset(self, task_id: str, **row: Any) -> None:
        """Set up the task of a row; its prompt holds the opening messages already."""
        del row
        self._environment.reset(self._tasks[task_id])
        self._stopped = None

    def act(self, action: str) -> str:
        """Carry out one action in the environment and return the observation.

        Args:
            action: The action, a command for example.
        """
        if self._stopped is not None:
            raise RuntimeError(Sentence("integrations.rollout-over", stopped=self._stopped))
        # Broken until the step returns: after an exception the rollout has no reward, instead of that of a part of it.
        text, self._stopped = self._wrap(action), self._BROKEN
        observation = self._environment.step(text)
        self._stopped = observation.stop
        return observation.content

    def get_reward(self) -> float | None:
        """Return the reward of the rollout so far; None, never 0, when it cannot be graded."""
        with suppress(InfrastructureError):
            broken = self._stopped == self._BROKEN
            return None if broken else boundary.check_grade(self._environment.grade(), self._environment).reward
        return None


def tool_environments(
    make: Callable[[], Environment], tasks: Sequence[Task], wrap: Callable[[str], str] = str
) -> Callable[[], ToolEnvironment]:
    """Return an `environment_factory`.

    `wrap` turns the tool's argument into a message: `mini_swe_agent.message` for environments that take commands.
    """
    return lambda: ToolEnvironment(make(), tasks, wrap)


os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func is announced as experimental on every start
MAX_PROMPTS = 8
"""Most prompts in one batch."""
Batch = list[dict[str, Any]]


def rollouts(
    policy: LocalPolicy,
    function: RolloutFunction,
    *,
    samples: int,
    folder: str,
    seed: int,
    skip: Callable[[Batch], bool],
) -> Iterator[dict[str, Any]]:
    """Let TRL play `samples` rollouts of every row of `function` without training, except batches that `skip` selects.

    TRL's own data loader, rollout call, padding and advantages, without an optimiser. Yields for each batch the tensors
    from which TRL would compute its loss, so that records can be compared with them; `function.latest` then holds the
    batch's rollouts.
    """
    prompts = prompts_per_batch(len(function.rows))
    size = Optimisation(steps=len(function.rows) // prompts, prompts_per_step=prompts, generations=samples)
    args = trl_config(
        folder,
        size,
        seed=seed,
        temperature=policy.config.temperature,
        max_completion=available.longest_answer(policy.config),
        device=device(policy.config.device),
    )
    trainer = GRPOTrainer(
        model=policy.model,
        processing_class=policy.tokenizer,
        reward_funcs=environment_reward,
        rollout_func=function,  # type: ignore[arg-type]  # TRL passes conversations, which its annotation omits
        args=args,
        train_dataset=Dataset.from_list(function.rows),
    )
    trainer.remove_callback(PrinterCallback)  # prints to stdout
    policy.model.train()  # else TRL counts the generations of an evaluation
    for batch in trainer.get_train_dataloader():
        if not skip(batch):
            with torch.no_grad():
                yield trainer._generate_and_score_completions(batch)


def prompts_per_batch(prompts: int) -> int:
    """Return the largest batch that divides all prompts, as TRL drops a batch that is not full."""
    return max(size for size in range(1, MAX_PROMPTS + 1) if prompts % size == 0)
