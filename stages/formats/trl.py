"""TRL's logged completions: Parquet, one sampled completion a row, prompt and completion as text or as messages.

The logs hold no token ids, no log-probs and no model's name. Where several reward functions were logged, their weights
are not, so the reward is unknown; each value is kept in `extra`. TRL writes a column for each function and no total
(TRL 1.16, `log`): a column `reward` is the reward only in our own files, or where it is alone. A generation that is
trained on in several steps is in the file of each of them, and counts once.

The writer makes `completions/completions_00000.parquet`, one rollout a row, prompt and completion as messages, `step`
and `advantage` as TRL logs them. Arguments of calls are JSON text, as they differ from tool to tool and a Parquet
column cannot.

Format read from huggingface/trl at its state of 2026-07-24, `trl/trainer/grpo_trainer.py`.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa

from composer_stages import json_text
from composer_stages.formats.base import Drop, NumberedRecord, Origin, Reader, Record, Trajectory, has_keys
from composer_stages.formats.measurement import REWARD, MeasuredSample
from composer_stages.formats.messages import conversation, split_turns
from composer_stages.formats.secrets import clean
from composer_stages.formats.transcripts import MARK, ExportedTranscript, File, Writer
from composer_stages.messages import Message
from composer_stages.rollouts import missing
from composer_stages.runs import store, tables
from composer_stages.runs.kinds import Row
from composer_stages.words import Sentence

NAME = "trl"
COLUMNS = {"step", "prompt", "completion", "advantage", "reward", "images", "tools"}
GENERATION, TOTAL = "generation", "reward_function"
"""Column for a digest of all of a file but its step; the name of the score of a function that is called `reward`."""
OUR_COLUMNS = {"rollout_id", "task_id", "env", "model", "family", "split", "hidden_pass"}
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
        "hidden_pass": pa.bool_(),
        **{name: pa.string() for name in MARK},
    }
)


def recognises(record: Any) -> bool:
    """Whether a record has prompt and completion, and a training step or an advantage."""
    return has_keys(record, "prompt completion") and bool({"step", "advantage"} & record.keys())


def of_generation(
    records: Iterator[NumberedRecord | Drop], make_drop: Callable[[int, str, str], Drop]
) -> Iterator[NumberedRecord | Drop]:
    """Yield the rows of a file with a digest of them all without their steps."""
    del make_drop
    held = list(records)
    rows = [{**item[1], "step": None} for item in held if not isinstance(item, Drop) and isinstance(item[1], dict)]
    generation = store.digest(repr(rows))[:12]
    for item in held:
        if isinstance(item, Drop) or not isinstance(item[1], dict):
            yield item
        else:
            yield item[0], item[1] | {GENERATION: generation}


def trajectories(record: Record, origin: Origin) -> Iterator[Trajectory]:
    """Yield the one rollout of a row. The prompt identifies a task, unless a column names it."""
    opening = _messages(record["prompt"], "user")
    completion = record["completion"]
    lead, turns = split_turns(_messages([] if completion is None else completion, "assistant"))
    rewards = {
        name: value
        for name, value in record.items()
        if name not in COLUMNS | OUR_COLUMNS | {GENERATION} and isinstance(value, float | int)
    }
    has_total = REWARD in record and (not rewards or set(MARK) <= record.keys())
    if REWARD in record and not has_total:
        rewards[TOTAL] = record[REWARD]
    scores: dict[str, float | None] = {name: None if value is None else float(value) for name, value in rewards.items()}
    if has_total:
        scores[REWARD] = record[REWARD]
    env = record.get("env") or NAME
    yield Trajectory(
        task_id=record.get("task_id") or f"{env}/{store.digest(record['prompt'])[:12]}",
        env=env,
        opening=[*opening, *lead],
        turns=turns,
        # A prompt that is text was rendered by the chat template: its roles can no longer be told apart with certainty.
        missing={missing.OPENING} if isinstance(record["prompt"], str) else set(),
        own_id=record.get("rollout_id") or f"{record[GENERATION]}:{origin.line}",
        model=record.get("model"),
        family=record.get("family"),
        split=record.get("split"),
        measured=MeasuredSample(scores),
        unscored=has_total,
        resolved=record.get("hidden_pass"),
        error=None if turns else ("empty_completion", Sentence("formats.no-model-message")),
        tools=clean(json_text.loads(record.get("tools") or "[]"), None),
        extra={name: record[name] for name in ("step", "advantage") if name in record} | {"rewards": rewards},
    )


def _messages(value: Any, role: str) -> list[Message]:
    """Return messages without the columns that Parquet fills with null; text as one message of a role."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    # A column of structs has every field in every row: a message without calls has `tool_calls` null.
    return conversation({name: part for name, part in item.items() if part is not None} for item in value)


def files(transcripts: Iterable[ExportedTranscript], dropped: Counter[str]) -> Iterable[File]:
    """Return one table of all rollouts with steps."""

    def rows() -> Iterator[Row]:
        for transcript in transcripts:
            dropped["no_steps"] += not transcript.turns
            if transcript.turns:
                prompt, completion = transcript.chat()
                yield {
                    "step": 0,
                    "prompt": prompt,
                    "completion": completion,
                    "advantage": None,
                    "reward": transcript.rollout["reward"],
                    "model": transcript.rollout["model"],
                    "tools": json.dumps(transcript.tools),
                    "hidden_pass": transcript.rollout["hidden_pass"],
                    **transcript.mark,
                }

    yield File("completions/completions_00000.parquet", lambda file: tables.write_rows(file, SCHEMA, rows()))


READERS = (Reader(NAME, recognises, trajectories, join=of_generation),)
WRITER = Writer(LOST, files)
