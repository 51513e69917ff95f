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

phrasing.py   - messages of the command line in the words of Python
results.py    - a run with what it holds as Python objects
signatures.py - the types of the stages' arguments, generated for editors
"""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from composer_cli import launch, settings
from composer_cli.console import Console
from composer_cli.help import described, is_basic
from composer_cli.printing import age
from composer_cli.show import runs as run_folders
from composer_cli.stage_command import SHORTCUTS
from composer_post_training.phrasing import errors_in_python, function_name, in_python
from composer_post_training.results import Difference, Differences, Evaluation, ReadableRun
from stages import STAGES
from stages.errors import BadInput, ComposerError, Incomplete, UsageError
from stages.runs.artifact import Inputs, Run
from stages.runs.config import StageConfig
from stages.runs.display import Table
from stages.runs.stage import Plan, load_stage

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
    "ReadableRun",
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


Listener = Callable[[str, int, int], None]
"""Called with (what, units done, units in all); with 0 in all, `what` is a remark on the state of the work."""
ARTIFACTS = Path("artifacts")
ARGUMENTS = {
    "config=()": "A TOML file with settings, or several; later ones and keywords win.",
    "artifacts='artifacts'": "The folder where runs are kept.",
    "out=None": "Another folder for this run, or s3://BUCKET/RUN.",
    "resume=False": "Go on with an unfinished run.",
    "clean=False": "Delete what the run's folder holds and start anew.",
    "on=None": 'Workers that do the work, such as "processes:4".',
    "max_cost=None": "USD, never more, over all attempts.",
    "trust=False": "Send a provider's key to another server where a settings file says so.",
    "quiet=False": "No progress on stderr.",
    "listener=None": "Called with the progress in place of stderr: (what, units done, units in all).",
}
"""What every stage's function takes besides its settings, with its meaning."""


class PythonConsole(Console):
    """Prints remarks and progress on stderr, in the words of this interface."""

    def tell(self, text: str) -> None:
        """Print one line."""
        super().tell(in_python(text))


