"""Inspect: one `.eval` archive for each environment and model, a sample a rollout, as its own viewer opens them.

An archive is a zip of a header, summaries of all samples, and one document a sample, written in the order in which
Inspect's own recorder writes them. What a model was shown stands once in a sample's pool of messages, and its events
refer to it. Times stand at the epoch: rollouts keep none.

Format read from UKGovernmentBEIS/inspect_ai at 499e6152e, `log/_log.py` and `log/_recorders/eval.py`.
"""

import io
import re
import statistics
import zipfile
from collections import Counter
from collections.abc import Iterable

import orjson

from stages import messages
from stages.exporters.transcripts import ExportedTranscript, File, chat, whole
from stages.redaction import redacted_bytes
from stages.runs import store
from stages.runs.records import Row

LOST = (
    "token ids and log-probs",
    "when it was played, and how long it took",
    "return codes, commands and what was elided",
    "how the arguments of a call were spaced, and those that are no JSON object",
)
EPOCH = "1970-01-01T00:00:00+00:00"
STOPS = {"length": "max_tokens", "stop": "stop", "tool_calls": "tool_calls", "content_filter": "content_filter"}
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
        stop = STOPS.get(turn.step["finish_reason"], "unknown")
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
