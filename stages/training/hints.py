"""Hints for the self-distillation channel: which turn of an episode went wrong, and what the agent lacked there.

A hint is placed at the faulty turn, in the message that the agent answered; the divergence is taken over that turn's
tokens alone.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stages.messages import Message, following_ids, opening_ids
from stages.policy import open_policy
from stages.policy.base import Policy, Turn
from stages.policy.local import LocalPolicy
from stages.rollouts.episode import Episode, Step
from stages.runs.artifact import Out
from stages.training.rows import HintedTurn
from stages.training.settings import Hints
from stages.training.trees import Tree

EDITS = re.compile(r"\b(sed\s+-i|>\s*\S+|tee|patch|cp|mv|ed)\b|>\s*\w")
TESTS = re.compile(r"\b(pytest|unittest|test_\w+\.py|tests?/)")
NO_FILE = re.compile(
    r"(\S+?): No such file or directory|can't open file '([^']+)'|No such file or directory: '([^']+)'"
)
NO_COMMAND = re.compile(r"(\S+): (?:command )?not found")


@dataclass(frozen=True)
class Fault:
    """A turn that went wrong: its index, the kind of error, and the error as the agent saw it afterwards."""

    turn: int
    kind: str
    error: str


@dataclass(frozen=True)
class Hint:
    """What to tell the agent at a turn."""

    turn: int
    kind: str
    text: str


def faults(episode: Episode) -> list[Fault]:
    """Every faulty turn, once.

    Faulty are a malformed action, an unknown command, a wrong file, an edit after which a test fails, and a wrong
    answer about which the environment had something to say.
    """
    by_turn: dict[int, Fault] = {}
    last_edit: int | None = None
    for index, step in enumerate(episode.steps):
        fault = _fault(index, step, last_edit)
        if fault is not None:
            by_turn.setdefault(fault.turn, fault)
        if any(EDITS.search(command) for command in step.observation.commands):
            last_edit = index
    if (wrong := _wrong_answer(episode)) is not None:
        by_turn.setdefault(wrong.turn, wrong)
    return list(by_turn.values())


def _fault(index: int, step: Step, last_edit: int | None) -> Fault | None:
    observation = step.observation
    if observation.parse_error is not None:
        return Fault(index, "malformed", observation.parse_error)
    if observation.returncode in (None, 0):
        return None
    if NO_COMMAND.search(observation.content):
        return Fault(index, "unknown_command", observation.content)
    if NO_FILE.search(observation.content):
        return Fault(index, "wrong_file", observation.content)
    if last_edit is not None and any(TESTS.search(command) for command in observation.commands):
        return Fault(last_edit, "failing_test", observation.content)
    return None


def _wrong_answer(episode: Episode) -> Fault | None:
    """The last turn, when it was an answer that the environment graded as wrong and commented on."""
    last = episode.steps[-1].observation if episode.steps else None
    if last is None or last.stop != "answered" or not last.content or episode.grade.gt_pass is not False:
        return None
    return Fault(len(episode.steps) - 1, "wrong_answer", last.content)


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return next((group for group in match.groups() if group), "") if match else ""


TEMPLATES: dict[str, Callable[[str], str]] = {
    "malformed": lambda error: f"Hint: {error}",
    "unknown_command": lambda error: f"Hint: there is no command {_first(NO_COMMAND, error)} here.",
    "wrong_file": lambda error: f"Hint: there is no file {_first(NO_FILE, error)} here.",
    "wrong_answer": lambda error: f"Hint: {error}",
    "failing_test": lambda error: f"Hint: the tests then say: {error.strip()}",
}


def from_templates(episode: Episode) -> list[Hint]:
    """One hint a fault, from the error itself."""
    return [Hint(fault.turn, fault.kind, TEMPLATES[fault.kind](fault.error)) for fault in faults(episode)]


QUESTION = (
    "A coding agent took the action below and it led to the error below. "
    "In one sentence, and without giving the whole solution, say what it should have known before it acted."
    "\n\nAction:\n{action}\n\nError:\n{error}"
)


def from_model(episode: Episode, policy: Policy) -> list[Hint]:
    """One hint a fault, from a model that is shown action and error; a call that fails gives no hint."""
    faulty = faults(episode)
    turns = [
        Turn(
            [{"role": "user", "content": QUESTION.format(action=episode.steps[f.turn].sample.text, error=f.error)}],
            episode.seed,
        )
        for f in faulty
    ]
    samples = policy.sample(turns) if turns else []
    return [
        Hint(fault.turn, fault.kind, f"Hint: {sample.text.strip()}")
        for fault, sample in zip(faulty, samples, strict=True)
        if sample.error_type is None and sample.text.strip()
    ]


def with_hint(messages: Sequence[Message], hint: str) -> list[Message]:
    """The conversation with the hint at the end of the message that is about to be answered."""
    *before, last = messages
    return [*before, {**last, "content": f"{last['content']}\n{hint}"}]


def hinted_turns(settings: Hints, policy: LocalPolicy, out: Out) -> Callable[[list[Episode]], list[HintedTurn]]:
    """A function from the episodes of a step to at most `settings.per_step` hinted turns, spread evenly over them."""
    generate = _generator(settings, out)

    def choose(episodes: list[Episode]) -> list[HintedTurn]:
        hints = [(episode, hint) for episode in episodes for hint in generate(episode)]
        stride = max(len(hints) / settings.per_step, 1.0)
        chosen = [hints[int(i * stride)] for i in range(min(len(hints), settings.per_step))]
        turns = [hinted_turn(policy.tokenizer, episode, hint) for episode, hint in chosen]
        return [turn for turn in turns if turn is not None]

    return choose


def _generator(settings: Hints, out: Out) -> Callable[[Episode], list[Hint]]:
    if settings.source == "template" or settings.llm is None:
        return from_templates
    hint_model = open_policy(settings.llm, cache=out.cache, budget=out.budget, listener=out.progress)
    return lambda episode: from_model(episode, hint_model)


def hinted_turn(tokenizer: Any, episode: Episode, hint: Hint) -> HintedTurn | None:
    """Token ids of a hinted turn; None when the policy gave none. Ids before the hinted message are as sampled."""
    step = episode.steps[hint.turn]
    sample = step.sample
    if sample.prompt_ids is None or not sample.completion_ids:
        return None
    state = episode.messages[: step.num_messages]
    action = (sample.completion_ids,)
    return HintedTurn(Tree(sample.prompt_ids, action), Tree(_hinted_prompt(tokenizer, episode, hint, state), action))


def _hinted_prompt(tokenizer: Any, episode: Episode, hint: Hint, state: list[dict[str, str]]) -> list[int]:
    hinted = with_hint(state, hint.text)
    if hint.turn == 0:
        return opening_ids(tokenizer, hinted)
    before = episode.steps[hint.turn - 1].sample
    held = [*(before.prompt_ids or []), *(before.completion_ids or [])]
    return held + following_ids(tokenizer, hinted[episode.steps[hint.turn - 1].num_messages + 1 :])
