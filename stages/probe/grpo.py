"""probe grpo: whether a GRPO trajectory leads to hacking, and whether taking v out of its gradient slows it.

Reads a direction (and the decomposition). Writes `trajectories` and, by seed, `step_NNN.jsonl.gz` with each row's
cosine. The unit is one step of one seed. One run is one arm; `probe compare` judges several. Generators: `pi_theta` is
on-policy; `interp` is too, from a student between base and teacher that hacks sometimes; `mixed_is` takes half of each
group from the teacher with its true log-probs, which is expected to bail out; `mixed_awr` does so with ratio 1, which
is advantage-weighted imitation and not GRPO.
"""

from typing import TYPE_CHECKING

from stages.errors import UsageError
from stages.policy import available
from stages.probe.settings import GrpoConfig as Config
from stages.runs.kinds import DIRECTION, SVD_MODULE, TRAJECTORY
from stages.runs.run import Inputs, RunWriter, Slot
from stages.runs.stage import Plan, Stage

if TYPE_CHECKING:
    from stages.probe.memory import MemoryInputs


def plan(inputs: Inputs, config: Config) -> Plan:
    """Return the steps of all seeds, their answers and the memory."""
    from stages.probe.memory import memory_notes

    measuring = _memory_inputs(inputs, config)
    memory = () if measuring is None else memory_notes(config.student, measuring)
    answers = len(config.seeds) * config.steps * config.problems * config.samples
    tokens = answers * config.max_steps * available.longest_answer(config.student)
    return Plan(
        units=len(config.seeds) * config.steps,
        what="steps",
        max_completion_tokens=tokens,
        notes=(f"{answers} answers", *memory),
    )


def _memory_inputs(inputs: Inputs, config: Config) -> "MemoryInputs | None":
    """Return what decides the memory, without sampling: the models, and the pairs when v is extracted again.

    None where the direction has no rank in its summary.
    """
    from stages.probe.memory import MemoryInputs

    direction = inputs.one("direction").manifest
    if "rank" not in direction.summary:
        return None
    pairs = direction.counts["done"] if config.direction_at == "start" or config.drift_every else 0
    models = 2 if config.generator == "interp" else int(config.mixed)
    adapter, rank = direction.summary["adapter"], direction.summary["rank"]
    return MemoryInputs(adapter, rank, config.max_tokens, config.checkpointing, rows=2 * pairs, models=models)


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Take the steps that are not taken yet, seed by seed, then tabulate.

    `UsageError` at a temperature but 1, and where memory would not suffice.
    """
    if config.student.temperature != 1.0:
        raise UsageError(
            "grpo samples at temperature 1, where log-probs and gradients are of one policy, "
            f"not at {config.student.temperature}. Set student.temperature=1."
        )
    from contextlib import nullcontext

    from stages.policy.local import checkpointed
    from stages.probe.memory import check_memory
    from stages.probe.trajectories import GrpoLoop

    if (measuring := _memory_inputs(inputs, config)) is not None:
        check_memory(config.student, measuring)
    loop = GrpoLoop(inputs, config, out)
    with checkpointed(loop.student.model) if config.checkpointing else nullcontext():
        for seed in config.seeds:
            loop.run_seed(seed)
    loop.finish()


STAGE = Stage(
    name="probe-grpo",
    version=1,
    config=Config,
    inputs={"direction": Slot(DIRECTION), "svd": Slot(SVD_MODULE, optional=True)},
    outputs={"trajectories": TRAJECTORY},
    plan=plan,
    run=run,
)