class StageFunction:
    """One stage, to be called with the runs that it reads and its settings.

    Settings are given as `tasks=2`, `policy={"model": "m"}` or `**{"policy.model": "m"}`; `settings()` names them all.
    Raises `UsageError`, `BadInput` or `Incomplete`.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        """Return what the stage does, and its settings with their defaults: what `help` prints."""
        stage, name = load_stage(self.name), function_name(self.name)
        kinds = ", ".join(f"{slot.kind.plural}{' (optional)' * slot.optional}" for slot in stage.inputs.values())
        reads = f"Runs with what it reads: {kinds}. Without them, the newest." if kinds else "None: it reads no runs."
        rows = [(shown, text) for key, shown, text in described(stage.config) if is_basic(key)]
        return "\n".join(
            [
                f"{STAGES[self.name].help} Returns its run, made now or found complete.",
                f"\n{name}(*runs, **settings)\n\nArguments of every stage:",
                *(_entry(shown, text) for shown, text in {"*runs": reads, **ARGUMENTS}.items()),
                '\nSettings that most runs need; one in a group as policy={"model": ...} or **{"policy.model": ...}:',
                *(_entry(shown, in_python(text)) for shown, text in rows),
                f"\n{name}.settings() returns all settings, {name}.plan(...) what a call would do and cost at most.",
            ]
        )

    def __call__(
        self,
        *reads: Run,
        config: Path | str | Sequence[Path | str] = (),
        artifacts: Path | str = ARTIFACTS,
        out: Path | str | None = None,
        resume: bool = False,
        clean: bool = False,
        on: str | None = None,
        max_cost: float | None = None,
        trust: bool = False,
        quiet: bool = False,
        listener: Listener | None = None,
        **chosen: Any,
    ) -> ReadableRun:
        """Run the stage, or find it done; returns its run.

        reads: the runs that it reads. The others are in `ARGUMENTS`, and in what `help` prints.
        """
        console = PythonConsole(quiet or listener is not None)
        with errors_in_python(resumes=True):
            _check_arguments(artifacts, out, max_cost)
            if on is not None and load_stage(self.name).work is None:
                raise UsageError(f"{self.name} deals no work to workers. Leave out on = {on!r}.")
            configuration, inputs = self._configure(reads, config, artifacts, chosen, console, trust=trust)
            job = launch.StageJob(self.name, self.name, inputs, configuration)
            asked = launch.RunOptions(Path(artifacts), None, resume, clean, max_cost, on)
            where = launch.with_out(self.name, None if out is None else str(out), asked)
            done = job.run(where, listener) if listener else launch.execute(job, where, console)
            return _opened(done.path)

    def plan(
        self,
        *reads: Run,
        config: Path | str | Sequence[Path | str] = (),
        artifacts: Path | str = ARTIFACTS,
        trust: bool = False,
        **chosen: Any,
    ) -> Plan:
        """Return what would be done and at most what it would cost, as `--dry-run` prints."""
        with errors_in_python():
            console = PythonConsole()
            configuration, inputs = self._configure(reads, config, artifacts, chosen, console, trust=trust)
            return load_stage(self.name).plan(inputs, configuration)

    def settings(self) -> dict[str, Any]:
        """Return every setting by its dotted key, with its default; None where there is none."""
        return {key: settings.default_of(field) for key, field in settings.known(load_stage(self.name).config)}

    @property
    def __signature__(self) -> Signature:
        """Return the words that it takes, every setting with its type and default, for `help` and notebooks."""
        own = [one for one in Signature.from_callable(StageFunction.__call__).parameters.values() if one.name != "self"]
        fields = load_stage(self.name).config.model_fields.items()
        chosen = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=settings.default_of(field), annotation=field.annotation)
            for name, field in fields
            if name.isidentifier()
        ]
        return Signature([*own[:-1], *chosen, own[-1]], return_annotation=ReadableRun)

    def __repr__(self) -> str:
        return f"<stage function {function_name(self.name)}>"

    def _configure(
        self,
        reads: tuple[Run, ...],
        config: Path | str | Sequence[Path | str],
        artifacts: Path | str,
        chosen: dict[str, Any],
        console: Console,
        *,
        trust: bool,
    ) -> tuple[StageConfig, Inputs]:
        """Return the settings and the runs to read; a text in the place of a group is its short option's value."""
        model = load_stage(self.name).config
        keys = dict(settings.known(model))
        layers, teachers = list[settings.Tree](), None
        for key, value in chosen.items():
            is_text = isinstance(value, (str, Path))
            if is_text and key == "teachers" and key in model.model_fields:
                teachers = Path(value)
            elif is_text and (short := SHORTCUTS.get(key)) in keys:
                layers.append(settings.nested(str(short), str(value)))
            else:
                layers.append(settings.nested(key, value))
        named, files = _paths_of_runs(reads), _paths(config)
        made = launch.configure(self.name, files, layers, {}, teachers, None, [], console.tell, trust=trust)
        return made, run_folders.choose(self.name, named, Path(artifacts), console.tell)


def _entry(shown: str, text: str) -> str:
    """Return an argument and what it means, as lines of a docstring."""
    words = " ".join(f"{shown}  - {text}".removesuffix("  - ").split(" "))
    return textwrap.fill(words, 110, initial_indent="    ", subsequent_indent=" " * 8)


def _paths_of_runs(reads: Sequence[object]) -> list[str]:
    """Return the folders of runs that were passed; `UsageError` where one is something else."""
    found = []
    for one in reads:
        if not isinstance(one, Run):
            shown = repr(str(one)) if isinstance(one, (str, Path)) else f"A {type(one).__name__}"
            raise UsageError(
                f'{shown} is no run. Positional arguments are runs, such as find("collect"); all others have a name.'
            )
        found.append(str(one.path))
    return found


