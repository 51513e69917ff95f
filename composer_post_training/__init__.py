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
from composer_cli.printing import age
from composer_cli.show import runs as run_folders
from composer_post_training.phrasing import errors_in_python, function_name, in_python
from composer_post_training.results import Chain, Difference, Differences, Evaluation, ReadableRun, opened
from composer_post_training.rollouts import Rollout
from composer_post_training.stage_functions import (
    ARTIFACTS,
    PythonConsole,
    StageFunction,
    check_arguments,
    paths,
    paths_of_runs,
)
from stages import STAGES
from stages.errors import BadInput, ComposerError, Incomplete, InfrastructureError, UsageError
from stages.runs.artifact import Run
from stages.runs.display import Table
from stages.runs.parquet import Scan
from stages.runs.stage import Plan

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
collect = cast("signatures.Collect", StageFunction("collect"))
replay_teachers = cast("signatures.ReplayTeachers", StageFunction("replay-teachers"))
extract_pairs = cast("signatures.ExtractPairs", StageFunction("extract-pairs"))
train = cast("signatures.Train", StageFunction("train"))
evaluate = cast("signatures.Evaluate", StageFunction("evaluate"))
import_traces = cast("signatures.Import", StageFunction("import"))
export = cast("signatures.Export", StageFunction("export"))
tasks = cast("signatures.Tasks", StageFunction("tasks"))
curriculum = cast("signatures.Curriculum", StageFunction("curriculum"))
normalize = cast("signatures.Normalize", StageFunction("normalize"))
substrates = cast("signatures.Substrates", StageFunction("substrates"))


class ProbeFunctions:
    """The stages of the gradient probe, as `composer probe` lists them."""

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


def run(
    preset: str | Path,
    chosen: Mapping[str, Any] | None = None,
    *,
    config: Path | str | Sequence[Path | str] = (),
    policy: str | None = None,
    artifacts: Path | str = ARTIFACTS,
    resume: bool = False,
    clean: bool = False,
    max_cost: float | None = None,
    trust: bool = False,
    quiet: bool = False,
) -> Chain:
    """Run a preset, a shipped one by name or a TOML file, and return the runs of its entries.

    chosen: settings by key, stage or entry, such as `{"env.name": "tasks", "collect.tasks": 5}`. config: TOML files
    with settings for its stages. policy: the model that every entry starts from. max_cost: USD, which no stage exceeds.
    quiet: whether progress on stderr is left out.
    """
    from composer_cli import chain

    with errors_in_python(resumes=True):
        check_arguments(artifacts, None, max_cost)
        console = PythonConsole(quiet)
        wanted = settings.load_preset(str(preset))
        files = settings.read_for_preset(wanted, paths(config), console.tell)
        typed = [settings.nested(key, value) for key, value in (chosen or {}).items()]
        configs = launch.configure_preset(wanted, files, policy, typed, trust=trust)
        asked = launch.RunOptions(Path(artifacts), resume=resume, clean=clean, max_cost=max_cost)
        results = chain.run(wanted, configs, asked, console)
        return Chain({title: opened(result.path) for title, result in results.items()})


def runs(artifacts: Path | str = ARTIFACTS) -> Table:
    """Return a table of all runs: name, stage, status, age, units, cost, and why one is not up to date."""
    with errors_in_python():
        cells = [
            (
                one.run,
                one.run.partition("/")[0],
                one.status,
                age(one.age_s) if one.began else None,
                f"{one.done}/{one.planned}" if one.planned else None,
                one.cost_usd,
                in_python(one.reason),
            )
            for one in run_folders.lines(Path(artifacts))
        ]
        note = "" if cells else f"There are no runs in {artifacts} yet. `run('demo')` makes some."
        names = ("run", "stage", "status", "age", "units", "cost_usd", "reason")
        return Table(names, cells, note=note, shown=len(cells))


@overload
def find(name: Literal["evaluate"], artifacts: Path | str = ...) -> Evaluation: ...
@overload
def find(name: str, artifacts: Path | str = ...) -> ReadableRun: ...
def find(name: str, artifacts: Path | str = ARTIFACTS) -> ReadableRun:
    """Return a run by its folder, its name in `runs()`, part of it, or a stage's name for its latest."""
    with errors_in_python():
        if not isinstance(name, (str, Path)):
            raise UsageError(f"A {type(name).__name__} is no name of a run. `composer status` lists the runs.")
        return opened(run_folders.find(Path(artifacts), str(name)))


def query(sql: str, *runs: Run, artifacts: Path | str = ARTIFACTS) -> Table:
    """Ask the tables of these runs, or of all runs, a question in SQL; every table has a column `run`."""
    from stages.runs import answering, queries

    with errors_in_python():
        paths_of_runs(runs)
        columns, rows = answering.answer(queries.question(list(runs) or run_folders.readable(Path(artifacts)), sql))
        return Table(columns, rows)


def report(*runs: Run, artifacts: Path | str = ARTIFACTS) -> Path:
    """Write one HTML file about these runs and all that they were made from, or the newest run; returns its path."""
    from composer_cli import report as reports

    with errors_in_python():
        root = Path(artifacts).resolve()
        return reports.write(root, reports.chain(root, paths_of_runs(runs)))


def view(artifacts: Path | str = ARTIFACTS, port: int = 0, tell: Callable[[str], None] = print) -> None:
    """Show all runs and rollouts on a local web page until Ctrl-C, or until a notebook's cell is interrupted.

    tell: called with the page's address once it answers. port: 0 for a free one.
    """
    from composer_cli.view import app

    with errors_in_python():
        app.serve(Path(artifacts).resolve(), port, tell)
