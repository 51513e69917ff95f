"""Trainings in processes of their own that share nothing but a folder or a bucket."""

import os
import shutil
import signal
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import needs
from pydantic import ValidationError
from support.command_line import until
from support.models import tiny_model
from support.refusals import refused
from support.replicas import PROCESSES, command
from support.s3 import s3 as s3
from support.trainings import checkpoint_bytes, settings, words_of

from composer_stages import train
from composer_stages.diloco import rounds
from composer_stages.errors import UsageError
from composer_stages.runs import store
from composer_stages.runs.bucket import open_bucket
from composer_stages.runs.kinds import ROLLOUT
from composer_stages.runs.run import Inputs, Run
from composer_stages.training import replicas
from tests.stages.training.test_plan import TWO, codes, served


class Replicas:
    """`composer train --diloco` at work: one folder of artifacts a replica, as on machines of their own."""

    def __init__(self, root: Path, url: str, model: Path, number: int, **variables: str) -> None:
        self.root, self.variables = root, variables
        size = ("steps=6", "prompts_per_step=2", "generations=4", "save_every=1", "threads=1", "learning_rate=0.01")
        diloco = ("inner_steps=2", "timeout_s=150", "outer_momentum=0")
        given = (*(f"optimisation.{part}" for part in size), *(f"diloco.{part}" for part in diloco))
        self.words = [*words_of(model, "tasks=4", *given), "-q", "--diloco", url, "--replicas", str(number)]

    def start(self, name: str, *more: str) -> BaseProcess:
        words = [*self.words, "--artifacts", str(self.root / name), *more]
        process = PROCESSES.Process(target=command, args=(words, self.root / name, self.variables))
        process.start()
        return process

    def end(self, name: str, process: BaseProcess) -> Run:
        process.join(200)
        assert process.exitcode == 0, (self.root / name / "stderr").read_text()
        return Run(next((self.root / name / "train").glob("2*")))


def members(run: Run) -> list[list[int]]:
    """The replicas of each round."""
    return [held["replicas"] for held in store.read_json(run.path / "diloco.json")["rounds"]]


@pytest.mark.slow
def test_two_replicas_end_alike_and_one_of_them_is_killed_on_the_way(tmp_path: Path, tiny: Path) -> None:
    """Killed in its second round and resumed, it goes on in the round that the other one waits for."""
    both, grace = Replicas(tmp_path, f"file://{tmp_path}/bucket", tiny, 2), ("-s", "diloco.grace_s=100")
    other, killed = both.start("b", *grace), both.start("a", *grace)
    mark = "train/2*/scratch/trainer/checkpoint-3/composer.json"
    until(lambda: list((tmp_path / "a").glob(mark)) or not killed.is_alive(), 200)
    os.kill(killed.pid or 0, signal.SIGKILL)
    killed.join()
    runs = [both.end("a", both.start("a", "--resume", *grace)), both.end("b", other)]
    assert checkpoint_bytes(runs[0]) == checkpoint_bytes(runs[1]) != (tiny / "model.safetensors").read_bytes()
    assert members(runs[1]) == [[0, 1]] * 3
    played = [{row["rollout_id"]: row["reward"] for row in run.rows(ROLLOUT)} for run in runs]
    assert played[0] != played[1], "each plays its own"
    assert sorted(run.manifest.outcome.summary["replica"] for run in runs) == [0, 1]
    assert [run.manifest.counts["done"] for run in runs] == [6, 6]
    late = both.end("c", both.start("c", *grace))
    assert checkpoint_bytes(late) == checkpoint_bytes(runs[0])
    assert late.manifest.outcome.summary["rounds_taken_part"] == 0


@needs("moto")
@pytest.mark.slow
def test_replicas_meet_in_an_s3_bucket(tmp_path: Path, tiny: Path, s3: dict[str, str]) -> None:
    both = Replicas(tmp_path, "s3://runs/first", tiny, 2, **s3)
    runs = [both.end(name, process) for name, process in [(name, both.start(name)) for name in "ab"]]
    assert checkpoint_bytes(runs[0]) == checkpoint_bytes(runs[1]) and members(runs[0]) == [[0, 1]] * 3


def replica(steps: int = 20, **diloco: Any) -> train.Config:
    return train.Config(optimisation={"steps": steps}, diloco={"store": "memory:///", "inner_steps": 5, **diloco})


def test_few_rounds_for_the_outer_momentum_are_a_warning_before_training() -> None:
    def warnings(config: train.Config) -> list[str]:
        return [note for note in train.plan(Inputs({}), config).notes if note.startswith("WARNING")]

    (note,) = warnings(replica(495, outer_momentum=0.9))
    assert "99 outer steps are few for an outer momentum of 0.9" in note and "below 100" in note
    enough = replica(500, outer_momentum=0.9), replica(100, outer_momentum=0.5), replica(50, outer_momentum=0)
    assert [warnings(config) for config in (*enough, train.Config(diloco={"outer_momentum": 0.9}))] == [[]] * 4


def test_replicas_of_one_machine_have_folders_of_their_own_and_share_all_other_settings(tmp_path: Path) -> None:
    assert replica(replica=3).label().endswith("-s0-r3")
    assert replica(replica=3).identity() != replica(replica=2).identity()
    shared = [replicas.shared_settings(replica(replica=number).identity()) for number in (0, 1)]
    assert shared[0] == shared[1]
    bucket = open_bucket(f"file://{tmp_path}/run")
    rounds.agree(bucket, shared[0])
    with pytest.raises(UsageError, match=r"diloco\.codec is 'int8' there and 'int4' here"):
        rounds.agree(bucket, replicas.shared_settings(replica(codec="int4").identity()))


def test_the_same_weights_in_another_folder_are_the_same(tmp_path: Path, tiny: Path) -> None:
    copy = shutil.copytree(tiny, tmp_path / "copy")
    one, other = (replicas.shared_settings(settings(model).identity()) for model in (tiny, copy))
    assert one == other


def test_statistics_beside_parameters_are_refused() -> None:
    assert len(replicas.trained(tiny_model())) == len(list(tiny_model().named_parameters()))
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    with pytest.raises(UsageError, match=r"1\.running_mean"):
        replicas.trained(model)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.exceptions", None)  # as where it is not installed
    refused(lambda: open_bucket("file:///x"), UsageError, code="runs.obstore-missing", url="file:///x")


def test_rounds_that_do_not_divide_the_steps_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"20.*inner_steps.*6"):
        replica(inner_steps=6)


def test_replicas_of_processes_and_on_a_server_are_refused() -> None:
    shared: dict[str, Any] = {"diloco": {"store": "file:///x"}}
    assert codes(shared | {"optimisation": {"steps": 40}}, **TWO) == ["replica-of-processes"]
    assert codes(shared | {"optimisation": {"steps": 40}}) == []
    assert codes(served(steps=40) | shared) == ["server-of-replicas"]
