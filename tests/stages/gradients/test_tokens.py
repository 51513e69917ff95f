"""Token rows and batches."""

import pytest
from hypothesis import given, strategies as st

from composer_stages.errors import BadInput
from composer_stages.gradients.per_row import TokenRow, by_length


def test_batches_hold_rows_of_similar_length() -> None:
    assert by_length([10, 3, 9, 4, 50], 20) == [[1, 3], [2, 0], [4]]


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=20), most=st.integers(1, 120))
def test_batches_hold_every_row_once_within_the_budget(lengths: list[int], most: int) -> None:
    batches = by_length(lengths, most)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    assert all(len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= most for batch in batches)


def test_a_row_without_prompt_or_own_tokens_is_refused() -> None:
    with pytest.raises(BadInput, match="needs a prompt"):
        TokenRow([1], [2, 3], [False, False])
    with pytest.raises(BadInput, match="needs a prompt"):
        TokenRow([], [2, 3], [True, True])
