"""Decide whether one arm of an experiment beats another: evaluation items in, a verdict with its reasons out.

VALIDATED: a gain is shown, over tasks and training seeds; the claim is whether it reaches 2 points. PARTIAL: a gain
is shown of less than 2 points, of these checkpoints alone (fewer than three training seeds), or for a family or another
arm after Holm's correction. INVALIDATED: over three or more training seeds no gain of 2 points, which would have been
detected, or worse. UNDERPOWERED: neither is shown. INVALID-RUN: the arms cannot be compared.

The order is fixed: treatment against baseline, then against the control that only imitates the chosen actions, and the
second is a test only where the first found a gain. All other questions share one level by Holm's correction.

What differs between the arms besides their channels, how many collections of pairs the trainings learnt from, and
trainings that collapsed are part of the reasons: each limits what a difference in pass rate can be credited to. A
decision is about treatment and baseline alone, and readers conclude from it that the preference helped, also where
imitation scored higher: words.py says what follows and what does not.
"""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import pyarrow as pa
import pyarrow.compute as pc

from composer_stages.evaluation import outcomes
from composer_stages.evaluation.arm_comparison import (
    EvalQuestion,
    Subset,
    compare,
    compare_other_rates,
    compare_secondary,
    compare_with,
    next_to,
)
from composer_stages.evaluation.arm_settings import ArmDifference
from composer_stages.evaluation.difference import GAINS, Decision, Difference, Reason, ReasonKind, Verdict
from composer_stages.evaluation.inference import ALPHA, MIN_GAIN, MIN_SEEDS, decide_difference, verdict_of
from composer_stages.evaluation.measurement import Comparison
from composer_stages.evaluation.outcomes import AT_ZERO, PASSED, PRIMARY, START, ArmSummary, Collapse, Missing, Outcome

EXIT_CODES = {
    Verdict.VALIDATED: 0,
    Verdict.INVALIDATED: 1,
    Verdict.PARTIAL: 3,
    Verdict.UNDERPOWERED: 3,
    Verdict.INVALID_RUN: 4,
}
LARGE_CUT = 1 / 3
"""The share of rollouts cut by a limit from which on a verdict names it."""
LIMITS = {
    "max_tokens": "policy.max_tokens of the trainings (or of policies.NAME)",
    "max_steps": "max_steps",
    "context": "limits.context_tokens",
    "wall_time": "limits.wall_s",
    "cost": "limits.cost_usd",
}
"""The limits that end a rollout (`terminated_by`), and the setting of each."""
AT_ZERO_RATE = " at temperature 0"


class Claim(StrEnum):
    """What is shown of a gain."""

    GAIN = "a gain"
    REACHES_BAR = "reaches the bar"


@dataclass(frozen=True)
class CutRollouts:
    """Rollouts that limits ended before they passed, by limit where they are many; whether no arm passed any task."""

    limits: Mapping[str, int]
    num_rollouts: int
    none_passed: bool


@dataclass(frozen=True)
class Look:
    """The result of one planned look: the tasks played by then, its two-sided level, the gain and the decision."""

    tasks: int
    level: float
    decision: str
    gain: Difference | None


