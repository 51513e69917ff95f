"""Inspect logs: `.json` with all samples, or `.eval` archives with one document a sample, read and written.

Texts that a log keeps apart (`attachment://`) are put back. A score is a number by Inspect's own rule (C, P, I and N,
yes and no); the parts of a dict or list are scores by their own names, `rubric.accuracy`. A sample that a person
invalidated has no verdict. One that ended in an error and has a score counts as the log counts it: since 0.3.248, and
before where `score_on_error` was set. What the writer notes in a sample's metadata under `composer` is read back.

A log that is tried again repeats the finished samples under their `uuid`, and plays those again that failed or were
invalidated, under another one: the evaluation's `task_id` and the folder are the same.

The writer makes one `.eval` archive for each environment and model, a sample a rollout, as Inspect's viewer opens them:
a zip of a header, summaries of all samples, and one document a sample, in the order in which Inspect's own recorder
writes them. The messages that a model was shown are once in a sample's pool of messages, and its events refer to it.
Times are the epoch: rollouts keep none.

Format read from UKGovernmentBEIS/inspect_ai at 499e6152e, `log/_log.py`, `log/_condense.py`, `log/_recorders/eval.py`
and `scorer/_metric.py`.
"""

import io
import re
import statistics
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

import orjson

from composer_stages.formats.base import FIELDS, Drop, ImportedTurn, Origin, Reader, Record, Trajectory, read_marks
from composer_stages.formats.measurement import (
    REWARD,
    MeasuredLog,
    MeasuredSample,
    Reported,
    ScoreKind,
    State,
    as_settings,
    reason_of,
    told,
    unread,
)
from composer_stages.formats.messages import conversation, split_turns
from composer_stages.formats.transcripts import ExportedTranscript, File, Writer, plain_arguments, small_file
from composer_stages.messages import Message
from composer_stages.redaction import redacted_bytes
from composer_stages.rollouts import missing
from composer_stages.runs import store
from composer_stages.runs.kinds import Row
from composer_stages.words import Sentence

NAME = "inspect"
ATTACHED = "attachment://"
GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
FINISH_REASONS = {"max_tokens": "length", "model_length": "length", "unknown": None}
"""Our finish reason by Inspect's stop reason; any other is the same word."""
EPOCH = "1970-01-01T00:00:00+00:00"
STOP_REASONS = {"length": "max_tokens", "stop": "stop", "tool_calls": "tool_calls", "content_filter": "content_filter"}
SAMPLING = ("temperature", "max_tokens", "top_p", "top_k", "seed")
LIMITS = ("message_limit", "token_limit", "time_limit", "working_limit", "cost_limit", "turn_limit")
"""Settings of an evaluation that end its samples."""
COUNTS_ERRORS = (0, 3, 248)
"""The version from which a score counts although its sample ended in an error."""
VERDICTS = ("hidden_pass", "hacked")
"""What the writer notes as scores beside the reward."""
MEANS = frozenset({"accuracy", "mean"})
"""Metrics that are the mean of the samples' values."""
SHARD = re.compile(r"[^/]+\.shards/[^/]+$")
"""The folder of a part of an evaluation that several workers share."""
SUMMARY = ("id", "epoch", "input", "target", "scores", "model_usage", "uuid", "metadata")


def recognises(record: Any) -> bool:
    """Whether a record is a log: it describes its evaluation; samples may be absent."""
    about = record.get("eval") if isinstance(record, dict) else None
    return isinstance(about, dict) and "task" in about and "model" in about


def trajectories(record: Record, origin: Origin) -> Iterator[Trajectory | Drop]:
    """Yield one rollout a sample and epoch; summaries of samples have no steps."""
    brief = "summaries" in record
    samples = record["summaries"] if brief else record.get("samples") or []
    if not samples:
        # Logs written with `log_samples=False`, and runs that failed before the first sample, have none.
        yield origin.make_drop(
            "log_without_samples", Sentence("formats.log-without-samples", status=record.get("status"))
        )
    for sample in samples:
        if brief:
            sample["messages"] = [{"role": "user", "content": sample["input"]}]
        if isinstance(sample.get("messages"), list):
            trajectory = _rollout(record, sample)
            trajectory.missing |= {missing.STEPS} if brief else set()
            if (task := record["eval"].get("task_id")) and sample.get("epoch") is not None:
                # The number 1 and the text "1" are two ids.
                folder = SHARD.sub("", origin.file.rpartition("/")[0])
                trajectory.measured.attempt = f"{folder}/{task}/{trajectory.model}/{sample['id']!r}/{sample['epoch']}"
            trajectory.log = origin.log(trajectory.model, lambda: _log(record))
            yield trajectory
        else:
            yield origin.make_drop("sample_without_messages", f"sample {sample.get('id')} is a summary")


