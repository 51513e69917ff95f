"""verifiers: `results.jsonl` of versions before 0.4, and `traces.jsonl` of 0.4 and PRIME-RL, also written.

Before 0.4 a line is one rollout, and `metadata.json` in the same folder describes the run. The `id` of older lines
identifies neither the problem nor the question, and one prompt may hide several answers, so a task is identified by its
environment, the user's messages and the answer; `compare` tells apart what only has another `example_id`.

Since 0.4 a line is one Episode, or one Trace. A trace is a graph of messages whose leaves are branches (compaction,
sub-agents). Each branch is a rollout, the final one first; an action that several branches share is a step of one of
them only, and context of the others, so that nothing is trained on twice. Token ids are on each message as its delta;
log-probs are rounded to 4 decimals by their writers.

The writer writes one Episode with one Trace a line. It does not know which of the tokens before an answer belong to
which message, so all of them are on the answer that followed. What it notes under `info.composer` is read back.

Formats read from PrimeIntellect-ai/verifiers at a60a606ec, `verifiers/legacy/utils/save_utils.py` and
`verifiers/v1/{trace,episode,graph}.py`, from its recorded runs, and from PrimeIntellect-ai/prime-rl at 559b44772,
`monitors/file.py`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from composer_stages import messages
from composer_stages.formats.base import (
    FIELDS,
    RECORDED_REWARD,
    Drop,
    ImportedTurn,
    Origin,
    Reader,
    Record,
    Trajectory,
    has_keys,
    path_to_root,
    read_marks,
)
from composer_stages.formats.measurement import (
    REWARD,
    Aggregate,
    MeasuredLog,
    MeasuredSample,
    ScoreKind,
    as_settings,
    told,
)
from composer_stages.formats.messages import context, conversation, in_order_of_calls, message, split_turns
from composer_stages.formats.transcripts import ExportedTranscript, File, Writer, json_lines
from composer_stages.messages import Message
from composer_stages.rollouts import missing
from composer_stages.runs import store
from composer_stages.runs.kinds import Row
from composer_stages.words import Sentence

NAME = "verifiers"
RESULT_COLUMNS = {
    *("prompt", "completion", "info", "tool_defs", "trajectory", "answer", "reward"),
    *("error", "error_chain", "long_error_chain"),
}
LIMITS = {"max_turns": "max_steps", "max_output_tokens": "max_tokens", "max_total_tokens": "max_tokens"}
ENDS = {"stop", "length", "tool_calls"}


def is_result(record: Any) -> bool:
    """Whether a record has prompt, completion and reward, and none of the columns that only TRL's logs have."""
    trl_columns = {"advantage", "step", "rollout_id"}
    return has_keys(record, "prompt completion reward") and not trl_columns & record.keys()


