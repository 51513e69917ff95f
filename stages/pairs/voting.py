"""Classes of equal actions, the majority of the teachers, and the pairs that follow, or the reason why none does.

Two rules: `majority_over_student` (more than half of all teachers agree on something the student did not do) and
`student_over_minority` (the student did what the majority would have done, a teacher would not have).

A teacher has one vote however often it was asked: its samples in a state are one distribution, and its vote is divided
among what it does, in the proportions in which it does it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
