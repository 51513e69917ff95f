"""The settings of `frameworks`."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from composer_stages.envs.config import EnvStageConfig
from composer_stages.policy.base import BasicPolicy, PolicyConfig
from composer_stages.runs.kinds import Row
from composer_stages.runs.settings import BASIC
from composer_stages.words import Sentence


class Config(EnvStageConfig):
    """What to compare."""

    policy: BasicPolicy = PolicyConfig()
    tasks: Annotated[int, BASIC] = Field(default=25, gt=0)
    """Tasks of the split that TRL plays."""
    samples: Annotated[int, BASIC] = Field(default=4, gt=1)
    """Rollouts of every task: TRL plays groups."""
    max_steps: Annotated[int, BASIC] = Field(default=8, gt=0)
    """Actions after which a rollout ends."""
    through: Annotated[Literal["process", "openenv"], BASIC] = "process"
    """Where TRL's rollouts act: in environments of this process, or in those of an OpenEnv server started for them."""
    openenv_python: str = Field(default="", json_schema_extra={"affects_results": False})
    """A Python that has openenv; without one COMPOSER_OPENENV, else this one."""
    traces: Annotated[str | None, BASIC] = None
    """File, folder or pattern of prime-rl's or verifiers' rollouts; without it our own, in that format."""

    @model_validator(mode="after")
    def _local(self) -> "Config":
        if self.policy.base_url is not None:
            raise ValueError(Sentence("integrations.server-for-trl"))
        return self

    def identity(self) -> Row:
        """Replace the path of the files by their content."""
        from composer_stages.formats import files

        contents = [[file.label, file.sha256] for file in files.find([self.traces])] if self.traces else None
        return {**super().identity(), "traces": contents}
