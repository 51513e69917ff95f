"""A server with continuous batching that takes its time to answer, in a process of its own.

It speaks as much of chat completions as openai's client asks for.
"""

import asyncio
import hashlib
import json
import math
import random
from collections.abc import Callable
from functools import partial

import cases

QUANTILE = {95: 1.6449, 99: 2.3263}
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


def lognormal(chance: random.Random, median: float, high: float, percentile: int, cut: float) -> float:
    """A log-normal number with this median and this value at a percentile, at most `cut`."""
    return min(chance.lognormvariate(math.log(median), math.log(high / median) / QUANTILE[percentile]), cut)


class Batch:
    """A continuous batch: every request in it gets a token a step, and a step takes longer the more there are.

    A step of n requests takes `STEP_S + n * REQUEST_S` seconds (times scale); those beyond `MOST_AT_ONCE` wait.
    """

    STEP_S, REQUEST_S, MOST_AT_ONCE = 8e-3, 3e-5, 256

    def __init__(self, scale: float) -> None:
        self.scale = scale
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
            tokens = (now - self._at) / self._step_s()
            left = {key: (n - tokens, done) for key, (n, done) in self._left.items()}
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


def serve(scale: float) -> None:
    """Answer with as many tokens as recorded answers have."""
    batch = Batch(scale)

    def respond(request: bytes, send: Callable[[bytes], None]) -> None:
        tokens = recorded(ANSWER_TOKENS, hashlib.sha256(request).hexdigest())
        message = {"role": "assistant", "content": "```bash\nls\n```"}
        usage = {"prompt_tokens": 1000, "completion_tokens": 20, "total_tokens": 1020}
        choices = [{"index": 0, "finish_reason": "stop", "message": message}]
        batch.add(tokens, partial(send, json.dumps({"model": "m", "choices": choices, "usage": usage}).encode()))

    cases.answer_requests(respond)