@dataclass(frozen=True)
class EvalVerdict:
    """The verdict, its reasons, and every number behind them; rates and differences are fractions of one.

    claim: what is shown of the gain, None where nothing is. reasons: of the decision. problems, control_problems: why
    treatment and baseline, and treatment and control, cannot be compared. `worst` and `best` are the gain under the
    worst and the best that `num_lost` lost outcomes could have been, None where none was lost. `outcome` names what
    `gain` and `over_control` are about (`outcomes.PRIMARY`). `comparisons` are all differences that were found: these
    two, then those in the other of the two outcomes, then every comparison in what else was recorded; but for the first
    two, arms that agree in all tasks are left out.
    `looks` are those that were taken of `planned_looks`; all differences are then at the level of the last one.
    `differences` are all settings in which arms differ, `collapsed` the trainings that left their course, or are
    far from the others of their arm or below the start. `at_zero` is the gain at temperature 0, None where the arms
    were not played so. `cut`: limits that ended many rollouts before they passed, None where few were. one_model:
    treatment and baseline are one model with equal settings. fixed_units: sampling units are fixed.
    """

    decision: Verdict
    baseline: str
    treatment: str
    control: str | None
    arms: tuple[ArmSummary, ...]
    claim: Claim | None = None
    reasons: tuple[Reason, ...] = ()
    problems: tuple[Reason, ...] = ()
    control_problems: tuple[Reason, ...] = ()
    gain: Difference | None = None  # treatment - baseline
    worst: Difference | None = None
    best: Difference | None = None
    num_lost: int = 0
    over_control: Difference | None = None  # treatment - control
    outcome: str = PASSED.name
    at_zero: Difference | None = None  # treatment - baseline, both at temperature 0
    comparisons: tuple[Difference, ...] = ()
    gain_by_seed: Mapping[str, float] = field(default_factory=dict)
    subsets: tuple[Subset, ...] = ()
    looks: tuple[Look, ...] = ()
    planned_looks: int = 1
    planned_tasks: int = 0
    differences: tuple[ArmDifference, ...] = ()
    collapsed: tuple[Collapse, ...] = ()
    cut: CutRollouts | None = None
    min_gain: float = MIN_GAIN
    alpha: float = ALPHA
    control_trained: bool = True
    baseline_trained: bool = True
    one_model: bool = False
    fixed_units: bool = False

    def compared(self, outcome: Outcome, baseline: str | None) -> Difference | None:
        """Return the treatment's difference from another arm in an outcome; None where they agree in all tasks."""
        key = (outcome.rate, self.treatment, baseline)
        return next((row for row in self.comparisons if (row.rate, row.treatment, row.baseline) == key), None)

    def next_to(self, baseline: str | None) -> list[tuple[Outcome, Difference]]:
        """Return the differences from an arm in the outcomes that stand next to the one that decides."""
        compared = ((outcome, self.compared(outcome, baseline)) for outcome in next_to(self.outcome))
        return [(outcome, row) for outcome, row in compared if row]

    def confounds(self, baseline: str | None) -> list[ArmDifference]:
        """Return the settings besides the channels in which the treatment differs from another arm."""
        return [row for row in self.differences if not row.channel and row.between((self.treatment, str(baseline)))]

    def is_main(self, row: Difference) -> bool:
        """Return whether a difference is one of treatment and baseline."""
        return (row.treatment, row.baseline) == (self.treatment, self.baseline)

    def rate_of(self, arm: str | None) -> float | None:
        """Return the rate of an arm that the decision is about."""
        return next((row.rate(self.outcome) for row in self.arms if row.arm == arm), None)

    @property
    def changed_conduct(self) -> list[Difference]:
        """Return the changes for the worse in conduct that are significant after Holm's correction."""
        worse = (
            (outcomes.HACKED.rate, True),
            (outcomes.SUSPECT.rate, True),
            (outcomes.PROTOCOL.rate, False),
            (outcomes.SEARCHED.rate, True),
        )
        return [
            row
            for row in self.comparisons
            if row.p_holm is not None and row.p_holm < self.alpha and (row.rate, row.estimate > 0) in worse
        ]

    @property
    def gaining(self) -> list[Subset]:
        """Return the parts that show a gain, the clearest first."""
        return sorted((subset for subset in self.subsets if subset.gains), key=lambda subset: subset.p_holm)

    @property
    def by_report(self) -> Difference | None:
        """Return the difference of treatment and baseline in passes by report."""
        return self.compared(outcomes.BY_REPORT, self.baseline)

    @property
    def report_may_explain(self) -> bool:
        """Return whether passes by report differ by more than the gain is shown to be."""
        return bool(self.gain and self.by_report and self.by_report.estimate > max(0.0, self.gain.low))

    @property
    def reaches_bar(self) -> bool:
        """Return whether the interval of the gain lies above the smallest gain of interest."""
        return self.gain is not None and self.gain.low >= self.min_gain

    @property
    def primary(self) -> Outcome:
        """Return the outcome that the decision is about."""
        return PRIMARY[self.outcome]

    @property
    def tasks(self) -> str:
        """Return what the decision counts: "tasks", or "tasks within the protocol"."""
        return "tasks" if self.primary is PASSED else f"tasks{self.primary.within}"

    @property
    def settled(self) -> bool:
        """Return whether no more tasks are needed: a gain is shown, or that there is none."""
        return bool(self.claim) or self.decision is Verdict.INVALIDATED

    @property
    def exit_code(self) -> int:
        """Return the exit code of the program."""
        return EXIT_CODES[self.decision]


