"""Rollouts behind a slow server: how near to what latency alone takes, what a kill loses, what never waiting gains.

    python benchmarks/rollouts.py latency [--rollouts 256] [--steps 20] [--scale 1.0] [--inspect-ai PYTHON]
    python benchmarks/rollouts.py killed shared/real/swe-lite/swe-bench-lite-test.jsonl.gz [--scale 1.0] [--limit 300]
    python benchmarks/rollouts.py queue [--rollouts 64] [--steps 3] [--train-s 60] [--scale 0.03]
    python benchmarks/rollouts.py served [--rounds 3]
    python benchmarks/rollouts.py ahead [--rounds 2] [--steps 4] [--wait 0.0]

The slow server is a loopback server in a process of its own with as much of chat completions as openai's client asks
for; it answers as many requests at once as there are connections, each after a log-normal wait. Commands and gradings
sleep, so that what is measured is the loop, the client, the journal and the tables.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gzip
import hashlib
import itertools
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import cases
import slow_server
from records import Claim, measured, ratio
from slow_server import COMMAND_S, GRADE_S, OBSERVATION, lognormal, prompt, wait_s

from stages import collect, export, extract_pairs, replay_teachers, train
from stages.envs.base import Grade, Observation, Task
from stages.envs.kata.env import KataEnv
from stages.policy import open_policy
from stages.policy import server as model_server
from stages.policy.base import PolicyConfig, Sample, Turn
from stages.rollouts.agent_loop import InFlight, Rules, play
from stages.runs import runner, store
from stages.runs.kinds import ROLLOUT, STEP
from stages.runs.ledger import Budget
from stages.runs.run import Run
from stages.training.rollouts import RolloutQueue, Schedule

# --- the time beside that of latency alone


class WaitingEnv:
    """Its commands and gradings take their time and nothing else."""

    name, sandbox = "waiting", "not-needed"

    def __init__(self, scale=1.0):
        self.scale = scale

    def tasks(self, split, count, seed):
        return [Task(f"t{i}", self.name, split, f"f{i}", prompt(i)) for i in range(count)]

    def reset(self, task):
        return [{"role": "user", "content": task.prompt}]

    def step(self, text):
        time.sleep(COMMAND_S * self.scale)
        return Observation(OBSERVATION, commands=("ls",), returncode=0)

    def grade(self):
        time.sleep(GRADE_S * self.scale)
        return Grade(1.0)

    def close(self):
        pass


def latency(rollouts: int = 256, steps: int = 20, scale: float = 1.0, inspect_ai: str | None = None) -> Iterator[Claim]:
    """How near the wall time of `composer collect` comes to what latency alone asks for, with a heavy tail.

    Waits have a median of 2 s, a 99th percentile of 30 s, and are cut at 60 s; a command takes 20 ms, a grading 1 s;
    all times `--scale`. No order of work can end before the slowest rollout, whose waits, commands and grading follow
    each other: the figure is that time by the wall time of the loop, from the first rollout's start to the last one's
    end; loading before, and tables and gate after it, are printed apart. inspect_ai: an interpreter that has inspect_ai
    and openai, whose `eval` then plays the same rollouts.
    """
    with cases.serving(slow_server.serve_waits, scale) as url:
        yield from _collected(url, rollouts, steps, scale)
        if inspect_ai:
            seconds, cpu = cases.apart(
                slow_server.played_by_inspect, url, rollouts, steps, scale, python=inspect_ai, WAITING_API_KEY="none"
            )
            yield from _of_time("inspect_ai", rollouts, steps, scale, seconds, cpu)


def _of_time(who: str, rollouts: int, steps: int, scale: float, wall: float, cpu: float) -> Iterator[Claim]:
    what = f"{rollouts} rollouts of {steps} steps{'' if scale == 1 else f', times x {scale:g}'}, {who}"
    share, goal = max(alone(rollouts, steps, scale)) / wall, ">= 0.9" if who == "composer collect" else None
    yield measured(f"{what}: what latency alone takes, of its time", share, n=1, goal=goal)
    each = 1000 * cpu / rollouts / steps
    yield measured(f"{what}: processor time of a step", each, unit="ms", n=rollouts * steps)


def alone(rollouts: int, steps: int, scale: float) -> list[float]:
    """Seconds that latency alone takes in each rollout."""
    own_s = (COMMAND_S * steps + GRADE_S) * scale
    return [own_s + sum(wait_s(e, i, scale) for i in range(steps)) for e in range(rollouts)]


def _collected(url: str, rollouts: int, steps: int, scale: float) -> Iterator[Claim]:
    config = collect.Config(
        env={"name": "rollouts:WaitingEnv", "options": {"scale": scale}},
        policy={"model": "m", "base_url": url, "concurrency": rollouts},
        tasks=rollouts,
        samples=1,
        max_steps=steps,
        in_flight={"rollouts": rollouts, "commands": 64, "gradings": 64},
    )
    peak, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            peak[0] = max(peak[0], cases.memory("VmRSS"))

    with tempfile.TemporaryDirectory() as folder:
        before = cases.memory("VmRSS")
        threading.Thread(target=watch, daemon=True).start()
        started, marks = time.monotonic(), list[tuple[float, float]]()

        def listen(what: str, done: int, total: int) -> None:
            marks.append((time.monotonic(), time.process_time()))

        result = runner.execute("collect", {}, config, root=Path(folder), listener=listen)
        loading, tables = marks[0][0] - started, time.monotonic() - marks[-1][0]
        wall, cpu = (end - begin for begin, end in zip(marks[0], marks[-1], strict=True))
        over.set()
        rows, played = Run(result.path).rows(STEP), Run(result.path).rows(ROLLOUT)
    late = sum(row["latency_s"] - wait_s(int(row["task_id"][1:]), row["step"], scale) for row in rows)
    between = sum(row["wall_s"] for row in played) - sum(row["latency_s"] + row["command_s"] for row in rows)
    slowest = alone(rollouts, steps, scale)
    print(
        f"{wall:.1f} s; latency alone {max(slowest):.1f} s (mean of a rollout {statistics.fmean(slowest):.1f} s); "
        f"loading {loading:.1f} s, tables and gate {tables:.1f} s; beyond the server's wait "
        f"{1000 * late / len(rows):.0f} ms of a request, {1000 * between / len(rows):.0f} ms a step between requests "
        f"and commands; {(peak[0] - before) / 1024 / rollouts:.0f} kB a live rollout"
    )
    yield from _of_time("composer collect", rollouts, steps, scale, wall, cpu)


# --- a chain that is killed

SAMPLES, STEPS, TEACHERS = 2, 20, ("one", "two", "three")


class LiteEnv:
    """Real problem statements; commands show text that depends on the command, gradings take their time."""

    name, sandbox = "lite-asleep", "not-needed"

    def __init__(self, rows="", scale=1.0):
        self.rows, self.scale, self.said = rows, scale, ""

    def tasks(self, split, count, seed):
        with gzip.open(self.rows, "rt") as file:
            rows = [json.loads(line) for line in file]
        return [
            Task(row["instance_id"], self.name, split, row["repo"], row["problem_statement"]) for row in rows[:count]
        ]

    def reset(self, task):
        self.said = task.task_id
        return [{"role": "user", "content": task.prompt}]

    def step(self, text):
        time.sleep(0.05 * self.scale)
        self.said = hashlib.sha256((self.said + text).encode()).hexdigest()
        words = random.Random(self.said)
        lines = [f"    self.value_{words.randrange(10**6)} = other.field_{words.randrange(999)}" for _ in range(60)]
        return Observation("\n".join(lines), commands=(text.split("\n")[-2],), returncode=0)

    def grade(self):
        chance = random.Random(self.said)
        time.sleep(self.scale * lognormal(chance, 15.0, 60.0, 95, 120.0))
        return Grade(float(chance.random() < 0.4))

    def close(self):
        pass


def configs(url: str, rows: Path, scale: float, limit: int) -> dict[str, Any]:
    about = {"base_url": url, "max_tokens": 64, "concurrency": 128}
    teachers = [{"name": name, "model": name, **about} for name in TEACHERS]
    rollouts = collect.Config(
        env={"name": "rollouts:LiteEnv", "options": {"rows": str(rows), "scale": scale}},
        policy={"model": "student", **about},
        tasks=limit,
        samples=SAMPLES,
        max_steps=STEPS,
        in_flight={"rollouts": 128, "commands": 64, "gradings": 64},
    )
    return {
        "collect": rollouts,
        "replay-teachers": replay_teachers.Config(teachers=teachers),
        "extract-pairs": extract_pairs.Config(compare="canonical"),
        "export": export.Config(format="verifiers"),
    }


def stage(name: str, folder: str, url: str, rows: str, scale: float, limit: int) -> None:
    """One stage to its end, or until it is killed."""
    reads = {"collect": (), "replay-teachers": ("collect",), "extract-pairs": ("collect", "replay-teachers")}
    slots = {"collect": "rollouts", "replay-teachers": "teacher_actions"}
    root = Path(folder)
    given = {slots[other]: Run(root / other) for other in reads.get(name, ("collect",))}
    runner.execute(name, given, configs(url, Path(rows), scale, limit)[name], root=root, out=root / name, resume=True)


def finished(folder: Path) -> dict[str, str]:
    """The finished units of a run by name, with a digest of what they hold."""
    units = store.read_units(folder / "steps") if folder.is_dir() else ()
    return {unit["unit"]: store.digest(unit) for unit in units if not unit["failed"]}


@cache
def lines_of(sealed: Path) -> int:
    with gzip.open(sealed) as file:
        return sum(1 for _ in file)


def lines_in(folder: Path) -> int:
    """How many units there are, those included that were written twice."""
    opened = 0
    for path in folder.glob("steps/*.jsonl.open"):
        with suppress(FileNotFoundError):  # sealed meanwhile
            opened += path.read_bytes().count(b"\n")
    return opened + sum(map(lines_of, folder.glob("steps/*.jsonl.gz")))


def carried_out(folder: Path, name: str, asked: list[Any], kill_at: int | None = None) -> tuple[float, float]:
    """Seconds and peak MB of a stage's process, which is killed once so many units are there."""
    started, peak = time.monotonic(), 0
    process = subprocess.Popen(cases.call(stage, [name, folder, *asked]), stdout=subprocess.DEVNULL)
    while process.poll() is None:
        peak = max(peak, cases.memory("VmHWM", process.pid))
        if kill_at is not None and lines_in(folder / name) >= kill_at:
            process.send_signal(signal.SIGKILL)
        time.sleep(0.5)
    assert process.returncode in (0, 1, -signal.SIGKILL), f"{name} ended with {process.returncode}"
    return time.monotonic() - started, peak / 1e6


