"""The few transcripts worth reading first: where two arms part, a hack if there is one, a success and a failure."""

from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from composer_cli.show.transcripts import Transcript, of_run
from stages.runs.artifact import Run

Example = dict[str, Any]


def examples(runs: Sequence[Run]) -> list[Example]:
    """Examples from the last run that played rollouts, each with the reason why it is shown."""
    if not runs:
        return []
    found, verdict = of_run(runs[-1]), orjson.loads(runs[-1].beside("verdict.json") or b"{}")
    chosen = _where_they_part(found, verdict) if verdict else []
    hacked = next((t for t in found if t.outcome.get("hacked")), None)
    chosen += [_example(hacked, "visible tests passed because they were tampered with")] if hacked else []
    return chosen or _one_of_each(found)


def _where_they_part(found: Iterable[Transcript], verdict: dict[str, Any]) -> list[Example]:
    """The first task that only the treatment passed, and the first that only the baseline did, both sides of each."""
    by_arm: dict[str, dict[str, Transcript]] = {}
    for transcript in found:
        by_arm.setdefault(transcript.outcome["arm"], {})[_task(transcript)] = transcript
    one, other = verdict["treatment"], verdict["baseline"]
    chosen = []
    for winner, loser in ((one, other), (other, one)):
        wins, losses = by_arm.get(winner, {}), by_arm.get(loser, {})
        parted = (key for key in wins if key in losses and _passed(wins[key]) and _passed(losses[key]) is False)
        if (key := next(parted, None)) is not None:
            chosen += [
                _example(wins[key], f"{winner} passed where {loser} failed"),
                _example(losses[key], f"{loser} failed where {winner} passed"),
            ]
    return chosen


def _task(transcript: Transcript) -> str:
    """The rollout without its arm and training seed: what pairs it with its counterpart."""
    return transcript.rollout_id.split("/", 2)[-1]


def _passed(transcript: Transcript) -> bool | None:
    outcome = transcript.outcome
    if "passed" in outcome:
        return bool(outcome["passed"])
    return None if outcome.get("reward") is None else outcome["reward"] >= 1.0


def _one_of_each(found: Sequence[Transcript]) -> list[Example]:
    passed = next((t for t in found if _passed(t)), None)
    failed = next((t for t in found if _passed(t) is False), None)
    chosen = [_example(passed, "passed")] if passed else []
    return chosen + ([_example(failed, "failed")] if failed else [])


def _example(transcript: Transcript, why: str) -> Example:
    return {
        "why": why,
        "rollout_id": transcript.rollout_id,
        "outcome": transcript.outcome,
        "messages": transcript.messages,
    }
