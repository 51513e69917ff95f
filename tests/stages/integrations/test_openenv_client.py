"""Episodes through a real OpenEnv server in a process of its own: as in this process, or broken, with the reason."""

from pathlib import Path

import pytest
from needs import needs, where
from support.environments import GuessEnv, NeverGradedEnv

from composer_stages.envs.base import Environment, Task
from composer_stages.envs.kata.env import KataEnv
from composer_stages.errors import InfrastructureError, UsageError
from composer_stages.integrations.openenv_client import ServedEnvironment, running

TESTS = str(Path(__file__).parents[2])


@pytest.fixture(autouse=True)
def _own_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", TESTS)


def played(env: Environment, task: Task, *texts: str) -> list[object]:
    opening = env.reset(task)
    seen = [env.step(text) for text in texts]
    told = [(o.content, o.commands, o.parse_error, o.returncode, o.stop, o.raw_chars) for o in seen]
    return [opening, told, env.grade()]


@needs("openenv")
@pytest.mark.slow
def test_a_served_episode_equals_one_in_process(tmp_path: Path) -> None:
    tasks = KataEnv().tasks("train", 2, 0)
    commands = ["```bash\ncat solution.py\n```", "no command", "```bash\npython3 test_solution.py\n```"]
    here = KataEnv()
    with running("kata", {}, tasks, max_steps=5, sessions=2, folder=tmp_path, python=where("openenv")) as url:
        served = ServedEnvironment(url, "kata", here.sandbox, tasks)
        for task in tasks:
            for ends in ([], ["```bash\nsubmit\n```"]):
                assert played(served, task, *commands, *ends) == played(here, task, *commands, *ends)
        assert served.tasks("train", 1, 7) == tasks[:1] and served.tasks("eval", 1, 7) == []
        served.close()
        with pytest.raises(InfrastructureError, match="reset comes first"):
            served.step("a")
    here.close()


@needs("openenv")
@pytest.mark.slow
def test_server_errors_reach_the_client(tmp_path: Path) -> None:
    tasks = GuessEnv().tasks("train", 1, 0)
    name = "support.environments:NeverGradedEnv"
    with running(name, {"turns": 1}, tasks, max_steps=5, sessions=1, folder=tmp_path, python=where("openenv")) as url:
        served = ServedEnvironment(url, "guess", "not-needed", tasks)
        served.reset(tasks[0])
        assert served.step("a").stop and served.grade().reward is None and served.grade().error == "no grader"
        with pytest.raises(InfrastructureError, match=r"answers with an error: .*has ended"):
            served.step("a")
    with pytest.raises(InfrastructureError, match=r"lost|closed"):
        served.step("a")
    with pytest.raises(InfrastructureError, match=r"cannot be reached"):
        served.reset(tasks[0])


def test_a_server_that_does_not_start_is_refused(tmp_path: Path) -> None:
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\necho No module named openenv >&2\nexit 1\n")
    silent.chmod(0o755)
    tasks, how = NeverGradedEnv().tasks("train", 1, 0), {"max_steps": 5, "sessions": 1, "folder": tmp_path}
    words = r"did not start under .* \(No module named openenv\).*COMPOSER_OPENENV"
    nowhere = str(tmp_path / "nowhere" / "python")
    for python, said in ((str(silent), words), (nowhere, r"can be started with .*nowhere")):
        with pytest.raises(UsageError, match=said), running("kata", {}, tasks, **how, python=python):
            pass
