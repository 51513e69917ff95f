"""Episodes of a policy on a server: each at its own pace, so that a slow answer, command or grader delays no other.

Sampling, commands and gradings of different episodes overlap. Everything runs on the event loop of the servers;
commands and gradings block, so each has a pool of threads. An episode that is played makes room for the next at once
and waits for a grader; where graders are slower than players, as many may wait as are played.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from stages.envs.base import Environment, GradesTogether
from stages.policy import background
from stages.policy.base import Sample, Turn
from stages.rollouts.episode import Episode, act, begin, end, grade
from stages.rollouts.limits import InFlight, Rules
from stages.rollouts.turns import next_turn
from stages.runs.records import Row

Result = TypeVar("Result")
Pair = tuple[Episode, Environment]
EVERY_S = 1.0
"""Between two looks at the live episodes."""
TOGETHER = 32
"""Most episodes in one grading, of an environment that grades several far more cheaply than one by one."""


async def play_each(
    make: Callable[[], Environment],
    policy: Any,
    episodes: Sequence[Episode],
    finished: Callable[[Episode], Awaitable[None]],
    *,
    rules: Rules,
    in_flight: InFlight,
    check: Callable[[], None],
    watch: Callable[[list[Row]], None] = lambda live: None,
) -> None:
    """Play and grade every episode; `finished` gets a filled-in copy of each when it is graded, in no fixed order.

    `policy` has `ask` and `drain` (`stages.policy.scheduler.Asks`). `check` raises when nothing more is to be asked:
    then, and after an error that is nobody's own, what is in flight is waited for, everything is closed, and the error
    raised. The episodes that were given stay as they are, so that finished ones take no memory. `watch` gets the live
    episodes once a second: rollout_id, steps, doing (what, in a word), doing_s and wall_s in seconds.
    """
    with (
        ThreadPoolExecutor(in_flight.commands, "commands") as commands,
        ThreadPoolExecutor(in_flight.gradings, "gradings") as gradings,
    ):
        game = _Game(make, policy, rules, check, finished, commands, gradings, in_flight.episodes)
        shower = asyncio.create_task(game.show(watch))
        try:
            await background.together([game.play_all(episodes), *(game.grade_all() for _ in range(in_flight.gradings))])
        finally:
            shower.cancel()
            await asyncio.gather(shower, return_exceptions=True)
            await game.close()
            await policy.drain()


class _Game:
    """What the players and graders of one call share.

    `open` holds every environment that is not closed yet, `doing` what its episode does and since when.
    """

    def __init__(
        self,
        make: Callable[[], Environment],
        policy: Any,
        rules: Rules,
        check: Callable[[], None],
        finished: Callable[[Episode], Awaitable[None]],
        commands: ThreadPoolExecutor,
        gradings: ThreadPoolExecutor,
        width: int,
    ) -> None:
        self.make, self.policy, self.rules, self.check, self.finished = make, policy, rules, check, finished
        self.commands, self.gradings, self.width = commands, gradings, width
        self.played: asyncio.Queue[Pair | None] = asyncio.Queue(width)
        self.open: dict[int, Pair] = {}
        self.doing: dict[int, tuple[str, float]] = {}

    async def play_all(self, episodes: Sequence[Episode]) -> None:
        """Play so many at once, then tell every grader that no more come."""
        waiting = deque(episodes)

        async def player() -> None:
            while waiting:
                planned = waiting.popleft()
                self.check()
                await self.play(Episode(planned.task, planned.sample_idx, planned.seed))

        await background.together(player() for _ in range(min(self.width, len(waiting))))
        await self.played.put(None)

    async def play(self, episode: Episode) -> None:
        """One episode up to where it can be graded."""
        environment = await in_pool(self.commands, self.make)
        self.open[id(episode)] = episode, environment
        self.does(episode, "setting up")
        await in_pool(self.commands, partial(begin, self.rules, episode, environment))
        while episode.terminated_by is None:
            self.check()
            turn = next_turn(episode, self.policy, self.rules)
            self.does(episode, "asking")
            sample = None if turn is None else await self.answer(episode, turn)
            if turn is not None and sample is not None:
                self.does(episode, "acting")
                await in_pool(self.commands, partial(act, episode, environment, turn, sample, self.rules))
        self.does(episode, "waiting for a grader")
        await self.played.put((episode, environment))

    def does(self, episode: Episode, what: str) -> None:
        """Note what an episode does from now on."""
        self.doing[id(episode)] = what, time.monotonic()

    async def show(self, watch: Callable[[list[Row]], None]) -> None:
        """Tell once a second what every live episode does."""
        while True:
            now = time.monotonic()
            live = [(episode, *self.doing[key]) for key, (episode, _) in self.open.items() if key in self.doing]
            rows = [
                {
                    "rollout_id": episode.rollout_id,
                    "steps": len(episode.steps),
                    "doing": what,
                    "doing_s": round(now - since, 1),
                    "wall_s": round(now - (episode.started or now), 1),
                }
                for episode, what, since in live
            ]
            await in_pool(None, partial(watch, rows))
            await asyncio.sleep(EVERY_S)

    async def answer(self, episode: Episode, turn: Turn) -> Sample | None:
        """The policy's answer; None where the episode's time ran out before. What was sent is still paid and kept."""
        wall_s = self.rules.limits.wall_s
        left_s = None if wall_s is None else max(wall_s - (time.monotonic() - episode.started), 0.0)
        try:
            async with asyncio.timeout(left_s) as clock:
                return await self.policy.ask(turn)
        except TimeoutError:
            if not clock.expired():
                raise
            episode.terminated_by = "wall_time"
            return None

    async def grade_all(self) -> None:
        """Grade what waits until there is no more; several together where the environment can."""
        while (pair := await self.played.get()) is not None:
            batch = [pair]
            while isinstance(pair[1], GradesTogether) and len(batch) < TOGETHER and not self.played.empty():
                more = self.played.get_nowait()
                if more is None:
                    await self.played.put(None)
                    break
                batch.append(more)
            for episode, _ in batch:
                self.does(episode, "being graded")
            await in_pool(self.gradings, partial(_graded, batch))
            for episode, _ in batch:
                del self.open[id(episode)], self.doing[id(episode)]
                await self.finished(episode)
        await self.played.put(None)  # for the next grader

    async def close(self) -> None:
        """Free the environments of episodes that were not finished."""
        for episode, environment in self.open.values():
            await in_pool(self.commands, partial(end, episode, environment))


def _graded(batch: list[Pair]) -> None:
    grade(batch)
    for episode, environment in batch:
        end(episode, environment)
        episode.wall_s = time.monotonic() - episode.started


async def in_pool(pool: ThreadPoolExecutor | None, call: Callable[[], Result]) -> Result:
    """What a blocking call returns. It cannot be cancelled, so whoever is cancelled waits for its end first."""
    future = asyncio.get_running_loop().run_in_executor(pool, call)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        if not future.cancelled():
            future.exception()  # looked at: whoever was cancelled has another reason to end
        raise
