"""The chart of an evaluation: pass@1 of every arm with its interval, as SVG with the same bytes every time."""

import io

from stages.evaluation.verdict import Verdict


def arms_chart(verdict: Verdict) -> bytes:
    """A point and a 95 % interval for each arm."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.hashsalt": "composer", "svg.fonttype": "none", "font.size": 10}):
        figure, axes = pyplot.subplots(figsize=(6, 0.6 + 0.45 * len(verdict.arms)), layout="constrained")
        for row, arm in enumerate(verdict.arms):
            axes.plot([100 * arm.low, 100 * arm.high], [row, row], color="#5b7c99", linewidth=2)
            axes.plot(100 * (arm.pass_rate or 0.0), row, "o", color="#1f3a52")
        axes.set_yticks(range(len(verdict.arms)), [arm.arm for arm in verdict.arms])
        axes.set_xlim(0, 100)
        axes.set_xlabel("pass@1 on held-out tasks, %, with 95 % interval")
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    return buffer.getvalue()
