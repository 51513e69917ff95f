"""Select which teachers to ask: cheap ones first, the next one where it is likely to add pairs.

In order of price, those of unknown price last, as many teachers as make a majority are asked in every state. Then one
after another is asked in the states that the rule keeps:

disagreement - where no action has a majority of all teachers yet. Where a majority is against the student, other
    answers cannot change the pair; where it is with the student, only a pair with a minority teacher is lost.
value - where the pairs that the next teacher is expected to add are worth more than its answer costs, which for an
    unknown price is known only from bills.

What it adds is measured in a random share of the states, in which all teachers are asked: by whether there is a
majority, with or against the student, by which teachers agree with the student (where the teachers so far differ, those
are likelier to be joined), and by the number of the step. The signal tests use these states too, because the others
were chosen by their answers. Actions are compared by their canonical forms, so two spellings may count as a
disagreement: then one teacher more is asked than needed.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import inf

from composer_stages.endings import NOT_WHOLE
from composer_stages.pairs.actions import ROUNDING, Ballot, Form, decide
from composer_stages.pairs.states import in_random_share
from composer_stages.policy.requests import price_bound
from composer_stages.runs.kinds import Row
from composer_stages.runs.run import RunWriter
from composer_stages.teachers.asking import Policies, ask_teachers
from composer_stages.teachers.config import SelectionConfig, TeacherConfig
from composer_stages.teachers.questions import QuestionsByTeacher, TeacherQuestion

PRIOR = 2.0
"""Weight, in states, of the estimate from the more general group when a narrower group is estimated."""
LAST_STEP = 8
"""Later steps count as this one."""


@dataclass
class SelectionState:
    """One state: its questions by teacher, its steps, the texts of the answers, and what is known of their cost in USD.

    A text is None for a failed or truncated answer. form: computes an action's canonical form.
    """

    questions: dict[str, list[TeacherQuestion]]
    form: Form
    steps: list[Row] = field(default_factory=list)
    answers: dict[str, list[str | None]] = field(default_factory=dict)
    costs: dict[str, list[float]] = field(default_factory=dict)

    def ballots(self, names: Sequence[str]) -> Iterator[Ballot]:
        """Yield one ballot per recorded step, with the answers of the teachers in `names` only."""
        teachers = {name: self.answers.get(name, []) if name in names else [] for name in self.questions}
        steps = [step for step in self.steps if not step["truncated"]]
        texts = {text for texts in teachers.values() for text in texts if text is not None}
        classes = {text: self.form(text) for text in texts | {step["action"] for step in steps}}
        for step in steps:
            yield Ballot(step["action"], teachers, classes)

    def situation(self, names: Sequence[str]) -> str:
        """Return "open" without a majority of all teachers, else "with" or "against" the student; or "no student"."""
        ballot = next(self.ballots(names), None)
        if ballot is None:
            return "no student"
        votes: Counter[str] = Counter()
        for teacher in ballot.teachers:
            votes.update(ballot.vote(teacher))
        winner, most = max(votes.items(), key=lambda item: item[1], default=("", 0.0))
        if most <= len(self.questions) / 2 + ROUNDING:
            return "open"
        return "with" if ballot.class_of(ballot.student) == winner else "against"

    def agreeing_teachers(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the teachers of `names` whose vote is mostly the student's first action."""
        ballot = next(self.ballots(names), None)
        student = None if ballot is None else ballot.class_of(ballot.student)
        if ballot is None or student is None:
            return ()
        return tuple(name for name in names if ballot.vote(name).get(student, 0.0) > 0.5)


