"""Classes of equal actions, the majority of the teachers, and the pairs that follow, or the reason why none does.

Two rules: `majority_over_student` (more than half of all teachers agree on something the student did not do) and
`student_over_minority` (the student did what the majority would have done, a teacher would not have).

A teacher has one vote however often it was asked: its samples in a state are one distribution, and its vote is divided
among what it does, in the proportions in which it does it.
"""

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from stages import messages
from stages.envs.base import ComparesOutcomes, Environment, Task
from stages.envs.bash import ActionError, parse_bash
from stages.errors import InfrastructureError
from stages.messages import ToolCall

STUDENT = "student"
ROUNDING = 1e-9
"""Thirds of votes do not add up to whole ones."""
Votes = dict[str, float]
"""Classes and how many teachers are behind them, in parts of a teacher."""


@dataclass(frozen=True)
class Preference:
    """One preference in one state: what was chosen and rejected, by whom, and how many teachers back each side."""

    rule: str
    chosen: str
    rejected: str
    rejected_by: str
    votes_chosen: float
    votes_rejected: float


@dataclass(frozen=True)
class Ballot:
    """What student and teachers did in a state.

    `teachers` maps each teacher to the texts of its samples, None for no whole answer; `classes` maps a text to its
    class, None for malformed. Texts of one class are equal actions.
    """

    student: str
    teachers: Mapping[str, Sequence[str | None]]
    classes: Mapping[str, str | None]

    def class_of(self, text: str | None) -> str | None:
        """The class of an action; None for no answer or a malformed one."""
        return None if text is None else self.classes[text]

    def vote(self, teacher: str) -> Votes:
        """One teacher's vote, divided by its samples; what is missing or malformed votes for nothing."""
        samples, shares = self.teachers[teacher], Votes()
        for name in map(self.class_of, samples):
            if name is not None:
                shares[name] = shares.get(name, 0.0) + 1.0 / len(samples)
        return shares


def decide(ballot: Ballot) -> tuple[list[Preference], str | None]:
    """The preferences of a ballot, or none and the reason: missing_answers, no_majority, unanimous."""
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
    if ballot.class_of(ballot.student) != winner:
        return [_majority_over_student(ballot, winner, votes)], None
    preferences = _student_over_minority(ballot, winner, votes)
    return (preferences, None) if preferences else ([], "unanimous")


def _majority_over_student(ballot: Ballot, winner: str, votes: Votes) -> Preference:
    texts = (text for texts in ballot.teachers.values() for text in texts)
    chosen = next(text for text in texts if text is not None and ballot.class_of(text) == winner)
    own = ballot.class_of(ballot.student)
    behind = votes.get(own, 0.0) if own is not None else 0.0
    return Preference("majority_over_student", chosen, ballot.student, STUDENT, votes[winner], behind)


def _student_over_minority(ballot: Ballot, winner: str, votes: Votes) -> list[Preference]:
    """One preference for each distinct action that some teacher does more often than what the majority does.

    A malformed answer is no action, so that it is not rejected in favour of one.
    """
    preferences: dict[str, Preference] = {}
    for teacher, texts in ballot.teachers.items():
        shares = ballot.vote(teacher)
        for text in texts:
            name = ballot.class_of(text)
            if text is None or name is None or name in preferences or shares[name] <= shares.get(winner, 0.0):
                continue
            preferences[name] = Preference(
                "student_over_minority", ballot.student, text, teacher, votes[winner], votes[name]
            )
    return list(preferences.values())


def backers(ballot: Ballot, preference: Preference) -> list[str]:
    """Who did what was chosen in at least one sample: the student where it did, then teachers in their order."""
    wanted = ballot.class_of(preference.chosen)
    by = [STUDENT] if preference.rejected_by != STUDENT else []
    return by + [name for name, texts in ballot.teachers.items() if wanted in map(ballot.class_of, texts)]


