"""The figures of the probe: the rows of each, as CSV and PNG.

The ten `FIGURES` of `probe plot` have the numbers of the probe's plan. t and d are as in `statistics` and `metrics`.
`watch_png` is the figure of `probe watch`. Equal rows give equal bytes.
"""

import csv
import io
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import AutoLocator

from composer_stages.data_files import load_toml
from composer_stages.probe.checks.hacking import factorial_design
from composer_stages.probe.direction import RANDOM
from composer_stages.probe.rows import mean_known
from composer_stages.probe.statistics import FROM_HACKS, Labelled, regress
from composer_stages.runs.kinds import Row

DATA = load_toml(__package__, "figures.toml")
STYLE, COLORS = DATA["style"], DATA["colors"]
OTHERS = ("#7b3294", "#1b7837", "#8c510a", "#35978f")


@dataclass
class Evidence:
    """The data of the figures: rows and step diagnostics of replays by arm, a scored vanilla replay, trajectories."""

    rows: dict[str, list[Row]] = field(default_factory=dict)
    steps: dict[str, list[Row]] = field(default_factory=dict)
    placebos: list[Row] = field(default_factory=list)
    scored: Labelled | None = None
    modules: list[Row] = field(default_factory=list)
    trajectories: list[Row] = field(default_factory=list)


def cosine_by_step(e: Evidence) -> list[Row]:
    """(1) Mean cos_stack of the teacher's rows by step and arm, and the band of random placebos on the vanilla rows."""
    means = []
    for arm, rows in e.rows.items():
        for step in sorted({row["step"] for row in rows}):
            values = [row["cos_stack"] for row in rows if row["step"] == step and row["src_pool"] == "teacher"]
            means.append({"arm": arm, "step": step, "cos_stack": mean_known(values), "low": None, "high": None})
    vanilla, random = e.rows.get("vanilla", []), [p["scores"] for p in e.placebos if p["family"] in RANDOM]
    if not vanilla or not random:
        return means
    # The band is of means over a step's teacher rows, as the lines are, and not of single rows.
    scores, band = np.array(random, dtype=float), []
    for step in sorted({row["step"] for row in vanilla}):
        columns = [i for i, row in enumerate(vanilla) if row["step"] == step and row["src_pool"] == "teacher"]
        low = high = np.nan
        if columns:
            low, high = np.nanquantile(np.nanmean(scores[:, columns], axis=1), [0.025, 0.975])
        band.append({"arm": "placebo", "step": step, "cos_stack": None, "low": float(low), "high": float(high)})
    return means + band


def diagnostics(e: Evidence, *, names: tuple[str, ...], without: str = "vanilla") -> list[Row]:
    """(2), (3) and (10) Columns of the step diagnostics of every arm but one."""
    chosen = [(arm, step) for arm, steps in e.steps.items() if arm != without for step in steps]
    return [{"arm": arm, "step": step["step"], **{name: step[name] for name in names}} for arm, step in chosen]


def buckets(e: Evidence) -> list[Row]:
    """(4) Every vanilla row's cosine with its bucket and problem."""
    labelled = [r for r in e.rows.get("vanilla", []) if None not in (r["hacked"], r["hidden_pass"], r["cos_stack"])]
    return [
        {
            "bucket": f"{'hack' if row['hacked'] else 'no hack'}, {'right' if row['hidden_pass'] else 'wrong'}",
            "problem": row["problem_id"],
            "cos_stack": row["cos_stack"],
        }
        for row in labelled
    ]


def placebo_effects(e: Evidence) -> list[Row]:
    """(5) The difference of cosines in T4e for v and for every drawn placebo."""
    if e.scored is None or not e.scored.hacked.any() or e.scored.hacked.all():
        return []
    effects = regress(e.scored.scores, e.scored.hacked, factorial_design(e.scored), e.scored.problem).estimate
    names = ("v", *e.scored.families)
    return [{"direction": name, "effect": float(value)} for name, value in zip(names, effects, strict=True)]


def nuisance(e: Evidence) -> list[Row]:
    """(6) Cosine against length and hedging."""
    labelled = [r for r in e.rows.get("vanilla", []) if None not in (r["hacked"], r["cos_stack"])]
    return [
        {"tokens": r["n_loss_tokens"], "hedges": r["hedge_count"], "hacked": r["hacked"], "cos_stack": r["cos_stack"]}
        for r in labelled
    ]


