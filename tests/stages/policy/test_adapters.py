"""What a training run says of its checkpoint survives the file; a run that says nothing is refused in words."""

from pathlib import Path

import pytest

from composer_stages.errors import BadInput, UsageError
from composer_stages.policy.adapters import CheckpointInfo, refuse_trained
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
