"""The setting `diloco`, and warnings about its values."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from composer_stages.runs.settings import Option, Settings
from composer_stages.words import Sentence

Codec = Literal["float32", "bf16", "int8", "int4"]
MEMORY = 10
"""Times 1 / (1 - momentum): rounds before the outer momentum has settled."""


class Diloco(Settings):
    """Replicas of this training that share only a bucket and synchronise every few steps."""

    text_sets: ClassVar[str | None] = "store"

    store: str | None = None
    """Object store by which replicas exchange weights: s3://BUCKET/RUN, gs://, az:// or file:///FOLDER. None trains
    without replicas."""
    replicas: Annotated[int, Option("N")] = Field(default=2, gt=0)
    """Replicas that the first round waits for; later ones may join, and any may leave."""
    replica: int | None = Field(default=None, ge=0)
    """This replica's number, from 0, on which its random draws depend. None takes the first free one in the bucket."""
    inner_steps: int = Field(default=20, gt=0)
    """Training steps between two rounds on the same weights."""
    outer_learning_rate: float = Field(default=0.9, gt=0)
    """Learning rate of the outer step. 1 with momentum 0 is the plain average."""
    outer_momentum: float = Field(default=0.5, ge=0, lt=1)
    """Nesterov momentum of the outer step. The papers' 0.7 and 0.9 are for hundreds of rounds."""
    codec: Codec = "int8"
    """Encoding of the weights that are sent. The rounding error of an offer is added to the next offer."""
    fragments: int = Field(default=1, gt=0)
    """Parts of the weights that are averaged in turn, each every inner_steps: equal traffic in smaller portions."""
    quorum: int | None = Field(default=None, gt=0)
    """Least number of replicas in a round; by default more than half of `replicas`."""
    grace_s: float = Field(default=60.0, ge=0)
    """Seconds that a round waits for others once there is a quorum; later offers do not count in it."""
    timeout_s: float = Field(default=3600.0, gt=0, json_schema_extra={"affects_results": False})
    """Seconds that a replica waits for a quorum before it gives up."""

    @model_validator(mode="after")
    def _check_values(self) -> "Diloco":
        if self.store is not None and "@" in self.store.partition("://")[2].partition("/")[0]:
            # The address is part of the run's settings, which are written to disk and shown.
            raise ValueError(Sentence("diloco.store-holds-key"))
        if self.inner_steps % self.fragments:
            raise ValueError(
                Sentence("diloco.inner-steps-not-divided", inner_steps=self.inner_steps, fragments=self.fragments)
            )
        if self.quorum is not None and self.quorum > self.replicas:
            raise ValueError(Sentence("diloco.quorum-too-large", quorum=self.quorum, replicas=self.replicas))
        return self

    @property
    def least(self) -> int:
        """Return the least number of replicas in a round."""
        return self.quorum or self.replicas // 2 + 1

    @property
    def every(self) -> int:
        """Return the inner steps between two rounds; each round synchronises one fragment."""
        return self.inner_steps // self.fragments

    def warnings(self, steps: int) -> tuple[str, ...]:
        """Return warnings for a training of this many steps; none without a store."""
        each = steps // self.inner_steps
        rounds_needed = round(MEMORY / (1 - self.outer_momentum), 6)  # in floats, 1 - 0.9 is a little less than 0.1
        if each >= rounds_needed or self.store is None:
            return ()
        best = max(0.0, 1 - MEMORY / max(each, 1))
        return (
            Sentence(
                "diloco.few-outer-steps",
                outer_steps=each,
                outer_momentum=self.outer_momentum,
                needed=rounds_needed,
                best_momentum=best,
            ),
        )
