"""Settings: frozen groups of fields that refuse unknown keys, and the layers from which they are built.

A stage's configuration is built from layers: defaults underneath, then files in order, then what was typed. Every
mistake is one sentence. Which fields determine the results of a run is declared at the fields (`Settings.identity`).
"""

import ast
import inspect
import json
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from itertools import pairwise
from os.path import commonprefix
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_before_validator_function

from composer_stages import STAGES
from composer_stages.errors import UsageError, refusal
from composer_stages.json_text import changed_numbers
from composer_stages.runs.store import encode, nearest
from composer_stages.words import Sentence, words_of_stage

Tree = dict[str, Any]


@dataclass(frozen=True)
class Basic:
    """Marks a field whose setting most runs need, which the short help lists: `tasks: Annotated[int, BASIC]`.

    Of a group, `keys` are the settings in it that most runs need; `*` stands for all of them.
    """

    keys: tuple[str, ...] = ("",)


BASIC = Basic()


def basic_of(*keys: str) -> Basic:
    """Return the mark of a group of which most runs need these settings."""
    return Basic(keys)


@dataclass(frozen=True)
class Option:
    """Marks a field that the command of a stage offers as an option too: `--arm NAME` is short for `--set arm=NAME`.

    The field is one that a text sets: a number, a text, or a group with `text_sets`; or a flag, whose option turns it
    on and has no metavar.
    """

    metavar: str = ""
    help: str = ""
    """What the option is; by default the setting that it is short for."""


@dataclass(frozen=True)
class InFile:
    """Marks a list of groups in whose place a TOML file may be given, which holds its tables and nothing else."""


class Settings(BaseModel):
    """A frozen group of settings that refuses unknown keys; `identity` returns those that determine results."""

    # Groups are built when they are validated by themselves: most are parts of others, which build them too.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)
    preflight: ClassVar[str | None] = None
    """`module:function` that checks the group and returns its finding as a line; imported by a dry run only, because
    checks import models and environments."""
    text_sets: ClassVar[str | None] = None
    """The setting that a text in place of the group sets: `policy="m"` is `policy={"model": "m"}`."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Expand a text to its table, before any validator of a subclass reads the group."""

        def table(value: Any) -> Any:
            return {cls.text_sets: str(value)} if cls.text_sets and isinstance(value, (str, Path)) else value

        return no_info_before_validator_function(table, handler(source))

    @model_validator(mode="before")
    @classmethod
    def _check_numbers(cls, values: Any) -> Any:
        # pydantic turns `true` and "1" into 1 without an error; orjson, which writes digests and manifests, takes
        # integers of 64 bits only, and would fail after the work has begun.
        for name, field in cls.model_fields.items() if isinstance(values, dict) else ():
            numbers = {field.annotation, *get_args(field.annotation)}
            if isinstance(values.get(name), bool) and numbers & {int, float} and bool not in numbers:
                raise ValueError(Sentence("runs.number-is-boolean", name=name, values=str(values[name]).lower()))
            text = values.get(name)
            if isinstance(text, str) and numbers & {int, float} and str not in numbers and _is_number(text):
                number = int(text) if text.strip().lstrip("+-").isdecimal() else float(text)
                raise ValueError(Sentence("runs.number-is-text", name=name, text=text, number=number))
            if isinstance(values.get(name), int) and not -(2**63) <= values[name] < 2**63:
                raise ValueError(Sentence("runs.number-too-large", name=name, values=values[name]))
            # What a table of any keys holds is of no type that pydantic could check.
            if Any in get_args(field.annotation) and name in values:
                values = {**values, name: _paths_as_texts(values[name])}
                if lost := next(changed_numbers(values[name]), None):
                    raise ValueError(Sentence("runs.number-not-finite", name=name, lost=lost))
                try:
                    encode(values[name])
                except TypeError as error:
                    raise ValueError(Sentence("runs.setting-not-json", name=name, error=error)) from None
        return values

    def identity(self) -> dict[str, Any]:
        """Return the fields that affect results, as JSON.

        A field declared with `json_schema_extra={"affects_results": False}` is left out.
        """
        values = {}
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if not (isinstance(extra, dict) and extra.get("affects_results") is False):
                values[name] = _identity(getattr(self, name))
        return values

    def check(self) -> list[str]:
        """Return what was checked outside of this program (models, servers), a line each; raise for what is missing.

        A group that needs something overrides this method or names `preflight`; all others check the groups inside.
        """
        if self.preflight is not None:
            return [resolve_name(self.preflight)(self)]
        # Two groups may name the same model: its line is kept once, in the order of the first.
        return list(dict.fromkeys(line for group in self._inside() for line in group.check()))

    def uses_gpu(self) -> bool:
        """Return whether the process of a stage with this group takes a GPU where there is one.

        A group that loads a model overrides this method; all others ask the groups inside.
        """
        return any(group.uses_gpu() for group in self._inside())

    def _inside(self) -> "Iterator[Settings]":
        """Yield the groups inside, without those inside of them."""
        return _groups([getattr(self, name) for name in type(self).model_fields])


