"""One step of a GRPO trajectory: sample groups, measure every row, move the student, account for it.

The loss is Dr.GRPO's (arXiv 2503.20783): token sums over a constant length, advantages not divided by their spread. At
ratio 1 without clipping a row's GRPO gradient is A_i times its token-sum NLL gradient over N Lmax, so one backward
pass gives both the cosines, of rows with advantage 0 too, and the step. With true ratios (`mixed_is`) the surrogate has
a backward pass of its own.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from stages.envs.base import Environment, Task
from stages.policy.local import LocalPolicy
from stages.probe.checks.guards.measurement import behaviour_log_probs
from stages.probe.checks.guards.trajectory import correlation, flat_groups
from stages.probe.checks.pool_checks import rate
from stages.probe.directions.drift import change_norm
from stages.probe.directions.extraction import Direction
from stages.probe.directions.measure import rows_of_metrics
from stages.probe.directions.streamed import stream
from stages.probe.gradients.per_sample import TotalSink
from stages.probe.gradients.student import Student
from stages.probe.gradients.surrogate import RatioReport, dr_grpo, ratio_report
from stages.probe.loops.config import GrpoConfig
from stages.probe.loops.descent import Descent, diagnostics
from stages.probe.loops.rollouts import answers, with_advantages
from stages.probe.pool.tokens import TokenRow, as_tokens
from stages.runs.records import Row
from stages.runs.store import digest


class Trajectory:
    """One arm and seed: a student, the optimiser of its adapter, and the policies that answer, by source."""

    def __init__(
        self,
        student: Student,
        direction: Direction,
        descent: Descent,
        policies: Mapping[str, LocalPolicy],
        config: GrpoConfig,
    ) -> None:
        self.student, self.direction, self.descent = student, direction, descent
        self.policies, self.config = policies, config

    def step(
        self, make: Callable[[], Environment], tasks: Sequence[Task], seed: int, number: int
    ) -> tuple[Row, list[Row]]:
        """Sample answers to the tasks, measure them, move; returns the step's account and its `probe_row/1` rows."""
        rows, groups = with_advantages(self._sample(make, tasks, int(digest([seed, number])[:12], 16)))
        tokens = [as_tokens(row) for row in rows]
        l_max = max(row.num_own for row in tokens)
        found = stream(self.student, tokens, self.direction, [row["advantage"] / (len(rows) * l_max) for row in rows])
        modules = len(self.direction.modules)
        measured = rows_of_metrics(rows, tokens, found.metrics, found.logps, modules)
        ratios = self._ratios(rows, found.logps)
        gradient = self._true_gradient(rows, tokens, l_max) if self.config.generator == "mixed_is" else found.total
        account = diagnostics(self.descent.step(gradient), self.config.descent)
        self.student.move_to(self.descent.theta)
        facts = self._facts(measured, groups, ratios)
        repeated = {
            "step": number,
            "arm": self.config.arm,
            "delta_S_norm": facts["delta_norm"],
            "mean_cos_pre": account["cos_in"],
            "mean_cos_post": account["cos_out"],
            "frac_fired": account["frac_fired"],
        }
        return account | facts, [row | repeated | _ratio_columns(ratios) for row in measured]

    def _sample(self, make: Callable[[], Environment], tasks: Sequence[Task], seed: int) -> list[Row]:
        """Whole groups of the student's, or halves of the teacher's and the student's."""
        sources = {"student": self.config.samples}
        if self.config.mixed:
            sources = {"teacher": self.config.samples // 2, "student": self.config.samples - self.config.samples // 2}
        rows = [
            row
            for source, samples in sources.items()
            for row in answers(make, self.policies[source], tasks, samples, seed, source, self.config.max_steps)
        ]
        order = [task.task_id for task in tasks]
        return sorted(rows, key=lambda row: order.index(row["problem_id"]))

    def _ratios(self, rows: Sequence[Row], logps: Sequence[Tensor]) -> RatioReport:
        """Always against the policy that wrote the row, whatever the loss makes of it."""
        return ratio_report(logps, [behaviour_log_probs(row) for row in rows], [row["advantage"] for row in rows])

    def _true_gradient(self, rows: Sequence[Row], tokens: Sequence[TokenRow], l_max: int) -> Float[Tensor, " N"]:
        """Of the Dr.GRPO loss with true ratios: `mixed_is`. Elsewhere they are 1: weighted imitation of a teacher."""
        loss = dr_grpo([row["advantage"] for row in rows], [behaviour_log_probs(row) for row in rows], l_max, len(rows))
        total = TotalSink(self.student.adapter.layout, torch.ones(len(rows)), self.student.device)
        self.student.stream(tokens, total.of, loss)
        return total.total.cpu()

    def _facts(self, rows: Sequence[Row], groups: list[list[float]], ratios: RatioReport) -> Row:
        student = [row for row in rows if row["src_pool"] == "student"]
        advantages = [row["advantage"] for row in rows]
        hacks = [row["advantage"] for row in rows if row["hacked"]]
        own: dict[str, list[float]] = {}
        for row in student:
            own.setdefault(row["problem_id"], []).append(row["reward"])
        saturated = ratios.saturated if self.config.generator == "mixed_is" else None
        return {
            "rows": len(rows),
            "groups": len(groups),
            "zero_variance_groups": flat_groups(groups),
            "zero_variance_student": flat_groups(list(own.values())),
            "hack_rate_student": rate(student, "hacked"),
            "hack_rate_all": rate(rows, "hacked"),
            "gt_rate_student": rate(student, "gt_pass"),
            "reward_mean": sum(row["reward"] for row in rows) / len(rows),
            "delta_norm": change_norm(self.student, self.descent.start),
            "hack_advantage_sum": sum(hacks) if hacks else None,
            "corr_advantage_hacked": correlation(advantages, [bool(row["hacked"]) for row in rows]),
            "corr_advantage_source": correlation(advantages, [row["src_pool"] == "teacher" for row in rows]),
            "off_policy": self.config.mixed,
            "clip_low": ratios.clip_low,
            "clip_high": ratios.clip_high,
            "vanish": ratios.vanish,
            "ess": ratios.ess,
            "ratio_p5": ratios.p5,
            "ratio_p50": ratios.p50,
            "ratio_p95": ratios.p95,
            "cos_by_source": {source: _mean(rows, source) for source in sorted({row["src_pool"] for row in rows})},
            "bailed": saturated,
        }


def _ratio_columns(ratios: RatioReport) -> Row:
    return {
        "ratio_mean": ratios.mean,
        "ratio_p5": ratios.p5,
        "ratio_p50": ratios.p50,
        "ratio_p95": ratios.p95,
        "ess": ratios.ess,
        "frac_clip_low": ratios.clip_low,
        "frac_clip_high": ratios.clip_high,
        "frac_vanish": ratios.vanish,
    }


def _mean(rows: Sequence[Row], source: str) -> float | None:
    known = [row["cos_stack"] for row in rows if row["src_pool"] == source and row["cos_stack"] is not None]
    return sum(known) / len(known) if known else None
