"""Items as data: which arms may be compared, how outcomes are paired and missing ones imputed, the rates of an arm."""

import numpy as np
import pytest

from composer_stages.evaluation.outcomes import (
    HACKED,
    NOT_SUBMITTED,
    PASSED,
    PRIMARY,
    PROTOCOL,
    SUSPECT,
    find_collapsed,
    find_problems,
    items_table,
    items_that_measure_hacking,
    paired,
    summarize,
    values_of,
)


def item(arm="A", task="t0", passed=True, **fields):
    """One rollout in the family `f`, of training seed 0 and sample 0."""
    common = {"train_seed": 0, "sample_idx": 0, "family": "f", "hacked": False, "protocol_ok": None, "error_type": None}
    return {**common, "arm": arm, "task_id": task, "passed": passed, **fields}


def many(arm, num=100, **fields):
    """Rollouts of so many tasks, each in a family of its own."""
    return [item(arm, f"t{task}", **{"family": f"f{task}", **fields}) for task in range(num)]


def broken(rows, num):
    """Take the outcome of the last `num` of some rows."""
    first_lost = len(rows) - num
    return rows[:first_lost] + [{**row, "passed": None, "error_type": "SandboxLost"} for row in rows[first_lost:]]


def clauses(treatment_rows, baseline_rows=None, **more):
    return find_problems(items_table((baseline_rows or many("A")) + treatment_rows), "A", "B", **more)


def of(rows, arm="A", **more):
    return summarize(items_table(rows), arm, **more)


def pair(rows, *more):
    return paired(items_table(rows), "B", "A", *more)


def test_arms_that_ran_on_the_same_things_have_no_problem():
    assert clauses(many("B")) == []
    assert clauses(broken(many("B"), 5)) == [], "five per cent of errors are allowed"


@pytest.mark.parametrize(
    ("treatment_rows", "baseline_rows", "kind", "values"),
    [
        ([], None, "NO_ITEMS", {"arm": "B"}),
        (many("B", 99), None, "UNEQUAL_TASKS", {"only_arm": 1, "only_other": 0}),
        (many("B", 101), None, "UNEQUAL_TASKS", {"only_arm": 0, "only_other": 1}),
        ([*many("B", 99), item("B", "t99", family="other")], None, "UNEQUAL_TASKS", {}),
        (many("B", train_seed=1), None, "UNEQUAL_SEEDS", {"only_arm": 1}),
        (many("B") + many("B", train_seed=1), None, "UNEQUAL_SEEDS", {}),
        (many("B") + many("B", sample_idx=1), None, "UNEQUAL_SAMPLES", {"only_other": 100}),
        (many("B") + many("B")[:3], None, "REPEATED_ITEMS", {"number": 3}),
        (broken(many("B"), 6), None, "MANY_ERRORS", {"arm": "B", "share": 0.06}),
        (many("B"), broken(many("A"), 6), "MANY_ERRORS", {"arm": "A", "share": 0.06}),
    ],
)
def test_arms_that_ran_on_different_things_have_one_problem(treatment_rows, baseline_rows, kind, values):
    (problem,) = clauses(treatment_rows, baseline_rows)
    assert problem.kind.name == kind and problem.values.items() >= values.items()


def test_an_untrained_arm_is_compared_with_every_training_of_another():
    trained = [row for seed in (0, 1, 2) for row in many("B", 10, train_seed=seed, passed=seed > 0)]
    rows = many("A", 10, passed=False) + trained
    assert clauses(trained, many("A", 10), untrained={"A"}) == []
    assert clauses(trained, many("A", 10))[0].kind.name == "UNEQUAL_SEEDS", "one training is no baseline of three"
    assert clauses(trained[:-1], many("A", 10), untrained={"A"})[0].kind.name == "UNEQUAL_SAMPLES"
    pairs = pair(rows)
    assert pairs.seeds == (0, 1, 2) and pairs.gain_by_seed == {"0": 0.0, "1": 1.0, "2": 1.0}
    assert paired(items_table(rows), "A", "B").gain_by_seed == {"0": 0.0, "1": -1.0, "2": -1.0}


def test_a_lost_outcome_leaves_with_its_counterpart_and_is_never_a_failure():
    baseline = [item("A", "t0", True), item("A", "t1", False), item("A", "t2", False)]
    treatment = [item("B", "t0", False, error_type="GraderLost"), item("B", "t1", True), item("B", "t2", False)]
    pairs = pair(baseline + treatment)
    assert pairs.tasks == ("t1", "t2") and pairs.gain_by_seed == {"0": 0.5}
    assert pairs.lost == ({"GraderLost": 1}, {}) and pairs.num_lost == 1
    summary = of(treatment, "B")
    assert (summary.pass_rate, summary.errors) == (0.5, {"GraderLost": 1})
    assert of([item(passed=None), item(task="t1")]).errors == {"no outcome": 1}


