"""Responses read as samples, and bills checked against request and answer: a limit holds whatever a server claims."""

import json
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import orjson
import pytest
from needs import needs
from support.letters import letter_tokenizer
from support.server import Reply, answer, kept_in, serving

from composer_stages.errors import ComposerError, Incomplete
from composer_stages.messages import read as parts_of
from composer_stages.policy import ask_all
from composer_stages.policy.base import PolicyConfig, Sample, Turn
from composer_stages.policy.bills import cost, most_words, read_charge, told_cost
from composer_stages.policy.client import (
    CallError,
    MissingModel,
    RefusedError,
    RejectedError,
    Response,
    RetryableError,
    UnavailableError,
    error_of,
)
from composer_stages.policy.endpoint import EndpointPolicy
from composer_stages.policy.reading import OverlongAnswer, read
from composer_stages.policy.requests import CallBounds
from composer_stages.policy.token_counts import least_tokens, tokenizer
from composer_stages.policy.tool_calls import FORMATS
from composer_stages.runs.ledger import NAME, Budget, totals

LIMIT = 3.0
QUESTION = "How many of the words in this question are words that a tokenizer could take for one, do you think?"
TEXT = "word " * 60
TRUE = {"prompt_tokens": 30, "completion_tokens": 60}
"""What an honest server bills."""
LIST_PRICE = 90 * 1000 / 1e6
"""USD of one call."""
PRICES = {"usd_per_mtok_in": 1000.0, "usd_per_mtok_cached_in": 100.0, "usd_per_mtok_out": 1000.0}
ASKED = CallBounds(500, 64, ({"role": "user", "content": QUESTION},))
BOUND = (500, 64, 0.564)
"""Tokens and USD of a call whose bill is not believed."""


def config(url: str = "http://127.0.0.1:9/v1", **more: Any) -> PolicyConfig:
    usual = {"model": "big", "concurrency": 4, "max_tokens": 64, "max_attempts": 1, "timeout_s": 20.0, **PRICES}
    return PolicyConfig(base_url=url, **{**usual, **more})


def turns(number: int) -> list[Turn]:
    return [Turn([{"role": "user", "content": f"{QUESTION} {i}"}], seed=i) for i in range(number)]


def body(usage: Any, text: Any = TEXT, **more: Any) -> dict[str, Any]:
    return {**answer(text), "usage": usage, **more}


def read_as(found: Any, asked: CallBounds = ASKED, **more: Any) -> Sample:
    raw = found if isinstance(found, bytes) else orjson.dumps(found)
    return read(raw, config(**more), asked, latency_s=0.0, attempts=1)


def ask(tmp_path: Path, reply: dict[str, Any], number: int = 1, **more: Any) -> tuple[Any, ...]:
    """The answers (None where the run was stopped), the ledger's sums, and the server."""
    budget, samples = Budget(LIMIT, tmp_path / NAME), None
    with serving(lambda *_: Reply(body=reply)) as server:
        policy = EndpointPolicy(config(server.url, **more), budget=budget, cache=kept_in(tmp_path))
        with suppress(Incomplete):
            samples = ask_all(policy, turns(number))
    return samples, budget, server


# --- bills


FOLDER = Path(__file__).parents[2] / "fixtures" / "dialects"
BILLS = {row["bill"]: row for row in map(json.loads, (FOLDER / "bills.jsonl").read_text().splitlines())}
"""What a server bills; `counts`: tokens of prompt and answer and USD that count, null for the bound; a lower claim."""


@pytest.mark.parametrize("name", BILLS)
def test_a_possible_bill_counts_and_an_impossible_one_costs_the_bound(name: str) -> None:
    row = BILLS[name]
    counted, claimed = row["counts"], row.get("claims")
    found = cost({"usage": row.get("usage"), **row.get("beside", {})}, [TEXT], ASKED, config())
    got = [found["prompt_tokens"], found["completion_tokens"], found["cost_usd"]]
    assert got == pytest.approx(counted or [*BOUND])
    assert name == "a cost alone, above the bound" or (found["usage_by"] == "bound") is (counted is None)
    if claimed is not None:
        assert found["claimed_usd"] == pytest.approx(claimed)
    elif counted is not None:
        assert found["claimed_usd"] is None


