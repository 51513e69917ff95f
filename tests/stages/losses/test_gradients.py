"""Every differentiable kernel against finite differences in float64; detached factors are held fixed."""

from functools import partial

import pytest
import torch
from parity.kernels import distillation_baselines as baselines
from parity.kernels import iw_opd, jsd, opd, preference
from parity.kernels import prime_rl as prime_rl_components
from parity.kernels.hidden_divergence import hidden_divergence
from parity.kernels.preference import BatchOptions, DpoBatch, cpo_loss, dpo_batch_loss, label_log_probs
from torch import Tensor
from torch.autograd import gradcheck

from stages.losses import dpo, prime_rl, sdpo
from stages.losses.dpo import simpo_loss
from stages.losses.eopd import SoftTargets, eopd_loss, soft_targets
from stages.losses.hidden import Head
from tests.stages.losses.samples import log_probs, logits

LABELS = torch.tensor([[1, -100, 2], [0, 3, -100]])
TEACHER = logits(1, 2, 3, 6)
IDS = torch.tensor([[1, 0, 2], [0, 3, 5]])


def student() -> Tensor:
    return logits(0, 2, 3, 6, wants_gradient=True)


@pytest.mark.parametrize("chunk_tokens", [None, 2])
@pytest.mark.parametrize("beta", [0, 0.3, 1])
@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"token_clip": 0.05}, {"temperature": 1.7, "reduction": "sum"}])
def test_generalized_jsd(beta: float, options: dict, chunk_tokens: int | None) -> None:
    loss = partial(jsd.generalized_jsd, beta=beta, chunk_tokens=chunk_tokens, **options)
    assert gradcheck(lambda s: loss(s, TEACHER, LABELS), student())


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_generalized_jsd_held_in_full(reduction: str) -> None:
    assert gradcheck(lambda s: jsd.generalized_jsd(s, TEACHER, LABELS, reduction=reduction), student())


@pytest.mark.parametrize("chunk_tokens", [None, 2])
@pytest.mark.parametrize("beta", [0, 0.3, 1])
@pytest.mark.parametrize("add_tail", [True, False])
def test_top_k_jsd(beta: float, add_tail: bool, chunk_tokens: int | None) -> None:
    loss = partial(iw_opd.top_k_jsd, beta=beta, top_k=2, add_tail=add_tail, chunk_tokens=chunk_tokens)
    assert gradcheck(lambda s: loss(s, TEACHER, LABELS), student())


@pytest.mark.parametrize("beta", [0.3, 1])
@pytest.mark.parametrize("mode", ["sampled", "argmax"])
def test_sparse_top_1_jsd(beta: float, mode: str) -> None:
    assert gradcheck(lambda s: iw_opd.sparse_top_1_jsd(s, TEACHER, IDS, LABELS, beta=beta, mode=mode), student())


def test_iw_opd_with_recorded_rollouts() -> None:
    teacher, rollout = log_probs(2, 2, 3), log_probs(3, 2, 3)
    assert gradcheck(lambda s: iw_opd.iw_opd(s, IDS, LABELS, teacher, rollout).loss, student())


@pytest.mark.parametrize("chunk_tokens", [None, 2])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("support", [{}, {"top_k": 2}, {"top_k": 2, "add_tail": False}])
def test_self_distillation(alpha: float, support: dict, chunk_tokens: int | None) -> None:
    weights = (LABELS >= 0).double() * 0.7
    loss = partial(sdpo.self_distillation_loss, alpha=alpha, chunk_tokens=chunk_tokens, **support)
    assert gradcheck(lambda s: loss(s, TEACHER, weights)[0], student())


@pytest.mark.parametrize("chunk_tokens", [None, 2])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_hidden_divergence(beta: float, chunk_tokens: int | None) -> None:
    mask, teacher = torch.tensor([[1, 1, 0], [0, 1, 1]]), Head(logits(4, 6, 5))

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        head = Head(weight, bias, scale=0.5, softcap=3.0)
        return hidden_divergence(
            hidden, logits(3, 2, 3, 5), head, teacher, mask, beta=beta, chunk_tokens=chunk_tokens
        ).loss

    inputs = (logits(0, 2, 3, 4), logits(1, 6, 4), logits(2, 6))
    assert gradcheck(loss, tuple(x.requires_grad_() for x in inputs))


def test_eopd_reaches_both_its_inputs() -> None:
    old, teacher = log_probs(1, 2, 3), log_probs(2, 2, 3)
    soft = soft_targets(logits(3, 2, 3, 6), TEACHER, top_k=3)

    def loss(own: Tensor, support: Tensor) -> Tensor:
        return eopd_loss(
            own, old, teacher, (LABELS >= 0).double(), SoftTargets(soft.teacher_entropy, soft.teacher, support)
        )[0]

    assert gradcheck(loss, (log_probs(0, 2, 3, wants_gradient=True), soft.student.requires_grad_()))


@pytest.mark.parametrize("full", [True, False])
def test_soft_targets(full: bool) -> None:
    assert gradcheck(lambda s: soft_targets(s, TEACHER, top_k=3, student_full_vocabulary=full).student, student())


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3"])
def test_kl_estimates(kind: str) -> None:
    assert gradcheck(lambda x: opd.kl_estimate(x, log_probs(1, 2, 3), kind), log_probs(0, 2, 3, wants_gradient=True))


@pytest.mark.parametrize("kind", ["k1+", "k3+"])
def test_a_plus_takes_the_gradient_of_k2(kind: str) -> None:
    own, reference = log_probs(0, 2, 3, wants_gradient=True), log_probs(1, 2, 3)
    grads = [torch.autograd.grad(opd.kl_estimate(own, reference, k).sum(), own)[0] for k in (kind, "k2")]
    assert torch.equal(*grads)


