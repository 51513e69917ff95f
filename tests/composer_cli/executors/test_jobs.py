"""What `composer run --on` would submit, and what it refuses before anything is submitted."""

import json
import re
from pathlib import Path

import pytest

KEY = "sk-0123456789abcdef"
PRESET = """
[[stage]]
stage = "collect"
[stage.config]
policy = { model = "m", base_url = "http://127.0.0.1:9/v1", api_key_env = "STUDENT_KEY" }

[[stage]]
stage = "replay-teachers"
from = ["collect"]
[stage.config]
[[stage.config.teachers]]
name = "t"
model = "t"
base_url = "http://127.0.0.1:9/v1"
api_key_env = "TEACHER_KEY"
max_tokens = 64

[[stage]]
stage = "export"
from = ["collect"]
[stage.config]
format = "hub"
"""
SETTINGS = """
[on]
setup = "module load cuda"
options = { partition = "gpu", gpus = 2, exclusive = true, hold = false }
keys = ["WANDB_API_KEY"]

[collect]
tasks = 7
"""


@pytest.fixture
def preset(tmp_path: Path) -> Path:
    (tmp_path / "mine.toml").write_text(PRESET)
    (tmp_path / "settings.toml").write_text(SETTINGS)
    return tmp_path / "mine.toml"


def test_a_dry_run_shows_the_spec_without_keys_and_submits_nothing(composer, preset, tmp_path):
    words = ["-c", tmp_path / "settings.toml", "--set", "collect.seed=3", "--set", "on.options.time=4:00:00"]
    more = {"STUDENT_KEY": KEY, "TEACHER_KEY": KEY, "WANDB_API_KEY": KEY, "PRIVATE": KEY}
    done = composer("run", "--preset", preset, "--on", "slurm", "--dry-run", "--json", *words, **more)
    assert done.returncode == 0, done.stderr
    spec = json.loads(done.stdout)["spec"]
    assert KEY not in done.stdout and "PRIVATE" not in done.stdout
    assert spec["keys"] == ["STUDENT_KEY", "TEACHER_KEY", "WANDB_API_KEY"]  # the export sends nothing
    lines = spec["script"].splitlines()
    assert {"#SBATCH --partition=gpu", "#SBATCH --gpus=2", "#SBATCH --exclusive", "#SBATCH --requeue"} <= set(lines)
    assert not any("--hold" in line for line in lines) and "#SBATCH --time=4:00:00" in lines
    exported = next(line for line in lines if "--export" in line).partition("=")[2].split(",")
    assert {"PATH", *spec["keys"]} <= set(exported)
    assert lines.index("module load cuda") < next(i for i, line in enumerate(lines) if line.startswith("set -- "))
    command = next(line for line in lines if line.startswith("set -- "))
    assert '--preset "$files"/preset.toml --config "$files"/settings-1.toml --set collect.seed=3' in command
    assert "tasks = 7" in lines and "on.options" not in command
    assert not (tmp_path / "artifacts").exists()


def test_a_name_is_one_that_every_executor_takes(composer, preset, tmp_path):
    other = tmp_path / f"größer & {'x' * 90}.toml"
    preset.rename(other)
    done = composer("run", "--preset", other, "--on", "slurm", "--dry-run", "--json")
    script = json.loads(done.stdout)["spec"]["script"]
    name = next(line for line in script.splitlines() if "--job-name" in line).partition("=")[2]
    assert re.fullmatch(r"[A-Za-z0-9_.-]{1,63}", name)


