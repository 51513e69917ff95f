"""probe score: v and its placebos on the stored gradients of a replay.

Needs no model, so a new v, or more placebos, cost seconds. Reads a replay and directions (the first is v, further ones
are placebos of kind `unrelated`). Writes `probe_scores`, `placebos`, and the effects by module and by family of
placebos. One unit. Metrics and placebos: docs/probe-method.md.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from composer_stages.errors import BadInput
from composer_stages.runs.kinds import DIRECTION, PLACEBO, PROBE_ROW, PROBE_SCORE, VECTORS, Row
from composer_stages.runs.run import Inputs, Run, RunWriter, Slot
from composer_stages.runs.settings import StageConfig
from composer_stages.runs.stage import Plan, Stage
from composer_stages.words import Sentence

if TYPE_CHECKING:
    from composer_stages.probe.direction import Direction


class Config(StageConfig):
    """Settings of the placebos."""

    placebos: int = Field(default=334, ge=1)
    """Draws of each of five families; T4e ranks v among three of them and needs 999 placebos in these."""


def plan(inputs: Inputs, config: Config) -> Plan:
    """Plan the rows to score."""
    del config
    return Plan(units=len(inputs.one("rows").rows(PROBE_ROW)), what="rows")


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Score all rows, which is cheaper than resuming; `BadInput` if coordinates differ."""
    from composer_stages.gradients.tensors import GradientStore
    from composer_stages.probe.direction import all_placebos, check_coordinates, open_direction, step_placebos
    from composer_stages.probe.metrics import chance, module_effects, placebo_rows, score_rows, teacher_gradients

    replay, rows = inputs.one("rows"), inputs.one("rows").rows(PROBE_ROW)
    gradients = GradientStore(replay.folder(VECTORS))
    opened = [open_direction(run.folder(VECTORS)) for run in inputs.many("directions")]
    for _, facts, _ in opened:
        check_coordinates(facts, gradients.facts)
    direction, facts, pairs = opened[0]
    if not gradients.kept:
        _write_measured_scores(rows, direction, gradients.facts["measured_with"], out)
        out.set_summary(arm=replay.manifest.summary["arm"], adapter=facts["adapter"], loss_kind=facts["loss_kind"])
        return
    placebos = all_placebos(
        direction, pairs, facts["loss_kind"], [d for d, _, _ in opened[1:]], config.placebos, config.seed
    )
    ordered = gradients.rows[[row["grad_store_offset"] for row in rows]]
    scores = placebo_rows(placebos, ordered, direction)
    out.table(PROBE_SCORE, score_rows(rows, ordered, direction))
    out.table(PLACEBO, scores)
    out.document("modules", module_effects(rows, ordered, direction))
    out.document("steps", step_placebos(teacher_gradients(rows, gradients.rows), placebos, direction))
    # 64 rows suffice for a mean; all rows would read a large store once more.
    _report(scores, chance(ordered[:64].float(), direction), replay, facts, out)


def _write_measured_scores(rows: Sequence[Row], direction: "Direction", measured_with: str, out: RunWriter) -> None:
    """Write the scores that a replay without stored gradients measured; `BadInput` if they are of another direction."""
    from composer_stages.gradients.tensors import tensors_sha256

    if tensors_sha256([direction.mean]) != measured_with:
        raise BadInput("probe.sums-of-other-direction")
    out.table(PROBE_SCORE, [{name: row[name] for name in PROBE_SCORE.columns} for row in rows])
    out.table(PLACEBO, [])
    out.document("modules", [])
    out.document("steps", {})
    out.count(placebos=0, rows=len(rows))
    out.write_file("report.txt", "The replay kept sums alone: v's scores are its own, and there are no placebos.\n")


def _report(placebos: Sequence[Row], chance: Mapping[str, float], replay: Run, facts: Row, out: RunWriter) -> None:
    spread = {}
    for family in sorted({row["family"] for row in placebos}):
        scores = [s for row in placebos if row["family"] == family for s in row["scores"] if s is not None]
        spread[family] = statistics.pstdev(scores) if len(scores) > 1 else 0.0
    generic = next(row["cos_with_v"] for row in placebos if row["family"] == "generic")
    out.count(placebos=len(placebos), rows=len(placebos[0]["scores"]))
    out.set_summary(
        arm=replay.manifest.summary["arm"],
        adapter=facts["adapter"],
        loss_kind=facts["loss_kind"],
        cos_with_generic=generic,
        isotropic=chance,
        placebo_sd=spread,
    )
    mean = statistics.fmean(spread[f] for f in ("haar", "randsign"))
    lines = [f"{family:<12} sd of cos_stack {value:.4f}" for family, value in spread.items()]
    isotropic = Sentence("probe.isotropic-spread", isotropic=chance["sd_cos_stack"], random=mean)
    out.write_file("report.txt", "\n".join([*lines, isotropic, f"cos(v, generic gradient) {generic:+z.3f}", ""]))


STAGE = Stage(
    name="probe-score",
    version=1,
    config=Config,
    inputs={"rows": Slot(PROBE_ROW), "directions": Slot(DIRECTION, many=True)},
    outputs={"probe_scores": PROBE_SCORE, "placebos": PLACEBO},
    plan=plan,
    run=run,
)
