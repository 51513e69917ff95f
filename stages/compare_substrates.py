"""substrates: collect through TRL, read what prime-rl or verifiers wrote, and check both with one gate.

Answers: whose traces are cleaner? 002a is TRL's rollout function as `train` uses it, without an optimiser step, kept by
our recorder in `steps/*.jsonl.gz`; with `through=openenv` its environments are those of an OpenEnv server on loopback.
002b is a file that a user has; without one it is the rollouts of 002a in that format, which tells of the format and
nothing of prime-rl, so that neither side is called cleaner. Writes `comparison.json` and the table in `report.txt`. The
unit is a rollout of 002a.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from stages import formats
from stages.envs.base import Environment, Task
from stages.envs.config import EnvStageConfig
from stages.errors import BadInput
from stages.formats import files, reading, rows
from stages.formats.base import Drop
from stages.formats.reading import FileCount
from stages.formats.reports import Sidecars
from stages.formats.rows import ImportedPayload
from stages.formats.transcripts import transcripts
from stages.policy.base import PolicyConfig
from stages.rollouts.substrates import Side, cleaner, table
from stages.rollouts.trace import RolloutPayload, rollout_units
from stages.runs import store
from stages.runs.artifact import Inputs, RunWriter
from stages.runs.records import Row
from stages.runs.stage import Plan, Stage

if TYPE_CHECKING:
    from stages.rollouts.agent_loop import Episode

EXPORTED = "traces.jsonl"
OWN = (
    "No --set traces=PATH was given: 002b is 002a as `composer export verifiers` writes it, read back.",
    "What differs is the format's doing; nothing is said of prime-rl or verifiers themselves. Log-probs in this format",
    "count as rounded to 4 decimals, since its own writers round them; these were not.",
)


class Config(EnvStageConfig):
    """What to compare."""

    policy: PolicyConfig = PolicyConfig()
    tasks: int = Field(25, gt=0)
    """Tasks of the split that TRL plays."""
    samples: int = Field(4, gt=1)
    """Rollouts of every task: TRL plays groups."""
    max_steps: int = Field(8, gt=0)
    """Actions after which a rollout ends."""
    through: Literal["process", "openenv"] = "process"
    """Where 002a acts: in environments of this process, or in those of an OpenEnv server that is started for it."""
    openenv_python: str = Field("", json_schema_extra={"affects_results": False})
    """A Python that has openenv; without one COMPOSER_OPENENV, else this one."""
    traces: str | None = None
    """File, folder or pattern of prime-rl's or verifiers' rollouts; without it our own, in that format."""

    @model_validator(mode="after")
    def _local(self) -> "Config":
        if self.policy.base_url is not None:
            raise ValueError(
                "policy.base_url: TRL samples from a model in this process; give a local folder or a hub id"
            )
        return self

    def identity(self) -> Row:
        """The content of the files stands for their path."""
        contents = [[file.label, file.sha256] for file in files.find([self.traces])] if self.traces else None
        return {**super().identity(), "traces": contents}


def plan(inputs: Inputs, config: Config) -> Plan:
    """The rollouts that TRL plays."""
    del inputs
    number = config.tasks * config.samples
    return Plan(
        units=number, what="rollouts", max_completion_tokens=number * config.max_steps * config.policy.max_tokens
    )


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Collect, read, compare."""
    del inputs
    make = config.opener()
    tasks = config.draw(make, config.tasks)
    given = _imported(config.traces, config.traces) if config.traces else None  # a file of no use is refused first
    with _environments(make, tasks, config, out) as environment:
        ours = _collected(environment, tasks, config, out)
    sides = ours, given or _imported(_exported(ours, tasks, out), "these rollouts as a verifiers file")
    best = cleaner(*sides) if given else None
    out.document("comparison", {"cleaner": best, "sides": [side.document() for side in sides]})
    out.text("report.txt", table(*sides) if given else table(*sides, OWN))
    failed = sum(row["error_type"] is not None for row in ours.rollouts)
    out.count(planned=ours.planned, done=len(ours.rollouts) - failed, failed=failed, read=len(sides[1].rollouts))
    fails: dict[str, Any] = {f"fails_{side.name}": side.verdicts("FAIL") for side in sides}
    out.set_summary(cleaner=best, **fails)


@contextmanager
def _environments(
    make: Callable[[], Environment], tasks: list[Task], config: Config, out: RunWriter
) -> Iterator[Callable[[], Environment]]:
    """What makes the environments that 002a acts in; a server of them ends with the block."""
    if config.through == "process":
        yield make
        return
    from stages.integrations import openenv_client

    first = make()
    name, sandbox = first.name, first.sandbox
    first.close()
    options = config.env_options()
    sessions = config.samples * len(tasks) + 1  # all episodes of a batch at once, and the openings
    with openenv_client.running(
        config.env.name,
        options,
        tasks,
        max_steps=config.max_steps,
        sessions=sessions,
        folder=out.scratch("openenv"),
        python=config.openenv_python,
    ) as url:
        yield lambda: openenv_client.ServedEnvironment(url, name, sandbox, tasks)


