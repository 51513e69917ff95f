"""The file of a release gate: what has to be shown of each score."""

import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from composer_stages.errors import UsageError
from composer_stages.runs import store


class PolicyMetric(BaseModel):
    """One metric of a policy: the score, and what has to be shown of B."""

    model_config = ConfigDict(extra="forbid", strict=True)
    score: str
    direction: Literal["higher", "lower"] | None = None
    """What is better; by default what the logs say."""
    not_worse: Annotated[float | None, Field(gt=0)] = None
    """B is not worse by this or more, in units of the score."""
    better: bool | Annotated[float, Field(gt=0)] | None = None
    """B is better; where this is a number, by more than it."""

    @model_validator(mode="after")
    def _one_of_two(self) -> "PolicyMetric":
        if (self.not_worse is None) == (not self.better):
            raise ValueError("one of not_worse and better")
        return self


def read_policy(path: str) -> list[PolicyMetric]:
    """Return the metrics of a policy; `UsageError` where the file is none."""
    try:
        content = store.read_bytes(Path(path).expanduser())
        if content is None:
            raise UsageError("comparison.no-policy", path=path)
        table = tomllib.loads(content.decode("utf-8-sig"))
        if table.keys() != {"metric"} or not isinstance(table["metric"], list) or not table["metric"]:
            raise UsageError("comparison.no-metric", path=path, keys=[*table])
        return [PolicyMetric.model_validate(row) for row in table["metric"]]
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
        raise UsageError("comparison.bad-policy", path=path, problem=problem) from None
    except (OSError, ValueError) as error:
        raise UsageError("comparison.bad-policy", path=path, problem=str(error)) from None
