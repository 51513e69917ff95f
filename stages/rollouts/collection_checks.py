"""Decide by counted checks over rollout and step rows whether a collection's rollouts are clean.

`CollectionChecks` counts rollout after rollout, so that a run may exceed memory; `Account` sums rewards, verdicts and
tokens of the same rollouts for the report.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from composer_stages import endings
from composer_stages.layout import aligned
from composer_stages.rollouts import missing
from composer_stages.rollouts.history import FULL, SUMMARISE, SUMMARY_REQUEST
from composer_stages.rollouts.missing import Fact
from composer_stages.rollouts.trace import OUT_OF_STEPS, by_rollout, played_by, prompt_ids, state_digests, transcripts
from composer_stages.runs.kinds import Row
from composer_stages.words import Sentence

SERVED = ("served_model", "provider", "system_fingerprint")


@dataclass(frozen=True)
class CheckedRollout:
    """A rollout's row, None where it is missing, its steps in order, and the facts that its source does not record."""

    rollout: Row | None
    steps: list[Row]
    absent: Collection[Fact] = ()


def _rollout(checked: CheckedRollout) -> Sequence[Row]:
    return [] if checked.rollout is None else [checked.rollout]


def _steps(checked: CheckedRollout) -> Sequence[Row]:
    return checked.steps


def _all_steps(checked: CheckedRollout) -> Sequence[list[Row]]:
    return [checked.steps] if checked.steps else []


def _sampled(checked: CheckedRollout) -> Sequence[Row]:
    """Return the steps of which a policy gave tokens or log-probs."""
    return [row for row in checked.steps if row["capture_level"] == "tokens" or row["logprobs"] is not None]


@dataclass(frozen=True)
class RolloutCheck:
    """A check: what it looks at of a rollout, whether that holds, the fact it needs, and the tolerated share.

    A rollout whose source does not record the fact counts as unrecorded.
    """

    name: str
    of: Callable[[CheckedRollout], Sequence[Any]]
    holds: Callable[[Any], bool]
    needs: Fact | None = None
    tolerated: float = 0.0


CHECKS = (
    RolloutCheck("rollouts scored", _rollout, lambda r: r["reward"] is not None, missing.REWARD),
    RolloutCheck("reward in [0, 1]", _rollout, lambda r: r["reward"] is None or 0 <= r["reward"] <= 1, missing.REWARD),
    RolloutCheck("steps dense from 0", _all_steps, lambda steps: [s["step"] for s in steps] == list(range(len(steps)))),
    RolloutCheck(
        "one done, the last",
        _all_steps,
        lambda steps: [s["done"] for s in steps] == [False] * (len(steps) - 1) + [True],
    ),
    RolloutCheck(
        "tuples complete",
        lambda played: [(row, missing.REWARD in played.absent) for row in played.steps],
        lambda step: (
            bool(step[0]["new_messages_json"] and step[0]["state_sha256"])
            and step[0]["action"] is not None
            and (step[0]["reward"] is not None or step[1])
        ),
    ),
    RolloutCheck(
        "state hash chain",
        lambda played: [(played.steps, _tools(played.rollout))] if played.steps else [],
        lambda rollout: _chained(*rollout),
    ),
    RolloutCheck(
        "ids as many as log-probs",
        _sampled,
        lambda s: (
            len(s["completion_token_ids"]) == len(s["logprobs"]) > 0
            if s["capture_level"] == "tokens"
            else (s["logprobs"] is None) == (s["capture_level"] == "text")
        ),
        missing.TOKENS,
    ),
    RolloutCheck(
        "log-probs finite, <= 0",
        _sampled,
        # A log-prob that is NaN is null in the journal, as JSON has no word for it.
        lambda s: all(p is not None and math.isfinite(p) and p <= 0 for p in s["logprobs"] or ()),
        missing.LOGPROBS,
    ),
    RolloutCheck(
        "prompt extends the last",
        _steps,
        # A prompt need not extend the last one where the policy is not shown the full history.
        lambda s: s["prefix_ok"] is not False or s.get("history") not in (None, FULL),
        missing.TOKENS,
    ),
    RolloutCheck(
        "prompt length as stored",
        _all_steps,
        lambda steps: all(
            ids is None or len(ids) == row["prompt_len"] for ids, row in zip(prompt_ids(steps), steps, strict=True)
        ),
        missing.TOKENS,
    ),
    RolloutCheck(
        "answers not truncated",
        _steps,
        lambda s: not s["truncated"] or s["finish_reason"] in (endings.FILTERED, endings.MALFORMED),
        missing.FINISH,
        tolerated=0.2,
    ),
    RolloutCheck(
        "answers not filtered", _steps, lambda s: s["finish_reason"] != endings.FILTERED, missing.FINISH, tolerated=0.2
    ),
    RolloutCheck("no output elided", _steps, lambda s: not s["elided_chars"], missing.ELISION),
    RolloutCheck(
        "actions well-formed",
        # What was cut off is not parsed, and has a check of its own; a call that a server could not read is malformed.
        lambda played: [
            row for row in played.steps if not row["truncated"] or row["finish_reason"] == endings.MALFORMED
        ],
        lambda s: s["parse_error"] is None,
        missing.PARSE,
        tolerated=0.2,
    ),
)
"""The checks of rollouts and of their steps."""
ONE_MODEL = "answers of one model"
NEEDS = {check.name: check.needs or missing.STEPS for check in CHECKS} | {ONE_MODEL: "the server's name of its model"}
"""What a check, by its name, needs of a source; where steps are not recorded, a check of them has nothing to count."""


