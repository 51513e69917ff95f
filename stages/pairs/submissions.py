"""What rollouts of one task submitted, compared by the verdict: a patch that was accepted over one that was not.

The context is the task alone, as the way to the answer differs from rollout to rollout.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from stages.pairs.voting import Preference
from stages.runs.records import Row


@dataclass(frozen=True)
class SubmissionVerdict:
    """A preference between two submissions, the rollout of the rejected one, and the number of other submissions."""

    preference: Preference
    rollout: Row
    num_others: int


def compare(
    rollouts: Sequence[Row], submitted: Mapping[str, str | None], student: str | None
) -> tuple[list[SubmissionVerdict], Counter[str]]:
    """Preferences between what was submitted for one task, and reasons for none.

    Every distinct text stands for itself once; a text that was judged both ways is compared with none.
    """
    dropped: Counter[str] = Counter()
    judged: dict[str, list[Row]] = {}
    for row in rollouts:
        text = submitted.get(row["rollout_id"]) or ""
        if not text.strip():
            dropped["no_submission"] += row["gt_pass"] is not None
        elif row["reward"] is None:
            dropped["submission_not_judged"] += 1
        else:
            judged.setdefault(text, []).append(row)
    settled = {text: rows for text, rows in judged.items() if len({row["reward"] for row in rows}) == 1}
    dropped["submission_judged_both_ways"] = len(judged) - len(settled)
    verdicts = [
        _verdict(better, worse, settled)
        for better, worse in product(settled, repeat=2)
        if settled[better][0]["reward"] > settled[worse][0]["reward"]
        and (student is None or any(row["model"] == student for row in (*settled[better], *settled[worse])))
    ]
    dropped["submissions_equal"] = bool(settled) and not verdicts
    return verdicts, +dropped


def _verdict(better: str, worse: str, settled: Mapping[str, list[Row]]) -> SubmissionVerdict:
    name = settled[worse][0]["model"] or "unknown"
    sides = Preference("better_submission", better, worse, name, len(settled[better]), len(settled[worse]))
    return SubmissionVerdict(sides, settled[worse][0], len(settled) - 1)
