"""Two thousand calls to a server with 30 % faults: each ends in an answer or a reason, and the ledger is kept."""

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.server import Reply, answer, kept_in, serving

from composer_stages import endings
from composer_stages.policy import ask_all
from composer_stages.policy.base import PolicyConfig, Turn
from composer_stages.policy.endpoint import EndpointPolicy
from composer_stages.runs.ledger import NAME, Budget, totals

CALLS = 2000
CUT = {**answer("half"), "choices": [{"finish_reason": "length", "message": {"content": "half"}}]}
SILENT = {**answer(""), "choices": [{"finish_reason": "content_filter", "message": {"content": None}}]}
FAULTS: dict[str, Reply] = {
    "overloaded": Reply(429, {"error": {"message": "slower"}}, {"Retry-After": "0.01"}),
    "broken": Reply(500, {"error": {"message": "oops"}}, {"Retry-After": "0.01"}),
    "proxy": Reply(502, b"<html>bad gateway</html>"),
    "full": Reply(503, {"error": {"message": "full"}}, {"Retry-After": "0"}),
    "rejected": Reply(400, {"error": {"message": "too long"}}),
    "error in a 200": Reply(200, {"error": {"code": 502, "message": "provider"}}),
    "no JSON": Reply(200, b"<html>"),
    "no choices": Reply(200, {"choices": []}),
    "cut": Reply(200, CUT),
    "silent": Reply(200, SILENT),
    "too slow": Reply(200, answer("late"), delay_s=1.5),
    "cut off": Reply(200, b'{"choices": ['),
}


KINDS = {"rejected", "no_text", "malformed", "garbage", "server", "rate_limit", "timeout", "connection"}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_call_ends_in_an_answer_or_a_reason(tmp_path: Path) -> None:
    random, sent = Random(0), Counter[str]()

    def reply(body: dict[str, Any], earlier: int) -> Reply:
        fault = random.choice(list(FAULTS)) if earlier and random.random() < 0.3 else "none"
        sent[fault] += 1
        return FAULTS[fault] if fault != "none" else Reply(body=answer(body["messages"][0]["content"].upper()))

    budget = Budget(100.0, tmp_path / NAME)
    with serving(reply) as server:
        prices = {"usd_per_mtok_in": 1.0, "usd_per_mtok_out": 1.0, "max_tokens": 64}
        more = {"concurrency": 32, "timeout_s": 1.0, "max_attempts": 3}
        config = PolicyConfig(model="m", base_url=server.url, **prices, **more)
        policy = EndpointPolicy(config, budget=budget, cache=kept_in(tmp_path))
        ask_all(policy, [Turn([{"role": "user", "content": "first"}], seed=0)])  # after an answer, pages are repeated
        asked = [Turn([{"role": "user", "content": f"q{i}"}], seed=i) for i in range(CALLS)]
        samples = ask_all(policy, asked)
        launched = len(server.requests)
        assert all(sent[fault] > 10 for fault in FAULTS)
        again = ask_all(policy, [turn for turn, one in zip(asked, samples, strict=True) if one.error_type is None])
        assert len(server.requests) == launched, "what was answered is not bought again"

    assert len(samples) == CALLS and len(again) > 0.9 * CALLS
    for index, sample in enumerate(samples):
        if sample.error_type is None:
            expected = {"length": "half", endings.FILTERED: ""}.get(sample.finish_reason, f"Q{index}")
            assert sample.text == expected
        else:
            assert sample.error and sample.error_type in KINDS
    spent, possibly = totals(tmp_path) or (0.0, 0.0)
    paid = sum(sample.cost_usd for sample in samples)
    assert spent == pytest.approx(budget.spent) and spent >= paid > 0 and budget.reserved == 0
    assert possibly > 0 and spent + possibly <= 100.0
