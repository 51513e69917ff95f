"""Preference pairs of a run: pages of those that fit, the conversations that they continue, and continuations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import orjson

from composer_stages.messages import Message
from composer_stages.runs.kinds import CONTINUATION, PAIR, STATE, Row
from composer_stages.runs.queries.views import SQL, open_views, rows_of
from composer_stages.runs.run import Run


@dataclass(frozen=True)
class PairFilter:
    """Which pairs to list: every field that is not empty narrows the choice.

    teacher: who did what was chosen or what was rejected, the student too. action: the kind of either.
    """

    text: str = ""
    rule: str = ""
    teacher: str = ""
    family: str = ""
    action: str = ""


@dataclass(frozen=True)
class PairPage:
    """The number of matching pairs, a page of rows from `offset` on, and the values to filter by, with their counts.

    A row is a `pair` row with `chosen_action` and `rejected_action`, the kinds of its actions.
    """

    total: int
    offset: int
    rows: list[Row]
    values: dict[str, list[tuple[str, int]]]


def pairs(run: Run, filters: PairFilter = PairFilter(), offset: int = 0, size: int = 20) -> PairPage | None:
    """Return one page of the matching pairs of a run, in their order; None for a run without pairs."""
    if not run.holds(PAIR):
        return None
    with open_views(run) as (connection, _, _):
        kinds = {f"{name}_action": SQL["expressions"]["action"].format(name) for name in ("chosen", "rejected")}
        connection.execute(SQL["pairs"]["listed"].format(**kinds))
        values = {name: value for name, value in vars(filters).items() if name != "text"}
        connection.execute(SQL["pairs"]["fitting"], values)
        if filters.text:
            connection.execute(SQL["pairs"]["without_text"], [filters.text.lower()])
        ((total,),) = connection.execute("SELECT count(*) FROM fitting").fetchall()
        rows = rows_of(connection, SQL["pairs"]["page"], {"size": size, "offset": offset})
        facets = {
            name: connection.execute(SQL["pairs"]["counted"].format(facet=facet)).fetchall()
            for name, facet in SQL["pairs"]["facets"].items()
        }
    return PairPage(total, offset, rows, facets)


def state_messages(run: Run, pairs: Sequence[Row]) -> dict[str, list[Message]]:
    """Return the messages of the states of these pairs, by `pair_id`; without those that are not known."""
    with open_views(run) as (connection, views, _):
        if STATE.name not in views:
            return {}
        before = dict(connection.execute("SELECT state_id, before_id FROM state").fetchall())
        chains = {pair["pair_id"]: _chain(pair["state_id"], before) for pair in pairs}
        needed = list({name for chain in chains.values() for name in chain})
        rows = {
            name: (index, text) for name, index, text in connection.execute(SQL["pairs"]["states"], [needed]).fetchall()
        }
    conversations = {}
    for pair_id, chain in chains.items():
        messages = list[Message]()
        for name in chain:
            index, text = rows[name]
            messages = [*messages[:index], *orjson.loads(text)]
        conversations[pair_id] = messages
    return {pair_id: messages for pair_id, messages in conversations.items() if messages}


def _chain(state: str | None, before: Mapping[str, str | None]) -> list[str]:
    """Return a state and those that it extends, the first one first; empty where it is not in the table."""
    chain = list[str]()
    while state is not None and state in before and len(chain) <= len(before):
        chain.append(state)
        state = before[state]
    return chain[::-1]


def continuations(run: Run, states: Sequence[str]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return passed and graded continuations of the actions that were played in these states, by state and action."""
    with open_views(run) as (connection, views, _):
        if CONTINUATION.name not in views:
            return {}
        rows = connection.execute(SQL["pairs"]["continuations"], [list(states)]).fetchall()
    return {(state, action): (passed, graded) for state, action, passed, graded in rows}
