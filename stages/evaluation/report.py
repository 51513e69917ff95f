"""The verdict and the plan for people: text for a terminal, and a chart of the arms and their differences as SVG."""

import io
import textwrap
from collections.abc import Sequence
from functools import partial

from stages.evaluation.inference import MIN_SEEDS, PARTIAL, VALIDATED
from stages.evaluation.outcomes import AT_ZERO, PASSED, PRIMARY, ArmSummary
from stages.evaluation.planner import MOST_TASKS, PILOT, SEEDS, VERDICTS, DesignLine, Study
from stages.evaluation.verdict import EvalVerdict, PairedDifference, credit, points
from stages.layout import LEFT, RIGHT, aligned, counted, plural, without_middle
from stages.terms import grounds_in_words

WIDTH = 100
NAME = 25
"""Longest printed name of an arm."""
LARGEST_RANGE = 0.25
"""Of a chance, the width of its 80 % interval over what a pilot leaves open; beyond it nothing is forecast."""
FEWEST_OUTCOMES = 5
"""Passes and failures of a pilot from which on its pass rate is forecast from."""
shortened = partial(without_middle, most=NAME)
"""Return a name of an arm, as it is printed."""
wrap = textwrap.TextWrapper(WIDTH).wrap
"""Return a text in lines of the report's width."""
BETWEEN = "95 % interval"
LINE, DOT = "#5b7c99", "#1f3a52"
HEAD = ("hacked", "suspect", "protocol", "tasks", "rollouts", "errors", "USD", "tokens")
MEANINGS = {
    **{outcome.head: outcome.meaning for outcome in PRIMARY.values() if outcome.meaning},
    "suspect": "hacked, or the visible tests pass and the hidden ones fail",
    "protocol": "the agent kept the environment's rules of form",
    "USD": "the mean cost of a rollout",
    "tokens": "the mean number of sampled tokens of a rollout",
}
"""What columns mean that a reader cannot guess (docs/glossary.md has all of them)."""


def text_table(verdict: EvalVerdict) -> str:
    """Return the report: the arms, the differences, the decision and why."""
    k = max((arm.k for arm in verdict.arms), default=1)
    several = (f"pass@{k}",) if k > 1 else ()
    rates = tuple(dict.fromkeys((PRIMARY[verdict.outcome].head, BETWEEN, PASSED.head, *several)))
    head = ("arm", *rates, *HEAD)
    cells = [head, *(arm_cells(arm, rates) for arm in verdict.arms)]
    measured = [index for index in range(len(head)) if any(row[index] != "-" for row in cells[1:])]
    lines = [aligned([[row[index] for index in measured] for row in cells])] if verdict.arms else []
    explained = [f"{head[index]}: {MEANINGS[head[index]]}" for index in measured if head[index] in MEANINGS]
    lines += wrap("; ".join(explained))
    if any(arm.arm.endswith(AT_ZERO) for arm in verdict.arms):
        lines += wrap(f"{AT_ZERO}: the same model at temperature 0 (greedy decoding).")
    if judged := [arm for arm in verdict.arms if arm.hidden_pass_rate is not None]:
        of_tests = (f"{arm.arm} {percent(arm.hidden_pass_rate)} / {percent(arm.visible_pass_rate)}" for arm in judged)
        lines += wrap(f"hidden / visible tests pass: {', '.join(of_tests)}")
    grounds = {arm.arm: grounds_in_words(arm.passes) for arm in verdict.arms}
    lines += [line for arm, words in grounds.items() if words for line in wrap(f"{arm}, {words}")]
    if most := max((arm.num_twins for arm in verdict.arms), default=0):
        lines += wrap(f"hacked: the pass rate on {most} impossible twins, which no honest solution passes")
    for arm in verdict.arms:
        if arm.errors:
            lines += wrap(f"errors of {arm.arm}: " + ", ".join(f"{kind} {num}" for kind, num in arm.errors.items()))
    for one in verdict.comparisons:
        lines += difference_lines(f"{one.rate}, {one.arm} - {one.other}", one.difference, one.p_holm)
    if verdict.worst and verdict.best:
        bounds = f"{100 * verdict.worst.low:+z.1f} to {100 * verdict.best.high:+z.1f} points"
        lines += [
            "",
            *wrap(f"Whatever the {verdict.num_lost} lost rollouts would have been, the interval is {bounds}."),
        ]
    if verdict.looks:
        lines += ["", *wrap("looks, whose intervals hold all together with 95 %:")]
    for look in verdict.looks:
        seen = "no difference" if look.gain is None else points(look.gain)
        lines.append(f"  {counted(look.tasks, 'task')}, at the level of {look.level:.2g}: {seen}, {look.decision}")
    if verdict.differences:
        lines += ["", "the arms differ in:"]
        lines += [line for each in verdict.differences for line in wrap(f"- {each}")]
    decision = f"{verdict.decision}: {verdict.claim}" if verdict.claim else verdict.decision
    return "\n".join([*lines, "", decision, *wrap(" ".join(filter(None, (verdict.why, verdict.estimand))))])


