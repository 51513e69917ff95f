"""Questions to teachers: an answer to be had in a distinct recorded state, and the row that it becomes."""

from collections.abc import Sequence
from typing import Any

import orjson

from stages.messages import OMITTED, Message
from stages.policy import Sample, Turn
from stages.policy.config import prompt_bound
from stages.rollouts.trace import states_by_digest
from stages.runs import store
from stages.runs.artifact import Run
from stages.runs.records import ORIGIN, STEP, Row
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
Asked = dict[str, list["Question"]]
"""The questions to each teacher, by its name."""


class Question:
    """One answer to be had: a state, the steps recorded in it, a teacher, a sample.

    `identity` is the teacher's. `tools` are those that the rollout which reached the state first could call.
    """

    def __init__(
        self,
        teacher: TeacherConfig,
        identity: dict[str, Any],
        messages: list[Message],
        steps: list[Row],
        sample_idx: int,
        seed: int,
        tools: Sequence[Any] = (),
    ) -> None:
        self.teacher, self.messages, self.steps, self.sample_idx = teacher, messages, steps, sample_idx
        self.tools = tools
        about = [teacher.name, identity, steps[0]["state_sha256"], sample_idx, seed]
        self.key = store.digest([*about, tools] if tools else about)[:24]
        self.seed = int(self.key[:15], 16)

    @property
    def state(self) -> str:
        """The digest of the state."""
        return str(self.steps[0]["state_sha256"])

    @property
    def turn(self) -> Turn:
        """The question as a policy is asked."""
        return Turn(self.messages, self.seed, tools=self.tools)

    @property
    def omits_media(self) -> bool:
        """Whether the state had a picture or a sound, of which the teacher sees a mark alone."""
        return any(OMITTED in message["content"] for message in self.messages)

    def price_bound(self) -> float:
        """At most so many USD."""
        size = len(store.encode(self.messages)) + len(store.encode(self.tools))
        return self.teacher.cost(prompt_bound(size), self.teacher.longest_answer())

    def row(self, sample: Sample) -> Row:
        """The `teacher_action/3` row of an answer."""
        first = self.steps[0]
        return {
            "unit_id": self.key,
            **{name: first[name] for name in ("state_sha256", "task_id", "rollout_id", "step")},
            "num_steps": len(self.steps),
            "teacher": self.teacher.name,
            "model": self.teacher.model,
            "sample_idx": self.sample_idx,
            "action": None if sample.error_type else sample.text,
            "cost_usd": sample.cost_usd if sample.price_known else None,
            **{name: getattr(sample, name) for name in AS_IT_CAME},
        }


def questions(rollouts: Run, teachers: Sequence[TeacherConfig], samples: int, seed: int) -> Asked:
    """What to ask each teacher, in the order in which states were first recorded."""
    recorded = states_by_digest(rollouts.rows(STEP)).values()
    tools = tools_of(rollouts)
    asked = {}
    for teacher in teachers:
        identity = teacher.identity()  # of a local folder all bytes are read for it
        asked[teacher.name] = [
            Question(
                teacher,
                identity,
                state.messages,
                state.steps,
                index,
                seed,
                tools.get(state.steps[0]["rollout_id"], ()),
            )
            for state in recorded
            for index in range(samples)
        ]
    return asked


def tools_of(rollouts: Run) -> dict[str, list[Any]]:
    """The tools that each imported rollout could call, by its id, as its source declared them."""
    if rollouts.holds(ORIGIN) is None:
        return {}
    return {row["rollout_id"]: orjson.loads(row["tools_json"] or "[]") for row in rollouts.rows(ORIGIN)}
