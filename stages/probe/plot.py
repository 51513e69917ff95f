"""probe plot: draw the probe's ten figures as PNG and CSV.

Reads replays, the score of the vanilla replay, and trajectories; draws the figures that have data. Equal runs give
equal bytes.
"""

from composer_stages.errors import BadInput
from composer_stages.runs import store
from composer_stages.runs.kinds import PLACEBO, PROBE_ROW, PROBE_SCORE, TRAJECTORY
from composer_stages.runs.run import Inputs, RunWriter, Slot
from composer_stages.runs.settings import StageConfig
from composer_stages.runs.stage import Plan, Stage


class Config(StageConfig):
    """No settings."""


def plan(inputs: Inputs, config: Config) -> Plan:
    """Plan the figures, of which some may have no rows."""
    del inputs, config
    return Plan(units=10, what="figures")


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Draw every figure that has rows; `BadInput` when none has."""
    del config
    from composer_stages.probe.checks.hacking import scored_rows
    from composer_stages.probe.figures import FIGURES, Evidence, as_csv, as_png

    evidence = Evidence()
    for run in inputs.many("replays"):
        arm, steps = run.manifest.summary["arm"], range(run.manifest.counts["steps"])
        # Of two replays of one arm, the second is named by its adapter too.
        name = arm if arm not in evidence.rows else f"{arm} {run.manifest.summary['adapter']}"
        evidence.rows[name] = run.rows(PROBE_ROW)
        evidence.steps[name] = [store.read_json(run.path / f"step_{number:03d}.diag.json") for number in steps]
    rows = [row for run in inputs.many("trajectories") for row in run.rows(TRAJECTORY)]
    mixed_adapters = len({row["adapter"] for row in rows}) > 1
    evidence.trajectories = [row | {"arm": f"{row['arm']} {row['adapter']}"} if mixed_adapters else row for row in rows]
    if "score" in inputs and "vanilla" in evidence.rows:
        score = inputs.one("score")
        evidence.placebos, evidence.modules = score.rows(PLACEBO), store.read_json(score.path / "modules.json")
        evidence.scored = scored_rows(evidence.rows["vanilla"], score.rows(PROBE_SCORE), evidence.placebos)
    drawn = []
    for index, (name, figure) in enumerate(FIGURES.items()):
        out.progress("figures", index, len(FIGURES))
        points = figure.rows(evidence)
        if points:
            out.write_file(f"{name}.csv", as_csv(points).encode())
            out.write_file(f"{name}.png", as_png(figure, points))
            drawn.append(name)
    if not drawn:
        raise BadInput("probe.nothing-to-draw")
    out.count(figures=len(drawn))
    out.set_summary(figures=drawn)


STAGE = Stage(
    name="probe-plot",
    version=1,
    config=Config,
    inputs={
        "replays": Slot(PROBE_ROW, many=True, optional=True),
        "score": Slot(PROBE_SCORE, optional=True),
        "trajectories": Slot(TRAJECTORY, many=True, optional=True),
    },
    plan=plan,
    run=run,
)
