"""Convert trajectories to the rows that `collect` writes, null for unrecorded fields, with the origin of each."""

from itertools import accumulate

import orjson

from composer_stages.endings import NOT_WHOLE, ending_of
from composer_stages.formats.base import ImportedTurn, Trajectory
from composer_stages.formats.measurement import MEASURED
from composer_stages.formats.reading import ReadTrajectory
from composer_stages.formats.repeats import rollout_id
from composer_stages.messages import OMITTED, Message
from composer_stages.rollouts import missing
from composer_stages.rollouts.trace import RolloutPayload, digests_of_prefixes
from composer_stages.runs import store
from composer_stages.runs.kinds import ROLLOUT, STEP, Row
from composer_stages.terms import whole_reward

USAGE = ("prompt_tokens", "completion_tokens", "cost_usd")
OF_TRAJECTORY = ("split", "family", "seed", "terminated_by", "wall_s", "submission")
OF_TURN = (
    *("commands", "parse_error", "finish_reason", "returncode", "raw_chars", "elided_chars", "logprobs"),
    *("prompt_tokens", "completion_tokens", "cost_usd", "latency_s", "action"),
)
"""Fields that rollouts and steps have as columns of the same names."""


class ImportedPayload(RolloutPayload):
    """The journal record of an imported rollout: that of a collected one, and its `task/1` and `origin/1` rows."""

    task: Row
    origin: Row


def payload(item: ReadTrajectory, sample_idx: int) -> ImportedPayload:
    """Return the journal record of one rollout.

    A redacted rollout loses its token ids and log-probs: the ids would spell out its secret.
    """
    trajectory = item.trajectory
    if item.redacted:
        # Of all turns, not only of those with a secret: later prompts hold the ids of earlier turns.
        for turn in trajectory.turns:
            turn.prompt_ids = turn.completion_ids = turn.logprobs = None
    task = {"task_id": trajectory.task_id, "env": trajectory.env}
    identity = {**task, "rollout_id": rollout_id(item), "group_id": trajectory.task_id, "sample_idx": sample_idx}
    is_graded = trajectory.error is None and trajectory.reward is not None
    reward = whole_reward(float(trajectory.reward or 0)) if is_graded else None
    model = trajectory.model or item.origin.sidecars.model
    steps = _steps(trajectory, identity, reward)
    questions = [message["content"] for message in trajectory.opening if message["role"] == "user"]
    error_type, error = trajectory.error or (None, None)
    tools = orjson.dumps(trajectory.tools).decode()  # in their order, in which templates write them
    return {
        "task": {
            **task,
            "split": trajectory.split,
            "family": trajectory.family,
            "prompt": trajectory.statement or (questions[-1] if questions else None),
            "data_json": store.encode(trajectory.task_data).decode(),
        },
        "rollout": {
            **dict.fromkeys(ROLLOUT.columns),
            **identity,
            **{name: getattr(trajectory, name) for name in OF_TRAJECTORY},
            **usage(trajectory),
            "num_steps": len(trajectory.turns),
            "reward": reward,
            "hidden_pass": trajectory.resolved,
            "error_type": error_type,
            "error": error,
            "model": model,
            "source": item.format,
            "tools_json": tools if trajectory.tools else None,
        },
        "steps": steps,
        "origin": {
            "rollout_id": identity["rollout_id"],
            "format": item.format,
            "file": item.origin.file,
            "line": item.origin.line,
            "effective": trajectory.effective,
            "submission": trajectory.submission,
            "missing": sorted(trajectory.missing | absent(trajectory, steps, model)),
            "tools_json": tools,
            "extra_json": store.encode({**trajectory.extra, **_measured(trajectory)}).decode(),
        },
    }


def _measured(trajectory: Trajectory) -> Row:
    """Return what was measured, as `compare` reads it of imported rollouts."""
    measured = trajectory.measured
    fields: Row = {**vars(measured), "log": trajectory.log and trajectory.log.key}
    return {MEASURED: {name: value for name, value in fields.items() if value or name == "scores"}}


