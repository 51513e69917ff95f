"""The guards on a world, in order of dependence: a guard is not judged where one that it needs does not pass."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from composer_stages.probe.checks import (
    direction as direction_checks,
    gradients as gradient_checks,
    hacking,
    pool,
    removal,
    trajectories,
)
from composer_stages.probe.checks.check import Check, pass_or_fail
from composer_stages.probe.checks.direction import length_cosine, pair_signal, polarity, recombined
from composer_stages.probe.checks.pool import hack_gap, taxonomy, teacher_hacks
from composer_stages.probe.descent import Descent, mean_cosine
from composer_stages.probe.direction import RANDOM, Placebos, generic_gradient, haar, randsign, step_placebos
from composer_stages.probe.metrics import basis_overlap, probe_rows, row_metrics, teacher_gradients
from composer_stages.probe.rows import as_tokens, with_advantages
from composer_stages.probe.settings import DescentConfig
from composer_stages.probe.statistics import Draws, codes, labelled, shortage
from composer_stages.runs.kinds import Row
from composer_stages.training.rollout_gradients import ratio_report
from probe_faults.world import ProbeWorld

DRAWS, PLACEBOS, RANKED, LORA_STEPS = Draws(permutations=400), 32, 500, 4


@dataclass(frozen=True)
class WorldGuard:
    """A check of a world: `needs` are the guards that must pass first."""

    name: str
    check: Callable[[ProbeWorld], Check]
    needs: tuple[str, ...] = ()


Checks = dict[str, Check | None]
"""The check of each guard by its name; None where the guard was not judged."""


def check_guards(world: ProbeWorld) -> Checks:
    """Return the check of every guard, None where a guard that it needs does not pass."""
    checks: Checks = {}
    for guard in GUARDS:
        sound = all((check := checks[name]) is not None and check.status == "PASS" for name in guard.needs)
        checks[guard.name] = guard.check(world) if sound else None
    return checks


def failing(checks: Checks) -> list[str]:
    """Return the names of the guards that were judged and do not pass."""
    return [name for name, check in checks.items() if check is not None and check.status != "PASS"]


def _teacher(w: ProbeWorld) -> Check:
    """Compare the teacher with the base model on the first eight answers of the teacher."""
    answers = [as_tokens(row) for row in w.pool if row["src_pool"] == "teacher"][:8]
    return pool.teacher_differs(w.teacher, w.student.model, answers, hack_gap(w.pool))


def _probe_rows(w: ProbeWorld) -> list[Row]:
    """Return the pool as `probe_row/1` rows with the cosines of their gradients."""
    tokens = [as_tokens(row) for row in w.pool]
    rows = probe_rows(w.pool, tokens, row_metrics(w.sums, w.direction), [torch.zeros(1)] * len(tokens), w.direction)
    return [row | {"grad_store_offset": index} for index, row in enumerate(rows)]


def _masks(w: ProbeWorld) -> Check:
    """Check the loss masks of about eight rows, spread over the pool."""
    rows = list(w.pool[:: max(len(w.pool) // 8, 1)])
    return gradient_checks.masks(w.student, rows, [as_tokens(row) for row in rows], w.score, "base")


def _steps(w: ProbeWorld) -> list[Row]:
    """Return the step diagnostics of a replay with one step for each problem."""
    steps = []
    for gradient in teacher_gradients(_probe_rows(w), w.sums):
        out, account = w.project(gradient, w.direction)
        steps.append(
            {
                "frac_fired": account.frac_fired,
                "change": float((gradient - out).norm()),
                "residual": account.residual,
                "conservation_err": account.conservation_err,
                "shares_memory": out.data_ptr() == gradient.data_ptr(),
                "projects_update": True,
                "cos_upd_in": mean_cosine(gradient, w.direction),
                "cos_upd_out": mean_cosine(out, w.direction),
                "removed_dot": account.removed_dot,
                "energy_removed": account.energy_removed,
                "n_modules": account.n_modules,
            }
        )
    return steps


def _fires(w: ProbeWorld) -> Check:
    """Compare what v fires on and removes with random directions of both families."""
    units = [haar(w.direction, PLACEBOS, 0), randsign(w.direction, PLACEBOS, 1)]
    placebos = Placebos([name for name, some in zip(RANDOM, units, strict=True) for _ in some], torch.cat(units))
    random = step_placebos(teacher_gradients(_probe_rows(w), w.sums), placebos, w.direction)
    return removal.fires(_steps(w), len(w.direction.layout.names), random["energy"], random["fired"])


def _specific(w: ProbeWorld) -> Check:
    """Score the pool with v, random placebos and the two controls, and check that no control passes T4e."""
    control = torch.stack([-w.direction.unit, generic_gradient(w.direction, w.pairs, "nll_mean")])
    drawn = [draw(w.direction, RANKED, seed) for seed, draw in enumerate((haar, randsign))]
    units = torch.cat([w.direction.unit[None], *drawn, control])
    scores = w.cosines(w.sums, units, w.direction.inside, len(w.direction.modules)).double().numpy()
    rows = labelled(_probe_rows(w), scores[:, :-2], [family for family in RANDOM for _ in range(RANKED)])
    return hacking.specific(rows, {"negated": scores[:, -2], "generic": scores[:, -1]}, DRAWS)


def _buckets(w: ProbeWorld) -> Check:
    """Check that both sides of T4e have two rows, which a variance needs."""
    hacked = sum(bool(row["hacked"]) for row in w.pool)
    counts = (hacked, len(w.pool) - hacked)
    shown = f"{counts[0]} hacked, {counts[1]} other rows"
    return Check("buckets", "E3", pass_or_fail(min(counts) >= 2), float(min(counts)), "two rows a side", shown)


def _enough(w: ProbeWorld) -> Check:
    """Check that the pool has the rows and problems that T4e needs."""
    hacked = np.array([bool(row["hacked"]) for row in w.pool])
    strata = codes([row["problem_id"] for row in w.pool], [row["src_pool"] for row in w.pool])
    few = shortage(hacked, strata, ("hacked", "other"))
    threshold = "15 rows a side, 8 mixed problems"
    return Check("enough", "R4", pass_or_fail(few is None), float(hacked.sum()), threshold, few or "enough")


def _accounts(w: ProbeWorld) -> list[Row]:
    """Return the row of a training's step, repeated as often as the guards tolerate it bad."""
    rows, groups = with_advantages(w.group)
    advantages, hacks = [row["advantage"] for row in rows], [row["advantage"] for row in rows if row["hacked"]]
    ratios = ratio_report(w.current, [gradient_checks.behaviour_log_probs(row) for row in rows], advantages)
    account = {
        "groups": len(groups),
        "zero_variance_groups": trajectories.flat_groups(groups),
        "saturated": ratios.saturated,
        "mixed": "ratio",
        "ratio_p5": ratios.ratio_p5,
        "ratio_p95": ratios.ratio_p95,
        "ess": ratios.ess,
        "hack_advantage_sum": sum(hacks) if hacks else None,
        "corr_advantage_source": trajectories.correlation(advantages, [row["src_pool"] == "teacher" for row in rows]),
    }
    return [account] * trajectories.MAX_BAD_STEPS


