"""What a run does about refusals: fields left out, addresses, one forbidden input, an empty account, proxies, TLS."""

import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pydantic
import pytest
from support.loopback import Handler, listening
from support.server import Reply, answer, kept_in, serving

from composer_stages import endings
from composer_stages.errors import ComposerError, InfrastructureError, UsageError
from composer_stages.policy import ask_all
from composer_stages.policy.base import PolicyConfig, Sample, Turn
from composer_stages.policy.client import proxy_of
from composer_stages.policy.endpoint import EndpointPolicy
from composer_stages.runs.ledger import Budget


def open_at(url: str, folder: Path, **more: Any) -> EndpointPolicy:
    said = more.pop("said", None)
    config = PolicyConfig(**{"model": "m", "base_url": url, "max_tokens": 64, "max_attempts": 2, **more})
    listener = None if said is None else lambda what, done, total: said.append(str(what))
    return EndpointPolicy(config, budget=Budget(), cache=kept_in(folder), listener=listener)


def asked(policy: EndpointPolicy, *texts: str) -> list[Sample]:
    return ask_all(policy, [Turn([{"role": "user", "content": text}], seed=i) for i, text in enumerate(texts)])


def refusing(**fields: str) -> Any:
    """A server that refuses these fields, each with this message."""

    def reply(body: dict[str, Any], earlier: int) -> Reply:
        refused = next((name for name in fields if name in body), None)
        return Reply(400, {"error": {"message": fields[refused]}}) if refused else Reply(body=answer("x"))

    return reply


@pytest.mark.parametrize(
    ("fields", "sent"),
    [
        ({"seed": "Unrecognized request argument supplied: seed"}, {"max_tokens", "temperature"}),
        ({"max_tokens": "Unsupported parameter: 'max_tokens'."}, {"max_completion_tokens", "temperature", "seed"}),
        ({"temperature": "'temperature' is deprecated"}, {"max_tokens", "seed"}),
        ({"seed": "unknown field `seed`", "temperature": "temperature is not supported"}, {"max_tokens"}),
    ],
)
def test_a_refused_field_is_learnt_once_and_named(tmp_path: Path, fields: dict[str, str], sent: set[str]) -> None:
    said = list[str]()
    with serving(refusing(**fields)) as server:
        policy = open_at(server.url, tmp_path, concurrency=1, said=said)
        assert [sample.text for sample in asked(policy, *"abcdefg")] == ["x"] * 7
        assert len(server.requests) == 7 + len(fields)
    assert server.requests[-1].keys() - {"model", "messages"} == sent
    for name in fields:
        assert sum(f"policy.request.{name}=false" in line for line in said) == 1
    assert policy.facts()["refused_fields"] == sorted(fields)


@pytest.mark.parametrize(
    ("fields", "more"),
    [
        ({"temperature": "'temperature' does not support 0.5. Only the default (1) value is supported."}, {}),
        ({"max_tokens": "Range of max_tokens should be [1, 32]"}, {}),
        (
            {
                "max_tokens": "max_tokens is unsupported",
                "max_completion_tokens": "it is unknown: max_completion_tokens",
            },
            {},
        ),
    ],
)
def test_a_refused_field_that_shapes_answers_stops_the_run(tmp_path: Path, fields: Any, more: Any) -> None:
    with serving(refusing(**fields)) as server:
        with pytest.raises(UsageError) as caught:
            asked(open_at(server.url, tmp_path, temperature=0.5, concurrency=1), *"abcdefg")
        assert len(server.requests) <= 2
    assert caught.value.code == "policy.field-refused" and caught.value.values["field"] in fields


@pytest.mark.parametrize("status", [400, 200])
def test_empty_messages_are_sent_as_text_once_a_server_refuses_them(tmp_path: Path, status: int) -> None:
    """Anthropic, Mistral, Bedrock and Gemini take none; OpenAI and local servers get what the model said."""
    refusal = Reply(status, {"error": {"code": 400, "message": "messages.1: must have non-empty content"}})
    takes_none, said = [True], list[str]()

    def reply(body: dict[str, Any], earlier: int) -> Reply:
        blank = any(not (message["content"] or message.get("tool_calls")) for message in body["messages"])
        return refusal if blank and takes_none[0] else Reply(body=answer("x"))

    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "b"}]
    turns = [Turn(talk, seed) for seed in range(4)]
    with serving(reply) as server:
        policy = open_at(server.url, tmp_path, concurrency=1, said=said)
        assert [sample.text for sample in ask_all(policy, turns)] == ["x"] * 4 and len(server.requests) == 5
        assert [message["content"] for message in server.requests[-1]["messages"]] == ["a", "(empty)", "b"]
        assert sum("(empty)" in line for line in said) == 1 and policy.facts()["refused_fields"] == ["messages"]
        takes_none[0] = False
        assert ask_all(open_at(server.url, tmp_path / "other"), turns[:1])[0].text == "x"
    assert server.requests[-1]["messages"] == talk