def usage(trajectory: Trajectory) -> dict[str, float | None]:
    """Return what a rollout cost: the source's own totals, else sums of the turns, None where one is unknown."""
    totals: dict[str, float | None] = {}
    for column in USAGE:
        stated, parts = getattr(trajectory, column), [getattr(turn, column) for turn in trajectory.turns]
        totals[column] = stated if stated is not None else sum(parts) if parts and None not in parts else None
    return totals


def _steps(trajectory: Trajectory, identity: Row, reward: float | None) -> list[Row]:
    """Return `step/1` rows: the messages that each state gained, and token ids as deltas where prompts extend.

    The reward is on the last step and 0 on the others; null on all where the rollout has none.
    """
    turns = trajectory.turns
    gains: list[list[Message]] = [trajectory.opening]
    gains += [[{"role": "assistant", "content": turn.action}, *turn.observed] for turn in turns[:-1]]
    sizes, digests = list(accumulate(map(len, gains))), digests_of_prefixes(gains, trajectory.tools)
    sampling = None if trajectory.sampling is None else store.encode(trajectory.sampling).decode()
    # Token ids of prompt and completion so far. Stored are deltas: a prompt of turn n holds those of all turns before.
    before: list[int] = []
    rows = []
    for index, turn in enumerate(turns):
        is_last, prompt = index == len(turns) - 1, turn.prompt_ids
        extends = None if prompt is None else prompt[: len(before)] == before
        rows.append(
            {
                **dict.fromkeys(STEP.columns),
                **identity,
                **{name: getattr(turn, name) for name in OF_TURN},
                "model": trajectory.model,
                "seed": trajectory.seed,
                "step": index,
                "num_steps": len(turns),
                "new_messages_json": store.encode(gains[index]).decode(),
                "num_messages": sizes[index],
                "state_sha256": digests[index],
                "truncated": None if turn.finish_reason is None else ending_of(turn.finish_reason) in NOT_WHOLE,
                "observation": "\n".join(message["content"] for message in turn.observed),
                "capture_level": capture_level(turn),
                "prompt_len": None if prompt is None else len(prompt),
                "prompt_delta_token_ids": None if prompt is None else prompt[len(before) :] if extends else prompt,
                "prefix_ok": extends,
                "completion_token_ids": turn.completion_ids,
                # No format states whether temperature and top-p were applied before the log-probs were taken.
                "logprob_kind": "unknown" if turn.logprobs else None,
                # Sources record one reward a rollout, which is known only after the last action.
                "reward": None if reward is None else reward if is_last else 0.0,
                "done": is_last,
                "terminated_by": trajectory.terminated_by if is_last else None,
                "sampling_json": sampling,
            }
        )
        before = [*(prompt or []), *(turn.completion_ids or [])]
    return rows


def capture_level(turn: ImportedTurn) -> str:
    """Return `tokens` with ids and log-probs of sampled tokens, `logprobs` without ids, else `text`."""
    if turn.prompt_ids is not None and turn.completion_ids and turn.logprobs:
        return "tokens"
    return "logprobs" if turn.logprobs and turn.completion_ids is None else "text"


def absent(trajectory: Trajectory, steps: list[Row], model: str | None) -> set[missing.Fact]:
    """Return the facts that the rows of a rollout lack: those whose columns are null in all of them."""
    levels = {row["capture_level"] for row in steps}
    columns = ("commands", "parse_error", "finish_reason", "elided_chars")
    recorded = {name for name in columns if any(row[name] is not None for row in steps)}
    facts = {
        missing.REWARD: trajectory.reward is None and not trajectory.unscored,
        missing.CALL_IDS: True,
        missing.TOKENS: levels != {"tokens"},
        missing.LOGPROBS: "text" in levels or not levels,
        missing.MODEL: model is None,
        missing.USAGE: any(row["completion_tokens"] is None for row in steps) or not steps,
        missing.MEDIA: any(OMITTED in row["new_messages_json"] + row["action"] for row in steps),
        missing.FINISH: "finish_reason" not in recorded,
        missing.PARSE: not {"commands", "parse_error"} & recorded,
        missing.ELISION: "elided_chars" not in recorded,
    }
    return {fact for fact, is_absent in facts.items() if is_absent}
