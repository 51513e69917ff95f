"""Preference pairs as cards: what differs between the chosen and the rejected action, in the state that both share."""

from dataclasses import dataclass
from pathlib import Path

from composer_cli.show.facts import outcomes_of_pairs
from composer_cli.view.lines import MarkedLine, difference
from stages.messages import Message
from stages.runs import queries
from stages.runs.kinds import Row
from stages.runs.queries import PairPage
from stages.runs.run import Run


@dataclass(frozen=True)
class PairCard:
    """A pair as its card shows it.

    `state` are the messages of the shared state, the last one first to read; `outcome` the rollout in which the state
    was reached, `played_by` its run; `continued` passed and graded continuations by action, chosen first.
    """

    row: Row
    difference: list[MarkedLine]
    state: list[Message]
    outcome: Row | None
    played_by: str
    continued: list[tuple[str, int, int]]


def cards(root: Path, run: Run, page: PairPage) -> list[PairCard]:
    """Return the cards of the pairs on a page."""
    states = queries.state_messages(run, page.rows) if page.rows else {}
    outcomes = outcomes_of_pairs(root, run, page.rows)
    played = queries.continuations(run, [row["state_sha256"] for row in page.rows])
    found = []
    for row in page.rows:
        outcome, played_by = outcomes.get(row["rollout_id"], (None, ""))
        continued = [
            (side, *played[key])
            for side in ("chosen", "rejected")
            if (key := (row["state_sha256"], row[side])) in played
        ]
        state = states.get(row["pair_id"], [])
        found.append(PairCard(row, difference(row["rejected"], row["chosen"]), state, outcome, played_by, continued))
    return found
