"""make-tasks: make tasks from a package by deleting features of it, keeping those that can be graded and not looked up.

Reads a folder or sdist, writes `tasks` (each row's data is a row in SWE-bench's shape) and the same rows as
`instances.jsonl`. What to delete is drawn, or a model proposes it. The unit is one candidate, or one question to that
model; a rejected candidate keeps its reason.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from stages.errors import Incomplete, UsageError
from stages.policy import PolicyConfig
from stages.policy.serving import Serving
from stages.runs import store
from stages.runs.artifact import Inputs, RunWriter
from stages.runs.config import StageConfig
from stages.runs.records import TASK, Row
from stages.runs.stage import Plan, Stage

if TYPE_CHECKING:
    from stages.envs.feature_deletion.selection import Removal
    from stages.envs.feature_deletion.task_generator import TaskGenerator
    from stages.envs.feature_deletion.worker import Baseline
    from stages.teachers.proposing import FeatureProposer


class Proposer(PolicyConfig):
    """A model that proposes features to delete."""

    max_tokens: int = Field(2048, gt=0)
    """Longest answer in tokens; of one that is cut off nothing is used."""


class Config(StageConfig):
    """What to make tasks from, and which."""

    env: Literal["feature-deletion"] = "feature-deletion"
    package: str = ""
    """A folder or sdist with tests."""
    tasks: int = Field(20, gt=0)
    """Number of accepted tasks."""
    split: Literal["train", "eval", "both"] = "both"
    """Which half of the package's definitions to remove from; the halves share none."""
    kinds: tuple[Literal["function", "class", "cluster"], ...] = ("function", "class", "cluster")
    """What to remove: single functions, whole classes, clusters of functions that call each other."""
    difficulty: Literal["easy", "medium", "hard", "mixed"] = "mixed"
    """easy keeps signatures and docstrings, medium only signatures, hard neither."""
    scope: Literal["full", "covering"] = "full"
    """Which tests say what still passes: all of them, or, much faster, those that execute a removed line."""
    requirements: tuple[str, ...] = ()
    """What the package's tests import beside it, installed as wheels."""
    sandbox: str = "bubblewrap"
    """`none` runs the package's code unprotected on this machine."""
    proposer: Proposer | None = None
    """A model that is asked for features and the symbols that carry them; without one `kinds` says what is drawn."""
    questions: int = Field(20, gt=0)
    """At most so many questions to the proposer, each for up to four features; no more than the tasks need."""

    def identity(self) -> dict[str, Any]:
        """The settings; what is asked of a proposer counts where there is one."""
        own = super().identity()
        return own if self.proposer else {name: own[name] for name in own if name not in ("proposer", "questions")}

    def label(self) -> str:
        """The package's name."""
        return Path(self.package).name.removesuffix(".tar.gz") or "package"


def plan(inputs: Inputs, config: Config) -> Plan:
    """The tasks to make."""
    del inputs
    _check_package(config)
    notes = (f"made from {config.package}, every one by running its tests",)
    if config.proposer is None:
        return Plan(units=config.tasks, what="tasks", notes=notes)
    tokens = config.questions * config.proposer.longest_answer()
    asked = f"features proposed by {config.proposer.model}, in at most {config.questions} answers"
    return Plan(config.tasks, "tasks", tokens, config.proposer.cost(0, tokens), (*notes, asked))


def _check_package(config: Config) -> None:
    if not config.package.strip():
        raise UsageError(
            "From which package? Give a folder or sdist with tests: `composer tasks feature-deletion PACKAGE`."
        )
    if not Path(config.package).expanduser().exists():
        raise UsageError(f"There is no package {config.package!r}. Give a folder or sdist with tests.")


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Try candidates in order until enough are accepted: no more at once than are lacking, whoever tries them."""
    del inputs
    _check_package(config)
    with _generator(config) as generator, Serving(out, [config.proposer] if config.proposer else []) as serving:
        out.set_summary(package=generator.package.label, package_sha256=generator.package.sha256)
        out.progress("first runs of all tests", 0, 2)
        asking = _proposing(generator, config, serving, out)
        candidates = asking.more() if asking else _drawn(generator, config)
        while (lacking := config.tasks - sum(record.get("row") is not None for record in out.journal.records())) > 0:
            out.raise_if_stopped()
            if not (waiting := _waiting(candidates, out)):
                if asking is None or asking.over:
                    break
                candidates = asking.more()
                continue
            tried = f"tasks, {len(candidates) - len(waiting)} of {len(candidates)} candidates tried"
            out.progress(tried, config.tasks - lacking, config.tasks)
            chosen = waiting[:lacking]
            out.spread([[candidate.identity] for candidate in chosen], "candidates", (generator.baseline, candidates))
            _try(_waiting(chosen, out)[: generator.batch], generator, config, out)
        notes = _about_tests(generator)
    _finish([candidate.identity for candidate in candidates], asking, notes, config, out)


def work(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Try a worker's candidates; what they are and how the tests behave before, the run has found out."""
    del inputs
    baseline, candidates = out.found
    with _generator(config, baseline) as generator:
        while waiting := _waiting(candidates, out)[: generator.batch]:
            out.raise_if_stopped()
            _try(waiting, generator, config, out)


def _generator(config: Config, baseline: "Baseline | None" = None) -> "TaskGenerator":
    from stages.envs.feature_deletion.task_generator import TaskGenerator, installed_requirements, unpacked_package

    package, requirements = unpacked_package(Path(config.package)), installed_requirements(config.requirements)
    return TaskGenerator(package, config.sandbox, requirements, baseline)


