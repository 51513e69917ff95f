"""Several processes take the step of one: every channel and combination, adapters and whole models, cut or not."""

import subprocess
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import orjson
import pytest
from safetensors.torch import load_file
from support.models import save_tiny
from support.several import BROKEN, pairs_run, start, train_all

from stages.runs.kinds import CHECKPOINT, HINT, ROLLOUT
from stages.runs.run import Run
from stages.training.channels import CHANNELS

TOLERANCE = 1e-5
STEP = {"steps": 2, "prompts_per_step": 4, "generations": 2, "learning_rate": 0.05, "threads": 1}
APART = ("step_time", "entropy", "cispo_clip_ratio")
"""Metrics that measure the machine, or that TRL takes the mean of over passes, of which processes have other ones."""
AT_FIRST = ("dpo/accuracy",)
"""In step 1 the student is the reference, so that this counts the signs of margins that are 0 up to rounding."""


def settings(folder: Path, names: tuple[str, ...] = (), size: dict[str, Any] | None = None, **more: Any) -> Any:
    """A case on the tiny model: gradient descent, so that weights differ by as much as gradients do."""
    channels = [CHANNELS[name] for name in names]
    return {
        "env": {"name": "support.environments:GuessEnv"},
        "policy": {"model": str(folder / "student"), "max_tokens": 10},
        "tasks": 3,
        "optimisation": {**STEP, **(size or {})},
        "weights": {name: 0.7 + 0.2 * i for i, name in enumerate(names)},
        "pairs": {"per_step": 5},
        "hints": {"per_step": 5},
        "teacher": {"model": str(folder / "teacher")} if any("teacher" in c.needs for c in channels) else None,
        "trl": {"optim": "sgd"},
        **({"from_pairs": str(folder / "pairs")} if any("pairs" in c.needs for c in channels) else {}),
        **more,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student, a teacher, and pairs."""
    made = tmp_path_factory.mktemp("processes")
    save_tiny(made / "student")
    save_tiny(made / "teacher", seed=5)
    pairs_run(made / "pairs", 12)
    return made


def metrics(run: Run) -> list[dict[str, float]]:
    return [orjson.loads(line) for line in (run.path / "metrics.jsonl").read_bytes().splitlines()]


def weights_apart(one: Run, other: Run) -> float:
    """The largest difference of a weight."""
    (a,), (b,) = ([load_file(p) for p in run.folder(CHECKPOINT).glob("*.safetensors")] for run in (one, other))
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def difference(one: Run, other: Run) -> float:
    """The largest difference of a weight, a loss or another metric of a step, relative to numbers above 1."""
    found = [weights_apart(one, other)]
    for number, (ours, theirs) in enumerate(zip(metrics(one), metrics(other), strict=True)):
        assert ours.keys() == theirs.keys()
        left_out = APART if number else (*APART, *AT_FIRST)
        found += [abs(ours[k] - theirs[k]) / max(1, abs(ours[k])) for k in ours if k not in left_out]
    return max(found)


def compare(ours: dict[str, Run], theirs: dict[str, Run]) -> dict[str, float]:
    """Differences above the tolerance by case; the rollouts and hints of both are the same rows."""
    for name, run in ours.items():
        assert run.rows(HINT) == theirs[name].rows(HINT), name
        played, others = ([r["rollout_id"] for r in x.rows(ROLLOUT)] for x in (run, theirs[name]))
        assert played == others and len(set(played)) == len(played) > 0, name
    found = {name: difference(run, theirs[name]) for name, run in ours.items()}
    print(max(found.values()))
    return {name: much for name, much in found.items() if not much < TOLERANCE}


def small_cases(folder: Path) -> dict[str, Any]:
    """Everything once."""
    every = tuple(CHANNELS)
    cut = {"micro_batch": 2, "max_tokens_per_micro_batch": 60, "gradient_cosine_every": 1}
    return {
        "all": settings(folder, every),
        "all-cut": settings(folder, every, cut),
        "adapter": settings(folder, every, adapter={"rank": 4}),
        "plain": settings(folder),
    }


def each_channel(folder: Path) -> dict[str, Any]:
    """Alone, and with each other one."""
    names = tuple(CHANNELS)
    cases = {name: settings(folder, (name,)) for name in names}
    return cases | {"-".join(two): settings(folder, two, {"steps": 1}) for two in combinations(names, 2)}


def each_form(folder: Path) -> dict[str, Any]:
    """Everything once, each form of GRPO's loss, and what channels and optimiser can be told to do otherwise."""
    cases = small_cases(folder)
    for form in ("grpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"):
        cases[form] = settings(folder, ("dpo",), {"loss_type": form, "micro_batch": 2})
    cases["kl"] = settings(folder, ("sdpo",), {"beta": 0.1})
    cases["kl-adapter"] = settings(folder, ("sdpo",), {"beta": 0.1}, adapter={"rank": 4})
    cases["recomputed"] = settings(folder, ("sdpo", "dpo"), {"gradient_checkpointing": True})
    cases["demonstrations"] = settings(folder, ("sdpo",), hints={"source": "rollout", "success_reward": 0.01})
    cases["average"] = settings(folder, ("sdpo",), hints={"teacher": "ema", "importance_clip": 2.0})
    return cases


@pytest.mark.slow
def test_two_processes_take_the_step_of_one(folder: Path) -> None:
    cases = small_cases(folder)
    alone = train_all(folder / "one", cases, 1)
    broken = {kind: {**cases["all"], "broken": kind} for kind in BROKEN}
    both = train_all(folder / "two", cases | broken, 2)
    assert compare({name: both[name] for name in cases}, alone) == {}
    names = {key.partition("/")[0] for key in metrics(alone["all"])[0]}
    assert set(CHANNELS) <= names
    red = {kind: weights_apart(both[kind], alone["all"]) for kind in BROKEN}
    print(red)
    assert all(much > 10 * TOLERANCE for much in red.values()), red


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("count", "make"), [(2, each_channel), (2, each_form), (4, small_cases)])
def test_every_combination_in_any_number_of_processes(folder: Path, count: int, make: Any) -> None:
    cases = make(folder)
    alone = train_all(folder / f"alone-{count}", cases, 1)
    assert compare(train_all(folder / f"together-{count}", cases, count), alone) == {}


