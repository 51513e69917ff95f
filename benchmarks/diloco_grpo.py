"""GRPO on kata: replicas that meet every few steps beside synchronous training on as many rollouts.

    python benchmarks/diloco_grpo.py [--steps 40] [--replicas 4] [--inner-steps 4] [--seed 3] [--folder DIR]

Everything is `composer` itself: one `train` with `--replicas` prompts a step, then that many `train --diloco` in
processes of their own, which share a folder, with one prompt a step each, and the same rate; `evaluate` then plays the
student and both results on the same held-out tasks, greedily. Prints each one's pass rate, the difference between the
two with its interval, the bytes that a replica sent, and the processor time of it all.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import orjson
import records

COMPOSER = (sys.executable, "-m", "composer_cli")
VERDICTS = (0, 1, 3)
"""Exit codes of an evaluation that came to a verdict."""


def words(given, *, prompts):
    """Of `composer train`, without what only replicas have."""
    size = {"steps": given.steps, "prompts_per_step": prompts, "learning_rate": given.rate, "threads": 1}
    settings = [f"optimisation.{name}={value}" for name, value in size.items()] + [f"seed={given.seed}"]
    return ["train", "-q", *(word for setting in settings for word in ("-s", setting))]


def started(command, out):
    """The command at work; beside its run lie the models, made once for all."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    places = ["--artifacts", str(out.parent), "--out", str(out)]
    return subprocess.Popen([*COMPOSER, *command, *places], env=environment, stdout=subprocess.DEVNULL)


def ended(process, codes=(0,)):
    if process.wait() not in codes:
        sys.exit(f"{' '.join(map(str, process.args))} ended with {process.returncode}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--inner-steps", type=int, default=4)
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=240)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp())
    ended(started([*words(given, prompts=given.replicas), "-s", "arm=A"], folder / "A"))
    meeting = ["--diloco", f"file://{folder}/bucket", "--replicas", str(given.replicas), "-s", "arm=B"]
    meeting += ["-s", f"diloco.inner_steps={given.inner_steps}", "-s", f"diloco.codec={given.codec}"]
    # they are slow together, and none is to be left behind for it
    meeting += ["-s", "diloco.grace_s=3600", "-s", f"diloco.quorum={given.replicas}"]
    replicas = [
        started([*words(given, prompts=1), *meeting, "-s", f"diloco.replica={n}"], folder / f"B{n}")
        for n in range(given.replicas)
    ]
    for process in replicas:
        ended(process)
    arms = [folder / "A", folder / "B0"]
    command = ["evaluate", "-q", *(word for arm in arms for word in ("--from", str(arm))), "-s", f"tasks={given.tasks}"]
    command += ["-s", f"seed={given.seed + 1000}", "-s", "temperature=0", "-s", "control="]
    ended(started(command, folder / "evaluated"), VERDICTS)
    verdict = orjson.loads((folder / "evaluated" / "verdict.json").read_bytes())
    sent = orjson.loads((arms[1] / "diloco.json").read_bytes())
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    told = {"rounds": len(sent["rounds"]), "bytes_sent": sent["bytes_sent"], "cpu_s": used.ru_utime + used.ru_stime}
    print(orjson.dumps({**told, "folder": str(folder), "verdict": verdict}, option=orjson.OPT_INDENT_2).decode())
    what = f"GRPO on kata, {given.replicas} replicas, {given.steps} steps, {given.inner_steps} a round, {given.codec}"
    claim = f"{what}, seed {given.seed}: pass@1 less synchronous training's"
    gain, *between = (100 * verdict["gain"][key] for key in ("estimate", "low", "high"))
    records.write(__file__, [records.measured(claim, gain, between, unit="points", n=given.tasks)])


if __name__ == "__main__":
    main()
