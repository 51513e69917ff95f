"""A server that sends its key back, in answers and in errors: no byte of it is written or shown anywhere."""

import gzip
import sqlite3
from pathlib import Path

import pyarrow.parquet as pq
from support.command_line import collect, teachers
from support.server import Reply, answer, serving

from composer_stages.redaction import MARK, Secrets

KEY = 'sk-"quoted\\and/long-0123456789'
SPELLINGS = (KEY.encode(), KEY.replace("\\", "\\\\").replace('"', '\\"').encode(), b"and/long-0123456789")


def every_byte(folder: Path) -> dict[str, bytes]:
    """All files below a folder by name, packed ones unpacked as well."""
    found = {}
    for path in (p for p in folder.rglob("*") if p.is_file()):
        found[str(path)] = path.read_bytes()
        if path.suffix == ".gz":
            found[f"{path} unpacked"] = gzip.decompress(path.read_bytes())
        if path.suffix == ".parquet":
            found[f"{path} rows"] = str(pq.read_table(path).to_pylist()).encode()
        if path.suffix == ".sqlite":
            rows = sqlite3.connect(path).execute("SELECT key, answer FROM answers").fetchall()
            found[f"{path} rows"] = str(rows).encode() + b"".join(row[1] for row in rows)
    return found


def leaks(folder: Path, *said: str) -> list[str]:
    texts = {**every_byte(folder), **{f"what was said {i}": text.encode() for i, text in enumerate(said)}}
    return [name for name, data in texts.items() if any(s in data for s in SPELLINGS)]


def test_a_key_that_a_server_sends_back_is_nowhere(composer, tmp_path):
    said = []

    def echo(body, earlier):
        if body["model"] == "refusing":
            return Reply(401, {"error": {"message": f"Incorrect API key provided: {KEY}"}})
        if body["model"] == "odd":
            return Reply(200, {"choices": [{"message": {"content": None}}], "debug": KEY, KEY: 1})
        if body["model"] == "no-json":
            return Reply(200, f"<html>{KEY}".encode(), {"Content-Type": "text/html"})
        if earlier == 0:
            return Reply(400, {"error": {"message": f"Bearer {KEY} may not ask this"}})
        return Reply(body=answer(f"I was asked with {KEY}.\n```bash\necho '{KEY}'; cat solution.py\n```"))

    with serving(echo) as server:
        key = ["-s", "policy.api_key_env=ECHO_KEY", "-s", "policy.max_attempts=1", "-v"]
        for name in ("echoing", "refusing", "odd", "no-json"):
            words = collect(server.url, *key, "-s", "max_steps=2", "-s", "samples=1", policy=name)
            done = composer(*words, ECHO_KEY=KEY)
            assert done.returncode in (2, 3), done.stderr
            said += [done.stdout, done.stderr]
            assert server.keys[-1] == f"Bearer {KEY}"
    shown = composer("show", next((tmp_path / "artifacts" / "collect").glob("2*")))
    assert MARK in str(said) + shown.stdout
    assert leaks(tmp_path / "artifacts", *said, shown.stdout) == []


def test_teachers_keys_are_kept_out_too(composer, made, tmp_path):
    with serving(lambda body, earlier: Reply(body=answer(f"{KEY} is yours"))) as server:
        table = teachers(tmp_path, server.url)
        table.write_text(table.read_text().replace("[[teachers]]", '[[teachers]]\napi_key_env = "ECHO_KEY"'))
        done = composer(
            "replay-teachers", "--teachers", table, "--from", (made / "collect" / "latest").resolve(), ECHO_KEY=KEY
        )
    assert done.returncode == 0, done.stderr
    assert leaks(tmp_path / "artifacts", done.stdout, done.stderr) == []


def test_short_values_are_no_secrets():
    secrets = Secrets()
    secrets.keep("EMPTY")
    secrets.keep("0123456789")
    assert secrets.redacted("EMPTY 0123456789") == f"EMPTY {MARK}"
    assert secrets.redacted_value({"0123456789": ["0123456789", 3, None]}) == {MARK: [MARK, 3, None]}
    assert secrets.redacted_bytes(b"x0123456789x") == f"x{MARK}x".encode()
