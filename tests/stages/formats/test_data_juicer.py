"""Data-Juicer in an environment of its own: joined by id, kept from installing, refused where it would do harm."""

import json
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.data_juicer import REAL_PROGRAM, needs_real, stand_in
from support.foreign import jsonl

from stages.errors import ComposerError, UsageError
from stages.formats.data_juicer import JuicerConfig, judge
from stages.import_traces import Config
from stages.runs import runner
from stages.runs.kinds import ORIGIN, ROLLOUT, STEP
from stages.runs.run import Run


@pytest.fixture
def program(tmp_path: Path) -> str:
    return stand_in(tmp_path / "elsewhere")


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text("process:\n  - text_length_filter:\n      min_len: 30\n")
    return str(path)


def row(answer: str) -> dict[str, Any]:
    call = {"id": "1", "function": {"name": "F", "arguments": '{"A":  1}'}}
    said = [{"role": "assistant", "content": answer, "tool_calls": [call]}] if answer else []
    return {"prompt": [{"role": "user", "content": "Q"}], "completion": said, "answer": "1", "reward": 1.0}


def imported(tmp_path: Path, dj: dict[str, Any], *rows: dict[str, Any]) -> Run:
    path = jsonl(tmp_path / "in" / "results.jsonl", *rows)
    return Run(runner.execute("import", {}, Config(paths=[str(path)], dj=dj), root=tmp_path / "artifacts").path)


def test_keep_drop_and_statistics_are_joined_by_id_and_texts_stay(
    tmp_path: Path, program: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "x")
    dj = {"recipe": recipe, "command": program}
    run = imported(tmp_path, dj, row("A" * 40), row("B" * 50), row(""))
    plain = imported(tmp_path, {}, row("A" * 40), row("B" * 50), row(""))
    assert [s["action"] for s in run.rows(STEP)] == [s["action"] for s in plain.rows(STEP)]  # not lowered, calls whole
    told = [orjson.loads(o["extra_json"]).get("data_juicer") for o in run.rows(ORIGIN)]
    assert told[0]["text_len"] + 10 == told[1]["text_len"] and told[2] is None and len(run.rows(ROLLOUT)) == 3


def test_what_a_recipe_drops_is_counted_by_name(tmp_path: Path, program: str, recipe: str) -> None:
    short = {**row("A" * 40), "completion": [{"role": "assistant", "content": "no"}]}
    run = imported(tmp_path, {"recipe": recipe, "command": program}, row("A" * 40), short)
    counts = run.manifest.counts
    assert (counts["traces"], counts["rollouts"], counts["dropped_data_juicer"]) == (2, 1, 1)
    assert "results.jsonl, line 2: data_juicer" in (run.path / "report.txt").read_text()
    assert json.loads((run.path / "sources.json").read_bytes())[0]["rollouts"] == 1


def test_its_failure_is_a_sentence(tmp_path: Path, program: str) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("fail")
    with pytest.raises(ComposerError, match="no such operator"):
        judge([("a", [])], JuicerConfig(recipe=str(bad), command=program), tmp_path)


def test_a_missing_program_or_one_in_this_environment_is_refused(tmp_path: Path, recipe: str) -> None:
    with pytest.raises(UsageError, match=r"dj\.command=DIR"):
        judge([], JuicerConfig(recipe=recipe, command="/no/such/dj-process"), tmp_path)
    with pytest.raises(UsageError, match="one of its own"):
        judge([], JuicerConfig(recipe=recipe, command=sys.executable), tmp_path)


def test_the_recipes_content_is_what_counts(tmp_path: Path, recipe: str) -> None:
    moved = tmp_path / "moved.yaml"
    moved.write_bytes(Path(recipe).read_bytes())
    assert JuicerConfig(recipe=recipe).identity() == JuicerConfig(recipe=str(moved), command="x").identity()
    moved.write_text("process: []\n")
    assert JuicerConfig(recipe=recipe).identity() != JuicerConfig(recipe=str(moved)).identity()
    with pytest.raises(UsageError, match="nowhere"):
        JuicerConfig(recipe=str(tmp_path / "nowhere.yaml")).identity()


@pytest.mark.slow
@pytest.mark.timeout(900)  # at its first start it looks for more packages than pip gave it
@needs_real
def test_data_juicer_itself_drops_and_what_it_drops_is_said_with_the_reason(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    operators = ("text_length_filter:\n      min_len: 30", "document_deduplicator:")
    recipe.write_text("process:\n" + "".join(f"  - {operator}\n" for operator in operators))
    short = {**row(""), "completion": [{"role": "assistant", "content": "no"}]}
    given = (row("A" * 40), short, row("B" * 50), {**row("A" * 40), "reward": 0.0})
    run = imported(tmp_path, {"recipe": str(recipe), "command": REAL_PROGRAM}, *given)
    counts = run.manifest.counts
    assert (counts["traces"], counts["rollouts"], counts["dropped_data_juicer"]) == (4, 2, 2)
    assert [step["action"][:1] for step in run.rows(STEP)] == ["A", "B"]
    told = [orjson.loads(o["extra_json"])["data_juicer"]["text_len"] for o in run.rows(ORIGIN)]
    assert told[0] + 10 == told[1]
    first = run.rows(ROLLOUT)[0]["rollout_id"]
    by_length, alike = json.loads(run.read_file("drops.json"))
    assert [(drop["line"], drop["reason"]) for drop in (by_length, alike)] == [(2, "data_juicer"), (4, "data_juicer")]
    said = f"text_len {len('user: Q') + len('assistant: no') + 2}"
    assert by_length["detail"].endswith(f": dropped by text_length_filter ({said})")
    assert alike["detail"].endswith(f": dropped by document_deduplicator, like {first}")
