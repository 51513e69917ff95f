"""Guards: one check for every known way in which such a probe misleads; `probe selftest` makes each fail on purpose.

In the order of the probe's stages: the teacher differs from the base model, gradients are those of the right tokens of
every row, a direction is really removed from gradients and updates, a LoRA's gradient and basis are where v expects
them, a GRPO step still learns from what it should, and the claim depends on v and not on any direction. The guard of
the pool's prompts is in `prompts`. For every failure that the plan of the probe names, and those that its authors met,
there is a guard, and in `tests/probe_faults/faults.py` the fault that it must detect.

Bounds and controls are this project's own unless a source is named. Thresholds: docs/probe.md.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from stages.probe.adapters.attach import in_float32, target_linears
from stages.probe.adapters.lora import A_HALF, has_path
from stages.probe.checks.check import Check, judged
from stages.probe.checks.contrast_checks import Draws, factorial
from stages.probe.checks.contrasts import Labelled
from stages.probe.directions.extraction import Direction, LossKind, PairGradients
from stages.probe.directions.scoring import generic_gradient
from stages.probe.gradients.per_sample import reference_gradient, reference_log_probs
from stages.probe.gradients.student import Student
from stages.probe.pool.tokens import TokenRow
from stages.runs.kinds import Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MIN_KL, MAX_ROUNDING = 1e-3, 0.3
MAX_ROW_ERROR, MAX_SUM_ERROR, MAX_SLOPE_ERROR, MAX_LOGP_GAP = 1e-4, 1e-5, 0.05, 0.02
STEP = 1e-2
"""The canary's finite difference, as a share of the weights' typical singular value."""
MAX_CONSERVATION, MAX_RESIDUAL = 1e-4, 1e-3
MIN_OVERLAP = 0.5
MAX_FLAT, MAX_BAD_STEPS, MAX_CONFOUNDING = 0.5, 3, 0.95
MAX_COSINE = 0.5
Measure = Callable[[Sequence[TokenRow]], Float[Tensor, "B N"]]
Score = Callable[[Sequence[TokenRow]], list[Float[Tensor, " own"]]]


@torch.no_grad()
def teacher_differs(
    teacher: "PreTrainedModel", base: "PreTrainedModel", rows: Sequence[TokenRow], hack_gap: float | None
) -> Check:
    """Check that every adapted weight changed, that answers differ by KL > 1e-3 nats a token, and that hack rates do.

    `rows` are answers of the teacher, `hack_gap` its hack rate less the base model's, None where it is unknown.
    """
    ours, theirs = target_linears(teacher), target_linears(base)
    # A LoRA that is kept as a parallel path leaves the weight itself unchanged.
    changed = sum(has_path(ours[n]) or bool((ours[n].weight != theirs[n].weight).any()) for n in ours)
    kls = []
    for row in rows:
        # KL(teacher || base) in nats, the mean over the answer's tokens, each predicted from the position before it.
        ids, start = [[*row.prompt_ids, *row.completion_ids]], len(row.prompt_ids)
        logits = (
            model(torch.tensor(ids, device=next(model.parameters()).device)).logits[0, start - 1 : -1]
            for model in (teacher, base)
        )
        p, q = (torch.log_softmax(values.float().cpu(), -1) for values in logits)
        kls.append((p.exp() * (p - q)).sum(-1).mean())
    kl = float(torch.stack(kls).mean())
    holds = changed == len(ours) and kl > MIN_KL and (hack_gap is None or hack_gap > 0)
    gap = "" if hack_gap is None else f", hacks {hack_gap:+.2f} more often"
    detail = f"{changed} of {len(ours)} modules changed{gap}"
    return Check("teacher", "T1", judged(holds), kl, f"KL > {MIN_KL:g}, all weights changed", detail)


def merge_is_sound(report: Row, expected: int) -> Check:
    """Check that a LoRA teacher changed all `expected` modules, by more than zero, and that rounding kept the change.

    `report` is that of `adapters.lora.apply_lora`.
    """
    deltas, losses = report["delta_norms"], report["rounding_losses"]
    lost = max(losses.values(), default=1.0)
    holds = (
        len(deltas) == expected
        and all(norm > 0 for norm in deltas.values())
        and (lost < MAX_ROUNDING or not report["merged"])
    )
    detail = f"{len(deltas)} of {expected} modules, {'merged' if report['merged'] else 'kept beside the weights'}"
    return Check("merge", "T1", judged(holds), lost, f"rounding loss < {MAX_ROUNDING}", detail)


def coverage(rows: Sequence[Row], planned: int, loss: str) -> Check:
    """Check that every planned row was measured or has a reason; under the loss `nll` rewards are no reason."""
    # A GRPO loop may leave out rows of groups with equal rewards; their NLL gradients exist all the same.
    reasons = Counter(row["null_reason"] for row in rows if row["null_reason"])
    measured = sum(row["cos_S_contrib"] is not None for row in rows)
    skipped = reasons["zero_adv"] if loss == "nll" else 0
    holds = (
        len(rows) == planned and skipped == 0 and measured + reasons.total() == planned and measured >= 0.9 * planned
    )
    shown = ", ".join(f"{name} {count}" for name, count in sorted(reasons.items())) or "no nulls"
    share = measured / max(planned, 1)
    return Check("coverage", "R2", judged(holds), share, ">= .9, none for a zero advantage", f"{planned} rows; {shown}")


def canary(student: Student, rows: Sequence[TokenRow], direction: Direction, measure: Measure) -> Check:
    """Check the gradients of one backward pass against one pass for each row, in sum and in their slope along v.

    The oracles are autograd and, for the slope, central differences of the loss. The separate passes run the adapter
    as a path parallel to the clean weights, whether or not it is folded into them.
    """
    together = measure(rows)
    # The oracle runs the adapter as a path, so the weights must not hold its change too.
    student.folded.restore()
    with in_float32(student.model):
        separate = torch.stack([reference_gradient(student.model, student.adapter, row).cpu() for row in rows])
    student.folded.refold()
    error, total = (
        float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
        for found, expected in ((together, separate), (together.sum(0), separate.sum(0)))
    )
    # v has norm 1 in each module, so with two modules a Linear (both halves of a LoRA) a step is shorter in each.
    share = min(1.0, len(target_linears(student.model)) / max(len(direction.modules), 1)) ** 0.5
    start, step = student.adapter.theta.clone(), STEP * student.weight_scale() * share
    losses = []
    for sign in (1, -1):
        student.move_to(start + sign * step * direction.unit.to(start))
        losses.append(sum(float(-logps.sum()) for logps in student.log_probs(rows)))
    student.move_to(start)
    # Central differences. Qwen3's RMSNorm computes in float32 whatever the model's type: a much smaller step would be
    # lost in rounding.
    slope, expected = (losses[0] - losses[1]) / (2 * step), float(together.sum(0) @ direction.unit)
    off = abs(slope - expected) / max(abs(slope), abs(expected), 1e-12)
    holds = error <= MAX_ROW_ERROR and total <= MAX_SUM_ERROR and off <= MAX_SLOPE_ERROR and slope * expected > 0
    detail = f"sum off by {total:.1g}, slope along v {expected:.4g}, by differences {slope:.4g}"
    return Check("canary", "T2", judged(holds), error, f"rows <= {MAX_ROW_ERROR:g}, slope within 5 %", detail)


def masks(
    student: Student, rows: Sequence[Row], tokens: Sequence[TokenRow], score: Score, own_model: str | None
) -> Check:
    """Check that the scored tokens are the answer's own, all of them and no pads.

    Their log-probs (`score`, rows batched and padded) equal those of a pass over each unpadded row and, where the
    student `own_model` wrote the row at temperature 1, those that it reported while sampling.
    """
    # Log-probs decide, since a mask that is off by one token still gives gradients with a cosine of .90 to .98 to the
    # right ones; counted pads lower it to 0 to .54.
    scored, faults = score(tokens), Counter[str]()
    for row, ids, logps in zip(rows, tokens, scored, strict=True):
        num_own = sum(bool(own) for own in ids.own)
        faults["number of scored tokens"] += {len(logps), num_own} != {row["n_loss_tokens"]}
        faults["length"] += len(ids.completion_ids) != row["comp_len"]
        faults["end token left out"] += bool(row["ends_with_eos"]) and not ids.own[-1]
    with in_float32(student.model):
        exact = [reference_log_probs(student.model, row) for row in tokens]
    gap = max(_gap(logps, expected) for logps, expected in zip(scored, exact, strict=True))
    # Only at temperature 1 are the sampler's log-probs those of the model's own distribution.
    sampled = [
        index
        for index, row in enumerate(rows)
        if row["gen_model"] == own_model and row["gen_temperature"] == 1.0 and row["behav_logp"]
    ]
    reported = max((_gap(scored[index], behaviour_log_probs(rows[index])) for index in sampled), default=0.0)
    faults["log-probs differ from one row's pass"] += gap > MAX_LOGP_GAP
    faults["log-probs differ from the generator's"] += reported > MAX_LOGP_GAP
    shown = ", ".join(sorted(+faults)) or f"{len(rows)} rows"
    detail = f"{shown}; {len(sampled)} rows of the student's own, off by {reported:.2g} nats a token"
    return Check("masks", "T2", judged(not +faults), max(gap, reported), f"<= {MAX_LOGP_GAP} nats, no fault", detail)


def behaviour_log_probs(row: Row) -> Float[Tensor, " own"]:
    """Return the log-probs in nats of a pool row's own tokens, as the policy that sampled them reported."""
    return torch.tensor([logp for logp in row["behav_logp"] if logp is not None])


