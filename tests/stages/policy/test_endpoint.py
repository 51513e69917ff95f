"""The endpoint policy against a real server on loopback: answers, failures, money, and how many requests it gets."""

import asyncio
import gc
import socket
import sqlite3
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.letters import letter_tokenizer
from support.loopback import Handler, listening
from support.server import Reply, answer, kept_in, serving

from composer_stages.errors import Incomplete, InfrastructureError, UsageError
from composer_stages.policy import ask_all, available, background
from composer_stages.policy.base import FINAL, PolicyConfig, Sample, Turn
from composer_stages.policy.endpoint import REFUSALS, START, EndpointPolicy, HostLimit, host_limit
from composer_stages.policy.reading import UNUSABLE
from composer_stages.policy.requests import QUESTION
from composer_stages.policy.serving import Serving
from composer_stages.policy.token_counts import tokenizer
from composer_stages.runs.activity import Notice
from composer_stages.runs.ledger import Budget
from composer_stages.runs.run import AnswerFolders, Manifest, RunWriter
from composer_stages.stopping import Interrupted, stopped_by


def open_at(url: str, cache: Path, budget: Budget | None = None, **settings: Any) -> EndpointPolicy:
    """A policy at this address with prices, 1 and 2 USD a million tokens in and out."""
    usual = {"usd_per_mtok_in": 1.0, "usd_per_mtok_out": 2.0, "max_tokens": 64}
    config = PolicyConfig(model="big", base_url=url, **{**usual, **settings})
    return EndpointPolicy(config, budget=budget or Budget(), cache=kept_in(cache))


def turns(*texts: str) -> list[Turn]:
    """A question of each text."""
    return [Turn([{"role": "user", "content": text}], seed=i) for i, text in enumerate(texts)]


def test_answers_come_in_order_with_tokens_and_cost(tmp_path: Path) -> None:
    with serving(lambda body, n: Reply(body=answer(body["messages"][0]["content"].upper()))) as server:
        samples = ask_all(open_at(server.url, tmp_path), turns("a", "b", "c"))
    assert [s.text for s in samples] == ["A", "B", "C"]
    assert [(s.prompt_tokens, s.completion_tokens) for s in samples] == [(10, 5)] * 3
    assert samples[0].cost_usd == pytest.approx((10 * 1.0 + 5 * 2.0) / 1e6)
    assert samples[0].prompt_ids is None and samples[0].logprobs is None


def test_retry_after_is_obeyed(tmp_path: Path) -> None:
    slow = Reply(429, {"error": {"message": "slow"}}, {"Retry-After": "0.3"})
    with serving(lambda body, n: Reply(body=answer("ok")) if n else slow) as server:
        started = time.monotonic()
        sample = ask_all(open_at(server.url, tmp_path), turns("a"))[0]
    assert sample.text == "ok" and sample.attempts == 2 and time.monotonic() - started >= 0.3


def test_a_wait_of_nothing_is_believed_once(tmp_path: Path) -> None:
    """Azure asks to wait 0 ms while a minute's tokens are spent: six attempts took milliseconds."""
    spent = Reply(429, {"error": {"message": "slow"}}, {"retry-after-ms": "0"})
    with serving(lambda body, n: Reply(body=answer("ok")) if n > 1 else spent) as server:
        started = time.monotonic()
        sample = ask_all(open_at(server.url, tmp_path), turns("a"))[0]
    assert sample.text == "ok" and sample.attempts == 3 and time.monotonic() - started >= 0.9


def test_a_stop_cancels_waiting_requests_and_keeps_sent_ones(tmp_path: Path) -> None:
    """As many calls as allowed at once had waited, and were sent and paid for after the signal."""
    stop = threading.Event()

    def reply(body: dict[str, Any], earlier: int) -> Reply:
        if len(server.requests) == 2:
            stop.set()
        return Reply(body=answer("ok"), delay_s=0.3)

    with serving(reply) as server:
        with stopped_by(stop), pytest.raises(Interrupted):
            ask_all(open_at(server.url, tmp_path, concurrency=2), turns(*"abcdef"))
        assert len(server.requests) == 2
        ask_all(open_at(server.url, tmp_path, concurrency=2), turns(*"abcdef"))
        assert len(server.requests) == 6


