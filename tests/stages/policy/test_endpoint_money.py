"""What the endpoint policy spends: prices, bills, budgets, and answers that are paid once."""

import sqlite3
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.endpoint import open_at, turns
from support.server import Reply, answer, serving

from stages.errors import Incomplete, UsageError
from stages.runs.ledger import Budget


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


def test_the_budget_is_never_overspent(tmp_path: Path) -> None:
    budget = Budget(limit=0.5)
    with serving(lambda body, n: Reply(body=answer("x", cost=0.1))) as server:
        policy = open_at(server.url, tmp_path, budget, usd_per_mtok_out=0.1e6 / 64)
        with pytest.raises(Incomplete, match=r"0\.5 USD"):
            policy.sample(turns(*map(str, range(20))))
    assert budget.spent <= 0.5
    assert 4 <= len(server.requests) <= 5


def test_unknown_prices_are_refused_under_a_limit_unless_written_down(tmp_path: Path) -> None:
    prices: dict[str, Any] = {"usd_per_mtok_in": None, "usd_per_mtok_out": None}
    with pytest.raises(UsageError, match=r"--max-cost is given, but what 'big' of .* costs is not"):
        open_at("http://127.0.0.1:9/v1", tmp_path, Budget(2.0), **prices)
    with pytest.raises(UsageError, match="costs is not"):
        open_at("http://127.0.0.1:9/v1", tmp_path, Budget(2.0), usd_per_mtok_in=1.0, usd_per_mtok_out=None)
    open_at("http://127.0.0.1:9/v1", tmp_path, Budget(), **prices)
    open_at("http://127.0.0.1:9/v1", tmp_path, Budget(2.0), usd_per_mtok_in=0.0, usd_per_mtok_out=0.0)
    with serving(lambda body, n: Reply(body=answer("x", cost=1.0))) as server:
        budget = Budget(2.0)
        policy = open_at(server.url, tmp_path, budget, price="unknown", concurrency=1, **prices)
        with pytest.raises(Incomplete, match=r"budget of 2 USD is spent"):
            policy.sample(turns(*map(str, range(6))))
    assert len(server.requests) == 2
    assert budget.spent == 2.0


def test_a_bill_is_never_above_the_reservation_of_a_long_or_foreign_text(tmp_path: Path) -> None:
    """A byte a token, as no tokenizer does worse: characters / 3 lay below the bill and 1.5 USD became 4."""
    texts = ["x" * 3000, "龍" * 1000, "🦜" * 500]

    def dear(body: dict[str, Any], n: int) -> Reply:
        return Reply(body=answer("x", prompt_tokens=len(body["messages"][0]["content"].encode()), completion_tokens=64))

    with serving(dear) as server:
        budget = Budget(4.5, tmp_path / "ledger.jsonl")
        policy = open_at(server.url, tmp_path, budget, usd_per_mtok_in=1000.0, usd_per_mtok_out=2.0, concurrency=1)
        with pytest.raises(Incomplete, match="is spent"):
            policy.sample(turns(*texts))
    lines = [orjson.loads(line) for line in (tmp_path / "ledger.jsonl").read_bytes().splitlines()]
    bounds = {line["call"]: line["reserved"] for line in lines if "reserved" in line}
    bills = {line["call"]: line["settled"] for line in lines if "settled" in line}
    assert bills and all(bills[call] <= bounds[call] for call in bills)
    assert budget.spent <= 4.5


def test_a_bill_above_its_reservation_stops_the_run(tmp_path: Path) -> None:
    with serving(lambda body, n: Reply(body=answer("x", cost=0.25))) as server:
        budget = Budget(10.0)
        with pytest.raises(Incomplete, match=r"billed 0\.250000 USD, more than"):
            open_at(server.url, tmp_path, budget, concurrency=1).sample(turns(*map(str, range(9))))
    assert budget.spent == 0.25 * len(server.requests) <= 0.5, "one more may have been on its way"


