"""Answers of servers as they write them, `tests/fixtures/dialects`: read, played, and as votes of teachers."""

import json
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import duckdb
import orjson
import pyarrow as pa
import pytest
from support.environments import CallingEnv, GuessEnv

from composer_stages import messages
from composer_stages.endings import NOT_WHOLE
from composer_stages.pairs.states import WHOLE
from composer_stages.policy.base import PolicyConfig, Sample, Turn
from composer_stages.policy.client import CallError, RejectedError, RetryableError
from composer_stages.policy.faults import (
    ACCOUNT,
    CONTEXT,
    PARAMETER,
    Sent,
    meaning,
    parse_fault,
    refused_field,
    told_wait_s,
)
from composer_stages.policy.reading import UNREAD, read
from composer_stages.policy.requests import CallBounds
from composer_stages.rollouts.agent_loop import LiveRollout, play
from composer_stages.rollouts.recording import step_rows
from composer_stages.teachers.config import TeacherConfig
from composer_stages.teachers.questions import TeacherQuestion
from composer_stages.teachers.spending import Tally

FOLDER = Path(__file__).parents[2] / "fixtures" / "dialects"
ANSWERS = {row["dialect"]: row for row in map(json.loads, (FOLDER / "answers.jsonl").read_text().splitlines())}
ANSWERED = [name for name, row in ANSWERS.items() if "error" not in row["expect"]]


REFUSALS = [json.loads(line) for line in (FOLDER / "refusals.jsonl").read_text().splitlines()]
ASKED = {"messages": [{"role": "user", "content": "word " * 9000}], "max_tokens": 64, "seed": 1, "temperature": 1.0}
"""The request that was refused, of 9,000 words."""


def read_as(row: dict[str, Any], **more: Any) -> Sample:
    body = row["body"]
    raw = body.encode() if isinstance(body, str) else orjson.dumps(body)
    calls = "native" if row.get("native") else "none"
    about = {"model": "m", "base_url": "http://127.0.0.1:9/v1", "max_tokens": 64, "tool_calls": calls}
    config = PolicyConfig(**{**about, **more})
    return read(
        raw, config, CallBounds(500, 64, ({"role": "user", "content": "Which word?"},)), latency_s=0, attempts=1
    )


@pytest.mark.parametrize("name", ANSWERED)
def test_an_answer_is_read_alike_in_every_dialect(name: str) -> None:
    expected, sample = ANSWERS[name]["expect"], read_as(ANSWERS[name])
    spoken = messages.read(sample.text)
    assert sample.error_type is None and len(spoken.calls) == expected.get("calls", 0)
    assert {call.name for call in spoken.calls} <= {"guess"} and (spoken.calls or sample.text == expected["text"])
    assert sample.reasoning == expected.get("reasoning")
    whole = sample.finish_reason not in NOT_WHOLE
    assert whole if expected["ending"] == "whole" else sample.finish_reason == expected["ending"]


@pytest.mark.parametrize("name", sorted(ANSWERS.keys() - ANSWERED))
def test_what_is_no_answer_is_named(name: str) -> None:
    expected = ANSWERS[name]["expect"]
    with pytest.raises(CallError) as caught:
        read_as(ANSWERS[name])
    error: Any = caught.value
    assert error.kind == expected["error"] and expected.get("names", "") in str(error)
    assert isinstance(error, RetryableError if error.kind == "garbage" else RejectedError)


