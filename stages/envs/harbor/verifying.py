"""The verifier of a Harbor task: run its test script, and read the reward that it writes.

A shared verifier runs in the agent's machine, a separate one in a fresh machine that only the declared artifacts reach.
Reward files that were there before are deleted first, and it is noted that they were. What is no finite number of a
file that the verifier wrote is not a reward: null with the reason, and never 0.
"""

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_stages.envs.folders import UnwieldyTree
from composer_stages.envs.harbor.machines import LOGS, Machine
from composer_stages.envs.harbor.task_folder import (
    ARTIFACTS,
    TEST_SCRIPT,
    Artifact,
    ContainerSource,
    HarborStep,
    HarborTask,
)
from composer_stages.envs.repo import trees
from composer_stages.errors import InfrastructureError
from composer_stages.words import Sentence

VERIFIER = f"{LOGS}/verifier"
TESTS = "/tests"
REWARDS = ("reward.json", "reward.txt")
"""In the order in which they count."""
LONGEST_REWARD = 1 << 16
"""Bytes of a reward file."""
LARGEST_REWARD = 1e6
FETCHED_BYTES = 256 << 20
"""Apparent bytes of all artifacts of a rollout."""
ATTEMPTS = 2
"""Runs of a verifier that gives no reward: the second may get what the first was denied."""
log = logging.getLogger(__name__)


class NoReward(InfrastructureError):
    """A verifier left no reward. again: whether another run may leave one."""

    def __init__(self, code: str, *, again: bool = True, **values: Any) -> None:
        super().__init__(code, **values)
        self.again = again


@dataclass(frozen=True)
class VerifierVerdict:
    """The numbers of a reward file, the verifier's log, and whether a reward file was there before it ran."""

    rewards: Mapping[str, float]
    log: str
    planted: bool


def verify(
    task: HarborTask, step: HarborStep, machine: Machine, start: Callable[[ContainerSource], Machine]
) -> VerifierVerdict:
    """Run a step's verifier on the agent's machine, or on one that `start` gives, and return its verdict.

    `NoReward` with the reason where no attempt leaves a reward; `UnwieldyTree` for artifacts that are too many. The
    agent's machine is left without tests and rewards.
    """
    planted = bool(machine.empty(VERIFIER) & set(REWARDS))
    if planted:
        log.warning("%s: a reward file was there before the verifier ran, and was deleted", task.name)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            if step.separate is None:
                rewards, text = run_shared(machine, task, step)
            else:
                rewards, text = run_separate(machine, start, task, step, step.separate)
            return VerifierVerdict(rewards, text, planted)
        except InfrastructureError as error:
            if attempt == ATTEMPTS or not getattr(error, "again", True):
                raise
            log.warning("%s: the verifier is run again: %s", task.name, error)
        finally:
            if step.separate is None:
                machine.empty(TESTS)
                machine.empty(VERIFIER)
    raise AssertionError


def run_shared(
    machine: Machine, task: HarborTask, step: HarborStep, *, has_tests: bool = False
) -> tuple[dict[str, float], str]:
    """Run the test script in a machine; return the rewards and the log."""
    machine.empty(VERIFIER)
    if not has_tests:
        machine.empty(TESTS)
        for folder in step.tests:
            machine.upload(task.folder / folder, TESTS)
    script, timeout_s = f"{TESTS}/{TEST_SCRIPT}", step.verifier_timeout_s
    machine.run(f"chmod +x {script}", timeout_s, user="root")
    result = machine.run(script, timeout_s, env=step.verifier_env, user=step.verifier_user)
    if result.timed_out:
        raise NoReward("envs.harbor.verifier-timed-out", again=False, timeout_s=timeout_s)
    if result.killed_for is not None:
        raise NoReward("envs.harbor.verifier-killed", killed_for=result.killed_for, output=result.output.strip()[-200:])
    for name in REWARDS:
        try:
            data = machine.read(f"{VERIFIER}/{name}", LONGEST_REWARD)
            if data is not None:
                rewards = parse_reward(data, name)
                return rewards, f"{result.output}\n[{name}] {json.dumps(rewards)}\n"
        except (ValueError, RecursionError) as error:
            raise NoReward("envs.harbor.invalid-reward", name=name, error=error) from None
    output = result.output.strip()[-200:]
    raise NoReward("envs.harbor.no-reward", returncode=result.returncode, output=output)


