"""OpenHands `output.jsonl`: one rollout a line.

Its history holds events of version 0 or 1, pairs of events (2024), or flat events (resolver). The conversation is what
the model was sent and what it answered, as far as events record it: where an event carries the model's own reply
(tool_call_metadata), that reply is the action; else the thought and the event's arguments are. Actions of one reply
(parallel calls) are one turn. Events that no model was shown are left out.

Format read from All-Hands-AI/OpenHands `evaluation/utils/shared.py` and `openhands/events/serialization`, and from
OpenHands/software-agent-sdk `openhands/sdk/event` at their states of 2025-11 and 2026-08.
"""

import json
from collections.abc import Iterable, Iterator
from math import isfinite
from typing import Any

from composer_stages.formats.base import FIELDS, INSTANCE, ImportedTurn, Origin, Reader, Record, Trajectory
from composer_stages.formats.measurement import MeasuredSample, State, reason_of, unread
from composer_stages.formats.messages import arguments_text, call, context, message, spoken, text
from composer_stages.formats.reports import stem
from composer_stages.messages import Message, MessageParts, ToolCall, write
from composer_stages.rollouts import missing
from composer_stages.runs import store
from composer_stages.words import Sentence

NAME = "openhands"
MISSING = frozenset({missing.PARSE, missing.OPENING})
OF_A_RUN = {"test_result", "git_patch", "instruction", "instance_id", "metadata", "metrics"}
HARNESS_FAILURES = ("error_eval", "test_timeout")
NAMES: dict[str, Any] = FIELDS["openhands"]


def recognises(record: Any) -> bool:
    """Whether a record has a history of events (or pairs of them) and fields of an evaluation run, or failed before."""
    if not isinstance(record, dict):
        return False
    history = record.get("history")
    if history is None:
        return {"instance_id", "test_result"} <= record.keys() and not {"instruction", "error"}.isdisjoint(record)
    if not isinstance(history, list) or not OF_A_RUN & record.keys():
        return False
    return all(isinstance(event, list) or (isinstance(event, dict) and "role" not in event) for event in history)


def trajectories(record: Record, origin: Origin) -> Iterator[Trajectory]:
    """Yield the one rollout of a record. Without history it is an instance that failed before the agent began."""
    issue, result = record.get("issue") or {}, record.get("test_result") or {}
    row = record["instance"] if isinstance(record.get("instance"), dict) else {}
    of_issue = f"{issue['owner']}/{issue['repo']}#{issue['number']}" if issue else None
    ids = (record.get("instance_id"), record.get("id"), row.get("instance_id"), of_issue)
    instance = next((str(name) for name in ids if name is not None), None)
    # Rows of SWE-bench have `instance_id`, other data sets `id`, the resolver an issue of GitHub.
    is_instance = bool(INSTANCE.fullmatch(instance or ""))
    about, metrics = record.get("metadata") or {}, record.get("metrics") or {}
    opening, turns = _conversation(record.get("history") or [], record.get("instruction"))
    # Reward and verdict are from the tests, in the record or a report; the resolver's own opinion is neither.
    report = record.get("report") or result.get("report") or {}
    resolved = report.get("resolved") if isinstance(report, dict) else None
    score, unreadable = _verdict(result) if resolved is None else (None, "")
    # The harness counts what it could not evaluate as unresolved, and what it evaluated whatever ended the agent, as a
    # limit of its steps does.
    ended = ("error", str(record["error"])) if record.get("error") else None
    failures = [name for name in HARNESS_FAILURES if isinstance(report, dict) and report.get(name)]
    if ended and turns and (resolved is not None or score is not None):
        failures, ended = [*failures, reason_of(ended)], None
    broken = MeasuredSample(state=State.SCORED_WITH_ERROR, reason=failures[0]) if failures else None
    usage = metrics.get("accumulated_token_usage") or {}
    # OpenHands writes `output.jsonl`; a file of another name is taken to be named after its data set.
    file_env = stem(origin.path) if stem(origin.path) != "output" else NAME
    tested = {k: v for k, v in result.items() if k != "git_patch"}
    summary: Record = {
        name: record[name] for name in ("success", "result_explanation", "final_message") if name in record
    }
    yield Trajectory(
        task_id=instance or f"{NAME}/{store.digest(record.get('instruction'))[:12]}",
        env="" if is_instance else str(about.get("dataset") or file_env),
        opening=opening,
        turns=turns,
        model=(about.get("llm_config") or about.get("llm") or {}).get("model") or about.get("model_name"),
        statement=row.get("problem_statement") or issue.get("body") or None,
        measured=broken or MeasuredSample(reason=unreadable),
        reward=score,
        resolved=None if resolved is None else bool(resolved),
        submission=result.get("git_patch", record.get("git_patch")),
        terminated_by=turns[-1].finish_reason if turns and turns[-1].finish_reason == "length" else None,
        error=ended,
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=usage.get("completion_tokens"),
        cost_usd=metrics.get("accumulated_cost"),
        extra={"agent": about.get("agent_class") or NAME, "test_result": tested, **summary},
    )


