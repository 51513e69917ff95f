"""SWE-bench's predictions, and reports of its harnesses: for whom they speak, from where, and which are useless."""

from pathlib import Path

import pytest
from support.transcripts import PATCH, assistant, document, imported, jsonl, payloads, prediction, read, user

from composer_stages.rollouts import missing
from composer_stages.runs.kinds import ROLLOUT

IDS = ["a__b-1", "a__b-2", "a__b-3"]


def predictions(path: Path, model: str = "m") -> Path:
    return jsonl(path, *(prediction(i, model=model) for i in IDS))


def verdicts(path: Path) -> list[bool | None]:
    rollouts, _, _ = read(path)
    return [rollout.resolved for rollout in rollouts]


def test_predictions_are_rollouts_without_steps(tmp_path: Path) -> None:
    jsonl(tmp_path / "all_preds.jsonl", *(prediction(i, PATCH * (i != "a__b-2")) for i in IDS))
    document(tmp_path / "report.json", {"resolved": ["a__b-1"], "generated": ["a__b-1", "a__b-2"]})
    statement = {"instance_id": "a__b-1", "problem_statement": "It breaks.", "base_commit": "c"}
    jsonl(tmp_path / "lite.jsonl", statement)
    payloads_read = payloads(tmp_path)
    assert [(p["rollout"]["hidden_pass"], p["origin"]["submission"]) for p in payloads_read] == [
        (True, PATCH),
        (False, None),
        (False, PATCH),  # the report does not list it
    ]
    assert [(p["task"]["prompt"], p["steps"]) for p in payloads_read] == [("It breaks.", []), (None, []), (None, [])]
    assert missing.STEPS in payloads_read[0]["origin"]["missing"]


def test_predictions_by_instance_and_a_report_of_each(tmp_path: Path) -> None:
    document(tmp_path / "preds.json", {i: prediction(i) for i in IDS[:2]})
    document(tmp_path / "report.json", {"a__b-2": {"resolved": True, "patch_exists": True}})
    assert verdicts(tmp_path) == [None, True]


def test_a_verdict_in_a_prediction_is_read(tmp_path: Path) -> None:
    lines = [prediction(i) | {"resolved": verdict} for i, verdict in zip(IDS, (True, False, None), strict=True)]
    jsonl(tmp_path / "all_preds.jsonl", *lines)
    assert verdicts(tmp_path) == [True, False, None]


def test_instances_that_a_report_does_not_list_are_unresolved(tmp_path: Path) -> None:
    predictions(tmp_path / "in" / "all_preds.jsonl")
    document(tmp_path / "in" / "results.json", {"no_generation": [], "no_logs": [], "resolved": ["a__b-1"]})
    run = imported(tmp_path, tmp_path / "in")
    assert [r["hidden_pass"] for r in run.rows(ROLLOUT)] == [True, False, False]
    assert run.manifest.summary["mean_reward"] == pytest.approx(1 / 3)
    assert run.manifest.summary["models"] == ["m"]
    report = (run.path / "report.txt").read_text()
    assert "in/results.json: a run's report, 1 resolved; 3 instances judged, 2 of them not listed" in report


def test_a_report_without_a_matching_instance_is_listed_as_unused(tmp_path: Path) -> None:
    predictions(tmp_path / "in" / "all_preds.jsonl")
    document(tmp_path / "in" / "report.json", {"resolved": ["x__y-1"], "applied": ["x__y-1", "x__y-2"]})
    run = imported(tmp_path, tmp_path / "in")
    assert [r["reward"] for r in run.rows(ROLLOUT)] == [None] * 3
    report = (run.path / "report.txt").read_text()
    assert "in/report.json: a run's report of 2 instances, none of which is here: not used" in report
    assert run.manifest.summary["reports"]["unused"] == ["in/report.json"]


def test_an_empty_list_of_resolved_instances_is_a_verdict(tmp_path: Path) -> None:
    predictions(tmp_path / "all_preds.jsonl")
    document(tmp_path / "report.json", {"resolved_ids": [], "total_instances": 3})
    assert verdicts(tmp_path) == [False] * 3


@pytest.mark.parametrize("given", ["", "preds", "preds/all_preds.jsonl"])
def test_a_report_of_sb_cli_next_door_judges(tmp_path: Path, given: str) -> None:
    predictions(tmp_path / "in" / "preds" / "all_preds.jsonl")
    report = {"resolved_ids": ["a__b-2"], "unresolved_ids": ["a__b-1", "a__b-3"]}
    document(tmp_path / "in" / "sb-cli-reports" / "swe-bench_lite__test__mine.json", report)
    assert verdicts(tmp_path / "in" / given) == [False, True, False]


@pytest.mark.parametrize("place", ["results/results.json", "logs/results.json", "run_evaluation/r/m/report.json"])
def test_reports_in_harness_folders_judge_their_run(tmp_path: Path, place: str) -> None:
    predictions(tmp_path / "run" / "all_preds.jsonl")
    predictions(tmp_path / "other" / "all_preds.jsonl", "other")
    document(tmp_path / "run" / place, {"resolved": ["a__b-2"]})
    judged = {(rollout.model, rollout.task_id): rollout.resolved for rollout in read(tmp_path)[0]}
    assert [judged["m", i] for i in IDS] == [False, True, False] and [judged["other", i] for i in IDS] == [None] * 3


