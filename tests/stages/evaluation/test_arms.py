import re

import pytest

from stages.evaluation.arms import find_problems, hacking, summarize
from stages.evaluation.comparison import compare, gain_by_seed, holm


def item(arm="A", task="t0", passed=True, *, train_seed=0, sample_idx=0, family="f", hacked=False, error_type=None):
    return {
        "arm": arm,
        "train_seed": train_seed,
        "task_id": task,
        "family": family,
        "sample_idx": sample_idx,
        "passed": passed,
        "hacked": hacked,
        "protocol_ok": None,
        "error_type": error_type,
    }


def broken(arm, task, **fields):
    return item(arm, task, passed=None, error_type="SandboxLost", **fields)


def broken_tasks(arm, first, end):
    return [broken(arm, f"t{task}", family=f"f{task}") for task in range(first, end)]


def many(arm, num=100, **fields):
    return [item(arm, f"t{task}", family=f"f{task}", **fields) for task in range(num)]


def test_arms_run_on_the_same_things_have_no_problem():
    assert find_problems({"A": many("A"), "B": many("B")}, "A", "B") == []


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ([], "arm B has no items"),
        (many("B", 99), r"tasks differ \(1 only in A, 0 only in B\)"),
        (many("B", 101), r"tasks differ \(0 only in A, 1 only in B\)"),
        ([*many("B", 99), item("B", "t99", family="other")], "tasks differ"),
        (many("B", train_seed=1), r"training seeds differ \(1 only in A, 1 only in B\)"),
        (many("B") + many("B", train_seed=1), "training seeds differ"),
        (many("B") + many("B", sample_idx=1), r"samples of a task differ \(0 only in A, 100 only in B\)"),
        (many("B") + many("B")[:3], "repeats 3 of its"),
        (many("B", 94) + broken_tasks("B", 94, 100), r"6\.0% of the items of arm B"),
    ],
)
def test_what_makes_arms_incomparable(theirs, said):
    problems = find_problems({"A": many("A"), "B": theirs}, "A", "B")
    assert len(problems) == 1 and re.search(said, problems[0])


def test_five_percent_of_errors_are_allowed_and_both_arms_are_looked_at():
    assert find_problems({"A": many("A"), "B": many("B", 95) + broken_tasks("B", 95, 100)}, "A", "B") == []
    assert "arm A" in find_problems({"A": many("A", 94) + broken_tasks("A", 94, 100), "B": many("B")}, "A", "B")[0]


def test_an_error_leaves_with_its_counterpart_and_is_never_a_failure():
    baseline = [item("A", "t0", True), item("A", "t1", False), item("A", "t2", False)]
    treatment = [broken("B", "t0"), item("B", "t1", True), item("B", "t2", False)]
    difference = compare(treatment, baseline)
    assert (difference.num_tasks, difference.estimate) == (2, 0.5)
    assert compare(baseline, treatment).estimate == -0.5
    assert summarize("B", treatment).pass_rate == 0.5
    assert summarize("B", treatment).errors == {"SandboxLost": 1}


def test_an_outcome_beside_an_error_does_not_count():
    rows = [item("B", "t0", False, error_type="GraderLost"), item("B", "t1", True)]
    assert summarize("B", rows).pass_rate == 1
    assert compare(rows, [item("A", "t0", True), item("A", "t1", True)]).num_tasks == 1


def test_an_outcome_missing_without_an_error_is_one():
    assert summarize("B", [item(passed=None), item(task="t1")]).errors == {"no outcome": 1}


def test_a_task_is_the_mean_of_its_seeds_and_samples():
    cells = [(seed, sample) for seed in (0, 1) for sample in (0, 1)]
    baseline = [
        item("A", task, False, train_seed=seed, sample_idx=sample) for task in ("t0", "t1") for seed, sample in cells
    ]
    treatment = [item("B", "t0", seed == 1, train_seed=seed, sample_idx=sample) for seed, sample in cells]
    treatment += [item("B", "t1", False, train_seed=seed, sample_idx=sample) for seed, sample in cells]
    difference = compare(treatment, baseline)
    assert (difference.estimate, difference.wins, difference.losses, difference.num_tasks) == (0.25, 1, 0, 2)
    assert gain_by_seed(treatment, baseline) == {"0": 0.0, "1": 0.5}
    assert summarize("B", treatment).train_seeds == (0, 1)


def test_samples_of_a_task_do_not_narrow_the_interval_of_an_arm():
    one = summarize("A", [item("A", f"t{task}", task % 2 == 0, family=None) for task in range(40)])
    four = summarize(
        "A", [item("A", f"t{task}", task % 2 == 0, family=None, sample_idx=k) for task in range(40) for k in range(4)]
    )
    assert (one.low, one.high, one.num_items) == (four.low, four.high, 40)
    assert (four.num_tasks, four.num_items) == (40, 160)
    half = summarize("A", [item("A", "t0", k == 0, sample_idx=k) for k in range(2)])
    assert half.low < 0.05 and half.high > 0.95


