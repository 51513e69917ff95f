"""TRL: `completions/completions_00000.parquet`, one rollout a row, prompt and completion as messages.

`step` and `advantage` stand as TRL logs them. Arguments of calls are JSON text, as they differ from tool to tool and a
Parquet column cannot.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from stages.exporters.transcripts import MARK, ExportedTranscript, File, chat
from stages.runs import parquet, store
from stages.runs.records import Row

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
