"""Do a frozen teacher's answers help SmolLM2 beyond GRPO, beyond distillation, and beyond imitation? Registered.

docs/experiments/skills-teachers.md states questions, arms, rule and power, and was committed before any held-out task
was played. `./dev experiment skills-teachers` runs it by benchmarks/experiment.py, about two and a half hours on two
idle cores. The outcomes of all answers are in docs/experiments/skills-teachers.parquet, the trainings beside it in
skills-teachers.json; `python benchmarks/experiment.py skills-teachers result` computes every published number from
them, and `python benchmarks/recompute.py` the main ones again, without this project's statistics.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import records
from experiment import Experiment, comparison_lines, cut_share, difference_of, put

from composer_stages.evaluation.arm_comparison import EvalQuestion
from composer_stages.evaluation.difference import Decision, Difference
from composer_stages.evaluation.inference import ALPHA, holm
from composer_stages.evaluation.outcomes import AT_ZERO, KEPT, PASSED, PROTOCOL, START, select_arm, task_mean
from composer_stages.evaluation.report import arms_chart
from composer_stages.evaluation.verdict import decide
from composer_stages.evaluation.words import points
from composer_stages.runs import store
from composer_stages.terms import SamplingUnit

EXPERIMENT = Experiment.named("skills-teachers")
GATE, GATED = ("C", "A"), (("C", "D"), ("B", "C"))
"""The first comparison is a test at 5 %; where it shows a gain the others are, together at 5 % by Holm's correction."""
OTHERS = (("B", "A"), ("D", "A"), ("A", START), ("C", START))
FAMILIES = SamplingUnit()
FIXED = replace(FAMILIES, fixed=True)
CUT, UNSURE = 0.25, 0.5
"""A training has collapsed, too, if it cuts more than this share of its answers, or its entropy doubles beyond this."""
SHOWN = {
    Decision.BETTER: "a gain is shown",
    Decision.BETTER_BY_LESS: "a gain of less than 2 points is shown",
    Decision.WORSE: "a loss is shown",
    Decision.NO_GAIN: "less than 2 points",
    Decision.UNDECIDED: "undecided",
}


def at_zero(*arms: str) -> tuple[str, ...]:
    """Return the names of arms at temperature 0."""
    return tuple(f"{arm}{AT_ZERO}" for arm in arms)


def primary(
    items: pa.Table,
    sampling: SamplingUnit = FAMILIES,
    pairs: Sequence[tuple[str, str]] = (GATE, *GATED),
    *,
    power: bool | None = None,
) -> dict[str, tuple[Difference, str]]:
    """Return the comparisons of the primary outcome by name, each with what follows from it by the rule.

    pairs: the gate first.
    """
    question = EvalQuestion(sampling=sampling, outcome=KEPT)
    power = not sampling.fixed if power is None else power
    found = difference_of(items, [at_zero(*pair) for pair in pairs], question, power=power)
    (gate, first), *rest = found.items()
    said = {gate: SHOWN[first.decision]}
    # At a p-value's own level of Holm's procedure, so that intervals of tests and decisions do not contradict.
    for (name, one), p in zip(rest, holm([one.p_value for _, one in rest]), strict=True):
        said[name] = f"{SHOWN[one.decision]}, p {p:.3g} after Holm"
        if one.gains and p >= ALPHA:
            said[name] = f"undecided, p {p:.3g} after Holm"
        if one.decision == Decision.WORSE and p >= ALPHA:  # its interval lies below 2 points all the same
            said[name] = f"{SHOWN[Decision.NO_GAIN]}; a loss is not shown, p {p:.3g} after Holm"
        if not first.gains:
            said[name] = f"a description, as no gain of {gate.replace(AT_ZERO, '')} is shown"
    return {name.replace(AT_ZERO, ""): (one, said[name]) for name, one in found.items()}


def result(
    table: Path = EXPERIMENT.items, document: Path = EXPERIMENT.document, figure: Path = EXPERIMENT.figure
) -> None:
    """Compute every published number from the table of outcomes; writes into the document, the figure, the record."""
    items, record = EXPERIMENT.read_items(table), store.read_json(table.with_suffix(".json"))
    courses = record["trainings"]
    lines = []
    for title, end in (("temperature 0", AT_ZERO), ("temperature 1", "")):
        lines += [*EXPERIMENT.outcome_lines(items, title, end), ""]
    lines += [
        "| primary, passed and protocol kept at temperature 0 | about families like these | follows | about these 71 |"
    ]
    lines += ["| --- | --- | --- | --- |"]
    found, fixed = primary(items), primary(items, FIXED)
    for name, (one, follows) in found.items():
        lines.append(f"| {name} | {points(one)} | {follows}{seen(one)} | {points(fixed[name][0])} |")
    lines += ["", *other_differences(courses), "", *seen_lines(items, courses)]
    question = EvalQuestion(outcome=KEPT)
    secondary = difference_of(items, [*(at_zero(*pair) for pair in OTHERS), GATE, *GATED], question, power=False)
    lines += ["", *comparison_lines("secondary, passed and protocol kept", secondary), "", *family_lines(items)]
    title = "passed, whatever the protocol, at temperature 0 (described; not registered)"
    lines += ["", *comparison_lines(title, in_passes(items))]
    collapses = collapsed_trainings(items, courses)
    lines += ["", f"Collapsed: {'; '.join(collapses) or 'none'}.", "", *EXPERIMENT.course_lines(courses)]
    lines += ["", f"All of it took {record['processor_hours']:.1f} processor hours, the tuning included."]
    put(document, lines)
    verdict = decide(items, EvalQuestion(*at_zero("A", "C", "D"), outcome=KEPT))
    figure.write_bytes(arms_chart(verdict))
    records.write("experiment-skills-teachers", (claim(name, one) for name, (one, _) in found.items()))
    print("\n".join(lines))


