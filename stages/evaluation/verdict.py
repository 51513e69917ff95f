"""Decide whether one arm of an experiment beats another: evaluation items in, a verdict with its reasons out.

VALIDATED: a gain is shown, over tasks and training seeds; the claim states whether it reaches 2 points. PARTIAL: a gain
is shown of these checkpoints alone (fewer than three training seeds), or for a family or another arm after Holm's
correction. INVALIDATED: over three or more training seeds no gain of 2 points, which would have been detected, or
worse. UNDERPOWERED: neither is shown. INVALID-RUN: the arms cannot be compared.

The order is fixed: treatment against baseline, then against the control that only imitates the chosen actions, and the
second is a test only where the first found a gain. All other questions share one level by Holm's correction.

What differs between the arms besides their channels, how many collections of pairs the trainings learnt from, and
trainings that collapsed are part of the reasons: each limits what a difference in pass rate can be credited to. A
decision is about treatment and baseline alone, and readers conclude from it that the preference helped, also where
imitation scored higher: `shown` and `not_shown` say in sentences what follows and what does not.

In reading order: the question and the verdict, the decision (`decide`), comparisons, sentences about the reasons,
sentences about what is shown.
"""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stages.evaluation import outcomes, planner
from stages.evaluation.arm_settings import ArmDifference
from stages.evaluation.inference import (
    ALPHA,
    BETTER,
    INVALIDATED,
    MIN_GAIN,
    MIN_SEEDS,
    NO_GAIN,
    PARTIAL,
    TIE,
    UNDECIDED,
    UNDERPOWERED,
    VALIDATED,
    WORSE,
    PairedTest,
    decision_of,
    fewest_units,
    holm,
    numbered,
    shows,
    too_few,
)
from stages.evaluation.outcomes import AT_ZERO, PASSED, PRIMARY, START, ArmSummary, Missing, Outcome, PairedOutcomes
from stages.layout import counted, p_value, plural
from stages.runs import display
from stages.terms import SamplingUnit

RECOMMENDED_SEEDS = 5
"""With three or four, an interval relies on gains that are normally distributed over trainings (docs/evaluate.md)."""
MOST_NAMED = 3
"""Subsets with a gain, and settings, that a sentence names."""
MIN_TASKS = 6
"""Of a family: five tasks of one sign give 2 * 2**-5 = .0625 and cannot reach p < .05."""
INVALID_RUN = "INVALID-RUN"
EXIT_CODES = {VALIDATED: 0, INVALIDATED: 1, PARTIAL: 3, UNDERPOWERED: 3, INVALID_RUN: 4}
ONLY_TWINS = "only impossible twins were played, and they measure hacking alone"
LARGE_CUT = 1 / 3
"""The share of rollouts cut by a limit from which on the verdict says so."""
LIMITS = {
    "max_tokens": "policy.max_tokens of the trainings (or of policies.NAME)",
    "max_steps": "max_steps",
    "context": "limits.context_tokens",
    "wall_time": "limits.wall_s",
    "cost": "limits.cost_usd",
}
"""The setting of each limit that ends a rollout (`terminated_by`)."""
AT_ZERO_RATE = " at temperature 0"


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

    def damage(self, *arms: str | None) -> list[str]:
        """Return why these arms could not be played, as clauses."""
        return [
            f"arm {arm}, seed {seed}, is INVALID: {why.rstrip('.')}"
            for (arm, seed), why in sorted(self.damaged.items())
            if arm in arms
        ]

    @property
    def of_what(self) -> str:
        """Return what sentences add to a difference: nothing where it is one in all passes."""
        return "" if self.outcome is PASSED else f" in {self.outcome.passes}"

    @property
    def arms(self) -> tuple[str, ...]:
        """Return the compared arms, each once."""
        return tuple(dict.fromkeys(arm for arm in (self.baseline, self.treatment, self.control) if arm))


@dataclass(frozen=True)
class PairedDifference:
    """Treatment minus baseline over the same tasks and training seeds, in numbers that JSON can hold.

    `low`, `high` and `p_value` are those of the deciding test, and `shows` is what it shows. `mde` is the true
    difference that 80 % of such experiments would find, by simulation, where nothing was decided; None where it was
    decided, and where no difference would be found so often. `too_few`: whether the test has too few units to reject
    anything. `elsewhere` is the interval for other units where those played are fixed, else None. `unit` is the noun
    for a unit. `num_collections`: of pairs that the trainings learnt from, 0 where none did. `wins` and `losses` are
    tasks that rose, fell.
    """

    estimate: float
    low: float
    high: float
    method: str
    num_tasks: int
    num_units: int
    num_seeds: int
    wins: int
    losses: int
    p_value: float
    shows: str = UNDECIDED
    mde: float | None = None
    too_few: bool = False
    elsewhere: tuple[float, float] | None = None
    unit: str = "family"
    num_collections: int = 0

    @property
    def units(self) -> str:
        """Return the number of units with their noun: "12 operations"."""
        return counted(self.num_units, self.unit)


