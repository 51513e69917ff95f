"""A rollout step by step: what was new in the state, the action, what came of it, and what teachers made of it."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import unified_diff
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from composer_cli.view.catalog import Catalog
from stages.messages import Message
from stages.runs import queries
from stages.runs.artifact import Run
from stages.runs.records import CHECKPOINT, PAIR, TEACHER_ACTION, Row

if TYPE_CHECKING:
    from tokenizers import Tokenizer


# ---- pieces
# The tokens of an answer with their log-probs, as text where the model's tokenizer lies on this machine.

LEVELS = (-0.05, -0.3, -1.0, -2.0, -4.0)
"""Natural logs of probabilities at which the colour changes: 95 %, 74 %, 37 %, 14 %, 2 %."""
UNFINISHED = "\ufffd"


@dataclass(frozen=True)
class Piece:
    """Some text, its log-prob (the sum where several tokens make one character), and its level, 0 for the surest."""

    text: str
    logprob: float
    level: int


def pieces(row: Row, tokenizer: "Tokenizer | None") -> list[Piece]:
    """The tokens of a step's answer; without a tokenizer they are shown by their ids. Empty without log-probs."""
    ids, logprobs = row.get("completion_token_ids"), row.get("logprobs")
    if not ids or not logprobs or len(ids) != len(logprobs):
        return []
    if tokenizer is None:
        return [_piece(f"{token} ", value) for token, value in zip(ids, logprobs, strict=True)]
    found, held, total = list[Piece](), list[int](), 0.0
    for token, value in zip(ids, logprobs, strict=True):
        held.append(token)
        total += value
        text = tokenizer.decode(held, skip_special_tokens=False)
        if not text.endswith(UNFINISHED):
            found.append(_piece(text, total))
            held, total = [], 0.0
    return [*found, _piece(tokenizer.decode(held, skip_special_tokens=False), total)] if held else found


def _piece(text: str, logprob: float) -> Piece:
    return Piece(text, logprob, level(logprob))


def level(logprob: float) -> int:
    """0 for what was nearly certain, 5 for what was nearly impossible."""
    return sum(logprob < edge for edge in LEVELS)


def of_run(run: Run, root: Path) -> "Tokenizer | None":
    """The tokenizer of the policy that played a run; None where it is not on this machine."""
    for place in _places(run, root):
        if (place / "tokenizer.json").is_file():
            return _opened(str(place / "tokenizer.json"))
    return None


@lru_cache(4)
def _opened(path: str) -> "Tokenizer":
    from tokenizers import Tokenizer

    return Tokenizer.from_file(path)


def _places(run: Run, root: Path) -> Sequence[Path]:
    """Where a model may lie: a folder of its name, this run's checkpoint, the kept models, the hub's cache."""
    models = [str(about.get("model", "")) for about in run.manifest.models.values() if isinstance(about, dict)]
    name = next((model for model in models if model), "")
    environment, colon, short = name.partition(":")
    kept = sorted((root / "models").glob(f"{environment}-{short}-*")) if colon and "/" not in short else []
    own = [run.folder(CHECKPOINT)] if run.holds(CHECKPOINT) else []
    return [*([Path(name)] if name and not colon else []), *own, *reversed(kept), *_cached(name)]


def _cached(name: str) -> list[Path]:
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        return []
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "tokenizer.json")
    return [Path(found).parent] if isinstance(found, str) else []


FIRST = ("reward", "passed", "arm", "gt_pass", "visible_pass", "hacked", "protocol_ok", "error_type", "error")
HIDDEN = ("transcript_json", "file_row", "rollout_id", "item_id", "group_id", "source")
FAILED_TEST = re.compile(r"^(?:FAILED|FAIL:?|ERROR:?) +(.{1,120})", re.M)
BAD_LINE = re.compile(r"^(?:FAILED|FAIL|ERROR|E  |Traceback|\w*Error\b|\w*Exception\b)")


@dataclass(frozen=True)
class Text:
    """One line of a block and what it is: "", "add", "del", "hunk" in a diff, "bad" in the output of tests."""

    line: str
    kind: str = ""


@dataclass(frozen=True)
class Disagreement:
    """A pair made at a step, and what differs from the rejected to the chosen action."""

    row: Row
    difference: list[Text]


