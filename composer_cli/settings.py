"""Settings of a stage: defaults underneath, then files in order, then what was typed. Every mistake is one sentence."""

import tomllib
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from stages import command_words
from stages.errors import UsageError
from stages.runs.config import Settings

Tree = dict[str, Any]
Wanted = TypeVar("Wanted", bound=Settings)
Config = TypeVar("Config", bound=Settings)


def build(stage: str, config: type[Config], layers: Iterable[Tree]) -> Config:
    """A stage's configuration from layers of settings, later ones over earlier ones."""
    merged: Tree = {}
    for layer in layers:
        merged = merge(merged, layer)
    try:
        return config.model_validate(merged)
    except ValidationError as error:
        raise UsageError(_explain(stage, config, error)) from None


def merge(below: Tree, above: Tree) -> Tree:
    """Both trees in one; where they meet at a value, `above` wins."""
    joined = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(joined.get(key), dict)
        joined[key] = merge(joined[key], value) if both else value
    return joined


def read_file(path: Path) -> Tree:
    """A TOML file as a tree."""
    try:
        return tomllib.loads(source(path))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}.") from None


def source(path: Path) -> str:
    """A TOML file as it is."""
    try:
        return path.read_text()
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}). Give a TOML file.") from None


def read_table(path: Path, key: str) -> Tree:
    """A TOML file that holds the tables `key` and nothing else."""
    found = read_file(path)
    if found.keys() != {key}:
        held = ", ".join(found) or "nothing"
        raise UsageError(f"{path} holds {held}, but [[{key}]] tables are needed, and nothing beside them.")
    return found


def assignment(text: str) -> Tree:
    """`a.b=value` as a tree. The value is read as TOML; what is no TOML value is a string."""
    key, equals, value = text.partition("=")
    if not equals or not all(key.strip().split(".")):
        raise UsageError(
            f"--set {text!r} is not understood. Write KEY=VALUE, for example --set policy.temperature=0.7."
        )
    return nested(key.strip(), _value(value.strip()))


def nested(key: str, value: Any) -> Tree:
    """{"a": {"b": value}} for the key a.b."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def known(config: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """All settings as dotted keys with their declarations, groups included; `N` is an index, `NAME` a name."""
    for name, field in config.model_fields.items():
        group, many = _group(field.annotation)
        if group is None:
            yield prefix + name, field
        else:
            yield from known(group, f"{prefix}{name}.{many}")


def _group(annotation: Any) -> tuple[type[BaseModel] | None, str]:
    """The group of settings that an annotation holds, if any, and what stands between its name and its keys."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, ""
    inner = [_group(argument)[0] for argument in get_args(annotation)]
    group = next((g for g in inner if g is not None), None)
    of = getattr(annotation, "__origin__", None)
    return group, "N." if of in (list, tuple) else "NAME." if of is dict else ""


def _explain(stage: str, config: type[BaseModel], error: ValidationError) -> str:
    problems = error.errors(include_url=False)
    first = problems[0]
    more = f" ({len(problems) - 1} more like this.)" if len(problems) > 1 else ""
    key = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return unknown_key(stage, key, [name for name, _ in known(config)]) + more
    if first["type"] == "missing":
        return f"{stage} needs the setting {key}, which is not given.{more}"
    rule = first["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    where = f"{key} = {first['input']!r}" if key else "these settings"
    return f"{stage} cannot take {where}: {rule}.{more}"


def unknown_key(stage: str, key: str, names: list[str]) -> str:
    """The sentence for a setting that does not exist, with the nearest one that does."""
    generic = ".".join("N" if part.isdigit() else part for part in key.split("."))
    leaf = generic.rpartition(".")[2]
    groups = dict.fromkeys(name.partition(".")[0] for name in names)
    same_leaf = [name for name in names if name.rpartition(".")[2] == leaf]
    near = same_leaf or get_close_matches(generic, [*names, *groups], n=1, cutoff=0.5)
    if not near:
        return f"{stage} has no setting {key}. It has: {', '.join(groups)}."
    return f"{stage} has no setting {key}. Did you mean {near[0]}? `{command_words(stage)} --help` lists all."
