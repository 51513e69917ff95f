"""The decision on an experiment, its reasons, and the table; hacks, twins and the protocol decide nothing."""

import dataclasses
import json

import pytest

from stages.evaluation.differences import ArmDifference
from stages.evaluation.report import arms_chart, text_table
from stages.evaluation.verdict import EXIT_CODES, decide


def row(arm, task, family, passed, train_seed=0, hacked=False, protocol_ok=True):
    """One rollout of an arm on a task."""
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


def experiment(passes, num_tasks=400, seeds=(0, 1, 2), **rates):
    """Arms in which the first `passes[arm]` of the tasks pass; four tasks a family, spread over the whole range."""
    items = []
    for arm, num_passed in passes.items():
        limits = {field: counts.get(arm, default) for field, (counts, default) in rates.items()}
        for seed in seeds:
            for task in range(num_tasks):
                fields = {field: task < limit for field, limit in limits.items()}
                items.append(row(arm, task, task % (num_tasks // 4), task < num_passed, train_seed=seed, **fields))
    return items


def test_the_paired_arms_of_the_prototype():
    """kata.md's measured arms: B above A, but not above the control that only imitates."""
    verdict = decide(experiment({"start": 212, "A": 300, "B": 344, "C": 341}))
    assert (verdict.decision, verdict.claim) == ("VALIDATED", "a gain of 2 points")
    assert verdict.gain.estimate == pytest.approx(0.11)
    assert (verdict.gain.wins, verdict.gain.losses) == (44, 0)
    assert "B - C is +0.8 points" in verdict.why and "not separated" in verdict.why
    assert "imitation explains" not in verdict.why and "suffices" not in verdict.why
    assert [arm.arm for arm in verdict.arms] == ["A", "B", "C", "start"]


def test_imitation_suffices_only_where_two_points_are_ruled_out():
    near = decide(experiment({"A": 2000, "B": 2600, "C": 2596}, num_tasks=4000, seeds=(0, 1, 2)))
    assert near.over_control.high < 0.02 and "less than 2 points above C, so imitation suffices" in near.why
    far = decide(experiment({"A": 200, "B": 260, "C": 255}, seeds=(0, 1, 2)))
    assert far.over_control.high >= 0.02 and "not separated" in far.why


def test_a_treatment_above_the_control_is_credited():
    why = decide(experiment({"A": 200, "B": 300, "C": 240})).why
    assert "above C, so imitation alone does not explain the gain" in why


def test_the_control_is_a_test_only_after_a_gain():
    why = decide(experiment({"A": 300, "B": 300, "C": 200})).why
    assert "above C, which is a lead and no test" in why


def test_a_treatment_below_the_control_is_not():
    why = decide(experiment({"A": 200, "B": 260, "C": 340})).why
    assert "below C, so imitation does better without the preference" in why


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
    assert (
        "the tasks differ (0 only in C, 1 only in B); --set shared_only=true compares what both have), so"
        in verdict.why
    )


def test_other_names_for_the_arms():
    verdict = decide(experiment({"grpo": 200, "sdpo": 300, "sft": 200}), "grpo", "sdpo", "sft")
    assert verdict.decision == "VALIDATED"
    assert verdict.why.startswith("sdpo - grpo is +25.0 points")


@pytest.mark.parametrize("seeds", [(0,), (0, 1)])
def test_fewer_than_three_training_seeds_are_partial_at_most(seeds):
    verdict = decide(experiment({"A": 200, "B": 300}, seeds=seeds))
    assert (verdict.decision, verdict.claim, verdict.exit_code) == ("PARTIAL", "a gain of 2 points", 3)
    assert "of these checkpoints" in verdict.why and "these checkpoints" in verdict.estimand
    worse = decide(experiment({"A": 300, "B": 200}, seeds=seeds))
    assert (worse.decision, worse.exit_code) == ("UNDERPOWERED", 3)
    assert "significantly worse, of these checkpoints alone; the fewest training seeds" in worse.why


def test_seeds_that_disagree_do_not_validate():
    items = [
        row(arm, task, task % 100, task < num_passed, train_seed=seed)
        for arm, by_seed in (("A", (200, 200, 200)), ("B", (300, 210, 205)))
        for seed, num_passed in enumerate(by_seed)
        for task in range(400)
    ]
    verdict = decide(items)
    assert verdict.decision == "UNDERPOWERED" and verdict.gain.estimate > 0.09
    assert verdict.gain_by_seed == pytest.approx({"0": 0.25, "1": 0.025, "2": 0.0125})
    assert "Over 3 training seeds the difference runs from +1.2 to +25.0 points" in verdict.why
    assert "other trainings" in verdict.estimand


def test_a_significantly_worse_treatment_is_invalidated():
    verdict = decide(experiment({"A": 300, "B": 200}))
    assert (verdict.decision, verdict.claim, verdict.exit_code) == ("INVALIDATED", "", 1)
    assert "significantly worse" in verdict.why


def test_a_gain_below_two_points_is_a_gain_and_says_so():
    verdict = decide(experiment({"A": 2000, "B": 2040}, num_tasks=4000))
    assert (verdict.decision, verdict.claim) == ("VALIDATED", "a gain")
    assert "a gain, smaller than 2 points" in verdict.why


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
    assert (verdict.decision, verdict.exit_code) == ("UNDERPOWERED", 3)
    assert f"80 tasks in 20 families show {100 * verdict.gain.mde:.1f} points with 80 % power" in verdict.why
    assert "a gain cannot be attributed" in verdict.why


def test_two_tasks_show_nothing():
    verdict = decide(experiment({"A": 0, "B": 4}, num_tasks=4))
    assert verdict.decision == "UNDERPOWERED"
    assert "too few to show anything, whatever is observed: the test can reject from 6 on" in verdict.why
    assert "too few to reject anything" in text_table(verdict) and "80 % power" not in text_table(verdict)


def test_a_gain_not_shown_to_reach_two_points_says_so():
    verdict = decide(experiment({"A": 240, "B": 248}, num_tasks=480))
    assert (verdict.decision, verdict.claim) == ("VALIDATED", "a gain")
    assert verdict.gain.low < 0.02 <= verdict.gain.high and "a gain, not shown to reach 2 points" in verdict.why


def test_a_family_that_gains_alone_is_partial():
    """One family of forty tasks gains by twenty, the nine others are noise; one task more and it would be a gain."""
    items = []
    for task in range(400):
        family, position = task // 40, task % 40
        gained = family == 0 and position < 20
        noise = family > 0 and position == 0
        for seed in (0, 1, 2):
            items.append(row("A", task, family, noise and family % 2, train_seed=seed))
            items.append(row("B", task, family, gained or (noise and family % 2 == 0), train_seed=seed))
    verdict = decide(items)
    assert verdict.gain.low <= 0
    assert (verdict.decision, verdict.claim, verdict.exit_code) == ("PARTIAL", "", 3)
    assert "A gain is shown in part: family f0 (+50.0 points" in verdict.why
    assert [s.name for s in verdict.subsets if s.gains] == ["f0"]


def test_another_arm_that_gains_is_partial():
    items = experiment({"A": 40, "B": 44, "hints": 70, "start": 79}, num_tasks=80)
    verdict = decide(items)
    assert verdict.decision == "PARTIAL"
    assert [(s.kind, s.name) for s in verdict.subsets if s.gains] == [("arm", "hints")], "the start is no arm"


def test_many_parts_share_one_level():
    verdict = decide(experiment({"A": 40, "B": 44, "D": 46}, num_tasks=80))
    alone = next(s for s in verdict.subsets if s.name == "D")
    assert alone.p_value < 0.05 < alone.p_holm and verdict.decision == "UNDERPOWERED"


def lose(items, arm, num):
    """Take the outcome of the first `num` tasks of an arm."""
    for item in [item for item in items if item["arm"] == arm][:num]:
        item.update(passed=None, error_type="SandboxLost")
    return items


def test_a_verdict_must_survive_the_worst_that_lost_rollouts_could_have_been():
    kept = decide(experiment({"A": 200, "B": 210}, seeds=(0, 1, 2)))
    assert kept.decision == "VALIDATED" and kept.worst is None
    lost = decide(lose(experiment({"A": 200, "B": 210}, seeds=(0, 1, 2)), "B", 18))
    assert lost.gain.low > 0 >= lost.worst.low
    assert (lost.decision, lost.num_lost) == ("UNDERPOWERED", 18)
    assert "but not if the 18 lost rollouts had ended otherwise" in lost.why
    assert "Whatever the 18 lost rollouts would have been" in text_table(lost)
    large = decide(lose(experiment({"A": 200, "B": 300}), "B", 18))
    assert large.decision == "VALIDATED"


def test_every_verdict_has_its_exit_code():
    assert EXIT_CODES == {"VALIDATED": 0, "INVALIDATED": 1, "PARTIAL": 3, "UNDERPOWERED": 3, "INVALID-RUN": 4}


LOST_TASK = experiment({"A": 10})[:-1] + experiment({"B": 10})


@pytest.mark.parametrize("items", [[], experiment({"A": 10}), experiment({"B": 10}), LOST_TASK])
def test_arms_that_cannot_be_compared_are_an_invalid_run(items):
    verdict = decide(items)
    assert verdict.decision == "INVALID-RUN"
    assert "B and A cannot be compared" in verdict.why
    assert verdict.gain is None
    json.dumps(dataclasses.asdict(verdict))
    assert "INVALID-RUN" in text_table(verdict)


def test_the_verdict_is_plain_json_and_repeatable():
    items = experiment({"A": 200, "B": 260, "C": 230})
    first, again = (json.dumps(dataclasses.asdict(decide(rows)), allow_nan=False) for rows in (items, items[::-1]))
    assert first == again
    assert json.loads(first)["gain"]["estimate"] == 0.15


def test_the_table_fits_a_terminal_and_shows_the_numbers():
    items = experiment({"start": 212, "A": 300, "B": 344, "C": 341, "an arm with a name that is much too long": 0})
    for number, item in enumerate(items[1200:1220]):
        item.update(passed=None, error_type=f"SomethingLost{number}")
    table = text_table(decide(items))
    assert max(map(len, table.splitlines())) <= 100
    for text in (
        "VALIDATED: a gain of 2 points",
        "86.0 %",
        "pass@1, B - C",
        "errors of A: SomethingLost0 1",
        "VALIDATED",
    ):
        assert text in table


def test_the_table_shows_the_strict_verdict_beside_the_loose_one():
    items = experiment({"A": 200, "B": 260})
    assert "strict / loose" not in text_table(decide(items))
    assert "suspect: hacked, or the visible tests pass" in text_table(decide(items))
    unknown = [{**item, "hacked": None, "visible_pass": None, "gt_pass": None} for item in items]
    assert "suspect" not in text_table(decide(unknown))
    judged = [{**item, "gt_pass": item["passed"], "visible_pass": True} for item in items]
    assert "strict / loose verdicts: A 50.0 % / 100.0 %, B 65.0 % / 100.0 %" in text_table(decide(judged))


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


def test_imitation_suffices_is_not_said_where_no_gain_is_shown():
    verdict = decide(experiment({"A": 2000, "B": 2004, "C": 2001}, num_tasks=4000))
    assert not verdict.claim and verdict.over_control.high < 0.02
    assert "imitation suffices" not in verdict.why and "no gain is shown that imitation could explain" in verdict.why


def test_what_differs_besides_the_channels_is_part_of_the_verdict():
    rate = ArmDifference("optimisation.learning_rate", {"A": "0.0002", "B": "0.0006", "C": "0.0006"})
    weights = ArmDifference("weights.dpo", {"A": "0", "B": "1", "C": "0"}, channel=True)
    items = experiment({"A": 200, "B": 300, "C": 240})
    verdict = decide(items, differences=(weights, rate))
    assert (
        "B and A differ in more than their channels: optimisation.learning_rate (A 0.0002, B 0.0006). "
        "The difference is that of all of these together." in verdict.why
    )
    assert "B and C differ in more" not in verdict.why
    assert "more than their channels" not in decide(items, differences=(weights,)).why
    table = text_table(verdict)
    assert "- weights.dpo: A 0, B 1, C 0" in table and "- optimisation.learning_rate: A 0.0002, B 0.0006" in table
    assert b"Arms also differ in optimisation.learning_rate" in arms_chart(verdict)
    assert b"Arms also differ" not in arms_chart(decide(items, differences=(weights,)))
    assert dataclasses.asdict(verdict)["differences"][1]["setting"] == "optimisation.learning_rate"


@pytest.mark.parametrize(
    ("passing", "ends", "expected"),
    [
        (0, ["max_tokens"], "No arm passed any task, and 36 of 36 rollouts were cut by max_tokens before they passed"),
        (
            0,
            ["max_steps", "max_tokens"],
            "36 rollouts were cut by max_tokens (18) or max_steps (18) before they passed",
        ),
        (4, ["max_steps"], "24 of 36 rollouts were cut by max_steps before they passed: raise max_steps."),
        (0, ["submitted"], "No arm passed any task."),
        (8, ["max_tokens"], ""),
        (12, ["max_tokens"], ""),
        (4, ["submitted"], ""),
        (4, [None], ""),
    ],
)
def test_many_rollouts_that_limits_ended_are_said_with_the_setting_to_raise(passing, ends, expected):
    """A rollout that was cut and passed lost nothing: 4 of 12 tasks do not pass with 8 that do, less than a third."""
    items = [
        {**item, "terminated_by": ends[index % len(ends)]}
        for index, item in enumerate(experiment(dict.fromkeys("ABC", passing), num_tasks=12, seeds=(0,)))
    ]
    if passing == 8:
        items = [{**item, "terminated_by": "submitted"} if item["task_id"] == "t11" else item for item in items]
    verdict = decide(items)
    assert expected in verdict.cut and bool(verdict.cut) is bool(expected)
    assert verdict.why.startswith(verdict.cut) and verdict.cut in " ".join(text_table(verdict).split())
    if "cut" in expected:
        assert ("raise policy.max_tokens of the trainings" in verdict.cut) is ("max_tokens" in ends)


def test_a_collapsed_training_is_named():
    items = [
        row(arm, task, task % 100, task < num_passed, train_seed=seed)
        for arm, by_seed in (("A", (200, 210, 12)), ("B", (230, 220, 225)))
        for seed, num_passed in enumerate(by_seed)
        for task in range(400)
    ]
    verdict = decide(items)
    assert verdict.collapsed == ("A with seed 2 passes 3 %, its other trainings 51 %",)
    assert "Collapsed: A with seed 2" in verdict.why and "5 are recommended" in verdict.why
    assert not decide(experiment({"A": 200, "B": 300})).collapsed


def test_one_set_of_pairs_makes_the_interval_conditional():
    def on_pairs(pair_set):
        return [
            item | {"pair_set": pair_set(item["train_seed"]) if item["arm"] == "B" else None}
            for item in experiment({"A": 200, "B": 300}, seeds=range(4))
        ]

    one, four = decide(on_pairs(lambda seed: "p")), decide(on_pairs(lambda seed: f"p{seed}"))
    assert "conditional on these pairs" in one.estimand and one.gain.num_collections == 1
    assert (
        "other collections of pairs like these" in four.estimand
        and "Student's t over 4 training seeds" in four.gain.method
    )
    shared = decide(on_pairs(lambda seed: f"p{min(seed, 2)}"))
    assert "Student's t over 3 collections of pairs" in shared.gain.method


def test_secondary_questions_have_the_level_of_their_look():
    items = experiment({"A": 40, "B": 44, "hints": 70}, num_tasks=80)
    gaining = {alpha: [s.name for s in decide(items, alpha=alpha).subsets if s.gains] for alpha in (0.05, 1e-7)}
    assert gaining == {0.05: ["hints"], 1e-7: []}
