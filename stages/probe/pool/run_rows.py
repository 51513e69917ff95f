"""Pool rows of rollouts that a run already holds: of `collect`, of `train`, or imported."""

import json
from collections.abc import Sequence
from typing import Any

from stages.messages import Message
from stages.probe.pool.rows import pool_row, prompt_sha256
from stages.probe.pool.tokens import TokenRow, token_row
from stages.rollouts import trace
from stages.rollouts.trace import rollout_rows
from stages.runs.artifact import Run
from stages.runs.records import TRAINING_REWARD, Row


def run_rows(run: Run, tokenizer: Any, *, source: str, role: str) -> list[Row]:
    """One `pool_row/1` of every rollout that was graded, in the run's order; `source` is its src_pool.

    `step` is the training step where the run is a training, else the problem's place. Rollouts whose ids were stored
    and are prefixes of each other keep these ids; others are rendered with `tokenizer`, and have no behav_logp.
    """
    at = {row["rollout_id"]: row["training_step"] for row in run.rows(TRAINING_REWARD)} if _trained(run) else {}
    places, found = dict[str, int](), list[Row]()
    for rollout, steps in rollout_rows(run):
        if steps and rollout["reward"] is not None:
            place = places.setdefault(rollout["task_id"], len(places))
            row = _row(rollout, steps, tokenizer, source, role)
            found.append(row | {"step": at.get(rollout["rollout_id"], place)})
    return found


def rows_of_runs(runs: Sequence[Run], whose: Sequence[tuple[str, str]], tokenizer: Any) -> list[Row]:
    """The rows of several runs, each with its (source, role), problem by problem in order of first appearance."""
    rows = [
        row
        for run, (source, role) in zip(runs, whose, strict=True)
        for row in run_rows(run, tokenizer, source=source, role=role)
    ]
    places = {problem: place for place, problem in enumerate(dict.fromkeys(row["problem_id"] for row in rows))}
    rows = [row | {"step": places[row["problem_id"]]} for row in rows]
    return sorted(rows, key=lambda row: (row["step"], row["src_pool"], row["sample_id"]))


def _trained(run: Run) -> bool:
    return run.holds(TRAINING_REWARD) is not None


def _row(rollout: Row, steps: list[Row], tokenizer: Any, source: str, role: str) -> Row:
    states, last = trace.states(steps), steps[-1]
    tokens, behaviour = _sampled(steps) or (rendered(tokenizer, states, steps), None)
    row = pool_row(
        list(tokens.prompt_ids),
        list(tokens.completion_ids),
        completion=tokenizer.decode(tokens.completion_ids),
        model=rollout["model"],
        source=source,
        sample_id=rollout["sample_idx"],
        problem=rollout["task_id"],
    )
    return row | {
        "family": rollout["family"],
        "reward": rollout["reward"],
        "hacked": rollout["hacked"],
        "hacked_arbitrary": rollout["hacked"],
        "gt_pass": rollout["gt_pass"],
        "fmt_ok": all(step["parse_error"] is None for step in steps),
        "own": list(tokens.own),
        "behav_logp": behaviour,
        "n_loss_tokens": tokens.num_own,
        "ends_with_eos": last["finish_reason"] == "stop",
        "truncated": last["finish_reason"] == "length",
        "problem_messages": states[0],
        "prompt": tokenizer.decode(tokens.prompt_ids),
        "prompt_role": role,
        "prompt_sha256": prompt_sha256(states[0]),
        "gen_temperature": json.loads(last["sampling_json"] or "{}").get("temperature"),
    }


def _sampled(steps: list[Row]) -> tuple[TokenRow, list[float | None]] | None:
    """The ids as they were sampled, with each one's log-prob; None where ids or log-probs were not kept whole."""
    prompts = trace.prompt_ids(steps)
    first = prompts[0]
    if first is None or any(row["logprobs"] is None or not row["prefix_ok"] for row in steps):
        return None
    ids: list[int] = []
    logps: list[float | None] = []
    for prompt, row in zip(prompts, steps, strict=True):
        if prompt is None:
            return None
        observed = prompt[len(first) + len(ids) :]
        ids += [*observed, *row["completion_token_ids"]]
        logps += [*[None] * len(observed), *row["logprobs"]]
    return TokenRow(first, ids, [logp is not None for logp in logps]), logps


def rendered(tokenizer: Any, states: list[list[Message]], steps: list[Row]) -> TokenRow:
    """A rollout as ids that `tokenizer` makes of its text; `states` are the conversations before each of its steps."""
    start = len(states[0])
    answer = [*states[-1][start:], {"role": "assistant", "content": steps[-1]["action"]}]
    return token_row(tokenizer, states[0], answer)
