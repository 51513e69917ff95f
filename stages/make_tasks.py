"""make-tasks: make tasks from a package by deleting features of it, keeping those that can be graded and not looked up.

Reads a folder or sdist, writes `tasks` (each row's data is a row in SWE-bench's shape) and the same rows as
`instances.jsonl`. What to delete is drawn, or a model proposes it. The unit is one candidate, or one question to that
model; a rejected candidate keeps its reason.
"""

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator

from composer_stages.data_files import load_template
from composer_stages.errors import BadInput, Incomplete, UsageError
from composer_stages.layout import counted
from composer_stages.policy import ask_all, available
from composer_stages.policy.base import FINAL, Policy, PolicyConfig, Turn
from composer_stages.policy.serving import Serving
from composer_stages.runs import store
from composer_stages.runs.kinds import TASK
from composer_stages.runs.run import Inputs, RunWriter
from composer_stages.runs.settings import BASIC, StageConfig, basic_of
from composer_stages.runs.stage import Plan, Stage
from composer_stages.words import Sentence

if TYPE_CHECKING:
    from composer_stages.envs.feature_deletion.selection import Proposals, Removal
    from composer_stages.envs.feature_deletion.task_generator import TaskGenerator
    from composer_stages.envs.feature_deletion.worker import Baseline


class Proposer(PolicyConfig):
    """A model that proposes features to delete."""

    max_tokens: int = Field(default=2048, gt=0)
    """Longest answer in tokens; of one that is cut off nothing is used."""


class Config(StageConfig):
    """What to make tasks from, and which."""

    env: Annotated[Literal["feature-deletion"], BASIC] = "feature-deletion"
    package: Annotated[str, BASIC] = ""
    """A folder or sdist with tests."""
    tasks: Annotated[int, BASIC] = Field(default=20, gt=0)
    """Number of accepted tasks."""
    split: Literal["train", "eval", "both"] = "both"
    """Which half of the package's definitions to remove from; the halves share none."""
    kinds: Annotated[tuple[Literal["function", "class", "cluster"], ...], BASIC] = ("function", "class", "cluster")
    """What to remove: single functions, whole classes, clusters of functions that call each other."""
    difficulty: Annotated[Literal["easy", "medium", "hard", "mixed"], BASIC] = "mixed"
    """easy keeps signatures and docstrings, medium only signatures, hard neither."""
    scope: Literal["full", "covering"] = "full"
    """Which tests say what still passes: all of them, or, much faster, those that execute a removed line."""
    requirements: tuple[str, ...] = ()
    """What the package's tests import in addition to it, installed as wheels."""
    sandbox: str = "bubblewrap"
    """`none` runs the package's code unprotected on this machine."""
    proposer: Annotated[Proposer | None, basic_of("base_url", "model")] = None
    """A model that is asked for features and the symbols that carry them; without one `kinds` says what is drawn."""
    questions: int = Field(default=20, gt=0)
    """At most so many questions to the proposer, each for up to four features; no more than the tasks need."""

    time_limit_s: float = Field(default=1800.0, gt=0, json_schema_extra={"affects_results": False})
    """Wall time of one attempt; what is found by then is saved, and resuming goes on."""

    @field_validator("env", mode="before")
    @classmethod
    def _makes_tasks(cls, env: Any) -> Any:
        if env != "feature-deletion":
            raise ValueError(Sentence("no-task-maker", env=env))
        return env

    def identity(self) -> dict[str, Any]:
        """Return the settings; those of a proposer count where there is one."""
        settings = super().identity()
        return (
            settings
            if self.proposer
            else {name: settings[name] for name in settings if name not in ("proposer", "questions")}
        )

    def label(self) -> str:
        """Return the package's name."""
        return Path(self.package).name.removesuffix(".tar.gz") or "package"


