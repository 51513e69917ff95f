"""What a stage is, what it plans, which settings of a file it takes, and how it works through its units in batches.

A stage's module ends in `STAGE = Stage(...)`; `stages.STAGES` names the modules, and `load_stage` imports one of them.
What a stage does may be in another module, which is imported when it is called (`later`).
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import islice
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Generic, Protocol, TypeVar

from composer_stages import STAGES
from composer_stages.errors import UsageError
from composer_stages.runs import display
from composer_stages.runs.kinds import Kind, Row
from composer_stages.runs.run import Inputs, Judgement, Run, RunWriter, Slot
from composer_stages.runs.settings import FileTree, StageConfig, Tree, merge, read_file
from composer_stages.words import Sentence, did_you_mean

ConfigT = TypeVar("ConfigT", bound=StageConfig)
Unit = TypeVar("Unit")


@dataclass(frozen=True)
class Plan:
    """Units of work with upper bounds: tokens as if every answer took its full length, prompts not counted.

    >>> plan = composer.collect.plan(tasks=100, samples=4, policy="reference")
    >>> plan.units, plan.what
    (400, 'rollouts')
    """

    units: int
    """Units of work."""
    what: str
    """What a unit is, such as "rollouts"."""
    max_completion_tokens: int = 0
    """Most tokens that are sampled; 0 where they are not known."""
    max_cost_usd: float = 0.0
    """Most that it costs in USD; 0 where nothing is paid or no price is known."""
    notes: tuple[str, ...] = ()
    """Remarks, each a sentence."""
    up_to: bool = False
    """There may be fewer units: the number of tasks is a default, and the split may have fewer."""

    def __repr__(self) -> str:
        return repr(display.of_plan(self))

    def _repr_html_(self) -> str:
        return display.of_plan(self)._repr_html_()


@dataclass(frozen=True)
class Stage(Generic[ConfigT]):
    """A stage: a function from finished runs to one new run, with everything that the runner and the CLI must know.

    Only `inputs` is read and only `out` is written; all randomness comes from `config.seed`; nothing is printed.
    """

    name: str
    """Its key in `stages.STAGES`, and the folder of its runs under `artifacts/`."""
    version: int
    """Raised when the same settings come to mean another result; part of the fingerprint."""
    config: type[ConfigT]
    """The settings: a frozen model that refuses unknown keys. The docstring under each field is its help text."""
    plan: Callable[[Inputs, ConfigT], Plan]
    """Return the units of work with upper bounds on tokens and cost. Reads its inputs and computes nothing."""
    run: Callable[[Inputs, ConfigT, RunWriter], None]
    """Do all units that `out` does not hold yet, then write the tables and the report."""
    inputs: Mapping[str, Slot] = field(default_factory=dict)
    """The runs that it reads, by the name of their slot."""
    outputs: Mapping[str, Kind] = field(default_factory=dict)
    """The tables and folders that it writes, by name. A run may lack some of them."""
    work: Callable[[Inputs, ConfigT, RunWriter], None] | None = None
    """Do the missing units and nothing else: workers call it (`--on`). None when units cannot be dealt to workers."""
    finish: Callable[[Run, ConfigT], None] = lambda run, config: None
    """Write what a call wants outside of the run folder, also of a run that was complete before the call."""
    judge: Callable[[Path, Mapping[str, Any], ConfigT], Judgement] | None = None
    """Return the verdict by a run's folder, with its ledger, and its summary, where limits among the settings decide.

    Such limits change no result, so that a complete run is judged again at every call, by the limits of that call.
    """
    study: Callable[[Sequence[Run], ConfigT, Callable[[str, int, int], None]], tuple[Row, str]] | None = None
    """Simulate the planned run (`--plan`) from pilot runs, and return the numbers as JSON and as text.

    The function that it is given is called with what is counted, how many are simulated, and how many in all.
    """
    example: str = ""
    """A call from Python, as `help` shows it, with what it gives; it is executed by the tests of the documents."""
    inherit: Callable[[ConfigT, Sequence[tuple[str, Tree]]], ConfigT] = lambda config, reads: config
    """Return the settings with what nobody gave taken from the runs that it reads, given as stage and settings of each.

    What is taken counts as given afterwards: it is part of the identity, and nothing is taken twice.
    """
    check_reads: Callable[[ConfigT, Sequence[tuple[str, StageConfig]]], None] = lambda config, reads: None
    """Refuse settings that cannot fit the entries of a chain that it reads, given as stage and settings of each."""
    limit_setting: str | None = None
    """The setting that `--limit` sets; None when there is nothing to cut short."""
    shows_progress: bool = False
    """Whether unfinished units are shown while it runs (`RunWriter.live`, `--watch`)."""
    several_processes: bool = False
    """Whether torchrun may start several processes of it, which share the work of `run`."""
    at_end: tuple[str, ...] = ()
    """Modules that `run` needs after its units, where they are installed. They are imported before it and by a dry run,
    so that nothing is paid for that cannot be finished."""
    preload: tuple[str, ...] = ()
    """Modules that take long to import. One process imports them for all entries of a chain that run in parallel."""


def later(module: str, *names: str) -> dict[str, Any]:
    """Return functions of a module by their names, which import it when they are called.

    A stage whose work needs readers of tables declares it so: its settings, help and refusals then wait for none.
    """

    def function(name: str) -> Callable[..., Any]:
        return lambda *arguments, **keywords: resolve_name(f"{module}:{name}")(*arguments, **keywords)

    return {name: function(name) for name in names}


def load_stage(name: str) -> Stage[Any]:
    """Import the stage of this name; `UsageError` lists the names when there is none."""
    if name not in STAGES:
        raise UsageError("runs.no-stage", name=name, stages=STAGES, nearest=did_you_mean(name, STAGES))
    stage: Stage[Any] = import_module(STAGES[name].module).STAGE
    return stage


def read_for_stage(stage: str, paths: Iterable[Path], notify: Callable[[str], None]) -> list[Tree]:
    """Return TOML files as layers of a stage's settings: those of all stages, and over them the stage's own table."""
    fields = load_stage(stage).config.model_fields
    return [
        FileTree.like(tree, merge({key: value for key, value in tree.items() if key != stage}, tree[stage]))
        if isinstance(tree.get(stage), dict) and stage not in fields
        else tree
        for tree in read_files(paths, {*fields, stage}, stage, notify)
    ]


def read_files(paths: Iterable[Path], names: Container[str], whose: str, notify: Callable[[str], None]) -> list[Tree]:
    """Return TOML files as trees, without settings that belong to other stages only; reports what is left out.

    One file can so serve all stages. names: those that mean something here; what no stage knows stays and is
    refused as unknown. whose: who lacks the others, for people. Raises `UsageError` where the files set nothing here.
    """
    trees, notes = list[Tree](), list[str]()
    for path in paths:
        tree = read_file(path)
        strange = {key: value for key, value in tree.items() if key not in names}
        # Other stages are imported for such keys alone.
        settings = {field for stage in STAGES for field in load_stage(stage).config.model_fields} if strange else set()
        tables = {key for key, value in strange.items() if key in STAGES and isinstance(value, dict)}
        if foreign := [key for key in strange if key in settings or key in tables]:
            notes.append(Sentence("runs.settings-left-out", path=path, foreign=foreign, whose=whose))
        trees.append(FileTree({key: value for key, value in tree.items() if key not in foreign}, path))
    if notes and not any(trees):
        raise UsageError("runs.no-settings-left", notes=notes, whose=whose)
    for note in notes:
        notify(note)
    return trees


def with_inherited(stage: str, inputs: Inputs, config: ConfigT) -> ConfigT:
    """Return a stage's settings with what nobody gave taken from its inputs."""
    reads = [(run.manifest.stage, run.manifest.config) for run in inputs.runs()]
    inherited: ConfigT = load_stage(stage).inherit(config, reads)
    return inherited


