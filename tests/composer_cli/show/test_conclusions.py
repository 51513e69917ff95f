"""What an evaluation shows and what it does not show, in sentences, from verdicts of the real decision."""

from dataclasses import asdict

import orjson
import pytest
from support.runs import eval_item

from composer_cli.show.conclusions import conclusions
from stages.evaluation.differences import ArmDifference
from stages.evaluation.verdict import decide


def decided(passes: dict[str, int], *, seeds: int = 3, hacks: int = 0, **given: object) -> dict[str, object]:
    """The document of an experiment in which each arm passes its number of 60 tasks, as `verdict.json` holds it."""
    items = [
        eval_item(arm, task, task < passes[arm], seed, hacked=arm == "B" and task < hacks)
        for arm in passes
        for task in range(60)
        for seed in range(seeds)
    ]
    return orjson.loads(orjson.dumps(asdict(decide(items, **given))))


def test_a_gain_that_imitation_reaches_too_is_not_the_preferences() -> None:
    found = conclusions(decided({"A": 10, "B": 50, "C": 54}))
    assert found.shown[0].startswith("B passes more tasks than A by at least 2 points: +66.7 [")
    assert any(
        "That the pairs' preference helps" in one or "Imitation alone does better" in one
        for one in [*found.shown, *found.not_shown]
    )
    assert any("C passes 90.0 %, B 83.3 %" in one for one in [*found.shown, *found.not_shown])
    assert any(one.startswith("That the pairs' preference helps") for one in found.not_shown)


def test_a_gain_over_the_control_is_shown() -> None:
    found = conclusions(decided({"A": 5, "B": 55, "C": 20}))
    assert any(one.startswith("B passes more tasks than C, which only imitates") for one in found.shown)
    assert not any("preference" in one for one in found.not_shown)


def test_without_a_control_nothing_says_where_a_gain_comes_from() -> None:
    found = conclusions(decided({"A": 5, "B": 55}, control=None))
    assert any("no arm that only imitates" in one for one in found.not_shown)


def test_rollouts_that_limits_cut_come_first() -> None:
    verdict = decided({"A": 5, "B": 20, "C": 20})
    assert not any(one.startswith("What the arms can do") for one in conclusions(verdict).not_shown)
    told = "40 of 60 rollouts were cut by max_steps before they passed: raise max_steps."
    assert conclusions({**verdict, "cut": told}).not_shown[0] == f"What the arms can do. {told}"


def test_equal_arms_show_nothing_or_no_gain() -> None:
    found = conclusions(decided({"A": 30, "B": 31, "C": 30}))
    assert not any("passes more tasks than A" in one for one in found.shown)
    assert any("B" in one and "A" in one for one in [*found.shown, *found.not_shown])


@pytest.mark.parametrize(("seeds", "warned"), [(1, True), (2, True), (3, False)])
def test_few_trainings_show_nothing_of_others(seeds: int, warned: bool) -> None:
    found = conclusions(decided({"A": 5, "B": 55, "C": 20}, seeds=seeds))
    assert any("other trainings" in one for one in found.not_shown) is warned


def test_other_settings_that_differ_are_named_and_channels_are_not() -> None:
    differences = (
        ArmDifference("weights.dpo", {"A": "0", "B": "1", "C": "0"}, channel=True),
        ArmDifference("optimisation.learning_rate", {"A": "1e-4", "B": "2e-4", "C": "2e-4"}),
    )
    (named,) = [
        one
        for one in conclusions(decided({"A": 5, "B": 55, "C": 20}, differences=differences)).not_shown
        if "channels" in one
    ]
    assert "optimisation.learning_rate" in named and "weights.dpo" not in named


def test_more_hacks_are_shown() -> None:
    found = conclusions(decided({"A": 5, "B": 55, "C": 20}, hacks=40))
    assert any(one.startswith("B hacks more often than A: +66.7 [") for one in found.shown)


def test_an_invalid_run_shows_nothing() -> None:
    found = conclusions(decided({"A": 5}))
    assert found.shown == [] and found.not_shown[0].startswith("Anything about the arms.")


def test_a_document_of_an_older_composer_is_read() -> None:
    verdict = decided({"A": 5, "B": 55, "C": 20})
    for name in ("differences", "subsets", "secondary", "collapsed", "hacked", "protocol", "estimand"):
        del verdict[name]
    assert conclusions(verdict).shown
