"""Presets: chains of stages in TOML, and the settings of their entries.

A preset gives its entries a layer of settings between defaults and files, and writes a stage that is run for several
arms and seeds once. Presets that are shipped lie in `presets/`; a user's own file works the same.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from composer_cli.trust import require_trusted_servers
from composer_stages import STAGES
from composer_stages.backends import engine
from composer_stages.errors import UsageError, refusal
from composer_stages.policy.base import VLLM
from composer_stages.runs.settings import (
    FileTree,
    Settings,
    StageConfig,
    Tree,
    build,
    known,
    merge,
    nested,
    origin,
    read_file,
)
from composer_stages.runs.stage import load_stage, read_files
from composer_stages.words import Sentence

SHIPPED = Path(__file__).parent / "presets"
EXAMPLES = Path(__file__).parent / "examples"
"""The repository's folder of that name; an installed Composer holds a copy, for use from any folder."""


class PresetEntry(Settings):
    """One run of a stage."""

    stage: str
    name: str = ""
    """What people and later entries call it; the stage when empty."""
    reads: list[str] = Field(default=[], alias="from")
    """Earlier entries whose runs it reads."""
    parallel: str = ""
    """Neighbours with the same word may run at the same time, each as soon as those that it reads have ended."""
    on: str = ""
    """Workers among whom its units are dealt, where `composer run` has no other --on."""
    gpus: int | None = Field(default=None, ge=0)
    """GPUs that it takes where there are any, or each of its workers; None: one if it loads a model, else none."""
    config: dict[str, Any] = Field(default_factory=dict)
    arms: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """An entry for each arm, called after it: its settings over `config`, and as `from` what it reads besides."""
    seeds: int | None = Field(default=None, gt=0)
    """An entry for each seed from 0 on, and for each arm: A-0, B-0, A-1, B-1."""
    rounds: int | None = Field(default=None, gt=1)
    """Neighbours with equal `rounds` are repeated so often, one round after the other: collect-1, train-1, collect-2.
    What they read from each other is of their own round."""
    before: list[str] = Field(default=[])
    """Entries of its block of rounds of which it reads that of the round before; in the first round none."""
    so_far: list[str] = Field(default=[])
    """Entries of its block of which it reads those of all rounds up to its own."""
    by_round: dict[str, list[Any]] = Field(default_factory=dict)
    """Settings that differ from round to round: their values in order, {"rollouts.mixed" = [0.5, 0.2, 0.0]}."""

    def entries(self) -> list["PresetEntry"]:
        """Return the entries that arms and seeds make of this one, else itself alone; `ValueError` for its names."""
        if not (self.arms or self.seeds):
            return [self]
        chosen = {"arm": self.arms, "seed": self.seeds}
        if self.name or (twice := [key for key, values in chosen.items() if values and key in self.config]):
            setting = "a name" if self.name else f"config.{twice[0]}"
            raise ValueError(Sentence("cli.name-beside-arms", title=self.title, name=setting))
        entries = []
        for seed in range(self.seeds) if self.seeds else [None]:
            for arm, changes in (self.arms or {"": {}}).items():
                reads, more = changes.get("from", []), {key: value for key, value in changes.items() if key != "from"}
                if isinstance(reads, str):
                    sentence = Sentence("cli.arm-from-not-list", arm=arm, reads=reads)
                    raise ValueError(sentence)  # noqa: TRY004 (which pydantic turns into a refused setting)
                named: dict[str, Any] = {"arm": arm} if arm else {}
                named |= {} if seed is None else {"seed": seed}
                title = "-".join(map(str, named.values())) if arm else f"{self.stage}-{seed}"
                update: dict[str, Any] = {"name": title, "reads": [*self.reads, *reads], "arms": {}, "seeds": None}
                config = merge(merge(self.config, more), named)
                entries.append(self.model_copy(update={**update, "config": config}))
        return entries

    def in_round(self, number: int, block: Collection[str]) -> "PresetEntry":
        """Return the entry of one round, counted from 1; `ValueError` for what rounds cannot be. block: its titles."""
        if strange := [name for name in (*self.before, *self.so_far) if name not in block]:
            raise ValueError(Sentence("cli.not-of-the-rounds", title=self.title, name=strange[0], block=block))
        if self.arms or self.seeds:
            raise ValueError(Sentence("cli.arms-in-rounds", title=self.title))
        config = self.config
        for key, values in self.by_round.items():
            if len(values) != self.rounds:
                raise ValueError(Sentence("cli.values-by-round", title=self.title, key=key, values=values))
            config = merge(config, nested(key, values[number - 1]))
        reads = [f"{name}-{number}" if name in block else name for name in self.reads]
        reads += [f"{name}-{number - 1}" for name in self.before if number > 1]
        reads += [f"{name}-{earlier + 1}" for name in self.so_far for earlier in range(number)]
        alone: dict[str, Any] = {"rounds": None, "before": [], "so_far": [], "by_round": {}}
        name = f"{self.title}-{number}"
        return self.model_copy(update={"name": name, "reads": reads, "config": config, **alone})

    @property
    def title(self) -> str:
        """Return the name of the entry."""
        return self.name or self.stage

    def gpus_for(self, config: StageConfig) -> int:
        """Return the number of GPUs that it takes with these settings, where there are any."""
        return int(config.uses_gpu()) if self.gpus is None else self.gpus


