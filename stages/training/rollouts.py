"""On-policy rollouts for GRPO: the schedule of rollouts by step, and the code that samples them.

`Schedule` names the rollouts of each step. `LockStep` plays them with a model of this process; `RolloutQueue` plays
them on a server, at most `max_staleness` steps ahead of the weights. `trl_columns` gives them to TRL.
"""

import asyncio
import random
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from composer_stages.backends.ranks import Ranks
from composer_stages.envs.base import Environment, Task
from composer_stages.messages import end_id
from composer_stages.policy import background
from composer_stages.policy.base import Policy
from composer_stages.rollouts.agent_loop import GIVEN_UP, ConcurrentLoop, LiveRollout, RolloutsAhead, Rules, play
from composer_stages.rollouts.config import IN_FLIGHT, NO_LIMITS, InFlight, RolloutLimits
from composer_stages.runs import store
from composer_stages.training.channels.rollouts import OwnRollout, own_rollout
from composer_stages.training.config import Optimisation
from composer_stages.training.scoring import Tree

if TYPE_CHECKING:
    from composer_stages.training.report import TrainingJournal
    from composer_stages.training.weights import WeightSync

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
    """The rollouts of each step: a function of the step, the same in every process and after every resume.

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
        """Return the number of optimiser steps of the training."""
        return len(self.prompts) // self.groups

    @property
    def process_groups(self) -> int:
        """Return the groups of a step that this process plays."""
        return self.groups // self.ranks.count

    def group(self, number: int) -> list[LiveRollout]:
        """Return a group of this process, counted from the first step's first; those after the last step's are spare.

        Spare groups are played where as many others were given up: the first prompts of the training again, with other
        seeds.
        """
        generation, index = divmod(number, self.process_groups)
        return self.process_rollouts(generation * self.reuse)[index * self.generations :][: self.generations]

    def process_rollouts(self, step: int) -> list[LiveRollout]:
        """Return the rollouts of a step that this process plays, group after group."""
        first = step // self.reuse * self.groups % len(self.prompts)
        of_step = self.prompts[first : first + self.groups]
        # Samples are numbered over all processes, as if one process played the step.
        rollouts = planned([task for task in of_step for _ in range(self.generations)], self.seed, step)
        size = len(rollouts) // self.ranks.count
        return rollouts[self.ranks.rank * size :][:size]


class Rollouts(ABC):
    """Samples the rollouts of a training; a checkpoint stores the state of unfinished rollouts."""

    corrected: ClassVar[bool] = False
    """Whether another program samples: its log-probs differ from the trainer's by rounding, and by the age of the
    weights, and TRL corrects for that by truncated importance sampling."""

    @abstractmethod
    def take(self, step: int) -> tuple[list[LiveRollout], dict[str, float]]:
        """Return the rollouts that this process trains on in a step, group after group, and metrics of them."""

    def state(self) -> Any:
        """Return the state of this process' unfinished rollouts as JSON; None where a step leaves none."""
        return None

    def load(self, state: Any) -> None:
        """Go on from a checkpoint's `state`."""
        del state

    def close(self) -> None:
        """Stop sampling."""
        return


@dataclass(frozen=True)
class LockStep(Rollouts):
    """Samples all rollouts of a step together with a model in this process; a teacher samples half of each group."""

    make: Callable[[], Environment]
    policy: Policy
    schedule: Schedule
    max_steps: int
    limits: RolloutLimits = NO_LIMITS
    in_flight: InFlight = IN_FLIGHT
    teacher: Policy | None = None

    def take(self, step: int) -> tuple[list[LiveRollout], dict[str, float]]:
        """Play the rollouts of a step."""
        rollouts = self.schedule.process_rollouts(step)
        if self.teacher is None:
            self._play(self.policy, rollouts)
            return rollouts, {}
        for policy, teachers in ((self.teacher, True), (self.policy, False)):
            policy_rollouts = [
                e for i, e in enumerate(rollouts) if played_by_teacher(i, self.schedule.generations) == teachers
            ]
            self._play(policy, policy_rollouts)
        return rollouts, {}

    def _play(self, policy: Policy, rollouts: list[LiveRollout]) -> None:
        play(self.make, policy, rollouts, max_steps=self.max_steps, limits=self.limits, in_flight=self.in_flight)


def played_by_teacher(index: int, generations: int) -> bool:
    """Return whether the teacher samples the rollout with this index in a step of mixed groups."""
    return index % generations < generations // 2