def ask_selected(
    by_teacher: QuestionsByTeacher,
    steps: Iterable[tuple[str, list[Row]]],
    policies: Policies,
    teachers: Sequence[TeacherConfig],
    selection: SelectionConfig,
    passed: Mapping[str, bool | None],
    form: Form,
    out: RunWriter,
) -> Counter[str]:
    """Ask the selected teachers; return the number of questions not asked, by reason.

    steps: the steps taken in each state, by its digest. passed: outcome of each rollout. form: computes an action's
    canonical form. All states and answers are in memory, the conversations are not.
    """
    states, spared = _states(by_teacher, steps, form), Counter[str]()
    if selection.failed_only:
        all_passed = {d for d, state in states.items() if all(passed.get(step["rollout_id"]) for step in state.steps)}
        spared["passed"] = sum(len(questions) for d in all_passed for questions in states[d].questions.values())
        states = {digest: state for digest, state in states.items() if digest not in all_passed}
    # By the price of a typical question: a thousand tokens in, a hundred out.
    order = [each.name for each in sorted(teachers, key=lambda each: (not each.priced, each.cost(1000, 100)))]
    majority = len(order) // 2 + 1
    everywhere = {digest for digest in states if selection.rule == "off" or in_random_share(digest, selection.explore)}
    # Fewer teachers than a majority of all could not decide anything.
    _ask({d: order if d in everywhere else order[:majority] for d in states}, states, policies, out)
    for number in range(majority, len(order)):
        before, name = order[:number], order[number]
        gains = ExpectedGains([states[digest] for digest in states if digest in everywhere], before, name)
        chosen = {}
        for digest, state in states.items():
            if digest in everywhere:  # asked already
                continue
            if selection.rule == "disagreement":
                ask = state.situation(before) == "open"
            else:
                ask = gains.expected(state) * selection.usd_per_pair > gains.price(state, name)
            if ask:
                chosen[digest] = [name]
            else:
                spared[state.situation(before)] += len(state.questions[name])
        _ask(chosen, states, policies, out)
    return +spared


class ExpectedGains:
    """Pairs that a teacher added in the explored states, by situation, agreeing teachers and step, and its prices."""

    def __init__(self, explored_states: Sequence[SelectionState], before: Sequence[str], name: str) -> None:
        self._before, self._cost = before, [cost for state in explored_states for cost in state.costs[name]]
        self._seen: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for state in explored_states:
            ballots = (state.ballots([*before, name]), state.ballots(before))
            pairs, pairs_before = (sum(len(decide(ballot)[0]) for ballot in each) for each in ballots)
            added = max(pairs - pairs_before, 0)
            for group in self._places(state):
                self._seen[group].append(added)

    def _places(self, state: SelectionState) -> list[tuple[object, ...]]:
        """Return the groups of a state, from the most general to the narrowest."""
        situation, agreeing = state.situation(self._before), state.agreeing_teachers(self._before)
        step = min(state.steps[0]["step"], LAST_STEP)
        return [(situation,), (situation, agreeing), (situation, agreeing, step)]

    def expected(self, state: SelectionState) -> float:
        """Return the expected number of pairs that an answer adds; 0.5 without data (Laplace's rule)."""
        # Each group's average is shrunk towards that of the more general group, with the weight of PRIOR states.
        expected = 0.5
        for group in self._places(state):
            expected = (sum(self._seen[group]) + PRIOR * expected) / (len(self._seen[group]) + PRIOR)
        return expected

    def price(self, state: SelectionState, name: str) -> float:
        """Return the price of asking in USD: the average so far, else the upper bound, infinite where it is unknown."""
        questions, teacher = state.questions[name], state.questions[name][0].teacher
        if not self._cost:
            return price_bound(teacher, (question.turn for question in questions)) if teacher.priced else inf
        return len(questions) * sum(self._cost) / len(self._cost)


def _states(
    questions_by_teacher: QuestionsByTeacher, steps: Iterable[tuple[str, list[Row]]], form: Form
) -> dict[str, SelectionState]:
    states: dict[str, SelectionState] = {}
    for name, questions in questions_by_teacher.items():
        for question in questions:
            state = states.setdefault(question.state.digest, SelectionState({}, form))
            state.questions.setdefault(name, []).append(question)
    for digest, rows in steps:
        states[digest].steps = rows
    return states


def _ask(
    teachers_by_state: Mapping[str, Sequence[str]],
    states: Mapping[str, SelectionState],
    policies: Policies,
    out: RunWriter,
) -> None:
    """Ask teachers in states, and enter their answers, of this or an earlier attempt, into `states`."""
    names = list(dict.fromkeys(chain.from_iterable(teachers_by_state.values())))
    questions = {
        n: [q for d, whom in teachers_by_state.items() if n in whom for q in states[d].questions[n]] for n in names
    }
    ask_teachers(questions, policies, out)
    for digest, whom in teachers_by_state.items():
        for name in whom:
            rows = [(out.journal.get(q.key) or {})["answer"] for q in states[digest].questions[name]]
            # An answer that is not whole is no action, so it is no vote either.
            states[digest].answers[name] = [
                None if row["finish_reason"] in NOT_WHOLE else row["action"] for row in rows
            ]
            answered = (row["cost_usd"] for row in rows if row["error_type"] is None)
            states[digest].costs[name] = [cost for cost in answered if cost is not None]
