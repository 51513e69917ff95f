"""A server that takes its time to answer, in a process of its own, and inspect_ai's evaluation loop in front of it.

It speaks as much of chat completions as openai's client asks for, and answers as many requests at once as there are
connections, each after a log-normal wait. `GET /counts` tells how many answers were given, and how many of them twice
to the same request. Imports nothing of Composer, so that the interpreter of another program can run it.
"""

import asyncio
import hashlib
import json
import math
import os
import random
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import cases

Body = dict
Answer = Callable[[Body, bytes], tuple[float, str]]
"""Seconds to wait, or of a batch tokens, and the text to answer with, for a request as JSON and as its bytes."""
USAGE = {"prompt_tokens": 1000, "completion_tokens": 20, "total_tokens": 1020}
QUANTILE = {95: 1.6449, 99: 2.3263}


def lognormal(chance: random.Random, median: float, high: float, percentile: int, cut: float) -> float:
    """A log-normal number with this median and this value at a percentile, at most `cut`."""
    return min(chance.lognormvariate(math.log(median), math.log(high / median) / QUANTILE[percentile]), cut)


class Batch:
    """A continuous batch: every request in it gets a token a step, and a step takes longer the more there are.

    A step of n requests takes `STEP_S + n * REQUEST_S` seconds (times scale); those beyond `MOST_AT_ONCE` wait.
    """

    STEP_S, REQUEST_S, MOST_AT_ONCE = 8e-3, 3e-5, 256

    def __init__(self, scale: float) -> None:
        self.scale, self.busy_s, self.tokens = scale, 0.0, 0.0
        self._left: dict[object, tuple[float, Callable[[], None]]] = {}
        self._waiting: list[tuple[float, Callable[[], None]]] = []
        self._at, self._timer = 0.0, None

    def add(self, tokens: float, done: Callable[[], None]) -> None:
        """Generate so many tokens, then call `done`."""
        self._advance()
        self._waiting.append((tokens, done))
        self._go_on()

    def _step_s(self) -> float:
        return self.scale * (self.STEP_S + len(self._left) * self.REQUEST_S)

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._left:
            passed = now - self._at
            self.busy_s += passed
            self.tokens += len(self._left) * passed / self._step_s()
            left = {key: (n - passed / self._step_s(), done) for key, (n, done) in self._left.items()}
            self._left = {key: one for key, one in left.items() if one[0] > 1e-6}
            for done in [done for n, done in left.values() if n <= 1e-6]:
                done()
        self._at = now

    def _go_on(self) -> None:
        while self._waiting and len(self._left) < self.MOST_AT_ONCE:
            self._left[object()] = self._waiting.pop(0)
        if self._timer is not None:
            self._timer.cancel()
        if self._left:
            wait_s = min(n for n, _ in self._left.values()) * self._step_s()
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._next)

    def _next(self) -> None:
        self._advance()
        self._go_on()


class _Connection(asyncio.Protocol):
    given: ClassVar[Counter[bytes]] = Counter()
    batch: ClassVar[Batch | None] = None

    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    def connection_made(self, transport):
        self.transport, self.held = transport, b""

    def data_received(self, data):
        self.held += data
        head, end, rest = self.held.partition(b"\r\n\r\n")
        if head.startswith(b"GET"):
            self.held = b""
            twice = sum(number - 1 for number in self.given.values())
            of_batch = {} if self.batch is None else {"busy_s": self.batch.busy_s, "tokens": self.batch.tokens}
            self._send({"served": self.given.total(), "twice": twice, **of_batch})
        elif end and len(rest) >= int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]):
            self.held = b""
            wait, text = self.answer(json.loads(rest), rest)
            give = partial(self._give, text, hashlib.sha256(rest).digest()[:12])
            if self.batch is None:
                asyncio.get_running_loop().call_later(wait, give)
            else:
                self.batch.add(wait, give)

    def _give(self, text, key):
        if self.transport.is_closing():
            return  # the client was killed
        self.given[key] += 1
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        self._send({"model": "m", "choices": [choice], "usage": USAGE})

    def _send(self, body):
        data = json.dumps(body).encode()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data)
        self.transport.write(head + data)


def serve(answer: Answer) -> None:
    """Answer until the standard input is closed; the port is printed first."""

    async def forever() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Connection(answer), "127.0.0.1", 0, backlog=1024)
        print(server.sockets[0].getsockname()[1], flush=True)
        await loop.run_in_executor(None, sys.stdin.read)
        server.close()

    asyncio.run(forever())


def counts(url: str) -> dict[str, int]:
    """How many answers the server gave, and how many of them twice."""
    with urllib.request.urlopen(url.removesuffix("/v1") + "/counts") as told:  # noqa: S310 (our own server)
        return json.loads(told.read())


# --- rollouts whose waits are known

MEDIAN_S, P99_S, CUT_S, COMMAND_S, GRADE_S = 2.0, 30.0, 60.0, 0.02, 1.0
OBSERVATION = "a line of output\n" * 60


