"""train with a teacher: the policy itself given hints, a model that writes the hints, another model."""

import threading
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.models import save_tiny
from support.server import Reply, answer, serving
from support.trainings import metrics_of, trained
from transformers import AutoModelForCausalLM, AutoTokenizer

from stages.errors import UsageError
from stages.runs.kinds import HINT, ROLLOUT


def test_self_distillation_hints_at_faulty_turns(tmp_path: Path, tiny: Path) -> None:
    run = trained(tmp_path, tiny, "D", weights={"sdpo": 1.0})
    metrics = [orjson.loads(line) for line in (run.path / "metrics.jsonl").read_bytes().splitlines()]
    assert metrics[0]["sdpo/turns"] > 0 and metrics[0]["sdpo/denominator"] > 0


def test_hints_of_a_model_are_asked_at_once_for_the_turns_that_are_used(tmp_path: Path, tiny: Path) -> None:
    lock, now, most = threading.Lock(), 0, 0

    def reply(body: dict[str, Any], n: int) -> Reply:
        nonlocal now, most
        with lock:
            now, most = now + 1, max(most, now + 1)
        time.sleep(0.2)
        with lock:
            now -= 1
        return Reply(body=answer(f"Think of {n % 3}."))

    with serving(reply) as server:
        hints = {"source": "llm", "llm": {"model": "adviser", "base_url": server.url}, "per_step": 4}
        run = trained(tmp_path, tiny, "D", weights={"sdpo": 1.0}, hints=hints)
        asked = len(server.requests)
    assert asked <= 2 * 4 and most > 1
    rows = run.rows(HINT)
    assert [row["training_step"] for row in rows] == [0] * 4 + [1] * 4
    assert {row["source"] for row in rows} == {"adviser"} and all(row["hint"].startswith("Hint: Think") for row in rows)
    assert [row["sdpo/turns"] for row in metrics_of(run)] == [4.0, 4.0]


def test_a_teacher_of_another_tokenizer_is_refused_before_training(tmp_path: Path, tiny: Path) -> None:
    other = save_tiny(tmp_path / "other", characters="abcdefghijkm\u0120")
    with pytest.raises(UsageError, match="has another vocabulary than the student: token 12 is 'm' there and 'l' here"):
        trained(tmp_path, tiny, "T", weights={"taid": 1.0}, teacher={"model": str(other)})


def test_a_teacher_whose_head_is_padded_teaches(tmp_path: Path, tiny: Path) -> None:
    padded = tmp_path / "padded"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)
    model.resize_token_embeddings(len(tokenizer) + 13, mean_resizing=False)
    model.save_pretrained(padded)
    tokenizer.save_pretrained(padded)
    runs = [
        metrics_of(
            trained(tmp_path / name, tiny, "T", weights={"taid": 1.0, "eopd": 1.0}, teacher={"model": str(path)})
        )
        for name, path in (("a", tiny), ("b", padded))
    ]
    assert runs[0][0]["taid/loss"] == pytest.approx(runs[1][0]["taid/loss"], rel=1e-6)
    assert runs[0][0]["eopd/loss"] == pytest.approx(runs[1][0]["eopd/loss"], rel=1e-6, abs=1e-7)


@pytest.mark.parametrize(
    "hints",
    [
        {"teacher": "ema", "importance_clip": 2.0},
        {"teacher": "trust-region", "tail": False},
        {"source": "rollout", "success_reward": 0.05},
    ],
)
def test_sdpo_in_upstreams_modes(tmp_path: Path, tiny: Path, hints: dict[str, Any]) -> None:
    run = trained(tmp_path, tiny, "D", weights={"sdpo": 1.0}, hints=hints)
    assert all(row["sdpo/loss"] >= 0 and row["sdpo/turns"] > 0 for row in metrics_of(run))
    if hints.get("source") == "rollout":
        shown = {row["source"] for row in run.rows(HINT)}
        assert shown and shown <= {row["rollout_id"] for row in run.rows(ROLLOUT)}
