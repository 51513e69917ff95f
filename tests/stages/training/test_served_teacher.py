"""A teacher behind a server is asked for the log-probs of the student's own tokens, and teaches as one held here."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import trainings
from support.engine import Engine, running
from support.models import save_tiny

from stages import train
from stages.errors import UsageError
from stages.rollouts.trace import by_rollout, prompt_ids
from stages.runs.kinds import CHECKPOINT, STEP
from stages.runs.run import Run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student, its teacher, and a model with another alphabet."""
    made = tmp_path_factory.mktemp("models")
    save_tiny(made / "student")
    save_tiny(made / "teacher", seed=5)
    save_tiny(made / "stranger", characters="abcdefghijklm\u0120")
    return made


def trained(root: Path, folder: Path, teacher: dict[str, Any]) -> Run:
    size = {"learning_rate": 0.05, "threads": 1, "micro_batch": 4}
    more: dict[str, Any] = {"weights": {"opd": 1.0}, "opd": {"form": "sampled"}, "trl": {"optim": "sgd"}, "tasks": 3}
    policy = {"max_tokens": 10}
    return trainings.trained(root, folder / "student", policy=policy, optimisation=size, teacher=teacher, **more)


def served(engine: Engine, model: Path) -> dict[str, Any]:
    return {"model": f"vllm:{model}", "base_url": engine.url}


def weights(run: Run) -> torch.Tensor:
    (file,) = run.folder(CHECKPOINT).glob("*.safetensors")
    return torch.cat([value.flatten() for _, value in sorted(load_file(file).items())])


def metrics(run: Run) -> list[dict[str, float]]:
    lines = trainings.metrics_of(run)
    return [{name: value for name, value in line.items() if name.startswith("opd/")} for line in lines]


def test_training_is_that_with_the_same_teacher_here(tmp_path: Path, folder: Path) -> None:
    here = trained(tmp_path / "here", folder, {"model": str(folder / "teacher")})
    with running(folder / "teacher") as engine:
        asked = trained(tmp_path / "asked", folder, served(engine, folder / "teacher"))
        scored = [body["prompt"] for _, body in engine.requests if "prompt_logprobs" in body]
    with running(folder / "student") as engine:
        other = trained(tmp_path / "other", folder, served(engine, folder / "student"))
    assert float((weights(asked) - weights(here)).abs().max()) < 1e-6
    assert float((weights(other) - weights(here)).abs().max()) > 1e-4, "another teacher must make a difference"
    for found, expected in zip(metrics(asked), metrics(here), strict=True):
        for name, value in found.items():
            assert value == pytest.approx(expected[name], abs=1e-5), name
    whole = [
        [*(prompt_ids(steps)[-1] or []), *steps[-1]["completion_token_ids"]]
        for steps in by_rollout(asked.rows(STEP)).values()
    ]
    assert sorted(scored[1:]) == sorted(whole), "after the probing call, each rollout once, token by token"
    assert asked.manifest.models["teacher 1"]["server"]["capture_level"] == "tokens"


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path: Path, folder: Path) -> None:
    with running(folder / "stranger") as engine, pytest.raises(UsageError, match="another vocabulary"):
        trained(tmp_path, folder, served(engine, folder / "stranger"))


URL = "http://127.0.0.1:1/v1"
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"model": "m", "base_url": URL}, {}, "write vllm: before the model"),
    ({"model": "vllm:m"}, {}, "composer serve m"),
    ({"model": "vllm:m", "base_url": URL}, {"opd": {"form": "divergence"}}, "weights.opd would need its distributions"),
    ({"model": "vllm:m", "base_url": URL}, {"weights": {"taid": 1.0}}, "weights.taid would need its distributions"),
    ({"model": "vllm:m", "base_url": URL}, {"weights": {"eopd": 1.0}}, "weights.eopd would need its distributions"),
    ({"model": "vllm:m", "base_url": URL}, {"policy": {"temperature": 0.7}}, "scored at temperature 1"),
]


@pytest.mark.parametrize(("teacher", "more", "words"), REFUSED)
def test_what_a_served_teacher_cannot_tell_is_refused(teacher: Any, more: dict[str, Any], words: str) -> None:
    given = {"weights": {"opd": 1.0}, "opd": {"form": "sampled"}, "teacher": teacher}
    train.Config(**{**given, "teacher": {"model": "vllm:m", "base_url": URL}})
    with pytest.raises(ValueError, match=words):
        train.Config(**{**given, **more})
