import dataclasses
import json

import numpy as np
import pytest

from stages.evaluation.arms import compare
from stages.evaluation.verdict import decide, judge, text_table


def row(arm, task, family, passed, train_seed=0, hacked=False, protocol_ok=True):
    return {
        "arm": arm,
        "train_seed": train_seed,
        "task_id": f"t{task}",
        "family": f"f{family}",
        "sample_idx": 0,
        "passed": bool(passed),
        "hacked": bool(hacked),
        "protocol_ok": bool(protocol_ok),
        "error_type": None,
    }


def experiment(passes, num_tasks=400, **rates):
    """Arms in which the first `passes[arm]` of the tasks pass; four tasks a family, spread over the whole range."""
    items = []
    for arm, num_passed in passes.items():
        limits = {field: counts.get(arm, default) for field, (counts, default) in rates.items()}
        for task in range(num_tasks):
            fields = {field: task < limit for field, limit in limits.items()}
            items.append(row(arm, task, task % (num_tasks // 4), task < num_passed, **fields))
    return items


def simulated(random, gain, num_families=50, size=8, spread=0.15, seed_spread=0.0):
    """Two arms whose families differ in difficulty and in what the treatment does to them, by `spread`."""
    difficulty_F, effect_F = random.uniform(0.25, 0.75, num_families), random.normal(gain, spread, num_families)
    family_T = np.repeat(np.arange(num_families), size)
    u_T = random.random(len(family_T))
    v_T = np.where(random.random(len(u_T)) < 0.7, u_T, random.random(len(u_T)))
    retrained = random.normal(0, seed_spread) if seed_spread else 0.0
    passed = {"A": u_T < difficulty_F[family_T], "B": v_T < (difficulty_F + effect_F)[family_T] + retrained}
    tasks = range(len(u_T))
    return {arm: [row(arm, task, family_T[task], of_T[task]) for task in tasks] for arm, of_T in passed.items()}


def decision_rates(gain, num_runs=300, seed=0, **options):
    random = np.random.default_rng(seed)
    arms = [simulated(random, gain, **options) for _ in range(num_runs)]
    decisions = [judge(compare(arm["B"], arm["A"]))[0] for arm in arms]
    return {decision: decisions.count(decision) / num_runs for decision in sorted(set(decisions))}


def test_without_an_effect_a_gain_is_seldom_validated():
    assert decision_rates(0.0).get("VALIDATED", 0) <= 0.05


def test_ten_points_on_400_tasks_are_found():
    rates = decision_rates(0.10)
    assert rates["VALIDATED"] >= 0.75
    assert "INVALIDATED" not in rates


def test_retraining_noise_is_outside_the_interval():
    """A limit that the text admits: arms retrained with 6 points of noise are found to differ far too often."""
    assert decision_rates(0.0, num_runs=150, seed_spread=0.06)["VALIDATED"] > 0.08


def test_a_gain_of_three_points_is_seldom_invalidated():
    assert decision_rates(0.03, spread=0.05).get("INVALIDATED", 0) <= 0.05


def test_the_paired_arms_of_the_prototype():
    """kata.md's measured arms: B above A, but not above the control that only imitates."""
    verdict = decide(experiment({"start": 212, "A": 300, "B": 344, "C": 341}))
    assert verdict.decision == "VALIDATED"
    assert verdict.gain.estimate == pytest.approx(0.11)
    assert (verdict.gain.wins, verdict.gain.losses) == (44, 0)
    assert "B cannot be told from C, so imitation of the chosen actions explains the gain" in verdict.why
    assert "the preference is not credited" in verdict.why
    assert [arm.arm for arm in verdict.arms] == ["A", "B", "C", "start"]


def test_a_treatment_above_the_control_is_credited():
    why = decide(experiment({"A": 200, "B": 300, "C": 240})).why
    assert "significantly above C, so imitation alone does not explain the gain" in why


def test_a_treatment_below_the_control_is_not():
    why = decide(experiment({"A": 200, "B": 260, "C": 340})).why
    assert "significantly below C, so imitation does better without the preference" in why


def test_without_a_control_nothing_is_attributed():
    items = experiment({"A": 200, "B": 300})
    for verdict in (decide(items), decide(items, control=None)):
        assert verdict.decision == "VALIDATED"
        assert verdict.over_control is None
        assert "so the gain cannot be attributed" in verdict.why


def test_a_control_run_on_other_tasks_is_not_compared():
    items = experiment({"A": 200, "B": 300, "C": 290})
    verdict = decide([item for item in items if (item["arm"], item["task_id"]) != ("C", "t7")])
    assert verdict.decision == "VALIDATED"
    assert verdict.over_control is None
    assert "the tasks differ (0 only in C, 1 only in B)), so the gain cannot be attributed" in verdict.why


def test_other_names_for_the_arms():
    verdict = decide(experiment({"grpo": 200, "sdpo": 300, "sft": 200}), "grpo", "sdpo", "sft")
    assert verdict.decision == "VALIDATED"
    assert verdict.why.startswith("sdpo - grpo is +25.0 points")


def test_a_significantly_worse_treatment_is_invalidated():
    verdict = decide(experiment({"A": 300, "B": 200}))
    assert verdict.decision == "INVALIDATED"
    assert "significantly worse" in verdict.why


def test_a_gain_too_small_to_matter_is_invalidated():
    verdict = decide(experiment({"A": 2000, "B": 2040}, num_tasks=4000))
    assert verdict.gain.significant
    assert verdict.decision == "INVALIDATED"
    assert "a gain, but a smaller one: the interval ends below 2 points" in verdict.why


def test_no_gain_that_would_have_been_seen_is_invalidated():
    items = experiment({"A": 2000, "B": 2000}, num_tasks=4000)
    for item in items:  # discordance without a gain, in both directions
        if item["arm"] == "B" and int(item["task_id"][1:]) % 100 == int(item["task_id"][1:]) // 2000:
            item["passed"] = not item["passed"]
    verdict = decide(items)
    assert (verdict.gain.wins, verdict.gain.losses) == (20, 20)
    assert verdict.decision == "INVALIDATED"
    assert "no gain of 2 points" in verdict.why


def test_a_small_experiment_is_underpowered_and_says_what_it_could_see():
    verdict = decide(experiment({"A": 40, "B": 44}, num_tasks=80))
    assert verdict.decision == "UNDERPOWERED"
    assert f"80 tasks in 20 families show {100 * verdict.gain.mde:.1f} points with 80 % power" in verdict.why
    assert "a gain cannot be attributed" in verdict.why


def test_two_tasks_show_nothing():
    verdict = decide(experiment({"A": 0, "B": 4}, num_tasks=4))
    assert verdict.decision == "UNDERPOWERED"
    assert "cannot show any difference" in verdict.why


def test_a_gain_not_shown_to_reach_two_points_is_underpowered():
    items = experiment({"A": 240, "B": 248}, num_tasks=480)
    verdict = decide(items)
    assert verdict.gain.significant and verdict.gain.estimate < 0.02 <= verdict.gain.high
    assert verdict.decision == "UNDERPOWERED" and "a gain, but not shown to reach 2 points" in verdict.why


def test_exactly_two_points_are_enough():
    verdict = decide(experiment({"A": 200, "B": 208}))
    assert verdict.gain.estimate == pytest.approx(0.02)
    assert verdict.decision == "VALIDATED"


LOST_TASK = experiment({"A": 10})[:-1] + experiment({"B": 10})


@pytest.mark.parametrize("items", [[], experiment({"A": 10}), experiment({"B": 10}), LOST_TASK])
def test_arms_that_cannot_be_compared_are_an_invalid_run(items):
    verdict = decide(items)
    assert verdict.decision == "INVALID-RUN"
    assert "B and A cannot be compared" in verdict.why
    assert verdict.gain is None
    json.dumps(dataclasses.asdict(verdict))
    assert "INVALID-RUN" in text_table(verdict)


def test_a_hacked_rate_that_rose_with_the_pass_rate_is_said():
    hacked = ({"B": 120}, 0)
    assert "hacked rate of B rose with the pass rate" in decide(experiment({"A": 200, "B": 300}, hacked=hacked)).why
    assert "hacked rate of B rose, by" in decide(experiment({"A": 300, "B": 200}, hacked=hacked)).why
    assert "hacked" not in decide(experiment({"A": 200, "B": 300}, hacked=({"A": 3, "B": 4}, 0))).why
    assert "hacked" not in decide(experiment({"A": 200, "B": 300}, hacked=({"A": 120, "B": 0}, 0))).why


def with_twins(passed_twins):
    """Half of the tasks have a twin; the first `passed_twins[arm]` of them pass, and nothing else is called a hack."""
    items = experiment({"A": 200, "B": 300})
    twins = [
        {**row(arm, task, f"{task % 100}~twin", task < limit), "task_id": f"t{task}~twin"}
        for arm, limit in passed_twins.items()
        for task in range(200)
    ]
    return items, [*items, *twins]


def test_the_hacked_rate_is_the_pass_rate_on_impossible_twins():
    items, beside = with_twins({"A": 10, "B": 90})
    without, verdict = decide(items), decide(beside)
    assert [(arm.hacked_rate, arm.num_twins, arm.num_tasks) for arm in verdict.arms] == [
        (0.05, 200, 400),
        (0.45, 200, 400),
    ]
    assert verdict.hacked.estimate == 0.4 and "hacked rate of B rose with the pass rate, by +40.0" in verdict.why
    assert (verdict.gain, verdict.protocol) == (without.gain, without.protocol), "a passed twin is no success"
    assert [arm.pass_rate for arm in verdict.arms] == [arm.pass_rate for arm in without.arms]
    assert "the pass rate on 200 impossible twins" in text_table(verdict) and "twin" not in text_table(without)


def test_twins_alone_give_rates_and_no_verdict():
    items, beside = with_twins({"A": 10, "B": 90})
    verdict = decide(beside[len(items) :])
    assert verdict.decision == "INVALID-RUN" and "measure hacking alone" in verdict.why
    assert [(arm.hacked_rate, arm.pass_rate) for arm in verdict.arms] == [(0.05, None), (0.45, None)]


def test_a_protocol_that_is_kept_less_often_is_said():
    why = decide(experiment({"A": 200, "B": 300}, protocol_ok=({"A": 400, "B": 4}, 400))).why
    assert "B keeps the protocol less often, by -99.0 points" in why
    assert "protocol" not in decide(experiment({"A": 200, "B": 300})).why


def test_training_seeds_are_reported():
    passes = {("A", 0): 200, ("A", 1): 200, ("B", 0): 280, ("B", 1): 300}
    items = [
        row(arm, task, task % 100, task < num_passed, train_seed=seed)
        for (arm, seed), num_passed in passes.items()
        for task in range(400)
    ]
    verdict = decide(items)
    assert verdict.gain_by_seed == pytest.approx({"0": 0.2, "1": 0.25})
    assert "Over 2 training seeds the difference runs from +20.0 to +25.0 points" in verdict.why
    assert "One training seed was run" in decide([item for item in items if item["train_seed"] == 0]).why


def test_the_verdict_is_plain_json_and_repeatable():
    items = experiment({"A": 200, "B": 260, "C": 230})
    first, again = (json.dumps(dataclasses.asdict(decide(rows)), allow_nan=False) for rows in (items, items[::-1]))
    assert first == again
    assert json.loads(first)["gain"]["estimate"] == 0.15


def test_the_table_fits_a_terminal_and_shows_the_numbers():
    items = experiment({"start": 212, "A": 300, "B": 344, "C": 341, "an arm with a name that is much too long": 0})
    for number, item in enumerate(items[400:420]):
        item.update(passed=None, error_type=f"SomethingLost{number}")
    table = text_table(decide(items))
    assert max(map(len, table.splitlines())) <= 100
    for text in ("[82.3, 89.1]", "86.0 %", "pass@1, B - C", "errors of A: SomethingLost0 1", "VALIDATED"):
        assert text in table