def in_passes(items: pa.Table) -> dict[str, Difference]:
    """Return the differences of README's table in passes, which verdicts of `composer evaluate` are about."""
    pairs = [at_zero(*pair) for pair in (GATE, OTHERS[0], GATED[1])]
    differences = difference_of(items, pairs, EvalQuestion(outcome=PASSED), power=False)
    return {name.replace(AT_ZERO, ""): difference for name, difference in differences.items()}


def seen(difference: Difference) -> str:
    """Return the difference that 80 % of such experiments would find, where nothing was decided."""
    return "" if difference.mde is None else f"; {100 * difference.mde:.1f} points would be found with 80 % power"


def claim(name: str, found: Difference) -> records.Claim:
    """Return the record of a comparison."""
    return EXPERIMENT.claim(
        f"SmolLM2-135M, {name} at temperature 0: points of tasks passed with the protocol kept, "
        f"{found.num_tasks} tasks of {found.num_units} families",
        found,
    )


def collapsed_trainings(
    items: pa.Table, courses: Sequence[Mapping[str, Any]], arms: Iterable[str] = tuple(EXPERIMENT.arms)
) -> list[str]:
    """Return the trainings that collapsed by the registered rule, as clauses.

    Not by `outcomes.collapsed`, the rule of verdicts: it may change after the registration.
    """
    found = []
    for arm in arms:
        rows = select_arm(items, f"{arm}{AT_ZERO}")
        trainings = {
            seed: rows.filter(pc.equal(rows["train_seed"], seed)) for seed in sorted({*rows["train_seed"].to_pylist()})
        }
        for outcome, does in (
            (PASSED, "passes {} % of the tasks"),
            (PROTOCOL, "keeps the protocol in {} % of answers"),
        ):
            rates = {seed: rate for seed, own in trainings.items() if (rate := task_mean(own, outcome)) is not None}
            for seed, rate in rates.items():
                usual = median([other for key, other in rates.items() if key != seed] or [0.0])
                error = (usual * (1 - usual) / pc.count_distinct(trainings[seed]["task_id"]).as_py()) ** 0.5
                if rate < usual / 2 and usual - rate > 3 * error:
                    did = does.format(f"{100 * rate:.0f}")
                    found.append(f"{arm}{AT_ZERO} with seed {seed} {did}, its other trainings {100 * usual:.0f} %")
        for seed, own in trainings.items():
            share = cut_share(own)
            found += [f"{arm} with seed {seed} cuts {100 * share:.0f} % of its answers"] if share > CUT else []
    for one in courses:
        name = f"{one['arm']} with seed {one['seed']}"
        if one.get("entropy_last", 0.0) > max(2 * one.get("entropy_first", 0.0), UNSURE):
            found.append(
                f"{name} has entropy {one['entropy_last']:.2f} at its end and {one['entropy_first']:.2f} before"
            )
        found += [f"{name} left its course at {one['collapsed']}"] if one["collapsed"] else []
    return found


def family_lines(items: pa.Table, pair: tuple[str, str] = GATE) -> list[str]:
    """Return how a gain is spread over families: the largest gains and losses, and how much the first three make."""
    rates = {arm: by_family(select_arm(items, f"{arm}{AT_ZERO}")) for arm in pair}
    gains = {name: rates[pair[0]][name] - rates[pair[1]][name] for name in rates[pair[0]]}
    order = sorted(gains, key=lambda name: -gains[name])
    three = 100 * sum(gains[name] for name in order[:3]) / len(gains)
    risen, fallen = (sum(sign * gain > 1e-9 for gain in gains.values()) for sign in (1, -1))
    shown = ", ".join(f"{name} {100 * gains[name]:+.0f}" for name in (*order[:5], *order[-5:]))
    return [
        f"By family, {pair[0]} − {pair[1]} rises in {risen}, falls in {fallen} and stays in "
        f"{len(gains) - risen - fallen} of {len(gains)}: the three largest gains make {three:+.1f} points of the mean. "
        f"The five largest and smallest, in points: {shown}."
    ]


