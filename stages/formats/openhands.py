"""OpenHands `output.jsonl`: one rollout a line.

Its history holds events of version 0 or 1, pairs of events (2024), or flat events (resolver).

Format read from All-Hands-AI/OpenHands `evaluation/utils/shared.py` and `openhands/events/serialization`, and from
OpenHands/software-agent-sdk `openhands/sdk/event` at their states of 2025-11 and 2026-08.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from stages.formats.base import INSTANCE, ImportedTurn, Origin, Reader, Record, Trajectory, family_of
from stages.formats.messages import arguments_text, call, message, spoken, text
from stages.formats.reports import stem
from stages.messages import Message, Spoken, ToolCall, write
from stages.rollouts import missing
from stages.runs import store

# ---- openhands_events
# OpenHands events as a conversation: what the model was sent and what it answered, as far as events tell it.
#
# Where an event carries the model's own reply (tool_call_metadata), that reply is the action; else the thought and the
# event's arguments are. Actions of one reply (parallel calls) are one turn. Events that no model ever saw are left
# out.

UNSEEN = {
    "recall",
    "change_agent_state",
    "agent_state_changed",
    "condensation",
    "condensation_request",
    "null",
    "task_tracking",
}
OF_THE_EVENT = {
    *(
        "thought",
        "keep_prompt",
        "is_confirmed",
        "confirmation_state",
        "action_risk",
        "security_risk",
        "kernel_init_code",
    ),
    *(
        "wait_for_response",
        "images_urls",
        "image_urls",
        "hidden",
        "translated_ipython_code",
        "include_extra",
        "blocking",
        "action",
    ),
    *("id", "timestamp", "source", "message", "cause", "is_input", "is_static", "file_urls", "impl_source"),
}


def conversation(history: Iterable[Any], instruction: str | None) -> tuple[list[Message], list[ImportedTurn]]:
    """Opening messages and turns; the instruction opens where no event does."""
    opening: list[Message] = []
    turns: list[ImportedTurn] = []
    replies: list[str | None] = []
    for event in _flat(history):
        reply = _reply_id(event)
        if (answer := _answer(event)) is not None:
            if turns and reply is not None and replies[-1] == reply:
                _merge(turns[-1], answer)
            else:
                turns.append(_turn(event, answer))
                replies.append(reply)
        elif (observed := _observed(event)) is not None:
            (turns[-1].observed if turns else opening).append(observed)
            if turns:
                turns[-1].returncode = _exit_code(event) if _exit_code(event) is not None else turns[-1].returncode
    if instruction and not any(item["role"] == "user" for item in opening):
        opening.append({"role": "user", "content": instruction})
    return opening, turns


def _flat(history: Iterable[Any]) -> Iterable[Record]:
    """Events in order, those of pairs one after the other. The first message of a flat history is the user's."""
    first = True
    for item in history:
        for event in item if isinstance(item, list) else [item]:
            unsigned = event.get("action") == "message" and "source" not in event
            yield {**event, "source": "user"} if unsigned and first else event
            first = False


def _reply_id(event: Record) -> str | None:
    """What tells actions of one reply of the model from those of another."""
    reply = (event.get("tool_call_metadata") or {}).get("model_response") or {}
    return event.get("llm_response_id") or reply.get("id")


def _answer(event: Record) -> Spoken | None:
    """What the model said in an event; None when the event is not an action of the agent."""
    kind = event.get("kind")
    if kind == "ActionEvent":
        thought = text(event.get("thought")) if event.get("thought") else ""
        return Spoken(thought, (call(event["tool_call"]),), event.get("reasoning_content") or None)
    if kind == "MessageEvent" and (event.get("llm_message") or {}).get("role") == "assistant":
        return spoken(event["llm_message"])
    name = event.get("action")
    if kind or not isinstance(name, str) or name in UNSEEN or name == "system" or event.get("source") == "user":
        return None
    reply = (event.get("tool_call_metadata") or {}).get("model_response") or {}
    if reply.get("choices"):
        return spoken({"role": "assistant", **reply["choices"][0]["message"]})
    arguments = event.get("args")
    return _from_arguments(name, arguments if isinstance(arguments, dict) else event)