def test_a_shipped_preset_goes_along_by_its_name_and_deals_its_units_to_workers_of_its_own(composer):
    words = ["--policy", "m", "--max-cost", "2", "--set", "on.workers=processes:4"]
    done = composer("run", "--preset", "demo", "--on", "slurm", "--dry-run", *words)
    assert "run --preset demo --policy m --max-cost 2.0 --on processes:4 --resume" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--on", "slrum"], "There is no executor 'slrum'. Did you mean 'slurm'? There are: local, slurm, hf-"),
        (["--on", "slurm", "--clean"], "--clean would delete"),
        (["--on", "slurm", "--set", "on.partition=gpu"], "has no setting on.partition"),
        (["--on", "slurm", "--set", "on.options.output=x"], "sbatch's --output is set by Composer itself"),
        (["--on", "slurm", "--set", "on.env.STUDENT_KEY=x"], "on.env holds STUDENT_KEY, which is a key"),
        (["--on", "slurm", "--set", "on.workers=slurm"], "on.workers"),
        (["--on", "slurm", "--set", "on=1"], "on = 1 is not a table of settings"),
        (["--on", "slurm", "--set", f"on.setup=login {KEY}"], "holds the value of a key"),
        (["--on", "slurm", "--dry-run", "--set", f"on.setup=login {KEY}"], "holds the value of a key"),
        (["--on", "slurm"], "The chain needs TEACHER_KEY, which is not set here"),
    ],
)
def test_chains_that_cannot_be_submitted_are_refused(composer, preset, tmp_path, words, said):
    done = composer("run", "--preset", preset, *words, STUDENT_KEY=KEY)
    assert done.returncode == 2 and said in done.stderr and KEY not in done.stderr, done.stderr
    assert not list(tmp_path.glob("artifacts/submitted/*"))


def test_a_path_on_this_machine_is_one_of_the_cluster(composer, tmp_path):
    (tmp_path / "student").mkdir()
    done = composer("run", "--preset", "demo", "--on", "slurm", "--dry-run", "-s", "collect.policy.model=./student")
    assert done.returncode == 0, done.stderr


def test_a_missing_sbatch_is_reported_with_a_remedy(composer, tmp_path):
    done = composer("run", "--preset", "demo", "--on", "slurm", PATH=str(tmp_path))
    assert done.returncode == 2 and "There is no sbatch here" in done.stderr
    assert not list(tmp_path.glob("artifacts/submitted/*"))


def test_settings_of_an_executor_mean_nothing_here(composer, tmp_path):
    (tmp_path / "settings.toml").write_text(SETTINGS.partition("[collect]")[0])
    done = composer("run", "--preset", "demo", "--on", "local", "-c", tmp_path / "settings.toml", "--dry-run")
    assert done.returncode == 0 and "after train-0" in done.stdout


def test_a_job_that_is_over_is_shown_from_its_record(composer, tmp_path):
    folder = tmp_path / "artifacts" / "submitted" / "20260101T000000Z-demo-abcdef"
    folder.mkdir(parents=True)
    record = {
        "name": folder.name,
        "executor": "slurm",
        "words": ["run", "--preset", "demo"],
        "keys": ["STUDENT_KEY"],
        "where": {},
        "submitted_at": "2026-01-01T00:00:00+00:00",
        "spec": {},
        "state": {"status": "failed", "detail": "exit code 3"},
        "handle": {"id": "1", "folder": str(folder)},
    }
    (folder / "job.json").write_text(json.dumps(record))
    (folder / "log.txt").write_text(f"one\ntwo {KEY}\n")
    more = {"PATH": str(tmp_path), "STUDENT_KEY": KEY}
    assert json.loads(composer("status", "--json", **more).stdout)["jobs"][0]["status"] == "failed"
    assert "20260101T000000Z-demo-abcdef  slurm  failed" in composer("status", **more).stdout
    shown = composer("show", "demo-abc", **more)
    assert "status: failed (exit code 3)" in shown.stdout and "two [redacted key]" in shown.stdout, shown.stderr
    assert composer("show", "abcdef", "--follow", **more).stdout == "one\ntwo [redacted key]\n"
    over = composer("cancel", "abcdef", **more)
    assert over.returncode == 2 and "is over: failed" in over.stderr
    assert composer("cancel", "other", **more).returncode == 4
    (folder / "job.json").write_text(json.dumps({**record, "executor": "abacus"}))
    unknown = composer("show", "abcdef", **more)
    assert unknown.returncode == 4 and "which this version does not know" in unknown.stderr
    (folder / "job.json").write_text("{}")
    damaged = composer("status", **more)
    assert damaged.returncode == 4 and "is not a record of a submitted job" in damaged.stderr