def test_cached_and_written_tokens_have_prices_of_their_own() -> None:
    read, wrote = ({**TRUE, "prompt_tokens_details": {name: 20}} for name in ("cached_tokens", "cache_write_tokens"))
    found = cost({"usage": read}, [TEXT], ASKED, config(usd_per_mtok_cached_in=None))
    assert (found["cached_tokens"], found["cost_usd"]) == pytest.approx((20, LIST_PRICE))
    dear = config(usd_per_mtok_cache_write=2000.0)
    assert cost({"usage": wrote}, [TEXT], ASKED, dear)["cost_usd"] == pytest.approx(0.11)
    assert ASKED.max_usd(dear) == pytest.approx(1.064)


@pytest.mark.parametrize(
    ("text", "usd"),
    [
        ('"prompt_tokens": "30", "cost": 2.0', 2.0),  # also where it counts no tokens
        ('"cost": 0.5, "cost": 0.1', 0.5),
        ('"cost": 0.1, "cost": 0.5', 0.5),
        ('"cost": 0.5, "cost": null', 0.5),
        ('"cost": 0.5}, "usage": {"cost": 0.1', 0.5),
        ('"cost": 0.5}, "usage": null, "more": {"a": 1', 0.5),
        ('"prompt_tokens_details": {"cached_tokens": 20, "cached_tokens": 0}', LIST_PRICE),
    ],
)
def test_the_higher_amount_of_a_duplicate_key_counts(text: str, usd: float) -> None:
    raw = json.dumps(body({**TRUE, "last": 0})).replace('"last": 0', text)
    assert read_as(raw.encode()).cost_usd == pytest.approx(usd)


@pytest.mark.parametrize("bill", [TRUE, None, {**TRUE, "completion_tokens": -90}, {**TRUE, "cost": False}])
def test_a_limit_holds_against_any_bill(tmp_path: Path, bill: Any) -> None:
    """Commit 46e634e served 13.68 USD under a limit of 3 where bills were negative."""
    _, budget, server = ask(tmp_path, body(bill), 50)
    served = LIST_PRICE * len(server.requests)
    assert budget.spent >= 0 and 0 < served <= budget.spent + budget.possibly + 1e-9 <= LIMIT + 1e-9
    assert totals(tmp_path) == pytest.approx((budget.spent, budget.possibly))


@pytest.mark.parametrize(("claim", "counted"), [(0.01, LIST_PRICE), (-1, None)])
def test_an_answer_with_too_low_a_bill_is_kept_and_its_claim_is_in_the_ledger(
    tmp_path: Path, claim: float, counted: float | None
) -> None:
    (sample,), budget, server = ask(tmp_path, body({**TRUE, "cost": claim}))
    usd = counted or CallBounds.of_request(server.requests[0], 4096).max_usd(config())
    assert (sample.text, sample.cost_usd, sample.claimed_usd) == (TEXT, pytest.approx(usd), claim)
    assert (sample.usage_by == "bound") is (counted is None)
    for one in (budget, Budget(LIMIT, tmp_path / NAME)):
        assert (one.spent, one.understated, one.understated_usd) == pytest.approx((usd, 1, usd - max(claim, 0)))


def test_a_bill_without_list_price_is_only_checked_for_plausibility() -> None:
    settings = PolicyConfig(model="big", base_url="http://h", price="unknown")
    assert cost({"usage": {**TRUE, "cost": 0.5}}, [TEXT], ASKED, settings)["cost_usd"] == 0.5
    void = cost({"usage": {**TRUE, "cost": -0.5}}, [TEXT], ASKED, settings)
    assert (void["cost_usd"], void["price_known"], void["usage_by"]) == (0.0, False, "bound")


# --- answers that cannot be used


