"""What a command of a stage does with its words, files and runs: results, plans, refusals and exit codes."""

import json
import os
import sys
from pathlib import Path

import pytest
from support.chains import SILENT
from support.command_line import collect, teachers
from support.models import save_larger

from composer_cli.stage_command import read_positionals


def latest(composer_folder: Path, stage: str) -> Path:
    return (composer_folder / "artifacts" / stage / "latest").resolve()


def test_results_are_on_stdout_and_the_rest_on_stderr(composer, server, tmp_path):
    done = composer(*collect(server))
    run = latest(tmp_path, "collect")
    assert done.returncode == 0 and done.stdout == f"{(run / 'report.txt').read_text()}\n{run}\n"
    assert "collect: starts, 4 rollouts" in done.stderr and "done in" in done.stderr


def test_json_and_quiet_output_and_cleanup_after_a_late_kill(composer, server, tmp_path):
    """After the manifest said complete: gigabytes of checkpoints stayed in `scratch`, and `latest` was an older run."""
    done = composer(*collect(server, "--json", "--quiet"))
    first, run = json.loads(done.stdout), latest(tmp_path, "collect")
    expected = {"path", "status", "fresh", "reason", "ok", "exit_code", "counts", "summary", "cost_usd", "seconds"}
    assert first.keys() == expected and done.stderr == ""
    (run / "scratch" / "checkpoint-1").mkdir(parents=True)
    (run.parent / "latest").unlink()
    again = json.loads(composer(*collect(server, "--json")).stdout)
    assert (first["fresh"], again["fresh"], again["reason"]) == (True, False, "up to date")
    assert first["path"] == again["path"] == str(run) and first["counts"]["done"] == 4
    assert not (run / "scratch").exists() and latest(tmp_path, "collect") == run


@pytest.mark.timeout(60)
def test_a_training_whose_plan_measures_its_prompts_starts_once(composer, tmp_path):
    """The plan of a model that is not small draws the tasks itself: to plan at a draw again would never end."""
    size = ("steps=1", "prompts_per_step=1", "generations=2", "threads=1")
    words = [word for one in size for word in ("-s", f"optimisation.{one}")]
    words += ["-s", "max_steps=1", "-s", "policy.max_tokens=4", "--env", "kata"]
    done = composer("train", "--policy", save_larger(tmp_path / "larger"), *words)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("train: starts, 1 step") == 1 and "measured on 2 of 200 tasks" in done.stderr


def test_a_dry_run_counts_the_tasks_that_there_are(composer, tmp_path):
    calls = [{"function": "a:f", "args": [], "returns": 1}]
    row = {"split": "train", "prompt": "p", "files": {"a.py": ""}, "calls": calls, "solution": {"a.py": ""}}
    (tmp_path / "own.jsonl").write_text(
        "".join(json.dumps({"id": f"t{at}", **row, "prompt": f"p{at}"}) + "\n" for at in range(3))
    )
    study = tmp_path / "study.toml"
    study.write_text(f"samples = 2\nenv = {{ name = 'tasks', path = '{tmp_path}/own.jsonl' }}\n")
    done = composer("collect", "--policy", "noop", "-c", study, "--dry-run")
    assert done.stdout.startswith("6 rollouts, at most"), done.stderr
    assert f"{study} sets samples = 2 for collect; without it 12 rollouts, at most" in done.stdout
    starts, tasks = composer("collect", "--policy", "noop", "-c", study).stderr.splitlines()[:2]
    assert "up to 50 rollouts" in starts and tasks.startswith("collect: 6 rollouts of 3 tasks: the split train has no")


def test_dry_run_prints_the_plan_and_does_nothing(composer, server, tmp_path):
    done = composer(*collect(server, "--dry-run", "-s", "policy.usd_per_mtok_out=1000"))
    assert done.returncode == 0 and done.stdout.startswith("4 rollouts, at most") and "USD" in done.stdout
    plan = json.loads(composer(*collect(server, "--dry-run", "--json")).stdout)
    assert plan["units"] == 4 and any("2 of its train tasks drawn" in line for line in plan["checked"])
    assert any(f"{server} answers" in line for line in plan["checked"]) and "GiB free" in plan["checked"][-1]
    assert not (tmp_path / "artifacts").exists()


