"""What takes days, in minutes: SWE-bench Lite's 300 rows through the pipeline, killed twice and resumed.

    python benchmarks/days.py --rows shared/real/swe-lite/swe-bench-lite-test.jsonl.gz [--scale 1.0] [--limit 300]

Two samples of 20 steps of a scripted policy behind a loopback server in a process of its own, then `replay-teachers`
with three models of that server, `extract-pairs` on texts, and `export verifiers`. Answers take 0.3 s (log-normal, 99th
percentile 3 s), commands 50 ms, and gradings as long as test suites do (log-normal, median 15 s, 95th percentile 60 s,
cut at 120 s); all times `--scale`. Every stage is a process of its own; `collect` and `replay-teachers` are killed
(SIGKILL) when half of their units are finished, and go on with `--resume`. Printed are seconds and peak memory of each,
files and bytes on disk, and what was lost: units that were finished before the kill and are not there, or not the same,
afterwards; and answers that the server gave twice.
"""

import argparse
import gzip
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import records
import slow_server
from slow_server import lognormal, running, serve

SAMPLES, STEPS, TEACHERS = 2, 20, ("one", "two", "three")
COMMAND_S = 0.05


# --- the server: what it says depends on the conversation, and in two of five cases on who is asked, with which seed


def answers(scale):
    def answer(body, raw):
        state = hashlib.sha256(json.dumps(body["messages"]).encode()).hexdigest()
        mine = f"{state}{body['model']}{body.get('seed')}".encode()
        common, own = int(state[:8], 16), int(hashlib.sha256(mine).hexdigest()[:8], 16)
        number = own if own % 5 < 2 else common
        wait_s = scale * lognormal(random.Random(hashlib.sha256(raw).digest()), 0.3, 3.0, 99, 10.0)
        return wait_s, f"I look at it.\n\n```bash\nsed -n {number % 400}p src/part_{number % 7}.py\n```"

    return answer


# --- the environment: the rows' own words; commands and gradings sleep


class LiteEnv:
    """Real problem statements; commands show text that depends on the command, gradings take their time."""

    name, sandbox = "lite-asleep", "not-needed"

    def __init__(self, rows="", scale=1.0):
        self.rows, self.scale, self.said = rows, scale, ""

    def tasks(self, split, count, seed):
        from stages.envs.base import Task

        with gzip.open(self.rows, "rt") as file:
            rows = [json.loads(line) for line in file]
        return [
            Task(row["instance_id"], self.name, split, row["repo"], row["problem_statement"]) for row in rows[:count]
        ]

    def reset(self, task):
        self.said = task.task_id
        return [{"role": "user", "content": task.prompt}]

    def step(self, text):
        from stages.envs.base import Observation

        time.sleep(COMMAND_S * self.scale)
        self.said = hashlib.sha256((self.said + text).encode()).hexdigest()
        words = random.Random(self.said)
        lines = [f"    self.value_{words.randrange(10**6)} = other.field_{words.randrange(999)}" for _ in range(60)]
        return Observation("\n".join(lines), commands=(text.split("\n")[-2],), returncode=0)

    def grade(self):
        from stages.envs.base import Grade

        chance = random.Random(self.said)
        time.sleep(self.scale * lognormal(chance, 15.0, 60.0, 95, 120.0))
        return Grade(float(chance.random() < 0.4))

    def close(self):
        pass


# --- the stages, each in a process of its own


