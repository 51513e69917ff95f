"""Episodes as rows and journal records, and states read back from rows."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TypedDict

import orjson

from stages.envs.base import Work
from stages.errors import BadInput
from stages.messages import Message
from stages.policy.base import Policy
from stages.rollouts.agent_loop import FULL, Episode, Step, shown
from stages.runs import store
from stages.runs.artifact import Run
from stages.runs.records import PAIR, ROLLOUT, STATE, STEP, Row


class RolloutPayload(TypedDict):
    """What a stage writes of one rollout into its journal: the `rollout/2` row and the `step/2` rows."""

    rollout: Row
    steps: list[Row]


class RolloutUnit(RolloutPayload):
    """The same read back from the journal, under the key of its unit."""

    unit: str


@dataclass(frozen=True)
class RecordedState:
    """A distinct state of a run: the conversation so far, and every step that was taken in it.

    `path`: the steps before it in the rollout that reached it first.
    """

    messages: list[Message]
    path: list[Row]
    steps: list[Row]


def payload(episode: Episode, policy: Policy, *, sandbox: str, source: str = "collect") -> RolloutPayload:
    """The journal record of one episode."""
    return {"rollout": rollout_row(episode, policy, sandbox, source), "steps": step_rows(episode, policy)}


def rollout_row(episode: Episode, policy: Policy, sandbox: str, source: str) -> Row:
    """One `rollout/2` row. An episode with an error has a null reward."""
    grade, samples = episode.grade, [step.sample for step in episode.steps]
    error_type, error = episode.error or (None, grade.error)
    return {
        **_identity(episode),
        "split": episode.task.split,
        "family": episode.task.family,
        "seed": episode.seed,
        "num_steps": len(episode.steps),
        "reward": None if episode.error else grade.reward,
        "gt_pass": grade.gt_pass,
        "visible_pass": grade.visible_pass,
        "hacked": grade.hacked,
        "protocol_ok": grade.protocol_ok,
        "terminated_by": episode.terminated_by,
        "error_type": error_type,
        "error": error,
        "sandbox": sandbox,
        "model": policy.config.model,
        "source": source,
        "prompt_tokens": sum(sample.prompt_tokens for sample in samples),
        "completion_tokens": sum(sample.completion_tokens for sample in samples),
        "cost_usd": sum(sample.cost_usd for sample in samples),
        "wall_s": episode.wall_s,
        "history": episode.history,
        "tools_json": store.encode([dict(tool) for tool in episode.tools]).decode() if episode.tools else None,
        **_work(grade.work),
    }


def _work(work: Work) -> Row:
    """What the episode left behind, as columns."""
    canary = None if work.canary is None else list(work.canary)
    return {name: getattr(work, name) for name in Work.__dataclass_fields__} | {"canary": canary}


def _identity(episode: Episode) -> Row:
    task = episode.task
    return {
        "rollout_id": episode.rollout_id,
        "task_id": task.task_id,
        "env": task.env,
        "group_id": task.task_id,
        "sample_idx": episode.sample_idx,
    }


def step_rows(episode: Episode, policy: Policy) -> list[Row]:
    """`step/2` rows, dense from 0; tokens as deltas, so that an episode's ids are stored once.

    The terminal reward stands on the last step and the others have 0.0; all are null when the episode was not scored.
    """
    held: list[int] = []
    rows = []
    for index, step in enumerate(episode.steps):
        rows.append(_step_row(episode, policy, index, step, held))
        held = [*(step.sample.prompt_ids or []), *(step.sample.completion_ids or [])]
    return rows


def _step_row(episode: Episode, policy: Policy, index: int, step: Step, held: list[int]) -> Row:
    sample, observation, last = step.sample, step.observation, index == len(episode.steps) - 1
    prompt = sample.prompt_ids
    prefix_ok = None if prompt is None else prompt[: len(held)] == held
    scored = episode.error is None and episode.grade.reward is not None
    return {
        **_identity(episode),
        "step": index,
        "num_steps": len(episode.steps),
        "new_messages_json": store.encode(step.new_messages).decode(),
        "num_messages": step.num_messages,
        "state_sha256": step.state_sha256,
        "action": sample.text,
        "commands": list(observation.commands),
        "parse_error": observation.parse_error,
        "finish_reason": sample.finish_reason,
        "truncated": sample.finish_reason == "length",
        "observation": observation.content,
        "returncode": observation.returncode,
        "timed_out": observation.timed_out,
        "raw_chars": observation.raw_chars,
        "elided_chars": observation.elided_chars,
        "reward": (episode.grade.reward if last else 0.0) if scored else None,
        "done": last,
        "terminated_by": episode.terminated_by if last else None,
        "capture_level": policy.capture_level,
        "prompt_len": None if prompt is None else len(prompt),
        "prompt_delta_token_ids": None if prompt is None else prompt[len(held) :] if prefix_ok else prompt,
        "prefix_ok": prefix_ok,
        "completion_token_ids": sample.completion_ids,
        "logprobs": sample.logprobs,
        "logprob_kind": sample.logprob_kind,
        "model": policy.config.model,
        "sampling_json": sampling_json(policy, sample.policy_version),
        "seed": step.seed,
        "prompt_tokens": sample.prompt_tokens,
        "completion_tokens": sample.completion_tokens,
        "cost_usd": sample.cost_usd,
        "latency_s": sample.latency_s,
        "command_s": observation.duration_s,
        "history": episode.history,
    }


def sampling_json(policy: Policy, version: int | None = None) -> str:
    """The sampling that was really used; version: optimiser steps that a policy under training had seen."""
    config = policy.config
    used = {"temperature": config.temperature, "max_tokens": config.max_tokens, "top_p": 1.0, "top_k": 0}
    return store.encode(used if version is None else used | {"policy_version": version}).decode()


def rollout_units(records: Iterable[Row]) -> dict[str, RolloutUnit]:
    """The records of rollouts in a journal by unit; records of other kinds are left out."""
    return {
        record["unit"]: {"unit": record["unit"], "rollout": record["rollout"], "steps": record["steps"]}
        for record in records
        if "rollout" in record
    }


def by_rollout(steps: list[Row]) -> dict[str, list[Row]]:
    """Step rows grouped by rollout, each in order."""
    grouped: dict[str, list[Row]] = {}
    for row in sorted(steps, key=lambda row: (row["rollout_id"], row["step"])):
        grouped.setdefault(row["rollout_id"], []).append(row)
    return grouped


def transcripts(steps: list[Row]) -> list[list[Message]]:
    """All that had been said before each step of one rollout."""
    messages: list[Message] = []
    conversations = []
    for row in steps:
        messages = [*messages, *orjson.loads(row["new_messages_json"])]
        conversations.append(messages)
    return conversations


def states(steps: list[Row]) -> list[list[Message]]:
    """The conversation before each step of one rollout, as the policy was shown it."""
    return [shown(said, row.get("history")) for said, row in zip(transcripts(steps), steps, strict=True)]


def state_digests(steps: list[Row]) -> list[str]:
    """`episode.state_sha256` of every state of one rollout, in linear time where the policy was shown all of it."""
    if any(row.get("history") not in (None, FULL) for row in steps):
        return [store.digest(state) for state in states(steps)]
    return digests_of_prefixes([orjson.loads(row["new_messages_json"]) for row in steps])


def digests_of_prefixes(gains: Iterable[list[Message]]) -> list[str]:
    """The digest of every state, each of which is the one before and what it gained; in linear time."""
    running, digests, begun = hashlib.sha256(b"["), [], False
    for gain in gains:
        for message in gain:
            running.update((b"," if begun else b"") + store.encode(message))
            begun = True
        ended = running.copy()
        ended.update(b"]")
        digests.append(ended.hexdigest())
    return digests


def states_by_digest(steps: list[Row]) -> dict[str, RecordedState]:
    """The distinct states of a run by their digest, in the order of rollouts and steps."""
    recorded: dict[str, RecordedState] = {}
    for rows in by_rollout(steps).values():
        for index, (messages, row) in enumerate(zip(states(rows), rows, strict=True)):
            state = recorded.setdefault(row["state_sha256"], RecordedState(messages, rows[:index], []))
            state.steps.append(row)
    return recorded


def prompt_ids(steps: list[Row]) -> list[list[int] | None]:
    """The token ids before each step of one rollout, from the deltas; None from where the source has none."""
    held: list[int] = []
    prompts: list[list[int] | None] = []
    for row in steps:
        delta, completion = row["prompt_delta_token_ids"], row["completion_token_ids"]
        if delta is None or completion is None:
            return [*prompts, *[None] * (len(steps) - len(prompts))]
        prompt = held + delta if row["prefix_ok"] else list(delta)
        prompts.append(prompt)
        held = prompt + completion
    return prompts


# ---- states
# States as rows of a table of their own, each as what it gained over the one before, and pairs read with theirs.

COLUMNS = [
    *("rollout_id", "step", "state_sha256", "new_messages_json", "history"),
    *("prompt_delta_token_ids", "completion_token_ids", "prefix_ok"),
]
"""What of the steps of a rollout its states are made of."""


def state_id(step: Row) -> str:
    """The name of the state in which a step was taken."""
    return f"{step['rollout_id']}/{step['step']}"


def state_rows(steps: list[Row], last: int) -> Iterator[Row]:
    """The `state/1` rows of one rollout, from its first step to `last`."""
    before, said, held = None, list[Message](), list[int]()
    for row, messages, prompt in zip(steps[: last + 1], states(steps), prompt_ids(steps), strict=False):
        kept = _common(said, messages)
        kept_ids = len(held) if prompt is not None and prompt[: len(held)] == held else 0
        yield {
            "state_id": state_id(row),
            "before_id": before,
            "state_sha256": row["state_sha256"],
            "kept_messages": kept,
            "new_messages_json": store.encode(messages[kept:]).decode(),
            "kept_token_ids": None if prompt is None else kept_ids,
            "new_token_ids": None if prompt is None else prompt[kept_ids:],
        }
        before, said, held = state_id(row), messages, prompt or []


def opening_row(name: str, messages: list[Message], digest: str) -> Row:
    """The `state/1` row of a state that nothing led to."""
    said = store.encode(messages).decode()
    gained = {"kept_messages": 0, "new_messages_json": said, "kept_token_ids": None, "new_token_ids": None}
    return {"state_id": name, "before_id": None, "state_sha256": digest, **gained}


def _common(before: list[Message], after: list[Message]) -> int:
    """How many messages both begin with."""
    if after[: len(before)] == before:
        return len(before)
    for index, (one, other) in enumerate(zip(before, after, strict=False)):
        if one != other:
            return index
    return min(len(before), len(after))


def read_states(rows: Iterable[Row]) -> Iterator[tuple[str, list[Message], list[int] | None]]:
    """Each state by its name: its messages, and its token ids or None. Rows stand after those that they go on from."""
    said, ids = list[Message](), list[int]()
    for row in rows:
        if row["before_id"] is None:
            said, ids = [], []
        said = [*said[: row["kept_messages"]], *orjson.loads(row["new_messages_json"])]
        if row["new_token_ids"] is None:
            ids = []
            yield row["state_id"], said, None
        else:
            ids = [*ids[: row["kept_token_ids"]], *row["new_token_ids"]]
            yield row["state_id"], said, ids


def pairs_with_states(run: Run) -> Iterator[Row]:
    """The pairs of a run, each with the `messages_json` of its state and its `prompt_token_ids`, which may be None.

    Each state is in memory once, however many pairs are in it. Pairs of an older version have both in their own row.
    """
    table = run.scan(PAIR)
    if "messages_json" in table.columns:
        yield from table.rows()
        return
    wanted = {row["state_id"] for row in table.rows(["state_id"])}
    held = {
        name: (store.encode(messages).decode(), ids)
        for name, messages, ids in read_states(run.scan(STATE).rows())
        if name in wanted
    }
    for row in table.rows():
        said, ids = held[row["state_id"]]
        yield {**row, "messages_json": said, "prompt_token_ids": ids}


# ---- reading
# Rollouts read back from the tables of a run, one after the other, so that a run may be larger than memory.


def rollout_rows(run: Run) -> Iterator[tuple[Row, list[Row]]]:
    """Each rollout with its steps in order, in the order of the table of rollouts.

    `BadInput` where the steps are not in the order of the rollouts, in which every stage writes them.
    """
    followed = step_groups(run.scan(STEP).rows())
    steps = next(followed, [])
    for rollout in run.scan(ROLLOUT).rows():
        if steps and steps[0]["rollout_id"] == rollout["rollout_id"]:
            yield rollout, steps
            steps = next(followed, [])
        else:
            yield rollout, []
    if steps:
        raise BadInput(
            f"{run.path}: the steps of {steps[0]['rollout_id']} do not lie in the order of the rollouts. "
            "Rerun the stage that wrote them."
        )


def conversation(steps: Iterable[Row]) -> list[Message]:
    """All that was said in one rollout, its last action included; `steps` are all of it, in order."""
    said: list[Message] = []
    action = ""
    for row in steps:
        said += orjson.loads(row["new_messages_json"])
        action = row["action"]
    return [*said, {"role": "assistant", "content": action}]


def step_groups(steps: Iterable[Row]) -> Iterator[list[Row]]:
    """The steps of one rollout after the other, where those of each lie together; each in order."""
    return (sorted(group, key=itemgetter("step")) for _, group in groupby(steps, key=itemgetter("rollout_id")))
