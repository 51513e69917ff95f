"""Preference pairs of a run: pages of those that fit, the conversations that they continue, and continuations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from composer_stages.messages import Message
from composer_stages.runs.kinds import CONTINUATION, PAIR, STATE, Row
from composer_stages.runs.queries.views import open_views, rows_of
from composer_stages.runs.run import Run

ACTION = (
    "coalesce(nullif(regexp_extract({0}, "
    # of a block or a call: its first word, past `cd FOLDER &&`
    "'(?:```[a-z]*\\s+|<function=|\"name\":\\s*\")(?:cd\\s+\\S+\\s*&&\\s*)?([\\w./-]+)', 1), ''), 'text')"
)
"""The kind of an action as SQL: the first word of its command, the name of the tool that it calls, or `text`."""
FACETS = {
    "rule": "rule",
    "teacher": "unnest(list_distinct(list_append(coalesce(chosen_by, []), rejected_by)))",
    "family": "family",
    "action": "unnest(list_distinct([chosen_action, rejected_action]))",
}
"""The values by which pairs are filtered, as SQL over `listed`."""


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
        connection.execute(
            "CREATE TEMP TABLE listed AS SELECT pair_id, rule, family, chosen_by, rejected_by, file_row, "
            f"{ACTION.format('chosen')} AS chosen_action, {ACTION.format('rejected')} AS rejected_action FROM pair"
        )
        where, values = ["true"], list[Any]()
        for name, value in (("rule", filters.rule), ("family", filters.family)):
            where += [f"{name} = ?"] if value else []
            values += [value] if value else []
        if filters.teacher:
            where.append("(rejected_by = ? OR list_contains(chosen_by, ?))")
            values += [filters.teacher] * 2
        if filters.action:
            where.append("(chosen_action = ? OR rejected_action = ?)")
            values += [filters.action] * 2
        if filters.text:
            where.append(
                "file_row IN (SELECT file_row FROM pair WHERE contains(lower(concat_ws(' ', pair_id, rollout_id, "
                "task_id, chosen, rejected)), ?))"
            )
            values.append(filters.text.lower())
        connection.execute(f"CREATE TEMP TABLE fitting AS FROM listed WHERE {' AND '.join(where)}", values)
        ((total,),) = connection.execute("SELECT count(*) FROM fitting").fetchall()
        on_page = f"SELECT * FROM fitting ORDER BY file_row LIMIT {int(size)} OFFSET {int(offset)}"
        rows = rows_of(
            connection,
            f"SELECT pair.*, chosen_action, rejected_action FROM pair JOIN ({on_page}) AS here USING (file_row) "
            "ORDER BY file_row",
            [],
        )
        facets = {
            name: connection.execute(
                f"SELECT value, count(*) FROM (SELECT {sql} AS value FROM listed) WHERE value IS NOT NULL "
                "GROUP BY value ORDER BY count(*) DESC, value LIMIT 200"
            ).fetchall()
            for name, sql in FACETS.items()
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
        question = "SELECT state_id, kept_messages, new_messages_json FROM state WHERE state_id IN (SELECT unnest(?))"
        rows = {name: (index, text) for name, index, text in connection.execute(question, [needed]).fetchall()}
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
        question = (
            "SELECT state_sha256, action, count(*) FILTER (passed), count(passed) FROM continuation "
            "WHERE state_sha256 IN (SELECT unnest(?)) GROUP BY ALL"
        )
        rows = connection.execute(question, [list(states)]).fetchall()
    return {(state, action): (passed, graded) for state, action, passed, graded in rows}
