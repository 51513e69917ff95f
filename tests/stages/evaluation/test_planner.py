"""The planner: its model of tasks has the rates it is given, its probabilities are those of the rule that decides."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import multivariate_normal, norm, t
from support.refusals import refused
from support.runs import eval_item

from composer_stages.errors import UsageError
from composer_stages.evaluation.arm_comparison import EvalQuestion
from composer_stages.evaluation.design import NUM_EXPERIMENTS, VERDICTS, Design, Supply, draw, outlook
from composer_stages.evaluation.outcomes import items_table, paired
from composer_stages.evaluation.pilot import bootstrap, complete, measure
from composer_stages.evaluation.plan_report import study_text
from composer_stages.evaluation.planner import (
    DesignLine,
    PlanQuestion,
    Study,
    detectable,
    ranked,
    study_design,
    validated_range,
)
from composer_stages.evaluation.task_model import TaskModel, chance_of_both, task_model
from composer_stages.evaluation.verdict import decide
from composer_stages.runs.activity import on_activity
from composer_stages.terms import SamplingUnit


def of_four(design):
    """The rollouts of four trained arms."""
    return 4 * design.num_tasks * design.samples * design.seeds


def of_sizes(sizes, **end):
    """The supply of an environment whose tasks are of units of these sizes."""
    return Supply(tuple(np.repeat(np.arange(len(sizes)), sizes).tolist()), **end)


KATA = (9, 8, 8, 8, 7, 7, 6, 6, 6, 6, 5, 5, 5, 5, 4, 4, 4, 4, 4, 3, 2, 2, 1, 1)


def items_of(treatment_ST, baseline_ST, sizes, samples=1):
    """Evaluation items with these outcomes; with samples, so many passes of each cell."""
    family_T = np.repeat(np.arange(len(sizes)), sizes)
    unknown = {"hacked": None, "protocol_ok": None, "error_type": None}
    return [
        {"arm": arm, "train_seed": seed, "task_id": f"t{task:05d}", "family": f"f{family_T[task]}"}
        | {"sample_idx": sample, "passed": bool(sample < round(values_ST[seed, task] * samples)), **unknown}
        for arm, values_ST in (("B", treatment_ST), ("A", baseline_ST))
        for seed in range(len(values_ST))
        for task in range(len(family_T))
        for sample in range(samples)
    ]


def test_the_model_of_tasks_has_the_rates_it_was_given():
    model = TaskModel(pass_rate=0.3, samples_differ=0.16, arms_differ=0.22, family_correlation=0.5, seed_sd=0.03)
    design = Design((10,) * 40, samples=2, seeds=2)
    treatment, baseline = draw(model, design, 0.05, 200, np.random.default_rng(0))
    assert baseline.mean() == pytest.approx(0.3, abs=0.01)
    assert (treatment - baseline).mean() == pytest.approx(0.05, abs=0.01)
    assert 4 * (baseline * (1 - baseline)).mean() == pytest.approx(0.16, abs=0.02), "two samples: 1/4 where they differ"
    across = treatment * (1 - baseline) + baseline * (1 - treatment)
    assert across.mean() == pytest.approx(0.22, abs=0.01)
    assert (treatment - baseline).mean(2).std(1, ddof=1).mean() == pytest.approx(0.03, abs=0.02)


def test_a_pilot_gives_the_rates_back():
    model = TaskModel(pass_rate=0.35, samples_differ=0.15, arms_differ=0.2, family_correlation=0.5, seed_sd=0.0)
    sizes = (10,) * 150
    treatment, baseline = draw(model, Design(sizes, samples=2, seeds=3), 0.04, 1, np.random.default_rng(5))
    measured = measure(items_of(treatment[0], baseline[0], sizes, samples=2), "A", "B")
    assert {source for _, source in measured.values()} == {"pilot"}
    rates = complete(measured, 0.04)
    tolerances = {"pass_rate": 0.05, "samples_differ": 0.02, "arms_differ": 0.03, "family_correlation": 0.12}
    for name, tolerance in tolerances.items():
        assert rates[name][0] == pytest.approx(getattr(model, name), abs=tolerance), name
    assert measured["seed_sd"][0] < 0.02


def test_a_pilot_counts_the_passes_that_a_verdict_counts():
    """Of 24 passes of 30 eight broke the protocol and eight have none recorded: all are passes."""
    items = [eval_item(arm, task, task >= 6) for arm in "AB" for task in range(30)]
    items = [item | {"protocol_ok": not item["passed"] or [True, False, None][n % 3]} for n, item in enumerate(items)]
    a, _ = decide(items_table(items), EvalQuestion()).arms
    assert measure(items, "A", "B")["pass_rate"] == (a.pass_rate, "pilot") == (pytest.approx(24 / 30), "pilot")


def test_a_pilot_of_the_start_alone_leaves_assumptions_that_are_said():
    items = items_of(np.full((1, 6), 0.5), np.full((1, 6), 0.5), (3, 3), samples=2)
    rates = complete(measure([{**item, "arm": "start"} for item in items if item["arm"] == "A"], "A", "B"), 0.02)
    assert rates["pass_rate"] == (0.5, "pilot") and rates["samples_differ"] == (0.5, "pilot")
    assert rates["seed_sd"] == (0.02, "assumed") and rates["arms_differ"][1] == "assumed"
    assert complete({}, 0.02)["pass_rate"][1] == "assumed" and measure([], "A", "B") == {}


def test_two_points_on_300_tasks_have_about_ten_percent_power():
    """Exact McNemar finds +2 points on 300 tasks with 9 % power at a discordance of 20 %."""
    design = Design((114, 77, 23, 23, 17, 16, 6, 6, 6, 5, 4, 3), fixed=True)
    model = TaskModel(pass_rate=0.3, samples_differ=0.2, arms_differ=0.2, family_correlation=0.0, seed_sd=0.0)
    assert 100 * outlook(model, design, 0.02, 1000).chances["PARTIAL"] == pytest.approx(9, abs=5)


def test_the_probabilities_are_the_rates_of_the_rule_that_decides():
    """Experiments as items, through `decide`; parts that gain on their own are the one thing the planner leaves out."""
    model = TaskModel(pass_rate=0.4, samples_differ=0.1, arms_differ=0.2, family_correlation=0.2, seed_sd=0.02)
    design, gain, num = Design((2,) * 30), 0.16, 20
    expected = outlook(model, design, gain, 1000).chances
    treatment, baseline = draw(model, design, gain, num, np.random.default_rng(5))
    question = EvalQuestion(control=None, sampling=SamplingUnit(fixed=design.fixed))
    tables = (items_table(items_of(b, a, design.sizes)) for b, a in zip(treatment, baseline, strict=True))
    verdicts = [decide(table, question) for table in tables]
    counts = Counter(v.decision if v.claim or v.decision == "INVALIDATED" else "UNDERPOWERED" for v in verdicts)
    for decision, chance in expected.items():
        noise = 3 * np.sqrt(max(chance * (1 - chance), 0.02) / num)
        assert counts[decision] / num == pytest.approx(chance, abs=noise), decision


@pytest.mark.parametrize(
    ("design", "model"),
    [(Design(KATA, seeds=3), TaskModel()), (Design((30, 20, 10), fixed=True), TaskModel(family_correlation=0.6))],
)
def test_the_detectable_gain_of_a_finished_experiment_is_found_with_its_power(design, model):
    """Experiments that are drawn anew at that gain find it about as often as was meant."""
    arms = draw(model, design, 0.02, 1, np.random.default_rng(2))
    items = items_table(items_of(arms[0][0], arms[1][0], design.sizes, design.samples))
    pairs = paired(items, "B", "A")
    gain = detectable(items, "B", "A", pairs, fixed=design.fixed)
    rates = complete(measure(items.to_pylist(), "A", "B"), gain)
    again = outlook(task_model(rates), design, gain, 400, seed=5).chances
    assert again["VALIDATED"] + again["PARTIAL"] == pytest.approx(0.8, abs=0.09)


def test_seeds_that_share_collections_find_less_than_seeds_of_their_own():
    """Twelve seeds on three collections have three gains, and Student's t over three has a long way to go."""
    question = PlanQuestion(TaskModel(seed_sd=0.05), 0.08, 0.8, of_four)
    alone, shared = (Design((1,) * 60, seeds=12, collection_of=each) for each in ((), (0, 1, 2) * 4))
    assert question.detectable(shared)[0] > 1.5 * question.detectable(alone)[0]
    drawn = draw(replace(question.model, samples_differ=0.01), shared, 0.1, 50, np.random.default_rng(0))
    gain_XS = (drawn[0] - drawn[1]).mean(2)
    within = np.abs(gain_XS[:, 0] - gain_XS[:, 3]).mean()
    assert within < 0.5 * np.abs(gain_XS[:, 0] - gain_XS[:, 1]).mean()


