"""Runs that several stage tests start from: a tiny model, rollouts, answers of teachers on a loopback server."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.models import save_tiny
from support.server import Reply, answer, serving

from composer_stages import collect, extract_pairs, replay_teachers
from composer_stages.runs import runner
from composer_stages.runs.run import Run

ENV = "support.environments:GuessEnv"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder."""
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def collected(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Callable[..., Run]:
    """Collects rollouts of GuessEnv with the tiny model; equal settings give the same run, which is only read."""
    root = tmp_path_factory.mktemp("collected")

    def collect_run(**more: object) -> Run:
        policy = {"model": str(tiny), "max_tokens": 200}
        config = collect.Config(**{"env": {"name": ENV}, "policy": policy, "tasks": 3, "samples": 2, **more})
        return Run(runner.execute("collect", {}, config, root=root).path)

    return collect_run


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory, collected: Callable[..., Run]) -> Run:
    """Pairs from text alone: three teachers on a server, all of one mind."""
    root, rollouts = tmp_path_factory.mktemp("pairs"), collected()
    with serving(lambda body, n: Reply(body=answer("```bash\nabc\n```"))) as server:
        table = [{"name": name, "model": name, "base_url": server.url, "max_tokens": 99} for name in "xyz"]
        config = replay_teachers.Config(teachers=table)
        answers = Run(runner.execute("replay-teachers", {"rollouts": rollouts}, config, root=root).path)
    given = {"rollouts": rollouts, "teacher_actions": answers}
    return Run(runner.execute("extract-pairs", given, extract_pairs.Config(compare="canonical"), root=root).path)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs that the tests of a module share: equal work below it is done once, and only read."""
    return tmp_path_factory.mktemp("artifacts")
