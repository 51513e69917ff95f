"""`composer compare A B`: one screen, one page, every flip, JSON, and the exit code of the decision."""

import html
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from starlette.testclient import TestClient
from support.runs import eval_item, written

import composer_post_training as composer
from composer_cli.app import main
from composer_cli.view.app import build, page_of
from composer_stages.runs.kinds import EVAL_ITEM
from tests.docs.documents import ROOT, blocks


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    """Two tables of 60 tasks, of which the second gains 25."""
    for name, passed in (("before", 10), ("after", 35)):
        rows = "".join(f"task-{at},{int(at < passed)}\n" for at in range(60))
        (tmp_path / f"{name}.csv").write_text("id,score\n" + rows)
    return [str(tmp_path / "before.csv"), str(tmp_path / "after.csv")]


def ran(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["compare", *words, "--quiet"])
    return ended.value.code or 0, capsys.readouterr().out  # type: ignore[return-value]


def test_the_summary_for_a_comment_shows_names_as_they_are(
    pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hostile = tmp_path / "@all|[x](y)<b>.csv"
    hostile.write_bytes(Path(pair[1]).read_bytes())
    for path in (Path(pair[0]), hostile):
        path.write_text(path.read_text().replace("task-", "\u202etask-\x1b"))
    code, out = ran(capsys, pair[0], str(hostile), "--markdown", "summary.md", "--html", "page.html")
    assert "\\u202etask-\\x1b" in out and not {"\u202e", "\x1b"} & {*out, *Path("page.html").read_text()}
    summary = (tmp_path / "summary.md").read_text()
    bold, _, rest = summary.partition("\n")
    assert code == 0 and html.unescape(bold) == f"**{out.splitlines()[0]}**"
    table, details = rest.split("<details>")
    assert not {"@", "[", "<"} & {*table} and len({line.count("|") for line in table.strip().splitlines()}) == 1
    assert "<b>" not in details and "25 higher, 0 lower" in details


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num", "lost", "other", "code"), [(2000, 1, "", 0), (60, 0, "", 3), (60, 25, "", 1), (60, 0, "x", 4)]
)
def test_the_workflow_of_the_page_passes_where_a_model_is_shown_not_to_be_worse(
    tmp_path: Path, num: int, lost: int, other: str, code: int
) -> None:
    """By the script of the action's step, with a log's name that would be a command if the script held it."""
    (block,) = (block for block in blocks(ROOT / "docs" / "compare.md") if block.language == "yaml")
    (inputs,) = (step["with"] for step in yaml.safe_load(block.text)["jobs"]["not-worse"]["steps"] if "with" in step)
    steps = yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"]
    assert not any("${{" in step.get("run", "") for step in steps)
    script = next(step["run"] for step in steps if step.get("id") == "compare")
    after = "$(touch hacked).jsonl"
    for name, passed, prefix in ((inputs["before"], 40, "task"), (after, 40 - lost, f"{other}task")):
        rows = "".join(json.dumps({"id": f"{prefix}-{at}", "score": int(at < passed)}) + "\n" for at in range(num))
        (tmp_path / name).write_text(rows)
    program = tmp_path / "composer" / "bin" / "composer"
    program.parent.mkdir(parents=True)
    program.symlink_to(Path(sys.executable).parent / "composer")
    files = {"GITHUB_STEP_SUMMARY": str(tmp_path / "step.md"), "GITHUB_OUTPUT": str(tmp_path / "output")}
    (tmp_path / "gate.toml").write_text('[[metric]]\nscore = "score"\nnot_worse = 0.02\n')
    (tmp_path / "page.html").write_text("of an earlier comparison")
    for options, policy in ((inputs["options"].replace("\n", " \r\n"), ""), ("", "gate.toml")):
        texts = {"BEFORE": inputs["before"], "AFTER": after, "OPTIONS": options, "POLICY": policy, "PAGE": "page.html"}
        environment = {**os.environ, "RUNNER_TEMP": str(tmp_path), **files, **texts}
        ended = subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, env=environment, capture_output=True)
        assert ended.returncode == code and not (tmp_path / "hacked").exists(), ended.stderr
    assert (tmp_path / "page.html").is_file() == (tmp_path / "step.md").is_file() == (code != 4)
    artifacts, summaries = (
        {line for line in (tmp_path / "output").read_text().splitlines() if line.startswith(name)}
        for name in ("artifact=comparison-", "summary=")
    )
    assert (len(artifacts), len(summaries)) == (2, 0 if code == 4 else 2)