def test_a_detectable_gain_has_its_power_to_the_point():
    """A step of bisection alone would move the power of such a design by several points."""
    model = TaskModel(pass_rate=0.41, samples_differ=0.06, arms_differ=0.2, family_correlation=0.9, seed_sd=0.03)
    question = PlanQuestion(model, 0.02, 0.8, of_four)
    design = Design((10,) * 12, seeds=6, fixed=True, collection_of=(0, 0, 1, 1, 2, 2))
    gain, error = question.detectable(design)
    result = outlook(question.model_at(gain), design, gain, NUM_EXPERIMENTS).chances["VALIDATED"]
    assert result == pytest.approx(0.8, abs=0.015), "of the experiments by which it was searched for"
    ends = (gain - 3 * error, gain + 3 * error)
    low, high = (outlook(question.model_at(at), design, at, seed=5).chances["VALIDATED"] for at in ends)
    assert low < 0.8 < high and 0 < error < gain / 10


def test_units_that_are_too_few_or_all_pass_find_no_gain():
    question = PlanQuestion(TaskModel(), 0.08, 0.8, of_four)
    assert question.detectable(Design((40,) * 5)) is None and question.detectable(Design((1,) * 6)) is None
    assert replace(question, model=TaskModel(pass_rate=0.98, arms_differ=0.03)).detectable(Design((4,) * 20)) is None