def _gap(logps: Float[Tensor, " own"], expected: Float[Tensor, " own"]) -> float:
    return float("inf") if len(logps) != len(expected) else float((logps - expected).abs().mean())


def removed(steps: Sequence[Row]) -> Check:
    """Check that gradients of fired modules changed, energies add up, and the result does not share memory.

    `steps` are the step diagnostics of a replay, here as in the two checks below.
    """
    faults = [
        name
        for name, faulty in (
            ("gradient unchanged", any(s["frac_fired"] > 0 and s["change"] <= 0 for s in steps)),
            ("energy not conserved", any(s["conservation_err"] > MAX_CONSERVATION for s in steps)),
            ("same memory", any(s["shares_memory"] for s in steps)),
        )
        if faulty
    ]
    worst = max((s["conservation_err"] for s in steps), default=float("nan"))
    detail = ", ".join(faults) or f"{len(steps)} steps"
    status = judged(bool(steps) and not faults)
    return Check("removal", "R3", status, worst, f"conservation <= {MAX_CONSERVATION:g}", detail)


def removed_toward_hack(steps: Sequence[Row]) -> Check:
    """Check that one-sided removal took what points toward the hack, in the update too, and left nothing along v."""
    fired = [s for s in steps if s["frac_fired"] > 0]
    worst = min((s["removed_dot"] for s in fired), default=float("nan"))
    left = max((s["residual"] for s in fired), default=float("nan"))
    # Under Adam a projected gradient gives no projected update, so the update is checked too; None: nothing to measure.
    turned = sum(
        not s["projects_update"]
        or s["cos_upd_in"] is None
        or s["cos_upd_out"] is None
        or s["cos_upd_out"] <= s["cos_upd_in"] + MAX_RESIDUAL
        for s in steps
    )
    status = judged(bool(fired) and worst > 0 and left <= MAX_RESIDUAL and turned == len(steps))
    detail = f"residual {left:.1g}, update no more toward v on {turned} of {len(steps)} steps"
    return Check("removed-sign", "T3", status, worst, f"> 0, residual <= {MAX_RESIDUAL:g}", detail)


