"""A teacher behind a server tells log-probs of the student's tokens or of its own, and teaches as one held here."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import trainings
from support.engine import Engine, running
from support.models import save_tiny

from composer_stages import train
from composer_stages.errors import UsageError
from composer_stages.rollouts.trace import by_rollout, prompt_ids
from composer_stages.runs.kinds import CHECKPOINT, STEP
from composer_stages.runs.run import Run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student, its teacher, and a model with another alphabet."""
    made = tmp_path_factory.mktemp("models")
    save_tiny(made / "student")
    save_tiny(made / "teacher", seed=5)
    save_tiny(made / "stranger", characters="abcdefghijklm\u0120")
    return made


SAMPLED = {"form": "sampled"}


def trained(root: Path, folder: Path, teacher: dict[str, Any], opd: dict[str, Any], temperature: float = 1.0) -> Run:
    size = {"learning_rate": 0.05, "threads": 1, "micro_batch": 4}
    more: dict[str, Any] = {"weights": {"opd": 1.0}, "opd": opd, "trl": {"optim": "sgd"}, "tasks": 3}
    policy = {"max_tokens": 10, "temperature": temperature}
    return trainings.trained(root, folder / "student", policy=policy, optimisation=size, teacher=teacher, **more)


def served(engine: Engine, model: Path) -> dict[str, Any]:
    return {"model": f"vllm:{model}", "base_url": engine.url}


def weights(run: Run) -> torch.Tensor:
    (file,) = run.folder(CHECKPOINT).glob("*.safetensors")
    return torch.cat([value.flatten() for _, value in sorted(load_file(file).items())])


def metrics(run: Run) -> list[dict[str, float]]:
    lines = trainings.metrics_of(run)
    return [{name: value for name, value in line.items() if name.startswith("opd/")} for line in lines]


VOCABULARY = 17


@pytest.mark.parametrize(
    ("opd", "here", "temperature"),
    [
        (SAMPLED, SAMPLED, 1.0),
        ({"top_k": VOCABULARY}, {}, 1.0),
        ({"top_k": 4, "beta": 0.5}, {"top_k": 4, "beta": 0.5}, 0.7),
    ],
    ids=["sampled", "whole vocabulary", "JSD of 4 at .7"],
)
def test_training_is_that_with_the_same_teacher_here(
    tmp_path: Path, folder: Path, opd: dict[str, Any], here: dict[str, Any], temperature: float
) -> None:
    held = trained(tmp_path / "here", folder, {"model": str(folder / "teacher")}, here, temperature)
    with running(folder / "teacher") as engine:
        asked = trained(tmp_path / "asked", folder, served(engine, folder / "teacher"), opd, temperature)
        scored = [body["prompt"] for _, body in engine.requests if "prompt_logprobs" in body]
    assert float((weights(asked) - weights(held)).abs().max()) < 1e-6
    assert any(abs(line["opd/loss"]) > 1e-3 for line in metrics(held)), "the teacher must make a difference"
    for found, expected in zip(metrics(asked), metrics(held), strict=True):
        for name, value in found.items():
            assert value == pytest.approx(expected[name], abs=1e-5), name
    whole = [
        [*(prompt_ids(steps)[-1] or []), *steps[-1]["completion_token_ids"]]
        for steps in by_rollout(asked.rows(STEP)).values()
    ]
    probes = 1 if opd == SAMPLED else 2
    assert sorted(scored[probes:]) == sorted(whole), "after the probing calls, each rollout once, token by token"
    assert asked.manifest.models["teacher 1"]["server"]["capture_level"] == "tokens"


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path: Path, folder: Path) -> None:
    with running(folder / "stranger") as engine, pytest.raises(UsageError, match=r"stranger' has another vocabulary"):
        trained(tmp_path, folder, served(engine, folder / "stranger"), {"top_k": 4})


@pytest.mark.parametrize(
    ("faults", "opd", "words"),
    [
        ({}, {"top_k": 21}, r"the 21 likeliest tokens: .* max allowed: 20\. Start it with --max-logprobs 21"),
        ({"mute": 2}, {"top_k": 4}, "does not answer with the log-probs of the tokens"),
        ({"mute": 5}, {"top_k": 4}, "does not answer with the log-probs of the tokens"),
        ({"mute": 5}, SAMPLED, "does not answer with the log-probs of the tokens"),
        ({"likeliest": 99}, {"top_k": 18}, "asked for the 18 likeliest of 17 tokens and told 17"),
    ],
)
def test_a_teacher_server_with_too_few_logprobs_ends_the_training(
    tmp_path: Path, folder: Path, faults: dict[str, int], opd: dict[str, Any], words: str
) -> None:
    """What it does not tell is never a difference of zero."""
    with running(folder / "teacher", **faults) as engine, pytest.raises(UsageError, match=words):
        trained(tmp_path, folder, served(engine, folder / "teacher"), opd)


URL = "http://127.0.0.1:1/v1"
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"model": "m", "base_url": URL}, {}, "write vllm: before the model"),
    ({"model": "vllm:m"}, {}, "composer serve m"),
    ({"model": "vllm:m", "base_url": URL}, {"opd": {"form": "divergence"}}, "its distributions; take weights.opd with"),
    ({"model": "vllm:m", "base_url": URL}, {"weights": {"taid": 1.0}}, "weights.taid would need its distributions"),
    ({"model": "vllm:m", "base_url": URL}, {"weights": {"eopd": 1.0}}, "weights.eopd would need its distributions"),
    ({"model": "vllm:m", "base_url": URL}, {"policy": {"temperature": 0.7}}, "scored at temperature 1"),
]


@pytest.mark.parametrize(("teacher", "more", "words"), REFUSED)
def test_losses_on_distributions_refuse_a_served_teacher(teacher: Any, more: dict[str, Any], words: str) -> None:
    given = {"weights": {"opd": 1.0}, "opd": {"form": "sampled"}, "teacher": teacher}
    train.Config(**{**given, "teacher": {"model": "vllm:m", "base_url": URL}})
    with pytest.raises(ValueError, match=words):
        train.Config(**{**given, **more})
