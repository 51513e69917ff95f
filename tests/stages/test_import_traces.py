"""import: accounts, groups, duplicates, verdicts, and a run that others can read."""

import json
from pathlib import Path
from typing import Any

import pytest
from needs import REAL, needs
from support.transcripts import INSTANCE, assistant, document, imported, jsonl, user

from composer_stages.errors import BadInput
from composer_stages.formats import FORMATS, readers
from composer_stages.import_traces import Config
from composer_stages.rollouts.trace import by_rollout, states
from composer_stages.runs.kinds import ORIGIN, ROLLOUT, STEP, TASK


def answered(question: str, answer: str, reward: float, **more: Any) -> dict[str, Any]:
    said = {"prompt": [user(question)], "completion": [assistant(answer)]}
    return {**said, "answer": "1", "reward": reward, **more}


def models(folder: Path) -> Path:
    """Two models on the same two questions, the first with two samples of each."""
    for name, rewards in (("one", (1.0, 0.0)), ("two", (0.0,))):
        rows = [answered(q, f"{name}-{i}", r) for q in ("q1", "q2") for i, r in enumerate(rewards)]
        jsonl(folder / f"{name}.results.jsonl", *rows)
        document(folder / f"{name}.metadata.json", {"env": "sums", "model": name})
    return folder


def test_models_on_the_same_tasks_are_groups(tmp_path: Path) -> None:
    run = imported(tmp_path, models(tmp_path / "in"))
    rollouts, tasks = run.rows(ROLLOUT), run.rows(TASK)
    assert len(rollouts) == 6 and len(tasks) == 2 and {r["group_id"] for r in rollouts} == {t["task_id"] for t in tasks}
    assert [(r["model"], r["sample_idx"], r["source"]) for r in rollouts[:3]] == [
        ("one", at, "verifiers") for at in (0, 1, 0)
    ]
    assert run.manifest.counts == {"traces": 6, "rollouts": 6, "failed": 0, "steps": 6}
    assert run.manifest.summary["failed_checks"] == []


def test_traces_in_are_rollouts_out_and_named_drops(tmp_path: Path) -> None:
    rows = [answered("q1", "a", 1.0), "{torn", {"foreign": 1}, answered("q1", "ghp_" + "a1B2" * 9, 0.0)]
    jsonl(tmp_path / "in" / "results.jsonl", *rows)
    run = imported(tmp_path, tmp_path / "in", model="m")
    counts, sources = run.manifest.counts, json.loads((run.path / "sources.json").read_bytes())
    assert counts["traces"] == counts["rollouts"] + counts["dropped_not_json"] + counts["dropped_foreign_record"] == 4
    assert sources[0]["redacted"] == {"github-token": 1} and run.manifest.summary["redacted"] == {"github-token": 1}
    report = (run.path / "report.txt").read_text()
    assert "in/results.jsonl, line 2: not_json" in report and "in/results.jsonl, line 3: foreign_record" in report
    assert "redacted: 1 github-token" in report and "not recorded" in report and "ghp_a1B2" not in report
    assert {r["model"] for r in run.rows(ROLLOUT)} == {"m"}
    assert not any(b"ghp_a1B2" in path.read_bytes() for path in run.path.rglob("*") if path.is_file())


def test_a_log_whose_samples_all_failed_is_refused_with_the_first_error(tmp_path: Path) -> None:
    """It was imported as complete, with eleven checks over nothing."""
    asked = user("q", source="input")
    failed = {"id": 1, "epoch": 1, "input": "q", "messages": [asked], "error": {"message": "no GPU", "traceback": ""}}
    played = {**failed, "id": 2, "error": None, "messages": [asked, assistant("a")]}
    for name, samples in (("failed", [failed]), ("mixed", [failed, played])):
        log = {"version": 2, "status": "error", "eval": {"task": "t", "model": "m"}, "samples": samples}
        document(tmp_path / f"{name}.json", log)
    with pytest.raises(BadInput, match=r"1 rollout failed .*/failed\.json, line 1: no GPU\."):
        imported(tmp_path, tmp_path / "failed.json")
    assert imported(tmp_path, tmp_path / "mixed.json").manifest.counts["failed"] == 1


def test_redaction_shows_a_preview_and_has_a_way_off(tmp_path: Path) -> None:
    secret = "ghp_" + "a1B2" * 9
    jsonl(tmp_path / "in" / "results.jsonl", answered("q1", f"export T={secret} && run", 1.0))
    run = imported(tmp_path, tmp_path / "in", model="m")
    report = (run.path / "report.txt").read_text()
    assert "in/results.jsonl, line 1: export T=[github-token, 40 characters] && run" in report
    assert "--set redact=false" in report and secret not in report
    off = imported(tmp_path, tmp_path / "in", model="m", redact=False)
    assert off.rows(STEP)[0]["action"] == f"export T={secret} && run" and off.manifest.summary["redacted"] == {}
    assert off.path != run.path


