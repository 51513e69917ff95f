"""The slow way to per-sample gradients, as an oracle: one row at a time, the adapter as a separate path, autograd.

It shares no formula with `per_sample`: logits come from the whole model, the loss from torch's cross
entropy, the gradient from torch's autograd. No method of anybody's.

Shapes: N trained numbers, V vocabulary, own: the row's own tokens.
"""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from stages.probe.adapters.attach import Adapter, attached
from stages.probe.pool.tokens import TokenRow

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def reference_gradient(model: "PreTrainedModel", adapter: Adapter, row: TokenRow) -> Float[Tensor, " N"]:
    """The gradient of the row's token-sum NLL in nats, from a backward pass over this row alone.

    The model must hold its clean weights: the adapter runs as a path beside them.
    """
    model.requires_grad_(False)
    with torch.enable_grad(), attached(model, adapter) as leaves:
        F.cross_entropy(*_own_logits(model, row), reduction="sum").backward()
    return torch.cat([leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves.values()])


@torch.no_grad()
def reference_log_probs(model: "PreTrainedModel", row: TokenRow) -> Float[Tensor, " own"]:
    """The log-probs of the row's own tokens in nats, from a pass over this row alone, unpadded; on the CPU."""
    return -F.cross_entropy(*_own_logits(model, row), reduction="none").cpu()


def _own_logits(model: "PreTrainedModel", row: TokenRow) -> tuple[Float[Tensor, "own V"], Int[Tensor, " own"]]:
    """Logits that predict the row's own tokens, in float32 at least, and those tokens."""
    device = next(model.parameters()).device
    ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]], device=device)
    start, own = len(row.prompt_ids), torch.tensor(row.own, device=device)
    logits = model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1][own]
    return logits.to(torch.promote_types(logits.dtype, torch.float32)), ids[0, start:][own]
