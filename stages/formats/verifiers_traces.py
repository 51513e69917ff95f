"""verifiers 0.4 and PRIME-RL `traces.jsonl`: one Episode a line, or one Trace a line.

A trace is a graph of messages whose leaves are branches (compaction, sub-agents). Each branch is a rollout; an action
that several branches share is a step of one of them only, and context of the others, so that nothing is trained on
twice. The final branch comes first. Token ids stand on each message as what it adds; log-probs are rounded to 4
decimals by the writer.

What `export verifiers` notes under `info.composer` is read back.

Format read from PrimeIntellect-ai/verifiers at a60a606ec, `verifiers/v1/{trace,episode,graph}.py`, and
PrimeIntellect-ai/prime-rl at 559b44772, `monitors/file.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stages.formats.base import Drop, ImportedTurn, Origin, Record, Trajectory
from stages.formats.messages import message
from stages.rollouts import missing
from stages.runs import store

NAME = "verifiers"
MISSING = frozenset({missing.PARSE, missing.ELISION, missing.CALL_IDS})
LIMITS = {"max_turns": "max_steps", "max_output_tokens": "max_tokens", "max_total_tokens": "max_tokens"}


@dataclass(frozen=True)
class Run:
    """What an Episode, or the place of a bare Trace, says of a trace."""

    env: str
    group: str | None
    effective: bool | None


def recognises(record: Any) -> bool:
    """An Episode has traces, a Trace has nodes that hold messages."""
    if not isinstance(record, dict):
        return False
    nodes = record.get("nodes")
    bare = isinstance(nodes, list) and "task" in record and all("message" in node for node in nodes)
    return bare or (isinstance(record.get("traces"), list) and ("task" in record or "env" in record))


def trajectories(record: Record, origin: Origin) -> Iterator[Trajectory | Drop]:
    """One rollout a branch of every trace; an episode that failed before any trace is a rollout without steps."""
    if "traces" not in record:
        yield from _branches(record, _run(record, origin), origin)
    elif record["traces"]:
        for trace in record["traces"]:
            yield from _branches({**trace, "task": trace.get("task") or record["task"]}, _run(record, origin), origin)
    else:
        yield _rollout(record, _run(record, origin), [], [], own_id=record["id"])


def _run(record: Record, origin: Origin) -> Run:
    env = record.get("env") or {}
    folder = origin.path.parent.name
    named = env.get("name") or env.get("id") or (folder.split("--")[0] if "--" in folder else None)
    subset = origin.path.parent.name
    effective = {"effective": True, "all": False}.get(subset)
    return Run(named or record["task"].get("type") or NAME, (record.get("group") or {}).get("id"), effective)


def _branches(trace: Record, run: Run, origin: Origin) -> Iterator[Trajectory | Drop]:
    nodes = trace.get("nodes") or []
    parents = {node.get("parent") for node in nodes}
    leaves = [index for index in range(len(nodes)) if index not in parents]
    taken: set[int] = set()
    if not leaves:
        yield _rollout(trace, run, [], [], own_id=trace["id"])
    for number, leaf in enumerate([*leaves[-1:], *leaves[:-1]]):
        path = _path(nodes, leaf)
        opening, turns = _walk(trace, path, taken)
        own_id = trace["id"] if number == 0 else f"{trace['id']}/{leaf}"
        if turns or number == 0:
            yield _rollout(trace, run, opening, turns, own_id=own_id)
        else:
            detail = f"trace {trace['id']}, leaf {leaf}: all its actions are on other branches"
            yield origin.drop("branch_without_actions", detail)
        taken |= {index for index in path if nodes[index].get("sampled")}


def _path(nodes: list[Record], leaf: int) -> list[int]:
    path: list[int] = []
    at: int | None = leaf
    while at is not None:
        if at in path:
            raise ValueError(f"node {at} is its own ancestor")
        path.append(at)
        at = nodes[at].get("parent")
    return path[::-1]


def _walk(trace: Record, path: list[int], taken: set[int]) -> tuple[list[Any], list[ImportedTurn]]:
    """Opening messages and turns of one branch; actions that an earlier branch has are context."""
    calls = {call["node"]: call for call in trace.get("calls") or [] if call.get("node") is not None}
    opening: list[Any] = []
    turns: list[ImportedTurn] = []
    held: list[int] = []
    for index in path:
        node = trace["nodes"][index]
        if node.get("sampled") and index not in taken:
            turns.append(_turn(node, held, calls.get(index) or {}))
        else:
            (turns[-1].observed if turns else opening).append(message(node["message"]))
        held = held + (node.get("token_ids") or [])
    return opening, turns


def _turn(node: Record, held: list[int], call: Record) -> ImportedTurn:
    usage, time = call.get("usage") or {}, call.get("time") or {}
    turn = ImportedTurn(
        message(node["message"])["content"],
        finish_reason=call.get("finish_reason"),
        prompt_tokens=_plus(usage.get("prompt_tokens"), usage.get("cached_input_tokens")),
        completion_tokens=usage.get("completion_tokens"),
        cost_usd=usage.get("cost"),
        latency_s=time["end"] - time["start"] if time.get("end") else None,
    )
    ids, mask = node.get("token_ids") or [], node.get("mask") or []
    if True in mask and len(ids) == len(mask):
        first, after = mask.index(True), len(mask) - mask[::-1].index(True)
        if all(mask[first:after]):
            turn.prompt_ids, turn.completion_ids = held + ids[:first], ids[first:after]
            turn.logprobs = node.get("logprobs") or None
    return turn


def _plus(first: int | None, second: int | None) -> int | None:
    return None if first is None else first + (second or 0)


def _rollout(trace: Record, run: Run, opening: list[Any], turns: list[ImportedTurn], *, own_id: str) -> Trajectory:
    task = trace["task"]
    data = task.get("data") or {}
    marked = (trace.get("info") or {}).get("composer") or {}
    key = task.get("key") or task.get("hash") or store.digest(data)[:16]
    rewards, lacks = trace.get("rewards") or {}, set(MISSING)
    lacks |= {missing.EXACT_LOGPROBS} if any(turn.logprobs for turn in turns) else set()
    lacks |= set() if rewards or "traces" in trace else {missing.REWARD}
    return Trajectory(
        task_id=marked.get("task_id") or data.get("instance_id") or f"{run.env}/{key}",
        env=run.env,
        opening=opening,
        turns=turns,
        missing=lacks,
        own_id=own_id,
        model=_model(trace),
        statement=data["prompt"] if isinstance(data.get("prompt"), str) else None,
        family=marked.get("family"),
        split=marked.get("split"),
        reward=_reward(rewards),
        resolved=marked.get("gt_pass"),
        submission=marked.get("submission"),
        terminated_by=LIMITS.get(str(trace.get("stop_condition")), trace.get("stop_condition")),
        error=_error(trace, turns),
        sampling=next((call.get("sampling") for call in trace.get("calls") or [] if call.get("sampling")), None),
        effective=run.effective,
        task_data=data,
        tools=trace.get("tools") or [],
        extra={
            "rewards": rewards,
            "metrics": trace.get("metrics") or {},
            "info": trace.get("info") or {},
            "group": run.group,
        },
    )


def _model(trace: Record) -> str | None:
    """The model that was asked, else the one that the agent was configured with."""
    named = next((call["model"] for call in trace.get("calls") or [] if call.get("model")), None)
    configured = ((trace.get("agent") or {}).get("config") or {}).get("model")
    return named or (configured if isinstance(configured, str) else None)


def _reward(rewards: Record) -> float | None:
    """The weighted sum of what was scored; None when nothing was. A bare number counts with weight 1."""
    scored = [reward for reward in rewards.values() if reward is not None]
    values = [r["score"] * r.get("weight", 1.0) if isinstance(r, dict) else float(r) for r in scored]
    return sum(values) if values else None


def _error(trace: Record, turns: list[ImportedTurn]) -> tuple[str, str] | None:
    errors = trace.get("errors") or ([trace["error"]] if trace.get("error") else [])
    if trace.get("ok") is False and errors:
        return str(errors[-1].get("type")), str(errors[-1].get("message"))
    if trace.get("ok") is False and trace.get("is_completed") is not True:
        return "not_ok", str(trace.get("stop_condition") or "the trace did not complete")
    return None if turns else ("no_actions", "the trace holds no action of the policy")
