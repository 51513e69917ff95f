"""moatless-tools: evaluation trajectories as steps, transitions or a tree of nodes, one instance a file.

The files hold neither prompts nor replies, only the parsed actions: the problem opens the conversation, the fields of
an action are the call, and its thoughts are the text before it. Of a tree, every path to a leaf is a rollout.

Format read from aorwall/moatless-tools at 68783da95, 135bbefb1, a1017b78e and 91f874186, `evaluations/*/trajs`.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from stages.formats.base import INSTANCE, ImportedTurn, Origin, Reader, Record, Trajectory, family_of
from stages.formats.reports import stem
from stages.messages import Spoken, ToolCall, write
from stages.rollouts import missing

NAME = "moatless"
MISSING = frozenset({missing.OPENING, missing.PARSE, missing.ELISION, missing.FINISH, missing.CALL_IDS})
Path = tuple[str, list[ImportedTurn], float | None]
"""The problem, the turns, and the value of the leaf in a search tree."""
THOUGHTS = ("scratch_pad", "thoughts", "thought", "reasoning")


def recognises(record: Any) -> bool:
    """Whether a record has steps or transitions with actions and an instance id, or nodes with ids."""
    if not isinstance(record, dict):
        return False
    nodes = record.get("nodes")
    if isinstance(nodes, list) and nodes:
        return all(isinstance(node, dict) and "node_id" in node for node in nodes)
    steps = record.get("transitions") if isinstance(record.get("transitions"), list) else record.get("steps")
    about = record.get("info", {})
    if not isinstance(about, dict) or not isinstance(steps, list):
        return False
    # A file without the id may be named after its instance; other formats have steps too, and no actions in them.
    return "instance_id" in about or (
        bool(steps) and all(isinstance(step, dict) and isinstance(step.get("actions"), list) for step in steps)
    )


def trajectories(record: Record, origin: Origin) -> Iterator[Trajectory]:
    """Yield the rollout of a file, or one for every leaf of its tree; a verdict applies to the first of them."""
    about = record.get("info") or record.get("metadata") or {}
    # Older files name their instance only by their own name, or by that of their folder.
    named = (origin.path.name.partition(".")[0], stem(origin.path), origin.path.parent.name)
    instance = about.get("instance_id") or next((name for name in named if INSTANCE.fullmatch(name)), None)
    if instance is None:
        raise ValueError("neither info.instance_id nor the file's name is an instance, such as astropy__astropy-6938")
    verdict = origin.sidecars.verdict(origin.path, instance)
    # The model is on each state of transitions, and once, at the agent, in a tree; files of steps do not name it.
    states = [transition.get("state") or {} for transition in record.get("transitions") or []]
    model = next((state["model"] for state in states if state.get("model")), None)
    model = model or ((record.get("agent") or {}).get("completion") or {}).get("model")
    paths: Iterable[Path] = _tree_paths(record["nodes"]) if record.get("nodes") else [_linear_path(record)]
    for number, (problem, turns, value) in enumerate(paths):
        resolved = verdict.resolved if verdict and number == 0 else None
        yield Trajectory(
            task_id=instance,
            env="swe-bench",
            opening=[{"role": "user", "content": problem}],
            turns=turns,
            missing=set(MISSING) | ({missing.REWARD} if resolved is None else set()),
            model=model or (verdict.model if verdict else None),
            statement=problem.removeprefix("<task>\n").removesuffix("\n</task>"),
            family=family_of(instance),
            reward=None if resolved is None else float(resolved),
            resolved=resolved,
            submission=about.get("submission"),
            terminated_by=about.get("status"),
            error=None if turns else ("no_actions", str(about.get("error") or "the file holds no action of the agent")),
            cost_usd=about.get("total_cost"),
            wall_s=about.get("duration"),
            extra={"agent": NAME, "evaluation": about.get("evaluation_name"), "value": value},
        )


def _linear_path(record: Record) -> Path:
    """Return the one path of a file of steps or transitions."""
    # Steps were written until 2024-06-09, transitions from 2024-06-17 (tokens are counted from 2024-06-23 on), and
    # trees of nodes by 2024-11-17. Steps have a cost for all their actions together, transitions one an action.
    problem = record.get("initial_message") or (record.get("input") or {}).get("problem_statement") or ""
    turns = []
    for step in record.get("transitions") or record.get("steps") or []:
        for action in step.get("actions") or []:
            fields = action.get("action") or action.get("input") or {}
            # An action that was refused has no output but the message with which the model was asked again.
            output = action.get("output") if action.get("output") is not None else action.get("retry_message")
            shown = output if output is None or isinstance(output, str) else json.dumps(output)
            turns.append(
                ImportedTurn(
                    _action_text(str(action.get("name") or step["name"]), fields),
                    [] if shown is None else [{"role": "tool", "content": shown}],
                    prompt_tokens=action.get("input_tokens"),
                    completion_tokens=action.get("output_tokens"),
                    cost_usd=action.get("completion_cost", step.get("completion_cost")),
                )
            )
    return problem, turns, None


def _tree_paths(nodes: list[Record]) -> Iterator[Path]:
    """Yield the path to every leaf of a tree."""
    by_id = {node["node_id"]: node for node in nodes}
    parents = {node.get("parent_id") for node in nodes}
    for leaf in (node for node in nodes if node["node_id"] not in parents):
        path = [leaf]
        # The second condition ends the walk in a file whose nodes are their own ancestors.
        while path[0].get("parent_id") is not None and len(path) <= len(nodes):
            path.insert(0, by_id[path[0]["parent_id"]])
        value = (leaf.get("reward") or {}).get("value") if isinstance(leaf.get("reward"), dict) else None
        turns = []
        for node in path:
            if not (action := node.get("action")):
                continue
            # The dotted path of a class is all that names an action: `moatless.actions.find_class.FindClassArgs`.
            name = str(action.get("action_args_class") or "action").rpartition(".")[2]
            observation = node.get("observation") or {}
            usage = ((node.get("completions") or {}).get("build_action") or {}).get("usage") or {}
            turns.append(
                ImportedTurn(
                    _action_text(name.removesuffix("Args").removesuffix("Arguments"), action),
                    [{"role": "tool", "content": str(observation["message"])}] if observation.get("message") else [],
                    prompt_tokens=usage.get("prompt_tokens"),
                    completion_tokens=usage.get("completion_tokens"),
                    cost_usd=usage.get("completion_cost"),
                )
            )
        yield str(path[0].get("message") or ""), turns, value


def _action_text(name: str, fields: Record) -> str:
    """Return an action as text: its thoughts, then a call with the other fields."""
    thoughts = "\n".join(str(fields[key]) for key in THOUGHTS if fields.get(key))
    rest = {key: value for key, value in fields.items() if key not in (*THOUGHTS, "action_args_class")}
    return write(Spoken(thoughts, (ToolCall(name, json.dumps(rest, ensure_ascii=False)),)))


READERS = (Reader(NAME, MISSING, recognises, trajectories),)
