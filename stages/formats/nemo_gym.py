"""NeMo Gym rollouts: one a line, the request and the response as OpenAI Responses items, and a reward.

Format read from NVIDIA-NeMo/Gym at its state of 2026-08-22, `**/data/example_rollouts*.jsonl`.
"""

from collections.abc import Iterator
from typing import Any

from composer_stages.formats.base import ImportedTurn, Origin, Reader, Record, Trajectory, find_instance
from composer_stages.formats.measurement import MeasuredSample
from composer_stages.formats.messages import context, exchanges
from composer_stages.formats.reports import stem
from composer_stages.messages import Message
from composer_stages.rollouts import missing
from composer_stages.runs import store
from composer_stages.words import Sentence

NAME = "nemo-gym"
OWN_FIELDS = {"responses_create_params", "response", "reward", "model_patch", "instance_config"}
GENERIC = ("example_rollouts", "rollouts", "data")


def recognises(record: Any) -> bool:
    """Whether a record is a request in the form of the Responses API, with a response to it or a reward for it."""
    request = isinstance(record, dict) and isinstance(record.get("responses_create_params"), dict)
    return request and ("response" in record or "reward" in record)


def trajectories(record: Record, origin: Origin) -> Iterator[Trajectory]:
    """Yield the one rollout of a line."""
    request, response = record["responses_create_params"], record.get("response") or {}
    about, metadata = request.get("metadata") or {}, record.get("metadata") or {}
    ids = [fields.get("instance_id") for fields in (record, about, metadata) if isinstance(fields, dict)]
    instance = find_instance(ids)
    opening, turns = _conversation(record)
    lacks = set[missing.Fact]()
    if not opening:
        # `input` is empty where the agent is a program of its own (`anyswe_agent`), whose requests are not recorded:
        # its system prompt and the problem, from the run's description, stand in for them.
        lacks.add(missing.OPENING)
        system = ((record.get("instance_config") or {}).get("agent_kwargs") or {}).get("system_prompt")
        texts = (("system", system), ("user", about.get("problem_statement")))
        opening = [{"role": role, "content": text} for role, text in texts if text]
    # A response has no finish reason but a status, and a reason only where it is incomplete.
    reason = (response.get("incomplete_details") or {}).get("reason")
    if turns and reason == "max_output_tokens":
        turns[-1].finish_reason = "length"
    elif turns and response.get("status") == "completed":
        turns[-1].finish_reason = "stop"
    # A run that masks a rollout keeps it out of training, whatever its reward.
    error: tuple[str, str] | None = None
    if record.get("mask_sample"):
        error = str(record.get("error_kind") or "masked"), Sentence("formats.rollout-masked")
    elif response.get("error"):
        problem = response["error"]
        error = "error", str(problem.get("message") or problem if isinstance(problem, dict) else problem)
    names = [stem(origin.path), *(parent.name for parent in origin.path.parents)]
    # The environment is the agent's, else by the file's name where it is no general one, else by the folder's.
    env = (record.get("agent_ref") or {}).get("name")
    env = env or next(name for name in names if name and not name.startswith(GENERIC))
    report = (metadata.get("eval_report") or {}) if isinstance(metadata, dict) else {}
    resolved = record.get("resolved", (report.get(instance) or {}).get("resolved"))
    usage = response.get("usage") or {}
    # A task is identified by the user's messages, pictures included; without any by its number, `_ng_task_index`, which
    # the rollouts of one task share (`_ng_rollout_index` tells them apart).
    input_items = request.get("input")
    items = (
        input_items
        if isinstance(input_items, str)
        else [item for item in input_items or [] if item.get("role") == "user"]
    )
    number = record.get("_ng_task_index", record.get("task_idx"))
    key = f"line-{origin.line}" if number is None else f"task-{number}"
    yield Trajectory(
        task_id=instance or f"{env}/{store.digest(items)[:12] if items else key}",
        env="" if instance else env,
        opening=opening,
        turns=turns,
        missing=lacks,
        model=response.get("model") or request.get("model"),
        statement=about.get("problem_statement"),
        reward=record.get("reward"),
        resolved=resolved if isinstance(resolved, bool) else None,
        unscored="reward" in record,
        submission=record.get("model_patch") or metadata.get("model_patch"),
        terminated_by=reason or record.get("error_kind"),
        measured=MeasuredSample(item="" if number is None else str(number)),
        error=error,
        sampling={name: request.get(name) for name in ("temperature", "top_p", "max_output_tokens")},
        prompt_tokens=usage.get("input_tokens") or None,
        completion_tokens=usage.get("output_tokens") or None,
        wall_s=record.get("agent_run_time"),
        tools=request.get("tools") or [],
        extra={name: value for name, value in record.items() if name not in OWN_FIELDS} | {"agent": env},
    )


def _conversation(record: Record) -> tuple[list[Message], list[ImportedTurn]]:
    """Return opening messages and turns."""
    request = record["responses_create_params"]
    input_items = request.get("input") or []
    opening: list[Message] = (
        [{"role": "system", "content": request["instructions"]}] if request.get("instructions") else []
    )
    if isinstance(input_items, str):
        opening.append({"role": "user", "content": input_items})
    else:
        opening += [item.message() for item in exchanges(input_items)]
    output = (record.get("response") or {}).get("output") or []
    if output and isinstance(output[0], list):
        output = output[-1]  # some agents write transitions, each of which is the conversation so far
    turns: list[ImportedTurn] = []
    for exchange in exchanges(output):
        if exchange.input_message is not None:
            context(opening, turns).append(exchange.input_message)
            continue
        turn = ImportedTurn(exchange.message()["content"])
        for item in exchange.items:
            if item.get("generation_token_ids"):  # tokens are on one of the items of a call
                turn.prompt_ids, turn.completion_ids = item.get("prompt_token_ids"), item["generation_token_ids"]
                turn.logprobs = item.get("generation_log_probs") or None
        turns.append(turn)
    return opening, turns


READERS = (Reader(NAME, recognises, trajectories),)
