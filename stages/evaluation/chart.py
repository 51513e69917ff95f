"""The chart of an evaluation: pass@1 of every arm and the paired differences, as SVG with the same bytes every time."""

import io

from stages.evaluation.report import shortened
from stages.evaluation.verdict import Verdict
from stages.evaluation.wording import MIN_GAIN

LINE, DOT = "#5b7c99", "#1f3a52"


def arms_chart(verdict: Verdict) -> bytes:
    """A point and a 95 % interval for each arm, and below for each difference, under the verdict."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    arms = [(shortened(arm.arm), arm.low, arm.pass_rate or 0.0, arm.high) for arm in verdict.arms]
    pairs = ((verdict.baseline, verdict.gain), (verdict.control, verdict.over_control))
    treatment = shortened(verdict.treatment)
    differences = [(f"{treatment}\n- {shortened(str(o))}", d.low, d.estimate, d.high) for o, d in pairs if d]
    heights = [0.6 + 0.45 * len(arms), *([0.6 + 0.45 * len(differences)] if differences else [])]
    with rc_context({"svg.hashsalt": "composer", "svg.fonttype": "none", "font.size": 10}):
        figure = Figure(figsize=(6, 0.4 + sum(heights)), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots(len(heights), squeeze=False, height_ratios=heights)
        figure.suptitle(": ".join(filter(None, (verdict.decision, verdict.claim))), fontsize=10)
        for (place,), rows in zip(axes, (arms, differences), strict=False):
            for row, (_, low, middle, high) in enumerate(rows):
                place.plot([100 * low, 100 * high], [row, row], color=LINE, linewidth=2)
                place.plot(100 * middle, row, "o", color=DOT)
            place.set_yticks(range(len(rows)), [label for label, *_ in rows])
            place.set_ylim(len(rows) - 0.5, -0.5)
            place.spines[["top", "right"]].set_visible(False)
        axes[0][0].set_xlim(0, 100)
        axes[0][0].set_xlabel("pass@1 on held-out tasks, %, with 95 % interval")
        if differences:
            axes[1][0].axvline(0, color="0.7", linewidth=1)
            axes[1][0].axvline(100 * MIN_GAIN, color="0.7", linewidth=1, linestyle=":")
            axes[1][0].set_xlabel("paired difference, points; dotted: 2 points")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
