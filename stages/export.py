"""export: write rollouts in the format of another program.

Answers: can others read what was collected here? Reads rollouts, own or imported, writes files in the run's folder and
a report of what the format has no room for. `merged` reads a trained adapter instead and writes a whole model.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Literal

from tabulate import tabulate

from stages import exporters
from stages.errors import BadInput, UsageError
from stages.exporters import merged
from stages.exporters.transcripts import ExportedTranscript, transcripts
from stages.runs.artifact import Out, Run, Slot
from stages.runs.config import StageConfig
from stages.runs.inputs import Inputs
from stages.runs.kinds import Kind
from stages.runs.outcome_records import CHECKPOINT
from stages.runs.plan import Plan
from stages.runs.records import ORIGIN, ROLLOUT, STEP, TASK

VERSION = 1
INPUTS = {"rollouts": Slot(STEP, unless=CHECKPOINT), "checkpoint": Slot(CHECKPOINT, optional=True)}
OUTPUTS: Mapping[str, Kind] = {}


class Config(StageConfig):
    """What to write."""

    format: Literal["trl", "openenv", "swebench-preds", "verifiers", "merged"]
    """The format."""

    def label(self) -> str:
        """The format."""
        return self.format


def plan(inputs: Inputs, config: Config) -> Plan:
    """The rollouts to write, or the one model."""
    if config.format == merged.FORMAT:
        return Plan(units=1, what="model")
    _check_rollouts(inputs, config)
    return Plan(units=len(inputs.one("rollouts").rows(ROLLOUT)), what="rollouts")


def run(inputs: Inputs, config: Config, out: Out) -> None:
    """Write every file of the format, then say what is in them and what is not."""
    if config.format == merged.FORMAT:
        merged.export(inputs.optional("checkpoint"), out)
        return
    _check_rollouts(inputs, config)
    exported = _transcripts(inputs.one("rollouts"))
    exporter, dropped = exporters.load(config.format), Counter[str]()
    written: list[tuple[int, str]] = []
    for file in exporter.files(exported, dropped):
        out.stop_here()
        out.foreign(file.name, file.data, file.records)
        written.append((file.records, file.name))
    if not written:
        counted = ", ".join(f"{number} {reason}" for reason, number in (+dropped).items())
        raise BadInput(f"{inputs.one('rollouts').path} holds nothing that {config.format} could hold: {counted}.")
    reasons = sorted((+dropped).items())
    out.count(rollouts=len(exported), files=len(written), **{f"dropped_{reason}": number for reason, number in reasons})
    out.conclude(format=config.format, lost=list(exporter.LOST), dropped=dict(+dropped))
    lines = [f"{len(exported)} rollouts as {config.format}", tabulate(written, tablefmt="plain")]
    lines += ["not in these files", *(f"  {number} {reason}" for reason, number in reasons)]
    lines += [f"  {what}" for what in exporter.LOST]
    out.text("report.txt", "\n".join(lines) + "\n")


def _check_rollouts(inputs: Inputs, config: Config) -> None:
    if "rollouts" not in inputs:
        raise UsageError(
            f"{config.format} writes rollouts. Give a run that holds them: --from artifacts/collect/latest."
        )


def _transcripts(rollouts: Run) -> list[ExportedTranscript]:
    origins = rollouts.rows(ORIGIN) if rollouts.holds(ORIGIN) else []
    return transcripts(rollouts.rows(ROLLOUT), rollouts.rows(STEP), rollouts.rows(TASK), origins)
