"""The saved report on a chain of runs: its verdict, numbers and examples, and nothing that a browser would fetch."""

import base64
import html
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from support.command_line import call
from support.elements import Elements
from support.runs import eval_item, written
from support.view_site import shown

from composer_cli.show.blocks import Training, colours, hue, position, ticks
from composer_cli.view import page
from composer_cli.view.page import charts, legend
from composer_stages.evaluation.difference import Verdict
from composer_stages.evaluation.document import verdict_document
from composer_stages.evaluation.outcomes import items_table
from composer_stages.evaluation.verdict import decide
from composer_stages.runs import store
from composer_stages.runs.kinds import EVAL_ITEM
from composer_stages.runs.run import InputRef, Run, RunOutcome

EVIL = "<script>alert('gotcha')</script>"
"""What a model may write."""
TRANSCRIPT = {"transcript_json": json.dumps([{"role": "assistant", "content": EVIL}])}


def assets(text: str) -> list[str]:
    """Everything on a page that a browser would fetch or execute."""
    fetched, tags = {"src", "href", "srcset", "onclick", "onload"}, Elements(text).tags
    named = [f"{tag} {name}" for tag, attributes in tags for name, _ in attributes if name in fetched]
    return named + [tag for tag, _ in tags if tag in {"script", "link", "iframe", "img"}]


def run_of(root: Path, stage: str, *reads: Run, **facts: Any) -> Run:
    """A complete run that reads these."""
    refs = [InputRef(stage=run.manifest.stage, path=str(run.path), fingerprint="", content="") for run in reads]
    folder = f"{stage}/20260101T00000{len(list(root.glob('*/*')))}Z-made-abcdef"
    return Run(written(root, folder, inputs={"x": refs}, attempts=1, **facts))


def trained(root: Path, arm: str, **weights: float) -> Run:
    """A training that logged three steps."""
    run = run_of(root, "train", config={"arm": arm, "seed": 0, "weights": weights})
    rows = [{"step": step, "reward": 0.1 * step, "loss": 1.0} for step in (1, 2, 3)]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def evaluated(root: Path, passes: dict[str, int], tasks: int = 40) -> Run:
    """An evaluation in which the first `passes[arm]` of the tasks pass."""
    arms = [trained(root, arm, **({"dpo": 1.0} if arm == "B" else {})) for arm in passes]
    items = [
        eval_item(arm, task, task < passes[arm], hacked=arm == "B" and task == 0) | TRANSCRIPT
        for arm in passes
        for task in range(tasks)
    ]
    models = {f"{arm}/0": {"model": "m"} for arm in passes}
    run = run_of(root, "evaluate", *arms, models=models, tables=[(EVAL_ITEM, items)])
    store.write_json(run.path / "verdict.json", verdict_document(decide(items_table(items))))
    return run


def saved(root: Path, *runs: Run) -> tuple[str, dict[str, Any]]:
    """A saved report and its JSON."""
    path = page.save(root, page.chain(root, [str(run.path) for run in runs]))
    return path.read_text(), json.loads(path.with_suffix(".json").read_text())


