"""Servers that lie about what they cost: a limit holds against all of them, and what they claim is told."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.server import Reply, answer, serving

from stages.errors import ComposerError, Incomplete
from stages.policy import ask_all, available, reading
from stages.policy.base import PolicyConfig, Turn
from stages.policy.client import FREE, Failed, Response, error_of
from stages.policy.endpoint import EndpointPolicy
from stages.policy.reading import MalformedBill, least_tokens, most_words, read
from stages.policy.requests import Asked
from stages.runs.ledger import NAME, Budget, totals

LIMIT = 3.0
QUESTION = "How many of the words in this question are words that a tokenizer could take for one, do you think?"
TEXT = "word " * 60
TRUE = {"prompt_tokens": 30, "completion_tokens": 60}
"""What an honest server bills."""
LIST_PRICE = 90 * 1000 / 1e6
"""USD of one call."""
PRICES = {"usd_per_mtok_in": 1000.0, "usd_per_mtok_out": 1000.0}


def config(url: str, **more: Any) -> PolicyConfig:
    usual = {"model": "big", "concurrency": 4, "max_tokens": 64, "max_attempts": 1, "timeout_s": 20.0, **PRICES}
    return PolicyConfig(base_url=url, **{**usual, **more})


def turns(number: int) -> list[Turn]:
    return [Turn([{"role": "user", "content": f"{QUESTION} {i}"}], seed=i) for i in range(number)]


def body(usage: Any, text: Any = TEXT, **more: Any) -> dict[str, Any]:
    return {**answer(text), "usage": usage, **more}


def ask(tmp_path: Path, reply: Any, number: int = 1, limit: float | None = LIMIT, **more: Any) -> tuple[Any, ...]:
    """The answers (None where the run was stopped), the ledger's sums, and the server."""
    budget, samples = Budget(limit, tmp_path / NAME), None
    with serving(reply if callable(reply) else lambda *_: Reply(body=reply)) as server:
        policy = EndpointPolicy(config(server.url, **more), budget=budget, cache=tmp_path)
        with suppress(Incomplete):
            samples = ask_all(policy, turns(number))
    return samples, budget, server


BILLS: dict[str, Any] = {
    "honest": TRUE,
    "nothing": {"prompt_tokens": 0, "completion_tokens": 0},
    "one token": {"prompt_tokens": 1, "completion_tokens": 1},
    "negative completion": {**TRUE, "completion_tokens": -90},
    "negative prompt": {**TRUE, "prompt_tokens": -1000},
    "negative cost": {**TRUE, "cost": -1},
    "negative cost alone": {"cost": -13.68},
    "cost 0": {**TRUE, "cost": 0},
    "cost 0 alone": {"cost": 0},
    "cost of a cent": {"cost": 0.01},
    "cost false": {**TRUE, "cost": False},
    "cost true": {**TRUE, "cost": True},
    "cost as text": {**TRUE, "cost": "1e9"},
    "cost 1e308": {**TRUE, "cost": 1e308},
    "cost a list": {**TRUE, "cost": [0]},
    "tokens true": {"prompt_tokens": True, "completion_tokens": True},
    "tokens as text": {"prompt_tokens": "30", "completion_tokens": "60"},
    "tokens 1e15": {"prompt_tokens": 10**15, "completion_tokens": 10**15},
    "tokens as floats": {"prompt_tokens": 0.1, "completion_tokens": 0.1},
    "cached more than the prompt": {**TRUE, "prompt_tokens_details": {"cached_tokens": 10**9}},
    "cached less than nothing": {**TRUE, "prompt_tokens_details": {"cached_tokens": -5}},
    "cached as text": {**TRUE, "prompt_tokens_details": {"cached_tokens": "abc"}},
    "details as text": {**TRUE, "prompt_tokens_details": "abc"},
    "reasoning apart": {**TRUE, "completion_tokens": 61, "completion_tokens_details": {"reasoning_tokens": 500}},
    "reasoning negative": {**TRUE, "completion_tokens_details": {"reasoning_tokens": -500}},
    "total larger than its parts": {**TRUE, "total_tokens": 400},
    "total smaller than its parts": {**TRUE, "total_tokens": 2},
    "no usage": None,
    "usage a list": [1],
    "usage a text": "0",
    "only the prompt": {"prompt_tokens": 30},
}


