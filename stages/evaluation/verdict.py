"""Decide whether one arm of an experiment beats another: evaluation items in, a verdict with its reasons out.

VALIDATED: a gain is shown, over tasks and training seeds; the claim states whether it reaches 2 points. PARTIAL: a gain
is shown of these checkpoints alone (fewer than three training seeds), or for a family or another arm after Holm's
correction. INVALIDATED: over three or more training seeds no gain of 2 points, which would have been detected, or
worse. UNDERPOWERED: neither is shown. INVALID-RUN: the arms cannot be compared.

The order is fixed: treatment against baseline, then against the control that only imitates the chosen actions, and the
second is a test only where the first found a gain. All other questions share one level by Holm's correction.

What differs between the arms besides their channels, how many collections of pairs the trainings learnt from, and
trainings that collapsed are part of the reasons: each limits what a difference in pass rate can be credited to.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from stages.envs.base import SamplingUnit
from stages.evaluation.arms import (
    START,
    ArmSummary,
    Item,
    failed,
    find_problems,
    hacking,
    summarize,
    task_mean,
    without_twins,
)
from stages.evaluation.comparison import Subset, by_family, compare, gain_by_seed, holm
from stages.evaluation.differences import ArmDifference
from stages.evaluation.paired import MIN_SEEDS
from stages.evaluation.stats import ALPHA, PairedDifference, fewest_units
from stages.plurals import counted, plural

MIN_GAIN = 0.02
BAR = f"{100 * MIN_GAIN:g} points"
RECOMMENDED_SEEDS = 5
"""With three or four, an interval relies on gains that are normally distributed over trainings (docs/verdicts.md)."""
MOST_NAMED = 3
"""Subsets with a gain that the reasons name."""
VALIDATED, PARTIAL, INVALIDATED = "VALIDATED", "PARTIAL", "INVALIDATED"
UNDERPOWERED, INVALID_RUN = "UNDERPOWERED", "INVALID-RUN"
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
Arms = Mapping[str, list[Item]]
Conduct = dict[str, tuple[PairedDifference | None, float]]
"""Differences in conduct, each with its p-value after Holm's correction."""


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
    the best that `num_lost` lost outcomes could have been, None where none was lost. `secondary` holds the p-values of
    conduct after Holm's correction. `looks` are those that were taken, where several were planned; all differences are
    then at the level of the last one. `differences` are all settings in which arms differ, `collapsed` the trainings
    that fell far below the others of their arm. `cut` says that limits ended many rollouts before they passed, and
    which; empty where few were. `dataclasses.asdict` turns all of it into what JSON can hold.
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
    hacked: PairedDifference | None = None  # treatment - baseline, in the hacked rate
    hacked_loose: PairedDifference | None = None
    protocol: PairedDifference | None = None  # treatment - baseline, in protocol adherence
    gain_by_seed: Mapping[str, float] | None = None
    secondary: Mapping[str, float] | None = None
    subsets: tuple[Subset, ...] = ()
    looks: tuple[Look, ...] = ()
    differences: tuple[ArmDifference, ...] = ()
    collapsed: tuple[str, ...] = ()
    cut: str = ""

    @property
    def settled(self) -> bool:
        """Return whether no more tasks are needed: a gain is shown, or that there is none."""
        return bool(self.claim) or self.decision == INVALIDATED

    @property
    def exit_code(self) -> int:
        """Return the exit code of the program."""
        return EXIT_CODES[self.decision]


