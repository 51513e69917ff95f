"""Groups of answers for one GRPO step, by student and teacher, as pool rows with advantages."""

from collections.abc import Callable, Sequence

from stages.envs.base import Environment, Task
from stages.policy.local import LocalPolicy
from stages.probe.checks.guards.prompts import HINTED
from stages.probe.pool.rows import episode_pool_row
from stages.rollouts.episode import Episode, play
from stages.runs.records import Row


def answers(
    make: Callable[[], Environment],
    policy: LocalPolicy,
    tasks: Sequence[Task],
    samples: int,
    seed: int,
    source: str,
    max_steps: int,
) -> list[Row]:
    """`pool_row/1` rows of `samples` answers to each task; those that could not be scored are left out.

    `make` opens an environment, `source` becomes src_pool, `max_steps` is the number of actions after which a rollout
    ends.
    """
    episodes = [Episode(task, index, seed) for task in tasks for index in range(samples)]
    play(make, policy, episodes, max_steps=max_steps)
    return [
        episode_pool_row(episode, policy, source=source, role=HINTED, step=0)
        for episode in episodes
        if episode.error is None and episode.steps and episode.grade.reward is not None
    ]


def with_advantages(rows: Sequence[Row]) -> tuple[list[Row], list[list[float]]]:
    """Rows with A = R - mean R of the problem's group (Dr.GRPO, arXiv 2503.20783), and the rewards by group."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(row["problem_id"], []).append(row["reward"])
    means = {problem: sum(rewards) / len(rewards) for problem, rewards in groups.items()}
    judged = [row | {"advantage": row["reward"] - means[row["problem_id"]], "adv_kind": "dr_grpo"} for row in rows]
    return judged, list(groups.values())
