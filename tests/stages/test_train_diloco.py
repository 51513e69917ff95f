"""`composer train --diloco`: replicas in processes of their own that share nothing but a folder or a bucket."""

import os
import shutil
import signal
import subprocess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from support.command_line import until
from support.models import save_tiny, tiny_model
from support.replicas import PROCESSES, command
from support.s3 import s3 as s3

from stages import train
from stages.diloco import rounds as in_store
from stages.errors import UsageError
from stages.runs import store
from stages.runs.bucket import open_bucket
from stages.runs.kinds import CHECKPOINT, ROLLOUT
from stages.runs.run import Inputs, Run
from stages.training.replicas import shared_settings, trained

pytest.importorskip("obstore", reason="the extra `diloco` is not installed")
SIZE = ("steps=6", "prompts_per_step=2", "generations=4", "save_every=1", "threads=1", "learning_rate=0.01")
DILOCO = ("inner_steps=2", "timeout_s=150", "outer_momentum=0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


class Replicas:
    """`composer train --diloco` at work: one folder of artifacts a replica, as on machines of their own."""

    def __init__(self, root: Path, url: str, model: Path, number: int, **variables: str) -> None:
        self.root, self.url, self.number, self.variables = root, url, number, variables
        settings = [f"optimisation.{s}" for s in SIZE] + [f"diloco.{s}" for s in DILOCO]
        settings += ["policy.max_tokens=20", "tasks=4"]
        self.words = ["train", "--env", "support.environments:GuessEnv", "--policy", str(model), "-q"]
        self.words += [word for setting in settings for word in ("-s", setting)]

    def start(self, name: str, *more: str) -> BaseProcess:
        words = [*self.words, "--diloco", self.url, "--replicas", str(self.number)]
        words += ["--artifacts", str(self.root / name), *more]
        process = PROCESSES.Process(target=command, args=(words, self.root / name, self.variables))
        process.start()
        return process

    def end(self, name: str, process: BaseProcess) -> Run:
        process.join(200)
        assert process.exitcode == 0, (self.root / name / "stderr").read_text()
        return Run(next((self.root / name / "train").glob("2*")))


def weights(run: Run) -> bytes:
    return (run.folder(CHECKPOINT) / "model.safetensors").read_bytes()


def rounds(run: Run) -> list[dict[str, Any]]:
    return store.read_json(run.path / "diloco.json")["rounds"]


@pytest.mark.slow
def test_two_replicas_end_alike_and_one_of_them_is_killed_on_the_way(tmp_path: Path, model: Path):
    """Killed in its second round and resumed, it goes on in the round that the other one waits for."""
    replicas = Replicas(tmp_path, f"file://{tmp_path}/bucket", model, 2)
    other, killed = replicas.start("b", "-s", "diloco.grace_s=100"), replicas.start("a", "-s", "diloco.grace_s=100")
    mark = "train/2*/scratch/trainer/checkpoint-3/composer.json"
    until(lambda: list((tmp_path / "a").glob(mark)) or not killed.is_alive(), 200)
    os.kill(killed.pid or 0, signal.SIGKILL)
    killed.join()
    runs = [
        replicas.end("a", replicas.start("a", "--resume", "-s", "diloco.grace_s=100")),
        replicas.end("b", other),
    ]
    assert weights(runs[0]) == weights(runs[1]) != (model / "model.safetensors").read_bytes()
    assert [held["replicas"] for held in rounds(runs[1])] == [[0, 1]] * 3
    played = [{row["rollout_id"]: row["reward"] for row in run.rows(ROLLOUT)} for run in runs]
    assert played[0] != played[1], "each plays its own"
    assert sorted(run.manifest.outcome.summary["replica"] for run in runs) == [0, 1]
    assert [run.manifest.counts["done"] for run in runs] == [6, 6]
    late = replicas.end("c", replicas.start("c", "-s", "diloco.grace_s=100"))
    assert weights(late) == weights(runs[0]) and late.manifest.outcome.summary["rounds_taken_part"] == 0


@pytest.mark.slow
def test_replicas_meet_in_an_s3_bucket(tmp_path: Path, model: Path, s3: dict[str, str]):
    replicas = Replicas(tmp_path, "s3://runs/first", model, 2, **s3)
    started = [(name, replicas.start(name)) for name in "ab"]
    runs = [replicas.end(name, process) for name, process in started]
    assert weights(runs[0]) == weights(runs[1])
    assert [held["replicas"] for held in rounds(runs[0])] == [[0, 1]] * 3


def configured(**diloco: Any) -> train.Config:
    return train.Config(optimisation={"steps": 20}, diloco={"store": "memory:///", "inner_steps": 5, **diloco})


def test_few_rounds_are_told_before_training():
    (note,) = (n for n in train.plan(Inputs({}), configured(outer_momentum=0.9)).notes if n.startswith("WARNING"))
    assert "4 outer steps are few for an outer momentum of 0.9" in note
    assert not any("WARNING" in n for n in train.plan(Inputs({}), configured(outer_momentum=0, inner_steps=2)).notes)
    assert not any("WARNING" in n for n in train.plan(Inputs({}), train.Config()).notes)


def test_steps_that_no_round_would_hold_are_refused():
    with pytest.raises(ValidationError, match=r"20, no multiple of diloco\.inner_steps, which is 6"):
        configured(inner_steps=6)


def test_replicas_of_one_machine_have_folders_of_their_own():
    assert configured(replica=3).label().endswith("-s0-r3")
    assert configured(replica=3).identity() != configured(replica=2).identity()


def test_settings_are_shared_but_for_a_replicas_own_place(tmp_path: Path):
    shared = [shared_settings(configured(replica=number).identity()) for number in (0, 1)]
    assert shared[0] == shared[1]
    bucket = open_bucket(f"file://{tmp_path}/run")
    in_store.agree(bucket, shared[0])
    with pytest.raises(UsageError, match=r"diloco\.codec is 'int8' there and 'int4' here"):
        in_store.agree(bucket, shared_settings(configured(codec="int4").identity()))


def test_the_same_weights_in_another_folder_are_the_same(tmp_path: Path, model: Path):
    shutil.copytree(model, tmp_path / "copy")
    one, other = (
        shared_settings(train.Config(policy={"model": str(m)}).identity()) for m in (model, tmp_path / "copy")
    )
    assert one == other


def test_statistics_beside_parameters_are_refused():
    assert len(trained(tiny_model())) == len(list(tiny_model().named_parameters()))
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    with pytest.raises(UsageError, match=r"keeps 1\.running_mean beside its parameters"):
        trained(model)


def test_a_missing_extra_is_named():
    code = "import sys; sys.modules['obstore'] = None\nfrom stages.runs.bucket import open_bucket\nopen_bucket('file:///x')"
    words = ["python", "-c", code]
    done = subprocess.run([shutil.which("python") or "", *words[1:]], capture_output=True, text=True, timeout=120)
    assert "file:///x needs obstore, which is not installed" in done.stderr
