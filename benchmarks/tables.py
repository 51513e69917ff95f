"""A run larger than memory through the pipeline: collect's tables and gate, extract-pairs, export; time and memory.

    python benchmarks/tables.py --steps 100000 1000000 [--folder DIR]

Rollouts of 50 steps, some 4 kB a step, are written as the finished units of a `collect` in a shuffled order, as servers
finish them. What follows are the stages themselves, each in a process of its own: `collect --resume`, which has
nothing left to play and tabulates and checks; `extract-pairs` on the answers of three teachers to every state;
`export` to TRL and to verifiers; and `replay-teachers` with a free teacher of this process that answers at once, so
that what is measured is the reading of states and the writing of answers. Prints the seconds and the peak memory of
each. The folder takes 4 GB a million steps, and 4 GB more while teachers are asked.
"""

import argparse
import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import records

from stages import collect, export, extract_pairs, replay_teachers
from stages.policy import KINDS, PolicyConfig, Sample, Turn
from stages.rollouts.agent_loop import LiveRollout
from stages.rollouts.trace import digests_of_prefixes
from stages.runs import runner, store
from stages.runs.kinds import ROLLOUT, STEP, TEACHER_ACTION, Row
from stages.runs.run import Inputs, Manifest, Run, RunWriter, write_manifest
from stages.runs.stage import load_stage
from stages.runs.store import Journal

SAMPLES, STEPS, OBSERVED = 8, 50, 1700
WORDS = [f"{a}{b}" for a in ("file", "test", "line", "value", "error", "path") for b in range(300)]
POLICY = {"model": "m", "base_url": "http://127.0.0.1:9/v1", "max_tokens": 64}
TEACHERS = ("one", "two", "three")
MEASURED = ("collect", "extract-pairs", "export trl", "export verifiers", "replay-teachers")
PHASES = ("made", "collect", "answers", "extract-pairs", "export trl", "export verifiers", "replay-teachers")