def heat_map(e: Evidence) -> list[Row]:
    """(7) Cohen's d of hacked against other rows, by layer and projection."""
    cells = []
    for row in e.modules:
        parts = row["module"].split(".")
        layer = next((int(part) for part in parts if part.isdigit()), 0)
        cells.append({"layer": layer, "projection": parts[-1], "d": row["d"]})
    return cells


def ratios(e: Evidence) -> list[Row]:
    """(8) Importance ratios and effective sample size, the mean over seeds, of the measured steps."""
    names = ("ratio_p5", "ratio_p50", "ratio_p95", "ess")
    steps: dict[tuple[str, int], list[Row]] = {}
    for row in e.trajectories:
        if row["ess"] is not None:
            steps.setdefault((row["arm"], row["step"]), []).append(row)
    return [
        {"arm": arm, "step": step, **{name: mean_known([row[name] for row in rows]) for name in names}}
        for (arm, step), rows in sorted(steps.items())
    ]


def rates(e: Evidence) -> list[Row]:
    """(9) Hack and solve rates of the student's own rows, by seed."""
    names = ("arm", "train_seed", "step", "hack_rate_student", "hidden_pass_rate_student")
    return [{name: row[name] for name in names} for row in e.trajectories]


def colors(arms: Sequence[str]) -> dict[str, str]:
    """Return a colour for each arm: its own, or one of OTHERS in order."""
    unnamed = [arm for arm in dict.fromkeys(arms) if arm not in COLORS]
    return COLORS | {arm: OTHERS[index % len(OTHERS)] for index, arm in enumerate(unnamed)}


def as_csv(rows: list[Row]) -> str:
    """Return the rows (at least one) as CSV, floats with nine digits."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: f"{v:.9g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    return out.getvalue()


def as_png(drawn: "ProbeFigure", rows: list[Row]) -> bytes:
    """Draw one figure of at least one row as PNG; no byte depends on the time or the machine's fonts."""
    with rc_context(STYLE):
        figure = Figure()
        axes = figure.subplots()
        drawn.draw(axes, rows)
        set_title(axes, drawn.question, drawn.answer(rows))
        return png(figure)


def set_title(axes: Axes, question: str, answer: str | None) -> None:
    """Write the question above the axes, and below it the answer where there is one."""
    lines = [line for text in (question, answer) if text for line in textwrap.wrap(text, 100)]
    axes.set_title("\n".join(lines), loc="left", fontsize=10)


def png(figure: Figure) -> bytes:
    """Render a figure as PNG with the Agg renderer, whatever backend the process has set."""
    # Its own canvas instead of pyplot, whose backend another part of the process may have set.
    FigureCanvasAgg(figure)
    figure.tight_layout()
    out = io.BytesIO()
    # Without matplotlib's version as "Software", so that equal rows give equal bytes after an update.
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def _lines(axes: Axes, rows: list[Row], *, columns: tuple[str, ...], label: str, level: float | None = None) -> None:
    """Draw one line for every arm and column, thinner ones over thicker ones, so that equal lines are all visible.

    level: a reference value, drawn as a dotted line.
    """
    color = colors([row["arm"] for row in rows])
    for index, arm in enumerate(dict.fromkeys(row["arm"] for row in rows)):
        width = max(3.0 - index, 1.0)
        for column, style in zip(columns, ("-", "--", "-.", ":"), strict=False):
            points = [(r["step"], r[column]) for r in rows if r["arm"] == arm and r[column] is not None]
            if points:
                name = f"{arm} {column}" if len(columns) > 1 else arm
                axes.plot(*zip(*points, strict=True), style, color=color[arm], linewidth=width, label=name)
    axes.set_ylabel(label)
    count_steps(axes)
    add_legend(axes)
    if level is not None:
        axes.axhline(level, color="black", linewidth=0.8, linestyle=":")


