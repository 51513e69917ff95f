"""train: one arm, by GRPO on the environment's reward; channels with a weight add their losses to it.

Reads an environment, a model (of the settings, of an earlier training, or of `composer probe start`), the tasks of a
curriculum where one is given, and, for channels on preference pairs, extracted pairs, of one run or several; writes a
Hugging Face folder (of an adapter alone, where one was trained), `checkpoint.json` (what `evaluate` needs to know of
it), `metrics.jsonl`, and as tables the rollouts that were played, their rewards, and the hints. Training resumes from
its newest complete checkpoint and then gives what an uninterrupted run gives. Under torchrun every process trains the
same model on its share of each step's rollouts, and the first one writes the run.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from composer_stages import envs
from composer_stages.backends import resources
from composer_stages.backends.ranks import join, world_size
from composer_stages.errors import UsageError
from composer_stages.policy import available
from composer_stages.policy.serving import Serving
from composer_stages.runs import reporting, store
from composer_stages.runs.activity import Checking, activity
from composer_stages.runs.kinds import (
    CHECKPOINT,
    DIFFICULTY,
    DIRECTION,
    HINT,
    PAIR,
    ROLLOUT,
    ROLLOUT_GRADIENT,
    START,
    STEP,
    TRAINING_REWARD,
    VECTORS,
)
from composer_stages.runs.run import Inputs, RunWriter, Slot
from composer_stages.runs.stage import Plan, Stage
from composer_stages.training.config import Config
from composer_stages.training.memory import choose_passes, describe_plan, unused
from composer_stages.training.model_shape import ASSUMED, Prompts, measure_rows
from composer_stages.training.plan import resolve


def plan(inputs: Inputs, config: Config) -> Plan:
    """Plan the steps and their rollouts; refuses settings that contradict each other."""
    config = _with_runs(inputs, config)
    resolved = resolve(config, world_size(), inputs, _longest_row(inputs))
    if resolved.shape is not None and not resolved.small:
        resolved = choose_passes(resolved, _foreseen(inputs, config), unused(resolved))
    if config.trl:
        from composer_stages.training.trl_arguments import trl_arguments

        trl_arguments(resolved, Path(tempfile.gettempdir()))
    size = config.optimisation
    rollouts = size.steps * size.prompts_per_step * size.generations
    if config.hints.source == "template":
        # Whether the environment's hints can be checked is known once it is made, which a plan does not.
        rollouts += 2 * config.answers_to_check_hints()
    return Plan(
        units=size.steps,
        what="steps",
        max_completion_tokens=rollouts * resolved.rollout_tokens,
        notes=(*describe_plan(resolved), *config.diloco.warnings(size.steps)),
    )


def _foreseen(inputs: Inputs, config: Config) -> Prompts:
    """Return the lengths of the rows, measured where no foreign code is executed and no tokenizer fetched for it."""
    policy, name = config.policy.in_process(), config.env.name
    if not envs.is_shipped(name) or config.env.curriculum or not available.tokenizer_is_here(policy):
        return ASSUMED
    from composer_stages.policy.local import open_tokenizer

    tokenizer = open_tokenizer(policy, listener=lambda action, done, total: None)
    environment = envs.load(name, config.env_options())
    tasks = config.draw(lambda: environment, config.tasks)
    return measure_rows(inputs, config, environment, tasks, tokenizer)


def _with_runs(inputs: Inputs, config: Config) -> Config:
    """Return the settings with the model of the run that training starts from and a curriculum, where they are given.

    `UsageError` for two of either.
    """
    start, student = inputs.optional("start"), inputs.optional("student")
    if start is not None and student is not None:
        raise UsageError("two-starts", paths=[start.path, student.path])
    if run := start or student:
        policy = config.policy.with_model(run.folder(CHECKPOINT if start is None else START))
        config = config.model_copy(update={"policy": policy})
    if (curriculum := inputs.optional("curriculum")) is not None:
        if config.env.curriculum:
            raise UsageError("two-curricula", curriculum=config.env.curriculum, path=curriculum.path)
        config = config.model_copy(update={"env": config.env.model_copy(update={"curriculum": str(curriculum.path)})})
    return config


def _longest_row(inputs: Inputs) -> int:
    """Return the tokens of the longest row of the direction's pairs; 0 where no direction is given."""
    if (direction := inputs.optional("direction")) is None:
        return 0
    from composer_stages.training.projection import PAIRS

    pairs = store.read_json(direction.folder(VECTORS) / PAIRS)
    return max(len(row["prompt_ids"]) + len(row["completion_ids"]) for pair in pairs for row in pair)


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Train, or resume training, then save the model and the metrics; the first process alone writes to `out`."""
    ranks, config = join(), _with_runs(inputs, config)
    resolved = resolve(config, ranks.count, inputs, _longest_row(inputs))
    tasks = config.draw(config.opener(), config.tasks, out)
    with activity(Checking("importing the libraries of training")):
        from composer_stages.arms.hint_check import check_hints
        from composer_stages.training import assembly, replicas, report

    resolved = assembly.fit_plan(resolved, inputs, tasks, out, ranks)
    config, replica = resolved.config, replicas.join(resolved.config.diloco, out)
    if replica is not None:
        seed = config.seed + replicas.SEEDS_APART * replica.number
        resolved = replace(resolved, config=config.model_copy(update={"seed": seed}))
    with (
        Serving(out, [config.policy], rank=config.adapter.rank, loras=1 + config.optimisation.max_staleness) as serving,
        ranks.naming_lost_peers(),
        _seeded(resolved.config.seed, config.optimisation.threads),
    ):
        training = assembly.TrainingSession.open(resolved, inputs, out, ranks, tasks, serving, replica)
        hints = check_hints(resolved.config, training.student, tasks, out)
        with reporting.backend_folders(config.report_to, out.path / "logs"):
            trainer, steps = training.fit()
        out.checkpoint(training.student.save)  # in all processes, each of which may hold a share
        if ranks.first:
            # Replicas draw from the same tasks, each in an order of its own.
            trained_on = training.prompts if replica is None else tasks
            report.save(trainer, config, trained_on, out, training.watch.collapsed(steps), hints)
        if training.outer is not None:
            training.outer.report()


@contextmanager
def _seeded(seed: int, threads: int | None) -> Iterator[None]:
    """Seed torch and set the number of CPU threads (None: those of `resources.use_own_cores`), by which sums round.

    Unlike `benchmarks.kata_models.reproducible`, which is for models of seconds on one CPU thread, it forbids no
    kernel without a deterministic form: models of any size are trained here, on GPUs too, where some have none.
    """
    import torch

    before = torch.get_num_threads()
    torch.manual_seed(seed)
    resources.use_own_cores() if threads is None else torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


STAGE = Stage(
    name="train",
    version=10,
    example="""\
>>> plan = composer.train.plan(policy="Qwen/Qwen3-8B", optimisation={"steps": 10})
>>> plan.units, plan.what
(10, 'steps')""",
    config=Config,
    inputs={
        "pairs": Slot(PAIR, many=True, optional=True),
        "direction": Slot(DIRECTION, optional=True),
        "start": Slot(START, optional=True),
        "student": Slot(CHECKPOINT, optional=True),
        "curriculum": Slot(DIFFICULTY, optional=True),
    },
    outputs={
        "checkpoint": CHECKPOINT,
        "rollouts": ROLLOUT,
        "steps": STEP,
        "training_rewards": TRAINING_REWARD,
        "hints": HINT,
        "rollout_gradients": ROLLOUT_GRADIENT,
    },
    plan=plan,
    run=run,
    shows_progress=True,
    several_processes=True,
    preload=("composer_stages.training.assembly",),
)
