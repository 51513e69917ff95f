"""A loopback server in a process of its own that takes its time to answer, as the benchmarks of rollouts need it.

    with running(__file__, "--scale", "1.0") as url:  # starts this script again with --serve
        ...

`serve` is what the script calls then. It speaks as much of chat completions as openai's client asks for, and answers as
many requests at once as there are connections. `GET /counts` tells how many answers were given, and how many of them
twice to the same request.
"""

import asyncio
import hashlib
import json
import math
import random
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

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
            return  # whoever asked was killed
        self.given[key] += 1
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        self._send({"model": "m", "choices": [choice], "usage": USAGE})

    def _send(self, body):
        data = json.dumps(body).encode()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data)
        self.transport.write(head + data)


def serve(answer: Answer) -> None:
    """Answer until whoever started the process closes its input, or is gone; the port is printed first."""

    async def forever() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Connection(answer), "127.0.0.1", 0, backlog=1024)
        print(server.sockets[0].getsockname()[1], flush=True)
        await loop.run_in_executor(None, sys.stdin.read)
        server.close()

    asyncio.run(forever())


@contextmanager
def running(script: str, *words: str) -> Iterator[str]:
    """The address of the server while the block lasts."""
    command = [sys.executable, script, "--serve", *words]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}/v1"
    finally:
        server.communicate()


def counts(url: str) -> dict[str, int]:
    """How many answers the server gave, and how many of them twice."""
    with urllib.request.urlopen(url.removesuffix("/v1") + "/counts") as told:  # noqa: S310 (our own server)
        return json.loads(told.read())