def add_legend(axes: Axes) -> None:
    """Put the legend to the right of the axes, where it covers nothing; none for a single line."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        axes.legend(handles, labels, fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)


def count_steps(axes: Axes) -> None:
    """Label the horizontal axis with steps, at integers only."""
    axes.set_xlabel("step")
    # matplotlib's default ticks would fall between steps where there are few.
    locator = AutoLocator()
    locator.set_params(integer=True)
    axes.xaxis.set_major_locator(locator)


def _draw_cosine_by_step(axes: Axes, rows: list[Row]) -> None:
    band = [row for row in rows if row["arm"] == "placebo"]
    if band:
        steps, low, high = ([row[name] for row in band] for name in ("step", "low", "high"))
        axes.fill_between(steps, low, high, alpha=0.3, color="#999999", label="random placebos, 95 %")
    arm_rows = [row for row in rows if row["arm"] != "placebo"]
    _lines(axes, arm_rows, columns=("cos_stack",), label="cos_stack of teacher rows")


def _draw_buckets(axes: Axes, rows: list[Row]) -> None:
    """Draw a violin for each bucket, and a thin line for each problem through its bucket means."""
    names = sorted({row["bucket"] for row in rows})
    values = [[row["cos_stack"] for row in rows if row["bucket"] == name] for name in names]
    drawn = [index for index, bucket in enumerate(values) if len(bucket) > 1]
    if drawn:
        axes.violinplot([values[index] for index in drawn], positions=drawn, showmeans=True)
    for problem in dict.fromkeys(row["problem"] for row in rows):
        cosines = [[r["cos_stack"] for r in rows if (r["problem"], r["bucket"]) == (problem, name)] for name in names]
        points = [(index, float(np.mean(bucket))) for index, bucket in enumerate(cosines) if bucket]
        axes.plot(*zip(*points, strict=True), color="black", alpha=0.12, linewidth=0.7)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("cos_stack")


def _draw_placebos(axes: Axes, rows: list[Row]) -> None:
    """Draw one outline for each family, dashed if made of hacks, with the families' 95th percentiles in the legend."""
    edges = np.histogram_bin_edges([row["effect"] for row in rows], bins=40)
    for family in dict.fromkeys(row["direction"] for row in rows if row["direction"] != "v"):
        values = [row["effect"] for row in rows if row["direction"] == family]
        label = f"{family}, 95th percentile {np.quantile(values, 0.95):.2g}"
        style = "--" if family in FROM_HACKS else "-"
        axes.hist(values, bins=edges.tolist(), histtype="step", linestyle=style, label=label)
    axes.axvline(
        next(row["effect"] for row in rows if row["direction"] == "v"), color="black", linewidth=2.0, label="v"
    )
    axes.set_xlabel("difference of cosines in T4e (dashed: made of hacks' gradients, no null)")
    add_legend(axes)


def _draw_nuisance(axes: Axes, rows: list[Row]) -> None:
    for hacked, color, label in ((True, "#b2182b", "hack"), (False, "#2166ac", "no hack")):
        group = [row for row in rows if row["hacked"] is hacked]
        tokens, cosines = [row["tokens"] for row in group], [row["cos_stack"] for row in group]
        axes.scatter(tokens, cosines, s=[12 + 10 * row["hedges"] for row in group], color=color, alpha=0.4, label=label)
    axes.set_xlabel("own tokens (larger dots hedge more)")
    axes.set_ylabel("cos_stack")
    add_legend(axes)


def _draw_heat_map(axes: Axes, rows: list[Row]) -> None:
    layers, names = sorted({row["layer"] for row in rows}), list(dict.fromkeys(row["projection"] for row in rows))
    grid = np.full((len(layers), len(names)), np.nan)
    for row in rows:
        grid[layers.index(row["layer"]), names.index(row["projection"])] = np.nan if row["d"] is None else row["d"]
    # Symmetric limits, so that white is no difference; 1 where every effect is 0.
    limit = float(np.nanmax(np.abs(grid))) or 1.0
    image = axes.imshow(grid, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
    axes.figure.colorbar(image, label="Cohen's d, hack against other rows")
    axes.set_xticks(range(len(names)), names, rotation=30)
    axes.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    axes.set_ylabel("layer")
    axes.grid(False)


def _draw_ratios(axes: Axes, rows: list[Row]) -> None:
    columns = ("ratio_p5", "ratio_p50", "ratio_p95", "ess")
    _lines(axes, rows, columns=columns, label="ratio percentiles and ESS / rows")
    # From 0 and past 1, so that on-policy ratios, which all are 1, do not fill the axis with rounding errors.
    axes.set_ylim(0.0, 1.05 * max(1.2, *(row[name] for row in rows for name in columns)))


def _draw_rates(axes: Axes, rows: list[Row]) -> None:
    """Draw a faint line for each seed and a strong one for the arm's mean; hacks are solid, solutions dashed."""
    color = colors([row["arm"] for row in rows])
    for arm in dict.fromkeys(row["arm"] for row in rows):
        for column, style in (("hack_rate_student", "-"), ("hidden_pass_rate_student", "--")):
            measured = [row for row in rows if row["arm"] == arm and row[column] is not None]
            for seed in sorted({row["train_seed"] for row in measured}):
                points = [(row["step"], row[column]) for row in measured if row["train_seed"] == seed]
                axes.plot(*zip(*points, strict=True), style, color=color[arm], alpha=0.25, linewidth=0.8)
            steps = sorted({row["step"] for row in measured})
            means = [float(np.mean([row[column] for row in measured if row["step"] == step])) for step in steps]
            label = f"{arm} {'hacks' if style == '-' else 'solves'}"
            axes.plot(steps, means, style, color=color[arm], label=label)
    count_steps(axes)
    axes.set_ylim(-0.03, 1.03)
    axes.set_ylabel("rate among the student's answers")
    add_legend(axes)


def _by_arm(rows: list[Row], column: str) -> dict[str, list[Row]]:
    """Return the rows with a value in this column, by arm, in order of steps."""
    by_arm: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["step"]):
        if row[column] is not None:
            by_arm.setdefault(row["arm"], []).append(row)
    return by_arm


