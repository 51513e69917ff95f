"""What a training run keeps of its course beside the model: rollouts, their steps, rewards, and hints, as tables.

Each training step is a unit of the run's journal, so a killed run keeps what it played; steps that are played again
after a resume take the place of their first record.
"""

from collections.abc import Sequence
from typing import Any

from stages.policy.base import Policy
from stages.rollouts import trace
from stages.rollouts.episode import Episode
from stages.runs.artifact import Out
from stages.runs.records import HINT, ROLLOUT, STEP, TRAINING_REWARD, Row
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
    units = sorted(out.records(), key=lambda unit: str(unit["unit"]))
    units = [unit for unit in units if unit.get("training_step", num_steps) < num_steps]
    played: list[tuple[int, Any]] = [(u["training_step"], p) for u in units for p in u.get("played", ())]
    out.table(ROLLOUT, [payload["rollout"] for _, payload in played])
    out.table(STEP, [row for _, payload in played for row in payload["steps"]])
    out.table(TRAINING_REWARD, [reward_row(step, payload["rollout"]) for step, payload in played])
    out.table(HINT, [row for unit in units for row in unit.get("hints", ())])


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
