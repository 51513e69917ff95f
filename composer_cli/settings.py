"""Settings of a stage, and presets: chains of stages in TOML.

A stage's configuration is built from layers: defaults underneath, then files in order, then what was typed. A preset
gives its entries a layer between defaults and files, and writes a stage that is run for several arms and seeds once.
Presets that are shipped lie in `presets/`; a user's own file works the same. Every mistake is one sentence.
"""

import json
import tomllib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo

from stages import STAGES, command_words
from stages.backends import engine
from stages.errors import UsageError, refusal
from stages.runs.settings import Settings, StageConfig
from stages.runs.stage import load_stage
from stages.runs.store import nearest

Tree = dict[str, Any]
Config = TypeVar("Config", bound=Settings)
SHIPPED = Path(__file__).parent / "presets"
EXAMPLES = Path(__file__).parent / "examples"
"""The repository's folder of that name; an installed Composer holds a copy, for use from any folder."""


# Layers of settings, and the configuration that they make.


def build(stage: str, config: type[Config], layers: Iterable[Tree]) -> Config:
    """Return a stage's configuration from layers of settings, later ones over earlier ones."""
    merged: Tree = {}
    for layer in layers:
        merged = merge(merged, expanded(config, layer))
    try:
        return config.model_validate(merged)
    except ValidationError as error:
        raise UsageError(_explain(stage, config, error, merged)) from None


def expanded(config: type[BaseModel], layer: Tree) -> Tree:
    """Return a layer with the table that each group's text stands for, so that the layers below keep the rest of it."""
    groups = {name: _group(field.annotation) for name, field in config.model_fields.items()}
    short = {name: getattr(group, "text_sets", None) for name, (group, many) in groups.items() if group and not many}
    return {
        key: {short[key]: str(value)} if isinstance(value, (str, Path)) and short.get(key) else value
        for key, value in layer.items()
    }


def merge(below: Tree, above: Tree) -> Tree:
    """Return both trees in one; where both have a value for a key, `above` wins."""
    joined = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(joined.get(key), dict)
        joined[key] = merge(joined[key], value) if both else value
    return joined


def read_file(path: Path) -> Tree:
    """Return a TOML file as a tree."""
    try:
        return tomllib.loads(read_toml_text(path))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}.") from None


def read_files(paths: Iterable[Path], own: Container[str], whose: str, notify: Callable[[str], None]) -> list[Tree]:
    """Return TOML files as trees, without the settings that other stages have and none of these; says what is left out.

    One file can so serve all stages. own: the names that mean something here; what no stage knows stays, and is refused
    as unknown. whose: who lacks the others, for people.
    """
    trees = list[Tree]()
    for path in paths:
        tree = read_file(path)
        # Other stages are imported for such keys alone.
        others = [key for key, value in tree.items() if key not in own and _of_a_stage(key, value)]
        if others:
            notify(f"{path}: {', '.join(others)} left out, which other stages have and {whose} does not.")
        trees.append({key: value for key, value in tree.items() if key not in others})
    return trees


def _of_a_stage(key: str, value: Any) -> bool:
    """Return whether a key is a setting of some stage, or a stage's own table."""
    return (key in STAGES and isinstance(value, dict)) or any(
        key in load_stage(stage).config.model_fields for stage in STAGES
    )


def read_for_stage(stage: str, paths: Iterable[Path], notify: Callable[[str], None]) -> list[Tree]:
    """Return TOML files as layers of a stage's settings: those of all stages, and over them the stage's own table."""
    fields = load_stage(stage).config.model_fields
    return [
        merge({key: value for key, value in tree.items() if key != stage}, tree[stage])
        if isinstance(tree.get(stage), dict) and stage not in fields
        else tree
        for tree in read_files(paths, {*fields, stage}, stage, notify)
    ]


