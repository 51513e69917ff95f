"""What an evaluation shows and what it does not show, as two lists of sentences made from its `verdict.json`.

`composer show`, `composer report` and `composer view` put them first: a decision such as VALIDATED is about treatment
and baseline alone, and readers conclude from it that the preference helped, also where imitation scored higher. Made
from the numbers of the document rather than when it is written, so that evaluations of every age have them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from stages.evaluation.differences import ArmDifference
from stages.evaluation.paired import MIN_SEEDS
from stages.evaluation.stats import ALPHA
from stages.evaluation.verdict import BAR, INVALID_RUN, INVALIDATED, MIN_GAIN
from stages.runs.run import Run

MOST_NAMED = 3
"""Families and arms with a gain that are named."""
Document = Mapping[str, Any]


@dataclass(frozen=True)
class Conclusions:
    """Sentences about what was shown, and about what was not; each is complete without the others."""

    shown: list[str]
    not_shown: list[str]


def read_verdict(run: Run) -> dict[str, Any]:
    """Return the verdict of an evaluation as its file holds it; empty for any other run."""
    verdict: dict[str, Any] = orjson.loads(run.read_file("verdict.json") or b"{}")
    return verdict if "decision" in verdict else {}


def conclusions(verdict: Document) -> Conclusions:
    """Return what the numbers of a verdict show, and what a reader may not conclude from them."""
    gain = verdict.get("gain")
    if verdict["decision"] == INVALID_RUN or not gain:
        return Conclusions([], [f"Anything about the arms. {verdict['why']}"])
    found = Conclusions([], [f"What the arms can do. {verdict['cut']}"] if verdict["cut"] else [])
    _gain(verdict, gain, found)
    _control(verdict, found)
    _conduct(verdict, found)
    treatment, baseline = verdict["treatment"], verdict["baseline"]
    confounds = [
        difference.setting
        for difference in (ArmDifference(**one) for one in verdict.get("differences") or ())
        if not difference.channel and difference.between((treatment, baseline))
    ]
    if confounds:
        found.not_shown.append(
            f"That the channels make the difference: {treatment} and {baseline} also differ in {_listed(confounds)}."
        )
    if gain["num_seeds"] < MIN_SEEDS:
        seeds = "1 seed was" if gain["num_seeds"] == 1 else f"{gain['num_seeds']} seeds were"
        found.not_shown.append(f"Anything about other trainings: {seeds} trained, and {MIN_SEEDS} are the fewest.")
    return found


def _gain(verdict: Document, gain: Document, found: Conclusions) -> None:
    """Add the comparison of treatment and baseline, which the decision is about."""
    treatment, baseline = verdict["treatment"], verdict["baseline"]
    points = f"{interval(gain)} points"
    subsets = [s for s in verdict.get("subsets") or () if s["estimate"] > 0 and s["p_holm"] < s.get("alpha", ALPHA)]
    if verdict.get("claim"):
        least = f" by at least {BAR}" if gain["low"] >= MIN_GAIN else ""
        found.shown.append(f"{treatment} passes more tasks than {baseline}{least}: {points}.")
        if not least:
            found.not_shown.append(f"That the gain of {treatment} over {baseline} reaches {BAR}.")
    elif gain["high"] < 0 and verdict["decision"] == INVALIDATED:
        found.shown.append(f"{treatment} passes fewer tasks than {baseline}: {points}.")
    elif verdict["decision"] == INVALIDATED:
        found.shown.append(f"{treatment} gains less than {BAR} over {baseline}: {points}.")
    else:
        mde = gain.get("mde")
        size = f"; differences from {100 * mde:.1f} points on would show" if mde is not None and mde < 1 else ""
        found.not_shown.append(f"Whether {treatment} passes more tasks than {baseline}: {points} is no decision{size}.")
    if subsets:
        subsets.sort(key=lambda subset: subset["p_holm"])
        named = [f"{s['kind']} {s['name']} ({_points(s['estimate'])})" for s in subsets[:MOST_NAMED]]
        more = f" and {len(subsets) - MOST_NAMED} more" if len(subsets) > MOST_NAMED else ""
        found.shown.append(f"A gain over {baseline} in part, in points: {', '.join(named)}{more}.")


def _control(verdict: Document, found: Conclusions) -> None:
    """Add whether the gain is the preference's: the comparison with the arm that imitates the chosen actions alone."""
    treatment, control, over = verdict["treatment"], verdict.get("control"), verdict.get("over_control")
    if not over:
        found.not_shown.append(
            f"What a gain of {treatment} comes from: no arm that only imitates the chosen actions was compared."
        )
        return
    rates = {arm["arm"]: arm["pass_rate"] for arm in verdict["arms"]}
    scored = f"{control} passes {_percent(rates.get(control))}, {treatment} {_percent(rates.get(treatment))}"
    points = f"{interval(over)} points"
    if over["low"] > 0 and verdict.get("claim"):
        found.shown.append(f"{treatment} passes more tasks than {control}, which only imitates: {points}.")
    elif over["high"] < 0:
        found.shown.append(f"Imitation alone does better: {scored} ({treatment} \u2212 {control} {points}).")
        found.not_shown.append("That the pairs' preference helps.")
    else:
        higher = "imitation alone scored higher" if over["estimate"] < 0 else "imitation alone is not excluded"
        found.not_shown.append(
            f"That the pairs' preference helps: {higher}. {scored} ({treatment} \u2212 {control} {points})."
        )


def _conduct(verdict: Document, found: Conclusions) -> None:
    """Add what changed in conduct after Holm's correction: hacks, and the protocol."""
    treatment, baseline = verdict["treatment"], verdict["baseline"]
    p_values = verdict.get("secondary") or {}
    for key, sign, words in (
        ("hacked", 1, "hacks more often"),
        ("hacked_loose", 1, "passes visible tests without hidden ones more often"),
        ("protocol", -1, "keeps the protocol less often"),
    ):
        difference = verdict.get(key)
        if difference and sign * difference["estimate"] > 0 and p_values.get(key, 1.0) < ALPHA:
            found.shown.append(f"{treatment} {words} than {baseline}: {interval(difference)} points.")


def interval(difference: Document) -> str:
    """Return a difference of shares in points with its interval: "+19.4 [+0.7, +38.8]"."""
    return f"{_points(difference['estimate'])} [{_points(difference['low'])}, {_points(difference['high'])}]"


def _points(share: float) -> str:
    return f"{100 * share:+.1f}".replace("-", "\u2212")


def _percent(rate: float | None) -> str:
    return "\u2013" if rate is None else f"{100 * rate:.1f} %"


def _listed(names: Sequence[str]) -> str:
    """Return names as a list in words, at most MOST_NAMED of them."""
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
