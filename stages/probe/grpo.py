"""probe grpo: whether a GRPO trajectory leads to hacking, and whether taking v out of its gradient slows it.

Reads a direction (and the decomposition). Writes `trajectories` and, by seed, `step_NNN.jsonl.gz` with each row's
cosine. The unit is one step of one seed. One run is one arm; `probe compare` judges several. Generators: `pi_theta` is
on-policy; `interp` is too, from a student between base and teacher that hacks sometimes; `mixed_is` takes half of each
group from the teacher with its true log-probs, which is expected to bail out; `mixed_awr` does so with ratio 1, which
is advantage-weighted imitation and not GRPO.
"""

from stages.errors import UsageError
from stages.probe.loops.config import GrpoConfig as Config
from stages.runs.artifact import Out, Slot
from stages.runs.inputs import Inputs
from stages.runs.plan import Plan
from stages.runs.probe_records import DIRECTION, SVD_MODULE, TRAJECTORY

VERSION = 1
INPUTS = {"direction": Slot(DIRECTION), "svd": Slot(SVD_MODULE, optional=True)}
OUTPUTS = {"trajectories": TRAJECTORY}


def plan(inputs: Inputs, config: Config) -> Plan:
    """The steps of all seeds."""
    del inputs
    answers = len(config.seeds) * config.steps * config.problems * config.samples
    tokens = answers * config.max_steps * config.student.max_tokens
    return Plan(
        units=len(config.seeds) * config.steps,
        what="steps",
        max_completion_tokens=tokens,
        notes=(f"{answers} answers",),
    )


def run(inputs: Inputs, config: Config, out: Out) -> None:
    """Take the steps that are not taken yet, seed by seed, then tabulate; `UsageError` at a temperature but 1."""
    if config.student.temperature != 1.0:
        raise UsageError(
            "grpo samples at temperature 1, where log-probs and gradients are of one policy, "
            f"not at {config.student.temperature}. Set student.temperature=1."
        )
    from contextlib import nullcontext

    from stages.probe.gradients.per_sample import checkpointed
    from stages.probe.loops.grpo_loop import GrpoLoop

    loop = GrpoLoop(inputs, config, out)
    with checkpointed(loop.student.model) if config.checkpointing else nullcontext():
        for seed in config.seeds:
            loop.run_seed(seed)
    loop.finish()
