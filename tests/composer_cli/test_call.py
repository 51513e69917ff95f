"""Exit codes: what a run found of itself reaches the shell, alone and in a chain."""

import json
import os
import signal
from pathlib import Path

import pytest
from support import leetcode
from support.command_line import call

from composer_cli.call import Arguments, StageJob, execute
from composer_cli.console import Console
from composer_stages import collect
from composer_stages.runs import settings
from composer_stages.runs.run import Inputs, Run, RunOutcome
from composer_stages.stopping import Interrupted


@pytest.mark.parametrize(
    ("ok", "chosen", "code"),
    [(None, None, 0), (True, None, 0), (False, None, 1), (True, 0, 0), (False, 1, 1), (False, 3, 3)],
)
def test_a_run_chooses_its_exit_code(ok: bool | None, chosen: int | None, code: int) -> None:
    assert RunOutcome(ok=ok, code=chosen).exit_code == code


def recorded(folder: Path, hacked: bool, problems: int) -> Path:
    """Recorded rows of a teacher, eight a problem, by turns right and wrong: all that a pool is judged by, no model."""
    told = {"prompt_ids": [1], "completion_ids": [2, 0], "comp_len": 2, "prompt": "y", "fmt_ok": True, "step": 0}
    rows = [leetcode.pool_row(n // 8, n, "x", hacked, n % 2 == 0) | told for n in range(8 * problems)]
    leetcode.write(folder / "rows.jsonl.gz", [row | {"src_pool": "teacher"} for row in rows])
    return folder


POOLS = {"PASS": (True, 60), "FAIL": (False, 8), "INCONCLUSIVE": (True, 2)}


def test_a_plan_of_an_evaluation_says_how_probable_each_verdict_is(tmp_path: Path) -> None:
    words = ["evaluate", "--plan", "--limit", "8", "--set", "planning.gain=0.5", "--set", "planning.arms_differ=0.55"]
    done = call(tmp_path, *words, "--set", "greedy=true")
    assert done.returncode == 0, done.stderr
    assert "A true gain of 50 points" in done.stdout and "What to add first: " in done.stdout
    assert "planning.arms_differ" in done.stdout and "starts" not in done.stderr
    found = json.loads(call(tmp_path, *words, "--json").stdout)
    assert found["enough"]["chances"]["VALIDATED"] >= 0.8 and found["rates"]["arms_differ"] == [0.55, "given"]
    (counted,) = (line for line in done.stdout.splitlines() if line.startswith("rollouts, all arms"))
    numbers = [int(word) for word in counted.replace(",", "").split() if word.isdigit()]
    assert numbers[0] == 2 * found["lines"][0]["rollouts"], "one answer at each temperature"
    assert not list(tmp_path.glob("evaluate/*")), "nothing is run"


def test_a_pilot_of_another_environment_is_refused(made: Path) -> None:
    done = call(made, "evaluate", "--plan", "--from", "collect", "--env", "tasks")
    assert done.returncode == 2 and not done.stdout
    assert "played in the environment 'kata', and the evaluation is planned in 'tasks'" in done.stderr
    assert "Give --env kata, or a pilot" in done.stderr


def chain(folder: Path, *verdicts: str, to_the_end: bool) -> Path:
    """A preset of one recorded pool after the other."""
    lines = [f"to_the_end = {str(to_the_end).lower()}"]
    for name in verdicts:
        lines += ["[[stage]]", 'stage = "probe-teacher-pool"', f'name = "{name}"', "[stage.config]", "contract = {}"]
        pool = recorded(folder / name, *POOLS[name])
        lines.append(f'recorded = {{ folder = "{pool}", model = "x", eos_id = 0 }}')
    (folder / "preset.toml").write_text("\n".join(lines))
    return folder / "preset.toml"


def test_a_chain_to_the_end_lists_failed_entries_and_exits_with_the_worst_code(tmp_path: Path) -> None:
    preset = chain(tmp_path, "FAIL", "PASS", "INCONCLUSIVE", to_the_end=True)
    done = call(tmp_path / "artifacts", "run", "--preset", preset)
    assert done.returncode == 1, done.stderr
    assert "FAIL did not pass its own checks" in done.stdout and "PASS did not" not in done.stdout
    assert "Every entry was run. Exit code 1: FAIL is FAIL." in done.stdout
    assert "Verdict: INCONCLUSIVE" in done.stdout


def test_an_inconclusive_chain_exits_3(tmp_path: Path) -> None:
    preset = chain(tmp_path, "PASS", "INCONCLUSIVE", to_the_end=True)
    assert call(tmp_path / "artifacts", "run", "--preset", preset, "--json").returncode == 3


def test_a_chain_stops_at_an_entry_that_failed_its_checks(tmp_path: Path) -> None:
    done = call(tmp_path / "artifacts", "run", "--preset", chain(tmp_path, "FAIL", "PASS", to_the_end=False))
    assert done.returncode == 1 and "PASS" not in done.stdout + done.stderr
    assert "FAIL did not pass its own checks, so nothing that builds on it was run" in done.stderr


@pytest.mark.parametrize(("position", "told"), [("", "collect is complete all the same"), (" (stage 1 of 2)", "")])
def test_a_signal_at_the_end_of_a_run_does_not_promise_that_it_goes_on(
    tmp_path: Path, position: str, told: str
) -> None:
    def stop_at_the_end(what: str, done: int, total: int) -> None:
        if done == total > 0:
            os.kill(os.getpid(), signal.SIGTERM)

    given = [{"policy": "noop", "tasks": 1, "samples": 1}]
    job = StageJob("collect", "collect", Inputs(), settings.build("collect", collect.Config, given), position)
    with pytest.raises(Interrupted) as stopped:
        execute(job, Arguments(artifacts=tmp_path, listener=stop_at_the_end), Console(quiet=True))
    assert Run(tmp_path / "collect" / "latest").manifest.status == "complete"
    assert stopped.value.signal_number == signal.SIGTERM and stopped.value.notice.startswith(told)
    assert bool(stopped.value.notice) == bool(told)