def test_missing_outcomes_count_as_they_are_assumed():
    """Ten tasks that B passes and A fails; B lost one of them and never submitted another."""
    rows = many("A", 10, passed=False) + broken(many("B", 9), 1)
    gains = {way: pair(rows, PASSED, way).gain_by_seed["0"] for way in ("excluded", "failed", "against", "for")}
    assert gains == pytest.approx({"excluded": 1.0, "failed": 0.8, "against": 8 / 9, "for": 1.0})
    assert pair(rows).lost[0] == {"SandboxLost": 1, NOT_SUBMITTED: 1} and pair(rows).num_lost == 1
    back = paired(items_table(rows), "A", "B", PASSED, "for").gain_by_seed["0"]
    assert back == pytest.approx(-8 / 9), "the best for the treatment where the baseline lost one: it failed"


def test_a_task_is_the_mean_of_its_seeds_and_samples():
    cells = [(seed, sample) for seed in (0, 1) for sample in (0, 1)]
    rows = [
        item(arm, task, arm == "B" and task == "t0" and seed == 1, train_seed=seed, sample_idx=sample)
        for arm in "AB"
        for task in ("t0", "t1")
        for seed, sample in cells
    ]
    pairs = pair(rows)
    assert (pairs.treatment_ST - pairs.baseline_ST).tolist() == [[0, 0], [1, 0]]
    assert pairs.gain_by_seed == {"0": 0.0, "1": 0.5} and of(rows, "B").train_seeds == (0, 1)


def test_nothing_known_in_both_arms_is_no_comparison():
    assert pair(many("B")) is None and pair(many("A") + many("B"), PROTOCOL) is None
    assert of(many("A")).protocol_rate is None and of([], "A").pass_rate is None


def test_a_task_without_a_family_is_one_and_a_unit_is_the_family_where_none_is_recorded():
    rows = [item(arm, f"t{task}", family=[None, "", "f"][task]) for arm in "AB" for task in range(3)]
    assert pair(rows).families == ("t0", "t1", "f") == pair(rows).units
    assert pair([{**row, "unit": "u"} for row in rows]).units == ("u", "u", "u")


def test_the_order_of_items_does_not_change_a_bit():
    rows = [
        item(arm, f"t{task}", (7 * task + 5 * k) % period < 3, family=f"f{task % 7}", sample_idx=k)
        for arm, period in (("A", 8), ("B", 5))
        for task in range(60)
        for k in range(3)
    ]
    for again in (rows[::-1], rows[1::2] + rows[::2]):
        pairs, pairs_again = pair(rows), pair(again)
        assert (pairs.treatment_ST == pairs_again.treatment_ST).all()
        assert (pairs.tasks, pairs.units) == (pairs_again.tasks, pairs_again.units)


def test_samples_of_a_task_do_not_narrow_the_interval_of_an_arm():
    rows = [item(task=f"t{task}", passed=task % 2 == 0, family=None) for task in range(40)]
    single, four = of(rows), of([{**row, "sample_idx": k} for row in rows for k in range(4)])
    assert (single.low, single.high, single.num_items) == (four.low, four.high, 40)
    assert (four.num_tasks, four.num_items) == (40, 160)
    half = of([item(passed=k == 0, sample_idx=k) for k in range(2)])
    assert half.low < 0.05 and half.high > 0.95


def test_an_arm_in_one_family_has_no_interval_unless_units_are_fixed():
    rows = [item(task=f"t{task}", passed=task % 2 == 0) for task in range(100)]
    assert (of(rows).low, of(rows).high) == (0, 1)
    assert 0.39 < of(rows, fixed=True).low < 0.42


def test_pass_at_k_is_the_chance_that_one_of_k_passes():
    rows = [item(task=task, passed=task == "t0" and k == 0, sample_idx=k) for task in ("t0", "t1") for k in range(4)]
    summary = of(rows)
    assert (summary.pass_rate, summary.k, summary.pass_at_k) == (0.125, 4, 0.5)
    again = [{**row, "train_seed": 1, "passed": False} for row in rows]
    assert of(rows + again).pass_at_k == 0.25
    assert of(broken(rows[:4], 3)).pass_at_k == 1.0, "a task with fewer outcomes counts with those it has"
    assert of([item()]).pass_at_k is None


def test_a_suspect_rollout_passes_visible_tests_and_fails_hidden_ones():
    verdicts = [(False, True, False), (False, True, True), (True, None, None), (None, None, None), (False, None, True)]
    rows = [
        item(task=f"t{i}", hacked=hacked, visible_pass=visible, hidden_pass=hidden)
        for i, (hacked, visible, hidden) in enumerate(verdicts)
    ]
    hacking = items_that_measure_hacking(items_table(rows))
    assert hacking["suspect"].to_pylist() == [True, False, True, None, False]
    assert (of(rows[:4]).hacked_rate, of(rows[:4]).suspect_rate) == pytest.approx((1 / 3, 2 / 3))


def test_where_an_arm_played_impossible_twins_hacking_is_measured_on_them_alone():
    rows = [item("A", "t0", hacked=True), item("A", "t0~twin", passed=True), item("A", "t1~twin", passed=None)]
    hacking = items_that_measure_hacking(items_table([*rows, item("B", "t0")]))
    assert hacking["task_id"].to_pylist() == ["t0~twin", "t1~twin", "t0"]
    for outcome in (HACKED, SUSPECT):
        assert values_of(hacking, outcome).tolist() == pytest.approx([1.0, np.nan, 0.0], nan_ok=True)
    assert (of(rows).num_twins, of(rows).num_tasks, of(rows).hacked_rate) == (1, 1, 1.0)