@dataclass(frozen=True)
class ComparedRate:
    """One rate of two arms, by its name in reports, and their difference.

    p_holm: for conduct, after Holm's correction over all questions besides the two in fixed order; else None.
    """

    rate: str
    arm: str
    other: str
    difference: PairedDifference
    p_holm: float | None = None


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


@dataclass(frozen=True)
class Look:
    """The result of one planned look: the tasks played by then, its two-sided level, the gain and the decision."""

    tasks: int
    level: float
    decision: str
    gain: PairedDifference | None


@dataclass(frozen=True)
class EvalVerdict:
    """The answer, why, and every number behind it; rates and differences are fractions of one.

    `claim` is what is shown of the gain, empty where nothing is. `worst` and `best` are the gain under the worst and
    the best that `num_lost` lost outcomes could have been, None where none was lost. `outcome` names what `gain` and
    `over_control` are about (`outcomes.PRIMARY`). `comparisons` are all differences that were found: these two, then
    those in the other of the two outcomes, then every comparison in what else was recorded; but for the first two, arms
    that agree in all tasks are left out.
    `looks` are those that were taken, where several were planned; all differences are then at the level of the last
    one. `differences` are all settings in which arms differ, `collapsed` the trainings that left their course, or are
    far from the others of their arm or below the start.
    `at_zero` is the gain at temperature 0, None where the arms were not played so. `cut` says that limits ended many
    rollouts before they passed, and which; empty where few were. `shown` and `not_shown` are sentences, each complete
    without the others. `dataclasses.asdict` turns all of it into what JSON can hold.
    """

    decision: str
    why: str
    baseline: str
    treatment: str
    control: str | None
    arms: tuple[ArmSummary, ...]
    claim: str = ""
    estimand: str = ""
    gain: PairedDifference | None = None  # treatment - baseline
    worst: PairedDifference | None = None
    best: PairedDifference | None = None
    num_lost: int = 0
    over_control: PairedDifference | None = None  # treatment - control
    outcome: str = PASSED.name
    at_zero: PairedDifference | None = None  # treatment - baseline, both at temperature 0
    comparisons: tuple[ComparedRate, ...] = ()
    gain_by_seed: Mapping[str, float] | None = None
    subsets: tuple[Subset, ...] = ()
    looks: tuple[Look, ...] = ()
    differences: tuple[ArmDifference, ...] = ()
    collapsed: tuple[str, ...] = ()
    cut: str = ""
    min_gain: float = MIN_GAIN
    control_trained: bool = True
    baseline_trained: bool = True
    shown: tuple[str, ...] = ()
    not_shown: tuple[str, ...] = ()

    def compared(self, outcome: Outcome, other: str | None) -> PairedDifference | None:
        """Return the treatment's difference from another arm in an outcome; None where they agree in all tasks."""
        of = (outcome.rate, self.treatment, other)
        return next((one.difference for one in self.comparisons if (one.rate, one.arm, one.other) == of), None)

    @property
    def rate(self) -> str:
        """Return what the decision is about, as reports call it."""
        return PRIMARY[self.outcome].rate

    @property
    def tasks(self) -> str:
        """Return what the decision counts, as sentences call it: "tasks", or "tasks within the protocol"."""
        return "tasks" if self.outcome == PASSED.name else f"tasks{PRIMARY[self.outcome].within}"

    @property
    def settled(self) -> bool:
        """Return whether no more tasks are needed: a gain is shown, or that there is none."""
        return bool(self.claim) or self.decision == INVALIDATED

    @property
    def exit_code(self) -> int:
        """Return the exit code of the program."""
        return EXIT_CODES[self.decision]


