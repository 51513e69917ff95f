"""extract-pairs on imported groups: no teachers needed, pairs in every state that several rollouts share."""

import json
from pathlib import Path
from typing import Any

import pytest
from needs import REAL, needs
from support.foreign import INSTANCE, call, document, jsonl

from stages import extract_pairs
from stages.errors import BadInput, UsageError
from stages.import_traces import Config
from stages.pairs.actions import canonical
from stages.rollouts.trace import pairs_with_states
from stages.runs import runner
from stages.runs.kinds import PAIR, ROLLOUT
from stages.runs.run import Run
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
    assert "1 task, 4 models, 2 of 2 states shared" in report and "a trace" in report
    assert run.manifest.counts["planned"] == 7


def questions(folder: Path, wrong_where_it_differs: bool) -> Path:
    """Twelve questions. The model d differs from three others in six, and is wrong in these or in the other six."""
    for name in "abcd":
        rows = []
        for number in range(12):
            differs = name == "d" and number % 2 == 0
            wrong = differs if wrong_where_it_differs else name == "d" and not differs
            said = {"role": "assistant", "content": f"No. {number}." if differs else f"Number {number}."}
            question = [{"role": "user", "content": f"What is {number}?"}]
            rows.append({"prompt": question, "answer": "x", "completion": [said], "reward": 0.0 if wrong else 1.0})
        jsonl(folder / f"{name}.results.jsonl", *rows)
        document(folder / f"{name}.metadata.json", {"env": "wiki", "model": name})
    return folder


def test_groups_get_the_verdict_that_votes_and_rewards_allow(tmp_path: Path) -> None:
    run = extracted(tmp_path, imported(tmp_path, questions(tmp_path / "in", True)), student="d")
    found = run.manifest.summary
    assert found["verdict"] == "DISAGREEMENT TRACKS FAILURE" and run.manifest.outcome.exit_code == 0
    assert (found["alignment"]["pairs"], found["alignment"]["right"]) == (6, 1.0)
    report = (run.path / "report.txt").read_text()
    assert "\nDISAGREEMENT TRACKS FAILURE: outcomes are in line with 100.0% of 6 preferences in 6 tasks" in report
    assert "imported rollouts cannot be continued" in report and "\noriginal criterion: FAIL" in report
    other = extracted(tmp_path, imported(tmp_path / "other", questions(tmp_path / "odd", False)), student="d")
    assert other.manifest.summary["verdict"] == "DISAGREEMENT NOT SHOWN TO TRACK FAILURE"
    assert other.manifest.summary["alignment"]["right"] == 0.0 and other.manifest.outcome.exit_code == 3


def test_a_single_question_decides_nothing(tmp_path: Path) -> None:
    run = extracted(tmp_path, imported(tmp_path, wiki(tmp_path / "in")))
    assert run.manifest.summary["verdict"] == "TOO LITTLE DATA" and run.manifest.outcome.exit_code == 0
    assert "\nTOO LITTLE DATA: " in (run.path / "report.txt").read_text()


def test_groups_cannot_be_continued(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"signal\.rollouts continues from states that `composer collect` recorded"):
        extracted(tmp_path, imported(tmp_path, wiki(tmp_path / "in")), signal={"rollouts": 2})


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
    with pytest.raises(BadInput, match="holds teacher actions"):
        assign_inputs(extract_pairs.STAGE, [collected()])


@needs("real")
def test_real_wiki_search_gives_pairs(tmp_path: Path) -> None:
    run = extracted(tmp_path, imported(tmp_path, REAL / "trajectories" / "wiki-search"))
    pairs = run.rows(PAIR)
    assert len(pairs) >= 20 and all(p["chosen"] != p["rejected"] for p in pairs)
    assert {p["rule"] for p in pairs} == {"majority_over_student", "student_over_minority"}
    counts = run.manifest.counts
    assert counts["dropped_too_few_rollouts"] >= 100  # up to nine rollouts a question: rewards say nothing about a step
    sides = [{(p["state_sha256"], canonical(p[side])) for p in pairs} for side in ("chosen", "rejected")]
    assert not sides[0] & sides[1]


@needs("real")
def test_real_submissions_to_one_instance_give_pairs(tmp_path: Path) -> None:
    rollouts = imported(tmp_path, REAL / "trajectories" / "nemo-gym")
    pairs = extracted(tmp_path, rollouts).rows(PAIR)
    resolved = {r["task_id"] for r in rollouts.rows(ROLLOUT) if r["gt_pass"]}
    assert len(pairs) >= 40 and {p["task_id"] for p in pairs} <= resolved
    assert {p["rule"] for p in pairs} == {"better_submission"}
