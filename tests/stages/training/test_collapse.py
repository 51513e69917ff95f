"""A training that leaves its course is noticed, says so once, and can be ended with a model from before."""

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from support.environments import SpoiltEnv
from support.trainings import trained
from transformers import TrainerState

from composer_stages.backends.ranks import Ranks
from composer_stages.errors import ComposerError
from composer_stages.policy.adapters import CheckpointInfo
from composer_stages.policy.base import NotFinite
from composer_stages.runs import runner
from composer_stages.runs.activity import Notice
from composer_stages.runs.kinds import CHECKPOINT
from composer_stages.runs.run import Run
from composer_stages.train import Config
from composer_stages.training.collapse import Course, Watch

WELL = {"reward": 0.5, "protocol": 0.9, "entropy": 1.6, "completions/mean_length": 40.0}


def noticed(changes: list[dict[str, float]], well: dict[str, float] = WELL) -> dict[str, tuple[int, int]]:
    """Of a training of ten steps that are well and further ones: by metric, the step that noticed, and steps before."""
    course, found = Course(rollouts=64), {}
    for step, row in enumerate([well] * 10 + [well | change for change in changes], start=1):
        for one in course.add(row):
            assert one.words.startswith(f"step {step}: ")
            found[one.metric] = (step, one.before)
    return found


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"reward": 0.0}, {"reward": (14, 9)}),
        ({"reward": 0.4}, {}),
        ({"protocol": 0.1}, {"protocol": (14, 9)}),
        ({"entropy": 8.0}, {"entropy": (12, 9)}),
        ({"entropy": 2.5}, {}),
        ({"entropy": 0.1}, {}),
        ({"completions/mean_length": 3.0, "reward": 0.4}, {"completions/mean_length": (12, 9)}),
        ({"completions/mean_length": 3.0, "reward": 0.9}, {}),
        ({"entropy": float("nan")}, {}),
    ],
)
def test_each_departure_from_the_course_is_reported_once(
    change: dict[str, float], found: dict[str, tuple[int, int]]
) -> None:
    assert noticed([change] * 20) == found


def test_single_steps_and_low_entropy_are_no_departure() -> None:
    assert noticed([{"entropy": 8.0}, *[{}] * 10]) == {}
    assert noticed([{"entropy": 0.4}] * 20, WELL | {"entropy": 0.05}) == {}


def test_a_training_without_grpo_has_no_entropy_to_watch() -> None:
    well = {name: value for name, value in WELL.items() if name != "entropy"}
    assert noticed([{"reward": 0.0}] * 4, well) == {"reward": (14, 9)}


def test_a_low_rate_takes_more_steps_than_a_high_one() -> None:
    low = WELL | {"reward": 0.05}
    assert noticed([{"reward": 0.0}] * 5, low) == {} and noticed([{"reward": 0.0}] * 60, low)["reward"][0] == 20
    assert noticed([{"reward": 0.0}] * 60, WELL | {"reward": 0.0}) == {}, "rewards that were never there"


def test_false_alarms_are_rare_and_zero_rewards_are_detected_early() -> None:
    """Simulated: 200 steps of groups of 8, tasks alike or nearly all-or-nothing, length and entropy with 20 % noise."""
    random, false, late, steps = np.random.default_rng(0), 0, [], 200
    designs = [*product((0.05, 0.3, 0.9), (1, 2, 8), (4.0, 1.0))]
    for rate, prompts, concentration in designs:
        tasks = random.beta(rate * concentration, (1 - rate) * concentration, (steps, prompts))
        healthy = random.binomial(8, tasks).mean(1) / 8
        fall = np.linspace(1, 2 / 3, steps) * random.normal(1, 0.2, (2, steps)).clip(0.3)
        kept = random.binomial(prompts * 8, 0.95, steps) / (prompts * 8)
        for rewards in (healthy, np.where(np.arange(steps) < 40, healthy, 0.0)):
            rows = zip(rewards.tolist(), kept.tolist(), fall[0].tolist(), (40 * fall[1]).tolist(), strict=True)
            course = Course(prompts * 8)
            found = (at for at, row in enumerate(rows) if course.add(dict(zip(WELL, row, strict=True))))
            at = next(found, None)
            false += rewards is healthy and at is not None
            late += [steps if at is None else at - 40] if rewards is not healthy and rate > 0.05 and prompts > 1 else []
    assert false / len(designs) < 0.02 and np.median(late) <= 6 and np.quantile(late, 0.95) < 25