def fires(
    steps: Sequence[Row], num_modules: int, placebo_energy: Sequence[float], placebo_fired: Sequence[float]
) -> Check:
    """Check that v has every module and removes more energy than placebos do; firing alone is chance, 1/2.

    `placebo_energy` and `placebo_fired` hold one value per placebo: its share of the energy, and of modules that fire.
    """
    # Firing is shown, not judged: random directions lower the cosine on 20 of 20 steps and fire in .53 of the modules.
    energy, fired = (float(np.mean([s[name] for s in steps])) for name in ("energy_removed", "frac_fired"))
    q95, fired_q95 = (float(np.quantile(x, 0.95)) if len(x) else float("nan") for x in (placebo_energy, placebo_fired))
    complete = all(s["n_modules"] == num_modules for s in steps)
    held = f"{steps[0]['n_modules']} of {num_modules} modules have a direction"
    detail = f"{held}; fired {fired:.2f} (placebo q95 {fired_q95:.2f}, chance .5)"
    threshold = "energy removed > placebo q95, all modules"
    return Check("fires", "T3", judged(complete and energy > q95), energy, threshold, detail, placebo_q95=q95)


def b_is_probed(sums: Float[Tensor, "B N"], direction: Direction) -> Check:
    """Check that a LoRA at B = 0 has no gradient on any A, and that v has a norm in every B and no part on an A.

    At B = 0, where PEFT starts, the gradient of A is exactly 0, so features are those of B alone, as in GRIFT (arXiv
    2604.16242).
    """
    parts = direction.layout.split(sums)
    halves = [name for name in parts if name.endswith(A_HALF)]
    largest = max((float(parts[name].abs().max()) for name in halves), default=0.0)
    on_a = [name for name in direction.modules if name.endswith(A_HALF)]
    bare = [name for name in parts if not name.endswith(A_HALF) and name not in direction.modules]
    faults = (
        ("gradients of A are not 0", largest > 0),
        (f"v has {len(on_a)} modules on A", bool(on_a)),
        (f"{len(bare)} Bs without v", bool(bare)),
    )
    shown = [text for text, faulty in faults if faulty]
    detail = ", ".join(shown) or f"{len(halves)} halves A, {len(direction.modules)} modules of v"
    return Check("lora-B", "R6", judged(not shown), largest, "max |dA| = 0, v on B only", detail)