def prompt(rollout):
    return f"{rollout} is the number of this one. " + "Explain this log. " * 230


def wait_s(rollout, step, scale):
    return scale * lognormal(random.Random(f"{rollout} {step}"), MEDIAN_S, P99_S, 99, CUT_S)


def serve_waits(scale: float) -> None:
    """Answer after the wait of a rollout's step, which the conversation tells."""

    def answer(body: Body, raw: bytes) -> tuple[float, str]:
        asked = next(message["content"] for message in body["messages"] if message["role"] == "user")
        text = asked if isinstance(asked, str) else asked[0]["text"]
        step = sum(message["role"] == "assistant" for message in body["messages"])
        return wait_s(int(text.split()[0]), step, scale), "```bash\nls\n```"

    serve(answer)


def played_by_inspect(url: str, rollouts: int, steps: int, scale: float) -> tuple[float, float]:
    """Play the same rollouts by inspect_ai's own loop; return seconds of the evaluation, by its log, and of the CPU.

    A solver asks, sleeps as long as a command takes and shows the same text, so many times; a scorer sleeps as long as
    a grading takes. Called by an interpreter that has inspect_ai.
    """
    cases.needed("inspect_ai", "openai", by="pip install inspect_ai openai, into an environment of its own")
    from datetime import datetime

    from inspect_ai import Task, eval
    from inspect_ai.dataset import MemoryDataset, Sample
    from inspect_ai.model import ChatMessageUser
    from inspect_ai.scorer import Score, mean, scorer
    from inspect_ai.solver import solver

    @solver
    def acts() -> Any:
        async def solve(state: Any, generate: Any) -> Any:
            for _ in range(steps):
                state = await generate(state)
                await asyncio.sleep(COMMAND_S * scale)
                state.messages.append(ChatMessageUser(content=OBSERVATION))
            return state

        return solve

    @scorer(metrics=[mean()])
    def graded() -> Any:
        async def score(state: Any, target: Any) -> Score:
            await asyncio.sleep(GRADE_S * scale)
            return Score(value=1.0)

        return score

    os.environ["WAITING_BASE_URL"] = url
    samples = [Sample(input=prompt(i), id=i) for i in range(rollouts)]
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        (log,) = eval(
            Task(dataset=MemoryDataset(samples), solver=acts(), scorer=graded(), name="waiting"),
            model="openai-api/waiting/m",
            max_connections=rollouts,
            max_samples=rollouts,
            display="none",
            log_dir=folder,
        )
        cpu = time.process_time() - began
    assert log.status == "success" and log.results.completed_samples == rollouts, log.error
    started, ended = (datetime.fromisoformat(at) for at in (log.stats.started_at, log.stats.completed_at))
    return (ended - started).total_seconds(), cpu


# --- rollouts of recorded lengths, in a batch

PERCENTILES = (0, 5, 25, 50, 75, 90, 95, 99, 100)
ANSWER_TOKENS = (10, 23, 40, 80, 230, 590, 988, 1985, 5457)
"""Tokens of an answer by percentile: 662 answers of mini-swe-agent with Gemini 3 Pro, on SWE-bench."""
COMMANDS_S = (0.4, 0.48, 0.61, 0.62, 0.62, 4.3, 4.8, 30.0, 60.0)
"""Seconds of a command by percentile: 60 commands of OpenHands, the longest of which, of 265 s, is cut at 60 s."""


def recorded(values: tuple[float, ...], *place: object) -> float:
    """A number of a recorded distribution, by its percentiles, for a place."""
    at = 100 * random.Random(" ".join(map(str, place))).random()
    upper = next(i for i, percentile in enumerate(PERCENTILES) if percentile > at)
    low, high = PERCENTILES[upper - 1], PERCENTILES[upper]
    return values[upper - 1] + (values[upper] - values[upper - 1]) * (at - low) / (high - low)


def serve_batch(scale: float) -> None:
    """Answer with as many tokens as recorded answers have, all requests in one batch."""

    def answer(body: Body, raw: bytes) -> tuple[float, str]:
        return recorded(ANSWER_TOKENS, hashlib.sha256(raw).hexdigest()), "```bash\nls\n```"

    _Connection.batch = Batch(scale)
    serve(answer)


# --- teachers


def serve_teachers(scale: float) -> None:
    """Answer by the conversation alone, and in two of five cases also by the model and the seed."""

    def answer(body: Body, raw: bytes) -> tuple[float, str]:
        state = hashlib.sha256(json.dumps(body["messages"]).encode()).hexdigest()
        mine = f"{state}{body['model']}{body.get('seed')}".encode()
        common, own = int(state[:8], 16), int(hashlib.sha256(mine).hexdigest()[:8], 16)
        number = own if own % 5 < 2 else common
        wait_s = scale * lognormal(random.Random(hashlib.sha256(raw).digest()), 0.3, 3.0, 99, 10.0)
        return wait_s, f"I look at it.\n\n```bash\nsed -n {number % 400}p src/part_{number % 7}.py\n```"

    serve(answer)
