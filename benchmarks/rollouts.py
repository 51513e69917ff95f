"""Rollouts against a server with a heavy tail: how near the wall time comes to what latency alone asks for.

    python benchmarks/rollouts.py [--episodes 256] [--steps 20] [--scale 1.0] [--inspect PYTHON]

A loopback server in a process of its own answers after a log-normal wait (median 2 s, 99th percentile 30 s, cut at
60 s; all times `--scale`), which the episode and the step decide. Each answer is followed by a command of 20 ms, and
each episode by a grading of 1 s; both sleep, so that what is measured is the loop, the client, the journal and the
tables, all of `composer collect`. No order of work can end before the slowest episode, whose waits, commands and
grading follow each other: the figure is the ratio of that time to the wall time of the loop, from the first episode's
start to the last one's end; loading the program before, and tables and gate after it, are given apart. Memory is what
the process gained (VmRSS) at its peak, over the episodes that were live. With `--inspect`, the interpreter of an
environment that has inspect_ai, the same episodes are then played by its `eval` against the same server.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import records
from slow_server import lognormal, running, serve

MEDIAN_S, P99_S, CUT_S, COMMAND_S, GRADE_S = 2.0, 30.0, 60.0, 0.02, 1.0
OBSERVATION = "a line of output\n" * 60


def prompt(episode):
    return f"{episode} is the number of this one. " + "Explain this log. " * 230


def wait_s(episode, step, scale):
    return scale * lognormal(random.Random(f"{episode} {step}"), MEDIAN_S, P99_S, 99, CUT_S)


def answers(scale):
    def answer(body, raw):
        asked = next(message["content"] for message in body["messages"] if message["role"] == "user")
        text = asked if isinstance(asked, str) else asked[0]["text"]
        step = sum(message["role"] == "assistant" for message in body["messages"])
        return wait_s(int(text.split()[0]), step, scale), "```bash\nls\n```"

    return answer


# --- the environment


class WaitingEnv:
    """Its commands and gradings take their time and nothing else."""

    name, sandbox = "waiting", "not-needed"

    def __init__(self, scale=1.0):
        self.scale = scale

    def tasks(self, split, count, seed):
        from stages.envs.base import Task

        return [Task(f"t{i}", self.name, split, f"f{i}", prompt(i)) for i in range(count)]

    def reset(self, task):
        return [{"role": "user", "content": task.prompt}]

    def step(self, text):
        from stages.envs.base import Observation

        time.sleep(COMMAND_S * self.scale)
        return Observation(OBSERVATION, commands=("ls",), returncode=0)

    def grade(self):
        from stages.envs.base import Grade

        time.sleep(GRADE_S * self.scale)
        return Grade(1.0)

    def close(self):
        pass


# --- the measurement


def resident_mb() -> float:
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith("VmRSS")) / 1024


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--inspect", metavar="PYTHON")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(answers(options.scale))
        return
    with running(__file__, "--scale", str(options.scale)) as url:
        alone_s = measure(options, url)
        if options.inspect:
            beside(options, url, alone_s)


def measure(options, url):
    from stages import collect
    from stages.runs import runner
    from stages.runs.kinds import ROLLOUT, STEP
    from stages.runs.run import Run

    config = collect.Config(
        env={"name": "rollouts:WaitingEnv", "options": {"scale": options.scale}},
        policy={"model": "m", "base_url": url, "concurrency": options.episodes},
        tasks=options.episodes,
        samples=1,
        max_steps=options.steps,
        in_flight={"episodes": options.episodes, "commands": 64, "gradings": 64},
    )
    peak, over = [0.0], threading.Event()

    def watch():
        while not over.wait(0.2):
            peak[0] = max(peak[0], resident_mb())

    with tempfile.TemporaryDirectory() as folder:
        before = resident_mb()
        threading.Thread(target=watch, daemon=True).start()
        started, marks = time.monotonic(), []

        def listen(what, done, total):
            marks.append((time.monotonic(), time.process_time()))

        result = runner.execute("collect", {}, config, root=Path(folder), listener=listen)
        loading, tables = marks[0][0] - started, time.monotonic() - marks[-1][0]
        wall, cpu = (end - begin for begin, end in zip(marks[0], marks[-1], strict=True))
        over.set()
        steps, rollouts = Run(result.path).rows(STEP), Run(result.path).rows(ROLLOUT)
    own_s = (COMMAND_S * options.steps + GRADE_S) * options.scale
    waits = {(e, i): wait_s(e, i, options.scale) for e in range(options.episodes) for i in range(options.steps)}
    alone = [own_s + sum(waits[e, i] for i in range(options.steps)) for e in range(options.episodes)]
    late = [row["latency_s"] - waits[int(row["task_id"][1:]), row["step"]] for row in steps]
    between = sum(row["wall_s"] for row in rollouts) - sum(row["latency_s"] + row["command_s"] for row in steps)
    print(
        f"beyond the server's wait: {1000 * sum(late) / len(steps):.0f} ms of a request, "
        f"{1000 * between / len(steps):.0f} ms a step between requests and commands"
    )
    print(
        f"{len(alone)} episodes of {options.steps} steps, times x {options.scale:g}: {wall:.1f} s; latency alone "
        f"{max(alone):.1f} s (mean of an episode {sum(alone) / len(alone):.1f} s), ratio {max(alone) / wall:.2f}; "
        f"loading {loading:.1f} s, tables and gate {tables:.1f} s; "
        f"{1000 * cpu / len(steps):.1f} ms of CPU a step; "
        f"{1024 * (peak[0] - before) / len(alone):.0f} kB a live episode ({before:.0f} to {peak[0]:.0f} MB)"
    )
    what = f"{sizes(options)}, composer collect"
    claims = [
        records.measured(f"{what}: what latency alone takes, of its time", max(alone) / wall, n=1, goal=">= 0.9"),
        records.measured(f"{what}: processor time of a step", 1000 * cpu / len(steps), unit="ms", n=len(steps)),
    ]
    records.write(__file__, claims)
    return max(alone)


def beside(options, url, alone_s):
    script = str(ROOT / "benchmarks" / "rollouts_inspect.py")
    words = [options.inspect, script, url, str(options.episodes), str(options.steps), str(options.scale)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "benchmarks")}
    told = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    seconds, cpu = map(float, told.split()[-2:])
    each = 1000 * cpu / options.episodes / options.steps
    print(f"inspect_ai: {seconds:.1f} s, ratio {alone_s / seconds:.2f}; {each:.1f} ms of CPU a step, all of it")
    what = f"{sizes(options)}, inspect_ai"
    claims = [
        records.measured(f"{what}: what latency alone takes, of its time", alone_s / seconds, n=1),
        records.measured(f"{what}: processor time of a step", each, unit="ms", n=options.episodes * options.steps),
    ]
    records.write(__file__, claims)


def sizes(options):
    scaled = "" if options.scale == 1 else f", times x {options.scale:g}"
    return f"{options.episodes} episodes of {options.steps} steps{scaled}"


if __name__ == "__main__":
    main()
