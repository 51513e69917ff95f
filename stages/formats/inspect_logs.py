"""Inspect logs: `.json` with all samples, or `.eval` archives with one document a sample.

Texts that a log keeps apart (`attachment://`) are put back. A score is a number by Inspect's own rule (C, P, I and N,
yes and no); a score that is no single value is not a reward. What `export inspect` notes in a sample's metadata under
`composer` is read back.

Format read from UKGovernmentBEIS/inspect_ai at 499e6152e, `log/_log.py`, `log/_condense.py` and `scorer/_metric.py`.
"""

import io
import re
import statistics
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from stages import messages
from stages.formats.base import Drop, ImportedTurn, Origin, Record, Trajectory
from stages.formats.messages import message, turns
from stages.formats.transcripts import ExportedTranscript, File, chat, whole
from stages.redaction import redacted_bytes
from stages.rollouts import missing
from stages.runs import store
from stages.runs.records import Row

NAME = "inspect"
MISSING = frozenset({missing.PARSE, missing.ELISION, missing.CALL_IDS})
ATTACHED = "attachment://"
GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
STOPS = {"max_tokens": "length", "model_length": "length", "unknown": None}


def recognises(record: Any) -> bool:
    """A log has its evaluation's description; samples may be missing from it."""
    return (
        isinstance(record, dict)
        and isinstance(record.get("eval"), dict)
        and "task" in record["eval"]
        and "model" in record["eval"]
    )


def trajectories(record: Record, origin: Origin) -> Iterator[Trajectory | Drop]:
    """One rollout a sample and epoch."""
    samples = record.get("samples") or []
    if not samples:
        yield origin.drop("log_without_samples", f"status {record.get('status')}, no samples in the log")
    for sample in samples:
        if isinstance(sample.get("messages"), list):
            yield _rollout(record["eval"], record.get("plan") or {}, sample)
        else:
            yield origin.drop("sample_without_messages", f"sample {sample.get('id')} is a summary")


def _rollout(about: Record, plan: Record, sample: Record) -> Trajectory:
    sample = _whole(sample, sample.get("attachments") or {})
    opening, actions = _conversation(sample)
    _answered(sample, actions)
    scores = sample.get("scores") or ({"score": sample["score"]} if sample.get("score") else {})
    usage = (sample.get("model_usage") or {}).get(about["model"]) or {}
    marked = (sample.get("metadata") or {}).get("composer") or {}
    return Trajectory(
        task_id=marked.get("task_id") or f"{about['task']}/{sample['id']}",
        env=marked.get("env") or about["task"],
        opening=opening,
        turns=actions,
        missing=set(MISSING)
        | (set() if scores else {missing.REWARD})
        | (set() if _ends(actions) else {missing.FINISH}),
        own_id=sample.get("uuid"),
        model=marked["model"] if marked else about["model"],
        statement=marked.get("prompt") or (sample["input"] if isinstance(sample.get("input"), str) else None),
        family=marked.get("family"),
        split=marked.get("split"),
        reward=_reward(about, scores),
        resolved=marked.get("gt_pass"),
        submission=marked.get("submission"),
        terminated_by=marked["terminated_by"] if marked else _terminated_by(sample),
        error=_error(sample, marked, actions),
        sampling=(about.get("model_generate_config") or {}) | (plan.get("config") or {}),
        prompt_tokens=usage.get("input_tokens"),
        completion_tokens=usage.get("output_tokens"),
        wall_s=sample.get("total_time"),
        task_data=marked["task_data"]
        if marked
        else {name: sample[name] for name in ("target", "choices", "metadata") if sample.get(name)},
        tools=marked.get("tools") or [],
        extra={"scores": scores, "epoch": sample.get("epoch")},
    )


def _ends(actions: list[ImportedTurn]) -> bool:
    return any(turn.finish_reason for turn in actions)


def _terminated_by(sample: Record) -> str | None:
    limit = sample.get("limit")
    kind = limit.get("type") if isinstance(limit, dict) else limit
    return kind or next((name for name in ("error", "limit") if sample.get(name)), None)


def _error(sample: Record, marked: Record, actions: list[ImportedTurn]) -> tuple[str, str] | None:
    error = sample.get("error")
    if marked.get("error_type"):
        return marked["error_type"], marked["error"] or ""
    if error:
        return "error", str(error.get("message") if isinstance(error, dict) else error)
    return None if actions else ("no_actions", "the sample holds no message of the model")


