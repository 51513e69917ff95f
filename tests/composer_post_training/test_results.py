"""The differences of an evaluation as values: those that its `verdict.json` holds, by the names there."""

import re
import shutil
from pathlib import Path

import duckdb
import orjson
import pytest
from support.elements import Elements
from support.server import Reply, answer, serving

import composer_post_training as composer
from composer_post_training.results import OPEN_LINES, Difference, Evaluation, Rollout
from composer_stages.runs import queries


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory):
    """Three models behind a server on fourteen tasks: B and C always right, A always wrong."""

    def reply(body, earlier):
        return Reply(body=answer("z" if body["model"] == "A" else body["messages"][0]["content"][-1]))

    root = tmp_path_factory.mktemp("evaluation")
    with serving(reply) as server:
        policies = {name: {"model": name, "base_url": server.url} for name in "ABC"}
        env = {"name": "support.environments:GuessEnv", "split": "train"}
        run = composer.evaluate(artifacts=root, policies=policies, env=env, tasks=14)
        preset = root / "mine.toml"
        preset.write_text('[[stage]]\nstage = "evaluate"\n')
        chosen = {"evaluate.policies": policies, "evaluate.env": env, "evaluate.tasks": 14}
        assert composer.run(preset, chosen, artifacts=root, quiet=True).differences == run.differences
    return run, root


def test_an_evaluation_returns_its_differences(evaluation):
    run, root = evaluation
    verdict = orjson.loads((run.path / "verdict.json").read_bytes())
    assert isinstance(run, Evaluation) and run.verdict == verdict["decision"] == "PARTIAL"
    gain, over = run.differences[:2]
    assert isinstance(gain, Difference)
    assert (gain.rate, gain.treatment, gain.baseline, gain.verdict) == ("pass@1", "B", "A", "PARTIAL")
    for name in ("estimate", "low", "high", "p_value", "num_tasks", "num_seeds"):
        assert getattr(gain, name) == verdict["gain"][name] and getattr(over, name) == verdict["over_control"][name]
    assert (over.baseline, over.estimate, over.verdict, gain.estimate) == ("C", 0.0, None, 1.0)
    assert gain.units == "7 families" and gain.p_holm is None
    assert run.differences.pandas()["p_value"].tolist()[0] == gain.p_value
    assert [one.rate for one in composer.find("evaluate", root).differences] == [one.rate for one in run.differences]


def test_differences_are_shown_as_a_table_in_points(evaluation):
    run, _ = evaluation
    lines = repr(run.differences).splitlines()
    assert lines[0].split()[:2] == ["rate", "difference"] and "+100.0" in lines[1] and "PARTIAL" in lines[1]
    assert "7 families" in lines[1] and "B - C" in lines[2] and lines[2].endswith("-")
    assert repr(run).endswith(repr(run.differences)) and run._repr_html_().count("<table>") == 2


def test_a_chain_gives_the_differences_of_its_evaluation(evaluation):
    run, _ = evaluation
    assert composer.Chain({"collect": run, "evaluate": run}).differences == run.differences
    with pytest.raises(composer.UsageError, match="No entry of this chain is an evaluation; it has collect"):
        _ = composer.Chain({"collect": composer.Run(run.path)}).differences


def test_an_evaluation_that_compared_nothing_has_no_differences(evaluation):
    run, _ = evaluation
    ended = Evaluation(run.path)
    ended.document = {**run.document, "decision": "INVALID-RUN", "comparisons": []}
    assert ended.differences == () and "could not be compared" in repr(ended.differences)
    ended.document = {}
    assert ended.differences == () and ended.verdict is None