def test_rewards_that_fall_with_an_order_of_tasks_are_no_collapse() -> None:
    """A coder's rewards on problems of MBPP, the easiest first (docs/coder.md)."""
    rewards = [0.64, 0.66, 0.52, 0.59, 0.89, 0.94, 0.78, 0.66, 0.7, 0.88, 0.58, 0.45, 0.73, 0.44, 0.61, 0.72, 0.73]
    rewards += [0.56, 0.83, 0.64, 0.64, 0.3, 0.36, 0.41, 0.22, 0.39, 0.19, 0.05, 0.12]
    for ordered, left in ((False, ["reward"]), (True, [])):
        course = Course(rollouts=64, ordered=ordered)
        for reward in rewards:
            course.add(WELL | {"reward": reward})
        assert list(course.departures) == left


def spoilt(root: Path, tiny: Path, **optimisation: Any) -> tuple[Run, list[str]]:
    """A training of 13 steps whose rewards are gone after 8, and its warnings."""
    SpoiltEnv.graded = 0
    size = {"steps": 13, "prompts_per_step": 4, "generations": 4, "save_every": 3, "keep_every": 1, **optimisation}
    config = Config(
        env={"name": "support.environments:SpoiltEnv", "good": 8 * 16},
        policy={"model": str(tiny), "max_tokens": 4},
        tasks=8,
        optimisation=size,
    )
    said: list[str] = []

    def listener(what: str, done: int, total: int) -> None:
        said.extend([what] if isinstance(what, Notice) else [])

    return Run(runner.execute("train", {}, config, root=root, listener=listener).path), said


def test_a_collapsed_training_warns_and_saves_the_model_from_before(tmp_path: Path, tiny: Path) -> None:
    run, said = spoilt(tmp_path, tiny, stop_on_collapse=True)
    (warning,) = said
    assert warning == "warning: step 12: rewards 0.1 over the last 5 steps, and 0.5 before"
    assert run.manifest.status == "complete" and run.manifest.counts["done"] == 12
    info = CheckpointInfo.of(run)
    assert info.collapsed == f"{warning.removeprefix('warning: ')}; the model is that of step 6"
    assert info.collapsed in (run.path / "report.txt").read_text() and run.manifest.summary["collapsed"]
    assert len((run.read_file("metrics.jsonl") or b"").splitlines()) == 12
    (final,), (kept,) = (
        folder.glob("*.safetensors") for folder in (run.folder(CHECKPOINT), run.path / "checkpoints" / "step_000006")
    )
    ours, theirs = load_file(final), load_file(kept)
    assert all((ours[name] == theirs[name]).all() for name in theirs)


def test_by_default_a_collapsed_training_warns_and_continues(tmp_path: Path, tiny: Path) -> None:
    run, said = spoilt(tmp_path, tiny)
    assert len(said) == 1 and run.manifest.counts["done"] == 13
    assert json.loads(run.read_file("checkpoint.json") or b"")["collapsed"].endswith("the model is that of step 13")


def test_weights_that_stop_being_numbers_end_the_training_with_the_step_and_the_last_good_checkpoint(
    tiny: Path, tmp_path: Path
) -> None:
    size = {"steps": 6, "save_every": 1, "learning_rate": 1e19}
    with pytest.raises(ComposerError) as ended:
        trained(tmp_path, tiny, optimisation=size)
    assert ended.value.exit_code == 1
    step, good = (re.search(pattern, str(ended.value)) for pattern in (r"in step (\d+): ", r"\S+/checkpoint-(\d+)"))
    assert step and good and int(good[1]) < int(step[1]) and "learning_rate" in str(ended.value)
    weights = load_file(Path(good[0]) / "model.safetensors")
    assert all(bool(weight.isfinite().all()) for weight in weights.values())


@pytest.mark.parametrize("row", [{"loss": float("nan"), "grad_norm": 1.0}, {"loss": 0.1, "grad_norm": float("inf")}])
def test_a_loss_or_gradient_that_is_no_number_ends_the_training(row: dict[str, float], tmp_path: Path) -> None:
    watch = Watch(None, 8, Ranks(), stop=False)  # type: ignore[arg-type]
    state = TrainerState(log_history=[row])
    with pytest.raises(NotFinite, match=r"nan|inf"):
        watch.on_log(None, state, None)  # type: ignore[arg-type]
