"""`composer view` by HTTP against the real process: what is shown, what is found, who is refused, what is escaped."""

import json
import re
import shutil
import time
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient
from support.command_line import call
from support.elements import Elements
from support.runs import written
from support.view_site import (
    EVALUATION,
    HOSTILE,
    HOSTILE_RUN,
    PLOT,
    RUNNING,
    Site,
    links,
    multiplied,
    rollout_path,
    runs,
    serving_view,
    shown,
    unit,
)

from composer_cli.view.app import build, page_of
from composer_cli.view.notes import Note
from composer_cli.view.page import markdown
from composer_stages.errors import UsageError
from composer_stages.messages import MessageParts, ToolCall, write
from composer_stages.rollouts.history import SUMMARY_REQUEST
from composer_stages.rollouts.trace import pairs_with_states
from composer_stages.runs import store
from composer_stages.runs.kinds import ORIGIN, PAIR, ROLLOUT, STEP, TASK, TEACHER_ACTION
from composer_stages.runs.run import Run, RunOutcome

PAGE = f"compare/{EVALUATION}?side=second"
"""The page that the command is asked for."""


@pytest.fixture(scope="module")
def artifacts(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs(tmp_path_factory.mktemp("view") / "artifacts", made)


@pytest.fixture(scope="module")
def site(artifacts: Path) -> Iterator[Site]:
    with serving_view(artifacts, PAGE) as running:
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


def test_runs_are_sorted_by_a_column_and_found_by_environment_and_model(site: Site, artifacts: Path) -> None:
    def listed(query: str) -> list[str]:
        return re.findall(r'class="name"><a href="[^"]*/run/([^"]+)"', site.get(query).text)

    assert listed("?sort=run") == sorted(listed("")) and listed("?sort=no-such-column") == listed("?sort=age")
    assert collected(artifacts) in listed("?text=kata%3Astudent") or collected(artifacts) in listed("?text=kata")


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


def test_tables_of_other_stages_have_names_and_what_a_reader_can_read_comes_first(site: Site, artifacts: Path) -> None:
    name = (artifacts / "replay-teachers" / "latest").resolve().name
    page = site.get(f"run/replay-teachers/{name}").text
    heads = re.findall(r"<th>([^<]+)</th>", page[page.index("<h3>Teacher actions</h3>") :])
    assert "<h3>teacher_action/" not in page
    assert heads[:2] == ["teacher", "action"] and heads.index("step") < heads.index("state sha256")


def test_a_step_shows_the_action_the_teachers_and_the_pairs(site: Site, artifacts: Path) -> None:
    run = Run(artifacts / "collect" / "latest")
    answers = Run(artifacts / "replay-teachers" / "latest").rows(TEACHER_ACTION)
    pair = Run(artifacts / "extract-pairs" / "latest").rows(PAIR)[0]
    page = site.get(rollout_path(collected(artifacts), pair["rollout_id"])).text
    text = shown(page)
    actions = [step["action"].split("\n")[1] for step in next(run.units())["steps"]]
    assert all(action in text for action in actions) and 'class="call"' not in page, "an action is shown once"
    assert "3 teachers' actions, 2 different" in text and "first" in text
    assert 'class="del"' in page and 'class="add"' in page, "the difference of a pair"
    assert {row["teacher"] for row in answers} == {"first", "second", "third"}
    assert pair["rule"].replace("_", " ") in text


def test_failed_tests_diffs_and_log_probs_are_shown(site: Site) -> None:
    page = site.get(rollout_path(HOSTILE_RUN, HOSTILE.replace("\x00", ""))).text
    assert "failed: tests/test_a.py::" in shown(page)
    assert 'class="add"' in page and 'class="del"' in page and 'class="hunk"' in page
    assert 'class="lp0" title="log-prob -0.010"' in page and 'class="lp5" title="log-prob -9.000"' in page


def test_the_chosen_arms_stand_side_by_side_and_tasks_on_which_they_part_come_first(site: Site) -> None:
    text = shown(site.get(f"compare/{EVALUATION}?task=t-1").text)
    assert "A and B, task by task" in text and "A did t-1" in text and "B did t-1" in text
    listed = text[text.index("the largest differences first") :]
    assert "B passes more often on 1, A on 0, no difference on 1" in text
    assert listed.index("t-1") < listed.index("t-0") and "family of t-1" in listed and "do t-1" in listed
    assert "+100.0" in listed and "0 of 1" in listed and "1 of 1" in listed
    swapped = shown(site.get(f"compare/{EVALUATION}?a=B&b=A&task=t-1").text)
    assert "B and A, task by task" in swapped and "\u2212100.0" in swapped
    assert "A passes more often on 0, B on 1" in swapped
    assert "A and B, task by task" in shown(site.get(f"compare/{EVALUATION}?a=nobody&b=<script>").text)
    assert site.get(f"compare/{HOSTILE_RUN}").status == 404


@pytest.mark.parametrize(
    ("asked", "tasks"),
    [
        ("side=second", ["t-1"]),
        ("side=first", []),
        ("side=equal", ["t-0"]),
        ("family=family+of+t-0", ["t-0"]),
        ("text=T-1", ["t-1"]),
        ("text=%25", []),
        ("side=odd", ["t-1", "t-0"]),
    ],
)
def test_tasks_of_two_arms_are_filtered(site: Site, asked: str, tasks: list[str]) -> None:
    page = site.get(f"compare/{EVALUATION}?{asked}").text
    listed = page[page.index('id="tasks"') :]
    assert [task for task in ("t-1", "t-0") if f">{task}</a>" in listed] == tasks


def test_an_evaluation_begins_with_its_verdict_and_its_failures_are_one_click_away(site: Site) -> None:
    page = site.get(f"run/{EVALUATION}").text
    text = shown(page)
    order = [text.index(words) for words in ("Shown", "Not shown", "Differences between arms", "By family", "Rollouts")]
    assert order == sorted(order) and "no arm that only imitates" in text
    buttons = re.findall(r'<a class="button"[^>]*>([^<]*)<', page)
    assert not [words for words in buttons if "task by task" in words], "there is no arm C to compare with"
    (link,) = re.findall(r'<a class="button" href="([^"]+)">B passed, A failed: 1 task<', page)
    opened = site.get(whole=unescape(link))
    assert opened.status == 200 and "B did t-1" in shown(opened.text) and "A did t-1" in shown(opened.text)
    assert re.search(r">family of t-1</a></td><td class=\"n good\">\+100.0<", page)


def test_a_list_of_rollouts_shows_the_prompt_and_the_chosen_columns(site: Site, artifacts: Path) -> None:
    page = site.get(f"run/{collected(artifacts)}").text
    summed = re.sub(r"\s+", " ", shown(page[page.index('class="facts summary"') : page.index('id="rollouts"')]))
    assert "kata, train tasks" in summed and "0 of 4, 0.0 %" in summed and re.search(r"all \d+ passed", summed)
    assert f"composer replay-teachers --from {collected(artifacts)}" in summed
    tasks = {row["task_id"]: row["prompt"] for row in Run(artifacts / "collect" / "latest").rows(TASK)}
    assert all(prompt.splitlines()[0][:60] in shown(page) for prompt in tasks.values())
    chosen = site.get(f"run/{collected(artifacts)}?col=task_id&col=tokens&col=nonsense").text
    table = chosen[chosen.index('class="list rollouts"') :]
    heads = [re.sub("<[^>]*>", "", head) for head in re.findall(r"<th[^>]*>(.*?)</th>", table)]
    assert heads[:5] == ["reward", "outcome", "rollout", "task", "tokens"]
    kept = site.get(f"run/{collected(artifacts)}?col=task_id&col=family&reward=failed").text
    assert "reward=failed&amp;col=task_id&amp;col=family" in kept, "links within the list keep columns and filters"


def test_pairs_are_cards_with_their_difference_in_the_shared_state(site: Site, artifacts: Path) -> None:
    run = Run(artifacts / "extract-pairs" / "latest")
    rows = run.rows(PAIR)
    page = site.get(f"run/extract-pairs/{run.path.resolve().name}").text
    text = shown(page)
    assert page.count('<article class="card"') == len(rows)
    first = rows[0]
    assert first["chosen_by"][0] in text and first["rule"].replace("_", " ") in text
    assert "mark>" in page and 'class="add"' in page and 'class="del"' in page
    state = next(r for r in pairs_with_states(run) if r["pair_id"] == first["pair_id"])
    last = json.loads(state["messages_json"])[-1]["content"]
    assert last.splitlines()[0] in text, "the shared state"
    outcome = next(
        r for r in Run(artifacts / "collect" / "latest").rows(ROLLOUT) if r["rollout_id"] == first["rollout_id"]
    )
    assert f"reward {outcome['reward']:.4g}" in text
    (link,) = {
        link
        for link in links(page)
        if quote(first["rollout_id"], safe="") in link and link.endswith(f"step-{first['step']}")
    }
    assert site.get(whole=link.partition("#")[0]).status == 200


def test_pairs_are_filtered_by_kind_teacher_family_action_and_text(site: Site, artifacts: Path) -> None:
    run = Run(artifacts / "extract-pairs" / "latest")
    rows, path = run.rows(PAIR), f"run/extract-pairs/{run.path.resolve().name}"

    def listed(asked: str) -> int:
        return site.get(f"{path}?{asked}").text.count('<article class="card"')

    for rule in {row["rule"] for row in rows}:
        assert listed(f"rule={rule}") == sum(row["rule"] == rule for row in rows)
    for who in ("first", "second", "third", "student"):
        fitting = [row for row in rows if who in (row["chosen_by"] or []) or row["rejected_by"] == who]
        assert listed(f"teacher={who}") == len(fitting)
    assert listed(f"family={quote(rows[0]['family'], safe='')}") == sum(r["family"] == rows[0]["family"] for r in rows)
    kinds = [{re.match(r"```bash\n(\w+)", row[side])[1] for side in ("chosen", "rejected")} for row in rows]
    for kind in set.union(*kinds):
        assert listed(f"action={kind}") == sum(kind in one for one in kinds)
    assert listed(f"text={quote(rows[0]['pair_id'])}") == 1 and listed("text=no-such-text") == 0
    assert (
        "There are only" in site.get(f"{path}?offset=9999").text and "No pair fits" in site.get(f"{path}?rule=x").text
    )


def test_curves_of_several_trainings_are_drawn_on_top_of_each_other(site: Site, artifacts: Path) -> None:
    config = {"policy": {"model": "m"}, "env": {"name": "e"}}
    names = []
    for arm, seed in (("A", 0), ("A", 1), ("B", 0)):
        names.append(f"train/20260103T03040{len(names)}Z-kata-{arm}{seed}")
        folder = written(artifacts, names[-1], config={**config, "arm": arm, "seed": seed})
        rows = [{"step": step, "reward": step / 9 + seed} for step in range(4)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = site.get(f"run/{names[0]}").text
    (link,) = re.findall(r'<a class="button" href="([^"]+)">3 trainings on top', page)
    drawn = site.get(whole=unescape(link)).text
    titles = re.findall(r"<title>([^<]+)</title></path>", drawn)
    assert titles == ["arm A, seed 0", "arm A, seed 1", "arm B, seed 0", "arm A, mean of 2 seeds"]
    assert drawn.count('class="c1 d0 thin"') == 2 and drawn.count('<path class="c2 d0"') == 1
    assert "<body data-live>" not in drawn
    two = site.get(f"curves?run={names[0]}&run={names[2]}&run=train/nothing").text
    assert re.findall(r"<title>([^<]+)</title></path>", two) == ["arm A, seed 0", "arm B, seed 0"]
    assert site.get(f"curves?run={RUNNING}").text.count("<body data-live>") == 1


@pytest.mark.parametrize(
    ("configs", "labels"),
    [
        (({"lr": 1}, {"lr": 2}), ["A, lr 1, seed 0", "A, lr 2, seed 0"]),
        (({"size": {"lr": 1}}, {}), ["A, lr 1, seed 0", "A, lr none, seed 0"]),
        (({}, {}), ["A, kata0, seed 0", "A, kata1, seed 0"]),
        (({}, {"seed": 1}), ["A, seed 0", "A, seed 1", "A, mean of 2 seeds"]),
        (({"policy": {"model": "a"}}, {"policy": {"model": "b"}, "seed": 1}), ["A, seed 0", "A, seed 1"]),
        (({}, {"arm": "B", "lr": 2}), ["A, seed 0", "B, seed 0"]),
    ],
)
def test_two_trainings_of_an_arm_are_told_apart_by_what_differs(
    tmp_path: Path, configs: tuple[dict[str, Any], ...], labels: list[str]
) -> None:
    names = [f"train/20260103T03040{number}Z-kata{number}" for number in range(2)]
    for name, config in zip(names, configs, strict=True):
        folder = written(tmp_path, name, config={"arm": "A", "seed": 0, **config})
        rows = [{"step": n, "reward": n / 7, "step_time": 2.0, "num_tokens": 10.0 * n**2} for n in range(1, 4)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = (
        TestClient(build(tmp_path, "t"), base_url="http://127.0.0.1/t/").get(f"curves?run={'&run='.join(names)}").text
    )
    drawn = dict(zip(*[iter(re.findall(r'data-(?:label|points)="([^"]+)"', page))] * 2, strict=True))
    assert list(drawn)[: len(labels)] == [f"arm {label}" for label in labels]
    assert page.count('data-points="1:5 2:15 3:25"') >= 2, "tokens a second"


def test_tool_calls_and_thoughts_are_shown_as_such(tmp_path: Path) -> None:
    calls = (ToolCall("bash", '{"command": "ls <b>", "at": [1]}'), ToolCall("say", "plain <i>"))
    spoken = write(MessageParts("I look.", calls, "Hm <u>."))
    rows = [{"rollout_id": name, "task_id": "t", "num_steps": 1, "seed": 0} for name in ("r", "bad")]
    steps = [
        {"rollout_id": name, "step": 0, "new_messages_json": "[]", "action": action, "commands": ["ls <b>"]}
        for name, action in (("r", spoken), ("bad", spoken + "x"))
    ]
    run = "collect/20260101T000000Z-kata-abcdef"
    written(tmp_path, run, [(ROLLOUT, rows), (STEP, steps)])
    client = TestClient(build(tmp_path, "t"), base_url="http://127.0.0.1/t/")
    page = client.get(rollout_path(run, "r")).text
    assert (
        page.count('<div class="called md">') == 2
        and page.count("tool call</span>") == 2
        and "tool_call&gt;" not in page
    )
    assert "<b>bash</b>" in page and '<p class="role">at</p><pre>[1]</pre>' in page and "plain &lt;i&gt;" in page
    assert "Hm &lt;u&gt;." in page.partition("<summary>thought</summary>")[2] and " None tokens" not in page
    bad = client.get(rollout_path(run, "bad")).text
    assert 'class="called' not in bad and "tool_call&gt;" in bad, "not what a recorded call looks like"


def test_notes_are_saved_beside_the_run_shown_and_found(site: Site, artifacts: Path) -> None:
    name, (row, other, *_) = collected(artifacts), Run(artifacts / "collect" / "latest").rows(ROLLOUT)
    before = {path: path.read_bytes() for path in (artifacts / name).rglob("*") if path.is_file()}
    saved = site.note(
        name, row["rollout_id"], text=f"look\r\nhere {HOSTILE}", tags="odd, hack  odd", seen=Note().digest()
    )
    assert saved.status == 303 and "/rollout/" in saved.headers["location"]
    page = site.get(rollout_path(name, row["rollout_id"])).text
    assert "look\nhere" in shown(page) and "<script>document" not in page and "\u202e" not in page
    (file,) = (artifacts / "notes" / name).iterdir()
    assert json.loads(file.read_text())["tags"] == ["odd", "hack"]
    assert {path: path.read_bytes() for path in before} == before, "the run is sealed"
    assert not Run(artifacts / name).damage()
    for asked, found in (("tag=hack", 1), ("tag=none", 0), ("noted=on", 1)):
        listed = site.get(f"run/{name}?{asked}").text
        assert len(re.findall(r"<a href=\"[^\"]*/rollout/", listed)) == found
    assert other["rollout_id"] not in shown(site.get(f"run/{name}?noted=on").text)
    now = Note(f"look\nhere {HOSTILE}".strip(), ("odd", "hack")).digest()
    assert site.note(name, row["rollout_id"], text="mine", seen=Note().digest()).status == 409, "another one is there"
    assert "look" in shown(site.get(rollout_path(name, row["rollout_id"])).text)
    assert site.note(name, row["rollout_id"], text=" ", tags="", seen=now).status == 303
    assert list((artifacts / "notes" / name).iterdir()) == [], "an empty note is none"


@pytest.mark.parametrize(
    ("headers", "fields", "status"),
    [
        ({"Sec_Fetch_Site": "cross-site"}, {}, 403),
        ({"Sec_Fetch_Site": "same-site"}, {}, 403),
        ({"Sec_Fetch_Site": ""}, {}, 403),
        ({"Sec_Fetch_Site": "", "Origin": "null"}, {}, 403),
        ({"Sec_Fetch_Site": "", "Origin": "http://127.0.0.1:1"}, {}, 403),
        ({"Sec_Fetch_Site": "cross-site", "Origin": "SAME"}, {}, 403),
        ({"Content_Type": "text/plain"}, {}, 415),
        ({}, {"text": "x" * 70_000}, 413),
        ({}, {"text": "x" * 10_001}, 400),
        ({}, {"tags": "x" * 41}, 400),
        ({}, {"tags": " ".join(map(str, range(21)))}, 400),
        ({}, {f"f{n}": "1" for n in range(20)}, 400),
        ({}, {"id": "../../../x"}, 404),
        ({}, {"id": ""}, 404),
    ],
)
def test_notes_from_elsewhere_or_too_large_are_refused_and_nothing_is_written(
    site: Site, artifacts: Path, headers: dict[str, str], fields: dict[str, str], status: int
) -> None:
    name, row = collected(artifacts), Run(artifacts / "collect" / "latest").rows(ROLLOUT)[0]
    origin = site.url.rpartition("/")[0].rpartition("/")[0]
    headers = {key: origin if value == "SAME" else value for key, value in headers.items()}
    given = {"text": "t", "seen": Note().digest(), **fields}
    assert site.note(name, given.pop("id", row["rollout_id"]), headers=headers, **given).status == status
    assert not list((artifacts / "notes").rglob("*.json"))


def test_a_program_that_names_the_servers_origin_may_write(site: Site, artifacts: Path) -> None:
    name, row = collected(artifacts), Run(artifacts / "collect" / "latest").rows(ROLLOUT)[1]
    headers = {"Sec_Fetch_Site": "", "Origin": f"http://{site.url.split('/')[2]}"}
    note = {"text": "t", "headers": headers}
    assert site.note(name, row["rollout_id"], seen=Note().digest(), **note).status == 303
    assert site.note(name, row["rollout_id"], seen=Note("t").digest(), **{**note, "text": ""}).status == 303


def test_a_note_needs_the_token_and_an_existing_run(site: Site, artifacts: Path) -> None:
    name = collected(artifacts)
    sent = {"Content_Type": "application/x-www-form-urlencoded", "Sec_Fetch_Site": "same-origin"}
    body = b"id=kata-train-0-00000%230%400&text=t"
    assert site.get(whole=f"/note/{name}", method="POST", body=body, **sent).status == 403
    assert site.get(f"note/{name}", method="POST", body=body, host="evil.example", **sent).status == 400
    assert site.get("note/collect/..", method="POST", body=body, **sent).status == 404
    assert site.get(f"note/{name}").status == 405
    assert not list((artifacts / "notes").rglob("*.json"))


@pytest.mark.parametrize(
    ("link", "page"),
    [
        ("", ""),
        ("run/collect/x?reward=failed#rollouts", "run/collect/x?reward=failed#rollouts"),
        ("http://127.0.0.1:1/old-token/rollout/collect/x?id=a%230%40b#step-2", "rollout/collect/x?id=a%230%40b#step-2"),
        ("http://127.0.0.1:1/old-token/", ""),
        ("curves?run=train/x&run=train/y", "curves?run=train/x&run=train/y"),
    ],
)
def test_a_copied_link_opens_the_same_page_on_another_server(link: str, page: str) -> None:
    assert page_of(link) == page


@pytest.mark.parametrize("link", ["nonsense", "static/view.js", "http://evil.example/x/nothing", "note/a/b"])
def test_other_links_are_refused(link: str) -> None:
    with pytest.raises(UsageError, match="not a page of `composer view`"):
        page_of(link)


def test_the_server_prints_the_address_of_the_page_that_was_asked_for(site: Site) -> None:
    assert site.printed.endswith(f"/{PAGE}") and site.printed.startswith(site.url)
    assert "B did t-1" in shown(site.get(whole="/" + site.printed.split("/", 3)[3]).text)


def test_a_damaged_run_is_listed_and_its_pages_are_sentences(artifacts: Path, tmp_path: Path) -> None:
    root = shutil.copytree(artifacts, tmp_path / "artifacts", symlinks=True)
    (root / EVALUATION / "eval_items.parquet").write_bytes(b"PAR1 torn")
    (root / EVALUATION / "verdict.json").write_text("{")
    broken = (root / "extract-pairs" / "latest").resolve().name
    (root / "extract-pairs" / broken / "states.parquet").unlink()
    (root / "train" / "x").mkdir()
    (root / "train" / "x" / "manifest.json").write_text("{")
    large = multiplied((root / "collect" / "latest").resolve(), root, 40_000)
    table = bytearray((large / "rollouts.parquet").read_bytes())
    footer = -8 - int.from_bytes(table[-8:-4], "little")
    table[footer : footer + 100] = bytes(100)  # of the same size, and pyarrow raises OSError
    (large / "rollouts.parquet").write_bytes(table)
    client = TestClient(build(root, "token"), base_url="http://127.0.0.1/token/")
    front = shown(client.get("").text)
    assert "damaged" in front and "unreadable" in front
    page = client.get(f"run/collect/{large.name}")
    assert page.status_code == 200 and "rollouts.parquet" in page.text and "Rerun that stage" in page.text
    for path in (f"run/{EVALUATION}", f"compare/{EVALUATION}", f"run/extract-pairs/{broken}", "run/train/x"):
        answer = client.get(path)
        assert answer.status_code in (200, 404) and "Traceback" not in answer.text, path
        assert re.search("Rerun that stage|not valid|cannot be read", answer.text), path
    assert client.get("curves").status_code == 200


def test_a_training_under_way_is_drawn_and_shown_anew(site: Site, artifacts: Path) -> None:
    before = site.get(f"run/{RUNNING}").text
    assert "<body data-live>" in before and ' data-points="1:0.1 2:0.2 ' in before and "reward <b>0.5</b>" in before
    assert "entropy, nats <b>2</b>" in before, "one that stays the same is drawn, too"
    with (artifacts / RUNNING / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 6, "reward": 0.9}) + "\n")
    assert "reward <b>0.9</b>" in site.get(f"run/{RUNNING}").text
    assert "data-live" not in site.get(f"run/{EVALUATION}").text


def test_a_run_under_way_shows_what_its_journal_holds(site: Site, artifacts: Path) -> None:
    folder = written(artifacts, "collect/20260102T030405Z-live-eeeeee", status="running")
    (folder / "steps").mkdir()
    lines = [store.checked(store.encode(unit(number))) for number in range(3)]
    (folder / "steps" / "000000.jsonl.open").write_bytes(b"\n".join([*lines, b'{"torn']))
    page = site.get("run/collect/20260102T030405Z-live-eeeeee").text
    assert "of 3<" in page and "live-2" in page


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


def test_requests_without_the_token_or_with_another_host_are_refused(site: Site) -> None:
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


@pytest.mark.parametrize(
    "path",
    [
        "",
        f"run/{HOSTILE_RUN}",
        f"matrix/{HOSTILE_RUN}",
        f"chain/{HOSTILE_RUN}",
        rollout_path(HOSTILE_RUN, HOSTILE.replace("\x00", "")),
    ],
)
def test_a_hostile_transcript_is_shown_escaped(site: Site, path: str) -> None:
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


def test_the_raw_request_and_response_of_a_step_are_plain_text(site: Site) -> None:
    """The raw request and response, which a browser must not take for a page."""
    path = rollout_path(HOSTILE_RUN, HOSTILE.replace("\x00", "")).replace("rollout/", "step/", 1)
    answer = site.get(f"{path}&step=0")
    assert answer.status == 200 and answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff" and "\u202e" not in answer.text
    found = json.loads(answer.text)
    assert found["request"]["messages"][0]["content"].startswith("</pre><script>")
    assert found["response"]["completion_token_ids"] == [1, 2] and found["response"]["observation"]
    assert (
        site.get(f"{path}&step=1").status == 404 and site.get(f"{path}&step=-1").status == 200
    )  # no number counts as 0


OTHER_LINES = "\n".join(["x = {'a': [1]}  # b"] * 8)


@pytest.mark.parametrize("language", ["python", "bash", "json", "diff", "html", '"><script>alert(1)</script>'])
@pytest.mark.parametrize(
    "code",
    [
        "<script>alert(1)</script><img src=x onerror=alert(1)>",
        "'" * 1_990,
        "${" * 990,
        "x" * 100_000,  # a line that keeps lexers busy
        f"@@ -1 +1 @@\n-<b>\n+{'<' * 1_990}",
        OTHER_LINES,
    ],
)
def test_code_in_colour_is_spans_with_classes_and_nothing_is_lost(language: str, code: str) -> None:
    began = time.process_time()
    found = Elements(str(markdown(f"```{language}\n{code}\n```")))
    assert time.process_time() - began < 2
    assert {tag for tag, _ in found.tags} <= {"div", "pre", "code", "span"}
    assert {name for name, _ in found.attributes} <= {"class"}
    assert code in found.text


@pytest.mark.parametrize(
    ("text", "shown_as"),
    [
        ("[a](javascript:alert(1)) ![b](http://x/y.png) <http://x>", None),
        ("<b onclick=x>*c*</b>", "<b onclick=x>c</b>"),
        ("[a]: http://x\n\n&lt; \\* a", None),
        ("*" * 19_000, None),
        ("> " * 900 + "deep", "deep"),
        ("| a | b |\n|---|---|\n| <i> | 2 |", "a\nb\n<i>\n2"),
    ],
)
def test_markdown_makes_no_link_and_hides_nothing(text: str, shown_as: str | None) -> None:
    began = time.process_time()
    found = Elements(str(markdown(text)))
    assert time.process_time() - began < 2
    assert not {"a", "img", "script", "b", "i"} & {tag for tag, _ in found.tags}
    assert {name for name, _ in found.attributes} <= {"class", "style"}
    lines = [line.strip() for line in found.text.splitlines() if line.strip()]
    assert "\n".join(lines).endswith(shown_as) if shown_as else found.text.split() == text.split()


def test_a_rollout_shows_its_time_and_the_rule_it_broke_and_its_task_all_samples(tmp_path: Path) -> None:
    rule = {"malformed": ("no command", "submitted"), "late": (None, "max_steps"), "untested": (None, "submitted")}
    rows, steps = list[dict[str, object]](), list[dict[str, object]]()
    for number, (name, (error, ended)) in enumerate(rule.items()):
        known = {"protocol_ok": False, "terminated_by": ended, "reward": float(number == 0), "sample_idx": number}
        rows.append({"rollout_id": name, "task_id": "t", "num_steps": 1, "seed": 0, **known})
        one = {"rollout_id": name, "step": 0, "new_messages_json": "[]", "action": "# Look\n```bash\nls\n```"}
        steps.append({**one, "observation": "a.py", "parse_error": error, "latency_s": 3.0, "command_s": 1.0})
    run = "collect/20260101T000000Z-kata-abcdef"
    written(tmp_path, run, [(ROLLOUT, rows), (STEP, steps)])
    client = TestClient(build(tmp_path, "token"), base_url="http://127.0.0.1/token/")
    pages = {name: client.get(rollout_path(run, name)).text for name in rule}
    assert "<dt>broken rule</dt><dd>step 1 is no well-formed action: no command</dd>" in pages["malformed"]
    assert "it did not submit: it ended by max_steps" in pages["late"] and "run the tests before" in pages["untested"]
    assert 'class="answer" x="0.0%" width="75.0%"' in pages["late"] and "step 1: command, 1 s" in pages["late"]
    assert '<h1 class="wrap">t, sample 0' in pages["malformed"] and '<h1 class="wrap">late' in pages["late"]
    assert '<code class="language-bash">ls\n</code>' in pages["late"] and "<h1>Look</h1>" in pages["late"]
    matrix = shown(client.get(f"matrix/{run}").text)
    assert re.sub(r"\s+", " ", matrix).count("t✓ ✗ ✗") == 1, "by sample"
    assert "no rollouts here" in client.get(f"matrix/{run}?offset=50").text


def test_every_message_is_shown_once(tmp_path: Path) -> None:
    """Those of the prompt with the answers in it, and a request for a summary after the observation."""

    def said(*messages: str) -> str:
        return json.dumps([dict(zip(("role", "content"), one.split(": "), strict=True)) for one in messages])

    prompt = said("system: rules", "user: 5:51?", "assistant: 05:51", "user: 7:02?")
    gained = [prompt, json.dumps([*json.loads(said("assistant: 07:02", "user: wrong")), SUMMARY_REQUEST])]
    acted = {"action": "07:02", "observation": "wrong"}, {"action": "so far", "observation": ""}
    steps = [
        {"rollout_id": "r", "step": number, "new_messages_json": gained[number], **one}
        for number, one in enumerate(acted)
    ]
    name = "collect/20260101T000000Z-kata-abcdef"
    written(tmp_path, name, [(ROLLOUT, [{"rollout_id": "r", "task_id": "t", "num_steps": 2}]), (STEP, steps)])
    page = TestClient(build(tmp_path, "token"), base_url="http://127.0.0.1/token/").get(rollout_path(name, "r")).text
    roles = re.findall(r'<span class="role">(\w+)</span>', page)
    assert roles == ["system", "user", "assistant", "user", "action", "observation", "user", "action"]
    texts = ("rules", "5:51?", "05:51", "7:02?", "07:02", "wrong", SUMMARY_REQUEST["content"].split(".")[0], "so far")
    assert re.search(".*".join(map(re.escape, texts)), shown(page), re.DOTALL) and shown(page).count("07:02") == 1


def test_hostile_words_in_an_address_are_shown_too(site: Site, artifacts: Path) -> None:
    page = site.get(f"run/{collected(artifacts)}?text={quote(HOSTILE)}&task={quote(HOSTILE)}&arm={quote(HOSTILE)}").text
    assert "No rollout fits." in page and "<script>document" not in page and "\x1b" not in page


def test_a_taken_port_is_refused(site: Site, tmp_path: Path) -> None:
    port = site.url.split(":")[2].split("/")[0]
    done = call(tmp_path, "view", "--port", port)
    assert done.returncode == 2 and f"Port {port} cannot be used" in done.stderr and done.stdout == ""


def test_a_rollout_begins_with_its_outcome_and_a_log_keeps_its_lines(tmp_path: Path) -> None:
    played = {
        "rollout_id": "r",
        "task_id": "t",
        "reward": 0.0,
        "hidden_pass": False,
        "num_steps": 0,
        "seed": 7,
        "patch": "",
    }
    log = "FAILED tests/test_a.py::test_it\n  <b>1</b> == 2"
    name = "collect/20260101T000000Z-kata-abcdef"
    diff = {"submission": "diff --git a/x b/x"}
    step = {"rollout_id": "r", "step": 0, "new_messages_json": "[]", "action": "submit", "elided_chars": 1234}
    tables = [(ROLLOUT, [played | diff | {"test_log": log}]), (STEP, [step | {"observation": diff["submission"]}])]
    written(tmp_path, name, tables, outcome=RunOutcome(ok=False))
    client = TestClient(build(tmp_path, "token"), base_url="http://127.0.0.1/token/")
    page = client.get(rollout_path(name, "r")).text
    assert '<div class="bad"><dt>outcome</dt><dd>failed</dd>' in page and '"role">submitted patch<' in page
    assert "1,234 characters of the output cut" in page and '"role">observation<' not in page
    assert "<dt>hidden tests pass</dt><dd>no</dd>" in page and "<dt>steps</dt>" in page
    assert "FAILED tests/test_a.py::test_it</span>\n  &lt;b&gt;1&lt;/b&gt; == 2</pre>" in page
    before, _, more = page.partition("<summary>More facts</summary>")
    assert "<dt>reward</dt>" in before and "<dt>seed</dt>" in more and "<dt>patch</dt>" not in page
    run = client.get(f"run/{name}").text
    assert "did not pass its own checks" in run and "<small>1 failed</small>" in run
    assert "did not pass its own checks" in client.get("").text


def test_an_empty_run_says_so_and_a_search_without_a_hit_offers_all(tmp_path: Path) -> None:
    for name, kinds, what in (
        ("collect/20260101T000000Z-kata-abcdef", (ROLLOUT, STEP), "rollout"),
        ("extract-pairs/20260101T000000Z-x-abcdef", (PAIR,), "pair"),
    ):
        written(tmp_path, name, [(kind, []) for kind in kinds])
        client = TestClient(build(tmp_path, "token"), base_url="http://127.0.0.1/token/")
        assert f"This run holds no {what}s." in client.get(f"run/{name}").text
        assert f"No {what} fits." in client.get(f"run/{name}?text=x").text


def test_an_imported_rollout_shows_its_task_its_file_its_target_and_all_scorers(tmp_path: Path) -> None:
    name = "import/20260102T030405Z-inspect"
    rollout = {"rollout_id": "hT2nq", "task_id": "sums/1", "sample_idx": 3, "reward": 1.0}
    scores = {"includes": {"value": "C", "answer": "It is 4."}, "match": {"value": "I", "explanation": "not 4.\n"}}
    origin = {"rollout_id": "hT2nq", "file": "a/log.json", "line": 1, "extra_json": json.dumps({"scores": scores})}
    task = {"task_id": "sums/1", "data_json": '{"target": "4"}'}
    written(tmp_path, name, [(ROLLOUT, [rollout]), (ORIGIN, [origin]), (TASK, [task])])
    view = TestClient(build(tmp_path, "token"), base_url="http://127.0.0.1/token")
    listed = view.get(f"run/{name}").text
    assert "<td>sums/1</td>" in listed and '<td class="n">3</td>' in listed
    facts = {"file": "a/log.json", "target": "4", "scores": "includes C for the answer It is 4.; match I: not 4."}
    page = view.get(f"rollout/{name}?id=hT2nq").text
    text = [" ".join(line.split()) for line in call(tmp_path, "show", tmp_path / name, "hT2nq").stdout.splitlines()]
    for label, words in facts.items():
        assert f"<dt>{label}</dt><dd>{words}</dd>" in page and f"{label} {words}" in text