def test_reports_of_single_instances_below_logs_are_read(tmp_path: Path) -> None:
    predictions(tmp_path / "run" / "all_preds.jsonl")
    document(tmp_path / "run" / "logs" / "a__b-1" / "report.json", {"a__b-1": {"resolved": True, "patch_exists": True}})
    document(tmp_path / "run" / "logs" / "a__b-2" / "report.json", {"resolved": False, "patch_exists": True})
    assert verdicts(tmp_path / "run") == [True, False, None]
    assert verdicts(tmp_path / "run" / "all_preds.jsonl") == [True, False, None]
    report = (imported(tmp_path, tmp_path / "run").path / "report.txt").read_text()
    assert "2 reports of single instances, the first run/logs/a__b-1/report.json: 2 instances judged" in report


def test_reports_one_folder_up_are_read_and_never_imported(tmp_path: Path) -> None:
    messages = [user("q"), assistant("```bash\nls\n```")]
    for instance in IDS:
        document(tmp_path / "run" / "trajs" / f"{instance}.traj.json", messages)
    document(tmp_path / "run" / "results" / "results.json", {"resolved": ["a__b-3"]})
    document(tmp_path / "run" / "report.json", [{"id": 0, "prompt": "q", "completion": "a", "reward": 1.0}])
    assert verdicts(tmp_path / "run" / "trajs") == [False, False, True]
    assert verdicts(tmp_path / "run" / "trajs" / "a__b-3.traj.json") == [True]


def test_a_named_report_judges_files_in_other_folders(tmp_path: Path) -> None:
    preds = predictions(tmp_path / "here" / "preds.jsonl")
    named = document(tmp_path / "there" / "m.run.json", {"resolved_ids": ["a__b-1"], "unresolved_ids": ["a__b-2"]})
    run = imported(tmp_path, preds, named)
    assert [r["hidden_pass"] for r in run.rows(ROLLOUT)] == [True, False, False]


def test_reports_of_several_models_in_one_folder_are_matched_by_name(tmp_path: Path) -> None:
    for model, resolved in (("gpt-3.5", "a__b-1"), ("org/x", "a__b-2")):
        name = model.replace("/", "__")
        predictions(tmp_path / f"{name}.jsonl", model)
        document(tmp_path / f"{name}.run1.json", {"resolved_ids": [resolved]})
    judged = {(rollout.model, rollout.task_id): rollout.resolved for rollout in read(tmp_path)[0]}
    assert [judged["gpt-3.5", i] for i in IDS] == [True, False, False]
    assert [judged["org/x", i] for i in IDS] == [False, True, False]


@pytest.mark.parametrize("name", ["m.{}.json", "sb-cli-reports/swe-bench_lite__test__{}.json"])
def test_reports_of_several_runs_of_a_model_are_matched_by_the_run(tmp_path: Path, name: str) -> None:
    for run, resolved in (("one", "a__b-1"), ("two", "a__b-2")):
        predictions(tmp_path / run / "preds.jsonl")
        report = {"resolved_ids": [resolved], "unresolved_ids": [i for i in IDS if i != resolved]}
        document(tmp_path / name.format(run), report)
    assert verdicts(tmp_path) == [True, False, False, False, True, False]


def test_reports_of_several_runs_that_nothing_tells_apart_give_no_verdict(tmp_path: Path) -> None:
    predictions(tmp_path / "preds.jsonl")
    for name, resolved in (("one", "a__b-1"), ("two", "a__b-2")):
        report = {"resolved_ids": [resolved], "unresolved_ids": [i for i in IDS if i != resolved]}
        document(tmp_path / f"{name}.json", report)
    assert verdicts(tmp_path) == [None] * 3


def test_contradicting_reports_give_no_verdict_and_are_counted(tmp_path: Path) -> None:
    predictions(tmp_path / "in" / "preds.jsonl")
    document(tmp_path / "in" / "one.json", {"resolved_ids": ["a__b-1", "a__b-2"]})
    document(tmp_path / "in" / "two.json", {"resolved_ids": ["a__b-1"]})
    run = imported(tmp_path, tmp_path / "in")
    assert [r["hidden_pass"] for r in run.rows(ROLLOUT)] == [True, None, False]
    text = (run.path / "report.txt").read_text()
    assert "reports contradict each other on 1 instances, which have no verdict: a__b-2" in text


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("gpt-4.1.run1", "gpt-4.1"),
        ("org__model-2.5.run1", "org/model-2.5"),
        ("org__model", "org/model"),
        ("gpt-4.5-preview", "gpt-4.5-preview"),
        ("swe-bench_verified__test__run", None),
        ("report", None),
    ],
)
def test_a_report_is_named_after_its_model_and_run(tmp_path: Path, name: str, model: str | None) -> None:
    """Models with a dot were cut at it, so that gpt-4.1 and gpt-4.5 were one."""
    document(tmp_path / f"{name}.json", {"resolved_ids": ["a__b-1"], "unresolved_ids": ["a__b-2"]})
    rollouts, _, _ = read(tmp_path)
    assert {rollout.model for rollout in rollouts} == {model}
