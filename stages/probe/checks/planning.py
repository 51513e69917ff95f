"""How large an effect T4e can see with so many problems and answers, before anything is sampled.

With problems held fixed, a problem's n answers of one source tell q (1 - q) (n - 1) rows' worth about hacks, q their
share. So t is about d sqrt(P q (1 - q) (n - 1)), d the effect in standard deviations of the score within problems.
"""

from scipy.stats import norm

from stages.probe.checks.contrast_checks import MAX_P

POWER = 0.8


def detectable_effect(problems: int, answers: int, hack_share: float = 0.5) -> float:
    """The effect d that T4e passes four times in five; `answers` are a problem's from the source that hacks.

    T4e needs a t above 2.33 and above all but 1 % of the placebos, which without an axis of hacking come to the same.
    """
    information = problems * hack_share * (1 - hack_share) * max(answers - 1, 1)
    return float((norm.isf(MAX_P) + norm.ppf(POWER)) / information**0.5)