def merged(canonical: Mapping[str, str | None], outcomes: Mapping[str, str]) -> dict[str, str | None]:
    """Classes of texts: by outcome where one is known for the canonical form, else by the canonical form itself."""
    return {text: None if form is None else outcomes.get(form, form) for text, form in canonical.items()}


def distinct(forms: Sequence[str | None]) -> list[str]:
    """The distinct well-formed canonical forms, in order."""
    return list(dict.fromkeys(form for form in forms if form is not None))


# ---- canonical
# The canonical form of an action: what two spellings of one command or one tool call share.

NO_THOUGHT = re.compile(r"^\s*<think>\s*</think>")
"""What some chat templates leave where a model did not think."""
PLAIN = re.compile(r"[a-zA-Z0-9_@%+=:,./\- \t]*")
"""Words that no shell needs quotes for, and blanks."""
SHELL_ARGUMENTS = ("command", "cmd")
"""The names under which shell tools take their command."""


def canonical(action: str) -> str | None:
    """The canonical form of an action's tool calls or of its ```bash block; None when it is malformed.

    Only spelling is touched (outer blanks, repeated blanks between words, kinds of quotes; order, blanks and escapes of
    JSON); whatever the shell or a tool could understand differently is left as written.
    """
    if calls := messages.read(action).calls:
        return "\n".join(map(canonical_call, calls))
    try:
        return canonical_command(parse_bash(action))
    except ActionError:
        return None


form = lru_cache(65_536)(canonical)
"""The same, remembered for texts that come again."""


def canonical_command(command: str) -> str:
    """A shell command with blanks and quoting normalised where the shell could not tell the difference."""
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
    """A tool's name with its arguments as JSON in one spelling; arguments that are no JSON object stay as written."""
    if not messages.is_object(call.arguments):
        return f"{call.name}({json.dumps(call.arguments)})"
    arguments = {key: _argument(key, value) for key, value in json.loads(call.arguments).items()}
    return f"{call.name}({json.dumps(arguments, sort_keys=True, separators=(',', ':'))})"


def _argument(key: str, value: Any) -> Any:
    if isinstance(value, str) and key in SHELL_ARGUMENTS:
        return canonical_command(value)
    return _number(value)


def _number(value: Any) -> Any:
    """1.0 and 1 are one number in JSON."""
    if isinstance(value, dict):
        return {key: _number(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_number(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def canonical_answer(action: str) -> str:
    """What an action without a command or call says, blanks normalised and reasoning left out."""
    return "says: " + " ".join(NO_THOUGHT.sub("", messages.read(action).content).split())


# ---- outcomes
# What an action led to: it is executed from a copy of the recorded state, reached by repeating the recorded actions.
#
# The repetition is checked: each observation must come out as recorded, else the state is not reproducible and
# nothing is
# claimed.


class NotReproducible(Exception):
    """The recorded actions did not lead to the recorded observations."""


@dataclass(frozen=True)
class State:
    """A recorded state: the task, the actions that led there and what each of them showed."""

    task: Task
    actions: tuple[str, ...]
    observations: tuple[str, ...]


def outcomes(make: Callable[[], Environment], state: State, candidates: Sequence[str]) -> list[str]:
    """A digest of the outcome of every candidate action in a state; equal digests mean equal outcomes.

    Raises `NotReproducible` when the state cannot be reached again, `InfrastructureError` when the machinery breaks.
    """
    return [_outcome(make(), state, candidate) for candidate in candidates]


def _outcome(environment: Environment, state: State, candidate: str) -> str:
    try:
        if not isinstance(environment, ComparesOutcomes):
            raise InfrastructureError(f"{environment.name} cannot compare outcomes")
        environment.reset(state.task)
        for index, (action, seen) in enumerate(zip(state.actions, state.observations, strict=True)):
            if environment.step(action).content != seen:
                raise NotReproducible(f"action {index} showed something else than recorded")
        return environment.outcome(environment.step(candidate))
    finally:
        environment.close()