@pytest.mark.parametrize("bill", BILLS.values(), ids=BILLS.keys())
def test_a_limit_holds_against_every_bill(tmp_path: Path, bill: Any) -> None:
    """Commit 46e634e served 13.68 USD under a limit of 3 where bills were negative."""
    _, budget, server = ask(tmp_path, body(bill), 120, usd_per_mtok_cached_in=0.0)
    served = LIST_PRICE * len(server.requests)
    assert budget.spent >= 0 and 0 < served <= budget.spent + budget.possibly + 1e-9 <= LIMIT + 1e-9
    assert totals(tmp_path) == pytest.approx((budget.spent, budget.possibly))


@pytest.mark.parametrize("bill", [BILLS["nothing"], BILLS["negative cost"], BILLS["negative completion"], None])
def test_an_impossible_bill_costs_the_upper_bound_and_its_answer_is_kept(tmp_path: Path, bill: Any) -> None:
    (sample,), budget, server = ask(tmp_path, body(bill))
    bound = Asked.of(server.requests[0], 4096)
    assert sample.text == TEXT and sample.usage_by == "bound"
    assert sample.cost_usd == budget.spent == bound.usd(config(server.url)) > LIST_PRICE
    assert (budget.understated, budget.understated_usd > 0) == ((0, False) if bill is None else (1, True))


def test_the_larger_of_two_amounts_counts_and_the_difference_is_told(tmp_path: Path) -> None:
    (sample,), budget, _ = ask(tmp_path, body({**TRUE, "cost": 0.01}))
    assert (sample.cost_usd, sample.claimed_usd) == (pytest.approx(LIST_PRICE), 0.01)
    again = Budget(LIMIT, tmp_path / NAME)
    for one in (budget, again):
        assert (one.understated, one.understated_usd) == (1, pytest.approx(LIST_PRICE - 0.01))


def test_reasoning_that_is_counted_apart_is_paid(tmp_path: Path) -> None:
    """Gemini's and xAI's servers leave it out of the completion tokens."""
    for number, bill in enumerate((BILLS["reasoning apart"], {**TRUE, "total_tokens": 30 + 60 + 501})):
        (sample,), _, _ = ask(tmp_path / str(number), body(bill), max_tokens=1000)
        assert sample.completion_tokens == 561 and sample.cost_usd == pytest.approx((30 + 561) / 1000)


NO_NUMBERS = (
    *("cost false", "cost true", "cost as text", "cost 1e308", "cost a list", "tokens true", "tokens as text"),
    *("tokens 1e15", "tokens as floats", "cached as text", "details as text", "usage a list", "usage a text"),
)


@pytest.mark.parametrize("name", NO_NUMBERS)
def test_a_bill_that_is_no_number_makes_an_unusable_answer(tmp_path: Path, name: str) -> None:
    (sample,), budget, server = ask(tmp_path, body(BILLS[name]), limit=None)
    assert sample.error_type == "garbage" and "malformed" in (sample.error or "")
    assert budget.spent == 0 < budget.possibly and len(server.requests) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"logprobs": {"content": [{"token": "a", "logprob": "abc"}]}},
        {"logprobs": {"content": [{"token": "a", "logprob": "-0.5"}]}},
        {"logprobs": {"content": [{"token": "a", "logprob": True}]}},
        {"logprobs": {"content": "abc"}},
        {"logprobs": {"content": [1]}},
        {"finish_reason": 5},
        {"finish_reason": {"a": 1}},
        {"message": {"content": 5}},
        {"message": {"content": [{"text": 5}]}},
        {"message": {"content": ["abc"]}},
        {"message": {"content": {"text": "a"}}},
        {"message": "abc"},
        {"message": {"content": None, "tool_calls": "abc"}},
        {"message": {"content": None, "tool_calls": [{"function": "abc"}]}},
        {"message": {"content": None, "tool_calls": [{"function": {"arguments": "{}"}}]}},
        {"message": {"content": None, "tool_calls": 7}},
    ],
)
def test_a_malformed_field_is_an_unusable_answer(tmp_path: Path, change: dict[str, Any]) -> None:
    choice = {"finish_reason": "stop", "message": {"content": TEXT}, **change}
    (sample,), budget, _ = ask(tmp_path, {"choices": [choice], "usage": TRUE}, limit=None)
    assert sample.error_type == "garbage" and budget.spent + budget.possibly > 0