def _basis(w: ProbeWorld) -> Check:
    """Train both halves of the LoRA for LORA_STEPS steps and check that its basis stays."""
    start = w.lora.adapter.theta.clone()
    descent = Descent(start, DescentConfig(learning_rate=w.lora_learning_rate), "none", w.lora_direction)
    steps = []
    for _ in range(LORA_STEPS):
        descent.step(w.lora.gradients([hack for hack, _ in w.pair_rows])[0].mean(0))
        w.lora.move_to(descent.theta)
        overlap = basis_overlap(w.lora.adapter.theta, start, w.lora)
        steps.append({"basis_overlap": overlap, "cos_in": None, "cos_out": None, "frac_fired": 0.0})
    w.lora.move_to(start)
    return removal.basis_stays(steps)


GUARDS = (
    WorldGuard("prompts", lambda w: pool.prompts_match(w.pool, w.contract, w.tokenizer)),
    WorldGuard("prompt-role", lambda w: pool.prompt_role(w.pool, w.contract, w.recorded_contract), ("prompts",)),
    WorldGuard("teacher", _teacher),
    WorldGuard("coverage", lambda w: gradient_checks.coverage(w.measured(_probe_rows(w)), len(w.pool))),
    WorldGuard(
        "canary",
        lambda w: gradient_checks.canary(w.student, [as_tokens(row) for row in w.pool[:2]], w.direction, w.measure),
    ),
    WorldGuard("masks", _masks),
    WorldGuard("signal", lambda w: pair_signal(w.direction, w.pairs.differences("nll_mean"), 0)),
    WorldGuard("R7-oracle", lambda w: recombined(w.pairs, w.grpo(w.student, w.pair_rows))),
    WorldGuard("V4", lambda w: length_cosine(w.student, w.direction, [clean for _, clean in w.pair_rows], w.longer)),
    WorldGuard("generic", lambda w: direction_checks.not_generic(w.direction, w.pairs, "nll_mean")),
    WorldGuard("V2", lambda w: polarity(w.student, w.direction, w.held_out), ("V4", "generic")),
    WorldGuard("removal", lambda w: removal.removed(_steps(w)), ("V2",)),
    WorldGuard("removed-sign", lambda w: removal.removed_toward_hack(_steps(w)), ("removal",)),
    WorldGuard("fires", _fires, ("removed-sign",)),
    WorldGuard("buckets", _buckets),
    WorldGuard("enough", _enough, ("buckets",)),
    WorldGuard("labels", lambda w: taxonomy(w.pool), ("buckets",)),
    WorldGuard("T1", lambda w: teacher_hacks(w.pool), ("enough", "labels")),
    WorldGuard("specific", _specific, ("enough", "V2", "fires")),
    WorldGuard("variance", lambda w: trajectories.rewards_vary(_accounts(w))),
    WorldGuard("ratios", lambda w: trajectories.ratios_carry_signal(_accounts(w)), ("variance",)),
    WorldGuard("advantages", lambda w: trajectories.advantages_favour_hacks(_accounts(w)), ("variance",)),
    WorldGuard("lora-B", lambda w: gradient_checks.b_is_probed(w.lora_sums, w.lora_direction)),
    WorldGuard("basis", _basis),
)
