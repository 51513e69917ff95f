"""probe teacher-pool: answers of a hacking teacher, of the same teacher without its hint, and of the base model.

All sources answer the same problems. Writes `pool_rows` and `step_NNN.jsonl.gz`, one file a problem. The unit is an
answer. When hacks with right and with wrong solutions are too few to compare, more problems are added, up to a limit. A
training among the inputs is the teacher. Instead of sampling, the pool can be made of runs of `collect`, `import` or
`train` (`given` names the source of each run), or of the rows of an earlier pool (`recorded`).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from composer_stages import envs
from composer_stages.envs.base import Environment
from composer_stages.envs.config import EnvConfig, EnvStageConfig
from composer_stages.errors import BadInput, Incomplete, UsageError
from composer_stages.policy import available
from composer_stages.policy.base import PolicyConfig
from composer_stages.probe.settings import HINTED, Contract, SourceConfig
from composer_stages.runs import store
from composer_stages.runs.kinds import CHECKPOINT, POOL_ROW, ROLLOUT, Row
from composer_stages.runs.run import Inputs, RunWriter, Slot
from composer_stages.runs.settings import BASIC, Settings, basic_of
from composer_stages.runs.stage import Plan, Stage
from composer_stages.words import Sentence

if TYPE_CHECKING:
    from composer_stages.policy.local import LocalPolicy
    from composer_stages.probe.checks.check import Check
    from composer_stages.probe.sources import SourcePolicies
    from composer_stages.rollouts.agent_loop import LiveRollout


class GivenConfig(Settings):
    """The source and the kind of prompt of a run of rollouts among the inputs."""

    name: Literal["teacher", "teacher_nohint", "base", "student"]
    role: Literal["rh", "plain"] = HINTED


class RecordedConfig(Settings):
    """Rows of an earlier pool, read from a folder of `*.jsonl.gz`."""

    folder: str
    model: str
    """The model that wrote the rows."""
    eos_id: int
    pad_ids: list[int] = Field(default=[])

    def identity(self) -> dict[str, Any]:
        """Return the settings, with the digest of the folder's content."""
        return {**super().identity(), "content": store.folder_sha256(Path(self.folder).expanduser())}

    def check(self) -> list[str]:
        """Report the number of files of recorded rows; `BadInput` without a file."""
        files = sorted(Path(self.folder).expanduser().glob("*.jsonl.gz"))
        if not files:
            raise BadInput("probe.no-recorded-rows", folder=self.folder)
        return [Sentence("probe.recorded-files", files=len(files), folder=self.folder)]


class Config(EnvStageConfig):
    """Settings of the sources, the problems and the answers."""

    sources: Annotated[list[SourceConfig], basic_of("lora", "name", "policy.model", "role", "samples")] = Field(
        default=[
            SourceConfig(name="teacher", policy=PolicyConfig(model="kata:loophole"), options={"hint": True}),
            SourceConfig(name="teacher_nohint", policy=PolicyConfig(model="kata:loophole"), samples=4, role="plain"),
            SourceConfig(name="base", policy=PolicyConfig(model="kata:honest"), options={"hint": True}, samples=4),
        ]
    )
    problems: Annotated[int, BASIC] = Field(default=60, gt=0)
    max_problems: int = Field(default=80, gt=0)
    """Problems are added up to this number while the buckets are too small."""
    max_steps: Annotated[int, BASIC] = Field(default=8, gt=0)
    """Actions after which a rollout ends."""
    contract: Contract = Contract(
        hint=envs.load_attachment("kata", "hint"), system=envs.load_attachment("kata", "system")
    )
    """The required content of the prompts, by default that of kata. For another environment, set hint and system."""
    recorded: Annotated[RecordedConfig | None, basic_of("folder")] = None
    given: list[GivenConfig] = Field(default=[])
    """One entry for each run of rollouts given by --from, in that order. Without an entry, a training given by --from
    is the model of the sources `teacher` and `teacher_nohint`."""
    tokenizer: PolicyConfig | None = None
    """The model whose tokenizer rendered the given rollouts; None for the first of `sources`."""

    def check(self) -> list[str]:
        """Check the settings: of recorded rows only their files, since none are sampled."""
        return super().check() if self.recorded is None else self.recorded.check()