def _log(record: Record) -> MeasuredLog:
    """Return what a log is of, from its header."""
    about, results = record["eval"], record.get("results") or {}
    config, declared = about.get("config") or {}, about.get("headline_metric") or {}
    reducers = config.get("epochs_reducer") or []
    kinds = {scorer: ScoreKind(scorer, scorer, scorer) for scorer in _scorers(record)}
    reported = list[Reported]()
    for score in results.get("scores") or []:
        scorer, key = str(score.get("scorer") or score["name"]), str(score["name"])
        name = key if key == scorer else f"{scorer}.{key}"
        main = bool(declared) and declared.get("scorer") in (None, scorer) and declared.get("score") in (None, key)
        if name != scorer:
            kinds.pop(scorer, None)
        main = main or (key == REWARD and {str(each["name"]) for each in results["scores"]} <= {REWARD, *VERDICTS})
        kinds[name] = ScoreKind(name, name, scorer, reducer=", ".join(reducers), main=main)
        for metric in (score.get("metrics") or {}).values():
            if (title := str(metric.get("name")).rpartition("/")[2]) in MEANS and not metric.get("group"):
                about_number = {"reducer": score.get("reducer") or "", "count": score.get("scored_samples")}
                reported += told(name, title, metric.get("value"), **about_number)
    # An archive without a header, of an evaluation that runs or was killed, has no status.
    status = record.get("status", "started")
    settings = (about.get("model_generate_config") or {}) | ((record.get("plan") or {}).get("config") or {})
    settings |= {name: config.get(name) for name in LIMITS} | _changed(record.get("config_updates") or [])
    settings |= {f"{role} model": _models(models) for role, models in (about.get("model_roles") or {}).items()}
    options = {str(scorer.get("name")): scorer.get("options") for scorer in about.get("scorers") or []}
    settings |= {f"{name} options": values or None for name, values in options.items()}
    settings |= {"solver": about.get("solver"), "dataset": (about.get("dataset") or {}).get("name")}
    version = str((about.get("packages") or {}).get("inspect_ai") or "")
    reduced = {"reducer": ", ".join(reducers)} if reducers and reducers != ["mean"] else {}
    return MeasuredLog(
        NAME,
        version,
        str(about["task"]),
        str(about.get("task_version") or ""),
        about["model"],
        tuple(kinds.values()),
        as_settings({**about.get("task_args", {}), **settings, **reduced}),
        None if status == "success" else str(status),
        tuple(reported),
    )


def _models(models: Any) -> str:
    return ", ".join(str(each.get("model")) for each in (models if isinstance(models, list) else [models]))


def _changed(updates: Iterable[Record]) -> dict[str, str]:
    """Return the settings that were changed while the evaluation ran, with all their values."""
    values = dict[str, list[str]]()
    for change in (change for update in updates for change in update["changes"]):
        if change.get("config") == "generate" or change["name"] in LIMITS:
            before = values.setdefault(change["name"], [str(change.get("previous"))])
            before.append(before[0] if change.get("cleared") else str(change.get("value")))
    return {name: ", then ".join(of_name) for name, of_name in values.items()}


def _scorers(record: Record) -> list[str]:
    """Return the names under which the scorers of an evaluation, and those run on its log later, are in its samples.

    Packages are left out, and of scorers of one name, as of a list of judges, the second has a 1 behind it, and so on.
    """
    names = list[str]()
    for scorer in record["eval"].get("scorers") or []:
        name = str(scorer.get("name")).rpartition("/")[2]
        others = (f"{name}{at}" for at in count(1))
        names.append(name if name not in names else next(each for each in others if each not in names))
    results = (record.get("results") or {}).get("scores") or []
    return list(dict.fromkeys([*names, *(str(score.get("scorer") or score["name"]) for score in results)]))