@pytest.mark.parametrize("change", [{"finish_reason": 5}, {"message": {"content": [{"text": 5}]}}])
def test_a_field_of_the_wrong_type_is_a_paid_unusable_answer(change: dict[str, Any]) -> None:
    """Others are rows of `dialects/answers.jsonl`."""
    choice = {"finish_reason": "stop", "message": {"content": TEXT}, **change}
    with pytest.raises(RejectedError) as caught:
        read_as({"choices": [choice], "usage": TRUE})
    assert (caught.value.kind, caught.value.billed_usd) == ("malformed", pytest.approx(LIST_PRICE))


def test_the_model_that_answered_is_recorded() -> None:
    sample = read_as({**body(TRUE), "model": "big-2026-08-01", "provider": "Somewhere"})
    assert (sample.served_model, sample.provider) == ("big-2026-08-01", "Somewhere")


def test_an_unusable_body_may_have_been_billed() -> None:
    broken_off = {"choices": [{"finish_reason": "error", "message": {"content": None}}]}
    for found in (b"nonsense", b"[1]", {"detail": "busy"}, broken_off):
        with pytest.raises(RetryableError) as caught:
            read_as(found)
        assert (caught.value.kind, caught.value.billed_usd) == ("garbage", None)
    with pytest.raises(RejectedError) as empty:
        read_as({"choices": []})
    assert (empty.value.kind, empty.value.billed_usd) == ("no_text", None)


@pytest.mark.parametrize("form", ["none", *FORMATS])
def test_deep_nesting_does_not_crash_the_reader(form: str) -> None:
    marks = {"qwen3": "<tool_call>", "llama3": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}
    text = marks.get(form, "") + "[" * 100_000
    with suppress(RetryableError):
        assert read_as(body(None, text), CallBounds(500, 10**6), tool_calls=form).error_type is None


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (b"\xef\xbb\xbf%s", "abc"),
        (b'%s, "n": NaN', "abc"),
        (b'%s, "n": -' + b"1" * 5000, "abc"),
        (b"%s", "a\ud800c"),
        (b"%s", "a\xffc"),
    ],
    ids=["byte order mark", "NaN", "a number of 5,000 digits", "half a surrogate pair", "not UTF-8"],
)
def test_a_paid_answer_in_sloppy_json_is_read(found: bytes, text: str) -> None:
    raw = json.dumps(body(TRUE, text)).replace("\\u00ff", "\xff").encode("latin-1")
    sample = read_as(found.replace(b"%s", raw[:-1]) + b"}")
    assert sample.text in ("abc", "a?c", "a\ufffdc") and sample.cost_usd == pytest.approx(LIST_PRICE)


NEST = "[" * 990 + "]" * 990
"""Python reads so many lists in each other, and has no text for them."""


@pytest.mark.parametrize(
    "found",
    [
        '{"choices": [], "extra": %s}',
        '{"detail": %s}',
        '{"error": %s}',
        '{"error": {"message": %s}}',
        '{"choices": [{"finish_reason": %s, "message": {"content": "x"}}]}',
        '{"choices": [{"message": {"content": null}}], "usage": {"prompt_tokens": %s}}',
    ],
)
def test_a_body_beyond_pythons_nesting_is_a_typed_error(found: str) -> None:
    raw = (found % NEST).encode()
    with pytest.raises(CallError):
        read_as(raw)
    assert isinstance(error_of(Response(400, {}, raw), config()), RejectedError)


def test_half_a_surrogate_pair_can_be_kept(tmp_path: Path) -> None:
    text = '<tool_call>{"name": "a", "arguments": {"x": "\\ud800"}}</tool_call>'
    (sample,), _, _ = ask(tmp_path, body(TRUE, text), tool_calls="qwen3")
    assert sample.error_type is None and "?" in sample.text


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (400, RejectedError),
        (402, UnavailableError),
        (429, RetryableError),
        ("abc", RetryableError),
        (True, RetryableError),
    ],
)
def test_an_error_inside_a_200_may_have_been_billed(code: Any, kind: type[CallError]) -> None:
    for usage, billed in ((None, None), ({**TRUE, "cost": 0.5}, 0.5), ({"cost": -1}, None)):
        with pytest.raises(kind) as caught:
            read_as({"error": {"code": code, "message": "upstream died"}, "usage": usage})
        assert caught.value.billed_usd == (0.0 if billed is None and kind is UnavailableError else billed)