def _whole(value: Any, attachments: Record) -> Any:
    """A value with the texts that are kept apart put back; events, which repeat everything, keep their references."""
    if isinstance(value, str) and value.startswith(ATTACHED):
        return attachments.get(value.removeprefix(ATTACHED), value)
    if isinstance(value, dict):
        return {
            key: item if key in ("events", "attachments") else _whole(item, attachments) for key, item in value.items()
        }
    return [_whole(item, attachments) for item in value] if isinstance(value, list) else value


def _conversation(sample: Record) -> tuple[list[Any], list[ImportedTurn]]:
    """Assistant messages that the input brought along belong to the opening."""
    raw = [_with_error(item) for item in sample["messages"]]
    given = [i for i, item in enumerate(raw) if item["role"] == "assistant" and item.get("source") == "input"]
    start = given[-1] + 1 if given else 0
    opening, actions = turns([message(item) for item in raw[start:]])
    answers = [item for item in raw[start:] if item["role"] == "assistant"]
    for turn, item in zip(actions, answers, strict=True):
        errors = [
            call["parse_error"]
            for call in item.get("tool_calls") or []
            if isinstance(call, dict) and call.get("parse_error")
        ]
        turn.parse_error = str(errors[0]) if errors else None
    return [message(item) for item in raw[:start]] + opening, actions


def _with_error(item: Record) -> Record:
    """A tool message with its error in place of content that it has none of."""
    error = item.get("error") or item.get("tool_error")
    if item.get("role") == "tool" and error and not item.get("content"):
        return {**item, "content": error["message"] if isinstance(error, dict) else str(error)}
    return item


def _answered(sample: Record, actions: list[ImportedTurn]) -> None:
    """Why each answer ended and its usage, from the model's events.

    Where those do not match the turns, only the last turn's are known, from the sample's output.
    """
    outputs = [
        e["output"]
        for e in sample.get("events") or []
        if e.get("event") == "model" and not e.get("error") and e.get("output")
    ]
    if len(outputs) != len(actions):
        outputs = [{}] * (len(actions) - 1) + [sample.get("output") or {}] if actions else []
    for turn, output in zip(actions, outputs, strict=True):
        stop: Any = ((output.get("choices") or [{}])[0] or {}).get("stop_reason")
        usage = output.get("usage") or {}
        turn.finish_reason = STOPS.get(stop, stop)
        turn.prompt_tokens, turn.completion_tokens = usage.get("input_tokens"), usage.get("output_tokens")
        turn.latency_s, turn.cost_usd = output.get("time"), usage.get("total_cost")


def _reward(about: Record, scores: Record) -> float | None:
    """The score of the first scorer that the evaluation names."""
    order = [scorer["name"] for scorer in about.get("scorers") or [] if scorer.get("name") in scores] or list(scores)
    value = scores[order[0]].get("value") if order else None
    if isinstance(value, bool | int | float):
        return float(value)
    if isinstance(value, str):
        try:
            return (
                GRADES.get(value, GRADES.get(value.lower()))
                if value in GRADES or value.lower() in GRADES
                else float(value)
            )
        except ValueError:
            return None
    return None


# ---- inspect_logs
# Inspect: one `.eval` archive for each environment and model, a sample a rollout, as its own viewer opens them.
#
# An archive is a zip of a header, summaries of all samples, and one document a sample, written in the order in which
# Inspect's own recorder writes them. What a model was shown stands once in a sample's pool of messages, and its events
# refer to it. Times stand at the epoch: rollouts keep none.
#
# Format read from UKGovernmentBEIS/inspect_ai at 499e6152e, `log/_log.py` and `log/_recorders/eval.py`.

LOST = (
    "token ids and log-probs",
    "when it was played, and how long it took",
    "return codes, commands and what was elided",
    "how the arguments of a call were spaced, and those that are no JSON object",
)
EPOCH = "1970-01-01T00:00:00+00:00"
INSPECT_LOGS_STOPS = {
    "length": "max_tokens",
    "stop": "stop",
    "tool_calls": "tool_calls",
    "content_filter": "content_filter",
}
SAMPLING = ("temperature", "max_tokens", "top_p", "top_k", "seed")
SUMMARY = ("id", "epoch", "input", "target", "scores", "model_usage", "uuid", "metadata")


