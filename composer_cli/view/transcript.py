"""A rollout step by step: new messages, the action token by token, the observation, teachers' actions and pairs."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from composer_cli.show.rollouts import SaidMessage, said
from composer_cli.show.runs import made_from
from composer_cli.view.lines import MarkedLine, block, difference
from stages.messages import Message
from stages.rollouts.trace import item_steps
from stages.runs import queries
from stages.runs.kinds import CHECKPOINT, PAIR, TEACHER_ACTION, Kind, Row
from stages.runs.run import Run

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FIRST = (
    *("outcome", "reward", "passed", "arm", "gt_pass", "visible_pass", "hacked", "protocol_ok", "error_type", "error"),
    *("num_steps", "terminated_by", "family", "model"),
)
"""Columns of a rollout that its page shows at once, in this order; one click opens the others."""
HIDDEN = ("transcript_json", "steps_json", "file_row", "rollout_id", "item_id", "group_id", "source")
FAILED_TEST = re.compile(r"^(?:FAILED|FAIL:?|ERROR:?) +(.{1,120})", re.M)
LEVELS = (-0.05, -0.3, -1.0, -2.0, -4.0)
"""Natural logs of probabilities at which the colour changes: 95 %, 74 %, 37 %, 14 %, 2 %."""
UNFINISHED = "\ufffd"
"""The decoder's character for bytes that do not yet make one."""


@dataclass(frozen=True)
class TokenPiece:
    """Some text, its log-prob (the sum where several tokens make one character), and its level, 0 for the surest.

    special: whether it is a mark of the chat template, such as the end of a turn, and no text.
    """

    text: str
    logprob: float
    level: int
    special: bool = False


@dataclass(frozen=True)
class ShownPair:
    """A pair made at a step, and what differs from the rejected to the chosen action."""

    row: Row
    difference: list[MarkedLine]


@dataclass(frozen=True)
class StepView:
    """One step.

    `failed` names tests; `by_id`: tokens could not be turned into text; `submitted`: the observation is the submitted
    patch; `answers` are the teachers' rows by action, the most frequent first.
    """

    row: Row
    new: list[Message]
    tokens: list[TokenPiece]
    action: list[MarkedLine]
    observation: list[MarkedLine]
    failed: list[str]
    by_id: bool
    submitted: bool = False
    answers: list[tuple[str, list[Row]]] = field(default_factory=list)
    pairs: list[ShownPair] = field(default_factory=list)


@dataclass(frozen=True)
class TranscriptView:
    """A rollout or an item: its row, and its steps, or the conversation where steps were not kept.

    `more` are the columns that are not shown at once, and `texts` those of several lines, such as the log of the tests.
    """

    rollout_id: str
    outcome: dict[str, Any]
    steps: list[StepView]
    said: list[tuple[SaidMessage, list[MarkedLine]]]
    more: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, list[MarkedLine]] = field(default_factory=dict)


def transcript(root: Path, run: Run, rollout_id: str) -> TranscriptView | None:
    """Return one rollout with everything that is known about its steps; None where the run has none of that id."""
    row, steps = queries.rollout(run, rollout_id)
    if row is None:
        return None
    steps = steps or item_steps(row)
    held = {name: row[name] for name in (*FIRST, *row) if row.get(name) not in (None, "") and name not in HIDDEN}
    texts = {name: value for name, value in held.items() if isinstance(value, str) and "\n" in value.strip()}
    outcome = {name: held[name] for name in FIRST if name in held.keys() - texts.keys()}
    more = {name: value for name, value in held.items() if name not in outcome and name not in texts}
    states = [step["state_sha256"] for step in steps if step["state_sha256"]]
    answers, pairs = (_rows_by_state(root, run, kind, states) for kind in (TEACHER_ACTION, PAIR))
    tokenizer = find_tokenizer(run, root)
    views = []
    for step in steps:
        by_action: dict[str, list[Row]] = {}
        for answer in answers.get(step["state_sha256"], []):
            by_action.setdefault(answer["action"] or f"({answer['error_type']}: {answer['error']})", []).append(answer)
        observation = step["observation"] or ""
        views.append(
            StepView(
                row=step,
                new=orjson.loads(step["new_messages_json"]),
                tokens=pieces(step, tokenizer),
                action=block(step["action"]),
                observation=block(observation),
                failed=FAILED_TEST.findall(observation),
                by_id=tokenizer is None,
                submitted=bool(observation) and observation == row.get("submission"),
                answers=sorted(by_action.items(), key=lambda item: -len(item[1])),
                pairs=[],
            )
        )
        for pair in pairs.get(step["state_sha256"], []):
            views[-1].pairs.append(ShownPair(pair, difference(pair["rejected"], pair["chosen"])))
    blocks = {name: block(value) for name, value in texts.items()}
    return TranscriptView(rollout_id, outcome, views, [] if views else _conversation(row, steps), more, blocks)


