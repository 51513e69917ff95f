"""Somebody's own environment may break or return nonsense: one episode ends, and the error says where and whose."""

import math
from pathlib import Path
from typing import Any

import pytest
from support.environments import GuessEnv

from stages.envs.base import Grade, Observation, Task
from stages.policy.base import PolicyConfig, Sample, Turn
from stages.policy.local import LocalPolicy
from stages.rollouts.agent_loop import Episode, EpisodeLimits, play
from stages.rollouts.gate import check
from stages.rollouts.trace import payload, states, step_rows
from stages.runs import store


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


def test_the_local_sampler_is_asked_for_all_active_episodes_at_once_in_their_order(tiny: Path, tmp_path: Path) -> None:
    """Its arithmetic depends on the batch: ids and log-probs are those of a plain loop, to the bit."""
    config = PolicyConfig(model=str(tiny), max_tokens=24)
    policy = LocalPolicy.open(config, cache=tmp_path, listener=lambda *told: None)
    tasks = GuessEnv().tasks("train", 5, 0)
    episodes = play(lambda: GuessEnv(3), policy, [Episode(task, 0, 7) for task in tasks], max_steps=3)

    envs, said, over = [GuessEnv(3) for _ in tasks], [[] for _ in tasks], [False] * len(tasks)
    chats = [env.reset(task) for env, task in zip(envs, tasks, strict=True)]
    with policy.reusing_prefixes():  # as `play` does
        for step in range(3):
            active = [i for i in range(len(tasks)) if not over[i]]
            if not active:
                break
            seeds = {i: int(store.digest([f"{tasks[i].task_id}#0@7", step])[:15], 16) for i in active}
            held = {i: [*said[i][-1].prompt_ids, *said[i][-1].completion_ids] if said[i] else None for i in active}
            for i, sample in zip(
                active, policy.sample([Turn(list(chats[i]), seeds[i], held[i]) for i in active]), strict=True
            ):
                said[i].append(sample)
                over[i] = sample.finish_reason == "length"
                if not over[i]:
                    chats[i] += [
                        {"role": "assistant", "content": sample.text},
                        {"role": "user", "content": envs[i].step(sample.text).content},
                    ]
    told = [[(s.prompt_ids, s.completion_ids, s.logprobs) for s in samples] for samples in said]
    assert [
        [(s.prompt_ids, s.completion_ids, s.logprobs) for s in (x.sample for x in e.steps)] for e in episodes
    ] == told
    assert len({len(e.steps) for e in episodes}) > 1, "some episodes end before others, so batches shrink"


class Counting(Says):
    """A server that says how long each prompt was, or that it does not fit, or nothing."""

    def __init__(self, tokens: int, usage: str) -> None:
        self.tokens, self.usage, self.turns = tokens, usage, []

    def sample(self, turns: list[Turn]) -> list[Sample]:
        """Ten tokens of prompt for each message."""
        self.turns += turns
        return [self._one(turn) for turn in turns]

    def _one(self, turn: Turn) -> Sample:
        prompt = self.tokens * len(turn.messages)
        if self.usage == "refuses" and prompt > 40:
            return Sample(error_type="context", error="too long")
        counted = {"prompt_tokens": prompt, "completion_tokens": 3} if self.usage == "server" else {}
        return Sample(text="aaa", usage_by="bound" if self.usage == "none" else "server", **counted)


@pytest.mark.parametrize(
    ("usage", "context_tokens", "steps"),
    [
        ("server", 200, 4),  # 10, 30, 50, 70 tokens of prompt, 3 of answer, 22 bytes of observation
        ("server", 30 + 3 + 22 + 64, 3),
        ("server", 30 + 3 + 22 + 64 - 1, 2),
        ("none", 5 + 3 + 22 + 64, 2),  # bytes: "say a", "aaa", the observation
        ("none", 5 + 3 + 22 + 64 - 1, 1),
        ("refuses", None, 2),
    ],
)
def test_at_the_end_of_the_context_the_work_is_graded(usage: str, context_tokens: int | None, steps: int) -> None:
    policy = Counting(10, usage)
    tasks = GuessEnv().tasks("train", 1, 0)
    limits = EpisodeLimits(context_tokens=context_tokens)
    (episode,) = play(lambda: GuessEnv(9), policy, [Episode(tasks[0], 0, 0)], max_steps=4, limits=limits)
    assert episode.error is None and episode.grade.reward == 1.0
    assert (len(episode.steps), episode.terminated_by) == (steps, "max_steps" if steps == 4 else "context")


def test_a_tokenizer_counts_where_there_is_one(tiny: Path, tmp_path: Path) -> None:
    policy = LocalPolicy.open(PolicyConfig(model=str(tiny), max_tokens=24), cache=tmp_path, listener=lambda *told: None)
    task = GuessEnv().tasks("train", 1, 0)[0]
    exact = policy.count_tokens(Turn(GuessEnv().reset(task), 0))
    for room, steps in ((exact + 24, 1), (exact + 23, 0)):
        limits = EpisodeLimits(context_tokens=room)
        (episode,) = play(lambda: GuessEnv(1), policy, [Episode(task, 0, 0)], max_steps=1, limits=limits)
        assert len(episode.steps) == steps and episode.error is None
    assert episode.terminated_by == "context"


def test_the_policy_is_shown_the_last_observations_and_the_row_tells() -> None:
    policy = Counting(10, "server")
    task = GuessEnv().tasks("train", 1, 0)[0]
    (episode,) = play(lambda: GuessEnv(4), policy, [Episode(task, 0, 0)], max_steps=4, history="last 1")
    out, seen = "[22 characters left out]", "foo: command not found"
    assert [[m["content"] for m in turn.messages] for turn in policy.turns] == [
        ["say a"],
        ["say a", "aaa", seen],
        ["say a", "aaa", out, "aaa", seen],
        ["say a", "aaa", out, "aaa", out, "aaa", seen],
    ]
    assert [message["content"] for message in episode.messages].count(seen) == 3
    rows = step_rows(episode, policy)
    assert {row["history"] for row in rows} == {"last 1"}
    assert states(rows) == [turn.messages for turn in policy.turns]
    row = payload(episode, policy, sandbox="none")["rollout"]
    assert all(c.ok for c in check([row], rows, 1) if c.name in ("state hash chain", "tuples complete"))