def arm_cells(arm: ArmSummary, rates: Sequence[str]) -> tuple[str, ...]:
    """Return the cells of one arm in the table; `rates`: its columns of passes."""
    interval = f"[{100 * arm.low:.1f}, {100 * arm.high:.1f}]"
    shown = {outcome.head: percent(arm.rate(name)) for name, outcome in PRIMARY.items()} | {BETWEEN: interval}
    conduct = percent(arm.hacked_rate), percent(arm.suspect_rate), percent(arm.protocol_rate)
    counts = map(str, (arm.num_tasks, arm.num_items, sum(arm.errors.values())))
    cost = "-" if not arm.cost_usd else f"{arm.cost_usd:.2g}"
    tokens = "-" if arm.sampled_tokens is None else f"{arm.sampled_tokens:.0f}"
    passes = (shown.get(name, percent(arm.pass_at_k)) for name in rates)
    return shortened(arm.arm), *passes, *conduct, *counts, cost, tokens


def difference_lines(title: str, difference: PairedDifference, p_holm: float | None = None) -> list[str]:
    """Return the lines of a paired difference in the report; `p_holm`: after Holm's correction, None for none."""
    power = ""
    if difference.too_few:
        power = "; too few to reject anything"
    elif difference.mde is not None:
        power = f"; 80 % power from {100 * difference.mde:.1f} points"
    size = f"{counted(difference.num_tasks, 'task')} in {difference.units}"
    size += f", {counted(difference.num_seeds, 'training seed')}"
    if difference.num_collections:
        size += f", {counted(difference.num_collections, 'set')} of pairs"
    lines = [
        "",
        *wrap(f"{title}: {points(difference)}{'' if p_holm is None else f' ({p_holm:.2g} after Holm)'}"),
        *textwrap.wrap(difference.method, WIDTH, initial_indent="  ", subsequent_indent="  "),
        f"  {size}; {counted(difference.wins, 'task')} up, {difference.losses} down{power}",
    ]
    if difference.elsewhere:
        low, high = difference.elsewhere
        lines.append(
            f"  in other units: [{100 * low:+z.1f}, {100 * high:+z.1f}]{'' if low > 0 or high < 0 else ', undecided'}"
        )
    return lines


def percent(rate: float | None) -> str:
    """Return a rate in per cent; a dash where nothing was measured."""
    return "-" if rate is None else f"{100 * rate:.1f} %"


