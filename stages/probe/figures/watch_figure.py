"""The figure of a watched training, drawn from its table alone; equal rows give equal bytes."""

from matplotlib import rc_context
from matplotlib.figure import Figure

from stages.probe.figures.figures import STYLE, beside, by_step, png
from stages.runs.records import Row

LINES = {
    "update_sum": ("#2166ac", "-", "update since the start"),
    "policy_sum": ("#b2182b", "-", "policy gradients since then"),
    "policy": ("#b2182b", ":", "policy gradient, one checkpoint"),
    "policy_length": ("#e08214", ":", "the same, length held fixed"),
}
RATES = {
    "hack_rate": ("#b2182b", "-", "hacks"),
    "hack_like": ("#e08214", "--", "like the hack"),
    "gt_rate": ("#1b7837", "-", "right answers"),
}


def watch_png(rows: list[Row], threshold: float | None) -> bytes:
    """The push toward the hack with the alarm's threshold, cosines in units of random directions', rates of rollouts.

    `rows` are `watched/2` rows in order of steps.
    """
    with rc_context({**STYLE, "figure.figsize": (8.6, 7.4)}):
        figure = Figure()
        top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 2))
        top.plot([row["step"] for row in rows], [row["push"] for row in rows], marker=".", color="#b2182b", label="v")
        if threshold is not None:
            top.axhline(threshold, color="black", linestyle="--", label="threshold")
        top.set_ylabel("push: advantage of hack-like rollouts")
        middle.axhspan(-1.96, 1.96, color="#999999", alpha=0.3, label="random, 95 % at one look")
        for look, (color, style, name) in LINES.items():
            points = [(row["step"], row[f"z_{look}"]) for row in rows if row[f"z_{look}"] is not None]
            if points:
                middle.plot(*zip(*points, strict=True), style, marker=".", color=color, label=name)
        middle.set_ylabel("alignment, in sd of random")
        for column, (color, style, label) in RATES.items():
            points = [(row["step"], row[column]) for row in rows if row[column] is not None]
            if points:
                bottom.plot(*zip(*points, strict=True), style, color=color, marker=".", label=label)
        first = next((row["step"] for row in rows if row["alarm"]), None)
        for axes in (top, middle, bottom):
            if first is not None:
                axes.axvline(first, color="black", linewidth=0.8, linestyle=":", label=f"alarm after {first} steps")
            beside(axes)
        bottom.set_ylim(-0.03, 1.03)
        bottom.set_ylabel("rate among rollouts")
        by_step(bottom)
        bottom.set_xlabel("training steps taken before")
        return png(figure)