def test_how_often_both_pass_is_the_bivariate_normal_distribution():
    for first, second, correlation in ((0.3, 0.6, 0.5), (0.5, 0.5, 0.9), (0.2, 0.2, 0.0), (0.7, 0.9, 0.3)):
        covariance = [[1, correlation], [correlation, 1]]
        expected = multivariate_normal.cdf(norm.ppf([first, second]), cov=covariance)
        assert chance_of_both(first, second, correlation) == pytest.approx(expected, abs=1e-6)
    assert chance_of_both(0.3, 0.6, 1.0) == 0.3


def test_a_study_says_what_to_add_first_and_what_is_enough():
    model = TaskModel(pass_rate=0.4, samples_differ=0.15, arms_differ=0.2, family_correlation=0.3, seed_sd=0.02)
    rates = {name: (value, "given") for name, value in vars(model).items()}
    study = study_design(PlanQuestion(model, 0.08, 0.8, of_four, 0.5), Design(KATA), of_sizes(KATA), rates)
    by_name = {line.name: line for line in study.lines}
    designs = {f"twice the {name}" for name in ("seeds", "tasks", "samples")}
    assert set(" or ".join(study.add_first).split(" or ")) == designs
    assert study.add_first[-1] == "twice the samples"
    assert by_name["as asked"].chances["VALIDATED"] == 0 and by_name["as asked"].usd == 0.5 * 480
    assert by_name["with 3 training seeds"].false_gain <= 0.025 + 0.02
    assert study.enough.chances["VALIDATED"] >= 0.8 and study.enough.seeds >= 3
    text = study_text(study)
    words = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert words["pass rate of the baseline"][5:] == ["40", "%", "given", "planning.pass_rate"]
    assert words["standard deviation of the gain between training seeds"][-4:-2] == ["2", "points"]
    for name, (_, source) in study.rates.items():
        assert f" {source} " in next(line for line in text.splitlines() if line.endswith(f"planning.{name}"))
    assert words["families of these tasks"][-6:-1] == ["24", "24", "48", "24", "24"]
    assert "What to add first: twice the" in text and "none" not in text.split()
    of_three = replace(study, lines=tuple(line for line in study.lines if line.seeds >= 3))
    assert "The smallest gain covers" in text and "The smallest gain covers" not in study_text(of_three)
    assert max(map(len, text.splitlines())) <= 120


