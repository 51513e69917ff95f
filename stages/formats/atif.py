"""ATIF, the Agent Trajectory Interchange Format of Harbor and Terminal-Bench: versions 1.0 to 1.7, one document a file.

Steps of the agent are actions. Steps copied from an earlier trajectory, and steps without a model call, are context:
they must not be trained on. Embedded trajectories of sub-agents are rollouts of their own; those in files of their own
are imported with these. Verdict, task and error are in Harbor's `result.json`, in a folder above the trajectory; a
folder of a trial without a trajectory is an item, as agents of many kinds leave none. A reward that Harbor marks as
invalid (`reward_valid`) is no verdict: the rollout ended in the exception that made it so. Of a trial of several steps
each has a trajectory of its own (`steps/NAME/agent`): a rollout with the step's verdict, on the task TASK/NAME.

Format read from Harbor's documentation (harborframework.com/docs/trajectory-format), from the reference of NVIDIA's
NeMo Agent Toolkit 1.7 (`nat.atif`), from programs that write it, and from `harbor/models/trial/result.py` of Harbor
0.26.
"""

import re
from collections import Counter
from collections.abc import Iterator
from math import isclose
from typing import Any

from composer_stages.formats.base import (
    WITHOUT_TRANSCRIPT,
    Drop,
    ImportedTurn,
    Origin,
    Reader,
    Record,
    Trajectory,
    has_keys,
    seconds,
)
from composer_stages.formats.measurement import (
    REWARD,
    Aggregate,
    MeasuredLog,
    MeasuredSample,
    State,
    alone,
    as_settings,
    told,
)
from composer_stages.formats.messages import arguments_text, context, text
from composer_stages.formats.reports import STATS
from composer_stages.formats.secrets import redact
from composer_stages.messages import Message, MessageParts, ToolCall, write
from composer_stages.runs import store
from composer_stages.words import Sentence

NAME = "atif"
MEAN = "mean"
OF_SUBAGENT = re.compile(r"trajectory\.(?!cont-).+\.json")
"""The files of sub-agents beside `trajectory.json` and its continuations, as Harbor tells them apart."""
SCHEMA = "ATIF-v1."
SPENT = ("n_input_tokens", "n_output_tokens", "cost_usd")
AGENT_SETTINGS = ("base_url", "override_timeout_sec", "max_timeout_sec", "skills", "mcp_servers")
TRIAL_SETTINGS = (
    "timeout_multiplier",
    "agent_timeout_multiplier",
    "verifier_timeout_multiplier",
    "extra_instructions",
    "extra_instruction_paths",
)
"""How trials are played, in the records of an agent and of a trial."""
SECRET_NAME = re.compile(r"key|token(?!s)|secret|passw|auth|credential", re.IGNORECASE)
"""Arguments of agents whose values are not shown."""
REGRADED = "regraded"
INVALID_REWARD = "invalid_reward"
"""The error of a trial whose reward Harbor marks as invalid without an exception that says why."""


def recognises(record: Any) -> bool:
    """Whether a record is a document that names its version and holds steps."""
    return (
        isinstance(record, dict)
        and str(record.get("schema_version", "")).startswith(SCHEMA)
        and isinstance(record.get("steps"), list)
    )


def trajectories(record: Record, origin: Origin) -> Iterator[Trajectory | Drop]:
    """Yield the rollout of a document, then those of its sub-agents, on which there is no verdict."""
    folder = origin.sidecars.trial_folder(origin.path)
    trial = origin.sidecars.trials[folder] if folder else {}
    if trial and str(trial.get("id")) in origin.sidecars.regraded:
        yield origin.make_drop(REGRADED, Sentence("formats.regraded"))
        return
    log = _log_of(trial, origin)
    if folder:
        trial = _of_step(trial, origin.path.relative_to(folder).parts)
    waiting: list[tuple[Record, bool]] = [(record, bool(OF_SUBAGENT.fullmatch(origin.path.name)))]
    # A queue and no recursion: how deep sub-agents are nested is up to the file.
    while waiting:
        document, is_subagent = waiting.pop(0)
        yield _rollout(document, {} if is_subagent else trial, is_subagent, None if is_subagent else log)
        waiting += [(inner, True) for inner in document.get("subagent_trajectories") or []]


