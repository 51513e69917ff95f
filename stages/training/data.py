"""The rows of one optimiser step beside GRPO's groups, and of the parts that it is cut into."""

import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import orjson
import torch
from jaxtyping import Float
from torch import Tensor

from stages.backends.ranks import Ranks
from stages.envs.base import Environment, Fault, ReportsFaults
from stages.errors import BadInput
from stages.messages import Message, following_ids, opening_ids
from stages.policy import open_policy
from stages.policy.base import Policy, Turn
from stages.policy.local import LocalPolicy
from stages.rollouts.agent_loop import Episode
from stages.runs.artifact import RunWriter
from stages.runs.records import Row
from stages.training.scoring import Tree, pack, score, token_log_probs
from stages.training.settings import Hints, RowSource

# ---- pair_source
# Preference pairs as token ids: tokenised once, useless ones dropped and counted, the reference scored once.

COLUMNS = ("pair_id", "messages_json", "prompt_token_ids", "chosen", "rejected")


@dataclass(frozen=True)
class TokenPair:
    """One pair in token ids, end tokens included: the tree of its two completions, chosen first."""

    pair_id: str
    tree: Tree

    @property
    def num_tokens(self) -> int:
        """Of both rows."""
        return self.tree.num_tokens


def tokenise(rows: Iterable[Row], tokenizer: Any, max_tokens: int) -> tuple[list[TokenPair], Counter[str]]:
    """Pairs that still say something after tokenisation and truncation, and how many do not, by reason.

    Reasons: `no_room` (the prompt alone fills max_tokens), `equal_after_tokenisation`, `equal_after_truncation`.
    `BadInput` names a missing column.
    """
    kept: list[TokenPair] = []
    dropped = Counter[str]()
    for row in rows:
        if missing := [name for name in COLUMNS if name not in row]:
            raise BadInput(
                f"A preference pair lacks the column {missing[0]!r}. "
                f"Pairs need {', '.join(COLUMNS)}; rerun extract-pairs."
            )
        prompt = row["prompt_token_ids"] or opening_ids(tokenizer, orjson.loads(row["messages_json"]))
        chosen, rejected = _ids(tokenizer, row["chosen"]), _ids(tokenizer, row["rejected"])
        room = max_tokens - len(prompt)
        reason = _useless(chosen, rejected, room)
        if reason:
            dropped[reason] += 1
        else:
            kept.append(TokenPair(row["pair_id"], Tree(prompt, (chosen[:room], rejected[:room]))))
    return kept, dropped


def _ids(tokenizer: Any, text: str) -> list[int]:
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def _useless(chosen: list[int], rejected: list[int], room: int) -> str | None:
    if room < 1:
        return "no_room"
    if chosen == rejected:
        return "equal_after_tokenisation"
    return "equal_after_truncation" if chosen[:room] == rejected[:room] else None


class PairSource:
    """Deals the pairs of each step: every pair once before any comes again, in an order given by the seed alone."""

    def __init__(self, pairs: list[TokenPair], *, per_step: int, seed: int) -> None:
        self.pairs, self._per_step, self._seed = pairs, per_step, seed
        self._reference: dict[str, tuple[float, float]] = {}
        self._orders: dict[int, list[int]] = {}

    def batch(self, step: int) -> list[TokenPair]:
        """The pairs of a step: a pure function of the step, so that a resumed run continues where it stopped."""
        start = step * self._per_step
        return [self._at(position) for position in range(start, start + min(self._per_step, len(self.pairs)))]

    def _at(self, position: int) -> TokenPair:
        epoch, offset = divmod(position, len(self.pairs))
        if epoch not in self._orders:  # a step touches two rounds at most, so older ones are let go
            self._orders = {kept: order for kept, order in self._orders.items() if kept == epoch - 1}
            self._orders[epoch] = self._order(epoch)
        return self.pairs[self._orders[epoch][offset]]

    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self.pairs)))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)  # noqa: S311 (an order that repeats, not a secret)
        return order

    @torch.no_grad()
    def cache_reference(self, model: Any, chunk: int = 32, ranks: Ranks | None = None) -> None:
        """Sum the reference's log-probs of both sides of every pair, once; the reference is the model as it is now.

        Each of several processes does its share.
        """
        ranks = ranks or Ranks()
        own = self.pairs[ranks.rank :: ranks.count]
        for start in range(0, len(own), chunk):
            pairs = own[start : start + chunk]
            scored = score(model, [pair.tree for pair in pairs])
            sums = scored.per_branch(token_log_probs(model, scored)).view(-1, 2).tolist()
            self._reference |= {pair.pair_id: (c, r) for pair, (c, r) in zip(pairs, sums, strict=True)}
        for reference in ranks.gather(self._reference):
            self._reference |= reference

    def reference(self, pairs: list[TokenPair], device: torch.device) -> Float[Tensor, "p 2"]:
        """Cached log-prob sums in nats, [pairs, (chosen, rejected)]."""
        return torch.tensor([self._reference[pair.pair_id] for pair in pairs], device=device)


GROUP_COLUMNS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch")


