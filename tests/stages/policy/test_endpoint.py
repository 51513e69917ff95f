"""The endpoint policy against a real server on loopback: answers, delays, failures, rate limits."""

import asyncio
import gc
import time
from pathlib import Path
from typing import Any

import pytest
from support.endpoint import open_at, turns
from support.server import Reply, answer, serving

from stages import messages
from stages.errors import Incomplete, UsageError
from stages.policy import background
from stages.policy.base import PolicyConfig, Turn


def test_answers_come_in_order_with_tokens_and_cost(tmp_path: Path) -> None:
    with serving(lambda body, n: Reply(body=answer(body["messages"][0]["content"].upper()))) as server:
        samples = open_at(server.url, tmp_path).sample(turns("a", "b", "c"))
    assert [s.text for s in samples] == ["A", "B", "C"]
    assert [(s.prompt_tokens, s.completion_tokens) for s in samples] == [(10, 5)] * 3
    assert samples[0].cost_usd == pytest.approx((10 * 1.0 + 5 * 2.0) / 1e6)
    assert samples[0].prompt_ids is None and samples[0].logprobs is None


def test_rate_limit_is_waited_out_as_asked(tmp_path: Path) -> None:
    def reply(body: dict[str, Any], n: int) -> Reply:
        return (
            Reply(429, {"error": {"message": "slow"}}, {"Retry-After": "0.3"}) if n == 0 else Reply(body=answer("ok"))
        )

    with serving(reply) as server:
        started = time.monotonic()
        sample = open_at(server.url, tmp_path).sample(turns("a"))[0]
    assert sample.text == "ok" and sample.attempts == 2
    assert 0.3 <= time.monotonic() - started < 5


def test_a_wait_longer_than_two_minutes_stops_the_run(tmp_path: Path) -> None:
    with (
        serving(lambda body, n: Reply(429, {"error": {"message": "no"}}, {"Retry-After": "3600"})) as server,
        pytest.raises(Incomplete, match="3600 s"),
    ):
        open_at(server.url, tmp_path).sample(turns("a"))


def test_failures_end_after_the_allowed_attempts(tmp_path: Path) -> None:
    with serving(lambda body, n: Reply(500, {"error": {"message": "boom"}})) as server:
        sample = open_at(server.url, tmp_path, max_attempts=2).sample(turns("a"))[0]
    assert sample.error_type == "server" and "boom" in (sample.error or "")
    assert len(server.requests) == sample.attempts == 2


def test_a_slow_answer_times_out(tmp_path: Path) -> None:
    with serving(lambda body, n: Reply(body=answer("late"), delay_s=1.0)) as server:
        sample = open_at(server.url, tmp_path, timeout_s=0.2, max_attempts=1).sample(turns("a"))[0]
    assert sample.error_type == "timeout"


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    sample = open_at("http://127.0.0.1:9/v1", tmp_path, max_attempts=1).sample(turns("a"))[0]
    assert sample.error_type == "connection" and "127.0.0.1:9" in (sample.error or "")


@pytest.mark.parametrize(("status", "words"), [(401, "key was refused"), (402, "no credit"), (404, "no such model")])
def test_what_no_retry_can_mend_stops_the_run(tmp_path: Path, status: int, words: str) -> None:
    with (
        serving(lambda body, n: Reply(status, {"error": {"message": "no"}})) as server,
        pytest.raises(UsageError, match=words),
    ):
        open_at(server.url, tmp_path).sample(turns("a"))
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, {"error": {"message": "Your messages are too many.", "code": "context_length_exceeded"}}),
        (400, {"object": "error", "message": "This model's maximum context length is 1024 tokens. However, you ..."}),
        (400, {"error": {"message": "the request exceeds the available context size", "code": 400}}),
        (400, {"error": {"message": "prompt is too long: 201000 tokens > 200000 maximum"}}),
        (413, {"error": {"message": "The input is longer than the model's context length (4096 tokens)."}}),
        (200, {"error": {"message": "This endpoint's maximum context length is 4096 tokens.", "code": 400}}),
    ],
)
def test_a_prompt_that_does_not_fit_has_a_kind_of_its_own(tmp_path: Path, status: int, body: dict) -> None:
    with serving(lambda asked, n: Reply(status, body)) as server:
        (sample,) = open_at(server.url, tmp_path).sample(turns("long"))
        assert (sample.error_type, len(server.requests)) == ("context", 1)


def test_a_rejected_request_fails_alone(tmp_path: Path) -> None:
    def reply(body: dict[str, Any], n: int) -> Reply:
        long = body["messages"][0]["content"] == "long"
        return Reply(400, {"error": {"message": "content policy"}}) if long else Reply(body=answer("ok"))

    with serving(reply) as server:
        samples = open_at(server.url, tmp_path).sample(turns("long", "short"))
    assert samples[0].error_type == "rejected" and samples[1].text == "ok"
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    "body",
    [
        b"<html>busy</html>",
        b"[1, 2]",
        {"choices": []},
        {"choices": [{"finish_reason": "error", "message": {"content": None}}]},
        {"error": {"message": "upstream died", "code": 502}},
    ],
)
def test_garbage_is_an_error_and_not_an_answer(tmp_path: Path, body: Any) -> None:
    with serving(lambda request, n: Reply(body=body)) as server:
        sample = open_at(server.url, tmp_path, max_attempts=1).sample(turns("a"))[0]
    assert sample.error_type in {"garbage", "server"} and sample.text == ""