def test_a_wait_longer_than_two_minutes_stops_the_run(tmp_path: Path) -> None:
    hour = Reply(429, {"error": {"message": "no"}}, {"Retry-After": "3600"})
    with serving(lambda body, n: hour) as server, pytest.raises(Incomplete, match="3600 s"):
        ask_all(open_at(server.url, tmp_path), turns("a"))


@pytest.mark.parametrize("status", [200, 405, 501])
def test_a_web_page_ends_the_run_unless_the_server_has_answered_before(tmp_path: Path, status: int) -> None:
    page = Reply(status, b"<!doctype html><html>hi</html>")
    with serving(lambda request, n: page, probed=lambda request, n: page) as server:
        with pytest.raises(UsageError, match=r"is not the address of an API for chats \(a web page; is the URL"):
            ask_all(open_at(server.url, tmp_path), turns("a"))
        assert len(server.requests) == len(server.probes) == 1
    busy = Reply(status, PAGE)
    with serving(lambda request, n: busy if n == 1 else Reply(body=answer("x"))) as server:
        policy = open_at(server.url, tmp_path)
        assert [ask_all(policy, turns(text))[0].text for text in "ab"] == ["x", "x"]
        assert len(server.requests) == 3


def test_a_refused_connection_is_free_and_reported_once(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    config = PolicyConfig(model="big", base_url="http://127.0.0.1:9/v1", max_attempts=2, max_tokens=64, price="unknown")
    budget = Budget(100.0)
    policy = EndpointPolicy(config, budget=budget, cache=kept_in(tmp_path), listener=lambda *heard: told.append(heard))
    for sample in ask_all(policy, turns("a", "b")):
        assert sample.error_type == "connection" and "127.0.0.1:9" in (sample.error or "")
    assert (budget.spent, budget.possibly, budget.reserved) == (0.0, 0.0, 0.0)
    ((what, *counts),) = told
    assert isinstance(what, Notice) and counts == [0, 0]
    assert what.startswith("big: http://127.0.0.1:9/v1 cannot be reached") and "2 times in 1 s at most" in what


def test_a_server_that_never_answered_is_given_up_early(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    started = time.monotonic()
    with pytest.raises(InfrastructureError, match=f"^{url} refuses every connection, and no server has answered there"):
        ask_all(open_at(url, tmp_path, max_attempts=50), turns("a", "b"))
    assert time.monotonic() - started < 60, "fifty attempts would take six minutes"
    with serving(lambda body, n: Reply(body=answer("x"))) as server:
        assert ask_all(open_at(server.url, tmp_path), turns("a"))[0].text == "x"
    sample = ask_all(open_at(server.url, tmp_path, max_attempts=REFUSALS + 1), turns("b"))[0]  # the server is down now
    assert sample.error_type == "connection" and sample.attempts == REFUSALS + 1


def test_the_api_key_is_sent_and_never_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", "s3cret")
    with serving(lambda body, n: Reply(body=answer("x"))) as server:
        policy = open_at(server.url, tmp_path, api_key_env="TEACHER_KEY")
        ask_all(policy, turns("a"))
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


def test_a_call_that_fails_after_cancellation_prints_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """asyncio would print a traceback for each of them, hundreds where a run ends while a server is down."""
    with serving(lambda body, n: Reply(500, {"error": {"message": "down"}}, delay_s=0.3)) as server:
        policy = open_at(server.url, tmp_path, usd_per_mtok_in=None, usd_per_mtok_out=None)

        async def leave() -> None:
            asked = asyncio.create_task(policy.ask(turns("a")[0]))
            await asyncio.sleep(0.1)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            await asyncio.sleep(0.6)

        background.run(leave())
        gc.collect()
    assert len(server.requests) == 1 and "never retrieved" not in caplog.text


def test_request_and_extra_body_shape_what_is_sent(tmp_path: Path) -> None:
    with serving(lambda body, n: Reply(body=answer(f"answer {n}"))) as server:
        policy = open_at(
            server.url,
            tmp_path,
            request={"seed": False, "max_tokens": False, "max_completion_tokens": 500},
            extra_body={"provider": {"allow_fallbacks": False}, "enable_thinking": False},
        )
        samples = [ask_all(policy, [Turn([{"role": "user", "content": "a"}], seed=seed)])[0] for seed in (1, 2)]
    sent = server.requests[0]
    assert "seed" not in sent and "max_tokens" not in sent
    assert sent["max_completion_tokens"] == 500 and available.longest_answer(policy.config) == 500
    assert sent["provider"] == {"allow_fallbacks": False} and sent["enable_thinking"] is False
    assert {s.text for s in samples} == {"answer 0", "answer 1"}, "samples stay apart where no seed tells them apart"


def test_a_paid_answer_is_reused_for_the_same_request(tmp_path: Path) -> None:
    with serving(lambda body, n: Reply(body=answer(f"answer {n}"))) as server:
        first = ask_all(open_at(server.url, tmp_path), turns("a"))
        again = ask_all(open_at(server.url, tmp_path), turns("a"))
        other = ask_all(open_at(server.url, tmp_path, temperature=0.5), turns("a"))
    assert first == again
    assert other[0].text == "answer 1"
    assert len(server.requests) == 2


FREE: dict[str, Any] = {"usd_per_mtok_in": None, "usd_per_mtok_out": None}


def test_a_free_answer_is_cached_for_its_run_only(tmp_path: Path) -> None:
    """Behind the same address and name may be another checkpoint by then: it got the score of the first."""
    loaded = ["first"]
    with serving(lambda body, n: Reply(body=answer(loaded[0]))) as server:
        for prices in (FREE, dict.fromkeys(FREE, 0.0)):
            runs = [AnswerFolders(tmp_path / "shared", tmp_path / str(prices) / run) for run in ("one", "two")]
            config = PolicyConfig(model="big", base_url=server.url, max_tokens=64, **prices)
            said = list[str]()
            for run, loaded[0] in zip([runs[0], runs[0], runs[1]], ("first", "second", "second"), strict=True):
                said += [one.text for one in ask_all(EndpointPolicy(config, budget=Budget(), cache=run), turns("a"))]
            assert said == ["first", "first", "second"]
        assert len(server.requests) == 4


@pytest.mark.parametrize("prices", [{"usd_per_mtok_in": 1.0, "usd_per_mtok_out": 2.0}, FREE], ids=["priced", "billed"])
def test_a_paid_answer_is_cached_for_all_runs(tmp_path: Path, prices: dict[str, Any]) -> None:
    bill = {} if prices["usd_per_mtok_in"] else {"cost": 0.01}  # known from the answer alone
    with serving(lambda body, n: Reply(body=answer(f"answer {n}", **bill))) as server:
        config = PolicyConfig(model="big", base_url=server.url, max_tokens=64, **prices)
        for run in ("one", "two"):
            policy = EndpointPolicy(config, budget=Budget(), cache=AnswerFolders(tmp_path / "shared", tmp_path / run))
            assert [one.text for one in ask_all(policy, turns("a"))] == ["answer 0"]
    assert len(server.requests) == 1


@pytest.mark.parametrize("told", ["fingerprint", "model", "root", "owner", "props"])
@pytest.mark.parametrize("prices", [{"usd_per_mtok_in": 1.0, "usd_per_mtok_out": 2.0}, FREE], ids=["priced", "billed"])
def test_a_paid_answer_is_reused_under_the_same_origin_only(tmp_path: Path, prices: dict[str, Any], told: str) -> None:
    """A newly trained checkpoint behind the old address got the score of the old one, without a request."""
    loaded, asked = ["A"], list[int]()

    class Local(Handler):
        def get(self) -> None:
            row = {"id": "big", "created": time.time_ns(), "root": "r", "owned_by": "llamacpp"}
            row |= {"root": {"root": loaded[0]}, "owner": {"owned_by": loaded[0]}}.get(told, {})
            props = {"model_path": loaded[0] if told == "props" else "p", "total_slots": time.time_ns()}
            body = {"/v1/models": {"data": [row]}, "/props": props}.get(self.path)
            self.send(*((200, body) if body else (404, {"error": "no such page"})))

        def post(self) -> None:
            plain = orjson.loads(self.body())["messages"] == QUESTION
            asked.append(not plain)
            body = answer(loaded[0], cost=0.01)
            self.send(
                200,
                body | {"fingerprint": {"system_fingerprint": loaded[0]}, "model": {"model": loaded[0]}}.get(told, {}),
            )

    def run(name: str, fresh: bool = False) -> tuple[str, EndpointPolicy]:
        config = PolicyConfig(model="big", base_url=f"{url}/v1", max_tokens=64, **prices)
        folders = AnswerFolders(tmp_path / "shared", tmp_path / name, fresh)
        policy = EndpointPolicy(config, budget=Budget(), cache=folders)
        return ask_all(policy, turns("a"))[0].text, policy

    with listening(Local) as url:
        said, number = list[str](), list[int]()
        for name, loaded[0] in (("one", "A"), ("two", "A"), ("three", "B"), ("two", "B"), ("four", "A"), ("five", "B")):
            said.append(run(name)[0])
            number.append(sum(asked))
        assert said == ["A", "A", "B", "A", "A", "B"] and number == [1, 1, 2, 2, 2, 2]
        assert run("six")[1].facts()["reused"] == 1 and "reused" not in run("seven", fresh=True)[1].facts()
        assert sum(asked) == 3, "a fresh run asks anew"
        assert run("seven", fresh=True)[0] == "B" and sum(asked) == 3, "and no answer of its own, after a kill"


# A reader that fails: the answer is paid, kept, and read again once the reader is mended.


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "panic": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "PanicException: chunk size must be non-zero"),
    "error": ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}}, "Exception: WordLevel error"),
}
"""Files that tokenizers loads, but fails with at a text: the first with an error that is no `Exception`."""