@dataclass(frozen=True)
class StepView:
    """One step.

    `failed` names tests; `by_id`: tokens could not be turned into text; `answers` are the teachers' rows by action, the
    most frequent first.
    """

    row: Row
    new: list[Message]
    tokens: list[Piece]
    action: list[Text]
    observation: list[Text]
    failed: list[str]
    by_id: bool
    answers: list[tuple[str, list[Row]]] = field(default_factory=list)
    pairs: list[Disagreement] = field(default_factory=list)


@dataclass(frozen=True)
class TranscriptView:
    """A rollout or an item: its row, and its steps, or the conversation where steps were not kept."""

    rollout_id: str
    outcome: dict[str, Any]
    steps: list[StepView]
    said: list[tuple[str, list[Text]]]


def transcript(catalog: Catalog, run: Run, rollout_id: str) -> TranscriptView | None:
    """All there is to see of one rollout; None where the run has none of that id."""
    row, steps = queries.rollout(run, rollout_id)
    if row is None:
        return None
    outcome = {name: row[name] for name in (*FIRST, *row) if row.get(name) is not None and name not in HIDDEN}
    return TranscriptView(rollout_id, outcome, _views(catalog, run, steps), _said(row.get("transcript_json")))


def _views(catalog: Catalog, run: Run, steps: Sequence[Row]) -> list[StepView]:
    states = [row["state_sha256"] for row in steps]
    answers = _by_state(
        row for one in catalog.with_kind(run, TEACHER_ACTION) for row in _at(one, TEACHER_ACTION, states)
    )
    pairs = _by_state(row for one in catalog.with_kind(run, PAIR) for row in _at(one, PAIR, states))
    tokenizer = of_run(run, catalog.root)
    return [
        StepView(
            row=row,
            new=orjson.loads(row["new_messages_json"]),
            tokens=pieces(row, tokenizer),
            action=block(row["action"]),
            observation=block(row["observation"] or ""),
            failed=FAILED_TEST.findall(row["observation"] or ""),
            by_id=tokenizer is None,
            answers=_by_action(answers.get(row["state_sha256"], [])),
            pairs=[Disagreement(pair, difference(pair)) for pair in pairs.get(row["state_sha256"], [])],
        )
        for row in steps
    ]


def _at(run: Run, kind: Any, states: Sequence[str]) -> list[Row]:
    return [{**row, "run": run} for row in queries.at_states(run, kind, states)]


def _by_state(rows: Iterable[Row]) -> Mapping[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["state_sha256"], []).append(row)
    return found


def _by_action(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["action"] or f"({row['error_type']}: {row['error']})", []).append(row)
    return sorted(found.items(), key=lambda item: -len(item[1]))


def difference(pair: Row) -> list[Text]:
    """From the rejected to the chosen action, line by line."""
    rejected, chosen = (str(pair[name]).splitlines() for name in ("rejected", "chosen"))
    return [Text(line, _in_diff(line)) for line in list(unified_diff(rejected, chosen, lineterm="", n=2))[2:]]


def block(text: str) -> list[Text]:
    """The lines of a text; in a diff those that come and go are told apart, elsewhere those that say what failed."""
    lines = text.split("\n")
    is_diff = any(line.startswith("@@ ") for line in lines)
    return [Text(line, _in_diff(line) if is_diff else "bad" if BAD_LINE.match(line) else "") for line in lines]


def _in_diff(line: str) -> str:
    if line.startswith(("+++", "---", "diff ", "@@")):
        return "hunk"
    return {"+": "add", "-": "del"}.get(line[:1], "")


def _said(transcript_json: str | None) -> list[tuple[str, list[Text]]]:
    said = orjson.loads(transcript_json) if transcript_json else []
    return [(message["role"], block(message["content"])) for message in said]


def item(row: Row) -> TranscriptView:
    """An item of an evaluation as the comparison shows it."""
    outcome = {name: row[name] for name in ("passed", "hacked", "num_steps", "terminated_by", "error_type", "error")}
    known = {name: value for name, value in outcome.items() if value is not None}
    return TranscriptView(row["item_id"], known, [], _said(row["transcript_json"]))
