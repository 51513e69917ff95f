"""States as rows of a table of their own, each as what it gained over the one before, and pairs read with theirs."""

from collections.abc import Iterable, Iterator

import orjson

from stages.messages import Message
from stages.rollouts.trace import prompt_ids, states
from stages.runs import store
from stages.runs.artifact import Run
from stages.runs.pair_records import PAIR, STATE
from stages.runs.records import Row

COLUMNS = [
    *("rollout_id", "step", "state_sha256", "new_messages_json", "history"),
    *("prompt_delta_token_ids", "completion_token_ids", "prefix_ok"),
]
"""What of the steps of a rollout its states are made of."""


def state_id(step: Row) -> str:
    """The name of the state in which a step was taken."""
    return f"{step['rollout_id']}/{step['step']}"


def state_rows(steps: list[Row], last: int) -> Iterator[Row]:
    """The `state/1` rows of one rollout, from its first step to `last`."""
    before, said, held = None, list[Message](), list[int]()
    for row, messages, prompt in zip(steps[: last + 1], states(steps), prompt_ids(steps), strict=False):
        kept = _common(said, messages)
        kept_ids = len(held) if prompt is not None and prompt[: len(held)] == held else 0
        yield {
            "state_id": state_id(row),
            "before_id": before,
            "state_sha256": row["state_sha256"],
            "kept_messages": kept,
            "new_messages_json": store.encode(messages[kept:]).decode(),
            "kept_token_ids": None if prompt is None else kept_ids,
            "new_token_ids": None if prompt is None else prompt[kept_ids:],
        }
        before, said, held = state_id(row), messages, prompt or []


def opening_row(name: str, messages: list[Message], digest: str) -> Row:
    """The `state/1` row of a state that nothing led to."""
    said = store.encode(messages).decode()
    gained = {"kept_messages": 0, "new_messages_json": said, "kept_token_ids": None, "new_token_ids": None}
    return {"state_id": name, "before_id": None, "state_sha256": digest, **gained}


def _common(before: list[Message], after: list[Message]) -> int:
    """How many messages both begin with."""
    if after[: len(before)] == before:
        return len(before)
    for index, (one, other) in enumerate(zip(before, after, strict=False)):
        if one != other:
            return index
    return min(len(before), len(after))


def read_states(rows: Iterable[Row]) -> Iterator[tuple[str, list[Message], list[int] | None]]:
    """Each state by its name: its messages, and its token ids or None. Rows stand after those that they go on from."""
    said, ids = list[Message](), list[int]()
    for row in rows:
        if row["before_id"] is None:
            said, ids = [], []
        said = [*said[: row["kept_messages"]], *orjson.loads(row["new_messages_json"])]
        if row["new_token_ids"] is None:
            ids = []
            yield row["state_id"], said, None
        else:
            ids = [*ids[: row["kept_token_ids"]], *row["new_token_ids"]]
            yield row["state_id"], said, ids


def pairs_with_states(run: Run) -> Iterator[Row]:
    """The pairs of a run, each with the `messages_json` of its state and its `prompt_token_ids`, which may be None.

    Each state is in memory once, however many pairs are in it. Pairs of an older version have both in their own row.
    """
    table = run.scan(PAIR)
    if "messages_json" in table.columns:
        yield from table.rows()
        return
    wanted = {row["state_id"] for row in table.rows(["state_id"])}
    held = {
        name: (store.encode(messages).decode(), ids)
        for name, messages, ids in read_states(run.scan(STATE).rows())
        if name in wanted
    }
    for row in table.rows():
        said, ids = held[row["state_id"]]
        yield {**row, "messages_json": said, "prompt_token_ids": ids}
