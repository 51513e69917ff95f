"""What stands beside a decision: positions, costs, noise of repeats, clusters, judges, a policy over several scores."""

import re
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.refusals import refused
from support.transcripts import assistant, document, jsonl, user

from composer_stages.comparison import report
from composer_stages.comparison.config import Config
from composer_stages.comparison.costs import compare_costs
from composer_stages.comparison.decision import LogComparison, compare
from composer_stages.comparison.gate import judge
from composer_stages.comparison.logs import ITEM, ReadLog
from composer_stages.comparison.pairs import ComparisonRules, ScoreSpan
from composer_stages.comparison.ranks import rank
from composer_stages.comparison.sides import read_sides
from composer_stages.comparison.stage import document as document_of, summarize
from composer_stages.errors import BadInput, UsageError
from composer_stages.evaluation.difference import Decision
from composer_stages.evaluation.inference import PairedTest, holm
from composer_stages.evaluation.outcomes import PairedOutcomes


def table(path: Path, **columns: Any) -> str:
    """A table of tasks, of which each column has a value for each."""
    rows = zip(*columns.values(), strict=True)
    return str(jsonl(path, *({"id": f"t{at}", **dict(zip(columns, row, strict=True))} for at, row in enumerate(rows))))


def compared(*paths: str, **settings: Any) -> LogComparison:
    config = Config(paths=list(paths), **settings)
    return compare(read_sides(config.logs, config.columns), config)[0]


def passes(num: int, passed: int) -> list[int]:
    return [int(at < passed) for at in range(num)]


def test_all_pairs_share_one_level_and_leave_each_side_its_positions(tmp_path: Path) -> None:
    rates = {"a": 60, "b": 62, "c": 100, "d": 20}
    paths = [table(tmp_path / f"{name}.jsonl", score=passes(120, passed)) for name, passed in rates.items()]
    first, every = compared(*paths), compared(*paths, all_pairs=True)
    assert len(first.differences) == 3 and first.ranking is None and "Position" not in report.text(first)
    assert [(each.treatment, each.baseline) for each in every.differences][3:] == [("C", "B"), ("D", "B"), ("D", "C")]
    assert max(each.p_holm or 0 for each in every.differences) == every.differences[0].p_holm
    assert every.ranking and every.ranking.letters == ("C", "B", "A", "D") and every.ranking.alike == ((2, 3),)
    assert every.ranking.positions == {"C": (1, 1), "B": (2, 3), "A": (2, 3), "D": (4, 4)}
    text = report.text(every)
    assert "Positions 2 to 3 cannot be told apart (B, A)." in text and "2 to 3" in text and "D - C" in text
    assert document_of(every)["differences"][5]["baseline"] == "C"


def test_several_sides_that_must_not_be_worse_share_the_level_alike_and_all_must_pass(tmp_path: Path) -> None:
    """Holm's levels are of no difference, which sides that are worse reject one after the other, until 0.05 is left."""
    rates = {"a": 600, "b": 650, "c": 598, "d": 500}
    paths = [table(tmp_path / f"{name}.jsonl", score=passes(1000, passed)) for name, passed in rates.items()]
    comparison = compared(*paths, not_worse=0.02)
    assert [each.alpha for each in comparison.differences] == pytest.approx([0.05 / 3] * 3)
    assert [each.p_holm for each in comparison.differences][1] == pytest.approx(3 * comparison.differences[1].p_value)
    assert [each.not_worse for each in comparison.differences] == [True, True, False]
    found = [compared(*paths[:num], not_worse=0.02) for num in (3, 4)]
    assert [summarize(each, document_of(each))["exit_code"] for each in found] == [0, 1]
    assert "Bonferroni" in report.text(comparison)


