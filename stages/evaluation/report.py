"""The report of a verdict: text for a terminal, and a chart of the arms and their differences as SVG."""

import io
import textwrap
from collections.abc import Sequence
from functools import partial

from composer_stages.evaluation.difference import Difference
from composer_stages.evaluation.outcomes import AT_ZERO, PASSED, PRIMARY, ArmSummary
from composer_stages.evaluation.verdict import EvalVerdict
from composer_stages.evaluation.words import SENTENCES, VerdictWords, describe_method, describe_verdict, percent, points
from composer_stages.layout import aligned, signed, without_middle
from composer_stages.terms import grounds_in_words

WIDTH = 100
NAME = 25
"""Longest printed name of an arm."""
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


def text_table(verdict: EvalVerdict, words: VerdictWords | None = None) -> str:
    """Return the report: the arms, the differences, the decision and why. words: of a verdict that was read."""
    words = words or describe_verdict(verdict)
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
        lines += wrap(SENTENCES.text("greedy", AT_ZERO))
    if judged := [arm for arm in verdict.arms if arm.hidden_pass_rate is not None]:
        lines += wrap(SENTENCES.text("test_rates", judged))
    grounds = {arm.arm: grounds_in_words(arm.passes) for arm in verdict.arms}
    lines += [line for arm, words in grounds.items() if words for line in wrap(f"{arm}, {words}")]
    if most := max((arm.num_twins for arm in verdict.arms), default=0):
        lines += wrap(SENTENCES.text("twins", most))
    for arm in verdict.arms:
        if arm.errors:
            lines += wrap(f"errors of {arm.arm}: " + ", ".join(f"{kind} {num}" for kind, num in arm.errors.items()))
    for difference in verdict.comparisons:
        lines += difference_lines(difference)
    if verdict.worst and verdict.best:
        lines += ["", *wrap(SENTENCES.text("lost", verdict))]
    if verdict.looks:
        lines += ["", *wrap(SENTENCES.text("looks_head"))]
    for look in verdict.looks:
        lines.append(f"  {SENTENCES.text('look', look)}")
    if verdict.differences:
        lines += ["", "the arms differ in:"]
        lines += [line for each in verdict.differences for line in wrap(f"- {each}")]
    decision = ": ".join(filter(None, (verdict.decision, words.claim)))
    return "\n".join([*lines, "", decision, *wrap(" ".join(filter(None, (words.why, words.estimand))))])


def arm_cells(arm: ArmSummary, rates: Sequence[str]) -> tuple[str, ...]:
    """Return the cells of one arm in the table; `rates`: its columns of passes."""
    interval = f"[{100 * arm.low:.1f}, {100 * arm.high:.1f}]"
    cells = {outcome.head: percent(arm.rate(name)) for name, outcome in PRIMARY.items()} | {BETWEEN: interval}
    conduct = percent(arm.hacked_rate), percent(arm.suspect_rate), percent(arm.protocol_rate)
    counts = map(str, (arm.num_tasks, arm.num_items, sum(arm.errors.values())))
    cost = "-" if not arm.cost_usd else f"{arm.cost_usd:.2g}"
    tokens = "-" if arm.sampled_tokens is None else f"{arm.sampled_tokens:.0f}"
    passes = (cells.get(name, percent(arm.pass_at_k)) for name in rates)
    return shortened(arm.arm), *passes, *conduct, *counts, cost, tokens


def difference_lines(difference: Difference) -> list[str]:
    """Return the lines of a difference in the report."""
    title = f"{difference.rate}, {difference.treatment} - {difference.baseline}"
    after_holm = "" if difference.p_holm is None else f" ({difference.p_holm:.2g} after Holm)"
    method = describe_method(difference.method, difference.unit)
    lines = [
        "",
        *wrap(f"{title}: {points(difference)}{after_holm}"),
        *textwrap.wrap(method, WIDTH, initial_indent="  ", subsequent_indent="  "),
        f"  {SENTENCES.text('size_of_test', difference)}",
    ]
    if difference.elsewhere:
        low, high = difference.elsewhere
        decided = "" if low > 0 or high < 0 else ", undecided"
        lines.append(f"  in other units: [{signed(low)}, {signed(high)}]{decided}")
    return lines


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
        (f"{treatment}{end}\n- {shortened(str(baseline))}{end}", d.low, d.estimate, d.high)
        for end, baseline, d in pairs
        if d
    ]
    compared = (verdict.baseline, verdict.treatment, verdict.control or verdict.baseline)
    confounds = [each for each in verdict.differences if not each.channel and each.between(compared)]
    caption = [line for each in confounds for line in textwrap.wrap(f"Arms also differ in {each}", 90)]
    heights = [0.6 + 0.45 * len(arms), *([0.6 + 0.45 * len(differences)] if differences else [])]
    with rc_context({"svg.hashsalt": "composer", "svg.fonttype": "none", "font.size": 10}):
        figure = Figure(figsize=(6, 0.4 + sum(heights) + 0.16 * len(caption)), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots(len(heights), squeeze=False, height_ratios=heights)
        title = [": ".join(filter(None, (verdict.decision, SENTENCES.text("claim", verdict))))]
        if verdict.control and verdict.over_control:
            # Beside the gain, which readers otherwise credit to the preference.
            title.append(f"{treatment} is {SENTENCES.text('credit', verdict, shortened(verdict.control))}")
        figure.suptitle("\n".join(title), fontsize=10)
        if caption:
            figure.supxlabel("\n".join(caption), fontsize=8, x=0.02, ha="left")
        for (axis,), rows in zip(axes, (arms, differences), strict=False):
            for row, (_, low, middle, high) in enumerate(rows):
                axis.plot([100 * low, 100 * high], [row, row], color=LINE, linewidth=2)
                axis.plot(100 * middle, row, "o", color=DOT)
            axis.set_yticks(range(len(rows)), [label for label, *_ in rows])
            axis.set_ylim(len(rows) - 0.5, -0.5)
            axis.spines[["top", "right"]].set_visible(False)
        protocols = [
            (row, 100 * arm.protocol_rate) for row, arm in enumerate(verdict.arms) if arm.protocol_rate is not None
        ]
        for row, rate in protocols:
            axes[0][0].plot(rate, row, "D", color=DOT, markersize=5, fillstyle="none", clip_on=False)
        axes[0][0].set_xlim(0, 100)
        also = "; diamond: kept the protocol" if protocols else ""
        axes[0][0].set_xlabel(f"{verdict.primary.rate} on held-out tasks, % [95 %]{also}")
        if differences:
            axes[1][0].axvline(0, color="0.7", linewidth=1)
            axes[1][0].axvline(100 * verdict.min_gain, color="0.7", linewidth=1, linestyle=":")
            axes[1][0].set_xlabel(f"paired difference, points; dotted: {100 * verdict.min_gain:g} points")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
