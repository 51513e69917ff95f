"""Golden cases of TAID: the loss, the scheduler, the wrapper with the language-model loss, and the baselines."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from parity.case import Case, Outcome, Runner
from parity.kernels import distillation_baselines as baselines
from stages.losses.reduction import Scalar
from stages.losses.taid import TaidSchedule, advance, taid_loss


def with_language_loss(distillation_loss: Scalar, language_loss: Scalar, distil_ratio: float = 1.0) -> Scalar:
    """(1 - distil_ratio) * language-model cross-entropy + distil_ratio * distillation.

    Serves the parity check only. Source: SakanaAI/TAID a062892 KDLoss.
    """
    return (1.0 - distil_ratio) * language_loss + distil_ratio * distillation_loss


SCHEDULE = ("t_start", "t_end", "alpha", "beta", "disable_adaptive")
IGNORED = -100


def _schedule(case: Case) -> TaidSchedule:
    return TaidSchedule(**{name: case.args[name] for name in SCHEDULE})


def _loss(case: Case) -> Outcome:
    student, teacher, mask = (case.inputs[name] for name in ("logits", "teacher_logits", "mask"))
    return Outcome(taid_loss(student, teacher, mask, torch.tensor(case.args["t"]), chunk_tokens=case.chunk_tokens))


def _update_t(case: Case) -> Outcome:
    schedule = _schedule(case)
    state, states, deltas = schedule.start(), [], []
    for loss, step in zip(case.inputs["losses"], case.inputs["global_steps"], strict=True):
        state, delta = advance(schedule, state, loss, step, case.args["num_train_steps"])
        states.append(state)
        deltas.append(delta)
    after = {"t_after": "t", "momentum_after": "momentum", "prev_loss_after": "prev_loss"}
    return Outcome(
        state={name: [getattr(s, key) for s in states] for name, key in after.items()} | {"delta_t_returned": deltas}
    )


def _sequence(case: Case) -> Outcome:
    """Each step's loss uses t from before that step's update."""
    schedule = _schedule(case)
    state, losses, ts, deltas = schedule.start(), [], [], []
    steps = zip(*(case.inputs[name] for name in ("logits", "teacher_logits", "mask", "global_steps")), strict=True)
    for logits, teacher_logits, mask, step in steps:
        loss = taid_loss(logits, teacher_logits, mask, state.t, chunk_tokens=case.chunk_tokens)
        state, delta = advance(schedule, state, loss, step, case.args["num_train_steps"])
        losses.append(loss)
        ts.append(state.t)
        deltas.append(delta)
    return Outcome(torch.stack(losses), state={"tiki_t": ts, "delta_t": deltas})


def _with_language_loss(case: Case) -> Outcome:
    student, teacher, labels = (case.inputs[name] for name in ("student_logits", "teacher_logits", "labels"))
    student, teacher, targets = student[:, :-1], teacher[:, :-1], labels[:, 1:]
    language = F.cross_entropy(student.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    mask = (targets != IGNORED).int()
    distillation = taid_loss(student, teacher, mask, torch.tensor(0.4), chunk_tokens=case.chunk_tokens)
    loss = with_language_loss(distillation, language, case.args["distil_ratio"])
    return Outcome(loss, {"lm_loss": language, "distil_loss": distillation})


def _baseline(loss: Callable[..., Tensor]) -> Runner:
    def run(case: Case) -> Outcome:
        return Outcome(loss(*(case.inputs[name] for name in ("logits", "teacher_logits", "mask")), **case.args))

    return run


RUNNERS: dict[str, Runner] = {
    "TAID.compute_loss": _loss,
    "TAID.update_t": _update_t,
    "TAID.forward[sequence]": _sequence,
    "KDLoss.forward[TAID, t=0.4]": _with_language_loss,
    "ForwardKL": _baseline(baselines.forward_kl),
    "ReverseKL": _baseline(baselines.reverse_kl),
    "JS": _baseline(baselines.jensen_shannon),
    "SkewForwardKL": _baseline(baselines.skew_forward_kl),
    "SkewReverseKL": _baseline(baselines.skew_reverse_kl),
    "TVD": _baseline(baselines.total_variation),
    "AdaptiveKL": _baseline(baselines.adaptive_kl),
}
