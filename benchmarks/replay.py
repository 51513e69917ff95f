"""Asking teachers: ours, all of it durable, beside raw aiohttp, AsyncOpenAI and distilabel, which keep nothing.

    python benchmarks/replay.py [--peers VENV/bin/python] [--distilabel VENV/bin/python] [--rounds 3]

A loopback server in a process of its own answers after a heavy-tailed wait (log-normal, median 150 ms, mean 190 ms,
95th percentile 470 ms, cut at 5 s; the same waits for all clients). Prompts have 8 kB, answers 600 B. Clients run in
turn, each in a fresh process, at 32, 256 and 1,024 in flight; printed are medians of calls a second and of CPU
milliseconds a call.
Ours is what `replay-teachers` does between reading rollouts and writing its table: reservation, call, answer cache,
settlement and journal, each fsynced, its number of requests in flight found out from 16 up. The peers need aiohttp,
openai and distilabel, in environments of their own: they are skipped, and named, where they are not installed.
"""

import asyncio
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cases
from records import ROOT, Claim, measured, ratio

CALLS = {32: 1_000, 256: 10_000, 1024: 20_000}
FEW = {32: 1_000, 256: 3_000, 1024: 4_000}  # of clients that would take minutes for more
PROMPT = "Explain the following lines of a log. " * 215
STEPS = 10


def body(number: int) -> dict:
    return {
        "model": "m",
        "messages": [{"role": "user", "content": f"{number} {PROMPT}"}],
        "temperature": 0.0,
        "max_tokens": 256,
        "seed": number,
    }


# --- the server


ANSWER = {
    "id": "c",
    "object": "chat.completion",
    "created": 0,
    "model": "m-1",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "word " * 60}}],
    "usage": {"prompt_tokens": 2000, "completion_tokens": 60, "total_tokens": 2060},
}


class Answers(asyncio.Protocol):
    waits = random.Random(0)

    def connection_made(self, transport):
        self.transport, self.held = transport, b""

    def data_received(self, data):
        self.held += data
        head, end, rest = self.held.partition(b"\r\n\r\n")
        if not end:
            return
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        if len(rest) < length:
            return
        self.held = rest[length:]
        wait_s = min(self.waits.lognormvariate(math.log(0.15), 0.7), 5.0)
        asyncio.get_running_loop().call_later(wait_s, self.transport.write, RESPONSE)


PAYLOAD = json.dumps(ANSWER).encode()
RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(PAYLOAD) + PAYLOAD


def serve() -> None:
    """Answer until the standard input is closed; the port is printed first."""

    async def forever() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Answers, "127.0.0.1", 0, backlog=4096)
        print(server.sockets[0].getsockname()[1], flush=True)
        await loop.run_in_executor(None, sys.stdin.read)
        server.close()

    asyncio.run(forever())


# --- clients: each asks `calls` things, `width` at once


async def side_by_side(one, calls: int, width: int) -> None:
    numbers = iter(range(calls))

    async def worker():
        for number in numbers:
            await one(number)

    await asyncio.gather(*(worker() for _ in range(width)))


async def with_aiohttp(url: str, calls: int, width: int) -> None:
    import aiohttp

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(number):
            async with session.post(f"{url}/chat/completions", json=body(number)) as response:
                assert (await response.json())["choices"][0]["message"]["content"]

        await side_by_side(one, calls, width)


async def with_openai(url: str, calls: int, width: int) -> None:
    import openai

    client = openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0)

    async def one(number):
        assert (await client.chat.completions.create(**body(number))).choices[0].message.content

    await side_by_side(one, calls, width)


async def with_distilabel(url: str, calls: int, width: int) -> None:
    from distilabel.models import OpenAILLM

    llm = OpenAILLM(model="m", base_url=url, api_key="k", max_retries=0)
    llm.load()
    for start in range(0, calls, width):  # its pipelines give a model one batch after another
        batch = [llm.agenerate(input=body(n)["messages"], max_new_tokens=256) for n in range(start, start + width)]
        await asyncio.gather(*batch)


