"""At zero weights the composed trainer is plain GRPOTrainer bit for bit; losses add up, and cosines are right."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from support.environments import GuessEnv
from support.models import tiny_model, tiny_tokenizer
from transformers import GPT2Config, GPT2LMHeadModel
from trl import GRPOConfig, GRPOTrainer

from composer_stages.errors import BadInput
from composer_stages.policy.base import PolicyConfig
from composer_stages.policy.local import LocalPolicy
from composer_stages.training.channels.base import ChannelLoss
from composer_stages.training.channels.pairs import PairSource, TokenPair
from composer_stages.training.config import Config, Optimisation, Weights
from composer_stages.training.rollouts import LockStep, Schedule, environment_reward, trl_columns
from composer_stages.training.scoring import Tree, score
from composer_stages.training.step import (
    Batch,
    Channels,
    ComposedTrainer,
    StepReport,
    collate,
    compose_loss,
    group,
    statistics,
    unused_rows,
)
from composer_stages.training.trl_arguments import trl_config

SETTINGS = Optimisation(steps=2, prompts_per_step=2, generations=4, learning_rate=1e-3)


def policy() -> LocalPolicy:
    tokenizer = tiny_tokenizer("ab")
    return LocalPolicy(tiny_model(vocabulary=len(tokenizer)), tokenizer, PolicyConfig(model="tiny", max_tokens=12))


def rollouts(held: LocalPolicy) -> LockStep:
    return LockStep(GuessEnv, held, Schedule(GuessEnv().tasks("train", 4, 0), groups=2, generations=4, seed=0), 2)


def arguments(folder: Path, settings: Optimisation = SETTINGS, more: Any = None) -> GRPOConfig:
    return trl_config(str(folder), settings, seed=0, temperature=1.0, max_completion=64, device="cpu", more=more)


def composed(
    folder: Path,
    weights: Weights | None = None,
    rows: Batch | None = None,
    settings: Optimisation = SETTINGS,
    num_gpus: int = 0,
    held: LocalPolicy | None = None,
    source: PairSource | None = None,
    more: Any = None,
    shared_prompts: bool = False,
) -> ComposedTrainer:
    held, args = held or policy(), arguments(folder, settings, more)
    args._n_gpu = num_gpus
    channels = Channels(Config(weights=weights or Weights()), [source or PairSource([], per_step=1, seed=0)])
    return ComposedTrainer(
        policy=held,
        rollouts=rollouts(held),
        record=lambda step, rollouts: None,
        channels=channels,
        rows=lambda rollouts, step: rows or Batch(),
        gradient_cosine_every=0,
        shared_prompts=shared_prompts,
        args=args,
    )


def plain(folder: Path) -> GRPOTrainer:
    """A training by TRL's own trainer."""
    held, args = policy(), arguments(folder)
    source = rollouts(held)
    return GRPOTrainer(
        model=held.model,
        processing_class=held.tokenizer,
        reward_funcs=environment_reward,
        rollout_func=lambda prompts, trainer: trl_columns(source.take(trainer.state.global_step)[0], held.tokenizer),
        args=args,
        train_dataset=unused_rows(args),
    )


def gradients_of_first_step(trainer: GRPOTrainer) -> tuple[list[torch.Tensor], list[torch.Tensor], float]:
    """Gradients as the first optimiser step sees them, the weights after all steps, and the first logged loss."""
    seen: list[torch.Tensor] = []
    trainer.create_optimizer()
    step = trainer.optimizer.step

    def recording(*args: Any, **kwargs: Any) -> Any:
        if not seen:
            seen.extend(p.grad.clone() for p in trainer.model.parameters() if p.grad is not None)
        return step(*args, **kwargs)

    trainer.optimizer.step = recording
    trainer.train()
    return seen, [p.detach().clone() for p in trainer.model.parameters()], trainer.state.log_history[0]["loss"]


