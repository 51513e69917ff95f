"""What an environment is: one plain class with `tasks`, `reset`, `step`, `grade`, `close`, and the values it exchanges.

An instance serves one episode at a time and is reused through `reset`. It knows no model, no trainer and no file of a
run: the agent loop (`stages.rollouts.agent_loop`) drives it; every other framework reaches it through a thin adapter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from stages.messages import Message

Split = Literal["train", "eval"]

TWIN = "~twin"
"""The ending of the id of an impossible variant: its tests contradict its description, so any pass of it is a hack."""


@dataclass(frozen=True)
class Task:
    """One problem.

    `family` groups tasks that share what has to be known; a family is never split between train and eval. `data` holds
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
    """What came back from one action.

    `commands` holds what was executed (empty when the action could not be parsed; `parse_error` then says why and the
    text is part of `content`). `raw_chars` counts the output before elision, `elided_chars` how much of it the agent
    did not see. `stop` is None while the episode goes on, else the reason ("submitted", "answered"). `results`: of
    tool calls what came back for each, in their order; they make up `content`, a line break between them.
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
    """A turn that went wrong: its index, the kind of error in a word, and the error as the agent saw it.

    advice: a sentence that would have helped before the turn.
    """

    turn: int
    kind: str
    error: str
    advice: str


@dataclass(frozen=True)
class Work:
    """What an episode left behind and how it did in its tests; None where the environment cannot tell.

    submission: what was handed in, None where the episode ended otherwise. patch: all that was changed, as `git diff`
    writes it, handed in or not. f2p, p2p: tests that had to come to pass, and to stay passing, in the strict run, whose
    log is test_log. image: of the container. canary: why the episode counts as a search for the solution.
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


@dataclass(frozen=True)
class Grade:
    """The verdict on one episode. Every field is None where the environment cannot tell: unknown is never zero.

    reward: what training maximises. gt_pass: the hidden tests pass. visible_pass: the tests that the agent could run
    pass as it left them. hacked: the visible tests pass because they were changed or replaced: they would pass without
    any fix. protocol_ok: the agent kept to the protocol (well-formed actions, ran the tests before it submitted).
    error_type, error: the class and the text of the trouble that kept the episode from being graded. work: what the
    episode left. labels: what the environment can tell beyond that, by name, for example upstream's category of a
    leetcode-rh answer.
    """

    reward: float | None
    gt_pass: bool | None = None
    visible_pass: bool | None = None
    hacked: bool | None = None
    protocol_ok: bool | None = None
    error_type: str | None = None
    error: str | None = None
    work: Work = Work()
    labels: Mapping[str, bool | str | None] = field(default_factory=dict)


class Environment(Protocol):
    """An environment of any kind: code repair in a sandbox, a single question, a wrapped framework."""

    name: str
    sandbox: str
    """"bubblewrap" or "none", recorded in every row; "not-needed" where nothing is executed.

    An environment may also say `fixed_families = True`: its families are a benchmark's own strata and not a sample of
    families, so that statistics speak of other tasks of these families only.
    """

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        """The first `count` tasks of a split under a seed; a longer list starts with the shorter one."""
        ...

    def reset(self, task: Task) -> list[Message]:
        """Set up a fresh workspace and return the opening messages."""
        ...

    def step(self, text: str) -> Observation:
        """Carry out one assistant message, verbatim as the model wrote it."""
        ...

    def grade(self) -> Grade:
        """Judge the episode as it stands; a failure of the machinery is a Grade with reward None, never a zero."""
        ...

    def close(self) -> None:
        """Free everything; safe to call twice."""
        ...


@runtime_checkable
class TakesCalls(Protocol):
    """An environment that can be acted in by tool calls instead of text."""

    tools: Sequence[Mapping[str, Any]]
    """Each {"name", "description", "parameters": the JSON schema of an object}."""

    def use_tools(self) -> None:
        """Said before `reset`: actions will be calls, so the opening does not ask for commands in text."""
        ...

    def call(self, name: str, arguments: Mapping[str, Any]) -> Observation:
        """Carry out one call of a declared tool, whose arguments fit its schema."""
        ...

    def malformed(self, error: str) -> Observation:
        """What the agent is told about an action that is no call, or a wrong one."""
        ...


@runtime_checkable
class GradesTogether(Protocol):
    """An environment that grades several episodes at once, far more cheaply than one by one."""

    def grade_together(self, episodes: list[Environment]) -> list[Grade]:
        """One Grade an episode, in order; `self` is any one of them."""
        ...


@runtime_checkable
class ComparesOutcomes(Protocol):
    """An environment that can say what an action led to, so that differently worded actions can be found equal."""

    def outcome(self, observation: Observation) -> str:
        """A digest of what can be observed after the last action: the state as it behaves, not as it is spelled."""
        ...


@runtime_checkable
class ReportsFaults(Protocol):
    """An environment that can say which turns of an episode went wrong, from what came back after each."""

    def faults(self, observations: Sequence[Observation]) -> list[TurnFault]:
        """At most one TurnFault a turn; malformed actions and wrong answers are found without its help."""
        ...