@dataclass(frozen=True)
class HintedTurn:
    """One faulty turn in token ids: the action as sampled, behind the prompt without (`tree`) and with the hint.

    own: 1 for the tokens that count, None where all do. logprobs: of sampling them (nats), where the policy gave any.
    """

    tree: Tree
    hinted: Tree
    own: list[int] | None = None
    logprobs: list[float] | None = None

    @property
    def mask(self) -> list[int]:
        """1 for the tokens that count."""
        return [1] * len(self.tree.branches[0]) if self.own is None else self.own

    @property
    def num_tokens(self) -> int:
        """Of the student's row and the teacher's."""
        return self.tree.num_tokens + self.hinted.num_tokens


@dataclass(frozen=True)
class OwnEpisode:
    """A sampled episode as one tree: 1 for the tokens the policy wrote, and the log-probs of sampling them (nats).

    teacher_logprobs: of all tokens, under a teacher behind a server (nats); None where the teacher is held here.
    """

    tree: Tree
    own: list[int]
    logprobs: list[float]
    teacher_logprobs: list[float] | None = None

    @property
    def num_tokens(self) -> int:
        """Of the whole row."""
        return self.tree.num_tokens


@dataclass(frozen=True)
class ChannelBatch:
    """The rows of all channels in one step, or in a part of it; a source without rows has an empty list."""

    pairs: Sequence[TokenPair] = field(default_factory=list)
    hinted: Sequence[HintedTurn] = field(default_factory=list)
    episodes: Sequence[OwnEpisode] = field(default_factory=list)
    whole: "ChannelBatch | None" = None
    """The step that this is a part of; None where it is the whole step."""

    def of(self, row_source: RowSource) -> Sequence[Any]:
        """The rows of one source."""
        rows: Sequence[Any] = getattr(self, row_source)
        return rows

    @property
    def step(self) -> "ChannelBatch":
        """All rows of the step, from which the denominators come."""
        return self.whole or self

    def part(self, index: int, count: int) -> "ChannelBatch":
        """The share of one of `count` micro-batches; it may be empty."""
        return ChannelBatch(self.pairs[index::count], self.hinted[index::count], self.episodes[index::count], self.step)

    def packed(self, max_tokens: int) -> "list[ChannelBatch]":
        """Parts of at most so many tokens, a row that is longer by itself."""
        sources = get_args(RowSource)
        rows = [(name, row) for name in sources for row in self.of(name)]
        return [
            ChannelBatch(
                whole=self.step, **{name: [rows[i][1] for i in part if rows[i][0] == name] for name in sources}
            )
            for part in pack([row.num_tokens for _, row in rows], max_tokens)
        ]


def collate(groups: Mapping[str, Any], batch: ChannelBatch, needed: Collection[RowSource]) -> dict[str, Any]:
    """The batch of a step: TRL's group tensors plus `channels`.

    `BadInput` names a column that is missing or of the wrong length, and missing pairs.
    needed: the row sources that active channels use.
    """
    if missing := [name for name in GROUP_COLUMNS if name not in groups]:
        raise BadInput(
            f"The batch lacks the column {missing[0]!r}, which GRPO needs; it has {', '.join(sorted(groups))}."
        )
    rows = {name: len(groups[name]) for name in GROUP_COLUMNS[:5]}
    if len(set(rows.values())) > 1:
        odd = next(name for name, count in rows.items() if count != rows["prompt_ids"])
        raise BadInput(f"The column {odd!r} has {rows[odd]} rows, but prompt_ids has {rows['prompt_ids']}.")
    if "pairs" in needed and not batch.step.pairs:
        raise BadInput(
            "A preference channel has a weight, but the batch holds no pairs. "
            "Give pairs with --from, or set its weight to 0."
        )
    return {**groups, "channels": batch}


def own_episode(episode: Episode) -> OwnEpisode | None:
    """An episode as one tree; None when nothing was sampled or the policy gave no token ids."""
    if not episode.steps or episode.steps[0].sample.prompt_ids is None:
        return None
    ids: list[int] = []
    own: list[int] = []
    logprobs: list[float] = []
    prompt = episode.steps[0].sample.prompt_ids
    for step in episode.steps:
        between = (step.sample.prompt_ids or [])[len(prompt) + len(ids) :]
        completion = step.sample.completion_ids or []
        ids += between + completion
        own += [0] * len(between) + [1] * len(completion)
        logprobs += [0.0] * len(between) + (step.sample.logprobs or [])
    return OwnEpisode(Tree(prompt, (ids,)), own, logprobs)


# ---- reprompt
# A successful rollout of the group as what the teacher knows more: SDPO's main mode.
#
# Every rollout whose group has another one that succeeded is scored again, as sampled, behind an opening message that
# shows that one. Source: lasgroup/SDPO 0e6d510 verl/trainer/ppo/ray_trainer.py, templates and numbers of
# verl/trainer/config/actor/actor.yaml; feedback is left to the other sources of hints.

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


# ---- hints
# Hints for the self-distillation channel: which turn of an episode went wrong, and what the agent lacked there.
#
# A hint is placed at the faulty turn, in the message that the agent answered; the divergence is taken over that turn's
# tokens alone. Environments say which turns went wrong (`ReportsFaults`); malformed actions and wrong answers are seen
# here, in any environment.


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
    settings: Hints, policy: LocalPolicy, environment: Environment, out: RunWriter
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


def _writer(settings: Hints, out: RunWriter) -> Callable[[Sequence[Faulty]], list[Hint | None]]:
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