def _from_arguments(name: str, arguments: Record) -> Spoken:
    """A reply rebuilt from an event: the thought, and the action as a call; a message is its content alone."""
    if name == "message":
        return Spoken(str(arguments.get("content") or ""))
    thought = arguments.get("thought") or ""
    kept = {key: value for key, value in arguments.items() if key not in OF_THE_EVENT}
    return Spoken(thought if isinstance(thought, str) else json.dumps(thought), (ToolCall(name, arguments_text(kept)),))


def _turn(event: Record, answer: Spoken) -> ImportedTurn:
    reply = (event.get("tool_call_metadata") or {}).get("model_response") or {}
    usage, choice = reply.get("usage") or {}, (reply.get("choices") or [{}])[0]
    command = (event.get("args") or event).get("command") if event.get("action") == "run" else None
    return ImportedTurn(
        write(answer),
        commands=[command] if isinstance(command, str) else None,
        finish_reason=choice.get("finish_reason"),
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=usage.get("completion_tokens"),
    )


def _merge(turn: ImportedTurn, answer: Spoken) -> None:
    """A further call of the same reply. A reply that is carried whole on each of its events is already there."""
    if turn.action != write(answer) and not answer.content:
        turn.action += "\n" + write(Spoken("", answer.calls))


def _observed(event: Record) -> Message | None:
    """What an event showed the model; None when it showed nothing."""
    kind = event.get("kind")
    if kind == "SystemPromptEvent":
        return {"role": "system", "content": text(event.get("system_prompt"))}
    if kind == "MessageEvent":
        return message(
            {**event["llm_message"], "content": [*_parts(event["llm_message"]), *(event.get("extended_content") or [])]}
        )
    if kind in ("ObservationEvent", "AgentErrorEvent", "UserRejectObservation"):
        shown = event.get("observation") or event.get("error") or event.get("rejection_reason")
        return {"role": "tool", "content": _shown(shown)}
    if kind or event.get("action") in UNSEEN or event.get("observation") in UNSEEN:
        return None
    return _observed_v0(event)


def _observed_v0(event: Record) -> Message | None:
    """The same for version 0."""
    if event.get("action") == "system":
        return {
            "role": "system",
            "content": str((event.get("args") or event).get("content") or event.get("message") or ""),
        }
    if event.get("action") == "message":
        return {"role": "user", "content": str((event.get("args") or event).get("content") or "")}
    if "observation" in event:
        role = "tool" if event.get("tool_call_metadata") else "user"
        return {"role": role, "content": str(event.get("content") or "")}
    return None


def _parts(raw: Record) -> list[Any]:
    content = raw.get("content") or []
    return content if isinstance(content, list) else [content]


def _shown(observation: Any) -> str:
    """The text of an observation, whose content may be parts or plain, under names that differ by tool."""
    if not isinstance(observation, dict):
        return str(observation)
    for name in ("content", "output", "error", "message"):
        if observation.get(name):
            return text(observation[name])
    return json.dumps({key: value for key, value in observation.items() if key != "kind"})


def _exit_code(event: Record) -> int | None:
    observation = event.get("observation")
    shown = observation if isinstance(observation, dict) else event
    extras = shown.get("extras") or {}
    code = shown.get("exit_code", extras.get("exit_code", (extras.get("metadata") or {}).get("exit_code")))
    return code if isinstance(code, int) and code != -1 else None


NAME = "openhands"
MISSING = frozenset({missing.PARSE, missing.ELISION, missing.CALL_IDS, missing.OPENING})
OF_A_RUN = {"test_result", "git_patch", "instruction", "instance_id", "metadata", "metrics"}