def test_thoughts_are_sent_back_once_a_server_refuses_answers_without_them(tmp_path: Path) -> None:
    """DeepSeek V4 and Kimi K2 Thinking want them; other servers refuse the field."""

    def reply(body: dict[str, Any], earlier: int) -> Reply:
        bare = any("reasoning_content" not in m for m in body["messages"] if m["role"] == "assistant")
        fault = {"message": "The `reasoning_content` in the thinking mode must be passed back to the API."}
        return Reply(400, {"error": fault}) if bare else Reply(body=answer("x"))

    said = list[str]()
    answers = [{"role": "assistant", "content": text} for text in ("<think>\nwhy\n</think>\n\nship", "shop")]
    user = {"role": "user", "content": "a"}
    turns = [Turn([user, answers[0], user, answers[1], user], seed) for seed in range(4)]
    with serving(reply) as server:
        policy = open_at(server.url, tmp_path, concurrency=1, said=said)
        assert [sample.text for sample in ask_all(policy, turns)] == ["x"] * 4
    first, *later = ([m for m in body["messages"] if m["role"] == "assistant"] for body in server.requests)
    assert [message["content"] for message in first] == ["ship", "shop"] and len(later) == 4
    assert [[m["reasoning_content"] for m in sent] for sent in later] == [["why", ""]] * 4
    assert sum("reasoning_content" in line for line in said) == 1


def test_an_answer_of_thoughts_alone_is_named_once(tmp_path: Path) -> None:
    """Where a parser of reasoning stands before a model that does not think, no answer is left."""
    body, said = answer(""), list[str]()
    body["choices"][0]["message"] |= {"content": None, "reasoning_content": "It is 7."}
    with serving(lambda asked, earlier: Reply(body=body)) as server:
        assert {sample.text for sample in asked(open_at(server.url, tmp_path, said=said), *"abc")} == {""}
    assert sum("It is 7." in line for line in said) == 1


def test_a_call_that_the_server_has_not_read_is_named_once(tmp_path: Path) -> None:
    said, text = list[str](), '{"name": "guess", "arguments": {"word": "a"}}'
    with serving(lambda body, earlier: Reply(body=answer(text))) as server:
        samples = asked(open_at(server.url, tmp_path, tool_calls="native", said=said), *"abc")
    assert {(sample.text, sample.finish_reason) for sample in samples} == {(text, endings.MALFORMED)}
    assert sum("policy.tool_calls=" in line and "guess" in line for line in said) == 1


def test_an_end_at_the_limit_is_told_once(tmp_path: Path) -> None:
    """Some servers say `stop` of what they have cut."""
    said = list[str]()
    with serving(lambda body, earlier: Reply(body=answer("a", 10, 5))) as server:
        samples = asked(open_at(server.url, tmp_path, max_tokens=5, said=said), *"abc")
    assert [sample.finish_reason for sample in samples] == ["stop"] * 3
    assert sum("5 tokens, the most that it may have, with 'stop'" in line for line in said) == 1


PAGE = "<!DOCTYPE html><title>Blocked</title>"


POLICY = Reply(400, {"error": {"message": "content policy"}})


@pytest.mark.parametrize(
    "forbidden", [Reply(403, {"error": {"message": "flagged"}}), Reply(403, PAGE.encode()), POLICY]
)
def test_a_forbidden_input_is_lost_alone(tmp_path: Path, forbidden: Reply) -> None:
    def reply(body: dict[str, Any], earlier: int) -> Reply:
        return forbidden if body["messages"][0]["content"] in "ab" else Reply(body=answer("x"))

    with serving(reply) as server:
        samples = asked(open_at(server.url, tmp_path, concurrency=1), *"abcd")
    assert [sample.error_type for sample in samples] == ["rejected", "rejected", None, None]
    assert len(server.requests) == 4
    assert bool(server.probes) == (forbidden is not POLICY), "a plain question told the input from the server"


@pytest.mark.parametrize("status", [200, 405])
def test_a_firewalls_page_for_the_first_input_loses_it_alone(tmp_path: Path, status: int) -> None:
    """It ended the run as a wrong address, as nothing had been answered yet."""

    def reply(body: dict[str, Any], earlier: int) -> Reply:
        return Reply(status, PAGE.encode()) if body["messages"][0]["content"] == "a" else Reply(body=answer("x"))

    with serving(reply) as server:
        samples = asked(open_at(server.url, tmp_path, concurrency=1), *"abc")
    assert [sample.error_type for sample in samples] == ["garbage", None, None] and len(server.probes) == 1


