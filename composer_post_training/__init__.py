"""Composer from Python: read what its stages wrote, and run them.

    import composer_post_training as composer

    composer.runs()                         # all runs below ./artifacts, as a table
    run = composer.find("collect")          # a run by its name, its folder, or its stage for the latest
    for rollout in run.rollouts():
        print(rollout.task_id, rollout.reward, rollout.messages)
    run.scan("steps").pandas()              # any table; .arrow() and .duckdb() too
    composer.find("evaluate").differences   # effects with their intervals and p-values
    composer.query("select avg(reward) from rollouts")

    rollouts = composer.collect(policy={"model": "Qwen/Qwen3-8B"}, tasks=2)   # runs a stage, or finds it done
    composer.collect.plan(tasks=100)        # what it would do and cost at most
    composer.collect.settings()             # every setting with its default; help(composer.collect) explains them
    composer.run("demo")                    # runs a preset, or a TOML file of your own

Stages: collect, replay_teachers, extract_pairs, train, evaluate; import_traces, export, tasks, curriculum, normalize,
substrates; those of the gradient probe are functions of `probe`. Errors are `UsageError`, `BadInput` and `Incomplete`,
each a `ComposerError`. The page docs/python.md has an executed example of everything.

The modules of this package:

examples.py        - a call of each stage, for help and the reference
jobs.py            - a submitted chain: its state, log and end
phrasing.py        - messages of the command line in the words of Python
results.py         - a run and a chain with what they hold as Python objects
rollouts.py        - one rollout as an object that shows itself as a conversation
signatures.py      - the types of the stages' arguments, generated for editors
stage_functions.py - a stage as a function: its arguments, signature and help
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from composer_cli import launch, settings
from composer_cli.show import runs as run_folders
from composer_post_training.examples import EXAMPLES
from composer_post_training.jobs import Job
from composer_post_training.phrasing import errors_in_python, function_name, in_python
from composer_post_training.results import Chain, Difference, Differences, Evaluation, ReadableRun, opened
from composer_post_training.rollouts import Rollout
from composer_post_training.stage_functions import (
    ARTIFACTS,
    PythonConsole,
    StageFunction,
    check_arguments,
    checked_settings,
    paths,
    paths_of_runs,
)
from stages import STAGES
from stages.errors import BadInput, ComposerError, Incomplete, InfrastructureError, UsageError
from stages.layout import age
from stages.runs.display import Table
from stages.runs.run import Run
from stages.runs.stage import Plan
from stages.runs.tables import Scan

if TYPE_CHECKING:
    from composer_post_training import signatures

__all__ = [
    "BadInput",
    "Chain",
    "ComposerError",
    "Difference",
    "Differences",
    "Evaluation",
    "Incomplete",
    "InfrastructureError",
    "Job",
    "Plan",
    "ReadableRun",
    "Rollout",
    "Scan",
    "Table",
    "UsageError",
    "collect",
    "curriculum",
    "evaluate",
    "export",
    "extract_pairs",
    "find",
    "import_traces",
    "job",
    "normalize",
    "probe",
    "query",
    "replay_teachers",
    "report",
    "run",
    "runs",
    "substrates",
    "tasks",
    "train",
    "view",
]


def __dir__() -> list[str]:
    """Return the names of the interface alone, for `dir()` and completion."""
    return __all__


# Their types name every setting for editors and type checkers; `signatures.py` is generated from the settings.
collect = cast("signatures.Collect", StageFunction("collect", EXAMPLES["collect"]))
replay_teachers = cast("signatures.ReplayTeachers", StageFunction("replay-teachers", EXAMPLES["replay-teachers"]))
extract_pairs = cast("signatures.ExtractPairs", StageFunction("extract-pairs", EXAMPLES["extract-pairs"]))
train = cast("signatures.Train", StageFunction("train", EXAMPLES["train"]))
evaluate = cast("signatures.Evaluate", StageFunction("evaluate", EXAMPLES["evaluate"]))
import_traces = cast("signatures.Import", StageFunction("import", EXAMPLES["import"]))
export = cast("signatures.Export", StageFunction("export", EXAMPLES["export"]))
tasks = cast("signatures.Tasks", StageFunction("tasks", EXAMPLES["tasks"]))
curriculum = cast("signatures.Curriculum", StageFunction("curriculum", EXAMPLES["curriculum"]))
normalize = cast("signatures.Normalize", StageFunction("normalize", EXAMPLES["normalize"]))
substrates = cast("signatures.Substrates", StageFunction("substrates", EXAMPLES["substrates"]))


class ProbeFunctions:
    """The stages of the gradient probe, as `composer probe` lists them."""

    def __dir__(self) -> list[str]:
        """Return the functions alone, for `dir()` and completion."""
        return [name for name in vars(type(self)) if not name.startswith("_")]

    def __repr__(self) -> str:
        return f"<stage functions {', '.join(dir(self))}>"

    svd = cast("signatures.ProbeSvd", StageFunction("probe-svd"))
    extract_vhack = cast("signatures.ProbeExtractVhack", StageFunction("probe-extract-vhack"))
    teacher_pool = cast("signatures.ProbeTeacherPool", StageFunction("probe-teacher-pool"))
    replay = cast("signatures.ProbeReplay", StageFunction("probe-replay"))
    score = cast("signatures.ProbeScore", StageFunction("probe-score"))
    uat = cast("signatures.ProbeUat", StageFunction("probe-uat"))
    grpo = cast("signatures.ProbeGrpo", StageFunction("probe-grpo"))
    compare = cast("signatures.ProbeCompare", StageFunction("probe-compare"))
    watch = cast("signatures.ProbeWatch", StageFunction("probe-watch"))
    plot = cast("signatures.ProbePlot", StageFunction("probe-plot"))
    selftest = cast("signatures.ProbeSelftest", StageFunction("probe-selftest"))


probe = ProbeFunctions()


if not TYPE_CHECKING:  # for a type checker, a name that is not above is a mistake

    def __getattr__(name: str) -> StageFunction:
        """Return the function of a stage that was added to `STAGES` from outside."""
        for stage in STAGES:
            if function_name(stage) == name:
                return StageFunction(stage)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@overload
def run(
    preset: str | Path,
    chosen: Mapping[str, Any] | None = ...,
    *,
    config: Path | str | Sequence[Path | str] = ...,
    policy: str | None = ...,
    on: Literal["local"] | None = ...,
    artifacts: Path | str = ...,
    resume: bool = ...,
    clean: bool = ...,
    max_cost: float | None = ...,
    trust: bool = ...,
    quiet: bool = ...,
) -> Chain: ...
@overload
def run(
    preset: str | Path,
    chosen: Mapping[str, Any] | None = ...,
    *,
    config: Path | str | Sequence[Path | str] = ...,
    policy: str | None = ...,
    on: Literal["slurm", "hf-jobs", "modal"],
    artifacts: Path | str = ...,
    resume: bool = ...,
    clean: bool = ...,
    max_cost: float | None = ...,
    trust: bool = ...,
    quiet: bool = ...,
) -> Job: ...
@overload
def run(
    preset: str | Path,
    chosen: Mapping[str, Any] | None = ...,
    *,
    config: Path | str | Sequence[Path | str] = ...,
    policy: str | None = ...,
    on: str,
    artifacts: Path | str = ...,
    resume: bool = ...,
    clean: bool = ...,
    max_cost: float | None = ...,
    trust: bool = ...,
    quiet: bool = ...,
) -> Chain | Job: ...
def run(
    preset: str | Path,
    chosen: Mapping[str, Any] | None = None,
    *,
    config: Path | str | Sequence[Path | str] = (),
    policy: str | None = None,
    on: str | None = None,
    artifacts: Path | str = ARTIFACTS,
    resume: bool = False,
    clean: bool = False,
    max_cost: float | None = None,
    trust: bool = False,
    quiet: bool = False,
) -> Chain | Job:
    """Run a preset and return the runs of its entries, or the job where it was submitted elsewhere.

    preset: the name of a preset that is shipped, or the path of a TOML file. chosen: settings by key, stage or entry,
    such as `{"env.name": "tasks", "collect.tasks": 5}`. config: TOML files with settings for its stages. policy: the
    model that every entry starts from. on: "processes:4" deals the work to workers here; "slurm", "hf-jobs" or "modal"
    submits the chain there, with settings such as `{"on.options.partition": "gpu"}`, and returns at once. resume: go on
    with unfinished runs. clean: delete what the runs' folders hold and start anew. max_cost: USD, which no stage
    exceeds. trust: send a provider's key to another server where a file says so. quiet: no progress on stderr.

    Raises `UsageError` for a preset or settings that cannot be run, `BadInput` for an input that a stage cannot read,
    `Incomplete` if part of a stage failed and the rest is saved, and `ComposerError` where an entry did not pass its
    own checks.

    >>> chain = composer.run("chain.toml", {"collect.samples": 1}, policy="reference", quiet=True)
    >>> chain["collect"].manifest.counts["done"]
    2
    """
    from composer_cli import chain
    from composer_cli.executors import base, jobs

    with errors_in_python(resumes=True):
        check_arguments(artifacts, None, max_cost)
        root, console = Path(artifacts).resolve(), PythonConsole(quiet)
        wanted = settings.load_preset(str(preset))
        files = settings.read_for_preset(wanted, paths(config), console.tell)
        given = checked_settings(chosen)
        layers, on_settings = jobs.split_on([*files, *(settings.nested(*one) for one in given.items())])
        configs = launch.configure_preset(wanted, layers[: len(files)], policy, layers[len(files) :], trust=trust)
        asked = launch.RunOptions(
            root, resume=resume, clean=clean, max_cost=max_cost, on=None if on == base.LOCAL else on
        )
        if on is not None and (executor := base.executor(on)) is not None:
            texts = [settings.assignment_text(*one) for one in given.items()]
            request = jobs.RunRequest(str(preset), paths(config), policy, texts, max_cost, trust)
            return Job(jobs.submit(on, executor, request, configs, on_settings, root, clean=clean))
        results = chain.run(wanted, configs, asked, console)
        return Chain({title: opened(result.path) for title, result in results.items()})


def runs(artifacts: Path | str = ARTIFACTS) -> Table:
    """Return a table of all runs, and of the chains that were submitted with `on=`.

    Its columns: name, stage, status, age, units, cost in USD, where it runs, and why it is not up to date.

    >>> composer.runs().columns
    ('run', 'stage', 'status', 'age', 'units', 'cost_usd', 'device', 'reason')
    >>> composer.runs()[0]["status"]
    'complete'
    """
    from composer_cli.executors import jobs

    with errors_in_python():
        root = Path(artifacts).resolve()
        cells: list[tuple[Any, ...]] = [
            (
                one.run,
                one.run.partition("/")[0],
                one.status,
                age(one.age_s) if one.began else None,
                f"{one.done}/{one.planned}" if one.planned else None,
                one.cost_usd,
                one.device or None,
                in_python(one.reason),
            )
            for one in run_folders.lines(root)
        ]
        cells += [
            (one["job"], "run", one["status"], age(one["age_s"]), None, None, one["on"], in_python(one["reason"]))
            for one in jobs.lines(root)
        ]
        note = "" if cells else f"There are no runs in {root} yet. `run('demo')` makes some."
        names = ("run", "stage", "status", "age", "units", "cost_usd", "device", "reason")
        return Table(names, cells, note=note, shown=len(cells))


def job(name: str, artifacts: Path | str = ARTIFACTS) -> Job:
    """Return a chain that was submitted with `run(..., on="slurm")`.

    name: its name in `runs()`, or a part of the name that no other has.

    Raises `BadInput` where there is none, or several fit.

    >>> composer.job("demo")
    Traceback (most recent call last):
    ...
    stages.errors.BadInput: No job 'demo' was submitted from artifacts. `runs()` lists those that were.
    """
    from composer_cli.executors import jobs

    with errors_in_python():
        if (found := jobs.find(Path(artifacts).resolve(), name)) is None:
            raise BadInput(f"No job {name!r} was submitted from {artifacts}. `composer status` lists those that were.")
        return Job(found)


@overload
def find(name: Literal["evaluate"], artifacts: Path | str = ...) -> Evaluation: ...
@overload
def find(name: str | Path, artifacts: Path | str = ...) -> ReadableRun: ...
def find(name: str | Path, artifacts: Path | str = ARTIFACTS) -> ReadableRun:
    """Return a run, with its verdict where it is an evaluation.

    name: its folder, its name in `runs()`, a part of the name that no other has, or a stage's name for the latest run
    of that stage. A run in a bucket has the name `s3://BUCKET/RUN`.

    Raises `BadInput` where there is none, where several fit, and for a manifest that cannot be read.

    >>> run = composer.find("collect")
    >>> run.manifest.stage, run.manifest.status
    ('collect', 'complete')
    """
    from composer_cli.executors import jobs

    with errors_in_python():
        if not isinstance(name, (str, Path)):
            raise UsageError(f"A {type(name).__name__} is no name of a run. `composer status` lists the runs.")
        root = Path(artifacts).resolve()
        if submitted := jobs.find(root, str(name), part=False):
            raise BadInput(f"{submitted.name} is a submitted job, not a run. `job({submitted.name!r})` returns it.")
        return opened(run_folders.find(root, str(name)))


def query(sql: str, *runs: Run, artifacts: Path | str = ARTIFACTS) -> Table:
    """Ask the tables of runs a question in SQL. A table has its name in `run.tables()`, and a column `run` in addition.

    sql: a question in DuckDB's SQL, which may read and not write. runs: those that are asked; without them, all.

    Raises `UsageError` for a question that DuckDB refuses, `BadInput` for a damaged table.

    >>> answer = composer.query("select count(*) as n, avg(reward) as mean from rollouts", composer.find("collect"))
    >>> answer[0]
    {'n': 2, 'mean': 1.0}
    """
    from stages.runs import answering, queries

    with errors_in_python():
        paths_of_runs(runs)
        columns, rows = answering.answer(queries.question(list(runs) or run_folders.readable(Path(artifacts)), sql))
        return Table(columns, rows)


def report(*runs: Run, artifacts: Path | str = ARTIFACTS) -> Path:
    """Write one HTML file about runs and all that they were made from; returns its path, which is absolute.

    runs: those that the report is about; without them, the newest.

    Raises `BadInput` where there is no run, or one is damaged.

    >>> composer.report(composer.find("collect")).suffix
    '.html'
    """
    from composer_cli.view import page

    with errors_in_python():
        root = Path(artifacts).resolve()
        return page.save(root, page.chain(root, paths_of_runs(runs)))


def view(artifacts: Path | str = ARTIFACTS, port: int = 0, tell: Callable[[str], None] = print) -> None:
    """Show all runs and rollouts on a local web page until Ctrl-C, or until a notebook's cell is interrupted.

    port: the port of the page; 0 for a free one. tell: called with the page's address once it answers.

    Raises `UsageError` where the port is not free.
    """
    from composer_cli.view import app

    with errors_in_python():
        app.serve(Path(artifacts).resolve(), port, tell)
