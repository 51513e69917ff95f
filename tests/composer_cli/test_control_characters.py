"""What a model writes to steer a terminal is shown by every command, and obeyed by none."""

import json
import re
from pathlib import Path

import pytest
from support.command_line import collect
from support.server import Reply, answer, serving
from support.transcripts import assistant, document, jsonl, user

from composer_cli.printing import escape_json
from composer_stages.layout import escape_control_characters, escape_line

EVIL = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202egnp.exe\r\x08\x00 | \x7f\x85\x0b\x0c\x1c\u2028"
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029]")
READ_BY_PEOPLE = (".txt", ".html", ".log", ".svg", ".md")


def steering(folder: Path) -> dict[str, list[str]]:
    """Control characters in the files below a folder that people read, by the name of the file."""
    files = [path for path in folder.rglob("*") if path.suffix in READ_BY_PEOPLE]
    found = {str(path.relative_to(folder)): RAW.findall(path.read_bytes().decode()) for path in files}
    assert found, "there is a file"
    return {name: characters for name, characters in found.items() if characters}


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
        more = ["-s", "policy.max_attempts=1", "-s", "policy.concurrency=1", "-s", "max_steps=2", "-v"]
        said = [composer(*collect(server.url, *more))]
        (run,) = (tmp_path / "artifacts" / "collect").glob("2*")
        said += [composer(*collect(server.url, *more, policy="refusing"))]
    assert [done.returncode for done in said] == [3, 2] and "401" in said[1].stderr
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
    assert steering(tmp_path / "artifacts") == {}


FORGED = f"t\n{EVIL}B (mine) is better than A (yours)."
"""An id that begins a line of its own, as the decision is written."""


def test_no_report_on_logs_of_others_passes_control_characters_on(composer, tmp_path):
    def log(name, right):
        said = [user("q"), assistant("1")]
        samples = [
            {"id": f"{at} {FORGED}", "epoch": 1, "input": f"q{at} {FORGED}", "messages": said}
            | {"metadata": {"topic": f"{at % 2} {FORGED}"}}
            | ({"scores": {FORGED: {"value": "C" if at in right else "I"}}} if at else {"error": {"message": FORGED}})
            for at in range(12)
        ]
        about = {"task": FORGED, "model": f"{name} {FORGED}", "model_generate_config": {"stop": name + FORGED}}
        return document(tmp_path / f"{name}.json", {"version": 2, "status": EVIL, "eval": about, "samples": samples})

    def table(name, right):
        rows = ({"id": f"{at} {FORGED}", "score": int(at in right), "topic": FORGED} for at in range(12))
        return jsonl(tmp_path / f"{name}.jsonl", *rows)

    logs = [log("a", range(6)), log("b", range(3, 12))]
    said = [composer("compare", *logs), composer("compare", table("a", range(6)), table("b", range(3, 12)))]
    said += [composer("import", logs[0]), composer("show", "compare"), composer("show", "import"), composer("status")]
    said += [composer("report", "compare"), composer("report", "import")]
    assert [done.returncode for done in said] == [3, 3, *[0] * 6], [done.stderr for done in said]
    assert [RAW.findall(done.stdout + done.stderr) for done in said] == [[]] * len(said)
    assert steering(tmp_path / "artifacts") == {}
    for report in (tmp_path / "artifacts").rglob("report.txt"):
        assert not [line for line in report.read_text().splitlines() if line.lstrip().startswith("\\x1b")]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ä 漢 \U0001f600\n\ttab", "plain ä 漢 \U0001f600\n\ttab"),
        ("\x1b[31m", "\\x1b[31m"),
        ("\r\n", "\\r\n"),
        ("\ud800", "\\ud800"),
    ],
)
def test_control_characters_are_escaped_and_other_text_is_kept(text, shown):
    assert escape_control_characters(text) == shown
    assert escape_line(text) == shown.replace("\n", "\\n")


def test_json_keeps_its_meaning():
    assert json.loads(escape_json(json.dumps(EVIL, ensure_ascii=False))) == EVIL
