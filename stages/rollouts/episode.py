"""The agent loop, one for all environments: sample, step, until the episode ends, then grade.

Here episodes of a batch advance in lock step, so that a local model samples them together; independent.py plays the
same turns each at its own pace. A bad rollout is data; only trouble with the machinery (no sandbox, wrong key, empty
budget) is raised.
"""

import errno
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from stages.envs import boundary
from stages.envs.base import Environment, Grade, Observation, Task
from stages.envs.tool_calls import carry_out
from stages.errors import ComposerError, InfrastructureError
from stages.messages import Message
from stages.policy.base import Policy, Sample, Turn
from stages.rollouts.history import FULL, GO_ON
from stages.rollouts.limits import NO_LIMITS, EpisodeLimits, Rules
from stages.rollouts.turns import next_turn
from stages.runs import store

Answer = TypeVar("Answer")


@dataclass
class Step:
    """One action and what came of it; `summary`: it was a summary that the policy was asked for, and no action.

    `new_messages` are those that the transcript gained since the previous step, `num_messages` all of them; the state,
    whose digest this is, is what the policy was shown.
    """

    new_messages: list[Message]
    num_messages: int
    state_sha256: str
    sample: Sample
    observation: Observation
    seed: int
    summary: bool = False


@dataclass
class Episode:
    """One rollout of one task: identity, transcript, steps, verdict.

    `history`: how much of it the policy was shown; `summarising`: what is asked for next is a summary. `tools`: what it
    could call. `started`: on the monotonic clock.
    """

    task: Task
    sample_idx: int
    seed: int
    messages: list[Message] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    grade: Grade = field(default_factory=lambda: Grade(reward=None))
    terminated_by: str | None = None
    error: tuple[str, str] | None = None
    wall_s: float = 0.0
    history: str = FULL
    summarising: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()
    started: float = 0.0

    @property
    def rollout_id(self) -> str:
        """Content key: the same task, sample and seed give the same id."""
        return f"{self.task.task_id}#{self.sample_idx}@{self.seed}"

    @property
    def held_ids(self) -> list[int] | None:
        """All token ids so far as they were sampled, or None when the policy has none to give, or is not shown all."""
        if self.history != FULL or not self.steps or self.steps[-1].sample.prompt_ids is None:
            return None
        last = self.steps[-1].sample
        return [*(last.prompt_ids or []), *(last.completion_ids or [])]


def play(
    make: Callable[[], Environment],
    policy: Policy,
    episodes: Sequence[Episode],
    *,
    max_steps: int,
    limits: EpisodeLimits = NO_LIMITS,
    history: str = FULL,
    threads: int = 4,
    before_turn: Callable[[], None] = lambda: None,
) -> list[Episode]:
    """Play every episode to its end and grade it; returns the same objects, filled in."""
    rules = Rules(max_steps, limits, history, policy.config.tool_calls != "none")
    environments = [make() for _ in episodes]
    try:
        with ThreadPoolExecutor(threads) as pool:
            pairs = list(zip(episodes, environments, strict=True))
            list(pool.map(partial(begin, rules), episodes, environments))
            while active := [pair for pair in pairs if pair[0].terminated_by is None]:
                before_turn()
                _advance(active, policy, rules, pool)
            grade(pairs, pool)
    finally:
        for episode, environment in zip(episodes, environments, strict=True):
            end(episode, environment)
    return list(episodes)


def begin(rules: Rules, episode: Episode, environment: Environment) -> None:
    """Set the environment up."""
    episode.started, episode.history = time.monotonic(), rules.history
    if rules.calls:
        episode.tools = boundary.tools(environment)
    opening = _tried(episode, environment, lambda: boundary.messages(environment.reset(episode.task)))
    episode.messages = opening or []


def end(episode: Episode, environment: Environment) -> None:
    """Free what the environment holds."""
    _tried(episode, environment, environment.close)


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


def _advance(active: list[tuple[Episode, Environment]], policy: Policy, rules: Rules, pool: ThreadPoolExecutor) -> None:
    """One turn of every active episode that its limits let go on."""
    asked = [(*pair, turn) for pair in active if (turn := next_turn(pair[0], policy, rules)) is not None]
    turns = [turn for _, _, turn in asked]
    samples = [
        sample
        for start in range(0, len(turns), policy.batch_size)
        for sample in policy.sample(turns[start : start + policy.batch_size])
    ]

    def answered(asked: tuple[Episode, Environment, Turn], sample: Sample) -> None:
        act(*asked, sample, rules)

    list(pool.map(answered, asked, samples))


def act(episode: Episode, environment: Environment, turn: Turn, sample: Sample, rules: Rules) -> None:
    """Carry out one sampled action and decide whether the episode goes on."""
    if sample.error_type == "context":
        episode.terminated_by = "context"
        return
    if sample.error_type is not None:
        _fail(episode, "model_error", sample.error_type, sample.error or "")
        return
    truncated = sample.finish_reason == "length"
    if truncated:
        observation: Observation | None = Observation("")
    elif episode.summarising:
        observation = Observation(GO_ON)
    else:
        step = partial(carry_out, environment) if episode.tools else environment.step
        observation = _tried(episode, environment, lambda: boundary.observation(step(sample.text)))
    if observation is None:
        return
    _record(episode, turn, sample, observation)
    if truncated:
        episode.terminated_by = "max_tokens"
    elif observation.stop is not None:
        episode.terminated_by = observation.stop
    elif sum(not step.summary for step in episode.steps) >= rules.max_steps:
        episode.terminated_by = "max_steps"


def _record(episode: Episode, turn: Turn, sample: Sample, observation: Observation) -> None:
    seen = episode.steps[-1].num_messages if episode.steps else 0
    whole = episode.messages
    digest, summary = state_sha256(turn.messages), episode.summarising
    episode.steps.append(Step(whole[seen:], len(whole), digest, sample, observation, turn.seed, summary))
    episode.messages = [*whole, {"role": "assistant", "content": sample.text}]
    if observation.stop is None and sample.finish_reason != "length":
        results = [{"role": "tool", "content": result} for result in observation.results]
        episode.messages += results or [{"role": "user", "content": observation.content}]


def state_sha256(messages: list[Message]) -> str:
    """The digest that identifies a state: canonical JSON of all its messages."""
    return store.digest(messages)


def grade(pairs: list[tuple[Episode, Environment]], pool: ThreadPoolExecutor | None = None) -> None:
    """Grade every episode whose machinery worked: together where the environment can, else side by side in `pool`."""
    played = [(episode, environment) for episode, environment in pairs if episode.error is None]
    if not played:
        return
    together = boundary.grades_together([environment for _, environment in played])
    asks = (
        [environment.grade for _, environment in played]
        if together is None
        else [partial(together.__getitem__, index) for index in range(len(played))]
    )

    def one(pair: tuple[Episode, Environment], ask: Callable[[], Grade]) -> None:
        episode, environment = pair
        found = _tried(episode, environment, lambda: boundary.grade(ask()))
        episode.grade = found or Grade(reward=None)
        if found is not None and found.error_type is not None:
            episode.error = (found.error_type, found.error or "")

    list((map if pool is None else pool.map)(one, played, asks))
