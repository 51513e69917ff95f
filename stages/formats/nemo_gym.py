"""NeMo Gym rollouts: one a line, the request and the response as OpenAI Responses items, and a reward.

Format read from NVIDIA-NeMo/Gym at its state of 2026-08-22, `**/data/example_rollouts*.jsonl`.
"""

from collections.abc import Iterator
from typing import Any

from stages.formats.base import INSTANCE, ImportedTurn, Origin, Reader, Record, Trajectory, family_of
from stages.formats.messages import Exchange, exchanges
from stages.formats.reports import stem
from stages.messages import Message
from stages.rollouts import missing
from stages.runs import store

NAME = "nemo-gym"
MISSING = frozenset({missing.PARSE, missing.ELISION, missing.CALL_IDS})
KNOWN = {"responses_create_params", "response", "reward", "model_patch", "instance_config"}
GENERIC = ("example_rollouts", "rollouts", "data")


def recognises(record: Any) -> bool:
    """A request in the form of the Responses API, and a response to it or a reward for it."""
    asked = isinstance(record, dict) and isinstance(record.get("responses_create_params"), dict)
    return asked and ("response" in record or "reward" in record)


def trajectories(record: Record, origin: Origin) -> Iterator[Trajectory]:
    """One rollout."""
    asked, response = record["responses_create_params"], record.get("response") or {}
    about, instance = asked.get("metadata") or {}, _instance(record)
    opening, turns, rebuilt = _conversation(record)
    _ended(turns, response)
    env = (record.get("agent_ref") or {}).get("name") or _env(origin)
    resolved, usage = _resolved(record, instance), response.get("usage") or {}
    yield Trajectory(
        task_id=instance or f"{env}/{_key(record, origin)}",
        env="swe-bench" if instance else env,
        opening=opening,
        turns=turns,
        missing=set(MISSING) | _unsaid(response, rebuilt, record),
        model=response.get("model") or asked.get("model"),
        statement=about.get("problem_statement"),
        family=family_of(instance) if instance else None,
        reward=record.get("reward"),
        resolved=resolved,
        submission=record.get("model_patch") or (record.get("metadata") or {}).get("model_patch"),
        terminated_by=(response.get("incomplete_details") or {}).get("reason"),
        error=_error(record, response, turns),
        sampling={name: asked.get(name) for name in ("temperature", "top_p", "max_output_tokens")},
        prompt_tokens=usage.get("input_tokens") or None,
        completion_tokens=usage.get("output_tokens") or None,
        wall_s=record.get("agent_run_time"),
        tools=asked.get("tools") or [],
        extra={name: value for name, value in record.items() if name not in KNOWN} | {"agent": env},
    )


def _instance(record: Record) -> str | None:
    places = (record, record["responses_create_params"].get("metadata") or {}, record.get("metadata") or {})
    named = [place.get("instance_id") for place in places if isinstance(place, dict)]
    return next((name for name in named if isinstance(name, str) and INSTANCE.fullmatch(name)), None)


def _env(origin: Origin) -> str:
    """The file's name where it says something, else the folder's."""
    names = [stem(origin.path), *(parent.name for parent in origin.path.parents)]
    return next(name for name in names if name and not name.startswith(GENERIC))


def _key(record: Record, origin: Origin) -> str:
    """What the task is known by: what the user asked, pictures included; else its number in the run."""
    asked = record["responses_create_params"].get("input")
    items = asked if isinstance(asked, str) else [item for item in asked or [] if item.get("role") == "user"]
    if items:
        return store.digest(items)[:12]
    number = record.get("_ng_task_index", record.get("task_idx"))
    return f"line-{origin.line}" if number is None else f"task-{number}"


def _conversation(record: Record) -> tuple[list[Message], list[ImportedTurn], bool]:
    """Opening messages, turns, and whether the opening had to be rebuilt from the run's description."""
    asked, given = record["responses_create_params"], record["responses_create_params"].get("input") or []
    opening = [{"role": "system", "content": asked["instructions"]}] if asked.get("instructions") else []
    opening += (
        [{"role": "user", "content": given}]
        if isinstance(given, str)
        else [item.message() for item in exchanges(given)]
    )
    turns: list[ImportedTurn] = []
    for exchange in exchanges(_output(record)):
        if exchange.other is None:
            turns.append(_turn(exchange))
        else:
            (turns[-1].observed if turns else opening).append(exchange.message())
    return (opening, turns, False) if opening else (_rebuilt(record), turns, True)


def _output(record: Record) -> list[Record]:
    """The items of the response; where they come as transitions, each the conversation so far, those of the last."""
    output = (record.get("response") or {}).get("output") or []
    return output[-1] if output and isinstance(output[0], list) else output


def _rebuilt(record: Record) -> list[Message]:
    """The agent's system prompt and the problem, where the request that the agent made is not recorded."""
    system = ((record.get("instance_config") or {}).get("agent_kwargs") or {}).get("system_prompt")
    problem = (record["responses_create_params"].get("metadata") or {}).get("problem_statement")
    return [{"role": role, "content": text} for role, text in (("system", system), ("user", problem)) if text]


def _turn(exchange: Exchange) -> ImportedTurn:
    """Tokens stand on one of the items of a call."""
    turn = ImportedTurn(exchange.message()["content"])
    for item in exchange.items:
        if item.get("generation_token_ids"):
            turn.prompt_ids, turn.completion_ids = item.get("prompt_token_ids"), item["generation_token_ids"]
            turn.logprobs = item.get("generation_log_probs") or None
    return turn


def _ended(turns: list[ImportedTurn], response: Record) -> None:
    if turns and (response.get("incomplete_details") or {}).get("reason") == "max_output_tokens":
        turns[-1].finish_reason = "length"
    elif turns and response.get("status") == "completed":
        turns[-1].finish_reason = "stop"


def _resolved(record: Record, instance: str | None) -> bool | None:
    report = (
        ((record.get("metadata") or {}).get("eval_report") or {}) if isinstance(record.get("metadata"), dict) else {}
    )
    resolved = record.get("resolved", (report.get(instance) or {}).get("resolved"))
    return resolved if isinstance(resolved, bool) else None


def _unsaid(response: Record, rebuilt: bool, record: Record) -> set[missing.Fact]:
    ends = response.get("incomplete_details") or response.get("status") == "completed"
    unsaid = set() if ends else {missing.FINISH}
    return unsaid | ({missing.OPENING} if rebuilt else set()) | (set() if "reward" in record else {missing.REWARD})


def _error(record: Record, response: Record, turns: list[ImportedTurn]) -> tuple[str, str] | None:
    """A rollout that the run itself keeps out of training, or one without any answer."""
    if record.get("mask_sample"):
        return str(record.get("error_kind") or "masked"), "the run masked this rollout"
    if response.get("error"):
        return "error", str(response["error"])
    return None if turns else ("no_actions", "the response holds no item of the model")


READERS = (Reader(NAME, MISSING, recognises, trajectories),)
