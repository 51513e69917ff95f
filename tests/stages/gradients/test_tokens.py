"""Token rows and batches."""

import pytest

from stages.errors import BadInput
from stages.gradients.tokens import TokenRow, by_length


def test_batches_hold_rows_of_similar_length_within_a_budget() -> None:
    lengths = [10, 3, 9, 4, 50]
    batches = by_length(lengths, 20)
    assert sorted(i for batch in batches for i in batch) == [0, 1, 2, 3, 4]
    assert batches == [[1, 3], [2, 0], [4]]


def test_a_row_without_prompt_or_own_tokens_is_refused() -> None:
    with pytest.raises(BadInput, match="needs a prompt"):
        TokenRow([1], [2, 3], [False, False])
    with pytest.raises(BadInput, match="needs a prompt"):
        TokenRow([], [2, 3], [True, True])
