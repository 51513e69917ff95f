"""Measure level and power of the tests of `extract-pairs` in simulated runs.

    python benchmarks/pair_levels.py [signal|power|failure|rewards|agreement] [--runs 800]

A run has twelve units with eight tasks, of which some are hard; every task has a state in which one of six actions is
right. Students and teachers vote as in a real run, and an action's quality is the share of continuations that pass
after it: .6 to .95 after the right one, 0 to .3 after another. The policy is simulated; votes and judgement are those
of the program.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import cases
import numpy as np
from records import Claim, share

from composer_stages.pairs.actions import STUDENT
from composer_stages.pairs.continuation import PairOutcome, signal_test
from composer_stages.pairs.evidence import LEVEL, FailureAlignment, Labels, agreement_tests, failure_verdict
from composer_stages.pairs.groups import StateVisit, choose
from composer_stages.pairs.states import JudgedState

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


def signal(runs: int = 800) -> Iterator[Claim]:
    """How often the verdict is SIGNAL where teachers know no more: one side of a two-sided level of 5 %."""
    for name, teachers in NULLS.items():
        given, _ = rates(teachers, runs)
        yield share(f"SIGNAL, {name} teachers", given["SIGNAL"], runs, "<= 3.5")


def power(runs: int = 200) -> Iterator[Claim]:
    """How often the verdict is SIGNAL where teachers know more, in small runs of 36 tasks."""
    for accuracy, goal in ((0.9, ">= 95"), (0.5, ">= 70")):
        given, _ = rates(experts(accuracy), runs, tasks=3)
        yield share(f"SIGNAL, teachers that are right in {accuracy:.0%}", given["SIGNAL"], runs, goal)


def failure(runs: int = 400) -> Iterator[Claim]:
    """How often disagreement tracks failure by chance, at a level of 1 %."""
    for name in ("shuffled", "random"):
        _, given = rates(NULLS[name], runs)
        yield share(f"failure tracked, {name} teachers", given["DISAGREEMENT TRACKS FAILURE"], runs, "<= 2.5")


def rewards(runs: int = 200) -> Iterator[Claim]:
    """How often random rewards of six rollouts of each of three actions give a pair in a state."""
    random, states = np.random.default_rng(3), 0
    for _ in range(runs):
        visits = [
            StateVisit(
                {"action": action, "truncated": False, "rollout_id": "r"}, "a", float(random.random() < 0.5), action
            )
            for action in "xyz"
            for _ in range(6)
        ]
        states += any(choice.preference.rule == "better_outcome" for choice in choose(visits, None)[0])
    yield share("states with a pair by random rewards", states, runs, "<= 8")


# Agreement

STEPS, POPULAR = 4, np.array([0.5, 0.2, 0.1, 0.1, 0.05, 0.05])


def labels(actions: Array, tasks: int = 25, repeats: int = 1) -> Labels:
    """Actions [N, 1 + T] of tasks with STEPS steps, each `repeats` times."""
    task, step = np.divmod(np.arange(tasks * STEPS * repeats), STEPS * repeats)
    return Labels(actions, task, step % STEPS, tuple("abc"[: actions.shape[1] - 1]))


def knowing(random: np.random.Generator, accuracies: tuple[float, ...]) -> Array:
    """Student and teachers that know the right action of a state with these rates: [N, 1 + T]."""
    right = random.integers(0, CHOICES, size=25 * STEPS)
    knows = random.random((len(right), len(accuracies))) < accuracies
    wrong = (right[:, None] + random.integers(1, CHOICES, size=knows.shape)) % CHOICES
    return np.where(knows, right[:, None], wrong)


def repeating(random: np.random.Generator) -> Array:
    """Twelve tasks with six rollouts each, in which every teacher repeats itself."""
    once = random.choice(CHOICES, size=(12, STEPS, 3), p=POPULAR)  # [tasks, steps, teachers]
    repeated = np.repeat(once[:, None], 6, axis=1).reshape(-1, 3)
    return np.column_stack([random.choice(CHOICES, size=len(repeated), p=POPULAR), repeated])


def equal_openings(random: np.random.Generator) -> Array:
    """Every first step is the same command, in every task and by student and teachers."""
    actions = random.choice(CHOICES, size=(25, STEPS, 4), p=POPULAR)
    actions[:, 0] = CHOICES
    return actions.reshape(-1, 4)


LABELS: dict[str, tuple[Callable[[np.random.Generator], Labels], str, str]] = {
    # goals of how often the test of kappa rejects, and the one of roles
    "popular actions": (
        lambda random: labels(random.choice(CHOICES, size=(25 * STEPS, 4), p=POPULAR)),
        "<= 3",
        "<= 3",
    ),
    "equally good": (lambda random: labels(knowing(random, (0.7,) * 4)), ">= 98", "<= 3"),
    "better teachers": (lambda random: labels(knowing(random, (0.5, 0.9, 0.9, 0.9))), ">= 98", ">= 98"),
    "teachers repeat themselves": (lambda random: labels(repeating(random), tasks=12, repeats=6), "<= 3", ""),
    "equal openings": (lambda random: labels(equal_openings(random)), "<= 3", ""),
}


def agreement(runs: int = 200) -> Iterator[Claim]:
    """How often the tests of agreement reject, at a level of 1 %."""
    for name, (draw, *goals) in LABELS.items():
        drawn = [agreement_tests(draw(np.random.default_rng(seed)), draws=199, seed=seed) for seed in range(runs)]
        tests = [test for test in drawn if test is not None]
        for role, goal in zip(("kappa", "roles"), goals, strict=True):
            rejected = sum(getattr(test, role).p_value <= LEVEL for test in tests)
            yield share(f"{role} rejects, {name}", rejected, runs, goal or None)


if __name__ == "__main__":
    cases.main(
        __file__, {"signal": signal, "power": power, "failure": failure, "rewards": rewards, "agreement": agreement}
    )