def test_a_rollout_that_is_there_twice_counts_once_and_knows_its_batch(tmp_path: Path) -> None:
    task = {"type": "T", "key": "k", "data": {}}
    nodes = [{"message": user("q")}, {"parent": 0, "sampled": True, "message": assistant("a")}]

    def rollout(name: str) -> dict[str, Any]:
        trace = {"id": f"t-{name}", "task": task, "nodes": nodes, "rewards": {"r": {"score": 1.0}}}
        return {"id": name, "env": {"id": "e"}, "task": task, "traces": [trace]}

    jsonl(tmp_path / "step_0" / "train" / "all" / "traces.jsonl", rollout("1"), rollout("2"))
    jsonl(tmp_path / "step_0" / "train" / "effective" / "traces.jsonl", rollout("2"))
    run = imported(tmp_path, tmp_path / "step_0")
    assert [(o["rollout_id"], o["effective"]) for o in run.rows(ORIGIN)] == [("t-1", False), ("t-2", True)]
    assert run.manifest.counts["dropped_duplicate"] == 1 and run.manifest.counts["traces"] == 3


def test_rollouts_of_two_models_under_one_id_are_two(tmp_path: Path) -> None:
    """As two collections of one environment have them; a third that is the first again counts once."""
    rows = [
        {"rollout_id": "r", "prompt": "1+1?", "completion": str(n), "advantage": 0.0, "reward": 1.0} for n in (1, 2, 1)
    ]
    run = imported(tmp_path, jsonl(tmp_path / "logged.jsonl", *rows))
    ids = [row["rollout_id"] for row in run.rows(ROLLOUT)]
    assert len(ids) == len({*ids}) == 2 and ids[0] == "r" and ids[1].startswith("r~")
    assert {row["rollout_id"] for row in run.rows(STEP)} == {*ids} == {row["rollout_id"] for row in run.rows(ORIGIN)}
    assert run.manifest.counts["dropped_duplicate"] == 1


def test_shares_that_add_up_to_one_are_a_full_reward(tmp_path: Path) -> None:
    run = imported(
        tmp_path, jsonl(tmp_path / "r.jsonl", answered("q", "a", 0.7 + 0.2 + 0.1), answered("q", "b", 0.999))
    )
    assert [row["reward"] for row in run.rows(ROLLOUT)] == [1.0, 0.999]


def test_the_plainest_wording_of_a_task_is_its_prompt(tmp_path: Path) -> None:
    asked = user("You are an agent with many instructions. It breaks. Now go.")
    document(tmp_path / "in" / f"{INSTANCE}.traj.json", [asked, assistant("```bash\nls\n```")])
    row = {"instance_id": INSTANCE, "problem_statement": "It breaks.", "messages": [user("Go.")]}
    jsonl(tmp_path / "in" / "rows.jsonl", row)
    run = imported(tmp_path, tmp_path / "in")
    (task,) = run.rows(TASK)
    assert (task["task_id"], task["prompt"], task["family"]) == (INSTANCE, "It breaks.", "owner/repo")
    assert {r["group_id"] for r in run.rows(ROLLOUT)} == {INSTANCE}


def test_moved_files_are_the_same_work_and_changed_ones_are_not(tmp_path: Path) -> None:
    first = imported(tmp_path, models(tmp_path / "here" / "in"))
    moved = imported(tmp_path, models(tmp_path / "there" / "in"))
    assert moved.path == first.path
    jsonl(tmp_path / "there" / "in" / "two.results.jsonl", answered("q1", "new", 1.0))
    assert imported(tmp_path, tmp_path / "there" / "in").path != first.path


def test_nothing_to_import_is_an_input_of_the_wrong_kind(tmp_path: Path) -> None:
    jsonl(tmp_path / "x.jsonl", {"foreign": 1})
    with pytest.raises(BadInput, match=r"x\.jsonl, line 1: unknown_format"):
        imported(tmp_path, tmp_path / "x.jsonl")
    document(tmp_path / "only" / "metadata.json", {"env": "e", "model": "m"})
    with pytest.raises(BadInput, match="nothing to import"):
        imported(tmp_path, tmp_path / "only")


@needs("real")
@pytest.mark.slow
def test_everything_real_in_one_run(tmp_path: Path) -> None:
    run = imported(tmp_path, REAL / "trajectories")
    expected = {"verifiers": 480 + 231, "mini-swe-agent": 22, "nemo-gym": 40, "swe-agent": 6}
    expected |= {"swebench-preds": 1, "openhands": 11, "inspect": 22, "trl": 24}
    rollouts = run.rows(ROLLOUT)
    assert {name: sum(r["source"] == name for r in rollouts) for name in expected} == expected
    counts = run.manifest.counts
    assert len(rollouts) == sum(expected.values()) == counts["traces"] - counts["dropped_unknown_format"]
    checks = run.manifest.summary["collection_checks"]
    names = ("state hash chain", "steps dense from 0", "one done, the last", "tuples complete", "rollout ids unique")
    assert all(checks[name][0] == checks[name][1] > 0 for name in names)
    for rows in by_rollout(run.rows(STEP)).values():
        assert [len(state) for state in states(rows)] == [row["num_messages"] for row in rows]


def test_the_first_word_may_name_the_format(tmp_path: Path) -> None:
    assert Config(paths=["nemo-gym", "x.jsonl"]).format == "nemo-gym" and Config(paths=["x.jsonl"]).format == "auto"
    assert Config(paths=["auto", "x"]).paths == ["x"] and Config(paths=["trl", "x"], format="auto").paths[0] == "trl"


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_of_the_table_can_be_named_and_has_a_reader(name: str) -> None:
    assert Config(format=name, paths=["x"]).format == name
    assert all(reader.name == name for reader in readers(name)) and readers(name)
