"""The verdict on pairs in simulated runs: how often it is SIGNAL where teachers know no more, and where they do.

A run has twelve units with eight tasks, of which some are hard; every task has a state in which one of six actions is
right. Students and teachers vote as in a real run, and an action's quality is the share of continuations that
pass after it: .6 to .95 after the right one, 0 to .3 after another. What is simulated is the policy; the votes and the
judgement are those of the program.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from stages.pairs.actions import STUDENT
from stages.pairs.continuation import PairOutcome, signal_test
from stages.pairs.evidence import FailureAlignment, failure_verdict
from stages.pairs.states import JudgedState

UNITS, TASKS, CHOICES, SAMPLES = 12, 8, 6, 4
NAMES = ("a", "b", "c")
SKILL = 0.05, 0.9
"""How often the student is right in a hard task, and in an easy one."""
Array = np.ndarray
Teachers = Callable[["Run", np.random.Generator], Array]


@dataclass(frozen=True)
class Run:
    """Tasks [T]: their unit, whether they are hard, the right action, and the student's."""

    unit: Array
    hard: Array
    right: Array
    student: Array

    def answers(self, accuracy: Array | float, random: np.random.Generator) -> Array:
        """Return [T] actions: right so often, else one of the wrong ones."""
        wrong = (self.right + random.integers(1, CHOICES, size=len(self.right))) % CHOICES
        return np.where(random.random(len(self.right)) < accuracy, self.right, wrong)


def a_run(random: np.random.Generator, tasks: int) -> Run:
    """A student of this `SKILL`, and units of which .2 to .8 of the tasks are hard."""
    unit = np.repeat(np.arange(UNITS), tasks)
    hard = random.random(len(unit)) < random.uniform(0.2, 0.8, size=UNITS)[unit]
    right = random.integers(0, CHOICES, size=len(unit))
    run = Run(unit, hard, right, right)
    return Run(unit, hard, right, run.answers(np.where(hard, *SKILL), random))


def experts(accuracy: float) -> Teachers:
    """Three teachers that are right so often, in hard units too, each by itself."""
    return lambda run, random: np.stack([run.answers(accuracy, random) for _ in NAMES], axis=1)


def shuffled(run: Run, random: np.random.Generator) -> Array:
    """Good teachers, each with the answers to other tasks."""
    return np.stack([random.permutation(run.answers(0.9, random)) for _ in NAMES], axis=1)


def blind(run: Run, random: np.random.Generator) -> Array:
    """Any action."""
    return random.integers(0, CHOICES, size=(len(run.right), len(NAMES)))


def identical(run: Run, random: np.random.Generator) -> Array:
    """Three copies of a teacher that is as good as the student."""
    one = run.answers(np.where(run.hard, *SKILL), random)
    return np.stack([one] * len(NAMES), axis=1)


def shared_wrong(run: Run, random: np.random.Generator) -> Array:
    """Where the task is hard, the same wrong action by all, most of the time; elsewhere what the student does."""
    common = (run.right + 1) % CHOICES
    follow = random.random((len(run.right), len(NAMES))) < 0.9
    return np.where(run.hard[:, None] & follow, common[:, None], run.student[:, None])


def guessing(run: Run, random: np.random.Generator) -> Array:
    """Guesses among three of the task's own actions, one of which is right."""
    offset = random.integers(0, 3, size=(len(run.right), len(NAMES)))
    return (run.right[:, None] + offset) % CHOICES


def oddly_worded(run: Run, random: np.random.Generator) -> Run:
    """A student that guesses as well, in words of its own: no action of it equals one of a teacher."""
    return Run(run.unit, run.hard, run.right, guessing(run, random)[:, 0] + CHOICES)


NULLS: dict[str, Teachers] = {
    "shuffled": shuffled,
    "random": blind,
    "identical": identical,
    "shared wrong": shared_wrong,
    "guessing": guessing,
}


def verdicts(teachers: Teachers, seed: int, tasks: int) -> tuple[str, str]:
    """The verdict on the pairs, and the one on disagreement."""
    random = np.random.default_rng(seed)
    run = a_run(random, tasks)
    if teachers is guessing:
        run = oddly_worded(run, random)
    said = teachers(run, random)
    # Of each action in each task: those in words of the student's own are as good as the same in common words.
    quality = random.uniform(0.0, 0.3, size=(len(run.right), 2 * CHOICES))
    for place in (run.right, run.right + CHOICES):
        quality[np.arange(len(run.right)), place] = random.uniform(0.6, 0.95, size=len(run.right))
    luck = random.random((len(run.right), SAMPLES))  # shared by both sides, as seeds are
    passed = random.random(len(run.right)) < quality[np.arange(len(run.right)), run.student]

    found = list[PairOutcome]()
    judgement = FailureAlignment({str(task): bool(one) for task, one in enumerate(passed)})
    for task in range(len(run.right)):
        number, _ = judgement.rollout_numbers([str(task)], [str(task)])
        state = JudgedState([str(run.student[task])], {name: [str(said[task, i])] for i, name in enumerate(NAMES)})
        for preference, _ in state.preferences():
            sides = preference.chosen, preference.rejected
            rates = [float((luck[task] < quality[task, int(side)]).mean()) for side in sides]
            found.append(PairOutcome(str(run.unit[task]), *rates))
            judgement.add(number, preference.rejected_by != STUDENT)
    aligned = judgement.alignment(draws=199, seed=seed)
    return signal_test(found).verdict, failure_verdict(aligned)


def rates(teachers: Teachers, runs: int, tasks: int = TASKS) -> tuple[Counter[str], Counter[str]]:
    """How often each verdict is given, of this many runs."""
    of_pairs, of_disagreement = zip(*(verdicts(teachers, seed, tasks) for seed in range(runs)), strict=True)
    return Counter(of_pairs), Counter(of_disagreement)


def at_most(rate: float, runs: int) -> float:
    """A count that a true rate exceeds in one of 700 simulations: three standard errors above."""
    return rate * runs + 3 * float(np.sqrt(rate * (1 - rate) * runs))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NULLS)
def test_no_signal_where_teachers_know_no_more(name: str) -> None:
    runs = 800
    played, _ = rates(NULLS[name], runs)
    # One side of a two-sided level of 5 %.
    assert played["SIGNAL"] <= at_most(0.025, runs), played


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("accuracy", "least"), [(0.9, 0.95), (0.5, 0.7)])
def test_power_at_two_qualities_of_teachers(accuracy: float, least: float) -> None:
    """In small runs of 36 tasks, as many as a first try has."""
    runs = 200
    played, _ = rates(experts(accuracy), runs, tasks=3)
    assert played["SIGNAL"] >= least * runs and played["NO SIGNAL"] <= at_most(0.025, runs), played


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["shuffled", "random"])
def test_disagreement_tracks_failure_at_its_level(name: str) -> None:
    runs = 400
    _, heuristic = rates(NULLS[name], runs)
    assert heuristic["DISAGREEMENT TRACKS FAILURE"] <= at_most(0.01, runs), heuristic