def test_a_comparison_is_no_log_and_several_runs_are_no_side(
    pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the home folder for a ~ that a shell leaves in `--option=~`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for words in (pair, pair[::-1]):
        ran(capsys, *words, "--artifacts=~/runs", "--html=~/page.html")
    assert not (tmp_path / "~").exists() and (tmp_path / "page.html").is_file()
    made = tmp_path / "runs" / "compare"
    (tmp_path / "logs").mkdir()
    shutil.copytree((made / "latest").resolve(), tmp_path / "logs" / "run")
    shutil.copy(pair[0], tmp_path / "logs")
    for path, part in (
        (made / "latest", "is a comparison, which has no rollouts"),
        (made, "is no single run: it holds 2"),
        (made / "2*", "it holds 2"),
        (tmp_path / "logs" / "*", "beside others"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["compare", str(path), pair[0], "--quiet"])
        assert ended.value.code == 4 and part in " ".join(capsys.readouterr().err.split())


def test_one_command_says_which_is_better(
    pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out = ran(capsys, *pair)
    assert code == 0 and out.startswith("B (after) is better than A (before): +41.7 points [")
    assert "25 higher, 0 lower, 35 the same" in out and "20 of 25; --flips" in out and "task-34" not in out
    assert not {"arm", "channel", "sha256", "--from"} & {*out.split()}
    again, every = ran(capsys, *pair, "--flips", "--html", "page.html")
    assert again == 0 and sum(line.startswith("task-") for line in every.splitlines()) == 25
    page = (tmp_path / "page.html").read_text()
    assert "<svg" in page and "is better than" in page and "http" not in page
    view = TestClient(build(tmp_path / "artifacts", "token"), base_url="http://127.0.0.1/token")
    made = (tmp_path / "artifacts" / "compare" / "latest").resolve()
    shown = view.get(f"run/compare/{made.name}").text
    places = [shown.index(part) for part in (out.partition(", p ")[0], "<svg", "<h3>The sides", "<h3>Tasks</h3>")]
    assert places == sorted(places) and "<th></th>" not in shown
    assert "by +41.7 points [" in view.get("").text
    worse, _ = ran(capsys, *pair[::-1])
    assert worse == 1
    code, out = ran(capsys, *pair, "--json")
    assert json.loads(out)["summary"]["differences"][0]["wins"] == 25
    none, out = ran(capsys, pair[0], pair[0], "--min-gain", "0.1")
    assert none == 1 and out.splitlines()[1].startswith("There is no difference of 10 points between")


def test_every_answer_knows_that_lower_is_better(
    pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss that rose from 10 to 35 of 60: the sentence, the exit code, the JSON, the page and the view say worse."""
    monkeypatch.chdir(tmp_path)
    code, out = ran(capsys, *pair, "--lower-is-better", "--html", "page.html")
    assert code == 1 and out.startswith("B (after) is worse than A (before): +41.7 points [")
    assert "; lower is better." in out.splitlines()[0] and "25 higher, 0 lower" in out and "pass rate" not in out
    assert "is worse than" in (tmp_path / "page.html").read_text()
    better, out = ran(capsys, *pair[::-1], "--lower-is-better", "--json")
    summary = json.loads(out)["summary"]
    assert better == 0 and summary["lower_is_better"] and summary["verdict"] == "better"
    assert (summary["differences"][0]["wins"], round(summary["differences"][0]["estimate"], 3)) == (25, -0.417)
    view = TestClient(build(tmp_path / "artifacts", "token"), base_url="http://127.0.0.1/token")
    made = (tmp_path / "artifacts" / "compare" / "latest").resolve()
    shown = view.get(f"run/compare/{made.name}").text
    assert "is better than" in shown and "pass rate" not in shown and "lower is better" in shown
    higher, _ = ran(capsys, *pair, "--set", "lower_is_better=false")
    assert higher == 0


def test_tasks_that_differ_are_linked_to_their_rollouts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address of a run opens in the view; scores in a table are nowhere else."""
    monkeypatch.chdir(tmp_path)
    items = [eval_item(arm, task, passed=arm == "B") for arm in "AB" for task in range(8)]
    run = written(tmp_path / "artifacts", "evaluate/20260102T030405Z-kata", [(EVAL_ITEM, items)])
    _, out = ran(capsys, str(run), "--flips", "--html", "page.html")
    address = next(word for word in out.split() if word.startswith("rollout/"))
    assert address == "rollout/evaluate/20260102T030405Z-kata?id=A/0/t0%230%400" and "composer view" in out
    assert address in (tmp_path / "page.html").read_text()
    view = TestClient(build(tmp_path / "artifacts", "token"), base_url="http://127.0.0.1")
    found = view.get(f"/token/{page_of(address)}")
    assert found.status_code == 200 and "A/0/t0#0@0" in found.text


def test_long_names_leave_the_report_100_columns_and_all_its_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sides = [tmp_path / f"{name}-of-a-model-with-a-long-name.csv" for name in ("before", "after")]
    ids = [f"benchmarks/of-a-very-long-name/{number:03}/{'part-' * 20}end" for number in range(60)]
    for side, passed in zip(sides, (10, 35), strict=True):
        side.write_text("id,score\n" + "".join(f"{one},{int(at < passed)}\n" for at, one in enumerate(ids)))
    _, out = ran(capsys, *map(str, sides))
    assert max(map(len, out.replace(str(tmp_path), "").splitlines())) <= 100
    assert {"60", "[6.9,", "[+28.6,"} <= {*out.split()} and out.count("  0  1\n") == 20
    assert "\u2026010/part-part" in out and ids[10] in ran(capsys, *map(str, sides), "--flips")[1]


def test_compare_is_a_python_function(pair: list[str], tmp_path: Path) -> None:
    found = composer.compare(*pair, artifacts=tmp_path / "runs", quiet=True)
    assert (found.decision, round(found.difference, 3)) == ("better", 0.417)
    assert found.interval[0] < found.difference < found.interval[1] and found.p < 0.001
    again = composer.compare(*pair, html=str(tmp_path / "page.html"), artifacts=tmp_path / "runs", quiet=True)
    assert again.path == found.path and "<svg" in (tmp_path / "page.html").read_text()
    assert found.items.num_rows == 60 and "<svg" in found._repr_html_() and "is better" in repr(found)


def test_the_same_logs_elsewhere_are_not_compared_again(pair: list[str], tmp_path: Path) -> None:
    first = composer.compare(*pair, artifacts=tmp_path / "runs", quiet=True)
    moved = tmp_path / "elsewhere" / tmp_path.name
    moved.mkdir(parents=True)
    paths = [Path(path).rename(moved / Path(path).name) for path in pair]
    assert composer.compare(*paths, artifacts=tmp_path / "runs", quiet=True).path == first.path


def test_an_import_keeps_whether_lower_is_better(tmp_path: Path) -> None:
    sides = []
    for name, off in (("a", 0.5), ("b", 0.3)):
        about = {"doc": {}, "target": "1", "filtered_resps": ["1"], "metrics": ["wer"]}
        rows = [{"doc_id": at, "doc_hash": f"{at:02d}" * 32, **about, "wer": off + at / 100} for at in range(30)]
        (tmp_path / name).mkdir()
        samples, time = tmp_path / name / "samples_speech_2026-01-02T03-04-05.jsonl", "2026-01-02T03-04-05"
        samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
        said = {"results": {}, "config": {}, "configs": {}, "higher_is_better": {"speech": {"wer": False}}}
        (tmp_path / name / f"results_{time}.json").write_text(json.dumps(said))
        sides.append(composer.import_traces(tmp_path / name, artifacts=tmp_path / "runs", quiet=True))
    assert composer.compare(*sides, artifacts=tmp_path / "runs", quiet=True).decision == "better"


def test_runs_are_compared_as_logs_are(pair: list[str], tmp_path: Path) -> None:
    """Rollouts of an import beside the file that they came from: the same tasks, no difference."""
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {at}?"}], "completion": "It is.", "reward": at % 2}
        for at in range(12)
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    imported = composer.import_traces(path, artifacts=tmp_path / "runs", quiet=True)
    found = composer.compare(imported, path, artifacts=tmp_path / "runs", quiet=True)
    assert found.difference == 0.0 and found.items.num_rows == 12
