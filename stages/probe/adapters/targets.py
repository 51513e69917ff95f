"""Which Linears of a model are adapted: the seven projections of every layer, all of them and nothing else.

The suffixes are those of dense Qwen3. wassname/grpo_proj2 @25ad306 also adapts the projections of gated delta nets
(in_proj_*, out_proj); here such a model is refused.
"""

from typing import TYPE_CHECKING

from torch import nn

from stages.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SUFFIXES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def target_linears(model: "PreTrainedModel") -> dict[str, nn.Linear]:
    """The adapted Linears by module name, in the model's order.

    `UsageError` when one is missing, or when a layer holds any other Linear: such a model would be probed in part only.
    """
    inside = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in f".{name}"]
    extra = sorted({name.rpartition(".")[2] for name, _ in inside} - set(SUFFIXES))
    if extra:
        raise UsageError(
            f"The model's layers hold Linears that the probe does not know: {', '.join(extra)}. It knows {SUFFIXES}."
        )
    layers = model.config.num_hidden_layers
    expected = layers * len(SUFFIXES)
    if len(inside) != expected:
        raise UsageError(f"The model has {len(inside)} of the {expected} Linears that {layers} layers should have.")
    return dict(inside)