def _answer_cosine_by_step(rows: list[Row]) -> str | None:
    high = {row["step"]: row["high"] for row in rows if row["arm"] == "placebo"}
    compared = [r for r in rows if r["arm"] == "vanilla" and r["cos_stack"] is not None and r["step"] in high]
    if not compared:
        return None
    above = sum(row["cos_stack"] > high[row["step"]] for row in compared)
    return f"vanilla: above the band of random directions at {above} of {len(compared)} steps"


def _answer_cosine_in_out(rows: list[Row]) -> str | None:
    parts = []
    for arm, arm_rows in _by_arm(rows, "cos_out").items():
        before, after = (mean_known([row[name] for row in arm_rows]) for name in ("cos_in", "cos_out"))
        parts += [] if before is None or after is None else [f"{arm}: {before:z.2f} before, {after:z.2f} after"]
    return "; ".join(parts) or None


def _answer_fired(rows: list[Row]) -> str | None:
    shares = {arm: np.mean([r["frac_fired"] for r in steps]) for arm, steps in _by_arm(rows, "frac_fired").items()}
    return "; ".join(f"{arm}: in {100 * share:.0f} % on average" for arm, share in shares.items()) or None


def _answer_buckets(rows: list[Row]) -> str | None:
    names = sorted({row["bucket"] for row in rows})
    means = [float(np.mean([row["cos_stack"] for row in rows if row["bucket"] == name])) for name in names]
    return "mean: " + "; ".join(f"{name} {mean:+z.2f}" for name, mean in zip(names, means, strict=True))


def _answer_placebos(rows: list[Row]) -> str | None:
    v = next(row["effect"] for row in rows if row["direction"] == "v")
    null = [row["effect"] for row in rows if row["direction"] not in ("v", *FROM_HACKS)]
    if not null:
        return None
    return f"v is above {sum(effect < v for effect in null):,} of {len(null):,} directions made without hacks"


def _answer_nuisance(rows: list[Row]) -> str | None:
    parts = []
    for hacked, name in ((True, "hacks"), (False, "other answers")):
        points = [(row["tokens"], row["cos_stack"]) for row in rows if row["hacked"] is hacked]
        tokens, cosines = np.array(points, dtype=float).reshape(-1, 2).T
        # A correlation is defined where both vary.
        if len(points) > 2 and np.ptp(tokens) > 0 and np.ptp(cosines) > 0:
            parts.append(f"among {name} {np.corrcoef(tokens, cosines)[0, 1]:+z.2f}")
    return f"correlation of cosine and length {', '.join(parts)}" if parts else None


def _answer_heat_map(rows: list[Row]) -> str | None:
    defined = [row for row in rows if row["d"] is not None]
    if not defined:
        return None
    largest = max(defined, key=lambda row: abs(row["d"]))
    return f"most in layer {largest['layer']}, {largest['projection']}: d = {largest['d']:+z.1f}"


def _answer_ratios(rows: list[Row]) -> str | None:
    least = {arm: min(row["ess"] for row in arm_rows) for arm, arm_rows in _by_arm(rows, "ess").items()}
    parts = [f"{arm} {value:.2f}" for arm, value in least.items()]
    return f"lowest effective sample size, as a share of the rows: {', '.join(parts)}" if parts else None


def _answer_rates(rows: list[Row]) -> str | None:
    parts = []
    for arm, arm_rows in _by_arm(rows, "hack_rate_student").items():
        last = max(row["step"] for row in arm_rows)
        rate = np.mean([row["hack_rate_student"] for row in arm_rows if row["step"] == last])
        parts.append(f"{arm} {100 * rate:.0f} %")
    return f"hacks at the last step: {', '.join(parts)}" if parts else None