def test_the_key_is_sent_and_never_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", "s3cret")
    with serving(lambda body, n: Reply(body=answer("x"))) as server:
        policy = open_at(server.url, tmp_path, api_key_env="TEACHER_KEY")
        policy.sample(turns("a"))
    assert server.keys == ["Bearer s3cret"]
    assert "s3cret" not in str(policy.config.identity()) + str(policy.facts())
    assert b"s3cret" not in (tmp_path / "answers.sqlite").read_bytes()


@pytest.mark.parametrize(("value", "words"), [(None, "is not set"), ("  ", "is empty")])
def test_a_missing_key_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None, words: str) -> None:
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("TEACHER_KEY", value)
    with pytest.raises(UsageError, match=f"TEACHER_KEY.*{words}"):
        open_at("http://127.0.0.1:9/v1", tmp_path, api_key_env="TEACHER_KEY")


# --- money


# --- answers


def test_a_call_that_fails_after_its_caller_left_is_nobodys_news(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio would print a traceback for each of them, hundreds where a run ends while a server is down."""
    with serving(lambda body, n: Reply(500, {"error": {"message": "down"}}, delay_s=0.3)) as server:
        policy = open_at(server.url, tmp_path)

        async def leave() -> None:
            asked = asyncio.create_task(policy.ask(turns("a")[0]))
            await asyncio.sleep(0.1)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            await asyncio.sleep(0.6)

        background.run(leave())
        gc.collect()
    assert len(server.requests) == 1 and "never retrieved" not in caplog.text


def test_a_tool_call_is_an_answer(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"query": "boat"}'}}
    body = answer("")
    body["choices"][0] = {"finish_reason": "tool_calls", "message": {"content": None, "tool_calls": [call]}}
    with serving(lambda request, n: Reply(body=body)) as server:
        (sample,) = open_at(server.url, tmp_path).sample(turns("a"))
    assert len(server.requests) == 1
    assert messages.read(sample.text).calls == (messages.ToolCall("search", '{"query": "boat"}'),)


def test_json_is_read_whatever_its_content_type(tmp_path: Path) -> None:
    with serving(lambda body, n: Reply(body=answer("ok"), headers={"Content-Type": "text/plain"})) as server:
        assert open_at(server.url, tmp_path).sample(turns("a"))[0].text == "ok"
    assert len(server.requests) == 1


@pytest.mark.parametrize(("finish", "error"), [("length", None), ("content_filter", "no_text")])
def test_an_answer_without_text_is_bought_once(tmp_path: Path, finish: str, error: str | None) -> None:
    body = answer("")
    body["choices"][0] = {"finish_reason": finish, "message": {"content": None}}
    with serving(lambda request, n: Reply(body=body)) as server:
        (sample,) = open_at(server.url, tmp_path).sample(turns("a"))
    assert (sample.error_type, sample.finish_reason, len(server.requests)) == (error, finish, 1)
    assert sample.cost_usd > 0


def test_the_model_that_answered_is_recorded(tmp_path: Path) -> None:
    body = {**answer("x"), "model": "big-2026-08-01", "provider": "Somewhere"}
    with serving(lambda request, n: Reply(body=body)) as server:
        (sample,) = open_at(server.url, tmp_path).sample(turns("a"))
    assert (sample.served_model, sample.provider) == ("big-2026-08-01", "Somewhere")


def test_request_and_extra_body_shape_what_is_sent(tmp_path: Path) -> None:
    with serving(lambda body, n: Reply(body=answer(f"answer {n}"))) as server:
        policy = open_at(
            server.url,
            tmp_path,
            request={"seed": False, "max_tokens": False, "max_completion_tokens": 500},
            extra_body={"provider": {"allow_fallbacks": False}, "enable_thinking": False},
        )
        same = [Turn([{"role": "user", "content": "a"}], seed=seed) for seed in (1, 2)]
        samples = policy.sample(same)
    sent = server.requests[0]
    assert "seed" not in sent and "max_tokens" not in sent
    assert sent["max_completion_tokens"] == 500 and policy.config.longest_answer() == 500
    assert sent["provider"] == {"allow_fallbacks": False} and sent["enable_thinking"] is False
    assert {s.text for s in samples} == {"answer 0", "answer 1"}, "samples stay apart where no seed tells them apart"


@pytest.mark.parametrize("settings", [{"request": {"max_tokens": False}}, {"extra_body": {"n": 4}}])
def test_requests_without_an_end_or_with_several_answers_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="request"):
        PolicyConfig(model="m", **settings)
