"""What a command and a rollout cost in a kept-alive sandbox.

Commands: against a fresh bwrap for each of them with the same isolation. Rollouts: against the bubblewrap environment
that mini-swe-agent brings along.

    python benchmarks/sandbox.py commands [--repetitions 50]
    python benchmarks/sandbox.py rollouts [--number 100] [--threads 1]

The second needs `pip install --no-deps mini-swe-agent python-dotenv platformdirs`.
"""

import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cases
from records import Claim, measured, ratio

from stages.envs.base import Task
from stages.envs.bash import fenced
from stages.envs.kata.env import KataEnv
from stages.sandbox import Call, Limits, View, judge, open_sandbox, probe
from stages.sandbox.bubblewrap import bwrap_command, find_bwrap
from stages.sandbox.supervised import FIXED_ENV

COMMANDS = {"true": "true", "cat a file": "cat solution.py", "python3 on a file": "python3 solution.py"}
SOURCE = "def add(a, b):\n    return a + b\n"
CANDIDATES = 64
EDIT, TEST = "sed -i 's/return/return /' solution.py", "python3 test_solution.py"
SHELL = ["cat solution.py", "cat test_solution.py", EDIT, "cat solution.py", "ls"]
SCRIPTS = {"shell": SHELL, "with tests": ["cat solution.py", TEST, EDIT, TEST, "ls"], "20 commands": 4 * SHELL}
SCRIPT = {
    "shell": "five commands of the shell's",
    "with tests": "five commands, two run the tests",
    "20 commands": "twenty commands of the shell's",
}
BLOCK = 10
"""Rollouts of one side before the other has its turn, so that whatever else the machine does meets both."""


def times_ms(action: Callable[[], object], repetitions: int) -> list[float]:
    """Wall times of `action` in milliseconds."""
    spent = []
    for _ in range(repetitions):
        started = time.perf_counter()
        action()
        spent.append(1000 * (time.perf_counter() - started))
    return spent


def fresh(work: Path, command: str) -> None:
    """One command in a bwrap of its own."""
    with bwrap_command(work, Limits(), View()) as (argv, descriptors):
        argv += ["--", "bash", "-c", command]
        subprocess.run(argv, pass_fds=descriptors, env=FIXED_ENV, capture_output=True, check=True)


def grade_fresh(work: Path) -> None:
    """Each candidate by a python3 in a bwrap of its own."""
    for _ in range(CANDIDATES):
        fresh(work, "python3 -c 'from solution import add; add(1, 2)'")


def commands(repetitions: int = 50) -> Iterator[Claim]:
    """What a command costs in a kept-alive sandbox beside a fresh bwrap for each of them with the same isolation."""
    probe("bubblewrap")
    with tempfile.TemporaryDirectory(prefix="composer-worker-") as folder:
        work = Path(folder)
        (work / "solution.py").write_text(SOURCE)
        opened = times_ms(lambda: open_sandbox("bubblewrap", work).close(), repetitions)
        print(f"open and close      {statistics.median(opened):6.1f} ms")
        with open_sandbox("bubblewrap", work) as sandbox:
            for name, command in COMMANDS.items():
                kept = times_ms(lambda command=command: sandbox.run(command), repetitions)
                yield beside(name, kept, times_ms(lambda command=command: fresh(work, command), repetitions))
        calls = [Call("solution.py", "add", [(1, 2)])] * CANDIDATES
        together = times_ms(lambda: judge("bubblewrap", work, calls), 5)
        yield beside(f"grade {CANDIDATES}", together, times_ms(lambda: grade_fresh(work), 5))


def ours(task: Task, commands: list[str]) -> list[str]:
    """Outputs of a rollout in our environment: fresh workspace, one sandbox, every change of the workspace noted."""
    environment = KataEnv()
    environment.reset(task)
    shown = [environment.step(fenced(command)).content for command in commands]
    environment.close()
    return shown


def theirs(task: Task, commands: list[str]) -> list[str]:
    """The same files and commands in mini-swe-agent's environment as it is installed: a bwrap a command."""
    os.environ["MSWEA_SILENT_STARTUP"] = "1"
    from minisweagent.environments.extra.bubblewrap import BubblewrapEnvironment

    environment = BubblewrapEnvironment(executable=find_bwrap())
    (environment.working_dir / "solution.py").write_text(task.data["original"])
    (environment.working_dir / "test_solution.py").write_text(task.data["tests"])
    shown = [environment.execute({"command": command})["output"] for command in commands]
    environment.cleanup()
    return shown


def rollouts(number: int = 100, threads: int = 1) -> Iterator[Claim]:
    """Rollouts a minute beside mini-swe-agent's bubblewrap environment, in turn, for scripts of five or 20 commands."""
    cases.needed("minisweagent", by="pip install --no-deps mini-swe-agent python-dotenv platformdirs")
    probe("bubblewrap")
    tasks = KataEnv().tasks("train", number, 0)
    for name, commands in SCRIPTS.items():
        shown = [text.rpartition("[exit ")[0].rstrip() for text in ours(tasks[0], commands)]
        assert shown == [text.rstrip() for text in theirs(tasks[0], commands)], "both must do the same"
        spent: dict[Callable[[Task, list[str]], list[str]], list[float]] = {ours: [], theirs: []}
        for start in range(0, number, BLOCK):
            for side, blocks in spent.items():
                blocks.append(seconds(side, tasks[start : start + BLOCK], commands, threads))
        our_rate, their_rate = (60 * number / sum(spent[side]) for side in (ours, theirs))
        print(f"{name:<12} {threads} threads  {our_rate:7.0f} rollouts a minute  {their_rate:7.0f} theirs", flush=True)
        claim = f"kata rollouts, {SCRIPT[name]}, {threads} at a time: as many a minute as with mini-swe-agent, times"
        goal = None if name == "20 commands" else ">= 2"
        yield measured(claim, *ratio(spent[theirs], spent[ours]), n=len(spent[ours]), goal=goal)


def seconds(side: Callable[[Task, list[str]], object], tasks: list[Task], commands: list[str], threads: int) -> float:
    """Wall time of a block of rollouts."""
    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda task: side(task, commands), tasks))
    return time.perf_counter() - started


def beside(name: str, kept: list[float], once: list[float]) -> Claim:
    """How many times as fast a sandbox is that is kept alive."""
    print(
        f"{name:<18}  {statistics.median(kept):6.1f} ms kept alive  {statistics.median(once):7.1f} ms fresh", flush=True
    )
    claim = f"sandbox kept alive, {name}: times as fast as a fresh bwrap each time"
    return measured(claim, *ratio(once, kept), n=len(kept))


CASES = {"commands": commands, "rollouts": rollouts}


if __name__ == "__main__":
    cases.main(__file__, CASES)