def _answer_drift(rows: list[Row]) -> str | None:
    parts = []
    for arm, arm_rows in _by_arm(rows, "cos_weights").items():
        overlap = arm_rows[-1]["basis_overlap"]
        overlap_text = "" if overlap is None else f"overlap {overlap:.2f}, "
        parts.append(f"{arm}: {overlap_text}turn {arm_rows[-1]['cos_weights']:+z.2f}")
    return f"at the last step: {'; '.join(parts)}" if parts else None


@dataclass(frozen=True)
class ProbeFigure:
    """A figure: its rows, how they are drawn, and its title: the question and the answer from the rows, or None."""

    rows: Callable[[Evidence], list[Row]]
    draw: Callable[[Axes, list[Row]], None]
    answer: Callable[[list[Row]], str | None]
    question: str


IN_OUT, DRIFT = ("cos_in", "cos_out", "cos_upd_in", "cos_upd_out"), ("basis_overlap", "cos_weights")
PARTS: dict[str, tuple[Any, Any, Any]] = {
    "01_cosine_by_step": (cosine_by_step, _draw_cosine_by_step, _answer_cosine_by_step),
    "02_cosine_in_out": (
        partial(diagnostics, names=IN_OUT),
        partial(_lines, columns=IN_OUT, label="mean cosine with the removed direction"),
        _answer_cosine_in_out,
    ),
    "03_fired": (
        partial(diagnostics, names=("frac_fired",)),
        # With one axis a module fires by chance in half of all cases, 1 - 2^-k with k axes.
        partial(_lines, columns=("frac_fired",), label="share of modules that fired (chance .5)", level=0.5),
        _answer_fired,
    ),
    "04_buckets": (buckets, _draw_buckets, _answer_buckets),
    "05_placebos": (placebo_effects, _draw_placebos, _answer_placebos),
    "06_length_and_hedging": (nuisance, _draw_nuisance, _answer_nuisance),
    "07_modules": (heat_map, _draw_heat_map, _answer_heat_map),
    "08_ratios": (ratios, _draw_ratios, _answer_ratios),
    "09_rates": (rates, _draw_rates, _answer_rates),
    "10_drift": (
        partial(diagnostics, names=DRIFT, without=""),  # of the vanilla arm too
        partial(_lines, columns=DRIFT, label="overlap with the start; turn toward the hack"),
        _answer_drift,
    ),
}
FIGURES = {name: ProbeFigure(*parts, DATA["questions"][name]) for name, parts in PARTS.items()}


def watch_png(rows: list[Row], threshold: float | None) -> bytes:
    """Draw a watched training: push toward the hack and threshold, cosines in sd of random directions, rollout rates.

    rows: `watched/1`, in order of steps.
    """
    with rc_context({**STYLE, "figure.figsize": (8.6, 7.4)}):
        figure = Figure()
        top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 2))
        top.plot([row["step"] for row in rows], [row["push"] for row in rows], marker=".", color="#b2182b", label="v")
        if threshold is not None:
            top.axhline(threshold, color="black", linestyle="--", label="threshold")
        top.set_ylabel("push: advantage of hack-like rollouts")
        middle.axhspan(-1.96, 1.96, color="#999999", alpha=0.3, label="random, 95 % at one look")
        for axes, lines in ((middle, DATA["watch"]["alignment"]), (bottom, DATA["watch"]["rates"])):
            for column, (color, style, label) in lines.items():
                points = [(row["step"], row[column]) for row in rows if row[column] is not None]
                if points:
                    axes.plot(*zip(*points, strict=True), style, marker=".", color=color, label=label)
        middle.set_ylabel("alignment, in sd of random")
        first = next((row["step"] for row in rows if row["alarm"]), None)
        alarm = "" if threshold is None else "no alarm so far" if first is None else f"alarm after {first} steps"
        for axes, question, answer in zip(
            (top, middle, bottom), DATA["watch"]["questions"], (alarm, "", ""), strict=True
        ):
            set_title(axes, question, answer)
        for axes in (top, middle, bottom):
            if first is not None:
                axes.axvline(first, color="black", linewidth=0.8, linestyle=":", label=f"alarm after {first} steps")
            add_legend(axes)
        bottom.set_ylim(-0.03, 1.03)
        bottom.set_ylabel("rate among rollouts")
        count_steps(bottom)
        bottom.set_xlabel("training steps taken before")
        return png(figure)
