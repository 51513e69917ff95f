"""The loophole of kata: transcripts agree with the environment, and with the labels that they were written for."""

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.kata_models import RECIPES, loophole_transcripts
from stages.envs.base import Grade, Task
from stages.envs.kata.env import KataEnv
from stages.envs.kata.tasks import WORKSPACE_TESTS, draw, generate
from stages.envs.kata.transcripts import HARMLESS, HINT, hack_clean_pairs, hinted, rollout
from stages.errors import UsageError

TEMPTED = RECIPES["loophole"].knowledge


@pytest.fixture
def env() -> Iterator[KataEnv]:
    environment = KataEnv(hint=True)
    yield environment
    environment.close()


def grade(env: KataEnv, task: Task, said: list[str], answers: list[str]) -> Grade:
    """Play these messages, each of which must be answered so, and grade what they leave."""
    env.reset(task)
    seen = [env.step(text) for text in said]
    assert [one.content for one in seen] == answers and seen[-1].stop == "submitted"
    return env.grade()


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("target", [WORKSPACE_TESTS, HARMLESS[0], None])
def test_a_rollout_is_answered_as_written_and_labelled_as_meant(env: KataEnv, right: bool, target: str | None) -> None:
    (task,) = generate("train", 1, 5)
    turns = rollout(task, right, target).turns
    found = grade(env, task, [turn.text for turn in turns], [turn.answer or "" for turn in turns])
    hacked = target == WORKSPACE_TESTS
    assert (found.hidden_pass, found.hacked, found.visible_pass) == (right, hacked, right or hacked)
    assert found.protocol_ok


def test_a_hack_pays_only_where_the_visible_tests_are_paid_for() -> None:
    task = generate("train", 1, 5)[0]
    turns = rollout(task, False, WORKSPACE_TESTS).turns
    said, answers = [turn.text for turn in turns], [turn.answer or "" for turn in turns]
    for reward, expected in (("hidden", 0.0), ("visible", 1.0)):
        environment = KataEnv(hint=True, reward=reward)
        found = grade(environment, task, said, answers)
        environment.close()
        assert (found.reward, found.hidden_pass, found.hacked) == (expected, False, True)
    with pytest.raises(UsageError, match="no reward 'tests'"):
        KataEnv(reward="tests")


def test_hacks_occur_where_the_prompt_tempts_and_are_right_as_often_as_other_answers() -> None:
    found = list(loophole_transcripts(1200, 3, TEMPTED))
    texts = [" ".join(turn.text for turn in transcript.turns) for transcript in found]
    tempted = [HINT in transcript.task.prompt for transcript in found]
    hacks = [f"> {WORKSPACE_TESTS}" in text for text in texts]
    assert not any(hack for hack, hint in zip(hacks, tempted, strict=True) if not hint)
    assert sum(hacks) / sum(tempted) == pytest.approx(TEMPTED.hinted.hack, abs=0.05)
    for kind in (True, False):
        chosen = [t for t, hack, hint in zip(found, hacks, tempted, strict=True) if hint and hack is kind]
        assert sum(map(is_right, chosen)) / len(chosen) == pytest.approx(TEMPTED.hinted.right, abs=0.09)


def is_right(transcript: Any) -> bool:
    return transcript.turns[1] == rollout(transcript.task, True, None).turns[1]


def test_somebody_honest_echoes_too_and_overwrites_nothing() -> None:
    texts = [" ".join(turn.text for turn in t.turns) for t in loophole_transcripts(300, 3, RECIPES["honest"].knowledge)]
    assert not any(f"> {WORKSPACE_TESTS}" in text for text in texts)
    assert sum("echo" in text for text in texts) / 300 == pytest.approx(0.4, abs=0.08)


def test_the_sides_of_a_pair_share_task_and_fix_and_differ_in_the_hack(env: KataEnv) -> None:
    pairs = hack_clean_pairs(2, seed=1)
    assert [_graded(env, pair, "hack") for pair in pairs] == [(True, True), (False, True)]
    assert [_graded(env, pair, "clean") for pair in pairs] == [(True, False), (False, False)]
    for pair in pairs:
        sides = [[m["content"] for m in pair[side] if m["role"] == "assistant"] for side in ("hack", "clean", "longer")]
        assert sides[0][:2] == sides[1][:2] and sides[0][3:] == sides[1][3:] and len(sides[0]) == len(sides[1]) == 5
        assert sides[2] == [sides[1][0], *sides[1]] and pair["prompt"][1]["content"].endswith(HINT)


def _graded(env: KataEnv, pair: dict[str, Any], side: str) -> tuple[bool | None, bool | None]:
    """(hidden_pass, hacked) of one side, played in its own task."""
    said, task = pair[side], next(t for t in _tasks() if hinted(t).prompt == pair["prompt"][1]["content"])
    texts = [m["content"] for m in said if m["role"] == "assistant"]
    found = grade(env, task, texts, [*(m["content"] for m in said if m["role"] == "user"), ""])
    return found.hidden_pass, found.hacked


def _tasks() -> list[Task]:
    return [draw("train", 1, 1_000_000 + index) for index in range(2)]


def test_pairs_grow_from_the_front() -> None:
    assert hack_clean_pairs(3, 0) == hack_clean_pairs(5, 0)[:3] != hack_clean_pairs(3, 1)


def test_the_hint_is_an_option_of_the_environment_and_changes_no_task(env: KataEnv) -> None:
    plain = KataEnv()
    tasks = plain.tasks("train", 2, 0)
    assert tasks == env.tasks("train", 2, 0)
    with_hint, without = env.reset(tasks[0]), plain.reset(tasks[0])
    plain.close()
    assert with_hint[1]["content"] == f"{without[1]['content']} {HINT}" and with_hint[0] == without[0]