def test_a_plan_names_sampling_units_as_the_environment_does():
    rates = {name: (value, "pilot") for name, value in vars(TaskModel()).items()}
    line = DesignLine("as asked", 16, 8, 1, 3, 144, None, dict.fromkeys(VERDICTS, 0.25), 400, None, 0.1, 0.01)
    runs = {"pilots": ("evaluate/1", "evaluate/2"), "sampling_unit": "repository"}
    study = Study(0.08, 0.8, rates, (line,), ("twice the seeds",), None, most_tasks=16, most_units=8, **runs)
    text = study_text(study)
    assert "\nrepositories of these tasks  " in text and "tasks of one repository  " in text
    assert "famil" not in text.replace("planning.family_correlation", "")
    assert "The environment has 8 repositories with 16 tasks, and no more." in text
    assert "\npilot: evaluate/1\npilot: evaluate/2\n" in text and "\n  over what the pilot leaves open, %  " in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize(
    ("left_open", "passes", "source", "words"),
    [
        ((0.6, 0.7), 5, "pilot", "What the pilot leaves open"),
        ((0.6, 0.7), 4, "pilot", "too small to forecast: 4 of 26 rollouts of the baseline pass"),
        ((0.6, 0.7), 22, "pilot", "too small to forecast: 22 of 26 rollouts of the baseline pass"),
        ((0.6, 0.7), 0, "given", "What the pilot leaves open"),
        ((0.26, 0.77), 13, "pilot", "the chance of VALIDATED of the design `as asked` is anywhere from 26 to 77 %"),
        (None, 13, "pilot", "The pilot is too small to forecast: it has one family"),
    ],
)
def test_a_pilot_that_is_too_small_to_forecast_says_so_with_a_range(left_open, passes, source, words):
    chances = dict.fromkeys(VERDICTS, 0.25)
    line = DesignLine("as asked", 24, 6, 1, 3, 144, None, chances, 400, None, 0.1, 0.01, left_open)
    pilot = {"pilots": ("collect/1",), "pilot_passes": passes, "pilot_items": 26}
    text = study_text(Study(0.02, 0.8, {"pass_rate": (0.1, source)}, (line,), ("twice the seeds",), None, **pilot))
    assert words in " ".join(text.split())


def test_units_too_few_to_reject_have_no_detectable_gain():
    events: list[str] = []
    with on_activity(events.append):
        study = study_design(PlanQuestion(TaskModel(), 0.08, 0.8, of_four), Design((4,) * 3), of_sizes((4,) * 3), {})
    assert events[0] == "simulating the design 'as asked'" and "for the cheapest design" in " ".join(events)
    line = study.lines[0]
    assert line.detectable is None and not any(line.chances[name] for name in ("VALIDATED", "PARTIAL", "INVALIDATED"))
    assert study.add_first == ("families",) and study.fewest_units == 6
    text = " ".join(study_text(study).split())
    assert "With fewer than 6 the test cannot reject, however large the gain. 6 are the minimum for a test" in text
    assert "smallest gain found with 80 % power, points none none" in text


