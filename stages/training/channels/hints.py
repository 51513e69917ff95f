"""Hinted turns as rows, and self-distillation on them: faulty turns, their hints, and the self-teacher.

`HintSource` gives a step's rows. A hint is placed at the faulty turn, in the message that the agent answered, and the
divergence is taken over that turn's tokens alone; with source = "rollout" (SDPO's main mode) the whole rollout is
scored again behind an opening message that shows a successful rollout of its group. `SelfTeacher` is the student as its
own teacher behind the hint, and `HintedRows` is what the channel's loss gets.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from composer_stages.envs.base import Environment, HintsAnswers, ReportsFaults, TurnFault
from composer_stages.errors import UsageError
from composer_stages.losses.distillation import Taught, divergence_sum, importance_weights, update_average
from composer_stages.losses.tokens import Predictors
from composer_stages.messages import Message, Tools, answer_text, following_ids, opening_ids
from composer_stages.policy import ask_all, open_policy
from composer_stages.policy.base import Policy, Turn
from composer_stages.policy.tool_calls import declare_tools
from composer_stages.rollouts.agent_loop import LiveRollout
from composer_stages.training.channels.base import Channel, ChannelLoss, Metric, RowSource, ScoredRows, SourceInputs
from composer_stages.training.channels.rollouts import own_rollout
from composer_stages.training.config import Hints
from composer_stages.training.scoring import Tree, predictors, score


@dataclass(frozen=True)
class Hint:
    """A hint for the agent at a turn. source: "template", or the name of the model that wrote it."""

    turn: int
    kind: str
    error: str
    text: str
    source: str = "template"


Faulty = tuple[LiveRollout, TurnFault]


@dataclass(frozen=True)
class HintedTurn:
    """One faulty turn in token ids: the action as sampled, behind the prompt without (`tree`) and with the hint.

    own: 1 for the tokens that count, None where all do. logprobs: of sampling them (nats), where the policy gave any.
    """

    tree: Tree
    hinted: Tree
    mask: list[int] | None = None
    logprobs: list[float] | None = None


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most `most` items of a list, evenly spaced over it."""
    # Not the first ones: rollouts come group by group, and the first groups would give all hints.
    stride = max(len(items) / most, 1.0)
    return [items[int(i * stride)] for i in range(min(len(items), most))]


# Hints at faulty turns. Environments report faulty turns (`ReportsFaults`); malformed actions and wrong answers are
# recognised here, in any environment.


def faults(rollout: LiveRollout, environment: Environment) -> list[TurnFault]:
    """Return every faulty turn, once, each with the text of its hint as `advice`.

    Faulty are a malformed action, what the environment reports, and a last turn whose answer the environment graded as
    wrong and commented on.
    """
    by_turn: dict[int, TurnFault] = {}
    for index, step in enumerate(rollout.steps):
        if (error := step.observation.parse_error) is not None:
            by_turn[index] = TurnFault(index, "malformed", error, f"Hint: {error}")
    if isinstance(environment, ReportsFaults):
        for fault in environment.faults([step.observation for step in rollout.steps]):
            by_turn.setdefault(fault.turn, replace(fault, advice=f"Hint: {fault.advice}"))
    if rollout.steps and rollout.grade.hidden_pass is False:
        turn, last = len(rollout.steps) - 1, rollout.steps[-1].observation
        if last.stop == "answered" and last.content:
            # The hint stands before the answer, and what was said of it was said after it.
            before = f"Hint: {last.content}"
            if isinstance(environment, HintsAnswers):
                before = environment.answer_hint(rollout.task)
            by_turn.setdefault(turn, TurnFault(turn, "wrong_answer", last.content, before))
    return [by_turn[turn] for turn in sorted(by_turn)]


QUESTION = (
    "A coding agent took the action below and it led to the error below. "
    "In one sentence, and without giving the whole solution, say what it should have known before it acted."
    "\n\nAction:\n{action}\n\nError:\n{error}"
)


def write_hints(faulty: Sequence[Faulty], policy: Policy | None) -> list[Hint | None]:
    """Return one hint a fault: from the error itself, or of a model that is shown action and error, in batches.

    None where a call to the model fails or its answer is empty.
    """
    if policy is None:
        return [Hint(fault.turn, fault.kind, fault.error, fault.advice) for _, fault in faulty]
    turns = []
    for rollout, fault in faulty:
        question = QUESTION.format(action=rollout.steps[fault.turn].sample.text, error=fault.error)
        turns.append(Turn([{"role": "user", "content": question}], rollout.seed))
    size = policy.batch_size
    samples = [x for start in range(0, len(turns), size) for x in ask_all(policy, turns[start : start + size])]
    return [
        Hint(fault.turn, fault.kind, fault.error, f"Hint: {sample.text.strip()}", policy.config.model)
        if sample.error_type is None and sample.text.strip()
        else None
        for (_, fault), sample in zip(faulty, samples, strict=True)
    ]