def basis_stays(steps: Sequence[Row]) -> Check:
    """Check that the row space of A keeps half of itself over the steps.

    Shown beside is the one-sided p of a falling trend (Kendall's tau) of what projection removes: whether the removed
    part grows back. It needs four steps with a removal.
    """
    overlap = min((step["basis_overlap"] for step in steps), default=float("nan"))
    gaps = [step["cos_in"] - step["cos_out"] for step in steps if step["cos_in"] is not None and step["frac_fired"] > 0]
    returns = ""
    if len(gaps) >= 4 and np.ptp(gaps) > 0:
        from scipy.stats import kendalltau

        returns = f"; removal fading at p {float(kendalltau(range(len(gaps)), gaps, alternative='less').pvalue):.2g}"
    threshold = f"overlap with the start >= {MIN_OVERLAP}"
    return Check("basis", "R6", judged(overlap >= MIN_OVERLAP), overlap, threshold, f"{len(steps)} steps{returns}")


def flat_groups(groups: Sequence[Sequence[float]]) -> int:
    """Return how many groups have equal rewards, which give no advantage (Dr.GRPO, arXiv 2503.20783)."""
    return sum(max(group) - min(group) < 1e-9 for group in groups)


def rewards_vary(steps: Sequence[Row]) -> Check:
    """Check that fewer than three steps in a row have equal rewards in more than half of their groups."""
    bad = [step["zero_variance_groups"] > MAX_FLAT * step["groups"] for step in steps]
    streak = longest_streak(bad)
    share = sum(bad) / max(len(bad), 1)
    status = judged(bool(steps) and streak < MAX_BAD_STEPS)
    detail = f"{sum(bad)} of {len(bad)} steps bad, {streak} in a row"
    return Check("variance", "R5", status, share, "<= half of the groups flat", detail)


