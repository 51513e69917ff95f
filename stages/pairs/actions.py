"""Vote on the actions in a state: classes of equal actions, the teachers' majority, and the pairs that follow.

Two actions are equal when their canonical forms are (`canonical`) or, where an environment can tell, when running them
from a copy of the recorded state has the same outcome (`outcomes`).

Two rules: `majority_over_student` (more than half of all teachers agree on something the student did not do) and
`student_over_minority` (the student did what the majority would have done, a teacher would not have).

A teacher has one vote however often it was asked: its samples in a state are one distribution, and its vote is divided
among what it does, in the proportions in which it does it.

An action that ends the rollout can be graded on the spot (`ends_in_failure`): one that fails is never chosen.
"""

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Any

from composer_stages import envs, messages
from composer_stages.envs import boundary
from composer_stages.envs.base import ComparesOutcomes, Environment, Observation, Task
from composer_stages.envs.bash import ActionError, parse_bash, same_observation
from composer_stages.errors import InfrastructureError
from composer_stages.messages import ToolCall
from composer_stages.rollouts.trace import collected_with
from composer_stages.runs.run import Run

PLAIN = re.compile(r"[a-zA-Z0-9_@%+=:,./\- \t]*")
"""Words that need no shell quotes, and blanks."""
SHELL_ARGUMENTS = ("command", "cmd")
"""The names under which shell tools take their command."""
STUDENT = "student"
ROUNDING = 1e-9
"""Tolerance: thirds of votes do not add up to exactly one."""
Votes = dict[str, float]
"""Classes, and how many teachers back each, in fractions of a teacher."""


@dataclass(frozen=True)
class Preference:
    """A preference in one state: both actions, whose the rejected one is, and how many teachers back each."""

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
        """Return a teacher's vote, divided among its samples; a missing or malformed sample has no vote."""
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
    student_class = ballot.class_of(ballot.student)
    if student_class != winner:
        texts = (text for texts in ballot.teachers.values() for text in texts)
        chosen = next(text for text in texts if text is not None and ballot.class_of(text) == winner)
        support = (votes[winner], 0.0 if student_class is None else votes.get(student_class, 0.0))
        return [Preference("majority_over_student", chosen, ballot.student, STUDENT, *support)], None
    preferences: dict[str, Preference] = {}
    for teacher, samples in ballot.teachers.items():
        shares = ballot.vote(teacher)
        for sample in samples:
            kind = ballot.class_of(sample)
            if sample is None or kind is None or kind in preferences or shares[kind] <= shares.get(winner, 0.0):
                continue
            sides = (ballot.student, sample)
            preferences[kind] = Preference("student_over_minority", *sides, teacher, votes[winner], votes[kind])
    return (list(preferences.values()), None) if preferences else ([], "unanimous")


def backers(ballot: Ballot, preference: Preference) -> list[str]:
    """Return the names of those that sampled the chosen action: the student first, then teachers in their order."""
    chosen_class = ballot.class_of(preference.chosen)
    student = [STUDENT] if preference.rejected_by != STUDENT else []
    return student + [name for name, texts in ballot.teachers.items() if chosen_class in map(ballot.class_of, texts)]


def class_names(classes: Mapping[str, str | None], forms: Mapping[str, str | None]) -> dict[str, str | None]:
    """Name each text's class by its first canonical form, so that a name means the same action in every state."""
    first: dict[str, str] = {}
    for text, canonical in forms.items():
        name = classes[text]
        if name is not None and canonical is not None:
            first[name] = min(first.get(name, canonical), canonical)
    return {text: None if name is None else first.get(name, name) for text, name in classes.items()}


def canonical(action: str) -> str | None:
    """Return the canonical form of an action's tool calls or of its ```bash block; None when it is malformed.

    Only spelling is normalised (outer blanks, repeated blanks between words, kinds of quotes; order, blanks and escapes
    of JSON). Text that the shell or a tool could parse differently is not changed.
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
def text_form(action: str) -> str | None:
    """Return the form of a text action, such as a program, without reasoning and outer blanks; None for no text."""
    said = messages.answer_text(action).strip()
    return f"says: {said}" if said else None


@lru_cache(65_536)
def any_form(action: str) -> str | None:
    """Return the form of an action that may be a command, a call, or an answer; None for no text."""
    return canonical(action) or (canonical_answer(action) if text_form(action) else None)


def action_form(rollouts: Run) -> Form:
    """Return the function that computes the canonical form of an action of these rollouts."""
    env = collected_with(rollouts).get("env")
    if env is None:  # imported: nobody knows what their environment took for an action
        return any_form
    return text_form if envs.text_actions(env["name"]) else form


def canonical_command(command: str) -> str:
    """Normalise blanks and quoting of a shell command where its meaning stays the same."""
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
    """Return a tool's name with its arguments in canonical JSON; arguments that are no JSON object are not changed."""
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
    """Return the form of an action without a command or tool call: its text without reasoning, blanks normalised.

    In blocks of code the beginnings of lines stay, which are a part of a program.
    """
    pieces = CODE_BLOCK.split(messages.answer_text(action))
    blocks = ["\n".join(line.rstrip() for line in block.splitlines() if line.strip()) for block in pieces[1::2]]
    texts = [" ".join(text.split()) for text in pieces[::2]]
    return "says: " + "\n".join(filter(None, (part for both in zip_longest(texts, blocks) for part in both)))


CODE_BLOCK = re.compile(r"(```.*?```)", re.DOTALL)


class NotReproducible(Exception):
    """The recorded actions gave other observations than the recorded ones."""


@dataclass(frozen=True)
class StatePath:
    """The path to a recorded state: the task, the actions before it and the observation of each."""

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

    Each candidate is executed in a new environment after the recorded actions. Raises `NotReproducible` if one of
    these gives another observation than recorded (durations and memory addresses aside), and `InfrastructureError`
    where the environment breaks.
    """
    results = []
    for candidate in candidates:
        with closing(make()) as environment:
            if not isinstance(environment, ComparesOutcomes):
                raise InfrastructureError("pairs.outcomes-not-comparable", environment=environment.name)
            observation = _act_in_state(environment, path, candidate)
            results.append(ActionOutcome(environment.outcome(observation), observation.stop is not None))
    return results


def ends_in_failure(make: Callable[[], Environment], path: StatePath, candidate: str) -> bool:
    """Return whether the environment grades an action that ends the rollout in a state as failed."""
    with closing(make()) as environment:
        _act_in_state(environment, path, candidate)
        return boundary.check_grade(environment.grade(), environment).passed is False


def _act_in_state(environment: Environment, path: StatePath, candidate: str) -> Observation:
    """Bring an environment to a recorded state; return the observation of an action there."""
    environment.reset(path.task)
    for index, (action, recorded) in enumerate(zip(path.actions, path.observations, strict=True)):
        if not same_observation(environment.step(action).content, recorded):
            raise NotReproducible(f"action {index} gave another observation than the recorded one")
    return environment.step(candidate)
