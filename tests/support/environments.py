"""Scripted environments: no sandbox, a verdict that a test can foresee."""

import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from composer_stages.envs import bash
from composer_stages.envs.base import Grade, Observation, Split, Task, TurnFault
from composer_stages.errors import InfrastructureError
from composer_stages.messages import Message


class GuessEnv:
    """The agent is asked for a letter; its share of what the agent writes is the reward. Every action is an error."""

    name, sandbox = "guess", "not-needed"

    def __init__(self, turns: int = 2, greeting: str = "") -> None:
        self.turns, self.greeting = turns, greeting
        self._said: list[str] = []
        self._task: Task | None = None

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        """Tasks 0..count-1; the letter alternates."""
        offset = 0 if split == "train" else 1_000
        letters: Sequence[str] = "ab"
        return [
            Task(f"guess-{i}", "guess", split, f"{split}-{i % 7}", f"say {letters[i % 2]}", {"letter": letters[i % 2]})
            for i in range(offset, offset + count)
        ]

    def reset(self, task: Task) -> list[Message]:
        """One user message."""
        self._task, self._said = task, []
        return [{"role": "user", "content": self.greeting + task.prompt}]

    def step(self, text: str) -> Observation:
        """Anything is accepted; the rollout ends after `turns` messages."""
        self._said.append(text)
        stop = "answered" if len(self._said) >= self.turns else None
        return Observation("foo: command not found", commands=(text,), returncode=127, stop=stop)

    def faults(self, observations: Sequence[Observation]) -> list[TurnFault]:
        """Those of a shell."""
        return bash.find_faults(observations)

    def grade(self) -> Grade:
        """The share of the letter among the characters, as a foreseeable reward that differs between samples."""
        said = "".join(self._said)
        assert self._task is not None
        return Grade(
            reward=said.count(self._task.data["letter"]) / max(len(said), 1), hidden_pass=False, protocol_ok=True
        )

    def close(self) -> None:
        """Nothing to free."""


class CallingEnv(GuessEnv):
    """The letter is said by text, or by a call, which the opening then asks for."""

    tools = ({"name": "guess", "parameters": {"type": "object", "properties": {"word": {"type": "string"}}}},)

    def use_tools(self) -> None:
        """Ask for a call."""
        self.greeting += "call "

    def call(self, name: str, arguments: Mapping[str, Any]) -> Observation:
        """Take the word as said."""
        return self.step(str(arguments.get("word")))

    def malformed(self, error: str) -> Observation:
        """Take nothing as said."""
        return self.step("")


class EndlessGuessEnv(GuessEnv):
    """Other tasks under every seed, in both splits."""

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        """Tasks 0..count-1 of a seed."""
        made = super().tasks(split, count, seed)
        return [replace(task, task_id=f"{task.task_id}-{split}-{seed}") for task in made]


class DistinctEnv(GuessEnv):
    """Answers that differ get rewards that differ: every step moves the policy, whatever it samples.

    Weights after an update, and so what is sampled from them, differ between processors, by the rounding of gradients.
    """

    def grade(self) -> Grade:
        """The share of the letter, and up to a thousandth by a checksum of what was said."""
        grade = super().grade()
        assert grade.reward is not None
        return replace(grade, reward=grade.reward + 1e-3 * zlib.crc32("".join(self._said).encode()) / 2**32)


class SpoiltEnv(GuessEnv):
    """Every other rollout is right, until `good` of this process were graded; then none is."""

    graded = 0

    def __init__(self, good: int) -> None:
        super().__init__(turns=1)
        self.good = good

    def grade(self) -> Grade:
        """Right or wrong, by how many were graded before."""
        SpoiltEnv.graded += 1
        return Grade(float(SpoiltEnv.graded <= self.good and SpoiltEnv.graded % 2), protocol_ok=True)


class HalfSolvedEnv(GuessEnv):
    """Only every second task has a solution."""

    def solution(self) -> list[str]:
        """The letter, as often as there are turns."""
        assert self._task is not None
        if self._task.data["letter"] == "b":
            raise InfrastructureError(f"The task {self._task.task_id} has no solution.")
        return ["a"] * self.turns


class ShortSolutionEnv(GuessEnv):
    """Solutions end before the rollout does."""

    def solution(self) -> list[str]:
        """The letter once."""
        assert self._task is not None
        return [self._task.data["letter"]]


class OneSplitEnv(GuessEnv):
    """The same tasks in both splits."""

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        """The training tasks."""
        return super().tasks("train", count, seed)


class BreakingEnv(GuessEnv):
    """The machinery breaks in every rollout of the first task."""

    def step(self, text: str) -> Observation:
        """Raise for task 0."""
        assert self._task is not None
        if self._task.task_id == "guess-0":
            raise InfrastructureError("the sandbox is gone")
        return super().step(text)


class NeverGradedEnv(GuessEnv):
    """Grading is not possible."""

    def grade(self) -> Grade:
        """Nothing can be said."""
        raise InfrastructureError("no grader")


class RequiringEnv(GuessEnv):
    """Wants passes by values, and knows the ground of none."""

    require = "values"


class IndifferentEnv(GuessEnv):
    """Whatever is said is worth the same."""

    def grade(self) -> Grade:
        """Half, always."""
        return Grade(reward=0.5)


class VariedEnv(GuessEnv):
    """Different characters are what is asked for: answers of a random model differ in their number."""

    def grade(self) -> Grade:
        """A hundredth for each."""
        said = "".join(self._said)
        return Grade(reward=min(len(set(said)) / 100, 1.0), hidden_pass=False, protocol_ok=True)


class SlowEnv(GuessEnv):
    """Every action takes a moment, so that a test can kill the program in the middle."""

    def step(self, text: str) -> Observation:
        """Sleep, then as in GuessEnv."""
        time.sleep(0.02)
        return super().step(text)


class NumberedEnv(GuessEnv):
    """Every task opens in words of its own."""

    def reset(self, task: Task) -> list[Message]:
        """The task's number is part of the message."""
        return [{"role": "user", "content": f"{super().reset(task)[0]['content']} {task.task_id}"}]


class JudgedGuessEnv(GuessEnv):
    """One message, solved where it is the letter and nothing else."""

    def __init__(self) -> None:
        super().__init__(turns=1)

    def grade(self) -> Grade:
        """Right or wrong."""
        assert self._task is not None
        right = self._said == [self._task.data["letter"]]
        return Grade(reward=float(right), hidden_pass=right, visible_pass=right, hacked=False, protocol_ok=True)


class HintedEnv(GuessEnv):
    """One answer, which is right behind the hint and wrong without it, or with `helps` false the other way round.

    helps None: always wrong.
    """

    def __init__(self, helps: bool | None = True) -> None:
        super().__init__(turns=1)
        self.helps, self._hinted = helps, False

    def reset(self, task: Task) -> list[Message]:
        """The question without a hint."""
        self._hinted = False
        return super().reset(task)

    def answer_hint(self, task: Task) -> str:
        """The letter."""
        self._hinted = True
        return f"(Answer: {task.data['letter']})"

    def grade(self) -> Grade:
        """The reward as ever."""
        return replace(super().grade(), hidden_pass=self._hinted == self.helps)