def with_hint(messages: Sequence[Message], text: str) -> list[Message]:
    """Return messages with a hint at the end of the last one, which is answered next."""
    *before, last = messages
    return [*before, {**last, "content": f"{last['content']}\n{text}"}]


def hinted_turn(tokenizer: Any, rollout: LiveRollout, hint: Hint) -> HintedTurn:
    """Return a hinted turn, of which the policy gave token ids, as a row.

    The hint is at the end of the message that the agent answered; ids before that message are as sampled.
    """
    step, tools = rollout.steps[hint.turn], declare_tools(rollout.tools)
    messages = with_hint(rollout.messages[: step.num_messages], hint.text)
    # The ids of earlier turns are those that were sampled: a text may be tokenised in another way than it was sampled.
    if hint.turn == 0:
        prompt = opening_ids(tokenizer, messages, tools)
    else:
        previous = rollout.steps[hint.turn - 1]
        sampled = [*(previous.sample.prompt_ids or []), *(previous.sample.completion_ids or [])]
        new, answer = messages[previous.num_messages + 1 :], previous.sample.text
        prompt = sampled + following_ids(tokenizer, new, answer=answer, last_id=sampled[-1], tools=tools)
    action = (step.sample.completion_ids or [],)
    return HintedTurn(Tree(step.sample.prompt_ids or [], action), Tree(prompt, action), logprobs=step.sample.logprobs)


# Demonstrations: every rollout whose group has another one that succeeded is scored again, as sampled, behind an
# opening message that shows that one. Source: lasgroup/SDPO 0e6d510 verl/trainer/ppo/ray_trainer.py, templates and
# numbers of verl/trainer/config/actor/actor.yaml; feedback is left to the other sources of hints.

TEMPLATE = "{prompt}\nCorrect solution:\n\n{demonstration}\n\nCorrectly solve the original question."
LONGEST_PROMPT = 10_240
"""Tokens of the prompt with the demonstration, which is cut to fit, as upstream's `max_reprompt_len`."""


@dataclass(frozen=True)
class Reprompted:
    """A rollout with the demonstration that its teacher is shown, and the id of the rollout that it is taken from."""

    rollout: LiveRollout
    row: HintedTurn
    demonstration: str
    source: str


def reprompted(rollouts: Sequence[LiveRollout], tokenizer: Any, success_reward: float) -> list[Reprompted]:
    """Return a row for each rollout with another one of its task that reached `success_reward`; the first is shown."""
    groups: dict[str, list[LiveRollout]] = {}
    for rollout in rollouts:
        if rollout.error is None and rollout.grade.reward is not None and rollout.grade.reward >= success_reward:
            groups.setdefault(rollout.task.task_id, []).append(rollout)
    rows = []
    for rollout in rollouts:
        successes = [success for success in groups.get(rollout.task.task_id, ()) if success is not rollout]
        sampled = own_rollout(rollout)
        if successes and sampled is not None:
            demonstration = successes[0]
            answers = demonstration.messages[
                demonstration.steps[0].num_messages :
            ]  # all after the opening, without thoughts
            text = "\n\n".join(answer_text(message["content"]).strip() for message in answers)
            opening = rollout.messages[: rollout.steps[0].num_messages]
            prompt, text = _with_demonstration(tokenizer, opening, text, declare_tools(rollout.tools))
            row = HintedTurn(sampled.tree, Tree(prompt, sampled.tree.branches), sampled.mask, sampled.logprobs)
            rows.append(Reprompted(rollout, row, text, demonstration.rollout_id))
    return rows


def _with_demonstration(tokenizer: Any, opening: Sequence[Message], text: str, tools: Tools) -> tuple[list[int], str]:
    """Return token ids of the opening with the demonstration in its last message, and the text that fitted."""
    *before, last = opening
    for attempt in (1, 2):
        content = TEMPLATE.format(prompt=last["content"], demonstration=text)
        ids = opening_ids(tokenizer, [*before, {**last, "content": content}], tools)
        excess = len(ids) - LONGEST_PROMPT
        if excess <= 0 or attempt == 2:
            break
        # Cut once, by as many tokens as are too many; the text around the cut may be tokenised in another way.
        text = tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"][:-excess])
    return ids, text


