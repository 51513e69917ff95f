"""Asking teachers: ours, all of it durable, beside raw aiohttp, AsyncOpenAI and distilabel, which keep nothing.

    python benchmarks/replay.py [--peers VENV/bin/python] [--distilabel VENV/bin/python] [--rounds 3]

A loopback server in a process of its own answers after a heavy-tailed wait (log-normal, median 150 ms, mean 190 ms,
95th percentile 470 ms, cut at 5 s; the same waits for everybody). Prompts have 8 kB, answers 600 B. Clients run in
turn, each in a fresh process, at 32, 256 and 1,024 in flight; printed are medians of calls a second and of CPU
milliseconds a call.
Ours is what `replay-teachers` does between reading rollouts and writing its table: reservation, call, answer cache,
settlement and journal, each fsynced, its number of requests in flight found out from 16 up. The peers need aiohttp,
openai and distilabel, in environments of their own: they are skipped, and named, where they are not installed.
"""

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import records

ROOT = Path(__file__).parents[1]
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


async def serve():
    server = await asyncio.get_running_loop().create_server(Answers, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


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
    sys.path.insert(0, str(ROOT))
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


CLIENTS = {
    "raw aiohttp": with_aiohttp,
    "ours, durable": with_ours,
    "AsyncOpenAI": with_openai,
    "distilabel": with_distilabel,
}


def measure(name: str, url: str, calls: int, width: int) -> None:
    """Run one client here, print its rate and its CPU time."""
    try:
        asyncio.run(CLIENTS[name](url, 2, 2))  # imports and first connections are not measured
    except ImportError as error:
        print(json.dumps({"missing": str(error)}))
        return
    cpu, started = time.process_time(), time.monotonic()
    asyncio.run(CLIENTS[name](url, calls, width))
    seconds, cpu = time.monotonic() - started, time.process_time() - cpu
    print(json.dumps({"rate": calls / seconds, "cpu_ms": 1000 * cpu / calls}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", default=sys.executable, help="a Python with aiohttp and openai")
    parser.add_argument("--distilabel", default=sys.executable, help="a Python with distilabel")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--in-flight", type=int, nargs="*", default=list(CALLS))
    parser.add_argument("--client", nargs=4, metavar=("NAME", "URL", "CALLS", "WIDTH"), help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        asyncio.run(serve())
    elif given.client:
        name, url, calls, width = given.client
        measure(name, url, int(calls), int(width))
    else:
        compare(given)


def compare(given: argparse.Namespace) -> None:
    pythons = {"raw aiohttp": given.peers, "AsyncOpenAI": given.peers, "distilabel": given.distilabel}
    missing = set()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for width in given.in_flight:
        found: dict[str, list[dict]] = {name: [] for name in CLIENTS}
        for _ in range(given.rounds):
            for name in CLIENTS:
                if name in missing:
                    continue
                server = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True)
                port = server.stdout.readline().strip()
                calls = (CALLS if name in ("raw aiohttp", "ours, durable") else FEW)[width]
                words = ["--client", name, f"http://127.0.0.1:{port}/v1", str(calls), str(width)]
                done = subprocess.run(
                    [pythons.get(name, sys.executable), __file__, *words], capture_output=True, text=True
                )
                server.terminate()
                server.wait()
                if done.returncode:
                    sys.exit(done.stderr)
                result = json.loads(done.stdout.splitlines()[-1])
                if "missing" in result:
                    missing.add(name)
                    print(f"{name} is left out: {result['missing']}")
                else:
                    found[name].append(result)
        best = statistics.median(r["rate"] for r in found["raw aiohttp"]) if found["raw aiohttp"] else math.nan
        for name, results in found.items():
            if results:
                rate = statistics.median(r["rate"] for r in results)
                cpu = statistics.median(r["cpu_ms"] for r in results)
                rates = ", ".join(f"{r['rate']:.0f}" for r in results)
                told = f"{rate:7.0f} calls/s ({rates})  {rate / best:.2f}  {cpu:.2f} ms CPU"
                print(f"{width:5d} in flight  {name:14s} {told}", flush=True)
        record(found, width)


def record(found: dict[str, list[dict]], width: int) -> None:
    ours = found.pop("ours, durable")
    claims = []
    for name, results in found.items():
        if results:
            rates = ([result["rate"] for result in side] for side in (ours, results))
            goal = ">= 0.6" if name == "raw aiohttp" and width == 256 else None
            claim = f"teachers' calls a second, {width} in flight, all kept: beside {name}, which keeps nothing"
            claims.append(records.measured(claim, *records.ratio(*rates), n=len(ours), goal=goal))
    cpu = statistics.median(result["cpu_ms"] for result in ours)
    claim = f"processor time of a teacher's call, {width} in flight, all kept"
    records.write(__file__, [*claims, records.measured(claim, cpu, unit="ms", n=len(ours))])


if __name__ == "__main__":
    main()