@pytest.mark.parametrize("name", FAULTS)
def test_an_unreadable_answer_is_paid_once_and_read_after_the_fix(tmp_path: Path, name: str) -> None:
    fault, words = FAULTS[name]
    model, budget = letter_tokenizer(tmp_path / "model", **fault), Budget(1.0, tmp_path / "ledger.jsonl")
    with serving(lambda body, n: Reply(body=answer("said", completion_tokens=8))) as server:

        def asked(budget: Budget) -> Sample:
            config = PolicyConfig(model=model, base_url=server.url, max_tokens=64, usd_per_mtok_in=1.0)
            config = config.model_copy(update={"usd_per_mtok_out": 2.0})
            policy = EndpointPolicy(config, budget=budget, cache=kept_in(tmp_path))
            return ask_all(policy, turns("a"))[0]

        failed, again = asked(budget), asked(budget)
        assert (failed.error_type, failed.text) == ("unreadable", "") and words in (failed.error or "")
        assert f"{tmp_path}/" in (failed.error or "") and failed.error_type not in FINAL
        assert words in (again.error or "") and len(server.requests) == 1
        assert budget.reserved == 0, "a bill that cannot be checked either counts as possibly paid"
        assert (budget.spent > 0, budget.possibly > 0) == ((False, True) if name == "panic" else (True, False))
        letter_tokenizer(tmp_path / "model")
        assert asked(budget).text == "said"
    assert len(server.requests) == 1
    calls = [orjson.loads(line)["call"] for line in (tmp_path / "ledger.jsonl").read_bytes().splitlines()]
    assert calls == [1, 1], "reserved once and settled once"
    tokenizer.cache_clear()


