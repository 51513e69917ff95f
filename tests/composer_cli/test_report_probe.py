"""The page on runs of the gradient probe: its verdict, checks and figures, and the alarm of a watched training."""

import base64
from pathlib import Path

from support.reported import EVIL, Assets, evaluated, finished, pages, sealed

from composer_cli import report
from stages.evaluation.verdict import PARTIAL
from stages.runs.artifact import Run

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
