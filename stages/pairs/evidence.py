"""What speaks for the pairs of a run: signal and its verdict, agreement with outcomes, an audit of teachers."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tabulate import tabulate

from stages.pairs import agreement
from stages.pairs.agreement import LEAST_TASKS, LEVEL, Signal, Verdict
from stages.pairs.audit import Alignment, Audit, Judgement, TeacherAudit
from stages.pairs.blocks import Alike, Block, Classes, numbers
from stages.pairs.labels import NOTHING, Array, Numbering
from stages.pairs.patterns import Pattern
from stages.pairs.voting import STUDENT
from stages.runs import store
from stages.runs.records import Row

Judged = tuple[Verdict, dict[str, Any], str]
MOST_STATES = 50_000
"""A thousand rearrangements of more take minutes, and would find differences of no interest."""
PASSED = ["rollout_id", "gt_pass", "reward"]
"""The columns of rollouts that say whether they passed."""
AUDIT = ("teacher", "agrees", "with student", "backs", "lost", "won", "minority", "right", "wrong", "USD/backed")


def outcomes(rollouts: Iterable[Row]) -> dict[str, bool | None]:
    """Whether each rollout passed: its verdict, else a reward above 0, else not known."""
    return {
        row["rollout_id"]: row["gt_pass"]
        if row["gt_pass"] is not None
        else None
        if row["reward"] is None
        else row["reward"] > 0
        for row in rollouts
    }


def spent(answers: Iterable[pa.RecordBatch]) -> dict[str, float | None]:
    """What each teacher's answers cost in USD; None where the price of one of them is not known."""
    sums: dict[str, float | None] = {}
    for batch in answers:
        coded = batch["teacher"].dictionary_encode()
        teacher, cost, failed = numbers(coded.indices), batch["cost_usd"], batch["error_type"].is_valid()
        unknown = numbers(pc.and_not(cost.is_null(), failed))
        for code, name in enumerate(coded.dictionary.to_pylist()):
            own, so_far = teacher == code, sums.get(name, 0.0)
            known = so_far is not None and not unknown[own].any()
            # one after the other, so that it does not matter how rows come
            sums[name] = float(np.cumsum([so_far or 0.0, *numbers(cost.fill_null(0.0))[own]])[-1]) if known else None
    return sums


class Evidence:
    """What speaks for pairs, block after block.

    passed: whether each rollout did. teachers: in order. The student counts with its first recorded step of a state,
    so that everybody speaks once in it. tested: states [S] of a block that signal is tested on, as is every state that
    was chosen blindly.
    """

    def __init__(self, teachers: Sequence[str], passed: Mapping[str, bool | None]) -> None:
        self._audit, self._judgement = Audit(teachers), Judgement(passed)
        self._labels = Numbering(teachers)

    def add(self, block: Block, classes: Classes, told: Sequence[tuple[Alike, Pattern]], tested: Array) -> None:
        """One block with its patterns."""
        rollout = self._rollouts(block)
        outcome = np.append(self._judgement.outcomes(), False)[rollout]
        actions = np.full((block.size, 1 + len(block.teachers)), NOTHING, dtype=np.int64)
        for alike, pattern in told:
            own = alike.rows[:, : alike.students]
            known = rollout[own] != NOTHING
            passed = outcome[own] & known
            worths, times = pattern.worths, len(alike.states)
            self._audit.add(worths, known.sum(axis=0).tolist(), passed.sum(axis=0).tolist(), times)
            for preference, step in pattern.wanted:
                self._judgement.add(rollout[own[:, step]], preference.rejected_by != STUDENT)
            for column, place in enumerate(pattern.says):
                if place != NOTHING:
                    actions[alike.states, column] = classes.class_of[alike.rows[:, place]]
        tasks, steps = block.of_first("task_id"), numbers(block.of_first("step"))
        self._labels.add(actions[tested], classes.names, tasks.filter(pa.array(tested)).to_pylist(), steps[tested])

    def _rollouts(self, block: Block) -> Array:
        """A number of each step's rollout, `NOTHING` where its outcome is not known."""
        coded = block.steps["rollout_id"].combine_chunks().dictionary_encode()
        index = numbers(coded.indices)
        _, first = np.unique(index, return_index=True)
        met = block.at[first]
        tasks = block.of_first("task_id").take(pa.array(met)).to_pylist()
        return self._judgement.meet(coded.dictionary.to_pylist(), tasks)[index]

    def verdict(self, spent: Mapping[str, float | None]) -> Judged:
        """Verdict, numbers for the manifest, and lines for the report. spent: USD of each teacher's answers."""
        found, aligned = agreement.signal(self._labels.labels()), self._judgement.alignment()
        audits = self._audit.lines(spent)
        said = agreement.verdict(found, aligned.p_value if aligned else None)
        numbers = {
            "signal": found and {"kappa": vars(found.kappa), "roles": vars(found.roles)},
            "alignment": aligned and vars(aligned),
            "teachers": [line.as_dict() for line in audits],
        }
        lines = [f"{said}: {_why(found)}", *_aligned(aligned), "", _table(audits, found), ""]
        return said, numbers, "\n".join(lines)


def blocks(states_per_task: Mapping[str, int], most: int = MOST_STATES) -> Collection[str]:
    """Tasks to test signal on: all, or where they have more states than `most`, a random part of them.

    By the digests of their names, so that equal work tests on the same ones.
    """
    left, chosen = most, set[str]()
    for task in sorted(states_per_task, key=store.digest):
        left -= states_per_task[task]
        if left < 0 and len(chosen) >= LEAST_TASKS:
            break
        chosen.add(task)
    return chosen


def _why(found: Signal | None) -> str:
    if found is None:
        return f"two teachers and {LEAST_TASKS} tasks are needed for a test at {LEVEL:g}"
    first, second = found.kappa, found.roles
    return (
        f"teachers agree in {first.agreement:.1%} of states, {first.chance:.1%} by chance "
        f"(kappa {first.kappa:.2f}, p = {first.p_value:.3f}); a majority of the others is against the student in "
        f"{second.against_student:.1%}, against a teacher in its place in {second.against_teacher:.1%} "
        f"(p = {second.p_value:.3f})"
    )


def _aligned(found: Alignment | None) -> list[str]:
    if found is None:
        return ["outcomes judge no pair"]
    return [
        f"outcomes call {found.right:.1%} of {found.pairs} preferences right, {found.by_chance:.1%} by chance "
        f"(p = {found.p_value:.3f})"
    ]


def _table(audits: Sequence[TeacherAudit], found: Signal | None) -> str:
    """backs: pairs; lost, won: pairs without the teacher; right, wrong: its minority votes, by the outcome."""
    cells = []
    for line in audits:
        own, rest = found.teachers[line.teacher] if found else (None, None)
        right = line.joined_passed + line.opposed - line.opposed_passed
        wrong = line.joined + line.opposed - right
        counts = (line.backed, line.lost_without, line.won_without, line.minority, right, wrong)
        cells.append((line.teacher, rest, own, *counts, line.usd_per_backed))
    formats = ("", ".2f", ".2f", *[""] * 6, ".4f")
    return tabulate(cells, AUDIT, tablefmt="plain", floatfmt=formats, missingval="-")
