"""Read rollouts, states and pairs from rows; `recording.py` writes these rows.

A `step/1` row holds what the transcript and the token ids gained since the step before, so that each is stored once;
`transcripts`, `states` and `prompt_ids` rebuild the full values of one rollout. A `state/2` row holds what a state has
more than the state that it follows; `pairs_with_states` joins pairs with theirs. `rollout_rows` reads a run one rollout
after the other, so that the run may exceed memory.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, TypedDict

import orjson

from composer_stages.errors import BadInput
from composer_stages.messages import Message
from composer_stages.rollouts.history import FULL, SUMMARY_REQUEST, visible_messages
from composer_stages.runs import catalog, store
from composer_stages.runs.kinds import ORIGIN, PAIR, ROLLOUT, STATE, STEP, Row
from composer_stages.runs.run import Run

OUT_OF_STEPS = "max_steps"
"""`terminated_by` of a rollout that the limit of steps ended."""

TEACHER = "teacher"
"""Key in `sampling_json` of a step that a teacher played in the policy's place: the teacher's name."""


class RolloutPayload(TypedDict):
    """The journal record of one rollout: the `rollout/1` row and the `step/1` rows."""

    rollout: Row
    steps: list[Row]


class RolloutUnit(RolloutPayload):
    """A payload read back from the journal, under the key of its unit."""

    unit: str


def item_steps(item: Row) -> list[Row]:
    """Return the `step/1` rows of an item of an evaluation, as far as it holds them; token ids are null."""
    messages: list[Message] = orjson.loads(item.get("transcript_json") or "[]")
    facts: list[Row] = orjson.loads(item.get("steps_json") or "[]")
    places = [fact["message"] for fact in facts]
    rows = []
    for number, (start, index, end) in enumerate(zip([0, *places], places, [*places[1:], len(messages)], strict=False)):
        observed = [
            message
            for message in messages[index + 1 : end]
            if message["role"] != "assistant" and message != SUMMARY_REQUEST
        ]
        row = {
            **{name: value for name, value in facts[number].items() if name != "message"},
            "step": number,
            "num_steps": len(facts),
            "new_messages_json": store.encode(messages[start:index]).decode(),
            "num_messages": index,
            "action": messages[index]["content"],
            "observation": "\n".join(message["content"] for message in observed),
        }
        rows.append({**dict.fromkeys(STEP.columns), **row})
    return rows


def rollout_units(records: Iterable[Row]) -> dict[str, RolloutUnit]:
    """Return the rollout records of a journal by unit; records of other kinds are left out."""
    return {
        record["unit"]: {"unit": record["unit"], "rollout": record["rollout"], "steps": record["steps"]}
        for record in records
        if "rollout" in record
    }


def by_rollout(steps: list[Row]) -> dict[str, list[Row]]:
    """Return step rows grouped by rollout, each in order."""
    groups = step_groups(sorted(steps, key=itemgetter("rollout_id")))
    return {rows[0]["rollout_id"]: rows for rows in groups}


def transcripts(steps: list[Row]) -> list[list[Message]]:
    """Return the transcript before each step of one rollout."""
    messages: list[Message] = []
    conversations = []
    for row in steps:
        messages = [*messages, *orjson.loads(row["new_messages_json"])]
        conversations.append(messages)
    return conversations


def states(steps: list[Row]) -> list[list[Message]]:
    """Return the conversation before each step of one rollout, as the policy was shown it."""
    pairs = zip(transcripts(steps), steps, strict=True)
    return [visible_messages(messages, row.get("history")) for messages, row in pairs]


def state_sha256(messages: list[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the digest that identifies a state: that of the canonical JSON of its tools, if any, and its messages."""
    return store.digest([{"tools": tools}, *messages] if tools else messages)


def state_digests(steps: list[Row], tools: Sequence[Any] = ()) -> list[str]:
    """Return the digest of every state of one rollout, in linear time where the policy was shown the full history."""
    if any(row.get("history") not in (None, FULL) for row in steps):
        return [state_sha256(state, tools) for state in states(steps)]
    return digests_of_prefixes([orjson.loads(row["new_messages_json"]) for row in steps], tools)


def digests_of_prefixes(gains: Iterable[list[Message]], tools: Sequence[Any] = ()) -> list[str]:
    """Return the digest of every state, given the new messages of each and the tools of all, in linear time."""
    running, digests, begun = hashlib.sha256(b"["), [], bool(tools)
    if tools:  # as `state_sha256` has them
        running.update(store.encode({"tools": tools}))
    for gain in gains:
        # A JSON list is hashed as it grows, and closed on a copy: with n steps, to hash each state anew is quadratic.
        for message in gain:
            running.update((b"," if begun else b"") + store.encode(message))
            begun = True
        ended = running.copy()
        ended.update(b"]")
        digests.append(ended.hexdigest())
    return digests


