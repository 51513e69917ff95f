"""moatless-tools: evaluation trajectories as steps, transitions or a tree of nodes, one instance a file.

Neither the prompts nor the replies were kept, only what was understood of them: the problem opens the conversation, the
action's own fields are the call, and its thoughts are the words before it. Of a tree, every path to a leaf is a
rollout.

Format read from aorwall/moatless-tools at 68783da95, 135bbefb1, a1017b78e and 91f874186, `evaluations/*/trajs`.
"""

import json
from collections.abc import Iterator
from typing import Any

from stages.formats.base import ImportedTurn, Origin, Reader, Record, Trajectory, family_of
from stages.messages import Spoken, ToolCall, write
from stages.rollouts import missing

NAME = "moatless"
MISSING = frozenset({missing.OPENING, missing.PARSE, missing.ELISION, missing.FINISH, missing.CALL_IDS})
THOUGHTS = ("scratch_pad", "thoughts", "thought", "reasoning")


def recognises(record: Any) -> bool:
    """Steps or transitions with actions and an instance id, or nodes with ids."""
    if not isinstance(record, dict):
        return False
    nodes = record.get("nodes")
    if isinstance(nodes, list) and nodes:
        return all(isinstance(node, dict) and "node_id" in node for node in nodes)
    about = record.get("info")
    return (
        isinstance(about, dict)
        and "instance_id" in about
        and (isinstance(record.get("transitions"), list) or isinstance(record.get("steps"), list))
    )


def trajectories(record: Record, origin: Origin) -> Iterator[Trajectory]:
    """The rollout of a file, or one for every leaf of its tree; a verdict is one on the first of them."""
    about = record.get("info") or record.get("metadata") or {}
    instance = about["instance_id"]
    verdict = origin.sidecars.verdict(origin.path, instance)
    paths = _tree(record["nodes"]) if record.get("nodes") else [_line(record)]
    for number, (problem, turns, reward) in enumerate(paths):
        resolved = verdict.resolved if verdict and number == 0 else None
        yield Trajectory(
            task_id=instance,
            env="swe-bench",
            opening=[{"role": "user", "content": problem}],
            turns=turns,
            missing=set(MISSING) | ({missing.REWARD} if resolved is None else set()),
            model=_model(record) or (verdict.model if verdict else None),
            statement=problem.removeprefix("<task>\n").removesuffix("\n</task>"),
            family=family_of(instance),
            reward=None if resolved is None else float(resolved),
            resolved=resolved,
            submission=about.get("submission"),
            terminated_by=about.get("status"),
            error=None if turns else ("no_actions", str(about.get("error") or "the file holds no action of the agent")),
            cost_usd=about.get("total_cost"),
            wall_s=about.get("duration"),
            extra={"agent": NAME, "evaluation": about.get("evaluation_name"), "value": reward},
        )


def _model(record: Record) -> str | None:
    states = [transition.get("state") or {} for transition in record.get("transitions") or []]
    named = next((state["model"] for state in states if state.get("model")), None)
    return named or ((record.get("agent") or {}).get("completion") or {}).get("model")


def _line(record: Record) -> tuple[str, list[ImportedTurn], float | None]:
    """The problem and the turns of a file of steps or transitions."""
    problem = record.get("initial_message") or (record.get("input") or {}).get("problem_statement") or ""
    turns = [
        _turn(action, str(action.get("name") or step["name"]), step)
        for step in record.get("transitions") or record.get("steps") or []
        for action in step.get("actions") or []
    ]
    return problem, turns, None


def _turn(action: Record, name: str, step: Record) -> ImportedTurn:
    done = action.get("action") or action.get("input") or {}
    shown = action.get("output") if action.get("output") is not None else action.get("retry_message")
    return ImportedTurn(
        _said(name, done),
        [] if shown is None else [{"role": "tool", "content": shown if isinstance(shown, str) else json.dumps(shown)}],
        prompt_tokens=action.get("input_tokens"),
        completion_tokens=action.get("output_tokens"),
        cost_usd=action.get("completion_cost", step.get("completion_cost")),
    )


def _said(name: str, done: Record) -> str:
    thoughts = "\n".join(str(done[key]) for key in THOUGHTS if done.get(key))
    rest = {key: value for key, value in done.items() if key not in (*THOUGHTS, "action_args_class")}
    return write(Spoken(thoughts, (ToolCall(name, json.dumps(rest, ensure_ascii=False)),)))


def _tree(nodes: list[Record]) -> Iterator[tuple[str, list[ImportedTurn], float | None]]:
    by_id = {node["node_id"]: node for node in nodes}
    parents = {node.get("parent_id") for node in nodes}
    for leaf in (node for node in nodes if node["node_id"] not in parents):
        path = [leaf]
        while path[0].get("parent_id") is not None and len(path) <= len(nodes):
            path.insert(0, by_id[path[0]["parent_id"]])
        value = (leaf.get("reward") or {}).get("value") if isinstance(leaf.get("reward"), dict) else None
        yield str(path[0].get("message") or ""), [_node(node) for node in path if node.get("action")], value


def _node(node: Record) -> ImportedTurn:
    action = node["action"]
    name = (
        str(action.get("action_args_class") or "action")
        .rpartition(".")[2]
        .removesuffix("Args")
        .removesuffix("Arguments")
    )
    observation = node.get("observation") or {}
    usage = ((node.get("completions") or {}).get("build_action") or {}).get("usage") or {}
    return ImportedTurn(
        _said(name, action),
        [{"role": "tool", "content": str(observation["message"])}] if observation.get("message") else [],
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=usage.get("completion_tokens"),
        cost_usd=usage.get("completion_cost"),
    )


READERS = (Reader(NAME, MISSING, recognises, trajectories),)