@pytest.mark.parametrize("form", ["none", "qwen3", "llama3", "mistral", "deepseek", "gpt-oss"])
def test_deep_nesting_is_no_crash(tmp_path: Path, form: str) -> None:
    deep = "[" * 100_000
    marks = {"qwen3": "<tool_call>", "llama3": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}
    (sample,), _, _ = ask(
        tmp_path, body(None, f"{marks.get(form, '')}{deep}"), max_tokens=10**6, tool_calls=form, limit=None
    )
    assert sample.error_type in (None, "garbage")


def test_half_a_surrogate_pair_can_be_kept(tmp_path: Path) -> None:
    text = '<tool_call>{"name": "a", "arguments": {"x": "\\ud800"}}</tool_call>'
    (sample,), _, _ = ask(tmp_path, body(TRUE, text), tool_calls="qwen3")
    assert sample.error_type is None and "?" in sample.text


# --- answers that are no answers


STATUSES = [204, 206, 301, 302, 303, 307, 308, 400, 401, 402, 403, 404, 408, 409, 413, 418, 422, 425, 429, 498, 499]


@pytest.mark.parametrize("status", [*STATUSES, 500, 502, 503, 504, 520, 529])
def test_the_ledger_keeps_to_the_table(tmp_path: Path, status: int) -> None:
    reply = Reply(status, b"" if status == 204 else {"error": {"message": "no"}}, {"Retry-After": "0"})
    budget = Budget(100.0, tmp_path / NAME)
    with serving(lambda *_: reply) as server, suppress(ComposerError):
        ask_all(EndpointPolicy(config(server.url), budget=budget, cache=tmp_path), turns(1))
    assert len(server.requests) == 1 and budget.spent == 0 == budget.reserved
    assert (budget.possibly > 0) == (status not in FREE)


@pytest.mark.parametrize("status", [200, 400, 404])
@pytest.mark.parametrize(
    "page",
    [b"<!---->" * 25, b'{"error": {"message": "' + b"input has 1 tokens " * 2000 + b'"}}'],
    ids=["page", "message"],
)
def test_no_error_takes_long_to_read(status: int, page: bytes) -> None:
    """The first took a minute and its double for ever, the second 48 s: a regular expression tried every division."""
    began = time.process_time()
    with suppress(Failed):
        asked = Asked(1, 1)
        if status == 200:
            read(page, config("http://127.0.0.1:9/v1"), asked, latency_s=0.0, attempts=1)
        raise error_of(Response(status, {}, page), config("http://127.0.0.1:9/v1"))
    assert time.process_time() - began < 2


@pytest.mark.parametrize("code", [400, 402, 429, 503, "abc", None, True, -1, 10**12])
def test_an_error_inside_a_200_may_have_been_billed(tmp_path: Path, code: Any) -> None:
    for number, (bill, paid) in enumerate(
        [(None, "possibly"), ({**TRUE, "cost": 0.5}, "spent"), ({"cost": -1}, "possibly")]
    ):
        budget = Budget(100.0)
        failed = {"error": {"code": code, "message": "upstream died"}, "usage": bill}
        with serving(lambda *_, failed=failed: Reply(body=failed)) as server, suppress(ComposerError):
            ask_all(EndpointPolicy(config(server.url), budget=budget, cache=tmp_path / str(number)), turns(1))
        assert (budget.spent, budget.possibly > 0) == ((0.5, False) if paid == "spent" else (0, True))