def result_trajectories(record: Record, origin: Origin) -> Iterator[Trajectory]:
    """Yield the one rollout of a result.

    An empty completion is a rollout without steps and with an error, whatever reward is recorded with it.
    """
    about = origin.sidecars.description(origin.path)
    # Runs are kept in `ENV--MODEL/ID` or `ENV--MODEL__ID`, where `--` in MODEL stands for the slash of a hub id. The
    # metadata has `env` in older runs and `env_id` in newer ones.
    folders = (origin.path.parent.name, origin.path.parent.parent.name)
    env_of_folder, dashes, suffix = next((name.partition("--") for name in folders if "--" in name), ("", "", ""))
    model_of_folder = suffix.split("__")[0].replace("--", "/") if dashes else None
    env = about.get("env_id") or about.get("env") or env_of_folder or NAME
    opening = _result_messages(record["prompt"], "user")
    lead, turns = split_turns(_result_messages(record["completion"], "assistant"))
    if turns and record.get("is_truncated"):
        turns[-1].finish_reason = "length"
    calls = record.get("trajectory") or []
    if len(calls) == len(turns):  # only some runs keep this column, the calls with their token ids
        for turn, call in zip(turns, calls, strict=True):
            tokens = call.get("tokens") or {}
            turn.prompt_ids = tokens.get("prompt_ids") or None
            turn.completion_ids = tokens.get("completion_ids") or None
            turn.logprobs = tokens.get("completion_logprobs") or None
    # `id` of older runs is no identity: in recorded math-python runs one covers three problems, and three are one
    # problem; in wordle five secret words share one prompt.
    prompt, info, timing = record["prompt"], record.get("info"), record.get("timing") or {}
    question = (
        prompt if isinstance(prompt, str) else [item["content"] for item in prompt or [] if item["role"] == "user"]
    )
    described = {k: v for k, v in info.items() if k != "oai_tools"} if isinstance(info, dict) else info
    task, example = store.digest([env, question, record.get("answer") or described])[:12], record.get("example_id")
    # A failed run may record a reward of 0 with an empty completion, and a failed request an object or a text.
    failure = record.get("error")
    error: tuple[str, str] | None = None if turns else ("empty_completion", Sentence("formats.completion-missing"))
    if isinstance(failure, dict):
        error = str(failure.get("error") or "error"), str(failure.get("message") or failure)
    elif failure:
        error = "error", str(failure)
    usage = record.get("token_usage") or {}
    read, written = usage.get("input_tokens"), usage.get("output_tokens")
    total_ms = timing.get("total_ms", record.get("total_ms"))
    yield Trajectory(
        task_id=f"{env}/{task}",
        env=env,
        opening=[*opening, *lead],
        turns=turns,
        model=about.get("model") or model_of_folder,
        log=origin.log("", lambda: _result_log(env, about)),
        measured=MeasuredSample(
            # Older versions have each of the metrics as a column.
            {
                REWARD: record["reward"],
                **_metrics(
                    record.get("metrics") or {name: record.get(name) for name in about.get("avg_metrics") or ()}
                ),
            },
            item="" if example is None else str(example),
        ),
        unscored=True,
        terminated_by=record.get("stop_condition"),
        error=error,
        sampling=about.get("sampling_args"),
        prompt_tokens=None if read is None else int(read),
        completion_tokens=None if written is None else int(written),
        wall_s=total_ms / 1000 if total_ms else timing.get("total"),
        task_data={name: record[name] for name in ("answer", "info") if record.get(name)},
        tools=record.get("tool_defs") or (info.get("oai_tools") if isinstance(info, dict) else None) or [],
        extra={name: value for name, value in record.items() if name not in RESULT_COLUMNS}
        | ({} if turns or record["reward"] is None else {RECORDED_REWARD: record["reward"]}),
    )


def _metrics(record: Record) -> dict[str, float | None]:
    """Return the metrics of a rollout as scores: what its reward functions gave, and what else was counted."""
    return {name: float(value) for name, value in record.items() if name != REWARD and isinstance(value, int | float)}


def _result_log(env: str, about: Record) -> MeasuredLog:
    """Return what a run is of, from its metadata."""
    examples, rollouts = about.get("num_examples"), about.get("rollouts_per_example")
    # Of all rollouts of the run, of which a file may hold a part.
    count = examples * rollouts if isinstance(examples, int) and isinstance(rollouts, int) else None
    versions, averages = about.get("version_info") or {}, about.get("avg_metrics") or {}
    return MeasuredLog(
        NAME,
        str(versions.get("vf_version") or about.get("version") or ""),
        env,
        str(versions.get("env_version") or ""),
        model=about.get("model"),
        kinds=(ScoreKind(main=True), *(ScoreKind(name, name) for name in averages if name != REWARD)),
        settings=as_settings({**(about.get("sampling_args") or {}), **(about.get("env_args") or {})}),
        reported=(
            *told(REWARD, "avg_reward", about.get("avg_reward"), Aggregate.SAMPLES, count=count),
            *(mean for name in averages for mean in told(name, name, averages[name], Aggregate.SAMPLES, count=count)),
        ),
    )


def _result_messages(value: Any, role: str) -> list[Message]:
    """Return messages, from a list or from the plain text of a base model."""
    if isinstance(value, str):
        return [{"role": role, "content": value}] if value else []
    return conversation(value or [])


@dataclass(frozen=True)
class TraceRun:
    """The fields of an Episode, or of the folder of a bare Trace, that apply to a trace."""

    env: str
    group: str | None
    effective: bool | None