# --- other statuses

STATUSES: dict[int, tuple[type[CallError], str | None]] = {
    204: (RejectedError, "rejected"),
    307: (RefusedError, None),
    400: (RejectedError, "rejected"),
    401: (RefusedError, None),
    402: (UnavailableError, None),
    404: (MissingModel, None),
    408: (RetryableError, "server"),
    413: (RejectedError, "context"),
    429: (RetryableError, "rate_limit"),
    500: (RetryableError, "server"),
    501: (RejectedError, "rejected"),
    503: (RetryableError, "server"),
    524: (RetryableError, "server"),
}


@pytest.mark.parametrize("status", STATUSES)
def test_a_status_is_an_error_and_free_only_where_it_refuses_before_any_work(status: int) -> None:
    error = error_of(Response(status, {"retry-after": "3"}, b'{"error": {"message": "the reason"}}'), config())
    kind, word = STATUSES[status]
    assert type(error) is kind and getattr(error, "kind", None) == word
    assert status == 307 or "the reason" in str(error)
    assert error.billed_usd == (0.0 if status in {401, 402, 404, 413, 429} else None)
    if isinstance(error, RetryableError):
        assert (error.wait_s, error.pushes_back) == (3.0, status in {429, 503})


@pytest.mark.parametrize(
    ("more", "usd"),
    [
        ({"usage": {**TRUE, "cost": 0.5}}, 0.5),
        ({"usage": TRUE}, LIST_PRICE),
        ({"cost": 0.5}, 0.5),
        ({"error": {"message": "no", "usage": {"cost": 0.5}}}, 0.5),
        ({"usage": {"prompt_tokens": 0, "completion_tokens": 0, "cost": 0}}, "by status"),
        ({"usage": None}, "by status"),
        ({"usage": {**TRUE, "cost": -0.5}}, None),
        ({"usage": {**TRUE, "completion_tokens": "60"}}, None),
    ],
)
@pytest.mark.parametrize("status", [400, 404, 429, 500])
def test_a_refusal_costs_what_the_server_says_that_it_charged(status: int, more: Any, usd: Any) -> None:
    """A server that billed its refusals was owed 27.36 USD, of which the ledger knew nothing."""
    response = Response(status, {}, orjson.dumps({"error": {"message": "no"}, **more}))
    error = error_of(response, config(), lambda of, free: read_charge(of.body, free, bounds=ASKED, config=config()))
    expected = (0.0 if status in {404, 429} else None) if usd == "by status" else usd
    assert error.billed_usd == (expected if expected is None else pytest.approx(expected))


def test_what_a_refusal_was_billed_counts_against_the_limit(tmp_path: Path) -> None:
    refusal = Reply(429, {"error": {"message": "slow"}, "usage": {**TRUE, "cost": 0.25}}, {"Retry-After": "0"})
    budget = Budget(LIMIT, tmp_path / NAME)
    with serving(lambda *_: refusal) as server:
        policy = EndpointPolicy(config(server.url, max_attempts=3), budget=budget, cache=kept_in(tmp_path))
        (sample,) = ask_all(policy, turns(1))
        assert (sample.error_type, len(server.requests)) == ("rate_limit", 3)
    assert totals(tmp_path) == pytest.approx((0.75, 0.0)) and budget.spent == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("status", "page"),
    [
        (200, b"<!---->" * 25),
        (404, b"<!---->" * 25),
        (400, b'{"error": {"message": "' + b"input has 1 tokens " * 2000 + b'"}}'),
    ],
)
def test_error_messages_are_parsed_in_linear_time(status: int, page: bytes) -> None:
    """The first took a minute and its double for ever, the last 48 s: a regular expression tried every division."""
    began = time.process_time()
    with suppress(CallError):
        read_as(page) if status == 200 else error_of(Response(status, {}, page), config())
    assert time.process_time() - began < 2


