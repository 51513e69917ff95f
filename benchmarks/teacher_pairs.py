"""Does trace-replay preference training add at least 2 points over GRPO, and is it more than imitation? Registered.

docs/experiments/teacher-pairs.md states hypotheses, arms, decision rule and power, and was committed before the
evaluation. `./dev experiment teacher-pairs` runs it (about two and a half hours on two idle cores) by
benchmarks/experiment.py. The outcomes of all rollouts are in docs/experiments/teacher-pairs.parquet, a row for each
arm, training seed and task, from which `python benchmarks/experiment.py teacher-pairs result` computes every published
number again: the record, the tables in the document, and the figure; `python benchmarks/recompute_teacher_pairs.py`
computes the main ones without this project's statistics. `python benchmarks/teacher_pairs.py` simulates what the
design finds.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import records
from experiment import Experiment, comparison_lines, difference_of, put
from scipy.special import ndtri, stdtrit

from composer_stages.envs import sampling_unit
from composer_stages.evaluation.arm_comparison import EvalQuestion, compare
from composer_stages.evaluation.arm_settings import ArmDifference, settings_differences
from composer_stages.evaluation.inference import top_error
from composer_stages.evaluation.outcomes import KEPT
from composer_stages.evaluation.report import arms_chart
from composer_stages.evaluation.verdict import EvalVerdict, decide
from composer_stages.evaluation.words import describe_verdict, points
from composer_stages.terms import SamplingUnit

EXPERIMENT = Experiment.named("teacher-pairs")
SECONDARY = (("D", "A"), ("E", "A"), ("E", "D"), ("F", "A"), ("C", "A"), ("F", "C"))
"""Differences that share one level by Holm's correction."""


def differences(items: pa.Table) -> tuple[ArmDifference, ...]:
    """Return what the evaluated arms differ in: channels, and the learning rates that the tuning chose."""
    chosen, arms = EXPERIMENT.chosen, {}
    for arm in sorted({*items["arm"].to_pylist()} - {"start"}):
        weights = EXPERIMENT.arms[arm].get("weights", {})
        shown = {f"weights.{name}": f"{float(weights.get(name, 0)):g}" for name in ("sdpo", "dpo", "sft")}
        arms[arm] = {0: {**shown, "optimisation.learning_rate": str(chosen[arm])}}
    return settings_differences(arms)


def sampling(*, fixed: bool) -> SamplingUnit:
    """Return the operations as what tasks are drawn from: these twelve alone, or a sample of possible ones."""
    return replace(sampling_unit("kata"), fixed=fixed)


def decided(items: pa.Table, *, fixed: bool) -> EvalVerdict:
    """Return the verdict about these operations, or about others."""
    return decide(items, EvalQuestion(sampling=sampling(fixed=fixed)), differences(items))


def result(
    table: Path = EXPERIMENT.items, document: Path = EXPERIMENT.document, figure: Path = EXPERIMENT.figure
) -> None:
    """Compute every published number from the table of outcomes; writes into the document, the figure, the record."""
    items = EXPERIMENT.read_items(table)
    verdicts = {"these twelve operations": decided(items, fixed=True), "other operations": decided(items, fixed=False)}
    main = verdicts["these twelve operations"]
    lines = [*EXPERIMENT.arm_lines(main), "", *verdict_lines(verdicts), ""]
    lines += ["The arms differ in " + "; ".join(map(str, main.differences)) + ".", ""]
    secondary = difference_of(items, SECONDARY, EvalQuestion(sampling=sampling(fixed=True)), power=False)
    lines += [*comparison_lines("secondary", secondary), "", *protocol_lines(items, main)]
    put(document, lines)
    figure.write_bytes(arms_chart(main))
    claims = []
    for name, difference in (("B - A", main.gain), ("B - C", main.over_control)):
        if difference is not None:
            claims.append(
                records.measured(
                    f"{name}, points of pass@1, {difference.num_tasks} tasks of fixed operations, "
                    f"{difference.num_seeds} seeds on {difference.num_collections} sets of pairs",
                    100 * difference.estimate,
                    (100 * difference.low, 100 * difference.high),
                    n=difference.num_tasks,
                    registration=EXPERIMENT.registration,
                )
            )
    records.write("experiment-teacher-pairs", claims)
    print("\n".join(lines))


def told() -> tuple[dict[str, str], str]:
    """Return the cells of this experiment in README's table by their row, and what to know about them."""
    items = EXPERIMENT.read_items()
    verdict = decided(items, fixed=True)
    question = EvalQuestion(sampling=sampling(fixed=True))
    imitation = compare(items, "C", "A", question)
    stricter = [compare(items, "B", other, replace(question, outcome=KEPT)) for other in "AC"]
    assert verdict.gain and verdict.over_control and imitation and stricter[0] and stricter[1]
    num_seeds = verdict.gain.num_seeds
    cells = {"": f"[a toy](experiments/teacher-pairs.md), 0.46 M parameters, {num_seeds} trainings an arm"}
    cells |= {arm.arm: f"{100 * arm.pass_rate:.0f} %" for arm in verdict.arms if arm.pass_rate is not None}
    cells |= {
        "C − A": points(imitation.difference),
        "B − A": points(verdict.gain),
        "B − C": f"{points(verdict.over_control)}: less than 2 points",
    }
    unsolved, of_them = unsolved_by_grpo(items)
    broke = {arm: len(broken(items, arm)) for arm in "BC"}
    rates = next(one.values for one in verdict.differences if one.setting == "optimisation.learning_rate")
    return cells, (
        f"On the toy, passes of {verdict.gain.num_tasks} held-out repair tasks count; {of_them:.0f} of the points of "
        f"C − A are {len(unsolved)} of {verdict.gain.num_units} operations, which GRPO solves in less than 1 % of "
        f"rollouts. A finding made after the result: {broke['B']} of the {num_seeds} trainings of B kept the protocol, "
        f"the form that answers must have, in less than half of their rollouts, and {broke['C'] or 'none'} of C; "
        f"counted as passed and protocol kept, B − A is {points(stricter[0].difference)} and B − C "
        f"{points(stricter[1].difference)}. Each arm's learning rate was tuned, and came to {rates['B']} in B and "
        f"{rates['C']} in A and C: what the preference loss does and what the rate does is not told apart."
    )