# The teacher behind the hint. What a teacher has of its own are the weights that training changes: all, or an
# adapter's. They are put into the student while it is scored as a teacher, so that no second model exists.

FILE = "self_teacher.safetensors"
Weights = dict[str, Tensor]


class SelfTeacher:
    """The student as its own teacher: as it is, its moving average, or held near where it started.

    Made before training; `begin` gets the model that training starts from, with its adapter if it has one.
    Source: lasgroup/SDPO 0e6d510 verl/workers/actor/dp_actor.py:52-64 (trust region), 132-151 (moving average).
    """

    def __init__(self, hints: Hints | None = None) -> None:
        hints = hints or Hints()
        self._kind, self._rate = hints.teacher, hints.teacher_rate
        self._kept: Weights | None = None

    def begin(self, student: Any) -> None:
        """Copy the weights that training will change, unless a checkpoint gave them.

        With an adapter, a trust region needs none: where training starts is the model with its adapter off.
        """
        if self._kind == "current" or (self._kind == "trust-region" and _has_adapter(student)):
            return
        trained = _trained(student)
        if self._kept is None:  # not where `load` took them from a checkpoint, on the CPU
            self._kept = {name: weight.detach().clone() for name, weight in trained.items()}
        self._kept = {name: self._kept[name].to(weight.device) for name, weight in trained.items()}

    @torch.no_grad()
    def predictors(self, student: Any, trees: Sequence[Tree]) -> Taught:
        """Return hidden states and output head for all completion tokens, without gradient."""

        def scored() -> Predictors:
            return predictors(student, score(student, trees))

        if self._kind == "current":
            return Taught(scored())
        if self._kind == "trust-region" and _has_adapter(student):
            # The frozen base is where training started: no copy is needed.
            with _as_teacher(student, {}), student.disable_adapter():
                teacher = scored()
        else:
            if self._kept is None:
                self.begin(student)
            with _as_teacher(student, self._kept or {}):
                teacher = scored()
        return Taught(teacher) if self._kind == "ema" else Taught(teacher, scored(), self._rate)

    def after_step(self, student: Any) -> None:
        """Update the moving average; a student with weights that are no numbers is skipped, as upstream."""
        if self._kept is None or self._kind != "ema":
            return
        trained = _trained(student)
        # One NaN would stay in the average for good.
        if all(bool(weight.isfinite().all()) for weight in trained.values()):
            update_average([self._kept[name] for name in trained], list(trained.values()), self._rate)

    def save(self, folder: Path) -> None:
        """Write the copied weights into a checkpoint."""
        if self._kept is not None:
            save_file({name: weight.clone() for name, weight in self._kept.items()}, folder / FILE)

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint."""
        if (folder / FILE).exists():
            self._kept = load_file(folder / FILE)


def _has_adapter(student: Any) -> bool:
    return hasattr(student, "disable_adapter") and bool(getattr(student, "peft_config", None))


def _trained(student: Any) -> Weights:
    """Return the weights that are trained, by name, each once."""
    return {name: weight for name, weight in student.named_parameters() if weight.requires_grad}


@contextmanager
def _as_teacher(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Switch dropout off, and put other weights in the model's place, tied ones in every module that has them.

    Parameters are exchanged, not written to: an optimiser and autograd may hold the model's own.
    """
    parameters = dict(model.named_parameters())
    replacements = {id(parameters[name]): nn.Parameter(weight, requires_grad=False) for name, weight in weights.items()}
    slots = [
        (module, name, weight)
        for module in model.modules()
        for name, weight in module.named_parameters(recurse=False, remove_duplicate=False)
        if id(weight) in replacements
    ]
    was_training = model.training
    model.eval()
    try:
        for module, name, weight in slots:
            setattr(module, name, replacements[id(weight)])
        yield
    finally:
        for module, name, weight in slots:
            setattr(module, name, weight)
        model.train(was_training)


