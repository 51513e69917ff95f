"""probe replay: train a student on the pool's teacher answers; measure every row's gradient against v, and store it.

Reads a pool, a direction and, for spectral adapters, the decomposition. Writes `step_NNN.jsonl.gz`,
`step_NNN.diag.json`, `probe_rows` and the token-sum gradients. The unit is a step: some problems, all their rows
measured, the student moved by the mean over teacher rows, with v taken out of gradient and update or not.
"""

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from composer_stages.errors import UsageError
from composer_stages.probe.settings import ReplayConfig as Config
from composer_stages.runs.kinds import DIRECTION, POOL_ROW, PROBE_ROW, SVD_MODULE, VECTORS, Row
from composer_stages.runs.run import Inputs, RunWriter, Slot
from composer_stages.runs.stage import Plan, Stage
from composer_stages.words import Sentence

if TYPE_CHECKING:
    from composer_stages.probe.memory import MemoryInputs


def plan(inputs: Inputs, config: Config) -> Plan:
    """Plan the steps, their rows and the memory."""
    from composer_stages.probe.memory import memory_notes

    rows = len(inputs.one("pool").rows(POOL_ROW))
    measuring = _memory_inputs(inputs, config)
    memory = () if measuring is None else memory_notes(config.student, measuring)
    return Plan(units=config.steps, what="steps", notes=(Sentence("probe.backward-rows", rows=rows), *memory))


def _memory_inputs(inputs: Inputs, config: Config) -> "MemoryInputs | None":
    """Return the inputs of the memory estimate; None if the direction has no rank."""
    from composer_stages.probe.memory import MemoryInputs

    facts = inputs.one("direction").manifest.summary
    if "rank" not in facts:
        return None
    largest = max(len(step) for step in _rows_by_step(inputs.one("pool").rows(POOL_ROW), config.steps))
    rows = largest if config.keep == "rows" else 0
    return MemoryInputs(facts["adapter"], facts["rank"], config.max_tokens, config.checkpointing, rows)


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Take the remaining steps, then tabulate; `UsageError` if memory does not suffice."""
    from composer_stages.policy.local import checkpointed
    from composer_stages.probe.descent import Replay
    from composer_stages.probe.memory import check_memory

    rows = inputs.one("pool").rows(POOL_ROW)
    steps = _rows_by_step(rows, config.steps)
    if (measuring := _memory_inputs(inputs, config)) is not None:
        check_memory(config.student, measuring, {"keep=sums": replace(measuring, rows=0)})
    replay = Replay(inputs, config, len(rows), out)
    with checkpointed(replay.student.model, config.checkpointing):
        for number, chosen in enumerate(steps):
            out.progress("steps", number, len(steps))
            if not out.finished(f"step_{number:03d}"):
                out.raise_if_stopped()
                replay.step(number, chosen, sum(len(step) for step in steps[:number]))
    replay.finish(len(steps), len(rows))


def _rows_by_step(rows: list[Row], steps: int) -> list[list[Row]]:
    """Divide rows into steps by problem, in the pool's order; `UsageError` with more steps than problems."""
    problems = sorted({row["step"] for row in rows})
    if len(problems) < steps:
        raise UsageError("probe.too-few-problems", problems=len(problems), steps=steps)
    bounds = [len(problems) * index // steps for index in range(steps + 1)]
    chosen = [set(problems[low:high]) for low, high in pairwise(bounds)]
    return [[row for row in rows if row["step"] in dealt] for dealt in chosen]


STAGE = Stage(
    name="probe-replay",
    version=2,
    config=Config,
    inputs={"pool": Slot(POOL_ROW), "direction": Slot(DIRECTION), "svd": Slot(SVD_MODULE, optional=True)},
    outputs={"probe_rows": PROBE_ROW, "gradients": VECTORS},
    plan=plan,
    run=run,
)