def plan(inputs: Inputs, config: Config) -> Plan:
    """Return the number of tasks to make, and the largest cost of a proposer's answers."""
    del inputs
    _check_package(config)
    notes = (f"made from {config.package}, every one by running its tests",)
    if config.proposer is None:
        return Plan(units=config.tasks, what="tasks", notes=notes)
    tokens = config.questions * available.longest_answer(config.proposer)
    proposals = f"features proposed by {config.proposer.model}, in at most {config.questions} answers"
    return Plan(config.tasks, "tasks", tokens, config.proposer.cost(0, tokens), (*notes, proposals))


def _check_package(config: Config) -> None:
    if not config.package.strip():
        raise UsageError("package-not-named")
    if not Path(config.package).expanduser().exists():
        raise BadInput("package-missing", package=config.package)


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Try candidates in order until enough are accepted: no more at once than are lacking, by workers too."""
    del inputs
    _check_package(config)
    started, search = time.monotonic(), Search()
    with _generator(config, out) as generator, Serving(out, [config.proposer] if config.proposer else []) as serving:
        out.set_summary(package=generator.package.label, package_sha256=generator.package.sha256)
        try:
            search.asking = _proposer(generator, config, serving, out)
            _search(search, generator, config, out)
            search.notes = _report_tests(generator)
        except TimeIsOver:
            search.is_over = True
            reason = Sentence(
                "time-limit-over",
                limit_s=config.time_limit_s,
                seconds=time.monotonic() - started,
                all_tests_s=generator.duration_s,
                covering=config.scope == "covering",
            )
            search.notes = ["", reason]
    _finish(search, config, out)


class FeatureProposer:
    """Questions to a model about which features of a package to delete, at most `questions` of them.

    Every answer is a unit of the run, so that it is paid for once however often the run is resumed.

    `more` raises `Incomplete` where the model fails in a way that another attempt may not.
    """

    def __init__(
        self, proposals: "Proposals", config: PolicyConfig, questions: int, seed: int, serving: Serving, out: RunWriter
    ) -> None:
        self.proposals, self.questions, self.asked = proposals, questions, 0
        self._config, self._seed, self._serving, self._out = config, seed, serving, out
        self._policy: Policy | None = None

    @property
    def over(self) -> bool:
        """Return whether no question is left."""
        return self.asked >= self.questions or not self.proposals.question()

    def more(self) -> "list[Removal]":
        """Ask until a new removal is proposed or no question is left; return all removals so far."""
        num_before = len(self.proposals.removals)
        while not self.over and len(self.proposals.removals) == num_before:
            self._out.raise_if_stopped()
            self.proposals.take(self._answer())
            self.asked += 1
        return self.proposals.removals

    def report(self, reasons: Counter[str]) -> list[str]:
        """Return the result of the questions as lines of a report."""
        features = counted(len(self.proposals.removals), "feature")
        lines = [
            "",
            f"{counted(self.asked, 'question')} to {self._config.model}: {features} to try, {reasons.total()} refused",
        ]
        return lines + [f"{number:>6}  {reason}" for reason, number in reasons.most_common()]

    def _answer(self) -> str:
        """Return the text of the next answer; empty for an error that asking again would not change."""
        unit = f"question-{self.asked:04d}"
        if not self._out.finished(unit):
            self._out.progress("questions about features", self.asked, self.questions)
            # The seed depends on the question's number, so that a resumed run would ask the same.
            seed = int(store.digest([self._seed, unit])[:15], 16)
            # Opened with the first question: a resumed run whose answers are all there needs no server.
            if self._policy is None:
                self._policy = self._serving.open(self._config)
                self._out.model("proposer", **self._policy.facts())
            sample = ask_all(self._policy, [Turn(self.proposals.question(), seed)])[0]
            is_failed = sample.error_type not in FINAL
            answer = {
                "text": sample.text,
                "finish_reason": sample.finish_reason,
                "prompt_tokens": sample.prompt_tokens,
                "completion_tokens": sample.completion_tokens,
                "cost_usd": sample.cost_usd,
                "error_type": sample.error_type,
                "error": sample.error,
            }
            self._out.write(unit, {"answer": answer}, failed=is_failed)
            if is_failed:
                raise Incomplete("proposer-failed", model=self._config.model, error=sample.error)
        record = self._out.journal.get(unit)
        return str(record["answer"]["text"]) if record else ""


@dataclass
class Search:
    """The search for tasks: the candidates in order, the proposer's questions if any, and lines for the report.

    is_over: whether the time limit ended it.
    """

    candidates: list["Removal"] = field(default_factory=list)
    asking: FeatureProposer | None = None
    notes: list[str] = field(default_factory=list)
    is_over: bool = False


def _search(search: Search, generator: "TaskGenerator", config: Config, out: RunWriter) -> None:
    """Try candidates until there are enough tasks, or no more candidates."""
    from composer_stages.envs.feature_deletion.task_generator import parse_difficulties

    out.progress("first runs of all tests", 0, 2)
    half, asking = None if config.split == "both" else config.split, search.asking
    drawn = (config.seed, half, config.kinds, parse_difficulties(config.difficulty))
    search.candidates = asking.more() if asking else generator.candidates(*drawn)
    while (num_missing := config.tasks - sum(record.get("row") is not None for record in out.journal.records())) > 0:
        out.raise_if_stopped()
        candidates = search.candidates
        if not (untried := [candidate for candidate in candidates if not out.finished(candidate.identity)]):
            if asking is None or asking.over:
                return
            search.candidates = asking.more()
            continue
        message = f"tasks, {len(candidates) - len(untried)} of {len(candidates)} candidates tried"
        out.progress(message, config.tasks - num_missing, config.tasks)
        batch = untried[:num_missing]
        out.spread([[candidate.identity] for candidate in batch], "candidates", (generator.baseline, candidates))
        # One batch only: what it accepts decides how many candidates are still lacking.
        _try(batch, generator, config, out)


def work(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Try a worker's candidates, which the run has found and whose unmodified tests it has run."""
    del inputs
    baseline, candidates = out.shared_value
    with _generator(config, out, baseline) as generator, suppress(TimeIsOver):
        while _try(candidates, generator, config, out):
            pass


