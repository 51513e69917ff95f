"""probe watch: does a training run turn toward a hack? An alarm, calibrated on permuted advantages and on placebos.

Reads a training run with its checkpoints (`optimisation.keep_every`), a direction that was extracted on the start model
of the training, and the decomposition. At the start and at every checkpoint it measures the checkpoint's rollouts
against v and placebo directions: which of them look like the hack, and whether they are rewarded more than their group.
It also measures where the update and the policy gradient point, also with length held fixed, and, over all rollouts,
whether v tells hacks from other answers, right or wrong alike. Writes `watched`, `watched_rollouts` (the data of the
alarm, a row for each rollout), `watch.json` and one figure. The unit is a checkpoint. The alarm is described in
`checks.alarm`.
"""

from typing import TYPE_CHECKING

from pydantic import Field

from composer_stages.runs.kinds import DIRECTION, SVD_MODULE, TRAINING_REWARD, WATCHED, WATCHED_ROLLOUT
from composer_stages.runs.run import Inputs, RunWriter, Slot
from composer_stages.runs.settings import StageConfig
from composer_stages.runs.stage import Plan, Stage

if TYPE_CHECKING:
    from composer_stages.probe.memory import MemoryInputs


class Config(StageConfig):
    """Settings of the placebos and permutations."""

    placebos: int = Field(default=334, ge=19)
    """Draws of each of five families; three of them are a null for the alarm."""
    permutations: int = Field(default=2000, ge=100)
    """Permutations of the advantages within groups for the alarm, and of labels for T4e."""
    max_tokens: int = Field(default=8192, gt=0, json_schema_extra={"affects_results": False})
    """Padded tokens of one backward pass."""
    checkpointing: bool = Field(default=False, json_schema_extra={"affects_results": False})
    """Keep one activation a layer: less memory, one more forward pass."""

    def uses_gpu(self) -> bool:
        """Return true: the model of the training is loaded."""
        return True


def plan(inputs: Inputs, config: Config) -> Plan:
    """Plan the checkpoints and the memory."""
    from composer_stages.policy.adapters import CheckpointInfo
    from composer_stages.probe.memory import memory_notes
    from composer_stages.probe.watching import checkpoints

    training, measuring = inputs.one("training"), _memory_inputs(inputs, config)
    memory = () if measuring is None else memory_notes(CheckpointInfo.of(training).start, measuring)
    return Plan(units=len(checkpoints(training)), what="checkpoints", notes=memory)


def _memory_inputs(inputs: Inputs, config: Config) -> "MemoryInputs | None":
    """Return the inputs of the memory estimate; None if the direction has no rank."""
    from composer_stages.probe.memory import VECTORS, MemoryInputs

    facts = inputs.one("direction").manifest.summary
    if "rank" not in facts:
        return None
    # Five families and v, three times: drawn, concatenated, and with the honest contrasts removed.
    vectors = VECTORS + 3 * (5 * config.placebos + 1)
    return MemoryInputs(facts["adapter"], facts["rank"], config.max_tokens, config.checkpointing, 0, vectors, models=1)


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Measure the remaining checkpoints, then judge; `BadInput` if v is of another model than the start."""
    from composer_stages.policy.adapters import CheckpointInfo
    from composer_stages.policy.local import checkpointed
    from composer_stages.probe.checks.check import write_checks
    from composer_stages.probe.figures import as_csv, watch_png
    from composer_stages.probe.memory import check_memory
    from composer_stages.probe.statistics import Draws
    from composer_stages.probe.watching import WatchLoop, checkpoints

    if (measuring := _memory_inputs(inputs, config)) is not None:
        check_memory(CheckpointInfo.of(inputs.one("training")).start, measuring)
    loop = WatchLoop(inputs, config.placebos, config.seed, config.max_tokens, out)
    found_checkpoints = checkpoints(inputs.one("training"))
    for index, (step, folder) in enumerate(found_checkpoints):
        out.progress("checkpoints", index, len(found_checkpoints))
        if not out.finished(f"step_{step:06d}"):
            out.raise_if_stopped()
            with checkpointed(loop.student.model, config.checkpointing):
                loop.measure(step, folder, None if index == 0 else found_checkpoints[index - 1][0])
    steps = [step for step, _ in found_checkpoints]
    watched, rollouts, facts, checks = loop.finish(steps, Draws(config.permutations, config.seed))
    out.table(WATCHED, watched, "watched")
    out.table(WATCHED_ROLLOUT, rollouts, "watched_rollouts")
    out.document("watch", {**facts, "checks": [check.as_json() for check in checks], "checkpoints": watched})
    out.write_file("watch.csv", as_csv(watched).encode())
    out.write_file("watch.png", watch_png(watched, facts["threshold"]))
    out.count(planned=len(steps), done=len(steps))
    write_checks(out, checks, "checks", figures=["watch"], **facts)


STAGE = Stage(
    name="probe-watch",
    version=1,
    config=Config,
    inputs={"training": Slot(TRAINING_REWARD), "direction": Slot(DIRECTION), "svd": Slot(SVD_MODULE, optional=True)},
    outputs={"watched": WATCHED, "watched_rollouts": WATCHED_ROLLOUT},
    plan=plan,
    run=run,
)
