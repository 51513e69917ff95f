"""What `frameworks` does: its plan, its run, and the two sides that it compares."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from composer_stages.data_files import load_template
from composer_stages.envs.base import Environment, Task
from composer_stages.errors import BadInput
from composer_stages.formats import files, reading, repeats, rows, writer
from composer_stages.formats.base import Drop
from composer_stages.formats.reading import FileCount
from composer_stages.formats.reports import Sidecars
from composer_stages.formats.rows import ImportedPayload
from composer_stages.formats.transcripts import transcripts_of_rows
from composer_stages.integrations.config import Config
from composer_stages.layout import aligned
from composer_stages.policy import available
from composer_stages.rollouts import collection_checks, missing
from composer_stages.rollouts.collection_checks import CollectionCheck
from composer_stages.rollouts.missing import Fact
from composer_stages.rollouts.trace import rollout_units
from composer_stages.runs import store
from composer_stages.runs.kinds import Row
from composer_stages.runs.run import Inputs, RunWriter
from composer_stages.runs.stage import Plan
from composer_stages.words import Sentence

EXPORTED = "traces.jsonl"
ENOUGH = 100
"""Rollouts that a collection needs to be judged."""
MAY_BE_NULL = {
    *("parse_error", "terminated_by", "error_type", "error", "commands"),
    *("ground", "hidden_pass", "visible_pass", "hacked"),
}
"""Columns that are not counted, as null is an answer there: no error, not ended, no command, not judged."""


def plan(inputs: Inputs, config: Config) -> Plan:
    """Count the rollouts that TRL plays."""
    del inputs
    number = config.tasks * config.samples
    return Plan(
        units=number,
        what="rollouts",
        max_completion_tokens=number * config.max_steps * available.longest_answer(config.policy),
    )


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Collect one side, read the other, and write `comparison.json` and the table in `report.txt`."""
    del inputs
    make = config.opener()
    tasks = config.draw(make, config.tasks)
    imported = _imported(config.traces, config.traces) if config.traces else None  # a file of no use is refused first
    with _environments(make, tasks, config, out) as environment:
        collected = _collected(environment, tasks, config, out)
    sides = collected, imported or _imported(_exported(collected, tasks, out), "these rollouts as a verifiers file")
    best = cleaner(*sides) if imported else None
    out.document("comparison", {"cleaner": best, "sides": [side.document() for side in sides]})
    out.write_file(
        "report.txt", table(*sides) if imported else table(*sides, Sentence("integrations.traces-not-given"))
    )
    failed = sum(row["error_type"] is not None for row in collected.rollouts)
    out.count(
        planned=collected.planned, done=len(collected.rollouts) - failed, failed=failed, read=len(sides[1].rollouts)
    )
    fails: dict[str, Any] = {f"fails_{side.name}": side.verdicts("FAIL") for side in sides}
    out.set_summary(cleaner=best, **fails)


# The two sides, and which is cleaner


OF_CHECK = {"name": "name", "verdict": "verdict", "failed": "failed", "of": "total", "not_recorded": "unrecorded"}
"""Keys of a check in the document, and its attributes."""


