"""The environment of one task, in bubblewrap or, where a module has a fixture `runs_in` of its own, in an engine."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from support.harbor import Files, for_training
from support.sample_package import write

from composer_stages.envs.base import Task
from composer_stages.envs.harbor.env import HarborEnv

Make = Callable[..., tuple[HarborEnv, Task]]


@pytest.fixture
def runs_in() -> str:
    """What the tasks run in."""
    return "bubblewrap"


@pytest.fixture
def made(tmp_path: Path, runs_in: str) -> Iterator[Make]:
    """Make the environment and the only task of given files, below `tasks0`, `tasks1`, ..."""
    with ExitStack() as opened:
        count = iter(range(1000))

        def make(files: Files, **options: Any) -> tuple[HarborEnv, Task]:
            root = tmp_path / f"tasks{next(count)}"
            write(root / "task0", for_training(files))
            env = opened.enter_context(closing(HarborEnv(path=str(root), **{"runs_in": runs_in, **options})))
            (task,) = env.tasks("train", 1, seed=0)
            return env, task

        yield make