# --- redirects


@pytest.mark.parametrize("status", [300, 301, 302, 303, 305, 307, 308])
def test_no_redirect_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """A loop of 307 made 63 requests for 3 calls of the ledger at commit 46e634e; other addresses got the request."""
    monkeypatch.setenv("BUDGET_KEY", "sk-a-key-that-is-nobodys")
    with serving(lambda *_: Reply(body=answer("caught"))) as other:

        def away(asked: dict[str, Any], earlier: int) -> Reply:
            del asked
            return Reply(status, b"", {"Location": f"{other.url}/chat/completions?n={earlier}"})

        with serving(away) as server:
            budget = Budget(LIMIT)
            settings = config(server.url, api_key_env="BUDGET_KEY")
            policy = EndpointPolicy(settings, budget=budget, cache=tmp_path)
            with pytest.raises(ComposerError, match=rf"answered {status}, a redirect to http://127.0.0.1") as caught:
                ask_all(policy, turns(1))
        assert (len(server.requests), other.requests, other.keys) == (1, [], [])
    assert budget.possibly > 0 and "sk-a-key" not in str(caught.value)


@pytest.mark.parametrize(
    "location", ["", "/v1/chat/completions", "http://[", "//other/v1", "ftp://x/", "http://u:p@h/"]
)
def test_odd_redirects_are_one_sentence(tmp_path: Path, location: str) -> None:
    with (
        serving(lambda *_: Reply(302, b"", {"Location": location} if location else {})) as server,
        pytest.raises(ComposerError, match="a redirect to") as caught,
    ):
        ask_all(EndpointPolicy(config(server.url), budget=Budget(), cache=tmp_path), turns(1))
    assert len(server.requests) == 1 and "u:p" not in str(caught.value)


# --- answers longer than asked for


@pytest.mark.parametrize("limit", [None, LIMIT])
@pytest.mark.parametrize("bill", [{**TRUE, "completion_tokens": 500}, TRUE, None])
def test_a_server_that_ignores_max_tokens_stops_the_run(tmp_path: Path, limit: float | None, bill: Any) -> None:
    text = TEXT if bill != TRUE else "word " * 500
    budget = Budget(limit, tmp_path / NAME)
    with serving(lambda *_: Reply(body=body(bill, text))) as server:
        settings = config(server.url, max_tokens=40, concurrency=1)
        policy = EndpointPolicy(settings, budget=budget, cache=tmp_path)
        with pytest.raises(Incomplete, match=r"answered with \d+ tokens, but at most 40 were asked for|more than the"):
            ask_all(policy, turns(20))
        assert len(server.requests) == 1 and budget.spent > 0
        assert ask_all(policy, turns(1))[0].text == text, "the answer is paid, so it is kept"


# --- what a bill is checked against


def test_the_lower_bound_is_one() -> None:
    texts = [
        "",
        "a",
        "two words",
        "  \n\t ",
        "x" * 5000,
        "foo.bar(baz)\n" * 10,
        ");\n///",
        "龍" * 1000,
        "// -- **",
        "1 2 3",
    ]
    assert [least_tokens(text) for text in texts] == [0, 1, 2, 1, 5, 10, 1, 3, 1, 1]
    assert least_tokens("\ud800") == 1


