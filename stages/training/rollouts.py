"""On-policy rollouts for GRPO: which ones a step is made of, and how they are played.

`Schedule` names the rollouts of each step. `LockStep` plays them with a model of this process; `StepsAhead` plays them
on a server, at most `max_staleness` steps ahead of the weights. `trl_columns` gives them to TRL.
"""

import copy
import random
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from stages.backends.ranks import Ranks
from stages.envs.base import Environment, Task
from stages.policy.base import Policy
from stages.rollouts.agent_loop import LiveRollout, play
from stages.runs import store
from stages.training.channels.rollouts import OwnRollout, own_rollout
from stages.training.config import Optimisation
from stages.training.scoring import Tree

TRL_COLUMNS = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "environment_reward")
"""What TRL's `rollout_func` returns; `env_mask` is 1 for the tokens that the policy wrote."""


def prompt_order(num_tasks: int, settings: Optimisation, seed: int, *, as_given: bool = False) -> list[int]:
    """Return the indices of the tasks of all prompts: every task once before any again, each round in its own order.

    as_given: every round in the order of the tasks, which is a curriculum's.
    """
    count = settings.steps * settings.prompts_per_step
    order: list[int] = []
    while len(order) < count:
        indices = list(range(num_tasks))
        if not as_given:
            random.Random(f"{seed}/{len(order)}").shuffle(indices)  # noqa: S311 (an order that repeats, not a secret)
        order += indices
    return order[:count]


def planned(tasks: Sequence[Task], seed: int, step: int) -> list[LiveRollout]:
    """Return the rollouts of a step, one for each task of the list; a task that comes again is sampled again.

    Seeds depend on the run's seed, the step, the task and the sample alone, whichever process plays them.
    """
    seen = Counter[str]()
    rollouts = []
    for task in tasks:
        # A digest, not a sum or a count: seeds of neighbouring steps and samples must have nothing in common.
        drawn = store.digest([seed, step, task.task_id, seen[task.task_id]])
        rollouts.append(LiveRollout(task, seen[task.task_id], int(drawn[:15], 16)))
        seen[task.task_id] += 1
    return rollouts


@dataclass(frozen=True)
class Schedule:
    """Which rollouts each step plays: a function of the step, the same in every process and after every resume.

    prompts: the task of every prompt of the training, in order. groups: of one step, over all processes. reuse:
    optimiser steps that train on the rollouts of the first of them (TRL's num_iterations).
    """

    prompts: Sequence[Task]
    groups: int
    generations: int
    seed: int
    ranks: Ranks = field(default_factory=Ranks)
    reuse: int = 1

    @property
    def steps(self) -> int:
        """Optimiser steps of the training."""
        return len(self.prompts) // self.groups

    def own(self, step: int) -> list[LiveRollout]:
        """Return the rollouts of a step that this process plays, group after group."""
        first = step // self.reuse * self.groups
        of_step = self.prompts[first : first + self.groups]
        # Samples are numbered over all processes, as if one process played the step.
        rollouts = planned([task for task in of_step for _ in range(self.generations)], self.seed, step)
        size = len(rollouts) // self.ranks.count
        return rollouts[self.ranks.rank * size :][:size]


class Rollouts(Protocol):
    """What plays the rollouts of a training."""

    corrected: ClassVar[bool]
    """Whether another program samples: its log-probs differ from the trainer's by rounding, and by the age of the
    weights, and TRL corrects for that by truncated importance sampling."""

    @property
    def policy(self) -> Policy:
        """What is sampled from."""
        ...

    def take(self, step: int) -> tuple[list[LiveRollout], dict[str, float]]:
        """Return the rollouts that this process trains on in a step, group after group, and metrics of them."""
        ...

    def close(self) -> None:
        """Play nothing more."""
        ...


@dataclass(frozen=True)
class LockStep:
    """Plays with a model of this process, all rollouts of a step together; with a teacher half of each group by it."""

    make: Callable[[], Environment]
    policy: Policy
    schedule: Schedule
    max_steps: int
    teacher: Policy | None = None
    corrected: ClassVar[bool] = False

    def take(self, step: int) -> tuple[list[LiveRollout], dict[str, float]]:
        """Play the rollouts of a step."""
        rollouts = self.schedule.own(step)
        if self.teacher is None:
            return play(self.make, self.policy, rollouts, max_steps=self.max_steps), {}
        for policy, teachers in ((self.teacher, True), (self.policy, False)):
            theirs = [e for i, e in enumerate(rollouts) if played_by_teacher(i, self.schedule.generations) == teachers]
            play(self.make, policy, theirs, max_steps=self.max_steps)
        return rollouts, {}

    def close(self) -> None:
        """Nothing is left to end."""