def read_for_preset(preset: "Preset", paths: Iterable[Path], notify: Callable[[str], None]) -> list[Tree]:
    """Return TOML files as layers of a chain's settings, as `by_entry` reads them, and the table of its executor."""
    stages = {entry.stage for entry in preset.stage}
    fields = {key for stage in stages for key in load_stage(stage).config.model_fields}
    titles = {entry.title for entry in preset.stage}
    return read_files(paths, {*stages, *fields, *titles, "on"}, "this preset", notify)


def read_toml_text(path: Path) -> str:
    """Return the text of a TOML file."""
    try:
        return path.read_text()
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}).{nearest(path)} Give a TOML file.") from None


def read_table(path: Path, key: str) -> Tree:
    """Return a TOML file that holds the tables `key` and nothing else."""
    found = read_file(path)
    if found.keys() != {key}:
        held = ", ".join(found) or "nothing"
        raise UsageError(f"{path} holds {held}, but [[{key}]] tables are needed, and nothing beside them.")
    return found


def assignment(text: str) -> Tree:
    """Return `a.b=value` as a tree. The value is read as TOML; what is no TOML value is a string."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not all(key.split(".")):
        raise UsageError(
            f"--set {text!r} is not understood. Write KEY=VALUE, for example --set policy.temperature=0.7."
        )
    # A value with a line break could be a whole document: then there are other keys than `value`, and it is a string.
    try:
        parsed = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        parsed = {}
    return nested(key, parsed["value"] if parsed.keys() == {"value"} else value)


def assignment_text(key: str, value: Any) -> str:
    """Return a setting as the text that `assignment` reads; `UsageError` for a value that TOML lacks."""
    if value is None:
        raise UsageError(f"{key} = None cannot be written as KEY=VALUE. Give it in a preset of your own.")
    if isinstance(value, Mapping):
        held = (assignment_text(json.dumps(name), one) for name, one in value.items())
        return f"{key}={{{', '.join(held)}}}"
    if isinstance(value, (list, tuple)):
        return f"{key}=[{', '.join(assignment_text('', one)[1:] for one in value)}]"
    # A text of JSON is one of TOML without its pairs of surrogates, and so are its numbers and truth values.
    text = json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)
    return f"{key}={text}".replace("\x7f", "\\u007f")


def nested(key: str, value: Any) -> Tree:
    """Return {"a": {"b": value}} for the key a.b."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def known(config: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield all settings as dotted keys with their declarations, groups included; `N` is an index, `NAME` a name."""
    for name, field in config.model_fields.items():
        group, many = _group(field.annotation)
        if group is None:
            yield prefix + name, field
        else:
            yield from known(group, f"{prefix}{name}.{many}")


def _group(annotation: Any) -> tuple[type[BaseModel] | None, str]:
    """Return the group of settings that an annotation holds, if any, and the part between its name and its keys."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, ""
    inner = [_group(argument)[0] for argument in get_args(annotation)]
    group = next((g for g in inner if g is not None), None)
    origin = getattr(annotation, "__origin__", None)
    return group, "N." if origin in (list, tuple) else "NAME." if origin is dict else ""


def parts(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a setting and all that it holds (settings models, dicts, lists), each with its dotted key."""
    yield key, value
    named: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, BaseModel):
        named = ((field, getattr(value, field)) for field in type(value).model_fields)
    elif isinstance(value, dict):
        named = value.items()
    elif isinstance(value, (list, tuple)):
        named = enumerate(value)
    for name, part in named:
        yield from parts(f"{key}.{name}", part)


def default_of(field: FieldInfo) -> Any:
    """Return the default of a setting; None where there is none."""
    return None if field.is_required() else field.get_default(call_default_factory=True)


def _explain(stage: str, config: type[BaseModel], error: ValidationError, given: Tree) -> str:
    """Return what a configuration was refused for: one sentence, or a line for each of several problems.

    Unknown keys come first: a setting that is missing is often one that was misspelt.
    """
    order = {"extra_forbidden": 0, "missing": 2}
    problems = sorted(error.errors(include_url=False), key=lambda problem: order.get(problem["type"], 1))
    sentences = list(dict.fromkeys(_problem(stage, config, problem, given) for problem in problems))
    if len(sentences) == 1:
        return sentences[0]
    return "\n".join([f"{stage} cannot take these settings:", *(f"- {sentence}" for sentence in sentences)])