def test_a_server_that_forbids_everything_stops_the_run(tmp_path: Path) -> None:
    no = Reply(403, {"error": {"message": "no access to this model"}})
    with serving(lambda *_: no, probed=lambda *_: no) as server:
        with pytest.raises(UsageError) as caught:
            asked(open_at(server.url, tmp_path, concurrency=2), *map(str, range(30)))
        assert len(server.requests) <= 10
    assert caught.value.code == "policy.request-refused"


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (429, {"type": "insufficient_quota", "code": "insufficient_quota", "message": "You exceeded your quota"}),
        (400, {"code": "Arrearage", "message": "Access denied"}),
        (400, {"type": "invalid_request_error", "message": "Your credit balance is too low"}),
        (402, {"message": "Payment required"}),
        (403, {"message": "余额不足"}),
        (200, {"message": "Insufficient credits", "code": 402}),
        (200, {"message": "Access denied", "code": "Arrearage"}),
    ],
)
def test_an_empty_account_stops_at_once(tmp_path: Path, status: int, error: dict[str, Any]) -> None:
    with serving(lambda *_: Reply(status, {"error": error})) as server:
        with pytest.raises(InfrastructureError) as caught:
            asked(open_at(server.url, tmp_path, concurrency=4), *map(str, range(20)))
        assert len(server.requests) <= 4
    assert caught.value.code == "policy.account-empty" and error["message"] in caught.value.values["message"]
    assert caught.value.values["status"] in (status, 402), "never one that no server sent"


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, {"base_resp": {"status_code": 2049, "status_msg": "invalid api key"}}),
        (200, {"code": "InvalidApiKey", "message": "Invalid API-key provided."}),
        (200, {"code": 401, "msg": "令牌已过期或验证不正确", "success": False}),
        (400, {"error": {"message": "API key not valid. Please pass a valid API key."}}),
        (200, {"error": "Unauthorized", "code": "401"}),
        (401, {"error": {"message": "no such user"}}),
    ],
)
def test_a_refused_key_stops_at_once_whatever_its_status(tmp_path: Path, status: int, body: dict[str, Any]) -> None:
    with serving(lambda *_: Reply(status, body)) as server:
        with pytest.raises(UsageError) as caught:
            asked(open_at(server.url, tmp_path, concurrency=4), *map(str, range(20)))
        assert len(server.requests) <= 4
    assert caught.value.code == "policy.key-refused" and "policy.api_key_env" in str(caught.value)


@pytest.mark.parametrize(
    ("status", "error", "text"),
    [
        (500, {"message": "Failed to parse tool call arguments as JSON: a quote is missing"}, ""),
        (400, {"code": "tool_use_failed", "message": "Failed.", "failed_generation": "<function=x"}, "<function=x"),
    ],
)
def test_a_call_that_the_server_cannot_read_is_the_models(tmp_path: Path, status: int, error: Any, text: str) -> None:
    with serving(lambda *_: Reply(status, {"error": error})) as server:
        (sample,) = asked(open_at(server.url, tmp_path), "a")
        assert len(server.requests) == 1
    assert (sample.error_type, sample.finish_reason, sample.text) == (None, endings.MALFORMED, text)
    assert error["message"] in (sample.error or "")


def test_a_refusal_of_no_table_is_told_as_not_understood(tmp_path: Path) -> None:
    with serving(lambda *_: Reply(400, {"error": {"message": "The flux capacitor is missing."}})) as server:
        (sample,) = asked(open_at(server.url, tmp_path), "one two three")
        assert len(server.requests) == 1 and sample.error_type == "rejected"
    assert all(words in (sample.error or "") for words in ("flux capacitor", "in no table", "at least 3 tokens"))


# Addresses


class Api(Handler):
    """An API below /api/v1; other paths are pages, or not found."""

    lists = True

    def get(self) -> None:
        listed = self.lists and self.path == "/api/v1/models"
        self.send(*((200, {"data": [{"id": "m"}]}) if listed else (404, {"detail": "Not Found"})))

    def post(self) -> None:
        self.body()
        right = self.path == "/api/v1/chat/completions"
        self.send(*((200, answer("x")) if right else (404, {"detail": "Not Found"})))


class Unlisted(Api):
    lists = False


@pytest.mark.parametrize("api", [Api, Unlisted])
@pytest.mark.parametrize("path", ["/api", "/api/", "/api/v1/v1", "/api/v1/chat"])
def test_a_wrong_address_names_the_one_to_use(tmp_path: Path, path: str, api: type[Api]) -> None:
    with listening(api) as url:
        with pytest.raises(UsageError) as caught:
            asked(open_at(url + path, tmp_path), "a")
        assert (caught.value.code, caught.value.values["address"]) == ("policy.other-address", f"{url}/api/v1")
        assert caught.value.values["known"] == api.lists
        assert asked(open_at(f"{url}/api/v1/", tmp_path), "a")[0].text == "x"