QueueState = dict[str, Any]
"""open: numbers of the groups that were begun and not taken. next: the group to begin next."""


class RolloutQueue(Rollouts):
    """Plays on a server: each rollout at its own pace, and groups are trained on as they are complete.

    Groups that are begun and not yet trained on are at most those of `1 + max_staleness` steps: without staleness a
    step is made of exactly its own, whichever ends first. A rollout goes on when the weights change, and samples its
    next turn from the newest. A group is given up once one of its turns is of weights that would be more than
    `max_staleness` steps old when it is first trained on, and the next one is begun in its place: the tasks that take
    longest are trained on less. Its answers under way are broken off, so that no more than `1 + max_staleness` versions
    are sampled from: on a server with adapters the newest would wait for them.

    journal: keeps each rollout when it ends, so that after a kill it is not played again; it may then be of weights
    newer than those of the checkpoint that the training goes on from. None with several processes, of which one writes.
    check: raises when nothing more is to be played.
    """

    corrected = True

    def __init__(
        self,
        make: Callable[[], Environment],
        policy: Any,
        schedule: Schedule,
        weights: "WeightSync",
        *,
        rules: Rules,
        in_flight: InFlight = IN_FLIGHT,
        max_staleness: int = 0,
        journal: "TrainingJournal | None" = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.policy, self.schedule, self.weights = policy, schedule, weights
        self._max_staleness, self._journal = max_staleness, journal
        self._resumed: QueueState | None = None
        self._ahead: RolloutsAhead = asyncio.Queue()
        self._changed = threading.Condition()
        """Of all that follows: the trainer's thread takes what the thread of the server's requests plays."""
        self._groups: dict[int, dict[str, LiveRollout | None]] = {}
        """Groups that were begun and not yet taken, by number: their rollouts, None for those that have not ended."""
        self._group_of: dict[str, int] = {}
        """The group of each rollout that has not ended."""
        self._under_way: dict[str, tuple[LiveRollout, int | None]] = {}
        """Each rollout that has begun and not ended, and the oldest version that it was or is being sampled from: a
        straggler's group is known to be too old before its answer comes."""
        self._next = 0
        """The group to begin next."""
        self._player: asyncio.Task[None] | None = None
        self._playing: Future[None] | None = None

        async def play_all() -> None:
            self._player = asyncio.current_task()
            await ConcurrentLoop(make, policy, self._ended, rules, in_flight, check, self._wanted).play(self._ahead)

        self._play_all = play_all

    def take(self, step: int) -> tuple[list[LiveRollout], dict[str, float]]:
        """Load the newest weights, begin the groups that staleness allows, and return the oldest complete groups."""
        metrics = self.weights.follow(step)
        size, reuse = self.schedule.process_groups, self.schedule.reuse
        ahead = 1 + min(self._max_staleness, self.schedule.steps - 1 - step) // reuse
        with self._changed:
            if self._playing is None:
                self._playing = background.start(self._play_all())
                begun = self._resumed or {"open": [], "next": step // reuse * size}
                self._next = begun["next"]
                for number in begun["open"]:
                    self._begin(number)
            given_up = self._renew(ahead * size, step)  # what was kept from before a kill may be too old
            while len(complete := [n for n, group in self._groups.items() if None not in group.values()]) < size:
                if self._playing.done():
                    self._playing.result()  # raises what ended it
                self._changed.wait(background.WAKE_S)
            groups = [self._groups.pop(number) for number in sorted(complete)[:size]]
            given_up += self._renew((ahead - 1) * size, step + reuse)
        rollouts = [rollout for group in groups for rollout in group.values() if rollout is not None]
        self.weights.played(step, rollouts)
        return rollouts, metrics | staleness(rollouts, step, given_up, self.schedule.ranks)

    def state(self) -> QueueState | None:
        """Return which groups were begun and not taken; None without staleness, where none are after a step."""
        with self._changed:
            return {"open": sorted(self._groups), "next": self._next} if self._max_staleness else None

    def load(self, state: QueueState | None) -> None:
        """Continue with the groups of a checkpoint; called before the first `take`."""
        self._resumed = state

    def close(self) -> None:
        """Abandon unfinished rollouts, and restore the server's weights."""
        if self._playing is not None:
            background.run(self._end())
        self.weights.end()

    async def _end(self) -> None:
        if self._player is not None:
            self._player.cancel()
            await asyncio.wait([self._player])

    def _begin(self, number: int) -> None:
        self._groups[number] = {}
        for rollout in self.schedule.group(number):
            recorded = None if self._journal is None else self._journal.kept(rollout)
            self._groups[number][rollout.rollout_id] = recorded
            if recorded is None:
                self._group_of[rollout.rollout_id] = number
                background.start(self._ahead.put(rollout))

    def _renew(self, groups: int, step: int) -> int:
        """Abandon groups too old for a step, and begin others up to `groups`; return the number abandoned.

        Nothing ages between two calls: what is sampled meanwhile is of the newest weights.
        """
        given_up = [number for number in self._groups if self._is_old(number, step)]
        while len(self._groups) - len(given_up) < groups:
            self._begin(self._next)
            given_up += [self._next] if self._is_old(self._next, step) else []
            self._next += 1
        for number in given_up:
            for rollout_id in self._groups.pop(number):
                if rollout_id in self._under_way:
                    background.start(self._under_way[rollout_id][0].break_off())
        return len(given_up)

    def _is_old(self, number: int, step: int) -> bool:
        versions = [
            oldest(rollout) if rollout else self._under_way[rollout_id][1]
            for rollout_id, rollout in self._groups[number].items()
            if rollout or rollout_id in self._under_way
        ]
        return any(version is not None and step - version > self._max_staleness for version in versions)

    def _wanted(self, rollout: LiveRollout) -> bool:
        """Return whether a rollout that is to be set up, or asked its next turn, may still be trained on."""
        with self._changed:
            if rollout.started:
                version = oldest(rollout)
                self._under_way[rollout.rollout_id] = rollout, self.policy.version if version is None else version
            return self._group_of[rollout.rollout_id] in self._groups

    async def _ended(self, rollout: LiveRollout) -> None:
        if self._journal is not None and rollout.terminated_by != GIVEN_UP:
            await self._journal.ended(rollout)
        with self._changed:
            self._under_way.pop(rollout.rollout_id, None)
            number = self._group_of.pop(rollout.rollout_id)
            if number in self._groups:
                self._groups[number][rollout.rollout_id] = rollout
                self._changed.notify_all()


def oldest(rollout: LiveRollout) -> int | None:
    """Return the oldest version of the weights that a rollout was sampled with; None where it is not known."""
    return min((v for step in rollout.steps if (v := step.sample.policy_version) is not None), default=None)


def staleness(rollouts: Sequence[LiveRollout], step: int, given_up: int, ranks: Ranks) -> dict[str, float]:
    """Return how many optimiser steps old the oldest weights of each rollout were: the mean, and the number above 0.

    given_up: groups of this process that had become too old since the step before.
    """
    gathered = ranks.gather(([version for rollout in rollouts if (version := oldest(rollout)) is not None], given_up))
    # After a kill, versions may be of steps that are taken again.
    behind = [max(step - version, 0) for versions, _ in gathered for version in versions]
    return {
        "sampling/staleness": sum(behind) / max(len(behind), 1),
        "sampling/stale_rollouts": float(sum(steps > 0 for steps in behind)),
        "sampling/groups_given_up": float(sum(number for _, number in gathered)),
    }


def trl_columns(rollouts: Sequence[LiveRollout], tokenizer: Any) -> dict[str, list[Any]]:
    """Return rollouts as TRL's columns: ids, log-probs, the mask of own tokens, and rewards."""
    columns: dict[str, list[Any]] = {name: [] for name in TRL_COLUMNS}
    for rollout in rollouts:
        tokens = own_rollout(rollout)
        if tokens is None:
            # It failed before its first action. TRL needs as many rows as prompts, so it gets one masked token behind
            # another, and no reward: a reward of 0 would blame the policy for the machinery.
            end = [end_id(tokenizer) or 0]
            tokens = OwnRollout(Tree(end, (end,)), [0], [0.0])
        reward = None if rollout.error else rollout.grade.reward
        row = (tokens.tree.prompt, tokens.tree.branches[0], tokens.logprobs, tokens.mask, reward)
        for name, value in zip(TRL_COLUMNS, row, strict=True):
            columns[name].append(value)
    return columns


def environment_reward(
    prompts: Any, completions: Any, environment_reward: list[float | None], **columns: Any
) -> list[float | None]:
    """TRL's reward function: return the environment's own reward; None, never zero, where it could not grade."""
    del prompts, completions, columns  # TRL 1.16 leaves None out of a group's mean
    return environment_reward