def _verdict(result: Record) -> tuple[float | None, str]:
    """Return the score of a benchmark's tests; None and what stands there where no benchmark known here has it.

    Names by the benchmarks' `run_infer.py` at OpenHands 0.62 and in OpenHands/benchmarks at 2026-08.
    """
    inner = result.get("eval_result")
    verdicts = {**inner, **result} if isinstance(inner, dict) else result
    named = {name: verdicts[name] for name in NAMES["passed"] if verdicts.get(name) is not None}
    for value in named.values():
        if isinstance(value, int | float) and isfinite(value):
            return float(value), ""
    of_checkpoints = result.get("final_score")
    if isinstance(of_checkpoints, dict) and (total := of_checkpoints.get("total")):
        return of_checkpoints["result"] / total, ""
    if not named and isinstance(result.get("exit_code"), int):  # of aider's tests
        return float(result["exit_code"] == 0), ""
    others = [name for name in result if name not in NAMES["no_verdicts"]]
    return None, unread(named) or (Sentence("formats.no-known-verdict", keys=others) if others else "")


def _conversation(history: Iterable[Any], instruction: str | None) -> tuple[list[Message], list[ImportedTurn]]:
    """Return opening messages and turns; without an opening event the instruction is the opening."""
    opening: list[Message] = []
    turns: list[ImportedTurn] = []
    replies: list[str | None] = []
    # Histories of 2024 hold pairs (action, observation) where later ones hold single events.
    events = [event for item in history for event in (item if isinstance(item, list) else [item])]
    for index, event in enumerate(events):
        if index == 0 and event.get("action") == "message" and "source" not in event:
            event = {**event, "source": "user"}  # flat histories name no source; the first message is the user's
        response = (event.get("tool_call_metadata") or {}).get("model_response") or {}
        # Actions with the same id are calls of one reply.
        reply_id = event.get("llm_response_id") or response.get("id")
        if (answer := _answer(event, response)) is not None:
            if turns and reply_id is not None and replies[-1] == reply_id:
                # A reply that each of its events carries is there already.
                if turns[-1].action != write(answer) and not answer.content:
                    turns[-1].action += "\n" + write(MessageParts("", answer.calls))
                continue
            usage, choice = response.get("usage") or {}, (response.get("choices") or [{}])[0]
            command = (event.get("args") or event).get("command") if event.get("action") == "run" else None
            turns.append(
                ImportedTurn(
                    write(answer),
                    commands=[command] if isinstance(command, str) else None,
                    finish_reason=choice.get("finish_reason"),
                    prompt_tokens=usage.get("prompt_tokens"),
                    completion_tokens=usage.get("completion_tokens"),
                )
            )
            replies.append(reply_id)
        elif (observed := _observed(event)) is not None:
            context(opening, turns).append(observed)
            # The exit code is on the observation (version 1), on the event (resolver), or in its extras (version 0,
            # later versions of which have it in the metadata there). -1 stands for a command that has not ended.
            if turns:
                details = event["observation"] if isinstance(event.get("observation"), dict) else event
                extras = details.get("extras") or {}
                code = details.get(
                    "exit_code", extras.get("exit_code", (extras.get("metadata") or {}).get("exit_code"))
                )
                turns[-1].returncode = code if isinstance(code, int) and code != -1 else turns[-1].returncode
    if instruction and not any(item["role"] == "user" for item in opening):
        opening.append({"role": "user", "content": instruction})
    return opening, turns


