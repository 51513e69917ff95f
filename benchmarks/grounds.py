"""On what ground are tasks paid: how many passes of own solutions rest on values, and why do the others not?

    python benchmarks/grounds.py SDIST... [--count TASKS] [--cache FOLDER]

Each task of swe-mini, and the first `--count` of feature deletion from each package, is played once with its own
solution. Prints one line a task that gives `report`, with the reason.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import cases
from records import Claim, measured

from composer_stages.envs.base import Task
from composer_stages.envs.feature_deletion.env import FeatureDeletionEnv
from composer_stages.envs.repo.session import RepoEnvironment
from composer_stages.envs.swe.mini import SweMiniEnv


def grounds(packages: tuple[str, ...], count: int = 8, cache: str = "") -> Iterator[Claim]:
    """The share of tasks by ground.

    cache: a folder for what swe-mini fetches and builds once.
    """
    with closing(SweMiniEnv(cache=cache) if cache else SweMiniEnv()) as env:
        yield from _played("swe-mini", env, [one for split in ("train", "eval") for one in env.tasks(split, 12, 0)])
    for package in packages:
        with closing(FeatureDeletionEnv(package=package)) as env:
            yield from _played(Path(package).name, env, env.tasks("train", count, 0))


def _played(name: str, env: RepoEnvironment, tasks: list[Task]) -> Iterator[Claim]:
    found: Counter[str] = Counter()
    for task in tasks:
        env.reset(task)
        env.step(env.solution()[0])
        grade = env.grade()
        ground = grade.ground if grade.reward == 1.0 else "unpaid"
        found[str(ground)] += 1
        if ground != "values":
            reason = grade.error or (grade.work.test_log or "").partition("\n")[0]
            print(f"{name} {task.task_id}: {ground}, {reason}", flush=True)
    yield measured(f"{name}: {len(tasks)} tasks, of them paid on values", found["values"], n=len(tasks))
    yield measured(f"{name}: {len(tasks)} tasks, of them not paid", found["unpaid"], n=len(tasks), goal="= 0")


CASES = {"grounds": grounds}

if __name__ == "__main__":
    cases.main(__file__, CASES)
