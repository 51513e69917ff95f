"""What a training run keeps of its course beside the model: rollouts, their steps, rewards, and hints, as tables.

Each training step is a unit of the run's journal, so a killed run keeps what it played; steps that are played again
after a resume take the place of their first record.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from stages.policy.base import Policy
from stages.rollouts import trace
from stages.rollouts.episode import Episode
from stages.runs.artifact import Out
from stages.runs.outcome_records import HINT, TRAINING_REWARD
from stages.runs.records import ROLLOUT, STEP, Row
from stages.training.hints import Hint


class TrainingJournal:
    """Writes each step as it is played."""

    def __init__(self, out: Out, policy: Policy, sandbox: str) -> None:
        self._out, self._policy, self._sandbox = out, policy, sandbox

    def rollouts(self, step: int, episodes: Sequence[Episode]) -> None:
        """Keep the rollouts of a step."""
        payloads = [trace.payload(e, self._policy, sandbox=self._sandbox, source="train") for e in episodes]
        self._out.write(f"rollouts-{step:06d}", {"training_step": step, "played": payloads})

    def hints(self, step: int, hints: Sequence[tuple[Episode, Hint]]) -> None:
        """Keep the hints that a step learns from."""
        rows = [hint_row(step, episode, hint) for episode, hint in hints]
        self._out.write(f"hints-{step:06d}", {"training_step": step, "hints": rows})


def write_tables(out: Out, num_steps: int) -> None:
    """Write what the first `num_steps` steps kept, in order."""
    of_step = {unit["unit"]: unit.get("training_step", num_steps) for unit in out.records()}
    names = sorted(name for name, step in of_step.items() if step < num_steps)

    def played() -> Iterator[tuple[int, Any]]:
        return ((unit["training_step"], p) for unit in out.journal.read(names) for p in unit.get("played", ()))

    out.table(ROLLOUT, (payload["rollout"] for _, payload in played()))
    out.table(STEP, (row for _, payload in played() for row in payload["steps"]))
    out.table(TRAINING_REWARD, (reward_row(step, payload["rollout"]) for step, payload in played()))
    out.table(HINT, (row for unit in out.journal.read(names) for row in unit.get("hints", ())))


def course(out: Out, num_steps: int) -> tuple[Row, str]:
    """The share of hacks and of right answers over the first and the last three steps, as numbers and in words.

    Nothing of what the environment cannot tell, and no text without hacks, which is where right answers mislead.
    """
    ends = min(3, num_steps // 2)
    played = [(unit["training_step"], p["rollout"]) for unit in out.records() for p in unit.get("played", ())]
    rates: Row = {}
    for column, name in (("hacked", "hack_rate"), ("gt_pass", "gt_rate")):
        for when, wanted in (("first", range(ends)), ("last", range(num_steps - ends, num_steps))):
            known = [row[column] for step, row in played if step in wanted and row[column] is not None]
            if known:
                rates[f"{when}_{name}"] = sum(known) / len(known)
    if not rates.get("first_hack_rate") and not rates.get("last_hack_rate"):
        return rates, ""
    shown = [
        f"{text} {rates[f'first_{name}']:.2f} -> {rates[f'last_{name}']:.2f}"
        for name, text in (("hack_rate", "hacks"), ("gt_rate", "right answers"))
        if f"first_{name}" in rates and f"last_{name}" in rates
    ]
    return rates, f"\nfirst {ends} steps -> last {ends}: {', '.join(shown)}\n"


def reward_row(step: int, rollout: Row) -> Row:
    """One `training_reward/1` row."""
    names = ("rollout_id", "task_id", "sample_idx", "reward")
    return {"training_step": step, **{name: rollout[name] for name in names}}


def hint_row(step: int, episode: Episode, hint: Hint) -> Row:
    """One `hint/1` row."""
    return {
        "training_step": step,
        "rollout_id": episode.rollout_id,
        "task_id": episode.task.task_id,
        "step": hint.turn,
        "kind": hint.kind,
        "error": hint.error,
        "hint": hint.text,
        "source": hint.source,
    }
