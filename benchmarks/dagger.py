"""Is it the student's own states? SmolLM2 imitates a teacher once, or in rounds of DAgger, at equal tasks and tokens.

docs/experiments/dagger.md states questions, arms, rule and power, and was committed before any held-out task was
played. `python benchmarks/experiment.py dagger run` runs it and goes on where it stopped, in one process; the outcomes
of all answers are then in docs/experiments/dagger.parquet, the trainings beside it in dagger.json. `python
benchmarks/experiment.py dagger result` computes every published number from them, and `python
benchmarks/recompute_dagger.py` the main ones again, without this project's statistics.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pyarrow as pa
import records
from experiment import Experiment, comparison_lines, difference_of, put, rounds_by_seed
from skills_teachers import FAMILIES, FIXED, at_zero, collapsed_trainings, family_lines, kept_rates, primary, seen

from composer_stages.evaluation.arm_comparison import EvalQuestion
from composer_stages.evaluation.difference import Difference
from composer_stages.evaluation.inference import holm, student_quantile
from composer_stages.evaluation.outcomes import AT_ZERO, KEPT, START
from composer_stages.evaluation.words import points
from composer_stages.runs import store

EXPERIMENT = Experiment.named("dagger")
COMPARED = (("C", "B"), ("C", "A"), ("C", "D"))
"""The first comparison is a test at 5 %; where it shows a gain the others are, together at 5 % by Holm's correction."""
OTHERS = (("B", "A"), ("D", "A"), ("B", "D"), ("A", START), ("C", START))
EQUAL = 0.05
"""Largest distance of an arm's share of GRPO's tokens from 1 that still counts as equal."""
UNEQUAL = "tokens NOT EQUAL"
"""Told, as registered, with every difference of an arm whose tokens are not."""


def result(table: Path = EXPERIMENT.items, document: Path = EXPERIMENT.document) -> None:
    """Compute every published number from the table of outcomes; writes into the document and the record."""
    items, record = EXPERIMENT.read_items(table), store.read_json(table.with_suffix(".json"))
    courses = [one for one in record["trainings"] if one["arm"] in EXPERIMENT.arms]
    lines = []
    for title, end in (("temperature 0", AT_ZERO), ("temperature 1", "")):
        lines += [*EXPERIMENT.outcome_lines(items, title, end), ""]
    lines += ["| primary, passed and protocol kept at temperature 0 | about these 71 families | follows | others |"]
    lines += ["| --- | --- | --- | --- |"]
    found, others = primary(items, FIXED, COMPARED, power=True), primary(items, FAMILIES, COMPARED, power=False)
    for name, (one, follows) in found.items():
        lines.append(
            f"| {name}{token_word(name, courses)} | {points(one)} | {follows}{seen(one)} | {points(others[name][0])} |"
        )
    lines += ["", *equality_lines(courses), ""]
    worded = {name + token_word(name, courses): difference for name, difference in secondary(items).items()}
    lines += comparison_lines("secondary, passed and protocol kept", worded)
    lines += ["", *cosine_lines(record["trainings"]), "", *family_lines(items, COMPARED[0])]
    collapses = collapsed_trainings(items, courses, tuple(EXPERIMENT.arms))
    lines += ["", f"Collapsed: {'; '.join(collapses) or 'none'}.", "", *EXPERIMENT.course_lines(courses)]
    lines += ["", f"All of it took {record['processor_hours']:.1f} processor hours."]
    put(document, lines)
    about = "SmolLM2-135M, three attempts a question, {} at temperature 0: points passed with the protocol kept"
    claims = ((about.format(name + token_word(name, courses)), one) for name, (one, _) in found.items())
    records.write("experiment-dagger", (EXPERIMENT.claim(claim, one) for claim, one in claims))
    print("\n".join(lines))


def secondary(items: pa.Table) -> dict[str, Difference]:
    """Return the secondary differences, which are under one correction."""
    pairs = [*(at_zero(*pair) for pair in OTHERS), *COMPARED]
    return difference_of(items, pairs, EvalQuestion(sampling=FIXED, outcome=KEPT), power=False)


