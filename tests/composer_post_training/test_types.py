"""A user's script outside of the clone is checked by mypy --strict against the types of the interface."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from composer_post_training import settings

ROOT = Path(__file__).parents[2]
SCRIPT = """
from collections.abc import Sequence
from pathlib import Path
from typing import Any, assert_type

import composer_post_training as composer
from composer_post_training.channels import CHANNELS, Channel, ChannelLoss, ChannelSpec, PairRows, PairSource
from composer_post_training.environments import AnsweredEnv, Environment, KataEnv, Observation, Question, Split, Task
from composer_post_training.executors import EXECUTORS, JobState
from composer_post_training.formats import Reader, Trajectory, Writer
from composer_post_training.grading import judge, match
from composer_post_training.policies import KINDS, PolicyConfig, Sample, Turn
from composer_post_training.sandbox import CommandResult, open_sandbox
from composer_post_training.settings import PolicySettings
from composer_post_training.stages import STAGES, Stage, StageConfig
from composer_post_training.trl import ProbeCallback, preference_dataset, with_channels

run = composer.collect(policy={"model": "reference", "max_tokens": 3}, env={"name": "kata"}, tasks=2)
assert_type(run, composer.ReadableRun)
assert_type(run.path, Path)
assert_type(run.rollouts(), list[composer.Rollout])
assert_type(run.rollouts()[0].messages, list[dict[str, str]])
assert_type(run.rollouts()[0].steps, list[dict[str, Any]])
assert_type(run.scan("steps"), composer.Scan)
assert_type(composer.collect.plan(tasks=3), composer.Plan)
compared = composer.evaluate(run, policies={"A": {"model": "a"}})
assert_type(compared.differences[0].p_value, float)
assert_type(composer.find("evaluate").verdict, str | None)
assert_type(composer.find(Path("artifacts/collect/latest")), composer.ReadableRun)
assert_type(composer.query("select 1", run)[0], dict[str, Any])
assert_type(composer.runs(), composer.Table)
assert_type(composer.report(run), Path)
assert_type(composer.run("demo", {"collect.tasks": 3}), composer.Chain)
assert_type(composer.run("demo", on="slurm"), composer.Job)
assert_type(composer.probe.teacher_pool(problems=3, sources=[{"name": "base", "policy": "m"}]), composer.ReadableRun)
assert_type(composer.compare("before.jsonl", "after.jsonl", min_gain=0.02), composer.ComparedLogs)
assert_type(composer.import_traces(Path("logs")), composer.ReadableRun)
composer.compare.plan(paths=["before.jsonl", "after.jsonl"])
composer.train(policy={"model": "m"}, teacher="m", env="kata", weights={"dpo": 0.1}, report_to="wandb")
student: PolicySettings = {"model": "m"}
composer.collect(policy=student, env={"name": "skills", "loose": True}, teachers=[{"name": "t", "model": "m"}])
composer.collect(run, policy=PolicySettings(model="m", max_tokens=3), teachers="teachers.toml", config=["a.toml"])
composer.collect(policy=PolicyConfig(model="m"), listener=lambda what, done, total: print(what))
try:
    composer.replay_teachers(run, teachers="teachers.toml", listener=lambda what, done, total: print(what))
except composer.UsageError as error:
    print(error.exit_code)
trainer = with_channels()(weights={"dpo": 0.1}, pairs=preference_dataset(run))
trainer.add_callback(ProbeCallback(trainer, run, every=5))


class Doubles(AnsweredEnv):
    name, source = "doubles", "all numbers"

    def questions(self, split: Split, count: int, seed: int) -> Sequence[Question]:
        return [Question(str(n), f"What is 2 * {n}?", str(2 * n)) for n in range(count)]


class Mine(Channel[PairRows]):
    source = PairSource

    def loss(self, rows: PairRows) -> ChannelLoss:
        return ChannelLoss(rows.sums.sum(), 1, {})


environment: Environment = Doubles()
assert_type(environment.step("4"), Observation)
assert_type(KataEnv().tasks("train", 1, seed=0), list[Task])
CHANNELS["mine"] = ChannelSpec(Mine, "What it lowers.")
composer.collect(tusks=3)
composer.collect(tasks="3")
composer.collect(policy=3)
composer.tasks(package="x", difficulty="eezy")
composer.collect(policy={"modle": "m"})
composer.collect(policy=PolicySettings(modle="m"))
composer.train(weights={"dop": 0.1})
composer.evaluate(policies={"A": {"modle": "m"}})
composer.collect(teachers=[{"name": "t", "modle": "m"}])
composer.collect.plan(limits={"wall": 3})
composer.probe.teacher_pool(contract={"hnit": "x"})
composer.export(run)
"""
ANY = re.compile(r"def (?!__)\w+\(.*-> (Any|.*\[Any\]):")


@pytest.mark.slow
def test_a_script_sees_the_types_of_what_it_calls(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = (sys.executable, "-m", "mypy", "--strict", "script.py")
    env = {name: value for name, value in os.environ.items() if name != "MYPYPATH"}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280)
    wrong = [line for line in done.stdout.splitlines() if ": error: " in line]
    parts = (
        *('argument "tusks"', 'Argument "tasks"', 'Argument "policy"', 'Argument "difficulty"', 'Argument "policy"'),
        *('key "modle"', 'Argument "weights"', "Dict entry 0", "List item 0", 'Argument "limits"'),
        *('Argument "contract"', 'Missing named argument "format"'),
    )
    assert len(wrong) == len(parts), done.stdout + done.stderr
    assert all(part in line for part, line in zip(parts, wrong, strict=True)), wrong
    assert all(
        (ROOT / package / "py.typed").is_file()
        for package in ("composer_post_training", "composer_cli", "composer_stages")
    )


def test_groups_of_settings_are_dictionaries_and_what_is_returned_has_a_type() -> None:
    assert settings.PolicySettings(model="m") == {"model": "m"}
    with pytest.raises(AttributeError, match="no attribute 'PolcySettings'"):
        settings.__getattr__("PolcySettings")
    source = (ROOT / "composer_post_training" / "results.py").read_text()
    assert ANY.findall(source) == []
