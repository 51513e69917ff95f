"""The shape of a sample in an archive of inspect_ai, as its documentation has it: no field more, no other type."""

from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, TypeAdapter, with_config
from typing_extensions import TypedDict

STRICT = ConfigDict(strict=True, extra="forbid")


@with_config(STRICT)
class Call(TypedDict):
    id: str
    function: str
    type: Literal["function"]
    arguments: dict[str, Any]
    parse_error: NotRequired[str]


@with_config(STRICT)
class Part(TypedDict):
    type: Literal["reasoning", "text"]
    reasoning: NotRequired[str]
    text: NotRequired[str]


@with_config(STRICT)
class Said(TypedDict):
    id: str
    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[Part]
    source: NotRequired[Literal["input", "generate"]]
    tool_calls: NotRequired[list[Call]]
    tool_call_id: NotRequired[str]


@with_config(STRICT)
class Usage(TypedDict):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    total_cost: float


@with_config(STRICT)
class Choice(TypedDict):
    message: Said
    stop_reason: Literal["stop", "max_tokens", "tool_calls", "content_filter", "unknown"]


@with_config(STRICT)
class Output(TypedDict):
    model: str
    choices: list[Choice]
    usage: NotRequired[Usage]


@with_config(STRICT)
class Event(TypedDict):
    event: Literal["model"]
    uuid: str
    timestamp: str
    working_start: int
    model: str
    input: list[Said]
    input_refs: list[tuple[int, int]]
    tools: list[Any]
    tool_choice: Literal["auto"]
    config: dict[str, float]
    output: Output


@with_config(STRICT)
class Score(TypedDict):
    value: float | bool
    answer: NotRequired[str]


@with_config(STRICT)
class Pool(TypedDict):
    messages: list[Said]
    calls: list[Any]


@with_config(STRICT)
class Fault(TypedDict):
    message: str
    traceback: str
    traceback_ansi: str


@with_config(STRICT)
class Limit(TypedDict):
    type: Literal["turn", "context", "cost"]
    limit: float


@with_config(STRICT)
class Sample(TypedDict):
    id: str
    epoch: int
    input: str | list[Said]
    target: str
    messages: list[Said]
    output: Output
    scores: dict[str, Score]
    metadata: dict[str, dict[str, Any]]
    events: list[Event]
    events_data: Pool
    model_usage: dict[str, Usage]
    uuid: str
    error: NotRequired[Fault]
    limit: NotRequired[Limit]


SAMPLE = TypeAdapter(Sample)
"""Reads a sample; what does not fit is an error."""
