"""On-policy distillation (OPD): frozen teachers on the student's own tokens, each on the tasks that it teaches.

`TaughtSource` opens the teachers and gives each rollout those whose patterns match its task: one where tasks are
routed, several where they are averaged. `Opd` has both published forms of the loss: the divergence between
distributions (GKD, OPSD), and the policy gradient whose advantage is the teacher's log-prob of the sampled token less
the student's (MOPD, tinker-cookbook). A teacher behind a server tells the log-probs of sampled tokens, or of its own k
likeliest at each place, over which the divergence is the same as that to the k likeliest of a teacher held here.

Shapes: N completion tokens of all rows, M those of a teacher. Log-probs are natural, in nats.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from composer_stages import envs
from composer_stages.envs import boundary
from composer_stages.envs.base import Task
from composer_stages.errors import UsageError
from composer_stages.losses.distillation import Taught, divergence_sum, reverse_kl_from_log_probs
from composer_stages.losses.tokens import Listed, Predictors
from composer_stages.messages import opening_ids
from composer_stages.policy.tool_calls import declare_tools
from composer_stages.policy.vllm import Likeliest, VllmPolicy
from composer_stages.rollouts.agent_loop import LiveRollout
from composer_stages.training.channels.base import Channel, ChannelLoss, Metric, RowSource, SourceInputs
from composer_stages.training.channels.rollouts import (
    OwnRollout,
    RolloutRows,
    check_vocabulary,
    open_teacher,
    own_rollout,
)
from composer_stages.training.config import OpdTeacher
from composer_stages.training.scoring import Scored, Tree, predictors, score_together, token_log_probs

ServerAnswer = Sequence[float] | Likeliest | None
"""The answer of a teacher behind a server for the n tokens of a rollout: their log-probs (nats), or at each position
the likeliest ids and then their log-probs, [n, 2k]. None for a teacher in this process."""


@dataclass(frozen=True)
class FrozenTeacher:
    """A model in this process, or behind vLLM the policy that asks it; and the tasks that it teaches."""

    settings: OpdTeacher
    model: Any = None
    server: VllmPolicy | None = None
    opening: Callable[[Task], list[int]] | None = None
    """The teacher's own opening of a task in token ids; None where it is the student's."""


@dataclass(frozen=True)
class TaughtRollout(OwnRollout):
    """A rollout with its teachers by number, and the answer of each.

    teacher_trees: the rollout as those teachers are shown it that open its task in another way than the student.
    """

    teachers: Mapping[int, ServerAnswer]
    teacher_trees: Mapping[int, Tree] = field(default_factory=dict)


@dataclass(frozen=True)
class Lesson:
    """The rollouts of a part that one teacher teaches, the positions of their tokens in the part, and its weights.

    index: [M]. share: [M] 1 / the number of teachers of the rollout for tokens that the student wrote, else 0.
    """

    number: int
    teacher: FrozenTeacher
    rows: list[TaughtRollout]
    index: Int[Tensor, " m"]
    share: Float[Tensor, " m"]

    def scored(self) -> Scored:
        """Return the hidden states of a teacher in this process, without gradient."""
        with torch.no_grad():
            return score_together(
                self.teacher.model, [[row.teacher_trees.get(self.number, row.tree) for row in self.rows]]
            )[0]

    def server_answers(self) -> Float[Tensor, "m ..."]:
        """Return a server's answer for the tokens: their log-probs [M], or the likeliest ids and log-probs [M, 2k]."""
        answers = [of_row for row in self.rows if (of_row := row.teachers[self.number]) is not None]
        return torch.as_tensor(np.concatenate(answers), device=self.index.device)

    def predictors(self, vocabulary: int) -> Predictors | Listed:
        """Return the predictions of the tokens; those of a server are over the student's vocabulary."""
        if self.teacher.model is None:
            return Listed(self.server_answers(), vocabulary)
        return predictors(self.teacher.model, self.scored())


class TaughtRows(RolloutRows):
    """Whole sampled rollouts, each with its teachers; `source` has all teachers by number."""

    @cached_property
    def lessons(self) -> list[Lesson]:
        """Return one lesson for each teacher of some of these rollouts."""
        ends, lessons = list(accumulate(self.scored.sizes)), list[Lesson]()  # each row is one branch
        for number, teacher in enumerate(self.source.teachers):
            mine = [(row, end) for row, end in zip(self.rows, ends, strict=True) if number in row.teachers]
            if mine:
                index = self.tensor(position for row, end in mine for position in range(end - len(row.mask), end))
                share = self.own[index] / self.tensor(len(row.teachers) for row, _ in mine for _ in row.mask)
                lessons.append(Lesson(number, teacher, [row for row, _ in mine], index, share))
        return lessons

    def teacher_logps(self, temperature: float) -> Float[Tensor, " N"]:
        """Return the mean over each rollout's teachers of their log-probs of its tokens; 0 where the student's are not.

        temperature: of teachers in this process; servers answer at 1.
        """
        total = torch.zeros_like(self.own)
        for lesson in self.lessons:
            if lesson.teacher.model is None:
                logps = lesson.server_answers()
            else:
                with torch.no_grad():
                    logps = token_log_probs(lesson.teacher.model, lesson.scored(), temperature)
            total.index_add_(0, lesson.index, lesson.share * logps.to(total.dtype))
        return total


