"""The study of a planned evaluation as text for a terminal: its rates, a column for each design, and remarks."""

import textwrap

from composer_stages.evaluation.design import VERDICTS
from composer_stages.evaluation.inference import MIN_SEEDS
from composer_stages.evaluation.planner import FEWEST_OUTCOMES, SEEDS, DesignLine, Study
from composer_stages.evaluation.report import wrap
from composer_stages.evaluation.sentences import Sentences
from composer_stages.layout import LEFT, RIGHT, aligned, plural

SENTENCES = Sentences(
    "composer_stages.evaluation",
    "plan.jinja",
    rate=lambda share: f"{100 * share:g}",
    percents=lambda share: f"{100 * share:.0f}",
    most_seeds=SEEDS[-1],
    fewest_seeds=MIN_SEEDS,
    fewest_outcomes=FEWEST_OUTCOMES,
)


def with_error(share: float, num: int) -> str:
    """Return a simulated share in per cent with its Monte-Carlo standard error: "83 ± 2".

    Of none or all in `num` experiments the error is that of the rule of succession, (n + 1) / (N + 2).
    """
    smoothed = (share * num + 1) / (num + 2)
    return f"{100 * share:.0f} ± {100 * (smoothed * (1 - smoothed) / num) ** 0.5:.1f}"


def study_text(study: Study) -> str:
    """Return the study for a terminal of 120 columns: the rates, and a column for each design."""
    lines = [SENTENCES.text("head", study), ""]
    lines += [aligned(rate_cells(study), ("rate", "value", "source", "setting"))]
    lines += [f"pilot: {name}" for name in study.pilots]
    cells = design_cells(study)
    lines += ["", aligned(cells, sides=[LEFT, *[RIGHT] * (len(cells[0]) - 1)]), ""]
    lines += [line for remark in SENTENCES.paragraphs("remarks", study) for line in wrap(remark)]
    return "\n".join(lines)


def rate_cells(study: Study) -> list[tuple[str, ...]]:
    """Return each rate in words, its value, its source and the setting that changes it."""
    values = {name: f"{100 * value:.3g} %" for name, (value, _) in study.rates.items()}
    if "family_correlation" in values:
        values["family_correlation"] = f"{study.rates['family_correlation'][0]:.2f}"
    if "seed_sd" in values:
        values["seed_sd"] = f"{100 * study.rates['seed_sd'][0]:.3g} points"
    return [
        (SENTENCES.text("rate", name, study.sampling_unit), values[name], source, f"planning.{name}")
        for name, (_, source) in study.rates.items()
    ]


def design_cells(study: Study) -> list[tuple[str, ...]]:
    """Return the designs, a column for each: its name over several lines, its size, and what it would find."""
    lines = [line for line in (*study.lines, study.enough, study.beyond) if line]
    heads = [textwrap.wrap(line.name, 10) for line in lines]
    height = max(map(len, heads))
    padded = [[""] * (height - len(head)) + head for head in heads]
    rows: list[tuple[str, list[str]]] = [("", list(words)) for words in zip(*padded, strict=True)]
    rows += [
        ("tasks", [f"{line.tasks:,}" for line in lines]),
        (f"{plural(study.sampling_unit)} of these tasks", [f"{line.sampling_units:,}" for line in lines]),
        ("samples (rollouts of a task by a model)", [f"{line.samples}" for line in lines]),
        *([] if study.untrained else [("training seeds of each arm", [f"{line.seeds}" for line in lines])]),
        ("rollouts, all arms", [f"{line.rollouts:,}" for line in lines]),
    ]
    if any(line.usd for line in lines):
        rows.append(
            ("cost of these rollouts, USD", ["-" if line.usd is None else f"{line.usd:,.2f}" for line in lines])
        )
    for name in VERDICTS:
        rows.append((f"chance of {name}, %", [with_error(line.chances[name], line.simulated) for line in lines]))
        if name == study.goal and study.pilots:
            ranges = [line.validated_range for line in lines]
            cells = [f"{100 * both[0]:.0f} to {100 * both[1]:.0f}" if both else "-" for both in ranges]
            rows.append(("  over what the pilot leaves open, %", cells))
    false = [None if line.false_gain is None else with_error(line.false_gain, line.simulated) for line in lines]
    rows += [
        ("chance of a gain where there is none, %", [cell or "-" for cell in false]),
        (f"smallest gain found with {100 * study.power:g} % power, points", [gain_cell(line) for line in lines]),
    ]
    return [(label, *cells) for label, cells in rows]


def gain_cell(line: DesignLine) -> str:
    """Return the gain that a design finds, in points, with its error; "none" where it finds none."""
    if line.detectable is None:
        return "none"
    error = "" if line.detectable_error is None else f" ± {100 * line.detectable_error:.1f}"
    return f"{100 * line.detectable:.1f}{error}"
