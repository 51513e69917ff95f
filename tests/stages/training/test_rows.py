"""The rows of a step: what is missing or of the wrong length is named."""

import pytest
import torch

from stages.errors import BadInput
from stages.training.step import ChannelBatch, collate

GROUPS = {
    name: torch.zeros(2, 3) for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
} | {"num_items_in_batch": torch.tensor(1)}


def test_the_collator_names_what_is_wrong() -> None:
    assert collate(GROUPS, ChannelBatch(), [])["channels"] == ChannelBatch()
    with pytest.raises(BadInput, match="lacks the column 'advantages'"):
        collate({k: v for k, v in GROUPS.items() if k != "advantages"}, ChannelBatch(), [])
    with pytest.raises(BadInput, match="column 'completion_ids' has 3 rows, but prompt_ids has 2"):
        collate({**GROUPS, "completion_ids": torch.zeros(3, 3)}, ChannelBatch(), [])
    with pytest.raises(BadInput, match="holds no pairs"):
        collate(GROUPS, ChannelBatch(), ["pairs"])