def _paths(config: Path | str | Sequence[Path | str]) -> list[Path]:
    """Return the paths of settings files; `UsageError` for something else."""
    files = [config] if isinstance(config, (str, Path)) else config
    if not isinstance(files, (list, tuple)) or not all(isinstance(one, (str, Path)) for one in files):
        raise UsageError(f"config = {config!r}: it should be the path of a TOML file, or a list of them.")
    return [Path(one) for one in files]


def _check_arguments(artifacts: object, out: object, max_cost: object) -> None:
    """Raise `UsageError` for an argument of every stage that has another type."""
    for name, value, types, form in (
        ("artifacts", artifacts, (str, Path), "the path of a folder"),
        ("out", out, (str, Path, type(None)), "the path of a folder"),
        ("max_cost", max_cost, (int, float, type(None)), "a number"),
    ):
        if not isinstance(value, types):
            raise UsageError(f"{name} = {value!r}: it should be {form}.")


def _opened(path: Path) -> ReadableRun:
    """Return the run of a folder, with its verdict where it is an evaluation."""
    opened = ReadableRun(path)
    return Evaluation(path) if opened.manifest.stage == "evaluate" else opened


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


@dataclass(frozen=True, repr=False)
class Chain(Mapping[str, ReadableRun]):
    """The runs of a preset by the names of its entries; it shows them as a table."""

    runs: Mapping[str, ReadableRun]

    def __getitem__(self, name: str) -> ReadableRun:
        return self.runs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.runs)

    def __len__(self) -> int:
        return len(self.runs)

    @property
    def differences(self) -> Differences:
        """Return the differences of the last evaluation in the chain; `UsageError` where it has none."""
        evaluations = [one for one in self.runs.values() if isinstance(one, Evaluation)]
        if not evaluations:
            raise UsageError(f"No entry of this chain is an evaluation; it has {', '.join(self.runs) or 'none'}.")
        return evaluations[-1].differences

    def table(self) -> Table:
        """Return a row for each run."""
        records = [(name, run, run.manifest) for name, run in self.runs.items()]
        cells = [(name, one.stage, one.status, one.summary.get("verdict"), run.path) for name, run, one in records]
        return Table(("entry", "stage", "status", "verdict", "folder"), cells)

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


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
        _check_arguments(artifacts, None, max_cost)
        console = PythonConsole(quiet)
        wanted = settings.load_preset(str(preset))
        files = settings.read_for_preset(wanted, _paths(config), console.tell)
        typed = [settings.nested(key, value) for key, value in (chosen or {}).items()]
        configs = launch.configure_preset(wanted, files, policy, typed, trust=trust)
        asked = launch.RunOptions(Path(artifacts), resume=resume, clean=clean, max_cost=max_cost)
        results = chain.run(wanted, configs, asked, console)
        return Chain({title: _opened(result.path) for title, result in results.items()})


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
        return _opened(run_folders.find(Path(artifacts), str(name)))


def query(sql: str, *reads: Run, artifacts: Path | str = ARTIFACTS) -> Table:
    """Ask the tables of these runs, or of all runs, a question in SQL; every table has a column `run`."""
    from stages.runs import answering, queries

    with errors_in_python():
        _paths_of_runs(reads)
        columns, rows = answering.answer(queries.question(list(reads) or run_folders.readable(Path(artifacts)), sql))
        return Table(columns, rows)


def report(*reads: Run, artifacts: Path | str = ARTIFACTS) -> Path:
    """Write one HTML file about these runs and all that they were made from, or the newest run; returns its path."""
    from composer_cli import report as reports

    with errors_in_python():
        return reports.write(Path(artifacts), reports.chain(Path(artifacts), _paths_of_runs(reads)))


def view(artifacts: Path | str = ARTIFACTS, port: int = 0, tell: Callable[[str], None] = print) -> None:
    """Show all runs and rollouts on a local web page until Ctrl-C, or until a notebook's cell is interrupted.

    tell: called with the page's address once it answers. port: 0 for a free one.
    """
    from composer_cli.view import app

    with errors_in_python():
        app.serve(Path(artifacts), port, tell)
