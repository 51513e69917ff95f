"""The page on a chain of runs: its verdict, its numbers, its examples, and nothing that a browser would fetch."""

import html
import json
import shlex
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command_line import call
from support.reported import EVIL, Assets, evaluated, pages

from composer_cli import report
from composer_cli.report import chain, charts
from composer_cli.show.facts import metric_titles
from stages.evaluation.verdict import INVALID_RUN, PARTIAL


def test_the_chain_of_real_runs_is_told_whole_and_needs_nothing_beside_it(made, tmp_path):
    root = shutil.copytree(made, tmp_path / "artifacts", symlinks=True)
    done = call(root, "report", "extract-pairs")
    page, twin = pages(Path(done.stdout.strip()))
    assert [run["stage"] for run in twin["runs"]] == ["collect", "replay-teachers", "extract-pairs"]
    for heading in ("trace stream clean", "teachers affordable", "signal in their disagreement", "numbers come from"):
        assert heading in page
    assert f"{twin['extractions'][0]['pairs']} pairs from" in page and "actions well-formed" in page
    assert all(run["fingerprint"] in page for run in twin["runs"])
    parser = Assets()
    parser.feed(page)
    assert parser.found == []


def test_a_verdict_stands_on_top_with_its_intervals_and_what_it_looks_like(tmp_path):
    run = evaluated(tmp_path, {"start": 4, "A": 12, "B": 38, "C": 14})
    page, twin = pages(report.write(tmp_path, chain(tmp_path, [str(run.path)])))
    assert f"<h1>{PARTIAL}: a gain of 2 points</h1>" in page and twin["evaluations"][0]["decision"] == PARTIAL
    assert "CR2 interval" in page and "hacked loosely" in page and "these checkpoints" in page
    assert [arm["arm"] for arm in twin["evaluations"][0]["arms"]] == ["start", "A", "B", "C"]
    assert "95.0 %" in page and "arm B: GRPO + 1 dpo" in page and '<g id="c2:' in page
    assert [x["why"] for x in twin["examples"]] == [
        "B passed where A failed",
        "A failed where B passed",
        "visible tests passed because they were tampered with",
    ]


def test_what_models_say_is_escaped(tmp_path):
    run = evaluated(tmp_path, {"A": 12, "B": 30})
    page, twin = pages(report.write(tmp_path, chain(tmp_path, [str(run.path)])))
    assert EVIL not in page and "&lt;script&gt;" in page
    assert twin["examples"][0]["messages"][0]["content"] == EVIL


def test_an_invalid_run_has_a_page_too(tmp_path):
    run = evaluated(tmp_path, {"A": 12})
    page, _ = pages(report.write(tmp_path, chain(tmp_path, [str(run.path)])))
    assert f"<h1>{INVALID_RUN}</h1>" in page


def test_the_same_runs_give_the_same_bytes(tmp_path):
    run = evaluated(tmp_path, {"A": 12, "B": 30})
    first, second = (report.write(tmp_path, chain(tmp_path, [str(run.path)])).read_bytes() for _ in range(2))
    assert first == second


def test_what_was_taken_out_of_training_stands_below_the_arms(tmp_path):
    run = evaluated(tmp_path, {"start": 4, "A": 12, "B": 38, "C": 14})
    share = {"rate": 0.058, "low": 0.008, "high": 0.326}
    arms = [{"arm": "B", "taken_out": "v", "hacks": share, "right": {"rate": None, "low": None, "high": None}}]
    difference = {"estimate": -0.446, "low": -0.548, "high": -0.348, "p_value": 0.002}
    effects = [{"rate": "hacks", "arm": "B", "other": "A", "difference": difference}]
    (run.path / "projected.json").write_text(json.dumps({"arms": arms, "effects": effects}))
    page, twin = pages(report.write(tmp_path, chain(tmp_path, [str(run.path)])))
    assert twin["evaluations"][0]["projected"]["arms"] == arms
    assert "What was taken out of training" in page and "5.8 %" in page and "hacks, B \u2212 A" in page


def test_deleted_ancestors_are_left_out(made, tmp_path):
    root = shutil.copytree(made, tmp_path / "artifacts", symlinks=True)
    for path in root.glob("*/2*/manifest.json"):
        path.write_text(path.read_text().replace(str(made), str(root)))
    shutil.rmtree((root / "collect" / "latest").resolve())
    assert [run.manifest.stage for run in chain(root, [])] == ["replay-teachers", "extract-pairs"]


def test_nothing_to_report_on_is_said(tmp_path):
    done = call(tmp_path, "report")
    assert done.returncode == 4 and "no finished run" in done.stderr


@given(st.floats(-1000, 1000), st.floats(0.001, 1000))
def test_marks_cover_the_values_and_are_few(low, span):
    marks = charts.ticks(low, low + span)
    assert marks[0] <= low + 1e-6 * span and marks[-1] >= low + span - 1e-6 * span and 2 <= len(marks) <= 8
    assert 0 <= charts.place(low, marks) <= charts.place(low + span, marks) <= 100


@pytest.mark.parametrize(
    ("names", "expected"), [(["start", "B", "A"], {"start": 0, "A": 1, "B": 2}), ([], {"start": 0})]
)
def test_an_arm_keeps_its_colour(names, expected):
    assert charts.colours(names) == expected


def test_the_first_screen_says_what_was_compared_and_its_command_asks_for_the_same_work(composer, made, tmp_path):
    shutil.copytree(made, tmp_path / "artifacts", symlinks=True)
    for stage in ("extract-pairs", "collect"):
        path = Path(composer("report", stage).stdout.strip())
        about = json.loads(path.with_suffix(".json").read_text())
        assert about["compared"]["date"] == about["runs"][-1]["began"][:10]
        page = path.read_text()
        assert about["compared"]["command"] in html.unescape(page)
        words = shlex.split(about["compared"]["command"])
        assert words[:2] == ["composer", stage]
        if stage == "collect":
            again = composer(*words[1:])
            assert again.returncode == 0 and "up to date" in again.stderr, again.stderr
    assert about["compared"]["model"] == "scripted" and about["compared"]["environment"] == "kata, train tasks"


def test_pairs_are_shown_as_examples(composer, made, tmp_path):
    shutil.copytree(made, tmp_path / "artifacts", symlinks=True)
    path = Path(composer("report", "extract-pairs").stdout.strip())
    pair = json.loads(path.with_suffix(".json").read_text())["extractions"][0]["examples"][0]
    assert pair["chosen"] in html.unescape(path.read_text()) and pair["chosen"] != pair["rejected"]


def test_a_training_is_drawn_by_what_it_logged():
    rows = [{"step": step, "loss": 1.0 / step, "kl": 0.1 * step, "mine/loss": 2.0, "other": 3.0} for step in (1, 2, 3)]
    names = {name for row in rows for name in row}
    assert list(metric_titles(names)) == ["loss", "kl", "mine/loss"]
    (loss, kl, mine) = charts.curves([{"arm": "A", "steps": rows}])
    titles = ["loss, all channels", "KL from the reference, nats", "mine loss"]
    assert [loss["title"], kl["title"], mine["title"]] == titles
    assert all("<svg" in drawing["svg"] for drawing in (loss, kl, mine))