def _of_step(trial: Record, parts: tuple[str, ...]) -> Record:
    """Return the record of a trial's step, where the path below the trial's folder is of one; else the trial."""
    if parts[0] != "steps" or len(parts) < 3:
        return trial
    step: Record = next((s for s in trial.get("step_results") or [] if s.get("step_name") == parts[1]), {})
    own = {name: step.get(name) for name in ("agent_result", "verifier_result", "exception_info")}
    policy = (step.get("exception_info") or {}).get("policy") or {}
    checksum = trial.get("task_checksum")
    return {
        **trial,
        **own,
        "task_name": f"{trial.get('task_name')}/{parts[1]}",
        "task_checksum": checksum and f"{checksum}/{parts[1]}",
        "step_results": None,
        "reward_valid": policy.get("has_valid_reward"),
    }


def _log_of(trial: Record, origin: Origin) -> MeasuredLog | None:
    """Return what a trial is of, the same for all of a job of these settings; None where there is no trial."""
    folder, agent, settings = origin.sidecars.trial_folder(origin.path), trial.get("agent_info") or {}, _settings(trial)
    if not trial or not folder:
        return None
    key = (trial.get("source"), (agent.get("model_info") or {}).get("name"), *settings.items())
    return origin.sidecars.log((folder.parent, key), lambda: _log(trial, settings, origin))


def _settings(trial: Record) -> dict[str, str]:
    """Return how a trial was played: the agent with its arguments, limits of time, and what was added to the task."""
    agent, config = trial.get("agent_info") or {}, trial.get("config") or {}
    of_agent, user = config.get("agent") or {}, config.get("user_agent") or {}
    settings = {name: of_agent.get(name) for name in AGENT_SETTINGS} | {
        name: config.get(name) for name in TRIAL_SETTINGS
    }
    settings |= {name: value for name, value in (of_agent.get("kwargs") or {}).items() if not SECRET_NAME.search(name)}
    settings["agent"] = f"{agent.get('name') or ''} {agent.get('version') or ''}".strip()
    settings["provider"] = (agent.get("model_info") or {}).get("provider")
    settings["user simulator"] = " ".join(str(user[name]) for name in ("name", "model_name") if user.get(name))
    settings["resume_trajectory"] = of_agent.get("resume_trajectory") or None
    said = {name: value for name, value in settings.items() if value != "" and value != [] and value != {}}
    return {name: redact(value, Counter()) for name, value in as_settings(said).items()}


def _log(trial: Record, settings: dict[str, str], origin: Origin) -> MeasuredLog:
    """Return what a trial is of, and what the result of its job reports."""
    agent, source = trial.get("agent_info") or {}, trial.get("source")
    model = (agent.get("model_info") or {}).get("name")
    jobs = (origin.sidecars.descriptions.get((folder, STATS)) for folder in origin.path.parents)
    job: Record = next(filter(None, jobs), {})
    # Before 0.4 a name of a model was written without its slashes.
    names = (model, model and model.replace("/", "-"))
    keys = ("__".join(filter(None, (agent.get("name"), name, source or "adhoc"))) for name in names)
    evaluation: Record = next(filter(None, ((job.get("evals") or {}).get(key) for key in keys)), {})
    stats: dict[str, dict[str, list[str]]] = evaluation.get("reward_stats") or {REWARD: {}}
    metrics: list[Record] = evaluation.get("metrics") or []
    count = evaluation.get("n_trials")
    # Of one reward a metric has the name of how it is aggregated; of several those of the rewards, whichever it is.
    if len(stats) == 1:
        values = {name: each[MEAN] for name in stats for each in metrics[::-1] if MEAN in each}
    else:
        values = {
            name: each[name]
            for name, trials in stats.items()
            for each in metrics[::-1]
            if each.keys() >= stats.keys() and _is_mean(each[name], trials, evaluation)
        }
    reported = [r for name, v in values.items() for r in told(name, MEAN, v, Aggregate.SAMPLES, count=count)]
    return MeasuredLog("harbor", task=str(source or ""), model=model, settings=settings, reported=tuple(reported))