def test_a_verdict_of_an_earlier_version_is_refused_and_not_empty(evaluation, tmp_path):
    run = Evaluation(shutil.copytree(evaluation[0].path, tmp_path / "evaluate" / evaluation[0].path.name))
    old = {key: value for key, value in run.document.items() if key != "comparisons"}
    (run.path / "verdict.json").write_bytes(orjson.dumps(old))
    del run.document
    with pytest.raises(composer.BadInput, match=r"earlier version of Composer.*`composer compare evaluate/"):
        _ = run.differences
    assert "evaluate" in repr(run) and run._repr_html_().count("<table>") == 1


@pytest.mark.parametrize(("lines", "columns"), [(24, 80), (40, 120), (60, 40)])
def test_a_printed_rollout_fits_the_screen(
    made: Path, monkeypatch: pytest.MonkeyPatch, lines: int, columns: int
) -> None:
    monkeypatch.setenv("LINES", str(lines))
    monkeypatch.setenv("COLUMNS", str(columns))
    run = composer.find("collect", made)
    for rollout in run.rollouts():
        printed = str(rollout).splitlines()
        assert len(printed) <= lines and max(map(len, printed)) <= columns
        assert printed[0].startswith(rollout.rollout_id[:20]) and "\n" not in repr(rollout)
        assert "submit" in printed[-2] or "more lines" in printed[-1] or "pass" in printed[-1], "its end"
        assert queries.outcome(rollout.row) == queries.rollout(run, rollout.rollout_id)[0]["outcome"]


def test_the_outcome_of_a_row_is_that_of_the_list(made: Path) -> None:
    run = composer.find("collect", made)
    rows = [
        run.rollouts()[0].row | {"reward": reward, "hacked": hacked, "error_type": error}
        for reward, hacked, error in (
            (1.0, None, None),
            (0.5, True, None),
            (None, None, None),
            (None, False, "TimeoutError"),
            (1.0, True, "TimeoutError"),
        )
    ]
    found = [queries.outcome(row) for row in rows]
    assert found == ["passed", "failed, hacked", "not graded", "error", "passed, hacked, error"]
    question = f"SELECT {queries.OUTCOME.format('reward')} FROM (SELECT unnest(?, recursive := true))"
    columns = ("reward", "hacked", "error_type")
    with duckdb.connect() as connection:
        asked = connection.execute(question, [[{name: row[name] for name in columns} for row in rows]]).fetchall()
    assert [words for (words,) in asked] == found


def test_a_notebook_gets_the_conversation_and_nothing_that_a_model_wrote_as_markup(made: Path) -> None:
    first = composer.find("collect", made).rollouts()[0]
    hostile = "<script>alert(1)</script></pre><img src=x onerror=alert(2)>\u202e\x1b[2J"
    steps = [{**first.steps[0], "action": hostile, "observation": hostile + "\nline" * OPEN_LINES}]
    row = {**first.row, "task_id": hostile, "error_type": hostile, "error": hostile, "metrics_json": '{"<b>x": 1.0}'}
    page = Rollout(hostile, {}, first.messages, steps, row, first.folder)._repr_html_()
    found = Elements(page)
    assert {tag for tag, _ in found.tags} == {"div", "p", "b", "table", "tr", "td", "pre", "details", "summary"}
    assert {name for name, _ in found.attributes} == {"style"} and "url(" not in page
    assert found.text.count("<script>alert(1)</script>") >= 4 and "\u202e" not in page and "\x1b" not in page
    assert re.search(rf"<summary><b>observation, step 1[^<]*</b>, {OPEN_LINES + 1} lines</summary><pre", page)  # folded
    assert re.search(r"assistant, step 1</b><pre", page) and "grading" in found.text and "ended by" in found.text


def test_an_evaluated_rollout_without_steps_is_a_conversation_too(made: Path) -> None:
    first = composer.find("collect", made).rollouts()[0]
    row = {**first.row, "reward": None, "transcript_json": '[{"role": "user", "content": "1 + 1?"}]'}
    shown = Rollout("one", {}, [], [], row, first.folder)
    assert "1 + 1?" in str(shown) and "1 + 1?" in shown._repr_html_() and "not graded" in str(shown)
