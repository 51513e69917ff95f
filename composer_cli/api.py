"""The commands as Python functions with their words. A stage returns its run, done now or up to date before.

from composer_cli.api import collect, extract_pairs, replay_teachers

rollouts = collect(policy={"model": "Qwen/Qwen3-8B"}, tasks=2)
rollouts.scan("rollouts").pandas()

Errors are the command line's, with the words of Python: `resume=True` instead of --resume.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from composer_cli import launch, settings
from composer_cli.console import Console
from composer_cli.help import described, is_basic
from composer_cli.show import runs
from stages import STAGES, command_words
from stages.errors import BadInput, ComposerError, Incomplete, UsageError
from stages.evaluation.result import Difference, Differences, Evaluation
from stages.runs import runner
from stages.runs.artifact import Inputs, Run
from stages.runs.config import StageConfig
from stages.runs.display import Table
from stages.runs.stage import Plan, load_stage

if TYPE_CHECKING:
    from composer_cli import signatures

__all__ = [
    "BadInput",
    "Chain",
    "ComposerError",
    "Difference",
    "Differences",
    "Evaluation",
    "Incomplete",
    "Run",
    "UsageError",
    "collect",
    "curriculum",
    "evaluate",
    "export",
    "extract_pairs",
    "find",
    "import_traces",
    "probe",
    "query",
    "replay_teachers",
    "report",
    "run",
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
PYTHON = (
    (r"Add --from(?: RUN)?", "Pass the runs to read"),
    (r"\b[Gg]ive the run(?P<which>[^.]*?) with --from", r"Pass the run\g<which>"),
    (r"with --from RUN\b", "as arguments"),
    (r"--from (?:RUN|chooses another)", "pass another run as an argument"),
    (r"--from (?P<first>\S+/\S+) --from (?P<second>\S+/\S*\w)", r'find("\g<first>"), find("\g<second>")'),
    (r"--from", "the runs passed"),
    (r"add --teachers FILE \(or -c FILE\)", "pass teachers=[...]"),
    (r"--set (?P<key>[\w.]+)=", r"\g<key>="),
    (r"--set ", ""),
    (r"--(?P<flag>resume|clean)\b", r"\g<flag>=True"),
    (r"--max-cost\b", "max_cost"),
    (r"--(?P<option>out|artifacts|policy|teachers|limit|seed|env|arm|preset)\b", r"\g<option>="),
    (r"`composer probe (?P<stage>[\w-]+) --help`", r"`probe.\g<stage>.settings()`"),
    (r"`composer (?P<stage>[\w-]+) --help`", r"`\g<stage>.settings()`"),
    (r"`composer status`", "`find`"),
    (r"`composer probe (?P<stage>[\w-]+)`", r"`probe.\g<stage>()`"),
    (r"`composer (?P<stage>[\w-]+)`", r"`\g<stage>()`"),
)
"""Words of the command line in messages, and what to write in Python."""


def in_python(message: str) -> str:
    """Return a message of the command line with the words of this interface."""
    for words, instead in PYTHON:
        message = re.sub(words, instead, message)
    # Names of functions have underscores: `replay_teachers()`.
    return re.sub(r"`([\w.-]+)(\(\)|\.settings\(\))`", lambda m: f"`{m[1].replace('-', '_')}{m[2]}`", message)


@contextmanager
def errors_in_python() -> Iterator[None]:
    """Raise the errors of the block with the words of this interface."""
    try:
        yield
    except ComposerError as error:
        error.args = (in_python(str(error)),)
        raise


class StageFunction:
    """One stage, to be called with its command's settings.

    Settings are given as `tasks=2`, `policy={"model": "m"}` or `**{"policy.model": "m"}`; `settings()` names them all.
    Raises the errors of the command: `UsageError`, `BadInput`, `Incomplete`.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        """Return what the stage does, and its settings with their defaults: what `help` prints."""
        rows = [row for row in described(load_stage(self.name).config) if is_basic(row[0])]
        listed = ["    " + "  - ".join(filter(None, (shown, " ".join(text.split())))) for _, shown, text in rows]
        every = f"{self.name.replace('-', '_')}.settings()".replace("probe_", "probe.", 1)
        return "\n".join([STAGES[self.name].help, "", *listed, "", f"{every} returns all settings."])

    def __call__(
        self,
        *reads: Run,
        artifacts: Path | str = ARTIFACTS,
        out: Path | str | None = None,
        resume: bool = False,
        clean: bool = False,
        max_cost: float | None = None,
        listener: Listener | None = None,
        **chosen: Any,
    ) -> Run:
        """Run the stage, or find it done; returns its run.

        reads: the runs that it reads; the latest of the stages that write what it needs if left out. max_cost: USD,
        never more, over all attempts. The other words are those of the command.
        """
        with errors_in_python():
            config, inputs = self._configure(reads, artifacts, chosen)
            asked = launch.RunOptions(Path(artifacts), None, resume, clean, max_cost)
            where = launch.with_out(self.name, None if out is None else str(out), asked)
            if note := launch.StageJob(self.name, self.name, inputs, config).nothing_to_resume(where):
                _tell(note)
            result = runner.execute(
                self.name, inputs, config, **where.where(), max_cost=max_cost, listener=listener, mirror=where.mirror
            )
            return _opened(result.path)

    def plan(self, *reads: Run, artifacts: Path | str = ARTIFACTS, **chosen: Any) -> Plan:
        """Return what would be done and at most what it would cost, as `--dry-run` prints."""
        with errors_in_python():
            config, inputs = self._configure(reads, artifacts, chosen)
            return load_stage(self.name).plan(inputs, config)

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
        return Signature([*own[:-1], *chosen, own[-1]], return_annotation=Run)

    def __repr__(self) -> str:
        return f"<{command_words(self.name)}>"

    def _configure(
        self, reads: tuple[Run, ...], artifacts: Path | str, chosen: dict[str, Any]
    ) -> tuple[StageConfig, Inputs]:
        layers = [settings.nested(key, value) for key, value in chosen.items()]
        config: StageConfig = settings.build(self.name, load_stage(self.name).config, layers)
        if wrong := [one for one in reads if not isinstance(one, Run)]:
            raise UsageError(f"{wrong[0]!r} is no run. Pass runs, such as find({str(wrong[0])!r}).")
        named = [str(run.path) for run in reads]
        return config, runs.choose(self.name, named, Path(artifacts), _tell)


