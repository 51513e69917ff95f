"""The collection gate, which says whether a trace stream is clean: counted checks over rollout and step rows."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tabulate import tabulate

from stages.messages import Message
from stages.rollouts import missing
from stages.rollouts.agent_loop import FULL, SUMMARISE, request
from stages.rollouts.missing import Fact
from stages.rollouts.trace import by_rollout, prompt_ids, state_digests, transcripts
from stages.runs.records import Row

OF_SAMPLES = ("ids as many as log-probs", "log-probs finite, <= 0")
OF_STEPS = (
    "steps dense from 0",
    "one done, the last",
    "tuples complete",
    "state hash chain",
    *OF_SAMPLES,
    "prompt extends the last",
    "prompt length as stored",
    "nothing truncated",
    "no output elided",
    "actions well-formed",
)
CHECKS = {"rollouts scored": 0.0, "reward in [0, 1]": 0.0, **dict.fromkeys(OF_STEPS, 0.0), "actions well-formed": 0.2}
"""The checks of rollouts and steps, with the share that may fail."""


@dataclass
class _Tally:
    failed: int = 0
    total: int = 0
    unrecorded: int = 0


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


class Gate:
    """All checks over a collection, rollout after rollout.

    What a source cannot tell is given with each rollout; a check that needs it passes the rollout over and counts it
    apart.
    """

    def __init__(self) -> None:
        self._tallies: dict[str, _Tally] = {name: _Tally() for name in CHECKS}
        self._ids: set[str] = set()
        self._rollouts = 0

    def add(self, rollout: Row | None, steps: list[Row], absent: Collection[Fact] = ()) -> None:
        """One rollout, None where its row is missing, and its steps in order; what its source cannot tell."""
        tell = partial(self._tell, absent)
        if rollout is not None:
            self._ids.add(rollout["rollout_id"])
            self._rollouts += 1
            reward = rollout["reward"]
            tell("rollouts scored", [reward], lambda r: r is not None, missing.REWARD)
            tell("reward in [0, 1]", [reward], lambda r: r is None or 0.0 <= r <= 1.0, missing.REWARD)
            if missing.STEPS in absent:
                for name in OF_STEPS:
                    self._tallies[name].unrecorded += 1
        sampled = [row for row in steps if row["capture_level"] == "tokens" or row["logprobs"] is not None]
        for name in OF_SAMPLES:
            self._tallies[name].unrecorded += len(steps) - len(sampled)
        episodes = [steps] if steps else []
        tell("steps dense from 0", episodes, lambda e: [s["step"] for s in e] == list(range(len(e))))
        tell("one done, the last", episodes, lambda e: [s["done"] for s in e] == [False] * (len(e) - 1) + [True])
        tell("tuples complete", steps, partial(_complete, absent))
        tell("state hash chain", episodes, _chained)
        tell("ids as many as log-probs", sampled, _lengths_agree, missing.TOKENS)
        tell("log-probs finite, <= 0", sampled, _log_probs_valid, missing.LOGPROBS)
        tell("prompt extends the last", steps, _extends, missing.TOKENS)
        tell("prompt length as stored", episodes, _prompt_lengths, missing.TOKENS)
        tell("nothing truncated", steps, lambda s: not s["truncated"], missing.FINISH)
        tell("no output elided", steps, lambda s: not s["elided_chars"], missing.ELISION)
        tell("actions well-formed", steps, lambda s: s["parse_error"] is None, missing.PARSE)

    def _tell(
        self,
        absent: Collection[Fact],
        name: str,
        items: Sequence[Any],
        holds: Callable[[Any], bool],
        needs: Fact | None = None,
    ) -> None:
        tally = self._tallies[name]
        if needs in absent:
            tally.unrecorded += len(items)
        else:
            tally.total += len(items)
            tally.failed += sum(not holds(item) for item in items)

    def checks(self, planned: int) -> list[Check]:
        """What came of it, where so many rollouts were planned."""
        ids = len(self._ids)
        return [
            Check("rollouts collected", planned - ids, planned),
            Check("rollout ids unique", self._rollouts - ids, self._rollouts),
            *(
                Check(name, tally.failed, tally.total, CHECKS[name], tally.unrecorded)
                for name, tally in self._tallies.items()
            ),
        ]


def check(
    rollouts: Iterable[Row],
    steps: Iterable[Row],
    planned: int,
    absent: Mapping[str, Collection[Fact]] | None = None,
) -> list[Check]:
    """All checks over rows that are in memory; `absent` holds by rollout what its source cannot tell."""
    found, grouped, absent = Gate(), by_rollout(list(steps)), absent or {}
    for row in rollouts:
        found.add(row, grouped.pop(row["rollout_id"], []), absent.get(row["rollout_id"], ()))
    for rollout_id, rows in grouped.items():
        found.add(None, rows, absent.get(rollout_id, ()))
    return found.checks(planned)


def _complete(absent: Collection[Fact], step: Row) -> bool:
    """State, action and reward are there; only a source that has no rewards may lack the last."""
    scored = step["reward"] is not None or missing.REWARD in absent
    return bool(step["new_messages_json"] and step["state_sha256"]) and step["action"] is not None and scored


def _chained(episode: list[Row]) -> bool:
    """Every state is the one before it, plus the action and what was observed, in one message or several.

    A request for a summary may follow.
    """
    if state_digests(episode) != [row["state_sha256"] for row in episode]:
        return False
    said = transcripts(episode)
    return all(_follows(row, before, after) for row, before, after in zip(episode, said, said[1:], strict=False))


def _follows(row: Row, before: list[Message], after: list[Message]) -> bool:
    gained = after[len(before) :]
    if row.get("history") == SUMMARISE and gained[-1:] == [request()]:
        gained = gained[:-1]
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


# ---- account
# What rollouts came to, added up one after the other: how many, rewards, verdicts, tokens, the first failure.


@dataclass
class Mean:
    """A mean of what is added to it; `value` is None of nothing."""

    total: float = 0.0
    number: int = 0

    def add(self, value: float) -> None:
        """One more value."""
        self.total, self.number = self.total + value, self.number + 1

    @property
    def value(self) -> float | None:
        """The mean."""
        return self.total / self.number if self.number else None


@dataclass
class Account:
    """Sums over rollouts. Tokens that a source does not tell count as none."""

    rollouts: int = 0
    steps: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_failure: str | None = None
    rewards: Mean = field(default_factory=Mean)
    strict: Mean = field(default_factory=Mean)
    loose: Mean = field(default_factory=Mean)

    def add(self, rollout: Row, steps: int) -> None:
        """One rollout and the number of its steps."""
        self.rollouts += 1
        self.steps += steps
        self.prompt_tokens += rollout["prompt_tokens"] or 0
        self.completion_tokens += rollout["completion_tokens"] or 0
        if rollout["error_type"] is not None:
            self.failed += 1
            self.first_failure = self.first_failure or f"{rollout['error_type']}: {rollout['error']}"
        if rollout["reward"] is not None:
            self.rewards.add(rollout["reward"])
        if rollout["gt_pass"] is not None and rollout["visible_pass"] is not None:
            self.strict.add(rollout["gt_pass"])
            self.loose.add(rollout["visible_pass"])

    @property
    def mean_reward(self) -> float | None:
        """Over the rollouts that were scored."""
        return self.rewards.value

    @property
    def strict_rate(self) -> float | None:
        """The share of strict passes where there are both verdicts."""
        return self.strict.value

    @property
    def loose_rate(self) -> float | None:
        """The share of loose passes there."""
        return self.loose.value