def is_trace(record: Any) -> bool:
    """Whether a record is an Episode, which has traces, or a Trace, which has nodes that hold messages."""
    if not isinstance(record, dict):
        return False
    nodes = record.get("nodes")
    bare = isinstance(nodes, list) and "task" in record and all("message" in node for node in nodes)
    return bare or (isinstance(record.get("traces"), list) and ("task" in record or "env" in record))


def trace_trajectories(record: Record, origin: Origin) -> Iterator[Trajectory | Drop]:
    """Yield one rollout a branch of every trace; an episode that failed before any trace is one without steps."""
    env, folder = record.get("env") or {}, origin.path.parent.name
    named = env.get("name") or env.get("id") or (folder.split("--")[0] if "--" in folder else None)
    run = TraceRun(
        env=named or record["task"].get("type") or NAME,
        group=(record.get("group") or {}).get("id"),
        # PRIME-RL's folders of the rollouts that entered a training batch, and of all.
        effective={"effective": True, "all": False}.get(folder),
    )
    if "traces" not in record:
        yield from _branches(record, run, origin)
    elif record["traces"]:
        seats = [(trace.get("agent") or {}).get("trainable") is not False for trace in record["traces"]]
        for trace, is_trained in zip(record["traces"], seats, strict=True):
            # A judge's or a modelled user's, of which the program counts none; it counts them where all are such.
            if any(seats) and not is_trained and not trace.get("rewards"):
                agent = str(trace["agent"].get("name") or "agent")
                yield origin.make_drop("other_agent", Sentence("formats.other-agent", trace=trace["id"], agent=agent))
                continue
            yield from _branches({**trace, "task": trace.get("task") or record["task"]}, run, origin)
    else:
        yield _trace_rollout(record, run, [], [], own_id=record["id"])


def _branches(trace: Record, run: TraceRun, origin: Origin) -> Iterator[Trajectory | Drop]:
    nodes = trace.get("nodes") or []
    parents = {node.get("parent") for node in nodes}
    leaves = [index for index in range(len(nodes)) if index not in parents]
    calls = {call["node"]: call for call in trace.get("calls") or [] if call.get("node") is not None}
    yielded: set[int] = set()
    if not leaves:
        yield _trace_rollout(trace, run, [], [], own_id=trace["id"])
    # The last leaf is the end of the rollout; others are what compaction or a sub-agent left behind.
    for number, leaf in enumerate([*leaves[-1:], *leaves[:-1]]):
        path = path_to_root(leaf, lambda index: nodes[index].get("parent"), "node")
        opening: list[Message] = []
        turns: list[ImportedTurn] = []
        token_ids: list[int] = []
        ordered = in_order_of_calls(nodes[index]["message"] for index in reversed(path))
        for index, said in zip(reversed(path), ordered, strict=True):
            node = nodes[index]
            if node.get("sampled") and index not in yielded:
                turns.append(_trace_turn(node, token_ids, calls.get(index) or {}))
            else:
                context(opening, turns).append(message(said))
            token_ids = token_ids + (node.get("token_ids") or [])
        own_id = trace["id"] if number == 0 else f"{trace['id']}/{leaf}"
        if turns or number == 0:
            yield _trace_rollout(trace, run, opening, turns, own_id=own_id)
        else:
            detail = Sentence("formats.branch-without-actions", trace=trace["id"], leaf=leaf)
            yield origin.make_drop("branch_without_actions", detail)
        yielded |= {index for index in path if nodes[index].get("sampled")}


def _trace_turn(node: Record, token_ids: list[int], call: Record) -> ImportedTurn:
    """Return the turn of a sampled node, after the `token_ids` of the nodes before it."""
    usage, time = call.get("usage") or {}, call.get("time") or {}
    read = usage.get("prompt_tokens")
    turn = ImportedTurn(
        message(node["message"])["content"],
        finish_reason=call.get("finish_reason"),
        prompt_tokens=None if read is None else read + (usage.get("cached_input_tokens") or 0),
        completion_tokens=usage.get("completion_tokens"),
        cost_usd=usage.get("cost"),
        latency_s=time["end"] - time["start"] if time.get("end") else None,
    )
    ids, mask = node.get("token_ids") or [], node.get("mask") or []
    # Sampled tokens are where the mask is True: before them is what the chat template adds, after them its ending. With
    # a gap between them the answer was not sampled in one piece, and its ids are left out.
    if True in mask and len(ids) == len(mask):
        first, after = mask.index(True), len(mask) - mask[::-1].index(True)
        if all(mask[first:after]):
            turn.prompt_ids, turn.completion_ids = token_ids + ids[:first], ids[first:after]
            turn.logprobs = node.get("logprobs") or None
    return turn


