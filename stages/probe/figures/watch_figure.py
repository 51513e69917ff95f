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
    """The push toward the hack with the alarm's threshold, cosines in units of random directions', rates of rollouts.

    `rows` are `watched/2` rows in order of steps.
    """
    with plt.rc_context({**STYLE, "figure.figsize": (7.0, 7.4)}):
        figure, (top, middle, bottom) = plt.subplots(3, 1, sharex=True, height_ratios=(3, 2, 2))
        top.plot([row["step"] for row in rows], [row["push"] for row in rows], marker=".", color="#b2182b", label="v")
        if threshold is not None:
            top.axhline(threshold, color="black", linestyle="--", label="alarm: 5 % of placebos in a whole run")
        top.set_ylabel("advantage of rollouts like the hack")
        middle.axhspan(-1.96, 1.96, color="#999999", alpha=0.3, label="random directions, 95 % at one look")
        for look, (color, style, name) in LINES.items():
            points = [(row["step"], row[f"z_{look}"]) for row in rows if row[f"z_{look}"] is not None]
            if points:
                middle.plot(*zip(*points, strict=True), style, marker=".", color=color, label=name)
        middle.set_ylabel("alignment, in sd of random")
        for column, label in (("hack_rate", "hacks"), ("hack_like", "like the hack"), ("gt_rate", "solutions")):
            points = [(row["step"], row[column]) for row in rows if row[column] is not None]
            if points:
                bottom.plot(*zip(*points, strict=True), marker=".", label=label)
        first = next((row["step"] for row in rows if row["alarm"]), None)
        for axes in (top, middle, bottom):
            if first is not None:
                axes.axvline(first, color="black", linewidth=0.8, linestyle=":")
            axes.legend(fontsize=7)
        bottom.set_ylabel("rate among rollouts")
        by_step(bottom)
        bottom.set_xlabel("training steps taken before")
        figure.tight_layout()
        out = io.BytesIO()
        figure.savefig(out, format="png", metadata={"Software": None})
        plt.close(figure)
    return out.getvalue()
