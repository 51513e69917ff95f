"""The collection gate, which says whether a trace stream is clean: counted checks over rollout and step rows."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tabulate import tabulate

from stages.messages import Message
from stages.rollouts import missing
from stages.rollouts.episode import state_sha256
from stages.rollouts.history import FULL
from stages.rollouts.missing import Fact
from stages.rollouts.trace import by_rollout, prompt_ids, states, transcripts
from stages.runs.records import Row


@dataclass(frozen=True)
class Check:
    """A counted check: how many of how many failed, the tolerated share, and how many the source does not record."""

    name: str
    failed: int
    total: int
    tolerated: float = 0.0
    unrecorded: int = 0

    @property
    def verdict(self) -> str:
        """`ok` is within tolerance; a check over nothing is `FAIL`, or `not recorded` where the source explains it."""
        if self.total == 0 and self.unrecorded > 0:
            return "not recorded"
        return "ok" if self.total > 0 and self.failed <= self.tolerated * self.total else "FAIL"

    @property
    def ok(self) -> bool:
        """Not failed."""
        return self.verdict != "FAIL"


def check(
    rollouts: list[Row], steps: list[Row], planned: int, absent: Mapping[str, Collection[Fact]] | None = None
) -> list[Check]:
    """All checks over a collection that was planned to hold so many rollouts.

    `absent` holds by rollout what its source cannot tell; a check that needs it passes that rollout over and counts it
    apart.
    """
    episodes = list(by_rollout(steps).values())
    stepless = sum(missing.STEPS in absent.get(row["rollout_id"], ()) for row in rollouts) if absent else 0
    each, step_by_step = partial(_each, absent or {}), partial(_each, absent or {}, not_recorded=stepless)
    sampled = [row for row in steps if row["capture_level"] == "tokens" or row["logprobs"] is not None]
    with_tokens = partial(_each, absent or {}, not_recorded=stepless + len(steps) - len(sampled))
    return [
        Check("rollouts collected", planned - len({r["rollout_id"] for r in rollouts}), planned),
        Check("rollout ids unique", len(rollouts) - len({r["rollout_id"] for r in rollouts}), len(rollouts)),
        each("rollouts scored", rollouts, lambda r: r["reward"] is not None, missing.REWARD),
        each("reward in [0, 1]", rollouts, lambda r: r["reward"] is None or 0.0 <= r["reward"] <= 1.0, missing.REWARD),
        step_by_step("steps dense from 0", episodes, lambda e: [s["step"] for s in e] == list(range(len(e)))),
        step_by_step(
            "one done, the last", episodes, lambda e: [s["done"] for s in e] == [False] * (len(e) - 1) + [True]
        ),
        step_by_step("tuples complete", steps, partial(_complete, absent or {})),
        step_by_step("state hash chain", episodes, _chained),
        with_tokens("ids as many as log-probs", sampled, _lengths_agree, missing.TOKENS),
        with_tokens("log-probs finite, <= 0", sampled, _log_probs_valid, missing.LOGPROBS),
        step_by_step("prompt extends the last", steps, _extends, missing.TOKENS),
        step_by_step("prompt length as stored", episodes, _prompt_lengths, missing.TOKENS),
        step_by_step("nothing truncated", steps, lambda s: not s["truncated"], missing.FINISH),
        step_by_step("no output elided", steps, lambda s: not s["elided_chars"], missing.ELISION),
        step_by_step("actions well-formed", steps, lambda s: s["parse_error"] is None, missing.PARSE, tolerated=0.2),
    ]


def _each(
    absent: Mapping[str, Collection[Fact]],
    name: str,
    items: Sequence[Any],
    holds: Callable[[Any], bool],
    needs: Fact | None = None,
    tolerated: float = 0.0,
    not_recorded: int = 0,
) -> Check:
    """One check over the rollouts, steps or episodes (lists of steps) whose source records the fact that it needs.

    `not_recorded`: the number of rollouts whose source has no steps, for checks over steps.
    """
    recorded = [item for item in items if needs not in absent.get(_rollout_of(item), ())]
    return Check(
        name,
        sum(not holds(item) for item in recorded),
        len(recorded),
        tolerated,
        len(items) - len(recorded) + not_recorded,
    )


def _rollout_of(item: Any) -> str:
    return item[0]["rollout_id"] if isinstance(item, list) else item["rollout_id"]


def _complete(absent: Mapping[str, Collection[Fact]], step: Row) -> bool:
    """State, action and reward are there; only a source that has no rewards may lack the last."""
    scored = step["reward"] is not None or missing.REWARD in absent.get(step["rollout_id"], ())
    return bool(step["new_messages_json"] and step["state_sha256"]) and step["action"] is not None and scored


def _chained(episode: list[Row]) -> bool:
    """Every state is the one before it, plus the action and what was observed, in one message or several."""
    if any(state_sha256(state) != row["state_sha256"] for state, row in zip(states(episode), episode, strict=True)):
        return False
    said = transcripts(episode)
    return all(_follows(row, before, after) for row, before, after in zip(episode, said, said[1:], strict=False))


def _follows(row: Row, before: list[Message], after: list[Message]) -> bool:
    gained = after[len(before) :]
    action, observed = gained[:1], "\n".join(message["content"] for message in gained[1:])
    spoken = [{"role": "assistant", "content": row["action"]}]
    return after[: len(before)] == before and action == spoken and observed == row["observation"]


def _extends(step: Row) -> bool:
    """Of a history that is not shown whole no prompt goes on from the one before."""
    return step["prefix_ok"] is not False or step.get("history") not in (None, FULL)


def _lengths_agree(step: Row) -> bool:
    if step["capture_level"] != "tokens":
        return step["logprobs"] is None
    return len(step["completion_token_ids"]) == len(step["logprobs"]) > 0


def _log_probs_valid(step: Row) -> bool:
    return all(math.isfinite(p) and p <= 0 for p in step["logprobs"] or ())


def _prompt_lengths(episode: list[Row]) -> bool:
    rebuilt = prompt_ids(episode)
    return all(ids is None or len(ids) == row["prompt_len"] for ids, row in zip(rebuilt, episode, strict=True))


def table(checks: list[Check]) -> str:
    """The checks as plain text, one line each."""
    lines = tabulate(map(_cells, checks), tablefmt="plain", disable_numparse=True)
    return f"Collection gate\n{lines}"


def advice(checks: list[Check]) -> str:
    """What to do about checks that failed; empty when none did."""
    failed = [check.name for check in checks if not check.ok]
    if not failed:
        return ""
    return (
        f"\nThe gate failed: {', '.join(failed)}. The run is whole, but its trace stream is not clean: exit code 1. "
        "`composer show RUN -n 4` shows rollouts; mend the cause and collect again with --clean.\n"
    )


def _cells(check: Check) -> tuple[str, str, str]:
    if check.verdict == "not recorded":
        return "-", check.name, "not recorded"
    also = f", {check.unrecorded} not recorded" if check.unrecorded else ""
    return check.verdict, check.name, f"{check.total - check.failed} of {check.total}{also}"