@pytest.mark.parametrize(
    ("reply", "paid"),
    [
        (Reply(body=answer("late"), delay_s=1.0), "possibly"),
        (Reply(body=b"<html>busy</html>"), "possibly"),
        (Reply(502, {"error": {"message": "bad gateway"}}), "possibly"),
        (Reply(429, {"error": {"message": "slow down"}}, {"Retry-After": "0"}), "nothing"),
        (Reply(400, {"error": {"message": "too long"}}), "nothing"),
        (Reply(body={**answer(""), "choices": []}), "spent"),
    ],
)
def test_calls_without_an_answer_are_not_free(tmp_path: Path, reply: Reply, paid: str) -> None:
    budget = Budget(100.0)
    with serving(lambda body, n: reply) as server:
        open_at(server.url, tmp_path, budget, timeout_s=0.3, max_attempts=1).sample(turns("a"))
    assert (budget.spent > 0, budget.possibly > 0) == (paid == "spent", paid == "possibly")
    assert budget.reserved == 0


def test_a_server_that_is_not_there_costs_nothing(tmp_path: Path) -> None:
    budget = Budget(100.0)
    open_at("http://127.0.0.1:9/v1", tmp_path, budget, max_attempts=1).sample(turns("a"))
    assert (budget.spent, budget.possibly, budget.reserved) == (0.0, 0.0, 0.0)


def test_a_server_that_leaves_out_usage_is_not_free(tmp_path: Path) -> None:
    silent = {k: v for k, v in answer("four words are here").items() if k != "usage"}
    budget = Budget(100.0)
    with serving(lambda body, n: Reply(body=silent)) as server:
        (sample,) = open_at(server.url, tmp_path, budget).sample(turns("a"))
    assert sample.usage_by == "bound"
    assert sample.prompt_tokens >= len("a") and sample.completion_tokens == 64
    assert budget.spent == sample.cost_usd > 0


def test_cached_input_has_its_own_price(tmp_path: Path) -> None:
    cached = answer("x", prompt_tokens=1000, completion_tokens=10, prompt_tokens_details={"cached_tokens": 900})
    with serving(lambda body, n: Reply(body=cached)) as server:
        (sample,) = open_at(server.url, tmp_path, usd_per_mtok_cached_in=0.1).sample(turns("a"))
        (full,) = open_at(server.url, tmp_path / "other").sample(turns("a"))
    assert sample.cached_tokens == 900
    assert sample.cost_usd == pytest.approx((100 * 1.0 + 900 * 0.1 + 10 * 2.0) / 1e6)
    assert full.cost_usd == pytest.approx((1000 * 1.0 + 10 * 2.0) / 1e6)


def test_the_answer_is_durable_before_its_reservation_is_released(tmp_path: Path) -> None:
    kept_at_release: list[int] = []

    class Watching(Budget):
        def write(self, lines: Any) -> None:
            for _ in (line for line in lines if "settled" in line):
                with sqlite3.connect(tmp_path / "answers.sqlite") as cache:
                    kept_at_release.append(cache.execute("SELECT count(*) FROM answers").fetchone()[0])
            super().write(lines)

    with serving(lambda body, n: Reply(body=answer("x"))) as server:
        open_at(server.url, tmp_path, Watching(1.0), concurrency=1).sample(turns("a", "b", "c"))
    assert len(kept_at_release) == 3, kept_at_release
    assert all(kept >= released for released, kept in enumerate(kept_at_release, 1)), kept_at_release


def test_answers_in_flight_are_kept_when_another_call_stops_the_run(tmp_path: Path) -> None:
    def reply(body: dict[str, Any], n: int) -> Reply:
        refused = body["messages"][0]["content"] == "refused"
        time.sleep(0.0 if refused else 0.5)
        return Reply(402, {"error": {"message": "no"}}) if refused else Reply(body=answer("paid"))

    budget = Budget(1.0)
    with serving(reply) as server:
        policy = open_at(server.url, tmp_path, budget)
        with pytest.raises(UsageError, match="no credit"):
            policy.sample(turns("slow", "refused"))
        assert budget.spent > 0 == budget.reserved
        assert policy.sample(turns("slow"))[0].text == "paid"
    assert len(server.requests) == 2