def recognises(record: Any) -> bool:
    """A history of events (or pairs of them) and something that belongs to a run of an evaluation."""
    history = record.get("history") if isinstance(record, dict) else None
    if not isinstance(history, list) or not OF_A_RUN & record.keys():
        return (
            history is None
            and isinstance(record, dict)
            and {"instance_id", "test_result", "instruction"} <= record.keys()
        )
    return all(
        isinstance(event, list | dict) and not (isinstance(event, dict) and "role" in event) for event in history
    )


def trajectories(record: Record, origin: Origin) -> Iterator[Trajectory]:
    """One rollout. A record without history is an instance that failed before the agent began."""
    instance, result = _instance(record), record.get("test_result") or {}
    about, metrics = record.get("metadata") or {}, record.get("metrics") or {}
    opening, turns = conversation(record.get("history") or [], record.get("instruction"))
    reward, resolved = _judged(record, result, origin, instance)
    usage = metrics.get("accumulated_token_usage") or {}
    named = bool(INSTANCE.fullmatch(instance or ""))
    yield Trajectory(
        task_id=instance or f"{NAME}/{store.digest(record.get('instruction'))[:12]}",
        env="swe-bench" if named else _env(about, origin),
        opening=opening,
        turns=turns,
        missing=set(MISSING) | _unsaid(turns, reward),
        model=(about.get("llm_config") or about.get("llm") or {}).get("model") or about.get("model_name"),
        statement=_statement(record),
        family=family_of(instance) if named and instance else None,
        reward=reward,
        resolved=resolved,
        submission=result.get("git_patch", record.get("git_patch")),
        terminated_by=turns[-1].finish_reason if turns and turns[-1].finish_reason == "length" else None,
        error=_error(record, turns),
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=usage.get("completion_tokens"),
        cost_usd=metrics.get("accumulated_cost"),
        extra={
            "agent": about.get("agent_class") or NAME,
            "test_result": {k: v for k, v in result.items() if k != "git_patch"},
        }
        | {name: record[name] for name in ("success", "result_explanation", "final_message") if name in record},
    )


def _instance(record: Record) -> str | None:
    inside, issue = _inside(record), record.get("issue") or {}
    named = f"{issue['owner']}/{issue['repo']}#{issue['number']}" if issue else None
    name = next(
        (v for v in (record.get("instance_id"), record.get("id"), inside.get("instance_id"), named) if v is not None),
        None,
    )
    return None if name is None else str(name)


def _inside(record: Record) -> Record:
    """The instance's row of the dataset, where the record holds it."""
    instance = record.get("instance")
    return instance if isinstance(instance, dict) else {}


def _env(about: Record, origin: Origin) -> str:
    return str(about.get("dataset") or (stem(origin.path) if stem(origin.path) != "output" else NAME))


def _statement(record: Record) -> str | None:
    return _inside(record).get("problem_statement") or (record.get("issue") or {}).get("body") or None


def _judged(record: Record, result: Record, origin: Origin, instance: str | None) -> tuple[float | None, bool | None]:
    """Reward and verdict from the tests, in the record or a report beside it; the resolver's own opinion is none."""
    report = record.get("report") or result.get("report") or {}
    resolved = report.get("resolved") if isinstance(report, dict) else None
    if resolved is None and (verdict := origin.sidecars.verdict(origin.path, instance)):
        resolved = verdict.resolved
    if resolved is None and isinstance(result.get("result"), bool):
        return float(result["result"]), None
    return (None, None) if resolved is None else (float(resolved), bool(resolved))


def _unsaid(turns: list[ImportedTurn], reward: float | None) -> set[missing.Fact]:
    unjudged = {missing.REWARD} if reward is None else set()
    return unjudged | (set() if any(turn.finish_reason for turn in turns) else {missing.FINISH})


def _error(record: Record, turns: list[ImportedTurn]) -> tuple[str, str] | None:
    if record.get("error"):
        return "error", str(record["error"])
    return None if turns else ("no_actions", "the record holds no action of the agent")


READERS = (Reader(NAME, MISSING, recognises, trajectories),)
