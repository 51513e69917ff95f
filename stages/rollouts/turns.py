"""What a policy is asked next in an episode: an action, or a summary where the limit of its context nears."""

import time
from functools import cache
from typing import TYPE_CHECKING

from stages.policy.base import CountsTokens, Policy, Turn
from stages.rollouts.history import FULL, SUMMARISE, request, shown
from stages.rollouts.limits import Rules
from stages.runs import store

if TYPE_CHECKING:
    from stages.rollouts.episode import Episode


def next_turn(episode: "Episode", policy: Policy, rules: Rules) -> Turn | None:
    """What to ask next; None where a limit ends the episode."""
    turn = _turn(episode)
    length = cache(lambda: prompt_tokens(episode, turn, policy))
    episode.terminated_by = rules.limits.reached(
        time.monotonic() - episode.started,
        sum(step.sample.cost_usd for step in episode.steps),
        length,
        policy.config.max_tokens,
    )
    if episode.terminated_by is not None:
        return None
    may = episode.history == SUMMARISE and bool(episode.steps) and not episode.steps[-1].summary
    episode.summarising = may and rules.limits.nears(length(), policy.config.max_tokens)
    if not episode.summarising:
        return turn
    episode.messages = [*episode.messages, request()]
    return _turn(episode)


def _turn(episode: "Episode") -> Turn:
    seed = step_seed(episode, len(episode.steps))
    return Turn(list(shown(episode.messages, episode.history)), seed, episode.held_ids, episode.tools)


def prompt_tokens(episode: "Episode", turn: Turn, policy: Policy) -> int | None:
    """How many tokens a turn's prompt has: counted where a tokenizer is at hand, else at most so many.

    A server counted the last prompt and answer, and what came since has at most as many tokens as UTF-8 bytes; from a
    server that does not count, or where the prompt does not go on from the last one, the bytes of it all. None for an
    opening that nobody counted: the server will tell.
    """
    if isinstance(policy, CountsTokens):
        return policy.count_tokens(turn)
    if not episode.steps:
        return None
    last = episode.steps[-1]
    new, counted = turn.messages, 0
    goes_on = episode.history == FULL or (episode.history == SUMMARISE and not last.summary)
    if last.sample.usage_by == "server" and last.sample.prompt_tokens and goes_on:
        new = episode.messages[last.num_messages + 1 :]
        counted = last.sample.prompt_tokens + last.sample.completion_tokens
    return counted + sum(len(message["content"].encode()) for message in new)


def step_seed(episode: "Episode", step: int) -> int:
    """The seed of one answer: a function of task, sample, the episode's seed and the step alone."""
    return int(store.digest([episode.rollout_id, step])[:15], 16)
