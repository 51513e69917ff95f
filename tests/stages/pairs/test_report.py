"""The words of pairs with a direction stand out from shuffled sides."""

import random

from composer_stages.pairs.report import word_signal


def test_a_consistent_direction_is_found() -> None:
    found = word_signal([(f"good {i}", f"bad {i}") for i in range(40)])
    assert found is not None and found.kl > found.shuffled_p95 and found.p_value < 0.01


def test_no_direction_is_found_in_random_sides() -> None:
    chance = random.Random(0)
    found = word_signal([("a", "b") if chance.random() < 0.5 else ("b", "a") for _ in range(30)])
    assert found is not None and found.p_value > 0.05


def test_too_few_pairs_are_not_judged() -> None:
    assert word_signal([("a", "b")] * 4) is None
    assert word_signal([("a", "b")] * 5) is not None
