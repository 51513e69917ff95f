"""What training does where the settings leave it open, by the size of the model.

A model below `SMALL` parameters, such as those that environments bring along, is trained whole in one pass. For others
these are the usual choices: LoRA at ten times the rate that TRL takes for whole models, one group a pass, activations
recomputed.
"""

from dataclasses import dataclass
from typing import Any

from stages.backends.ranks import launched
from stages.policy import embedded
from stages.policy.base import PolicyConfig
from stages.training import memory
from stages.training.model_shape import ModelShape, model_shape
from stages.training.settings import Adapter, Distribution, Optimisation

SMALL = 10_000_000
SMALL_RATE = 2e-4
ADAPTER_RATE = 1e-5
WHOLE_RATE = 1e-6
"""TRL's default for GRPO."""


@dataclass(frozen=True)
class Chosen:
    """Settings with nothing left open. shape: None for a small embedded model, or where it is not known yet.

    teacher: bytes of the model to distil from, 0 where a server has it or its size is not known yet. sharded: whether
    masters, gradients and moments are spread over the processes. several: whether a backward pass goes through each
    layer more than once.
    """

    optimisation: Optimisation
    adapter: Adapter
    shape: ModelShape | None
    small: bool
    teacher: int = 0
    sharded: bool = False
    several: bool = False

    def facts(self) -> dict[str, Any]:
        """What was chosen, for the manifest."""
        size = self.optimisation
        return {
            "adapter_rank": self.adapter.rank,
            "learning_rate": size.learning_rate,
            "micro_batch": size.micro_batch,
            "gradient_checkpointing": size.gradient_checkpointing,
        }

    def notes(self, episode: int) -> tuple[str, ...]:
        """What was chosen and why, and the memory it takes, for people; nothing for small models."""
        if self.small:
            return ()
        takes = () if self.shape is None else (f"about {memory.needed(self.shape, self._training(episode))} of memory",)
        return (self._note(), *takes)

    def check(self, episode: int, device: str) -> None:
        """`UsageError` where the memory does not suffice; episode: its longest, in tokens after the prompt."""
        if self.shape is not None:
            memory.check(self.shape, self._training(episode), memory.available(device))

    def _training(self, episode: int) -> memory.Training:
        return memory.Training(
            self.optimisation, self.adapter, episode, launched(), self.teacher, self.sharded, self.several
        )

    def _note(self) -> str:
        size = self.optimisation
        what = f"LoRA of rank {self.adapter.rank}" if self.adapter.rank else "all weights"
        known = f"of {self.shape.parameters / 1e9:.2g} B parameters" if self.shape else "whose size is not known yet"
        again = "activations recomputed" if size.gradient_checkpointing else "activations kept"
        return (
            f"{what} at learning rate {size.learning_rate:g}, {size.micro_batch} rollouts a pass, {again} "
            f"(what you left open is chosen for a model {known})"
        )


def choose(
    policy: PolicyConfig,
    size: Optimisation,
    adapter: Adapter,
    teacher: PolicyConfig | None = None,
    distribution: Distribution = Distribution(),  # noqa: B008 (frozen)
    *,
    channels: bool = False,
) -> Chosen:
    """Fill in what the settings leave open; reads the models' config.json, and asks the hub for it where need be.

    channels: whether there are any beside GRPO.
    """
    shape = model_shape(policy.held_here())
    small = embedded.is_embedded(policy.source) or (shape is not None and shape.parameters < SMALL)
    whole = small and not policy.served  # a server follows the training by its adapter
    rank = adapter.rank if adapter.rank is not None else 0 if whole else memory.RANK
    usual = ADAPTER_RATE if rank else WHOLE_RATE
    rate = (embedded.learning_rate(policy.source) or SMALL_RATE) if small else usual
    rollouts = size.prompts_per_step * size.generations
    filled = {
        "learning_rate": rate if size.learning_rate is None else size.learning_rate,
        "micro_batch": size.micro_batch or (rollouts if small else size.generations),
        "gradient_checkpointing": not small if size.gradient_checkpointing is None else size.gradient_checkpointing,
    }
    other = None if teacher is None or teacher.served else model_shape(teacher)
    held = 0 if other is None else other.parameters * other.bytes
    sharded = distribution.sharding == "fsdp2" and launched() > 1
    size, adapter = size.model_copy(update=filled), adapter.model_copy(update={"rank": rank})
    return Chosen(size, adapter, shape, small, held, sharded, several=channels or size.shared_prompts)
