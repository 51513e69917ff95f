"""The endpoint policy against a real server on loopback: answers, delays, failures, rate limits, budgets, caching."""

import time
from pathlib import Path
from typing import Any

import pytest
from support.server import Reply, answer, serving

from stages.errors import Incomplete, UsageError
from stages.policy.base import PolicyConfig, Turn
from stages.policy.endpoint import EndpointPolicy
from stages.runs.artifact import Budget


def open_at(url: str, cache: Path, budget: Budget | None = None, **settings: Any) -> EndpointPolicy:
    config = PolicyConfig(model="big", base_url=url, **{"usd_per_mtok_in": 1.0, "usd_per_mtok_out": 2.0, **settings})
    return EndpointPolicy(config, budget=budget or Budget(), cache=cache)


def turns(*texts: str) -> list[Turn]:
    return [Turn([{"role": "user", "content": text}], seed=i) for i, text in enumerate(texts)]


def test_answers_come_in_order_with_tokens_and_cost(tmp_path: Path) -> None:
    with serving(lambda body, n: Reply(body=answer(body["messages"][0]["content"].upper()))) as server:
        samples = open_at(server.url, tmp_path).sample(turns("a", "b", "c"))
    assert [s.text for s in samples] == ["A", "B", "C"]
    assert [(s.prompt_tokens, s.completion_tokens) for s in samples] == [(10, 5)] * 3
    assert samples[0].cost_usd == pytest.approx((10 * 1.0 + 5 * 2.0) / 1e6)
    assert samples[0].prompt_ids is None and samples[0].logprobs is None


def test_what_the_server_billed_counts_more_than_our_prices(tmp_path: Path) -> None:
    with serving(lambda body, n: Reply(body=answer("x", cost=0.25))) as server:
        assert open_at(server.url, tmp_path).sample(turns("a"))[0].cost_usd == 0.25


def test_a_paid_answer_is_never_bought_twice(tmp_path: Path) -> None:
    with serving(lambda body, n: Reply(body=answer(f"answer {n}"))) as server:
        first = open_at(server.url, tmp_path).sample(turns("a"))
        again = open_at(server.url, tmp_path).sample(turns("a"))
        other = open_at(server.url, tmp_path, temperature=0.5).sample(turns("a"))
    assert first == again
    assert other[0].text == "answer 1"
    assert len(server.requests) == 2


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


def test_a_rejected_request_fails_alone(tmp_path: Path) -> None:
    def reply(body: dict[str, Any], n: int) -> Reply:
        long = body["messages"][0]["content"] == "long"
        return Reply(400, {"error": {"message": "context_length_exceeded"}}) if long else Reply(body=answer("ok"))

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


def test_the_budget_is_never_overspent(tmp_path: Path) -> None:
    budget = Budget(limit=0.5)
    with serving(lambda body, n: Reply(body=answer("x", cost=0.1))) as server:
        policy = open_at(server.url, tmp_path, budget, usd_per_mtok_out=0.1e6 / 64)
        with pytest.raises(Incomplete, match=r"0\.5 USD"):
            policy.sample(turns(*map(str, range(20))))
    assert budget.spent <= 0.5
    assert 4 <= len(server.requests) <= 5


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
