"""What teachers are worth: pairs they back, pairs that need them, whose minority was right; and failed rollouts."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stages.pairs.audit import (
    Alignment,
    Audit,
    JudgedState,
    OutcomeJudgement,
    TeacherAudit,
    failure_verdict,
    passed_by_rollout,
    spent,
    worth,
)
from stages.pairs.blocks import StateBlock
from stages.pairs.extraction import PairEvidence, patterns, tasks_to_test
from tests.stages.pairs.answered import command


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
        found.add([worth(one.judged, name) for name in spent], [outcome is not None], [bool(outcome)])
    return found.lines(spent)


def alignment(states: list[Told], passed: dict[str, bool | None], *, draws: int, seed: int = 0) -> Alignment | None:
    found = OutcomeJudgement(passed)
    for one in states:
        number, _ = found.rollout_numbers([one.rollout], [one.task])
        for preference, _ in one.judged.preferences():
            found.add(number, preference.rejected_by != "student")
    return found.alignment(draws=draws, seed=seed)


def evidence(states: list[Told], passed: dict[str, bool | None], spent: dict[str, float | None]) -> Any:
    rows = {"state_sha256": "d", "step": 0, "truncated": False, "has_ids": False}
    steps = [
        rows | {"n": n, "rollout_id": one.rollout, "task_id": one.task, "action": command(str(one.judged.students[0]))}
        for n, one in enumerate(states)
    ]
    answers = [
        {"n": n, "teacher": name, "whole": command(str(said)), "served": "m", "cost_usd": 0.0}
        for n, one in enumerate(states)
        for name, (said,) in one.judged.teachers.items()
    ]
    block = StateBlock.from_tables(
        0, len(states), list(spent), pa.Table.from_pylist(steps), pa.Table.from_pylist(answers)
    )
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


def test_states_that_are_alike_count_as_often_as_they_are_there() -> None:
    one, spent = state("two", "x", "y", "y", "x"), dict.fromkeys("abc", 1.0)
    together, alone = Audit(spent), Audit(spent)
    worths = [worth(one.judged, name) for name in spent]
    together.add(worths, known=[3], passed=[1], times=4)
    for known, passed in ((1, 1), (1, 0), (1, 0), (0, 0)):
        alone.add(worths, [known], [passed])
    assert together.lines(spent) == alone.lines(spent)  # type: ignore[arg-type]
    (c,) = [line for line in together.lines(spent) if line.teacher == "c"]  # type: ignore[arg-type]
    assert (c.minority, c.joined, c.joined_passed, c.opposed) == (4, 3, 1, 0)


def test_outcomes_judge_pairs() -> None:
    found = alignment(STATES, PASSED, draws=99)
    assert found is not None and found.pairs == 4 and found.right == pytest.approx(3 / 4)
    assert alignment(STATES, dict.fromkeys(PASSED), draws=9) is None


def draw(seed: int, linked: bool) -> tuple[list[Told], dict[str, bool | None]]:
    """Thirty tasks with three rollouts each; teachers disagree with the student where it fails, or where they like."""
    chance = random.Random(seed)
    states, passed = [], dict[str, bool | None]()
    for task in range(30):
        hard = chance.random() < 0.5
        for rollout in range(3):
            name = f"{task}-{rollout}"
            fails = chance.random() < (0.8 if hard else 0.2)
            differs = fails if linked else chance.random() < (0.8 if chance.random() < 0.5 else 0.2)
            passed[name] = not fails
            said = "y" if differs else "x"
            states.append(state(str(task), "x", said, said, "z", rollout=name))
    return states, passed


def test_alignment_keeps_its_level_and_finds_what_is_there() -> None:
    found = [alignment(*draw(seed, linked=False), draws=99, seed=seed) for seed in range(200)]
    assert 2 <= sum(one is not None and one.p_value <= 0.05 for one in found) <= 19, "5 % of 200 is 10"
    powers = [alignment(*draw(seed, linked=True), draws=99, seed=seed) for seed in range(20)]
    assert all(one is not None and one.p_value <= 0.05 and one.right == 1.0 for one in powers)


def test_outcomes_are_verdicts_else_rewards_else_unknown() -> None:
    rows = [
        {"rollout_id": name, "gt_pass": gt_pass, "reward": reward}
        for name, gt_pass, reward in (("a", False, 1.0), ("b", None, 0.5), ("c", None, 0.0), ("d", None, None))
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


def test_outcomes_that_say_nothing_give_no_verdict() -> None:
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
    assert tasks_to_test(sizes) == sizes.keys()
    some = tasks_to_test(sizes, most=305)
    assert len(some) == 30 and some == tasks_to_test(dict(reversed(sizes.items())), most=305) < sizes.keys()
    assert len(tasks_to_test(sizes, most=5)) == 6, "as many as a test needs"


def test_what_was_spent_does_not_depend_on_how_rows_come() -> None:
    chance = random.Random(0)
    rows = [
        {"teacher": chance.choice("ab"), "cost_usd": chance.choice([None, chance.random()]), "error_type": "timeout"}
        for _ in range(1000)
    ] + [{"teacher": "c", "cost_usd": None, "error_type": None}, {"teacher": "c", "cost_usd": 1.0, "error_type": None}]
    kinds = pa.schema([("teacher", pa.string()), ("cost_usd", pa.float64()), ("error_type", pa.string())])
    table = pa.Table.from_pylist(rows, kinds)
    by_hand = {name: sum(row["cost_usd"] or 0.0 for row in rows if row["teacher"] == name) for name in "ab"}
    for size in (1, 7, 2000):
        assert spent(table.to_batches(size)) == by_hand | {"c": None}