@dataclass(frozen=True)
class CollectionCheck:
    """A counted check: `failed` of `total`, the tolerated share, and how many the source does not record."""

    name: str
    failed: int
    total: int
    tolerated: float = 0.0
    unrecorded: int = 0

    @property
    def verdict(self) -> str:
        """Return `ok` within tolerance. A check over nothing is `FAIL`, or `not recorded` where the source lacks it."""
        if self.total == 0 and self.unrecorded > 0:
            return "not recorded"
        return "ok" if self.total > 0 and self.failed <= self.tolerated * self.total else "FAIL"

    @property
    def ok(self) -> bool:
        """Return whether the check has not failed."""
        return self.verdict != "FAIL"


@dataclass
class _Tally:
    failed: int = 0
    total: int = 0
    unrecorded: int = 0


@dataclass
class CollectionChecks:
    """All checks over a collection, one rollout at a time."""

    _tallies: dict[RolloutCheck, _Tally] = field(default_factory=lambda: {check: _Tally() for check in CHECKS})
    _ids: set[str] = field(default_factory=set)
    _rollouts: int = 0
    served: Counter[tuple[str | None, ...]] = field(default_factory=Counter)
    """Answers by `SERVED`, where a server says it."""
    cut_prompts: int = 0
    """Prompts of which the server counted fewer tokens than they have."""
    _unnamed: int = 0

    def add(self, rollout: Row | None, steps: list[Row], absent: Collection[Fact] = ()) -> None:
        """Check one rollout, None where its row is missing, and its steps in order; `absent`: facts not recorded."""
        checked = CheckedRollout(rollout, steps, absent)
        for check, tally in self._tallies.items():
            items = check.of(checked)
            if check.needs in absent:
                tally.unrecorded += len(items)
            else:
                tally.total += len(items)
                tally.failed += sum(not check.holds(item) for item in items)
            if check.of is _sampled:
                tally.unrecorded += len(steps) - len(items)
            if rollout is not None and missing.STEPS in absent and check.of is not _rollout:
                tally.unrecorded += 1  # once a rollout: how many steps there were is not recorded either
        if rollout is not None:
            self._ids.add(rollout["rollout_id"])
            self._rollouts += 1
        self.cut_prompts += sum(row.get("prompt_read") is not None for row in steps)
        named = [tuple(row.get(name) for name in SERVED) for row in steps if played_by(row) is None]
        self.served.update(entry for entry in named if any(entry))
        self._unnamed += sum(not any(entry) for entry in named)

    def checks(self, planned: int) -> list[CollectionCheck]:
        """Return all checks over what was added, where `planned` rollouts were planned."""
        # By distinct id: a rollout that was written twice must not hide one that is missing.
        ids = len(self._ids)
        arms = Counter[tuple[str | None, ...]]()
        for (*model_and_provider, _), number in self.served.items():
            arms[tuple(model_and_provider)] += number
        return [
            CollectionCheck("rollouts collected", planned - ids, planned),
            CollectionCheck("rollout ids unique", self._rollouts - ids, self._rollouts),
            *(
                CollectionCheck(check.name, tally.failed, tally.total, check.tolerated, tally.unrecorded)
                for check, tally in self._tallies.items()
            ),
            CollectionCheck(
                ONE_MODEL,
                arms.total() - max(arms.values(), default=0),
                arms.total(),
                unrecorded=self._unnamed or not arms,
            ),
        ]


def check(
    rollouts: Iterable[Row], steps: Iterable[Row], planned: int, absent: Mapping[str, Collection[Fact]] | None = None
) -> list[CollectionCheck]:
    """Return all checks over rows in memory; `absent`: unrecorded facts by rollout."""
    collection, grouped, absent = CollectionChecks(), by_rollout(list(steps)), absent or {}
    for row in rollouts:
        collection.add(row, grouped.pop(row["rollout_id"], []), absent.get(row["rollout_id"], ()))
    for rollout_id, rows in grouped.items():
        collection.add(None, rows, absent.get(rollout_id, ()))
    return collection.checks(planned)


def _tools(rollout: Row | None) -> list[Any]:
    return orjson.loads((rollout or {}).get("tools_json") or "[]")