@pytest.mark.parametrize("call", ["/chat/completions", "/chat/completions/", "/completions?a=b", "/messages"])
def test_the_address_of_a_call_is_refused_with_the_one_to_use(call: str) -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        PolicyConfig(model="m", base_url=f"http://h/v1{call}", max_tokens=64)
    assert f"give http://h/v1{'?a=b' if '?' in call else ''}" in str(caught.value)


def test_a_query_of_the_address_comes_last(tmp_path: Path) -> None:
    paths = list[str]()

    class Seen(Handler):
        def post(self) -> None:
            self.body()
            paths.append(self.path)
            self.send(200, answer("x"))

    with listening(Seen) as url:
        asked(open_at(f"{url}/deployments/m?api-version=2024-10-21", tmp_path), "a")
    assert paths == ["/deployments/m/chat/completions?api-version=2024-10-21"]


CHUNK = b'{"object": "chat.completion.chunk", "choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}]}'


@pytest.mark.parametrize("stream", [b"data: %s\n\ndata: [DONE]\n\n", b": ping\n\nevent: e\ndata: %s\n\n", b"%s"])
def test_a_streamed_body_is_named_and_its_setting_accepted(tmp_path: Path, stream: bytes) -> None:
    stream = stream.replace(b"%s", CHUNK)
    with serving(lambda *_: Reply(body=stream)) as server:
        with pytest.raises(UsageError) as caught:
            asked(open_at(server.url, tmp_path, extra_body={"stream": False}), "a")
        assert caught.value.code == "policy.answer-is-stream" and len(server.requests) == 1
    assert server.requests[0]["stream"] is False


# Proxies and TLS


@pytest.mark.parametrize(
    ("no_proxy", "proxy"),
    [
        ("", "http://127.0.0.1:9"),
        ("127.0.0.1", None),
        ("localhost,127.0.0.0/8", None),
        ("*", None),
        ("10.0.0.0/8", "http://127.0.0.1:9"),
    ],
)
def test_a_dead_proxy_is_named_and_no_proxy_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_proxy: str, proxy: str | None
) -> None:
    monkeypatch.setenv("http_proxy", "127.0.0.1:9")
    monkeypatch.setenv("no_proxy", no_proxy)
    with serving(lambda *_: Reply(body=answer("x"))) as server:
        assert proxy_of(server.url) == proxy
        policy = open_at(server.url, tmp_path)
        if proxy is None:
            assert asked(policy, "a")[0].text == "x"
            return
        with pytest.raises(InfrastructureError) as caught:
            asked(open_at(server.url, tmp_path, max_attempts=3), "a")
    assert (caught.value.code, caught.value.values["proxy"]) == ("policy.server-refuses-connections", proxy)


@pytest.mark.parametrize(("no_proxy", "is_exempt"), [("a, ::1", True), ("[::1]", True), ("fd00::/8", False)])
def test_no_proxy_names_addresses_of_ipv6(monkeypatch: pytest.MonkeyPatch, no_proxy: str, is_exempt: bool) -> None:
    monkeypatch.setenv("http_proxy", "127.0.0.1:9")
    monkeypatch.setenv("no_proxy", no_proxy)
    assert (proxy_of("http://[::1]:8000/v1") is None) is is_exempt


@pytest.mark.parametrize("scheme", ["socks5", "socks4", "ftp"])
def test_a_proxy_of_another_kind_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    monkeypatch.setenv("all_proxy", f"{scheme}://127.0.0.1:9")
    with pytest.raises(ComposerError) as caught:
        asked(open_at("http://127.0.0.1:9/v1", tmp_path, max_attempts=3), "a")
    assert caught.value.values["proxy"] == f"{scheme}://127.0.0.1:9"


@contextmanager
def with_tls(folder: Path) -> Iterator[str]:
    """The address of a server with a certificate that it signed itself."""
    names = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost", *names]
    subprocess.run(words, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"https://127.0.0.1:{server.server_port}/v1"
    server.shutdown()


def test_a_certificate_that_is_not_trusted_ends_at_once(tmp_path: Path) -> None:
    with with_tls(tmp_path) as url, pytest.raises(UsageError) as caught:
        asked(open_at(url, tmp_path, max_attempts=6), "a")
    assert caught.value.code == "policy.certificate-not-trusted" and "SSL_CERT_FILE" in str(caught.value)


def test_a_server_without_tls_is_named_with_its_address(tmp_path: Path) -> None:
    with serving(lambda *_: Reply(body=answer("x"))) as server, pytest.raises(UsageError) as caught:
        asked(open_at(server.url.replace("http:", "https:"), tmp_path, max_attempts=6), "a")
    assert (caught.value.code, caught.value.values["address"]) == ("policy.no-tls", server.url)