class Preset(Settings):
    """A chain, in the order in which it runs."""

    about: str = ""
    next: str = ""
    """What to type afterwards."""
    to_the_end: bool = False
    """Go on also after an entry that judges itself not ok, or leaves that open to entries that read it: its findings
    are part of what the last entry shows."""
    stage: list[PresetEntry] = Field(min_length=1)

    @field_validator("stage")
    @classmethod
    def _each_alone(cls, declared: list[PresetEntry]) -> list[PresetEntry]:
        """Return the entries, of rounds, arms and seeds one each; a stage that is read is all entries of it so far."""
        expanded = list[PresetEntry]()
        for entry in (entry for each in _in_rounds(declared) for entry in each.entries()):
            titles = [entry.title for entry in expanded]
            read = [
                title
                for name in entry.reads
                for title in ([name] if name in titles else [o.title for o in expanded if o.stage == name] or [name])
            ]
            expanded.append(entry.model_copy(update={"reads": read}))
        return expanded

    def to_run(self, to_the_end: bool) -> "Preset":
        """Return the chain, which goes on to the end if it does so by itself or is asked to."""
        return self.model_copy(update={"to_the_end": self.to_the_end or to_the_end})

    def groups(self) -> list[list[PresetEntry]]:
        """Return the entries in groups of neighbours that may run at the same time."""
        numbered = groupby(enumerate(self.stage), lambda item: item[1].parallel or item[0])
        return [[entry for _, entry in group] for _, group in numbered]


def _in_rounds(declared: Iterable[PresetEntry]) -> Iterator[PresetEntry]:
    """Yield the entries, neighbours with equal rounds once in each round."""
    for rounds, neighbours in groupby(declared, lambda entry: entry.rounds):
        block = list(neighbours)
        titles = [entry.title for entry in block]
        if rounds is None:
            if partial := [entry for entry in block if entry.before or entry.so_far or entry.by_round]:
                raise ValueError(Sentence("cli.no-rounds", title=partial[0].title))
            yield from block
        else:
            yield from (entry.in_round(number + 1, titles) for number in range(rounds) for entry in block)


def preset_names() -> list[str]:
    """Return the names of the shipped presets."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def load_preset(reference: str | None) -> Preset:
    """Return a shipped preset by name, or a user's own by path; raises `UsageError` for an invalid one.

    `examples/NAME.toml` is the one that came with Composer where the current folder has none of that name.
    """
    names = preset_names()
    if reference is None:
        raise UsageError("cli.no-preset-given", presets=names)
    path = SHIPPED / f"{reference}.toml" if reference in names else Path(reference)
    shipped_example = EXAMPLES / path.name
    if not path.exists() and path.parent == Path("examples") and shipped_example.exists():
        path = shipped_example
    if path.suffix != ".toml":
        raise UsageError("cli.no-preset", reference=reference, presets=names)
    tree = read_file(path)
    if not tree.get("stage"):
        raise UsageError("cli.no-stage-tables", path=path)
    if isinstance(tree["stage"], dict):
        raise UsageError("cli.single-stage-table", path=path)
    try:
        preset = Preset.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        input_value = (
            {} if first["type"] in ("missing", "extra_forbidden", "value_error") else {"value": first["input"]}
        )
        raise UsageError("cli.invalid-preset", path=path, key=where, refusal=refusal(first), **input_value) from None
    earlier: list[str] = []
    for entry in preset.stage:
        if entry.title in earlier:
            raise UsageError("cli.equal-entry-names", path=path, title=entry.title)
        for name in entry.reads:
            if name not in earlier:
                raise UsageError(
                    "cli.no-earlier-entry", path=path, title=entry.title, name=name, earlier=earlier, stages=[*STAGES]
                )
        if entry.on:
            engine.check_engine(entry.on)
            if entry.parallel or not load_stage(entry.stage).work:
                raise UsageError(
                    "cli.on-not-possible", path=path, title=entry.title, on=entry.on, may_overlap=bool(entry.parallel)
                )
        earlier.append(entry.title)
    return preset


def read_for_preset(preset: Preset, paths: Iterable[Path], notify: Callable[[str], None]) -> list[Tree]:
    """Return TOML files as layers of a chain's settings, as `by_entry` reads them, and the table of its executor."""
    stages = {entry.stage for entry in preset.stage}
    fields = {key for stage in stages for key in load_stage(stage).config.model_fields}
    titles = {entry.title for entry in preset.stage}
    return read_files(paths, {*stages, *fields, *titles, "on"}, "this preset", notify)


