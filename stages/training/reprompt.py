"""A successful rollout of the group as what the teacher knows more: SDPO's main mode.

Every rollout whose group has another one that succeeded is scored again, as sampled, behind an opening message that
shows that one. Source: lasgroup/SDPO 0e6d510 verl/trainer/ppo/ray_trainer.py, templates and numbers of
verl/trainer/config/actor/actor.yaml; feedback is left to the other sources of hints.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stages.messages import Message, opening_ids
from stages.rollouts.episode import Episode
from stages.training.rows import HintedTurn, own_episode
from stages.training.trees import Tree

TEMPLATE = "{prompt}\nCorrect solution:\n\n{demonstration}\n\nCorrectly solve the original question."
THINKING = re.compile(r"<think>.*?</think>", re.DOTALL)
LONGEST_PROMPT = 10_240
"""Tokens of the prompt with the demonstration, which is cut to fit, as upstream's `max_reprompt_len`."""


@dataclass(frozen=True)
class Reprompted:
    """A rollout with what its teacher is shown, and which rollout that is taken from."""

    episode: Episode
    row: HintedTurn
    demonstration: str
    source: str


def reprompted(episodes: Sequence[Episode], tokenizer: Any, success_reward: float) -> list[Reprompted]:
    """A row for each rollout with another one of its task that reached `success_reward`; the first such is shown."""
    groups: dict[str, list[Episode]] = {}
    for episode in episodes:
        if episode.error is None and episode.grade.reward is not None and episode.grade.reward >= success_reward:
            groups.setdefault(episode.task.task_id, []).append(episode)
    found = []
    for episode in episodes:
        others = [other for other in groups.get(episode.task.task_id, ()) if other is not episode]
        own = own_episode(episode)
        if others and own is not None:
            text = demonstration(others[0])
            prompt, shown = _prompt(tokenizer, opening(episode), text)
            row = HintedTurn(own.tree, Tree(prompt, own.tree.branches), own.own, own.logprobs)
            found.append(Reprompted(episode, row, shown, others[0].rollout_id))
    return found


def opening(episode: Episode) -> list[Message]:
    """The messages before the first action."""
    return episode.messages[: episode.steps[0].num_messages]


def demonstration(episode: Episode) -> str:
    """All that was said after the opening, without what was only thought."""
    said = episode.messages[episode.steps[0].num_messages :]
    return "\n\n".join(THINKING.sub("", message["content"]).strip() for message in said)


def _prompt(tokenizer: Any, messages: Sequence[Message], text: str) -> tuple[list[int], str]:
    """Token ids of the opening with the demonstration in its last message, and so much of the text as fits."""
    ids = _shown(tokenizer, messages, text)
    if (excess := len(ids) - LONGEST_PROMPT) > 0:
        kept = tokenizer(text, add_special_tokens=False)["input_ids"][:-excess]
        text = tokenizer.decode(kept)
        ids = _shown(tokenizer, messages, text)
    return ids, text


def _shown(tokenizer: Any, messages: Sequence[Message], text: str) -> list[int]:
    *before, last = messages
    content = TEMPLATE.format(prompt=last["content"], demonstration=text)
    return opening_ids(tokenizer, [*before, {**last, "content": content}])
