"""Every field of TRL's can be set, what it refuses is refused before anything is loaded, and ours stay ours."""

import signal
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.refusals import refused
from support.trainings import checkpoint_bytes, metrics_of, settings, trained
from trl.trainer.grpo_config import GRPOConfig

from composer_stages import train
from composer_stages.errors import UsageError
from composer_stages.runs import runner
from composer_stages.runs.run import Inputs, Run
from composer_stages.stopping import Interrupted
from composer_stages.training import trl_arguments
from composer_stages.training.config import FIXED, OURS, TRL_FIELDS, Optimisation
from composer_stages.training.trl_arguments import trl_config


def made(folder: Path, **more: Any) -> GRPOConfig:
    size = Optimisation(steps=2, prompts_per_step=2, generations=4)
    return trl_config(str(folder), size, seed=0, temperature=1.0, max_completion=64, device="cpu", more=more)


def test_without_autocast_weights_compute_in_their_own_type(tmp_path: Path) -> None:
    args = made(tmp_path)
    assert (args.bf16, args.fp16) == (False, False)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("warmup_steps", 3),
        ("lr_scheduler_type", "cosine"),
        ("epsilon_high", 0.28),
        ("scale_rewards", False),
        ("scale_rewards", "batch"),
        ("vllm_importance_sampling_correction", False),
    ],
)
def test_trl_fields_reach_the_trainer(tmp_path: Path, key: str, value: Any) -> None:
    expected = "none" if value is False and key == "scale_rewards" else value
    assert getattr(made(tmp_path, **{key: value}), key) == expected


@pytest.mark.parametrize(
    ("settings", "setting_key"),
    [
        ({"trl": {"learning_rate": 1e-6}}, "optimisation.learning_rate"),
        ({"num_generations": 8}, "optimisation.generations"),
        ({"trl": {"report_to": "wandb", "seed": 1}}, "report_to"),
        ({"trl": {"use_vllm": True}}, None),
    ],
)
def test_trl_fields_of_settings_are_refused_by_name(settings: dict[str, Any], setting_key: str | None) -> None:
    code = "training.trl-field-is-setting" if setting_key else "training.trl-field-fixed"
    refused(lambda: train.Config(**settings), UsageError, code=code, setting_key=setting_key)


@pytest.mark.parametrize(
    ("fields", "code", "values"),
    [
        ({"epsilon_hihg": 0.2}, "no-trl-field", {"key": "epsilon_hihg"}),
        (
            {"lr_scheduler_type": "cosin", "weight_decay": 0.1},
            "trl-refuses",
            {"refused": "trl.lr_scheduler_type = 'cosin'"},
        ),
        ({"epsilon": "much"}, "trl-field-type", {"key": "epsilon", "field_value": "much"}),
        ({"num_iterations": 1.5}, "trl-field-type", {"key": "num_iterations", "field_value": 1.5}),
        ({"num_iterations": 0}, "trl-field-outside", {"key": "num_iterations", "number": 0, "least": 1}),
        ({"pad_to_multiple_of": 0}, "trl-field-outside", {"key": "pad_to_multiple_of"}),
        ({"adam_beta1": 1.0}, "trl-refuses", {"refused": "trl.adam_beta1 = 1.0"}),
        ({"scale_rewards": "grop"}, "trl-choice-unknown", {"name": "trl.scale_rewards", "choice": "grop"}),
        # What transformers would raise behind the loading of the model.
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "weight_decay": 0.1},
            "trl-refuses",
            {"refused": "trl.lr_scheduler_type = 'cosine_with_min_lr'"},
        ),
        ({"optim": "galore_adamw"}, "trl-refuses", {"refused": "trl.optim = 'galore_adamw'"}),
    ],
)
def test_invalid_trl_values_are_refused_when_planning(
    fields: dict[str, Any], code: str, values: dict[str, Any]
) -> None:
    plan = partial(train.plan, Inputs(), train.Config(trl=fields))
    refused(plan, UsageError, code=f"training.{code}", **values)


def test_rows_are_not_cut_over_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By TRL's field, or as `accelerate launch` has it, in the environment."""
    config = train.Config(trl={"parallelism_config": {"cp_size": 2}})
    refused(lambda: train.plan(Inputs(), config), UsageError, code="training.parallelism-config")
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    refused(lambda: made(tmp_path), UsageError, code="training.parallelism-config")


def test_an_unknown_loss_type_is_refused_by_the_name_of_our_setting(tmp_path: Path) -> None:
    config = train.Config(optimisation={"loss_type": "dpao"})
    call = partial(runner.execute, "train", {}, config, root=tmp_path)
    refused(call, UsageError, code="training.trl-choice-unknown", name="optimisation.loss_type", choice="dpao")


def test_the_lists_name_fields_of_this_trl() -> None:
    known = {field.name for field in fields(GRPOConfig)}
    assert known >= OURS.keys() | FIXED | trl_arguments.CHOICES.keys() | TRL_FIELDS["bounds"].keys()


def test_trl_fields_set_by_composer_are_refused_or_defaults(tmp_path: Path) -> None:
    """The schedule and the project are set by us and free; whatever else we set, nobody can set behind our back."""
    plain, ours = GRPOConfig(str(tmp_path), report_to=[], use_cpu=True, bf16=False), made(tmp_path)
    differ = {f.name for f in fields(GRPOConfig) if f.init and getattr(plain, f.name) != getattr(ours, f.name)}
    assert differ - OURS.keys() - FIXED == {"lr_scheduler_type", "project"}


def test_what_trl_refuses_of_the_model_or_the_rewards_is_refused_before_a_step(tmp_path: Path, tiny: Path) -> None:
    call = partial(trained, tmp_path, tiny, trl={"reward_weights": [1.0, 2.0]}, seed=-1)  # numpy takes no such seed
    refused(call, UsageError, code="training.trl-refuses", refused="trl.reward_weights = [1.0, 2.0]")


TWICE: dict[str, Any] = {
    "optimisation": {"steps": 4, "save_every": 1},
    "trl": {"warmup_steps": 3, "num_iterations": 2, "epsilon_high": 0.3},
}


def test_a_warm_up_and_two_iterations_train(artifacts: Path, tiny: Path) -> None:
    rows = metrics_of(trained(artifacts, tiny, **TWICE))
    assert [row["learning_rate"] for row in rows] == pytest.approx([0.0, 2e-4 / 3, 4e-4 / 3, 2e-4])
    assert ["reward" in row for row in rows] == [True, False] * 2, "every second step reuses the rollouts before it"


def test_steps_that_share_rollouts_are_not_parted_by_a_stop(tmp_path: Path, artifacts: Path, tiny: Path) -> None:
    def stop(what: str, done: int, of: int) -> None:
        if what == "training steps" and done == 1:
            signal.raise_signal(signal.SIGINT)

    config = settings(tiny, arm="A", **TWICE)
    with pytest.raises(Interrupted):
        runner.execute("train", {}, config, root=tmp_path, listener=stop)
    assert [path.name for path in tmp_path.glob("train/*/scratch/trainer/checkpoint-*")] == ["checkpoint-2"]
    resumed = Run(runner.execute("train", {}, config, root=tmp_path, resume=True).path)
    assert checkpoint_bytes(resumed) == checkpoint_bytes(trained(artifacts, tiny, **TWICE))
