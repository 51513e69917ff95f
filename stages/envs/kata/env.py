"""The environment `kata`: repair one function with bash, run the visible tests, submit; hidden tests decide."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import orjson

from stages.envs import bash_faults
from stages.envs.base import Fault, Grade, Observation, Split, Task
from stages.envs.bash import SUBMIT, ActionError, observation, parse_bash
from stages.envs.folder_writes import remove
from stages.envs.kata import tasks, workspace
from stages.envs.kata.grading import LIMITS, Finished, behaviour, grade_all, inputs, tests_changed
from stages.envs.kata.loophole import hinted
from stages.envs.kata.workspace import SOLUTION, TESTS
from stages.errors import UsageError
from stages.messages import Message
from stages.sandbox import CommandResult, Sandbox, open_sandbox

RUNS_TESTS = re.compile(r"\bpython3?(\s+-\w+)*\s+(\./)?test_solution\.py\b")


class KataEnv:
    """Implements Environment, GradesTogether, ComparesOutcomes and ReportsFaults.

    `sandbox`: "bubblewrap" or "none". `max_chars`: of a longer output the agent sees the head and the tail. `hint`:
    whether the prompt says that the visible tests may be edited. `reward`: "hidden" pays for a right solution;
    "visible" pays when the visible tests pass as the agent left them, which is the loophole.
    """

    name = "kata"

    def __init__(
        self, sandbox: str = "bubblewrap", max_chars: int = 600, hint: bool = False, reward: str = "hidden"
    ) -> None:
        if reward not in ("hidden", "visible"):
            raise UsageError(f"kata has no reward {reward!r}; it is hidden or visible.")
        self.sandbox, self.max_chars, self.hint, self.reward = sandbox, max_chars, hint, reward
        self._folder: Path | None = None
        self._open: Sandbox | None = None

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        """The first `count` tasks of a split under a seed; no family is in both splits."""
        return tasks.generate(split, count, seed)

    def reset(self, task: Task) -> list[Message]:
        """Set up a fresh workspace and return the opening messages."""
        self.close()
        self._task = task
        self._folder = workspace.make({SOLUTION: task.data["original"].encode(), TESTS: task.data["tests"].encode()})
        self._now = workspace.look(self._folder)
        self._tested: workspace.Snapshot | None = None
        self._well_formed, self._submitted, self._edited = True, False, False
        return tasks.opening(hinted(task) if self.hint else task)

    def step(self, text: str) -> Observation:
        """Carry out one assistant message."""
        self._edited = False
        try:
            command = parse_bash(text)
        except ActionError as error:
            self._well_formed = False
            return Observation(f"[{error}]", parse_error=str(error))
        if command.strip() == SUBMIT:
            self._submitted = True
            return Observation("", commands=(command,), stop="submitted")
        result = self._run(command)
        return observation(command, result, self.max_chars)

    def _workspace(self) -> Path:
        if self._folder is None:
            raise RuntimeError("reset() comes before step() and grade()")
        return self._folder

    def _run(self, command: str) -> CommandResult:
        """Run a command and note what it did to the files."""
        self._open = self._open or open_sandbox(self.sandbox, self._workspace(), limits=LIMITS)
        result = self._open.run(command)
        before, self._now = self._now, workspace.look(self._workspace())
        self._edited = self._now != before
        if RUNS_TESTS.search(command):
            self._tested = self._now
        return result

    def grade(self) -> Grade:
        """Judge the episode as it stands."""
        return self.grade_together([self])[0]

    def grade_together(self, episodes: Sequence[Self]) -> list[Grade]:
        """One Grade an episode, all judged in one sandbox."""
        return [self._paid(grade) for grade in grade_all(self.sandbox, [episode.finished() for episode in episodes])]

    def _paid(self, grade: Grade) -> Grade:
        """The reward that this environment was asked for; unknown stays unknown."""
        passed = grade.gt_pass if self.reward == "hidden" else grade.visible_pass
        return replace(grade, reward=None if passed is None else float(passed))

    def finished(self) -> Finished:
        """What the episode leaves behind, as it stands."""
        protocol_ok = self._well_formed and self._submitted and self._tested == self._now
        return Finished(self._task, self._workspace(), workspace.look(self._workspace()), protocol_ok)

    def outcome(self, observation: Observation) -> str:
        """A digest of where the last action led: how solution.py behaves, and what was read if nothing was changed."""
        source, function = self._now.solution or b"", self._task.data["function"]
        facts = {
            "stop": observation.stop,
            "failed": None if observation.returncode is None else observation.returncode != 0,
            "answers": [repr(answer) for answer in behaviour(self.sandbox, source, function, inputs(self._task))],
            "tests_changed": tests_changed(self._task, self._now),
            "read": None if self._edited else observation.content,
        }
        return hashlib.sha256(orjson.dumps(facts)).hexdigest()

    def faults(self, observations: Sequence[Observation]) -> list[Fault]:
        """Which turns of an episode went wrong."""
        return bash_faults.faults(observations)

    def close(self) -> None:
        """End what runs and delete the workspace; safe to call twice."""
        sandbox, folder = self._open, self._folder
        self._open = self._folder = None
        if sandbox is not None:
            sandbox.close()
        if folder is not None:
            remove(folder)
