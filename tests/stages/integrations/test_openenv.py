"""A session over one of our environments: in process, and on a real server over loopback where OpenEnv is installed."""

import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from needs import needs
from support.command_line import until
from support.environments import BreakingEnv, GuessEnv, NeverGradedEnv, RequiringEnv

from composer_stages.envs.base import Environment
from composer_stages.envs.kata.env import KataEnv
from composer_stages.errors import InfrastructureError, UsageError
from composer_stages.integrations.openenv import Session, TextAction, app
from composer_stages.words import Sentence

try:
    import uvicorn
    from openenv.core import GenericEnvClient
except ImportError:
    uvicorn = GenericEnvClient = None
TASKS = GuessEnv().tasks("train", 4, 0)


def session(environment: Environment | None = None, max_steps: int = 5) -> Session:
    return Session(environment or GuessEnv(), TASKS, max_steps)


def test_an_episode_ends_with_its_reward():
    one = session()
    opening = one.reset(index=1, episode_id="mine")
    assert opening.messages == [{"role": "user", "content": "say b"}] and opening.reward is None and not opening.done
    first = one.step(TextAction(text="b"))
    assert [first.done, first.reward, first.returncode] == [False, None, 127]
    assert first.messages == [{"role": "user", "content": "foo: command not found"}]
    last = one.step(TextAction(text="xb"))
    assert [last.done, last.reward, last.stop, last.messages] == [True, 2 / 3, "answered", []]
    assert last.metadata["hidden_pass"] is False
    assert one.state.model_dump() == {"episode_id": "mine", "step_count": 2, "task_id": "guess-1"}


def test_a_step_needs_a_reset_before_and_after_an_episode():
    one = session(GuessEnv(turns=1))
    with pytest.raises(UsageError, match="no episode has begun"):
        one.step(TextAction(text="a"))
    one.reset()
    one.step(TextAction(text="a"))
    with pytest.raises(UsageError, match=r"has ended \(answered\)"):
        one.step(TextAction(text="a"))
    one.reset()
    one.close()
    with pytest.raises(UsageError, match="closed"):
        one.step(TextAction(text="a"))
    broken = session(BreakingEnv())
    broken.reset(index=0)
    for error, words in ((InfrastructureError, ""), (UsageError, "broke off")):
        with pytest.raises(error, match=words):
            broken.step(TextAction(text="a"))


def test_the_task_is_chosen_by_index_or_seed():
    one = session()
    for asked, task in (({"index": 2}, 2), ({"seed": 7}, 3), ({}, 0)):
        one.reset(**asked)
        assert one.state.task_id == f"guess-{task}"
    with pytest.raises(UsageError, match="no task 4; there are 4"):
        one.reset(index=4)


def test_steps_run_out():
    one = session(GuessEnv(turns=9), max_steps=2)
    one.reset()
    assert not one.step(TextAction(text="a")).done
    last = one.step(TextAction(text="a"))
    assert last.done and last.stop == "max_steps" and last.reward == 1.0 and last.messages


@pytest.mark.parametrize(
    ("environment", "error"), [(NeverGradedEnv, "no grader"), (RequiringEnv, Sentence("envs.not-paid"))]
)
def test_ungraded_episodes_have_no_reward(environment: type, error: str):
    one = session(environment(turns=1))
    one.reset()
    last = one.step(TextAction(text="a"))
    assert last.done and last.reward is None and last.metadata["error"] == error


@pytest.fixture
def serve() -> Iterator[object]:
    running = []

    def start(make, tasks, **settings) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app(make, tasks, **settings), log_level="critical"))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        running.append((server, thread))
        while not server.started:
            time.sleep(0.01)
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join(10)


@needs("openenv-here")
def test_sessions_over_loopback_keep_apart(serve):
    url = serve(GuessEnv, TASKS, max_steps=5, sessions=2)
    with GenericEnvClient(base_url=url).sync() as one, GenericEnvClient(base_url=url).sync() as other:
        with pytest.raises(RuntimeError, match="no episode has begun"):
            one.step({"text": "a"})
        assert one.reset(index=0).observation["messages"][0]["content"] == "say a"
        with pytest.raises(RuntimeError, match="no episode has begun"):
            other.step({"text": "a"})
        other.reset(index=1)
        one.step({"text": "a"})
        assert [other.step({"text": "b"}).done, one.step({"text": "a"}).reward] == [False, 1.0]
        assert one.state()["task_id"] == "guess-0" and other.state()["step_count"] == 1
        with pytest.raises(RuntimeError):
            one.step({"words": "a"})


@needs("openenv-here")
@pytest.mark.parametrize("route", ["reset", "step"])
def test_routes_without_a_session_are_not_served(serve, route):
    url = serve(GuessEnv, TASKS, max_steps=5)
    body = b'{"action": {"text": "a"}}'
    asked = urllib.request.Request(f"{url}/{route}", body, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(asked, timeout=10)
    assert refused.value.code in (404, 405)


@needs("openenv-here")
def test_kata_in_its_sandbox_over_loopback(serve):
    made: list[KataEnv] = []

    def make() -> KataEnv:
        made.append(KataEnv())
        return made[-1]

    url = serve(make, KataEnv().tasks("train", 1, 0), max_steps=5)
    with GenericEnvClient(base_url=url).sync() as client:
        client.reset()
        assert "def " in client.step({"text": "```bash\ncat solution.py\n```"}).observation["messages"][0]["content"]
        (folder,) = (one._folder for one in made if one._folder)
        last = client.step({"text": "```bash\nsubmit\n```"})
        assert last.done and last.reward == 0.0 and last.metadata["hidden_pass"] is False and folder.is_dir()
    until(lambda: not folder.exists())


def test_only_session_routes_are_requested():
    if GenericEnvClient is not None:
        pytest.skip("the real server is asked in the tests above")
    asked = app(GuessEnv, TASKS, max_steps=5, sessions=3)
    assert asked.mode == "production" and asked.max_concurrent_envs == 3 and Session.SUPPORTS_CONCURRENT_SESSIONS
    assert asked.env() is not asked.env()
