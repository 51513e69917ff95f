"""`composer tasks check`: a table, JSON, and exit codes."""

import json
import signal
from pathlib import Path

import pytest
import typer

from composer_cli.printing import interrupt_leaves, reporting_errors
from composer_stages.stopping import Interrupted

GOOD = {"id": "good", "prompt": "p", "test": "grep -qx 1 a", "solution": {"a": "1\n"}, "split": "train"}


def written(folder: Path, *rows: dict[str, object]) -> Path:
    path = folder / "my.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_good_tasks_exit_with_0_and_bad_ones_with_4(composer, tmp_path):
    # Without a sandbox nothing is forged, which keeps this short; tests/stages/envs/test_task_checks.py forges.
    words = ["tasks", "check", written(tmp_path, GOOD), "-s", "repeats=1", "-s", "sandbox=none"]
    done = composer(*words, "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["env"], found["counts"]) == (0, "tasks", {"ok": 1}), done.stderr
    assert [(one["task_id"], one["verdict"]) for one in found["tasks"]] == [("good", "ok")]
    assert done.stderr.splitlines()[-1].endswith("1 of 1 tasks, good: ok"), done.stderr
    others = [
        {**GOOD, "id": name, "prompt": name, "test": test} for name, test in (("open", "true"), ("shut", "false"))
    ]
    written(tmp_path, GOOD, *others)
    done = composer(*words)
    assert done.returncode == 4 and "good" not in done.stdout and "No forgeries were tried" in done.stdout
    last = [line.split()[0] for line in done.stdout.splitlines()[-4:-1]]
    assert last == ["shut", "open", "3"] and "open  train  empty passes  an empty solution gets 1\n" in done.stdout
    assert "3 tasks: 1 ok, 1 fails, 1 empty passes\n" in done.stdout


def test_an_interrupted_command_promises_to_go_on_only_if_it_keeps_a_run(run_command, tmp_path, monkeypatch):
    (tmp_path / "interrupting_env.py").write_text("raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(tmp_path)
    of = ["--env", "interrupting_env:Env"]
    collect = ["collect", *of, "--policy", "noop", "-n", "1"]
    nothing, saved = "Interrupted. Nothing was kept; start it again.", "the same command with --resume goes on."
    for words, said in (
        (["tasks", "check", *of], nothing),
        (collect, saved),
        (["tasks", "convert", *of, "--to", "harbor", tmp_path / "new"], nothing),
    ):
        code, _, errors = run_command(*words)
        assert code == 130 and errors.rstrip().endswith(said), (words, errors)


OWN = """
from composer_stages.envs.kata.env import KataEnv

class Env(KataEnv):
    def reset(self, task):
        if task.split == "eval":
            raise KeyboardInterrupt
        return super().reset(task)
"""


def test_an_interrupt_prints_the_tasks_that_were_checked_by_then(run_command, tmp_path, monkeypatch):
    (tmp_path / "stopping_env.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["tasks", "check", "--env", "stopping_env:Env", "-n", "1", "-s", "repeats=1", "-s", "workers=1"]
    code, printed, errors = run_command(*words, "-s", "sandbox=none")
    assert code == 130 and printed.splitlines()[-2] == "1 task: 1 ok", (printed, errors)
    assert errors.rstrip().endswith("Interrupted. 1 of 2 tasks were checked by then.")
    code, printed, _ = run_command(*words, "-s", "sandbox=none", "--json")
    found = json.loads(printed)
    assert code == 130 and found["interrupted"] and found["of"] == 2 and len(found["tasks"]) == 1


def test_an_interrupt_of_a_plan_or_of_what_leaves_something_has_its_own_sentence(capsys):
    for resumes, leaves, said in (
        (True, "", "Everything finished is saved; the same command with --resume goes on."),
        (False, "", "Nothing was kept; start it again."),
        (True, "The folder holds some.", "The folder holds some."),
    ):
        with pytest.raises(typer.Exit) as found, reporting_errors(resumes=resumes), interrupt_leaves(leaves):
            raise Interrupted(signal.SIGTERM)
        assert found.value.exit_code == 143 and capsys.readouterr().err == f"Stopped by SIGTERM. {said}\n"