@dataclass(frozen=True)
class Side:
    """One framework's rollouts.

    `dropped`: records that could not be read, by reason. `absent`: unrecorded facts by rollout.
    """

    name: str
    description: str
    rollouts: Sequence[Row]
    steps: Sequence[Row]
    planned: int
    absent: Mapping[str, Collection[Fact]] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def checks(self) -> list[CollectionCheck]:
        """Return the collection checks, then the checks of the data that training needs."""
        rounded = [missing.EXACT_LOGPROBS in self.absent.get(row["rollout_id"], ()) for row in self.steps]
        unusable = sum(row["logprobs"] is None or cut for row, cut in zip(self.steps, rounded, strict=True))
        lost, total = sum(self.dropped.values()), len(self.steps)
        return [
            *collection_checks.check(list(self.rollouts), list(self.steps), self.planned, self.absent),
            CollectionCheck(f"{ENOUGH} rollouts or more", max(ENOUGH - len(self.rollouts), 0), ENOUGH),
            CollectionCheck("records readable", lost, len(self.rollouts) + lost),
            CollectionCheck("token ids captured", total - self.levels["tokens"], total),
            CollectionCheck("log-probs beyond 4 decimals", unusable, total),
        ]

    @property
    def levels(self) -> Counter[str]:
        """Return the number of steps by capture level: tokens, logprobs, text."""
        return Counter(row["capture_level"] for row in self.steps)

    @property
    def nulls(self) -> dict[str, int]:
        """Return the number of nulls by column of steps and rollouts, except in columns of `MAY_BE_NULL`."""
        counts = Counter(f"step.{name}" for row in self.steps for name, value in row.items() if value is None)
        counts += Counter(f"rollout.{name}" for row in self.rollouts for name, value in row.items() if value is None)
        return {name: n for name, n in sorted(counts.items()) if name.partition(".")[2] not in MAY_BE_NULL}

    @property
    def not_recorded(self) -> dict[Fact, int]:
        """Return the facts that the source does not record, with the number of rollouts that lack each."""
        return dict(sorted(Counter(fact for facts in self.absent.values() for fact in facts).items()))

    def verdicts(self, verdict: str) -> list[str]:
        """Return the names of the criteria with this verdict: ok, FAIL or not recorded."""
        return [check.name for check in self.checks if check.verdict == verdict]

    @property
    def standing(self) -> tuple[int, int]:
        """Return the numbers of failed criteria and of criteria that the source does not record: less is cleaner."""
        return len(self.verdicts("FAIL")), len(self.verdicts("not recorded"))

    def document(self) -> Row:
        """Return the side as JSON."""
        return {
            "name": self.name,
            "what": self.description,
            "rollouts": len(self.rollouts),
            "steps": len(self.steps),
            "planned": self.planned,
            "checks": [
                {name: getattr(check, attribute) for name, attribute in OF_CHECK.items()} for check in self.checks
            ],
            "capture_levels": dict(sorted(self.levels.items())),
            "nulls": self.nulls,
            "source_cannot_tell": self.not_recorded,
            "dropped": dict(self.dropped),
        }


def cleaner(first: Side, second: Side) -> str | None:
    """Return the name of the side whose rollouts are cleaner; None when they are equally clean."""
    if first.standing == second.standing:
        return None
    return min(first, second, key=lambda side: side.standing).name


def table(first: Side, second: Side, note: str = "") -> str:
    """Return the verdict as plain text. note: why the sides are not judged; empty if they are."""
    cells: list[tuple[object, ...]] = [
        ("", first.name, second.name),
        ("rollouts", len(first.rollouts), len(second.rollouts)),
        ("steps", len(first.steps), len(second.steps)),
        (),
        *((a.name, _outcome(a), _outcome(b)) for a, b in zip(first.checks, second.checks, strict=True)),
    ]
    sections: dict[str, list[Mapping[str, int]]] = {
        "steps by capture level": [first.levels, second.levels],
        "nulls by column": [first.nulls, second.nulls],
        "rollouts whose source cannot tell": [first.not_recorded, second.not_recorded],
        "records that could not be read": [first.dropped, second.dropped],
    }
    for title, counts in sections.items():
        names = sorted({name for side in counts for name in side})
        cells += [(), (f"{title}:",), *((name, *(side.get(name, 0) for side in counts)) for name in names)]
        cells += [] if names else [("none",)]
    conclusion = Sentence("integrations.cleaner-side", name=cleaner(first, second), judged=not note)
    text = aligned([(*row, *[""] * (3 - len(row))) for row in cells])
    page = load_template(__package__, "frameworks_report.jinja")
    return page.render(sides=(first, second), note=note, table=text, conclusion=conclusion)


def _outcome(check: CollectionCheck) -> str:
    if check.verdict == "not recorded":
        return "- not recorded"
    also = f" (+{check.unrecorded} not recorded)" if check.unrecorded else ""
    return f"{check.verdict} {check.total - check.failed} of {check.total}{also}"