def test_no_redirect_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop of 307 made 63 requests for 3 calls of the ledger at commit 46e634e; other addresses got the request."""
    monkeypatch.setenv("BUDGET_KEY", "sk-a-key-that-is-nobodys")
    budget = Budget(LIMIT)
    with serving(lambda *_: Reply(body=answer("caught"))) as other:
        away = Reply(307, b"", {"Location": f"{other.url}/chat/completions"})
        with serving(lambda *_: away) as server:
            settings = config(server.url, api_key_env="BUDGET_KEY")
            with pytest.raises(ComposerError, match=r"a redirect to http://127\.0\.0\.1") as caught:
                ask_all(EndpointPolicy(settings, budget=budget, cache=kept_in(tmp_path)), turns(1))
        assert (len(server.requests), other.requests, other.keys) == (1, [], [])
    assert budget.possibly > 0 and "sk-a-key" not in str(caught.value)


@pytest.mark.parametrize("location", [None, "/v1/chat/completions", "http://[", "http://u:p@h/"])
def test_malformed_redirects_are_refused(location: str | None) -> None:
    error = error_of(Response(302, {} if location is None else {"location": location}, b""), config())
    assert isinstance(error, RefusedError) and "a redirect to" in str(error) and "u:p" not in str(error)


# --- answers longer than asked for


@pytest.mark.parametrize(
    ("bill", "words", "tokens"), [({**TRUE, "completion_tokens": 500}, 60, 500), (TRUE, 500, 500), (None, 500, 500)]
)
def test_an_overlong_answer_is_detected_by_bill_or_text(bill: Any, words: int, tokens: int) -> None:
    with pytest.raises(OverlongAnswer, match=f"{tokens} tokens"):
        read_as(body(bill, "word " * words))
    assert read_as(body({**TRUE, "completion_tokens": 66})).text == TEXT, "some servers count what ends an answer"
    with pytest.raises(OverlongAnswer):
        read_as(body({**TRUE, "completion_tokens": 67}))


@pytest.mark.parametrize("limit", [None, LIMIT])
def test_a_server_that_ignores_max_tokens_stops_the_run(tmp_path: Path, limit: float | None) -> None:
    budget = Budget(limit, tmp_path / NAME)
    with serving(lambda *_: Reply(body=body(None, "word " * 500))) as server:
        settings = config(server.url, max_tokens=40, concurrency=1)
        policy = EndpointPolicy(settings, budget=budget, cache=kept_in(tmp_path))
        with pytest.raises(Incomplete, match=r"500 tokens.*40"):
            ask_all(policy, turns(20))
        assert len(server.requests) == 1 and budget.spent > 0
        assert ask_all(policy, turns(1))[0].text == "word " * 500, "the answer is paid, so it is kept"


@pytest.mark.parametrize(
    ("prices", "limit", "bill", "stops"),
    [
        ({}, None, TRUE, False),
        ({"usd_per_mtok_in": 0.0, "usd_per_mtok_out": 0.0}, LIMIT, TRUE, False),
        ({}, None, {**TRUE, "cost": 0.01}, True),
        ({"price": "unknown"}, LIMIT, TRUE, True),
    ],
)
def test_long_answers_of_a_free_server_are_kept_with_one_notice(
    tmp_path: Path, prices: dict[str, Any], limit: float | None, bill: Any, stops: bool
) -> None:
    free = {"usd_per_mtok_in": None, "usd_per_mtok_out": None, "max_tokens": 40, "concurrency": 1}
    told = list[str]()
    with serving(lambda *_: Reply(body=body({**bill, "completion_tokens": 500}, "word " * 500))) as server:
        policy = EndpointPolicy(
            config(server.url, **{**free, **prices}),
            budget=Budget(limit, tmp_path / NAME),
            cache=kept_in(tmp_path),
            listener=lambda what, done, total: told.append(what),
        )
        with pytest.raises(Incomplete, match=r"500 tokens.*40") if stops else nullcontext():
            assert [one.text for one in ask_all(policy, turns(3))] == ["word " * 500] * 3
    assert sum("500 tokens" in one for one in told) == (not stops)


# --- what a bill is checked against


def test_least_tokens_of_known_texts() -> None:
    texts = {"": 0, "a": 1, "two words": 2, "  \n\t ": 1, "// -- **": 1, "\ud800": 1}
    texts |= {"x" * 5000: 5, "foo.bar(baz)\n" * 10: 10, "龍" * 1000: 3}
    assert {text: least_tokens(text) for text in texts} == texts


def test_padding_and_truncation_of_a_tokenizer_are_ignored(tmp_path: Path) -> None:
    """Filled up to 512, every honest bill was below its answer, and cost the upper bound."""
    filling = {"strategy": {"Fixed": 512}, "direction": "Right", "pad_to_multiple_of": None}
    filling |= {"pad_id": 27, "pad_type_id": 0, "pad_token": "?"}
    cutting = {"direction": "Right", "max_length": 10, "strategy": "LongestFirst", "stride": 0}
    model = letter_tokenizer(tmp_path / "model", padding=filling, truncation=cutting)
    assert tokenizer(model)("a" * 100) == 100 - 2 - 5


def test_a_known_tokenizer_detects_smaller_understatements(tmp_path: Path) -> None:
    """The model's name is a folder of this machine, as where one is served by another program."""
    model = letter_tokenizer(tmp_path / "model")
    assert tokenizer(model)("a" * 100) == 100 - 2 - 5
    bill = body({"prompt_tokens": 500, "completion_tokens": 65})
    known, unknown = (read_as(bill, CallBounds(1000, 200), model=name) for name in (model, "big"))
    assert (known.usage_by, unknown.usage_by) == ("bound", "server"), "240 letters are 240 tokens of this tokenizer"
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    assert tokenizer(str(tmp_path / "broken")) is None and tokenizer("a/b/c/d") is None