def _generator(config: Config, out: RunWriter, baseline: "Baseline | None" = None) -> "TaskGenerator":
    """Return a generator whose tests end within a second of a stop request or of the end of the time."""
    from composer_stages.envs.feature_deletion.task_generator import (
        TaskGenerator,
        installed_requirements,
        unpacked_package,
    )

    package, requirements = unpacked_package(Path(config.package)), installed_requirements(config.requirements)
    deadline = time.monotonic() + config.time_limit_s

    def check() -> None:
        out.raise_if_stopped()
        if time.monotonic() > deadline:
            raise TimeIsOver

    def tell(step: str) -> None:
        out.progress(step, 0, 0)

    return TaskGenerator(package, config.sandbox, requirements, baseline, check=check, tell=tell)


class TimeIsOver(Exception):
    """The attempt's time limit has passed."""


def _proposer(generator: "TaskGenerator", config: Config, serving: Serving, out: RunWriter) -> FeatureProposer | None:
    """Return the proposer of features; None where none is configured."""
    from composer_stages.envs.feature_deletion.selection import Proposals
    from composer_stages.envs.feature_deletion.task_generator import parse_difficulties

    if config.proposer is None:
        return None
    split, difficulties = None if config.split == "both" else config.split, parse_difficulties(config.difficulty)
    package, texts, lines = generator.package.label, generator.texts, generator.baseline.lines
    proposals = Proposals(package, texts, lines, seed=config.seed, split=split, difficulties=difficulties)
    return FeatureProposer(proposals, config.proposer, config.questions, config.seed, serving, out)