def blocks(document: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """The blocks of a kind in all sections."""
    return [block for section in document["sections"] for block in section["blocks"] if block["kind"] == kind]


def first_screen(text: str) -> str:
    return html.unescape(text[text.index('<div class="first">') : text.index("<h2>Does it help?")])


def test_a_report_on_real_runs_needs_no_other_file_and_forbids_scripts_and_requests(own_runs):
    done = call(own_runs, "report", "extract-pairs")
    text = Path(done.stdout.strip()).read_text()
    document = json.loads(Path(done.stdout.strip()).with_suffix(".json").read_text())
    assert [run["stage"] for run in document["runs"]] == ["collect", "replay-teachers", "extract-pairs"]
    assert {section["run"].partition("/")[0] for section in document["sections"]} == {
        *("collect", "replay-teachers", "extract-pairs")
    }
    assert "actions well-formed" in text and all(run["fingerprint"] in text for run in document["runs"])
    assert assets(text) == []
    allowed = ("content", "default-src 'none'; style-src 'unsafe-inline'; img-src data:")
    assert ("meta", [("http-equiv", "Content-Security-Policy"), allowed]) in Elements(text).tags


def test_the_first_screen_has_the_verdict_and_what_is_shown_and_not_shown(tmp_path):
    text, document = saved(tmp_path, evaluated(tmp_path, {"start": 4, "A": 12, "B": 36, "C": 38}))
    first, (found,) = first_screen(text), blocks(document, "findings")
    assert f"<h2>{Verdict.PARTIAL}: a gain of 2 points</h2>" in first and f"<title>{Verdict.PARTIAL}" in text
    assert found["shown"] and found["not_shown"] and found["note"] in first
    assert all(sentence in first for sentence in (*found["shown"], *found["not_shown"]))
    assert "B</b> GRPO + 1 dpo" in first


def test_an_evaluation_is_drawn_and_listed_by_arm_in_the_colour_of_its_training(tmp_path):
    text, document = saved(tmp_path, evaluated(tmp_path, {"start": 4, "A": 12, "B": 38, "C": 14}))
    drawn = {one["title"]: one for one in blocks(document, "intervals")}
    assert [row["arm"] for row in drawn["pass@1 of the arms"]["rows"]] == ["start", "A", "B", "C"]
    assert [row["label"] for row in drawn["Differences between arms, paired by task"]["rows"]] == [
        *("pass@1, B \u2212 A", "pass@1, B \u2212 C")
    ]
    (listed,) = (one for one in blocks(document, "table") if one["title"] == "The arms")
    assert [row[:2] for row in listed["cells"]] == [["start", 0.1], ["A", 0.3], ["B", 0.95], ["C", 0.35]]
    assert 'class="track c2 d0"' in text and '<path class="c2 d0"' in text and "95.0 %" in text
    assert [one["title"] for one in blocks(document, "dialogue")] == [
        "B passed where A failed",
        "A failed where B passed",
        "Visible tests passed because they were tampered with",
    ]


def test_a_chain_is_found_where_its_folder_was_moved(tmp_path):
    evaluated(tmp_path / "made", {"A": 12, "B": 30})
    (tmp_path / "made").rename(tmp_path / "moved")
    found = page.chain(tmp_path / "moved", [])
    assert [run.manifest.stage for run in found] == ["train", "train", "evaluate"]


def test_no_two_of_37_arms_are_drawn_alike():
    numbers = colours(["start", *(f"arm{number:02}" for number in range(36))])
    assert len(set(map(hue, numbers.values()))) == 37 and hue(numbers["start"]) == "c0 d0"
    assert len({hue(number).split()[0] for number in colours(map(str, range(9))).values()}) == 10


def test_model_output_is_escaped_and_reports_are_deterministic(tmp_path):
    run = evaluated(tmp_path, {"A": 12, "B": 30})
    text, document = saved(tmp_path, run)
    assert EVIL not in text and "&lt;script&gt;" in text and "script" not in assets(text)
    assert blocks(document, "dialogue")[0]["messages"][0]["content"] == EVIL
    assert saved(tmp_path, run) == (text, document)


def test_an_invalid_run_has_a_report_too(tmp_path):
    text, _ = saved(tmp_path, evaluated(tmp_path, {"A": 12}))
    assert f"<h2>{Verdict.INVALID_RUN}</h2>" in first_screen(text)


def test_the_legend_has_an_entry_for_each_arm_and_not_for_each_training(tmp_path):
    trainings = [Training("", arm, str(seed), f"GRPO + {arm}", "", {}) for arm in "AB" for seed in range(3)]
    assert legend(trainings) == [("A", "GRPO + A", 1, 3), ("B", "GRPO + B", 2, 3)]


def test_a_training_is_drawn_by_what_it_logged():
    rows = {"loss": 1.0, "kl": 0.1, "mine/loss": 2.0, "step": 1.0}
    series = {metric: [(step, value * step) for step in (1.0, 2.0, 3.0)] for metric, value in rows.items()}
    titles = [chart.title for chart in charts([Training("", "A", "0", "", "", series)])]
    assert titles == ["loss, all channels", "KL from the reference, nats", "mine/loss"]


def test_a_training_from_a_run_names_that_run_as_its_model(tmp_path):
    start = run_of(tmp_path, "probe-start", config={"base": {"model": "m"}})
    given = {"start": [InputRef(stage="probe-start", path=str(start.path), fingerprint="", content="")]}
    config = {"arm": "A", "policy": {"model": "kata:student"}}
    training = Run(written(tmp_path, "train/20260101T000001Z-made-abcdef", inputs=given, attempts=1, config=config))
    assert saved(tmp_path, training)[1]["compared"]["model"] == f"probe-start/{start.path.name}"


def test_deleted_ancestors_are_left_out(own_runs):
    shutil.rmtree((own_runs / "collect" / "latest").resolve())
    assert [run.manifest.stage for run in page.chain(own_runs, [])] == ["replay-teachers", "extract-pairs"]


@given(st.floats(-1000, 1000), st.floats(0.001, 1000))
def test_marks_cover_the_values_and_are_few(low, span):
    marks = ticks(low, low + span)
    assert marks[0] <= low + 1e-6 * span and marks[-1] >= low + span - 1e-6 * span and 2 <= len(marks) <= 8
    assert 0 <= position(low, marks) <= position(low + span, marks) <= 100


@pytest.mark.parametrize(
    ("names", "expected"), [(["start", "B", "A"], {"start": 0, "A": 1, "B": 2}), ([], {"start": 0})]
)
def test_an_arm_keeps_its_colour(names, expected):
    assert colours(names) == expected


def test_the_command_of_a_report_asks_for_the_same_work(composer, own_runs):
    for stage in ("extract-pairs", "collect"):
        path = Path(composer("report", stage).stdout.strip())
        compared = json.loads(path.with_suffix(".json").read_text())["compared"]
        assert compared["command"] in html.unescape(path.read_text())
        words = shlex.split(compared["command"])
        assert words[:2] == ["composer", stage]
        if stage == "collect":
            again = composer(*words[1:])
            assert again.returncode == 0 and "up to date" in again.stderr, again.stderr
    assert compared["model"] == "scripted" and compared["environment"] == "kata, train tasks"


def test_a_pair_of_each_rule_is_an_example(own_runs):
    text, document = saved(own_runs, Run(own_runs / "extract-pairs" / "latest"))
    examples = [one for one in blocks(document, "dialogue") if one["messages"][0]["role"] == "chosen"]
    chosen, rejected = (message["content"] for message in examples[0]["messages"])
    assert chosen != rejected and chosen.strip("`").removeprefix("bash\n") in shown(text)  # as a block of code
    assert len({one["title"] for one in examples}) == len(examples)


PNG = b"\x89PNG\r\n"
CHECK = {
    "plan_item": "T4",
    "severity": "deciding",
    "threshold": "t > 2",
    "detail": EVIL,
    "evidence_path": "",
    "asks": "",
}


def probed(root: Path, status: str = "FAIL") -> list[Run]:
    """A pool with a fault, a verdict on it and a plot."""
    deciding = {**CHECK, "check": "T4e", "status": status, "stat": 1.5, "placebo_q95": 2.5, "pass": status == "PASS"}
    reported = {**deciding, "check": "T4a", "severity": "report", "status": "PASS", "stat": None, "placebo_q95": None}
    pool = run_of(root, "probe-teacher-pool", outcome=RunOutcome(summary={"verdict": "FAIL"}))
    uat = run_of(root, "probe-uat", pool, outcome=RunOutcome(summary={"verdict": status}))
    plot = run_of(root, "probe-plot", outcome=RunOutcome(summary={"figures": ["05_placebos"]}))
    store.write_json(pool.path / "checks.json", [reported, deciding])
    store.write_json(uat.path / "uat.json", [reported, deciding])
    (plot.path / "05_placebos.csv").write_text("direction,t\nv,1.5\n")
    (plot.path / "05_placebos.png").write_bytes(PNG)
    return [uat, plot]


def test_the_probe_has_its_verdict_its_checks_and_its_figures_with_their_numbers(tmp_path):
    text, document = saved(tmp_path, *probed(tmp_path))
    assert [run["stage"] for run in document["runs"]] == ["probe-teacher-pool", "probe-uat", "probe-plot"]
    verdict, guard = blocks(document, "findings")
    assert verdict["title"] == "Gradient probe: FAIL" and "T4e" in verdict["lead"] and EVIL not in text
    assert [row[0] for one in blocks(document, "table") for row in one["cells"]] == ["T4e", "T4a"]
    assert guard["title"] == "teacher-pool: FAIL" and guard["not_shown"][0].startswith("T4e needs t > 2")
    assert blocks(document, "figure")[0]["csv"] == "direction,t\nv,1.5\n"
    assert sorted(assets(text)) == ["a href", "img", "img src"]
    assert f'src="data:image/png;base64,{base64.b64encode(PNG).decode()}"' in text
    assert base64.b64encode(b"direction,t\nv,1.5\n").decode() in text


def test_a_watched_training_has_its_alarm_and_its_figure(tmp_path):
    run = run_of(tmp_path, "probe-watch", outcome=RunOutcome(summary={"verdict": "FAIL", "figures": ["watch"]}))
    alarm = {**CHECK, "check": "alarm", "status": "FAIL", "stat": 11.9, "detail": "alarm after 2 steps", "pass": False}
    store.write_json(run.path / "checks.json", [alarm])
    (run.path / "watch.csv").write_text("step,push\n0,0.5\n")
    (run.path / "watch.png").write_bytes(PNG)
    text, document = saved(tmp_path, run)
    assert "alarm after 2 steps" in blocks(document, "findings")[0]["not_shown"][0] and "alarm after 2 steps" in text
    assert blocks(document, "figure")[0]["csv"] == "step,push\n0,0.5\n" and "img src" in assets(text)


def test_a_verdict_on_arms_comes_before_that_of_the_probe(tmp_path):
    run = evaluated(tmp_path, {"start": 4, "A": 12, "B": 38, "C": 14})
    _, document = saved(tmp_path, run, *probed(tmp_path, "PASS"))
    titles = [one["title"] for one in blocks(document, "findings")]
    assert titles[0].startswith(Verdict.PARTIAL) and titles[1] == "Gradient probe: PASS"


def test_verdict_sections_precede_checks_of_their_inputs(tmp_path):
    direction = run_of(tmp_path, "probe-extract-vhack", outcome=RunOutcome(summary={"verdict": "PASS"}))
    compared = run_of(tmp_path, "probe-compare", direction, outcome=RunOutcome(summary={"verdict": "FAIL"}))
    store.write_json(direction.path / "validation.json", [{**CHECK, "check": "V1", "status": "PASS"}])
    store.write_json(compared.path / "compare.json", [{**CHECK, "check": "R6", "status": "FAIL"}])
    text, document = saved(tmp_path, compared)
    assert "<title>compare: FAIL" in text
    assert [one["title"] for one in blocks(document, "findings")] == ["compare: FAIL", "extract-vhack: PASS"]
