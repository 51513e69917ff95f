"""The setting `weights`: one field a channel, made from the registry; a channel is off until it is given a weight."""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field, ValidationError, create_model, model_validator
from pydantic_core import InitErrorDetails

from stages.runs.config import Settings
from stages.training.channels import CHANNELS

Weight = Annotated[float, Field(ge=0)]


class ChannelWeights(Settings):
    """How much each channel counts beside GRPO, whose weight is 1. At 0 a channel is not even computed.

    Names that are not in the registry are refused; a channel that was registered after import is accepted.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Weight] = Field(init=False)

    @model_validator(mode="before")
    @classmethod
    def _registered(cls, given: Any) -> Any:
        unknown = [name for name in given if name not in CHANNELS] if isinstance(given, dict) else []
        if unknown:
            errors = [InitErrorDetails(type="extra_forbidden", loc=(name,), input=given[name]) for name in unknown]
            raise ValidationError.from_exception_data(cls.__name__, errors)
        return given

    def identity(self) -> dict[str, Any]:
        """All weights."""
        return self.model_dump()

    def active(self) -> dict[str, float]:
        """The channels with a weight, by name, in the order of the registry."""
        weights = self.model_dump()
        return {name: weights[name] for name in CHANNELS if weights.get(name, 0.0) > 0}


if TYPE_CHECKING:
    Weights = ChannelWeights
else:
    Weights = create_model(
        "Weights",
        __base__=ChannelWeights,
        __doc__=ChannelWeights.__doc__,
        __module__=__name__,
        **{name: (Weight, Field(0.0, description=channel.description)) for name, channel in CHANNELS.items()},
    )
