"""Figures and their twins."""

import csv
from pathlib import Path

import pytest

from stages.errors import BadInput
from stages.probe import plot
from stages.probe.figures import DATA, DRAW
from stages.runs.artifact import Run
from tests.stages.probe.running import carry_out


def test_figures_have_twins_and_equal_runs_give_equal_bytes(chain: dict[str, Run], tmp_path: Path) -> None:
    given = [chain[name] for name in ("vanilla", "projected", "projected_random", "score")]
    one, other = (carry_out(plot, given, plot.Config(), tmp_path / name) for name in ("one", "other"))
    assert one.manifest.summary["figures"] == [name for name in DATA if name[:2] not in ("08", "09")]
    assert DATA.keys() == DRAW.keys()
    for name in one.manifest.summary["figures"]:
        assert (one.path / f"{name}.png").read_bytes() == (other.path / f"{name}.png").read_bytes()
        assert (one.path / f"{name}.csv").read_bytes() == (other.path / f"{name}.csv").read_bytes()
    with (one.path / "05_placebos.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["direction"] == "v" and len(rows) == 1 + 5 * 334


def test_nothing_to_draw_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="nothing to draw"):
        carry_out(plot, [], plot.Config(), tmp_path / "plot")
