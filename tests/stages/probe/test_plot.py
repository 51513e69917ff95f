"""Figures and their twins."""

import csv
from pathlib import Path

import pytest

from composer_stages.errors import BadInput
from composer_stages.probe import plot
from composer_stages.probe.figures import FIGURES, Evidence, as_png
from composer_stages.runs.kinds import Row
from composer_stages.runs.run import Run
from tests.stages.probe.running import carry_out


@pytest.mark.slow
def test_figures_have_twins_and_equal_runs_give_equal_bytes(chain: dict[str, Run], tmp_path: Path) -> None:
    given = [chain[name] for name in ("vanilla", "projected", "projected_random", "score")]
    one, other = (carry_out(plot, given, plot.Config(), tmp_path / name) for name in ("one", "other"))
    assert one.manifest.summary["figures"] == [name for name in FIGURES if name[:2] not in ("08", "09")]
    for name in one.manifest.summary["figures"]:
        assert (one.path / f"{name}.png").read_bytes() == (other.path / f"{name}.png").read_bytes()
        assert (one.path / f"{name}.csv").read_bytes() == (other.path / f"{name}.csv").read_bytes()
    with (one.path / "05_placebos.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["direction"] == "v" and len(rows) == 1 + 5 * 334


def cosine(arm: str, step: int, cos: float | None, low: float | None = None, high: float | None = None) -> Row:
    return {"arm": arm, "step": step, "cos_stack": cos, "low": low, "high": high}


def rates(seed: int, step: int, hacks: float) -> Row:
    found = {"hack_rate_student": hacks, "hidden_pass_rate_student": 0.0}
    return {"arm": "vanilla", "train_seed": seed, "step": step, **found}


VANILLA, BAND = [cosine("vanilla", 0, 0.3)], [cosine("placebo", step, None, -0.1, 0.1) for step in (0, 1)]
EFFECTS = [("v", 1.0), ("haar", 0.0), ("haar", 0.5), ("haar", 2.0), ("hack_hack", 5.0)]
TITLES: list[tuple[str, list[Row], str | None]] = [
    (
        "01_cosine_by_step",
        [*VANILLA, cosine("vanilla", 1, 0.0), *BAND],
        "vanilla: above the band of random directions at 1 of 2 steps",
    ),
    ("01_cosine_by_step", VANILLA, None),
    (
        "05_placebos",
        [{"direction": name, "effect": effect} for name, effect in EFFECTS],
        "v is above 2 of 3 directions made without hacks",
    ),
    ("06_length_and_hedging", [{"tokens": 3, "hedges": 0, "hacked": True, "cos_stack": 0.1}], None),
    ("09_rates", [rates(0, 0, 0.0), rates(0, 1, 0.5), rates(1, 1, 1.0)], "hacks at the last step: vanilla 75 %"),
]


@pytest.mark.parametrize(("name", "rows", "answer"), TITLES)
def test_titles_have_a_question_and_an_answer(name: str, rows: list[Row], answer: str | None) -> None:
    assert FIGURES[name].answer(rows) == answer
    assert as_png(FIGURES[name], rows).startswith(b"\x89PNG")


def test_ratios_are_drawn_of_measured_steps_and_not_of_trainings_that_measured_nothing() -> None:
    ratios = {"ratio_p5": 0.5, "ratio_p50": 1.0, "ratio_p95": 1.5, "ess": 0.9}
    measured = [{"arm": "vanilla", "step": step, **ratios, "ess": ess} for step, ess in ((1, 0.8), (0, 0.6), (0, 1.0))]
    unmeasured = [{"arm": arm, "step": 0, **dict.fromkeys(ratios)} for arm in ("vanilla", "projected")]
    figure = FIGURES["08_ratios"]
    rows = figure.rows(Evidence(trajectories=[*measured, *unmeasured]))
    assert rows == [{"arm": "vanilla", "step": step, **ratios, "ess": 0.8} for step in (0, 1)]
    assert as_png(figure, rows).startswith(b"\x89PNG")
    assert figure.rows(Evidence(trajectories=unmeasured)) == []


def test_nothing_to_draw_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="nothing to draw"):
        carry_out(plot, [], plot.Config(), tmp_path / "plot")
