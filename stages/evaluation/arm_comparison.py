"""Compare two arms of an experiment in an outcome, and everything that is asked besides the two planned comparisons."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from composer_stages.evaluation import outcomes, planner
from composer_stages.evaluation.difference import Decision, Difference, Reason, ReasonKind
from composer_stages.evaluation.inference import ALPHA, MIN_GAIN, PairedTest, holm
from composer_stages.evaluation.measurement import Comparison, measure_difference, paired_test
from composer_stages.evaluation.outcomes import AT_ZERO, PASSED, PRIMARY, START, Missing, Outcome, PairedOutcomes
from composer_stages.terms import SamplingUnit

MIN_TASKS = 6
"""Of a family: five tasks of one sign give 2 * 2**-5 = .0625 and cannot reach p < .05."""


@dataclass(frozen=True)
class EvalQuestion:
    """What is asked of the items: which arms, of what their tasks are a sample, at which level.

    outcome: what the decision is about: passes, but for experiments that registered another outcome. Passes that kept
    the protocol stand next to it where they differ. min_gain: the smallest gain of interest. alpha: the level of the
    differences, of one look where several are planned. untrained: arms without training seeds, which are compared with
    every training of another. collapsed: how trainings collapsed as they recorded it, by arm and seed. damaged: why
    arms could not be played, by arm and seed.
    """

    baseline: str = "A"
    treatment: str = "B"
    control: str | None = "C"
    sampling: SamplingUnit = SamplingUnit()  # noqa: RUF009 (frozen)
    outcome: Outcome = PASSED
    min_gain: float = MIN_GAIN
    alpha: float = ALPHA
    untrained: frozenset[str] = frozenset({START, START + AT_ZERO})
    collapsed: Mapping[tuple[str, int], str] = field(default_factory=dict)
    damaged: Mapping[tuple[str, int], str] = field(default_factory=dict)

    def damage(self, *arms: str | None) -> list[Reason]:
        """Return why these arms could not be played."""
        return [
            Reason.of(ReasonKind.DAMAGED, arm=arm, seed=seed, error=error.rstrip("."))
            for (arm, seed), error in sorted(self.damaged.items())
            if arm in arms
        ]

    @property
    def arms(self) -> tuple[str, ...]:
        """Return the compared arms, each once."""
        return tuple(dict.fromkeys(arm for arm in (self.baseline, self.treatment, self.control) if arm))


@dataclass(frozen=True)
class Subset:
    """A part of the experiment: its difference, and p after Holm's correction over all secondary questions."""

    kind: str
    name: str
    estimate: float
    num_tasks: int
    p_value: float
    p_holm: float = 1.0
    alpha: float = ALPHA

    @property
    def gains(self) -> bool:
        """Return whether the part shows a gain at its level `alpha`."""
        return self.estimate > 0 and self.p_holm < self.alpha


def compare(
    items: pa.Table,
    treatment: str,
    baseline: str,
    question: EvalQuestion,
    outcome: Outcome | None = None,
    missing: Missing = "excluded",
    *,
    equal: bool = True,
) -> Comparison | None:
    """Compare two arms, in the question's outcome where none is given; None when nothing is known in both.

    equal: whether to compare what does not differ in any task; None, too, where it is not.
    """
    compared_outcome = outcome or question.outcome
    paired = outcomes.paired(items, treatment, baseline, compared_outcome, missing)
    if paired is None or not (equal or paired.differ):
        return None
    sampling, alpha = question.sampling, question.alpha
    test = paired_test(paired, fixed=sampling.fixed)
    difference = measure_difference(
        paired,
        [test],
        min_gain=question.min_gain,
        alpha=alpha,
        fixed=sampling.fixed,
        rate=compared_outcome.rate,
        treatment=treatment,
        baseline=baseline,
        unit=sampling.noun,
    )
    if sampling.fixed:
        (low,), (high,) = paired_test(paired).interval(alpha)
        difference = replace(difference, elsewhere=(float(low), float(high)))
    undecided = difference.decision is Decision.UNDECIDED and not difference.too_few
    if outcome is None and missing == "excluded" and undecided:
        passes = outcomes.with_passes(items, question.outcome)
        mde = planner.detectable(passes, treatment, baseline, paired, fixed=sampling.fixed, alpha=alpha)
        difference = replace(difference, mde=mde)
    return Comparison(paired, test, difference)


def compare_with(
    possible: pa.Table, arm: str | None, question: EvalQuestion
) -> tuple[Comparison, list[Reason]] | tuple[None, list[Reason]]:
    """Compare the treatment with an arm; returns the reasons where they cannot be compared."""
    if not arm:
        return None, [Reason.of(ReasonKind.NOT_NAMED)]
    arms = arm, question.treatment
    if reasons := question.damage(*arms) or outcomes.find_problems(possible, *arms, question.untrained):
        return None, reasons
    if comparison := compare(possible, question.treatment, arm, question):
        return comparison, []
    return None, [Reason.of(ReasonKind.NO_OUTCOMES)]


