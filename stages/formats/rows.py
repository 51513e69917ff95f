"""Trajectories as the rows that `collect` writes, null where the source does not say, and the origin of each."""

from itertools import accumulate
from typing import Any

from stages.formats.base import ImportedTurn, Trajectory, family_of
from stages.formats.reading import ReadTrajectory
from stages.messages import OMITTED, Message
from stages.rollouts import missing
from stages.rollouts.trace import RolloutPayload, digests_of_prefixes
from stages.runs import store
from stages.runs.records import Row


class ImportedPayload(RolloutPayload):
    """What an import writes of one rollout into its journal: its `task/1` and `origin/1` rows besides."""

    task: Row
    origin: Row


def payload(item: ReadTrajectory, sample_idx: int) -> ImportedPayload:
    """The journal record of one rollout. Token ids of a redacted one are removed: they would spell out its secret."""
    trajectory = item.trajectory
    if item.redacted:
        for turn in trajectory.turns:
            turn.prompt_ids = turn.completion_ids = turn.logprobs = None
    identity: Row = {
        "rollout_id": rollout_id(item),
        "task_id": trajectory.task_id,
        "env": trajectory.env,
        "group_id": trajectory.task_id,
        "sample_idx": sample_idx,
    }
    steps = _steps(trajectory, identity)
    return {
        "task": _task(trajectory),
        "rollout": _rollout(item, identity),
        "steps": steps,
        "origin": _origin(item, identity["rollout_id"], steps),
    }


UNKNOWN = ("history", "patch", "f2p_passed", "f2p_total", "p2p_passed", "p2p_total", "test_log", "image", "canary")
"""Columns of our own rollouts alone."""


def rollout_id(item: ReadTrajectory) -> str:
    """The source's own id where it has one, else a digest of the file's content and model, and its place in it."""
    place = f"{store.digest([item.origin.sha256, _model(item)])[:12]}:{item.origin.line}"
    return item.trajectory.own_id or (f"{place}.{item.index}" if item.index else place)


def _task(trajectory: Trajectory) -> Row:
    asked = [message["content"] for message in trajectory.opening if message["role"] == "user"]
    return {
        "task_id": trajectory.task_id,
        "env": trajectory.env,
        "split": trajectory.split,
        "family": trajectory.family or family_of(trajectory.task_id),
        "prompt": trajectory.statement or (asked[-1] if asked else None),
        "data_json": store.encode(trajectory.task_data).decode(),
    }


def _rollout(item: ReadTrajectory, identity: Row) -> Row:
    trajectory = item.trajectory
    error_type, error = trajectory.error or (None, None)
    return {
        **identity,
        "split": trajectory.split,
        "family": trajectory.family or family_of(trajectory.task_id),
        "seed": trajectory.seed,
        "num_steps": len(trajectory.turns),
        "reward": _score(trajectory),
        "gt_pass": trajectory.resolved,
        "visible_pass": None,
        "hacked": None,
        "protocol_ok": None,
        "terminated_by": trajectory.terminated_by,
        "error_type": error_type,
        "error": error,
        "sandbox": None,
        "model": _model(item),
        "source": item.importer,
        "prompt_tokens": _total(trajectory.prompt_tokens, [turn.prompt_tokens for turn in trajectory.turns]),
        "completion_tokens": _total(
            trajectory.completion_tokens, [turn.completion_tokens for turn in trajectory.turns]
        ),
        "cost_usd": _total(trajectory.cost_usd, [turn.cost_usd for turn in trajectory.turns]),
        "wall_s": trajectory.wall_s,
        "submission": trajectory.submission,
        "tools_json": store.encode(trajectory.tools).decode() if trajectory.tools else None,
        **dict.fromkeys(UNKNOWN),
    }


def _score(trajectory: Trajectory) -> float | None:
    return None if trajectory.error is not None or trajectory.reward is None else float(trajectory.reward)


def _model(item: ReadTrajectory) -> str | None:
    return item.trajectory.model or item.origin.sidecars.model


def _total(stated: Any, parts: list[Any]) -> Any:
    """What the source says of the whole, else the sum of its parts where all are known."""
    return stated if stated is not None else sum(parts) if parts and None not in parts else None