# Rollouts of both


@contextmanager
def _environments(
    make: Callable[[], Environment], tasks: list[Task], config: Config, out: RunWriter
) -> Iterator[Callable[[], Environment]]:
    """Yield a function that makes the environments of `trl`; a server of them ends with the block."""
    if config.through == "process":
        yield make
        return
    from composer_stages.integrations import openenv_client

    first = make()
    name, sandbox = first.name, first.sandbox
    first.close()
    options = config.env_options()
    sessions = config.samples * len(tasks) + 1  # all rollouts of a batch at once, and the openings
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
    """Return the side `trl`: rollouts of the journal, and new ones, played in TRL's batches."""
    from composer_stages.integrations import trl
    from composer_stages.integrations.trl import RolloutFunction
    from composer_stages.policy.local import LocalPolicy

    policy = LocalPolicy.open(config.policy, cache=out.cache, listener=out.progress)
    out.model("policy", **policy.facts())
    function = RolloutFunction(
        make,
        tasks,
        max_steps=config.max_steps,
        max_tokens=config.policy.max_tokens or available.longest_answer(config.policy),
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
        # Write the rollouts that are new: a batch that was only partly done has been played again from its start.
        keys = units([rollout.task.task_id for rollout in function.latest])
        new_rollouts = zip(keys, function.records(), function.latest, strict=True)
        out.write_all(
            [(key, record, rollout.error is not None) for key, record, rollout in new_rollouts if not out.finished(key)]
        )
        out.progress("rollouts", len(out.journal), len(planned))
    written = rollout_units(out.journal.records())
    records = [written[unit] for unit in planned if unit in written]
    where = "" if config.through == "process" else " through an OpenEnv server"
    description = f"TRL's rollout_func on {config.env.name}{where}, {config.policy.model}"
    steps = [step for record in records for step in record["steps"]]
    return Side("trl", description, [record["rollout"] for record in records], steps, len(planned))


def units(task_ids: list[str]) -> list[str]:
    """Return the key of each rollout: its task id and its index among the rollouts of that task."""
    seen = Counter[str]()
    keys = []
    for task_id in task_ids:
        keys.append(f"{task_id}#{seen[task_id]}")
        seen[task_id] += 1
    return keys


def _exported(side: Side, tasks: list[Task], out: RunWriter) -> str:
    """Write a side's rollouts in the format of verifiers into the run; return the file."""
    task_rows = [
        {"task_id": t.task_id, "prompt": t.prompt, "data_json": store.encode(dict(t.data)).decode()} for t in tasks
    ]
    exported = transcripts_of_rows(side.rollouts, side.steps, task_rows)
    for file in writer("verifiers").files(exported, Counter()):
        out.write_export(file.name, file.fill)
    return str(out.path / EXPORTED)


def _imported(path: str, called: str) -> Side:
    """Return the side `other`: each rollout of the files once, though PRIME-RL writes training rollouts twice."""
    sidecars, dropped = Sidecars(), Counter[str]()
    payloads: dict[str, ImportedPayload] = {}
    for source, importer in reading.detect_formats(files.find([path]), "verifiers", sidecars).items():
        for item in reading.read(source, importer, sidecars, FileCount(source.label, "verifiers", source.sha256)):
            if isinstance(item, Drop):
                dropped[item.reason] += 1
            else:
                payloads.setdefault(repeats.rollout_id(item), rows.payload(item, 0))
    if not payloads:
        raise BadInput("integrations.no-rollout-to-compare", path=path, dropped=dict(dropped))
    imported = list(payloads.values())
    rollouts = [payload["rollout"] for payload in imported]
    steps = [step for payload in imported for step in payload["steps"]]
    absent = {payload["origin"]["rollout_id"]: payload["origin"]["missing"] for payload in imported}
    environments = ", ".join(sorted({row["env"] for row in rollouts}))
    return Side("other", f"{called}: {environments}", rollouts, steps, len(rollouts), absent, dropped)
