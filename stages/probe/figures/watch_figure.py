"""The figure of a watched training, drawn from its table alone; equal rows give equal bytes."""

import io

from matplotlib import pyplot as plt

from stages.probe.figures.figures import STYLE, by_step
from stages.runs.records import Row

LINES = {
    "update_sum": ("#2166ac", "-", "update since the start"),
    "policy_sum": ("#b2182b", "-", "policy gradients since the start"),
    "policy": ("#b2182b", ":", "policy gradient of one checkpoint"),
    "policy_length": ("#e08214", ":", "the same with length held fixed"),
}


def watch_png(rows: list[Row], threshold: float | None) -> bytes:
    """Above, cosines with v in units of random directions', with the alarm's threshold; below, rates of the rollouts.

    `rows` are `watched/1` rows in order of steps.
    """
    with plt.rc_context({**STYLE, "figure.figsize": (7.0, 5.6)}):
        figure, (upper, lower) = plt.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        upper.axhspan(-1.96, 1.96, color="#999999", alpha=0.3, label="random directions, 95 % at one look")
        if threshold is not None:
            upper.axhline(threshold, color="black", linestyle="--", label="alarm: 5 % of placebos in a whole run")
        for look, (color, style, name) in LINES.items():
            points = [(row["step"], row[f"z_{look}"]) for row in rows if row[f"z_{look}"] is not None]
            if points:
                upper.plot(*zip(*points, strict=True), style, marker=".", color=color, label=name)
        upper.set_ylabel("alignment with v, in sd of random ones")
        for column, label in (("hack_rate", "hacks"), ("gt_rate", "solutions")):
            points = [(row["step"], row[column]) for row in rows if row[column] is not None]
            if points:
                lower.plot(*zip(*points, strict=True), marker=".", label=label)
        first = next((row["step"] for row in rows if row["alarm"]), None)
        for axes in (upper, lower):
            if first is not None:
                axes.axvline(first, color="black", linewidth=0.8, linestyle=":")
            axes.legend(fontsize=7)
        lower.set_ylabel("rate among rollouts")
        by_step(lower)
        lower.set_xlabel("training steps taken before")
        figure.tight_layout()
        out = io.BytesIO()
        figure.savefig(out, format="png", metadata={"Software": None})
        plt.close(figure)
    return out.getvalue()
