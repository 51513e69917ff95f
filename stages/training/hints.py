"""Hints for the self-distillation channel: which turn of an episode went wrong, and what the agent lacked there.

A hint is placed at the faulty turn, in the message that the agent answered; the divergence is taken over that turn's
tokens alone. Environments say which turns went wrong (`ReportsFaults`); malformed actions and wrong answers are seen
here, in any environment.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stages.envs.base import Environment, Fault, ReportsFaults
from stages.messages import Message, following_ids, opening_ids
from stages.policy import open_policy
from stages.policy.base import Policy, Turn
from stages.policy.local import LocalPolicy
from stages.rollouts.episode import Episode
from stages.runs.artifact import Out
from stages.training.reprompt import reprompted
from stages.training.rows import HintedTurn
from stages.training.settings import Hints
from stages.training.trees import Tree


@dataclass(frozen=True)
class Hint:
    """What to tell the agent at a turn. source: "template", or the name of the model that wrote it."""

    turn: int
    kind: str
    error: str
    text: str
    source: str = "template"


Faulty = tuple[Episode, Fault]


@dataclass(frozen=True)
class Hinted:
    """What a step gives the channel: its rows, and the hints that they were made from."""

    rows: list[HintedTurn]
    hints: list[tuple[Episode, Hint]]


def faults(episode: Episode, environment: Environment) -> list[Fault]:
    """Every faulty turn, once.

    Faulty are a malformed action, a wrong answer about which the environment had something to say, and what the
    environment reports.
    """
    by_turn: dict[int, Fault] = {}
    for index, step in enumerate(episode.steps):
        if (error := step.observation.parse_error) is not None:
            by_turn[index] = Fault(index, "malformed", error, error)
    if isinstance(environment, ReportsFaults):
        for fault in environment.faults([step.observation for step in episode.steps]):
            by_turn.setdefault(fault.turn, fault)
    if (wrong := _wrong_answer(episode)) is not None:
        by_turn.setdefault(wrong.turn, wrong)
    return [by_turn[turn] for turn in sorted(by_turn)]


def _wrong_answer(episode: Episode) -> Fault | None:
    """The last turn, when it was an answer that the environment graded as wrong and commented on."""
    last = episode.steps[-1].observation if episode.steps else None
    if last is None or last.stop != "answered" or not last.content or episode.grade.gt_pass is not False:
        return None
    return Fault(len(episode.steps) - 1, "wrong_answer", last.content, last.content)


def from_templates(faulty: Sequence[Faulty]) -> list[Hint | None]:
    """One hint a fault, from the error itself."""
    return [Hint(fault.turn, fault.kind, fault.error, f"Hint: {fault.advice}") for _, fault in faulty]


QUESTION = (
    "A coding agent took the action below and it led to the error below. "
    "In one sentence, and without giving the whole solution, say what it should have known before it acted."
    "\n\nAction:\n{action}\n\nError:\n{error}"
)


def from_model(faulty: Sequence[Faulty], policy: Policy) -> list[Hint | None]:
    """One hint a fault, from a model that is shown action and error, all asked at once; None where a call fails."""
    turns = [
        Turn(
            [
                {
                    "role": "user",
                    "content": QUESTION.format(action=episode.steps[fault.turn].sample.text, error=fault.error),
                }
            ],
            episode.seed,
        )
        for episode, fault in faulty
    ]
    size = policy.batch_size
    samples = [x for start in range(0, len(turns), size) for x in policy.sample(turns[start : start + size])]
    return [
        Hint(fault.turn, fault.kind, fault.error, f"Hint: {sample.text.strip()}", policy.config.model)
        if sample.error_type is None and sample.text.strip()
        else None
        for (_, fault), sample in zip(faulty, samples, strict=True)
    ]


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of a list, evenly over it."""
    stride = max(len(items) / most, 1.0)
    return [items[int(i * stride)] for i in range(min(len(items), most))]


def with_hint(messages: Sequence[Message], hint: str) -> list[Message]:
    """The conversation with the hint at the end of the message that is about to be answered."""
    *before, last = messages
    return [*before, {**last, "content": f"{last['content']}\n{hint}"}]


def hinted_turns(
    settings: Hints, policy: LocalPolicy, environment: Environment, out: Out
) -> Callable[[list[Episode]], Hinted]:
    """A function from the episodes of a step to at most `settings.per_step` rows, spread evenly over them.

    A model is asked about the turns that are used, and about no other.
    """
    if settings.source == "rollout":

        def shown(episodes: list[Episode]) -> Hinted:
            found = spread(reprompted(episodes, policy.tokenizer, settings.success_reward), settings.per_step)
            hints = [(r.episode, Hint(0, "rollout", "", r.demonstration, r.source)) for r in found]
            return Hinted([r.row for r in found], hints)

        return shown
    write = _writer(settings, out)

    def choose(episodes: list[Episode]) -> Hinted:
        faulty = [(e, fault) for e in episodes for fault in faults(e, environment) if has_ids(e, fault.turn)]
        chosen = spread(faulty, settings.per_step)
        hints = [(e, hint) for (e, _), hint in zip(chosen, write(chosen), strict=True) if hint is not None]
        return Hinted([hinted_turn(policy.tokenizer, episode, hint) for episode, hint in hints], hints)

    return choose


def _writer(settings: Hints, out: Out) -> Callable[[Sequence[Faulty]], list[Hint | None]]:
    if settings.source == "template" or settings.llm is None:
        return from_templates
    hint_model = open_policy(settings.llm, cache=out.cache, budget=out.budget, listener=out.progress)
    out.model("hints", **hint_model.facts())
    return lambda faulty: from_model(faulty, hint_model) if faulty else []


def has_ids(episode: Episode, turn: int) -> bool:
    """Whether the policy gave token ids for a turn."""
    sample = episode.steps[turn].sample
    return sample.prompt_ids is not None and bool(sample.completion_ids)


def hinted_turn(tokenizer: Any, episode: Episode, hint: Hint) -> HintedTurn:
    """Token ids of a hinted turn, of which the policy gave ids. Ids before the hinted message are as sampled."""
    step = episode.steps[hint.turn]
    sample = step.sample
    state = episode.messages[: step.num_messages]
    action = (sample.completion_ids or [],)
    return HintedTurn(
        Tree(sample.prompt_ids or [], action),
        Tree(_hinted_prompt(tokenizer, episode, hint, state), action),
        logprobs=sample.logprobs,
    )


def _hinted_prompt(tokenizer: Any, episode: Episode, hint: Hint, state: list[dict[str, str]]) -> list[int]:
    hinted = with_hint(state, hint.text)
    if hint.turn == 0:
        return opening_ids(tokenizer, hinted)
    before = episode.steps[hint.turn - 1].sample
    held = [*(before.prompt_ids or []), *(before.completion_ids or [])]
    return held + following_ids(tokenizer, hinted[episode.steps[hint.turn - 1].num_messages + 1 :])