def test_a_small_pilot_leaves_more_open_than_a_large_one():
    """Bootstrap over units: its samples differ in their rates."""
    model, spreads = TaskModel(samples_differ=0.1, family_correlation=0.6), []
    for num_units in (6, 40):
        sizes = (5,) * num_units
        arms = draw(model, Design(sizes, samples=2, seeds=3), 0.1, 1, np.random.default_rng(1))
        pilots = bootstrap(items_of(arms[0][0], arms[1][0], sizes, samples=2), 20)
        spreads.append(np.std([measure(rows, "A", "B")["pass_rate"][0] for rows in pilots]))
    assert spreads[0] > 1.5 * spreads[1] > 0


def test_a_range_is_as_wide_as_students_t_over_the_pilots_units():
    """In normal quantiles, about the chance by the pilot itself; one model says nothing of what is left open."""
    models, design = [TaskModel(pass_rate=rate) for rate in (0.3, 0.4, 0.5)], Design((5,) * 12, seeds=3)
    widths = []
    for units in (6, 60):
        low, high = norm.ppf(validated_range(0.6, models, units, design, 0.1))
        assert (low + high) / 2 == pytest.approx(norm.ppf(0.6), abs=0.01)
        widths.append(high - low)
    expected = [t.ppf(0.9, units - 1) * (units / (units - 1)) ** 0.5 for units in (6, 60)]
    assert widths[0] / widths[1] == pytest.approx(expected[0] / expected[1], rel=0.02)
    assert validated_range(0.6, models[:1], 6, design, 0.1) is None
    too_few = Design((1,) * 4, seeds=3)
    assert validated_range(0.0, models, 6, too_few, 0.1) == pytest.approx((0, 0), abs=1e-9), "never is from 0 to 0"


def test_a_pilot_without_repeats_still_measures_how_alike_a_units_tasks_are():
    model = TaskModel(pass_rate=0.4, samples_differ=0.05, arms_differ=0.2, family_correlation=0.95, seed_sd=0.0)
    shares = []
    for share in (0.95, 0.05):
        arms = draw(replace(model, family_correlation=share), Design((10,) * 60), 0.05, 1, np.random.default_rng(3))
        rates = complete(measure(items_of(arms[0][0], arms[1][0], (10,) * 60), "A", "B"), 0.05)
        assert rates["samples_differ"][1] == "assumed" and rates["family_correlation"][1] == "pilot"
        shares.append(rates["family_correlation"][0])
    assert shares[0] > 0.6 and shares[1] < 0.3


def test_seeds_that_spread_too_far_need_more_seeds():
    model = TaskModel(seed_sd=0.12, arms_differ=0.3)
    study = study_design(PlanQuestion(model, 0.15, 0.8, of_four), Design((2,) * 20), of_sizes((2,) * 20), {})
    assert study.add_first[0] == "twice the seeds"
    assert study.enough is None or study.enough.seeds >= 8


def test_rates_that_are_given_stay_and_a_pilots_yield_to_them():
    sources = {"arms_differ": (0.9, "given"), "samples_differ": (0.4, "pilot"), "pass_rate": (0.1, "given")}
    rates = complete(sources, 0.02)
    assert rates["arms_differ"] == (0.9, "given"), "so that it is refused, not changed"
    assert rates["samples_differ"] == (pytest.approx(0.18), "pilot")


def test_arms_that_differ_as_often_as_chance_lets_them_are_planned():
    """Without the gain chance lets them differ less often, and the null is simulated too."""
    question = PlanQuestion(TaskModel(arms_differ=0.483), 0.02, 0.8, of_four)
    assert outlook(question.without_gain, Design((2,) * 12), 0.0, 20).num == 20


