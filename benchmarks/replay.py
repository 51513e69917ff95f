"""Asking teachers: ours, all of it durable, beside raw aiohttp, which keeps nothing.

    python benchmarks/replay.py [--peer VENV/bin/python] [--in-flight 256] [--rounds 3]

A loopback server in a process of its own answers after a heavy-tailed wait (log-normal, median 150 ms, mean 190 ms,
95th percentile 470 ms, cut at 5 s; the same waits for both clients). Prompts have 8 kB, answers 600 B. Clients run in
turn, each in a fresh process; printed are calls a second and CPU milliseconds a call.
Ours is what `replay-teachers` does between reading rollouts and writing its table: reservation, call, answer cache,
settlement and journal, each fsynced, its number of requests in flight found out from 16 up. The peer is a Python with
aiohttp.
"""

import asyncio
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cases
from records import ROOT, Claim, measured, ratio

CALLS = {32: 1_000, 256: 10_000, 1024: 20_000}
"""Calls of a round, by the number in flight."""
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


def serve() -> None:
    """Answer each request after a wait of its own."""
    waits, payload = random.Random(0), json.dumps(ANSWER).encode()

    def respond(request: bytes, send: Callable[[bytes], None]) -> None:
        wait_s = min(waits.lognormvariate(math.log(0.15), 0.7), 5.0)
        asyncio.get_running_loop().call_later(wait_s, send, payload)

    cases.answer_requests(respond)


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


async def with_ours(url: str, calls: int, width: int) -> None:
    from composer_stages.policy.base import PolicyConfig, Turn
    from composer_stages.policy.endpoint import EndpointPolicy
    from composer_stages.runs.run import Manifest, RunWriter
    from composer_stages.runs.store import GroupCommit
    from composer_stages.teachers.asking import ask_chains

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


CLIENTS = {"raw aiohttp": with_aiohttp, "ours": with_ours}


def asked(name: str, url: str, calls: int, width: int) -> dict[str, Any]:
    """Run one client here: its calls a second and its CPU time."""
    asyncio.run(CLIENTS[name](url, 2, 2))  # imports and first connections are not measured
    cpu, started = time.process_time(), time.monotonic()
    asyncio.run(CLIENTS[name](url, calls, width))
    seconds, cpu = time.monotonic() - started, time.process_time() - cpu
    return {"rate": calls / seconds, "cpu_ms": 1000 * cpu / calls}


def teachers(peer: str = sys.executable, rounds: int = 3, in_flight: tuple[int, ...] = (256,)) -> Iterator[Claim]:
    """Calls a second beside a client that keeps nothing. peer: a Python with aiohttp."""
    if peer == sys.executable:
        cases.needed("aiohttp")
    for width in in_flight:
        rates: dict[str, list[float]] = {name: [] for name in CLIENTS}
        for name in rounds * list(CLIENTS):
            python = peer if name == "raw aiohttp" else sys.executable
            with cases.serving(serve) as url:
                result = cases.apart(asked, name, url, CALLS[width], width, python=python)
            rates[name].append(result["rate"])
            print(f"{width:5d} in flight  {name:14s} {result['rate']:7.0f} calls/s  {result['cpu_ms']:.2f} ms CPU")
        claim = f"teachers' calls a second, {width} in flight, all kept: beside raw aiohttp, which keeps nothing"
        goal = ">= 0.6" if width == 256 else None
        yield measured(claim, *ratio(rates["ours"], rates["raw aiohttp"]), n=rounds, goal=goal)


CASES = {"teachers": teachers}


if __name__ == "__main__":
    cases.main(__file__, CASES)