def at_a_checkpoint(folder: Path, case: dict[str, Any], count: int) -> list["subprocess.Popen[str]"]:
    """Processes that have just written the first checkpoint, with steps to go."""
    running = start(folder, {"run": case}, count)
    deadline = time.monotonic() + 280
    while not (folder / "run" / "scratch" / "trainer" / "checkpoint-2" / "composer.json").exists():
        assert all(process.poll() is None for process in running) and time.monotonic() < deadline
        time.sleep(0.01)
    return running


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_training_goes_on_in_another_number_of_processes(folder: Path) -> None:
    """Taid's schedule and the moving average go along."""
    case = settings(
        folder,
        ("sdpo", "taid"),
        {"steps": 6, "save_every": 2},
        env={"name": "support.environments:SlowEnv"},
        hints={"teacher": "ema"},
    )
    whole = train_all(folder / "whole", {"run": case}, 1)
    for first, then in ((2, 1), (1, 2)):
        place = folder / f"{first}-{then}"
        running = at_a_checkpoint(place, case, first)
        running[-1].kill()
        if first == 2:
            said = running[0].communicate(timeout=120)[1]
            assert running[0].returncode == 1 and "One of the other 1 processes of this training is gone" in said
        running[-1].communicate(timeout=60)
        resumed = train_all(place, {"run": case}, then)
        assert resumed["run"].manifest.attempts == 2
        assert compare(resumed, whole) == {}