class Repeats:
    """A policy that gives one answer, always."""

    capture_level, batch_size = "text", 8

    def __init__(self, sample: Sample, calls: bool) -> None:
        self.config = PolicyConfig(model="m", base_url="http://h", tool_calls="native" if calls else "none")
        self.answer = sample

    def sample(self, turns: list[Turn]) -> list[Sample]:
        return [self.answer for _ in turns]

    def facts(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("name", ANSWERED)
def test_only_a_whole_answer_is_executed(name: str) -> None:
    """What is cut or filtered ends the rollout, which is graded as it stands; a call that no server reads is told."""
    expected = ANSWERS[name]["expect"]
    policy = Repeats(read_as(ANSWERS[name]), calls="calls" in expected or expected["ending"] == "malformed_call")
    (rollout,) = play(CallingEnv, policy, [LiveRollout(GuessEnv().tasks("train", 1, 0)[0], 0, 0)], max_steps=2)
    assert rollout.error is None and rollout.grade.reward is not None
    rows = step_rows(rollout, policy)
    assert rows[0]["truncated"] is (expected["ending"] != "whole")
    assert rows[0]["action"] == messages.with_thought(policy.answer.text, policy.answer.reasoning)
    ends = {"length": "max_tokens", "content_filter": "content_filter"}.get(expected["ending"])
    assert (rollout.terminated_by == ends and not rows[0]["observation"]) if ends else rows[0]["observation"]


def test_an_environment_gets_the_answer_alone_and_the_conversation_the_thought_of_its_server() -> None:
    class Recording(GuessEnv):
        def step(self, action: str) -> Any:
            executed.append(action)
            return super().step(action)

    executed, policy = list[str](), Repeats(Sample(text="ship", reasoning="why"), calls=False)
    (rollout,) = play(Recording, policy, [LiveRollout(GuessEnv().tasks("train", 1, 0)[0], 0, 0)], max_steps=1)
    assert executed == ["ship"]
    assert rollout.messages[1] == {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nship"}


@pytest.mark.parametrize("name", ANSWERED)
def test_only_a_whole_answer_of_a_teacher_is_counted_as_whole(name: str) -> None:
    state: Any = SimpleNamespace(digest="0" * 64, task_id="t", rollout_id="r", step=0, num_steps=1)
    teacher, sample = TeacherConfig(name="t", model="m", base_url="http://h"), read_as(ANSWERS[name])
    row = TeacherQuestion(teacher, {}, state, lambda state: [], 0, 0).row(sample)
    tally = Tally(["r"])
    tally.add(row)
    action = messages.with_thought(sample.text, sample.reasoning)
    assert row["reasoning"] == ANSWERS[name]["expect"].get("reasoning") and row["action"] == action
    assert tally.line("t").truncated == (ANSWERS[name]["expect"]["ending"] != "whole")
    connection = duckdb.connect()
    connection.register("answers", pa.table({name: [value] for name, value in row.items()}))
    vote = connection.execute(f"SELECT {WHOLE} FROM answers").fetchall()
    assert vote == [(action if ANSWERS[name]["expect"]["ending"] == "whole" else None,)]


@pytest.mark.parametrize("number", range(len(REFUSALS)))
def test_a_refusal_means_what_its_codes_numbers_or_words_say(number: int) -> None:
    refusal = REFUSALS[number]
    empty = [{"role": "assistant", "content": " "}] if refusal.get("sent") == "empty" else []
    asked = {**ASKED, "messages": [*ASKED["messages"], *empty]}
    sent = Sent.of(asked, len(orjson.dumps(asked)))
    assert meaning(parse_fault(refusal["body"]), refusal["status"], sent) == refusal["means"], refusal["body"]


SHORT = {"messages": [{"role": "user", "content": "word " * 60}], "max_tokens": 32_768, "seed": 1}
LIMITED = [
    ("vLLM", "This model's maximum context length is 4096 tokens. However, you requested 32828 tokens "
     "(60 in the messages, 32768 in the completion). Please reduce the length of the messages or completion."),
    ("SGLang", "Requested token count exceeds the model's maximum context length of 4096 tokens. You requested a total "
     "of 32828 tokens: 60 tokens from the input messages and 32768 tokens for the completion."),
    ("TGI", "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 70 `inputs` tokens and "
     "32768 `max_new_tokens`"),
    ("Groq", "`max_tokens` must be less than or equal to `8192`, the maximum value for `max_tokens` is less than the "
     "`context_window` for this model"),
    ("Anthropic", "max_tokens: 32768 > 8192, which is the maximum allowed number of output tokens for claude"),
]  # fmt: skip


@pytest.mark.parametrize(("server", "message"), LIMITED, ids=[server for server, _ in LIMITED])
def test_a_limit_that_no_prompt_could_have_is_refused_as_such(server: str, message: str) -> None:
    """And no prompt as too long; where the prompt and a possible limit are too much together, it is."""
    fault, size = parse_fault({"error": {"message": message}}), len(orjson.dumps(SHORT))
    assert meaning(fault, 400, Sent.of(SHORT, size)) == PARAMETER
    assert refused_field(fault, Sent.of(SHORT, size)) == "max_tokens"
    text = (
        "This model's maximum context length is 8192 tokens. However, you requested 9096 tokens (5000 in the messages, "
    )
    long = {**SHORT, "messages": [{"role": "user", "content": "word " * 4900}], "max_tokens": 4096}
    both = parse_fault({"error": {"message": text + "4096 in the completion)."}})
    assert meaning(both, 400, Sent.of(long, len(orjson.dumps(long)))) == CONTEXT
    room = "max_tokens is 32768, and your prompt of 900 tokens leaves room for 31000 in the context of this model"
    assert meaning(parse_fault(room), 400, Sent.of(SHORT, size)) == CONTEXT
    credit = "This request requires more credits: you requested up to 32768 tokens, but can only afford 2400."
    assert meaning(parse_fault(credit), 400, Sent.of(SHORT, size)) == ACCOUNT


def test_an_answer_that_reaches_the_limit_without_a_word_is_cut_and_without_tools_no_call_is_lost() -> None:
    """LocalAI says nothing of some answers, and LMDeploy `tool_calls` of all; `stop` may be an end at the limit."""
    config = PolicyConfig(model="m", base_url="http://127.0.0.1:9/v1", max_tokens=64)

    def ended(word: str | None, tokens: int, *, has_tools: bool = True) -> Any:
        choice = {"finish_reason": word, "message": {"content": "so the total is"}}
        raw = orjson.dumps({"choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": tokens}})
        bounds = CallBounds(500, 64, (), has_tools)
        return read(raw, config, bounds, latency_s=0, attempts=1).finish_reason

    assert [ended(word, tokens) for word in ("stop", None) for tokens in (63, 64)] == ["stop"] * 3 + ["length"]
    assert [ended("tool_calls", 5, has_tools=tools) for tools in (True, False)] == ["malformed_call", "tool_calls"]


@pytest.mark.parametrize(
    "mark",
    [
        "<|tool_call|>",
        "<function_calls>",
        "<TOOLCALL>",
        "<|START_ACTION|>",
        "<｜DSML｜invoke",
        "functools[{",
        "<tool_call>",
    ],
)
def test_a_call_left_in_the_text_is_told_in_every_family(mark: str) -> None:
    assert UNREAD.search(f"I list them.\n{mark} ls") and not UNREAD.search(
        "vector<function_call>, functools[0] < TOOLCALL"
    )


def test_a_gateways_cost_beside_the_message_is_a_bill() -> None:
    message = {"content": "7", "provider_metadata": {"gateway": {"cost": "0.05"}}}
    config = PolicyConfig(model="m", base_url="http://127.0.0.1:9/v1", max_tokens=64, price="unknown")
    raw = orjson.dumps({"choices": [{"finish_reason": "stop", "message": message}], "usage": {}})
    sample = read(raw, config, CallBounds(500, 64), latency_s=0, attempts=1)
    assert (sample.cost_usd, sample.price_known) == (0.05, True)


WAITS: list[tuple[dict[str, str], str, float | None]] = [
    ({"retry-after": "3"}, "", 3.0),
    ({"retry-after": "nan"}, "", None),
    ({"retry-after": "Sun, 06 Nov 1994 08:49:37 GMT"}, "", 0.0),
    ({"retry-after-ms": "250", "retry-after": "1"}, "", 0.25),
    ({}, "Please try again in 1m2.5s.", 62.5),
    ({}, "Retry after 30 seconds", 30.0),
    ({}, "Please try again in 1h12m28.8s. Upgrade", 4348.8),
    ({}, "try again in 30 min", 1800.0),
    ({}, "Please retry after 2 hours.", 7200.0),
    ({}, "try again in 1 day and 3 hours", 97200.0),
    ({}, "wait 1 hour, 5 minutes", 3900.0),
    ({}, "again in 250ms", 0.25),
    ({}, "try again after 20 messages", None),
    ({"x-ratelimit-reset-requests": "1s", "x-ratelimit-reset-tokens": "6m0s"}, "", 1.0),
    ({"x-ratelimit-reset-tokens": "6m0s", "x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset": "1"}, "", 360.0),
    ({"x-ratelimit-reset": "17"}, "", 17.0),
    ({"x-ratelimit-reset": "1000000000500"}, "", 0.0),
    ({"anthropic-ratelimit-tokens-reset": "2001-01-01T00:00:00Z"}, "", 0.0),
    ({}, "slower", None),
]


@pytest.mark.parametrize(("headers", "message", "wait_s"), WAITS)
def test_a_wait_is_read_wherever_a_server_says_it(headers: dict[str, str], message: str, wait_s: float | None) -> None:
    info = [{"error": {"message": "x", "details": [{"@type": "google.rpc.RetryInfo", "retryDelay": "17.5s"}]}}]
    assert told_wait_s(headers, parse_fault({"error": {"message": message}})) == wait_s
    assert told_wait_s({}, parse_fault(info)) == 17.5
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=90), usegmt=True)
    assert told_wait_s({"retry-after": later}, parse_fault("slower")) == pytest.approx(90, abs=3)
    reset = str(round(datetime.now(UTC).timestamp() + 90) * 1000)
    passed_on = parse_fault({"error": {"metadata": {"headers": {"X-RateLimit-Reset": reset}}}})
    assert told_wait_s({}, passed_on) == pytest.approx(90, abs=3)
    assert told_wait_s({"retry-after": "3"}, passed_on) == 3