def _opened(path: Path) -> Run:
    """Return the run of a folder, with its verdict where it is an evaluation."""
    opened = Run(path)
    return Evaluation(path) if opened.manifest.stage == "evaluate" else opened


def _tell(text: str) -> None:
    print(in_python(text), file=sys.stderr)


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


@dataclass(frozen=True, repr=False)
class Chain(Mapping[str, Run]):
    """The runs of a preset by the names of its entries; it shows them as a table."""

    runs: Mapping[str, Run]

    def __getitem__(self, name: str) -> Run:
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
    policy: str | None = None,
    artifacts: Path | str = ARTIFACTS,
    resume: bool = False,
    clean: bool = False,
    max_cost: float | None = None,
    quiet: bool = False,
) -> Chain:
    """Run a preset, a shipped one by name or a TOML file, and return the runs of its entries.

    chosen: settings by key, stage or entry, such as `{"env.name": "tasks", "collect.tasks": 5}`. policy: the model that
    every entry starts from. max_cost: USD, which no stage exceeds. quiet: whether progress on stderr is left out.
    """
    from composer_cli import chain
    from stages.policy.base import VLLM

    with errors_in_python():
        wanted = settings.load_preset(str(preset))
        model = settings.for_every_entry(wanted, "policy.model", policy, prefix=VLLM) if policy else []
        layers = [settings.nested(key, value) for key, value in (chosen or {}).items()]
        configs = settings.configure_preset(wanted, [*model, *layers])
        asked = launch.RunOptions(Path(artifacts), resume=resume, clean=clean, max_cost=max_cost)
        results = chain.run(wanted, configs, asked, Console(quiet))
        return Chain({title: _opened(result.path) for title, result in results.items()})


@overload
def find(name: Literal["evaluate"], artifacts: Path | str = ...) -> Evaluation: ...
@overload
def find(name: str, artifacts: Path | str = ...) -> Run: ...
def find(name: str, artifacts: Path | str = ARTIFACTS) -> Run:
    """Return a run by its folder, its name in `composer status`, part of it, or a stage's name for its latest."""
    with errors_in_python():
        return _opened(runs.find(Path(artifacts), name))


def query(sql: str, *reads: Run, artifacts: Path | str = ARTIFACTS) -> Table:
    """Ask the tables of these runs, or of all runs, a question in SQL; every table has a column `run`."""
    from stages.runs import answering, queries

    with errors_in_python():
        columns, rows = answering.answer(queries.question(list(reads) or runs.readable(Path(artifacts)), sql))
        return Table(columns, rows)


def report(*reads: Run, artifacts: Path | str = ARTIFACTS) -> Path:
    """Write one HTML file about these runs and all that they were made from, or the newest run; returns its path."""
    from composer_cli import report as reports

    with errors_in_python():
        return reports.write(Path(artifacts), reports.chain(Path(artifacts), [str(run.path) for run in reads]))


def view(artifacts: Path | str = ARTIFACTS, port: int = 0, tell: Callable[[str], None] = print) -> None:
    """Show all runs and rollouts on a local web page until Ctrl-C, or until a notebook's cell is interrupted.

    tell: called with the page's address once it answers. port: 0 for a free one.
    """
    from composer_cli.view import app

    with errors_in_python():
        app.serve(Path(artifacts), port, tell)