def describe_unlike_presets(config: StageConfig) -> str | None:
    """Return which channels a training has that the shipped presets' arm of its name lacks, in words; else None.

    The name is a label alone: what an arm learns from are its weights.
    """
    weights, arm = getattr(config, "weights", None), getattr(config, "arm", None)
    if weights is None:
        return None
    trainings = [entry.config for name in preset_names() for entry in load_preset(name).stage if entry.stage == "train"]
    known_arms = {training["arm"]: training.get("weights", {}) for training in trainings if "arm" in training}
    more = [f"{name} = {weight:g}" for name, weight in weights.active().items() if name not in known_arms.get(arm, {})]
    if arm not in known_arms or not more:
        return None
    return Sentence("cli.arm-unlike-presets", arm=arm, weights=more)


def configure_preset(
    preset: Preset, files: Sequence[Tree], typed: Sequence[Tree] = (), *, policy: str | None = None, trust: bool = False
) -> dict[str, StageConfig]:
    """Return the configuration of every entry by title: from the preset, files, the policy, then what was typed.

    files, typed: layers as `by_entry` reads them. policy: the model that every entry starts from. trust: whether files
    may send a provider's key elsewhere; the preset is a file like the others.
    """
    chosen = for_every_entry(preset, "policy.model", policy, prefix=VLLM) if policy else []
    layers = [by_entry(preset, layer) for layer in (*files, *chosen, *typed)]
    configs: dict[str, StageConfig] = {}
    same: dict[tuple[str, ...], str] = {}
    for entry in preset.stage:
        try:
            above = [layer[entry.title] for layer in layers if entry.title in layer]
            built: StageConfig = build(entry.stage, load_stage(entry.stage).config, [entry.config, *above])
            reads = [(source.stage, configs[source.title]) for source in preset.stage if source.title in entry.reads]
            as_recorded = [(stage, config.model_dump(mode="json")) for stage, config in reads]
            built = load_stage(entry.stage).inherit(built, as_recorded)
            load_stage(entry.stage).check_reads(built, reads)
        except UsageError as error:
            refusal = Sentence(error.code, **error.values)
            if entry.title == entry.stage:
                raise UsageError(refusal) from None
            raise UsageError("cli.entry-refused", entry=entry.title, refusal=refusal) from None
        if (seeds := len(built.each_seed())) > 1:
            raise UsageError("cli.seeds-of-entry", entry=entry.title, seeds=seeds)
        # Not `identity`, which reads models' folders: those of an executor are on another machine.
        work = (entry.stage, *entry.reads, built.model_dump_json())
        if (first := same.setdefault(work, entry.title)) != entry.title:
            raise UsageError("cli.equal-entries", first=first, title=entry.title)
        configs[entry.title] = built
    for title, config in configs.items():
        typed_here = [layer[title] for layer in layers[len(layers) - len(typed) :] if title in layer]
        require_trusted_servers(title, config, typed_here, trust=trust)
    return configs


def by_entry(preset: Preset, layer: Tree) -> Tree:
    """Return a layer of a chain's settings by the titles of its entries, the nearer name over the wider one.

    They are given by title (`collect.tasks=5`), by stage for all its entries (`train.adapter.rank=8`), or by key alone
    for all entries that have it (`env.name=tasks`), as in the settings file of one stage.
    """
    entries = {entry.title: load_stage(entry.stage).config for entry in preset.stage}
    of_stage: dict[str, list[str]] = {}
    for entry in preset.stage:
        of_stage.setdefault(entry.stage, []).append(entry.title)
    widths: list[Tree] = [{}, {}, {}]
    for name, value in layer.items():
        having = [title for title, config in entries.items() if name in config.model_fields]
        if isinstance(value, dict) and (name in entries or name in of_stage):
            widths[2 if name in entries else 1] |= dict.fromkeys([name] if name in entries else of_stage[name], value)
        elif having and name not in entries:
            widths[0] = merge(widths[0], {title: {name: value} for title in having})
        else:
            known_names = [*entries, *of_stage, *(key for config in entries.values() for key in config.model_fields)]
            raise UsageError(
                "cli.no-entry-or-setting", name=name, origin=origin([name], [layer]), known=known_names, entries=entries
            )
    merged = merge(merge(widths[0], widths[1]), widths[2])
    return {title: FileTree.like(layer, tree) for title, tree in merged.items()}


def for_every_entry(preset: Preset, key: str, value: str, prefix: str = "") -> list[Tree]:
    """Return layers that give one setting to every entry that has it.

    Where the entry's own value begins with `prefix` and the new one does not, the prefix is kept.
    """
    layers: list[Tree] = []
    for entry in preset.stage:
        if key not in dict(known(load_stage(entry.stage).config)):
            continue
        current: Any = entry.config
        for part in key.split("."):
            current = current.get(part, {}) if isinstance(current, dict) else {}
        keep = isinstance(current, str) and current.startswith(prefix) and not value.startswith(prefix)
        layers.append({entry.title: nested(key, f"{prefix}{value}" if keep else value)})
    return layers
