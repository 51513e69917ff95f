"""TRL's logged completions: Parquet, one sampled completion a row, prompt and completion as text or as messages.

The logs hold no token ids, no log-probs and no model's name. Where several reward functions were logged, their weights
are not, so the reward is unknown; each value is kept beside.

Format read from huggingface/trl at its state of 2026-07-24, `trl/trainer/grpo_trainer.py`.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from stages.formats import messages
from stages.formats.base import Origin, Record, Trajectory
from stages.formats.transcripts import MARK, ExportedTranscript, File, chat
from stages.messages import Message
from stages.rollouts import missing
from stages.runs import parquet, store
from stages.runs.records import Row

NAME = "trl"
MISSING = frozenset({missing.PARSE, missing.ELISION, missing.FINISH, missing.CALL_IDS})
OWN = {"step", "prompt", "completion", "advantage", "reward", "images", "tools"}
OURS = {"rollout_id", "task_id", "env", "model", "family", "split"}


def recognises(record: Any) -> bool:
    """Prompt and completion with a training step or an advantage."""
    return (
        isinstance(record, dict)
        and {"prompt", "completion"} <= record.keys()
        and bool({"step", "advantage"} & record.keys())
    )


def trajectories(record: Record, origin: Origin) -> Iterator[Trajectory]:
    """One rollout. A task is known by its prompt, unless a column names it."""
    opening, lacks = _prompt(record["prompt"])
    lead, turns = messages.turns(_conversation(record["completion"]))
    numbers = {name: v for name, v in record.items() if name not in OWN | OURS and isinstance(v, float | int)}
    reward, known = _reward(record, numbers)
    env = record.get("env") or "trl"
    yield Trajectory(
        task_id=record.get("task_id") or f"{env}/{store.digest(record['prompt'])[:12]}",
        env=env,
        opening=[*opening, *lead],
        turns=turns,
        missing=set(MISSING) | lacks | (set() if known else {missing.REWARD}),
        own_id=record.get("rollout_id"),
        model=record.get("model"),
        family=record.get("family"),
        split=record.get("split"),
        reward=reward,
        error=None if turns else ("empty_completion", "the completion holds no message of the model"),
        tools=json.loads(record.get("tools") or "[]"),
        extra={name: record[name] for name in ("step", "advantage") if name in record} | {"rewards": numbers},
    )


def _prompt(prompt: Any) -> tuple[list[Message], set[missing.Fact]]:
    """Messages; or the rendered text, whose roles can no longer be told apart with certainty, as one message."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}], {missing.OPENING}
    return [messages.message(_present(item)) for item in prompt], set()


def _conversation(completion: Any) -> list[Message]:
    if isinstance(completion, str):
        return [{"role": "assistant", "content": completion}]
    return [messages.message(_present(item)) for item in completion or []]


def _present(item: Record) -> Record:
    """A message without the columns that Parquet fills with null."""
    return {name: value for name, value in item.items() if value is not None}


def _reward(record: Record, numbers: Record) -> tuple[float | None, bool]:
    """The reward, and whether the row can tell one: its own column, or the only reward function's."""
    if "reward" in record:
        return record["reward"], True
    return (next(iter(numbers.values())), True) if len(numbers) == 1 else (None, False)


# ---- trl
# TRL: `completions/completions_00000.parquet`, one rollout a row, prompt and completion as messages.
#
# `step` and `advantage` stand as TRL logs them. Arguments of calls are JSON text, as they differ from tool to tool
# and a
# Parquet column cannot.

LOST = ("token ids and log-probs", "finish reasons, return codes, costs and times", "errors", "submissions", "sampling")
CALL = pa.struct(
    {"id": pa.string(), "type": pa.string(), "function": pa.struct({"name": pa.string(), "arguments": pa.string()})}
)
MESSAGE = pa.struct(
    {
        **{name: pa.string() for name in ("role", "content", "reasoning_content", "tool_call_id")},
        "tool_calls": pa.list_(CALL),
    }
)
SCHEMA = pa.schema(
    {
        "step": pa.int64(),
        "prompt": pa.list_(MESSAGE),
        "completion": pa.list_(MESSAGE),
        "reward": pa.float64(),
        "advantage": pa.float64(),
        "model": pa.string(),
        "tools": pa.string(),
        **{name: pa.string() for name in MARK},
    }
)


def files(transcripts: Iterable[ExportedTranscript], dropped: Counter[str]) -> Iterable[File]:
    """One table of all rollouts that did something."""

    def rows() -> Iterator[Row]:
        for transcript in transcripts:
            dropped["no_steps"] += not transcript.turns
            if transcript.turns:
                yield _row(transcript)

    yield File("completions/completions_00000.parquet", lambda file: parquet.write_rows(file, SCHEMA, rows()))


def _row(transcript: ExportedTranscript) -> Row:
    prompt, completion = chat(transcript)
    fields: dict[str, Any] = {"step": 0, "prompt": prompt, "completion": completion, "advantage": None}
    rollout = transcript.rollout
    tools = store.encode(transcript.tools).decode()
    return {**fields, "reward": rollout["reward"], "model": rollout["model"], "tools": tools, **transcript.mark}