def _is_mean(number: float, trials: dict[str, list[str]], evaluation: Record) -> bool:
    """Return whether a number is the mean over all trials, of which those without this reward count as 0."""
    total = sum(float(value) * len(names) for value, names in trials.items())
    failed = {name for names in (evaluation.get("exception_stats") or {}).values() for name in names}
    played = {name for rewards in evaluation["reward_stats"].values() for names in rewards.values() for name in names}
    return any(isclose(number * num, total, rel_tol=1e-6) for num in {len(played), len(played | failed)})


def _rollout(document: Record, trial: Record, is_subagent: bool, log: MeasuredLog | None) -> Trajectory:
    agent, metrics, steps = document.get("agent") or {}, document.get("final_metrics") or {}, document["steps"]
    spent = _spent(trial)
    opening, turns = _conversation(steps)
    rewards = (trial.get("verifier_result") or {}).get("rewards") or {}
    # A verifier may write several finite numbers; the one called `reward` is the score, the others are metrics.
    scores = {name: None if value is None else float(value) for name, value in rewards.items()}
    # Harbor leaves out of its own statistics what an exception of certain kinds (an API's limit, a lost machine) made
    # of no worth, although the verifier wrote a number.
    is_void = bool(scores) and trial.get("reward_valid") is False
    source, task = trial.get("source"), trial.get("task_name")
    measured = MeasuredSample(scores, State.INVALID if is_void else None, item=f"{source}/{task}" if source else "")
    measured.asked = store.digest([trial["task_checksum"]])[:16] if trial.get("task_checksum") else ""
    reward = None if is_void or not log else scores.get(alone(log, scores) or "")
    # An exception that was followed by a verdict is only how the rollout ended.
    problem = _exception(trial) or {}
    if is_void and not problem:
        problem = {"exception_type": INVALID_REWARD, "exception_message": Sentence("formats.invalid-reward")}
    has_verdict = not is_void and any(value is not None for value in scores.values())
    failed = bool(problem) and not has_verdict
    times = [step["timestamp"] for step in steps if step.get("timestamp")]
    # `trajectory_id` names a document since 1.7. Before, only `session_id` exists, which continuations and sub-agents
    # share with the document that they belong to; the digest of the steps makes the id unique.
    session = document.get("trajectory_id") or document.get("session_id")
    of_agent = ((trial.get("agent_info") or {}).get("model_info") or {}).get("name")
    return Trajectory(
        task_id=str(task or ""),
        env=str(source or NAME),
        opening=opening,
        turns=turns,
        own_id=f"{session}/{store.digest(steps)[:8]}" if session else None,
        model=agent.get("model_name")
        or next((s["model_name"] for s in steps if s.get("model_name")), None)
        or of_agent,
        log=log,
        measured=measured,
        reward=reward,
        resolved=bool(reward) if reward in (0.0, 1.0) else None,
        unscored=is_void,
        judged=not is_subagent,
        terminated_by=(trial.get("exception_info") or {}).get("exception_type") if has_verdict else None,
        error=(str(problem.get("exception_type")), str(problem.get("exception_message"))) if failed else None,
        prompt_tokens=metrics.get("total_prompt_tokens", spent.get("n_input_tokens")),
        completion_tokens=metrics.get("total_completion_tokens", spent.get("n_output_tokens")),
        cost_usd=metrics.get("total_cost_usd", spent.get("cost_usd")),
        wall_s=seconds(times[0], times[-1]) if times else None,
        tools=agent.get("tool_definitions") or [],
        extra={
            "agent": f"{agent.get('name', NAME)} {agent.get('version', '')}".strip(),
            "session": document.get("session_id"),
            "subagent": is_subagent,
            "rewards": (trial.get("verifier_result") or {}).get("rewards"),
            "continued_in": document.get("continued_trajectory_ref"),
        },
    )