def decide(
    items: Iterable[Item],
    baseline: str = "A",
    treatment: str = "B",
    control: str | None = "C",
    *,
    sampling: SamplingUnit = SamplingUnit(),  # noqa: B008 (frozen)
    alpha: float = ALPHA,
    differences: tuple[ArmDifference, ...] = (),
) -> EvalVerdict:
    """Compare `treatment` with `baseline`, and with `control` where it was run.

    `sampling`: the tasks' units, sampled or fixed. `alpha`: the level of the differences, of one look where several are
    planned. `differences`: all settings in which arms differ.
    """
    arms: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        arms[item["arm"]].append(item)
    summaries = tuple(summarize(arm, arms[arm], sampling.fixed) for arm in sorted(arms))
    names = (baseline, treatment, control, summaries)
    possible = {arm: without_twins(rows) for arm, rows in arms.items()}
    cut = cut_sentence(possible)
    problems = find_problems(possible, baseline, treatment) if any(possible.values()) or not arms else [ONLY_TWINS]
    ours, theirs = possible.get(treatment, []), possible.get(baseline, [])
    gain = None if problems else compare(ours, theirs, sampling=sampling, alpha=alpha)
    if gain is None:
        reasons = "; ".join(problems) or "no item has an outcome in both"
        why = f"{treatment} and {baseline} cannot be compared: {reasons}."
        return EvalVerdict(INVALID_RUN, " ".join(filter(None, (cut, why))), *names, differences=differences, cut=cut)
    num_lost = sum(map(failed, [*ours, *theirs]))
    bounds: list[PairedDifference | None] = [None, None]
    if num_lost:
        bounds = [compare(ours, theirs, sampling=sampling, lost=side, alpha=alpha) for side in ("against", "for")]
    decision, claim, reason = judge(gain, bounds[0] or gain, bounds[1] or gain, num_lost, alpha)
    conduct, subsets = secondary(arms, possible, names[:3], sampling, alpha)
    if decision == UNDERPOWERED and any(subset.gains for subset in subsets):
        decision = PARTIAL
    control_problems = find_problems(possible, control, treatment) if control else ["none was named"]
    over = None
    if control and not control_problems:
        over = compare(ours, possible[control], sampling=sampling, alpha=alpha)
    by_seed = gain_by_seed(ours, theirs)
    gaining = sorted((subset for subset in subsets if subset.gains), key=lambda subset: subset.p_holm)
    named = ", ".join(
        f"{s.kind} {s.name} ({100 * s.estimate:+.1f} points, p = {s.p_holm:.2g} after Holm)"
        for s in gaining[:MOST_NAMED]
    )
    more = f" and {len(gaining) - MOST_NAMED} more" if len(gaining) > MOST_NAMED else ""
    shown = (arm for arm in (baseline, treatment, control) if arm)
    collapsed = tuple(clause for arm in dict.fromkeys(shown) for clause in collapses(arm, possible))
    sentences = [
        cut,
        f"{treatment} - {baseline} is {points(gain)}: {reason}.",
        differences_sentence(differences, treatment, baseline),
        seeds_sentence(by_seed),
        f"Collapsed: {'; '.join(collapsed)}." if collapsed else "",
        f"A gain is shown in part: {named}{more}." if gaining else "",
        credit_sentence(bool(claim), treatment, control, over, control_problems, alpha),
        differences_sentence(differences, treatment, control) if over and control else "",
        *conduct_sentences(treatment, gain, conduct, alpha),
    ]
    return EvalVerdict(
        decision,
        " ".join(filter(None, sentences)),
        *names,
        claim=claim,
        estimand=estimand(gain, sampling),
        gain=gain,
        worst=bounds[0],
        best=bounds[1],
        num_lost=num_lost,
        over_control=over,
        hacked=conduct["hacked"][0],
        hacked_loose=conduct["hacked_loose"][0],
        protocol=conduct["protocol"][0],
        gain_by_seed=by_seed,
        secondary={name: p for name, (difference, p) in conduct.items() if difference},
        subsets=tuple(subsets),
        differences=differences,
        collapsed=collapsed,
        cut=cut,
    )


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
    shown = [f"{d.setting} ({other} {d.values[other]}, {treatment} {d.values[treatment]})" for d in confounds]
    return (
        f"{treatment} and {other} differ in more than their channels: {', '.join(shown)}. "
        "The difference is that of all of these together."
    )


def cut_sentence(possible: Arms) -> str:
    """Return, in a sentence, that limits ended many rollouts before they passed, with the settings to raise.

    Empty where fewer than `LARGE_CUT` of them were cut, and some arm passed something.
    """
    played = [item for rows in possible.values() for item in rows if not failed(item)]
    none_passed = bool(played) and not any(item["passed"] for item in played)
    by = Counter(item.get("terminated_by") for item in played if not item["passed"])
    cut = {limit: by[limit] for limit in LIMITS if by[limit]}
    if sum(cut.values()) < LARGE_CUT * max(len(played), 1):
        return "No arm passed any task." if none_passed else ""
    counted = " or ".join(f"{limit} ({num})" for limit, num in cut.items()) if len(cut) > 1 else next(iter(cut))
    settings = " and ".join(LIMITS[limit] for limit in cut)
    told = f"{sum(cut.values())} of {len(played)} rollouts were cut by {counted} before they passed: raise {settings}."
    return f"No arm passed any task, and {told}" if none_passed else told


