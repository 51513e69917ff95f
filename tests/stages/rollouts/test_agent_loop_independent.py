"""Episodes of a policy on a server: none waits for another, and what they may use has limits."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from support.environments import GuessEnv
from support.server import Reply, answer, serving

from stages import collect
from stages.envs.base import Grade, Observation
from stages.errors import UsageError
from stages.policy import background
from stages.policy.base import PolicyConfig, Sample, Turn
from stages.rollouts.agent_loop import NO_LIMITS, Episode, EpisodeLimits, InFlight, Rules, play_each
from stages.runs import runner
from stages.runs.run import Interrupted, Run

DEFAULT = InFlight()


class Asked:
    """A policy on a server that takes its time for some tasks; counts what it is asked at once."""

    capture_level, batch_size = "text", 8
    config = PolicyConfig()

    def __init__(self, delay: Callable[[Turn], float] = lambda turn: 0.0) -> None:
        self.delay, self.now, self.most, self.drained = delay, 0, 0, False

    async def ask(self, turn: Turn) -> Sample:
        """One letter, after a while."""
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(self.delay(turn))
        finally:
            self.now -= 1
        return Sample(text="a", prompt_tokens=4, completion_tokens=1, cost_usd=0.25)

    async def drain(self) -> None:
        """Remember that this was asked for."""
        self.drained = True


class CountedEnv(GuessEnv):
    """Counts how many steps and gradings run at once, and which environments are open."""

    running: ClassVar[dict[str, int]] = {}
    most: ClassVar[dict[str, int]] = {}
    opened: ClassVar[set[int]] = set()
    lock: ClassVar[Any] = threading.Lock()
    slow_grade: ClassVar[str] = ""

    def _timed(self, what: str, seconds: float) -> None:
        with self.lock:
            self.running[what] = self.running.get(what, 0) + 1
            self.most[what] = max(self.most.get(what, 0), self.running[what])
        time.sleep(seconds)
        with self.lock:
            self.running[what] -= 1

    def reset(self, task: Any) -> Any:
        """Opens it."""
        self.opened.add(id(self))
        return super().reset(task)

    def step(self, text: str) -> Observation:
        """Takes ten milliseconds."""
        self._timed("steps", 0.01)
        return super().step(text)

    def grade(self) -> Grade:
        """Takes twenty milliseconds, or for one task very long."""
        assert self._task is not None
        self._timed("gradings", 1.0 if self._task.task_id == self.slow_grade else 0.02)
        return super().grade()

    def close(self) -> None:
        """Closes it."""
        self.opened.discard(id(self))


@pytest.fixture(autouse=True)
def _fresh() -> None:
    for shared in (CountedEnv.running, CountedEnv.most, CountedEnv.opened):
        shared.clear()
    CountedEnv.slow_grade = ""


def played(
    policy: Any,
    count: int,
    *,
    limits: EpisodeLimits = NO_LIMITS,
    in_flight: InFlight = DEFAULT,
    check: Callable[[], None] = lambda: None,
    turns: int = 3,
    finished: Callable[[Episode], None] = lambda episode: None,
) -> list[Episode]:
    """The episodes in the order in which they were finished."""
    ended: list[Episode] = []

    async def keep(episode: Episode) -> None:
        ended.append(episode)
        finished(episode)

    kept: Callable[[Episode], Awaitable[None]] = keep
    episodes = [Episode(task, 0, 0) for task in GuessEnv().tasks("train", count, 0)]
    background.run(
        play_each(
            lambda: CountedEnv(turns),
            policy,
            episodes,
            kept,
            rules=Rules(10, limits),
            in_flight=in_flight,
            check=check,
        )
    )
    assert policy.drained and not any(episode.steps for episode in episodes)
    return ended


def test_a_slow_answer_delays_no_other_episode() -> None:
    slow = [True]

    def once(turn: Turn) -> float:
        return slow.pop() * 2.0 if slow else 0.0

    ended = played(Asked(once), 12, in_flight=InFlight(episodes=2))
    assert [e.task.task_id for e in ended][-1] == "guess-0" and len(ended) == 12
    assert all(e.terminated_by == "answered" and len(e.steps) == 3 and e.grade.reward is not None for e in ended)


def test_a_slow_grader_delays_no_other_episode() -> None:
    CountedEnv.slow_grade = "guess-0"
    ended = played(Asked(), 12, in_flight=InFlight(episodes=2, gradings=2))
    assert [e.task.task_id for e in ended][-1] == "guess-0" and len(ended) == 12


def test_no_more_at_once_than_allowed_and_as_many_as_allowed() -> None:
    policy = Asked(lambda turn: 0.03)
    played(policy, 24, in_flight=InFlight(episodes=6, commands=3, gradings=2))
    assert CountedEnv.most == {"steps": 3, "gradings": 2} and 4 <= policy.most <= 6


def test_where_time_runs_out_the_work_is_graded() -> None:
    ended = played(Asked(lambda turn: 0.1), 2, limits=EpisodeLimits(wall_s=0.15), turns=9)
    assert [(e.terminated_by, e.error, len(e.steps)) for e in ended] == [("wall_time", None, 1)] * 2
    assert sorted(e.grade.reward or 0.0 for e in ended) == [0.0, 1.0]


def test_an_episode_costs_no_more_than_one_answer_beyond_its_limit() -> None:
    ended = played(Asked(), 2, limits=EpisodeLimits(cost_usd=0.6), turns=9)
    assert [(e.terminated_by, len(e.steps)) for e in ended] == [("cost", 3)] * 2


def test_a_wish_to_stop_is_heard_between_turns_and_everything_is_closed() -> None:
    done: list[Episode] = []

    def check() -> None:
        if len(done) >= 3:
            raise Interrupted

    with pytest.raises(Interrupted):
        played(Asked(lambda turn: 0.01), 40, check=check, in_flight=InFlight(episodes=4), finished=done.append)
    assert 3 <= len(done) < 12 and CountedEnv.opened == set()


def test_trouble_that_is_nobodys_own_ends_them_all_and_everything_is_closed() -> None:
    class Refused(Asked):
        async def ask(self, turn: Turn) -> Sample:
            if turn.messages[0]["content"] == "say b":
                raise UsageError("the key was refused")
            return await super().ask(turn)

    with pytest.raises(UsageError):
        played(Refused(), 6)
    assert CountedEnv.opened == set()


def digests(root: Path, url: str, **in_flight: int) -> list[str]:
    config = collect.Config(
        env={"name": "support.environments:NumberedEnv"},
        policy={"model": "m", "base_url": url},
        tasks=6,
        samples=2,
        in_flight=in_flight,
    )
    run = Run(runner.execute("collect", {}, config, root=root).path)
    return [run.manifest.outputs[name]["content_sha256"] for name in ("rollouts", "steps")]


def test_equal_work_gives_equal_tables_whatever_ended_first(tmp_path: Path) -> None:
    def reply(body: dict, n: int) -> Reply:
        said = "ab"[sum(len(message["content"]) for message in body["messages"]) % 2]
        return Reply(body=answer(said * (body["seed"] % 3 + 1)), delay_s=(n * 7 % 5) / 100)

    with serving(reply) as server:
        one = digests(tmp_path / "one", server.url, episodes=1, commands=1, gradings=1)
        other = digests(tmp_path / "other", server.url, episodes=12, commands=4, gradings=3)
    assert one == other