async def with_ours(url: str, calls: int, width: int) -> None:
    from stages.policy.base import PolicyConfig, Turn
    from stages.policy.endpoint import EndpointPolicy
    from stages.runs.run import Manifest, RunWriter
    from stages.runs.store import GroupCommit
    from stages.teachers.asking import ask_chains

    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        manifest = Manifest(composer="0", stage="benchmark", stage_version=1, fingerprint="0")
        out = RunWriter(Path(folder) / "run", manifest, cache=Path(folder) / "cache", max_cost=1e6)
        config = PolicyConfig(
            model="m", base_url=url, concurrency=width, max_tokens=256, usd_per_mtok_in=1.0, usd_per_mtok_out=1.0
        )
        policy = EndpointPolicy(config, budget=out.budget, cache=out.cache)
        written = GroupCommit(out.write_all)

        async def answered(number, sample):
            assert sample.error_type is None
            await written((str(number), {"answer": {"action": sample.text, "cost_usd": sample.cost_usd}}, False))

        chains = ([[n] for n in range(at, min(at + STEPS, calls))] for at in range(0, calls, STEPS))
        await ask_chains([(policy, chains)], lambda n: Turn(body(n)["messages"], n), answered, out.raise_if_stopped)
        assert len(out.journal) == calls
        assert out.budget.reserved == 0 < out.budget.spent


OURS = "ours, durable"
CLIENTS = {
    "raw aiohttp": with_aiohttp,
    OURS: with_ours,
    "AsyncOpenAI": with_openai,
    "distilabel": with_distilabel,
}


def asked(name: str, url: str, calls: int, width: int) -> dict[str, Any]:
    """Run one client here: its calls a second and its CPU time, or what it lacks."""
    try:
        asyncio.run(CLIENTS[name](url, 2, 2))  # imports and first connections are not measured
    except ImportError as error:
        return {"missing": str(error)}
    cpu, started = time.process_time(), time.monotonic()
    asyncio.run(CLIENTS[name](url, calls, width))
    seconds, cpu = time.monotonic() - started, time.process_time() - cpu
    return {"rate": calls / seconds, "cpu_ms": 1000 * cpu / calls}


def teachers(
    peers: str = sys.executable,
    distilabel: str = sys.executable,
    rounds: int = 3,
    in_flight: tuple[int, ...] = tuple(CALLS),
) -> Iterator[Claim]:
    """Calls a second beside clients that keep nothing, and the processor time of a call.

    peers: a Python with aiohttp and openai. distilabel: a Python with distilabel.
    """
    pythons = {"raw aiohttp": peers, "AsyncOpenAI": peers, "distilabel": distilabel}
    missing = set[str]()
    for width in in_flight:
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in CLIENTS}
        for name in rounds * list(CLIENTS):
            if name in missing:
                continue
            calls = (CALLS if name in ("raw aiohttp", OURS) else FEW)[width]
            with cases.serving(serve) as url:
                result = cases.apart(asked, name, url, calls, width, python=pythons.get(name, sys.executable))
            if "missing" in result:
                missing.add(name)
                print(f"{name} is left out: {result['missing']}", flush=True)
            else:
                found[name].append(result)
                print(f"{width:5d} in flight  {name:14s} {result['rate']:7.0f} calls/s  {result['cpu_ms']:.2f} ms CPU")
        ours = found.pop(OURS)
        for name, results in found.items():
            if results:
                rates = ([result["rate"] for result in side] for side in (ours, results))
                goal = ">= 0.6" if name == "raw aiohttp" and width == 256 else None
                claim = f"teachers' calls a second, {width} in flight, all kept: beside {name}, which keeps nothing"
                yield measured(claim, *ratio(*rates), n=len(ours), goal=goal)
        claim = f"processor time of a teacher's call, {width} in flight, all kept"
        yield measured(claim, statistics.median(result["cpu_ms"] for result in ours), unit="ms", n=len(ours))


CASES = {"teachers": teachers}


if __name__ == "__main__":
    cases.main(__file__, CASES)
