"""Vote on the actions in a state: classes of equal actions, the teachers' majority, and the pairs that follow.

Two actions are equal when their canonical forms are (`canonical`) or, where an environment can tell, when running them
from a copy of the recorded state has the same outcome (`outcomes`).

Two rules: `majority_over_student` (more than half of all teachers agree on something the student did not do) and
`student_over_minority` (the student did what the majority would have done, a teacher would not have).

A teacher has one vote however often it was asked: its samples in a state are one distribution, and its vote is divided
among what it does, in the proportions in which it does it.

An action that ends the rollout can be graded on the spot (`fails_at_once`): one that fails is never chosen.
"""

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from stages import messages
from stages.envs import boundary
from stages.envs.base import ComparesOutcomes, Environment, Observation, Task
from stages.envs.bash import ActionError, parse_bash, same_observation
from stages.errors import InfrastructureError
from stages.messages import ToolCall

NO_THOUGHT = re.compile(r"^\s*<think>\s*</think>")
"""What some chat templates leave where a model did not reason."""
PLAIN = re.compile(r"[a-zA-Z0-9_@%+=:,./\- \t]*")
"""Words that no shell needs quotes for, and blanks."""
SHELL_ARGUMENTS = ("command", "cmd")
"""The names under which shell tools take their command."""
STUDENT = "student"
ROUNDING = 1e-9
"""Tolerance: thirds of votes do not add up to exactly one."""
Votes = dict[str, float]
"""Classes, and how many teachers back each, in fractions of a teacher."""


@dataclass(frozen=True)
class Preference:
    """One preference in one state: the actions of both sides, by whom, and how many teachers back each side."""

    rule: str
    chosen: str
    rejected: str
    rejected_by: str
    votes_chosen: float
    votes_rejected: float


@dataclass(frozen=True)
class Ballot:
    """The actions of student and teachers in a state.

    `teachers` maps each teacher to the texts of its samples, None for no complete answer; `classes` maps a text to its
    class, None for malformed. Texts of one class are equal actions.
    """

    student: str
    teachers: Mapping[str, Sequence[str | None]]
    classes: Mapping[str, str | None]

    def class_of(self, text: str | None) -> str | None:
        """Return the class of an action; None for no answer or a malformed one."""
        return None if text is None else self.classes[text]

    def vote(self, teacher: str) -> Votes:
        """Return one teacher's vote, divided by its samples; a missing or malformed sample votes for nothing."""
        samples, shares = self.teachers[teacher], Votes()
        for name in map(self.class_of, samples):
            if name is not None:
                shares[name] = shares.get(name, 0.0) + 1.0 / len(samples)
        return shares


def decide(ballot: Ballot) -> tuple[list[Preference], str | None]:
    """Return the preferences of a ballot, or none and the reason: missing_answers, no_majority, unanimous.

    The majority over the student where the student did something else; otherwise the student over each distinct action
    that some teacher does more often than what the majority does. A malformed answer is no action, so that it is never
    rejected in favour of one.
    """
    half = len(ballot.teachers) / 2 + ROUNDING
    if sum(any(text is not None for text in texts) for texts in ballot.teachers.values()) <= half:
        return [], "missing_answers"
    votes = Votes()
    for teacher in ballot.teachers:
        for name, share in ballot.vote(teacher).items():
            votes[name] = votes.get(name, 0.0) + share
    winner = max(votes, key=lambda name: votes[name], default=None)
    if winner is None or votes[winner] <= half:
        return [], "no_majority"
    votes = {name: round(number, 9) for name, number in votes.items()}
    own = ballot.class_of(ballot.student)
    if own != winner:
        texts = (text for texts in ballot.teachers.values() for text in texts)
        chosen = next(text for text in texts if text is not None and ballot.class_of(text) == winner)
        behind = votes.get(own, 0.0) if own is not None else 0.0
        return [Preference("majority_over_student", chosen, ballot.student, STUDENT, votes[winner], behind)], None
    found: dict[str, Preference] = {}
    for teacher, samples in ballot.teachers.items():
        shares = ballot.vote(teacher)
        for sample in samples:
            kind = ballot.class_of(sample)
            if sample is None or kind is None or kind in found or shares[kind] <= shares.get(winner, 0.0):
                continue
            sides = (ballot.student, sample)
            found[kind] = Preference("student_over_minority", *sides, teacher, votes[winner], votes[kind])
    return (list(found.values()), None) if found else ([], "unanimous")


def backers(ballot: Ballot, preference: Preference) -> list[str]:
    """Return who did the chosen action in at least one sample: the student first, then teachers in their order."""
    wanted = ballot.class_of(preference.chosen)
    by = [STUDENT] if preference.rejected_by != STUDENT else []
    return by + [name for name, texts in ballot.teachers.items() if wanted in map(ballot.class_of, texts)]