def broken(items: pa.Table, arm: str) -> dict[int, float]:
    """Return the trainings of an arm that keep the protocol in less than half of their rollouts, with that share."""
    own = items.filter(pc.equal(items["arm"], arm)).group_by("train_seed").aggregate([("protocol_ok", "mean")])
    shares = dict(zip(own["train_seed"].to_pylist(), own["protocol_ok_mean"].to_pylist(), strict=True))
    return {seed: share for seed, share in sorted(shares.items()) if share < 0.5}


def unsolved_by_grpo(items: pa.Table) -> tuple[list[str], float]:
    """Return the operations of which A passes at most 1 %, and C some, with their share of C - A in points."""
    rates = items.group_by(["arm", "unit"]).aggregate([("passed", "mean")]).to_pylist()
    of = {(row["arm"], row["unit"]): row["passed_mean"] for row in rates}
    units = sorted({unit for _, unit in of})
    unsolved = [unit for unit in units if of["A", unit] < 0.01 and of["C", unit] > 0.5]
    return unsolved, 100 * sum(of["C", unit] - of["A", unit] for unit in unsolved) / len(units)


def verdict_lines(verdicts: dict[str, EvalVerdict]) -> list[str]:
    """Return the two planned comparisons, of these operations and of others."""
    lines = ["| about | B − A | B − C | verdict |", "| --- | --- | --- | --- |"]
    for about, verdict in verdicts.items():
        shown = [points(one) if one else "-" for one in (verdict.gain, verdict.over_control)]
        claim = ": ".join(filter(None, (verdict.decision, describe_verdict(verdict).claim)))
        lines.append(f"| {about} | {shown[0]} | {shown[1]} | {claim} |")
    return [*lines, "", describe_verdict(verdicts["these twelve operations"]).why]


def protocol_lines(items: pa.Table, verdict: EvalVerdict) -> list[str]:
    """Return what became of the protocol, which was recorded, and looked at after the result."""
    lines = [
        "After the result, and not registered: the protocol.",
        "",
        "| arm | protocol kept | passed and protocol kept | trainings that keep it in less than half of rollouts |",
        "| --- | --- | --- | --- |",
    ]
    for arm in verdict.arms:
        seeds = ", ".join(f"seed {seed}: {100 * share:.0f} %" for seed, share in broken(items, arm.arm).items())
        rates = [f"{100 * (rate or 0):.1f} %" for rate in (arm.protocol_rate, arm.kept_rate)]
        lines.append(f"| {arm.arm} | {rates[0]} | {rates[1]} | {seeds or 'none'} |")
    lines += ["", "| passed and protocol kept | difference |", "| --- | --- |"]
    question = EvalQuestion(sampling=sampling(fixed=True), outcome=KEPT)
    found = difference_of(items, (("B", "A"), ("B", "C"), ("C", "A")), question, power=False)
    return [*lines, *(f"| {name} | {points(difference)} |" for name, difference in found.items())]


def power(num: int = 4000) -> None:
    """Print with what probability the design finds true differences, given the standard deviations of the demo."""
    random = np.random.default_rng(0)
    num_seeds, collections = EXPERIMENT.seeds, EXPERIMENT.collections
    of_collection = np.repeat(np.arange(collections), num_seeds // collections)
    print("| true difference | B − A: a gain of 2 points | B − C: above 0 | B − C: below 2, imitation suffices |")
    print("| --- | --- | --- | --- |")
    for true in (-3, -1, 0, 2, 4, 6, 8):
        cells = []
        for of_seeds, of_tasks, question in ((5.5, 0.86, "least"), (3.5, 0.58, "above"), (3.5, 0.58, "below")):
            gains = true + of_seeds * random.normal(size=(num, num_seeds))
            errors, top = top_error(gains, of_collection)
            means = gains.mean(1) + of_tasks * random.normal(size=num)
            halves = np.hypot(stdtrit(top - 1, 0.975) * errors, ndtri(0.975) * of_tasks)
            found = {"least": means - halves >= 2, "above": means - halves > 0, "below": means + halves < 2}
            share = found[question].mean()
            cells.append(f"{100 * share:.0f} ± {100 * (share * (1 - share) / num) ** 0.5:.1f} %")
        print(f"| {true:+d} | {' | '.join(cells)} |")


if __name__ == "__main__":
    power()
