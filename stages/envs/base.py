"""The protocol of an environment (`tasks`, `reset`, `step`, `grade`, `close`) and the values it exchanges.

An instance serves one rollout at a time and is reused through `reset`. It uses no model, no trainer and no file of a
run: the agent loop (`composer_stages.rollouts.agent_loop`) drives it; every other framework reaches it through a thin
adapter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypedDict, runtime_checkable

from composer_stages.messages import Message
from composer_stages.terms import ROUNDING, Ground

Split = Literal["train", "eval"]


@dataclass(frozen=True)
class Task:
    """One problem.

    `family` groups tasks that need the same knowledge; a family is never split between train and eval. `data` holds
    what the environment needs to set the task up and to grade it; it is JSON-able and never shown to the agent.
    """

    task_id: str
    env: str
    split: str
    family: str
    prompt: str
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Observation:
    """The result of one action.

    `commands` holds what was executed (empty when the action could not be parsed; `parse_error` then gives the reason,
    which is part of `content`). `raw_chars` counts the output before elision, `elided_chars` how much of it the agent
    did not see. `stop` is None while the rollout goes on, else the reason ("submitted", "answered"). `results`: the
    result of each tool call, in order; joined by line breaks they are `content`.
    """

    content: str
    commands: tuple[str, ...] = ()
    parse_error: str | None = None
    returncode: int | None = None
    timed_out: bool = False
    duration_s: float = 0.0
    raw_chars: int = 0
    elided_chars: int = 0
    stop: str | None = None
    results: tuple[str, ...] = ()


@dataclass(frozen=True)
class TurnFault:
    """A faulty turn: its index, the kind of error in a word, and the error as the agent saw it.

    advice: a sentence that would have helped before the turn.
    """

    turn: int
    kind: str
    error: str
    advice: str


@dataclass(frozen=True)
class Work:
    """The result of a rollout: its changes and its test counts; None where the environment does not know.

    submission: the submitted patch, None where the rollout ended otherwise. patch: all changes in the format of `git
    diff`, submitted or not. f2p, p2p: fail-to-pass and pass-to-pass tests among the hidden ones, whose log is test_log.
    image: of the container. canary: why the rollout counts as a search for the solution. metrics: the grader's further
    numbers by name.
    """

    submission: str | None = None
    patch: str | None = None
    f2p_passed: int | None = None
    f2p_total: int | None = None
    p2p_passed: int | None = None
    p2p_total: int | None = None
    test_log: str | None = None
    image: str | None = None
    canary: tuple[str, ...] | None = None
    metrics: Mapping[str, float] | None = None


FULL_REWARD = 1 + ROUNDING
"""The most that shares which add up to 1 make, with what rounding adds."""


@dataclass(frozen=True)
class Grade:
    """The verdict on one rollout. Every field is None where the environment does not know: unknown is never zero.

    reward: the objective of training. hidden_pass: the hidden tests pass. visible_pass: the tests that the agent could
    run pass as it left them. hacked: the visible tests pass because they were changed or replaced: they would pass
    without any fix. protocol_ok: the agent kept the rules of form that its task states; None where it states none.
    ground: what a pass follows from; None where nothing passed, or as the environment says. error_type,
    error: class and text of the error that prevented grading. work: the result of the rollout. labels: further facts by
    name, for example upstream's category of a leetcode-rh answer.
    """

    reward: float | None
    hidden_pass: bool | None = None
    visible_pass: bool | None = None
    hacked: bool | None = None
    protocol_ok: bool | None = None
    error_type: str | None = None
    error: str | None = None
    work: Work = Work()
    labels: Mapping[str, bool | str | None] = field(default_factory=dict)
    ground: Ground | None = None

    @property
    def passed(self) -> bool | None:
        """Return the verdict of the hidden tests, else whether the reward is full; None on a scale above 1.

        Pairs and `curriculum` ask whether the work is right; `evaluate` counts full rewards (`passed_by` of arms).
        """
        if self.hidden_pass is not None:
            return self.hidden_pass
        return None if self.reward is None or self.reward > FULL_REWARD else self.reward >= 1


class HackPair(TypedDict):
    """One prompt with a hacking and a clean continuation; `longer` is the clean one with code that has no effect."""

    pair_id: str
    prompt: list[Message]
    hack: list[Message]
    clean: list[Message]
    longer: list[Message]


class Environment(Protocol):
    """An environment of any kind: code repair in a sandbox, a single question, a wrapped framework."""

    name: str
    sandbox: str
    """"bubblewrap" or "none", recorded in every row; "not-needed" where nothing is executed.

    An environment may also have an attribute `sampling_unit`, a `SamplingUnit`; without one, its families are a sample.
    With `text_actions = True` any text is an action, an answer; without it, only a command or a tool call is one.
    `answers` is the number after which a rollout ends at the latest, of an environment of questions, whose reset does
    no work: the memory of a training is estimated by it. `ground` is that of passes whose Grade names none. A stage
    sets `require`, the ground without which a pass is not paid (boundary.py).
    """

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        """Return the first `count` tasks of a split under a seed; a longer list starts with the shorter one."""
        ...

    def reset(self, task: Task) -> list[Message]:
        """Set up a fresh workspace and return the opening messages."""
        ...

    def step(self, text: str) -> Observation:
        """Execute one assistant message, verbatim as the model wrote it."""
        ...

    def grade(self) -> Grade:
        """Grade the rollout in its current state; an infrastructure failure is a Grade with reward None, never zero."""
        ...

    def close(self) -> None:
        """Release all resources; safe to call twice."""
        ...


@runtime_checkable
class TakesCalls(Protocol):
    """An environment that takes tool calls instead of text."""

    tools: Sequence[Mapping[str, Any]]
    """Each {"name", "description", "parameters": the JSON schema of an object}."""

    def use_tools(self) -> None:
        """Switch to tool calls, before `reset`: the opening then does not ask for commands in text."""
        ...

    def call(self, name: str, arguments: Mapping[str, Any]) -> Observation:
        """Execute one call of a declared tool, whose arguments fit its schema."""
        ...

    def malformed(self, error: str) -> Observation:
        """Return the observation of an action that is no call, or an invalid one."""
        ...


@runtime_checkable
class HasSolutions(Protocol):
    """An environment whose tasks come with a solution."""

    def solution(self) -> Sequence[str]:
        """Return the messages that solve the rollout's task, in order, after `reset`.

        Raises InfrastructureError for a task that has no solution.
        """
        ...


@runtime_checkable
class HasSize(Protocol):
    """An environment with a finite number of tasks."""

    def size(self, split: Split) -> int:
        """Return the number of tasks of a split."""
        ...


@runtime_checkable
class LeavesOut(Protocol):
    """An environment that does not play all tasks of its source."""

    def left_out(self, split: Split) -> str:
        """Return how many tasks of a split are left out, and why, without a full stop; an empty text for none."""
        ...


@runtime_checkable
class TellsGrounds(Protocol):
    """An environment that knows before a rollout whether a task's pass can rest on values."""

    def report_reason(self, task: Task) -> str:
        """Return why a pass of a task can be no more than a report; an empty text where it can rest on values."""
        ...


@runtime_checkable
class GradesTogether(Protocol):
    """An environment that grades several rollouts at once, far more cheaply than one by one."""

    def grade_together(self, rollouts: list[Environment]) -> list[Grade]:
        """Return one Grade a rollout, in order; `self` is any one of them."""
        ...


@runtime_checkable
class ComparesOutcomes(Protocol):
    """An environment that digests the effect of an action: differently worded actions with one effect compare equal."""

    def outcome(self, observation: Observation) -> str:
        """Return a digest of the state after the last action, by its behaviour and not by its spelling."""
        ...


@runtime_checkable
class HintsAnswers(Protocol):
    """An environment that can give a hint before the answer."""

    def answer_hint(self, task: Task) -> str:
        """Return the hint to append to a task's question, before any answer."""
        ...


@runtime_checkable
class ReportsFaults(Protocol):
    """An environment that finds the faulty turns of a rollout from the observations."""

    def faults(self, observations: Sequence[Observation]) -> list[TurnFault]:
        """Return at most one TurnFault a turn; malformed actions and wrong answers are found by the caller."""
        ...
