"""The agent loop, one for all environments: sample, step, until the episode ends, then grade.

Episodes of a batch advance in lock step, so that a local model samples them together. A bad rollout is data; only
trouble with the machinery (no sandbox, wrong key, empty budget) is raised.
"""

import errno
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from stages.envs import boundary
from stages.envs.base import Environment, Grade, GradesTogether, Observation, Task
from stages.errors import ComposerError, InfrastructureError
from stages.messages import Message
from stages.policy.base import Policy, Sample, Turn
from stages.runs import store

Answer = TypeVar("Answer")


@dataclass
class Step:
    """One action and what came of it. `new_messages` are those that the state gained since the previous step."""

    new_messages: list[Message]
    num_messages: int
    state_sha256: str
    sample: Sample
    observation: Observation
    seed: int


@dataclass
class Episode:
    """One rollout of one task: identity, transcript, steps, verdict."""

    task: Task
    sample_idx: int
    seed: int
    messages: list[Message] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    grade: Grade = field(default_factory=lambda: Grade(reward=None))
    terminated_by: str | None = None
    error: tuple[str, str] | None = None
    wall_s: float = 0.0

    @property
    def rollout_id(self) -> str:
        """Content key: the same task, sample and seed give the same id."""
        return f"{self.task.task_id}#{self.sample_idx}@{self.seed}"

    @property
    def held_ids(self) -> list[int] | None:
        """All token ids so far as they were sampled, or None when the policy has none to give."""
        if not self.steps or self.steps[-1].sample.prompt_ids is None:
            return None
        last = self.steps[-1].sample
        return [*(last.prompt_ids or []), *(last.completion_ids or [])]


def step_seed(episode: Episode, step: int) -> int:
    """The seed of one answer: a function of task, sample, the episode's seed and the step alone."""
    return int(store.digest([episode.rollout_id, step])[:15], 16)


def play(
    make: Callable[[], Environment],
    policy: Policy,
    episodes: Sequence[Episode],
    *,
    max_steps: int,
    threads: int = 4,
    before_turn: Callable[[], None] = lambda: None,
) -> list[Episode]:
    """Play every episode to its end and grade it; returns the same objects, filled in."""
    environments = [make() for _ in episodes]
    try:
        with ThreadPoolExecutor(threads) as pool:
            pairs = list(zip(episodes, environments, strict=True))
            list(pool.map(lambda pair: _reset(*pair), pairs))
            while active := [pair for pair in pairs if pair[0].terminated_by is None]:
                before_turn()
                _advance(active, policy, max_steps, pool)
        _grade(pairs)
    finally:
        for episode, environment in zip(episodes, environments, strict=True):
            _tried(episode, environment, environment.close)
    return list(episodes)


def _reset(episode: Episode, environment: Environment) -> None:
    opening = _tried(episode, environment, lambda: boundary.messages(environment.reset(episode.task)))
    episode.messages = opening or []


def _tried(episode: Episode, environment: Environment, ask: Callable[[], Answer]) -> Answer | None:
    """What the environment answers; where it breaks, the episode ends with the error, and the others go on."""
    try:
        return ask()
    except InfrastructureError as error:
        _fail(episode, "env_error", type(error).__name__, str(error))
    except (ComposerError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        _fail(episode, "env_error", type(error).__name__, boundary.blamed(error, environment, episode.task.task_id))
    return None


def _fail(episode: Episode, terminated_by: str, error_type: str, error: str) -> None:
    episode.terminated_by, episode.error = terminated_by, (error_type, error)


def _advance(
    active: list[tuple[Episode, Environment]], policy: Policy, max_steps: int, pool: ThreadPoolExecutor
) -> None:
    """One turn of every active episode."""
    seeds = [step_seed(episode, len(episode.steps)) for episode, _ in active]
    turns = [Turn(list(e.messages), seed, e.held_ids) for (e, _), seed in zip(active, seeds, strict=True)]
    samples = [
        sample
        for start in range(0, len(turns), policy.batch_size)
        for sample in policy.sample(turns[start : start + policy.batch_size])
    ]

    def act(pair: tuple[Episode, Environment], sample: Sample, seed: int) -> None:
        _act(*pair, sample, seed, max_steps)

    list(pool.map(act, active, samples, seeds))


def _act(episode: Episode, environment: Environment, sample: Sample, seed: int, max_steps: int) -> None:
    """Carry out one sampled action and decide whether the episode goes on."""
    if sample.error_type is not None:
        _fail(episode, "model_error", sample.error_type, sample.error or "")
        return
    truncated = sample.finish_reason == "length"
    if truncated:
        observation: Observation | None = Observation("")
    else:
        observation = _tried(episode, environment, lambda: boundary.observation(environment.step(sample.text)))
    if observation is None:
        return
    _record(episode, sample, observation, seed)
    if truncated:
        episode.terminated_by = "max_tokens"
    elif observation.stop is not None:
        episode.terminated_by = observation.stop
    elif len(episode.steps) >= max_steps:
        episode.terminated_by = "max_steps"


def _record(episode: Episode, sample: Sample, observation: Observation, seed: int) -> None:
    seen = episode.steps[-1].num_messages if episode.steps else 0
    state = episode.messages
    episode.steps.append(Step(state[seen:], len(state), state_sha256(state), sample, observation, seed))
    episode.messages = [*state, {"role": "assistant", "content": sample.text}]
    if observation.stop is None and sample.finish_reason != "length":
        episode.messages.append({"role": "user", "content": observation.content})


def state_sha256(messages: list[Message]) -> str:
    """The digest that identifies a state: canonical JSON of all its messages."""
    return store.digest(messages)


def _grade(pairs: list[tuple[Episode, Environment]]) -> None:
    """Grade every episode whose machinery worked; together where the environment can."""
    played = [(episode, environment) for episode, environment in pairs if episode.error is None]
    if not played:
        return
    together = _graded_together([environment for _, environment in played])
    for index, (episode, environment) in enumerate(played):
        ask = environment.grade if together is None else partial(together.__getitem__, index)
        found = _tried(episode, environment, lambda ask=ask: boundary.grade(ask()))  # type: ignore[misc]
        episode.grade = found or Grade(reward=None)
        if found is not None and found.error_type is not None:
            episode.error = (found.error_type, found.error or "")


def _graded_together(environments: list[Environment]) -> list[Grade] | None:
    """All grades at once where the environment can; None where each has to be asked, also because that broke."""
    first = environments[0]
    if not isinstance(first, GradesTogether):
        return None
    with suppress(ArithmeticError, AttributeError, LookupError, NameError, RuntimeError, TypeError, ValueError):
        grades = first.grade_together(environments)
        return grades if len(grades) == len(environments) else None
    return None