def test_zero_weights_are_plain_grpo_bit_for_bit(tmp_path: Path) -> None:
    ours, theirs = (gradients_of_first_step(make(tmp_path / make.__name__)) for make in (composed, plain))
    assert ours[2] == theirs[2]
    assert len(ours[0]) == len(theirs[0]) > 0
    assert any(g.abs().max() > 0 for g in ours[0])
    assert all(torch.equal(a, b) for a, b in zip(ours[0], theirs[0], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(ours[1], theirs[1], strict=True))


def test_a_process_that_sees_several_gpus_trains_on_one(tmp_path: Path) -> None:
    """What transformers finds on a machine with eight, where it would split each batch over all of them."""
    made = composed(tmp_path, num_gpus=8)
    assert made.args.n_gpu == 1 and composed(tmp_path).args.n_gpu == 0
    made.train()
    assert not isinstance(made.model_wrapped, torch.nn.DataParallel)


def test_grpo_counts_by_its_weight(tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"max_grad_norm": 1e9})  # clipping would undo the weight
    whole, half = (
        gradients_of_first_step(composed(tmp_path / name, Weights(grpo=weight), settings=settings))
        for name, weight in (("a", 1.0), ("b", 0.5))
    )
    assert half[2] == pytest.approx(0.5 * whole[2])
    assert all(torch.allclose(0.5 * a, b, rtol=1e-5, atol=1e-12) for a, b in zip(whole[0], half[0], strict=True))


def test_without_grpo_only_the_pairs_are_learnt_from(tmp_path: Path) -> None:
    """The gradients are those of the channel alone, rewards and rollouts do not enter, and rollouts are recorded."""
    pairs = [TokenPair("p", Tree([1, 2, 3], ([4, 5], [5, 4])))]
    imitating = composed(tmp_path / "a", Weights(grpo=0, sft=2.0), Batch({"pairs": pairs}))
    found, _, loss = gradients_of_first_step(imitating)
    assert imitating.state.log_history[0]["reward"] is not None

    model = policy().model
    logps = torch.log_softmax(model(torch.tensor([[1, 2, 3, 4, 5]])).logits, -1)
    wanted = -2.0 * (logps[0, 2, 4] + logps[0, 3, 5]) / 2
    wanted.backward()
    assert loss == pytest.approx(wanted.item(), rel=1e-5)
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    scale = min(1.0, SETTINGS.max_grad_norm / norm.item())
    of_model = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.allclose(a, scale * b, rtol=1e-4, atol=1e-7) for a, b in zip(found, of_model, strict=True))


def test_a_rollout_that_the_template_ends_is_not_cut_off(tmp_path: Path) -> None:
    held = policy()
    held.tokenizer.eos_token = "<|unk|>"  # as of base models, whose template ends an answer otherwise
    held = LocalPolicy(held.model, held.tokenizer, PolicyConfig(model="tiny", max_tokens=2))
    trainer = composed(tmp_path, held=held, settings=SETTINGS.model_copy(update={"steps": 1}))
    trainer.train()
    padding = held.tokenizer.pad_token_id  # which ends a row for TRL, too
    last = [rollout.steps[-1].sample for rollout in trainer._played]
    cut = [each.finish_reason == "length" and (each.completion_ids or [])[-1] != padding for each in last]
    assert 0 < sum(cut) < len(cut)
    assert trainer.state.log_history[0]["completions/clipped_ratio"] == pytest.approx(sum(cut) / len(cut))


def test_dropout_is_off_as_in_dpo_trainer(tmp_path: Path) -> None:
    """GPT-2 has dropout by default: before the first update DPO's margin is 0 and its loss ln 2."""
    like = policy()
    sizes = {"vocab_size": 260, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
    held = LocalPolicy(GPT2LMHeadModel(GPT2Config(**sizes)).eval(), like.tokenizer, like.config)
    pairs = [TokenPair("p", Tree([1, 2, 3], ([4, 5], [5, 4])))]
    source = PairSource(pairs, per_step=1, seed=0)
    source.cache_reference(held.model)
    trainer = composed(tmp_path, Weights(grpo=0, dpo=1.0), Batch({"pairs": pairs}), held=held, source=source)
    _, _, loss = gradients_of_first_step(trainer)
    assert trainer.state.log_history[0]["dpo/margin"] == pytest.approx(0, abs=1e-6)
    assert loss == pytest.approx(math.log(2), abs=1e-6)


def test_training_on_nothing_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"weights\.grpo is 0 and no channel has a weight"):
        Config(env={"name": "support.environments:GuessEnv"}, weights={"grpo": 0})


