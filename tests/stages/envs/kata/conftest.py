"""An environment, and a task that was begun in it."""

from collections.abc import Iterator

import pytest

from composer_stages.envs.base import Task
from composer_stages.envs.kata.env import KataEnv


@pytest.fixture
def env() -> Iterator[KataEnv]:
    environment = KataEnv()
    yield environment
    environment.close()


@pytest.fixture
def task(env: KataEnv) -> Task:
    chosen = env.tasks("train", 1, seed=0)[0]
    env.reset(chosen)
    return chosen