def next_to(decided: str) -> list[Outcome]:
    """Return the outcomes that verdicts can be about besides the decided one. decided: its name."""
    return [outcome for name, outcome in PRIMARY.items() if name != decided]


def compare_other_rates(possible: pa.Table, baselines: Iterable[str], question: EvalQuestion) -> list[Difference]:
    """Compare the treatment with each baseline in the outcomes besides the decided one, and in passes by report.

    The first where a pass of the two arms broke the protocol, the second where they differ from the baseline in it.
    """
    differences = []
    for arm in baselines:
        arms = possible.filter(pc.is_in(possible["arm"], pa.array([question.treatment, arm])))
        compared = [
            (outcome, True)
            for outcome in next_to(question.outcome.name)
            if outcomes.num_apart(arms, outcome, question.outcome)
        ]
        compared += [(outcomes.BY_REPORT, False)] if arm == question.baseline else []
        for outcome, equal in compared:
            comparison = compare(possible, question.treatment, arm, question, outcome, equal=equal)
            differences += [comparison.difference] if comparison else []
    return differences


def compare_secondary(
    items: pa.Table, possible: pa.Table, question: EvalQuestion, *, control: bool
) -> tuple[list[Difference], list[Subset]]:
    """Test all questions but the two in fixed order (conduct, families, other arms) under one Holm correction.

    All of them share the level of this look. Conduct is tested in every comparison that is made: with the baseline,
    with the control where it can be, and of every other arm with the baseline.
    """
    baseline, treatment = question.baseline, question.treatment
    compared = [(treatment, baseline), *([(treatment, str(question.control))] if control else [])]
    subsets = compare_families(outcomes.paired(possible, treatment, baseline, question.outcome))
    for arm in sorted({*pc.unique(items["arm"]).to_pylist()} - {START, *question.arms}):
        # An arm at temperature 0 differs from the baseline by its temperature, too.
        if not arm.endswith(AT_ZERO) and not outcomes.find_problems(possible, arm, baseline, question.untrained):
            comparison = compare(possible, arm, baseline, question, question.outcome)
            if comparison:
                gain = comparison.difference
                subsets.append(Subset("arm", arm, gain.estimate, gain.num_tasks, gain.p_value))
                compared.append((arm, baseline))
    conduct = [row for arm, baseline in compared for row in compare_conduct(items, possible, arm, baseline, question)]
    adjusted = holm([*(row.p_value for row in conduct), *(subset.p_value for subset in subsets)])
    of_subsets = zip(subsets, adjusted[len(conduct) :], strict=True)
    return (
        [replace(row, p_holm=p) for row, p in zip(conduct, adjusted, strict=False)],
        [replace(subset, p_holm=p, alpha=question.alpha) for subset, p in of_subsets],
    )


def compare_conduct(
    items: pa.Table, possible: pa.Table, arm: str, baseline: str, question: EvalQuestion
) -> list[Difference]:
    """Return the differences of two arms in hacks, in the protocol, in searches, and in the hidden tests.

    The last only where passing is something else: where hidden tests decide, it is the gain itself. What does not
    differ in any task is no question, and does not count in the correction.
    """
    hacking = outcomes.items_that_measure_hacking(items)
    tables = [(outcomes.HACKED, hacking), (outcomes.SUSPECT, hacking)]
    tables += [(outcomes.PROTOCOL, possible), (outcomes.SEARCHED, possible)]
    both = possible.filter(pc.is_in(possible["arm"], pa.array([arm, baseline])))
    if outcomes.num_apart(both, outcomes.HIDDEN):
        tables.append((outcomes.HIDDEN, possible))
    compared = (compare(rows, arm, baseline, question, outcome, equal=False) for outcome, rows in tables)
    return [comparison.difference for comparison in compared if comparison]


def compare_families(paired: PairedOutcomes | None) -> list[Subset]:
    """Return the gain in each family that has enough tasks; within a family, tasks are the units."""
    subsets: list[Subset] = []
    families = np.asarray(paired.families if paired else ())
    for family in sorted(set(families.tolist())):
        at_T = families == family
        if paired and at_T.sum() >= MIN_TASKS:
            arms = paired.treatment_ST[None][:, :, at_T], paired.baseline_ST[None][:, :, at_T]
            test = PairedTest(*arms, np.arange(at_T.sum()))
            subsets.append(Subset("family", family, float(test.estimate_X[0]), int(at_T.sum()), float(test.p()[0])))
    return subsets
