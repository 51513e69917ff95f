"""Which types training computes in.

Weights that learn are float32: AdamW's steps at usual learning rates are smaller than half a unit in bfloat16's last
place, so most would be lost. A model whose weights come in 16 bits is either frozen as it is, beside float32 adapters,
or trained as float32 masters under bfloat16 autocast, in which it is sampled from and scored, too.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

HALF = (torch.bfloat16, torch.float16)


def masters(model: Any, *, adapter: bool) -> bool:
    """Make all weights float32 where they are to be trained and come in 16 bits; whether they did."""
    if adapter or model.dtype not in HALF:
        return False
    model.float()
    return True


def autocast(model: Any, on: bool) -> AbstractContextManager[Any]:
    """The bfloat16 autocast that accelerate puts around the model's forward pass, for other ways into the model."""
    return torch.autocast(model.device.type, torch.bfloat16) if on else nullcontext()