def test_dry_run_finds_what_is_done_and_what_is_damaged(composer, server, own_runs, tmp_path):
    done = composer("extract-pairs", "--dry-run")
    assert done.returncode == 0 and "up to date: there is nothing to do" in done.stdout
    rollouts = latest(tmp_path, "collect") / "rollouts.parquet"
    rollouts.write_bytes(rollouts.read_bytes().replace(b"PAR1", b"PAR2", 1))
    done = composer("replay-teachers", "--teachers", teachers(tmp_path, server), "--dry-run")
    assert done.returncode == 4 and "rollouts.parquet has changed since it was written" in done.stderr


def test_resume_says_where_it_finds_a_run_of_other_settings_alone(composer, server, own_runs, tmp_path):
    """Such a run may have been meant; the new one starts all the same."""
    words = collect(server, "-s", "samples=1", "-s", "policy.temperature=0.5", "--resume")
    note = (
        f"Nothing to resume with these settings: policy.temperature is 0.5, the newest run "
        f"collect/{latest(tmp_path, 'collect').name} has 1.0; samples is 1, it has 2. A new run starts."
    )
    planned = composer(*words, "--dry-run")
    assert planned.returncode == 0 and planned.stderr == f"{note}\n"
    done = composer(*words)
    assert done.returncode == 0 and done.stderr.startswith(f"collect: {note}\ncollect: starts, 2 rollouts")
    for other in (
        words[:-1],
        [*words, "--seed", "1", "--env", "kata", "--out", tmp_path / "own"],
        collect(server, "--resume"),
    ):
        assert "Nothing to resume" not in composer(*other, "--dry-run").stderr
    other = composer("extract-pairs", "-s", "compare=canonical", "--resume", "--dry-run")
    assert other.returncode == 0 and "Nothing to resume" not in other.stderr, "another label"


def test_a_file_and_the_short_options_reach_the_settings(composer, tmp_path):
    (tmp_path / "small.toml").write_text("tasks = 9\nsamples = 1\n")
    words = [
        "collect",
        "--policy",
        "reference",
        "-c",
        tmp_path / "small.toml",
        "-n",
        "2",
        "--seed",
        "5",
        "--env",
        "kata",
    ]
    assert composer(*words).returncode == 0
    config = json.loads((latest(tmp_path, "collect") / "config.json").read_text())
    assert (config["tasks"], config["samples"], config["seed"], config["env"]["name"]) == (2, 1, 5, "kata")


def test_one_settings_file_serves_all_stages(composer, server, tmp_path):
    """Of other stages' settings a stage takes none, and says so once; what no stage has stays an error."""
    study, also = tmp_path / "study.toml", tmp_path / "teachers.toml"
    study.write_text(
        "max_steps = 3\n[env]\nname = 'kata'\n[policy]\nmodel = 'x'\n[evaluate]\ntasks = 2\n[train]\ntasks = 9\n"
    )
    also.write_text("[[teachers]]\nname = 'one'\nmodel = 'm'\nmax_tokens = 9\n")
    arms = [word for name in "AB" for word in ("-s", f"policies.{name}.model=noop")]
    done = composer("evaluate", "-c", study, "-c", also, *arms, "--dry-run")
    assert done.returncode == 0 and done.stdout.startswith("4 rollouts"), done.stderr
    assert f"  {study} sets tasks = 2 for evaluate; without it up to 400 rollouts\n" in done.stdout
    assert done.stdout.count(" sets ") == 1, "max_steps costs nothing where no length is known"
    assert done.stderr.splitlines() == [
        f"{study}: policy, train left out, which other stages have and evaluate does not.",
        f"{also}: teachers left out, which other stages have and evaluate does not.",
    ]
    typed = composer("evaluate", *arms, "-s", "policy.model=x", "--dry-run")
    assert typed.returncode == 2 and "evaluate has no setting policy" in typed.stderr
    study.write_text("polcy = 3\ncollect = 3\n")
    done = composer("evaluate", "-c", study, *arms, "--dry-run")
    assert done.returncode == 2 and "no setting polcy" in done.stderr and "no setting collect" in done.stderr
    preset = tmp_path / "mine.toml"
    preset.write_text(f"[[stage]]\nstage = 'collect'\nconfig.policy.base_url = '{server}'\nconfig.tasks = 2\n")
    study.write_text("[optimisation]\nsteps = 3\n")
    done = composer("run", "--preset", preset, "-c", study, "--dry-run")
    assert done.returncode == 2 and "Nothing is left for this preset" in done.stderr
    study.write_text("samples = 3\n")
    done = composer("run", "--preset", preset, "-c", study, "--dry-run")
    assert (
        "6 rollouts" in done.stdout
        and f"{study} sets samples = 3 for collect; without it 8 rollouts, at" in done.stdout
    )


