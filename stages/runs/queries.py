"""Queries over the tables of runs with DuckDB: search in one run, a page at a time, and SQL over many runs.

Rollouts of a collection, an import or a training and items of an evaluation are searched the same way. A run in
progress has no tables yet, so its journal is searched instead.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from os.path import commonprefix
from pathlib import Path
from typing import Any, Literal

import duckdb
import orjson
import pyarrow as pa

from stages.messages import Message
from stages.runs import store
from stages.runs.index import Entry
from stages.runs.kinds import (
    CONTINUATION,
    EVAL_ITEM,
    ORIGIN,
    PAIR,
    ROLLOUT,
    STATE,
    STEP,
    TASK,
    TEACHER_ACTION,
    Kind,
    Row,
)
from stages.runs.run import Run
from stages.runs.sql import RUNS, SqlQuery
from stages.runs.tables import Scan
from stages.words import Sentence

UNREADABLE = (duckdb.Error, pa.ArrowException, orjson.JSONDecodeError, OSError)  # pyarrow's for a damaged footer
"""Errors of torn files: a run that has not ended has no digests by which they would be found."""
Reward = Literal["", "passed", "failed", "none"]
COLUMNS = (
    "task_id, family, sample_idx, num_steps, hacked, ground, hidden_pass, visible_pass, protocol_ok, terminated_by, "
    "error_type, error, cost_usd, file_row"
)
OUTCOME = (
    "concat_ws(', ', CASE WHEN {0} >= 1 THEN 'passed' WHEN {0} < 1 THEN 'failed' WHEN error_type IS NULL "
    "THEN 'not graded' END, CASE WHEN hacked THEN 'hacked' END, CASE WHEN error_type IS NOT NULL THEN 'error' END)"
)
"""The outcome of a rollout in words, as SQL over its reward: `passed`, `failed`, `failed, hacked`, `error`."""
ID_AND_REWARD = {EVAL_ITEM.name: ("item_id", "CAST(passed AS DOUBLE)"), ROLLOUT.name: ("rollout_id", "reward")}
"""The columns of an id and of a reward, in the order in which a run that holds both kinds is searched."""
LISTED = {
    EVAL_ITEM.name: "SELECT item_id AS id, arm, CAST(passed AS DOUBLE) AS reward, train_seed AS seed, "
    f"sampled_tokens AS tokens, {OUTCOME.format('CAST(passed AS DOUBLE)')} AS outcome, {COLUMNS} FROM eval_item",
    ROLLOUT.name: "SELECT rollout_id AS id, NULL AS arm, reward, seed, "
    f"completion_tokens AS tokens, {OUTCOME.format('reward')} AS outcome, {COLUMNS} FROM rollout",
}
SHORTEST = 4
"""Characters to which an id is shortened at most, as far as words at its beginning allow."""
LONGEST = 20
"""Digits of a seed up to which it is shortened; where two are alike for longer, all stay whole."""
PREVIEW = 400
"""Characters of a prompt that a list carries."""
REWARDS = {"passed": "reward >= 1.0", "failed": "reward < 1.0", "none": "reward IS NULL"}
ORDERS = {"": "file_row", "reward": "reward DESC NULLS LAST, file_row", "steps": "num_steps DESC, file_row"}


@dataclass(frozen=True)
class RolloutFilter:
    """Which rollouts to list: every field that is not empty narrows the choice.

    ids: those to choose from; None for all.
    """

    text: str = ""
    task: str = ""
    family: str = ""
    arm: str = ""
    reward: Reward = ""
    hacked: bool = False
    error: bool = False
    order: str = ""
    ids: tuple[str, ...] | None = None


@dataclass(frozen=True)
class RolloutPage:
    """The number of matching rollouts, and the rows from `offset` on, each with the beginning of its `prompt`.

    `short` of a row is its id without what all ids of the run share. `outcomes` are the numbers of all rollouts of the
    run by outcome, the most frequent first; `passes` those that passed, by ground, "" for an unknown one.
    """

    total: int
    offset: int
    rows: list[Row]
    outcomes: dict[str, int]
    passes: dict[str, int]


def page(run: Run, filters: RolloutFilter, offset: int = 0, size: int = 50) -> RolloutPage | None:
    """Return one page of the matching rollouts, in the order of the run or of the filter.

    None for a run that holds neither rollouts nor items, and has not finished any.
    """
    if not run.holds(ROLLOUT) and not run.holds(EVAL_ITEM) and run.manifest.status == "complete":
        return None
    with _views(run) as (connection, views, name):
        if name is None:
            return None
        where, values = _conditions(filters, name, views)
        listed = f"(SELECT * FROM ({LISTED[name]}) WHERE {where})"
        if filters.text:  # search once, for the count and for the page: the search is most of the work
            connection.execute(f"CREATE TEMP TABLE fitting AS FROM {listed}", values)
            listed, values = "fitting", []
        ((total,),) = connection.execute(f"SELECT count(*) FROM {listed}", values).fetchall()
        order = ORDERS.get(filters.order, ORDERS[""])
        rows = _rows(
            connection, f"SELECT * FROM {listed} ORDER BY {order} LIMIT {int(size)} OFFSET {int(offset)}", values
        )
        prompts = _prompts(connection, views, name, rows)
        short = _differing(connection, name) if rows else str
        counted = f"SELECT outcome, count(*) FROM ({LISTED[name]}) GROUP BY outcome ORDER BY count(*) DESC, outcome"
        outcomes = dict(connection.execute(counted).fetchall())
        counted = (
            f"SELECT coalesce(ground, ''), count(*) FROM ({LISTED[name]}) WHERE reward >= 1 GROUP BY ALL ORDER BY 1"
        )
        passes = dict(connection.execute(counted).fetchall())
    listed_rows = [{**row, "short": short(row["id"]), "prompt": prompts.get(row["id"])} for row in rows]
    return RolloutPage(total, offset, listed_rows, outcomes, passes)


@dataclass(frozen=True)
class TaskMatrix:
    """Tasks by arms: `rows` holds, by task and arm, the rollouts by seed and sample; `total` counts all tasks."""

    total: int
    offset: int
    arms: list[str | None]
    rows: dict[str, dict[str | None, list[Row]]]


def matrix(run: Run, offset: int = 0, size: int = 50) -> TaskMatrix:
    """Return the rollouts of some tasks of a run, task by task and arm by arm; without arms all are one column."""
    with _views(run) as (connection, _, name):
        if name is None:
            return TaskMatrix(0, offset, [], {})
        ((total,),) = connection.execute(f"SELECT count(DISTINCT task_id) FROM {name}").fetchall()
        some = f"SELECT DISTINCT task_id FROM {name} ORDER BY task_id LIMIT {int(size)} OFFSET {int(offset)}"
        question = f"SELECT id, task_id, arm, reward, outcome FROM ({LISTED[name]}) WHERE task_id IN ({some})"
        items = _rows(connection, f"{question} ORDER BY task_id, arm, seed, sample_idx, file_row", [])
    rows: dict[str, dict[str | None, list[Row]]] = {}
    for row in items:
        rows.setdefault(row["task_id"], {}).setdefault(row["arm"], []).append(row)
    return TaskMatrix(total, offset, sorted({row["arm"] for row in items}, key=str), rows)


def short_ids(run: Run, ids: Sequence[str]) -> list[str]:
    """Return these ids of rollouts or items without what all ids of the run share; `rollout_ids` finds them by that."""
    with _views(run) as (connection, _, name):
        return list(ids) if name is None else list(map(_differing(connection, name), ids))


def _differing(connection: duckdb.DuckDBPyConnection, name: str) -> Callable[[str], str]:
    """Return a function that leaves out of an id the words at its beginning and end that all ids of the run share.

    Of seeds that differ, as in a training, it keeps so many digits that no two ids are shortened to the same text.
    """
    key, _ = ID_AND_REWARD[name]
    ends = f"SELECT min({key}), max({key}), min(reverse({key})), max(reverse({key})), min(length({key})) FROM {name}"
    ((first, last, first_end, last_end, shortest),) = connection.execute(ends).fetchall()
    if first == last:
        return str
    end = _shared_words(first_end, last_end)[-1]
    starts = [start for start in _shared_words(first, last) if shortest - start - end >= SHORTEST]
    start = max(starts, default=0)
    if end:
        return lambda name: name[start : len(name) - end]
    # Of ids with the same beginning, those are most alike whose seeds are next to each other in alphabetical order.
    alike = f"list_sum([CAST(left(seed, n) = left(before, n) AS INT) FOR n IN range({SHORTEST}, {LONGEST} + 1)])"
    seeds = f"SELECT DISTINCT {key}, split_part({key}, '@', -1) AS seed FROM {name}"
    neighbours = (
        f"SELECT seed, lag(seed) OVER (PARTITION BY left({key}, -length(seed)) ORDER BY seed) AS before "
        f"FROM ({seeds}) WHERE regexp_full_match(seed, '[0-9]+')"
    )
    question = f"SELECT max({alike}) FROM ({neighbours}) WHERE left(seed, {SHORTEST}) = left(before, {SHORTEST})"
    ((shared,),) = connection.execute(question).fetchall()
    digits = SHORTEST + (shared or 0)

    def short(name: str) -> str:
        before, at, seed = name.rpartition("@")
        cut = at and digits <= LONGEST and seed.isascii() and seed.isdigit()
        return f"{before}{at}{seed[:digits] if cut else seed}"[start:]

    return short


def _shared_words(name: str, second: str) -> list[int]:
    """Return where words begin in the beginning that two texts share, which is shared by all texts between them."""
    alike = commonprefix([name, second])  # noqa: RUF071 - these are no paths
    return [0, *(match.end() for match in re.finditer(r"[\W_]+", alike))]


def _prompts(
    connection: duckdb.DuckDBPyConnection, views: set[str], name: str, rows: Sequence[Row]
) -> dict[str, str | None]:
    """Return the beginning of the prompt of each of these listed rows, as far as it is known, by their ids."""
    ids, places = [row["id"] for row in rows], [row["file_row"] for row in rows]
    if not rows:
        return {}
    if name == EVAL_ITEM.name:
        # The range of row numbers spares the groups of rows before and after it: conversations are long.
        question = (
            "SELECT item_id, transcript_json, steps_json FROM eval_item "
            "WHERE file_row BETWEEN ? AND ? AND item_id IN (SELECT unnest(?))"
        )
        states = connection.execute(question, [min(places), max(places), ids]).fetchall()
    elif STEP.name in views:
        question = (
            "SELECT rollout_id, new_messages_json, '[]' FROM step WHERE step = 0 AND rollout_id IN (SELECT unnest(?))"
        )
        states = connection.execute(question, [ids]).fetchall()
    else:
        return {}
    return {key: _prompt(*texts) for key, *texts in states}


def _prompt(messages_json: str | None, steps_json: str | None) -> str | None:
    """Return the beginning of the last message of a user before the first action; None without one.

    The messages before it may be worked examples, which all tasks share. steps_json: of an item, whose messages go on
    after its first action. Items of an earlier version have none: theirs begin with the first message of the model.
    """
    messages: list[Message] = orjson.loads(messages_json) if messages_json else []
    if steps_json is None:
        answers = (index for index, message in enumerate(messages) if message["role"] == "assistant")
        first = next(answers, len(messages))
    else:
        steps: list[Row] = orjson.loads(steps_json)
        first = steps[0]["message"] if steps else len(messages)
    questions = (message["content"][:PREVIEW] for message in reversed(messages[:first]) if message["role"] == "user")
    return next(questions, None)


def rollout(run: Run, rollout_id: str) -> tuple[Row | None, list[Row]]:
    """Return the full row of one rollout or item with its `outcome`, and its steps in order; items have none.

    That of an imported rollout has also its file, what the file adds to it, and the target of its task.
    """
    steps = list[Row]()
    with _views(run) as (connection, views, name):
        if name is None:
            return None, steps
        key, reward = ID_AND_REWARD[name]
        question = f"SELECT *, {OUTCOME.format(reward)} AS outcome FROM {name} WHERE {key} = ? LIMIT 1"
        step_rows = _rows(connection, question, [rollout_id])
        if step_rows and name == ROLLOUT.name and STEP.name in views:
            # Row numbers first, from the one narrow column: the wide ones (observations) are then read only there.
            question = "SELECT min(file_row), max(file_row) FROM step WHERE rollout_id = ?"
            ((first, last),) = connection.execute(question, [rollout_id]).fetchall()
            if first is not None:
                question = "SELECT * FROM step WHERE file_row BETWEEN ? AND ? AND rollout_id = ? ORDER BY step"
                steps = _rows(connection, question, [first, last, rollout_id])
        if step_rows and {ORIGIN.name, TASK.name} <= views:
            question = (
                "SELECT file, line, extra_json, json_extract_string(data_json, '$.target') AS target "
                "FROM origin LEFT JOIN task ON task_id = ? WHERE rollout_id = ? LIMIT 1"
            )
            step_rows = [
                step_rows[0] | more for more in _rows(connection, question, [step_rows[0]["task_id"], rollout_id])
            ] or step_rows
    return (step_rows[0] if step_rows else None), steps


def outcome(row: Row) -> str:
    """Return the outcome of a rollout or an item in words, as `OUTCOME` does: `passed`, `failed, hacked`, `error`."""
    reward = row["reward"] if "reward" in row else row["passed"]
    error = row["error_type"] is not None
    graded = "" if reward is None else "passed" if reward >= 1 else "failed"
    words = (graded or ("" if error else "not graded"), "hacked" if row["hacked"] else "", "error" if error else "")
    return ", ".join(filter(None, words))


def rollout_ids(run: Run, part: str = "") -> list[str]:
    """Return the ids of the rollouts or items with this text in their id or as their task, in the order of the run.

    Only one where the text is an id, or what `short_ids` makes of it.
    """
    with _views(run) as (connection, _, name):
        if name is None:
            return []
        key, _ = ID_AND_REWARD[name]
        fits = f"contains({key}, $1) OR task_id = $1 OR ends_with(task_id, '/' || $1)"
        question = f"SELECT {key} FROM {name} WHERE {fits} ORDER BY file_row"
        ids = [rollout_id for (rollout_id,) in connection.execute(question, [part]).fetchall()]
        if part in ids or len(ids) < 2:
            return [part] if part in ids else ids
        short = _differing(connection, name)
        return [rollout_id for rollout_id in ids if short(rollout_id) == part] or ids


@dataclass(frozen=True)
class RolloutPlace:
    """The place of a rollout among the `total` that fit a filter, from 1, and the ids of its neighbours there."""

    number: int
    total: int
    before: str | None
    after: str | None


def place(run: Run, filters: RolloutFilter, rollout_id: str) -> RolloutPlace | None:
    """Return the place of a rollout or item in the list that `page` returns; None where it does not fit the filter."""
    with _views(run) as (connection, views, name):
        if name is None:
            return None
        where, values = _conditions(filters, name, views)
        order = f"ORDER BY {ORDERS.get(filters.order, ORDERS[''])}"
        question = (
            f"SELECT number, total, before, after FROM (SELECT id, row_number() OVER ({order}) AS number, "
            f"count(*) OVER () AS total, lag(id) OVER ({order}) AS before, lead(id) OVER ({order}) AS after "
            f"FROM ({LISTED[name]}) WHERE {where}) WHERE id = ?"
        )
        row = connection.execute(question, [*values, rollout_id]).fetchone()
    return None if row is None else RolloutPlace(*row)


# Two arms of an evaluation, task by task.

Side = Literal["", "first", "second", "equal"]
SIDES = {"": "true", "first": "difference < 0", "second": "difference > 0", "equal": "difference = 0"}


@dataclass(frozen=True)
class TaskFilter:
    """Which tasks of two arms to list; `side`: those that the first or the second passed more often, or equal ones."""

    side: Side = ""
    family: str = ""
    text: str = ""


@dataclass(frozen=True)
class TaskPage:
    """Tasks of two arms, the largest differences first: the numbers by side, of those that fit, and a page of rows.

    A row has task_id, family, the beginning of its prompt, rollouts passed and scored of either arm, and `difference`:
    the pass rate of the second arm less that of the first, null where either has no outcome.
    """

    first_more: int
    second_more: int
    equal: int
    total: int
    offset: int
    rows: list[Row]


def tasks(
    run: Run,
    first: str,
    second: str,
    filters: TaskFilter = TaskFilter(),
    offset: int = 0,
    size: int = 50,
) -> TaskPage:
    """Return the tasks of an evaluation that two arms played, those first on which their pass rates differ most."""
    with _views(run) as (connection, views, _):
        if EVAL_ITEM.name not in views:
            return TaskPage(0, 0, 0, 0, 0, [])
        # count(passed) leaves out null: an item that could not be graded is neither passed nor failed.
        sides = (
            "SELECT task_id, any_value(family) AS family, "
            "count(*) FILTER (passed AND arm = $first) AS first_passed, "
            "count(passed) FILTER (arm = $first) AS first_scored, "
            "count(*) FILTER (passed AND arm = $second) AS second_passed, "
            "count(passed) FILTER (arm = $second) AS second_scored, "
            "second_passed / nullif(second_scored, 0) - first_passed / nullif(first_scored, 0) AS difference "
            "FROM eval_item WHERE arm IN ($first, $second) GROUP BY task_id"
        )
        connection.execute(
            f"CREATE TEMP TABLE sides AS SELECT * FROM ({sides}) WHERE $family IN ('', family) AND "
            "contains(lower(task_id || ' ' || coalesce(family, '')), $text)",
            {"first": first, "second": second, "family": filters.family, "text": filters.text.lower()},
        )
        counted = ", ".join(f"count(*) FILTER ({SIDES[side]})" for side in ("first", "second", "equal", filters.side))
        ((firsts, seconds, equal, total),) = connection.execute(f"SELECT {counted} FROM sides").fetchall()
        rows = _rows(
            connection,
            f"SELECT * FROM sides WHERE {SIDES[filters.side]} ORDER BY abs(difference) DESC NULLS LAST, difference, "
            f"task_id LIMIT {int(size)} OFFSET {int(offset)}",
            [],
        )
        question = (
            "SELECT DISTINCT ON (task_id) task_id, transcript_json, steps_json FROM eval_item "
            "WHERE transcript_json IS NOT NULL AND task_id IN (SELECT unnest(?))"
        )
        stored = connection.execute(question, [[row["task_id"] for row in rows]]).fetchall()
    prompts = {task: _prompt(*texts) for task, *texts in stored}
    return TaskPage(
        firsts, seconds, equal, total, offset, [{**row, "prompt": prompts.get(row["task_id"])} for row in rows]
    )


def families(run: Run) -> list[Row]:
    """Return, for each family of an evaluation, its tasks, and the pass rate of each arm: the mean over its tasks."""
    with _views(run) as (connection, views, _):
        if EVAL_ITEM.name not in views:
            return []
        question = (
            "WITH tasks AS (SELECT family, task_id, arm, avg(CAST(passed AS INT)) AS rate FROM eval_item GROUP BY ALL) "
            "SELECT family, arm, avg(rate) AS rate, count(*) AS num_tasks FROM tasks WHERE family IS NOT NULL "
            "GROUP BY family, arm ORDER BY family, arm"
        )
        totals: dict[str, Row] = {}
        for row in _rows(connection, question, []):
            family = totals.setdefault(row["family"], {"family": row["family"], "num_tasks": 0, "rates": {}})
            family["num_tasks"] = max(family["num_tasks"], row["num_tasks"])
            family["rates"][row["arm"]] = row["rate"]
    return list(totals.values())


def of_task(run: Run, task: str, arm: str) -> list[Row]:
    """Return the items of one arm on one task, by training seed and sample."""
    with _views(run) as (connection, views, _):
        question = "SELECT * FROM eval_item WHERE task_id = ? AND arm = ? ORDER BY train_seed, sample_idx"
        return _rows(connection, question, [task, arm]) if EVAL_ITEM.name in views else []


# Preference pairs.

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


def pairs(
    run: Run,
    filters: PairFilter = PairFilter(),
    offset: int = 0,
    size: int = 20,
) -> PairPage | None:
    """Return one page of the matching pairs of a run, in their order; None for a run without pairs."""
    if not run.holds(PAIR):
        return None
    with _views(run) as (connection, _, _):
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
        rows = _rows(
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
    with _views(run) as (connection, views, _):
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
    with _views(run) as (connection, views, _):
        if CONTINUATION.name not in views:
            return {}
        question = (
            "SELECT state_sha256, action, count(*) FILTER (passed), count(passed) FROM continuation "
            "WHERE state_sha256 IN (SELECT unnest(?)) GROUP BY ALL"
        )
        rows = connection.execute(question, [list(states)]).fetchall()
    return {(state, action): (passed, graded) for state, action, passed, graded in rows}


def at_states(run: Run, kind: Kind, states: Sequence[str]) -> list[Row]:
    """Return the rows of a kind (teacher actions, pairs) at the states with these digests."""
    with _views(run) as (connection, views, _):
        if not states or kind.name not in views:
            return []
        # unnest(): one parameter for any number of digests.
        question = f"SELECT * FROM {kind.name} WHERE state_sha256 IN (SELECT unnest(?))"
        return _rows(connection, question, [list(states)])


def first_rows(run: Run, number: int) -> dict[str, list[Row]]:
    """Return the first rows of every table of a run, by the table's name."""
    with _database().cursor() as connection:
        return {
            name: _rows(connection, f"SELECT * EXCLUDE (file_row_number) FROM {_parquet(path)} LIMIT {int(number)}", [])
            for name, path in run.tables().items()
            if path.is_file()
        }


