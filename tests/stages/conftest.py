"""Runs that several stage tests start from: a tiny model, rollouts, answers of teachers on a loopback server."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.models import save_tiny

from stages import collect
from stages.runs import runner
from stages.runs.run import Run

ENV = "support.environments:GuessEnv"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder."""
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def collected(tmp_path: Path, tiny: Path) -> Callable[..., Run]:
    """Collects rollouts of GuessEnv with the tiny model below `tmp_path`."""

    def collect_run(**more: object) -> Run:
        config = collect.Config(
            env={"name": ENV}, policy={"model": str(tiny), "max_tokens": 200}, **{"tasks": 3, "samples": 2, **more}
        )
        return Run(runner.execute("collect", {}, config, root=tmp_path).path)

    return collect_run