def test_an_answer_beyond_the_json_parser_is_not_requested_again(tmp_path: Path) -> None:
    """Its bill cannot be read either, so that it counts as possibly paid."""
    deep = "[" * 20_000 + "]" * 20_000
    body = f'{{"choices": [{{"message": {{"content": "yes", "extra": {deep}}}}}], "usage": {{"cost": 0.01}}}}'.encode()
    with serving(lambda request, n: Reply(body=body)) as server:
        for _ in range(2):
            budget = Budget(None, tmp_path / "ledger.jsonl")
            (sample,) = ask_all(open_at(server.url, tmp_path, budget), turns("a"))
            assert sample.error_type == "unreadable" and "RecursionError" in (sample.error or "")
            assert budget.possibly > 0 and budget.reserved == 0
    assert len(server.requests) == 1


@pytest.mark.parametrize("prices", [{}, FREE], ids=["priced", "billed"])
def test_a_deeply_nested_answer_costs_its_bill_once(tmp_path: Path, prices: dict[str, Any]) -> None:
    name = "[" * 990 + "]" * 990  # of a tool; Python has no text for it
    call = f'{{"function": {{"name": {name}, "arguments": "{{}}"}}}}'
    bill = '{"prompt_tokens": 10, "completion_tokens": 5, "cost": 0.01}'
    body = f'{{"choices": [{{"message": {{"content": null, "tool_calls": [{call}]}}}}], "usage": {bill}}}'.encode()
    with serving(lambda request, n: Reply(body=body if n == 0 else answer("fine"))) as server:
        budget = Budget(None, tmp_path / "ledger.jsonl")
        (sample, *rest) = ask_all(open_at(server.url, tmp_path, budget, concurrency=1, **prices), turns("a", "b"))
        assert "RecursionError" in (sample.error or "") and [one.text for one in rest] == ["fine"]
        assert (budget.spent, budget.possibly) == (pytest.approx(0.01, rel=0.01), 0.0)
        config, folders = open_at(server.url, tmp_path, **prices).config, AnswerFolders(tmp_path, tmp_path / "other")
        other = EndpointPolicy(config, budget=Budget(), cache=folders)
        assert ask_all(other, turns("a"))[0].error_type == "unreadable", "nor does another run buy it again"
    assert len(server.requests) == 2