class Batched(Protocol):
    """The part of a policy that decides the batches: whether it captures tokens, and the turns of one call.

    config: has `lockstep`, the units that a model in this process works on together.
    """

    capture_level: str
    batch_size: int

    @property
    def config(self) -> Any:
        """Return its settings."""
        ...


def blocks(items: Sequence[Unit], size: int) -> list[Sequence[Unit]]:
    """Return items, such as the names of units, in blocks of `size`: the least that one worker does."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def work_through(
    units: Iterable[Unit],
    key: Callable[[Unit], str],
    do: Callable[[list[Unit]], Iterable[tuple[str, Mapping[str, Any], bool]]],
    *,
    policy: Batched,
    out: RunWriter,
    noun: str,
    shared_value: Any = None,
) -> None:
    """Do every unit that is not finished and write (key, payload, failed) of each.

    Where the run has workers, they do it, a batch or more each, with `shared_value` (`RunWriter.spread`). `units` is
    iterated twice and may be lazy.
    """
    local = policy.capture_level == "tokens"
    # A fixed size for a local model: its arithmetic depends on the shape of a batch, and so would the results.
    size = policy.config.lockstep if local else policy.batch_size
    keys = [key(unit) for unit in units]
    out.spread(blocks(keys, size), noun, shared_value)
    total, waiting = len(keys), iter(units)
    for start in range(0, total, size):
        batch = list(islice(waiting, size))
        missing = [unit for unit in batch if not out.finished(key(unit))]
        out.progress(noun, start, total)
        if missing:
            out.raise_if_stopped()
            # For the same reason a local batch that is partly finished is repeated, and only its missing units are
            # written. Answers of a server cost money: only the missing ones are requested.
            done = list(do(batch if local else missing))
            out.write_all([unit for unit in done if not out.finished(unit[0])])
    out.progress(noun, total, total)