def run_separate(
    machine: Machine,
    start: Callable[[ContainerSource], Machine],
    task: HarborTask,
    step: HarborStep,
    source: ContainerSource,
) -> tuple[dict[str, float], str]:
    """Run the test script in a fresh machine with the artifacts of the agent's; return the rewards and the log."""
    for hook in step.collect:
        result = machine.run(hook.command, hook.timeout_sec, user=hook.user)
        if result.returncode:
            # As in Harbor: what a hook should have left is then missing, which the verifier finds.
            log.warning("%s: a collect hook failed: %s", task.name, result.output.strip()[-200:])
    with trees.scratch() as scratch:
        carried, budget = [], FETCHED_BYTES
        declared = [*step.artifacts]
        if all(artifact.source != ARTIFACTS for artifact in declared):
            declared.insert(0, Artifact(source=ARTIFACTS))
        for number, artifact in enumerate(declared):
            try:
                budget -= machine.fetch(artifact.source, scratch / str(number) / "artifact", artifact.exclude, budget)
            except UnwieldyTree as error:
                raise UnwieldyTree(
                    "envs.harbor.too-many-artifact-bytes",
                    most_mb=FETCHED_BYTES >> 20,
                    num_bytes=FETCHED_BYTES - budget,
                    error=error,
                ) from None
            carried.append((artifact.source, scratch / str(number)))
        with closing(start(source)) as fresh:
            for path, folder in carried:
                _upload_artifact(fresh, path, folder)
            return run_shared(fresh, task, step, has_tests=source.own_tests)


def _upload_artifact(machine: Machine, path: str, folder: Path) -> None:
    """Write an artifact to its own path in a fresh machine, where there is one."""
    fetched = folder / "artifact"
    if fetched.is_dir():
        machine.empty(path)
        machine.upload(fetched, path)
    elif fetched.exists():
        above, _, name = path.rpartition("/")
        fetched.rename(folder / name)
        machine.upload(folder, above or "/")


def parse_reward(data: bytes, name: str) -> dict[str, float]:
    """Return the numbers of a reward file: `reward` and further metrics; ValueError where it holds anything else.

    reward.json holds a number, or an object of numbers: the reward is the one under `reward`, or the only one, as
    Harbor counts it. reward.txt holds a number.
    """
    text = data.decode()
    if not text.strip():
        raise ValueError("it is empty")
    if name.endswith(".json"):
        document = json.loads(text, parse_constant=_not_finite)
        values = document if isinstance(document, dict) else {"reward": document}
    else:
        try:
            values = {"reward": float(text)}
        except ValueError:
            raise ValueError(Sentence("envs.harbor.reward-not-a-number", text=text.strip()[:40])) from None
    if "reward" not in values and len(values) != 1:
        raise ValueError(Sentence("envs.harbor.no-reward-key", keys=list(map(repr, sorted(values)[:5]))))
    for key, value in values.items():
        if not isinstance(value, (int, float)):
            raise ValueError(Sentence("envs.harbor.value-not-a-number", key=key, value=str(value)[:40]))  # noqa: TRY004 (of a file's text)
        # A group's mean and spread are computed from rewards: 1e308 is finite, and its square is not.
        if not abs(value) <= LARGEST_REWARD:
            raise ValueError(
                Sentence("envs.harbor.value-too-large", key=key, value=str(value)[:40], largest=LARGEST_REWARD)
            )
    numbers = {key: float(value) for key, value in values.items()}
    return numbers if "reward" in numbers else {"reward": next(iter(numbers.values())), **numbers}


def _not_finite(constant: str) -> float:
    raise ValueError(f"it holds {constant}")