def tiny_tokenizer(folder: Path) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"[UNK]": 0, **{letter: i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz", 1)}}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return str(folder)


def test_a_known_tokenizer_finds_smaller_lies(tmp_path: Path) -> None:
    """The model's name is a folder of this machine, as where one is served by another program."""
    model = tiny_tokenizer(tmp_path / "model")
    assert reading.tokenizer(model)("a" * 100) == 100 - 2 - 5
    bill = {"prompt_tokens": 500, "completion_tokens": 65}
    (known,), _, _ = ask(tmp_path / "known", body(bill), model=model, max_tokens=200)
    (unknown,), _, _ = ask(tmp_path / "unknown", body(bill), max_tokens=200)
    assert (known.usage_by, unknown.usage_by) == ("bound", "server"), "240 letters are 240 tokens of this tokenizer"
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    assert reading.tokenizer(str(tmp_path / "broken")) is None and reading.tokenizer("a/b/c/d") is None


def test_a_bill_without_a_price_is_checked_for_sense_alone() -> None:
    settings = PolicyConfig(model="big", base_url="http://h", price="unknown")
    asked = Asked(100, 100, ({"role": "user", "content": QUESTION},))
    assert reading.cost({"usage": {**TRUE, "cost": 0.5}}, [TEXT], asked, settings)["cost_usd"] == 0.5
    void = reading.cost({"usage": {**TRUE, "cost": -0.5}}, [TEXT], asked, settings)
    assert (void["cost_usd"], void["price_known"], void["usage_by"]) == (0.0, False, "bound")
    with pytest.raises(MalformedBill, match="cost is '1', and no number"):
        reading.cost({"usage": {"cost": "1"}}, [], asked, settings)


def test_cached_input_that_is_dearer_is_reserved_at_its_price() -> None:
    settings = PolicyConfig(model="m", usd_per_mtok_in=1.0, usd_per_mtok_cached_in=5.0, usd_per_mtok_out=1.0)
    assert settings.most(10**6, 0) == 5.0 == settings.cost(10**6, 0, 10**6)


UNSEEN = (
    *("max_output_tokens", "maxTokens", "MAX_TOKENS", "max-tokens", "maxOutputTokens", "max_new_tokens", "num_predict"),
    *("n_predict", "max_length", "max_tokens_to_sample", "n", "N", "best_of", "num_return_sequences", "candidateCount"),
    *("use_beam_search", "stream", "messages", "model", "models", "prompt", "maxReasoningTokens"),
)


@pytest.mark.parametrize(
    ("where", "fields"),
    [
        (where, {name: value})
        for where in ("request", "extra_body")
        for name in ("max_tokens", "max_completion_tokens")
        for value in ("100000", 1e5, 100.5, True, 0, -1, None, [64], "64")
    ]
    + [("extra_body", {"max_tokens": False})]
    + [("extra_body", {name: 100_000}) for name in UNSEEN]
    + [("extra_body", {name: {inner: 10**6}}) for name, inner in (("options", "num_predict"), ("parameters", "n"))]
    + [("extra_body", {"extra_body": {"google": {"thinking_config": {"thinking_budget": 10**6}}}})]
    + [("extra_body", {"reasoning": {"max_tokens": value}}) for value in (10**6, "64", -1, 64.0, True)],
)
def test_what_would_lengthen_an_answer_unseen_is_refused_at_the_start(where: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"request|extra_body"):
        PolicyConfig(model="m", base_url="http://h", **{where: fields})


def test_what_bounds_an_answer_is_taken() -> None:
    taken = {
        "extra_body": {"max_completion_tokens": 500, "reasoning": {"max_tokens": 400, "effort": "high"}},
        "request": {"max_tokens": False},
    }
    assert available.longest_answer(PolicyConfig(model="m", base_url="http://h", **taken)) == 500
    schema = {"response_format": {"json_schema": {"properties": {"n": {"type": "integer"}, "max_tokens": {}}}}}
    PolicyConfig(model="m", base_url="http://h", extra_body={**schema, "provider": {"order": ["a"]}})


@given(st.text(st.characters(max_codepoint=127)) | st.text())
@example(" ".join(chr(code) + "a" for code in range(128)))
def test_the_quick_count_of_words_is_never_too_small(text: str) -> None:
    assert most_words(text) >= len(text.split())
