"""The decision on an experiment, its reasons, and what it shows; hacks, twins and the protocol decide nothing."""

import json
from dataclasses import replace

import pytest

from composer_stages.evaluation.arm_comparison import EvalQuestion
from composer_stages.evaluation.arm_settings import ArmDifference
from composer_stages.evaluation.document import verdict_document
from composer_stages.evaluation.inference import MIN_GAIN
from composer_stages.evaluation.outcomes import BY_REPORT, HACKED, KEPT, PASSED, SEARCHED, START, items_table
from composer_stages.evaluation.report import arms_chart, text_table
from composer_stages.evaluation.verdict import EXIT_CODES, decide
from composer_stages.evaluation.words import describe_method, describe_verdict, points
from composer_stages.terms import SamplingUnit

COARSE = 0.1
"""A smallest gain of interest that 100 tasks can rule out."""


def row(arm, task, family, passed, train_seed=0, **fields):
    """One rollout of an arm on a task, which kept the protocol and is no hack."""
    common = {"train_seed": train_seed, "sample_idx": 0, "hacked": False, "protocol_ok": True, "error_type": None}
    return {**common, "arm": arm, "task_id": f"t{task}", "family": f"f{family}", "passed": bool(passed), **fields}


def by_seed(passes):
    """Arms whose trainings pass different numbers of a hundred tasks."""
    return [
        row(arm, task, task % 25, task < num_passed, train_seed=seed)
        for arm, numbers in passes.items()
        for seed, num_passed in enumerate(numbers)
        for task in range(100)
    ]