def _scores(record: Record, scores: Record) -> dict[str, float | None]:
    """Return the values of a sample by the names of their scores: those of the scorers that the evaluation names."""
    named = [scorer for scorer in _scorers(record) if scorer in scores]
    return {name: number for scorer in named or scores for name, number in _parts(scorer, scores[scorer].get("value"))}


def _parts(scorer: str, value: Any) -> Iterator[tuple[str, float | None]]:
    """Yield the number of a score, or of each of its parts, with its name."""
    if isinstance(value, dict | list):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        yield from ((f"{scorer}.{key}", _number(part)) for key, part in parts)
    else:
        yield scorer, _number(value)


def _before(scores: Record) -> dict[str, float | None]:
    """Return the scores that were edited as they had been: results that were not computed again are of these."""
    edited = {scorer: score["history"][0] for scorer, score in scores.items() if score.get("history")}
    return {
        name: number
        for scorer, first in edited.items()
        if not first.get("provenance")  # one that was added by an edit had been none
        for name, number in _parts(scorer, first.get("value"))
    }


def _counts_errors(about: Record) -> bool:
    """Return whether a score counts in the log although its sample ended in an error."""
    version = re.match(r"(\d+)\.(\d+)\.(\d+)", str((about.get("packages") or {}).get("inspect_ai")))
    is_recent = version is not None and tuple(map(int, version.groups())) >= COUNTS_ERRORS
    return is_recent or bool((about.get("config") or {}).get("score_on_error"))


def _rollout(record: Record, sample: Record) -> Trajectory:
    about, plan = record["eval"], record.get("plan") or {}
    if attachments := sample.get("attachments"):
        sample = _with_attachments(sample, attachments)
    opening, turns = _conversation(sample)
    _add_outputs(sample, turns)
    scores = sample.get("scores") or ({"score": sample["score"]} if sample.get("score") else {})
    # The number 1 and the text "1" are two ids.
    measured = MeasuredSample(
        _scores(record, scores), epoch=sample.get("epoch"), item=repr(sample["id"]), before=_before(scores)
    )
    if all(value is None for value in measured.scores.values()):
        measured.reason = unread({name: score.get("value") for name, score in scores.items()})
    usage = (sample.get("model_usage") or {}).get(about["model"]) or {}
    marked = (sample.get("metadata") or {}).get("composer") or {}
    # The writer noted the type of an error; Inspect's own is a message (text in old logs) and tracebacks.
    failure = sample.get("error")
    error = None
    if marked.get("error_type"):
        error = marked["error_type"], marked["error"] or ""
    elif invalidation := sample.get("invalidation"):
        error = "invalidated", str(invalidation.get("reason") or invalidation.get("author") or "")
        measured.state = State.INVALID
    elif failure:
        error = "error", str(failure.get("message") if isinstance(failure, dict) else failure)
        if _counts_errors(about) and any(value is not None for value in measured.scores.values()):
            measured.state, measured.reason, error = State.SCORED_WITH_ERROR, reason_of(error), None
    # An object with the kind and its number; summaries have the kind alone.
    limit = sample.get("limit")
    limit_type = limit.get("type") if isinstance(limit, dict) else limit
    ended = limit_type or next((name for name in ("error", "limit") if sample.get(name)), None)
    return Trajectory(
        task_id=marked.get("task_id") or f"{about['task']}/{sample['id']}",
        env=marked.get("env") or about["task"],
        opening=opening,
        turns=turns,
        own_id=sample.get("uuid"),
        model=marked["model"] if marked else about["model"],
        statement=marked.get("prompt") or (sample["input"] if isinstance(sample.get("input"), str) else None),
        measured=measured,
        unscored=bool(scores),
        **read_marks(marked),
        terminated_by=marked["terminated_by"] if marked else ended,
        error=error,
        sampling=(about.get("model_generate_config") or {}) | (plan.get("config") or {}),
        prompt_tokens=_tokens_read(usage),
        completion_tokens=usage.get("output_tokens"),
        cost_usd=usage.get("total_cost"),
        wall_s=sample.get("total_time"),
        task_data=marked["task_data"]
        if marked
        else {name: sample[name] for name in ("target", "choices", "metadata") if sample.get(name)},
        tools=marked.get("tools") or [],
        extra={"scores": scores, "epoch": sample.get("epoch")},
    )


