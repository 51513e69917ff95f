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
from typing import Any, ClassVar

import cases

Body = dict
Answer = Callable[[Body, bytes], tuple[float, str]]
"""Seconds to wait and the text to answer with, for a request as JSON and as its bytes."""
USAGE = {"prompt_tokens": 1000, "completion_tokens": 20, "total_tokens": 1020}
QUANTILE = {95: 1.6449, 99: 2.3263}


def lognormal(chance: random.Random, median: float, high: float, percentile: int, cut: float) -> float:
    """A log-normal number with this median and this value at a percentile, at most `cut`."""
    return min(chance.lognormvariate(math.log(median), math.log(high / median) / QUANTILE[percentile]), cut)


class _Connection(asyncio.Protocol):
    given: ClassVar[Counter[bytes]] = Counter()

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
            self._send({"served": self.given.total(), "twice": twice})
        elif end and len(rest) >= int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]):
            self.held = b""
            wait_s, text = self.answer(json.loads(rest), rest)
            asyncio.get_running_loop().call_later(wait_s, self._give, text, hashlib.sha256(rest).digest()[:12])

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
