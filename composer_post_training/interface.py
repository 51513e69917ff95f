"""The functions of the package, and the stages as functions: what `composer_post_training.NAME` returns.

Imported when the first of them is used, for it needs all that reads runs; an environment needs none of that.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

from composer_cli.call import ChainArguments
from composer_cli.preset import configure_preset, load_preset, read_for_preset
from composer_cli.show import runs as run_folders
from composer_post_training.results import (
    Chain as Chain,
    ComparedLogs as ComparedLogs,
    Difference as Difference,
    Differences as Differences,
    Evaluation as Evaluation,
    Job as Job,
    ReadableRun as ReadableRun,
    Rollout as Rollout,
    opened,
)
from composer_post_training.stage_functions import PythonConsole, StageFunction, check_settings, folders_of_runs
from composer_post_training.words import PYTHON, errors_in_python, function_name
from composer_stages import STAGES
from composer_stages.errors import (
    BadInput as BadInput,
    ComposerError as ComposerError,
    Incomplete as Incomplete,
    InfrastructureError as InfrastructureError,
    UsageError as UsageError,
)
from composer_stages.layout import age
from composer_stages.runs import catalog, settings
from composer_stages.runs.display import Table as Table
from composer_stages.runs.run import Run
from composer_stages.runs.stage import Plan as Plan
from composer_stages.runs.tables import Scan as Scan
from composer_stages.words import in_interface

if TYPE_CHECKING:
    # [[[cog
    # from docs import stubs
    # cog.outl(stubs.stage_functions())
    # ]]]
    from composer_post_training.settings import (
        Submitted as Submitted,
        collect as collect,
        compare as compare,
        curriculum as curriculum,
        evaluate as evaluate,
        export as export,
        extract_pairs as extract_pairs,
        frameworks as frameworks,
        import_traces as import_traces,
        normalize as normalize,
        probe as probe,
        replay_teachers as replay_teachers,
        tasks as tasks,
        train as train,
    )
    # [[[end]]]
else:

    def __getattr__(name: str) -> StageFunction:
        """Return the function of a stage, also of one that was added to `STAGES` from outside."""
        if name == "probe":
            group = [stage for stage in STAGES if STAGES[stage].group == "probe"]
            return SimpleNamespace(
                **{function_name(stage).removeprefix("probe."): StageFunction(stage) for stage in group}
            )
        for stage in STAGES:
            if function_name(stage) == name:
                return StageFunction(stage)
        raise AttributeError(f"module {__package__!r} has no attribute {name!r}")


class _ChainWords(TypedDict, total=False):
    config: Path | str | Sequence[Path | str]
    policy: str | None
    artifacts: Path | str
    resume: bool
    clean: bool
    max_cost: float | None
    fresh: bool
    to_the_end: bool
    trust: bool
    quiet: bool


_Chosen = Mapping[str, Any] | None


@overload
def run(
    preset: str | Path, chosen: _Chosen = ..., *, on: Literal["local"] | None = ..., **options: Unpack[_ChainWords]
) -> Chain: ...
@overload
def run(preset: str | Path, chosen: _Chosen = ..., *, on: "Submitted", **options: Unpack[_ChainWords]) -> Job: ...
@overload
def run(preset: str | Path, chosen: _Chosen = ..., *, on: str, **options: Unpack[_ChainWords]) -> Chain | Job: ...
def run(
    preset: str | Path,
    chosen: Mapping[str, Any] | None = None,
    *,
    config: Path | str | Sequence[Path | str] = (),
    policy: str | None = None,
    on: str | None = None,
    artifacts: Path | str = "artifacts",
    resume: bool = False,
    clean: bool = False,
    max_cost: float | None = None,
    fresh: bool = False,
    to_the_end: bool = False,
    trust: bool = False,
    quiet: bool = False,
) -> Chain | Job:
    """Run a preset and return the runs of its entries, or the job where it was submitted elsewhere.

    preset: the name of a preset that is shipped, or the path of a TOML file. chosen: settings by key, stage or entry,
    such as `{"env.name": "tasks", "collect.tasks": 5}`. config: TOML files with settings for its stages. policy: the
    model that every entry starts from. on: "processes:4" deals the work to workers here; "slurm", "hf-jobs" or "modal"
    submits the chain there, with settings such as `{"on.options.partition": "gpu"}`, and returns at once. resume: go on
    with unfinished runs. clean: delete what the runs' folders hold and start again. max_cost: USD, which all stages
    together do not exceed. fresh: ask anew also where another run has bought the answer. to_the_end: go on after an
    entry that did not pass its own checks, or left them open. trust: send a provider's key to another server where a
    file says so. quiet: no progress on stderr.

    Raises `UsageError` for a preset or settings that cannot be run, `BadInput` for an input that a stage cannot read,
    `Incomplete` if part of a stage failed and the rest is saved, or an entry left open what others build on, and
    `ComposerError` where an entry did not pass its own checks.

    >>> chain = composer.run("chain.toml", {"collect.samples": 1}, policy="reference", quiet=True)
    >>> chain["collect"].manifest.counts["done"]
    2
    """
    from composer_cli import chain
    from composer_cli.executors import base, jobs

    with errors_in_python(resumes=True):
        options = {"config": config, "artifacts": artifacts, "resume": resume, "clean": clean, "max_cost": max_cost}
        options |= {
            "on": on,
            "trust": trust,
            "fresh": fresh,
            "quiet": quiet,
            "policy": policy,
            "to_the_end": to_the_end,
        }
        requested = settings.build("run", ChainArguments, [options])
        requested = requested.model_copy(update={"artifacts": requested.artifacts.resolve()})
        console = PythonConsole(quiet)
        chain_preset = load_preset(str(preset)).to_run(to_the_end)
        files = read_for_preset(chain_preset, requested.config, console.notify)
        typed = check_settings(chosen)
        layers, on_settings = jobs.split_on([*files, *(settings.nested(*setting) for setting in typed.items())])
        configs = configure_preset(chain_preset, layers[: len(files)], layers[len(files) :], policy=policy, trust=trust)
        local = requested.model_copy(update={"on": None if on == base.LOCAL else on})
        if on is not None and base.executor(on) is not None:
            texts = [settings.assignment_text(*setting) for setting in typed.items()]
            return Job(jobs.submit(jobs.Request(str(preset), requested, texts, configs, on_settings)))
        results = chain.run(chain_preset, configs, local, console)
        return Chain({title: opened(result.path) for title, result in results.items()})


def runs(artifacts: Path | str = "artifacts") -> Table:
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
        cells = list[tuple[Any, ...]]()
        for line in run_folders.lines(root):
            began = age(line.age_s) if line.began else None
            units = f"{line.done}/{line.planned}" if line.planned else None
            named, on = (line.run, line.run.partition("/")[0]), line.device or None
            cells.append((*named, line.status, began, units, line.cost_usd, on, in_interface(line.reason, PYTHON)))
        for sent in jobs.lines(root):
            about = (sent["job"], "run", sent["status"], age(sent["age_s"]), None, None, sent["on"])
            cells.append((*about, in_interface(sent["reason"], PYTHON)))
        note = "" if cells else f"There are no runs in {root} yet. `run('demo')` makes some."
        names = ("run", "stage", "status", "age", "units", "cost_usd", "device", "reason")
        return Table(names, cells, note=note, shown=len(cells))


def job(name: str, artifacts: Path | str = "artifacts") -> Job:
    """Return a chain that was submitted with `run(..., on="slurm")`.

    name: its name in `runs()`, or a part of the name that no other has.

    Raises `BadInput` where there is none, or several fit.

    >>> composer.job("demo")
    Traceback (most recent call last):
    ...
    composer_stages.errors.BadInput: No job 'demo' was submitted from artifacts. `runs()` lists those that were.
    """
    from composer_cli.executors import jobs

    with errors_in_python():
        if (submitted := jobs.find(Path(artifacts).resolve(), name)) is None:
            raise BadInput("cli.no-job", text=name, root=artifacts)
        return Job(submitted)


@overload
def find(name: Literal["evaluate"], artifacts: Path | str = ...) -> Evaluation: ...
@overload
def find(name: str | Path, artifacts: Path | str = ...) -> ReadableRun: ...
def find(name: str | Path, artifacts: Path | str = "artifacts") -> ReadableRun:
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
            raise UsageError("python.not-a-name", type=type(name).__name__)
        root = Path(artifacts).resolve()
        if submitted := jobs.find(root, str(name), part=False):
            raise BadInput("python.job-not-run", job=submitted.name)
        return opened(catalog.find(root, str(name)))


def query(sql: str, *runs: Run, artifacts: Path | str = "artifacts") -> Table:
    """Ask the tables of runs a question in SQL. A table has its name in `run.tables()`, and a column `run` in addition.

    sql: a question in DuckDB's SQL, which may read and not write. runs: those that are asked; without them, all.

    Warns where a table's rows of several stages are counted together. Raises `UsageError` for a question that DuckDB
    refuses, `BadInput` for a damaged table.

    >>> answer = composer.query("select count(*) as n, avg(reward) as mean from rollouts", composer.find("collect"))
    >>> answer[0]
    {'n': 2, 'mean': 1.0}
    """
    from composer_stages.runs import index
    from composer_stages.runs.sql import pooled, run_sql, sql_query

    with errors_in_python():
        folders_of_runs(runs)
        if not isinstance(sql, str):
            raise UsageError("python.sql-not-text", sql=sql)
        entries = index.of(runs) or index.entries(Path(artifacts))
        columns, rows = run_sql(sql_query(entries, sql))
        for sentence in pooled(entries, sql):
            warnings.warn(in_interface(sentence, PYTHON), stacklevel=2)
        return Table(columns, rows)


def report(*runs: Run, artifacts: Path | str = "artifacts") -> Path:
    """Write one HTML file about runs and all that they were made from; returns its path, which is absolute.

    runs: those that the report is about; without them, the newest.

    Raises `BadInput` where there is no run, or one is damaged.

    >>> composer.report(composer.find("collect")).suffix
    '.html'
    """
    from composer_cli.view import page

    with errors_in_python():
        root = Path(artifacts).resolve()
        return page.save(root, page.chain(root, folders_of_runs(runs)))


def view(artifacts: Path | str = "artifacts", port: int = 0, notify: Callable[[str], None] = print) -> None:
    """Show all runs and rollouts on a local web page until Ctrl-C, or until a notebook's cell is interrupted.

    port: the port of the page; 0 for a free one. notify: called with the page's address once it answers.

    Raises `UsageError` where the port is not free.
    """
    from composer_cli.view import app

    with errors_in_python():
        app.serve(Path(artifacts).resolve(), port, notify)