def test_an_arm_unlike_the_presets_is_noted_before_anything_is_loaded(composer):
    words = ["train", "--arm", "A", "-s", "weights.sdpo=1", "-s", "policy.model=./nowhere", "--dry-run"]
    assert composer(*words).stderr.startswith("train: arm A has sdpo = 1, while the shipped presets' arm A has none.")


def test_inputs_are_the_latest_runs_unless_named(composer, server, own_runs, tmp_path):
    run = latest(tmp_path, "collect")
    done = composer("replay-teachers", "--teachers", teachers(tmp_path, server))
    assert done.returncode == 0 and f"reads {run}" in done.stderr
    for named in (run, run.name, "collect", run.name[-6:], run.parent):
        again = composer("replay-teachers", "--teachers", teachers(tmp_path, server), "--from", named)
        assert again.returncode == 0 and "up to date" in again.stderr, (named, again.stderr)


def test_a_missing_or_empty_key_is_named_and_leaves_nothing_in_the_way(composer, server, tmp_path):
    words = collect(server, "-s", "policy.api_key_env=COMPOSER_TEST_KEY")
    for variables, state in (({}, "is not set"), ({"COMPOSER_TEST_KEY": " "}, "is empty")):
        done = composer(*words, **variables)
        assert (
            done.returncode == 2
            and "starts" not in done.stderr
            and f"COMPOSER_TEST_KEY, which holds the key for {server}, {state}" in done.stderr
        )
        assert not list((tmp_path / "artifacts" / "collect").glob("2*"))
    assert composer(*words, COMPOSER_TEST_KEY="sk-1").returncode == 0


def test_a_spent_budget_leaves_what_is_finished_and_exits_3(composer, server, tmp_path):
    priced = collect(
        *(server, "-s", "policy.usd_per_mtok_in=1000", "-s", "policy.usd_per_mtok_out=0"),
        *("-s", "policy.concurrency=1", "-s", "in_flight.rollouts=1"),  # else all may be under way, and none ended
    )
    short = composer(*priced, "--max-cost", "16")  # some rollouts end, not all
    assert short.returncode == 3 and "--resume" in short.stderr
    assert composer(*priced).returncode == 2  # neither --resume nor --clean
    assert composer(*priced, "--resume").returncode == 0


def test_a_mistake_in_ones_own_environment_names_file_and_line(composer, server, tmp_path):
    broken = tmp_path / "broken_env.py"
    broken.write_text(
        "from composer_stages.envs.kata.env import KataEnv\n"
        "class Broken(KataEnv):\n"
        "    def reset(self, task):\n"
        "        raise ZeroDivisionError('the author made a mistake')\n"
    )
    words = collect(server, "--env", "broken_env:Broken")
    done = composer(*words, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    assert done.returncode == 3 and "Traceback" not in done.stderr
    assert f"the author made a mistake ({broken}, line 4, in reset, task" in done.stderr
    assert "code of the environment broken_env:Broken, not of Composer" in done.stderr
    assert "--resume plays again what failed" in done.stderr and "The others are saved" not in done.stderr


def test_a_run_that_judges_itself_not_ok_exits_1(composer, server, tmp_path):
    (tmp_path / "silent_env.py").write_text(SILENT)
    done = composer(*collect(server, "--env", "silent_env:Silent"), PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and "FAIL  actions well-formed" in done.stdout


@pytest.mark.parametrize(
    ("stage", "words", "layers", "runs"),
    [
        ("export", ["trl", "collect"], [{"format": "trl"}], ["collect"]),
        ("export", ["trl"], [{"format": "trl"}], []),
        ("import", ["auto", "a", "b", "c"], [{"paths": ["auto", "a", "b", "c"]}], []),
        ("import", [], [], []),
        ("collect", [], [], []),
    ],
)
def test_words_are_settings_and_runs(stage, words, layers, runs):
    assert read_positionals(stage, words) == (layers, runs)


def test_export_and_import_in_words_go_round(composer, made, tmp_path):
    made_runs = str(made / "collect" / "latest")
    written = json.loads(composer("export", "trl", made_runs, "--json").stdout)
    again = json.loads(composer("import", "trl", f"{written['path']}", "--json").stdout)
    assert again["counts"]["rollouts"] == written["counts"]["rollouts"] > 0