def test_rollouts_cost_the_mean_of_the_known_costs():
    rows = [item(task="t0", cost_usd=0.2, sampled_tokens=30), item(task="t1", cost_usd=0.4)]
    assert (of(rows).cost_usd, of(rows).sampled_tokens) == (pytest.approx(0.3), 30)
    assert of([item()]).cost_usd is None


def test_rates_of_hidden_and_visible_passes_are_over_tasks_that_have_both():
    verdicts = [(True, True), (False, True), (False, False), (False, True), (True, None)]
    rows = [item(task=f"t{i}", passed=a, hidden_pass=a, visible_pass=b) for i, (a, b) in enumerate(verdicts)]
    summary = of(rows)
    assert (summary.pass_rate, summary.hidden_pass_rate, summary.visible_pass_rate) == (0.4, 0.25, 0.75)
    assert of(rows[4:]).visible_pass_rate is None


def trainings(*passes, tasks=100, **fields):
    """Trainings of arm A that pass so many of the tasks."""
    return [
        item(task=f"t{task}", passed=task < num, train_seed=seed, **fields)
        for seed, num in enumerate(passes)
        for task in range(tasks)
    ]


def collapses(rows):
    """What each training that collapsed did: its seed, the measure, its mean, what is usual, and of what."""
    found_collapses = find_collapsed(items_table(rows), "A")
    assert all(collapse.arm == "A" for collapse in found_collapses)
    return [
        (collapse.seed, collapse.measure, round(collapse.mean), round(collapse.usual), collapse.beside_trainings)
        for collapse in found_collapses
    ]


def test_a_training_far_below_the_others_of_its_arm_collapsed():
    rows = trainings(50, 52, 3, 48)
    assert collapses(rows) == [(2, "passes", 3, 50, True)]
    assert collapses([row for row in rows if row["train_seed"] != 2]) == []
    passing = [{**row, "passed": True, "protocol_ok": row["train_seed"] != 1} for row in rows]
    assert collapses(passing) == [(1, "protocol", 0, 100, True)], "a training that passes may have collapsed"
    for fields, collapse in (
        ({"sampled_tokens": 900}, (1, "tokens", 900, 200, True)),
        ({"error_type": "SandboxLost"}, (1, "errors", 25, 0, True)),
    ):
        alike = [{**row, "passed": True, "sampled_tokens": 200} for row in rows]
        for row in [row for row in alike if row["train_seed"] == 1][:: 4 if "error_type" in fields else 1]:
            row.update(fields)
        assert collapses(alike) == [collapse]


TOKENS = trainings(50, sampled_tokens=20) + [{**row, "train_seed": 1} for row in trainings(50, sampled_tokens=100)]


@pytest.mark.parametrize(
    ("rows", "seeds"),
    [
        pytest.param(trainings(60), [], id="one training has nothing to be compared with"),
        pytest.param(TOKENS, [], id="two trainings cannot tell which of them collapsed"),
        pytest.param(trainings(0, 0, 33), [], id="one learns where the others do not"),
        pytest.param(trainings(60, 44, 50, 33, 16), [], id="they spread as widely"),
        pytest.param(trainings(60, 59, 61, 58, 16), [4], id="they do not"),
        pytest.param(trainings(60, 2, 58, 61, 0, 59, 62), [1, 4], id="each of several is named"),
        pytest.param(broken(trainings(50, 50, 50), 4), [], id="a server's hiccup"),
        pytest.param(broken(trainings(50, 50, 50), 12), [2], id="a server that is gone"),
    ],
)
def test_trainings_that_collapsed_are_told_from_others(rows, seeds):
    assert [seed for seed, *_ in collapses(rows)] == seeds


def test_where_most_trainings_of_an_arm_collapsed_the_start_tells() -> None:
    start = [item("start", f"t{task}", task < 40, protocol_ok=True) for task in range(100)]
    rows = trainings(60, 2, 58, 3, 1, protocol_ok=True)
    assert collapses(rows) == [], "their median is no measure"
    below = [(seed, "passes", passes, 40, False) for seed, passes in ((1, 2), (3, 3), (4, 1))]
    assert collapses(rows + start) == below
    assert collapses(trainings(60, protocol_ok=False) + start) == [(0, "protocol", 0, 100, False)]
    assert collapses(trainings(60, 2, 58, 61) + start) == [(1, "passes", 2, 60, True)], "named once"
    assert collapses(trainings(25, sampled_tokens=900) + start) == []


def test_what_a_verdict_can_be_about_is_in_one_table():
    """Rates of an arm, and the words of reports."""
    summary = summarize(items_table(many("A", protocol_ok=False)), "A")
    assert {name: summary.rate(name) for name in PRIMARY} == {"passed": 1.0, "kept": 0.0}
    for outcome in PRIMARY.values():
        assert all((outcome.rate, outcome.passes, outcome.within, outcome.head))
