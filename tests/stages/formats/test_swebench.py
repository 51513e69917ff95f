"""SWE-bench predictions, and the reports in their folders."""

from pathlib import Path
from typing import Any

from needs import REAL, needs
from support.transcripts import PATCH, document, jsonl, payloads, read

from stages.rollouts import missing


def prediction(instance: str, patch: str | None = PATCH) -> dict[str, Any]:
    return {"instance_id": instance, "model_name_or_path": "m", "model_patch": patch}


def test_predictions_are_rollouts_without_steps(tmp_path: Path) -> None:
    jsonl(tmp_path / "all_preds.jsonl", prediction("a__b-1"), prediction("a__b-2", ""), prediction("a__b-3"))
    document(tmp_path / "report.json", {"resolved": ["a__b-1"], "generated": ["a__b-1", "a__b-2"]})
    statement = {"instance_id": "a__b-1", "problem_statement": "It breaks.", "base_commit": "c"}
    jsonl(tmp_path / "lite.jsonl", statement)
    found = payloads(tmp_path)
    assert [(p["rollout"]["hidden_pass"], p["origin"]["submission"]) for p in found] == [
        (True, PATCH),
        (False, None),
        (False, PATCH),  # the report does not list it
    ]
    assert [p["task"]["prompt"] for p in found] == ["It breaks.", None, None] and all(p["steps"] == [] for p in found)
    assert missing.STEPS in found[0]["origin"]["missing"]


def test_predictions_by_instance_and_a_report_of_each(tmp_path: Path) -> None:
    document(tmp_path / "preds.json", {"a__b-1": prediction("a__b-1"), "a__b-2": prediction("a__b-2")})
    document(tmp_path / "report.json", {"a__b-2": {"resolved": True, "patch_exists": True}})
    found, drops, _ = read(tmp_path)
    assert [one.resolved for one in found] == [None, True] and not drops


@needs("real")
def test_real_runs_on_the_same_instances() -> None:
    found, drops, _ = read(REAL / "trajectories" / "same-instance", "mini-swe-agent")
    assert len(found) == 18 and len({one.task_id for one in found}) == 18
    assert {drop.reason for drop in drops} == {"unknown_format"}  # of programs that are not read


@needs("real")
def test_real_predictions_and_their_reports() -> None:
    found, drops, _ = read(REAL / "swe-patches")
    judged = {}
    for one in found:
        judged.setdefault(one.model, []).append(one.resolved)
    assert len(found) == 2003 and not drops
    assert sum(answers.count(True) for answers in judged.values()) >= 54 + 54 + 57 + 74 + 80 + 79
