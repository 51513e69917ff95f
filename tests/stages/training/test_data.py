"""Pairs in token ids: useless ones are dropped and counted, every pair comes once a round, the reference is cached."""

import time

import pytest
import torch
from support.models import tiny_model, tiny_tokenizer

from composer_stages.errors import BadInput
from composer_stages.training.channels.pairs import MEASURED, PairSource, TokenPair, measure_pairs, tokenise
from composer_stages.training.scoring import Tree, score, token_log_probs

TOKENIZER = tiny_tokenizer()


def row(chosen: str, rejected: str, prompt: list[int] | None = None) -> dict[str, object]:
    return {
        "pair_id": chosen + rejected,
        "messages_json": '[{"role":"user","content":"q"}]',
        "prompt_token_ids": prompt,
        "chosen": chosen,
        "rejected": rejected,
    }


def test_ids_end_with_the_end_token_and_sampled_prompts_are_kept() -> None:
    (pair,), dropped = tokenise([row("yes", "no", [1, 2, 3])], TOKENIZER, 100)
    assert pair.tree.prompt == [1, 2, 3] and not dropped
    assert all(branch[-1] == TOKENIZER.eos_token_id for branch in pair.tree.branches)
    (rendered,), _ = tokenise([row("yes", "no")], TOKENIZER, 100)
    assert TOKENIZER.decode(rendered.tree.prompt).endswith("<|im_start|>assistant\n")


def test_pairs_without_a_difference_are_dropped_with_a_reason() -> None:
    rows = [row("same", "same", [1]), row("abcdef-one", "abcdef-two", [1]), row("x", "y", [1] * 7), row("p", "q", [1])]
    kept, dropped = tokenise(rows, TOKENIZER, 7)
    assert {reason: len(ids) for reason, ids in dropped.items()} == {
        "equal_after_tokenisation": 1,
        "equal_after_truncation": 1,
        "no_room": 1,
    }
    assert [pair.pair_id for pair in kept] == ["pq"]
    assert all(len(pair.tree.prompt) + len(branch) <= 7 for pair in kept for branch in pair.tree.branches)


def test_lengths_of_pairs_are_measured_on_some_spread_over_all() -> None:
    rows = [row("a" * (1 + i % 7), "b", [1] * 30) for i in range(7)]
    lengths = [len(p.tree.prompt) + sum(map(len, p.tree.branches)) for p in tokenise(rows, TOKENIZER, 100)[0]]
    assert measure_pairs(rows, len(rows), TOKENIZER, 100) == (sum(lengths) / 7, max(lengths))
    last = [*[row("x", "y", [1] * 10)] * (2 * MEASURED - 2), *[row("x", "y", [1] * 50)] * 2]
    assert measure_pairs(last, len(last), TOKENIZER, 100)[1] > 50
    assert measure_pairs([], 0, TOKENIZER, 100) == (0.0, 0)


def test_a_missing_column_is_named() -> None:
    with pytest.raises(BadInput, match="lacks the column 'rejected'"):
        tokenise([{k: v for k, v in row("a", "b").items() if k != "rejected"}], TOKENIZER, 10)


def source(count: int, per_step: int, seed: int = 0) -> PairSource:
    return PairSource(
        [TokenPair(str(i), Tree([1, i + 4], ([5], [6]))) for i in range(count)], per_step=per_step, seed=seed
    )


def test_every_pair_comes_once_before_any_comes_again() -> None:
    dealt = [pair.pair_id for step in range(5) for pair in source(10, 4).rows([], step)]
    assert sorted(dealt[:10]) == sorted(dealt[10:20]) == [str(i) for i in range(10)]
    assert dealt[:10] != dealt[10:]


def test_a_step_with_fewer_pairs_takes_each_once() -> None:
    assert len(source(3, 16).rows([], 0)) == 3


def test_the_cached_reference_is_the_model_as_it_was() -> None:
    model, pairs = tiny_model(), source(5, 5)
    pairs.cache_reference(model, chunk=2)
    batch = pairs.rows([], 0)
    scored = score(model, [pair.tree for pair in batch])
    expected = scored.per_branch(token_log_probs(model, scored)).view(-1, 2)
    torch.testing.assert_close(pairs.reference(batch, torch.device("cpu")), expected.detach())


def test_a_step_of_many_pairs_is_dealt_at_once() -> None:
    """Under 10 ms a step from 20,000 pairs; shuffling them anew for every pair took 0.4 s."""
    many = source(20_000, 16)
    many.rows([], 0)
    started = time.process_time()
    dealt = [pair.pair_id for step in range(1, 51) for pair in many.rows([], step)]
    assert (time.process_time() - started) / 50 < 0.01
    again = source(20_000, 16)
    assert dealt[-16:] == [pair.pair_id for pair in again.rows([], 50)], "a step is a function of seed and step"


def test_a_step_is_a_function_of_seed_and_step_also_where_it_takes_in_two_rounds() -> None:
    few = source(10, 4)
    for step in (2, 7, 2, 0):
        dealt, again, other = (
            [pair.pair_id for pair in one.rows([], step)] for one in (few, source(10, 4), source(10, 4, seed=1))
        )
        assert dealt == again != other
