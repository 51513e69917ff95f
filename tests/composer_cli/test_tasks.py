"""`composer tasks check`: a table, JSON, and exit codes."""

import json
from pathlib import Path

GOOD = {"id": "good", "prompt": "p", "test": "grep -qx 1 a", "solution": {"a": "1\n"}, "split": "train"}


def written(folder: Path, *rows: dict[str, object]) -> Path:
    path = folder / "my.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_good_tasks_exit_with_0_and_bad_ones_with_4(composer, tmp_path):
    # Without a sandbox nothing is forged, which keeps this short; tests/stages/envs/test_task_checks.py forges.
    words = ["tasks", "check", written(tmp_path, GOOD), "-s", "repeats=1", "-s", "sandbox=none"]
    done = composer(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "1 tasks: 1 ok" and "No forgeries were tried" in done.stdout
    written(tmp_path, GOOD, {**GOOD, "id": "open", "prompt": "q", "test": "true"})
    done = composer(*words)
    assert done.returncode == 4 and "good" not in done.stdout
    assert "open    train    empty passes  an empty solution gets 1\n2 tasks: 1 ok, 1 empty passes\n" in done.stdout
    found = json.loads(composer(*words, "--json").stdout)
    assert found["counts"] == {"ok": 1, "empty passes": 1} and found["env"] == "tasks"
    assert {one["task_id"]: one["verdict"] for one in found["tasks"]} == {"good": "ok", "open": "empty passes"}


def test_words_that_name_no_tasks_are_a_sentence(composer, tmp_path):
    for words, code, sentence in (
        ([], 2, "Which tasks? Give a file of rows"),
        ([tmp_path / "none.jsonl"], 4, "cannot be read"),
        ([written(tmp_path, {"prompt": "p"})], 4, "give either test"),
        (["--env", "leetcode-rh"], 2, "has no solutions to check"),
        (["--env", "kata", "-s", "repeats=0"], 2, "repeats"),
    ):
        done = composer("tasks", "check", *words)
        assert done.returncode == code and sentence in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_tasks_alone_is_still_the_stage(composer):
    done = composer("tasks", "feature-deletion")
    assert done.returncode == 2 and "From which package?" in done.stderr