def _trace_rollout(
    trace: Record, run: TraceRun, opening: list[Message], turns: list[ImportedTurn], *, own_id: str
) -> Trajectory:
    task = trace["task"]
    data = task.get("data") or {}
    marked = (trace.get("info") or {}).get("composer") or {}
    key = task.get("key") or task.get("hash") or store.digest(data)[:16]
    rewards, calls = trace.get("rewards") or {}, trace.get("calls") or []
    errors = trace.get("errors") or ([trace["error"]] if trace.get("error") else [])
    error = None
    if trace.get("ok") is False and errors:
        error = str(errors[-1].get("type")), str(errors[-1].get("message"))
    elif trace.get("ok") is False:
        error = "not_ok", str(trace.get("stop_condition") or Sentence("formats.trace-incomplete"))
    # The reward is the weighted sum of what was scored; a bare number counts with weight 1.
    scored = [reward for reward in rewards.values() if reward is not None]
    values = [r["score"] * r.get("weight", 1.0) if isinstance(r, dict) else float(r) for r in scored]
    parts = {
        f"rewards.{name}": None if r is None else float(r["score"] if isinstance(r, dict) else r)
        for name, r in rewards.items()
        if len(rewards) > 1
    }
    model = next((call["model"] for call in calls if call.get("model")), None)
    configured = ((trace.get("agent") or {}).get("config") or {}).get("model")
    return Trajectory(
        task_id=marked.get("task_id") or data.get("instance_id") or f"{run.env}/{key}",
        env=run.env,
        opening=opening,
        turns=turns,
        missing={missing.EXACT_LOGPROBS} if any(turn.logprobs for turn in turns) else set(),
        own_id=own_id,
        model=model or (configured if isinstance(configured, str) else None),
        statement=data["prompt"] if isinstance(data.get("prompt"), str) else None,
        measured=MeasuredSample(
            {REWARD: sum(values) if values else None, **parts, **_metrics(trace.get("metrics") or {})}
            if rewards
            else {}
        ),
        unscored=bool(rewards) or "traces" in trace or "hidden_pass" in marked,
        **read_marks(marked),
        terminated_by=LIMITS.get(str(trace.get("stop_condition")), trace.get("stop_condition")),
        error=error,
        sampling=next((call.get("sampling") for call in calls if call.get("sampling")), None),
        effective=run.effective,
        task_data=data,
        tools=trace.get("tools") or [],
        extra={
            "rewards": rewards,
            "metrics": trace.get("metrics") or {},
            "info": trace.get("info") or {},
            "group": run.group,
        },
    )


def files(transcripts: Iterable[ExportedTranscript], dropped: Counter[str]) -> Iterable[File]:
    """Return `traces.jsonl` with all rollouts, also those that failed before any step."""
    yield json_lines("traces.jsonl", (_episode(transcript, dropped) for transcript in transcripts))


