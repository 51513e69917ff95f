"""Power cuts before random changes of a run's files: what is complete stays, and what is not goes on."""

import os
from pathlib import Path
from typing import Any

import pytest
from needs import needs
from support.disturbances import Work, contents, cut_power, finish, preload
from support.models import save_tiny

from stages import train

ENV = {"name": "support.environments:NumberedEnv"}
CUTS = int(os.environ.get("COMPOSER_CUTS", 3))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Work, dict[str, Any]]:
    """A training, and what comes of it."""
    preload("stages.training.report", "duckdb", "scipy.stats")
    place = tmp_path_factory.mktemp("tiny")
    size = {"steps": 6, "prompts_per_step": 2, "generations": 4, "save_every": 2, "threads": 1, "keep_every": 3}
    policy = {"model": str(save_tiny(place / "model")), "max_tokens": 20}
    work = Work("train", train.Config(env=ENV, policy=policy, tasks=4, optimisation=size))
    finish(work, place / "whole")
    return work, contents(place / "whole")


@needs("compiler")
def test_train(trained: tuple[Work, dict[str, Any]], tmp_path: Path) -> None:
    work, expected = trained
    cut_power(work, tmp_path, CUTS, expected, seed=1)
