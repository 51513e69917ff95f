"""Questions to teachers: an answer to be had in a distinct recorded state, and the row that it becomes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from stages.messages import Message
from stages.policy import Sample, Turn
from stages.policy.config import prompt_bound
from stages.runs import store
from stages.runs.records import Row
from stages.teachers.recorded import RecordedStates, State
from stages.teachers.table import TeacherConfig

AS_IT_CAME = (
    "reasoning",
    "served_model",
    "provider",
    "finish_reason",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "usage_by",
    "error_type",
    "error",
    "attempts",
    "latency_s",
)
"""Columns that are a sample's fields."""


class Question:
    """One answer to be had: a state, a teacher, a sample.

    `identity` is the teacher's. `said` reads the messages of the state when they are needed. `tools` are those that the
    rollout which reached the state first could call.
    """

    __slots__ = ("_said", "key", "sample_idx", "state", "teacher", "tools")

    def __init__(
        self,
        teacher: TeacherConfig,
        identity: dict[str, Any],
        state: State,
        said: Callable[[State], list[Message]],
        sample_idx: int,
        seed: int,
        tools: Sequence[Any] = (),
    ) -> None:
        self.teacher, self.state, self.sample_idx, self.tools = teacher, state, sample_idx, tools
        self._said = said
        about = [teacher.name, identity, state.digest, sample_idx, seed]
        self.key = store.digest([*about, tools] if tools else about)[:24]

    @property
    def turn(self) -> Turn:
        """The question as a policy is asked."""
        return Turn(self._said(self.state), int(self.key[:15], 16), tools=self.tools)

    def price_bound(self) -> float:
        """At most so many USD."""
        size = len(store.encode(self._said(self.state))) + len(store.encode(self.tools))
        return self.teacher.cost(prompt_bound(size), self.teacher.longest_answer())

    def row(self, sample: Sample) -> Row:
        """The `teacher_action/3` row of an answer."""
        return {
            "unit_id": self.key,
            "state_sha256": self.state.digest,
            **{name: getattr(self.state, name) for name in ("task_id", "rollout_id", "step", "num_steps")},
            "teacher": self.teacher.name,
            "model": self.teacher.model,
            "sample_idx": self.sample_idx,
            "action": None if sample.error_type else sample.text,
            "cost_usd": sample.cost_usd if sample.price_known else None,
            **{name: getattr(sample, name) for name in AS_IT_CAME},
        }


class Questions:
    """The questions to one teacher, in the order in which states were first recorded, made whenever gone through."""

    def __init__(self, recorded: RecordedStates, teacher: TeacherConfig, samples: int, seed: int) -> None:
        self.recorded, self.teacher, self._samples, self._seed = recorded, teacher, samples, seed
        self._identity = teacher.identity()  # of a local folder all bytes are read for it

    def __len__(self) -> int:
        return len(self.recorded) * self._samples

    def __iter__(self) -> Iterator[Question]:
        read, tools = self.recorded.messages, self.recorded.tools
        for state in self.recorded:
            for index in range(self._samples):
                told = tools.get(state.rollout_id, ())
                yield Question(self.teacher, self._identity, state, read, index, self._seed, told)


Asked = Mapping[str, Questions | list[Question]]
"""The questions to each teacher, by its name."""


def questions(
    recorded: RecordedStates, teachers: Sequence[TeacherConfig], samples: int, seed: int
) -> dict[str, Questions]:
    """What to ask each teacher."""
    return {teacher.name: Questions(recorded, teacher, samples, seed) for teacher in teachers}
