"""What a model writes to steer a terminal is shown by every command, and obeyed by none."""

import json
import re
from pathlib import Path

import pytest
from support.command_line import collect
from support.server import Reply, answer, serving

from composer_cli.printing import escape_control_characters, escape_json, escape_line

EVIL = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202egnp.exe\r\x08\x00 | \x7f\x85\x0b\x0c\x1c\u2028"
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2028\u2029]")


def test_no_command_passes_control_characters_on(composer, tmp_path):
    refused = []

    def steer(body, earlier):
        if body["model"] == "refusing":
            return Reply(401, {"error": {"message": f"no {EVIL} key"}})
        if len(body["messages"]) > 2 and not refused:  # the second turn of some rollout, which so has a first
            refused.append(earlier)
            return Reply(400, {"error": {"message": f"no {EVIL} answer"}})
        return Reply(body=answer(f"title: {EVIL}\n```bash\nprintf '\\033[2J\\233'; echo\n```"))

    with serving(steer) as server:
        words = collect(
            server.url, "-s", "policy.max_attempts=1", "-s", "policy.concurrency=1", "-s", "max_steps=2", "-v"
        )
        said = [composer(*words)]
        (run,) = (tmp_path / "artifacts" / "collect").glob("2*")
        said += [composer(*words, "-s", "policy.model=refusing")]
    assert [done.returncode for done in said] == [3, 2]
    sql = "select action, observation from steps"
    said += [composer("show", run, "-n", 4), composer("show", run, "-n", 4, "--json"), composer("status")]
    said += [composer("query", sql), composer("query", sql, "--json"), composer("status", "--json")]
    said += [composer("query", "select chr(27) || '[2J' as x"), composer("show", "no\x1b[2Jthing")]
    said += [composer("query", "select * from no_such_\x1b[2J")]
    assert [RAW.findall(done.stdout + done.stderr) for done in said] == [[]] * len(said)
    assert "\\x1b[2J\\x1b]0;owned\\x07\\x9b31m\\u202egnp.exe\\r" in said[2].stdout
    rows = json.loads(said[6].stdout)["rows"]
    assert any(EVIL in row["action"] for row in rows)
    reported = composer("report", run, "--json")
    page = json.loads(reported.stdout)
    html, twin = (Path(page[name]).read_bytes().decode() for name in ("html", "json"))
    assert RAW.findall(html) == [] and "\\x1b[2J" in html
    assert not re.search("[\x00-\x08\x0b-\x1f]", twin)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ä 漢 \U0001f600\n\ttab", "plain ä 漢 \U0001f600\n\ttab"),
        ("\x1b[31m", "\\x1b[31m"),
        ("\r\n", "\\r\n"),
        ("\ud800", "\\ud800"),
    ],
)
def test_what_steers_is_spelled_and_the_rest_stays(text, shown):
    assert escape_control_characters(text) == shown
    assert escape_line(text) == shown.replace("\n", "\\n")


def test_json_keeps_its_meaning():
    assert json.loads(escape_json(json.dumps(EVIL, ensure_ascii=False))) == EVIL