def prompt_ids(steps: list[Row]) -> list[list[int] | None]:
    """Return the token ids before each step of one rollout, from the deltas; None from where the source has none.

    A teacher's turn has none, and the one after it has all of its own.
    """
    prefix: list[int] = []
    prompts: list[list[int] | None] = []
    for row in steps:
        delta, completion = row["prompt_delta_token_ids"], row["completion_token_ids"]
        if played_by(row) is not None:
            prefix = []
            prompts.append(None)
            continue
        if delta is None or completion is None:
            return [*prompts, *[None] * (len(steps) - len(prompts))]
        prompt = prefix + delta if row["prefix_ok"] else list(delta)
        prompts.append(prompt)
        prefix = prompt + completion
    return prompts


def played_by(step: Row) -> str | None:
    """Return the teacher that played a step in the policy's place; None where the policy did."""
    text = step.get("sampling_json") or ""
    name: str | None = orjson.loads(text).get(TEACHER) if TEACHER in text else None
    return name


def collected_with(run: Run) -> Mapping[str, Any]:
    """Return the settings with which a run's rollouts were played: of `normalize` those of the run that it filtered.

    Empty where that run is gone.
    """
    while run.manifest.stage == "normalize":
        filtered, *_ = run.manifest.inputs["rollouts"]
        source = catalog.find_input(run.path.parents[1], Path(filtered.path))
        if not (source / "manifest.json").is_file():
            return {}
        run = Run(source)
    return run.manifest.config


def require_unmixed(run: Run) -> Run:
    """Return a run; `BadInput` where teachers played turns in it, so that its rollouts measure no model."""
    config = collected_with(run) if run.manifest.stage in ("collect", "normalize") else {}
    if share := config.get("rollouts", {}).get("mixed"):
        raise BadInput("rollouts.mixed-rollouts", path=run.path, mixed=share)
    return run


def lineage(run: Run) -> set[str]:
    """Return digests by which the rollouts of a run are known: its own, and those of runs and files that hold them."""
    files: list[Row] = orjson.loads(run.read_file("sources.json") or "[]")
    imported = (file["sha256"] for file in files if file["rollouts"])
    return {run.manifest.content, *run.manifest.summary.get("rollouts_of", ()), *imported}


def inherited(runs: Iterable[Run]) -> dict[str, Any]:
    """Return what the summary of a run has that holds rollouts of these runs: their digests.

    rollouts_of: of what holds the rollouts. selected_by: of the rollouts that selected their tasks.
    """
    sources = [*runs]
    digests = {
        "rollouts_of": {digest for run in sources for digest in lineage(run)},
        "selected_by": {digest for run in sources for digest in run.manifest.summary.get("selected_by", ())},
    }
    return {name: sorted(of_name) for name, of_name in digests.items() if of_name}


def exports_of(files: Iterable[Path]) -> list[Run]:
    """Return the runs in whose folders these files lie, which wrote them."""
    exports, parents = list[Run](), {path.resolve().parent for path in files}
    for folder in {above for parent in parents for above in (parent, *parent.parents)}:
        if (folder / "manifest.json").is_file():
            with suppress(BadInput):  # a manifest of another program
                exports.append(Run(folder))
    return exports


STATE_COLUMNS = [
    *("rollout_id", "step", "state_sha256", "new_messages_json", "history"),
    *("prompt_delta_token_ids", "completion_token_ids", "prefix_ok", "sampling_json"),
]
"""The columns of steps that `state_rows` reads."""
TOOL_COLUMNS = ["state_id", "tools_json"]


def state_id(step: Row) -> str:
    """Return the name of the state in which a step was taken."""
    return f"{step['rollout_id']}/{step['step']}"


def state_rows(steps: list[Row], last: int, tools_json: str | None = None) -> Iterator[Row]:
    """Yield the `state/2` rows of one rollout, from its first step to `last`."""
    before, held_messages, previous_ids = None, list[Message](), list[int]()
    for row, messages, prompt in zip(steps[: last + 1], states(steps), prompt_ids(steps), strict=False):
        num_kept = len(held_messages)
        if messages[:num_kept] != held_messages:
            # A shortened or summarised history: keep what is equal up to the first difference.
            differing = (i for i, (old, new) in enumerate(zip(held_messages, messages, strict=False)) if old != new)
            num_kept = next(differing, min(num_kept, len(messages)))
        kept_ids = len(previous_ids) if prompt is not None and prompt[: len(previous_ids)] == previous_ids else 0
        yield {
            "state_id": state_id(row),
            "before_id": before,
            "state_sha256": row["state_sha256"],
            "kept_messages": num_kept,
            "new_messages_json": store.encode(messages[num_kept:]).decode(),
            "kept_token_ids": None if prompt is None else kept_ids,
            "new_token_ids": None if prompt is None else prompt[kept_ids:],
            "tools_json": tools_json,
        }
        before, held_messages, previous_ids = state_id(row), messages, prompt or []


