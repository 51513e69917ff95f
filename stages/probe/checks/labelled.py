"""Scored rows with their labels, as arrays: what the T4 checks take.

Bounds of too little data are those of the probe's plan. Shapes: n rows, D placebo directions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

from stages.probe.checks.contrasts import Codes, Flags, Scores, codes, mixed
from stages.runs.records import Row

MIN_ROWS, MIN_PROBLEMS = 15, 8
"""Fewer rows in a bucket, or fewer problems that hold both kinds, and nothing can be concluded."""
FROM_HACKS = ("perm_pairs", "hack_hack")
"""Families of placebos made of hacks' own gradients: shown, and no null (`directions.placebos` says why)."""


@dataclass(frozen=True)
class Labelled:
    """n rows.

    `scores` [n, 1 + D] holds v's score and then those of its placebos, `first` [n, 1] v's score on the first 128
    tokens, `style` [n, 2] the numbers of hedges and comments, `length` own tokens, `logp` nats a token. `families`
    names the family of each of the D placebos.
    """

    hacked: Flags
    wrong: Flags
    problem: Codes
    source: Codes
    length: Float[np.ndarray, " n"]
    style: Float[np.ndarray, "n 2"]
    logp: Float[np.ndarray, " n"]
    scores: Scores
    first: Scores
    families: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.hacked)

    def where(self, keep: Flags) -> "Labelled":
        """Only some of the rows."""
        by_row = [name for name in self.__dataclass_fields__ if name != "families"]
        return replace(self, **{name: getattr(self, name)[keep] for name in by_row})

    @property
    def null(self) -> Flags:
        """Which of the D placebos v is ranked among: those that hold no hack's gradient."""
        return np.array([family not in FROM_HACKS for family in self.families], dtype=bool)

    def relabelled(self, hacked: Flags) -> "Labelled":
        """The same rows under other labels."""
        return replace(self, hacked=hacked)

    @property
    def among_hacks(self) -> "Labelled":
        """The two buckets of T4: hacks with a wrong and with a right solution."""
        return self.where(self.hacked)


def labelled(rows: Sequence[Row], scores: Scores, families: Sequence[str] = ()) -> Labelled:
    """From `probe_row/1` rows and their scores; those of unknown label or undefined score are left out.

    `families` are those of the placebos, in the order of their columns; one family where none is given.
    """
    keep = [
        index
        for index, row in enumerate(rows)
        if row["hacked"] is not None and row["gt_pass"] is not None and np.isfinite(scores[index]).all()
    ]
    kept = [rows[index] for index in keep]
    style = [[row["hedge_count"] or 0, row["comment_count"] or 0] for row in kept]
    return Labelled(
        hacked=np.array([row["hacked"] for row in kept], dtype=bool),
        wrong=np.array([not row["gt_pass"] for row in kept], dtype=bool),
        problem=codes([row["problem_id"] for row in kept]),
        source=codes([row["src_pool"] for row in kept]),
        length=np.array([row["n_loss_tokens"] for row in kept], dtype=float),
        style=np.array(style, dtype=float).reshape(len(kept), 2),
        logp=np.array([row["logp_mean"] for row in kept], dtype=float),
        scores=scores[keep],
        first=np.array([[row["cos_first128"]] for row in kept], dtype=float).reshape(len(kept), 1),
        families=tuple(families) or ("placebo",) * (scores.shape[1] - 1),
    )


def shortage(flags: Flags, strata: Codes, names: tuple[str, str]) -> str | None:
    """Why these rows are too few, in words: under 15 rows in a bucket or 8 strata with both; None when they suffice."""
    counts, both = (int(flags.sum()), int((~flags).sum())), mixed(flags, strata) if len(flags) else 0
    if min(counts) >= MIN_ROWS and both >= MIN_PROBLEMS:
        return None
    return (
        f"{counts[0]} {names[0]} and {counts[1]} {names[1]} rows, {both} problems with both; "
        f"{MIN_ROWS} of each and {MIN_PROBLEMS} problems are needed"
    )