def item(row: Row) -> TranscriptView:
    """Return an item of an evaluation as the comparison of two arms shows it."""
    names = ("passed", "hacked", "num_steps", "terminated_by", "error_type", "error")
    outcome = {name: row[name] for name in names if row[name] is not None}
    texts = {name: block(row[name]) for name in ("submission", "test_log") if row[name]}
    return TranscriptView(row["item_id"], outcome, [], _conversation(row, []), texts=texts)


def _rows_by_state(root: Path, run: Run, kind: Kind, states: Sequence[str]) -> dict[str, list[Row]]:
    """Return the rows about these states in the runs made from this one, each with its run."""
    found: dict[str, list[Row]] = {}
    # Teachers' actions are in the runs made from this one, pairs in those made from these.
    children = made_from(root, run)
    others = {one.path: one for one in [*children, *(g for child in children for g in made_from(root, child))]}
    for other in others.values():
        if not other.holds(kind) or other.manifest.status != "complete":
            continue
        for row in queries.at_states(other, kind, states):
            found.setdefault(row["state_sha256"], []).append({**row, "run": other})
    return found


def _conversation(row: Row, steps: Sequence[Row]) -> list[tuple[SaidMessage, list[MarkedLine]]]:
    return [(one, block(one.content)) for one in said(row, steps)]


def pieces(row: Row, tokenizer: "Tokenizer | None") -> list[TokenPiece]:
    """Return the tokens of a step's answer with log-probs, as ids without a tokenizer; empty without log-probs."""
    ids, logprobs = row.get("completion_token_ids"), row.get("logprobs")
    if not ids or not logprobs or len(ids) != len(logprobs):
        return []
    found, held, total = list[TokenPiece](), list[int](), 0.0
    for number, (token, value) in enumerate(zip(ids, logprobs, strict=True), start=1):
        held.append(token)
        total += value
        # A character may be cut into several tokens, which decode to U+FFFD until the last of them.
        text = tokenizer.decode(held, skip_special_tokens=False) if tokenizer else f"{token} "
        if number == len(ids) or not text.endswith(UNFINISHED):
            # Level 0 is for what was nearly certain, 5 for what was nearly impossible.
            special = tokenizer is not None and bool(text) and not tokenizer.decode(held, skip_special_tokens=True)
            found.append(TokenPiece(text, total, sum(total < edge for edge in LEVELS), special))
            held, total = [], 0.0
    return found


def find_tokenizer(run: Run, root: Path) -> "Tokenizer | None":
    """Return the tokenizer of the policy that played a run; None where it is not on this machine.

    It is looked for in a folder of the model's name, this run's checkpoint, the models kept below the artifacts folder,
    and the hub's cache.
    """
    models = [str(about.get("model", "")) for about in run.manifest.models.values() if isinstance(about, dict)]
    name = next((model for model in models if model), "")
    environment, colon, short = name.partition(":")
    kept = sorted((root / "models").glob(f"{environment}-{short}-*")) if colon and "/" not in short else []
    own = [run.folder(CHECKPOINT)] if run.holds(CHECKPOINT) else []
    folders = [*([Path(name)] if name and not colon else []), *own, *reversed(kept)]
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        from huggingface_hub import try_to_load_from_cache

        if isinstance(cached := try_to_load_from_cache(name, "tokenizer.json"), str):
            folders.append(Path(cached).parent)
    path = next((folder / "tokenizer.json" for folder in folders if (folder / "tokenizer.json").is_file()), None)
    return None if path is None else _load_tokenizer(str(path))


@lru_cache(4)
def _load_tokenizer(path: str) -> "Tokenizer":
    from tokenizers import Tokenizer

    return Tokenizer.from_file(path)
