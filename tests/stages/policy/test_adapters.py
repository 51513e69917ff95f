"""What a training run says of its checkpoint survives the file; a run that says nothing is refused in words."""

from pathlib import Path

import pytest

from composer_stages.errors import BadInput, UsageError
from composer_stages.policy.adapters import CheckpointInfo, refuse_trained, trainings_of
from composer_stages.policy.base import PolicyConfig
from composer_stages.runs.run import Manifest, Run, write_manifest

INFO = CheckpointInfo(
    arm="B",
    train_seed=3,
    start=PolicyConfig(temperature=0.5),
    start_identity="0" * 64,
    env="kata",
    split="train",
    task_ids=("t1", "t0"),
)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    about = {"composer": "0", "stage": "train", "stage_version": 1, "fingerprint": "f", "label": "l"}
    write_manifest(tmp_path, Manifest.model_validate({**about, "started_at": "2026-01-01T00:00:00+00:00"}))
    return Run(tmp_path)


@pytest.mark.parametrize("text", [None, "{", '{"arm": "A"}'])
def test_a_missing_or_damaged_document_is_refused(run: Run, text: str | None) -> None:
    if text is not None:
        (run.path / "checkpoint.json").write_text(text)
    with pytest.raises(BadInput, match=r"checkpoint\.json"):
        CheckpointInfo.of(run)


def test_training_tasks_are_refused_under_any_name_of_their_environment() -> None:
    for env in ("kata", "composer_stages.envs.kata.env:KataEnv"):
        with pytest.raises(UsageError, match="1 of 2 tasks, for example t1"):
            refuse_trained([INFO], env, ["t7", "t1"])
        refuse_trained([INFO], env, ["t7"])
    refuse_trained([INFO], "support.environments:GuessEnv", ["t1"])


def test_tasks_of_pairs_and_of_earlier_trainings_are_trained_on() -> None:
    info = INFO.model_copy(update={"further_tasks": {"gsm8k": ("q1",), "": ("imported",)}})
    for env, task_id in (("gsm8k", "q1"), ("gsm8k", "imported"), ("kata", "imported"), ("kata", "t0")):
        with pytest.raises(UsageError, match=f"for example {task_id}"):
            refuse_trained([info], env, [task_id])
    refuse_trained([info], "kata", ["q1"])


def test_a_training_is_known_by_its_folders(run: Run) -> None:
    (run.path / "checkpoint.json").write_text(INFO.model_dump_json())
    models = ("checkpoint", "checkpoints/step-1", "Qwen/Qwen3-8B", "")
    policies = {name: PolicyConfig(model=str(run.path / name) if "/" not in name[:5] else name) for name in models}
    assert {info.arm for info in trainings_of(policies)} == {"checkpoint", "checkpoints/step-1"}
