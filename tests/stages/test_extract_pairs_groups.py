"""extract-pairs on imported groups: no teachers needed, pairs in every state that several rollouts share."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.foreign import INSTANCE, REAL, call, document, jsonl, needs_real

from stages import extract_pairs
from stages.errors import BadInput, UsageError
from stages.import_traces import Config
from stages.pairs.voting import canonical
from stages.rollouts.trace import pairs_with_states
from stages.runs import runner
from stages.runs.artifact import Run
from stages.runs.records import PAIR, ROLLOUT
from stages.runs.stage import assign_inputs


def imported(root: Path, *paths: Path) -> Run:
    return Run(runner.execute("import", {}, Config(paths=[str(path) for path in paths]), root=root).path)


def extracted(root: Path, rollouts: Run, **settings: Any) -> Run:
    config = extract_pairs.Config(**settings)
    return Run(runner.execute("extract-pairs", {"rollouts": rollouts}, config, root=root).path)


def wiki(folder: Path) -> Path:
    """Three models search for the boat and are right; a fourth answers at once and is wrong."""
    for number, name in enumerate(("a", "b", "c", "d")):
        calls = [json.dumps(call("search", '{"query": "boat"}', f"call_{number}"))]
        said = [{"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": "a ship"}]
        last = {"role": "assistant", "content": f"Hollow ship, says {name}."}
        row = {
            "prompt": [{"role": "user", "content": "What?"}],
            "answer": "ship",
            "completion": [*said, last],
            "reward": 1.0,
        }
        wrong = {**row, "completion": [{"role": "assistant", "content": "A bird."}], "reward": 0.0}
        jsonl(folder / f"{name}.results.jsonl", wrong if name == "d" else row)
        document(folder / f"{name}.metadata.json", {"env": "wiki", "model": name})
    return folder


def test_a_group_of_models_needs_no_teachers(tmp_path: Path) -> None:
    run = extracted(tmp_path, imported(tmp_path, wiki(tmp_path / "in")))
    pairs = run.rows(PAIR)
    assert [(p["rule"], p["rejected"], p["num_teachers"]) for p in pairs] == [("student_over_minority", "A bird.", 3)]
    assert run.manifest.counts["dropped_duplicate"] == 3  # each student says the same
    assert run.manifest.counts["dropped_too_few_rollouts"] == 1  # one rollout was wrong, which may be luck
    search = '<tool_call>\n{"name": "search", "arguments": {"query": "boat"}}\n</tool_call>'
    (said,) = (json.loads(p["messages_json"]) for p in pairs_with_states(run))
    assert {p["chosen"] for p in pairs} == {search} and said == [{"role": "user", "content": "What?"}]
    report = (run.path / "report.txt").read_text()
    assert "1 tasks, 4 models, 2 of 2 states shared" in report and "a trace" in report
    assert run.manifest.counts["planned"] == 7


def test_a_student_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    rollouts = imported(tmp_path, wiki(tmp_path / "in"))
    with pytest.raises(UsageError, match="a, b, c, d"):
        extracted(tmp_path, rollouts, student="e")
    assert extracted(tmp_path, rollouts, student="d").rows(PAIR)[0]["rejected_by"] in ("student", "d")


def test_submissions_of_one_task_are_compared_by_the_verdict(tmp_path: Path) -> None:
    for name, patch, resolved in (("one", "P", True), ("two", "Q", False)):
        prediction = {"instance_id": INSTANCE, "model_name_or_path": name, "model_patch": patch}
        jsonl(tmp_path / "in" / name / "all_preds.jsonl", prediction)
        document(
            tmp_path / "in" / name / "report.json", {"resolved": [INSTANCE] if resolved else [], "applied": [INSTANCE]}
        )
    wordless = extracted(tmp_path, imported(tmp_path, tmp_path / "in"))
    assert wordless.rows(PAIR) == [] and wordless.manifest.counts["dropped_task_without_words"] == 1
    jsonl(
        tmp_path / "in" / "lite.jsonl", {"instance_id": INSTANCE, "problem_statement": "It breaks.", "base_commit": "c"}
    )
    (pair,) = pairs_with_states(extracted(tmp_path, imported(tmp_path, tmp_path / "in")))
    assert (pair["rule"], pair["chosen"], pair["rejected"], pair["rejected_by"]) == (
        "better_submission",
        "P",
        "Q",
        "two",
    )
    assert (
        json.loads(pair["messages_json"]) == [{"role": "user", "content": "It breaks."}]
        and pair["family"] == "owner/repo"
    )


def test_only_imported_rollouts_may_come_without_teachers(tmp_path: Path, collected: Any) -> None:
    rollouts = imported(tmp_path, wiki(tmp_path / "in"))
    assert assign_inputs(extract_pairs.STAGE, [rollouts]) == {"rollouts": [rollouts]}
    with pytest.raises(BadInput, match="teacher_action"):
        assign_inputs(extract_pairs.STAGE, [collected()])


@needs_real
def test_real_wiki_search_gives_pairs(tmp_path: Path) -> None:
    run = extracted(tmp_path, imported(tmp_path, REAL / "wiki-search"))
    pairs = run.rows(PAIR)
    assert len(pairs) >= 20 and all(p["chosen"] != p["rejected"] for p in pairs)
    assert {p["rule"] for p in pairs} == {"majority_over_student", "student_over_minority"}
    counts = run.manifest.counts
    assert counts["dropped_too_few_rollouts"] >= 100  # up to nine rollouts a question: rewards say nothing about a step
    sides = [{(p["state_sha256"], canonical(p[side])) for p in pairs} for side in ("chosen", "rejected")]
    assert not sides[0] & sides[1]


@needs_real
def test_real_runs_on_the_same_instances_give_pairs(tmp_path: Path) -> None:
    rollouts = imported(tmp_path, REAL / "same-instance")
    pairs = extracted(tmp_path, rollouts).rows(PAIR)
    resolved = {r["task_id"] for r in rollouts.rows(ROLLOUT) if r["gt_pass"]}
    assert len(pairs) >= 40 and {p["task_id"] for p in pairs} <= resolved
    assert {p["rule"] for p in pairs} == {"better_submission"}
