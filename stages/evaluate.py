"""evaluate: play every arm on held-out tasks and decide whether B beats A, and whether the preference did it.

Reads the checkpoints of several arms, writes `eval_items`, the verdict with intervals and paired tests, a table and a
chart. The unit is one rollout of one arm. The verdict is the exit code too: 0 VALIDATED, 1 INVALIDATED, 3 PARTIAL or
UNDERPOWERED, 4 INVALID-RUN.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from pydantic import Field

from stages.envs.base import Environment, Task
from stages.envs.config import EnvStageConfig, HeldOutEnvConfig
from stages.errors import BadInput, Incomplete
from stages.evaluation.arms import START
from stages.policy import Policy, PolicyConfig, open_policy
from stages.policy.checkpoint import CheckpointInfo, refuse_trained
from stages.rollouts.episode import Episode, play
from stages.runs import store
from stages.runs.artifact import Out, Run, Slot
from stages.runs.config import Settings
from stages.runs.inputs import Inputs
from stages.runs.plan import Plan, work_through
from stages.runs.records import CHECKPOINT, EVAL_ITEM, ROLLOUT, Row

VERSION = 2
INPUTS = {"arms": Slot(CHECKPOINT, many=True)}
OUTPUTS = {"eval_items": EVAL_ITEM}
LIMIT = "tasks"


class Planning(Settings):
    """What `--plan` assumes. Rates that are not given come from the pilot behind --from, or are assumed."""

    gain: float = Field(0.02, gt=-1, lt=1)
    """The true difference in pass@1, a fraction."""
    power: float = Field(0.8, gt=0.5, lt=1)
    seeds: int = Field(1, gt=0)
    """Training seeds."""
    base: float | None = Field(None, gt=0, lt=1)
    """The baseline's pass rate."""
    repeat: float | None = Field(None, gt=0, lt=1)
    """How often two rollouts of one model on one task differ."""
    discordance: float | None = Field(None, gt=0, le=1)
    """How often rollouts of the two arms on one task differ."""
    family_share: float | None = Field(None, ge=0, le=1)
    """The part of a task's difficulty that its family has."""
    seed_spread: float | None = Field(None, ge=0, lt=1)
    """The standard deviation of the gain from training to training."""
    usd_per_rollout: float | None = Field(None, ge=0)


class Config(EnvStageConfig):
    """What to evaluate on, and which arms to compare."""

    env: HeldOutEnvConfig = HeldOutEnvConfig()
    tasks: int = Field(200, gt=0, le=100_000)
    """Number of held-out tasks."""
    samples: int = Field(1, gt=0)
    """Rollouts of every task and arm."""
    max_steps: int = Field(8, gt=0)
    temperature: float = Field(1.0, ge=0)
    """1 evaluates the policy as it was trained; 0 its most likely answers."""
    baseline: str = "A"
    treatment: str = "B"
    control: str | None = "C"
    """The arm that only imitates the chosen actions."""
    with_start: bool = True
    """Also evaluate the model that training started from."""

    planning: Planning = Field(Planning(), json_schema_extra={"affects_results": False})

    def fixed_families(self) -> bool:
        """Whether the environment's families are fixed strata, as a benchmark's repositories are, and not a sample."""
        environment = self.opener()()
        try:
            return bool(getattr(environment, "fixed_families", False))
        finally:
            environment.close()

    def label(self) -> str:
        """Environment and arms."""
        return f"{self.env.label()}-{self.treatment}-vs-{self.baseline}"


@dataclass(frozen=True)
class Arm:
    """One model to evaluate: the arm's name, its training seed, and where the model is."""

    name: str
    seed: int
    policy: PolicyConfig


def arms(inputs: Inputs, config: Config) -> list[Arm]:
    """Every trained model, and the one they all started from; `BadInput` when they cannot be compared."""
    runs: list[Run] = inputs.many("arms")
    infos = [CheckpointInfo.of(run) for run in runs]
    trained = [_arm(info, str(run.folder()), config) for info, run in zip(infos, runs, strict=True)]
    names = [(arm.name, arm.seed) for arm in trained]
    if len(set(names)) < len(names):
        name, seed = next(name for name in names if names.count(name) > 1)
        raise BadInput(f"Arm {name!r} with seed {seed} was given twice. Give every arm and seed once.")
    starts = {info.start_identity: run for info, run in zip(infos, runs, strict=True)}
    if len(starts) > 1:
        raise BadInput(
            "The arms did not start from the same model, so they cannot be compared: "
            + ", ".join(str(run.path) for run in starts.values())
        )
    if not config.with_start:
        return trained
    start = infos[0].start
    return [Arm(START, 0, start.model_copy(update={"temperature": config.temperature})), *trained]


def _arm(info: CheckpointInfo, folder: str, config: Config) -> Arm:
    changes = {"model": folder, "temperature": config.temperature}
    return Arm(info.arm, info.train_seed, info.start.model_copy(update=changes))


def plan(inputs: Inputs, config: Config) -> Plan:
    """The rollouts to play."""
    return Plan(units=len(arms(inputs, config)) * config.tasks * config.samples, what="rollouts")