def _conditions(filters: RolloutFilter, name: str, views: set[str]) -> tuple[str, list[Any]]:
    where, values = ["true"], list[Any]()
    if filters.text:
        text = filters.text.lower()
        places = ["contains(lower(id), ?)", "contains(lower(coalesce(error, '')), ?)"]
        values += [text, text]
        if name == EVAL_ITEM.name:
            # Searched for the text as JSON writes it, with escapes, since its characters are not parsed.
            places.append("id IN (SELECT item_id FROM eval_item WHERE contains(lower(transcript_json), ?))")
            values.append(store.encode(text).decode()[1:-1])
        elif STEP.name in views:
            inside = "SELECT rollout_id FROM step WHERE contains(lower(action), ?) OR contains(lower(observation), ?)"
            places.append(f"id IN ({inside})")
            values += [text, text]
        where.append(f"({' OR '.join(places)})")
    for column, value in (("task_id", filters.task), ("family", filters.family), ("arm", filters.arm)):
        if value:
            where.append(f"{column} = ?")
            values.append(value)
    where += [REWARDS[filters.reward]] if filters.reward in REWARDS else []
    where += ["hacked"] if filters.hacked else []
    where += ["error_type IS NOT NULL"] if filters.error else []
    if filters.ids is not None:
        where.append("id IN (SELECT unnest(?))")
        values.append(list(filters.ids))
    return " AND ".join(where), values