def by_family(rows: pa.Table) -> dict[str, float]:
    """Return the share of passes with the protocol kept of each family."""
    kept = pc.and_(rows["passed"], rows["protocol_ok"]).cast("float64")
    table = pa.table({"family": rows["family"], "kept": kept}).group_by("family").aggregate([("kept", "mean")])
    return dict(zip(table["family"].to_pylist(), table["kept_mean"].to_pylist(), strict=True))


def kept_rates(items: pa.Table, arms: Iterable[str]) -> dict[str, str]:
    """Return in per cent what each arm and the start pass with the protocol kept at temperature 0."""
    means = {arm: task_mean(select_arm(items, f"{arm}{AT_ZERO}"), KEPT) for arm in (START, *arms)}
    return {arm: f"{100 * mean:.0f} %" for arm, mean in means.items() if mean is not None}


def told() -> tuple[dict[str, str], str]:
    """Return the cells of this experiment in README's table by their row, and what to know about them."""
    items = EXPERIMENT.read_items()
    found = primary(items)
    (whole,) = difference_of(items, [at_zero(*OTHERS[0])], EvalQuestion(outcome=KEPT)).values()
    title = "[SmolLM2-135M](experiments/skills-teachers.md)"
    cells = {"": f"{title}, {whole.num_seeds} trainings an arm"}
    cells |= kept_rates(items, EXPERIMENT.arms)
    cells |= {name: f"{points(one)}: {follows}" for name, (one, follows) in found.items()}
    cells["B − A"] = f"{points(whole)}: {SHOWN[whole.decision]}"
    courses = store.read_json(EXPERIMENT.document.with_suffix(".json"))["trainings"]
    collapses = collapsed_trainings(items, courses)
    often, seldom = (next(iter(gains.values())) for gains in by_pairs(items, courses))
    registered = {**{name: one for name, (one, _) in found.items()}, "B − A": whole}
    if any(points(one) != points(registered[name]) for name, one in in_passes(items).items()):
        raise ValueError("passes give other differences than kept ones: write README's sentence anew")
    return cells, (
        f"On SmolLM2, answers at temperature 0 to held-out questions of {whole.num_units} families count that are "
        "right and kept the protocol; the teacher is the model's own frozen start behind worked examples. On-policy "
        f"distillation from it (D) reaches {cells['D']}; C − D is {cells['C − D']}. B and C also see pairs from tasks "
        f"that A and D never see: in the {often.num_units} families with such pairs C − A is {points(often)}, in the "
        f"other {seldom.num_units} it is {points(seldom)} (described, not tested). Eight seeds were registered; two "
        "were dropped before the evaluation, as the registration allows where the machine's time ends. Trainings that "
        f"collapsed: {len(collapses) or 'none'}. In passes, whatever the protocol, which verdicts count today, the "
        "differences are the same to the tenth of a point."
    )


def other_differences(courses: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return in what the arms differ beside their losses, for the place next to their differences."""
    own = [one for one in courses if one["arm"] == "C"]
    mean = {name: fmean(one[name] for one in own) for name in ("pairs", "pairs_other")}
    return [
        "The arms differ in more than their losses. B and C also see pairs, "
        f"{mean['pairs']:.0f} for each seed, of which {mean['pairs_other']:.0f} come from tasks that the start solves "
        "always or never; A and D see its mixed tasks alone. B and C ask the teacher 142 times for each seed before "
        "the training, D has it score 512 answers in it."
    ]


def seen_lines(items: pa.Table, courses: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return C - A and C - D apart for families with pairs from tasks that the mixed ones lack, and for the others."""
    lines = ["| pairs from tasks that are not mixed | families | C − A | C − D |", "| --- | --- | --- | --- |"]
    titles = ("in at least half of the collections", "in fewer")
    for title, gains in zip(titles, by_pairs(items, courses), strict=True):
        cells = [f"{next(iter(gains.values())).num_units}", *map(points, gains.values())]
        lines.append(f"| {title} (described, not tested) | {' | '.join(cells)} |")
    return lines


def by_pairs(items: pa.Table, courses: Sequence[Mapping[str, Any]]) -> list[dict[str, Difference]]:
    """Return C - A and C - D of families with pairs from tasks that are not mixed, often; and of the others."""
    own = [one["families_other"] for one in courses if one["arm"] == "C"]
    often = {name for name, num in Counter(name for names in own for name in names).items() if 2 * num >= len(own)}
    inside = pa.array([family in often for family in items["family"].to_pylist()])
    pairs = [at_zero(*pair) for pair in (GATE, GATED[0])]
    parts = (items.filter(part) for part in (inside, pc.invert(inside)))
    return [difference_of(part, pairs, EvalQuestion(outcome=KEPT), power=False) for part in parts]