def told(table: Path = EXPERIMENT.items) -> tuple[str, str]:
    """Return what was found, in the paragraph of docs/findings.md and in README's line."""
    items, record = EXPERIMENT.read_items(table), store.read_json(table.with_suffix(".json"))
    courses = [one for one in record["trainings"] if one["arm"] in EXPERIMENT.arms]
    found = {
        name: f"{points(one)}{token_word(name, courses)}: {follows}"
        for name, (one, follows) in primary(items, FIXED, COMPARED).items()
    }
    rates = kept_rates(items, EXPERIMENT.arms)
    shares = [f"{arm} {share:.2f}" for arm, share in token_shares(courses).items() if arm != "A"]
    others = secondary(items)
    p_values = dict(zip(others, holm([one.p_value for one in others.values()]), strict=True))
    name = "B@0 − A@0"
    imitation = f"{points(others[name])}{token_word(name, courses)}, p {p_values[name]:.3f} after Holm's correction"
    collapses = collapsed_trainings(items, courses, tuple(EXPERIMENT.arms))
    seeds = len({one["seed"] for one in courses})
    return (
        "Must the states that are imitated be the student's own of today? A [third experiment](experiments/dagger.md), "
        f"registered as well, of {seeds} trainings of each arm of SmolLM2-135M with three attempts a question and the "
        f"same tasks for each arm: answers at temperature 0 are right and kept the protocol in {rates[START]} before "
        f"training, {rates['A']} by GRPO (A), {rates['B']} by imitating the teacher's choices in one collection (B), "
        f"{rates['C']} in three rounds, each with a collection of the student of the round before, as DAgger does (C), "
        f"and {rates['D']} by on-policy distillation (D). C − B is {found['C − B']}; C − A is {found['C − A']}; "
        f"C − D is {found['C − D']}. B − A, a secondary comparison, is {imitation}. Tokens in "
        f"the losses, beside those of A: {', '.join(shares)} (equal by the registration is within "
        f"{EQUAL:.2f}). Trainings that collapsed: {len(collapses) or 'none'}.",
        f"In a third, of the same tasks for each arm, imitation beside GRPO, a secondary comparison: {imitation}; "
        f"three rounds of it, as DAgger does, beside one: {found['C − B']}.",
    )


def token_word(comparison: str, courses: Sequence[Mapping[str, Any]]) -> str:
    """Return `UNEQUAL` in brackets where an arm of a comparison trained on other tokens than GRPO, else nothing."""
    shares = token_shares(courses)
    arms = {side.partition("@")[0] for side in comparison.split(" − ")}
    return f" ({UNEQUAL})" * any(abs(shares[arm] - 1) > EQUAL for arm in arms & shares.keys())


def token_shares(courses: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return each arm's share of the tokens that GRPO trained on with the same seed, mean over the seeds."""
    of_grpo = by_seed(courses, "A")
    counts = {arm: by_seed(courses, arm) for arm in EXPERIMENT.arms}
    return {arm: fmean(count / of_grpo[seed] for seed, count in of.items()) for arm, of in counts.items()}


def equality_lines(courses: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what the arms trained on, means over seeds, and whether it is equal by the registered rule."""
    lines = ["| trained on | tasks | tokens in the loss | least and most | share of GRPO's | most pairs |"]
    lines += ["| --- " * 6 + "|"]
    tokens = {arm: by_seed(courses, arm) for arm in EXPERIMENT.arms}
    shares = token_shares(courses)
    sets = {seed: {one["task_set"] for one in courses if one["seed"] == seed} for seed in tokens["A"]}
    for arm, of_seeds in tokens.items():
        own = [one for one in courses if one["arm"] == arm]
        share = shares[arm]
        tasks = " or ".join(map(str, sorted({one["tasks"] for one in own})))
        ends = f"{min(of_seeds.values()):,} to {max(of_seeds.values()):,}"
        said = f"{share:.3f}, {'equal' if abs(share - 1) <= EQUAL else 'NOT EQUAL'}"
        pairs = max(one["pairs"] for one in own)
        lines.append(f"| {arm} | {tasks} | {fmean(of_seeds.values()):,.0f} | {ends} | {said} | {pairs} |")
    differing = [seed for seed, found in sets.items() if len(found) > 1]
    lines += ["", f"Seeds whose arms differ in their tasks: {', '.join(map(str, differing)) or 'none'}."]
    return lines


def by_seed(courses: Sequence[Mapping[str, Any]], arm: str) -> dict[int, int]:
    """Return the tokens that an arm trained on, over all of its rounds, by seed."""
    trainings = rounds_by_seed(courses, arm)
    return {rounds[0]["seed"]: sum(one["tokens_trained"] for one in rounds) for rounds in trainings}


def cosine_lines(trainings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the cosines between the gradients of the losses at the start, over seeds with Student's interval."""
    measured = [one for one in trainings if one["arm"] in EXPERIMENT.beside]
    names = sorted({key for one in measured for key in one if key.startswith("gradient/cosine/")})
    lines = ["| gradients at the start, one step of each seed | cosine, 95 % interval |", "| --- | --- |"]
    for name in names:
        values = [one[name] for one in measured if name in one]
        half = student_quantile(len(values) - 1, 0.975) * stdev(values) / len(values) ** 0.5
        mean = fmean(values)
        between = name.rpartition("/")[2].replace("~", ", ")
        lines.append(f"| {between} | {mean:.3f} [{mean - half:.3f}, {mean + half:.3f}] |")
    return lines