def class_names(classes: Mapping[str, str | None], forms: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return a name for every text's class that means the same in every state: the first of its canonical forms."""
    first: dict[str, str] = {}
    for text, canonical in forms.items():
        name = classes[text]
        if name is not None and canonical is not None:
            first[name] = min(first.get(name, canonical), canonical)
    return {text: None if name is None else first.get(name, name) for text, name in classes.items()}


def canonical(action: str) -> str | None:
    """Return the canonical form of an action's tool calls or of its ```bash block; None when it is malformed.

    Only spelling is touched (outer blanks, repeated blanks between words, kinds of quotes; order, blanks and escapes of
    JSON); whatever the shell or a tool could understand differently is left as written.
    """
    if calls := messages.read(action).calls:
        return "\n".join(map(canonical_call, calls))
    try:
        return canonical_command(parse_bash(action))
    except ActionError:
        return None


Form = Callable[[str], str | None]
"""The canonical form of an action, or None of a malformed one."""
form = lru_cache(65_536)(canonical)
"""`canonical` with a cache."""


@lru_cache(65_536)
def text_form(action: str) -> str:
    """Return the form of an action that is a text, such as a program: the text without reasoning and outer blanks."""
    return f"says: {NO_THOUGHT.sub('', messages.read(action).content).strip()}"


def canonical_command(command: str) -> str:
    """Return a shell command with blanks and quoting normalised where this does not change its meaning."""
    command = command.strip()
    if PLAIN.fullmatch(command):
        return " ".join(command.split())
    if any(character in command for character in "\n$`*?[{~<>|;&()#\\!"):
        return command
    try:
        return shlex.join(shlex.split(command))
    except ValueError:
        return command


def canonical_call(call: ToolCall) -> str:
    """Return a tool's name with its arguments as JSON in one spelling; other arguments stay as written."""
    if not messages.is_object(call.arguments):
        return f"{call.name}({json.dumps(call.arguments)})"
    arguments = {
        key: canonical_command(value) if isinstance(value, str) and key in SHELL_ARGUMENTS else _canonical_value(value)
        for key, value in json.loads(call.arguments).items()
    }
    return f"{call.name}({json.dumps(arguments, sort_keys=True, separators=(',', ':'))})"


def _canonical_value(value: Any) -> Any:
    """Return a JSON value in which 1.0 and 1 are one number."""
    if isinstance(value, dict):
        return {key: _canonical_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_canonical_value(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def canonical_answer(action: str) -> str:
    """Return the form of an action without a command or call: its text without reasoning, blanks normalised."""
    return "says: " + " ".join(NO_THOUGHT.sub("", messages.read(action).content).split())


class NotReproducible(Exception):
    """The recorded actions did not lead to the recorded observations."""


@dataclass(frozen=True)
class StatePath:
    """How a recorded state was reached: the task, the actions that led there and the observation of each."""

    task: Task
    actions: tuple[str, ...]
    observations: tuple[str, ...]


@dataclass(frozen=True)
class ActionOutcome:
    """The outcome of an action: a digest, equal for equal outcomes, and whether the action ended the rollout."""

    digest: str
    ends: bool


def outcomes(make: Callable[[], Environment], path: StatePath, candidates: Sequence[str]) -> list[ActionOutcome]:
    """Return the outcome of every candidate action in a state.

    Each candidate is executed in a new environment after the recorded actions, each of which must give the recorded
    observation, but for durations and memory addresses. Raises `NotReproducible` when one does not, so that nothing is
    claimed of the state, and `InfrastructureError` when the machinery breaks.
    """
    found = []
    for candidate in candidates:
        with closing(make()) as environment:
            if not isinstance(environment, ComparesOutcomes):
                raise InfrastructureError(f"{environment.name} cannot compare outcomes")
            observation = _carried_out(environment, path, candidate)
            found.append(ActionOutcome(environment.outcome(observation), observation.stop is not None))
    return found


def fails_at_once(make: Callable[[], Environment], path: StatePath, candidate: str) -> bool:
    """Return whether an action that ends the rollout in a state fails: the environment grades what it leaves behind."""
    with closing(make()) as environment:
        _carried_out(environment, path, candidate)
        return boundary.grade(environment.grade(), environment).passed is False


def _carried_out(environment: Environment, path: StatePath, candidate: str) -> Observation:
    """Return the observation of an action in a recorded state, which the environment is brought to first."""
    environment.reset(path.task)
    for index, (action, seen) in enumerate(zip(path.actions, path.observations, strict=True)):
        if not same_observation(environment.step(action).content, seen):
            raise NotReproducible(f"action {index} gave another observation than the recorded one")
    return environment.step(candidate)
