"""The settings of `replay-teachers`."""

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from composer_stages.messages import Message
from composer_stages.policy.base import PolicyConfig
from composer_stages.runs.settings import BASIC, InFile, Option, Settings, StageConfig, basic_of, read_table
from composer_stages.words import Sentence


class Example(Settings):
    """A worked example for a teacher: a user message and its answer."""

    user: str
    assistant: str


class TeacherConfig(PolicyConfig):
    """One teacher: a name and a policy, by default with greedy decoding, perhaps with a prompt of its own."""

    name: str
    """The teacher's name in tables and reports."""
    model: str = Field(min_length=1)
    """Hugging Face folder, hub id, `kata:NAME`, or with `base_url` the server's name for it."""
    temperature: float = Field(default=0.0, ge=0.0)
    concurrency: int = Field(default=32, gt=0, json_schema_extra={"affects_results": False})
    """Largest number of requests in flight to a server; the actual number adapts to the server."""
    system: str | None = None
    """The teacher's own system message, in place of the student's; an empty text for none. It has to say again what
    form an action has, if the student's said it."""
    examples: list[Example] = Field(default=[])
    """Worked examples, {user, assistant} each, between the system message and the first message of the user; or a TOML
    file with one [[examples]] table each. The student's own model with examples is a teacher too."""

    opening: dict[str, Any] = Field(default_factory=dict)
    """Options of the environment with which it opens the teacher's tasks, over the student's: {shots = 8}."""

    @field_validator("examples", mode="before", json_schema_input_type=list[Example] | Path)
    @classmethod
    def _read(cls, value: Any) -> Any:
        return read_table(Path(value), "examples")["examples"] if isinstance(value, (str, Path)) else value

    @property
    def own_prompt(self) -> list[Message]:
        """Return the messages that precede the conversation for this teacher."""
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        pairs = ((("user", example.user), ("assistant", example.assistant)) for example in self.examples)
        return [*system, *({"role": role, "content": text} for pair in pairs for role, text in pair)]

    def prompt_in_words(self) -> str:
        """Return a clause about the teacher's own prompt; empty for a teacher that sees the student's prompt."""
        if self.system is None and not self.examples and not self.opening:
            return ""
        examples = len(self.examples)
        return Sentence(
            "teachers.teacher-prompt", teacher=self.name, system=self.system, examples=examples, opening=self.opening
        )

    def add_prompt(self, conversation: Sequence[Message]) -> list[Message]:
        """Return a conversation with the teacher's own prompt in place of the student's system message.

        Its prompt has other token ids than the student's, so the ids of the rollout are not part of a question.
        """
        system = list(takewhile(lambda message: message["role"] == "system", conversation))
        prefix = system if self.system is None else []
        return [*prefix, *self.own_prompt, *conversation[len(system) :]]

    def identity(self) -> dict[str, Any]:
        """Return the settings that affect answers, without unset settings of the teacher's own prompt."""
        # Seeds and paid answers of teachers from before there were such prompts then stay what they were.
        unset = {
            name
            for name, value in (("system", None), ("examples", []), ("opening", {}))
            if getattr(self, name) == value
        }
        return {name: value for name, value in super().identity().items() if name not in unset}


Teachers = Annotated[
    list[TeacherConfig],
    basic_of("api_key_env", "base_url", "max_tokens", "model", "name", "usd_per_mtok_in", "usd_per_mtok_out"),
    InFile(),
    Option("FILE", "A TOML file with one [[teachers]] table a teacher."),
]
"""A teacher table, as settings and files give it."""


RESERVED = ("student", "all")
"""What tables and pairs call the model that played, and all teachers together."""


def check_names(teachers: Sequence[TeacherConfig]) -> None:
    """Raise `ValueError` for a name that two teachers have, or that stands for others."""
    names = [teacher.name for teacher in teachers]
    if reserved := next((name for name in names if name in RESERVED), None):
        raise ValueError(Sentence("teachers.teacher-name-reserved", name=reserved, reserved=RESERVED))
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(Sentence("teachers.teacher-name-twice", number=names.count(repeated), name=repeated))


class SelectionConfig(Settings):
    """Which teachers are asked in which states."""

    rule: Literal["off", "disagreement", "value"] = "off"
    """`off` asks all teachers in all states. The others ask the cheapest, and one more in states where the answers have
    no majority yet (`disagreement`), or where the pairs that it may add are worth more than its answer (`value`).
    A teacher of unknown price comes last."""
    usd_per_pair: float = Field(default=0.01, gt=0)
    """Value of a pair in USD, for the rule `value`."""
    explore: float = Field(default=0.1, gt=0, le=1)
    """Share of the states in which all teachers are asked, to measure what an answer adds."""
    failed_only: bool = False
    """Ask only in states of rollouts that failed, or whose outcome is not known."""


class Config(StageConfig):
    """Which teachers to ask, and how often."""

    teachers: Teachers = Field(
        default=[TeacherConfig(name=f"teacher-{x}", model=f"kata:teacher-{x}", max_tokens=64) for x in "abc"],
        min_length=1,
    )
    """The teacher table. The default is for rollouts of kata alone."""
    answers_per_state: Annotated[int, BASIC] = Field(default=1, gt=0)
    """Answers of every teacher to one state; more than one makes sense with a temperature above 0."""
    selection: Annotated[SelectionConfig, basic_of("rule")] = SelectionConfig()
    """Whether expensive teachers are asked only where they can matter."""
    min_answered: float = Field(default=0.8, ge=0.0, le=1.0, json_schema_extra={"affects_results": False})
    """Least share of complete answers for the run to pass."""
    max_usd_per_rollout: float = Field(default=5.0, gt=0, json_schema_extra={"affects_results": False})
    """Highest cost of a rollout for the verdict AFFORDABLE."""
    max_p95_latency_s: float = Field(default=30.0, gt=0, json_schema_extra={"affects_results": False})
    """Highest 95th percentile of the seconds a step takes with its slowest teacher, for the verdict AFFORDABLE."""
    deal: Literal["local", "teachers"] = Field(default="local", json_schema_extra={"affects_results": False})
    """What workers get: the questions to local models, while servers are asked from this process alone; or
    teachers, those behind servers too, all questions to each by one worker."""

    @model_validator(mode="after")
    def _check(self) -> "Config":
        check_names(self.teachers)
        if self.deal == "teachers" and (self.selection.rule != "off" or self.selection.failed_only):
            raise ValueError(Sentence("teachers.deal-with-selection"))
        return self

    def label(self) -> str:
        """Return the run's label: the number of teachers."""
        return f"{len(self.teachers)}-teachers"