def _proposing(
    generator: "TaskGenerator", config: Config, serving: Serving, out: RunWriter
) -> "FeatureProposer | None":
    """Return the questions to the model that proposes features; None without a proposer."""
    from stages.envs.feature_deletion.selection import Proposals
    from stages.envs.feature_deletion.task_generator import parse_difficulties
    from stages.teachers.proposing import FeatureProposer

    if config.proposer is None:
        return None
    split, difficulties = None if config.split == "both" else config.split, parse_difficulties(config.difficulty)
    package, texts, lines = generator.package.label, generator.texts, generator.baseline.lines
    proposals = Proposals(package, texts, lines, seed=config.seed, split=split, difficulties=difficulties)
    return FeatureProposer(proposals, config.proposer, config.questions, config.seed, serving, out)


def _drawn(generator: "TaskGenerator", config: Config) -> "list[Removal]":
    """Return the candidates in the order that the seed draws."""
    from stages.envs.feature_deletion.task_generator import parse_difficulties

    split = None if config.split == "both" else config.split
    return generator.candidates(config.seed, split, config.kinds, parse_difficulties(config.difficulty))


def _waiting(candidates: "Sequence[Removal]", out: RunWriter) -> "list[Removal]":
    return [candidate for candidate in candidates if not out.finished(candidate.identity)]


def _try(batch: "Sequence[Removal]", generator: "TaskGenerator", config: Config, out: RunWriter) -> None:
    """Make tasks of a batch, and write each result as a unit."""
    from stages.envs.feature_deletion.task_generator import with_source

    for tried in generator.make(batch, config.scope):
        row = tried.row and with_source(tried.row, config.package, config.requirements)
        out.write(tried.removal.identity, {"row": row, "reason": tried.reason, "removed": tried.removal.names})


def _finish(
    order: Sequence[str], asking: "FeatureProposer | None", notes: Sequence[str], config: Config, out: RunWriter
) -> None:
    """Tables in the order of the candidates, and what became of each."""
    tried = [record for unit in order if (record := out.journal.get(unit))]
    rows = [record["row"] for record in tried if record["row"]][: config.tasks]
    out.table(TASK, [_task_row(row) for row in rows])
    out.write_file("instances.jsonl", "".join(store.encode(row).decode() + "\n" for row in rows))
    reasons = Counter(record["reason"].partition(":")[0] for record in tried if record["reason"])
    out.count(planned=config.tasks, done=len(rows), tried=len(tried))
    out.count(**{f"rejected, {reason}": number for reason, number in sorted(reasons.items())})
    out.set_summary(tasks=len(rows))
    refused = asking.refused if asking else Counter[str]()
    out.count(**{f"refused, {reason}": number for reason, number in sorted(refused.items())})
    named = asking.report(refused) if asking else []
    beyond = sum(record["row"] is not None for record in tried) - len(rows)
    out.write_file("report.txt", _report(len(rows), len(tried), beyond, reasons, [*named, *_hanging(rows), *notes]))
    if not order and asking:
        raise Incomplete(
            f"None of the proposer's features can be tried: {dict(refused)}. Read its answers in the run's units; ask "
            "another model, or more questions."
        )
    if not order:
        raise Incomplete(
            "The package has no function or class that its tests execute and that is long enough to be a task. Choose "
            "another package or other kinds."
        )
    if not rows:
        raise Incomplete(
            f"None of {len(tried)} candidates became a task: {dict(reasons)}. Choose another package or other kinds."
        )


def _report(num_rows: int, num_tried: int, beyond: int, reasons: Counter[str], notes: Sequence[str]) -> str:
    """What was made, why candidates were rejected, and which tests were no help."""
    more = f", {beyond} more accepted than asked for" if beyond else ""
    lines = [f"{num_rows} tasks; {num_tried} candidates were tried, {sum(reasons.values())} of them rejected{more}"]
    lines += [f"{number:>6}  {reason}" for reason, number in reasons.most_common()]
    return "\n".join([*lines, *notes]) + "\n"


def _hanging(rows: Sequence[Row]) -> list[str]:
    """The tests that hang without the code of some task, which leaves them out."""
    tests = Counter(test for row in rows for test in row["set_aside"])
    title = ["", f"{len(tests)} tests hang where code was removed and are set aside in those tasks"] if tests else []
    return title + [f"{number:>6}  {test}" for test, number in tests.most_common()]


def _about_tests(generator: "TaskGenerator") -> list[str]:
    """Return lines on hanging tests and uncollectable files of the unmodified package, with a hint on modules."""
    from stages.envs.feature_deletion.package import import_hint
    from stages.envs.feature_deletion.worker import missing_modules

    broken, hanging = generator.baseline.broken, sorted(generator.baseline.hanging)
    lines = ["", f"{len(hanging)} tests did not end and play no part: {', '.join(hanging)}"] if hanging else []
    if broken:
        lines += ["", f"{len(broken)} test files could not be collected, so their tests play no part"]
        lines += [f"        {path}: {reason}" for path, reason in sorted(broken.items())]
        if absent := missing_modules(broken.values()):
            lines.append(import_hint(absent, generator.package.root))
    return lines


def _task_row(row: Row) -> Row:
    """One `task/1` row."""
    return {
        "task_id": row["instance_id"],
        "env": "feature-deletion",
        "split": row["split"],
        "family": row["family"],
        "prompt": row["problem_statement"],
        "data_json": store.encode(row).decode(),
    }


STAGE = Stage(
    name="tasks",
    version=2,
    config=Config,
    outputs={"tasks": TASK},
    plan=plan,
    run=run,
    work=work,
    limit_setting="tasks",
)