def _collected(make: Callable[[], Environment], tasks: list[Task], config: Config, out: RunWriter) -> Side:
    """002a: what is not in the journal yet is played, a batch of TRL's at a time."""
    from stages.integrations import trl
    from stages.integrations.trl import RolloutFunction
    from stages.policy.local import LocalPolicy

    policy = LocalPolicy.load(config.policy, cache=out.cache, listener=out.progress)
    out.model("policy", **policy.facts())
    function = RolloutFunction(
        make,
        tasks,
        max_steps=config.max_steps,
        max_tokens=config.policy.max_tokens,
        seed=config.seed,
        model=config.policy.model,
        before_turn=out.raise_if_stopped,
    )
    batches = trl.rollouts(
        policy,
        function,
        samples=config.samples,
        folder=str(out.scratch("trl")),
        seed=config.seed,
        skip=lambda batch: all(out.finished(unit) for unit in units([row["task_id"] for row in batch])),
    )
    planned = units([task.task_id for task in tasks for _ in range(config.samples)])
    for _ in batches:
        _keep(function.latest, function.records(), out)
        out.progress("rollouts", len(out.journal), len(planned))
    written = rollout_units(out.records())
    records = [written[unit] for unit in planned if unit in written]
    where = "" if config.through == "process" else " through an OpenEnv server"
    what = f"TRL's rollout_func on {config.env.name}{where}, {config.policy.model}"
    steps = [step for record in records for step in record["steps"]]
    return Side("002a", what, [record["rollout"] for record in records], steps, len(planned))


def _keep(episodes: "list[Episode]", records: list[RolloutPayload], out: RunWriter) -> None:
    """Write what is not there yet: a batch that was only partly done has been played whole again."""
    keys = units([episode.task.task_id for episode in episodes])
    played = zip(keys, records, episodes, strict=True)
    out.write_all(
        [(key, record, episode.error is not None) for key, record, episode in played if not out.finished(key)]
    )


def units(task_ids: list[str]) -> list[str]:
    """A key for every rollout: its task, and how many of that task came before it."""
    seen = Counter[str]()
    keys = []
    for task_id in task_ids:
        keys.append(f"{task_id}#{seen[task_id]}")
        seen[task_id] += 1
    return keys


def _exported(side: Side, tasks: list[Task], out: RunWriter) -> str:
    """The file with a side's rollouts in the format of verifiers, kept in the run."""
    task_rows = [
        {"task_id": t.task_id, "prompt": t.prompt, "data_json": store.encode(dict(t.data)).decode()} for t in tasks
    ]
    exported = transcripts(side.rollouts, side.steps, task_rows, [])
    for file in formats.exporters_load("verifiers").files(exported, Counter()):
        out.write_export(file.name, file.fill)
    return str(out.path / EXPORTED)


def _imported(path: str, called: str) -> Side:
    """002b: all rollouts that files hold, each once; PRIME-RL writes those of a training batch a second time."""
    sidecars, dropped = Sidecars(), Counter[str]()
    payloads: dict[str, ImportedPayload] = {}
    for source, importer in reading.sort(files.find([path]), "verifiers", sidecars).items():
        for item in reading.read(source, importer, sidecars, FileCount(source.label, "verifiers", source.sha256)):
            if isinstance(item, Drop):
                dropped[item.reason] += 1
            else:
                payloads.setdefault(rows.rollout_id(item), rows.payload(item, 0))
    if not payloads:
        raise BadInput(
            f"{path} holds no rollout of prime-rl or verifiers that could be read ({dict(dropped) or 'empty'})."
        )
    return _side(list(payloads.values()), dropped, called)


def _side(payloads: list[ImportedPayload], dropped: Counter[str], what: str) -> Side:
    rollouts = [payload["rollout"] for payload in payloads]
    steps = [step for payload in payloads for step in payload["steps"]]
    absent = {payload["origin"]["rollout_id"]: payload["origin"]["missing"] for payload in payloads}
    environments = ", ".join(sorted({row["env"] for row in rollouts}))
    return Side("002b", f"{what}: {environments}", rollouts, steps, len(rollouts), absent, dropped)


STAGE = Stage(
    name="substrates",
    version=2,
    config=Config,
    plan=plan,
    run=run,
    limit_setting="tasks",
)