class StageConfig(Settings):
    """The configuration of a stage."""

    seed: Annotated[int, BASIC, Option("N")] = 0
    """All randomness of the stage comes from here."""

    def label(self) -> str:
        """Return a word for the name of the run folder."""
        return "run"

    def each_seed(self) -> "list[StageConfig]":
        """Return the settings of every run that these ask for: one, or several that differ in the seed alone."""
        return [self]

    def reads_runs(self) -> bool:
        """Return whether the stage reads runs where none was named: those that it needs are chosen then."""
        return True

    def with_tasks_drawn(self) -> "StageConfig":
        """Return the settings with as many tasks as there are, in place of a default that is larger."""
        return self


def _paths_as_texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _paths_as_texts(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_paths_as_texts(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _identity(value: Any) -> Any:
    if isinstance(value, Settings):
        return value.identity()
    if isinstance(value, (list, tuple)):
        return [_identity(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _identity(item) for key, item in value.items()}
    return value


def _groups(value: Any) -> Iterator[Settings]:
    """Yield the groups that a value is or holds, without those inside of them."""
    if isinstance(value, Settings):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _groups(item)


# Layers of settings, and the configuration that they make.

Config = TypeVar("Config", bound=Settings)


def build(stage: str, config: type[Config], layers: Iterable[Tree]) -> Config:
    """Return a stage's configuration from layers of settings, later ones over earlier ones."""
    merged, read = Tree(), list[Tree]()
    lists = [name for name, field in config.model_fields.items() if InFile() in field.metadata]
    for values in layers:
        layer = FileTree.like(values, expanded(config, values))
        read.append(layer)
        for key in lists:
            if isinstance(value := layer.get(key), (str, Path)):
                read.append(table := read_table(Path(value), key))
                layer = {**layer, **table}
        merged = merge(merged, layer)
    try:
        return config.model_validate(merged)
    except ValidationError as error:
        raise _refused(stage, config, error, merged, read) from None


def expanded(config: type[BaseModel], layer: Tree) -> Tree:
    """Return a layer in which each group's text is expanded to its table, so that layers below keep the other keys."""
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


MOST_BYTES = 8 * 2**20
"""Bytes of the largest file of settings: a million unknown keys took 30 s to be read and refused, and these take 4."""


class FileTree(dict[str, Any]):
    """Settings of a TOML file."""

    def __init__(self, tree: Tree, path: Path) -> None:
        super().__init__(tree)
        self.path = path

    @classmethod
    def like(cls, origin: Tree, part: Tree) -> Tree:
        """Return a part of a layer as of the same file; unchanged where the layer is of none."""
        return cls(part, origin.path) if isinstance(origin, FileTree) else part


def read_file(path: Path) -> FileTree:
    """Return a TOML file as a tree."""
    try:
        return FileTree(tomllib.loads(read_toml_text(path)), path)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        remedy = Sentence("runs.how-to-write-toml")
        raise UsageError("runs.invalid-toml", path=path, error=error, remedy=remedy) from None
    except RecursionError:
        raise UsageError("runs.toml-nested-too-deeply", path=path) from None


def read_toml_text(path: Path) -> str:
    """Return the text of a TOML file; `UsageError` for one of more than `MOST_BYTES`."""
    try:
        if path.is_file() and (size := path.stat().st_size) > MOST_BYTES:
            raise UsageError("runs.toml-too-large", path=path, size=size / 2**20, most_bytes=MOST_BYTES >> 20)
        return path.read_text("utf-8-sig")  # with or without the mark that editors of Windows put first
    except OSError as error:
        raise UsageError("runs.toml-unreadable", path=path, strerror=error.strerror, nearest=nearest(path)) from None


def read_table(path: Path, key: str) -> Tree:
    """Return a TOML file that holds the tables `key` and nothing else."""
    tree = read_file(path)
    if tree.keys() != {key}:
        keys = ", ".join(tree) or "nothing"
        raise UsageError("runs.tables-needed", path=path, held=keys, key=key)
    return tree


def assignment(text: str) -> Tree:
    """Return `a.b=value` as a tree. The value is read as TOML; what is no TOML value is a string."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not all(key.split(".")):
        raise UsageError("runs.set-not-understood", text=text)
    # A value with a line break could be a whole document: then there are other keys than `value`, and it is a string.
    try:
        parsed = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        parsed = {}
    return nested(key, parsed["value"] if parsed.keys() == {"value"} else value)


def assignment_text(key: str, value: Any) -> str:
    """Return a setting as the text that `assignment` reads; `UsageError` for a value that TOML lacks."""
    if value is None:
        raise UsageError("runs.none-as-text", key=key)
    if isinstance(value, Mapping):
        texts = (assignment_text(json.dumps(name), item) for name, item in value.items())
        return f"{key}={{{', '.join(texts)}}}"
    if isinstance(value, (list, tuple)):
        return f"{key}=[{', '.join(assignment_text('', item)[1:] for item in value)}]"
    # A text of JSON is one of TOML without its pairs of surrogates, and so are its numbers and truth values.
    text = json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)
    return f"{key}={text}".replace("\x7f", "\\u007f")


def nested(key: str, value: Any) -> Tree:
    """Return {"a": {"b": value}} for the key a.b."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def dotted(tree: Any, name: str = "") -> dict[str, Any]:
    """Return {"a.b": value} for {"a": {"b": value}}; an empty table is a value."""
    if not isinstance(tree, Mapping) or not tree:
        return {name: tree}
    inside = (dotted(value, f"{name}.{key}" if name else str(key)) for key, value in tree.items())
    return {key: value for part in inside for key, value in part.items()}


def known(config: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield all settings as dotted keys with their declarations, groups included; `N` is an index, `NAME` a name."""
    for name, field in config.model_fields.items():
        group, many = _group(field.annotation)
        if group is None:
            yield prefix + name, field
        else:
            yield from known(group, f"{prefix}{name}.{many}")


def basic_settings(config: type[BaseModel]) -> set[str]:
    """Return the keys of the settings that most runs need, which are marked at their fields (`Basic`)."""
    marks = {
        name: mark for name, field in config.model_fields.items() for mark in field.metadata if isinstance(mark, Basic)
    }
    names = set[str]()
    for key, _ in known(config):
        name, _, inner = key.partition(".")
        if name in marks and {inner.removeprefix("N."), "*"} & {*marks[name].keys}:
            names.add(key)
    return names


def options(config: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo, Option]]:
    """Yield the settings that are options of the command too: the dotted key, its declaration and its mark."""
    for name, field in config.model_fields.items():
        yield from ((prefix + name, field, mark) for mark in field.metadata if isinstance(mark, Option))
        group, many = _group(field.annotation)
        if group is not None and not many:
            yield from options(group, f"{prefix}{name}.")


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


def describe(config: type[BaseModel]) -> None:
    """Make the docstring below each field of a model and its groups the field's description, which help shows.

    pydantic could do so when a class is made (`use_attribute_docstrings`), but reading the sources of all settings is
    a fifth of the time that the refusal of a command then takes.
    """
    help_texts: dict[str, str] = {}
    for base in reversed(config.__mro__):
        help_texts |= (
            _docstrings(base.__module__).get(base.__name__, {}) if base.__module__ != BaseModel.__module__ else {}
        )
    for name, field in config.model_fields.items():
        field.description = field.description or help_texts.get(name)
        if (group := _group(field.annotation)[0]) is not None:
            describe(group)


@cache
def _docstrings(module: str) -> dict[str, dict[str, str]]:
    """Return the docstrings below annotated names in the classes of a module, by class and name."""
    # Not `inspect.getsource`: it searches all modules, which takes longer than to read one.
    source = getattr(sys.modules.get(module), "__file__", None)
    if source is None:  # a class that was typed in, or a builtin
        return {}
    docstrings: dict[str, dict[str, str]] = {}
    for node in (node for node in ast.parse(Path(source).read_bytes()).body if isinstance(node, ast.ClassDef)):
        for field, text in pairwise(node.body):
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                docstrings.setdefault(node.name, {})[field.target.id] = inspect.cleandoc(str(text.value.value))
    return docstrings


def default_of(field: FieldInfo) -> Any:
    """Return the default of a setting; None where there is none."""
    return None if field.is_required() else field.get_default(call_default_factory=True)


MOST_PROBLEMS = 50
"""Problems of settings that are told one by one."""


def _refused(
    stage: str, config: type[BaseModel], error: ValidationError, tree: Tree, layers: Sequence[Tree]
) -> UsageError:
    """Return the refusal of a configuration: one sentence, or a line for each of several problems.

    Unknown keys come first: a setting that is missing is often one that was misspelt.
    """
    order = {"extra_forbidden": 0, "missing": 2}
    errors = sorted(error.errors(include_url=False), key=lambda problem: order.get(problem["type"], 1))
    # The nearest setting of each unknown key is looked for, which takes a minute for a million of them.
    problems = list(dict.fromkeys(_problem(stage, config, problem, tree, layers) for problem in errors[:MOST_PROBLEMS]))
    return UsageError(
        "runs.settings-refused", stage=stage, problems=problems, further=max(len(errors) - MOST_PROBLEMS, 0)
    )


def _along(tree: Any, keys: Iterable[str | int]) -> Iterator[tuple[str | int, Any]]:
    """Yield each part of a setting's place in a tree with the value there, as far as the tree holds it."""
    for part in keys:
        members = tree if isinstance(tree, dict) else range(len(tree) if isinstance(tree, list) else 0)
        if part not in members:
            return
        tree = tree[part]
        yield part, tree


def origin(keys: Sequence[str | int], layers: Sequence[Tree]) -> Path | None:
    """Return the file where the highest layer that holds a setting, or most of its key, is of a file."""
    best = max(reversed(layers), key=lambda layer: len(list(_along(layer, keys))), default=Tree())
    return best.path if isinstance(best, FileTree) and keys and keys[0] in best else None


def nearest_keys(config: type[BaseModel], key: str, cutoff: float = 0.5) -> list[str]:
    """Return the keys of a model and its groups, or the groups, that may be meant by a key that it lacks.

    They end alike wherever they are (`rank` for `adapter.rank`), have these initials (`lr` for `learning_rate`), begin
    so (`policy.temp` for `policy.temperature`), or are spelt alike, in all or in their last part. Of equally similar
    ones the first has the longest common beginning: `dpo`, then `opd` for `dop`. cutoff: the least similarity, of 1.
    """
    # Of several keys with one last part, that which most runs need, then the shortest, then the first, comes last.
    basic, declared = basic_settings(config), [name for name, _ in known(config)][::-1]
    names = sorted(declared, key=lambda name: (name in basic, -name.count(".")))
    leaves = {name.rpartition(".")[2]: name for name in names}
    short = {initials(leaf): name for leaf, name in leaves.items()}
    candidates = {word: word for name in names for word in (name.partition(".")[0], name)}
    generic = ".".join("N" if part.isdigit() else part for part in key.split("."))
    leaf = generic.rpartition(".")[2]
    if exact := leaves.get(leaf) or short.get(leaf):
        return [exact]
    begun = [name for name in names if name.startswith(generic)] if len(leaf) > 2 else []
    if begun:
        return begun[-1:]
    # The last part alone says less than a whole key: it has to be more similar.
    near = {word: candidates[word] for word in get_close_matches(generic, candidates, 3, cutoff)}
    near |= {word: leaves[word] for word in get_close_matches(generic, leaves, 3, max(cutoff, 0.8))}
    similar = {word: SequenceMatcher(None, word, generic).ratio() for word in near}  # in the order of get_close_matches
    best = [word for word in near if similar[word] == max(similar.values())]
    best.sort(key=lambda word: -len(commonprefix([word, generic])))  # noqa: RUF071 - these are no paths
    return list(dict.fromkeys(near[word] for word in best))


def initials(name: str) -> str:
    """Return the initials of a setting's words, `lr` of `learning_rate`; empty for one word."""
    return "".join(word[:1] for word in name.split("_")) if "_" in name else ""


def _problem(
    stage: str, config: type[BaseModel], problem: Mapping[str, Any], tree: Tree, layers: Sequence[Tree]
) -> tuple[bool, Sentence]:
    """Return one problem in a sentence without its beginning: the stage, and whether it "cannot take" what follows.

    Of an entry of a list, such as a teacher, it has the entry's name; and it has the file of the setting.
    """
    key = ".".join(map(str, problem["loc"]))
    entries = [
        entry for part, entry in _along(tree, problem["loc"]) if isinstance(part, int) and isinstance(entry, dict)
    ]
    names = [name for entry in entries if (name := entry.get("name") or entry.get("model"))]
    where = {"key": key, "entry": names[-1] if names else None, "file": origin(problem["loc"], layers)}
    if problem["type"] == "extra_forbidden":
        groups = list(dict.fromkeys(name.partition(".")[0] for name, _ in known(config)))
        near = nearest_keys(config, key)
        return False, Sentence("runs.no-setting", **where, near=near, groups=groups, words=words_of_stage(stage))
    if problem["type"] == "missing":
        usage = STAGES[stage].usage if stage in STAGES and key in STAGES[stage].positionals else None
        return False, Sentence("runs.setting-missing", **where, usage=usage, words=words_of_stage(stage))
    # The text of a whole object, such as a run, is cut.
    first, *more = repr(problem["input"]).splitlines() or [""]
    # Of a table with several settings the reason names those that are meant.
    named = isinstance(problem["input"], dict) and problem["type"] == "value_error"
    value = None if named else f"{first}{'…' if more else ''}"
    return True, Sentence("runs.setting-invalid", **where, value=value, reason=refusal(problem))