def _episode(transcript: ExportedTranscript, dropped: Counter[str]) -> Row:
    """Return an Episode with one Trace; count in `dropped` if its token ids cannot be stored."""
    is_known = any(turn.prompt is not None for turn in transcript.turns)
    dropped["token_ids_left_out"] += not transcript.has_tokens and is_known
    rollout, task_row = transcript.rollout, transcript.task
    data = {"prompt": task_row["prompt"], **orjson.loads(task_row["data_json"])}
    task = {"type": "Task", "data": data, "key": task_row["task_id"]}
    ok = rollout["error_type"] is None
    errors = [] if ok else [{"type": rollout["error_type"], "message": rollout["error"] or ""}]
    nodes = _nodes(transcript)
    sampled = [index for index, node in enumerate(nodes) if node["sampled"]]
    trace = {
        "version": 1,
        "id": rollout["rollout_id"],
        "verifiers": {"version": "0.4.0"},
        "task": task,
        "agent": {"config": {"model": rollout["model"]}, "name": "agent", "trainable": True},
        "tools": [_tool(tool) for tool in transcript.tools],
        "nodes": nodes,
        "calls": [_call(turn.step, node) for turn, node in zip(transcript.turns, sampled, strict=True)],
        "rewards": {} if rollout["reward"] is None else {"reward": {"score": rollout["reward"], "weight": 1.0}},
        "metrics": {},
        "info": {
            "composer": {**transcript.mark, "hidden_pass": rollout["hidden_pass"], "submission": transcript.submission}
        },
        "is_completed": True,
        "ok": ok,
        "stop_condition": rollout["terminated_by"],
        "errors": errors,
    }
    return {
        "id": f"episode-{rollout['rollout_id']}",
        "env": {"id": rollout["env"]},
        "task": task,
        "ok": ok,
        "errors": errors,
        "group": {"id": rollout["group_id"]},
        "traces": [trace],
    }


def _tool(tool: Row) -> Row:
    """Return a tool as verifiers declares it, from OpenAI's nested or flat form."""
    inner = tool["function"] if isinstance(tool.get("function"), dict) else tool
    return {
        "name": str(inner.get("name") or tool.get("type")),
        "description": inner.get("description") or "",
        "parameters": inner.get("parameters") or inner.get("inputSchema") or {},
    }


def _nodes(transcript: ExportedTranscript) -> list[Row]:
    """Return a chain of messages. Tokens that a state gained are, unsampled, before the answer given in it."""
    nodes, has_tokens = [_node(opening) for opening in transcript.opening], transcript.has_tokens
    for turn in transcript.turns:
        answer = {**_node({"role": "assistant", "content": turn.step["action"]}), "sampled": True}
        if has_tokens:
            gained, sampled = turn.step["prompt_delta_token_ids"], turn.step["completion_token_ids"]
            answer["token_ids"] = [*gained, *sampled]
            answer["mask"] = [False] * len(gained) + [True] * len(sampled)
            answer["logprobs"] = turn.step["logprobs"]
        nodes += [answer, *map(_node, turn.observed)]
    return [node if index == 0 else {"parent": index - 1, **node} for index, node in enumerate(nodes)]


def _node(chat_message: Message) -> Row:
    """Return a message as a node without tokens."""
    role, content = chat_message["role"], chat_message["content"]
    content_fields: Row = {"role": role if role == "system" else "user", "content": content}
    if role == "tool":
        content_fields = {"role": "tool", "tool_call_id": "", "content": content}
    elif role == "assistant":
        spoken = messages.read(content)
        calls = [{"id": f"call_{i}", "name": c.name, "arguments": c.arguments} for i, c in enumerate(spoken.calls)]
        thought = {} if spoken.reasoning is None else {"reasoning_content": spoken.reasoning}
        content_fields = {
            "role": role,
            "content": spoken.content,
            **thought,
            **({"tool_calls": calls} if calls else {}),
        }
    return {"message": content_fields, "sampled": False, "token_ids": [], "mask": [], "logprobs": []}


def _call(step: Row, node: int) -> Row:
    """Return the call of an answer: model, finish reason and usage, as far as recorded."""
    fields = {"node": node, "model": step["model"], "sampling": orjson.loads(step["sampling_json"] or "null")}
    fields["finish_reason"] = step["finish_reason"] if step["finish_reason"] in ENDS else None
    if step["prompt_tokens"] is not None and step["completion_tokens"] is not None:
        usage = {name: step[name] for name in ("prompt_tokens", "completion_tokens")}
        fields["usage"] = {**usage, "cost": step["cost_usd"]}
    return {name: value for name, value in fields.items() if value is not None}


READERS = (Reader(NAME, is_trace, trace_trajectories), Reader(NAME, is_result, result_trajectories))
WRITER = Writer(FIELDS[NAME]["lost"], files)
