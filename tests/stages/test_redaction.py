"""A key that comes back in another encoding is redacted before it is stored, and what is not a key is left alone."""

import base64
import html
import json
import random
import sqlite3
import time
from pathlib import Path
from urllib.parse import quote

import pytest
from support.server import Reply, answer, kept_in, serving

from composer_stages import redaction
from composer_stages.policy import ask_all
from composer_stages.policy.base import PolicyConfig, Turn
from composer_stages.policy.endpoint import EndpointPolicy
from composer_stages.redaction import MARK, Secrets
from composer_stages.runs.ledger import Budget

KEYS = {
    "plain": "sk-or-v1-0123456789abcdef0123456789abcdef0123456789abcdef",
    "quoted": 'sk-"quoted\\and/long-0123456789',
    "foreign": "pässwort-mit-ümlaut-🦜x",
    "short": "k-12345678",
}


def encodings(key: str) -> dict[str, str]:
    """The key as a program could write it."""
    data = key.encode()
    points = [ord(c) for c in key]
    utf16 = key.encode("utf-16-be").hex()
    escaped = "".join(f"\\u{utf16[i : i + 4]}" for i in range(0, len(utf16), 4))
    found = {
        "itself": key,
        "JSON": json.dumps(key),
        "JSON in JSON": json.dumps(json.dumps(key)),
        "escapes of JSON": escaped,
        "escapes in JSON": json.dumps(escaped),
        "some escapes": "".join(f"\\u{ord(c):04x}" if i % 3 == 1 and c < "\uffff" else c for i, c in enumerate(key)),
        "one escape": f"\\u{points[0]:04X}{json.dumps(key[1:], ensure_ascii=False)[1:-1]}",
        "escapes of Python": "".join(f"\\x{byte:02x}" for byte in data),
        "octal": "".join(f"\\{byte:03o}" for byte in data),
        "braces": "".join(f"\\u{{{point:x}}}" for point in points),
        "entities": "".join(f"&#{point};" for point in points),
        "hex entities": "".join(f"&#x{point:X};" for point in points),
        "HTML": html.escape(key),
        "URL": quote(key, safe=""),
        "all of URL": "".join(f"%{byte:02X}" for byte in data),
        "URL in URL": quote("".join(f"%{byte:02x}" for byte in data)),
        "hex": data.hex(),
        "HEX": data.hex().upper(),
        "hex with colons": data.hex(":"),
        "hex with spaces": data.hex(" ").upper(),
        "bytes": ", ".join(f"0x{byte:02x}" for byte in data),
        "reversed": key[::-1],
    }
    for before in range(3):
        for behind in range(3):
            text = b"Key: "[:before] + data + b"; x"[:behind]
            found[f"base64 {before} {behind}"] = base64.b64encode(text).decode()
            found[f"base64 of URLs {before} {behind}"] = base64.urlsafe_b64encode(text).decode()
            found[f"wrapped base64 {before} {behind}"] = json.dumps(base64.encodebytes(b"x" * 45 + text).decode())
    for before in range(5):
        found[f"base32 {before}"] = base64.b32encode(b"abcd"[:before] + data).decode()
        found[f"BASE32 {before}"] = found[f"base32 {before}"].lower()
    if len(key) >= redaction.LONG:
        found |= {"spelled out": " ".join(key), "hyphens": "-".join(key), "a list": json.dumps(list(key))}
    return found


@pytest.mark.parametrize("name", KEYS)
def test_a_key_is_found_in_every_encoding(name: str) -> None:
    secrets = Secrets()
    secrets.keep("another-key-of-this-run")
    secrets.keep(KEYS[name])
    for what, text in encodings(KEYS[name]).items():
        for around in ("{}", "begin {} end", '{{"error":"{}"}}'):
            said = around.format(text)
            assert MARK in secrets.redacted(said), what
            assert MARK.encode() in secrets.redacted_bytes(said.encode()), what
            assert str(secrets.redacted_value({"a": [said]})).count(MARK) == 1, what


def test_other_texts_are_unchanged() -> None:
    secrets, rng = Secrets(), random.Random(0)
    for key in KEYS.values():
        secrets.keep(key)
    for _ in range(150):
        text = "".join(chr(rng.choice((rng.randrange(32, 127), rng.randrange(32, 0x2FF)))) for _ in range(200))
        numbers = json.dumps([rng.randrange(256) for _ in range(40)])
        for said in (text, numbers, base64.b64encode(text.encode()).decode(), text.encode().hex(), json.dumps(text)):
            assert secrets.redacted(said) == said and secrets.redacted_bytes(said.encode()) == said.encode()
    assert secrets.redacted("1 2 3 4 5 6 7 8 k 12345678") == "1 2 3 4 5 6 7 8 k 12345678"


@pytest.mark.parametrize("part", ["\\", "%25", "&#", "\\u0073", "s k ", "736b", "sk-", "MDEy", " "])
def test_redaction_is_fast_on_hostile_texts(part: str) -> None:
    secrets = Secrets()
    secrets.keep(KEYS["plain"])
    started = time.process_time()
    for text in (part * 20_000, part * 20_000 + KEYS["plain"][::-1]):
        secrets.redacted_bytes(text.encode())
    assert time.process_time() - started < 5.0


@pytest.mark.parametrize("place", ["content", "reasoning", "error", "header"])
def test_encoded_key_of_a_server_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setenv("ENCODED_KEY", KEYS["plain"])
    found = encodings(KEYS["plain"]).items()
    forms = [text for what, text in found if "JSON" not in what and not ("base" in what.lower() and "0" not in what)]

    def echo(body: dict, earlier: int) -> Reply:
        text = forms[earlier]
        if place == "error":
            return Reply(400, {"error": {"message": text}})
        if place == "header":
            return Reply(302, b"", {"Location": f"http://{quote(text)}/"})
        said = answer(text if place == "content" else "no")
        said["choices"][0]["message"]["reasoning"] = text
        return Reply(body=said)

    with serving(echo) as server:
        served = {"model": "m", "base_url": server.url, "api_key_env": "ENCODED_KEY"}
        settings = PolicyConfig(**served, concurrency=1, max_tokens=9999)
        policy = EndpointPolicy(settings, budget=Budget(None, tmp_path / "ledger.jsonl"), cache=kept_in(tmp_path))
        for number, text in enumerate(forms):
            turn = Turn([{"role": "user", "content": f"What is key {number}?"}], seed=0)
            try:
                said = str(ask_all(policy, [turn]))
            except Exception as error:
                said = str(error)
            assert text not in said and (MARK in said or place == "header"), text
    with sqlite3.connect(tmp_path / "own" / "answers.sqlite") as file:
        kept = b"".join(row[0] for row in file.execute("SELECT answer FROM answers"))
    file.close()
    assert not [text for text in forms if text.encode() in kept or json.dumps(text)[1:-1].encode() in kept]
