"""What a rollout costs in a sandbox, beside the bubblewrap environment that mini-swe-agent brings along.

    python benchmarks/sandbox.py rollouts [--number 100] [--threads 1]
    python benchmarks/sandbox.py processor [--number 100]

The first needs `pip install --no-deps mini-swe-agent python-dotenv platformdirs`.
"""

import os
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import cases
from records import Claim, measured, ratio

from composer_stages.envs.base import Task
from composer_stages.envs.bash import fenced
from composer_stages.envs.kata.env import KataEnv
from composer_stages.sandbox import probe
from composer_stages.sandbox.bubblewrap import find_bwrap

EDIT = "sed -i 's/return/return /' solution.py"
COMMANDS = ["cat solution.py", "cat test_solution.py", EDIT, "cat solution.py", "ls"]
BLOCK = 10
"""Rollouts of one side before the other has its turn, so that whatever else the machine does meets both."""


def ours(task: Task) -> list[str]:
    """Outputs of a rollout in our environment: fresh workspace, one sandbox, every change of the workspace noted."""
    environment = KataEnv()
    environment.reset(task)
    shown = [environment.step(fenced(command)).content for command in COMMANDS]
    environment.close()
    return shown


def theirs(task: Task) -> list[str]:
    """The same files and commands in mini-swe-agent's environment as it is installed: a bwrap a command."""
    os.environ["MSWEA_SILENT_STARTUP"] = "1"
    from minisweagent.environments.extra.bubblewrap import BubblewrapEnvironment

    environment = BubblewrapEnvironment(executable=find_bwrap())
    (environment.working_dir / "solution.py").write_text(task.data["original"])
    (environment.working_dir / "test_solution.py").write_text(task.data["tests"])
    shown = [environment.execute({"command": command})["output"] for command in COMMANDS]
    environment.cleanup()
    return shown


def rollouts(number: int = 100, threads: int = 1) -> Iterator[Claim]:
    """Rollouts of five commands a minute beside mini-swe-agent's bubblewrap environment, in turn."""
    cases.needed("minisweagent", by="pip install --no-deps mini-swe-agent python-dotenv platformdirs")
    probe("bubblewrap")
    tasks = KataEnv().tasks("train", number, 0)
    shown = [text.rpartition("[exit ")[0].rstrip() for text in ours(tasks[0])]
    assert shown == [text.rstrip() for text in theirs(tasks[0])], "both must do the same"
    spent: dict[Callable[[Task], list[str]], list[float]] = {ours: [], theirs: []}
    for start in range(0, number, BLOCK):
        for side, blocks in spent.items():
            started = time.perf_counter()
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(side, tasks[start : start + BLOCK]))
            blocks.append(time.perf_counter() - started)
    our_rate, their_rate = (60 * number / sum(spent[side]) for side in (ours, theirs))
    print(f"{threads} threads  {our_rate:7.0f} rollouts a minute  {their_rate:7.0f} theirs", flush=True)
    claim = f"kata rollouts, five commands of the shell's, {threads} at a time: as many a minute as with mini-swe-agent"
    yield measured(f"{claim}, times", *ratio(spent[theirs], spent[ours]), n=len(spent[ours]), goal=">= 2")


def processor(number: int = 100) -> Iterator[Claim]:
    """Processor time of a rollout of kata without its model, the programs in its sandboxes included."""
    probe("bubblewrap")
    spent: dict[str, list[float]] = {"played": [], "played and graded": []}
    for task in KataEnv().tasks("train", number, 0):
        for what, blocks in spent.items():
            before, environment = _processor_s(), KataEnv()
            environment.reset(task)
            for command in COMMANDS:
                environment.step(fenced(command))
            if what != "played":
                environment.grade()
            environment.close()
            blocks.append(1000 * (_processor_s() - before))
    for what, blocks in spent.items():
        claim = f"a kata rollout of five commands, {what}: processor time"
        yield measured(claim, *ratio(blocks, [1.0] * number), n=number, unit="ms")


def _processor_s() -> float:
    """Return seconds of processor time of this process and of its children that have ended."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


CASES = {"rollouts": rollouts, "processor": processor}


if __name__ == "__main__":
    cases.main(__file__, CASES)
