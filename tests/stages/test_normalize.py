"""normalize: what a recipe keeps is as it was, what it drops is declared, whoever played the rollouts."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from needs import needs, where
from support.data_juicer import stand_in
from support.refusals import refused
from support.runs import rewritten, written
from support.transcripts import assistant, imported, jsonl, user

from composer_stages import export, normalize
from composer_stages.errors import BadInput, ComposerError, Incomplete, UsageError
from composer_stages.normalize import JuicerConfig, run_recipe
from composer_stages.pairs.actions import action_form
from composer_stages.rollouts.trace import (
    collected_with,
    conversation,
    lineage,
    require_unmixed,
    rollout_rows,
    transcripts,
)
from composer_stages.runs import runner, store
from composer_stages.runs.kinds import ORIGIN, ROLLOUT, SELECTION, STEP, TASK, Row
from composer_stages.runs.run import Run


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text("process:\n  - text_length_filter:\n      min_len: 30\n")
    return str(path)


@pytest.fixture
def make(tmp_path: Path, recipe: str) -> Callable[..., Run]:
    program = stand_in(tmp_path / "elsewhere")

    def normalized(source: Run, command: str = program, **settings: Any) -> Run:
        config = normalize.Config(dj={"recipe": recipe, "command": command, **settings})
        return Run(runner.execute("normalize", {"rollouts": source}, config, root=tmp_path / "artifacts").path)

    return normalized


def played(root: Path, *actions: str | None) -> Run:
    """A run of collect with one rollout an action; None failed before its first."""
    tasks = [{"task_id": t, "env": "e", "split": "train", "family": t, "prompt": "Q", "data_json": "{}"} for t in "ab"]
    rollouts: list[Row] = []
    steps: list[Row] = []
    for number, action in enumerate(actions):
        who = {"rollout_id": f"r{number}", "task_id": "ab"[number % 2], "env": "e"}
        rollouts.append({**who, "reward": None if action is None else float(len(action) > 20), "num_steps": 1})
        if action is not None:
            said = store.encode([{"role": "user", "content": "Q"}]).decode()
            row = {"step": 0, "num_steps": 1, "new_messages_json": said, "num_messages": 1, "action": action}
            steps.append({**who, **row, "done": True, "capture_level": "text"})
    return Run(written(root, "collect/played", [(TASK, tasks), (ROLLOUT, rollouts), (STEP, steps)]))


def test_kept_rollouts_are_unchanged_and_drops_are_recorded(
    tmp_path: Path, make: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "x")  # the program must not see it
    source = played(tmp_path, "A" * 40, "no", "B" * 50, "nor this", None)
    run = make(source)
    kept = {"r0", "r2", "r4"}
    for kind in (ROLLOUT, STEP):
        assert run.rows(kind) == [row for row in source.rows(kind) if row["rollout_id"] in kept]
    assert run.rows(TASK) == source.rows(TASK)
    told = {row["rollout_id"]: (row["kept"], row["stats_json"]) for row in run.rows(SELECTION)}
    assert [name for name, (stays, _) in told.items() if stays] == sorted(kept) and len(told) == 5
    assert orjson.loads(told["r0"][1])["text_len"] + 10 == orjson.loads(told["r2"][1])["text_len"]
    assert told["r1"][1] is None and told["r4"] == (True, None)  # dropped; without steps there is nothing to judge
    summary = run.manifest.summary
    assert (summary["kept"], summary["dropped"], summary["tasks_without_rollouts"]) == (3, 2, 1)
    assert (summary["mean_reward_kept"], summary["mean_reward_dropped"]) == (1.0, 0.0)
    report = (run.path / "report.txt").read_text()
    assert "  r1\n  r3\n" in report and "tasks without a rollout left: 1, among them b" in report


def test_rollouts_are_those_of_the_environment_and_the_players_of_the_run_that_was_filtered(
    tmp_path: Path, make: Callable[..., Run]
) -> None:
    """Pairs are voted by its outcomes, and what teachers played in part measures no model."""
    source = played(tmp_path, "A" * 40, "B" * 50)
    settings = {"env": {"name": "kata"}, "rollouts": {"mixed": 0.3}}
    rewritten(source.path / "manifest.json", lambda fields: fields | {"config": settings})
    run = make(make(Run(source.path)))
    assert collected_with(run)["env"] == {"name": "kata"} and action_form(run) is action_form(Run(source.path))
    with pytest.raises(BadInput, match="mixed"):
        require_unmixed(run)
    shutil.rmtree(source.path)
    assert collected_with(Run(run.path)) == {}


def test_imported_rollouts_keep_their_origins(tmp_path: Path, make: Callable[..., Run]) -> None:
    rows = [
        {"messages": [user("Q"), assistant(text)], "resolved": True, "task_id": f"t{number}"}
        for number, text in enumerate(("A" * 40, "no", "B" * 50))
    ]
    file = jsonl(tmp_path / "in" / "chats.jsonl", *rows)
    source = imported(tmp_path, file, model="m")
    run = make(source)
    assert lineage(run) >= {run.manifest.content, source.manifest.content, store.file_sha256(Path(file))}
    whole = source.rows(ORIGIN)
    assert run.rows(ORIGIN) == [whole[0], whole[2]] and len(run.rows(STEP)) == 2
    unrecorded = {name: counts[2] for name, counts in run.manifest.summary["collection_checks"].items()}
    assert unrecorded["prompt extends the last"] == 2, "what the source cannot tell is no failure"


def test_normalized_run_can_be_exported(
    tmp_path: Path, make: Callable[..., Run], collected: Callable[..., Run]
) -> None:
    source = collected()
    run = make(source)
    assert run.manifest.counts["dropped"] == 0 and run.rows(STEP) == source.rows(STEP)
    assert run.manifest.outputs["steps"]["content_sha256"] == source.manifest.outputs["steps"]["content_sha256"]
    done = runner.execute("export", {"rollouts": run}, export.Config(format="trl"), root=tmp_path / "artifacts")
    assert done.status == "complete"
    for _, steps in rollout_rows(run):
        assert conversation(steps)[:-1] == transcripts(steps)[-1]


def test_a_recipe_that_keeps_nothing_or_is_not_named_is_refused(tmp_path: Path, make: Callable[..., Run]) -> None:
    source = played(tmp_path, "no", "nor")
    refused(lambda: make(source), Incomplete, code="recipe-keeps-nothing", num_rollouts=2)
    refused(lambda: make(source, recipe=None), UsageError, code="recipe-not-named")


def test_a_full_disk_in_data_juicer_is_a_full_disk(tmp_path: Path, make: Callable[..., Run]) -> None:
    program = tmp_path / "elsewhere" / "full"
    program.write_text("#!/bin/sh\necho working >&2; cat /dev/zero >/dev/full\n")
    program.chmod(0o755)
    with pytest.raises(ComposerError, match=r"^The disk is full or cannot be written: .*No space left on device"):
        make(played(tmp_path, "A" * 40), command=str(program))


def test_error_of_data_juicer_is_reported(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("fail")
    config = JuicerConfig(recipe=str(bad), command=stand_in(tmp_path / "elsewhere"))
    refused(lambda: run_recipe([("a", [])], config, tmp_path), ComposerError, "no such operator", code="juicer-failed")


def test_statistics_that_are_no_number_are_null_and_lost_ids_are_named(tmp_path: Path, recipe: str) -> None:
    program = Path(stand_in(tmp_path / "elsewhere"))
    config, script = JuicerConfig(recipe=recipe, command=str(program)), program.read_text()
    said: list[tuple[str, list[dict[str, str]]]] = [("a", [{"role": "user", "content": "A" * 40}])]
    program.write_text(script.replace('len(row["text"])}', 'float("nan")}'))
    assert store.encode(run_recipe(said, config, tmp_path).statistics) == b'{"a":{"text_len":null}}'
    program.write_text(script.replace("{**row,", '{**row, "id": 7,'))
    refused(lambda: run_recipe(said, config, tmp_path), ComposerError, code="juicer-without-ids", id=7)


def test_damaged_files_of_data_juicer_are_named(tmp_path: Path, recipe: str) -> None:
    program = Path(stand_in(tmp_path / "elsewhere"))
    config, script = JuicerConfig(recipe=recipe, command=str(program)), program.read_text()
    said: list[tuple[str, list[dict[str, str]]]] = [("a", [{"role": "user", "content": "A" * 40}])]
    trace = 'os.makedirs(os.path.dirname(told["--export_path"]) + "/trace")\n'
    trace += 'open(os.path.dirname(told["--export_path"]) + "/trace/%s-x.jsonl", "w").write(\'%s\')\n'
    for more, code in (
        ('open(told["--export_path"], "a").write(\'{"id": "a", "te\')\n', "juicer-file-damaged"),
        ('open(told["--export_path"], "ab").write(b"7\\n")\n', "juicer-file-damaged"),
        (trace % ("filter", '{"id": "a"'), "juicer-file-damaged"),
        (trace % ("duplicate", '{"dup1": {"id": "a"}}'), "juicer-without-ids"),
    ):
        program.write_text(script + more)
        refused(lambda: run_recipe(said, config, tmp_path), ComposerError, code=code)


def test_a_missing_program_or_one_in_this_environment_is_refused(tmp_path: Path, recipe: str) -> None:
    for command, code in (("/no/such/dj-process", "juicer-missing"), (sys.executable, "juicer-in-own-environment")):
        config = JuicerConfig(recipe=recipe, command=command)
        refused(lambda config=config: run_recipe([], config, tmp_path), UsageError, code=code)  # type: ignore[misc]


def test_a_recipe_is_identified_by_its_content(tmp_path: Path, recipe: str) -> None:
    moved = tmp_path / "moved.yaml"
    moved.write_bytes(Path(recipe).read_bytes())
    assert JuicerConfig(recipe=recipe).identity() == JuicerConfig(recipe=str(moved), command="x").identity()
    moved.write_text("process: []\n")
    assert JuicerConfig(recipe=recipe).identity() != JuicerConfig(recipe=str(moved)).identity()
    refused(JuicerConfig(recipe=str(tmp_path / "nowhere.yaml")).identity, UsageError, code="recipe-unreadable")


@needs("data-juicer")
@pytest.mark.slow
@pytest.mark.timeout(900)  # at its first start it looks for more packages than pip gave it
def test_data_juicer_itself_drops_what_is_short_and_what_is_equal(
    tmp_path: Path, make: Callable[..., Run], recipe: str
) -> None:
    Path(recipe).write_text(Path(recipe).read_text() + "  - document_deduplicator:\n")
    run = make(played(tmp_path, "A" * 40, "no", "B" * 50, "A" * 40), command=where("data-juicer"))
    told = {row["rollout_id"]: row for row in run.rows(SELECTION)}
    assert [told[f"r{i}"]["kept"] for i in range(4)] == [True, False, True, False]
    assert told["r3"]["reason"] == "document_deduplicator, like r0"
    assert told["r1"]["reason"].startswith("text_length_filter (text_len ") and told["r0"]["reason"] is None
    assert orjson.loads(told["r0"]["stats_json"])["text_len"] == len("user: Q\n\nassistant: ") + 40
    assert [row["action"] for row in run.rows(STEP)] == ["A" * 40, "B" * 50]


def test_paths_are_those_of_where_the_command_runs(
    tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data-Juicer runs in a folder of its own, in which a relative path is another file."""
    program, source = stand_in(tmp_path / "elsewhere"), played(tmp_path, "A" * 40)
    monkeypatch.chdir(tmp_path)
    config = normalize.Config(dj={"recipe": "recipe.yaml", "command": f"elsewhere/{Path(program).name}"})
    done = runner.execute("normalize", {"rollouts": source}, config, root=Path("artifacts"))
    assert len(Run(done.path).rows(ROLLOUT)) == 1