def _problem(stage: str, config: type[BaseModel], problem: Mapping[str, Any], given: Tree) -> str:
    """Return one problem in a sentence; of an entry of a list, such as a teacher, with the name that it was given."""
    key = ".".join(map(str, problem["loc"]))
    of = ""
    entry: Any = given
    for part in problem["loc"]:
        within = isinstance(entry, list) and isinstance(part, int) and part < len(entry)
        entry = entry[part] if within else entry.get(part) if isinstance(entry, dict) else None
        if within and isinstance(entry, dict) and (name := entry.get("name") or entry.get("model")):
            of = f" (of {name})"
    if problem["type"] == "extra_forbidden":
        # The nearest setting: one that ends alike wherever it is (`rank` for `adapter.rank`), else one spelt alike.
        names = [name for name, _ in known(config)]
        generic = ".".join("N" if part.isdigit() else part for part in key.split("."))
        groups = dict.fromkeys(name.partition(".")[0] for name in names)
        same_leaf = [name for name in names if name.rpartition(".")[2] == generic.rpartition(".")[2]]
        near = same_leaf or get_close_matches(generic, [*names, *groups], n=1, cutoff=0.5)
        if not near:
            return f"{stage} has no setting {key}{of}. It has: {', '.join(groups)}."
        return f"{stage} has no setting {key}{of}. Did you mean {near[0]}? `{command_words(stage)} --help` lists all."
    if problem["type"] == "missing":
        if stage in STAGES and key in STAGES[stage].positionals:
            return f"{stage} needs {key}. Write `{command_words(stage)} {STAGES[stage].usage}`."
        return f"{stage} needs the setting {key}{of}, which is not given."
    # The text of a whole object, such as a run, is cut.
    first, *more = repr(problem["input"]).splitlines() or [""]
    # Of a table with several settings the reason names those that are meant.
    value = "" if isinstance(problem["input"], dict) and problem["type"] == "value_error" else f" = {first}"
    where = f"{key}{value}{'…' if more else ''}{of}" if key else "these settings"
    return f"{stage} cannot take {where}: {refusal(problem)}."


# Presets.


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

    def entries(self) -> list["PresetEntry"]:
        """Return the entries that arms and seeds make of this one, else itself alone; `ValueError` for its names."""
        if not (self.arms or self.seeds):
            return [self]
        chosen = {"arm": self.arms, "seed": self.seeds}
        if self.name or (twice := [key for key, made in chosen.items() if made and key in self.config]):
            what = "a name" if self.name else f"config.{twice[0]}"
            raise ValueError(
                f"{self.title} has {what}, and its arms and seeds give each entry its own; leave {what} out"
            )
        made = []
        for seed in range(self.seeds) if self.seeds else [None]:
            for arm, own in (self.arms or {"": {}}).items():
                reads, more = own.get("from", []), {key: value for key, value in own.items() if key != "from"}
                if isinstance(reads, str):
                    sentence = f"from of the arm {arm} is {reads!r}, but it should be a list of entries"
                    raise ValueError(sentence)  # noqa: TRY004 (which pydantic turns into a refused setting)
                named: dict[str, Any] = {"arm": arm} if arm else {}
                named |= {} if seed is None else {"seed": seed}
                title = "-".join(map(str, named.values())) if arm else f"{self.stage}-{seed}"
                update: dict[str, Any] = {"name": title, "reads": [*self.reads, *reads], "arms": {}, "seeds": None}
                config = merge(merge(self.config, more), named)
                made.append(self.model_copy(update={**update, "config": config}))
        return made

    @property
    def title(self) -> str:
        """Its name."""
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
    """Go on also after an entry that judges itself not ok: its findings are part of what the last entry shows."""
    stage: list[PresetEntry] = Field(min_length=1)

    @field_validator("stage")
    @classmethod
    def _each_alone(cls, given: list[PresetEntry]) -> list[PresetEntry]:
        """Return the entries, of arms and seeds one each; a stage that is read is all entries of it until there."""
        made = list[PresetEntry]()
        for entry in (one for each in given for one in each.entries()):
            titles = [one.title for one in made]
            read = [
                title
                for name in entry.reads
                for title in ([name] if name in titles else [o.title for o in made if o.stage == name] or [name])
            ]
            made.append(entry.model_copy(update={"reads": read}))
        return made

    def groups(self) -> list[list[PresetEntry]]:
        """Return the entries in groups of neighbours that may run at the same time."""
        numbered = groupby(enumerate(self.stage), lambda item: item[1].parallel or item[0])
        return [[entry for _, entry in group] for _, group in numbered]