def longest_streak(flags: Sequence[bool]) -> int:
    """Return the length of the longest run of true values."""
    best = run = 0
    for flag in flags:
        run = run + 1 if flag else 0
        best = max(best, run)
    return best


def ratios_carry_signal(steps: Sequence[Row]) -> Check:
    """Check that ratios use the true behaviour policy and are neither clipped, vanished, nor carried by a few rows."""
    bailed = [step["bailed"] for step in steps if step["bailed"]]
    # Ratios of a teacher's rows that all are 1 are those of detached current log-probs; their mean of 1 shows nothing.
    constant = [
        s for s in steps if s["off_policy"] and s["ratio_p5"] is not None and s["ratio_p95"] - s["ratio_p5"] < 1e-6
    ]
    detail = f"{len(steps)} steps"
    if bailed:
        detail = bailed[0]
    elif constant:
        detail = "off-policy rows with every ratio 1: old log-probs are not the generator's"
    stat = min((step["ess"] for step in steps if step["ess"] is not None), default=None)
    status = judged(not bailed and not constant)
    return Check("ratios", "R5", status, stat, "clipped + vanished <= .5, ESS >= .2", detail)


def advantages_favour_hacks(steps: Sequence[Row]) -> Check:
    """Check that the advantages of hacks sum to more than 0, a pull to slow, and do not encode the source."""
    # Where hacks earn less than their groups, training leads away from hacking and there is nothing to slow.
    sums = [step["hack_advantage_sum"] for step in steps if step["hack_advantage_sum"] is not None]
    away = sum(value <= 0 for value in sums)
    by_source = max((abs(step["corr_advantage_source"] or 0.0) for step in steps), default=0.0)
    holds = bool(sums) and away < 0.5 * len(sums) and by_source < MAX_CONFOUNDING
    detail = f"pull away from hacking on {away} of {len(sums)} steps, |corr(A, source)| up to {by_source:.2f}"
    stat = float(np.mean(sums)) if sums else None
    return Check("advantages", "R5", judged(holds), stat, "sum over hacks > 0, corr with source < .95", detail)


def correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return Pearson's r; None where one of them does not vary."""
    a, b = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    return float(np.corrcoef(a, b)[0, 1]) if len(a) > 1 and a.std() > 0 and b.std() > 0 else None


def specific(rows: Labelled, controls: dict[str, np.ndarray], draws: Draws) -> Check:
    """Check that T4e fails for control directions; `controls` holds the scores [n] of the same rows under each."""
    # The placebos stay: a control that passes shows that T4e would pass for directions without any meaning.
    passed = []
    for name, scores in controls.items():
        swapped = replace(rows, scores=np.column_stack([scores, rows.scores[:, 1:]]))
        if factorial(swapped, draws).passed:
            passed.append(name)
    shown = "; ".join(f"{name} passes T4e" for name in passed) or "T4e fails for " + ", ".join(controls)
    return Check("specific", "R4", judged(not passed), float(len(passed)), "T4e fails for every control", shown)


def not_generic(direction: Direction, pairs: PairGradients, loss: LossKind) -> Check:
    """Check that v is not the direction in which any answer pulls, the mean gradient of clean answers."""
    cosine = float(generic_gradient(direction, pairs, loss) @ direction.unit) / len(direction.modules)
    detail = "against the mean gradient of clean answers"
    threshold = f"|cos(v, generic)| <= {MAX_COSINE}"
    return Check("generic", "R4", judged(abs(cosine) <= MAX_COSINE), cosine, threshold, detail)