def _try(candidates: "Sequence[Removal]", generator: "TaskGenerator", config: Config, out: RunWriter) -> bool:
    """Make tasks of the next batch of untried candidates, each result a unit; return whether there was one."""
    from composer_stages.envs.feature_deletion.task_generator import with_source

    batch = [candidate for candidate in candidates if not out.finished(candidate.identity)][: generator.batch]
    if batch:
        out.raise_if_stopped()
        for result in generator.make(batch, config.scope):
            row = result.row and with_source(result.row, config.package, config.requirements)
            out.write(result.removal.identity, {"row": row, "reason": result.reason, "removed": result.removal.names})
    return bool(batch)


def _finish(search: Search, config: Config, out: RunWriter) -> None:
    """Write the tables in the order of the candidates, and the report; raise `Incomplete` without a task."""
    order, asking = [candidate.identity for candidate in search.candidates], search.asking
    records = [record for unit in order if (record := out.journal.get(unit))]
    # Workers may accept more than were lacking; which are kept does not depend on who was first.
    rows = [record["row"] for record in records if record["row"]][: config.tasks]
    tasks = [
        {
            "task_id": row["instance_id"],
            "env": "feature-deletion",
            "split": row["split"],
            "family": row["family"],
            "prompt": row["problem_statement"],
            "data_json": store.encode(row).decode(),
        }
        for row in rows
    ]
    out.table(TASK, tasks)
    out.write_file("instances.jsonl", b"".join(store.encode(row) + b"\n" for row in rows))
    # A reason is a class and, after the colon, what differs between candidates.
    reasons = Counter(record["reason"].partition(":")[0] for record in records if record["reason"])
    out.count(planned=config.tasks, done=len(rows), tried=len(records))
    out.count(**{f"rejected, {reason}": number for reason, number in sorted(reasons.items())})
    out.set_summary(tasks=len(rows))
    refusals = Counter(reason.partition(":")[0] for reason in (asking.proposals.refused if asking else ()))
    out.count(**{f"refused, {reason}": number for reason, number in sorted(refusals.items())})
    proposer_lines = asking.report(refusals) if asking else []
    beyond = sum(record["row"] is not None for record in records) - len(rows)
    report = load_template(__package__, "make_tasks_report.jinja").render(
        rows=rows,
        num_tried=len(records),
        beyond=beyond,
        reasons=reasons,
        proposer_lines=proposer_lines,
        hanging=Counter(test for row in rows for test in row["set_aside"]),
        notes=search.notes,
        counted=counted,
    )
    out.write_file("report.txt", report)
    if search.is_over:
        raise Incomplete(
            "task-time-over", num_tasks=len(rows), target=config.tasks, num_tried=len(records), reason=search.notes[-1]
        )
    if not order and asking:
        raise Incomplete("no-feature-to-try", reasons=dict(refusals))
    if not order:
        raise Incomplete("no-candidates")
    if not rows:
        raise Incomplete("all-candidates-rejected", num_tried=len(records), reasons=dict(reasons))


def _report_tests(generator: "TaskGenerator") -> list[str]:
    """Return lines on hanging tests and uncollectable files of the unmodified package, with a hint on modules."""
    from composer_stages.envs.feature_deletion.package import import_hint
    from composer_stages.envs.feature_deletion.worker import missing_modules

    broken, hanging = generator.baseline.broken, sorted(generator.baseline.hanging)
    lines = ["", f"{len(hanging)} tests did not end and play no part: {', '.join(hanging)}"] if hanging else []
    if broken:
        lines += ["", f"{len(broken)} test files could not be collected, so their tests play no part"]
        lines += [f"        {path}: {reason}" for path, reason in sorted(broken.items())]
        if absent := missing_modules(broken.values()):
            lines.append(import_hint(absent, generator.package.root))
    return lines


STAGE = Stage(
    name="tasks",
    version=1,
    example="""\
>>> composer.tasks.plan(package="toolz-1.2.0", tasks=5).what
'tasks'""",
    config=Config,
    outputs={"tasks": TASK},
    plan=plan,
    run=run,
    work=work,
    limit_setting="tasks",
)
