"""Write rollouts as rows and journal records, and restore a rollout from its record."""

from typing import Any

import orjson

from composer_stages import endings
from composer_stages.envs.base import Grade, Observation, Work
from composer_stages.policy.base import Policy, Sample
from composer_stages.rollouts.agent_loop import LiveRollout, Step
from composer_stages.rollouts.trace import TEACHER, RolloutPayload, conversation, prompt_ids
from composer_stages.runs import store
from composer_stages.runs.kinds import Row

TOKENS = ("logprobs", "logprob_kind", "prompt_tokens", "completion_tokens")
OF_SAMPLE = ("finish_reason", *TOKENS, "cost_usd", "latency_s")
OF_OBSERVATION = ("parse_error", "returncode", "timed_out", "raw_chars", "elided_chars")
OF_GRADE = ("ground", "hidden_pass", "visible_pass", "hacked", "protocol_ok")
"""Columns with the name of the field of a sample, an observation or a grade that they hold."""
OF_SERVER = ("served_model", "provider", "system_fingerprint", "reasoning", "prompt_read")
"""Columns of a step that are null where no server was asked."""


def _identity(rollout: LiveRollout) -> Row:
    task = rollout.task
    return {
        "rollout_id": rollout.rollout_id,
        "sample_idx": rollout.sample_idx,
        "task_id": task.task_id,
        "env": task.env,
        "group_id": task.task_id,
    }


def payload(rollout: LiveRollout, policy: Policy, *, sandbox: str, source: str = "collect") -> RolloutPayload:
    """Return the journal record of one rollout. A rollout with an error has a null reward."""
    grade, samples = rollout.grade, [step.sample for step in rollout.steps]
    error_type, error = rollout.error or (None, grade.error)
    row = {
        **_identity(rollout),
        "split": rollout.task.split,
        "family": rollout.task.family,
        "seed": rollout.seed,
        "terminated_by": rollout.terminated_by,
        "wall_s": rollout.wall_s,
        "history": rollout.history,
        **verdict_columns(grade),
        "num_steps": len(rollout.steps),
        "reward": None if rollout.error else grade.reward,
        "error_type": error_type,
        "error": error,
        "sandbox": sandbox,
        "model": policy.config.model,
        "source": source,
        "prompt_tokens": sum(sample.prompt_tokens for sample in samples),
        "completion_tokens": sum(sample.completion_tokens for sample in samples),
        "cost_usd": sum(sample.cost_usd for sample in samples),
        "tools_json": orjson.dumps([dict(tool) for tool in rollout.tools]).decode() if rollout.tools else None,
        **work_columns(grade.work),
    }
    return {"rollout": row, "steps": step_rows(rollout, policy)}


def restore_rollout(planned: LiveRollout, recorded: RolloutPayload) -> LiveRollout:
    """Return a planned rollout as `payload` recorded it, for a training that goes on after a kill.

    Lacks what no row holds: a grade's labels, and the results of single tool calls. `planned` has no error.
    """
    row, steps = recorded["rollout"], recorded["steps"]
    work = {name: row[name] for name in Work.__dataclass_fields__ if name != "metrics"}
    work["canary"] = None if row["canary"] is None else tuple(row["canary"])
    metrics = None if row["metrics_json"] is None else orjson.loads(row["metrics_json"])
    rollout = LiveRollout(
        planned.task,
        planned.sample_idx,
        planned.seed,
        messages=conversation(steps),
        grade=Grade(
            reward=row["reward"],
            error=row["error"],
            **{name: row[name] for name in OF_GRADE},
            work=Work(**work, metrics=metrics),
        ),
        terminated_by=row["terminated_by"],
        wall_s=row["wall_s"],
        history=row["history"],
        tools=tuple(orjson.loads(row["tools_json"] or "[]")),
    )
    for step, prompt in zip(steps, prompt_ids(steps), strict=True):
        used = orjson.loads(step["sampling_json"])
        of_sample: dict[str, Any] = {name: step.get(name) for name in (*OF_SAMPLE, *OF_SERVER)}
        sample = Sample(
            text=step["action"],
            prompt_ids=prompt,
            policy_version=used.get("policy_version"),
            completion_ids=step["completion_token_ids"],
            **of_sample,
        )
        observation = Observation(
            step["observation"],
            commands=tuple(step["commands"]),
            duration_s=step["command_s"],
            stop=step["terminated_by"],
            **{name: step[name] for name in OF_OBSERVATION},
        )
        new_messages = orjson.loads(step["new_messages_json"])
        rollout.steps.append(
            Step(new_messages, step["num_messages"], step["state_sha256"], sample, observation, step["seed"])
        )
    return rollout