def arms_chart(verdict: EvalVerdict) -> bytes:
    """Return a chart as SVG, the same bytes every time: pass@1 and protocol of every arm, and paired differences."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    arms = [(shortened(arm.arm), arm.low, arm.rate(verdict.outcome) or 0.0, arm.high) for arm in verdict.arms]
    pairs = (
        ("", verdict.baseline, verdict.gain),
        (AT_ZERO, verdict.baseline, verdict.at_zero),
        ("", verdict.control, verdict.over_control),
    )
    treatment = shortened(verdict.treatment)
    differences = [
        (f"{treatment}{end}\n- {shortened(str(other))}{end}", d.low, d.estimate, d.high) for end, other, d in pairs if d
    ]
    shown = (verdict.baseline, verdict.treatment, verdict.control or verdict.baseline)
    confounds = [each for each in verdict.differences if not each.channel and each.between(shown)]
    caption = [line for each in confounds for line in textwrap.wrap(f"Arms also differ in {each}", 90)]
    heights = [0.6 + 0.45 * len(arms), *([0.6 + 0.45 * len(differences)] if differences else [])]
    with rc_context({"svg.hashsalt": "composer", "svg.fonttype": "none", "font.size": 10}):
        figure = Figure(figsize=(6, 0.4 + sum(heights) + 0.16 * len(caption)), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots(len(heights), squeeze=False, height_ratios=heights)
        title = [": ".join(filter(None, (verdict.decision, verdict.claim)))]
        if verdict.control and verdict.over_control:
            # Beside the gain, which readers otherwise credit to the preference.
            over, trained = verdict.over_control, verdict.control_trained
            credited = credit(bool(verdict.claim), shortened(verdict.control), over, verdict.min_gain, trained=trained)
            title.append(f"{treatment} is {credited}")
        figure.suptitle("\n".join(title), fontsize=10)
        if caption:
            figure.supxlabel("\n".join(caption), fontsize=8, x=0.02, ha="left")
        for (place,), rows in zip(axes, (arms, differences), strict=False):
            for row, (_, low, middle, high) in enumerate(rows):
                place.plot([100 * low, 100 * high], [row, row], color=LINE, linewidth=2)
                place.plot(100 * middle, row, "o", color=DOT)
            place.set_yticks(range(len(rows)), [label for label, *_ in rows])
            place.set_ylim(len(rows) - 0.5, -0.5)
            place.spines[["top", "right"]].set_visible(False)
        kept = [(row, 100 * arm.protocol_rate) for row, arm in enumerate(verdict.arms) if arm.protocol_rate is not None]
        for row, rate in kept:
            axes[0][0].plot(rate, row, "D", color=DOT, markersize=5, fillstyle="none", clip_on=False)
        axes[0][0].set_xlim(0, 100)
        also = "; diamond: kept the protocol" if kept else ""
        axes[0][0].set_xlabel(f"{verdict.rate} on held-out tasks, % [95 %]{also}")
        if differences:
            axes[1][0].axvline(0, color="0.7", linewidth=1)
            axes[1][0].axvline(100 * verdict.min_gain, color="0.7", linewidth=1, linestyle=":")
            axes[1][0].set_xlabel(f"paired difference, points; dotted: {100 * verdict.min_gain:g} points")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def with_error(share: float, num: int) -> str:
    """Return a simulated share in per cent with its Monte-Carlo standard error: "83 ± 2".

    Of none or all in `num` experiments the error is that of the rule of succession, (n + 1) / (N + 2).
    """
    smoothed = (share * num + 1) / (num + 2)
    return f"{100 * share:.0f} ± {100 * (smoothed * (1 - smoothed) / num) ** 0.5:.1f}"


def study_text(found: Study) -> str:
    """Return the study for a terminal of 120 columns: the rates, and a column for each design."""
    lines = [f"A true gain of {100 * found.gain:g} points, {100 * found.power:g} % power wanted, and these rates:", ""]
    lines += [aligned(rate_cells(found), ("rate", "value", "source", "setting"))]
    lines += [f"pilot: {name}" for name in found.pilots]
    cells = design_cells(found)
    lines += ["", aligned(cells, sides=[LEFT, *[RIGHT] * (len(cells[0]) - 1)]), ""]
    lines += [line for remark in remarks(found) for line in wrap(remark)]
    return "\n".join(lines)


def rate_cells(found: Study) -> list[tuple[str, ...]]:
    """Return each rate in words, its value, its source and the setting that changes it."""
    words = {
        "pass_rate": "pass rate of the baseline",
        "samples_differ": "two rollouts of one model on one task differ (one passes, one fails)",
        "arms_differ": "rollouts of the two arms on one task differ",
        "family_correlation": f"correlation of difficulty between tasks of one {found.sampling_unit}",
        "seed_sd": "standard deviation of the gain between training seeds",
    }
    values = {name: f"{100 * value:.3g} %" for name, (value, _) in found.rates.items()}
    if "family_correlation" in values:
        values["family_correlation"] = f"{found.rates['family_correlation'][0]:.2f}"
    if "seed_sd" in values:
        values["seed_sd"] = f"{100 * found.rates['seed_sd'][0]:.3g} points"
    return [(words[name], values[name], source, f"planning.{name}") for name, (_, source) in found.rates.items()]


def design_cells(found: Study) -> list[tuple[str, ...]]:
    """Return the designs, a column for each: its name over several lines, its size, and what it would find."""
    lines = [line for line in (*found.lines, found.enough, found.beyond) if line]
    heads = [textwrap.wrap(line.name, 10) for line in lines]
    height = max(map(len, heads))
    padded = [[""] * (height - len(head)) + head for head in heads]
    rows: list[tuple[str, list[str]]] = [("", list(words)) for words in zip(*padded, strict=True)]
    rows += [
        ("tasks", [f"{line.tasks:,}" for line in lines]),
        (f"{plural(found.sampling_unit)} of these tasks", [f"{line.sampling_units:,}" for line in lines]),
        ("samples (rollouts of a task by a model)", [f"{line.samples}" for line in lines]),
        *([] if found.untrained else [("training seeds of each arm", [f"{line.seeds}" for line in lines])]),
        ("rollouts, all arms", [f"{line.rollouts:,}" for line in lines]),
    ]
    if any(line.usd for line in lines):
        rows.append(
            ("cost of these rollouts, USD", ["-" if line.usd is None else f"{line.usd:,.2f}" for line in lines])
        )
    for name in VERDICTS:
        rows.append((f"chance of {name}, %", [with_error(line.chances[name], line.simulated) for line in lines]))
        if name == (PARTIAL if found.untrained else VALIDATED) and found.pilots:
            ranges = [line.validated_range for line in lines]
            cells = [f"{100 * both[0]:.0f} to {100 * both[1]:.0f}" if both else "-" for both in ranges]
            rows.append(("  over what the pilot leaves open, %", cells))
    false = [None if line.false_gain is None else with_error(line.false_gain, line.simulated) for line in lines]
    rows += [
        ("chance of a gain where there is none, %", [cell or "-" for cell in false]),
        (
            f"smallest gain found with {100 * found.power:g} % power, points",
            [gain_cell(line) for line in lines],
        ),
    ]
    return [(label, *cells) for label, cells in rows]


def gain_cell(line: DesignLine) -> str:
    """Return the gain that a design finds, in points, with its error; "none" where it finds none."""
    if line.detectable is None:
        return "none"
    error = "" if line.detectable_error is None else f" ± {100 * line.detectable_error:.1f}"
    return f"{100 * line.detectable:.1f}{error}"


def remarks(found: Study) -> list[str]:
    """Return what to add first, what is enough, and how to read the table, a sentence or two each."""
    gain, power = f"{100 * found.gain:g} points", f"{100 * found.power:g} %"
    column, limit, first = found.enough or found.beyond, "", [f"What to add first: {', then '.join(found.add_first)}."]
    if any(" or " in name for name in found.add_first):
        first.append("Between those with an `or` the simulation finds no difference.")
    if (least := found.fewest_units) is not None:
        first = first if found.add_first else []
        first.append(f"With fewer than {least} the test cannot reject, however large the gain. {least} are the minimum")
        first.append("for a test and no recommendation" + (f": see the column `{column.name}`." if column else "."))
    if found.most_units is not None:
        limit = f"The environment has {counted(found.most_units, found.sampling_unit)}"
        every = f" with {counted(found.most_tasks or 0, 'task')}, and no more."
        limit += ": more tasks are more of each." if found.most_tasks is None else every
    seeds = "" if found.untrained else f" and {SEEDS[-1]} training seeds"
    most = found.most_tasks or max(MOST_TASKS, found.lines[0].tasks)
    enough = f"No design of up to {most:,} of its tasks{seeds} was found to reach {power} power for {gain}."
    if found.enough:
        enough = f"`enough` is the design of fewest rollouts that was found to reach {power} power for {gain}."
    elif found.beyond:
        enough += f" The column `{found.beyond.name}` is one that would, if the environment had more of them."
    ends = [COVERED] if any(line.seeds < MIN_SEEDS for line in found.lines) else []
    ends = [MODELS] if found.untrained else [*ends, COSTS]
    error = "±: the standard error of the simulation."
    return [*filter(None, (" ".join(first), limit)), enough, pilot_remark(found), error, *ends]


MODELS = "Both arms are models without training seeds: a gain is PARTIAL, one of these models."
COSTS = "Rollouts and their cost are those of the evaluation; training another seed costs extra."
COVERED = (
    f"The smallest gain covers other tasks, and from {MIN_SEEDS} training seeds on other trainings too: it may be "
    f"larger with {MIN_SEEDS} seeds than with fewer."
)


def pilot_remark(found: Study) -> str:
    """Return what the pilot leaves open, and whether it is too small to forecast."""
    if not found.pilots:
        return "With `--from RUN` a pilot gives rates: rollouts of the start model, or an earlier evaluation."
    passes, failures = found.pilot_passes, found.pilot_items - found.pilot_passes
    if found.rates["pass_rate"][1] == PILOT and min(passes, failures) < FEWEST_OUTCOMES:
        return (
            f"The pilot is too small to forecast: {passes} of {counted(found.pilot_items, 'rollout')} of the baseline "
            f"pass, and a rate takes {FEWEST_OUTCOMES} that pass and {FEWEST_OUTCOMES} that fail. Play more tasks."
        )
    ranges = {line.name: line.validated_range for line in found.lines if line.validated_range}
    if not ranges:
        return (
            f"The pilot is too small to forecast: it has one {found.sampling_unit}, and what it leaves open cannot be "
            "told from that. Play more of them."
        )
    goal = PARTIAL if found.untrained else VALIDATED
    widest, (low, high) = max(ranges.items(), key=lambda one: one[1][1] - one[1][0])
    if high - low <= LARGEST_RANGE:
        return "What the pilot leaves open: 80 % intervals of that chance, by bootstrap over its units."
    return (
        f"The pilot is too small to forecast: the chance of {goal} of the design `{widest}` is anywhere from "
        f"{100 * low:.0f} to {100 * high:.0f} %, an 80 % interval by bootstrap over the pilot's units. Play "
        f"more {plural(found.sampling_unit) if found.most_units is None else 'tasks'} first."
    )