def files(transcripts: Iterable[ExportedTranscript], dropped: Counter[str]) -> Iterable[File]:
    """One archive for each environment and model; rollouts that failed before they did anything are in it too."""
    del dropped
    groups: dict[tuple[str, str], list[ExportedTranscript]] = {}
    for transcript in transcripts:
        rollout = transcript.rollout
        groups.setdefault((str(rollout["env"]), str(rollout["model"] or "none/unknown")), []).append(transcript)
    names = Counter[str]()
    for (env, model), group in sorted(groups.items()):
        name = re.sub(r"[^\w.-]+", "-", f"{env}_{model}").strip("-")
        names[name] += 1
        suffix = f"-{names[name]}" if names[name] > 1 else ""
        yield whole(f"{name}{suffix}.eval", _archive(env, model, group), len(group))


def _archive(env: str, model: str, group: list[ExportedTranscript]) -> bytes:
    epochs = Counter[str]()
    samples = []
    for transcript in group:
        task_id = transcript.rollout["task_id"]
        epochs[task_id] += 1
        samples.append(_sample(transcript, model, epochs[task_id]))
    start = {"version": 2, "eval": _evaluation(env, model, group, samples), "plan": {"name": "plan", "steps": []}}
    spent = _usage([turn.step for transcript in group for turn in transcript.turns])
    stats = {"started_at": EPOCH, "completed_at": EPOCH, "model_usage": {model: spent}}
    results = {"status": "success", "results": _results(samples), "stats": stats}
    parts: dict[str, object] = {"_journal/start.json": start}
    parts |= {f"samples/{sample['id']}_epoch_{sample['epoch']}.json": sample for sample in samples}
    parts |= {"summaries.json": [_summary(sample) for sample in samples], "header.json": {**start, **results}}
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, part in parts.items():
            # a time of its own would make equal rollouts unequal bytes
            archive.writestr(zipfile.ZipInfo(name), redacted_bytes(store.encode(part)), zipfile.ZIP_DEFLATED)
    return sink.getvalue()


def _evaluation(env: str, model: str, group: list[ExportedTranscript], samples: list[Row]) -> Row:
    key = store.digest([env, model, [transcript.rollout["rollout_id"] for transcript in group]])[:22]
    ids = sorted({sample["id"] for sample in samples})
    shared = [turn.step["sampling_json"] for transcript in group for turn in transcript.turns]
    return {
        "eval_id": key,
        "run_id": key,
        "task_id": key,
        "created": EPOCH,
        "task": env,
        "dataset": {"name": env, "samples": len(ids), "sample_ids": ids, "shuffled": False},
        "model": model,
        "model_generate_config": _sampling(shared[0]) if len(set(shared)) == 1 else {},
        "config": {"epochs": max(sample["epoch"] for sample in samples)},
        "scorers": [{"name": name} for name in sorted({name for sample in samples for name in sample["scores"]})[::-1]],
    }


def _sampling(sampling_json: str | None) -> Row:
    known = orjson.loads(sampling_json or "{}")
    return {name: known[name] for name in SAMPLING if known.get(name) is not None}


def _sample(transcript: ExportedTranscript, model: str, epoch: int) -> Row:
    rollout, task = transcript.rollout, transcript.task
    opening, rest = chat(transcript)
    pool = [
        _message(m, f"{index}", "input" if index < len(opening) else None) for index, m in enumerate(opening + rest)
    ]
    events = _events(transcript, model, len(opening), pool)
    failed, limit = rollout["error_type"] is not None, _limit(transcript)
    told = f"{rollout['error_type']}: {rollout['error'] or ''}"
    marked = {**transcript.mark, "gt_pass": rollout["gt_pass"], "terminated_by": rollout["terminated_by"]}
    marked |= {"task_data": orjson.loads(task["data_json"] or "{}"), "submission": transcript.submission}
    marked |= {name: rollout[name] for name in ("model", "error_type", "error")}
    return {
        "id": rollout["task_id"],
        "epoch": epoch,
        "input": pool[: len(opening)] or task["prompt"] or "",
        "target": "",
        "messages": pool,
        "output": events[-1]["output"] if events else {"model": model, "choices": []},
        "scores": _scores(transcript),
        "metadata": {"composer": {**marked, "prompt": task["prompt"], "tools": transcript.tools}},
        "events": events,
        "events_data": {"messages": pool, "calls": []},
        "model_usage": {model: _usage([turn.step for turn in transcript.turns])},
        "uuid": rollout["rollout_id"],
        **({"error": {"message": told, "traceback": told, "traceback_ansi": told}} if failed else {}),
        **({"limit": limit} if limit else {}),
    }


def _limit(transcript: ExportedTranscript) -> Row | None:
    """A limit that Inspect has a word for, and what the rollout had taken of it."""
    rollout, last = transcript.rollout, transcript.turns[-1].step if transcript.turns else {}
    taken = {
        "max_steps": ("turn", rollout["num_steps"]),
        "context": ("context", last.get("prompt_tokens")),
        "cost": ("cost", rollout["cost_usd"]),
    }
    kind, value = taken.get(rollout["terminated_by"], ("", None))
    return None if value is None else {"type": kind, "limit": value}