@pytest.mark.parametrize("reason", ["not JSON", "unknown ending"])
def test_an_unusable_body_is_requested_again_by_the_next_process(tmp_path: Path, reason: str) -> None:
    """It was kept before it was read, and it does not stand in the way of an answer."""
    with serving(lambda body, n: Reply(body=answer("at last") if n else BODIES[reason])) as server:
        failed, found, kept = (ask_all(open_at(server.url, tmp_path, max_attempts=1), turns("a"))[0] for _ in range(3))
    assert failed.error_type == UNUSABLE[reason][0] and (found.text, kept.text) == ("at last", "at last")
    assert len(server.requests) == 2


def test_the_budget_is_never_overspent(tmp_path: Path) -> None:
    budget = Budget(limit=0.5)
    with serving(lambda body, n: Reply(body=answer("x", cost=0.1))) as server:
        policy = open_at(server.url, tmp_path, budget, usd_per_mtok_out=0.1e6 / 64)
        with pytest.raises(Incomplete, match=r"0\.5 USD"):
            ask_all(policy, turns(*map(str, range(20))))
    assert budget.spent <= 0.5
    assert 4 <= len(server.requests) <= 5


def test_unknown_prices_are_refused_under_a_limit_unless_written_down(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--max-cost is given, but what 'big' of .* costs is not"):
        open_at("http://127.0.0.1:9/v1", tmp_path, Budget(2.0), **FREE)
    with pytest.raises(UsageError, match="costs is not"):
        open_at("http://127.0.0.1:9/v1", tmp_path, Budget(2.0), usd_per_mtok_in=1.0, usd_per_mtok_out=None)
    open_at("http://127.0.0.1:9/v1", tmp_path, Budget(), **FREE)
    open_at("http://127.0.0.1:9/v1", tmp_path, Budget(2.0), usd_per_mtok_in=0.0, usd_per_mtok_out=0.0)
    with serving(lambda body, n: Reply(body=answer("x", cost=1.0))) as server:
        budget = Budget(2.0)
        policy = open_at(server.url, tmp_path, budget, price="unknown", concurrency=1, **FREE)
        with pytest.raises(Incomplete, match=r"budget of 2 USD is spent"):
            ask_all(policy, turns(*map(str, range(6))))
    assert len(server.requests) == 2
    assert budget.spent == 2.0


@pytest.mark.parametrize(
    ("more", "asked"),
    [({}, 2), ({"price": "unknown"}, 6), ({"usd_per_mtok_in": 0.0, "usd_per_mtok_out": 0.0}, 6), ({"usd": 0.0}, 6)],
    ids=["unpriced", "known to be unknown", "priced", "free"],
)
def test_a_limit_of_one_rollout_limits_all_whose_price_nobody_told(
    tmp_path: Path, more: dict[str, Any], asked: int
) -> None:
    """Seven rollouts of 0.05 USD ended none of their limits of 0.10 USD, and nothing said that 0.35 were spent."""
    usd = more.pop("usd", 0.05)
    bill = {"cost": 0, "is_byok": True, "cost_details": {"upstream_inference_cost": usd}}
    out = RunWriter(
        tmp_path / "run", Manifest(composer="0", stage="s", stage_version=1, fingerprint="0"), cache=tmp_path
    )
    with serving(lambda body, n: Reply(body=answer("x", **bill))) as server:
        config = PolicyConfig(model="m", base_url=server.url, max_tokens=64, concurrency=1, **more)
        ends = pytest.raises(Incomplete) if asked < 6 else nullcontext()
        with Serving(out, [config], rollout_usd=0.1) as opened, ends:
            policy = opened.open(config)
            for turn in turns(*"abcdef"):
                ask_all(policy, [turn])
        assert len(server.requests) == asked and out.budget.spent == pytest.approx(usd * asked)


def test_a_bill_never_exceeds_its_reservation_for_any_script(tmp_path: Path) -> None:
    """A byte a token, as no tokenizer does worse: characters / 3 lay below the bill and 1.5 USD became 4."""
    texts = ["x" * 3000, "龍" * 1000, "🦜" * 500]

    def dear(body: dict[str, Any], n: int) -> Reply:
        return Reply(body=answer("x", prompt_tokens=len(body["messages"][0]["content"].encode()), completion_tokens=64))

    with serving(dear) as server:
        budget = Budget(4.5, tmp_path / "ledger.jsonl")
        policy = open_at(server.url, tmp_path, budget, usd_per_mtok_in=1000.0, usd_per_mtok_out=2.0, concurrency=1)
        with pytest.raises(Incomplete, match="is spent"):
            ask_all(policy, turns(*texts))
    lines = [orjson.loads(line) for line in (tmp_path / "ledger.jsonl").read_bytes().splitlines()]
    bounds = {line["call"]: line["reserved"] for line in lines if "reserved" in line}
    bills = {line["call"]: line["settled"] for line in lines if "settled" in line}
    assert bills and all(bills[call] <= bounds[call] for call in bills)
    assert budget.spent <= 4.5


@pytest.mark.parametrize("more", [{}, {"choices": []}], ids=["an answer", "no choice"])
def test_a_bill_above_its_reservation_stops_the_run(tmp_path: Path, more: dict[str, Any]) -> None:
    with serving(lambda body, n: Reply(body={**answer("x", cost=0.25), **more})) as server:
        budget = Budget(10.0)
        with pytest.raises(Incomplete, match=r"billed 0\.250000 USD, more than"):
            ask_all(open_at(server.url, tmp_path, budget, concurrency=1), turns(*map(str, range(9))))
    assert budget.spent == 0.25 and len(server.requests) == 1, "no call that waited was sent"


PAGE = b"<html>busy</html>"


@pytest.mark.parametrize(
    ("reply", "error_type", "paid"),
    [
        (Reply(body=answer("late"), delay_s=1.0), "timeout", "possibly"),
        (Reply(body=PAGE), UsageError, "possibly"),
        (Reply(429, {"error": {"message": "slow down"}}, {"Retry-After": "0"}), "rate_limit", "nothing"),
        (Reply(body={**answer(""), "choices": []}), "no_text", "spent"),
    ],
)
def test_a_failed_call_is_free_only_if_refused_before_any_work(
    tmp_path: Path, reply: Reply, error_type: str | type[UsageError], paid: str
) -> None:
    budget, samples = Budget(100.0), []
    ends = nullcontext() if isinstance(error_type, str) else pytest.raises(error_type, match="web page")
    with serving(lambda body, n: reply, probed=lambda body, n: reply) as server, ends:
        timeout_s = 0.3 if error_type == "timeout" else 60.0  # an answer at once takes 0.3 s on a busy machine
        policy = open_at(server.url, tmp_path, budget, timeout_s=timeout_s, max_attempts=1)
        samples = ask_all(policy, turns("a"))
    assert [sample.error_type for sample in samples] == [error_type] * isinstance(error_type, str)
    assert (budget.spent > 0, budget.possibly > 0) == (paid == "spent", paid == "possibly")
    assert budget.reserved == 0


def choice(**fields: Any) -> dict[str, Any]:
    """A completion with these fields in its only choice."""
    return {**answer(""), "choices": [{"finish_reason": "stop", "message": {"content": "x"}, **fields}]}


NAMELESS = {"message": {"content": None, "tool_calls": [{"function": {"arguments": "{}"}}]}}
BODIES: dict[str, Any] = {
    "not JSON": b'{"choices": [',
    "not a completion": {"detail": "busy"},
    "broken off": choice(finish_reason="error"),
    "no choices": {**answer(""), "choices": []},
    "unknown ending": choice(finish_reason="tired"),
    "malformed": choice(**NAMELESS),
}


@pytest.mark.parametrize("reason", UNUSABLE)
def test_an_unusable_answer_is_retried_only_if_a_retry_can_help(tmp_path: Path, reason: str) -> None:
    kind, mends = UNUSABLE[reason]
    budget = Budget(1.0)
    with serving(lambda body, n: Reply(body=BODIES[reason])) as server:
        (sample,) = ask_all(open_at(server.url, tmp_path, budget, max_attempts=2), turns("a"))
        assert (sample.error_type, sample.attempts, len(server.requests)) == (kind, 1 + mends, 1 + mends)
    assert budget.reserved == 0 and (budget.spent > 0) == ("usage" in str(BODIES[reason]))


def kept(*folders: Path) -> set[str]:
    """The questions whose answers are kept in these folders."""
    keys = set[str]()
    for folder in folders:
        with sqlite3.connect(folder / "answers.sqlite") as cache:
            keys |= {key.partition(":")[0] for (key,) in cache.execute("SELECT key FROM answers")}
    return keys


def test_nobody_waits_for_what_a_server_tells_of_its_model(tmp_path: Path) -> None:
    """Two questions preceded the first answer. Until they are answered, answers are kept for their run alone."""
    answered, before = threading.Event(), list[int]()

    class Slow(Handler):
        def get(self) -> None:
            assert answered.wait(9.0)
            before.append(len(kept(tmp_path)))
            self.send(503 if len(before) == 1 else 200, {"data": [{"id": "big", "root": "r"}]})  # it is starting

        def post(self) -> None:
            self.body()
            self.send(200, answer("x"))

    with listening(Slow) as url:
        policy = open_at(f"{url}/v1", tmp_path)

        async def ask() -> str:
            text = (await policy.ask(turns("a")[0])).text
            assert len(kept(tmp_path / "own")) == 1
            answered.set()
            await policy.drain()
            return text

        assert background.run(ask()) == "x" and before[0] == 0 and len(kept(tmp_path)) == 1
        assert policy.facts()["server"] == {"root": "r"}
        ask_all(open_at(f"{url}/v1", tmp_path), turns("a"))


def test_the_answer_is_durable_before_its_reservation_is_released(tmp_path: Path) -> None:
    kept_at_release: list[int] = []

    class Watching(Budget):
        def write(self, lines: Any) -> None:
            kept_at_release.extend(len(kept(tmp_path, tmp_path / "own")) for line in lines if "settled" in line)
            super().write(lines)

    with serving(lambda body, n: Reply(body=answer("x"))) as server:
        ask_all(open_at(server.url, tmp_path, Watching(1.0), concurrency=1), turns("a", "b", "c"))
    assert len(kept_at_release) == 3, kept_at_release
    assert all(kept >= released for released, kept in enumerate(kept_at_release, 1)), kept_at_release


def test_answers_in_flight_are_cached_when_another_call_stops_the_run(tmp_path: Path) -> None:
    def reply(body: dict[str, Any], n: int) -> Reply:
        refused = body["messages"][0]["content"] == "refused"
        time.sleep(0.0 if refused else 0.5)
        return Reply(402, {"error": {"message": "no"}}) if refused else Reply(body=answer("paid"))

    budget = Budget(1.0)
    with serving(reply) as server:
        policy = open_at(server.url, tmp_path, budget)
        with pytest.raises(InfrastructureError, match="no credit"):
            ask_all(policy, turns("slow", "refused"))
        assert budget.spent > 0 == budget.reserved
        assert ask_all(policy, turns("slow"))[0].text == "paid"
    assert len(server.requests) == 2


def test_a_silent_server_is_reported_while_requests_wait(tmp_path: Path) -> None:
    heard: list[tuple[str, int, int]] = []
    with serving(lambda body, n: Reply(body=answer("x"), delay_s=0.5)) as server:
        config = PolicyConfig(model="big", base_url=server.url)
        policy = EndpointPolicy(
            config, budget=Budget(), cache=kept_in(tmp_path), listener=lambda *said: heard.append(said), quiet_s=0.1
        )
        ask_all(policy, turns("a", "b"))
        told = len(heard)
        time.sleep(0.3)
    assert told and len(heard) == told, "nothing is said once all answers are there"
    what, done, total = heard[0]
    assert what.startswith("waiting for 2 answers of big at http://127.0.0.1:") and ", the oldest since " in what
    assert (done, total) == (0, 0)


# How many requests a server gets: more while it answers, fewer when it pushes back, none while it asks to wait.


def test_the_limit_grows_with_answers_and_falls_on_push_back() -> None:
    async def play() -> tuple[float, float, float]:
        host = HostLimit()
        for _ in range(6):
            entered = int(host.limit)
            for _ in range(entered):
                await host.enter()
            for _ in range(entered):
                host.leave()
        grown = host.limit
        for _ in range(20):
            await host.enter()
        for _ in range(20):
            host.leave(pushed_back=True)
        fallen = host.limit
        await host.enter()
        host.leave()
        return grown, fallen, host.limit

    grown, fallen, idle = asyncio.run(play())
    assert grown > START
    assert fallen == 0.7 * grown, "twenty push-backs of one moment are one"
    assert idle == fallen, "an idle door tells nothing"


def test_the_limit_settles_near_a_servers_capacity() -> None:
    """A server that takes 40 at once and refuses more: few refusals, and the number settles near 40."""
    capacity, refused, peak = 40, 0, 0

    async def play() -> float:
        nonlocal refused, peak
        host, inside = HostLimit(), 0

        async def request() -> None:
            nonlocal inside, refused, peak
            while True:
                await host.enter()
                inside += 1
                peak = max(peak, inside)
                too_many = inside > capacity
                await asyncio.sleep(0.001 if too_many else 0.02)
                inside -= 1
                host.leave(pushed_back=too_many)
                if not too_many:
                    return
                refused += 1

        await asyncio.gather(*(request() for _ in range(3000)))
        return host.limit

    limit = asyncio.run(play())
    assert 15 <= limit <= 60
    assert peak > 30 and refused < 600


def test_retry_after_holds_for_all_requests_of_a_server() -> None:
    async def play() -> float:
        host = HostLimit()
        await host.enter()
        host.leave(pushed_back=True, wait_s=0.2)
        started = time.monotonic()
        await asyncio.gather(host.enter(), host.enter())
        return time.monotonic() - started

    assert asyncio.run(play()) >= 0.2


def test_one_limit_per_server() -> None:
    assert host_limit("http://a:1/v1") is host_limit("http://a:1/v2") is not host_limit("http://a:2/v1")


@pytest.mark.parametrize("woken", [False, True])
def test_cancelled_waiters_do_not_consume_a_slot(woken: bool) -> None:
    """Whether they give up before their turn comes or after."""

    async def play() -> None:
        host = HostLimit()
        for _ in range(START):
            await host.enter()
        # An answer at the limit gives two turns: its own, and the one by which the limit grows.
        *gone, waiting = (asyncio.create_task(host.enter()) for _ in range(3))
        await asyncio.sleep(0)
        cancels = [task.cancel for task in gone]
        for act in (host.leave, *cancels) if woken else (*cancels, host.leave):
            act()
        await asyncio.wait_for(waiting, 20.0)

    asyncio.run(play())