def test_what_is_said_of_a_margin_is_at_a_level_that_all_share_alike(tmp_path: Path) -> None:
    """Sides that are all better would leave 0.05 to the last, at which alone B gains less than 3.2 points."""
    little = [0] * 12 + passes(988, 518)
    scores = {"a": passes(1000, 500), "b": little, "c": passes(1000, 700), "d": passes(1000, 710)}
    paths = [table(tmp_path / f"{name}.jsonl", score=scores[name]) for name in scores]
    assert compared(*paths[:2], min_gain=0.032).differences[0].decision is Decision.BETTER_BY_LESS
    differences = compared(*paths, min_gain=0.032).differences
    assert (differences[0].alpha, differences[0].high < 0.032) == (0.05, True)
    assert {each.decision for each in differences} == {Decision.BETTER}
    sides = [
        table(tmp_path / f"{name}.jsonl", small=small, large=passes(1000, large))
        for name, small, large in (("x", scores["a"], 500), ("y", little, 700))
    ]

    def gate(*bars: str) -> list[bool | None]:
        metrics = zip(("small", "large"), bars, strict=False)
        text = "".join(f'[[metric]]\nscore = "{score}"\nbetter = {bar}\n' for score, bar in metrics)
        (tmp_path / "gate.toml").write_text(text)
        config = Config(paths=sides, policy=str(tmp_path / "gate.toml"))
        return [result.passes for result in judge(read_sides(sides, config.columns), config)]

    assert (gate("0.0045"), gate("0.0045", "true"), gate("true", "true")) == ([True], [None, True], [True, True])


@pytest.mark.parametrize("rates", [(0.5, 0.5, 0.5, 0.5), (0.4, 0.4, 0.5, 0.7)])
def test_intervals_of_positions_hold_together(rates: tuple[float, ...]) -> None:
    """Of 400 experiments with 120 shared tasks: every true position, ties in any order, is in its interval in 95 %."""
    random, letters, covered = np.random.default_rng(0), "ABCD", []
    ability = random.normal(size=(400, 1, 120)) + random.normal(size=(400, 4, 120))
    passed = (ability < np.quantile(ability, rates)[:, None]).astype(float)
    pairs = [*combinations(range(4), 2)]
    tests = [PairedTest(passed[:, [b]], passed[:, [a]], np.arange(120), num_flips=399) for a, b in pairs]
    for at, p_values in enumerate(np.array([test.p() for test in tests]).T):
        decided = [
            SimpleNamespace(
                treatment=letters[b],
                baseline=letters[a],
                decision="undecided" if p >= 0.05 else Decision.BETTER if test.estimate_X[at] > 0 else Decision.WORSE,
            )
            for (a, b), test, p in zip(pairs, tests, holm(p_values.tolist()), strict=True)
        ]
        positions = rank(letters, decided).positions.values()  # type: ignore[arg-type]
        true = [(1 + sum(other > own for other in rates), 4 - sum(other < own for other in rates)) for own in rates]
        covered.append(all(low <= a and b <= high for (low, high), (a, b) in zip(positions, true, strict=True)))
    assert np.mean(covered) >= 0.935


def spender(passed: np.ndarray, costs: np.ndarray) -> ReadLog:
    num = len(passed)
    columns = {"task": [*map(str, range(num))], "seed": [0] * num, "score": passed, "cost_usd": costs}
    items = pa.table({**{field.name: pa.nulls(num, field.type) for field in ITEM}, **columns})
    return ReadLog("", items.select(ITEM.names).cast(ITEM), ())