def main() -> None:
    """All phases at every size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--phase", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.phase:
        began = time.perf_counter()
        phase(given.phase, given.folder, given.steps[0])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        took = time.perf_counter() - began
        print(f"{given.phase:18} {took:8.1f} s {time.process_time():8.1f} s of CPU {peak:8.0f} MB", flush=True)
        print(json.dumps({"cpu": time.process_time(), "peak": peak}))
        return
    for steps in given.steps:
        folder = Path(tempfile.mkdtemp(dir=given.folder))
        print(f"{steps} steps", flush=True)
        for name in PHASES:
            words = [sys.executable, __file__, "--phase", name, "--folder", str(folder), "--steps", str(steps)]
            told, last = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
            print(told, flush=True)
            found, what = json.loads(last), f"{steps:,} steps, {name}"
            claims = [
                records.measured(f"{what}: peak memory", found["peak"], unit="MB", n=1, goal="<= 1000"),
                records.measured(f"{what}: processor time", found["cpu"], unit="s", n=1),
            ]
            records.write(__file__, claims if name in MEASURED else [])
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        print(f"on disk {size / 1e9:.2f} GB", flush=True)
        shutil.rmtree(folder)


def config(steps: int) -> collect.Config:
    """So many steps are these rollouts."""
    tasks = steps // (SAMPLES * STEPS)
    return collect.Config(policy=POLICY, tasks=tasks, samples=SAMPLES, max_steps=STEPS)


def phase(name: str, root: Path, steps: int) -> None:
    """One of `PHASES`."""
    if name == "made":
        made(root, config(steps))
    elif name == "collect":
        runner.execute("collect", {}, config(steps), root=root, out=root / "rollouts", resume=True)
    elif name == "replay-teachers":
        KINDS["instant"] = Instant
        teacher = {"name": "instant", "model": "instant:it", "max_tokens": 16}
        asked = replay_teachers.Config(teachers=[teacher])
        runner.execute(name, {"rollouts": Run(root / "rollouts")}, asked, root=root)
    elif name == "answers":
        answered(root)
    else:
        rollouts = Run(root / "rollouts")
        if name == "extract-pairs":
            given = {"rollouts": rollouts, "teacher_actions": Run(root / "answers")}
            runner.execute(name, given, extract_pairs.Config(compare="canonical"), root=root)
        else:
            runner.execute("export", {"rollouts": rollouts}, export.Config(format=name.split()[1]), root=root)


class Instant:
    """A teacher of this process that says at once how much it was shown."""

    capture_level, batch_size = "text", 64

    def __init__(self, settings: PolicyConfig) -> None:
        self.config = settings

    @classmethod
    def open(cls, settings: PolicyConfig, *, cache: Path, budget: Any, listener: Any) -> "Instant":
        """Ready at once."""
        return cls(settings)

    def sample(self, turns: list[Turn]) -> list[Sample]:
        """One command an answer, by the length of the conversation."""
        return [Sample(text=f"```bash\nsed -n {len(turn.messages)}p x.py\n```", finish_reason="stop") for turn in turns]

    def facts(self) -> dict[str, Any]:
        """Its name."""
        return {"model": self.config.model}


def opened(folder: Path, stage: str, settings: Any, inputs: Inputs) -> Manifest:
    """The manifest of a run that was begun."""
    resolved = settings and runner.resolve_run(stage, inputs, settings, root=folder.parent, check=False)
    print_ = resolved.fingerprint if resolved else "0"
    about = {"config": settings.model_dump(mode="json"), "identity": settings.identity()} if settings else {}
    version = load_stage(stage).version
    begun = Manifest(composer="0", stage=stage, stage_version=version, fingerprint=print_, **about)
    begun.status, begun.inputs = "interrupted", inputs.refs()
    folder.mkdir()
    write_manifest(folder, begun)
    return begun


def made(root: Path, settings: collect.Config) -> None:
    """All rollouts as finished units, in the order in which they happened to end."""
    opened(root / "rollouts", "collect", settings, Inputs())
    tasks = settings.draw(settings.opener(), settings.tasks)
    rollouts = [LiveRollout(task, index, settings.seed) for task in tasks for index in range(settings.samples)]
    random.Random(0).shuffle(rollouts)
    journal = Journal(root / "rollouts" / "steps")
    for start in range(0, len(rollouts), 32):
        journal.append([(e.rollout_id, unit(e, i), False) for i, e in enumerate(rollouts[start : start + 32], start)])


def unit(rollout: LiveRollout, number: int) -> Row:
    """One rollout as `collect` would write it: commands, what they showed, and a reward."""
    rng, reward = random.Random(number), float(number % 3 == 0)
    who = {"rollout_id": rollout.rollout_id, "task_id": rollout.task.task_id, "env": rollout.task.env}
    who |= {"group_id": rollout.task.task_id, "sample_idx": rollout.sample_idx}
    actions = [command(rng) for _ in range(STEPS)]
    seen = [" ".join(rng.choices(WORDS, k=OBSERVED // 8)) for _ in range(STEPS)]
    gains = [[{"role": "user", "content": rollout.task.prompt}]] + [
        [{"role": "assistant", "content": action}, {"role": "user", "content": shown}]
        for action, shown in zip(actions[:-1], seen, strict=False)
    ]
    states = digests_of_prefixes(gains)
    common = dict.fromkeys(STEP.columns) | who | {"num_steps": STEPS, "capture_level": "text", "model": "m"}
    common |= {"truncated": False, "timed_out": False, "elided_chars": 0, "finish_reason": "stop", "history": "full"}
    common |= {"prompt_tokens": 1000, "completion_tokens": 30, "cost_usd": 0.0, "latency_s": 1.0, "command_s": 0.1}
    rows = [
        {
            **common,
            "step": i,
            "new_messages_json": store.encode(gains[i]).decode(),
            "num_messages": 1 + 2 * i,
            "state_sha256": states[i],
            "action": actions[i],
            "commands": [actions[i]],
            "observation": seen[i],
            "returncode": 0,
            "raw_chars": len(seen[i]),
            "reward": reward if i == STEPS - 1 else 0.0,
            "done": i == STEPS - 1,
        }
        for i in range(STEPS)
    ]
    about = {"split": "train", "family": rollout.task.family, "seed": 0, "num_steps": STEPS, "reward": reward}
    about |= {"hidden_pass": bool(reward), "visible_pass": True, "terminated_by": "submitted", "sandbox": "none"}
    about |= {"model": "m", "source": "collect", "prompt_tokens": 1, "completion_tokens": 1, "cost_usd": 0.0}
    return {"rollout": dict.fromkeys(ROLLOUT.columns) | who | about, "steps": rows}


def command(rng: random.Random) -> str:
    """One of a few thousand commands, as agents repeat themselves."""
    return f"```bash\nsed -n {rng.randrange(60)}p {rng.choice(WORDS[:40])}.py\n```"


def answered(root: Path) -> None:
    """What three teachers said in every state; each agrees with the student half of the time."""
    rollouts = Run(root / "rollouts")
    record = opened(root / "answers", "replay-teachers", None, Inputs({"rollouts": rollouts}))
    out = RunWriter(root / "answers", record, cache=root)
    out.table(TEACHER_ACTION, answers(rollouts))
    record.status = "complete"
    write_manifest(root / "answers", record)


def answers(rollouts: Run) -> Iterator[Row]:
    """Rows in the order of states; those that rollouts of a task begin with are asked about once."""
    seen, rng = set[str](), random.Random(1)
    columns = ["state_sha256", "task_id", "rollout_id", "step", "action"]
    common = dict.fromkeys(TEACHER_ACTION.columns) | {"num_steps": 1, "model": "t", "sample_idx": 0, "cost_usd": 0.0}
    common |= {"finish_reason": "stop", "prompt_tokens": 1, "completion_tokens": 1, "attempts": 1, "latency_s": 1.0}
    for row in rollouts.scan(STEP).rows(columns):
        if row["step"] == 0:
            if row["state_sha256"] in seen:
                continue
            seen.add(row["state_sha256"])
        better = command(rng)
        for teacher in TEACHERS:
            said = row["action"] if rng.random() < 0.5 else better
            yield {**common, **row, "unit_id": "u", "teacher": teacher, "action": said}


if __name__ == "__main__":
    main()
