"""Rollouts whose turns a policy and its teachers share: the mixture of DAgger (Ross, Gordon and Bagnell 2011).

Turn by turn, as arXiv 2605.12913 does for agents of many turns. Who plays a turn is drawn from the turn's own seed,
which is a function of the task, the sample, the run's seed and the step: it is the same in any order, on any worker and
after a kill. What a teacher played has no token ids and no log-probs, as no loss may take it for the student's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from pydantic import Field

from composer_stages import envs
from composer_stages.envs.base import Environment
from composer_stages.envs.config import EnvStageConfig
from composer_stages.policy import ask_all, kind_of
from composer_stages.policy.base import AsyncPolicy, CountsTokens, Policy, PolicyConfig, Sample, Turn
from composer_stages.runs import store
from composer_stages.runs.settings import Settings
from composer_stages.runs.stage import blocks
from composer_stages.teachers.config import TeacherConfig
from composer_stages.words import Sentence

DIGITS = 12


class Mixing(Settings):
    """Who plays the turns of a rollout."""

    mixed: float = Field(default=0.0, ge=0, le=1)
    """Share of turns that a teacher plays in place of the policy, drawn for each: DAgger's beta. Such turns lead to
    states that the policy alone would not reach; no loss takes them for the policy's own."""

    def require_players(self, student: PolicyConfig, teachers: Sequence[TeacherConfig]) -> None:
        """Raise `ValueError` where no teacher could play a turn, or nothing could say whose it was."""
        if not self.mixed:  # a table for all stages of a chain names teachers here too
            return
        if not teachers:
            raise ValueError(Sentence("teachers.mixed-without-teachers", mixed=self.mixed))
        for config in (student, *teachers):
            if config.scripted:
                raise ValueError(Sentence("teachers.mixed-scripted", model=config.model))
        for teacher in teachers:
            if (teacher.tool_calls == "none") != (student.tool_calls == "none"):
                forms = [student.tool_calls, teacher.tool_calls]
                raise ValueError(Sentence("teachers.mixed-tool-calls", teacher=teacher.name, forms=forms))
            if teacher.served and teacher.base_url is None:
                raise ValueError(Sentence("teachers.mixed-without-address", teacher=teacher.name, model=teacher.model))
            # Batches of what a server left open differ after a kill, and with them a local model's arithmetic.
            if kind_of(student) == "endpoint" and kind_of(teacher) == "local":
                raise ValueError(Sentence("teachers.mixed-local-teacher", teacher=teacher.name, model=teacher.model))


class MixedPolicy:
    """A policy, the student, in whose place teachers answer the turns that are drawn; its settings are the student's.

    environments: by teacher, of those whose own options open tasks in another way; "" is the student's.
    """

    def __init__(
        self,
        student: Policy,
        teachers: Sequence[tuple[TeacherConfig, Policy]],
        share: float,
        environments: Mapping[str, Environment],
    ) -> None:
        self.config, self.capture_level, self.batch_size = student.config, student.capture_level, student.batch_size
        self.student: Any = student
        self.teachers: Sequence[tuple[TeacherConfig, Any]] = teachers
        self._share, self._environments = share, environments
        if isinstance(student, CountsTokens):
            self.count_tokens = student.count_tokens

    def facts(self) -> dict[str, Any]:
        """Return the student's entry of the manifest."""
        facts: dict[str, Any] = self.student.facts()
        return facts

    def player(self, turn: Turn) -> int | None:
        """Return the number of the teacher that plays a turn; None for the student."""
        digits = store.digest(["player", turn.seed])
        if int(digits[:DIGITS], 16) >= self._share * 16**DIGITS:
            return None
        return int(digits[DIGITS : 2 * DIGITS], 16) % len(self.teachers)

    def question(self, turn: Turn, teacher: TeacherConfig) -> Turn:
        """Return a turn as a teacher is asked it: with its own prompt, behind its own opening of the task."""
        messages = turn.messages
        if teacher.name in self._environments and turn.task is not None:
            of_teacher, students = (self._environments[name].reset(turn.task) for name in (teacher.name, ""))
            messages = [*of_teacher, *messages[len(students) :]]
        return Turn(teacher.add_prompt(messages), turn.seed, tools=turn.tools)


class MixedBatches(MixedPolicy):
    """Implements BatchPolicy, for a student or a teacher in this process."""

    def sample(self, turns: list[Turn]) -> list[Sample]:
        """Return one answer per turn, in order."""
        samples: dict[int, Sample] = {}
        players = [self.player(turn) for turn in turns]
        for number, (teacher, policy) in [(None, (None, self.student)), *enumerate(self.teachers)]:
            places = [position for position, player in enumerate(players) if player == number]
            questions = [self.question(turns[position], teacher) if teacher else turns[position] for position in places]
            answers = [sample for part in blocks(questions, policy.batch_size) for sample in ask_all(policy, part)]
            answers = [_of_teacher(sample, teacher) for sample in answers] if teacher else answers
            samples |= dict(zip(places, answers, strict=True))
        return [samples[position] for position in range(len(turns))]


class MixedServers(MixedPolicy):
    """Implements AsyncPolicy, where everyone is behind a server."""

    async def ask(self, turn: Turn) -> Sample:
        """Return one answer."""
        if (number := self.player(turn)) is None:
            return cast(Sample, await self.student.ask(turn))
        teacher, policy = self.teachers[number]
        return _of_teacher(await policy.ask(self.question(turn, teacher)), teacher)

    async def drain(self) -> None:
        """Wait for the requests in flight."""
        for policy in (self.student, *(policy for _, policy in self.teachers)):
            await policy.drain()


def _of_teacher(sample: Sample, teacher: TeacherConfig) -> Sample:
    """Return a teacher's answer under its name, without tokens and log-probs."""
    unknown: dict[str, Any] = dict.fromkeys(("prompt_ids", "completion_ids", "logprobs", "logprob_kind"))
    return replace(sample, teacher=(teacher.name, teacher), **unknown)


@contextmanager
def mixed(
    mixing: Mixing, config: EnvStageConfig, student: Policy, teachers: Mapping[str, tuple[TeacherConfig, Policy]]
) -> Iterator[Policy]:
    """Provide the policy in which teachers play their share of turns; the student itself where there are none."""
    if not teachers:
        yield student
        return
    options = {name: teacher.opening for name, (teacher, _) in teachers.items() if teacher.opening}
    if options:
        options[""] = {}
    environments = {
        name: envs.load(config.env.name, {**config.env_options(), **opening}) for name, opening in options.items()
    }
    independent = all(isinstance(policy, AsyncPolicy) for policy in (student, *(p for _, p in teachers.values())))
    kind: Callable[..., Policy] = MixedServers if independent else MixedBatches
    try:
        yield kind(student, [*teachers.values()], mixing.mixed, environments)
    finally:
        for environment in environments.values():
            environment.close()
