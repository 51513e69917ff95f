"""Golden cases of PRIME-RL, May 2026 and newest snapshot."""

from dataclasses import fields
from typing import Any

from parity.case import Case, Outcome, Runner, sequences
from parity.kernels import prime_rl as head
from stages.errors import UsageError
from stages.losses import prime_rl as may

REQUIRED = ("trainer_logprobs", "inference_logprobs", "advantages", "loss_mask")


def _options(kind: type, case: Case) -> Any:
    return kind(**{field.name: case.args[field.name] for field in fields(kind) if field.name in case.args})


def _tokens(case: Case) -> may.PackedTokens:
    reference = case.optional("ref_logprobs")
    reference = case.optional("teacher_logprobs") if reference is None else reference
    trainer, inference, advantages, mask = (case.inputs[name] for name in REQUIRED)
    return may.PackedTokens(trainer, inference, advantages, mask, reference, case.optional("loss_weights"))


def _outcome(output: may.LossOutputs) -> Outcome:
    return Outcome(output.loss, output.metrics)


def _default(case: Case) -> Outcome:
    return _outcome(may.default_loss(_tokens(case), _options(may.DefaultOptions, case)))


def _default_before_may19(case: Case) -> Outcome:
    options = _options(may.DefaultOptions, case)
    return _outcome(head.default_loss_before_may19(_tokens(case), options, teacher_tau=case.args["teacher_tau"]))


def _ipo(case: Case) -> Outcome:
    return _outcome(head.ipo_loss(_tokens(case), _options(head.IpoOptions, case)))


def _packed(case: Case) -> list[may.PackedTokens]:
    count = len(case.inputs["trainer_logprobs"])
    reference = "ref_logprobs" if "ref_logprobs" in case.inputs else "teacher_logprobs"
    columns = [sequences(case.optional(name), count) for name in (*REQUIRED, reference)]
    return [may.PackedTokens(*row) for row in zip(*columns, strict=True)]


def _compute_loss(case: Case) -> Outcome:
    packed, options = _packed(case), _options(may.DefaultOptions, case)
    if "rl_scale" in case.args:
        return _component_loss(case, packed, options)
    losses = {"rl": lambda tokens: may.default_loss(tokens, options), "opd": head.opd_loss, "sft": head.nll_loss}
    mode = case.args["training_mode"]
    if mode not in losses:
        raise UsageError(f"training_mode is {mode!r}; choose one of {', '.join(losses)}")
    return Outcome(*head.compute_loss(packed, losses[mode], case.args["loss_scale"]))


def _component_loss(case: Case, packed: list[may.PackedTokens], options: may.DefaultOptions) -> Outcome:
    names = ("rl", "ce", "ref_kl")
    columns = [sequences(case.optional(f"{name}_weights"), len(packed)) for name in names]
    streams = [head.Streams(*row) for row in zip(*columns, strict=True)]
    scales = head.Scales(*(case.args[f"{name}_scale"] for name in names))
    ipo = _options(head.IpoOptions, case)

    def rl_loss(tokens: may.PackedTokens) -> may.LossOutputs:
        return head.ipo_loss(tokens, ipo) if "ipo_threshold" in case.args else may.default_loss(tokens, options)

    return Outcome(*head.compute_component_loss(packed, streams, scales, rl_loss))


RUNNERS: dict[str, Runner] = {
    "default_loss_fn": _default,
    "default_loss_fn[before 2026-05-19]": _default_before_may19,
    "opd_loss_fn": lambda case: _outcome(head.opd_loss(_tokens(case))),
    "sft_loss_fn": lambda case: _outcome(head.nll_loss(_tokens(case))),
    "ce_loss_fn": lambda case: _outcome(head.nll_loss(_tokens(case))),
    "ipo_loss_fn": _ipo,
    "ref_kl_loss_fn": lambda case: _outcome(head.ref_kl_loss(_tokens(case))),
    "compute_loss": _compute_loss,
}