def _rows(connection: duckdb.DuckDBPyConnection, question: str, values: Sequence[Any]) -> list[Row]:
    answer = connection.execute(question, values)
    names = [column[0] for column in answer.description or ()]
    return [dict(zip(names, row, strict=True)) for row in answer.fetchall()]


TABLES = (ROLLOUT, STEP, EVAL_ITEM, TEACHER_ACTION, PAIR, TASK, STATE, CONTINUATION, ORIGIN)
_database = cache(duckdb.connect)
"""Returns the one empty database of this process; views belong to the cursor that makes them."""


@contextmanager
def _views(run: Run) -> Iterator[tuple[duckdb.DuckDBPyConnection, set[str], str | None]]:
    """Open a connection with a view per record kind of the run, named in the set, with the column `file_row` added.

    Yields last which of the tables of `LISTED` the run has; None where it has neither.
    """
    with _database().cursor() as connection:
        views = set[str]()
        tables = run.tables()
        for kind in TABLES:
            if name := run.holds(kind):
                # A run that an earlier version wrote may lack a column.
                present = set(Scan(tables[name]).columns)
                parts = (f'"{name}"' if name in present else f'NULL AS "{name}"' for name in kind.columns)
                columns = ", ".join([*parts, "file_row_number AS file_row"])
                connection.execute(f"CREATE TEMP VIEW {kind.name} AS SELECT {columns} FROM {_parquet(tables[name])}")
                views.add(kind.name)
        if not views:  # a run in progress writes its tables at its end
            for kind, rows in _journal(run):
                connection.register(f"journal_{kind.name}", pa.Table.from_pylist(rows, schema=kind.schema))
                connection.execute(
                    f"CREATE TEMP VIEW {kind.name} AS SELECT *, row_number() OVER () - 1 AS file_row "
                    f"FROM journal_{kind.name}"
                )
                views.add(kind.name)
        yield connection, views, next((name for name in LISTED if name in views), None)