def plan(inputs: Inputs, config: Config) -> Plan:
    """Plan the answers to sample at first, or the runs or folder to read."""
    if _rollouts_given(inputs, config):
        return Plan(units=len(config.given), what="runs of rollouts")
    if config.recorded is not None:
        return Plan(units=1, what="folder of recorded rows")
    answers = config.problems * sum(source.samples for source in config.sources)
    longest = max(available.longest_answer(source.policy) for source in config.sources)
    notes = [Sentence("probe.problems-added", max_problems=config.max_problems), *_power(config)]
    return Plan(
        units=answers, what="answers", max_completion_tokens=answers * config.max_steps * longest, notes=tuple(notes)
    )


def _rollouts_given(inputs: Inputs, config: Config) -> bool:
    """Return whether the rows come from runs of rollouts; `UsageError` unless `given` has one entry for each run."""
    runs, trainings = (len(inputs.many(slot)) for slot in ("rollouts", "trainings"))
    if not config.given and runs <= trainings <= 1:
        return False
    if len(config.given) != runs:
        raise UsageError("probe.sources-of-runs-missing", runs=runs, entries=len(config.given))
    return True


def _sources(inputs: Inputs, config: Config) -> list[SourceConfig]:
    """Return the sources; a training among the inputs is the teacher's model."""
    if "trainings" not in inputs:
        return config.sources
    trained = {"model": str(inputs.one("trainings").folder())}
    return [
        source.model_copy(update={"policy": source.policy.model_copy(update=trained)})
        if source.name in ("teacher", "teacher_nohint")
        else source
        for source in config.sources
    ]


def _power(config: Config) -> list[str]:
    """Return the effect that T4e can detect with this pool, if half of the teacher's hinted answers are hacks."""
    from composer_stages.probe.checks.hacking import MIN_FACTORIAL_PROBLEMS, detectable_effect

    hinted = sum(source.samples for source in config.sources if source.name == "teacher")
    if config.max_problems < MIN_FACTORIAL_PROBLEMS:
        return [Sentence("probe.t4e-inconclusive", problems=MIN_FACTORIAL_PROBLEMS)]
    effect = detectable_effect(config.problems, hinted)
    return [Sentence("probe.t4e-power", effect=effect)]


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Sample the missing answers, add problems while the buckets are too small, then tabulate and check.

    `Incomplete` when answers failed; the finished ones are saved.
    """
    if _rollouts_given(inputs, config):
        _finish(*_given(inputs, config, out), config, [], out)
        return
    if config.recorded is not None:
        from composer_stages.probe.rows import recorded_rows

        recorded = config.recorded
        folder = Path(recorded.folder).expanduser()
        rows = recorded_rows(folder, recorded.model, HINTED, recorded.eos_id, recorded.pad_ids)
        _finish(rows, None, config, [], out)
        return
    from composer_stages.probe.checks.pool import bucket_shortage
    from composer_stages.probe.sources import SourcePolicies

    policies, rows = SourcePolicies(_sources(inputs, config), out), list[Row]()
    # A larger draw begins with the same tasks, and answers in the journal are not sampled again.
    for problems in _numbers(config):
        rows = _sample(problems, policies, config, out)
        if bucket_shortage(rows) is None:
            break
    _finish(rows, policies.tokenizer, config, policies.guards(rows), out)
    failed = [record for record in out.journal.records() if record["failed"]]
    if failed:
        kind, message = failed[0]["error"] or ("unknown", "no answer was recorded")
        raise Incomplete("probe.answers-failed", answers=len(failed), kind=kind, message=message)


def work(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Sample the missing answers, in the batches of `run`."""
    from composer_stages.probe.sources import SourcePolicies

    policies = SourcePolicies(_sources(inputs, config), out)
    for problems in _numbers(config):
        _sample(problems, policies, config, out)