def preset_names() -> list[str]:
    """Return the names of the shipped presets."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def load_preset(wanted: str | None) -> Preset:
    """Return a shipped preset by name, or a user's own by path; raises `UsageError` for an invalid one.

    `examples/NAME.toml` is the one that came with Composer where the current folder has none of that name.
    """
    names = preset_names()
    if wanted is None:
        raise UsageError(f"Which preset? Give --preset NAME. There are: {', '.join(names)}; or give a TOML file.")
    path = SHIPPED / f"{wanted}.toml" if wanted in names else Path(wanted)
    shipped_example = EXAMPLES / path.name
    if not path.exists() and path.parent == Path("examples") and shipped_example.exists():
        path = shipped_example
    if path.suffix != ".toml":
        near = "".join(f" Did you mean {one!r}?" for one in get_close_matches(wanted, names, 1))
        raise UsageError(f"There is no preset {wanted!r}.{near} There are: {', '.join(names)}; or give a TOML file.")
    tree = read_file(path)
    if not tree.get("stage"):
        raise UsageError(f"{path} is no preset: it has no [[stage]] tables. `-c FILE` reads a file of settings.")
    try:
        preset = Preset.model_validate(_with_example_paths(tree) if path.parent == EXAMPLES else tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        given = "" if first["type"] in ("missing", "extra_forbidden", "value_error") else f" = {first['input']!r}"
        raise UsageError(f"{path} is no preset: {where}{given}: {refusal(first)}.") from None
    earlier: list[str] = []
    for entry in preset.stage:
        if entry.title in earlier:
            raise UsageError(f"{path}: two entries are called {entry.title!r}. Give each a name of its own.")
        for name in entry.reads:
            if name not in earlier:
                raise UsageError(f"{path}: {entry.title} reads {name!r}, but no earlier entry is called so: {earlier}.")
        if entry.on:
            engine.check_engine(entry.on)
            if entry.parallel or not load_stage(entry.stage).work:
                why = "its stage deals no units" if not entry.parallel else "it may run beside others"
                raise UsageError(f"{path}: {entry.title} has on = {entry.on!r}, but {why}. Remove `on` there.")
        earlier.append(entry.title)
    return preset


def unlike_presets(config: StageConfig) -> str | None:
    """Return which channels a training has that the shipped presets' arm of its name lacks, in words; else None.

    The name is a label alone: what an arm learns from are its weights.
    """
    weights, arm = getattr(config, "weights", None), getattr(config, "arm", None)
    if weights is None:
        return None
    trainings = [one.config for name in preset_names() for one in load_preset(name).stage if one.stage == "train"]
    known_arms = {own["arm"]: own.get("weights", {}) for own in trainings if "arm" in own}
    more = [f"{name} = {weight:g}" for name, weight in weights.active().items() if name not in known_arms.get(arm, {})]
    if arm not in known_arms or not more:
        return None
    return (
        f"arm {arm} has {', '.join(more)}, while the shipped presets' arm {arm} has none. The name is a label alone: "
        "what the arm learns from are its weights."
    )


def _with_example_paths(value: Any) -> Any:
    """Return settings of a shipped example with full paths for the files in its folder."""
    if isinstance(value, dict):
        return {
            name: inner if name in ("about", "next") else _with_example_paths(inner) for name, inner in value.items()
        }
    if isinstance(value, list):
        return [_with_example_paths(one) for one in value]
    before, found, name = value.rpartition("examples/") if isinstance(value, str) else ("", "", "")
    return f"{before}{EXAMPLES / name}" if found and (EXAMPLES / name).is_file() else value


def configure_preset(preset: Preset, layers: Sequence[Tree]) -> dict[str, StageConfig]:
    """Return the configuration of every entry by title, from layers as `by_entry` reads them."""
    models = {entry.title: load_stage(entry.stage).config for entry in preset.stage}
    merged: Tree = {}
    for layer in layers:
        of_entries = by_entry(preset, layer).items()
        merged = merge(merged, {title: expanded(models[title], tree) for title, tree in of_entries})
    configs: dict[str, StageConfig] = {}
    same: dict[tuple[str, ...], str] = {}
    for entry in preset.stage:
        try:
            above = merged.get(entry.title, {})
            made: StageConfig = build(entry.stage, models[entry.title], [entry.config, above])
            reads = [(other.stage, configs[other.title]) for other in preset.stage if other.title in entry.reads]
            load_stage(entry.stage).check_reads(made, reads)
        except UsageError as error:
            raise UsageError(f"{entry.title}: {error}" if entry.title != entry.stage else str(error)) from None
        # Not `identity`, which reads models' folders: those of an executor are on another machine.
        work = (entry.stage, *entry.reads, made.model_dump_json())
        if (other := same.setdefault(work, entry.title)) != entry.title:
            raise UsageError(
                f"{other} and {entry.title} would be one run: the same stage, settings and inputs. Leave out the "
                "setting that makes them equal, such as seed, or one of them."
            )
        configs[entry.title] = made
    return configs


def by_entry(preset: Preset, layer: Tree) -> Tree:
    """Return a layer of a chain's settings by the titles of its entries, the nearer name over the wider one.

    They are given by title (`collect.tasks=5`), by stage for all its entries (`train.adapter.rank=8`), or by key alone
    for all entries that have it (`env.name=tasks`), as in the settings file of one stage.
    """
    entries = {entry.title: load_stage(entry.stage).config for entry in preset.stage}
    of_stage = {one.stage: [other.title for other in preset.stage if other.stage == one.stage] for one in preset.stage}
    widths: list[Tree] = [{}, {}, {}]
    for name, value in layer.items():
        having = [title for title, config in entries.items() if name in config.model_fields]
        if isinstance(value, dict) and (name in entries or name in of_stage):
            widths[2 if name in entries else 1] |= dict.fromkeys([name] if name in entries else of_stage[name], value)
        elif having and name not in entries:
            widths[0] = merge(widths[0], {title: {name: value} for title in having})
        else:
            known_names = [*entries, *of_stage, *(key for config in entries.values() for key in config.model_fields)]
            near = [f" Did you mean {one}?" for one in get_close_matches(name, known_names, 1)]
            raise UsageError(
                f"This preset has no entry {name!r}, and none of its stages such a setting.{''.join(near)} A setting "
                "is named ENTRY.KEY, STAGE.KEY for all entries of a stage, or KEY for all that have it; the entries "
                f"are: {', '.join(entries)}."
            )
    return merge(merge(widths[0], widths[1]), widths[2])


def for_every_entry(preset: Preset, key: str, value: str, prefix: str = "") -> list[Tree]:
    """Return layers that give one setting to every entry that has it.

    Where the entry's own value begins with `prefix` and the new one does not, the prefix is kept.
    """
    layers: list[Tree] = []
    for entry in preset.stage:
        if key not in dict(known(load_stage(entry.stage).config)):
            continue
        own: Any = entry.config
        for part in key.split("."):
            own = own.get(part, {}) if isinstance(own, dict) else {}
        keep = isinstance(own, str) and own.startswith(prefix) and not value.startswith(prefix)
        layers.append({entry.title: nested(key, f"{prefix}{value}" if keep else value)})
    return layers