def played_by_teacher(index: int, generations: int) -> bool:
    """Return whether a rollout of a step, by its place among all of them, is the teacher's in mixed groups."""
    return index % generations < generations // 2


class Weights(Protocol):
    """Keeps a server at the newest weights of the model under training (`stages.training.weights.WeightSync`)."""

    def follow(self, step: int) -> dict[str, float]:
        """Load the weights that a step begins with; return metrics of it."""
        ...

    def check_unchanged(self, step: int) -> None:
        """Raise where others have replaced the weights while the rollouts of a step were played."""
        ...

    def end(self) -> None:
        """Leave the server as it was."""
        ...


@dataclass(eq=False)
class StepsAhead:
    """Plays on a server: whole steps in their order, at most `max_staleness` of them ahead of the weights.

    A step is played from beginning to end with the weights that the server has when the step is begun. The policy of
    each step is a copy, so that it keeps sampling from these weights.
    """

    make: Callable[[], Environment]
    policy: Any
    schedule: Schedule
    weights: Weights
    max_steps: int
    max_staleness: int = 0
    corrected: ClassVar[bool] = True

    def __post_init__(self) -> None:
        # One thread: steps are played in their order, each with weights at least as new as those of the one before.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._playing: dict[int, Future[list[LiveRollout]]] = {}

    def take(self, step: int) -> tuple[list[LiveRollout], dict[str, float]]:
        """Load the newest weights, return the rollouts of a step, and begin those of the next steps."""
        metrics = self.weights.follow(step)
        playing = self._playing.pop(step, None)
        rollouts = self._play(step) if playing is None else playing.result()
        last = min(step + self.max_staleness, self.schedule.steps - 1)
        for later in range(step + self.schedule.reuse, last + 1, self.schedule.reuse):
            if later not in self._playing:
                self._playing[later] = self._pool.submit(self._play, later)
        self.weights.check_unchanged(step)
        return rollouts, metrics | staleness(rollouts, step, self.schedule.ranks)

    def close(self) -> None:
        """Begin no further step, await the one that is being played, and leave the server as it was."""
        self._pool.shutdown(cancel_futures=True)
        self.weights.end()

    def _play(self, step: int) -> list[LiveRollout]:
        return play(self.make, copy.copy(self.policy), self.schedule.own(step), max_steps=self.max_steps)


def staleness(own: Sequence[LiveRollout], step: int, ranks: Ranks) -> dict[str, float]:
    """Return how many optimiser steps old the weights of the rollouts were: the mean, and the number of older ones."""
    mine = [e.steps[0].sample.policy_version for e in own if e.steps]
    versions = [version for theirs in ranks.gather(mine) for version in theirs]
    behind = [step - version for version in versions if version is not None]
    return {
        "sampling/staleness": sum(behind) / max(len(behind), 1),
        "sampling/stale_rollouts": float(sum(steps > 0 for steps in behind)),
    }


def trl_columns(rollouts: Sequence[LiveRollout], tokenizer: Any) -> dict[str, list[Any]]:
    """Return rollouts as TRL's columns: ids, log-probs, the mask of own tokens, and rewards."""
    columns: dict[str, list[Any]] = {name: [] for name in TRL_COLUMNS}
    for rollout in rollouts:
        played = own_rollout(rollout)
        if played is None:
            # It failed before its first action. TRL needs as many rows as prompts, so it gets one masked token behind
            # another, and no reward: a reward of 0 would blame the policy for the machinery.
            end = [tokenizer.eos_token_id]
            played = OwnRollout(Tree(end, (end,)), [0], [0.0])
        reward = None if rollout.error else rollout.grade.reward
        row = (played.tree.prompt, played.tree.branches[0], played.logprobs, played.own, reward)
        for name, value in zip(TRL_COLUMNS, row, strict=True):
            columns[name].append(value)
    return columns


def trl_row(rollout: LiveRollout) -> dict[str, Any]:
    """Return the dataset row that TRL logs for a rollout; a list of messages, so that TRL sees a conversation."""
    return {"prompt": [{"role": "user", "content": rollout.task.prompt}]}


def environment_reward(
    prompts: Any, completions: Any, environment_reward: list[float | None], **columns: Any
) -> list[float | None]:
    """TRL's reward function: return the environment's own reward; None, never zero, where it could not grade."""
    del prompts, completions, columns  # TRL 1.16 leaves None out of a group's mean
    return environment_reward
