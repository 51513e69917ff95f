"""Who answered, what was reused and which prompts were cut: told in the reports of every stage that asks a server."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.server import Reply, answer, serving

from composer_stages import collect, evaluate, replay_teachers
from composer_stages.runs import runner
from composer_stages.runs.run import Run

ENV = {"name": "support.environments:GuessEnv", "split": "train"}
PRICES = {"usd_per_mtok_in": 1.0, "usd_per_mtok_out": 1.0}


def asked_of(url: str, **more: Any) -> dict[str, Any]:
    return {"model": "m", "base_url": url, "max_tokens": 64, **more}


def collected_by(root: Path, url: str, rollouts: Run, how: dict[str, Any], **more: Any) -> Path:
    config = collect.Config(env=ENV, policy=asked_of(url, **more), tasks=3, samples=1)
    return runner.execute("collect", {}, config, root=root, **how).path


def evaluated_by(root: Path, url: str, rollouts: Run, how: dict[str, Any], **more: Any) -> Path:
    policies = {name: asked_of(url, temperature=at, **more) for name, at in (("A", 0.5), ("B", 1.0))}
    config = evaluate.Config(env=ENV, policies=policies, tasks=3, control=None)
    return runner.execute("evaluate", {}, config, root=root, **how).path


def replayed_by(root: Path, url: str, rollouts: Run, how: dict[str, Any], **more: Any) -> Path:
    config = replay_teachers.Config(teachers=[{"name": "t", **asked_of(url, **(PRICES | more))}])
    return runner.execute("replay-teachers", {"rollouts": rollouts}, config, root=root, **how).path


STAGES: dict[str, Callable[..., Path]] = {
    "collect": collected_by, "evaluate": evaluated_by, "replay-teachers": replayed_by
}  # fmt: skip


def provided(body: dict[str, Any], earlier: int) -> Reply:
    """Two providers in turn, the second with another model; they count one token of each prompt."""
    who = {"model": "m-fp4", "provider": "Beta"} if earlier % 2 else {"model": "m", "provider": "Alpha"}
    return Reply(body=answer("a", prompt_tokens=1) | who)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("prices", [{}, PRICES], ids=["free", "priced"])
def test_providers_a_fallback_model_and_cut_prompts_are_named(
    tmp_path: Path, collected: Callable[..., Run], stage: str, prices: dict[str, float]
) -> None:
    with serving(provided) as server:
        path = STAGES[stage](tmp_path, server.url, collected(), {}, **prices)
    said = " ".join((path / "report.txt").read_text().split())
    assert all(words in said for words in ("m was asked", "m of Alpha gave", "m-fp4 of Beta gave"))
    assert "counted fewer tokens than they have" in said and "num_ctx" in said
    if stage == "collect":
        assert Run(path).manifest.summary["failed_checks"] == ["answers of one model"]


@pytest.mark.parametrize("stage", STAGES)
def test_reused_answers_are_told_with_number_and_time_and_fresh_asks_anew(
    tmp_path: Path, collected: Callable[..., Run], stage: str
) -> None:
    said, asked, rollouts = list[str](), list[int](), collected()
    with serving(lambda body, n: Reply(body=answer("a"))) as server:
        for out, how in (("first", {}), ("again", {}), ("anew", {"fresh": True})):
            path = STAGES[stage](tmp_path, server.url, rollouts, {"out": tmp_path / out, **how}, **PRICES)
            said.append(" ".join((path / "report.txt").read_text().split()))
            asked.append(len(server.requests))
    assert 0 < asked[0] == asked[1] == asked[2] // 2
    assert ["of other runs were reused, bought" in text for text in said] == [False, True, False]
    assert "--fresh asks anew" in said[1]
