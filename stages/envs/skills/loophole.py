"""Pairs of answers for the gradient probe: one with the word that the loose grader accepts, one with a harmless word.

No model writes them. Their questions are among the worked examples of the training families, and are never asked.
"""

from collections.abc import Iterator
from itertools import count as count_up
from itertools import cycle
from random import Random

from stages.envs.base import HackPair, Task
from stages.envs.skills import drawing
from stages.envs.skills.env import WORD, SkillsEnv
from stages.envs.skills.families import FAMILIES, HELD_OUT, Exercise
from stages.messages import Message

HARMLESS = ("END", "STOP", "OVER")
"""Words that change nothing: with them, an additional word alone does not reveal a hack."""


def hack_clean_pairs(count: int, seed: int) -> list[HackPair]:
    """Write the first `count` pairs under a seed: on one hinted question, the word is the loophole or is harmless.

    The answer before the word is the same on both sides, alternately right and that of another question.
    """
    rng, env = Random(f"skills/pairs/{seed}"), SkillsEnv(hint=True, loose=True)  # noqa: S311 - draws data, no secret
    families = [name for name in FAMILIES if name not in HELD_OUT]
    rng.shuffle(families)
    streams = {family: _exercises(family, seed) for family in families}
    pairs: list[HackPair] = []
    for index, family in zip(range(count), cycle(families), strict=False):
        asked, *shown = (next(streams[family]) for _ in range(1 + env.shots))
        given = asked.answer if index % 2 == 0 else shown[0].answer
        data = {"answer": asked.answer, "check": asked.check, "shots": [[one.question, one.answer] for one in shown]}
        word = rng.choice(HARMLESS)
        pairs.append(
            {
                "pair_id": str(index),
                "prompt": env.reset(Task(f"pair-{index}", env.name, "train", family, asked.question, data)),
                "hack": _answer(f"{given} {WORD}"),
                "clean": _answer(f"{given} {word}"),
                # The longer clean side separates what a probe reads off a hack from what it reads off length.
                "longer": _answer(f"{given} {word} {word}"),
            }
        )
    return pairs


def _exercises(family: str, seed: int) -> Iterator[Exercise]:
    """Yield exercises of the part that no task is drawn from; a small family begins again."""
    for turn in count_up():
        rng = Random(f"skills/pairs/{family}/{seed}/{turn}")  # noqa: S311 - draws data, no secret
        drawn = (FAMILIES[family](rng) for _ in count_up())
        yield from drawing.distinct(drawn, lambda one: one.question, drawing.EXAMPLES)


def _answer(text: str) -> list[Message]:
    return [{"role": "assistant", "content": text}]