def _parquet(path: Path) -> str:
    quoted = str(path).replace("'", "''")  # a table function takes no parameters
    return f"read_parquet('{quoted}', file_row_number = true)"


def _journal(run: Run) -> list[tuple[Kind, list[Row]]]:
    """Return the finished units of a run in progress as the rows that its tables will hold."""
    rollouts, steps, items = list[Row](), list[Row](), list[Row]()
    for unit in run.units():
        if "rollout" in unit:
            rollouts.append(unit["rollout"])
            steps += unit["steps"]
        items += [unit["item"]] if "item" in unit else []
    return [(kind, rows) for kind, rows in ((ROLLOUT, rollouts), (STEP, steps), (EVAL_ITEM, items)) if rows]


def sql_query(runs: Mapping[Path, Entry], sql: str) -> SqlQuery:
    """Return a question in SQL with the tables of these runs that it may read.

    Every table is a view under the name of its file (`rollouts`, `steps`, `pairs`, ...), with the rows of all runs
    and a column `run`; `runs` holds one row per run. DuckDB reads the Parquet files, nothing is copied.
    """
    files: dict[str, list[Path]] = {}
    lines = list[Row]()
    for folder, entry in runs.items():
        facts = {name: getattr(entry.facts, name) for name in RUNS if hasattr(entry.facts, name)}
        lines.append(facts | {"run": f"{folder.parent.name}/{folder.name}", "path": str(folder)})
        for table in entry.tables:
            files.setdefault(Path(table).stem, []).append(folder / table)
    return SqlQuery(sql, files, lines)


def pooled(runs: Mapping[Path, Entry], sql: str) -> list[str]:
    """Return a sentence for each table with rows of several stages that a question reads without telling runs apart."""
    with _database().cursor() as connection:
        ((parsed,),) = connection.execute("SELECT json_serialize_sql(?)", [sql]).fetchall()
    # In JSON, which nests too deeply for Python's readers; quotes in a text of the question are escaped there.
    read = {name.lower() for name in re.findall(r'"table_name":"([^"]+)"', parsed)}
    columns = {name.lower() for name in re.findall(r'"column_names":\[(?:"[^"]*",)*"([^"]*)"\]', parsed)}
    if "runs" in read or columns & {"run", "source"}:
        return []
    stages: dict[str, set[str]] = {}
    for entry in runs.values():
        for table in entry.tables:
            stages.setdefault(Path(table).stem, set()).add(entry.facts.stage)
    return [
        Sentence("runs.rows-of-several-stages", stages=sorted(makers), table=table)
        for table, makers in stages.items()
        if len(makers) > 1 and table.lower() in read
    ]