@dataclass(eq=False)
class HintedRows(ScoredRows):
    """Faulty turns, N tokens; their teacher is `source.follower`, the model itself behind the prompt with the hint.

    tokens: those that count, of all turns of the whole step. mean_weights: [N] 1 / tokens for every token that counts,
    so that a sum under these weights is this part's share of the step's mean.
    """

    def __post_init__(self) -> None:
        # Without `own` all tokens of a turn count: the action at a faulty turn was written by the student alone.
        mask = [x for turn in self.rows for x in turn.mask or [1] * len(turn.tree.branches[0])]
        self.tokens = sum(sum(turn.mask) if turn.mask else len(turn.tree.branches[0]) for turn in self.step_rows)
        self.mean_weights = self.tensor(mask) * (1.0 / self.tokens)

    @property
    def sampled_logps(self) -> Float[Tensor, " N"]:
        """Log-probs (nats) that the tokens were sampled with; `UsageError` where the policy gave none."""
        if any(turn.logprobs is None for turn in self.rows):
            raise UsageError("training.channels.clip-without-logprobs")
        return self.tensor(x for turn in self.rows for x in turn.logprobs or ())

    @cached_property
    def taught(self) -> Taught:
        """The teacher's predictions of the same tokens behind the hint, without gradient."""
        return self.source.follower.predictors(self.model, [turn.hinted for turn in self.rows])


@dataclass(eq=False)
class HintSource(RowSource[HintedTurn]):
    """Gives at most `hints.per_step` hinted turns of a step's rollouts, spread evenly over them.

    A model that writes hints is asked about the turns that are used, and about no other. `follower`, a `SelfTeacher`,
    scores the turns behind their hints.
    """

    name, scored_rows = "hinted", HintedRows

    settings: Hints
    tokenizer: Any
    environment: Environment
    record: Callable[[int, list[tuple[LiveRollout, Hint]]], None]
    hint_model: Policy | None = None

    def __post_init__(self) -> None:
        self.follower = SelfTeacher(self.settings)

    @classmethod
    def open(cls, inputs: SourceInputs) -> Self:
        """Return the source, with the model that writes its hints if there is one."""
        settings, out = inputs.config.hints, inputs.out
        hint_model: Policy | None = None
        if settings.source == "llm" and settings.llm is not None:
            hint_model = open_policy(settings.llm, cache=out.cache, budget=out.budget, listener=out.progress)
            out.model("hints", **hint_model.facts())
        return cls(settings, inputs.student.policy.tokenizer, inputs.environment, inputs.record_hints, hint_model)

    def rows(self, rollouts: Sequence[LiveRollout], step: int) -> list[HintedTurn]:
        """Return the hinted turns of a step, and record their hints."""
        settings, tokenizer = self.settings, self.tokenizer
        if settings.source == "rollout":
            demonstrations = spread(reprompted(rollouts, tokenizer, settings.success_reward), settings.per_step)
            self.record(step, [(r.rollout, Hint(0, "rollout", "", r.demonstration, r.source)) for r in demonstrations])
            return [r.row for r in demonstrations]
        faulty = []
        for rollout in rollouts:
            for fault in faults(rollout, self.environment):
                sample = rollout.steps[fault.turn].sample
                if sample.prompt_ids is not None and sample.completion_ids:  # the policy gave token ids
                    faulty.append((rollout, fault))
        # Chosen before a model is asked: its calls are paid for.
        chosen = spread(faulty, settings.per_step)
        written = zip(chosen, write_hints(chosen, self.hint_model), strict=True)
        hints = [(rollout, hint) for (rollout, _), hint in written if hint is not None]
        self.record(step, hints)
        return [hinted_turn(tokenizer, rollout, hint) for rollout, hint in hints]

    def trees(self, row: HintedTurn) -> tuple[Tree, ...]:
        """Return the turn without the hint, which the student is trained on, and with it, which the teacher scores."""
        return (row.tree, row.hinted)


class Sdpo(Channel[HintedRows]):
    """Self-distillation: mean divergence (nats) over the tokens of hinted turns.

    Kernel: stages/losses/distillation.py.
    """

    source = HintSource

    def loss(self, rows: HintedRows) -> ChannelLoss:
        """Return the loss; metrics are the number of hinted turns and the largest divergence of a token (nats)."""
        hints, weights = self.config.hints, rows.mean_weights
        if hints.importance_clip is not None:
            # The weights carry no gradient, so this second pass through the output head needs no graph.
            with torch.no_grad():
                logps = rows.student_logps(self.temperature)
            weights = weights * importance_weights(logps, rows.sampled_logps, hints.importance_clip)
        loss, per_token = divergence_sum(
            rows.student,
            rows.taught,
            weights,
            beta=hints.alpha,
            top_k=hints.top_k,
            outside="tail" if hints.tail else "renormalised",
            temperature=self.temperature,
        )
        turns = Metric("sum", len(rows.rows))
        metrics = {"turns": turns, "divergence_max": Metric("max", per_token.max())}
        return ChannelLoss(loss, rows.tokens, metrics)