def killed(rows: Path, scale: float = 1.0, limit: int = 300) -> Iterator[Claim]:
    """What takes days, in minutes: SWE-bench Lite's rows from collect to export, two stages killed and resumed.

    Two samples of 20 steps of a scripted policy, then `replay-teachers` with three models of the same server,
    `extract-pairs` on texts, and `export verifiers`. Answers take 0.3 s (log-normal, 99th percentile 3 s), commands 50
    ms, and gradings as long as test suites do (log-normal, median 15 s, 95th percentile 60 s, cut at 120 s); all times
    `--scale`. Every stage is a process of its own; `collect` and `replay-teachers` are killed (SIGKILL) when half of
    their units are finished, and go on with `--resume`. Lost are units that were finished before the kill and are not
    there, or not the same, afterwards. rows: the rows of SWE-bench Lite as jsonl.gz.
    """
    if not rows.is_file():
        sys.exit(f"{rows} is no file. Give the rows of SWE-bench Lite as jsonl.gz.")
    with cases.serving(slow_server.serve_teachers, scale) as url, tempfile.TemporaryDirectory() as folder:
        yield from _killed(Path(folder), [url, rows.resolve(), scale, limit])


def _killed(folder: Path, asked: list[Any]) -> Iterator[Claim]:
    (url, *_, limit), highest, gone, kept = asked, 0.0, 0, 0
    units = {"collect": limit * SAMPLES, "replay-teachers": limit * SAMPLES * STEPS * len(TEACHERS)}
    for name in configs(*asked):
        before: dict[str, str] = {}
        if name in units:
            seconds, peak = carried_out(folder, name, asked, kill_at=units[name] // 2)
            before, highest = finished(folder / name), max(highest, peak)
            print(f"{name:16} {seconds:7.1f} s {peak:6.0f} MB  killed with {len(before)} units finished", flush=True)
        seconds, peak = carried_out(folder, name, asked)
        highest, run = max(highest, peak), Run(folder / name)
        assert run.manifest.status == "complete" and not run.damage()
        after = finished(folder / name)
        missing = sum(after.get(unit) != held for unit, held in before.items())
        gone, kept = gone + missing, kept + len(before)
        counts = ", ".join(f"{key} {value}" for key, value in run.manifest.counts.items())
        print(f"{name:16} {seconds:7.1f} s {peak:6.0f} MB  {missing} lost  {counts}", flush=True)
    files = [path for path in folder.rglob("*") if path.is_file()]
    print(f"{len(files)} files of {sum(path.stat().st_size for path in files) / 1e6:.0f} MB", flush=True)
    served, what = slow_server.counts(url), f"{limit} rows of SWE-bench Lite from collect to export, two stages killed"
    yield measured(f"{what}: finished units lost", gone, n=kept, goal="= 0")
    yield measured(f"{what}: answers paid twice", served["twice"], n=served["served"])
    yield measured(f"{what}: largest memory of a process", highest, unit="MB", n=1, goal="<= 2000")


# --- training that waits for rollouts, and training that does not

TURNS, GROUP = 8, 8


class RecordedEnv(WaitingEnv):
    """Commands take as long as recorded ones, gradings as test suites."""

    def reset(self, task):
        self.task, self.turn = task, 0
        # Two samples of a task are no equal requests, so that their answers have lengths of their own.
        self.sample = next(RecordedEnv.numbers)
        return [{"role": "user", "content": f"{self.sample} {task.prompt}"}]

    numbers = itertools.count()

    def step(self, text):
        self.turn += 1
        time.sleep(self.scale * slow_server.recorded(slow_server.COMMANDS_S, self.sample, self.turn))
        return Observation(OBSERVATION, commands=("ls",), returncode=0)

    def grade(self):
        time.sleep(self.scale * lognormal(random.Random(self.sample), 15.0, 60.0, 95, 120.0))
        return Grade(1.0)


class Followed:
    """In the place of a server's weights: answers are of the newest version, which loads in no time."""

    def __init__(self, policy: Any) -> None:
        self.policy, self.version = policy, 0
        self.config, self.drain = policy.config, policy.drain
        self.capture_level, self.batch_size = policy.capture_level, policy.batch_size

    async def ask(self, turn: Turn) -> Sample:
        """Answer with the version at the beginning."""
        version = self.version
        return replace(await self.policy.ask(turn), policy_version=version)

    def follow(self, step: int) -> dict[str, float]:
        """Take the next version."""
        self.version = step
        return {}

    def played(self, step: int, rollouts: Any) -> None:
        """Compare nothing: nobody else trains."""

    def end(self) -> None:
        """Nothing was replaced."""


def queue(rollouts: int = 64, steps: int = 3, train_s: float = 60.0, scale: float = 0.03) -> Iterator[Claim]:
    """What a training gains whose rollouts never wait for each other, behind a server with continuous batching.

    Groups of eight rollouts of eight turns. Answers are as long as 662 recorded ones of mini-swe-agent (median 80
    tokens, 99th percentile 1,985), commands as 60 of OpenHands (median 0.6 s, 99th percentile 30 s, cut at 60 s),
    gradings as test suites (log-normal, median 15 s, 95th percentile 60 s, cut at 120 s). A step of the server takes 8
    ms and 0.03 ms a request, for a token of each. Training on a step takes `--train-s`; all times `--scale`. Lock step
    is the loop of models in this process, with 4 threads as trainings had until then, and with as many as the others;
    these have 64 commands and 64 gradings at once. A ratio is of whole steps, the first one left out, to lock step
    with 4 threads.
    """
    wide = InFlight(rollouts=512, commands=64, gradings=64)
    ways: dict[str, tuple[InFlight, int | None]] = {
        "lock step, 4 threads": (InFlight(commands=4, gradings=4), None),
        "lock step, 64 threads": (wide, None),
        "each at its own pace": (wide, 0),
        "queue, max_staleness 1": (wide, 1),
        "queue, max_staleness 2": (wide, 2),
    }
    with cases.serving(slow_server.serve_batch, scale) as url:
        found = {name: _trained(url, rollouts, steps, train_s, scale, *way) for name, way in ways.items()}
    before = statistics.fmean(found["lock step, 4 threads"][0])
    what = f"{rollouts} rollouts of {TURNS} turns a step, training {train_s:g} s"
    for name, (times, busy, given_up) in found.items():
        gained = before / statistics.fmean(times)
        print(
            f"{name:<24}{statistics.fmean(times) / scale:>8.0f} s a step{gained:>7.2f} times as fast, the server has "
            f"work {100 * busy:.0f} % of the time, {given_up:.0f} groups given up",
            flush=True,
        )
        goals = (">= 3", ">= 0.9") if name.startswith("queue") else (None, None)
        yield measured(f"{what}, {name}: times as fast as lock step", gained, n=len(times), goal=goals[0])
        yield measured(f"{what}, {name}: time in which the server has work", busy, n=len(times), goal=goals[1])


def _trained(
    url: str, rollouts: int, steps: int, train_s: float, scale: float, in_flight: InFlight, max_staleness: int | None
) -> tuple[list[float], float, float]:
    """Seconds of each step but the first, the share of them in which the server had work, and groups given up."""
    RecordedEnv.numbers = itertools.count()
    config = PolicyConfig(model="m", base_url=url, max_tokens=64, concurrency=512)
    make, groups = partial(RecordedEnv, scale), rollouts // GROUP
    # More than are measured, so that there are always groups to begin.
    tasks = WaitingEnv().tasks("train", (steps + 1 + 4) * groups, 0)
    schedule, given_up, marks = Schedule(tasks, groups, GROUP, seed=0), 0.0, list[tuple[float, float]]()
    with tempfile.TemporaryDirectory() as folder:
        policy = Followed(
            open_policy(config, cache=Path(folder), budget=Budget(None, Path(folder) / "ledger"), listener=print)
        )
        rules = Rules(TURNS)
        player = RolloutQueue(
            make, policy, schedule, policy, rules=rules, in_flight=in_flight, max_staleness=max_staleness or 0
        )
        for step in range(steps + 1):
            if max_staleness is None:
                play(make, policy, schedule.own(step), max_steps=TURNS, in_flight=in_flight)
            else:
                given_up += player.take(step)[1]["sampling/groups_given_up"]
            time.sleep(train_s * scale)
            marks.append((time.monotonic(), slow_server.counts(url)["busy_s"]))
        player.close()
    times = [after[0] - before[0] for before, after in itertools.pairwise(marks)]
    return times, (marks[-1][1] - marks[0][1]) / (marks[-1][0] - marks[0][0]), given_up


# --- rollouts from vLLM

STUDENT = "kata:student-served"


@contextmanager
def vllm() -> Iterator[tuple[Path, dict[str, Any]]]:
    """A folder of artifacts, and the policy that a vLLM server of kata's student serves."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        config = PolicyConfig(model=f"vllm:{STUDENT}")
        server = model_server.start(
            config, root / "vllm.log", cache=root / "models", rank=8, listener=lambda *a: None, check=lambda: None
        )
        try:
            yield root, {"model": f"vllm:{STUDENT}", "base_url": server.url}
        finally:
            server.stop()


def served(rounds: int = 3) -> Iterator[Claim]:
    """Rollouts of kata through a vLLM server beside the sampler in this process: seconds for the same 160 rollouts.

    The two take turns, so that other work slows both. The start of the server is not counted; its first rollouts, in
    which it compiles, are thrown away. Needs vLLM: `./dev vllm`, or COMPOSER_VLLM.
    """

    def seconds(root: Path, policy: dict[str, Any], seed: int, tasks: int = 20) -> float:
        config = collect.Config(env={"name": "kata"}, policy=policy, tasks=tasks, samples=8, seed=seed)
        started = time.monotonic()
        run = Run(runner.execute("collect", {}, config, root=root).path)
        took, tokens = time.monotonic() - started, sum(row["completion_tokens"] for row in run.rows(STEP))
        print(f"{policy['model']}: {took:.1f} s, {tokens / took:.0f} tokens/s", flush=True)
        return took

    times: dict[str, list[float]] = {"vLLM": [], "here": []}
    with vllm() as (root, policy):
        seconds(root, policy, seed=99, tasks=2)
        for seed in range(rounds):
            times["vLLM"].append(seconds(root, policy, seed))
            times["here"].append(seconds(root, {"model": STUDENT}, seed))
    claim = "160 rollouts of kata from vLLM: time beside the sampler in this process"
    yield measured(claim, *ratio(times["vLLM"], times["here"]), n=rounds)


# --- training on rollouts from vLLM


class WaitingKata(KataEnv):
    """Every command takes so many seconds more."""

    def __init__(self, wait_s: float = 0.0) -> None:
        super().__init__()
        self._wait_s = wait_s

    def step(self, text: str) -> Observation:
        """Wait, then as in kata."""
        time.sleep(self._wait_s)
        return super().step(text)


def ahead(rounds: int = 2, steps: int = 4, wait: float = 0.0) -> Iterator[Claim]:
    """GRPO on kata with rollouts from vLLM beside the sampler in this process, and what max_staleness = 1 gains.

    Three trainings of the same settings take turns: LoRA of rank 8, 4 prompts x 8 rollouts a step. The start of the
    server is not counted, nor the first step of each training, for which no rollouts can be sampled ahead. Trainer and
    server share this machine's cores, so that only what neither of them computes can be gained: `--wait` lets every
    command of a rollout take so many seconds more, as a slow tool would. Needs vLLM: `./dev vllm`, or COMPOSER_VLLM.
    """
    seconds: dict[str, list[float]] = {}
    rewards: dict[str, list[float]] = {}
    with vllm() as (root, policy):
        sides = {"here": ({"model": STUDENT}, {}), "vLLM": (policy, {}), "ahead": (policy, {"max_staleness": 1})}
        steps_of(root, policy, {"steps": 1}, wait, seed=99)
        for seed in range(rounds):
            for name, (sampler, more) in sides.items():
                lines = steps_of(root, sampler, {"steps": steps, **more}, wait, seed)
                seconds.setdefault(name, []).extend(line["step_time"] for line in lines[1:])
                rewards.setdefault(name, []).extend(line["reward"] for line in lines)
                print(f"{name}: {[round(line['step_time'], 1) for line in lines]} s", flush=True)
    for name, times in seconds.items():
        mean = statistics.fmean(rewards[name])
        print(f"{name:<22}{statistics.median(times):>7.2f} s a step, mean reward {mean:.3f}")
    waited = f", commands of {wait:g} s" if wait else ""
    claim = f"training on vLLM's rollouts of kata{waited}: time of a step with max_staleness 1 beside 0"
    yield measured(claim, *ratio(seconds["ahead"], seconds["vLLM"]), n=len(seconds["vLLM"]))


def steps_of(
    root: Path, policy: dict[str, Any], size: dict[str, Any], wait: float, seed: int
) -> list[dict[str, float]]:
    """The metrics of each step of one training."""
    config = train.Config(
        env={"name": "rollouts:WaitingKata", "options": {"wait_s": wait}},
        policy=policy,
        tasks=40,
        seed=seed,
        optimisation={"prompts_per_step": 4, "generations": 8, "learning_rate": 1e-3, "threads": 1, **size},
        adapter={"rank": 8},
    )
    run = Run(runner.execute("train", {}, config, root=root).path)
    lines = [json.loads(line) for line in (run.read_file("metrics.jsonl") or b"").splitlines()]
    return [line for line in lines if "step_time" in line]


CASES = {"latency": latency, "killed": killed, "queue": queue, "served": served, "ahead": ahead}

if __name__ == "__main__":
    cases.main(__file__, CASES)