def opening_row(name: str, messages: list[Message], digest: str) -> Row:
    """Return the `state/2` row of a state that follows no other."""
    text = store.encode(messages).decode()
    gained = {"kept_messages": 0, "new_messages_json": text, "kept_token_ids": None, "new_token_ids": None}
    return {"state_id": name, "before_id": None, "state_sha256": digest, **gained, "tools_json": None}


def read_states(rows: Iterable[Row]) -> Iterator[tuple[str, list[Message], list[int] | None]]:
    """Yield name, messages and token ids (or None) of each state; a row must follow the row that it extends."""
    messages, ids = list[Message](), list[int]()
    for row in rows:
        if row["before_id"] is None:
            messages, ids = [], []
        messages = [*messages[: row["kept_messages"]], *orjson.loads(row["new_messages_json"])]
        if row["new_token_ids"] is None:
            ids = []
            yield row["state_id"], messages, None
        else:
            ids = [*ids[: row["kept_token_ids"]], *row["new_token_ids"]]
            yield row["state_id"], messages, ids


def pairs_with_states(run: Run) -> Iterator[Row]:
    """Yield the pairs of a run, each with `messages_json`, `tools_json` and `prompt_token_ids` of its state.

    The ids and the tools may be None.

    Each state is in memory once, however many pairs name it.
    """
    table, state_table = run.scan(PAIR), run.scan(STATE)
    state_ids = {row["state_id"] for row in table.rows(["state_id"])}
    states_by_id = {
        name: (store.encode(messages).decode(), ids)
        for name, messages, ids in read_states(state_table.rows())
        if name in state_ids
    }
    has_tools = "tools_json" in state_table.columns  # since state/2
    tools = {row["state_id"]: row["tools_json"] for row in state_table.rows(TOOL_COLUMNS)} if has_tools else {}
    for row in table.rows():
        messages_json, ids = states_by_id[row["state_id"]]
        tools_json = tools.get(row["state_id"])
        yield {**row, "messages_json": messages_json, "prompt_token_ids": ids, "tools_json": tools_json}


def tools_by_rollout(run: Run) -> dict[str, str]:
    """Return the JSON of the tools that each rollout could call, as its environment or its source declared them."""
    tools: dict[str, str] = {}
    for kind in (ORIGIN, ROLLOUT):
        if run.holds(kind) and "tools_json" in run.scan(kind).columns:
            rows = run.scan(kind).rows(["rollout_id", "tools_json"])
            tools |= {row["rollout_id"]: row["tools_json"] for row in rows if row["tools_json"]}
    return tools


def rollout_rows(run: Run) -> Iterator[tuple[Row, list[Row]]]:
    """Yield each rollout with its steps in order, in the order of the rollout table.

    Raises `BadInput` where the steps are not in the order of the rollouts, in which every stage writes them.
    """
    # Merged like two sorted files, so that neither table has to fit in memory.
    groups = step_groups(run.scan(STEP).rows())
    steps = next(groups, [])
    for rollout in run.scan(ROLLOUT).rows():
        if steps and steps[0]["rollout_id"] == rollout["rollout_id"]:
            yield rollout, steps
            steps = next(groups, [])
        else:
            yield rollout, []
    if steps:
        raise BadInput("rollouts.steps-out-of-order", path=run.path, rollout_id=steps[0]["rollout_id"])


def conversation(steps: Iterable[Row]) -> list[Message]:
    """Return the messages of one rollout, its last action included; `steps`: all of its steps, in order."""
    messages: list[Message] = []
    action = ""
    for row in steps:
        messages += orjson.loads(row["new_messages_json"])
        action = row["action"]
    return [*messages, {"role": "assistant", "content": action}]


def step_groups(steps: Iterable[Row]) -> Iterator[list[Row]]:
    """Yield the steps of each rollout, sorted; steps of one rollout must be adjacent."""
    return (sorted(group, key=itemgetter("step")) for _, group in groupby(steps, key=itemgetter("rollout_id")))