@pytest.mark.parametrize(
    ("model", "code"),
    [
        (TaskModel(pass_rate=0.99), "impossible-pass-rate"),
        (TaskModel(arms_differ=0.01), "impossible-arms-differ"),
        (TaskModel(samples_differ=0.5), "impossible-samples-differ"),
    ],
)
def test_rates_that_contradict_each_other_are_refused(model, code):
    refused(lambda: outlook(model, Design(KATA), 0.02, 10), UsageError, code=f"evaluation.{code}")


def test_a_supply_gives_the_units_that_the_environment_gives():
    """Ten families in turn: more tasks are more of each, of all that were drawn, and beyond."""
    in_turn = Supply.of([f"f{task % 10}" for task in range(200)], complete=False, fixed=False)
    assert in_turn.sizes(5) == (1,) * 5 and in_turn.sizes(20) == (2,) * 10
    assert in_turn.sizes(405) == (41,) * 5 + (40,) * 5
    assert Supply.of(["a", "b", "a"], complete=True, fixed=False).sizes(9) == (2, 1), "all that there are"
    alone = Supply.of([f"t{task}" for task in range(20)], complete=False, fixed=False)
    assert alone.sizes(50) == (1,) * 50, "each task a unit: more tasks are more units"
    assert Supply.of(["a", "b"], complete=False, fixed=True).sizes(8) == (4, 4)


def test_a_plan_offers_nothing_beyond_the_environment():
    """Six families of four tasks each are all: twice the tasks is no design, and what would be enough says so."""
    question = PlanQuestion(TaskModel(seed_sd=0.0, arms_differ=0.3), 0.2, 0.8, of_four)
    study = study_design(question, Design((4,) * 6), of_sizes((4,) * 6, complete=True, grows=False), {})
    assert [line.name for line in study.lines[2:]] == ["twice the seeds", "twice the samples"]
    assert study.enough is None and study.beyond.sampling_units > 6 and study.beyond.chances["VALIDATED"] >= 0.8
    text = " ".join(study_text(study).split())
    assert "The environment has 6 families with 24 tasks, and no more." in text
    assert "No design of up to 24 of its tasks and 20 training seeds was found to reach 80 % power for 20" in text
    assert "The column `with more families` is one that would, if the environment had more of them." in text
    unsearched = PlanQuestion(TaskModel(seed_sd=0.5), 0.1, 0.8, of_four)  # which no number of seeds can find
    three = study_design(unsearched, Design((4,) * 3), of_sizes((4,) * 3, grows=False), {})
    assert (three.enough, three.add_first) == (None, ()) and "What to add" not in study_text(three), "it has no more"


def test_designs_that_the_simulation_cannot_tell_apart_are_no_order():
    line = DesignLine("a", 24, 6, 1, 3, 144, None, dict.fromkeys(VERDICTS, 0.25), 400, None, 0.1, 0.002)
    lines = [replace(line, name=name, detectable=gain) for name, gain in (("b", 0.105), ("c", 0.12), ("d", None))]
    assert ranked([lines[1], lines[2], line, lines[0]]) == ("a or b", "c", "d")


def test_models_are_planned_without_training_seeds():
    """A gain of models is PARTIAL, and more seeds are no design."""
    question = PlanQuestion(TaskModel(seed_sd=0.0), 0.1, 0.8, lambda design: 2 * design.num_tasks * design.samples)
    study = study_design(question, Design((2,) * 30, untrained=True), of_sizes((2,) * 30), {})
    assert [line.name for line in study.lines] == ["as asked", "twice the tasks", "twice the samples"]
    assert study.enough.seeds == 1 and study.enough.chances["PARTIAL"] >= 0.8
    assert "training seeds of each arm" not in study_text(study) and "a gain is PARTIAL" in study_text(study)


def test_large_designs_are_simulated_less_often():
    large = outlook(TaskModel(), Design((1,) * 10_000, seeds=2), 0.02)
    assert large.num == 100 and outlook(TaskModel(), Design((1,) * 100), 0.02).num == NUM_EXPERIMENTS