def test_ppo() -> None:
    old, advantages, mask = log_probs(1, 3, 5), logits(2, 3, 5), torch.ones(3, 5)
    assert gradcheck(lambda x: opd.ppo_loss(x, old, advantages, mask)[0], log_probs(0, 3, 5, wants_gradient=True))


def packed(trainer: Tensor) -> prime_rl.PackedTokens:
    reference, weights = log_probs(2, 9), logits(4, 9)
    return prime_rl.PackedTokens(trainer, log_probs(1, 9), logits(3, 9), torch.arange(9) != 4, reference, weights)


@pytest.mark.parametrize("loss", [prime_rl.default_loss, prime_rl_components.nll_loss, prime_rl_components.ipo_loss])
def test_packed_losses(loss: object) -> None:
    assert gradcheck(lambda x: loss(packed(x)).loss, log_probs(0, 9, wants_gradient=True))


@pytest.mark.parametrize("loss", [prime_rl_components.opd_loss, prime_rl_components.ref_kl_loss])
def test_packed_distillation_holds_its_signal_fixed(loss: object) -> None:
    """d/dt of -keep sg[ref - t] r + tau (t - q)^2, with the signal as a constant."""
    trainer = log_probs(0, 9, wants_gradient=True)
    tokens = packed(trainer)
    got = torch.autograd.grad(loss(tokens).loss, trainer)[0]
    ratio, signal = (trainer - tokens.inference).exp(), tokens.reference - trainer
    pull = 2 * prime_rl_components.OPD_KL_TAU * tokens.mask * (trainer - tokens.inference)
    kept = tokens.weights * (pull - signal * ratio)
    dropped = tokens.weights * pull
    assert (got.isclose(kept) | got.isclose(dropped)).all() and got.isclose(kept).any()


def pairs(chosen: Tensor, rejected: Tensor) -> dpo.PairLogProbs:
    tokens = torch.tensor([3, 1, 0, 5]), torch.tensor([2, 2, 4, 1])
    return dpo.PairLogProbs(chosen, rejected, log_probs(2, 4), log_probs(3, 4), *tokens)


@pytest.mark.parametrize("loss_type", preference.LOSS_TYPES)
def test_dpo_types(loss_type: str) -> None:
    options = preference.DpoOptions(beta=0.5, label_smoothing=0.1)
    inputs = log_probs(0, 4, wants_gradient=True), log_probs(1, 4, wants_gradient=True)
    tolerance = {"atol": 1e-4} if loss_type == "exo_pair" else {}  # its smoothing is float32
    assert gradcheck(lambda c, r: preference.dpo_losses(pairs(c, r), loss_type, options), inputs, **tolerance)


@pytest.mark.parametrize("loss_type", dpo.FORMS)
def test_the_trainers_dpo_is_the_checked_one(loss_type: str) -> None:
    chosen, rejected = log_probs(0, 4), log_probs(1, 4)
    expected = preference.dpo_losses(pairs(chosen, rejected), loss_type, preference.DpoOptions(beta=0.3))
    assert torch.equal(dpo.dpo_losses(pairs(chosen, rejected), loss_type, 0.3), expected)


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"])
def test_dpo_f_divergences_also_alpha_in_float64(divergence: str) -> None:
    options = preference.DpoOptions(f_divergence=divergence)
    inputs = log_probs(0, 4, wants_gradient=True), log_probs(1, 4, wants_gradient=True)
    assert gradcheck(lambda c, r: preference.dpo_losses(pairs(c, r), "sigmoid", options), inputs)


def test_dpo_batches() -> None:
    mask = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0], [0, 0, 1, 1], [1, 1, 1, 1]])
    options = BatchOptions(("sigmoid", "sft", "ipo"), (0.8, 1.0, 0.2), ld_alpha=0.5)
    inputs = log_probs(0, 4, 3, wants_gradient=True)
    assert gradcheck(lambda x: dpo_batch_loss(DpoBatch(x * mask[:, 1:], log_probs(1, 4, 3), mask), options)[0], inputs)


@pytest.mark.parametrize("options", [{}, {"loss_type": "hinge"}, {"label_smoothing": 0.2}])
def test_simpo(options: dict) -> None:
    inputs = log_probs(0, 4, wants_gradient=True), log_probs(1, 4, wants_gradient=True)
    assert gradcheck(lambda c, r: simpo_loss(c, r, **options).losses, inputs)


@pytest.mark.parametrize("loss_type", ["simpo", "sigmoid", "hinge", "ipo"])
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_cpo(loss_type: str, alpha: float) -> None:
    inputs = log_probs(0, 4, wants_gradient=True), log_probs(1, 4, wants_gradient=True)
    assert gradcheck(lambda c, r: cpo_loss(c, r, loss_type=loss_type, alpha=alpha).losses, inputs)


@pytest.mark.parametrize("average", [True, False])
def test_label_log_probs(average: bool) -> None:
    assert gradcheck(lambda s: label_log_probs(s, torch.tensor([[0, 1, 2], [0, 3, -100]]), average=average), student())


BASELINES = ("forward_kl", "reverse_kl", "jensen_shannon", "skew_forward_kl", "skew_reverse_kl", "total_variation")


@pytest.mark.parametrize("name", [*BASELINES, "adaptive_kl"])
def test_taid_baselines_in_float32(name: str) -> None:
    """Their softmaxes are float32, so the step is coarse."""
    mask = torch.ones(2, 3)
    loss = getattr(baselines, name)
    assert gradcheck(lambda s: loss(s, TEACHER, mask).double(), student(), eps=1e-2, atol=1e-3, rtol=1e-2)
