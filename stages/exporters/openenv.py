"""OpenEnv: `results.jsonl` as `openenv collect` writes it, and `captured_traces.jsonl` where token ids are known.

A line of the latter is a TrainingTrace beside its episode's id and reward.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate

import orjson

from stages import messages
from stages.exporters.transcripts import ExportedTranscript, File, chat, json_lines
from stages.runs.records import Row

LOST = (
    "results.jsonl: token ids, log-probs, finish reasons, costs and times",
    "captured_traces.jsonl: what was observed after the last action, the task's own data, costs and times",
    "return codes, commands and errors",
)


def files(transcripts: Iterable[ExportedTranscript], dropped: Counter[str]) -> Iterable[File]:
    """Traces first, so that who reads the whole folder meets the richer record of an episode before the plainer one."""
    acted = (transcript for transcript in transcripts if transcript.turns)
    if any(transcript.has_tokens for transcript in acted):
        yield json_lines("captured_traces.jsonl", (_captured(t) for t in transcripts if t.turns and t.has_tokens))

    def episodes() -> Iterator[Row]:
        for transcript in transcripts:
            dropped["no_steps"] += not transcript.turns
            if transcript.turns:
                dropped["no_tokens_for_a_training_trace"] += not transcript.has_tokens
                yield _episode(transcript)

    yield json_lines("results.jsonl", episodes())


def _known(transcript: ExportedTranscript) -> Row:
    rollout = transcript.rollout
    fields = {"model": rollout["model"], "resolved": rollout["gt_pass"], "terminated_by": rollout["terminated_by"]}
    return {**transcript.mark, **fields, "submission": transcript.submission}


def _episode(transcript: ExportedTranscript) -> Row:
    opening, rest = chat(transcript)
    return {
        "episode_id": transcript.rollout["rollout_id"],
        "messages": [*opening, *rest],
        "reward": transcript.rollout["reward"],
        "done": True,
        "tool_trace": _tool_trace(transcript),
        "metrics": {"turns": len(transcript.turns)},
        "verify_metrics": {},
        "artifacts": {},
        "task": None,
        "extra": {**_known(transcript), "tools": transcript.tools},
    }


def _tool_trace(transcript: ExportedTranscript) -> list[Row]:
    """Every call that got an answer of its own, with that answer."""
    traced = []
    for turn in transcript.turns:
        shown = [message["content"] for message in turn.observed if message["role"] == "tool"]
        for call, data in zip(messages.read(turn.step["action"]).calls, shown, strict=False):
            arguments = orjson.loads(call.arguments) if messages.is_object(call.arguments) else {"_": call.arguments}
            result = {"data": data, "done": False, "metadata": {}, "error": None}
            traced.append({"tool_name": call.name, "arguments": arguments, "result": result})
    return traced


def _captured(transcript: ExportedTranscript) -> Row:
    opening, rest = chat(transcript)
    sent = list(accumulate(rest, lambda before, message: [*before, message], initial=opening))
    starts = [index for index, message in enumerate(rest) if message["role"] == "assistant"]
    starts = starts[: len(transcript.turns)]
    tools = transcript.tools or None
    turns = [_turn(transcript, i, sent[start], rest[start], tools) for i, start in enumerate(starts)]
    fields = {"episode_id": transcript.rollout["rollout_id"], "reward": transcript.rollout["reward"]}
    return {**fields, **_known(transcript), "trace": {"schema_version": 1, "turns": turns}}


def _turn(transcript: ExportedTranscript, index: int, sent: list[Row], reply: Row, tools: list[Row] | None) -> Row:
    turn = transcript.turns[index]
    prompt, sampled = turn.prompt or [], turn.step["completion_token_ids"]
    sampling = orjson.loads(turn.step["sampling_json"] or "{}")
    return {
        "node_id": f"{transcript.rollout['rollout_id']}/{index}",
        "prompt_token_ids": prompt,
        "completion_token_ids": sampled,
        "per_token_logps": turn.step["logprobs"],
        "loss_mask": [0] * len(prompt) + [1] * len(sampled),
        "request": {"messages": sent, "tools": tools},
        "response": {"choices": [{"message": reply, "finish_reason": turn.step["finish_reason"]}]},
        "metadata": {"model": turn.step["model"], "sampling_params": sampling, "index": index},
    }
