"""The tests of agreement: their levels where there is none, their power where there is some, by simulation."""

from collections.abc import Callable

import numpy as np
import pytest

from stages.pairs.agreement import LEVEL, Labels, Numbering, Shuffles, agreement_tests, kappa, roles
from stages.pairs.voting import class_names

TASKS, STEPS, CHOICES, DRAWS, RUNS = 25, 4, 6, 199, 200
Drawn = Callable[[np.random.Generator], np.ndarray]
POPULAR = np.array([0.5, 0.2, 0.1, 0.1, 0.05, 0.05])


def labels(actions: np.ndarray, tasks: int = TASKS, repeats: int = 1) -> Labels:
    """Actions [N, 1 + T] of tasks with STEPS steps, each `repeats` times."""
    task, step = np.divmod(np.arange(tasks * STEPS * repeats), STEPS * repeats)
    return Labels(actions, task, step % STEPS, tuple("abc"[: actions.shape[1] - 1]))


def experts(random: np.random.Generator, accuracies: tuple[float, ...]) -> np.ndarray:
    """Each knows the right action of a state so often, and else takes another: [N, 1 + T]."""
    right = random.integers(0, CHOICES, size=TASKS * STEPS)
    knows = random.random((len(right), len(accuracies))) < accuracies
    wrong = (right[:, None] + random.integers(1, CHOICES, size=knows.shape)) % CHOICES
    return np.where(knows, right[:, None], wrong)


def chance(random: np.random.Generator) -> np.ndarray:
    """Everybody draws from one distribution, in which some actions are popular, without looking at the state."""
    return random.choice(CHOICES, size=(TASKS * STEPS, 4), p=POPULAR)


def rates(draw: Drawn, **shape: int) -> tuple[float, float]:
    """How often each test rejects."""
    drawn = (labels(draw(np.random.default_rng(seed)), **shape) for seed in range(RUNS))
    found = [agreement_tests(one, draws=DRAWS, seed=seed) for seed, one in enumerate(drawn)]
    kappas, others = ([getattr(one, name).p_value <= LEVEL for one in found if one] for name in ("kappa", "roles"))
    return float(np.mean(kappas)), float(np.mean(others))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_levels_where_everybody_draws_blindly() -> None:
    by_kappa, by_roles = rates(chance)
    assert by_kappa <= 0.03 and by_roles <= 0.03


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_levels_where_the_student_is_as_good_as_the_teachers() -> None:
    by_kappa, by_roles = rates(lambda random: experts(random, (0.7,) * 4))
    assert by_kappa == 1.0, "teachers do agree beyond chance"
    assert by_roles <= 0.03


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_power_where_teachers_know_more() -> None:
    assert rates(lambda random: experts(random, (0.5, 0.9, 0.9, 0.9))) == (1.0, 1.0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_states_of_one_task_that_hang_together_do_not_raise_the_level() -> None:
    """Every task six rollouts in which each teacher repeats itself: shuffling states instead of tasks rejects often."""

    def draw(random: np.random.Generator) -> np.ndarray:
        once = random.choice(CHOICES, size=(12, STEPS, 3), p=POPULAR)  # [tasks, steps, teachers]
        repeated = np.repeat(once[:, None], 6, axis=1).reshape(-1, 3)
        return np.column_stack([random.choice(CHOICES, size=len(repeated), p=POPULAR), repeated])

    assert rates(draw, tasks=12, repeats=6)[0] <= 0.03
    apart = 0
    for seed in range(60):
        random = np.random.default_rng(seed)
        found = labels(draw(random), tasks=12, repeats=6)
        alone = Labels(found.actions, np.arange(len(found.task)), found.step, found.teachers)
        apart += kappa(alone, DRAWS, random).p_value <= LEVEL
    assert apart >= 6, "the clusters are what holds the level"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_popular_steps_alone_are_no_agreement() -> None:
    """Every first step is the same command, in every task and by everybody."""

    def draw(random: np.random.Generator) -> np.ndarray:
        actions = random.choice(CHOICES, size=(TASKS, STEPS, 4), p=POPULAR)
        actions[:, 0] = CHOICES
        return actions.reshape(-1, 4)

    assert rates(draw)[0] <= 0.03


def test_one_draw_of_each_kind() -> None:
    """What the simulations show of many, on one."""
    random = np.random.default_rng(1)
    known = agreement_tests(labels(experts(random, (0.5, 0.9, 0.9, 0.9))), draws=DRAWS)
    assert known is not None and max(known.kappa.p_value, known.roles.p_value) <= LEVEL
    blind = agreement_tests(labels(chance(random)), draws=DRAWS)
    assert blind is not None and min(blind.kappa.p_value, blind.roles.p_value) > LEVEL


def test_kappa_and_roles_by_hand() -> None:
    actions = np.array([[0, 1, 1, 1], [0, 1, 1, 2], [3, 3, 3, 3], [0, -1, -1, 1]] * 6)
    found = labels(actions, tasks=6)
    assert kappa(found, 9, np.random.default_rng(0)).agreement == pytest.approx((3 + 1 + 3 + 0) / 12)
    exchanged = roles(found, 9, np.random.default_rng(0))
    assert exchanged.against_student == pytest.approx(2 / 4)
    assert exchanged.against_teacher == pytest.approx((0 + 0 + 1) / 4 / 3), "of c once, by a and b"
    told = agreement_tests(found, draws=9)
    assert told is not None and told.teachers["a"] == (pytest.approx(0.25), pytest.approx((0.75 + 0.5) / 2))


def test_shuffles_keep_steps_and_move_whole_tasks() -> None:
    random = np.random.default_rng(0)
    task = np.array([0, 0, 0, 1, 1, 2, 2, 2])
    step = np.array([0, 1, 2, 0, 1, 0, 1, 1])
    shuffles = Shuffles(Labels(np.zeros((8, 3), dtype=int), task, step, ("a", "b")))
    places = set()
    for _ in range(200):
        source = shuffles.draw(random)
        assert (step[source] == step).all()
        first = {t: task[source][(task == t) & (step == 0)][0] for t in range(3)}
        assert len(set(first.values())) == 3
        places.add(tuple(first.values()))
        assert source[2] == 2, "no other task has a third step"
    assert len(places) == 6


def test_too_little_is_not_judged() -> None:
    assert agreement_tests(labels(experts(np.random.default_rng(0), (0.5, 0.9))[:20], tasks=5)) is None
    assert agreement_tests(labels(experts(np.random.default_rng(0), (0.5, 0.9)))) is None


def test_classes_go_by_their_first_canonical_form() -> None:
    names = class_names({"b": "x", "a": "x", "c": "y", "d": None}, {"b": "B", "a": "A", "c": "C", "d": None})
    assert names == {"a": "A", "b": "A", "c": "C", "d": None}
    numbering = Numbering(["t", "u"])
    numbering.add(np.array([[5, 5, 7]]), {5: "A", 7: "C"}, ["one"], [0])
    numbering.add(np.array([[-1, -1, 0]]), ["C"], ["two"], [0])
    found = numbering.labels()
    assert found.actions.tolist() == [[0, 0, 1], [-1, -1, 1]] and found.task.tolist() == [0, 1]
