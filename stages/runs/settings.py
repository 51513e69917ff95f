"""Configuration of a stage: frozen, closed, and clear about which of its fields determine the results."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_before_validator_function

Read = TypeVar("Read", covariant=True)
Write = TypeVar("Write", contravariant=True)

if TYPE_CHECKING:

    class Given(Generic[Read, Write]):
        """The type of a field that is read as `Read` and may be given as `Write` too: a list of tables for groups."""

        def __get__(self, instance: object, owner: object) -> Read: ...
        def __set__(self, instance: object, value: Write) -> None: ...

else:

    class Given:
        """See above; at run time, the type that the field is read as, which pydantic validates."""

        def __class_getitem__(cls, types: tuple[Any, Any]) -> Any:
            return types[0]


@dataclass(frozen=True)
class Basic:
    """Marks a field whose setting most runs need, which the short help lists: `tasks: Annotated[int, BASIC]`.

    Of a group, `keys` are the settings in it that most runs need; `*` stands for all of them.
    """

    keys: tuple[str, ...] = ("",)

    def covers(self, key: str) -> bool:
        """Return whether the setting with this key below the field is basic; empty for the field itself."""
        return key in self.keys or "*" in self.keys


BASIC = Basic()


def basic_of(*keys: str) -> Basic:
    """Return the mark of a group of which most runs need these settings."""
    return Basic(keys)


def with_default(default: Any, **about: Any) -> Any:
    """Return `Field(default=...)` for a field of the type `Given`, which its default is not for type checkers."""
    return Field(default=default, **about)


class Settings(BaseModel):
    """A frozen group of settings that refuses unknown keys; `identity` returns those that determine results."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
    preflight: ClassVar[str | None] = None
    """`module:function` that checks the group and returns its finding as a line; imported by a dry run only, because
    checks import models and environments."""
    text_sets: ClassVar[str | None] = None
    """The setting that a text in the place of the whole group stands for: `policy="m"` is `policy={"model": "m"}`."""

    if TYPE_CHECKING:
        # How type checkers read a field whose type is a group (typing specification, descriptor-typed fields of
        # dataclasses): it is read as the group, and given as the group, a table of its settings, or its text.
        # Not Self: mypy 2.3 would take the class that is constructed for it.
        def __get__(self, instance: object, owner: object) -> Self: ...
        def __set__(self, instance: object, value: "Settings | Mapping[str, Any] | str | Path") -> None: ...

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Read a text as the table that it stands for, before any validator of a subclass reads the group."""

        def table(given: Any) -> Any:
            return {cls.text_sets: str(given)} if cls.text_sets and isinstance(given, (str, Path)) else given

        return no_info_before_validator_function(table, handler(source))

    @model_validator(mode="before")
    @classmethod
    def _check_numbers(cls, given: Any) -> Any:
        # pydantic turns `true` and "1" into 1 without an error; orjson, which writes digests and manifests, takes
        # integers of 64 bits only, and would fail after the work has begun.
        for name, field in cls.model_fields.items() if isinstance(given, dict) else ():
            numbers = {field.annotation, *get_args(field.annotation)}
            if isinstance(given.get(name), bool) and numbers & {int, float} and bool not in numbers:
                raise ValueError(f"{name} is a number, but {str(given[name]).lower()} was given")
            text = given.get(name)
            if isinstance(text, str) and numbers & {int, float} and str not in numbers and _is_number(text):
                raise ValueError(f"{name} is a number, but the text {text!r} was given; leave out the quotation marks")
            if isinstance(given.get(name), int) and not -(2**63) <= given[name] < 2**63:
                raise ValueError(f"{name} is {given[name]}, more than 64 bits hold")
        return given

    def identity(self) -> dict[str, Any]:
        """Return the fields that affect results, as JSON.

        A field declared with `json_schema_extra={"affects_results": False}` is left out.
        """
        found = {}
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if not (isinstance(extra, dict) and extra.get("affects_results") is False):
                found[name] = _identity(getattr(self, name))
        return found

    def check(self, cache: Path) -> list[str]:
        """Return what was checked outside of this program (models, servers), a line each; raise for what is missing.

        cache: folder of models that are made on first use (`RunWriter.cache`), which may not exist yet. A group that
        needs something overrides this method or names `preflight`; all others check the groups inside.
        """
        if self.preflight is not None:
            return [resolve_name(self.preflight)(self, cache)]
        # Two groups may name the same model: its line is kept once, in the order of the first.
        groups = [getattr(self, name) for name in type(self).model_fields]
        return list(dict.fromkeys(_check(groups, cache)))

    def uses_gpu(self) -> bool:
        """Return whether the process of a stage with this group takes a GPU where there is one.

        A group that loads a model overrides this method; all others ask the groups inside.
        """
        return any(_uses_gpu(getattr(self, name)) for name in type(self).model_fields)


class StageConfig(Settings):
    """The configuration of a stage."""

    seed: Annotated[int, BASIC] = 0
    """All randomness of the stage comes from here."""

    def label(self) -> str:
        """Return a word for the name of the run folder."""
        return "run"


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


def _check(value: Any, cache: Path) -> list[str]:
    if isinstance(value, Settings):
        return value.check(cache)
    if isinstance(value, dict):
        return _check(list(value.values()), cache)
    return [line for item in value for line in _check(item, cache)] if isinstance(value, (list, tuple)) else []


def _uses_gpu(value: Any) -> bool:
    if isinstance(value, Settings):
        return value.uses_gpu()
    if isinstance(value, dict):
        return _uses_gpu(list(value.values()))
    return any(map(_uses_gpu, value)) if isinstance(value, (list, tuple)) else False