def _chained(steps: list[Row], tools: list[Any]) -> bool:
    """Return whether every state is the one before it, plus the action and the observation, in one message or several.

    A request for a summary may follow the observation.
    """
    recorded = [row["state_sha256"] for row in steps]
    # Without the tools: of runs before version 5 of `collect` and 9 of `import`.
    if recorded != state_digests(steps, tools) and recorded != state_digests(steps):
        return False
    conversations = transcripts(steps)
    for row, before, after in zip(steps, conversations, conversations[1:], strict=False):
        gained = after[len(before) :]
        if row.get("history") == SUMMARISE and gained[-1:] == [SUMMARY_REQUEST]:
            gained = gained[:-1]
        observation = "\n".join(message["content"] for message in gained[1:])
        action = [{"role": "assistant", "content": row["action"]}]
        if after[: len(before)] != before or gained[:1] != action or observation != row["observation"]:
            return False
    return True


def summary(checks: Sequence[CollectionCheck]) -> dict[str, Any]:
    """Return what a manifest says of the checks: those that failed; of each, how many pass, of how many."""
    counts = {check.name: [check.total - check.failed, check.total, check.unrecorded] for check in checks}
    return {"failed_checks": [check.name for check in checks if not check.ok], "collection_checks": counts}


def title(num: int, failed: int, unrecorded: Sequence[str]) -> str:
    """Return the number of passed checks of `num` as one line; the checks of the names `unrecorded` lack data."""
    applied = num - len(unrecorded)
    passed = f"{applied - failed} of {applied}" if failed else f"all {applied}"
    facts = ", ".join(dict.fromkeys(NEEDS.get(name, name) for name in unrecorded))
    needs = "needs" if len(unrecorded) == 1 else "need"
    more = f"; {len(unrecorded)} more {needs} what was not recorded ({facts})" if unrecorded else ""
    return f"Collection checks: {passed} passed{more}"


def table(checks: Sequence[CollectionCheck]) -> str:
    """Return the number of passed checks, and a line for each check with failures or unrecorded rows."""
    cells = []
    for each in checks:
        more = f", {each.unrecorded} not recorded" if each.unrecorded else ""
        if each.verdict != "not recorded" and (each.failed or more or not each.ok):
            cells.append((each.verdict, each.name, f"{each.total - each.failed} of {each.total}{more}"))
    num_failed = sum(not each.ok for each in checks)
    unrecorded = [each.name for each in checks if each.verdict == "not recorded"]
    head = title(len(checks), num_failed, unrecorded)
    return "\n".join([head, *([aligned(cells)] if cells else [])])


def advice(failed: Sequence[str]) -> str:
    """Return what to do about the failed checks of these names; empty without any."""
    return f"\n{Sentence('rollouts.checks-failed', failed=failed)}\n" if failed else ""


@dataclass
class RunningMean:
    """The mean of the values added so far."""

    total: float = 0.0
    number: int = 0

    def add(self, value: float) -> None:
        """Add one value."""
        self.total, self.number = self.total + value, self.number + 1

    @property
    def value(self) -> float | None:
        """Return the mean; None of nothing."""
        return self.total / self.number if self.number else None


@dataclass
class Account:
    """Sums over rollouts. Tokens that a source does not record count as 0.

    `rewards`: over scored rollouts. `hidden_pass`, `visible_pass`: passes of the hidden and of the visible tests, over
    rollouts that have both.
    """

    rollouts: int = 0
    steps: int = 0
    failed: int = 0
    out_of_steps: int = 0
    """Rollouts that the limit of steps ended."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_failure: str | None = None
    rewards: RunningMean = field(default_factory=RunningMean)
    hidden_pass: RunningMean = field(default_factory=RunningMean)
    visible_pass: RunningMean = field(default_factory=RunningMean)
    passes: Counter[str] = field(default_factory=Counter)
    """By ground, "" for an unknown one."""
    by_task: dict[str, list[int]] = field(default_factory=dict)
    """Scored rollouts of each task, and those of them that passed."""

    def add(self, rollout: Row, steps: int) -> None:
        """Add one rollout and the number of its steps."""
        self.rollouts += 1
        self.steps += steps
        self.out_of_steps += rollout["terminated_by"] == OUT_OF_STEPS
        self.prompt_tokens += rollout["prompt_tokens"] or 0
        self.completion_tokens += rollout["completion_tokens"] or 0
        if rollout["error_type"] is not None:
            self.failed += 1
            self.first_failure = self.first_failure or f"{rollout['error_type']}: {rollout['error']}"
        if rollout["reward"] is not None:
            self.rewards.add(rollout["reward"])
            counts = self.by_task.setdefault(rollout["task_id"], [0, 0])
            counts[0] += 1
            counts[1] += rollout["reward"] >= 1
        if (rollout["reward"] or 0) >= 1:
            self.passes[rollout["ground"] or ""] += 1
        if rollout["hidden_pass"] is not None and rollout["visible_pass"] is not None:
            self.hidden_pass.add(rollout["hidden_pass"])
            self.visible_pass.add(rollout["visible_pass"])
