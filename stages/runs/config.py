"""Configuration of a stage: frozen, closed, and clear about which of its fields determine the results."""

from pkgutil import resolve_name
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, model_validator


class Settings(BaseModel):
    """A frozen group of settings that refuses unknown keys. `identity` is what of it determines results."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
    preflight: ClassVar[str | None] = None
    """`module:function` that checks such a group and says what it found in a line; imported for a dry run alone."""

    @model_validator(mode="before")
    @classmethod
    def _no_truth_as_number(cls, given: Any) -> Any:
        for name, field in cls.model_fields.items() if isinstance(given, dict) else ():
            numbers = {field.annotation, *get_args(field.annotation)}
            if isinstance(given.get(name), bool) and numbers & {int, float} and bool not in numbers:
                raise ValueError(f"{name} is a number, but {str(given[name]).lower()} was given")
            if isinstance(given.get(name), int) and not -(2**63) <= given[name] < 2**63:
                raise ValueError(f"{name} is {given[name]}, more than 64 bits hold")
        return given

    def identity(self) -> dict[str, Any]:
        """The fields that affect results, as JSON.

        A field declared with `json_schema_extra={"affects_results": False}` is left out.
        """
        return {
            name: _identity(getattr(self, name)) for name, field in type(self).model_fields.items() if _matters(field)
        }

    def check(self) -> list[str]:
        """What a run would need of the world outside: raised where it is not there, else said in words, one line each.

        A group of settings that needs something overrides this or names `preflight`; all others ask the groups inside.
        """
        if self.preflight is not None:
            return [resolve_name(self.preflight)(self)]
        return list(dict.fromkeys(said for name in type(self).model_fields for said in _check(getattr(self, name))))


class StageConfig(Settings):
    """The configuration of a whole stage."""

    seed: int = 0
    """All randomness of the stage comes from here."""

    def label(self) -> str:
        """A word for the name of the run folder."""
        return "run"


def _matters(field: Any) -> bool:
    extra = field.json_schema_extra
    return not (isinstance(extra, dict) and extra.get("affects_results") is False)


def _identity(value: Any) -> Any:
    if isinstance(value, Settings):
        return value.identity()
    if isinstance(value, (list, tuple)):
        return [_identity(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _identity(item) for key, item in value.items()}
    return value


def _check(value: Any) -> list[str]:
    if isinstance(value, Settings):
        return value.check()
    if isinstance(value, dict):
        return _check(list(value.values()))
    return [said for item in value for said in _check(item)] if isinstance(value, (list, tuple)) else []
