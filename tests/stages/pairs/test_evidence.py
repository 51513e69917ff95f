"""Evidence for pairs by votes: tests of agreement, failed rollouts, and the audit of teachers."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from composer_stages.pairs.actions import class_names
from composer_stages.pairs.blocks import StateBlock
from composer_stages.pairs.evidence import (
    LEVEL,
    Alignment,
    Audit,
    FailureAlignment,
    LabelCollector,
    Labels,
    PairEvidence,
    Shuffles,
    TeacherAudit,
    agreement_tests,
    failure_verdict,
    kappa,
    passed_by_rollout,
    roles,
    sample_tasks,
    teacher_costs,
)
from composer_stages.pairs.states import JudgedState, leave_one_out, patterns
from tests.stages.pairs.answered import command

TASKS, STEPS, CHOICES, DRAWS = 25, 4, 6, 199
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


def test_agreement_is_found_where_teachers_know_more_and_not_where_actions_are_popular() -> None:
    """One draw of each."""
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
    numbering = LabelCollector(["t", "u"])
    numbering.add(np.array([[5, 5, 7]]), {5: "A", 7: "C"}, ["one"], [0])
    numbering.add(np.array([[-1, -1, 0]]), ["C"], ["two"], [0])
    found = numbering.labels()
    assert found.actions.tolist() == [[0, 0, 1], [-1, -1, 1]] and found.task.tolist() == [0, 1]


@dataclass(frozen=True)
class Told:
    """What was done in a state of a task, on one rollout."""

    task: str
    rollout: str
    judged: JudgedState


def state(task: str, student: str | None, *teachers: str | None, rollout: str | None = None) -> Told:
    names = {name: [said] for name, said in zip("abc", teachers, strict=True)}
    return Told(task, rollout or task, JudgedState([student], names))


def audit(states: list[Told], passed: dict[str, bool | None], spent: dict[str, float | None]) -> list[TeacherAudit]:
    found = Audit(spent)
    for one in states:
        outcome = passed.get(one.rollout)
        found.add([leave_one_out(one.judged, name) for name in spent], [outcome is not None], [bool(outcome)])
    return found.lines(spent)


def alignment(states: list[Told], passed: dict[str, bool | None], *, draws: int, seed: int = 0) -> Alignment | None:
    found = FailureAlignment(passed)
    for one in states:
        number, _ = found.rollout_numbers([one.rollout], [one.task])
        for preference, _ in one.judged.preferences():
            found.add(number, preference.rejected_by != "student")
    return found.alignment(draws=draws, seed=seed)


def evidence(states: list[Told], passed: dict[str, bool | None], spent: dict[str, float | None]) -> Any:
    rows = {"state_sha256": "d", "step": 0, "truncated": False, "by_teacher": False, "has_ids": False}
    steps = [
        rows | {"n": n, "rollout_id": one.rollout, "task_id": one.task, "action": command(str(one.judged.students[0]))}
        for n, one in enumerate(states)
    ]
    answers = [
        {"n": n, "teacher": name, "whole": command(str(said)), "served": "m", "cost_usd": 0.0}
        for n, one in enumerate(states)
        for name, (said,) in one.judged.teachers.items()
    ]
    tables = pa.Table.from_pylist(steps), pa.Table.from_pylist(answers)
    block = StateBlock.from_tables(0, len(states), list(spent), *tables)
    found, classes = PairEvidence(list(spent), passed), block.classes_by_text()
    found.add(block, classes, list(patterns(block, classes)), np.ones(len(states), dtype=bool))
    return found.evidence(spent)


STATES = [
    state("one", "x", "y", "y", "y"),  # a pair that needs nobody
    state("two", "x", "y", "y", "x"),  # a pair that two back, the third joins the student
    state("three", "x", "x", "x", "z"),  # the student over c
    state("four", "x", "x", "y", "z"),  # no majority
    state("five", None, "y", "y", None),  # a malformed student
]
PASSED = {"one": False, "two": True, "three": True, "four": None, "five": False}


def test_an_audit_by_hand() -> None:
    a, b, c = audit(STATES, PASSED, {"a": 1.0, "b": None, "c": 0.0})
    assert (a.backed, b.backed, c.backed) == (3, 3, 2)
    assert a.usd_per_backed == pytest.approx(1 / 3) and b.usd_per_backed is None and c.usd_per_backed == 0.0
    assert (a.minority, b.minority, c.minority) == (0, 0, 2)
    assert (c.joined, c.joined_passed, c.opposed, c.opposed_passed) == (1, 1, 1, 1)
    assert c.lost_without == 1, "the student over c; the other pairs have a majority of two"
    assert a.lost_without == 3, "b and c alone agree only in the first state"


def test_grouped_states_count_by_their_number() -> None:
    one, spent = state("two", "x", "y", "y", "x"), dict.fromkeys("abc", 1.0)
    together, alone = Audit(spent), Audit(spent)
    decided = [leave_one_out(one.judged, name) for name in spent]
    together.add(decided, with_outcome=[3], passed=[1], times=4)
    for known, passed in ((1, 1), (1, 0), (1, 0), (0, 0)):
        alone.add(decided, [known], [passed])
    assert together.lines(spent) == alone.lines(spent)  # type: ignore[arg-type]
    (c,) = [line for line in together.lines(spent) if line.teacher == "c"]  # type: ignore[arg-type]
    assert (c.minority, c.joined, c.joined_passed, c.opposed) == (4, 3, 1, 0)


def test_outcomes_judge_pairs() -> None:
    found = alignment(STATES, PASSED, draws=99)
    assert found is not None and found.pairs == 4 and found.right == pytest.approx(3 / 4)
    assert alignment(STATES, dict.fromkeys(PASSED), draws=9) is None


def test_outcomes_are_verdicts_else_rewards_else_unknown() -> None:
    rows = [
        {"rollout_id": name, "hidden_pass": hidden_pass, "reward": reward}
        for name, hidden_pass, reward in (("a", False, 1.0), ("b", None, 1.0), ("c", None, 0.5), ("d", None, None))
    ]
    assert passed_by_rollout(rows) == {"a": False, "b": True, "c": False, "d": None}


def test_evidence_names_what_it_measures() -> None:
    """Every teacher opposes the student on failed rollouts alone: that tracks failure, and is no test of pairs."""
    spent = {"a": 0.1, "b": 0.1, "c": None}
    failing = [state(f"{task}", "x", f"y{task}", f"y{task}", f"y{task}") for task in range(12)]
    passing = [state(f"{task}", "x", "x", "x", "z") for task in range(12, 24)]
    outcomes = {str(task): task >= 12 for task in range(24)}
    found = evidence([*failing, *passing], outcomes, spent)
    assert found.verdict == "DISAGREEMENT TRACKS FAILURE" and found.numbers["alignment"]["right"] == 1.0
    assert "100.0% of 24 preferences in 24 tasks" in found.sentences[0]
    assert "does not test the pairs" in found.sentences[0] and "SIGNAL:" not in "\n".join(found.lines())
    assert found.numbers["agreement"]["roles"]["against_student"] == 0.5 and len(found.numbers["teachers"]) == 3
    swapped = {name: not passed for name, passed in outcomes.items()}
    assert evidence([*failing, *passing], swapped, spent).verdict == "DISAGREEMENT NOT SHOWN TO TRACK FAILURE"


def test_uninformative_outcomes_give_no_verdict() -> None:
    spent = dict.fromkeys("abc", 0.1)
    failing = [state(f"{task}", "x", "y", "y", "y") for task in range(12)]
    alike = evidence(failing, dict.fromkeys(map(str, range(12)), False), spent)
    assert alike.verdict == "TOO LITTLE DATA" and "all rollouts ended alike" in alike.sentences[0]
    few = evidence(failing[:5], {str(task): task > 2 for task in range(5)}, spent)
    assert few.verdict == "TOO LITTLE DATA" and "6 tasks are needed" in few.sentences[0]
    unknown = evidence(failing, {}, spent)
    assert unknown.verdict == "TOO LITTLE DATA" and "known outcome" in unknown.sentences[0]
    assert failure_verdict(None) == "TOO LITTLE DATA"


def test_agreement_is_tested_on_whole_tasks_of_a_large_run() -> None:
    sizes = {f"t{i}": 10 for i in range(100)}
    assert sample_tasks(sizes) == sizes.keys()
    some = sample_tasks(sizes, max_states=305)
    assert len(some) == 30 and some == sample_tasks(dict(reversed(sizes.items())), max_states=305) < sizes.keys()
    assert len(sample_tasks(sizes, max_states=5)) == 6, "as many as a test needs"


def test_teacher_costs_do_not_depend_on_batches() -> None:
    chance = random.Random(0)
    rows = [
        {"teacher": chance.choice("ab"), "cost_usd": chance.choice([None, chance.random()]), "error_type": "timeout"}
        for _ in range(1000)
    ] + [{"teacher": "c", "cost_usd": None, "error_type": None}, {"teacher": "c", "cost_usd": 1.0, "error_type": None}]
    kinds = pa.schema([("teacher", pa.string()), ("cost_usd", pa.float64()), ("error_type", pa.string())])
    table = pa.Table.from_pylist(rows, kinds)
    by_hand = {name: sum(row["cost_usd"] or 0.0 for row in rows if row["teacher"] == name) for name in "ab"}
    for size in (1, 7, 2000):
        assert teacher_costs(table.to_batches(size)) == by_hand | {"c": None}