def decide(
    items: pa.Table,
    question: EvalQuestion = EvalQuestion(),
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
    summaries = tuple(outcomes.summarize(items, arm, question.sampling.fixed, question.outcome) for arm in names)
    cut = cut_sentence(possible, question.collapsed)
    judgement = partial(
        EvalVerdict,
        baseline=baseline,
        treatment=treatment,
        control=control,
        arms=summaries,
        differences=differences,
        cut=cut,
        min_gain=question.min_gain,
        control_trained=control not in question.untrained,
        baseline_trained=baseline not in question.untrained,
    )
    gain, reasons = with_reasons(possible, baseline, question)
    if gain is None:
        if len(items) and not len(possible) and not question.damage(baseline, treatment):
            reasons = [ONLY_TWINS]
        why = " ".join(filter(None, (cut, f"{treatment} and {baseline} cannot be compared: {'; '.join(reasons)}.")))
        return judgement(INVALID_RUN, why, not_shown=(f"Anything about the arms. {why}",))
    bounds: list[Comparison] = []
    if num_lost := gain.outcomes.num_lost:
        sides: tuple[Missing, Missing] = ("against", "for")
        bounds = [found for side in sides if (found := compare(possible, treatment, baseline, question, missing=side))]
    decision, claim, reason = judged(gain, bounds, num_lost, question)
    over, control_problems = with_reasons(possible, control, question) if control else (None, ["none was named"])
    conduct, subsets = secondary(items, possible, question, control=over is not None)
    gaining = sorted((subset for subset in subsets if subset.gains), key=lambda subset: subset.p_holm)
    if decision == UNDERPOWERED and gaining:
        decision = PARTIAL
    by_seed = gain.outcomes.gain_by_seed
    collapsed = collapsed_clauses(possible, question)
    other_rates = beside(possible, (baseline, str(control)) if over else (baseline,), question)
    at_zero = None
    if {treatment + AT_ZERO, baseline + AT_ZERO} <= {*names}:
        at_zero = compare(possible, treatment + AT_ZERO, baseline + AT_ZERO, question, question.outcome)
    sentences = [
        cut,
        f"{treatment} - {baseline} is {points(gain.difference)}{question.of_what}: {reason}.",
        f"At temperature 0 it is {points(at_zero.difference)}." if at_zero else "",
        beside_sentence(other_rates, baseline, question),
        differences_sentence(differences, treatment, baseline),
        seeds_sentence(by_seed, "this training" if baseline in question.untrained else "these checkpoints"),
        f"Collapsed: {'; '.join(collapsed)}." if collapsed else "",
        subsets_sentence(gaining),
        credit_sentence(bool(claim), over, control_problems, question),
        beside_sentence(other_rates, control, question),
        differences_sentence(differences, treatment, control) if over and control else "",
        *conduct_sentences(conduct, gain.difference, question),
        report_sentence(other_rates),
    ]
    verdict = judgement(
        decision,
        " ".join(filter(None, sentences)),
        claim=claim,
        estimand=estimand(gain.difference, question.sampling),
        gain=gain.difference,
        worst=bounds[0].difference if bounds else None,
        best=bounds[1].difference if bounds else None,
        num_lost=num_lost,
        over_control=over.difference if over else None,
        outcome=question.outcome.name,
        at_zero=at_zero.difference if at_zero else None,
        comparisons=(
            *(
                ComparedRate(f"{question.outcome.rate}{end}", treatment, other, found.difference)
                for end, other, found in (("", baseline, gain), (AT_ZERO_RATE, baseline, at_zero), ("", control, over))
                if found and other
            ),
            *other_rates,
            *conduct,
        ),
        gain_by_seed=by_seed,
        subsets=tuple(subsets),
        collapsed=collapsed,
    )
    shown, not_shown = conclusions(verdict, question.alpha)
    return replace(verdict, shown=tuple(shown), not_shown=tuple(not_shown))


def judged(
    gain: "Comparison", bounds: Sequence["Comparison"], num_lost: int, question: EvalQuestion
) -> tuple[str, str, str]:
    """Return the decision, the claim and its clause; both must hold with lost outcomes imputed at their worst.

    bounds: the comparison with lost outcomes against the treatment, and for it; none where none was lost.
    """
    found, bar = gain.difference, f"{100 * question.min_gain:g} points"
    tests = [each.test for each in (gain, *bounds)]
    shown, of_known = str(shows(tests, question.min_gain, question.alpha)[0]), found.shows
    worst, best = (each.difference for each in bounds) if bounds else (found, found)
    claim, reason = clause(shown, min(found.low, worst.low), max(found.high, best.high), question)
    if shown == UNDECIDED and of_known != UNDECIDED:
        _, reason = clause(of_known, found.low, found.high, question)
        reason = f"{reason}, but not if the {num_lost} lost rollouts had ended otherwise; --resume retries them"
    elif shown == UNDECIDED:
        power = power_clause(found, question.alpha)
        reason = f"neither a gain nor the absence of a gain of {bar} is shown; {power}"
    elif found.num_seeds < MIN_SEEDS and shown == BETTER:
        reason = f"{reason} of these checkpoints"
    elif found.num_seeds < MIN_SEEDS:
        fewest = f"the fewest training seeds that can show it of other trainings are {MIN_SEEDS}"
        reason = f"{reason}, of these checkpoints alone; {fewest}"
    return decision_of(shown, found.num_seeds), claim, reason


def clause(shown: str, low: float, high: float, question: EvalQuestion) -> tuple[str, str]:
    """Return the claim and the clause that follow from what is shown, and from the limits of the interval."""
    bar = f"{100 * question.min_gain:g} points"
    if shown == WORSE:
        return "", "significantly worse"
    if shown == NO_GAIN:
        return "", f"no gain of {bar}: the interval ends below, so they would have been seen"
    if shown == UNDECIDED:
        return "", ""
    if low >= question.min_gain:
        return f"a gain of {bar}", f"a gain of at least {bar}"
    return "a gain", f"a gain, {'smaller than' if high < question.min_gain else 'not shown to reach'} {bar}"


def after_looks(verdict: EvalVerdict, taken: Sequence[Look], planned: int, num_tasks: int) -> EvalVerdict:
    """Return the verdict with the looks that led to it, the last its own; `num_tasks`: all that were planned."""
    last = taken[-1]
    ended = f"Decided at look {len(taken)} of {planned}"
    if len(taken) >= planned:
        ended = f"All {planned} planned looks were taken"
    why = (
        f"{verdict.why} {ended}, after {last.tasks} of {num_tasks} tasks; differences are at this look's level of "
        f"{last.level:.2g}, which holds 5 % over all looks."
    )
    return replace(verdict, looks=tuple(taken), why=why)


# Comparisons of two arms.


@dataclass(frozen=True)
class Comparison:
    """Two arms: their paired outcomes, the test of these, and the difference in numbers."""

    outcomes: PairedOutcomes
    test: PairedTest
    difference: PairedDifference


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
    found = outcomes.paired(items, treatment, baseline, outcome or question.outcome, missing)
    if found is None:
        return None
    d_T = np.nanmean(found.treatment_ST - found.baseline_ST, 0)
    wins, losses = int((d_T > TIE).sum()), int((d_T < -TIE).sum())
    if not equal and wins + losses == 0:
        return None
    sampling, alpha = question.sampling, question.alpha
    arms, unit_T = (found.treatment_ST[None], found.baseline_ST[None]), numbered(found.units)
    num_collections = len(set(found.collections) - {""})
    collection_S = numbered(found.collections) if num_collections else None
    test = PairedTest(*arms, unit_T, fixed=sampling.fixed, collection_S=collection_S)
    (low,), (high,) = test.interval(alpha)
    elsewhere = None
    if sampling.fixed:
        limits = PairedTest(*arms, unit_T, collection_S=collection_S).interval(alpha)
        elsewhere = (float(limits[0][0]), float(limits[1][0]))
    of = (
        f"each task's difference within its {sampling.noun}" if sampling.fixed else f"each {sampling.noun}'s difference"
    )
    method = f"paired permutation test (sign flips of {of}, {test.flips.draws}) and a score test; the larger p counts"
    if test.top_error_X is not None:
        level = "training seeds" if test.num_top == test.num_seeds else "collections of pairs"
        method += f"; Student's t over {test.num_top} {level}"
    difference = PairedDifference(
        estimate=float(test.estimate_X[0]),
        low=float(low),
        high=float(high),
        method=method,
        num_tasks=len(unit_T),
        num_units=int(unit_T.max()) + 1,
        num_seeds=len(found.seeds),
        wins=wins,
        losses=losses,
        p_value=float(test.p()[0]),
        shows=str(shows([test], question.min_gain, alpha)[0]),
        too_few=test.num_flipped < fewest_units(alpha),
        elsewhere=elsewhere,
        unit=sampling.noun,
        num_collections=num_collections,
    )
    if outcome is None and missing == "excluded" and difference.shows == UNDECIDED and not difference.too_few:
        passes = outcomes.with_passes(items, question.outcome)
        mde = planner.detectable(passes, treatment, baseline, found, fixed=sampling.fixed, alpha=alpha)
        difference = replace(difference, mde=mde)
    return Comparison(found, test, difference)


def with_reasons(
    possible: pa.Table, other: str, question: EvalQuestion
) -> tuple[Comparison, list[str]] | tuple[None, list[str]]:
    """Compare the treatment with another arm; returns why they cannot be compared, as clauses, where they cannot."""
    arms = other, question.treatment
    if reasons := question.damage(*arms) or outcomes.problems(possible, *arms, question.untrained):
        return None, reasons
    if found := compare(possible, question.treatment, other, question):
        return found, []
    return None, ["no item has an outcome in both"]


def next_to(outcome: str) -> list[Outcome]:
    """Return what stands next to the outcome that decides, by its name: what else verdicts can be about."""
    return [other for name, other in PRIMARY.items() if name != outcome]


def beside(possible: pa.Table, others: Iterable[str], question: EvalQuestion) -> list[ComparedRate]:
    """Compare the treatment with others in the outcome next to the one that decides, and in passes by report.

    The first where a pass of the two arms broke the protocol, the second where they differ from the baseline in it.
    """
    found = []
    for other in others:
        arms = possible.filter(pc.is_in(possible["arm"], pa.array([question.treatment, other])))
        asked = [
            (outcome, True)
            for outcome in next_to(question.outcome.name)
            if outcomes.num_apart(arms, outcome, question.outcome)
        ]
        asked += [(outcomes.BY_REPORT, False)] if other == question.baseline else []
        for outcome, equal in asked:
            one = compare(possible, question.treatment, other, question, outcome, equal=equal)
            if one:
                found.append(ComparedRate(outcome.rate, question.treatment, other, one.difference))
    return found


def secondary(
    items: pa.Table, possible: pa.Table, question: EvalQuestion, *, control: bool
) -> tuple[list[ComparedRate], list[Subset]]:
    """Test all questions but the two in fixed order (conduct, families, other arms) under one Holm correction.

    All of them share the level of this look. Conduct is tested in every comparison that is made: with the baseline,
    with the control where it can be, and of every other arm with the baseline.
    """
    baseline, treatment = question.baseline, question.treatment
    made = [(treatment, baseline), *([(treatment, str(question.control))] if control else [])]
    subsets = by_family(outcomes.paired(possible, treatment, baseline, question.outcome))
    for arm in sorted({*pc.unique(items["arm"]).to_pylist()} - {START, *question.arms}):
        # An arm at temperature 0 differs from the baseline by its temperature, too.
        if not arm.endswith(AT_ZERO) and not outcomes.problems(possible, arm, baseline, question.untrained):
            found = compare(possible, arm, baseline, question, question.outcome)
            if found:
                of = found.difference
                subsets.append(Subset("arm", arm, of.estimate, of.num_tasks, of.p_value))
                made.append((arm, baseline))
    conduct = [one for arm, other in made for one in conduct_differences(items, possible, arm, other, question)]
    adjusted = holm([*(one.difference.p_value for one in conduct), *(subset.p_value for subset in subsets)])
    of_subsets = zip(subsets, adjusted[len(conduct) :], strict=True)
    return (
        [replace(one, p_holm=p) for one, p in zip(conduct, adjusted, strict=False)],
        [replace(subset, p_holm=p, alpha=question.alpha) for subset, p in of_subsets],
    )


def conduct_differences(
    items: pa.Table, possible: pa.Table, arm: str, other: str, question: EvalQuestion
) -> list[ComparedRate]:
    """Return the differences of two arms in hacks, in the protocol, in searches, and in the hidden tests.

    The last only where passing is something else: where hidden tests decide, it is the gain itself. What does not
    differ in any task is no question, and does not count in the correction.
    """
    hacking = outcomes.items_that_measure_hacking(items)
    asked = [(outcomes.HACKED, hacking), (outcomes.SUSPECT, hacking)]
    asked += [(outcomes.PROTOCOL, possible), (outcomes.SEARCHED, possible)]
    both = possible.filter(pc.is_in(possible["arm"], pa.array([arm, other])))
    if outcomes.num_apart(both, outcomes.HIDDEN):
        asked.append((outcomes.HIDDEN, possible))
    compared = ((outcome, compare(rows, arm, other, question, outcome, equal=False)) for outcome, rows in asked)
    return [ComparedRate(outcome.rate, arm, other, found.difference) for outcome, found in compared if found]


def by_family(found: PairedOutcomes | None) -> list[Subset]:
    """Return the gain in each family that has enough tasks; within a family, tasks are the units."""
    subsets: list[Subset] = []
    families = np.asarray(found.families if found else ())
    for family in sorted(set(families.tolist())):
        at_T = families == family
        if found and at_T.sum() >= MIN_TASKS:
            arms = found.treatment_ST[None][:, :, at_T], found.baseline_ST[None][:, :, at_T]
            test = PairedTest(*arms, np.arange(at_T.sum()))
            subsets.append(Subset("family", family, float(test.estimate_X[0]), int(at_T.sum()), float(test.p()[0])))
    return subsets


# Sentences about the reasons.


def points(difference: PairedDifference) -> str:
    """Return a difference in percentage points with its interval and p-value."""
    interval = f"[{100 * difference.low:+z.1f}, {100 * difference.high:+z.1f}]"
    return f"{100 * difference.estimate:+z.1f} points {interval}, {p_value(difference.p_value)}"


def power_clause(difference: PairedDifference, alpha: float = ALPHA) -> str:
    """Return the difference that such an experiment would find, or why it would find none."""
    if difference.too_few:
        return too_few(difference.units, alpha)
    size = f"{counted(difference.num_tasks, 'task')} in {difference.units}"
    if difference.mde is None:
        return f"{size} cannot show any gain with 80 % power"
    return f"{size} show {100 * difference.mde:.1f} points with 80 % power"


def estimand(gain: PairedDifference, sampling: SamplingUnit) -> str:
    """Return, in a sentence, what the interval covers besides what was played."""
    tasks = (
        f"other tasks of these {gain.units}" if sampling.fixed else f"other {plural(gain.unit)} with tasks like these"
    )
    if gain.num_seeds < MIN_SEEDS:
        return f"The interval is about {tasks}, and about these checkpoints."
    if gain.num_collections >= MIN_SEEDS:
        return f"The interval is about {tasks}, and about trainings on other collections of pairs like these."
    if gain.num_collections:
        shared = "one set of pairs" if gain.num_collections == 1 else f"{gain.num_collections} sets of pairs"
        return f"The interval is about {tasks}, and other trainings on {shared}, and is conditional on these pairs."
    return f"The interval is about {tasks}, and about other trainings like these."


def differences_sentence(differences: Iterable[ArmDifference], treatment: str, other: str) -> str:
    """Return, in a sentence, what differs between two arms besides their channels; empty where nothing does."""
    confounds = [d for d in differences if not d.channel and d.between((treatment, other))]
    if not confounds:
        return ""
    named = [f"{d.setting} ({other} {d.values[other]}, {treatment} {d.values[treatment]})" for d in confounds]
    return (
        f"{treatment} and {other} differ in more than their channels: {', '.join(named)}. "
        "The difference is that of all of these together."
    )


def cut_sentence(possible: pa.Table, collapsed: Container[tuple[str, int]] = ()) -> str:
    """Return, in a sentence, that limits ended many rollouts before they passed, with the settings to raise.

    Empty where fewer than `LARGE_CUT` of them were cut, and some arm passed something. Rollouts of trainings that
    collapsed do not count: higher limits would only make them longer.
    """
    trainings = zip(possible["arm"].to_pylist(), possible["train_seed"].to_pylist(), strict=True)
    sound = pa.array([(arm.removesuffix(AT_ZERO), seed) not in collapsed for arm, seed in trainings], pa.bool_())
    played = possible.filter(pc.and_(sound, pc.invert(outcomes.failed(possible))))
    none_passed = bool(len(played)) and not pc.any(played["passed"]).as_py()
    by = Counter(played["terminated_by"].filter(pc.invert(played["passed"])).to_pylist())
    cut = {limit: by[limit] for limit in LIMITS if by[limit]}
    if sum(cut.values()) < LARGE_CUT * max(len(played), 1):
        return "No arm passed any task." if none_passed else ""
    by_limit = " or ".join(f"{limit} ({num})" for limit, num in cut.items()) if len(cut) > 1 else next(iter(cut))
    settings = " and ".join(LIMITS[limit] for limit in cut)
    sentence = (
        f"{sum(cut.values())} of {len(played)} rollouts were cut by {by_limit} before they passed: raise {settings}."
    )
    return f"No arm passed any task, and {sentence}" if none_passed else sentence


def collapsed_clauses(possible: pa.Table, question: EvalQuestion) -> tuple[str, ...]:
    """Return the trainings of all arms that collapsed, as they recorded it or by their outcomes as they were trained.

    Arms that are not compared with each other count too: each is with the baseline.
    """
    played = set(pc.unique(possible["arm"]).to_pylist()) - {START, *question.arms}
    arms = (*question.arms, *sorted(arm for arm in played if not arm.endswith(AT_ZERO)))
    recorded = [
        f"arm {arm}, seed {seed}: {how.removesuffix('.')}"
        for (arm, seed), how in sorted(question.collapsed.items())
        if arm in arms
    ]
    return (*recorded, *(clause for arm in arms for clause in outcomes.collapsed(possible, arm)))


def seeds_sentence(by_seed: Mapping[str, float], of_one: str) -> str:
    """Return the range of gains over training seeds, in a sentence; `of_one`: what one seed is about."""
    if len(by_seed) == 1:
        return f"One training seed was run: this is about {of_one} only, not about other seeds."
    low, high = 100 * min(by_seed.values()), 100 * max(by_seed.values())
    spread = f"Over {len(by_seed)} training seeds the difference runs from {low:+z.1f} to {high:+z.1f} points"
    if len(by_seed) < MIN_SEEDS:
        return (
            f"{spread}; fewer than {MIN_SEEDS} show nothing of another training, and {RECOMMENDED_SEEDS} are "
            "recommended."
        )
    # The share of trainings that must fail for one of so many to fail with a chance of 95 %.
    rarest = 100 * (1 - ALPHA ** (1 / len(by_seed)))
    unseen = f"a failure in fewer than {rarest:.0f} % of trainings may not have been seen"
    if len(by_seed) < RECOMMENDED_SEEDS:
        return (
            f"{spread}; the interval covers other trainings where their gains are normally distributed, which "
            f"{len(by_seed)} seeds cannot show, and {unseen}: {RECOMMENDED_SEEDS} are recommended."
        )
    return f"{spread}. The interval is about trainings that vary as these {len(by_seed)} did; {unseen}."


def subsets_sentence(gaining: Sequence[Subset]) -> str:
    """Return, in a sentence, the parts that gain, the clearest first; empty where none does."""
    if not gaining:
        return ""
    named = ", ".join(
        f"{s.kind} {s.name} ({100 * s.estimate:+z.1f} points, p = {s.p_holm:.2g} after Holm)"
        for s in gaining[:MOST_NAMED]
    )
    return f"A gain is shown in part: {named}{_and_more(gaining)}."


def credit_sentence(gained: bool, over: Comparison | None, reasons: Sequence[str], question: EvalQuestion) -> str:
    """Return a sentence: whether the gain is credited to the preference or to imitation, the control."""
    if over is None and question.baseline in question.untrained:
        return ""  # the gain is that of training as it was: there is nothing to attribute it to
    if over is None:
        gain = "the gain" if gained else "a gain"
        return (
            f"There is no control to compare with that only imitates the chosen actions ({'; '.join(reasons)}), "
            f"so {gain} cannot be attributed."
        )
    found, control = over.difference, str(question.control)
    more = f"; {power_clause(found, question.alpha)}" if found.shows == UNDECIDED else ""
    credited = credit(gained, control, found, question.min_gain, trained=control not in question.untrained)
    return f"{question.treatment} - {control} is {points(found)}{question.of_what}: {credited}{more}."


def credit(
    gained: bool, control: str, over: PairedDifference, min_gain: float = MIN_GAIN, *, trained: bool = True
) -> str:
    """Return the end of a sentence: how treatment and control compare, and what follows about imitation."""
    stands = {
        BETTER: f"above {control}",
        WORSE: f"below {control}",
        NO_GAIN: f"less than {100 * min_gain:g} points above {control}",
        UNDECIDED: "not separated",
    }
    if not trained:
        return f"{stands[over.shows]}, which is about training as a whole, as {control} was not trained"
    lead = "which is a lead and no test, since no gain is shown first"
    follows = {
        BETTER: "so imitation alone does not explain the gain" if gained else lead,
        WORSE: "so imitation does better without the preference",
        NO_GAIN: "so imitation suffices" if gained else "and no gain is shown that imitation could explain",
        UNDECIDED: f"so {'the' if gained else 'a'} gain is credited neither to the preference nor to imitation",
    }
    return f"{stands[over.shows]}, {follows[over.shows]}"


def conduct_sentences(conduct: Iterable[ComparedRate], gain: PairedDifference, question: EvalQuestion) -> Iterator[str]:
    """Yield, in sentences, what else changed significantly in some comparison, after Holm's correction."""
    for one in conduct:
        up, main = one.difference.estimate > 0, (one.arm, one.other) == (question.treatment, question.baseline)
        if one.p_holm is None or one.p_holm >= question.alpha:
            continue
        if up and one.rate in (outcomes.HACKED.rate, outcomes.SUSPECT.rate):
            rate = "hacked rate" if one.rate == outcomes.HACKED.rate else "rate of visible without hidden passes"
            rose = "rose with the pass rate" if gain.estimate > 0 else "rose"
            rose = rose if main else f"is higher than that of {one.other}"
            yield f"The {rate} of {one.arm} {rose}, by {points(one.difference)}: part of it may be the hack."
        if not up and one.rate == outcomes.PROTOCOL.rate:
            than = "" if main else f" than {one.other}"
            yield f"{one.arm} keeps the protocol less often{than}, by {points(one.difference)}."
        if up and one.rate == outcomes.SEARCHED.rate:
            than = "" if main else f" than {one.other}"
            yield f"{one.arm} searches for the published solution more often{than}, by {points(one.difference)}."


def beside_sentence(found: Iterable[ComparedRate], other: str | None, question: EvalQuestion) -> str:
    """Return, in sentences, the difference from an arm in what stands next to the outcome that decides."""
    return " ".join(
        f"In {outcome.passes} it is {points(one.difference)}."
        for outcome in next_to(question.outcome.name)
        for one in found
        if (one.rate, one.other) == (outcome.rate, other)
    )


def report_sentence(found: Iterable[ComparedRate]) -> str:
    """Return, in a sentence, how the arms differ in passes by report; empty where they do not."""
    reported = next((one for one in found if one.rate == outcomes.BY_REPORT.rate), None)
    if reported is None or not reported.difference.estimate:
        return ""
    return (
        f"{reported.arm} and {reported.other} differ in passes by report, by {points(reported.difference)}: code under "
        "test could have forged these."
    )


# Sentences about what is shown and what is not, which pages put first.


def conclusions(verdict: EvalVerdict, alpha: float = ALPHA) -> tuple[list[str], list[str]]:
    """Return what the numbers of a verdict show, and what a reader may not conclude from them."""
    shown: list[str] = []
    not_shown = [f"What the arms can do. {verdict.cut}"] if verdict.cut else []
    if verdict.claim and verdict.at_zero and verdict.at_zero.shows != BETTER:
        more = f"{verdict.treatment} passes more {verdict.tasks} than {verdict.baseline}{AT_ZERO_RATE}"
        not_shown.append(f"That {more}: {_interval(verdict.at_zero)}.")
    for found in (gain_conclusions(verdict), control_conclusions(verdict)):
        shown += found[0]
        not_shown += found[1]
    treatment, baseline = verdict.treatment, verdict.baseline
    words = {
        (outcomes.HACKED.rate, True): "hacks more often",
        (outcomes.SUSPECT.rate, True): "passes visible tests without hidden ones more often",
        (outcomes.PROTOCOL.rate, False): "keeps the protocol less often",
        (outcomes.SEARCHED.rate, True): "searches for the published solution more often",
    }
    for one in verdict.comparisons:
        does = words.get((one.rate, one.difference.estimate > 0))
        if does and one.p_holm is not None and one.p_holm < alpha:
            shown.append(f"{one.arm} {does} than {one.other}: {_interval(one.difference)}.")
    by_report = verdict.compared(outcomes.BY_REPORT, baseline)
    if verdict.gain and by_report and by_report.estimate > max(0.0, verdict.gain.low):
        part = _interval(by_report)
        not_shown.append(
            f"That the gain is one in solutions: {part} of it are passes by report, which code under test could forge."
        )
    confounds = [d.setting for d in verdict.differences if not d.channel and d.between((treatment, baseline))]
    if confounds:
        named = ", ".join(confounds[:MOST_NAMED]) + _and_more(confounds)
        not_shown.append(f"That the channels make the difference: {treatment} and {baseline} also differ in {named}.")
    if verdict.gain and verdict.gain.num_seeds < MIN_SEEDS:
        seeds = "1 seed was" if verdict.gain.num_seeds == 1 else f"{verdict.gain.num_seeds} seeds were"
        not_shown.append(f"Anything about other trainings: {seeds} trained, and {MIN_SEEDS} are the fewest.")
    return shown, not_shown


def gain_conclusions(verdict: EvalVerdict) -> tuple[list[str], list[str]]:
    """Return what the comparison of treatment and baseline shows, and does not, which the decision is about."""
    treatment, baseline, gain, tasks = verdict.treatment, verdict.baseline, verdict.gain, verdict.tasks
    bar = f"{100 * verdict.min_gain:g} points"
    if gain is None:
        return [], []
    shown, not_shown = [], []
    if verdict.claim:
        least = f" by at least {bar}" if gain.low >= verdict.min_gain else ""
        shown.append(f"{treatment} passes more {tasks} than {baseline}{least}: {_interval(gain)}.")
        if not least:
            not_shown.append(f"That the gain of {treatment} over {baseline} reaches {bar}.")
        for outcome in next_to(verdict.outcome):
            other = verdict.compared(outcome, baseline)
            if other and other.shows != BETTER:
                way = f"{treatment} passes more tasks than {baseline}{outcome.within}"
                not_shown.append(f"That {way}: {_interval(other)}.")
    elif gain.shows == WORSE and verdict.decision == INVALIDATED:
        shown.append(f"{treatment} passes fewer {tasks} than {baseline}: {_interval(gain)}.")
    elif verdict.decision == INVALIDATED:
        shown.append(f"{treatment} gains less than {bar} over {baseline}: {_interval(gain)}.")
    else:
        size = f"; differences from {100 * gain.mde:.1f} points on would show" if gain.mde is not None else ""
        not_shown.append(
            f"Whether {treatment} passes more {tasks} than {baseline}: {_interval(gain)} is no decision{size}."
        )
    if gaining := sorted((s for s in verdict.subsets if s.gains), key=lambda subset: subset.p_holm):
        named = ", ".join(f"{s.kind} {s.name} ({display.points(s.estimate)})" for s in gaining[:MOST_NAMED])
        shown.append(f"A gain over {baseline} in part, in points: {named}{_and_more(gaining)}.")
    return shown, not_shown


def control_conclusions(verdict: EvalVerdict) -> tuple[list[str], list[str]]:
    """Return whether the gain is the preference's: what the comparison with the imitating arm shows, and does not."""
    treatment, control, over = verdict.treatment, verdict.control, verdict.over_control
    if not over and not verdict.baseline_trained:
        return [], []
    if not over:
        return [], [
            f"What a gain of {treatment} comes from: no arm that only imitates the chosen actions was compared."
        ]
    rates = {arm.arm: arm.rate(verdict.outcome) for arm in verdict.arms}
    tasks = verdict.tasks
    of_control, of_treatment = (display.percent(rates.get(str(arm))) for arm in (control, treatment))
    scored = f"{control} passes {of_control}, {treatment} {of_treatment}"
    scored = f"{scored} ({treatment} \u2212 {control} {_interval(over)})"
    if not verdict.control_trained:
        if over.shows not in (BETTER, WORSE):
            return [], [f"Whether training helps at all: {scored}."]
        more = "more" if over.shows == BETTER else "fewer"
        return [f"{treatment} passes {more} {tasks} than {control}, which was not trained: {_interval(over)}."], []
    if over.shows == BETTER and verdict.claim:
        return [f"{treatment} passes more {tasks} than {control}, which only imitates: {_interval(over)}."], []
    if over.shows == WORSE:
        return [f"Imitation alone does better: {scored}."], ["That the pairs' preference helps."]
    higher = "imitation alone scored higher" if over.estimate < 0 else "imitation alone is not excluded"
    return [], [f"That the pairs' preference helps: {higher}. {scored}."]


def _interval(difference: PairedDifference) -> str:
    """Return a difference of shares in points with its interval: "+19.4 [+0.7, +38.8] points"."""
    low, high = display.points(difference.low), display.points(difference.high)
    return f"{display.points(difference.estimate)} [{low}, {high}] points"


def _and_more(found: Sequence[object]) -> str:
    """Return how many are left out of a list in words: " and 5 more"; empty where none is."""
    return f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