def configs(options):
    from stages import collect, export, extract_pairs, replay_teachers

    about = {"base_url": options.url, "max_tokens": 64, "concurrency": 128}
    teachers = [{"name": name, "model": name, **about} for name in TEACHERS]
    rollouts = collect.Config(
        env={"name": "days:LiteEnv", "options": {"rows": str(options.rows), "scale": options.scale}},
        policy={"model": "student", **about},
        tasks=options.limit,
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


def stage(options):
    """One stage to its end, or until it is killed."""
    from stages.runs import runner
    from stages.runs.run import Run

    reads = {"collect": (), "replay-teachers": ("collect",), "extract-pairs": ("collect", "replay-teachers")}
    slots = {"collect": "rollouts", "replay-teachers": "teacher_actions"}
    given = {slots[name]: Run(options.folder / name) for name in reads.get(options.stage, ("collect",))}
    root, out = options.folder, options.folder / options.stage
    runner.execute(options.stage, given, configs(options)[options.stage], root=root, out=out, resume=True)


def finished(folder: Path) -> dict[str, str]:
    """The finished units of a run by name, with a digest of what they hold."""
    from stages.runs import store

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


def carried_out(options, name: str, kill_at: int | None = None) -> tuple[float, float]:
    """Seconds and peak MB of a stage's process, which is killed once so many units are there."""
    words = [sys.executable, __file__, "--stage", name, "--url", options.url, "--folder", str(options.folder)]
    words += ["--rows", str(options.rows), "--scale", str(options.scale), "--limit", str(options.limit)]
    started, peak = time.monotonic(), 0.0
    process = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"})
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak = max([peak, *(int(line.split()[1]) / 1e3 for line in status.splitlines() if line.startswith("VmHWM"))])
        if kill_at is not None and lines_in(options.folder / name) >= kill_at:
            process.send_signal(signal.SIGKILL)
        time.sleep(0.5)
    assert process.returncode in (0, 1, -signal.SIGKILL), f"{name} ended with {process.returncode}"
    return time.monotonic() - started, peak


def measure(options):
    from stages.runs.run import Run

    began, highest, gone, kept = time.monotonic(), 0.0, 0, 0
    units = {"collect": options.limit * SAMPLES, "replay-teachers": options.limit * SAMPLES * STEPS * len(TEACHERS)}
    for name in configs(options):
        lost = ""
        if name in units:
            seconds, peak = carried_out(options, name, kill_at=units[name] // 2)
            before = finished(options.folder / name)
            print(f"{name:16} {seconds:7.1f} s {peak:6.0f} MB  killed with {len(before)} units finished", flush=True)
            highest = max(highest, peak)
        seconds, peak = carried_out(options, name)
        highest = max(highest, peak)
        run = Run(options.folder / name)
        assert run.manifest.status == "complete" and not run.damage()
        if name in units:
            after = finished(options.folder / name)
            missing = sum(after.get(unit) != held for unit, held in before.items())
            gone, kept = gone + missing, kept + len(before)
            lost = f"  {missing} of these lost"
        counts = ", ".join(f"{key} {value}" for key, value in run.manifest.counts.items())
        print(f"{name:16} {seconds:7.1f} s {peak:6.0f} MB {lost}  {counts}", flush=True)
    files = [path for path in options.folder.rglob("*") if path.is_file()]
    print(f"in all {time.monotonic() - began:.0f} s, peak {highest:.0f} MB, {len(files)} files of ", end="")
    size = sum(path.stat().st_size for path in files) / 1e6
    served = slow_server.counts(options.url)
    print(f"{size:.0f} MB; the server gave {served}", flush=True)
    what = f"{options.limit} rows of SWE-bench Lite from collect to export, two stages killed"
    claims = [
        records.measured(f"{what}: finished units lost", gone, n=kept, goal="= 0"),
        records.measured(f"{what}: answers paid twice", served["twice"], n=served["served"]),
        records.measured(f"{what}: largest memory of a process", highest, unit="MB", n=1, goal="<= 2000"),
    ]
    records.write(__file__, claims)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--limit", type=int, default=300)
    for hidden in ("--serve", "--stage", "--url", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS, **({"action": "store_true"} if hidden == "--serve" else {}))
    options = parser.parse_args()
    options.folder = options.folder and Path(options.folder)
    if options.serve:
        serve(answers(options.scale))
    elif options.stage:
        stage(options)
    elif options.rows is None or not options.rows.is_file():
        sys.exit(f"--rows {options.rows} is no file. Give the rows of SWE-bench Lite as jsonl.gz.")
    else:
        options.rows = options.rows.resolve()
        with running(__file__, "--scale", str(options.scale)) as options.url, tempfile.TemporaryDirectory() as folder:
            options.folder = Path(folder)
            measure(options)


if __name__ == "__main__":
    main()
