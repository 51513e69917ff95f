"""Actions and observations are closed, states are open; assignments are checked."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

CLOSED = ConfigDict(extra="forbid", validate_assignment=True)


class Action(BaseModel):
    """What a client sends."""

    model_config = CLOSED
    metadata: dict[str, Any] = Field(default_factory=dict)


class Observation(BaseModel):
    """What it gets."""

    model_config = CLOSED
    done: bool = False
    reward: bool | int | float | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


class State(BaseModel):
    """How far a rollout is."""

    model_config = ConfigDict(extra="allow", validate_assignment=True)
    episode_id: str | None = None
    step_count: int = Field(0, ge=0)
