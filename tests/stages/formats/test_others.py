"""moatless, tracing spans and SWE-bench predictions, and the verdicts that lie beside them."""

from pathlib import Path
from typing import Any

from support.foreign import INSTANCE, PATCH, REAL, call, document, jsonl, needs_real, payloads, read

from stages.rollouts import missing


def test_moatless_steps_and_transitions(tmp_path: Path) -> None:
    about = {"instance_id": INSTANCE, "submission": PATCH, "total_cost": 0.1}
    step = {
        "name": "Loop",
        "actions": [{"name": "search", "input": {"class_name": "A"}, "output": {"message": "none"}}],
        "completion_cost": 0.05,
    }
    document(
        tmp_path / "a.json",
        {"name": "moatless", "input": {"problem_statement": "It breaks."}, "steps": [step], "info": about},
    )
    action = {
        "action": {"thoughts": "I look.", "function_name": "f"},
        "output": {},
        "completion_cost": 0.1,
        "input_tokens": 5,
    }
    moved = {
        "name": "SearchCode",
        "state": {"model": "gpt-4o"},
        "actions": [action, {"action": {}, "retry_message": "again"}],
    }
    document(
        tmp_path / "b.json",
        {"initial_message": "It breaks.", "transitions": [moved, {"name": "Finished", "actions": []}], "info": about},
    )
    found, drops, _ = read(tmp_path)
    assert [one.turns[0].action for one in found] == [
        '<tool_call>\n{"name": "search", "arguments": {"class_name": "A"}}\n</tool_call>',
        'I look.\n<tool_call>\n{"name": "SearchCode", "arguments": {"function_name": "f"}}\n</tool_call>',
    ]
    assert (
        found[1].turns[1].observed == [{"role": "tool", "content": "again"}]
        and found[1].model == "gpt-4o"
        and not drops
    )
    assert all(one.task_id == INSTANCE and one.submission == PATCH and one.statement == "It breaks." for one in found)


def test_every_leaf_of_a_moatless_tree_is_a_rollout(tmp_path: Path) -> None:
    def node(number: int, parent: int | None, **more: Any) -> dict[str, Any]:
        return {"node_id": number, "parent_id": parent, **more}

    action = {"scratch_pad": "hm", "query": "q", "action_args_class": "moatless.actions.search.FindFunctionArgs"}
    nodes = [
        node(0, None, message="<task>\nIt breaks.\n</task>"),
        node(1, 0, action=action, observation={"message": "found"}),
        node(2, 1, action=action),
        node(3, 1, action=action),
    ]
    record = {"metadata": {"instance_id": INSTANCE}, "agent": {"completion": {"model": "m"}}, "nodes": nodes}
    found, _, _ = read(document(tmp_path / "tree.json", record))
    assert [len(one.turns) for one in found] == [2, 2] and found[0].statement == "It breaks."
    assert (
        found[0].turns[0].action
        == 'hm\n<tool_call>\n{"name": "FindFunction", "arguments": {"query": "q"}}\n</tool_call>'
    )


SPANS = [
    {
        "type": "llm_call",
        "timestamp": "1",
        "task_prompt": [{"role": "user", "content": "Fix it."}],
        "output": {"content": "I look.", "tool_calls": [call("bash", '{"command": "ls"}')]},
    },
    {"type": "tool_call", "timestamp": "2", "tool": "bash", "result": {"stdout": "a.py", "exitCode": 0}},
    {"type": "judge_call", "timestamp": "3", "model": "judge", "input_messages": []},
    {"type": "llm_call", "timestamp": "4"},
    {"type": "llm_call", "timestamp": "5", "output": {"content": "Done.", "tool_calls": []}},
]


def test_spans_are_model_and_tool_calls(tmp_path: Path) -> None:
    record = {"instance_id": INSTANCE, "session_id": "s", "total_spans": 9, "trajectory": SPANS}
    document(tmp_path / INSTANCE / "run.json", record)
    jsonl(
        tmp_path / "index.jsonl",
        {"instance_id": INSTANCE, "file": f"{INSTANCE}/run.json", "resolved": True, "model": "m", "agent": "a"},
    )
    (one,), drops, _ = read(tmp_path)
    assert (one.model, one.resolved, one.reward, one.own_id, len(one.turns)) == ("m", True, 1.0, "s", 2) and not drops
    assert one.opening == [{"role": "user", "content": "Fix it."}] and one.turns[0].returncode == 0


def prediction(instance: str, patch: str | None = PATCH) -> dict[str, Any]:
    return {"instance_id": instance, "model_name_or_path": "m", "model_patch": patch}


def test_predictions_are_rollouts_without_steps(tmp_path: Path) -> None:
    jsonl(tmp_path / "all_preds.jsonl", prediction("a__b-1"), prediction("a__b-2", ""), prediction("a__b-3"))
    document(tmp_path / "report.json", {"resolved": ["a__b-1"], "generated": ["a__b-1", "a__b-2"]})
    statement = {"instance_id": "a__b-1", "problem_statement": "It breaks.", "base_commit": "c"}
    jsonl(tmp_path / "lite.jsonl", statement)
    found = payloads(tmp_path)
    assert [(p["rollout"]["gt_pass"], p["origin"]["submission"]) for p in found] == [
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


@needs_real
def test_real_runs_on_the_same_instances() -> None:
    found, drops, _ = read(REAL / "same-instance")
    assert len(found) == 80 and not drops and len({one.task_id for one in found}) == 18
    assert [sum(one.resolved is verdict for one in found) for verdict in (True, False, None)] == [52, 26, 2]


@needs_real
def test_real_predictions_and_their_reports() -> None:
    found, drops, _ = read(REAL.parent / "swe-patches")
    judged = {}
    for one in found:
        judged.setdefault(one.model, []).append(one.resolved)
    assert len(found) == 2003 and not drops
    assert sum(answers.count(True) for answers in judged.values()) >= 54 + 54 + 57 + 74 + 80 + 79