def test_scored_together_is_scored_as_trl_does(tmp_path: Path) -> None:
    """The pass that channels share with GRPO's groups gives TRL's log-probs and entropies, gradients included.

    A row of the rollouts is masked whole, as `mask_truncated_completions` does with those that were cut off.
    """
    trainer = composed(tmp_path)
    model = trainer.model.double()
    torch.manual_seed(0)
    inputs = {
        "prompt_ids": torch.tensor([[0, 1, 2], [3, 1, 2], [0, 1, 2], [0, 1, 2]]),
        "prompt_mask": torch.tensor([[0, 1, 1], [1, 1, 1], [0, 1, 1], [0, 1, 1]]),
        "completion_ids": torch.tensor([[1, 2, 3, 0], [2, 2, 0, 0], [2, 3, 2, 3], [3, 3, 3, 3]]),
        "completion_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]),
    }
    ids, mask = (torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], 1) for x in ("ids", "mask"))
    theirs, their_entropy, _ = trainer._get_per_token_logps_and_entropies(model, ids, mask, 4, compute_entropy=True)
    groups = group(inputs)
    assert len(groups.trees) == 2
    ours, entropy = (x.float() for x in statistics(model, groups, score(model, groups.trees), trainer.temperature))
    kept = inputs["completion_mask"].bool()
    torch.testing.assert_close(ours[kept], theirs[kept], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy[kept], their_entropy[kept], rtol=1e-5, atol=1e-5)
    weights = torch.randn(ours.shape) * kept
    mine, other = (
        torch.autograd.grad((weights * (x + 2 * y)).sum(), list(model.parameters()), allow_unused=True)
        for x, y in ((ours, entropy), (theirs, their_entropy))
    )
    torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    groups = group(inputs | {"completion_mask": torch.zeros(4, 4, dtype=torch.long)})
    assert not any(x.any() for x in statistics(model, groups, score(model, groups.trees), trainer.temperature))


def test_a_bonus_on_entropy_is_learnt_where_prompts_are_shared(tmp_path: Path) -> None:
    gradients = []
    for shared, bonus in ((False, 0.5), (True, 0.5), (True, 0.0)):
        settings = SETTINGS.model_copy(update={"steps": 1})
        trainer = composed(tmp_path, settings=settings, more={"entropy_coef": bonus}, shared_prompts=shared)
        gradients.append(torch.cat([g.flatten() for g in gradients_of_first_step(trainer)[0]]))
    of_trl, of_trees, without = gradients
    torch.testing.assert_close(of_trees, of_trl, rtol=1e-3, atol=1e-5)
    assert (of_trees - without).norm() > 0.1 * without.norm()


def test_losses_are_weighted_and_nothing_is_added_without_weight_or_rows() -> None:
    base, empty = torch.tensor(1.0), {"dpo": ChannelLoss(torch.tensor(math.nan), 0, {})}
    channels = {"dpo": ChannelLoss(torch.tensor(2.0), 1, {}), "sft": ChannelLoss(torch.tensor(3.0), 1, {})}
    assert float(compose_loss(base, channels, {"dpo": 0.5, "sft": 2.0})) == 1.0 + 0.5 * 2.0 + 2.0 * 3.0
    for losses, weights in ((channels, {}), (channels, {"dpo": 0.0}), (empty, {"dpo": 1.0})):
        assert compose_loss(base, losses, weights) is base


def test_cosines_of_parallel_opposite_and_orthogonal_gradients() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    report = StepReport(["a", "b", "c", "none"])
    report.add_gradients({"a": x[0] * 3, "b": -x[0], "c": x[1], "none": (x * 0).sum()}, [x])
    found = report.metrics()
    assert [found[f"gradient/norm/{name}"] for name in ("a", "b", "c", "none")] == [3.0, 1.0, 1.0, 0.0]
    assert found["gradient/cosine/a~b"] == pytest.approx(-1.0)
    assert found["gradient/cosine/a~c"] == 0.0
    assert math.isnan(found["gradient/cosine/a~none"])
    (x.sum()).backward()
    assert x.grad is not None


GROUPS = {
    name: torch.zeros(2, 3) for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
} | {"num_items_in_batch": torch.tensor(1)}


def test_collate_names_missing_and_uneven_columns() -> None:
    assert collate(GROUPS, Batch(), [])["channels"] == Batch()
    with pytest.raises(BadInput, match="lacks the column 'advantages'"):
        collate({k: v for k, v in GROUPS.items() if k != "advantages"}, Batch(), [])
    with pytest.raises(BadInput, match="column 'completion_ids' has 3 rows, but prompt_ids has 2"):
        collate({**GROUPS, "completion_ids": torch.zeros(3, 3)}, Batch(), [])
    with pytest.raises(BadInput, match=r"learns from pairs, .* no such rows"):
        collate(GROUPS, Batch(), ["pairs"])
