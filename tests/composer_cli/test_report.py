"""The page on a chain of runs: its verdict, its numbers, its examples, and nothing that a browser would fetch."""

import base64
import html
import json
import shlex
import shutil
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command_line import call
from support.runs import eval_item

from composer_cli import report
from composer_cli.report import chain, charts
from composer_cli.show.facts import metric_titles
from stages.evaluation.verdict import INVALID_RUN, PARTIAL, decide
from stages.runs.run import InputRef, Manifest, Run, RunWriter, write_manifest

EVIL = "<script>alert('gotcha')</script>"
"""What a model may say."""


class Assets(HTMLParser):
    """Everything on a page that a browser would fetch or execute."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.found += [
            f"{tag} {name}" for name, _ in attributes if name in {"src", "href", "srcset", "onclick", "onload"}
        ]
        self.found += [tag] if tag in {"script", "link", "iframe", "img"} else []


SAID = {"transcript_json": json.dumps([{"role": "assistant", "content": EVIL}])}
"""What the model of every rollout said."""


def finished(root: Path, stage: str, *reads: Run, **config) -> RunWriter:
    """A run folder of a stage to be filled, complete once `sealed` has written its manifest."""
    refs = [InputRef(stage=r.manifest.stage, path=str(r.path), fingerprint="", content="") for r in reads]
    folder = root / stage / f"20260101T00000{len(list(root.glob('*/*')))}Z-made-abcdef"
    began = {"started_at": "2026-01-01T00:00:00+00:00", "status": "complete", "attempts": 1}
    record = Manifest(
        composer="0", stage=stage, stage_version=1, fingerprint="ab" * 32, config=config, inputs={"x": refs}, **began
    )
    return RunWriter(folder, record, cache=root)


def sealed(out: RunWriter) -> Run:
    """The run in such a folder, complete."""
    write_manifest(out.path, out.manifest)
    return Run(out.path)


def trained(root: Path, arm: str, **weights: float) -> Run:
    """A run of train that logged three steps."""
    out = finished(root, "train", arm=arm, seed=0, weights=weights)
    out.metrics([{"step": step, "reward": 0.1 * step, "loss": 1.0} for step in (1, 2, 3)])
    return sealed(out)


def evaluated(root: Path, passes: dict[str, int], tasks: int = 40) -> Run:
    """A run of evaluate in which the first `passes[arm]` of the tasks pass."""
    arms = [trained(root, arm, **({"dpo": 1.0} if arm == "B" else {})) for arm in passes]
    out = finished(root, "evaluate", *arms)
    items = [
        eval_item(arm, task, task < passes[arm], hacked=arm == "B" and task == 0) | SAID
        for arm in passes
        for task in range(tasks)
    ]
    out.document("verdict", asdict(decide(items)))
    out.write_all((one["item_id"], {"item": one}, False) for one in items)
    return sealed(out)


def pages(path: Path) -> tuple[str, dict]:
    """A page and the numbers beside it."""
    return path.read_text(), json.loads(path.with_suffix(".json").read_text())


def test_the_chain_of_real_runs_is_told_whole_and_needs_nothing_beside_it(made, tmp_path):
    root = shutil.copytree(made, tmp_path / "artifacts", symlinks=True)
    done = call(root, "report", "extract-pairs")
    page, twin = pages(Path(done.stdout.strip()))
    assert [run["stage"] for run in twin["runs"]] == ["collect", "replay-teachers", "extract-pairs"]
    for heading in ("trace stream clean", "teachers affordable", "pairs prefer what passes", "numbers come from"):
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
    assert "CR2 interval" in page and "suspect" in page and "these checkpoints" in page
    assert [arm["arm"] for arm in twin["evaluations"][0]["arms"]] == ["start", "A", "B", "C"]
    assert "95.0 %" in page and "arm B: GRPO + 1 dpo" in page and '<g id="c2:' in page
    assert [x["why"] for x in twin["examples"]] == [
        "B passed where A failed",
        "A failed where B passed",
        "visible tests passed because they were tampered with",
    ]


def test_the_first_screen_says_what_was_shown_and_what_was_not(tmp_path):
    run = evaluated(tmp_path, {"start": 4, "A": 12, "B": 36, "C": 38})
    page, twin = pages(report.write(tmp_path, chain(tmp_path, [str(run.path)])))
    first = html.unescape(page[page.index("<h1>") : page.index("</header>")])
    (found,) = (one["conclusions"] for one in twin["evaluations"])
    assert "<h2>Shown</h2>" in first and "<h2>Not shown</h2>" in first
    assert all(sentence in first for sentence in (*found["shown"], *found["not_shown"]))
    (preference,) = (one for one in found["not_shown"] if "preference" in one)
    assert "imitation alone scored higher. C passes 95.0 %, B 90.0 %" in preference


def test_a_chain_is_found_where_its_folder_was_moved(tmp_path):
    evaluated(tmp_path / "made", {"A": 12, "B": 30})
    (tmp_path / "made").rename(tmp_path / "moved")
    found = chain(tmp_path / "moved", [])
    assert [run.manifest.stage for run in found] == ["train", "train", "evaluate"]


def test_no_two_of_many_arms_are_drawn_alike():
    numbers = charts.colours(["start", *(f"arm{number:02}" for number in range(36))])
    drawn = {(charts.colour(number), charts.dash(number)) for number in numbers.values()}
    assert len(drawn) == 37 and charts.colour(numbers["start"]) == 0
    nine = [charts.colour(charts.colours([str(n) for n in range(9)])[str(n)]) for n in range(9)]
    assert len(set(nine)) == 9


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


def test_the_legend_has_an_entry_for_each_arm_and_not_for_each_training():
    trainings = [{"arm": arm, "losses": f"GRPO + {arm}", "seed": seed} for arm in "AB" for seed in range(3)]
    assert charts.legend(trainings) == [{"arm": arm, "losses": f"GRPO + {arm}", "seeds": "3 seeds"} for arm in "AB"]
    assert charts.legend(trainings[:1])[0]["seeds"] == "seed 0"


def test_deleted_ancestors_are_left_out(made, tmp_path):
    root = shutil.copytree(made, tmp_path / "artifacts", symlinks=True)
    for path in root.glob("*/2*/manifest.json"):
        manifest = orjson.loads(path.read_text().replace(str(made), str(root)))
        path.write_bytes(orjson.dumps({**manifest, "seal": ""}))  # as a run from before seals has none
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


PNG = b"\x89PNG\r\n"


def probed(root: Path, status: str = "FAIL") -> list[Run]:
    """A pool with a fault, a verdict on it and a plot."""
    check = {
        "check": "T4e",
        "seed_id": "T4",
        "severity": "gate",
        "status": status,
        "threshold": "t > 2",
        "detail": EVIL,
        "evidence_path": "",
        "stat": 1.5,
        "placebo_q95": 2.5,
        "pass": status == "PASS",
    }
    told = check | {"check": "T4a", "severity": "report", "status": "PASS", "stat": None, "placebo_q95": None}
    ends = []
    for stage, document, summary in (
        ("probe-teacher-pool", "checks", {"verdict": "FAIL"}),
        ("probe-uat", "uat", {"verdict": status}),
        ("probe-plot", "", {"figures": ["05_placebos"]}),
    ):
        out = finished(root, stage, *[end for end in ends if stage == "probe-uat"], seed=0)
        if document:
            out.document(document, [told, check])
        else:
            out.write_file("05_placebos.csv", "direction,t\nv,1.5\n")
            out.write_file("05_placebos.png", PNG)
        out.set_summary(**summary)
        ends.append(sealed(out))
        (root / stage / "latest").symlink_to(ends[-1].path)
    return ends[1:]


def test_the_probe_has_its_verdict_its_checks_and_its_figures_with_their_numbers(tmp_path):
    probed(tmp_path)
    page, twin = pages(report.write(tmp_path, report.chain(tmp_path, [])))
    assert [run["stage"] for run in twin["runs"]] == ["probe-teacher-pool", "probe-uat", "probe-plot"]
    assert "<h1>Gradient probe: FAIL</h1>" in page and "Not passed: T4e." in page and EVIL not in page
    assert [c["check"] for c in twin["probes"][0]["checks"]] == ["T4e", "T4a"]
    assert twin["guards"][0]["missed"][0]["check"] == "T4e" and twin["guards"][0]["title"] == "teacher-pool"
    assert twin["figures"][0]["csv"] == "direction,t\nv,1.5\n"
    parser = Assets()
    parser.feed(page)
    assert sorted(parser.found) == ["a href", "img", "img src"]
    assert f'src="data:image/png;base64,{base64.b64encode(PNG).decode()}"' in page
    assert base64.b64encode(b"direction,t\nv,1.5\n").decode() in page


def test_a_watched_training_shows_its_alarm_and_its_figure(tmp_path):
    out = finished(tmp_path, "probe-watch", seed=0)
    check = {"check": "alarm", "seed_id": "watch", "severity": "gate", "status": "FAIL", "threshold": "no push"}
    out.document(
        "checks", [check | {"detail": "alarm after 2 steps", "evidence_path": "", "stat": 11.9, "pass": False}]
    )
    out.write_file("watch.csv", "step,push\n0,0.5\n")
    out.write_file("watch.png", PNG)
    out.set_summary(verdict="FAIL", figures=["watch"])
    sealed(out)
    page, twin = pages(report.write(tmp_path, report.chain(tmp_path, [str(out.path)])))
    assert twin["guards"][0]["missed"][0]["detail"] == "alarm after 2 steps" and "alarm after 2 steps" in page
    assert twin["figures"][0]["csv"] == "step,push\n0,0.5\n" and "push toward the hack" in page
    assert f'src="data:image/png;base64,{base64.b64encode(PNG).decode()}"' in page


def test_a_verdict_of_the_pipeline_stands_above_that_of_the_probe(tmp_path):
    run = evaluated(tmp_path, {"start": 4, "A": 12, "B": 38, "C": 14})
    named = [str(one.path) for one in (run, *probed(tmp_path, "PASS"))]
    page, twin = pages(report.write(tmp_path, report.chain(tmp_path, named)))
    assert (
        f"<h1>{PARTIAL}: a gain of 2 points</h1>" in page
        and "beyond random directions" in page
        and len(twin["figures"]) == 1
    )