def decide(
    items: pa.Table,
    question: EvalQuestion = EvalQuestion(),  # noqa: B008 (frozen)
    differences: tuple[ArmDifference, ...] = (),
) -> EvalVerdict:
    """Compare the treatment with the baseline, and with the control where it was run.

    items: as `items_table` makes them. differences: all settings in which arms differ.
    """
    baseline, treatment, control = question.baseline, question.treatment, question.control
    names = sorted(pc.unique(items["arm"]).to_pylist())
    possible = outcomes.without_twins(items)
    if len(possible) and not outcomes.num_apart(possible, question.outcome):
        question = replace(question, outcome=PASSED)
    verdict = EvalVerdict(
        Verdict.INVALID_RUN,
        baseline=baseline,
        treatment=treatment,
        control=control,
        arms=tuple(outcomes.summarize(items, arm, question.sampling.fixed, question.outcome) for arm in names),
        differences=differences,
        cut=cut_rollouts(possible, question.collapsed),
        min_gain=question.min_gain,
        alpha=question.alpha,
        control_trained=control not in question.untrained,
        baseline_trained=baseline not in question.untrained,
        fixed_units=question.sampling.fixed,
    )
    gain, problems = compare_with(possible, baseline, question)
    if gain is None:
        if len(items) and not len(possible) and not question.damage(baseline, treatment):
            problems = [Reason.of(ReasonKind.ONLY_TWINS)]
        return replace(verdict, problems=tuple(problems))
    bounds: list[Comparison] = []
    if num_lost := gain.outcomes.num_lost:
        sides: tuple[Missing, Missing] = ("against", "for")
        compared = (compare(possible, treatment, baseline, question, missing=side) for side in sides)
        bounds = [comparison for comparison in compared if comparison]
    decision, claim, reasons = judge_gain(gain, bounds, num_lost, question)
    over, control_problems = compare_with(possible, control, question)
    conduct, subsets = compare_secondary(items, possible, question, control=over is not None)
    if decision is Verdict.UNDERPOWERED and any(subset.gains for subset in subsets):
        decision = Verdict.PARTIAL
    other_rates = compare_other_rates(possible, (baseline, str(control)) if over else (baseline,), question)
    at_zero = None
    if {treatment + AT_ZERO, baseline + AT_ZERO} <= {*names}:
        at_zero = compare(possible, treatment + AT_ZERO, baseline + AT_ZERO, question, question.outcome)
    cold = None
    if at_zero:
        rate = f"{question.outcome.rate}{AT_ZERO_RATE}"
        cold = replace(at_zero.difference, rate=rate, treatment=treatment, baseline=baseline)
    planned = (gain.difference, cold, over.difference if over else None)
    return replace(
        verdict,
        decision=decision,
        claim=claim,
        reasons=reasons,
        control_problems=tuple(control_problems),
        gain=gain.difference,
        worst=bounds[0].difference if bounds else None,
        best=bounds[1].difference if bounds else None,
        num_lost=num_lost,
        over_control=over.difference if over else None,
        outcome=question.outcome.name,
        at_zero=cold,
        comparisons=(*(row for row in planned if row), *other_rates, *conduct),
        gain_by_seed=gain.outcomes.gain_by_seed,
        subsets=tuple(subsets),
        collapsed=collapsed_trainings(possible, question),
    )