def _with_attachments(value: Any, attachments: Record) -> Any:
    """Return a value with its attachments put back; events, which repeat everything, keep their references."""
    if isinstance(value, str) and value.startswith(ATTACHED):
        return attachments.get(value.removeprefix(ATTACHED), value)
    if isinstance(value, dict):
        return {
            key: item if key in ("events", "attachments") else _with_attachments(item, attachments)
            for key, item in value.items()
        }
    return [_with_attachments(item, attachments) for item in value] if isinstance(value, list) else value


def _conversation(sample: Record) -> tuple[list[Message], list[ImportedTurn]]:
    """Return opening and turns; assistant messages of the sample's input belong to the opening."""
    raw: list[Record] = []
    for item in sample["messages"]:
        # A tool that failed has its text in `error` (`tool_error` in older logs) and an empty content.
        error = item.get("error") or item.get("tool_error")
        if item.get("role") == "tool" and error and not item.get("content"):
            item = {**item, "content": error["message"] if isinstance(error, dict) else str(error)}
        raw.append(item)
    # Few-shot examples of the input are messages of the assistant too; `source` tells them from answers.
    examples = [i for i, item in enumerate(raw) if item["role"] == "assistant" and item.get("source") == "input"]
    start = examples[-1] + 1 if examples else 0
    opening, turns = split_turns(conversation(raw[start:]))
    answers = [item for item in raw[start:] if item["role"] == "assistant"]
    for turn, item in zip(turns, answers, strict=True):
        calls = [call for call in item.get("tool_calls") or [] if isinstance(call, dict)]
        turn.parse_error = next((str(call["parse_error"]) for call in calls if call.get("parse_error")), None)
    return conversation(raw[:start]) + opening, turns


def _add_outputs(sample: Record, turns: list[ImportedTurn]) -> None:
    """Add finish reason, usage, time and cost of each answer, from the model's events.

    Where those do not match the turns, only the last turn's are known, from the sample's output.
    """
    outputs = [
        e["output"]
        for e in sample.get("events") or []
        if e.get("event") == "model" and not e.get("error") and e.get("output")
    ]
    if len(outputs) != len(turns):
        outputs = [{}] * (len(turns) - 1) + [sample.get("output") or {}] if turns else []
    for turn, output in zip(turns, outputs, strict=True):
        stop: Any = ((output.get("choices") or [{}])[0] or {}).get("stop_reason")
        usage = output.get("usage") or {}
        turn.finish_reason = FINISH_REASONS.get(stop, stop)
        turn.prompt_tokens, turn.completion_tokens = _tokens_read(usage), usage.get("output_tokens")
        turn.latency_s, turn.cost_usd = output.get("time"), usage.get("total_cost")


def _tokens_read(usage: Record) -> int | None:
    """Return all tokens of a prompt, of which `input_tokens` leaves out those read from a cache or written to one.

    Older versions of Inspect count them there for OpenAI, which the total tells.
    """
    read, written = usage.get("input_tokens"), usage.get("output_tokens") or 0
    cached = sum(usage.get(f"input_tokens_cache_{way}") or 0 for way in ("read", "write"))
    return read + cached if read is not None and read + cached + written == usage.get("total_tokens") else read


def _number(value: Any) -> float | None:
    """Return a score as a number."""
    if isinstance(value, str):
        grade = GRADES.get(value, GRADES.get(value.lower()))
        try:
            return float(value) if grade is None else grade
        except ValueError:
            return None
    return float(value) if isinstance(value, bool | int | float) else None


def files(transcripts: Iterable[ExportedTranscript], dropped: Counter[str]) -> Iterable[File]:
    """Return one archive for each environment and model, also with rollouts that failed before any step."""
    del dropped
    groups: dict[tuple[str, str], list[ExportedTranscript]] = {}
    for transcript in transcripts:
        rollout = transcript.rollout
        groups.setdefault((str(rollout["env"]), str(rollout["model"] or "none/unknown")), []).append(transcript)
    names = store.FolderNames()
    for (env, model), group in sorted(groups.items()):
        yield small_file(f"{names.name(f'{env}_{model}')}.eval", _archive(env, model, group), len(group))