@dataclass(eq=False)
class TaughtSource(RowSource[TaughtRollout]):
    """Gives the rollouts of a step that have a teacher.

    top_k: how many of its likeliest tokens a server is asked for; None asks for the tokens that were sampled.
    """

    name, scored_rows, whole_rollouts = "taught", TaughtRows, True

    teachers: Sequence[FrozenTeacher]
    top_k: int | None = None

    @classmethod
    def open(cls, inputs: SourceInputs) -> Self:
        """Return the source; `UsageError` names a teacher of another vocabulary, or one that has no task to teach."""
        teachers, out, top_k = [], inputs.out, inputs.config.opd.top_k
        for number, settings in enumerate(inputs.config.opd_teachers(), start=1):
            if not any(map(settings.teaches, inputs.tasks)):
                families = sorted({task.family for task in inputs.tasks})
                raise UsageError(
                    "training.channels.teacher-without-tasks",
                    model=settings.model,
                    patterns=settings.tasks,
                    tasks=len(inputs.tasks),
                    families=families,
                )
            role, opening = f"teacher {number}", cls._opening(inputs, settings)
            if settings.served:
                server = VllmPolicy.open(settings, cache=out.cache, budget=out.budget, listener=out.progress)
                check_vocabulary(inputs.student.policy.tokenizer, server.tokenizer, settings.model)
                if top_k is not None:  # before anything is played, as the server may tell fewer
                    server.likeliest_all([([0], [0])], top_k)
                out.model(role, **server.facts())
                teachers.append(FrozenTeacher(settings, server=server, opening=opening))
            else:
                policy = open_teacher(settings, role, inputs.student, out)
                teachers.append(FrozenTeacher(settings, policy.model, opening=opening))
        return cls(teachers, top_k)

    @staticmethod
    def _opening(inputs: SourceInputs, teacher: OpdTeacher) -> Callable[[Task], list[int]] | None:
        """Return the function that renders a task's opening for a teacher; None where it is the student's opening."""
        if not teacher.opening:
            return None
        environment = envs.load(inputs.config.env.name, {**inputs.config.env_options(), **teacher.opening})
        calls = inputs.config.policy.tool_calls != "none"
        tools = declare_tools(boundary.declared_tools(environment) if calls else ())
        return lambda task: opening_ids(inputs.student.policy.tokenizer, environment.reset(task), tools)

    def rows(self, rollouts: Sequence[LiveRollout], step: int) -> list[TaughtRollout]:
        """Return the taught rollouts of a step; each server is asked about all of its own at once."""
        del step
        sampled = [
            (token_rollout, rollout.task) for rollout in rollouts if (token_rollout := own_rollout(rollout)) is not None
        ]
        answers: list[dict[int, ServerAnswer]] = [{} for _ in sampled]
        teacher_trees: list[dict[int, Tree]] = [{} for _ in sampled]
        for number, teacher in enumerate(self.teachers):
            mine = [index for index, (_, task) in enumerate(sampled) if teacher.settings.teaches(task)]
            trees = [sampled[index][0].tree for index in mine]
            if teacher.opening is not None:
                tasks = {task.task_id: task for _, task in (sampled[index] for index in mine)}
                prompts = {name: teacher.opening(task) for name, task in tasks.items()}
                trees = [
                    Tree(prompts[sampled[i][1].task_id], tree.branches) for i, tree in zip(mine, trees, strict=True)
                ]
                for index, tree in zip(mine, trees, strict=True):
                    teacher_trees[index][number] = tree
            log_probs: Sequence[ServerAnswer] = [None] * len(mine)
            if teacher.server is not None:
                requests = [(tree.prompt, tree.branches[0]) for tree in trees]
                server, top_k = teacher.server, self.top_k
                log_probs = server.score_all(requests) if top_k is None else server.likeliest_all(requests, top_k)
            for index, of_rollout in zip(mine, log_probs, strict=True):
                answers[index][number] = of_rollout
        return [
            TaughtRollout(token_rollout.tree, token_rollout.mask, token_rollout.logprobs, teachers, to_each)
            for (token_rollout, _), teachers, to_each in zip(sampled, answers, teacher_trees, strict=True)
            if teachers
        ]


class Opd(Channel[TaughtRows]):
    """OPD: mean over the student's own tokens of taught rollouts, and over the teachers of each.

    Kernels and their sources: stages/losses/distillation.py.
    """

    source = TaughtSource

    def loss(self, rows: TaughtRows) -> ChannelLoss:
        """Return the loss; metrics are means over tokens in nats, or shares of tokens.

        Of sampled log-probs those of EOPD's policy gradient; of the divergence the largest of a token, and where there
        are several teachers the mean to each: divergence/1 is to the first, 0 in a step in which it teaches nothing.
        """
        settings = self.config.opd
        if settings.form == "sampled":
            loss, totals = reverse_kl_from_log_probs(
                rows.student_logps(self.temperature),
                rows.sampled_logps,
                rows.teacher_logps(self.temperature),
                rows.own,
                num_tokens=rows.tokens,
            )
            return ChannelLoss(loss, rows.tokens, {name: Metric("mean", *total) for name, total in totals.items()})
        loss, student = torch.zeros((), device=rows.own.device), rows.student
        largest = torch.zeros_like(loss)
        means = dict.fromkeys(range(len(rows.source.teachers)), Metric("mean", 0.0, 0))
        for lesson in rows.lessons:
            total, per_token = divergence_sum(
                Predictors(student.rows.index_select(0, lesson.index), student.head),
                Taught(lesson.predictors(student.vocabulary)),
                lesson.share,
                beta=settings.beta,
                top_k=settings.top_k,
                top_k_of="teacher",
                outside="renormalised",
                temperature=self.temperature,
            )
            loss, largest = loss + total, largest.maximum(per_token.max())
            means[lesson.number] = Metric("mean", per_token.sum(), (lesson.share > 0).sum())
        metrics = {"divergence_max": Metric("max", largest)}
        if len(means) > 1:
            metrics |= {f"divergence/{number + 1}": mean for number, mean in means.items()}
        return ChannelLoss(loss / rows.tokens, rows.tokens, metrics)