def test_the_quick_count_of_words_is_never_too_small() -> None:
    texts = [f"a{chr(i)}b{chr(j)}{chr(i)}c" for i in range(128) for j in range(128)]
    texts += [*map(chr, range(128)), "", "a".join(map(chr, (*range(0xD800), *range(0xE000, 0x20000))))]
    assert all(most_words(text) >= len(text.split()) for text in texts)


# --- what headers and a public table say


@pytest.mark.parametrize(("told", "usd"), [("0.25", 0.25), ("0", 0.0), ("None", 0.0), ("-1", 0.0), ("1e99", 0.0)])
def test_a_header_of_litellms_proxy_is_what_the_server_charged(tmp_path: Path, told: str, usd: float) -> None:
    """Of a model without a price, LiteLLM 1.108 sends none; of a refusal, 0."""
    free = {"usd_per_mtok_in": None, "usd_per_mtok_out": None, "concurrency": 1}
    headers, budget = {"x-litellm-response-cost": told}, Budget(0.4, tmp_path / NAME)
    with serving(lambda *_: Reply(body=body(TRUE), headers=headers)) as server:
        settings = config(server.url, price="unknown", **free)
        # Without a bill no limit can be kept: the first answer is the last.
        with pytest.raises(Incomplete):
            ask_all(EndpointPolicy(settings, budget=budget, cache=kept_in(tmp_path)), turns(3))
        assert budget.spent == pytest.approx(2 * usd) and len(server.requests) == (2 if usd else 1)
        (kept,) = ask_all(EndpointPolicy(settings, budget=Budget(), cache=kept_in(tmp_path)), turns(1))
        assert (kept.cost_usd, kept.price_known) == (usd, usd > 0) and len(server.requests) == (2 if usd else 1)
    refusal = Response(429, {**headers}, b'{"error": {"message": "no"}}')
    told_usd = told_cost(refusal.headers)
    assert read_charge(refusal.body, True, bounds=ASKED, config=config(), told_usd=told_usd) == usd