def _archive(env: str, model: str, group: list[ExportedTranscript]) -> bytes:
    epochs = Counter[str]()
    samples = []
    for transcript in group:
        task_id = transcript.rollout["task_id"]
        epochs[task_id] += 1
        samples.append(_sample(transcript, model, epochs[task_id]))
    key = store.digest([env, model, [transcript.rollout["rollout_id"] for transcript in group]])[:22]
    ids = sorted({sample["id"] for sample in samples})
    sampling = [turn.step["sampling_json"] for transcript in group for turn in transcript.turns]
    scorers = sorted({name for sample in samples for name in sample["scores"]})[::-1]
    evaluation = {
        "eval_id": key,
        "run_id": key,
        "task_id": key,
        "created": EPOCH,
        "task": env,
        "dataset": {"name": env, "samples": len(ids), "sample_ids": ids, "shuffled": False},
        "model": model,
        "model_generate_config": _sampling(sampling[0]) if len(set(sampling)) == 1 else {},
        "config": {"epochs": max(sample["epoch"] for sample in samples)},
        "scorers": [{"name": name} for name in scorers],
    }
    start = {"version": 2, "eval": evaluation, "plan": {"name": "plan", "steps": []}}
    spent = _usage([turn.step for transcript in group for turn in transcript.turns])
    stats = {"started_at": EPOCH, "completed_at": EPOCH, "model_usage": {model: spent}}
    results = {"status": "success", "results": _results(samples, scorers), "stats": stats}
    parts: dict[str, object] = {"_journal/start.json": start}
    parts |= {f"samples/{sample['id']}_epoch_{sample['epoch']}.json": sample for sample in samples}
    # Inspect's recorder writes the header last; its reader takes an archive without one for a run that is not over.
    parts |= {"summaries.json": [_summary(sample) for sample in samples], "header.json": {**start, **results}}
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, part in parts.items():
            # Without ZipInfo, each member gets the time of writing, and equal rollouts would give unequal bytes.
            archive.writestr(zipfile.ZipInfo(name), redacted_bytes(store.encode(part)), zipfile.ZIP_DEFLATED)
    return sink.getvalue()


def _sampling(sampling_json: str | None) -> Row:
    sampling = orjson.loads(sampling_json or "{}")
    return {name: sampling[name] for name in SAMPLING if sampling.get(name) is not None}


def _sample(transcript: ExportedTranscript, model: str, epoch: int) -> Row:
    rollout, task = transcript.rollout, transcript.task
    opening, conversation = transcript.chat()
    pool = [
        _pool_message(chat_message, f"{index}", "input" if index < len(opening) else None)
        for index, chat_message in enumerate(opening + conversation)
    ]
    events = _events(transcript, model, len(opening), pool)
    marked = {**transcript.mark, "hidden_pass": rollout["hidden_pass"], "terminated_by": rollout["terminated_by"]}
    marked |= {"task_data": orjson.loads(task["data_json"] or "{}"), "submission": transcript.submission}
    marked |= {name: rollout[name] for name in ("model", "error_type", "error")}
    # Inspect's viewer shows a column for every score.
    answer = {"answer": transcript.submission} if transcript.submission else {}
    scores: Row = {} if rollout["reward"] is None else {"reward": {"value": rollout["reward"], **answer}}
    scores |= {name: {"value": bool(rollout[name])} for name in VERDICTS if rollout[name] is not None}
    sample = {
        "id": rollout["task_id"],
        "epoch": epoch,
        "input": pool[: len(opening)] or task["prompt"] or "",
        "target": "",
        "messages": pool,
        "output": events[-1]["output"] if events else {"model": model, "choices": []},
        "scores": scores,
        "metadata": {"composer": {**marked, "prompt": task["prompt"], "tools": transcript.tools}},
        "events": events,
        "events_data": {"messages": pool, "calls": []},
        "model_usage": {model: _usage([turn.step for turn in transcript.turns])},
        "uuid": rollout["rollout_id"],
    }
    if rollout["error_type"] is not None:
        error = f"{rollout['error_type']}: {rollout['error'] or ''}"
        sample["error"] = {"message": error, "traceback": error, "traceback_ansi": error}
    # A limit that Inspect has a word for, and how much of it the rollout used.
    last = transcript.turns[-1].step if transcript.turns else {}
    limits = {
        "max_steps": ("turn", rollout["num_steps"]),
        "context": ("context", last.get("prompt_tokens")),
        "cost": ("cost", rollout["cost_usd"]),
    }
    kind, used = limits.get(rollout["terminated_by"], ("", None))
    if used is not None:
        sample["limit"] = {"type": kind, "limit": used}
    return sample


