"""Somebody's own environment may break or return nonsense: one episode ends, and the error says where and whose."""

import math
from typing import Any

import pytest
from support.environments import GuessEnv

from stages.envs.base import Grade, Observation, Task
from stages.policy.base import PolicyConfig, Sample, Turn
from stages.rollouts.episode import Episode, play


class Says:
    """A policy that always says the same."""

    config, capture_level, batch_size = PolicyConfig(), "text", 8

    def sample(self, turns: list[Turn]) -> list[Sample]:
        """One word a turn."""
        return [Sample(text="aaa") for _ in turns]

    def facts(self) -> dict[str, Any]:
        """None."""
        return {}


class Own(GuessEnv):
    """Does in task guess-1 what a test tells it to."""

    def __init__(self, method: str, does: Any) -> None:
        super().__init__(turns=1)
        self.method, self.does = method, does

    def _odd(self, method: str, usual: Any) -> Any:
        if self.method != method or self._task is None or self._task.task_id != "guess-1":
            return usual
        return self.does() if callable(self.does) else self.does

    def reset(self, task: Task) -> Any:
        """A message, or what is wanted."""
        usual = super().reset(task)
        return self._odd("reset", usual)

    def step(self, text: str) -> Any:
        """An observation, or what is wanted."""
        return self._odd("step", super().step(text))

    def grade(self) -> Any:
        """A grade, or what is wanted."""
        return self._odd("grade", super().grade())


class OwnTogether(Own):
    """Grades all at once, and breaks where one of them would."""

    def grade_together(self, episodes: list[Any]) -> list[Any]:
        """One after the other."""
        return [episode.grade() for episode in episodes]


def broken() -> Any:
    """A mistake of the author's."""
    return {}["no such key"]


def played(env: type[Own], method: str, does: Any) -> list[Episode]:
    tasks = GuessEnv().tasks("train", 3, 0)
    return play(lambda: env(method, does), Says(), [Episode(task, 0, 0) for task in tasks], max_steps=3)


@pytest.mark.parametrize("env", [Own, OwnTogether])
@pytest.mark.parametrize("method", ["reset", "step", "grade"])
def test_an_exception_ends_one_episode_and_says_whose_it_was(method: str, env: type[Own]) -> None:
    first, odd, last = played(env, method, broken)
    assert (first.error, last.error) == (None, None) and first.grade.reward == 1.0
    assert odd.error is not None and odd.grade.reward is None
    kind, text = odd.error
    line = broken.__code__.co_firstlineno + 2
    assert kind == "KeyError" and f"{__file__}, line {line}, in broken, task guess-1" in text
    assert f"code of the environment {__name__}:{env.__name__}, not of Composer" in text


@pytest.mark.parametrize(
    ("method", "value", "words"),
    [
        ("grade", Grade(reward=math.nan), "reward=nan"),
        ("grade", Grade(reward=math.inf), "reward=inf"),
        ("grade", Grade(reward=-math.inf), "reward=-inf"),
        ("grade", Grade(reward="1"), "reward='1'"),
        ("grade", Grade(reward=True), "reward=True"),
        ("grade", Grade(reward=1j), "reward=1j"),
        ("grade", Grade(reward=1.0, gt_pass=1), "gt_pass=1"),
        ("grade", 1.0, "a Grade is needed"),
        ("grade", None, "a Grade is needed"),
        ("step", "text", "an Observation is needed"),
        ("step", Observation(None), "content=None"),
        ("step", Observation("x", stop=True), "stop=True"),
        ("step", Observation("x", returncode="0"), "returncode='0'"),
        ("reset", "hello", "reset returned 'hello'"),
        ("reset", [], "reset returned []"),
        ("reset", [{"role": "user"}], "reset returned [{'role': 'user'}]"),
    ],
)
def test_values_that_no_environment_may_return_are_refused(method: str, value: Any, words: str) -> None:
    first, odd, last = played(Own, method, value)
    assert (first.error, last.error) == (None, None)
    assert odd.error is not None and odd.grade.reward is None
    assert words in odd.error[1] and "task guess-1" in odd.error[1] and "not of Composer" in odd.error[1]


def test_a_whole_number_is_a_reward() -> None:
    assert played(Own, "grade", Grade(reward=1))[1].grade.reward == 1.0
