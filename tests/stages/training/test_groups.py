"""Rows of a batch within a budget of tokens: parts cut to their own length add up to the batch."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.training.channels.episodes import OwnEpisode
from stages.training.scoring import Tree, pack, row_lengths, rows_in_batch, rows_of, share, split_until


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=20), most=st.integers(1, 120))
def test_parts_hold_every_row_once_within_the_budget(lengths: list[int], most: int) -> None:
    parts = pack(lengths, most)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert all(len(part) == 1 or len(part) * max(lengths[row] for row in part) <= most for part in parts)


def test_one_long_rollout_does_not_decide_the_memory_of_all() -> None:
    """Padded together, 31 rollouts of 200 tokens and one of 16,000 take 512,000 places; in parts 16,000 at most."""
    lengths = [200] * 31 + [16_000]
    assert [len(part) * max(lengths[row] for row in part) for part in pack(lengths, 16_384)] == [6_200, 16_000]


def test_rows_are_cut_to_the_longest_among_them() -> None:
    inputs = {
        "prompt_ids": torch.tensor([[0, 1, 2], [3, 1, 2]]),
        "prompt_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]),
        "completion_ids": torch.tensor([[1, 0, 0, 0], [3, 3, 3, 3]]),
        "completion_mask": torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1]]),
        "tool_mask": torch.ones(2, 4),
        "advantages": torch.tensor([0.5, -0.5]),
        "num_items_in_batch": torch.tensor(5),
    }
    part = rows_of(inputs, [0])
    assert row_lengths(inputs) == [3, 7]
    assert part["prompt_ids"].tolist() == [[1, 2]] and part["completion_ids"].tolist() == [[1]]
    assert part["tool_mask"].shape == (1, 1) and part["advantages"].tolist() == [0.5]
    assert part["num_items_in_batch"] == 5
    assert share("dapo", part, inputs) == 1.0 and share("grpo", part, inputs) == 0.5
    assert share("bnpo", part, inputs) == 0.2


def test_each_batch_takes_the_rows_of_its_own_rollouts_and_the_last_one_what_is_left() -> None:
    """Two rollouts that are equal count as two; one that is in no batch, which TRL cut short, goes along at last."""
    rows = [OwnEpisode(Tree([1, 2], (ids,)), [1] * len(ids), []) for ids in ([5], [6, 7], [5], [8, 9, 9])]
    batches = [[[6, 7], [5]], [[8, 9], [5]]]
    left, found = list(rows), []
    for number, completions in enumerate(batches):
        inputs = {
            "prompt_ids": torch.tensor([[0, 1, 2]] * 2),
            "prompt_mask": torch.tensor([[0, 1, 1]] * 2),
            "completion_ids": torch.tensor([[*ids, 0][:2] for ids in completions]),
            "completion_mask": torch.tensor([[1] * len(ids) + [0] * (2 - len(ids)) for ids in completions]),
        }
        found.append(rows_in_batch(left, inputs, all_left=number == 1))
    assert found == [[rows[0], rows[1]], [rows[2], rows[3]]] and left == []


def test_parts_are_halved_until_there_are_enough() -> None:
    assert split_until([[0, 1, 2, 3, 4], [5]], 2) == [[0, 1, 2, 3, 4], [5]]
    assert split_until([[0, 1, 2, 3, 4], [5]], 4) == [[0, 1], [2], [3, 4], [5]]
    assert split_until([[0, 1, 2]], 3) == [[0], [1], [2]]
