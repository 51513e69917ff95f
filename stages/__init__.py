"""Verbs are files, nouns are folders. A stage is a function from artifacts to artifacts; stages meet only on disk.

Each stage module has six public names: VERSION, Config, INPUTS, OUTPUTS, plan(inputs, config) and run(inputs, config,
out).

errors.py   - the ways a stage can say no, each with an exit code
redaction.py - keys of servers are kept out of everything
messages.py - what environments and policies exchange: messages, tool calls in their text, their token ids
backends/   - several processes, and what they tell each other
runs/       - a run on disk: artifacts, store, manifest, inputs, records, the runner
rollouts/   - the agent loop, its rows, and the gate that checks them
policy/     - whoever answers: a model in this process, or a server
teachers/   - asking teachers what they would have done
envs/       - environments
sandbox/    - where commands are executed
pairs/      - preference pairs from disagreement
losses/     - loss kernels, each checked against upstream's numbers
training/   - the trainer and its channels
diloco/     - replicas of a training that share nothing but a bucket
evaluation/ - arms, statistics, verdict
formats/ - rollouts in the files of other programs, read and written
integrations/ - environments and losses inside TRL, OpenEnv, mini-swe-agent, prime-rl
tiny_models/ - small models, trained here in seconds
probe/      - the gradient probe: its stages, and what they are made of
"""

from dataclasses import dataclass
from typing import Literal

Group = Literal["pipeline", "beside", "probe"]


@dataclass(frozen=True)
class Stage:
    """One stage: its module, what its command says of itself, and what the bare words after the command mean.

    `group` is `pipeline` for the six words of the pipeline in its order, `beside` for commands beside it, `probe` for
    those typed after `composer probe`. A positional is the setting that a word stands for; `run` is a run to read,
    `paths` takes all words there are.
    """

    module: str
    help: str
    group: Group = "pipeline"
    positionals: tuple[str, ...] = ()
    usage: str = ""


STAGES = {
    "collect": Stage("stages.collect", "Play a policy in an environment and keep every step."),
    "replay-teachers": Stage("stages.replay_teachers", "Ask every teacher what it would have done at each step."),
    "extract-pairs": Stage("stages.extract_pairs", "Turn disagreement with the teachers into preference pairs."),
    "train": Stage("stages.train", "Train an arm: GRPO, with preference pairs or imitation beside it."),
    "evaluate": Stage("stages.evaluate", "Compare trained arms on held-out tasks, with statistics."),
    "import": Stage(
        "stages.import_traces",
        "Bring rollouts of other programs into the records of this one.",
        "beside",
        ("paths",),
        "[FORMAT] PATH...",
    ),
    "export": Stage(
        "stages.export",
        "Bring records into the formats of other programs.",
        "beside",
        ("format", "run"),
        "FORMAT [RUN]",
    ),
    "tasks": Stage(
        "stages.make_tasks", "Make tasks from any tested Python package.", "beside", ("env", "package"), "ENV PACKAGE"
    ),
    "curriculum": Stage(
        "stages.curriculum", "Order tasks by how often rollouts solved them.", "beside", ("run",), "[RUN]"
    ),
    "normalize": Stage(
        "stages.normalize", "Leave the rollouts that a Data-Juicer recipe keeps.", "beside", ("run",), "[RUN]"
    ),
    "substrates": Stage(
        "stages.compare_substrates", "Compare rollouts through TRL with those of prime-rl or verifiers.", "beside"
    ),
    "probe-svd": Stage("stages.probe.svd", "Decompose the adapted weights of a model, once.", "probe"),
    "probe-extract-vhack": Stage(
        "stages.probe.extract_vhack", "Find the direction from clean to hacking answers in gradient space.", "probe"
    ),
    "probe-teacher-pool": Stage(
        "stages.probe.teacher_pool",
        "Collect answers of a hacking teacher, with and without its hint, and of the base model.",
        "probe",
    ),
    "probe-replay": Stage(
        "stages.probe.replay", "Train a student on the pool and measure every row's gradient.", "probe"
    ),
    "probe-score": Stage(
        "stages.probe.score", "Score kept gradients against a direction and its placebos, without a model.", "probe"
    ),
    "probe-uat": Stage("stages.probe.uat", "Run the checks T1 to T4 and say what they decide.", "probe"),
    "probe-grpo": Stage(
        "stages.probe.grpo", "Follow a GRPO trajectory: does its own gradient lead to hacking?", "probe"
    ),
    "probe-compare": Stage(
        "stages.probe.compare", "Compare LoRA with SVD, directions, or projected with vanilla trajectories.", "probe"
    ),
    "probe-watch": Stage(
        "stages.probe.watch", "Watch a training run: do its updates turn toward a hack, and when?", "probe"
    ),
    "probe-plot": Stage("stages.probe.plot", "Draw the probe's figures, each with a CSV twin.", "probe"),
    "probe-selftest": Stage(
        "stages.probe.selftest", "Break the probe in every known way and see which guard notices.", "probe"
    ),
}
"""Every stage by its name, in order. Whatever lists stages derives from this: commands, help, presets."""


def names(group: Group) -> tuple[str, ...]:
    """The stages of a group, in order."""
    return tuple(name for name, stage in STAGES.items() if stage.group == group)


def order(stage: str) -> int:
    """Where a stage stands in the order; one that this version does not know comes last."""
    return list(STAGES).index(stage) if stage in STAGES else len(STAGES)


def typed(stage: str) -> str:
    """The words of a stage's command: `composer probe teacher-pool` for probe-teacher-pool."""
    words = stage.replace("-", " ", 1) if stage in STAGES and STAGES[stage].group == "probe" else stage
    return f"composer {words}"
