"""`composer view` by HTTP against the real process: what is shown, what is found, who is refused, what is escaped."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from support.command_line import command, environment
from support.runs import written
from support.view_site import (
    EVALUATION,
    HOSTILE,
    HOSTILE_RUN,
    PLOT,
    RUNNING,
    Site,
    links,
    rollout_path,
    runs,
    serving_view,
    shown,
    unit,
)

from stages.runs.artifact import Run, RunOutcome
from stages.runs.records import PAIR, TEACHER_ACTION

pytest.importorskip("starlette", reason="starlette is not installed here, so `composer view` cannot be tried")
pytest.importorskip("uvicorn", reason="uvicorn is not installed here, so `composer view` cannot be tried")


@pytest.fixture(scope="module")
def artifacts(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs(tmp_path_factory.mktemp("view") / "artifacts", made)


@pytest.fixture(scope="module")
def site(artifacts: Path) -> Iterator[Site]:
    with serving_view(artifacts) as running:
        yield running


def collected(artifacts: Path) -> str:
    return f"collect/{(artifacts / 'collect' / 'latest').resolve().name}"


def test_every_run_is_listed_and_every_link_leads_somewhere(site: Site, artifacts: Path) -> None:
    front = site.get()
    assert front.status == 200
    found, waiting, seen = 0, links(front.text), set()
    while waiting and found < 60:
        address = waiting.pop()
        seen.add(address.partition("#")[0])
        if address.startswith(("#", "?")):
            continue
        answer = site.get(whole=address.partition("#")[0])
        assert answer.status == 200, address
        found += 1
        if answer.headers["content-type"].startswith("text/html"):  # a figure links to nothing
            waiting |= {link for link in links(answer.text) if link.partition("#")[0] not in seen}
    for name in (collected(artifacts), EVALUATION, HOSTILE_RUN, RUNNING, PLOT):
        assert any(f"/run/{name}" in link for link in seen)
    assert found > 15


def test_runs_are_filtered(site: Site) -> None:
    page = shown(site.get("?stage=evaluate").text)
    assert EVALUATION in page and HOSTILE_RUN not in page and "1 of 7" in page
    assert "No run fits." in site.get("?text=no-such-run").text
    assert RUNNING in site.get("?status=running").text


@pytest.mark.parametrize(
    ("asked", "total"),
    [
        ("", 4),
        ("reward=passed", 0),
        ("reward=failed", 4),
        ("text=return+u+%2B+v", 4),
        ("text=RETURN", 4),
        ("text=no-such-text", 0),
        ("task=kata-train-0-00000", 2),
        ("hacked=on", 0),
        ("error=on", 0),
        ("offset=many&order=nonsense&reward=odd", 4),
    ],
)
def test_rollouts_are_searched(site: Site, artifacts: Path, asked: str, total: int) -> None:
    page = site.get(f"run/{collected(artifacts)}?{asked}").text
    assert len(re.findall(r"<a href=\"[^\"]*/rollout/", page)) == total
    assert (f"of {total}<" in page) if total else "No rollout fits." in page


def test_a_step_shows_the_action_the_teachers_and_the_pairs(site: Site, artifacts: Path) -> None:
    run = Run(artifacts / "collect" / "latest")
    answers = Run(artifacts / "replay-teachers" / "latest").rows(TEACHER_ACTION)
    pair = Run(artifacts / "extract-pairs" / "latest").rows(PAIR)[0]
    page = site.get(rollout_path(collected(artifacts), pair["rollout_id"])).text
    text = shown(page)
    assert text.count("tool call") == len(next(run.units())["steps"]) and "cat solution.py" in text
    assert "3 teachers' actions, 2 different" in text and "first" in text
    assert 'class="del"' in page and 'class="add"' in page, "the difference of a pair"
    assert {row["teacher"] for row in answers} == {"first", "second", "third"}
    assert pair["rule"].replace("_", " ") in text


def test_tests_that_failed_diffs_and_log_probs_are_shown(site: Site) -> None:
    page = site.get(rollout_path(HOSTILE_RUN, HOSTILE.replace("\x00", ""))).text
    assert "failed: tests/test_a.py::" in shown(page)
    assert 'class="add"' in page and 'class="del"' in page and 'class="hunk"' in page
    assert 'class="lp0" title="log-prob -0.010"' in page and 'class="lp5" title="log-prob -9.000"' in page


def test_two_arms_stand_side_by_side_and_tasks_on_which_they_part_come_first(site: Site) -> None:
    page = site.get(f"compare/{EVALUATION}?task=t-1").text
    text = shown(page)
    assert "A beside B" in text and "A did t-1" in text and "B did t-1" in text
    assert text.index("t-1", text.index("Tasks, those")) < text.index("t-0", text.index("Tasks, those"))


def test_a_training_under_way_is_drawn_and_shown_anew(site: Site, artifacts: Path) -> None:
    before = site.get(f"run/{RUNNING}").text
    assert "<body data-live>" in before and '<path d="M' in before and "reward <b>0.5</b>" in before
    assert "entropy, nats <b>2</b>" in before, "one that stays the same is drawn, too"
    with (artifacts / RUNNING / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 6, "reward": 0.9}) + "\n")
    assert "reward <b>0.9</b>" in site.get(f"run/{RUNNING}").text
    assert "data-live" not in site.get(f"run/{EVALUATION}").text


def test_a_run_under_way_shows_what_its_journal_holds(site: Site, artifacts: Path) -> None:
    folder = written(artifacts, "collect/20260102T030405Z-live-eeeeee", status="running")
    (folder / "steps").mkdir()
    lines = [json.dumps(unit(number)) for number in range(3)]
    (folder / "steps" / "000000.jsonl.open").write_text("\n".join(lines) + '\n{"torn')
    page = site.get("run/collect/20260102T030405Z-live-eeeeee").text
    assert "of 3<" in page and "live-2" in page


def test_the_figure_of_a_watched_training_is_on_its_page(site: Site, artifacts: Path) -> None:
    name = "probe-watch/20260102T030405Z-run-ffffff"
    folder = written(artifacts, name, outcome=RunOutcome(summary={"figures": ["watch"]}))
    (folder / "watch.png").write_bytes(b"png")
    assert f"figure/{name}/watch" in site.get(f"run/{name}").text and site.get(f"figure/{name}/watch").status == 200


def test_figures_of_the_probe_are_served_and_nothing_else_is(site: Site) -> None:
    figure = site.get(f"figure/{PLOT}/01_cosine_by_step")
    assert figure.status == 200 and figure.headers["content-type"] == "image/png"
    for path in (
        f"figure/{PLOT}/manifest",
        f"figure/{PLOT}/..%2Fmanifest",
        "run/..%2F../x",
        "run/collect/latest",
        "static/../app.py",
        "static/%2e%2e/app.py",
        "static/..%2f..%2fapp.py",
        f"rollout/{EVALUATION}?id=nothing",
        "nothing",
    ):
        answer = site.get(path)
        assert answer.status == 404 and b"import" not in answer.body, path


def test_nobody_without_the_token_or_from_another_name_is_answered(site: Site) -> None:
    token = site.url.split("/")[3]
    assert len(token) >= 20
    for path in ("/", "/run/x/y", f"/{token[:-1]}/", f"/{token}x/", "/static/view.js", f"/{token}"):
        answer = site.get(whole=path)
        assert answer.status == 403 and b"token" in answer.body, path
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", ""):
        assert site.get(host=host or " ").status == 400, host
    assert site.get(method="POST").status == 405


def test_every_answer_forbids_scripts_from_elsewhere_and_framing(site: Site) -> None:
    for path in ("", "static/view.js", "static/view.css", f"run/{EVALUATION}", "nothing", f"figure/{PLOT}/x"):
        headers = site.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store" and "server" not in headers
    assert "content-security-policy" in site.get(whole="/").headers


@pytest.mark.parametrize("path", ["", f"run/{HOSTILE_RUN}", rollout_path(HOSTILE_RUN, HOSTILE.replace("\x00", ""))])
def test_a_hostile_transcript_is_shown_and_obeyed_by_nobody(site: Site, path: str) -> None:
    answer = site.get(path)
    assert answer.status == 200
    assert not re.search(rb"[\x00-\x08\x0b-\x1f\x7f]", answer.body) and "\u202e" not in answer.text
    tags = re.findall(r"<(\w+)([^>]*)>", answer.text)
    assert {name for name, _ in tags if name in ("script", "img", "iframe")} <= {"script"}
    assert [rest for name, rest in tags if name == "script"] == [
        f' src="/{site.url.split("/")[3]}/static/view.js" defer'
    ]
    assert not any(re.search(r"\son\w+=|\sstyle=|javascript:", re.sub(r'"[^"]*"', '""', rest)) for _, rest in tags)
    if path:
        assert "{{ 7 * 7 }}" in shown(answer.text) and "\\x1b]0;owned\\x07\\u202e" in shown(answer.text)


def test_hostile_words_in_an_address_are_shown_too(site: Site, artifacts: Path) -> None:
    page = site.get(f"run/{collected(artifacts)}?text={quote(HOSTILE)}&task={quote(HOSTILE)}&arm={quote(HOSTILE)}").text
    assert "No rollout fits." in page and "<script>document" not in page and "\x1b" not in page


def test_a_taken_port_is_refused(site: Site, tmp_path: Path) -> None:
    port = site.url.split(":")[2].split("/")[0]
    done = subprocess.run(command("view", "--port", port), capture_output=True, text=True, env=environment(tmp_path))
    assert done.returncode == 2 and f"Port {port} cannot be used" in done.stderr and done.stdout == ""