def _pool_message(chat_message: Row, number: str, source: str | None) -> Row:
    """Return a message in Inspect's form from one in OpenAI's."""
    pool_message: Row = {"id": number, "role": chat_message["role"], "content": chat_message["content"]}
    if chat_message["role"] != "assistant":
        call_id = {"tool_call_id": chat_message["tool_call_id"]} if "tool_call_id" in chat_message else {}
        return {**pool_message, **call_id, **({"source": source} if source else {})}
    if chat_message.get("reasoning_content"):
        thought = {"type": "reasoning", "reasoning": chat_message["reasoning_content"]}
        pool_message["content"] = [thought, {"type": "text", "text": chat_message["content"]}]
    calls = []
    for call in chat_message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        # Inspect keeps arguments as an object; what the model wrote and cannot be parsed goes into `parse_error`.
        about = {"id": call["id"], "function": name, "type": "function"}
        if (written := plain_arguments(arguments)) is not None:
            calls.append({**about, "arguments": written})
        else:
            calls.append({**about, "arguments": {}, "parse_error": f"no plain object of JSON: {arguments}"})
    return {**pool_message, "source": source or "generate", **({"tool_calls": calls} if calls else {})}


def _events(transcript: ExportedTranscript, model: str, opening: int, pool: list[Row]) -> list[Row]:
    """Return one model event a step: its input, as a range of the pool, and its answer."""
    events, at = [], opening
    for index, turn in enumerate(transcript.turns):
        stop = STOP_REASONS.get(turn.step["finish_reason"], "unknown")
        usage = {"usage": _usage([turn.step])} if turn.step["completion_tokens"] is not None else {}
        output = {"model": model, "choices": [{"message": pool[at], "stop_reason": stop}], **usage}
        about = {"event": "model", "uuid": str(index), "timestamp": EPOCH, "working_start": 0, "model": model}
        request = {"input": [], "input_refs": [[0, at]], "tools": [], "tool_choice": "auto"}
        events.append({**about, **request, "config": _sampling(turn.step["sampling_json"]), "output": output})
        at += 1 + len(turn.observed)
    return events


def _usage(steps: list[Row]) -> Row:
    """Return tokens and cost, as far as they are known."""
    read, written = (sum(step[name] or 0 for step in steps) for name in ("prompt_tokens", "completion_tokens"))
    cost = sum(step["cost_usd"] or 0.0 for step in steps)
    return {"input_tokens": read, "output_tokens": written, "total_tokens": read + written, "total_cost": cost}


def _summary(sample: Row) -> Row:
    """Return a sample's entry in the viewer's list; Inspect keeps metadata short there."""
    short = {name: sample[name] for name in SUMMARY}
    marked = sample["metadata"]["composer"]
    short["metadata"] = {name: marked[name] for name in ("family", "split") if marked[name] is not None}
    short["metadata"]["composer"] = True  # a sample of ours is read in full: its metadata name its task
    ends = {"error": sample["error"]["message"]} if "error" in sample else {}
    ends |= {"limit": sample["limit"]["type"]} if "limit" in sample else {}
    return {**short, "completed": True, "message_count": len(sample["messages"]), **ends}


def _results(samples: list[Row], scorers: list[str]) -> Row:
    """Return the mean of every score, and its standard error as Inspect computes it, over the samples that have it."""
    scores = []
    for name in scorers:
        values = [float(sample["scores"][name]["value"]) for sample in samples if name in sample["scores"]]
        spread = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
        figures = {"mean": statistics.fmean(values), "stderr": spread}
        metrics = {metric: {"name": metric, "value": value} for metric, value in figures.items()}
        counted = {"scored_samples": len(values), "unscored_samples": len(samples) - len(values)}
        scores.append({"name": name, "scorer": name, **counted, "metrics": metrics})
    failed = sum("error" in sample for sample in samples)
    return {"total_samples": len(samples), "completed_samples": len(samples) - failed, "scores": scores}


READERS = (Reader(NAME, recognises, trajectories, frozenset({missing.PARSE})),)
WRITER = Writer(FIELDS[NAME]["lost"], files)