def _steps(trajectory: Trajectory, identity: Row) -> list[Row]:
    """`step/2` rows: the messages that each state gained, and token ids as deltas where they go on from each other."""
    turns = trajectory.turns
    gains = [trajectory.opening, *[[_spoken(turn), *turn.observed] for turn in turns[:-1]]]
    sizes, digests = list(accumulate(map(len, gains))), digests_of_prefixes(gains)
    before: list[int] = []
    rows = []
    for index, turn in enumerate(turns):
        rows.append(
            {
                **identity,
                "step": index,
                "num_steps": len(turns),
                "new_messages_json": store.encode(gains[index]).decode(),
                "num_messages": sizes[index],
                "state_sha256": digests[index],
                **_act(turn),
                **_ids(turn, before),
                **_end(trajectory, index),
            }
        )
        before = [*(turn.prompt_ids or []), *(turn.completion_ids or [])]
    return rows


def _spoken(turn: ImportedTurn) -> Message:
    return {"role": "assistant", "content": turn.action}


def _act(turn: ImportedTurn) -> Row:
    return {
        "action": turn.action,
        "commands": turn.commands,
        "parse_error": turn.parse_error,
        "finish_reason": turn.finish_reason,
        "truncated": None if turn.finish_reason is None else turn.finish_reason == "length",
        "observation": "\n".join(message["content"] for message in turn.observed),
        "returncode": turn.returncode,
        "timed_out": None,
        "raw_chars": turn.raw_chars,
        "elided_chars": turn.elided_chars,
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.completion_tokens,
        "cost_usd": turn.cost_usd,
        "latency_s": turn.latency_s,
        "command_s": None,
        "history": None,
    }


def _ids(turn: ImportedTurn, before: list[int]) -> Row:
    prompt = turn.prompt_ids
    goes_on = None if prompt is None else prompt[: len(before)] == before
    return {
        "capture_level": capture_level(turn),
        "prompt_len": None if prompt is None else len(prompt),
        "prompt_delta_token_ids": None if prompt is None else prompt[len(before) :] if goes_on else prompt,
        "prefix_ok": goes_on,
        "completion_token_ids": turn.completion_ids,
        "logprobs": turn.logprobs,
        "logprob_kind": "unknown" if turn.logprobs else None,
    }


def capture_level(turn: ImportedTurn) -> str:
    """`tokens` with ids and log-probs of what was sampled, `logprobs` without the ids, else `text`."""
    if turn.prompt_ids is not None and turn.completion_ids and turn.logprobs:
        return "tokens"
    return "logprobs" if turn.logprobs and turn.completion_ids is None else "text"


def _end(trajectory: Trajectory, index: int) -> Row:
    """The reward stands on the last step and the others have 0; all are null where the rollout has none."""
    last, score = index == len(trajectory.turns) - 1, _score(trajectory)
    return {
        "reward": None if score is None else score if last else 0.0,
        "done": last,
        "terminated_by": trajectory.terminated_by if last else None,
        "model": trajectory.model,
        "sampling_json": None if trajectory.sampling is None else store.encode(trajectory.sampling).decode(),
        "seed": trajectory.seed,
    }


def _origin(item: ReadTrajectory, rollout: str, steps: list[Row]) -> Row:
    trajectory = item.trajectory
    return {
        "rollout_id": rollout,
        "format": item.importer,
        "file": item.origin.file,
        "line": item.origin.line,
        "effective": trajectory.effective,
        "submission": trajectory.submission,
        "missing": sorted(trajectory.missing | _absent(item, steps)),
        "tools_json": store.encode(trajectory.tools).decode(),
        "extra_json": store.encode(trajectory.extra).decode(),
    }


def _absent(item: ReadTrajectory, steps: list[Row]) -> set[missing.Fact]:
    """What the rows lack, beyond what the importer declares."""
    levels = {row["capture_level"] for row in steps}
    absent = {
        missing.TOKENS: levels != {"tokens"},
        missing.LOGPROBS: "text" in levels or not levels,
        missing.MODEL: _model(item) is None,
        missing.USAGE: any(row["completion_tokens"] is None for row in steps) or not steps,
        missing.MEDIA: any(OMITTED in row["new_messages_json"] for row in steps),
        missing.FINISH: not any(row["finish_reason"] for row in steps),
    }
    return {fact for fact, is_absent in absent.items() if is_absent}
