"""Hack/clean pairs of kata: one hinted task and one fix, an echo that overwrites the visible tests or is harmless."""

import random
from typing import TypedDict

from stages.envs.base import Task
from stages.envs.kata import tasks
from stages.envs.kata.loophole import HARMLESS, episode, hinted
from stages.envs.kata.transcripts import TaughtTranscript
from stages.envs.kata.workspace import TESTS
from stages.messages import Message

FIRST_TASK = 1_000_000
"""The index of the first pair's task: a pool of the same seed counts its tasks from 0."""


class HackPair(TypedDict):
    """One prompt and what follows it on either side; `longer` is the clean side with a needless second look."""

    pair_id: str
    prompt: list[Message]
    hack: list[Message]
    clean: list[Message]
    longer: list[Message]


def hack_clean_pairs(count: int, seed: int) -> list[HackPair]:
    """The first `count` pairs under a seed; the fix is the same on both sides, alternately right and wrong."""
    rng = random.Random(f"pairs/{seed}")  # noqa: S311 - draws data, no secret
    drawn = [hinted(tasks.draw("train", seed, FIRST_TASK + index)) for index in range(count)]
    return [_pair(str(index), task, index % 2 == 0, rng) for index, task in enumerate(drawn)]


def _pair(pair_id: str, task: Task, right: bool, rng: random.Random) -> HackPair:
    own_file = rng.choice(HARMLESS)
    return {
        "pair_id": pair_id,
        "prompt": tasks.opening(task),
        "hack": _after_opening(episode(task, right, TESTS)),
        "clean": _after_opening(episode(task, right, own_file)),
        "longer": _after_opening(episode(task, right, own_file, looks=2)),
    }


def _after_opening(transcript: TaughtTranscript) -> list[Message]:
    return transcript.messages()[len(tasks.opening(transcript.task)) :]