def spent(random: np.random.Generator, num: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Passes and costs of two sides on tasks of which the hard ones cost more, and failures twice as much."""
    ease, sides = random.normal(size=num), []
    for rate, price in ((0.0, 1.0), (0.5, 0.7)):
        passed = (ease + random.normal(size=num) > -rate).astype(float)
        sides.append((passed, price * (2 - passed) * np.exp(-0.5 * ease + 0.5 * random.normal(size=num))))
    return sides


def test_intervals_of_costs_cover() -> None:
    """Of 150 experiments with 60 tasks, held against a million tasks: what a sample costs, and what a success does."""
    (first, cost), (second, other) = spent(np.random.default_rng(9), 1_000_000)
    truth = (other.mean() - cost.mean(), other.mean() / second.mean() - cost.mean() / first.mean())
    random, rules, covered = (
        np.random.default_rng(1),
        ComparisonRules(ScoreSpan(0, 1), None, True, "excluded", None),
        [],
    )
    for _ in range(150):
        sides = spent(random, 60)
        outcomes = PairedOutcomes.of_one_seed(sides[1][0][None], sides[0][0][None], [*map(str, range(60))])
        (found,) = compare_costs([spender(*side) for side in sides], outcomes, rules, "AB", True)
        limits = [(each.low or 0, each.high or 0) for each in (found.per_sample, found.per_success) if each]
        covered.append([low <= true <= high for (low, high), true in zip(limits, truth, strict=True)])
    assert (np.mean(covered, axis=0) >= 0.91).all()


def test_costs_stand_beside_quality_and_what_is_unknown_is_no_zero(tmp_path: Path) -> None:
    """C writes 0 where it knows no price, so does B in one of two columns; A lacks the tokens of half of its tasks."""
    scores = {"a": passes(40, 20), "b": passes(40, 30), "c": passes(40, 30)}
    none = [0] * 40
    prices = {"a": {"cost": [0.5] * 40}, "b": {"cost": none, "total_cost": [0.25] * 40}, "c": {"cost": none}}
    tokens = {"a": [100, None] * 20, "b": [50] * 40, "c": [75] * 40}
    paths = [
        table(tmp_path / f"{name}.jsonl", score=scores[name], output_tokens=tokens[name], **prices[name])
        for name in scores
    ]
    comparison = compared(*paths)
    cost, written = comparison.pairings[0].costs
    assert cost.per_sample and cost.per_success and (cost.num_tasks, written.num_tasks) == (40, 20)
    assert (cost.per_sample.baseline, cost.per_sample.treatment, cost.per_sample.estimate) == (0.5, 0.25, -0.25)
    assert (cost.per_sample.low, cost.per_sample.high) == (-0.25, -0.25), "of all tasks alike"
    assert (cost.per_success.baseline, cost.per_success.treatment) == pytest.approx((1, 1 / 3))
    unknown, _ = comparison.pairings[1].costs
    assert (
        unknown.unknown == ("C",)
        and unknown.per_sample is None
        and comparison.sides[2].costs.keys() == {"completion_tokens"}
    )
    assert comparison.frontier and (comparison.frontier.quantity, comparison.frontier.letters) == (
        "tokens written",
        ("B",),
    )
    text = report.text(comparison)
    assert "A 0.5, B 0.25 a sample" in text and "not recorded by C" in text and "(20 tasks)" in text
    bare = [table(tmp_path / f"{name}.jsonl", score=scores[name]) for name in "ab"]
    assert compared(*bare).frontier is None and "not recorded, and no tokens" in report.text(compared(*bare))


def test_tokens_of_rows_of_several_servers_have_different_names(tmp_path: Path) -> None:
    names = ["prompt_tokens", "input_tokens"]
    rows = [
        {"id": at, "score": at % 2, **dict.fromkeys(names), names[at % 2]: 100 + 200 * (at % 2)} for at in range(40)
    ]
    currencies = [[{**row, "cost": 1, "currency": name} for row in rows] for name in ("USD", "EUR")]
    paths = [str(jsonl(tmp_path / f"{at}.jsonl", *side)) for at, side in enumerate(currencies)]
    (pairing,) = compared(*paths).pairings
    read = next(cost for cost in pairing.costs if cost.quantity == "tokens read")
    assert read.num_tasks == 40 and read.per_sample and read.per_sample.baseline == 200
    assert [(each.name, each.baseline, each.treatment) for each in pairing.settings] == [("currency", "USD", "EUR")]


def inspect_log(path: Path, passed: list[int], model: str = "m", **config: Any) -> str:
    samples = [
        {"id": at, "epoch": 1, "input": f"What is {at}?", "messages": [user(f"What is {at}?"), assistant("It is.")]}
        | {
            "scores": {"match": {"value": value}},
            "metadata": {"template": at // 2, "document": at // 4, "page_id": at // 3, "level": 1},
        }
        | {"model_usage": {model: {"input_tokens": 9, "output_tokens": at + 1, "total_cost": 0.01}}}
        for at, value in enumerate(passed)
    ]
    about = {"task": "quiz", "model": model, "model_generate_config": config}
    return str(document(path, {"version": 2, "status": "success", "eval": about, "samples": samples}))


def test_runs_of_one_model_say_how_large_a_difference_they_make_alone(tmp_path: Path) -> None:
    """By a second side that its log says is the same model, by a log that the user names, and never by a copy."""
    before, again, after = passes(80, 40), [0, 1] * 40, passes(80, 50)
    expected = 1.96 * (40**0.5) / 80  # of 80 pairs of runs 40 differ: each has the variance 1 / 2
    alike = [inspect_log(tmp_path / f"{at}.json", side, seed=at) for at, side in enumerate((before, again))]
    other = inspect_log(tmp_path / "2.json", after, "n")
    two = compared(*alike)
    assert two.pairings[0].noise and two.pairings[0].noise.same
    assert two.pairings[0].noise.limit == pytest.approx(expected, rel=0.001)
    beside = compared(alike[0], other, alike[1]).pairings[0].noise
    named = compared(alike[0], other, noise=alike[1]).pairings[0].noise
    assert beside == named and named and named.limit == two.pairings[0].noise.limit and named.repeated == ("A",)
    assert "by repeats of A" in report.text(compared(alike[0], other, noise=alike[1]))
    assert compared(alike[0], other).pairings[0].noise is None
    tables = [table(tmp_path / f"{name}.jsonl", score=side) for name, side in (("a", before), ("b", again))]
    alone = compared(tables[0], noise=tables[1])
    assert len(alone.sides) == 2 and alone.pairings[0].noise and alone.pairings[0].noise.same
    assert compared(tables[0], tables[0]).pairings[0].noise is None
    refused(lambda: compared(*tables, noise=tables[0]), UsageError, code="comparison.noise-is-itself")


def test_noise_of_uneven_repeats_counts_each_task_and_one_that_shows_none_is_refused(tmp_path: Path) -> None:
    """A has 1 to 4 samples of a task, of which the mean varies with 1 / n: also where a sample is alone."""
    scores = [[at % 2, 1, 0, 1][: 1 + at % 4] for at in range(40)]
    rows = [{"id": f"t{at}", "score": score} for at, of_task in enumerate(scores) for score in of_task]
    first, second = str(jsonl(tmp_path / "a.jsonl", *rows)), table(tmp_path / "b.jsonl", score=passes(40, 30))
    usual = np.mean([np.var(of_task, ddof=1) for of_task in scores if len(of_task) > 1])
    means = [(np.var(s, ddof=1) if len(s) > 1 else usual) / len(s) for s in scores]
    found = compared(first, second).pairings[0].noise
    of_second = [np.var(s, ddof=1) if len(s) > 1 else usual for s in scores]
    assert found and found.limit == pytest.approx(1.96 * ((np.mean(means) + np.mean(of_second)) / 40) ** 0.5, rel=0.001)
    few, percent = (
        table(tmp_path / f"{name}.jsonl", score=values)
        for name, values in (("few", passes(15, 5)), ("percent", [100 * passed for passed in passes(40, 20)]))
    )
    refused(lambda: compared(second, first, noise=few), UsageError, code="comparison.no-noise")
    refused(lambda: compared(second, first, noise=percent), BadInput, code="comparison.scales-differ")


@pytest.mark.parametrize("name", ["model", "temperature"])
def test_noise_is_of_the_first_sides_model_and_settings(tmp_path: Path, name: str) -> None:
    rows = [{"id": at, "score": at % 2, "seed": 1} for at in range(40)]
    first, other = (str(jsonl(tmp_path / f"{v}.jsonl", *({**row, name: f"{v}"} for row in rows))) for v in (0, 1))
    text = refused(lambda: compared(first, noise=other), UsageError, code="comparison.noise-of-another")
    assert f"{name} is 1, not 0" in text


def test_what_tasks_share_is_found_with_what_a_unit_would_change(tmp_path: Path) -> None:
    """A gain on all tasks of six of thirty documents, of which the interval is the widest; --unit gives it, too."""
    before, after = [at % 2 for at in range(120)], [int(at // 4 < 6 or at % 2) for at in range(120)]
    paths = [inspect_log(tmp_path / f"{name}.json", side, name) for name, side in (("a", before), ("b", after))]
    comparison, by_unit = compared(*paths), compared(*paths, unit="document")
    clusters, difference = comparison.pairings[0].clusters, by_unit.differences[0]
    assert clusters and (clusters.column, clusters.num_units, clusters.num_tasks) == ("document", 30, 120)
    assert (clusters.low, clusters.high) == pytest.approx((difference.low, difference.high))
    assert clusters.low < comparison.differences[0].low and by_unit.pairings[0].clusters is None
    assert "--unit document, by which the interval is [" in report.text(comparison).replace("\n    ", " ")
    columns = ["epoch", "template", "document", "page_id", "level", "question", "family", "category", "repository"]
    refused(
        lambda: compared(*paths, unit="sample_id"),
        UsageError,
        code="comparison.no-unit-column",
        label=paths[0],
        columns=columns,
    )
    asked = [f"What is {at // 2}?" for at in range(120)]
    tables = [
        table(tmp_path / f"{name}.jsonl", score=side, question=asked, template_id=[1] * 120)
        for name, side in (("a", before), ("b", after))
    ]
    shared = compared(*tables).pairings[0].clusters
    assert shared and (shared.column, shared.num_units) == ("question", 60)
    assert compared(*tables, unit="question").differences[0].num_units == 60
    alone = [table(tmp_path / f"{name}.jsonl", score=side) for name, side in (("a", before), ("b", after))]
    assert compared(*alone).pairings[0].clusters is None


def test_the_spread_of_judges_is_in_the_interval(tmp_path: Path) -> None:
    """Of 200 experiments with four judges whose liking of B varies by ten points, 95 % hold the mean of all judges.

    A column names the judge, or each has a column of its own: the same numbers.
    """
    random = np.random.default_rng(0)
    liking = random.normal(0, 0.1, (200, 4, 1))
    apart = liking + random.normal(0, 0.2, (200, 4, 60))
    test = PairedTest((0.5 + apart / 4), np.full((200, 4, 60), 0.5), np.arange(60), scores=True, num_flips=399)
    assert test.rejects(0.0).mean() <= 0.09
    alone = PairedTest(0.5 + apart.mean(1, keepdims=True) / 4, np.full((200, 1, 60), 0.5), np.arange(60), scores=True)
    assert alone.rejects(0.0).mean() > 0.3, "without judges the interval is too narrow"
    names, columns, rows = [f"judge_{number}" for number in range(4)], list[str](), list[str]()
    for side in range(2):
        values = dict(zip(names, 0.5 + side * np.clip(apart[0] + 0.1, -0.4, 0.4), strict=True))
        columns.append(table(tmp_path / f"wide-{side}.jsonl", **values))
        of_judges = ({"id": f"t{at}", "judge": name, "score": values[name][at]} for at in range(60) for name in names)
        rows.append(str(jsonl(tmp_path / f"long-{side}.jsonl", *of_judges)))
    wide, long_form = compared(*columns, score="+".join(names)), compared(*rows)
    assert "4 judges scored each sample: the interval is about other judges, too" in report.text(wide)
    first, second = wide.differences[0], long_form.differences[0]
    assert (first.num_seeds, first.num_tasks) == (4, 60)
    assert (first.low, first.high) == pytest.approx((second.low, second.high), abs=0.002)
    assert compared(*columns, score="judge_0").differences[0].num_seeds == 1
    others = [{"id": f"t{at}", "judge": name, "score": 0.5} for at in range(60) for name in ("judge_0", "another")]
    other = str(jsonl(tmp_path / "other.jsonl", *others))
    refused(lambda: compared(rows[0], other), BadInput, code="comparison.other-judges")


def test_judges_that_have_few_samples_in_common_are_no_pairs(tmp_path: Path) -> None:
    """Each of 60 tasks is scored by one of three annotators, another one on the other side, and no task is lost."""
    sides = [
        [{"id": f"t{at}", "annotator": "xyz"[(at + side) % 3], "score": at % 2} for at in range(60)] for side in (0, 1)
    ]
    (difference,) = compared(
        *(str(jsonl(tmp_path / f"{at}.jsonl", *side)) for at, side in enumerate(sides))
    ).differences
    assert (difference.num_tasks, difference.num_seeds, difference.estimate) == (60, 1, 0)


def test_what_a_judge_lacks_is_missing_and_judges_have_one_scale(tmp_path: Path) -> None:
    def judged(up: float = 0, **scales: float) -> list[dict[str, Any]]:
        return [
            {"id": f"t{at}", "judge": judge, "score": (at % 5 / 10 + up) * scales.get(judge, 1)}
            for at in range(40)
            for judge in "xyz"
        ]

    whole, other = judged(), judged(0.4)
    part = [row for at, row in enumerate(other) if row["judge"] != "z" or at % 4]
    paths = [str(jsonl(tmp_path / f"{at}.jsonl", *rows)) for at, rows in enumerate((whole, part, judged(0.4, z=10)))]
    (difference,) = compared(*paths[:2]).differences
    assert (
        difference.missing and difference.missing.by_side == ({}, {"not submitted": 10}) and difference.num_seeds == 3
    )
    refused(lambda: compared(paths[0], paths[2]), BadInput, code="comparison.scales-of-judges")
    assert compared(paths[0], paths[2], scale="0,10").differences[0].num_tasks == 40


@pytest.mark.parametrize(
    ("policy", "outcomes", "code"),
    [
        ('{score = "acc", not_worse = 0.05}, {score = "f1", better = true}', [True, True], 0),
        ('{score = "acc", not_worse = 0.001}, {score = "f1", better = true}', [None, True], 3),
        ('{score = "acc", better = 0.02}, {score = "f1", better = 0.5}', [False, False], 1),
        ('{score = "f1", better = 0.14}, {score = "f1", better = 0.1}', [None, True], 3),
        ('{score = "f1", direction = "lower", not_worse = 0.05}', [False], 1),
    ],
)
def test_a_policy_passes_where_every_metric_of_it_does(
    tmp_path: Path, policy: str, outcomes: list[bool | None], code: int
) -> None:
    """Of 400 tasks: accuracy falls on two and rises on two, f1 rises on 60."""
    acc, f1 = passes(400, 200), passes(400, 100)
    acc_after, f1_after = [*acc[:198], 0, 0, 1, 1, *acc[202:]], passes(400, 160)
    paths = [
        table(tmp_path / f"{name}.jsonl", acc=first, f1=second)
        for name, first, second in (("a", acc, f1), ("b", acc_after, f1_after))
    ]
    (tmp_path / "gate.toml").write_text(f"metric = [{policy}]")
    config = Config(paths=paths, policy=str(tmp_path / "gate.toml"))
    results = judge(read_sides(paths, config.columns), config)
    assert [result.passes for result in results] == outcomes
    content = document_of(results[0].comparison, results)
    summary = summarize(results[0].comparison, content, results)
    assert summary["exit_code"] == code and [row["passes"] for row in content["policy"]] == outcomes
    text, comment = (write for write in (report.text, report.markdown))
    assert text(results[0].comparison, results).startswith("The gate passes" if code == 0 else "The gate")
    assert summary["why"] in comment(results[0].comparison, results[0].tasks, results).replace("&#58;", ":")


def test_each_metric_of_a_policy_shows_its_own_tasks(tmp_path: Path) -> None:
    paths = [
        table(tmp_path / f"{name}.jsonl", f1=[0.1, *rest], acc=[0.4] * 29 + [last])
        for name, rest, last in (("a", [0.2] * 29, 0.5), ("b", [0.3] * 29, 0.6))
    ]
    (tmp_path / "gate.toml").write_text('metric = [{score = "f1", better = true}, {score = "acc", not_worse = 0.1}]')
    config = Config(paths=paths, policy=str(tmp_path / "gate.toml"))
    results = judge(read_sides(paths, config.columns), config)
    first = results[0]
    tables = report.flips(first.tasks, results)
    assert "tasks that differ in f1 (20 of 29" in tables and tables.index("tasks that differ in acc") < tables.index(
        "t29"
    )
    plots = report.page(first.comparison, first.tasks, results).split("<svg")[1:]
    dots = [{*re.findall(r'cx="([\d.]+)" cy="([\d.]+)" r="2.5"', plot)} for plot in plots]
    assert dots == [{("665.0", "145.0"), ("680.0", "115.0")}, {("710.0", "100.0"), ("725.0", "70.0")}]


def test_a_margin_is_less_than_the_scale_and_no_side_wins_by_a_cost_that_it_lacks(tmp_path: Path) -> None:
    """One point that was meant by 1 would be the whole scale; 0 in all rows is an unknown price."""
    paths = [
        table(tmp_path / f"{name}.jsonl", acc=passes(40, passed), cost=[cost] * 40)
        for name, passed, cost in (("a", 30, 1), ("b", 10, 0))
    ]

    def gate(metric: str) -> list[bool | None]:
        (tmp_path / "gate.toml").write_bytes(b"\xef\xbb\xbf[[metric]]\n" + metric.encode())
        config = Config(paths=paths, policy=str(tmp_path / "gate.toml"))
        return [result.passes for result in judge(read_sides(paths, config.columns), config)]

    refused(lambda: gate('score = "acc"\nnot_worse = 1'), UsageError, code="comparison.min-gain-too-large")
    assert gate('score = "acc"\nnot_worse = 0.9') == [True]
    cheaper = 'score = "cost"\ndirection = "lower"\nbetter = true'
    refused(lambda: gate(cheaper), BadInput, code="comparison.no-common-task")


def test_rows_that_were_written_twice_are_noted(tmp_path: Path) -> None:
    rows = [{"id": f"t{at}", "score": at % 2} for at in range(20)]
    once, twice = str(jsonl(tmp_path / "a.jsonl", *rows)), str(jsonl(tmp_path / "b.jsonl", *rows, *rows[3:5]))
    four_times = str(jsonl(tmp_path / "c.jsonl", *rows * 4))
    noted = [side.notes for side in compared(once, twice, four_times).sides]
    assert noted[0] == noted[2] == ()
    assert [(note.code, note.filled["tasks"], note.filled["first"]) for note in noted[1]] == [
        ("comparison.repeated-tasks", 2, "t3")
    ]


@pytest.mark.parametrize("not_worse", [None, 0.05])
def test_a_log_that_was_cut_off_passes_no_gate(tmp_path: Path, not_worse: float | None) -> None:
    """Of 60 tasks B has the first 30: it is better on these, and could be worse on all."""
    before, after = [*passes(30, 10), *passes(30, 30)], passes(60, 55)
    paths = [table(tmp_path / "a.jsonl", acc=before), table(tmp_path / "b.jsonl", acc=after[:30])]
    (tmp_path / "gate.toml").write_text('metric = [{score = "acc", not_worse = 0.05}]')

    def passed(**settings: Any) -> bool | None:
        config = Config(paths=paths, **settings)
        sides = read_sides(paths, config.columns)
        if config.policy:
            return judge(sides, config)[0].passes
        return compare(sides, config)[0].differences[0].not_worse

    gate = {"not_worse": not_worse} if not_worse else {"policy": str(tmp_path / "gate.toml")}
    assert passed(**gate) is None and passed(**gate, missing="excluded") is True


def test_what_is_called_better_shares_one_level_and_not_worse_has_its_own(tmp_path: Path) -> None:
    """Three scores with p of .03: each is better by itself, and none of three that a policy calls better is."""
    before, after = [0] * 12 + [1] * 4 + [0, 1] * 40, [1] * 12 + [0] * 4 + [0, 1] * 40
    names = ("acc", "f1", "exact_match")
    paths = [
        table(tmp_path / f"{name}.jsonl", **dict.fromkeys(names, side)) for name, side in (("a", before), ("b", after))
    ]
    assert 0.02 < compared(*paths, score="f1").differences[0].p_value < 0.05

    def gate(*metrics: str) -> list[bool | None]:
        (tmp_path / "gate.toml").write_text("\n".join(f"[[metric]]\n{metric}" for metric in metrics))
        config = Config(paths=paths, policy=str(tmp_path / "gate.toml"))
        return [result.passes for result in judge(read_sides(paths, config.columns), config)]

    better = [f'score = "{name}"\nbetter = true' for name in names]
    assert gate(better[0]) == [True] and gate(*better) == [None] * 3
    assert gate(better[0], *(f'score = "{name}"\nnot_worse = 0.01' for name in names[1:])) == [True] * 3
    for bad in ('score = "acc"', 'score = "acc"\nbetter = true\nnot_worse = 0.1', "score = 1\nbetter = true", "x = 1"):
        refused(lambda bad=bad: gate(bad), UsageError, code="comparison.bad-policy")
    (tmp_path / "gate.toml").write_text("score = 'acc'")
    refused(
        lambda: Config(paths=paths, policy=str(tmp_path / "gate.toml")).columns, UsageError, code="comparison.no-metric"
    )
    refused(lambda: Config(paths=paths, policy="absent.toml").columns, UsageError, code="comparison.no-policy")
    both = Config(paths=paths, policy=str(tmp_path / "gate.toml"), not_worse=0.1)
    refused(lambda: judge(read_sides(paths), both), UsageError, code="comparison.policy-with-others")