def collapses(arm: str, possible: Arms) -> list[str]:
    """Return the trainings of an arm that collapsed, as clauses.

    Collapsed: less than half of the median pass rate of the arm's other trainings, and more than three standard errors
    of a rate over the tasks below it.
    """
    by_seed: dict[int, list[Item]] = defaultdict(list)
    for item in possible.get(arm, ()):
        by_seed[item["train_seed"]].append(item)
    rates = {seed: rate for seed, rows in by_seed.items() if (rate := task_mean(rows, "passed")) is not None}
    found = []
    for seed, rate in rates.items():
        others = [other for key, other in rates.items() if key != seed]
        usual = median(others) if others else 0.0
        error = (usual * (1 - usual) / len({item["task_id"] for item in by_seed[seed]})) ** 0.5
        if rate < usual / 2 and usual - rate > 3 * error:
            found.append(f"{arm} with seed {seed} passes {100 * rate:.0f} %, its other trainings {100 * usual:.0f} %")
    return found


def judge(
    gain: PairedDifference, worst: PairedDifference, best: PairedDifference, num_lost: int, alpha: float = ALPHA
) -> tuple[str, str, str]:
    """Return the decision, the claim and its clause; both must hold with lost outcomes imputed at their worst."""
    surviving = replace(gain, low=min(gain.low, worst.low), high=max(gain.high, best.high))
    decision, claim, reason = decision_of(surviving, alpha)
    if decision == UNDERPOWERED and (alone := decision_of(gain, alpha))[0] != UNDERPOWERED:
        reason = f"{alone[2]}, but not if the {num_lost} lost rollouts had ended otherwise; --resume retries them"
    if decision == VALIDATED and gain.num_seeds < MIN_SEEDS:
        return PARTIAL, claim, f"{reason} of these checkpoints"
    if decision == INVALIDATED and gain.num_seeds < MIN_SEEDS:
        # The spread of trainings is not seen: with one or two, 8 to 30 % of true gains of 2 to 5 points looked so.
        fewest = f"the fewest training seeds that can show it of other trainings are {MIN_SEEDS}"
        return UNDERPOWERED, "", f"{reason}, of these checkpoints alone; {fewest}"
    return decision, claim, reason


def decision_of(gain: PairedDifference, alpha: float = ALPHA) -> tuple[str, str, str]:
    """Return what a difference alone shows, regardless of lost outcomes and of the number of checkpoints."""
    if gain.low > 0:
        if gain.low >= MIN_GAIN:
            return VALIDATED, f"a gain of {BAR}", f"a gain of at least {BAR}"
        smaller = "smaller than" if gain.high < MIN_GAIN else "not shown to reach"
        return VALIDATED, "a gain", f"a gain, {smaller} {BAR}"
    if gain.high < 0:
        return INVALIDATED, "", "significantly worse"
    if gain.high < MIN_GAIN:
        return INVALIDATED, "", f"no gain of {BAR}: the interval ends below, so they would have been seen"
    return UNDERPOWERED, "", f"neither a gain nor the absence of a gain of {BAR} is shown; {detectable(gain, alpha)}"


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


def secondary(
    arms: Arms, possible: Arms, names: tuple[str, str, str | None], sampling: SamplingUnit, alpha: float = ALPHA
) -> tuple[Conduct, list[Subset]]:
    """Test all questions but the two in fixed order (conduct, families, other arms) under one Holm correction.

    `alpha`: the level of this look, which these questions share.
    """
    baseline, treatment, _ = names
    ours, theirs = hacking(arms[treatment]), hacking(arms[baseline])
    differences = {
        "hacked": compare(ours, theirs, "hacked", sampling=sampling, alpha=alpha),
        "hacked_loose": compare(ours, theirs, "hacked_loose", sampling=sampling, alpha=alpha),
        "protocol": compare(possible[treatment], possible[baseline], "protocol_ok", sampling=sampling, alpha=alpha),
    }
    subsets = by_family(possible[treatment], possible[baseline])
    for arm in sorted(arms.keys() - {START, *names}):
        difference = None
        if not find_problems(possible, arm, baseline):
            difference = compare(possible[arm], possible[baseline], sampling=sampling, alpha=alpha)
        if difference:
            subsets.append(Subset("arm", arm, difference.estimate, difference.num_tasks, difference.p_value))
    asked = {name: difference.p_value for name, difference in differences.items() if difference}
    adjusted = holm([*asked.values(), *(subset.p_value for subset in subsets)])
    p_holm = dict(zip(asked, adjusted, strict=False))
    conduct = {name: (difference, p_holm.get(name, 1.0)) for name, difference in differences.items()}
    return conduct, [replace(s, p_holm=p, alpha=alpha) for s, p in zip(subsets, adjusted[len(asked) :], strict=True)]


