"""What speaks for the pairs of a run: signal and its verdict, agreement with outcomes, an audit of teachers."""

from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate

from stages.pairs import agreement
from stages.pairs.agreement import LEAST_TASKS, LEVEL, Signal, Verdict
from stages.pairs.audit import Alignment, JudgedState, TeacherAudit, alignment, audit
from stages.pairs.labels import numbered
from stages.runs.records import Row

AUDIT = ("teacher", "agrees", "with student", "backs", "lost", "won", "minority", "right", "wrong", "USD/backed")


def outcomes(rollouts: Sequence[Row]) -> dict[str, bool | None]:
    """Whether each rollout passed: its verdict, else a reward above 0, else not known."""
    return {
        row["rollout_id"]: row["gt_pass"]
        if row["gt_pass"] is not None
        else None
        if row["reward"] is None
        else row["reward"] > 0
        for row in rollouts
    }


def spent(answers: Sequence[Row]) -> dict[str, float | None]:
    """What each teacher's answers cost in USD; None where the price of one of them is not known."""
    sums: dict[str, float | None] = {}
    for row in answers:
        so_far, cost = sums.get(row["teacher"], 0.0), row["cost_usd"]
        priced = so_far is not None and (cost is not None or row["error_type"] is not None)
        sums[row["teacher"]] = (so_far or 0.0) + (cost or 0.0) if priced else None
    return sums


def evidence(
    states: Sequence[JudgedState],
    passed: Mapping[str, bool | None],
    spent: Mapping[str, float | None],
    tested: Sequence[JudgedState] | None = None,
) -> tuple[Verdict, dict[str, Any], str]:
    """Verdict, numbers for the manifest, and lines for the report. spent: USD of each teacher's answers, in order.

    tested: the states to test signal on, where those in which everybody was asked were not all chosen blindly.

    The student counts with its first recorded step of a state, so that everybody speaks once in it.
    """
    tested = states if tested is None else tested
    labels = numbered(
        [state.students[0] for state in tested],
        {name: [state.says(name) for state in tested] for name in spent},
        [state.task for state in tested],
        [state.step for state in tested],
    )
    found, aligned = agreement.signal(labels), alignment(states, passed)
    audits = audit(states, passed, spent)
    said = agreement.verdict(found, aligned.p_value if aligned else None)
    numbers = {
        "signal": found and {"kappa": vars(found.kappa), "roles": vars(found.roles)},
        "alignment": aligned and vars(aligned),
        "teachers": [line.as_dict() for line in audits],
    }
    lines = [f"{said}: {_why(found)}", *_aligned(aligned), "", _table(audits, found), ""]
    return said, numbers, "\n".join(lines)


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