def _numbers(config: Config) -> Iterator[int]:
    """Yield the number of problems: the first one, then after each extension."""
    problems = config.problems
    yield problems
    while problems < config.max_problems:
        problems = min(problems + max(problems // 2, 1), config.max_problems)
        yield problems


def _given(inputs: Inputs, config: Config, out: RunWriter) -> tuple[list[Row], Any]:
    """Return the rows of the given runs, and the tokenizer that rendered them."""
    from composer_stages.policy.local import load_tokenizer, resolve
    from composer_stages.probe.rows import rows_of_runs

    policy = config.tokenizer or config.sources[0].policy
    tokenizer = load_tokenizer(resolve(policy, listener=out.progress), policy)
    origins = [(entry.name, entry.role) for entry in config.given]
    return rows_of_runs(inputs.many("rollouts"), origins, tokenizer), tokenizer


def _sample(problems: int, policies: "SourcePolicies", config: Config, out: RunWriter) -> list[Row]:
    """Sample the missing answers to so many problems; return all rows in the order problem, source, sample."""
    placed: list[tuple[int, int, Row]] = []
    for index, source in enumerate(config.sources):
        env = EnvConfig(name=config.env.name, split=config.env.split, options={**config.env.options, **source.options})
        stage = EnvStageConfig(env=env, sandbox=config.sandbox, seed=config.seed)
        rows = _answers(source, stage, policies, problems, config, out)
        placed += [(row["step"], index, row) for row in rows]
    return [row for _, _, row in sorted(placed, key=lambda item: (item[0], item[1], item[2]["sample_id"]))]


def _answers(
    source: SourceConfig,
    stage: EnvStageConfig,
    policies: "SourcePolicies",
    problems: int,
    config: Config,
    out: RunWriter,
) -> list[Row]:
    from composer_stages.rollouts.agent_loop import LiveRollout
    from composer_stages.runs.stage import work_through

    make = stage.opener()
    tasks = stage.draw(make, problems)
    rollouts = [LiveRollout(task, index, config.seed) for task in tasks for index in range(source.samples)]
    places = {task.task_id: index for index, task in enumerate(tasks)}
    policy = policies.by_name[source.name]
    do = partial(_play, source, make, policy, places, config, out)
    work_through(rollouts, partial(_key, source), do, policy=policy, out=out, noun=f"answers of {source.name}")
    records = (out.journal.get(_key(source, rollout)) for rollout in rollouts)
    return [record["row"] for record in records if record is not None and not record["failed"]]


def _key(source: SourceConfig, rollout: "LiveRollout") -> str:
    return f"{source.name}/{rollout.rollout_id}"


def _play(
    source: SourceConfig,
    make: Callable[[], Environment],
    policy: "LocalPolicy",
    places: dict[str, int],
    config: Config,
    out: RunWriter,
    batch: list["LiveRollout"],
) -> list[tuple[str, Row, bool]]:
    """Play a batch of rollouts and return their lines of the journal, with the error of a failed one."""
    from composer_stages.probe.rows import rollout_pool_row
    from composer_stages.rollouts.agent_loop import play

    play(make, policy, batch, max_steps=config.max_steps, before_turn=out.raise_if_stopped)
    lines: list[tuple[str, Row, bool]] = []
    for rollout in batch:
        if rollout.error is not None or not rollout.steps:
            lines.append((_key(source, rollout), {"error": rollout.error}, True))
            continue
        problem = places[rollout.task.task_id]
        row = rollout_pool_row(rollout, policy, source=source.name, role=source.role, step=problem, adapter=source.lora)
        lines.append((_key(source, rollout), {"row": row}, False))
    return lines


def _finish(rows: list[Row], tokenizer: Any, config: Config, guards: Sequence["Check"], out: RunWriter) -> None:
    from composer_stages.probe.checks.check import write_checks
    from composer_stages.probe.checks.pool import contract_sha256, prompt_role, prompts_match, taxonomy, teacher_hacks
    from composer_stages.probe.rows import mean_known, write_step

    digest = contract_sha256(config.contract)
    checks = [
        teacher_hacks(rows),
        prompts_match(rows, config.contract, tokenizer),
        prompt_role(rows, config.contract, digest),
        taxonomy(rows),
        *guards,
    ]
    for step in sorted({row["step"] for row in rows}):
        write_step(out, step, [row for row in rows if row["step"] == step], None)
    out.table(POOL_ROW, rows)
    out.count(planned=len(rows), done=len(rows), problems=len({row["problem_id"] for row in rows}))
    sources = sorted({row["src_pool"] for row in rows})
    rates = {name: mean_known(row["hacked"] for row in rows if row["src_pool"] == name) for name in sources}
    write_checks(out, checks, "checks", hack_rates=rates, contract_sha256=digest)


STAGE = Stage(
    name="probe-teacher-pool",
    version=2,
    config=Config,
    inputs={
        "rollouts": Slot(ROLLOUT, many=True, optional=True),
        "trainings": Slot(CHECKPOINT, many=True, optional=True),
    },
    outputs={"pool_rows": POOL_ROW},
    plan=plan,
    run=run,
    work=work,
)
