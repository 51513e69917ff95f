"""Terminal-Bench before Harbor: `results.json` of a trial, and of a run, which holds all of its trials; no transcript.

A trial without a verdict (its tests crashed or took too long) has no reward, and its failure mode is its error. The
model is in `run_metadata.json` of the run. A run's file is read rather than those of its trials, as a trial that broke
down has none.

Format read from logs of eleven agents in laude-institute/terminal-bench-leaderboard, `results/`.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from composer_stages.formats.base import WITHOUT_TRANSCRIPT, Origin, Reader, Record, Trajectory, has_keys, seconds
from composer_stages.formats.measurement import REWARD, Aggregate, MeasuredLog, ScoreKind, told
from composer_stages.terms import TERMINAL_BENCH

NAME = TERMINAL_BENCH
UNSET = "unset"
"""The failure mode of a trial in which nothing failed."""


def is_trial(record: Any) -> bool:
    """Whether a record is the result of one trial."""
    return has_keys(record, "task_id trial_name is_resolved failure_mode")


def is_run(record: Any) -> bool:
    """Whether a record is the results of a run."""
    trials = record.get("results") if isinstance(record, dict) else None
    return isinstance(trials, list) and bool(trials) and is_trial(trials[0])


def trial_trajectories(record: Record, origin: Origin) -> Iterator[Trajectory]:
    """Yield the item of one trial."""
    resolved, failure = record["is_resolved"], record["failure_mode"]
    about = (origin.sidecars.descriptions.get((folder, "")) for folder in origin.path.parents)
    yield Trajectory(
        task_id=record["task_id"],
        env=NAME,
        own_id=record.get("uuid") or record.get("id"),
        model=next(filter(None, about), {}).get("model"),
        statement=record.get("instruction"),
        reward=None if resolved is None else float(resolved),
        unscored=True,
        terminated_by=None if failure == UNSET else failure,
        error=(failure, f"{record['trial_name']} has no verdict") if resolved is None else None,
        prompt_tokens=record.get("total_input_tokens"),
        completion_tokens=record.get("total_output_tokens"),
        wall_s=seconds(record.get("agent_started_at"), record.get("agent_ended_at")),
        extra={"tests": record.get("parser_results")},
    )


def run_trajectories(record: Record, origin: Origin) -> Iterator[Trajectory]:
    """Yield the items of a run's trials."""
    for trial in record["results"]:
        for trajectory in trial_trajectories(trial, origin):
            trajectory.log = origin.log("", partial(_log, record.get("accuracy"), trajectory.model))
            yield trajectory


def _log(accuracy: Any, model: str | None) -> MeasuredLog:
    """Return what a run is of; a trial without a verdict is none that was resolved."""
    reported = told(REWARD, "accuracy", accuracy, Aggregate.SAMPLES)
    return MeasuredLog(NAME, task=NAME, model=model, kinds=(ScoreKind(scale=(0.0, 1.0)),), reported=reported)


READERS = (
    Reader(NAME, is_trial, trial_trajectories, WITHOUT_TRANSCRIPT, describes=True),
    Reader(NAME, is_run, run_trajectories, WITHOUT_TRANSCRIPT),
)