def _spent(trial: Record) -> Record:
    """Return what an agent spent; of a trial of several steps, which has no total, the sum over those that say it."""
    contexts = [part.get("agent_result") or {} for part in (trial, *(trial.get("step_results") or []))]
    said = {name: [context[name] for context in contexts if context.get(name) is not None] for name in SPENT}
    return contexts[0] or {name: sum(values) for name, values in said.items() if values}


def _exception(trial: Record) -> Record | None:
    """Return the exception of a trial: the first that makes its reward invalid, else the first.

    A trial of several steps records those that it went on after at the steps.
    """
    tried = (trial, *(trial.get("step_results") or []))
    recorded = [part["exception_info"] for part in tried if part.get("exception_info")]
    invalidating = (
        exception for exception in recorded if (exception.get("policy") or {}).get("has_valid_reward") is False
    )
    return next(invalidating, next(iter(recorded), None))


def _conversation(steps: list[Record]) -> tuple[list[Message], list[ImportedTurn]]:
    opening: list[Message] = []
    turns: list[ImportedTurn] = []
    for step in steps:
        # Results in the order of their calls; a result that answers no call is input like a user's.
        order = {call.get("tool_call_id"): index for index, call in enumerate(step.get("tool_calls") or [])}
        results = (step.get("observation") or {}).get("results") or []
        observed: list[Message] = [
            {
                "role": "tool" if result.get("source_call_id") in order else "user",
                "content": text(result.get("content")),
            }
            for result in sorted(results, key=lambda result: order.get(result.get("source_call_id"), len(order)))
        ]
        is_agent = step["source"] == "agent"
        role, content = step["source"], text(step.get("message"))
        if is_agent:
            calls = [
                ToolCall(str(call["function_name"]), arguments_text(call.get("arguments")))
                for call in step.get("tool_calls") or []
            ]
            parts = MessageParts(content, tuple(calls), step.get("reasoning_content") or None)
            role, content = "assistant", write(parts)
        # Harbor writes a continued session to `trajectory.cont-N.json`, which begins with the steps so far, marked as
        # copied. A step with `llm_call_count` 0 is of the agent's program, for example a fixed first command.
        if is_agent and not step.get("is_copied_context") and step.get("llm_call_count") != 0:
            metrics = step.get("metrics") or {}
            turns.append(
                ImportedTurn(
                    content,
                    observed,
                    prompt_ids=metrics.get("prompt_token_ids") or None,
                    completion_ids=metrics.get("completion_token_ids") or None,
                    logprobs=metrics.get("logprobs") or None,
                    prompt_tokens=metrics.get("prompt_tokens"),
                    completion_tokens=metrics.get("completion_tokens"),
                    cost_usd=metrics.get("cost_usd"),
                )
            )
        else:
            context(opening, turns).extend([{"role": role, "content": content}, *observed])
    return opening, turns


def is_trial(record: Any) -> bool:
    """Whether a record is Harbor's result of one trial."""
    return has_keys(record, "task_name verifier_result trial_name")


def trial_trajectories(record: Record, origin: Origin) -> Iterator[Trajectory | Drop]:
    """Yield the item of a trial whose agent left no trajectory."""
    if str(record.get("id")) in origin.sidecars.regraded:
        yield origin.make_drop(REGRADED, Sentence("formats.regraded"))
        return
    trajectory = _rollout({"steps": []}, record, is_subagent=False, log=_log_of(record, origin))
    trajectory.unscored = True
    yield trajectory


READERS = (
    Reader(NAME, recognises, trajectories),
    Reader(NAME, is_trial, trial_trajectories, WITHOUT_TRANSCRIPT, describes=True),
)