def _answer(event: Record, response: Record) -> MessageParts | None:
    """Return the parts of the model's message in an event; None when the event is not an action of the agent."""
    kind = event.get("kind")
    if kind == "ActionEvent":
        thought = text(event.get("thought")) if event.get("thought") else ""
        return MessageParts(thought, (call(event["tool_call"]),), event.get("reasoning_content") or None)
    if kind == "MessageEvent" and (event.get("llm_message") or {}).get("role") == "assistant":
        return spoken(event["llm_message"])
    name = event.get("action")
    if (
        kind
        or not isinstance(name, str)
        or name in NAMES["unseen"]
        or name == "system"
        or event.get("source") == "user"
    ):
        return None
    if response.get("choices"):
        return spoken({"role": "assistant", **response["choices"][0]["message"]})
    # The reply rebuilt from the event: the thought, and the action as a call; a message is its content alone.
    arguments = event["args"] if isinstance(event.get("args"), dict) else event
    if name == "message":
        return MessageParts(str(arguments.get("content") or ""))
    thought = arguments.get("thought") or ""
    fields = {key: value for key, value in arguments.items() if key not in NAMES["event_fields"]}
    content = thought if isinstance(thought, str) else json.dumps(thought)
    return MessageParts(content, (ToolCall(name, arguments_text(fields)),))


def _observed(event: Record) -> Message | None:
    """Return the message of an event that the model saw, None if it did not see the event."""
    kind = event.get("kind")
    if kind == "SystemPromptEvent":
        return {"role": "system", "content": text(event.get("system_prompt"))}
    if kind == "MessageEvent":
        content = event["llm_message"].get("content") or []
        parts = content if isinstance(content, list) else [content]
        return message({**event["llm_message"], "content": [*parts, *(event.get("extended_content") or [])]})
    if kind in ("ObservationEvent", "AgentErrorEvent", "UserRejectObservation"):
        result = event.get("observation") or event.get("error") or event.get("rejection_reason")
        if not isinstance(result, dict):
            return {"role": "tool", "content": str(result)}
        # The content of an observation is parts or plain text, under a name that differs by tool.
        content = next((result[name] for name in ("content", "output", "error", "message") if result.get(name)), None)
        if content is None:
            content = json.dumps({key: value for key, value in result.items() if key != "kind"})
        return {"role": "tool", "content": text(content)}
    if kind or event.get("action") in NAMES["unseen"] or event.get("observation") in NAMES["unseen"]:
        return None
    # Version 0 and the resolver's flat events: `args` holds the fields of an action, or the event itself does.
    fields = event.get("args") or event
    if event.get("action") == "system":
        return {"role": "system", "content": str(fields.get("content") or event.get("message") or "")}
    if event.get("action") == "message":
        return {"role": "user", "content": str(fields.get("content") or "")}
    if "observation" in event:
        # Without function calling, version 0 sends what a command printed as a message of the user.
        role = "tool" if event.get("tool_call_metadata") else "user"
        return {"role": role, "content": str(event.get("content") or "")}
    return None


READERS = (Reader(NAME, recognises, trajectories, MISSING),)