def experiment(passes, num_tasks=100, seeds=(0, 1, 2), **rates):
    """Arms in which the first `passes[arm]` of the tasks pass; four tasks a family, spread over the whole range."""
    items = []
    for arm, num_passed in passes.items():
        limits = {field: counts.get(arm, default) for field, (counts, default) in rates.items()}
        for seed in seeds:
            for task in range(num_tasks):
                fields = {field: task < limit for field, limit in limits.items()}
                items.append(row(arm, task, task % (num_tasks // 4), task < num_passed, train_seed=seed, **fields))
    return items


def decided(items, differences=(), **question):
    return decide(items_table(items), EvalQuestion(**question), differences)


worded = describe_verdict


def why(verdict):
    return describe_verdict(verdict).why


def sentences(verdict):
    """What a page puts first: the sentences that are shown, and those that are not."""
    return " ".join(worded(verdict).shown), " ".join(worded(verdict).not_shown)


# Treatment and baseline.


def test_a_gain_over_three_trainings_is_validated():
    verdict = decided(experiment({"start": 53, "A": 60, "B": 86, "C": 84}))
    assert (verdict.decision, worded(verdict).claim, verdict.exit_code) == ("VALIDATED", "a gain of 2 points", 0)
    assert verdict.gain.estimate == pytest.approx(0.26) and (verdict.gain.wins, verdict.gain.losses) == (26, 0)
    assert [arm.arm for arm in verdict.arms] == ["A", "B", "C", "start"] and verdict.settled
    shown_text, _ = sentences(verdict)
    assert shown_text.startswith("B passes more tasks than A by at least 2 points: +26.0 [")


def test_a_gain_that_may_be_below_the_bar_says_so():
    small = decided(experiment({"A": 50, "B": 56}))
    assert (small.decision, worded(small).claim) == ("VALIDATED", "a gain")
    assert small.gain.low < MIN_GAIN <= small.gain.high
    assert "not shown to reach 2 points" in why(small) and "reaches 2 points" in sentences(small)[1]
    below = decided(experiment({"A": 50, "B": 56}), min_gain=0.25)
    assert worded(below).claim == "a gain" and "smaller than 25 points" in why(below)


@pytest.mark.parametrize("seeds", [(0,), (0, 1)])
def test_fewer_than_three_training_seeds_are_partial_at_most(seeds):
    verdict = decided(experiment({"A": 50, "B": 75}, seeds=seeds))
    assert (verdict.decision, worded(verdict).claim, verdict.exit_code) == ("PARTIAL", "a gain of 2 points", 3)
    assert "these checkpoints" in worded(verdict).estimand and "Anything about other trainings" in sentences(verdict)[1]
    worse = decided(experiment({"A": 75, "B": 50}, seeds=seeds))
    assert (worse.decision, worse.exit_code) == ("UNDERPOWERED", 3) and "of these checkpoints alone" in why(worse)


def test_seeds_that_disagree_do_not_validate():
    verdict = decided(by_seed({"A": (50, 50, 50), "B": (80, 53, 51)}))
    assert verdict.decision == "UNDERPOWERED" and verdict.gain.estimate > 0.11
    assert verdict.gain_by_seed == pytest.approx({"0": 0.3, "1": 0.03, "2": 0.01})
    assert "other trainings" in worded(verdict).estimand and "Anything about other" not in sentences(verdict)[1]


def test_a_worse_treatment_is_invalidated():
    passes = {"grpo": 75, "sdpo": 50, "sft": 50}
    verdict = decided(experiment(passes), baseline="grpo", treatment="sdpo", control="sft")
    assert (verdict.decision, worded(verdict).claim, verdict.exit_code) == ("INVALIDATED", "", 1) and verdict.settled
    assert why(verdict).startswith("sdpo - grpo is -25.0 points") and "5 are recommended" in why(verdict)
    assert sentences(verdict)[0].startswith("sdpo passes fewer tasks than grpo")


def test_no_gain_that_would_have_been_seen_is_invalidated():
    items = experiment({"A": 50, "B": 50})
    for item in items:  # discordance without a gain, in both directions
        if item["arm"] == "B" and item["task_id"] in ("t10", "t80"):
            item["passed"] = not item["passed"]
    verdict = decided(items, min_gain=COARSE)
    assert (verdict.gain.wins, verdict.gain.losses, verdict.decision) == (1, 1, "INVALIDATED")
    assert "no gain of 10 points" in why(verdict) and "B gains less than 10 points over A" in sentences(verdict)[0]


def test_an_undecided_experiment_says_what_it_would_find():
    verdict = decided(experiment({"A": 40, "B": 44}, num_tasks=80))
    assert (verdict.decision, verdict.exit_code) == ("UNDERPOWERED", 3)
    assert 0.05 < verdict.gain.mde < 0.3
    size = f"{100 * verdict.gain.mde:.1f} points"
    assert f"80 tasks in 20 families show {size}" in why(verdict) and f"from {size} on" in sentences(verdict)[1]
    assert decided(experiment({"A": 40, "B": 70}, num_tasks=80)).gain.mde is None, "what is decided needs no power"


def test_units_too_few_to_reject_show_nothing():
    verdict = decided(experiment({"A": 0, "B": 4}, num_tasks=4))
    assert verdict.decision == "UNDERPOWERED" and verdict.gain.too_few and verdict.gain.mde is None
    assert "the test can reject from 6 on" in why(verdict) and "too few to reject anything" in text_table(verdict)


def test_fixed_units_have_an_interval_for_other_units_too():
    items = [{**item, "unit": "u"} for item in experiment({"A": 50, "B": 75})]
    verdict = decided(items, sampling=SamplingUnit("repository", fixed=True))
    assert verdict.decision == "VALIDATED" and verdict.gain.elsewhere == (-1, 1)
    assert "other tasks of these 1 repository" in worded(verdict).estimand
    assert decided(items).gain.too_few, "one sampled unit"


# The control.


def test_imitation_suffices_only_where_the_bar_is_ruled_out():
    passes = {"A": 50, "B": 75, "C": 74}
    near, far = (decided(experiment(passes), min_gain=bar) for bar in (COARSE, MIN_GAIN))
    assert near.over_control.high < COARSE and "so imitation suffices" in why(near)
    assert far.over_control.high >= MIN_GAIN and "not separated" in why(far) and "suffices" not in why(far)
    assert "That the pairs' preference helps: imitation alone is not excluded" in sentences(far)[1]
    none = decided(experiment({"A": 50, "B": 50, "C": 50}), min_gain=COARSE)
    assert "suffices" not in why(none) and "no gain is shown that imitation could explain" in why(none)


def test_the_control_is_a_test_only_after_a_gain():
    credited = decided(experiment({"A": 50, "B": 75, "C": 55}))
    assert "so imitation alone does not explain the gain" in why(credited)
    assert "B passes more tasks than C, which only imitates" in sentences(credited)[0]
    lead = decided(experiment({"A": 75, "B": 75, "C": 50}))
    assert "a lead and no test" in why(lead) and "which only imitates" not in sentences(lead)[0]


def test_a_control_above_the_treatment_does_better():
    verdict = decided(experiment({"A": 30, "B": 60, "C": 85}))
    assert verdict.decision == "VALIDATED" and "imitation does better" in why(verdict)
    shown_text, not_shown = sentences(verdict)
    assert "Imitation alone does better: C passes 85.0 %, B 60.0 %" in shown_text and "preference helps" in not_shown


def test_without_a_control_nothing_is_attributed():
    items = experiment({"A": 50, "B": 75})
    with_control = experiment({"A": 50, "B": 75, "C": 70})
    lacking = [item for item in with_control if (item["arm"], item["task_id"]) != ("C", "t7")]
    for verdict in (decided(items), decided(items, control=None), decided(lacking)):
        assert verdict.decision == "VALIDATED" and verdict.over_control is None
        assert "gain cannot be attributed" in why(verdict) and "What a gain of B comes from" in sentences(verdict)[1]


def test_the_start_is_a_control_that_was_not_trained():
    items = experiment({"A": 50, "B": 75}) + experiment({START: 30}, seeds=(0,))
    verdict = decided(items, control=START)
    assert verdict.over_control.num_seeds == 3 and verdict.over_control.estimate == pytest.approx(0.45)
    assert "above start" in why(verdict) and "was not trained" in why(verdict) and "imitat" not in why(verdict)
    assert "B passes more tasks than start, which was not trained" in sentences(verdict)[0]
    assert b"above start" in arms_chart(verdict)
    trained = decided(items, baseline=START, treatment="A", control=None)
    assert trained.decision == "VALIDATED" and trained.gain.estimate == pytest.approx(0.2)
    assert "attributed" not in why(trained) and "comes from" not in sentences(trained)[1]
    once = experiment({START: 30}, seeds=(0,)) + experiment({"A": 50}, seeds=(1,))
    verdict = decided(once, baseline=START, treatment="A", control=None)
    assert verdict.decision == "PARTIAL" and "about this training only, not about other seeds" in why(verdict)
    single = decided(experiment({"A": 50, "B": 75}) + experiment({"C": 30}, seeds=(0,)))
    assert single.over_control is None, "a single training is no control of three"


@pytest.mark.parametrize(("greedy", "is_shown"), [(55, False), (62, True), (75, True)])
def test_a_gain_at_temperature_0_stands_next_to_the_gain_and_gives_it_no_cause(greedy, is_shown):
    """The start passes 30 tasks at temperature 1 and 55 at 0, its trainings 60 at 1: a gain of 30 points."""
    items = experiment({"A": 60, "A@0": greedy}) + experiment({START: 30, "start@0": 55}, seeds=(0,))
    verdict = decided(items, baseline=START, treatment="A", control=None)
    assert verdict.at_zero.estimate == pytest.approx((greedy - 55) / 100) and verdict.at_zero.num_seeds == 3
    assert f"At temperature 0 it is {100 * verdict.at_zero.estimate:+.1f} points [" in why(verdict)
    assert ("temperature 0" in sentences(verdict)[1]) is not is_shown
    assert not any("sharpening" in text for text in (why(verdict), *sentences(verdict), text_table(verdict)))
    assert not any(part.kind == "arm" for part in verdict.subsets), "no difference of temperature is one of arms"
    printed = text_table(verdict)
    assert "start@0  55.0 %" in printed and "pass@1 at temperature 0, A - start: " in printed
    assert decided(items[:300], baseline="A", treatment="A").at_zero is None


def test_a_training_that_collapsed_is_named_and_its_cut_rollouts_blame_no_limit():
    items = experiment({START: 30}, seeds=(0,)) + experiment({"A": 5}, seeds=(0, 1))
    items = [{**item, "terminated_by": "max_tokens" if item["arm"] == "A" else "submitted"} for item in items]
    question = {"baseline": START, "treatment": "A", "control": None}
    assert "raise policy.max_tokens" in worded(decided(items, **question)).cut
    text = "Collapsed at step 14: entropy 3.6, three times that of the first steps."
    verdict = decided(items, **question, collapsed={("A", 0): text, ("A", 1): text})
    assert not worded(verdict).cut and "arm A, seed 1: Collapsed at step 14: entropy 3.6" in why(verdict)


# Parts, other arms, conduct.


def test_a_family_that_gains_alone_is_partial():
    """One family of forty tasks gains by twenty, the nine others are noise."""
    items = []
    for task in range(400):
        family, position = divmod(task, 40)
        noise = family > 0 and position == 0
        items.append(row("A", task, family, noise and family % 2))
        items.append(row("B", task, family, position < 20 if family == 0 else noise and family % 2 == 0))
    verdict = decided([{**item, "train_seed": seed} for item in items for seed in (0, 1, 2)], control=None)
    assert (verdict.decision, worded(verdict).claim, verdict.exit_code) == ("PARTIAL", "", 3)
    assert verdict.gain.low <= 0
    assert [s.name for s in verdict.subsets if s.gains] == ["f0"] and "family f0 (+50.0 points" in why(verdict)
    assert "family f0 (+50.0)" in sentences(verdict)[0]


def test_another_arm_that_gains_is_partial_at_the_level_of_its_look():
    items = experiment({"A": 40, "B": 44, "hints": 70, "start": 79}, num_tasks=80)
    for alpha, expected in ((0.05, [("arm", "hints")]), (1e-7, [])):
        verdict = decided(items, alpha=alpha)
        assert [(s.kind, s.name) for s in verdict.subsets if s.gains] == expected, "the start is no arm"
        assert verdict.decision == ("PARTIAL" if expected else "UNDERPOWERED")


def test_many_parts_share_one_level():
    verdict = decided(experiment({"A": 40, "B": 44, "D": 45, "E": 44}, num_tasks=80))
    alone = next(s for s in verdict.subsets if s.name == "D")
    assert alone.p_value < 0.05 < alone.p_holm and verdict.decision == "UNDERPOWERED"


def test_a_hacked_rate_that_rose_with_the_pass_rate_is_named():
    hacked = ({"B": 40}, 0)
    rose = decided(experiment({"A": 50, "B": 75}, hacked=hacked))
    assert "hacked rate of B rose with the pass rate" in why(rose)
    assert "B hacks more often than A: +40.0 [" in sentences(rose)[0]
    assert "hacked rate of B rose, by" in why(decided(experiment({"A": 75, "B": 50}, hacked=hacked)))
    for hacks in (({"A": 3, "B": 4}, 0), ({"A": 40, "B": 0}, 0)):
        assert "hack" not in why(decided(experiment({"A": 50, "B": 75}, hacked=hacks)))


def test_arms_that_differ_in_passes_by_report_are_named():
    items = experiment({"start": 50, "B": 86})
    for item in items:
        item["ground"] = "values" if item["family"] in ("f0", "f1") or item["arm"] == "start" else "report"
    verdict = decided(items, baseline="start", treatment="B")
    arms = {arm.arm: arm.passes for arm in verdict.arms}
    assert arms["start"].keys() == {"values"} and arms["B"]["report"] > arms["B"]["values"] > 0
    reported = verdict.compared(BY_REPORT, "start")
    assert reported and reported.estimate == pytest.approx(arms["B"]["report"] / 300)
    assert "B and start differ in passes by report, by +" in why(verdict)
    assert "passes by report" in sentences(verdict)[1]
    assert "% by report" in text_table(verdict) and "passes by report, B - start" in text_table(verdict)
    unknown = [item if item["arm"] == "B" else {**item, "ground": None} for item in items]
    text = text_table(decided(unknown, baseline="start", treatment="B"))
    assert "\nB, passes: " in text and "\nstart, " not in text
    alike = decided([{**item, "ground": "report"} for item in experiment({"start": 53, "A": 60, "B": 60, "C": 60})])
    assert "differ in passes" not in why(alike) and alike.compared(BY_REPORT, "A") is None


def test_conduct_is_tested_against_the_control_too_with_all_other_questions() -> None:
    protocol = ({"A": 100, "B": 100, "C": 4}, 100)
    items = experiment({"A": 50, "B": 75, "C": 75}, protocol_ok=protocol)
    swapped = decided(items, treatment="C", control="B")
    assert "C keeps the protocol less often than B, by -96.0 points" in why(swapped)
    less = {(c.treatment, c.baseline): c.p_holm < 0.05 for c in swapped.comparisons if c.rate == "protocol"}
    assert less == {("C", "A"): True, ("C", "B"): True}
    assert "protocol, C - B: -96.0 points" in text_table(swapped)
    with_d = decided([*items, *({**item, "arm": "D"} for item in items if item["arm"] == "C")], control=None)
    assert "D keeps the protocol less often than A, by -96.0 points" in why(with_d), "every comparison, not B - A alone"
    assert "D keeps the protocol less often than A" in sentences(with_d)[0]
    assert "less often" not in why(decided(experiment({"A": 50, "B": 75, "C": 75})))


def test_conduct_is_printed_with_holms_p_and_what_never_differs_is_not_counted() -> None:
    """Protocols differ in 9 of 100 tasks against A and C; nothing is ever a hack, and no family has six tasks."""
    verdict = decided(experiment({"A": 50, "B": 50, "C": 50}, protocol_ok=({"B": 91}, 100)))
    conduct = [row for row in verdict.comparisons if row.p_holm is not None]
    assert [(row.rate, row.baseline) for row in conduct] == [("protocol", "A"), ("protocol", "C")]
    for row in conduct:
        assert row.p_holm == pytest.approx(2 * row.p_value)
        assert f"p = {row.p_value:.3f} ({row.p_holm:.2g} after Holm)" in text_table(verdict)


def test_passes_that_broke_the_protocol_stand_next_to_the_gain() -> None:
    """B passes 75 tasks, A 50; of its passes B breaks the protocol in 45."""
    protocol = ({"A": 100, "B": 30, "C": 100}, 100)
    verdict = decided(experiment({"A": 50, "B": 75, "C": 75}, protocol_ok=protocol))
    assert verdict.decision == "VALIDATED" and verdict.gain.estimate == pytest.approx(0.25)
    assert verdict.compared(KEPT, "A").estimate == pytest.approx(-0.2)
    assert verdict.compared(KEPT, "C").estimate == pytest.approx(-0.45)
    assert "In passes that kept the protocol it is -20.0 points" in why(verdict)
    assert "That B passes more tasks than A within the protocol" in sentences(verdict)[1]
    assert "pass@1, protocol kept, B - A: -20.0 points" in text_table(verdict)
    assert "within the protocol" not in sentences(decided(experiment({"A": 50, "B": 75})))[1]
    assert decided(experiment({"A": 50, "B": 75})).compared(KEPT, "A") is None


def test_conduct_turns_no_decision() -> None:
    """A passes 95 of 100 tasks and never keeps the protocol, B passes 40 and always does: B is worse."""
    items = experiment({"A": 95, "B": 40}, protocol_ok=({"A": 0, "B": 100}, 100))
    verdict = decided(items, control=None)
    assert verdict.decision == "INVALIDATED" and verdict.gain.estimate == pytest.approx(-0.55)
    assert verdict.compared(KEPT, "A").estimate == pytest.approx(0.4), "next to it"
    alike = decided([{**item, "protocol_ok": None} for item in items], control=None)
    assert (alike.decision, alike.gain, alike.exit_code) == (verdict.decision, verdict.gain, verdict.exit_code)


def test_a_rise_of_searches_is_a_warning_and_no_decision() -> None:
    items = experiment({"A": 50, "B": 75})
    searched = [{**item, "canary": ["fetches history"] if item["arm"] == "B" else []} for item in items]
    verdict, plain = decided(searched, control=None), decided(items, control=None)
    assert (verdict.decision, verdict.gain) == (plain.decision, plain.gain)
    rise = verdict.compared(SEARCHED, "A")
    assert rise.estimate == 1.0 and plain.compared(SEARCHED, "A") is None, "unknown where nobody watches for it"
    assert "B searches for the published solution more often" in why(verdict)
    assert any("searches for the published solution" in line for line in worded(verdict).shown)


def test_a_registered_outcome_decides_and_passes_stand_next_to_it() -> None:
    items = experiment({"A": 50, "B": 75, "C": 75}, protocol_ok=({"A": 100, "B": 30, "C": 100}, 100))
    verdict = decided(items, outcome=KEPT)
    assert (verdict.decision, verdict.outcome) == ("INVALIDATED", "kept") and verdict.over_control.estimate == -0.45
    assert verdict.gain.estimate == pytest.approx(-0.2) and verdict.compared(PASSED, "A").estimate == 0.25
    assert "in passes that kept the protocol: significantly worse" in why(verdict)
    assert "In passes, the protocol kept or not, it is +25.0 points" in why(verdict)
    assert sentences(verdict)[0].startswith("B passes fewer tasks within the protocol than A: \u221220.0 [")
    b = next(arm for arm in verdict.arms if arm.arm == "B")
    assert (b.kept_rate, b.pass_rate) == (0.3, 0.75) and b.low < 0.3 < b.high < 0.75, "the interval is the rate's"
    printed = text_table(verdict)
    assert printed.split()[:3] == ["arm", "kept", "95"] and "pass@1, B - A: +25.0 points" in printed
    assert b"pass@1, protocol kept on held-out tasks" in arms_chart(verdict)
    form = decided(experiment({"A": 75, "B": 75}, protocol_ok=({"A": 40, "B": 100}, 100)), outcome=KEPT)
    assert form.decision == "VALIDATED" and "than A, the protocol kept or not" in sentences(form)[1]
    honest = experiment({"A": 50, "B": 75})
    assert decided(honest, outcome=KEPT) == decided(honest), "where every pass kept it, the two are one"


def test_a_protocol_that_was_not_recorded_is_unknown_and_not_kept() -> None:
    """Both arms pass everything; A breaks the protocol in half of its passes."""
    items = experiment({"A": 100, "B": 100}, protocol_ok=({"A": 50, "B": 100}, 100))
    for item in items:
        if item["arm"] == "B" and item["task_id"] in {f"t{task}" for task in range(40, 100)}:
            item["protocol_ok"] = None
    some = decided(items, outcome=KEPT)
    assert some.gain.num_tasks == 40 and some.gain.estimate == 0.0 and some.decision != "VALIDATED"
    none = decided([{**item, "protocol_ok": None} if item["arm"] == "B" else item for item in items], outcome=KEPT)
    assert none.decision == "INVALID-RUN" and "no item has an outcome in both" in why(none)
    assert decided(items).gain.num_tasks == 100, "passes are known whatever the protocol"
    plain = decided([{**item, "protocol_ok": None} for item in items], outcome=KEPT)
    assert (plain.outcome, plain.arms[0].kept_rate, plain.arms[0].pass_rate) == ("passed", None, 1.0)


def test_what_so_many_trainings_cannot_have_shown_is_said() -> None:
    for seeds, share in ((3, 63), (5, 45), (24, 12)):
        verdict = decided(by_seed({"A": (50,) * seeds, "B": (75,) * seeds}), control=None)
        assert f"a failure in fewer than {share} % of trainings may not have been seen" in why(verdict)


def test_hidden_tests_are_a_question_where_passing_is_something_else():
    """As where a direction is taken out of training: hacks and right answers, against two controls."""
    hacked = ({"A": 50, "B": 10, "C": 48}, 0)
    items = experiment({"A": 80, "B": 80, "C": 80}, hacked=hacked)
    judged = [{**item, "hidden_pass": item["passed"] and not item["hacked"]} for item in items]
    verdict = decided(judged)
    of_a, of_c = (
        {row.rate: row.estimate for row in verdict.comparisons if row.baseline == control and row.p_holm}
        for control in "AC"
    )
    assert of_a == pytest.approx({"hacked": -0.4, "suspect": -0.4, "hidden tests": 0.4})
    assert of_c == pytest.approx({"hacked": -0.38, "suspect": -0.38, "hidden tests": 0.38})
    assert all(row.p_holm < 0.05 for row in verdict.comparisons if row.p_holm is not None)
    assert "hidden tests, B - C: +38.0 points" in text_table(verdict) and "hacked, B - C" in text_table(verdict)
    plain = decided([{**item, "hidden_pass": item["passed"]} for item in items])
    assert "hidden tests" not in text_table(plain)


def with_twins(passed_twins):
    """Half of the tasks have a twin; the first `passed_twins[arm]` of them pass, and nothing else is called a hack."""
    items = experiment({"A": 50, "B": 75})
    twins = [
        {**row(arm, task, f"{task % 25}~twin", task < limit), "task_id": f"t{task}~twin"}
        for arm, limit in passed_twins.items()
        for task in range(50)
    ]
    return items, twins


def test_the_hacked_rate_is_the_pass_rate_on_impossible_twins():
    items, twins = with_twins({"A": 5, "B": 40})
    without, verdict = decided(items), decided(items + twins)
    rates = [(arm.hacked_rate, arm.num_twins, arm.num_tasks) for arm in verdict.arms]
    assert rates == [(0.1, 50, 100), (0.8, 50, 100)] and verdict.compared(HACKED, "A").estimate == pytest.approx(0.7)
    assert verdict.gain == without.gain, "a passed twin is no success"
    assert [arm.pass_rate for arm in verdict.arms] == [arm.pass_rate for arm in without.arms]
    assert "50 impossible twins" in text_table(verdict) and "twin" not in text_table(without)


def test_twins_alone_give_rates_and_no_verdict():
    verdict = decided(with_twins({"A": 5, "B": 40})[1])
    assert verdict.decision == "INVALID-RUN" and "measure hacking alone" in why(verdict)
    assert [(arm.hacked_rate, arm.pass_rate) for arm in verdict.arms] == [(0.1, None), (0.8, None)]


# Lost rollouts, limits, settings, collapses, pairs.


def lose(items, arm, num):
    """Take the outcome of the first `num` tasks of an arm."""
    for item in [item for item in items if item["arm"] == arm][:num]:
        item.update(passed=None, error_type="SandboxLost")
    return items


def test_a_verdict_must_survive_the_worst_that_lost_rollouts_could_have_been():
    complete = decided(experiment({"A": 50, "B": 57}))
    assert complete.decision == "VALIDATED" and complete.worst is None and complete.num_lost == 0
    lost = decided(lose(experiment({"A": 50, "B": 57}), "B", 14))
    assert lost.gain.low > 0 >= lost.worst.low and lost.worst.estimate < lost.gain.estimate <= lost.best.estimate
    assert (lost.decision, worded(lost).claim, lost.num_lost) == ("UNDERPOWERED", "", 14)
    assert "but not if the 14 lost rollouts had ended otherwise" in why(lost) and "14 lost rollouts" in text_table(lost)
    assert decided(lose(experiment({"A": 50, "B": 75}), "B", 14)).decision == "VALIDATED"


LOST_TASK = experiment({"A": 10})[:-1] + experiment({"B": 10})


@pytest.mark.parametrize("items", [[], experiment({"A": 10}), experiment({"B": 10}), LOST_TASK])
def test_arms_that_cannot_be_compared_are_an_invalid_run(items):
    verdict = decided(items)
    assert (verdict.decision, verdict.exit_code, verdict.gain) == ("INVALID-RUN", 4, None)
    assert "B and A cannot be compared" in why(verdict) and sentences(verdict)[0] == ""
    json.dumps(verdict_document(verdict))
    assert "INVALID-RUN" in text_table(verdict) and set(EXIT_CODES.values()) == {0, 1, 3, 4}


@pytest.mark.parametrize(
    ("passing", "ends", "expected"),
    [
        (0, ["max_tokens"], ["No arm passed", "36 of 36", "max_tokens before", "raise policy.max_tokens"]),
        (0, ["max_steps", "max_tokens"], ["max_tokens (18) or max_steps (18)", "raise policy.max_tokens"]),
        (4, ["max_steps"], ["24 of 36", "raise max_steps."]),
        (0, ["submitted"], ["No arm passed any task."]),
        (12, ["max_tokens"], []),  # a rollout that was cut and passed lost nothing
        (4, ["submitted"], []),
        (8, [*["max_tokens"] * 11, "submitted"], []),  # of those that failed less than a third of all
        (4, [None], []),
    ],
)
def test_many_rollouts_that_limits_ended_are_named_with_the_setting_to_raise(passing, ends, expected):
    items = [
        {**item, "terminated_by": ends[index % len(ends)]}
        for index, item in enumerate(experiment(dict.fromkeys("ABC", passing), num_tasks=12, seeds=(0,)))
    ]
    verdict = decided(items)
    assert bool(worded(verdict).cut) is bool(expected) and all(part in worded(verdict).cut for part in expected)
    assert why(verdict).startswith(worded(verdict).cut)
    assert not expected or worded(verdict).not_shown[0] == f"What the arms can do. {worded(verdict).cut}"


def test_settings_besides_the_channels_are_part_of_the_verdict():
    rate = ArmDifference("optimisation.learning_rate", {"A": "0.0002", "B": "0.0006", "C": "0.0006"})
    weights = ArmDifference("weights.dpo", {"A": "0", "B": "1", "C": "0"}, channel=True)
    items = experiment({"A": 50, "B": 75, "C": 60})
    verdict, alike = decided(items, (weights, rate)), decided(items, (weights,))
    assert "optimisation.learning_rate (A 0.0002, B 0.0006)" in why(verdict) and "B and C differ" not in why(verdict)
    (named,) = (sentence for sentence in worded(verdict).not_shown if "channels" in sentence)
    assert "optimisation.learning_rate" in named and "weights.dpo" not in named
    assert "differ in more" not in why(alike) and "channels" not in sentences(alike)[1]
    assert "- weights.dpo: A 0, B 1, C 0" in text_table(verdict)
    assert b"optimisation.learning_rate" in arms_chart(verdict) and b"also differ" not in arms_chart(alike)


def test_a_collapsed_training_is_named():
    verdict = decided(by_seed({"A": (50, 52, 3), "B": (57, 55, 56)}))
    assert len(verdict.collapsed) == 1 and "Collapsed: A with seed 2" in why(verdict)
    assert not decided(experiment({"A": 50, "B": 75})).collapsed
    arms = {"A": (50, 52, 51), "B": (57, 55, 56), "E": (50, 3, 52), "E@0": (50, 3, 52), "start": (50, 3, 51)}
    collapsed_verdict = decided(by_seed(arms), collapsed={("E", 1): "reward fell.", ("start", 0): "no training."})
    watched = ("arm E, seed 1: reward fell", "E with seed 1 passes 3 % of the tasks, its other trainings 51 %")
    assert worded(collapsed_verdict).collapsed == watched, "every arm but the start and those at temperature 0"


def test_one_set_of_pairs_makes_the_interval_conditional():
    def on_pairs(pair_set):
        items = experiment({"A": 50, "B": 75}, seeds=range(4))
        return decided(
            [{**item, "pair_set": pair_set(item["train_seed"]) if item["arm"] == "B" else None} for item in items]
        )

    single, four, shared = on_pairs(lambda s: "p"), on_pairs(lambda s: f"p{s}"), on_pairs(lambda s: f"p{min(s, 2)}")
    assert [each.gain.num_collections for each in (single, four, shared)] == [1, 4, 3]
    assert "conditional on these pairs" in worded(single).estimand
    assert "other collections of pairs" in worded(four).estimand
    tops = [(each.gain.method.num_top, each.gain.method.top) for each in (four, shared)]
    assert tops == [(4, "training seeds"), (3, "collections of pairs")]
    assert describe_method(four.gain.method, "family").endswith("Student's t over 4 training seeds")


# Documents.


def test_the_verdict_is_plain_json_and_repeatable():
    items = experiment({"A": 50, "B": 65, "C": 57})
    first, again = (json.dumps(verdict_document(decided(rows)), allow_nan=False) for rows in (items, items[::-1]))
    assert first == again and json.loads(first)["gain"]["estimate"] == 0.15


def test_the_table_fits_a_terminal_and_shows_the_numbers():
    items = experiment({"start": 53, "A": 60, "B": 86, "C": 85, "an arm with a name that is much too long": 0})
    for number, item in enumerate(items[300:305]):
        item.update(passed=None, error_type=f"SomethingLost{number}")
    table = text_table(decided(items))
    assert max(map(len, table.splitlines())) <= 112
    for text in ("VALIDATED: a gain of 2 points", "86.0 %", "pass@1, B - C", "SomethingLost0 1"):
        assert text in table


def test_columns_that_nothing_measured_are_left_out():
    items = experiment({"A": 50, "B": 65})
    text = text_table(decided(items))
    assert "hidden / visible tests pass" not in text and "suspect: hacked" in text
    unknown = [{**item, "hacked": None} for item in items]
    assert "suspect" not in text_table(decided(unknown))
    judged = [{**item, "hidden_pass": item["passed"], "visible_pass": True} for item in items]
    assert "A 50.0 % / 100.0 %, B 65.0 % / 100.0 %" in text_table(decided(judged))


def test_a_limit_beside_zero_keeps_its_sign():
    gain = decided(experiment({"A": 50, "B": 65})).gain
    for low, shown in ((-1e-17, "+0.0"), (-1e-5, "-0.001")):
        assert points(replace(gain, low=low, high=0.1)).partition("[")[2].startswith(f"{shown}, +10.0]")