def _message(message: Row, number: str, source: str | None) -> Row:
    """A message in Inspect's form; `message` is in OpenAI's."""
    shown: Row = {"id": number, "role": message["role"], "content": message["content"]}
    if message["role"] != "assistant":
        kept = {"tool_call_id": message["tool_call_id"]} if "tool_call_id" in message else {}
        return {**shown, **kept, **({"source": source} if source else {})}
    if message.get("reasoning_content"):
        thought = {"type": "reasoning", "reasoning": message["reasoning_content"]}
        shown["content"] = [thought, {"type": "text", "text": message["content"]}]
    calls = [_call(call) for call in message.get("tool_calls", ())]
    return {**shown, "source": source or "generate", **({"tool_calls": calls} if calls else {})}


def _call(call: Row) -> Row:
    function = call["function"]
    about = {"id": call["id"], "function": function["name"], "type": "function"}
    if messages.is_object(function["arguments"]):
        return {**about, "arguments": orjson.loads(function["arguments"])}
    return {**about, "arguments": {}, "parse_error": f"not the JSON of an object: {function['arguments']}"}


def _events(transcript: ExportedTranscript, model: str, opening: int, pool: list[Row]) -> list[Row]:
    """One model event a step: what it was shown, as a range of the pool, and its answer."""
    found, at = [], opening
    for index, turn in enumerate(transcript.turns):
        stop = INSPECT_LOGS_STOPS.get(turn.step["finish_reason"], "unknown")
        usage = {"usage": _usage([turn.step])} if turn.step["completion_tokens"] is not None else {}
        output = {"model": model, "choices": [{"message": pool[at], "stop_reason": stop}], **usage}
        about = {"event": "model", "uuid": str(index), "timestamp": EPOCH, "working_start": 0, "model": model}
        asked = {"input": [], "input_refs": [[0, at]], "tools": [], "tool_choice": "auto"}
        found.append({**about, **asked, "config": _sampling(turn.step["sampling_json"]), "output": output})
        at += 1 + len(turn.observed)
    return found


def _usage(steps: list[Row]) -> Row:
    """Tokens and cost, as far as they are known."""
    read, written = (sum(step[name] or 0 for step in steps) for name in ("prompt_tokens", "completion_tokens"))
    cost = sum(step["cost_usd"] or 0.0 for step in steps)
    return {"input_tokens": read, "output_tokens": written, "total_tokens": read + written, "total_cost": cost}


def _scores(transcript: ExportedTranscript) -> Row:
    """The reward and what else is known; the viewer shows a column for each."""
    rollout = transcript.rollout
    answer = {"answer": transcript.submission} if transcript.submission else {}
    known: Row = {} if rollout["reward"] is None else {"reward": {"value": rollout["reward"], **answer}}
    flags = {name: rollout[name] for name in ("gt_pass", "hacked") if rollout[name] is not None}
    return known | {name: {"value": bool(value)} for name, value in flags.items()}


def _summary(sample: Row) -> Row:
    """What the viewer's list shows of a sample; Inspect keeps metadata short there."""
    short = {name: sample[name] for name in SUMMARY}
    marked = sample["metadata"]["composer"]
    short["metadata"] = {name: marked[name] for name in ("family", "split") if marked[name] is not None}
    ends = {"error": sample["error"]["message"]} if "error" in sample else {}
    ends |= {"limit": sample["limit"]["type"]} if "limit" in sample else {}
    return {**short, "completed": True, "message_count": len(sample["messages"]), **ends}


def _results(samples: list[Row]) -> Row:
    """The mean of every score, and its standard error as Inspect computes it, over the samples that have it."""
    scores = []
    for name in sorted({name for sample in samples for name in sample["scores"]})[::-1]:
        values = [float(sample["scores"][name]["value"]) for sample in samples if name in sample["scores"]]
        spread = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
        figures = {"mean": statistics.fmean(values), "stderr": spread}
        metrics = {metric: {"name": metric, "value": value} for metric, value in figures.items()}
        counted = {"scored_samples": len(values), "unscored_samples": len(samples) - len(values)}
        scores.append({"name": name, "scorer": name, **counted, "metrics": metrics})
    failed = sum("error" in sample for sample in samples)
    return {"total_samples": len(samples), "completed_samples": len(samples) - failed, "scores": scores}
