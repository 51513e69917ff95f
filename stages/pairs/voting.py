"""Classes of equal actions, the majority of the teachers, and the pairs that follow, or the reason why none does.

Two rules: `majority_over_student` (more than half of all teachers agree on something the student did not do) and
`student_over_minority` (the student did what the majority would have done, a teacher would not have).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

STUDENT = "student"


@dataclass(frozen=True)
class Preference:
    """One preference in one state: what was chosen and rejected, by whom, and how many teachers back each side."""

    rule: str
    chosen: str
    rejected: str
    rejected_by: str
    votes_chosen: int
    votes_rejected: int


@dataclass(frozen=True)
class Ballot:
    """What student and teachers did in a state.

    `answers` maps student and teachers to their action's text, None for no answer; `classes` maps a text to its class,
    None for malformed. Texts of one class are equal actions.
    """

    answers: Mapping[str, str | None]
    classes: Mapping[str, str | None]
    num_teachers: int

    def class_of(self, name: str) -> str | None:
        """The class of an action of the student or a teacher; None for no answer or a malformed one."""
        text = self.answers.get(name)
        return None if text is None else self.classes[text]

    @property
    def teachers(self) -> list[str]:
        """All teachers, in the order of the table."""
        return [name for name in self.answers if name != STUDENT]


def decide(ballot: Ballot) -> tuple[list[Preference], str | None]:
    """The preferences of a ballot, or none and the reason: missing_answers, no_majority, unanimous."""
    votes = _votes(ballot)
    if sum(ballot.answers[teacher] is not None for teacher in ballot.teachers) <= ballot.num_teachers / 2:
        return [], "missing_answers"
    winner = max(votes, key=lambda name: votes[name], default=None)
    if winner is None or votes[winner] <= ballot.num_teachers / 2:
        return [], "no_majority"
    if ballot.class_of(STUDENT) != winner:
        return [_majority_over_student(ballot, winner, votes)], None
    preferences = _student_over_minority(ballot, winner, votes)
    return (preferences, None) if preferences else ([], "unanimous")


def _votes(ballot: Ballot) -> dict[str, int]:
    """Teachers behind each class; malformed and missing answers vote for nothing."""
    votes: dict[str, int] = {}
    for teacher in ballot.teachers:
        if (name := ballot.class_of(teacher)) is not None:
            votes[name] = votes.get(name, 0) + 1
    return votes


def _majority_over_student(ballot: Ballot, winner: str, votes: Mapping[str, int]) -> Preference:
    chosen = next(ballot.answers[t] for t in ballot.teachers if ballot.class_of(t) == winner)
    own = ballot.class_of(STUDENT)
    return Preference(
        "majority_over_student",
        chosen or "",
        ballot.answers[STUDENT] or "",
        STUDENT,
        votes[winner],
        votes.get(own or "", 0),
    )


def _student_over_minority(ballot: Ballot, winner: str, votes: Mapping[str, int]) -> list[Preference]:
    """One preference for each distinct action of the minority."""
    preferences: dict[str | None, Preference] = {}
    for teacher in ballot.teachers:
        text, name = ballot.answers[teacher], ballot.class_of(teacher)
        if text is not None and name != winner and name not in preferences:
            behind = votes.get(name or "", 1)
            preferences[name] = Preference(
                "student_over_minority", ballot.answers[STUDENT] or "", text, teacher, votes[winner], behind
            )
    return list(preferences.values())


def merged(canonical: Mapping[str, str | None], outcomes: Mapping[str, str]) -> dict[str, str | None]:
    """Classes of texts: by outcome where one is known for the canonical form, else by the canonical form itself."""
    return {text: None if form is None else outcomes.get(form, form) for text, form in canonical.items()}


def distinct(forms: Sequence[str | None]) -> list[str]:
    """The distinct well-formed canonical forms, in order."""
    return list(dict.fromkeys(form for form in forms if form is not None))