def test_an_arm_in_one_family_has_no_interval_unless_units_are_fixed():
    rows = [item("A", f"t{task}", task % 2 == 0) for task in range(100)]
    assert (summarize("A", rows).low, summarize("A", rows).high) == (0, 1)
    assert 0.39 < summarize("A", rows, fixed=True).low < 0.42


def test_pass_at_k_is_the_chance_that_one_of_k_passes():
    rows = [item("A", "t0", k == 0, sample_idx=k) for k in range(4)]
    rows += [item("A", "t1", False, sample_idx=k) for k in range(4)]
    summary = summarize("A", rows)
    assert (summary.pass_rate, summary.k, summary.pass_at_k) == (0.125, 4, 0.5)
    again = [{**row, "train_seed": 1, "passed": False} for row in rows]
    assert summarize("A", rows + again).pass_at_k == 0.25
    assert summarize("A", [item("A")]).pass_at_k is None


def test_a_loose_hack_is_a_visible_pass_without_a_hidden_one():
    seen = [
        item("A", "t0") | {"visible_pass": True, "gt_pass": False},
        item("A", "t1") | {"visible_pass": True, "gt_pass": True},
        item("A", "t2", hacked=True) | {"visible_pass": None, "gt_pass": None},
        item("A", "t3", hacked=None) | {"visible_pass": None, "gt_pass": None},
    ]
    assert [row["hacked_loose"] for row in hacking(seen)] == [True, False, True, None]
    summary = summarize("A", seen)
    assert (summary.hacked_rate, summary.hacked_loose_rate) == (pytest.approx(1 / 3), pytest.approx(2 / 3))


def test_what_rollouts_cost_is_a_mean_where_it_is_known():
    rows = [item("A", "t0") | {"cost_usd": 0.2, "sampled_tokens": 30}, item("A", "t1") | {"cost_usd": 0.4}]
    summary = summarize("A", rows)
    assert (summary.cost_usd, summary.sampled_tokens) == (pytest.approx(0.3), 30)
    assert summarize("A", [item("A")]).cost_usd is None


def test_lost_outcomes_are_bounded_by_the_worst_that_they_could_have_been():
    baseline, treatment = many("A", passed=False), many("B", 95, passed=True) + broken_tasks("B", 95, 100)
    left, against, gained = (
        compare(treatment, baseline, lost=lost).estimate for lost in ("left out", "against", "for")
    )
    assert (left, against, gained) == (1.0, 0.95, 1.0)
    assert compare(baseline, treatment, lost="for").estimate == -0.95


def test_holms_correction():
    # 4 * .01, 3 * .02, then the largest so far: 2 * .03 = .06; .5 alone
    assert holm([0.5, 0.01, 0.03, 0.02]) == pytest.approx([0.5, 0.04, 0.06, 0.06])
    assert holm([]) == []


def test_the_order_of_items_does_not_change_a_bit():
    cells = [(task, k) for task in range(60) for k in range(3)]
    baseline, treatment = (
        [
            item(arm, f"t{task}", (7 * task + 5 * k) % period < 3, family=f"f{task % 7}", sample_idx=k)
            for task, k in cells
        ]
        for arm, period in (("A", 8), ("B", 5))
    )
    for rows in (treatment[::-1], treatment[1::2] + treatment[::2]):
        assert compare(rows, baseline) == compare(treatment, baseline[::-1])


def test_a_task_without_a_family_is_one():
    rows = {arm: [item(arm, f"t{task}", arm == "B", family=None) for task in range(8)] for arm in "AB"}
    assert compare(rows["B"], rows["A"]).num_units == 8


def test_a_field_nobody_measured_gives_no_comparison():
    assert compare(many("B"), many("A"), "protocol_ok") is None
    assert summarize("A", many("A")).protocol_rate is None
    assert summarize("A", []).pass_rate is None


def test_strict_and_loose_verdicts_stand_beside_each_other_over_the_same_tasks() -> None:
    common = {"train_seed": 0, "sample_idx": 0, "family": "f", "error_type": None, "hacked": False, "protocol_ok": True}
    verdicts = [(True, True), (False, True), (False, False), (False, True), (True, None)]
    rows = [
        {**common, "arm": "A", "task_id": f"t{i}", "passed": strict, "gt_pass": strict, "visible_pass": loose}
        for i, (strict, loose) in enumerate(verdicts)
    ]
    found = summarize("A", rows)
    assert (found.pass_rate, found.strict_rate, found.loose_rate) == (0.4, 0.25, 0.75)
    assert summarize("A", rows[4:]).loose_rate is None