def points(difference: PairedDifference) -> str:
    """Return a difference in percentage points with its interval and p-value."""
    p = "p < 0.001" if difference.p_value < 0.001 else f"p = {difference.p_value:.3f}"
    return f"{100 * difference.estimate:+.1f} points [{100 * difference.low:+.1f}, {100 * difference.high:+.1f}], {p}"


def detectable(difference: PairedDifference, alpha: float = ALPHA) -> str:
    """Return the difference that an experiment with this spread could have detected, or why it could detect none."""
    size = f"{counted(difference.num_tasks, 'task')} in {difference.units}"
    if difference.mde is None:
        return (
            f"{difference.units} are too few to show anything, whatever is observed: the test can reject from "
            f"{fewest_units(alpha)} on"
        )
    if difference.mde >= 1:
        return f"{size} cannot show any difference with 80 % power"
    return f"{size} show {100 * difference.mde:.1f} points with 80 % power"


def seeds_sentence(by_seed: Mapping[str, float]) -> str:
    """Return the range of gains over training seeds, in a sentence."""
    if len(by_seed) == 1:
        return "One training seed was run: this is about these checkpoints, not about another training."
    low, high = 100 * min(by_seed.values()), 100 * max(by_seed.values())
    spread = f"Over {len(by_seed)} training seeds the difference runs from {low:+.1f} to {high:+.1f} points"
    if len(by_seed) < MIN_SEEDS:
        return (
            f"{spread}; fewer than {MIN_SEEDS} show nothing of another training, and {RECOMMENDED_SEEDS} are "
            "recommended."
        )
    if len(by_seed) < RECOMMENDED_SEEDS:
        return (
            f"{spread}; the interval covers other trainings where their gains are normally distributed, which "
            f"{len(by_seed)} seeds cannot show: {RECOMMENDED_SEEDS} are recommended."
        )
    return f"{spread}; the interval covers other trainings too."


def credit_sentence(
    gained: bool,
    treatment: str,
    control: str | None,
    over: PairedDifference | None,
    problems: Sequence[str],
    alpha: float = ALPHA,
) -> str:
    """Return, in a sentence, whether the gain is credited to the preference or to the control's imitation alone."""
    if over is None:
        gain = "the gain" if gained else "a gain"
        return (
            f"There is no control to compare with that only imitates the chosen actions ({'; '.join(problems)}), "
            f"so {gain} cannot be attributed."
        )
    undecided = over.low <= 0 and over.high >= MIN_GAIN
    more = f"; {detectable(over, alpha)}" if undecided else ""
    return f"{treatment} - {control} is {points(over)}: {credit(gained, str(control), over)}{more}."


def credit(gained: bool, control: str, over: PairedDifference) -> str:
    """Return how the treatment stands to the control, and what that says of imitation: the end of a sentence."""
    if over.high < 0:
        return f"below {control}, so imitation does better without the preference"
    if over.low > 0 and gained:
        return f"above {control}, so imitation alone does not explain the gain"
    if over.low > 0:
        return f"above {control}, which is a lead and no test, since no gain is shown first"
    if over.high < MIN_GAIN:
        suffices = "so imitation suffices" if gained else "and no gain is shown that imitation could explain"
        return f"less than {BAR} above {control}, {suffices}"
    return f"not separated, so {'the' if gained else 'a'} gain is credited neither to the preference nor to imitation"


def conduct_sentences(treatment: str, gain: PairedDifference, found: Conduct, alpha: float = ALPHA) -> list[str]:
    """Return, in sentences, what changed significantly besides the pass rate, after Holm's correction."""
    shown = {name: d for name, (d, p) in found.items() if d and d.significant and p < alpha}
    sentences = []
    for name, rate in (("hacked", "hacked rate"), ("hacked_loose", "rate of visible without hidden passes")):
        if name in shown and shown[name].estimate > 0:
            rose = "rose with the pass rate" if gain.estimate > 0 else "rose"
            sentences.append(f"The {rate} of {treatment} {rose}, by {points(shown[name])}: part of it may be the hack.")
    if "protocol" in shown and shown["protocol"].estimate < 0:
        sentences.append(f"{treatment} keeps the protocol less often, by {points(shown['protocol'])}.")
    return sentences
