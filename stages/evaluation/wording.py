"""The words of a verdict, one sentence a question, and what they may mean."""

from collections.abc import Mapping, Sequence

from stages.evaluation.comparison import Subset
from stages.evaluation.paired import MIN_SEEDS
from stages.evaluation.stats import ALPHA, PairedDifference

MIN_GAIN = 0.02
BAR = f"{100 * MIN_GAIN:g} points"
MOST_NAMED = 3


def points(difference: PairedDifference) -> str:
    """A difference in percentage points with its interval and p-value."""
    p = "p < 0.001" if difference.p_value < 0.001 else f"p = {difference.p_value:.3f}"
    return f"{100 * difference.estimate:+.1f} points [{100 * difference.low:+.1f}, {100 * difference.high:+.1f}], {p}"


def detectable(difference: PairedDifference) -> str:
    """What an experiment with this spread could have seen."""
    size = f"{difference.num_tasks} tasks in {difference.num_families} families"
    if difference.mde >= 1:
        return f"{size} cannot show any difference with 80 % power"
    return f"{size} show {100 * difference.mde:.1f} points with 80 % power"


def estimand(gain: PairedDifference, fixed: bool) -> str:
    """What the interval speaks of, in a sentence."""
    which = "these tasks' families, other tasks of them" if fixed else "other families of tasks like these"
    models = "other trainings like these" if gain.num_seeds >= MIN_SEEDS else "these checkpoints"
    return f"The interval speaks of {which}, and of {models}."


def seeds(by_seed: Mapping[str, float]) -> str:
    """The gain of each training seed, in a sentence."""
    if len(by_seed) == 1:
        return "One training seed was run: this speaks of these checkpoints, not of another training."
    low, high = 100 * min(by_seed.values()), 100 * max(by_seed.values())
    spread = f"Over {len(by_seed)} training seeds the difference runs from {low:+.1f} to {high:+.1f} points"
    if len(by_seed) < MIN_SEEDS:
        return f"{spread}; fewer than {MIN_SEEDS} cannot speak of another training."
    return f"{spread}; the interval covers other seeds too."


def gaining(subsets: Sequence[Subset]) -> str:
    """The parts that show a gain, in a sentence; empty without any."""
    found = sorted((s for s in subsets if s.gains), key=lambda subset: subset.p_holm)
    named = ", ".join(
        f"{s.kind} {s.name} ({100 * s.estimate:+.1f} points, p = {s.p_holm:.2g} after Holm)" for s in found[:MOST_NAMED]
    )
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return f"A gain is shown in part: {named}{more}." if found else ""


def credit(
    gained: bool, treatment: str, control: str | None, over: PairedDifference | None, problems: Sequence[str]
) -> str:
    """Whether the preference is credited, or the imitation of the chosen actions that the control does alone."""
    gain = "the gain" if gained else "a gain"
    if over is None:
        return (
            f"There is no control to compare with that only imitates the chosen actions ({'; '.join(problems)}), "
            f"so {gain} cannot be attributed."
        )
    difference = f"{treatment} - {control} is {points(over)}"
    if over.high < 0:
        return f"{difference}: below {control}, so imitation does better without the preference."
    if over.low > 0 and gained:
        return f"{difference}: above {control}, so imitation alone does not explain the gain."
    if over.low > 0:
        return f"{difference}: above {control}, which is a lead and no test, since no gain is shown first."
    if over.high < MIN_GAIN:
        return f"{difference}: less than {BAR} above {control}, so imitation suffices."
    return (
        f"{difference}: not separated, so {gain} is credited neither to the preference nor to imitation; "
        f"{detectable(over)}."
    )


def looks(taken: int, planned: int, tasks: int, num_tasks: int, level: float) -> str:
    """How many of the planned looks were needed, in a sentence."""
    ended = f"Decided at look {taken} of {planned}" if taken < planned else f"All {planned} planned looks were taken"
    return (
        f"{ended}, after {tasks} of {num_tasks} tasks; differences are at this look's level of {level:.2g}, "
        "which holds 5 % over all looks."
    )


def conduct(
    treatment: str, gain: PairedDifference, found: Mapping[str, tuple[PairedDifference | None, float]]
) -> list[str]:
    """What changed significantly beside the pass rate, after Holm's correction."""
    shown = {name: d for name, (d, p) in found.items() if d and d.significant and p < ALPHA}
    sentences = []
    for name, rate in (("hacked", "hacked rate"), ("hacked_loose", "rate of visible without hidden passes")):
        if name in shown and shown[name].estimate > 0:
            rose = "rose with the pass rate" if gain.estimate > 0 else "rose"
            sentences.append(f"The {rate} of {treatment} {rose}, by {points(shown[name])}: part of it may be the hack.")
    if "protocol" in shown and shown["protocol"].estimate < 0:
        sentences.append(f"{treatment} keeps the protocol less often, by {points(shown['protocol'])}.")
    return sentences