def study(pilots: Sequence[Run], config: Config) -> tuple[Row, str]:
    """What the planned evaluation would find and cost, as JSON and as text; `BadInput` for a pilot without rollouts."""
    from stages.evaluation import planner
    from stages.evaluation.pilot import GIVEN, Price, complete, measure
    from stages.evaluation.simulation import Design, World

    asked = config.planning
    items = [item for run in pilots for item in _pilot_items(run)]
    given = {name: (getattr(asked, name), GIVEN) for name in World.__annotations__ if getattr(asked, name) is not None}
    rates = complete({**measure(items, config.baseline, config.treatment), **given}, asked.gain)
    world = World(**{name: value for name, (value, _) in rates.items()})
    sizes = Counter(task.family or task.task_id for task in config.draw(config.opener(), config.tasks))
    design = Design(tuple(sizes.values()), config.samples, asked.seeds, config.fixed_families())
    costs = [item["cost_usd"] for item in items if item["cost_usd"] is not None]
    price = asked.usd_per_rollout if asked.usd_per_rollout is not None else sum(costs) / len(costs) if costs else None
    arms = 2 + (config.control is not None) + config.with_start
    found = planner.study(planner.Question(world, asked.gain, asked.power, arms, Price(price)), design, rates)
    return asdict(found), planner.text(found)


def _pilot_items(run: Run) -> list[Row]:
    """The rollouts of an evaluation or of a collection, as items."""
    if run.holds(EVAL_ITEM):
        return run.rows(EVAL_ITEM)
    rows = run.rows(ROLLOUT)
    each = run.manifest.cost_usd / max(len(rows), 1)
    return [
        {
            **row,
            "arm": START,
            "train_seed": 0,
            "passed": None if row["reward"] is None else row["reward"] >= 1.0,
            "cost_usd": each,
        }
        for row in rows
    ]


def run(inputs: Inputs, config: Config, out: Out) -> None:
    """Play every arm on every task, then decide."""
    make = config.opener()
    tasks = config.draw(make, config.tasks)
    compared = arms(inputs, config)
    trained = [CheckpointInfo.of(run) for run in inputs.many("arms")]
    refuse_trained(trained, config.env.name, [task.task_id for task in tasks])
    for arm in compared:
        policy = open_policy(arm.policy, cache=out.cache, budget=out.budget, listener=out.progress)
        out.model(f"{arm.name}/{arm.seed}", **policy.facts())
        _evaluate(make, policy, arm, tasks, config, out)
    _finish(compared, tasks, config, out)


def _episodes(tasks: list[Task], config: Config) -> list[Episode]:
    """The same tasks, samples and sampling seeds for every arm: what differs is the model alone."""
    return [Episode(task, index, config.seed) for task in tasks for index in range(config.samples)]


def _item_id(arm: Arm, episode: Episode) -> str:
    return f"{arm.name}/{arm.seed}/{episode.rollout_id}"


def _evaluate(
    make: Callable[[], Environment], policy: Policy, arm: Arm, tasks: list[Task], config: Config, out: Out
) -> None:
    def play_batch(batch: list[Episode]) -> Iterable[tuple[str, Row, bool]]:
        started = time.monotonic()
        play(make, policy, batch, max_steps=config.max_steps, before_turn=out.stop_here)
        for episode in batch:
            episode.wall_s = (time.monotonic() - started) / len(batch)
            yield _item_id(arm, episode), {"item": _item(arm, episode)}, episode.error is not None

    work_through(
        _episodes(tasks, config),
        lambda episode: _item_id(arm, episode),
        play_batch,
        policy=policy,
        out=out,
        what=f"rollouts of arm {arm.name}",
    )


def _item(arm: Arm, episode: Episode) -> Row:
    """One `eval_item/1` row; `passed` is null when the machinery failed."""
    error_type, error = episode.error or (None, None)
    reward = None if episode.error else episode.grade.reward
    return {
        "item_id": _item_id(arm, episode),
        "arm": arm.name,
        "train_seed": arm.seed,
        "task_id": episode.task.task_id,
        "family": episode.task.family,
        "sample_idx": episode.sample_idx,
        "passed": None if reward is None else reward >= 1.0,
        **{name: getattr(episode.grade, name) for name in ("gt_pass", "visible_pass", "hacked", "protocol_ok")},
        "num_steps": len(episode.steps),
        "terminated_by": episode.terminated_by,
        "transcript_json": store.encode(episode.messages).decode(),
        "error_type": error_type,
        "error": error,
        "cost_usd": sum(step.sample.cost_usd for step in episode.steps),
        "sampled_tokens": sum(step.sample.completion_tokens for step in episode.steps),
        "wall_s": episode.wall_s,
    }


def _finish(compared: list[Arm], tasks: list[Task], config: Config, out: Out) -> None:
    from stages.evaluation.chart import arms_chart
    from stages.evaluation.report import text_table
    from stages.evaluation.verdict import INVALID_RUN, decide

    records = {record["unit"]: record["item"] for record in out.records()}
    items = [records[_item_id(arm, episode)] for arm in compared for episode in _episodes(tasks, config)]
    out.table(EVAL_ITEM, items)
    verdict = decide(items, config.baseline, config.treatment, config.control, fixed=config.fixed_families())
    failed = sum(item["error_type"] is not None for item in items)
    out.count(planned=len(items), done=len(items) - failed, failed=failed)
    out.conclude(
        ok=verdict.decision != INVALID_RUN,
        exit_code=verdict.exit_code,
        verdict=verdict.decision,
        claim=verdict.claim,
        why=verdict.why,
    )
    out.document("verdict", asdict(verdict))
    out.figure("chart.svg", arms_chart(verdict))
    out.text("report.txt", text_table(verdict) + "\n")
    if failed:
        first = next(item for item in items if item["error_type"])
        raise Incomplete(
            f"{failed} of {len(items)} rollouts failed, the first with {first['error_type']}: {first['error']}. "
            "Retry them with --resume."
        )