def judge_gain(
    gain: Comparison, bounds: Sequence[Comparison], num_lost: int, question: EvalQuestion
) -> tuple[Verdict, Claim | None, tuple[Reason, ...]]:
    """Return the verdict, the claim and the reasons; all must hold with lost outcomes imputed at their worst.

    bounds: the comparison with lost outcomes against the treatment, and for it; none where none was lost.
    """
    difference, tests = gain.difference, [comparison.test for comparison in (gain, *bounds)]
    decision = decide_difference(tests, question.min_gain, question.alpha)
    worst_low = min((comparison.difference.low for comparison in bounds), default=difference.low)
    reasons = [size_reason(decision, min(difference.low, worst_low), question)]
    if decision is Decision.UNDECIDED and difference.decision is not Decision.UNDECIDED:
        reasons = [size_reason(difference.decision, difference.low, question)]
        reasons.append(Reason.of(ReasonKind.RESTS_ON_LOST, num_lost=num_lost))
    elif decision is not Decision.UNDECIDED and difference.num_seeds < MIN_SEEDS:
        reasons.append(Reason.of(ReasonKind.FEW_SEEDS))
    claim = None
    if decision in GAINS:
        claim = Claim.REACHES_BAR if reasons[0].kind is ReasonKind.REACHES_BAR else Claim.GAIN
    return verdict_of(decision, difference.num_seeds), claim, tuple(reasons)


def size_reason(decision: Decision, low: float, question: EvalQuestion) -> Reason:
    """Return what is shown, by the lower limit of the interval, beside the smallest gain of interest."""
    if decision is Decision.BETTER:
        return Reason.of(ReasonKind.REACHES_BAR if low >= question.min_gain else ReasonKind.MAY_REACH_BAR)
    kinds = {
        Decision.BETTER_BY_LESS: ReasonKind.BELOW_BAR,
        Decision.WORSE: ReasonKind.SIGNIFICANTLY_WORSE,
        Decision.NO_GAIN: ReasonKind.GAIN_EXCLUDED,
    }
    return Reason.of(kinds.get(decision, ReasonKind.LOW_POWER))


def cut_rollouts(possible: pa.Table, collapsed: Container[tuple[str, int]] = ()) -> CutRollouts | None:
    """Return the limits that ended many rollouts before they passed; None where few were, and some arm passed.

    Few are fewer than `LARGE_CUT` of them. Rollouts of trainings that collapsed do not count: higher limits would only
    make them longer.
    """
    trainings = zip(possible["arm"].to_pylist(), possible["train_seed"].to_pylist(), strict=True)
    sound = pa.array([(arm.removesuffix(AT_ZERO), seed) not in collapsed for arm, seed in trainings], pa.bool_())
    rollouts = possible.filter(pc.and_(sound, pc.invert(outcomes.failed(possible))))
    none_passed = bool(len(rollouts)) and not pc.any(rollouts["passed"]).as_py()
    ends = Counter(rollouts["terminated_by"].filter(pc.invert(rollouts["passed"])).to_pylist())
    limits = {limit: ends[limit] for limit in LIMITS if ends[limit]}
    if sum(limits.values()) < LARGE_CUT * max(len(rollouts), 1):
        limits = {}
    return CutRollouts(limits, len(rollouts), none_passed) if limits or none_passed else None


def collapsed_trainings(possible: pa.Table, question: EvalQuestion) -> tuple[Collapse, ...]:
    """Return the trainings of all arms that collapsed, as they recorded it or by their outcomes as they were trained.

    Arms that are not compared with each other count too: each is with the baseline.
    """
    other_arms = set(pc.unique(possible["arm"]).to_pylist()) - {START, *question.arms}
    arms = (*question.arms, *sorted(arm for arm in other_arms if not arm.endswith(AT_ZERO)))
    recorded = [
        Collapse(arm, seed, recorded=text.removesuffix("."))
        for (arm, seed), text in sorted(question.collapsed.items())
        if arm in arms
    ]
    return (*recorded, *(row for arm in arms for row in outcomes.find_collapsed(possible, arm)))
