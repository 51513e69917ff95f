"""Trainings behind a slow server: what they gain whose rollouts never wait for each other.

    python benchmarks/rollouts.py [--rollouts 64] [--steps 7] [--train-s 60] [--scale 0.05] [--vllm kata:student-served]

The slow server is a loopback server in a process of its own with as much of chat completions as openai's client asks
for, or a real vLLM. Commands and gradings sleep, so that what is measured is the loop, the client and the queue.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cases
import slow_server
from records import Claim, measured, ratio
from slow_server import lognormal

from composer_stages.envs.base import Grade, Observation, Task
from composer_stages.policy import open_policy, server
from composer_stages.policy.base import PolicyConfig, Sample, Turn
from composer_stages.policy.vllm import VllmPolicy
from composer_stages.rollouts.agent_loop import Rules, play
from composer_stages.rollouts.config import InFlight
from composer_stages.runs.ledger import Budget
from composer_stages.runs.run import AnswerFolders
from composer_stages.training.rollouts import RolloutQueue, Schedule

TURNS, GROUP = 8, 8


class RecordedEnv:
    """Commands take as long as recorded ones, gradings as test suites; nothing else is done."""

    name, sandbox = "recorded", "not-needed"
    numbers = itertools.count()

    def __init__(self, scale, lines):
        self.scale, self.lines = scale, lines

    def reset(self, task):
        self.turn = 0
        # Two samples of a task are no equal requests, so that their answers have lengths of their own.
        self.sample = next(RecordedEnv.numbers)
        return [{"role": "user", "content": f"{self.sample} {task.prompt}"}]

    def step(self, text):
        self.turn += 1
        time.sleep(self.scale * slow_server.recorded(slow_server.COMMANDS_S, self.sample, self.turn))
        return Observation("a line of output\n" * self.lines, commands=("ls",), returncode=0)

    def grade(self):
        time.sleep(self.scale * lognormal(random.Random(self.sample), 15.0, 60.0, 95, 120.0))
        return Grade(1.0)

    def close(self):
        pass


class Followed:
    """In the place of a server's weights: answers are of the newest version, which loads in no time.

    An answer that reached its limit of tokens ends no rollout.
    """

    def __init__(self, policy: Any) -> None:
        self.policy, self.version = policy, 0
        self.config, self.drain = policy.config, policy.drain
        self.capture_level, self.batch_size = policy.capture_level, policy.batch_size
        self._work = 0, 0.0, 0.0
        """Requests under way, when that number last changed, and for how many seconds there were some before."""

    async def ask(self, turn: Turn) -> Sample:
        """Answer with the version at the beginning."""
        version = self.version
        self._count(1)
        try:
            return replace(await self.policy.ask(turn), policy_version=version, finish_reason="stop")
        finally:
            self._count(-1)

    def _count(self, more: int) -> None:
        busy_s = self.busy_s()
        self._work = self._work[0] + more, time.monotonic(), busy_s

    def busy_s(self) -> float:
        """Return for how many seconds there were requests under way."""
        asked, since, before_s = self._work
        return before_s + (time.monotonic() - since if asked else 0.0)

    def follow(self, step: int) -> dict[str, float]:
        """Take the next version."""
        self.version = step
        return {}

    def played(self, step: int, rollouts: Any) -> None:
        """Compare nothing: nobody else trains."""

    def end(self) -> None:
        """Nothing was replaced."""


Opened = Callable[[Path], Any]
"""Returns a policy on a server, which may keep its answers in a folder."""


@contextmanager
def _slow_server(scale: float) -> Iterator[Opened]:
    with cases.serving(slow_server.serve, scale) as url:
        config = PolicyConfig(model="m", base_url=url, max_tokens=64, concurrency=512)

        def opened(folder: Path) -> Any:
            cache = AnswerFolders(folder / "shared", folder / "own")
            return open_policy(config, cache=cache, budget=Budget(None, folder / "ledger"), listener=print)

        yield opened


@contextmanager
def _vllm(model: str) -> Iterator[Opened]:
    config = PolicyConfig(model=f"vllm:{model}", max_tokens=64, concurrency=512)
    with tempfile.TemporaryDirectory() as named:
        log = Path(named) / "log"
        started = server.start(config, log, rank=0, listener=lambda *told: None, check=lambda: None)
        try:
            policy = VllmPolicy.connect(config, started.url, listener=print, server=started)
            yield lambda folder: policy
        finally:
            started.stop()


def queue(
    rollouts: int = 64, steps: int = 7, train_s: float = 60.0, scale: float = 0.05, vllm: str = ""
) -> Iterator[Claim]:
    """What a training gains whose rollouts never wait for each other, behind a server with continuous batching.

    Groups of eight rollouts of eight turns. Answers are as long as 662 recorded ones of mini-swe-agent (median 80
    tokens, 99th percentile 1,985), commands as 60 of OpenHands (median 0.6 s, 99th percentile 30 s, cut at 60 s),
    gradings as test suites (log-normal, median 15 s, 95th percentile 60 s, cut at 120 s). A step of the server takes 8
    ms and 0.03 ms a request, for a token of each. Training on a step takes `--train-s`; all times `--scale`, which is
    to leave this process and the server time for 2 to 3 ms of processor time a turn: their share is printed. `--vllm`
    names a model that the real vLLM serves here in place of that server, at its own pace, with shorter prompts and
    answers of at most 64 tokens. A server has work while it owes an answer. Lock step is the loop of models in this
    process; all ways have 64 commands and 64 gradings at once. A ratio is of the mean step to that of lock step, its
    interval by bootstrap over steps; steps are left out until those that were begun together with the first are over.
    """
    ways = {"lock step": None, "each at its own pace": 0, "queue, max_staleness 1": 1, "queue, max_staleness 2": 2}
    what = f"{rollouts} rollouts of {TURNS} turns a step, training {train_s:g} s"
    what = f"vLLM with {vllm}, {what}, all times but the server's x {scale:g}" if vllm else what
    before: list[float] = []
    with _vllm(vllm) if vllm else _slow_server(scale) as opened:
        for name, max_staleness in ways.items():
            times, busy, given_up, used = _trained(
                opened, rollouts, steps, train_s, scale, max_staleness, 2 if vllm else 60
            )
            before = before or times
            gained, interval = ratio(before, times, statistics.fmean)
            print(
                f"{name:<24}{statistics.fmean(times) / scale:>8.0f} s a step{gained:>7.2f} times as fast, the server "
                f"has work {100 * busy:.0f} % of the time, {given_up:.0f} groups given up, this process computes "
                f"{100 * used:.0f} % of the time",
                flush=True,
            )
            goals = (">= 3", ">= 0.9") if max_staleness else (None, None)
            if max_staleness is not None:
                claim = f"{what}, {name}: times as fast as lock step with 64 threads"
                yield measured(claim, gained, interval, n=len(times), goal=goals[0])
            yield measured(f"{what}, {name}: time in which the server has work", busy, n=len(times), goal=goals[1])


def _trained(
    opened: Opened, rollouts: int, steps: int, train_s: float, scale: float, max_staleness: int | None, lines: int
) -> tuple[list[float], float, float, float]:
    """Seconds of each step, the shares of them in which server and this process had work, and groups given up."""
    in_flight, left_out = InFlight(rollouts=512, commands=64, gradings=64), 1 + (max_staleness or 0)
    RecordedEnv.numbers = itertools.count()
    make, groups = partial(RecordedEnv, scale, lines), rollouts // GROUP
    # More than are measured, so that there are always groups to begin.
    asked = "Explain this log. " * 4 * lines
    tasks = [Task(f"t{i}", "recorded", "train", f"f{i}", asked) for i in range((left_out + steps + 4) * groups)]
    schedule, given_up, marks = Schedule(tasks, groups, GROUP, seed=0), 0.0, list[tuple[float, float, float]]()
    with tempfile.TemporaryDirectory() as folder:
        policy = Followed(opened(Path(folder)))
        rules = Rules(TURNS)
        player = RolloutQueue(
            make, policy, schedule, policy, rules=rules, in_flight=in_flight, max_staleness=max_staleness or 0
        )
        for step in range(left_out + steps):
            if max_staleness is None:
                play(make, policy, schedule.process_rollouts(step), max_steps=TURNS, in_flight=in_flight)
            else:
                given_up += player.take(step)[1]["sampling/groups_given_up"]
            time.sleep(train_s * scale)
            marks.append((time.monotonic(), policy.busy_s(), time.process_time()))
        player.close()
    marks = marks[left_out - 1 :]
    times = [after[0] - before[0] for before, after in itertools.pairwise(marks)]
    wall_s, busy_s, used_s = (end - begin for begin, end in zip(marks[0], marks[-1], strict=True))
    return times, busy_s / wall_s, given_up, used_s / wall_s


CASES = {"queue": queue}

if __name__ == "__main__":
    cases.main(__file__, CASES)
