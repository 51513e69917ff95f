"""Secrets of the usual shapes, and what must be left alone."""

import json
import time
from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from composer_stages.formats.secrets import Redactions, clean, redact

KEY = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow{}\n-----END RSA PRIVATE KEY-----".format("A" * 40)
SECRETS = {
    "openai-key": ["sk-" + "aB3" * 16, "sk-proj-" + "a_B-3" * 12],
    "anthropic-key": ["sk-ant-api03-" + "x" * 40],
    "github-token": ["ghp_" + "a1B2" * 9, "github_pat_" + "a1_B" * 15],
    "huggingface-token": ["hf_" + "aB1" * 12],
    "aws-key": ["AKIA" + "ABCDEFGH234567XY"],
    "google-key": ["AIza" + "a" * 35],
    "slack-token": ["xoxb-" + "123456789012-abcdefghij"],
    "gitlab-token": ["glpat-" + "a" * 20],
    "jwt": ["eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0." + "a" * 43],
    "private-key": [KEY, json.dumps(KEY)[1:-1]],
}


@pytest.mark.parametrize(
    ("kind", "secret"), [(kind, secret) for kind, secrets in SECRETS.items() for secret in secrets]
)
def test_a_secret_is_replaced_by_its_kind_and_counted(kind: str, secret: str) -> None:
    counts: Counter[str] = Counter()
    assert redact(f'export KEY="{secret}" && run', counts) == f'export KEY="[redacted: {kind}]" && run'
    assert counts == {kind: 1}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://svc:hG7k2Lq9xW@db.corp.io/x", "https://svc:[redacted: url-password]@db.corp.io/x"),
        ("Authorization: Bearer q8Zr2Lw9Tn4Vb7Yc1Kd6Mf", "Authorization: Bearer [redacted: authorization]"),
        ('aws_secret_access_key = "' + "aB/1" * 10 + '"', 'aws_secret_access_key = "[redacted: aws-secret]"'),
    ],
)
def test_text_around_a_secret_is_kept(text: str, expected: str) -> None:
    assert redact(text, Counter()) == expected


@pytest.mark.parametrize(
    "text",
    [
        "#sk-container-id-1 div.sk-toggleable__content-with-a-long-name {color: black}",
        "sha256:" + "a1" * 32,
        "https://host:8080/path@v2",
        "ASIAN markets and xoxo, npm_config_cache, SG.no, eyJ",
        "from hf_hub import x; AKIA is a prefix",
        "-----BEGIN PUBLIC KEY-----\nMIIB\n-----END PUBLIC KEY-----",
        "git@github.com:owner/repo.git ssh://git@host/x",
        "http://userid:password@example.com:8080/ http://foo:b4rQuux77Zk@test",
        "https://user:pass1234@host/ ftp://joe:hunter22@server.example.org/ redis://:Zk81Lw0qPx9@localhost:6379",
        "aws_access_key_id = AKIAIOSFODNN7EXAMPLE",
        'aws_secret_access_key = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"',
        "Authorization: Basic dXNlcmlkOnBhc3N3b3Jk Authorization: Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==",
        "Authorization: Bearer aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    ],
)
def test_text_that_resembles_a_secret_is_kept(text: str) -> None:
    counts: Counter[str] = Counter()
    assert redact(text, counts) == text and not counts


@pytest.mark.parametrize("part", ["a:", "://a:", "-----BEGIN PRIVATE KEY-----", "sk-", "eyJaaaa.", "authorization: "])
def test_redaction_is_linear_in_adversarial_text(part: str) -> None:
    started = time.process_time()
    redact("://" + part * 5_000, Counter())
    assert time.process_time() - started < 5.0


def test_a_preview_shows_the_surrounding_text_and_no_secret() -> None:
    counts = Redactions()
    two = f"curl -H 'x: {SECRETS['github-token'][0]}' postgres://svc:hG7k2Lq9xW@db.corp.io/x"
    assert redact(two, counts).count("[redacted: ") == 2
    (token, password) = (preview for _, preview in counts.previews)
    assert token.startswith("curl -H 'x: [github-token, 40 characters]' postgres") and "hG7k2Lq9xW" not in token
    assert password.endswith("svc:[url-password, 10 characters]@db.corp.io/x") and "a1B2" * 3 not in password


def test_redaction_can_be_off() -> None:
    assert clean({"a": [SECRETS["github-token"][0], float("nan")]}, None) == {"a": [SECRETS["github-token"][0], None]}


def test_tool_arguments_stay_json() -> None:
    arguments = json.dumps({"command": f"curl -H 'x: {SECRETS['github-token'][0]}'", "key": KEY})
    values = json.loads(redact(arguments, Counter()))
    assert values == {"command": "curl -H 'x: [redacted: github-token]'", "key": "[redacted: private-key]"}


def test_values_that_json_or_utf8_cannot_hold_are_converted() -> None:
    value = {"a": [float("nan"), float("inf"), 2**70, True, 3, 0.5], "b\ud800": "x\udfff"}
    assert clean(value, Counter()) == {"a": [None, None, str(2**70), True, 3, 0.5], "b\ufffd": "x\ufffd"}


@settings(max_examples=40)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(alphabet=st.characters(codec="utf-8")),
        lambda v: st.lists(v) | st.dictionaries(st.text(alphabet="ab"), v),
    )
)
def test_values_without_secrets_come_back_equal(value: object) -> None:
    counts: Counter[str] = Counter()
    cleaned = clean(value, counts)
    assert counts or cleaned == value