def verdict_columns(grade: Grade) -> Row:
    """Return the verdicts of a grade as columns of `rollout/1` and `eval_item/1`."""
    return {name: getattr(grade, name) for name in OF_GRADE}


def work_columns(work: Work) -> Row:
    """Return the result of a rollout as columns of `rollout/1` and `eval_item/1`."""
    return {
        **{name: getattr(work, name) for name in Work.__dataclass_fields__ if name != "metrics"},
        "canary": None if work.canary is None else list(work.canary),
        "metrics_json": None if work.metrics is None else store.encode(dict(work.metrics)).decode(),
    }


def step_rows(rollout: LiveRollout, policy: Policy) -> list[Row]:
    """Return the `step/1` rows, dense from 0; tokens as deltas, so that the ids of a rollout are stored once.

    The last step has the terminal reward, the others 0.0; all are null when the rollout was not scored.
    """
    prefix: list[int] = []  # the prompt and answer of the step before
    rows = []
    scored = rollout.error is None and rollout.grade.reward is not None
    for index, step in enumerate(rollout.steps):
        sample, observation, last = step.sample, step.observation, index == len(rollout.steps) - 1
        prompt = sample.prompt_ids
        teacher, player = sample.teacher or (None, policy.config)
        used = {"temperature": player.temperature, "max_tokens": player.max_tokens, "top_p": 1.0, "top_k": 0}
        # The version counts the optimiser steps of a policy under training, which may change from turn to turn.
        captured = policy.capture_level if sample.teacher is None else "text"
        captured = "logprobs" if captured == "text" and sample.logprobs else captured  # of a server asked for them
        version = {} if sample.policy_version is None else {"policy_version": sample.policy_version}
        # False where the history was cut, or where the chat template renders old messages anew (a dropped <think>,
        # say).
        prefix_ok = None if prompt is None else prompt[: len(prefix)] == prefix
        row = {
            **_identity(rollout),
            "num_messages": step.num_messages,
            "state_sha256": step.state_sha256,
            "seed": step.seed,
            "step": index,
            "num_steps": len(rollout.steps),
            "new_messages_json": store.encode(step.new_messages).decode(),
            "action": sample.text,
            "commands": list(observation.commands),
            "truncated": sample.finish_reason in endings.NOT_WHOLE,
            "observation": observation.content,
            "reward": (rollout.grade.reward if last else 0.0) if scored else None,
            "done": last,
            "terminated_by": rollout.terminated_by if last else None,
            "capture_level": captured,
            "prompt_len": None if prompt is None else len(prompt),
            "prompt_delta_token_ids": None if prompt is None else prompt[len(prefix) :] if prefix_ok else prompt,
            "prefix_ok": prefix_ok,
            "completion_token_ids": sample.completion_ids,
            "model": player.model,
            "sampling_json": store.encode(used | version | ({} if teacher is None else {TEACHER: teacher})).decode(),
            "command_s": observation.duration_s,
            "history": rollout.history,
            **{name: getattr(sample, name) for name in (*OF_SAMPLE, *OF_SERVER)},
            **{name: getattr(observation, name) for name in OF_OBSERVATION},
        }
        rows.append(row)
        prefix = [*(prompt or []), *(sample.completion_ids or [])]
    return rows


def action_facts(rollout: LiveRollout) -> Row:
    """Return the columns of an item that hold its conversation, and what this does not hold of each action.

    `message`: the place of the action among the messages. Facts that are null, zero or false are left out.
    """
    facts = []
    for step in rollout.steps:
        values = {
            "completion_tokens": step.sample.completion_tokens,
            "truncated": step.sample.finish_reason in endings.NOT_WHOLE,
            **{name: getattr(step.sample, name) for name in OF_SERVER},
            **{name: getattr(step.observation, name) for name in OF_OBSERVATION},
        }
        # An exit code of 0 is a fact.
        columns = {
            name: value for name, value in values.items() if value or (name == "returncode" and value is not None)
        }
        facts.append({"message": step.num_messages, **columns})
    return {"transcript_json": store.encode(rollout.messages).decode(), "steps_json": store.encode(facts).decode()}