GOOGLE = "https://generativelanguage.googleapis.com"
PROVIDERS = {
    # model and host; tokens of the prompt, of those cached and written, of the answer
    "OpenAI": ("gpt-4o-mini", "https://api.openai.com/v1", (1000, 100, 500, 0)),
    "OpenRouter": ("qwen/qwen3-coder", "https://openrouter.ai/api/v1", (1000, 100, 0, 0)),
    "Anthropic, written": ("claude-sonnet-4-5", "https://api.anthropic.com/v1", (1000, 100, 200, 300)),
    "Google, a higher tier": (
        "gemini-2.5-pro",
        "https://generativelanguage.googleapis.com/v1beta/openai",
        (300_000, 9, 0, 0),
    ),
}


@needs("prices")
@pytest.mark.parametrize("name", PROVIDERS)
def test_a_known_model_of_a_known_host_is_priced_by_the_tables_own_arithmetic(name: str) -> None:
    from genai_prices import Usage, calc_price

    model, url, (prompt, completion, cached, written) = PROVIDERS[name]
    counts = {"input_tokens": prompt, "output_tokens": completion}
    counts |= {"cache_read_tokens": cached, "cache_write_tokens": written}
    theirs = float(calc_price(Usage(**counts), model, provider_api_url=url).total_price)
    known = PolicyConfig(model=model, base_url=url, max_tokens=64)
    assert known.priced and known.has_price and known.table and known.table.source.startswith("genai-prices ")
    assert known.cost(prompt, completion, cached, written) == pytest.approx(theirs, rel=1e-12) and theirs > 0
    assert ASKED.max_usd(known) >= known.cost(500, 64)
    assert known.cost(10, 0, 99, 99) == pytest.approx(known.cost(10, 0, 10, 0)), "more cached than there is"


@needs("prices")
@pytest.mark.parametrize(
    "more",
    [
        {"model": "my-finetune"},
        {"model": "gpt-4o-mini", "base_url": "http://127.0.0.1:9/v1"},
        {"model": "gpt-4o-mini", "base_url": "https://my.company/v1"},
        {"model": "gpt-4o-mini", "price": "unknown"},
        {"model": "gpt-4o-mini", "base_url": "https://api.openai.com.evil/v1"},
        {"model": "gemini-2.5-pro", "base_url": "https://evil.com/x.googleapis.com/v1"},
        {"model": "kimi-k2-0905-preview", "base_url": "https://api.moonshot.evil.com/v1"},
        {"model": "sonar", "base_url": "https://api.perplexity.ai"},  # it charges by the request, too
    ],
)
def test_what_the_table_does_not_know_has_no_price(more: dict[str, Any]) -> None:
    unknown = PolicyConfig(**{"base_url": "https://api.openai.com/v1", "max_tokens": 64, **more})
    assert not unknown.priced and not unknown.has_price and unknown.cost(1000, 1000) == 0


@needs("prices")
def test_a_servers_own_amount_counts_before_a_table_and_prices_of_settings_before_both() -> None:
    known = {"model": "gpt-4o-mini", "base_url": "https://api.openai.com/v1", "max_tokens": 64}
    (listed, told, own) = (
        cost({"usage": {**TRUE, **amount}}, [TEXT], ASKED, PolicyConfig(**known, **prices))
        for amount, prices in (({}, {}), ({"cost": 1e-6}, {}), ({"cost": 1e-6}, PRICES))
    )
    assert listed["cost_usd"] == pytest.approx((30 * 0.15 + 60 * 0.6) / 1e6) and listed["price_known"]
    assert (told["cost_usd"], told["claimed_usd"]) == (pytest.approx(1e-6), None)
    assert own["cost_usd"] == pytest.approx(LIST_PRICE)


def test_numbers_of_calls_are_kept_to_the_digit() -> None:
    """orjson makes floats of integers beyond 64 bits, and refuses those that no float holds."""
    numbers = {"n": 2**64 + 1, "m": 10**400, "small": 7}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": numbers}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    found = {**body(TRUE, None), "choices": [{"finish_reason": "tool_calls", "index": 0, "message": message}]}
    sample = read_as(json.dumps(found).encode(), CallBounds(500, 10**6))
    assert sample.error_type is None and json.loads(parts_of(sample.text).calls[0].arguments) == numbers
