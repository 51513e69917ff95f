"""One rollout, or one item of an evaluation: its row, its messages, and what is known of each of its steps.

`composer show RUN ROLLOUT`, the pages and the Python interface all read a rollout here; `OUTCOME` lists its columns.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from composer_cli.show.facts import display_path
from composer_stages.errors import BadInput, UsageError
from composer_stages.layout import shortened
from composer_stages.messages import Message
from composer_stages.policy import base
from composer_stages.rollouts.history import SUMMARY_REQUEST
from composer_stages.rollouts.trace import item_steps, rollout_units, states
from composer_stages.runs import queries
from composer_stages.runs.display import plain
from composer_stages.runs.index import readers_of
from composer_stages.runs.kinds import CHECKPOINT, PAIR, TEACHER_ACTION, Kind, Row
from composer_stages.runs.run import Run
from composer_stages.words import Sentence

if TYPE_CHECKING:
    from tokenizers import Tokenizer


LONGEST_REASON = 400
"""Characters of a scorer's explanation that are shown."""


@dataclass(frozen=True)
class RolloutColumn:
    """A column of rollouts and of evaluated items.

    title: for people; the name without underscores where it is empty. opens: whether the page of a rollout shows it at
    once. grades: whether it tells how the rollout was graded. listed: whether a list of rollouts can show it; usual:
    whether it does so without being asked to.
    """

    name: str
    title: str = ""
    format: str = ""
    opens: bool = False
    grades: bool = False
    listed: bool = False
    usual: bool = False


OUTCOME = (
    RolloutColumn("outcome", opens=True),
    RolloutColumn("reward", opens=True, grades=True),
    RolloutColumn("passed", grades=True),
    RolloutColumn("arm", opens=True, listed=True, usual=True),
    RolloutColumn("prompt", listed=True, usual=True),
    RolloutColumn("task_id", "task", listed=True),
    RolloutColumn("family", opens=True, listed=True, usual=True),
    RolloutColumn("seed", format="count", listed=True),
    RolloutColumn("sample_idx", "sample", format="count", listed=True),
    RolloutColumn("ground", "ground of the pass", opens=True, grades=True, listed=True),
    RolloutColumn("hidden_pass", "hidden tests pass", opens=True, grades=True, listed=True),
    RolloutColumn("visible_pass", "visible tests pass", opens=True, grades=True, listed=True),
    RolloutColumn("hacked", opens=True, grades=True),
    RolloutColumn("protocol_ok", "followed the protocol", opens=True, grades=True, listed=True),
    RolloutColumn("broken_rule", "broken rule", opens=True, grades=True),
    RolloutColumn("target", opens=True, grades=True),
    RolloutColumn("scores", opens=True, grades=True),
    RolloutColumn("error_type", opens=True),
    RolloutColumn("error", opens=True),
    RolloutColumn("num_steps", "steps", format="count", opens=True, listed=True, usual=True),
    RolloutColumn("tokens", format="count", listed=True),
    RolloutColumn("cost_usd", "USD", format="usd", listed=True),
    RolloutColumn("terminated_by", "ended by", opens=True, listed=True, usual=True),
    RolloutColumn("notes", listed=True, usual=True),
    RolloutColumn("model", opens=True),
    RolloutColumn("file", opens=True),
    RolloutColumn("test_log", "log of the tests"),
    RolloutColumn("submission", "submitted patch"),
    RolloutColumn("wall_s", "took"),
)
"""The columns by which a rollout is listed, shown and graded, in the order in which they are read."""
TITLES = {column.name: column.title for column in OUTCOME if column.title}
HIDDEN = ("transcript_json", "steps_json", "extra_json", "file_row", "rollout_id", "item_id", "group_id", "source")
"""Columns that the page of a rollout leaves out."""
CANDIDATES = 10
"""Rollouts that are named where a part of an id fits several."""
FAILED_TEST = re.compile(r"^(?:FAILED|FAIL:?|ERROR:?) +(.{1,120})", re.M)
LEVELS = (-0.05, -0.3, -1.0, -2.0, -4.0)
"""Natural logs of probabilities at which the colour changes: 95 %, 74 %, 37 %, 14 %, 2 %."""
UNFINISHED = "\ufffd"
"""The decoder's character for bytes that do not yet make one."""


def title_of(column: str) -> str:
    """Return the title of a column for people."""
    return TITLES.get(column, column.replace("_", " "))


@dataclass(frozen=True)
class ShownMessage:
    """A message of a rollout; `step`: of an action and of what was observed after it, from 1; `notes`: what was cut."""

    role: str
    content: str
    step: int | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Return its author, its step, and what was cut."""
        who = "observation" if self.step is not None and self.role != "assistant" else self.role
        at = "" if self.step is None else f", step {self.step}"
        return " \u00b7 ".join([f"{who}{at}", *self.notes])


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
class ShownStep:
    """One step: its row, the messages before it, its tokens, and the teachers' actions and pairs in its state.

    new: without the earlier action and its observation. by_id: whether tokens could not be turned into text. answers:
    the teachers' rows by action, the most frequent first.
    """

    row: Row
    new: list[Message]
    tokens: list[TokenPiece]
    by_id: bool
    answers: list[tuple[str, list[Row]]]
    pairs: list[Row]

    @property
    def failed(self) -> list[str]:
        """Return the tests that its observation reports as failed."""
        return FAILED_TEST.findall(self.row["observation"] or "")


@dataclass(frozen=True)
class ShownRollout:
    """One rollout: all its columns with its `outcome` in words, and its messages without the patch that ended it.

    steps: empty unless `read` was asked for them.
    """

    row: Row
    messages: list[ShownMessage]
    steps: list[ShownStep] = field(default_factory=list)

    @property
    def rollout_id(self) -> str:
        """Return its id, which is unique in its run."""
        return str(self.row.get("rollout_id") or self.row["item_id"])

    @property
    def title(self) -> str:
        """Return its id with its outcome and its reward."""
        reward = self.row.get("reward")
        return f"{self.rollout_id}: {self.row['outcome']}" + ("" if reward is None else f", reward {reward:g}")

    @property
    def known(self) -> Row:
        """Return the columns that have a value, those of OUTCOME first; without ids and conversations."""
        order = [*(column.name for column in OUTCOME), *self.row]
        return {name: self.row[name] for name in order if self.row.get(name) not in (None, "") and name not in HIDDEN}

    @property
    def texts(self) -> dict[str, str]:
        """Return the columns of several lines, such as the log of the tests."""
        return {name: text for name, text in self.known.items() if isinstance(text, str) and "\n" in text.strip()}

    @property
    def outcome(self) -> Row:
        """Return the columns that its page shows at once."""
        opens = {column.name for column in OUTCOME if column.opens} - self.texts.keys()
        return {name: value for name, value in self.known.items() if name in opens}

    @property
    def more(self) -> Row:
        """Return the columns that are neither texts nor shown at once."""
        opened = self.texts.keys() | self.outcome.keys()
        return {name: value for name, value in self.known.items() if name not in opened}

    def as_json(self) -> dict[str, Any]:
        """Return its columns but the conversation, which the messages hold, and its messages."""
        hidden = ("transcript_json", "steps_json", "file_row")
        columns = {name: value for name, value in self.row.items() if name not in hidden}
        return {"rollout": columns, "messages": self.messages}

    def opening(self, folder: Path) -> dict[str, str]:
        """Return the identity and outcome of the rollout, by label, where known; `folder`: of its run."""
        row = self.row
        sample = "" if row["sample_idx"] is None else f", sample {row['sample_idx']}"
        family = f", family {row['family']}" if row["family"] not in (None, row["task_id"]) else ""
        tokens = row.get("completion_tokens") if row.get("arm") is None else row.get("sampled_tokens")
        sampled = f", {tokens:,} sampled tokens" if tokens else ""
        facts = {
            "run": str(display_path(folder)),
            "arm": "" if row.get("arm") is None else f"{row['arm']}, training seed {row['train_seed']}",
            "task": f"{row['task_id']}{sample}{family}",
            "model": row.get("model"),
            "file": row.get("file"),
            "steps": "" if row["num_steps"] is None else f"{row['num_steps']}{sampled}",
            "ended by": row["terminated_by"],
        }
        return {label: str(value) for label, value in facts.items() if value}

    def blocks(self) -> Iterator[tuple[str, str]]:
        """Yield its messages and the patch that it made, each with its title."""
        yield from ((message.title, message.content) for message in self.messages)
        if patch := self.row.get("submission"):
            yield "submitted patch", patch
        elif patch := self.row.get("patch"):
            yield "changes, not submitted", patch

    def grading(self) -> dict[str, str]:
        """Return the numbers and verdicts behind its reward by their titles; empty where it was not graded."""
        row = self.row
        grades = {title_of(column.name): row.get(column.name) for column in OUTCOME if column.grades}
        for name, words in (("f2p", "fail-to-pass tests"), ("p2p", "pass-to-pass tests")):
            if row.get(f"{name}_total") is not None:
                grades[words] = f"{row[f'{name}_passed']} of {row[f'{name}_total']} pass"
        for name, value in orjson.loads(row.get("metrics_json") or "{}").items():
            grades.setdefault(name, value)
        grades["searched for the solution"] = ", ".join(row.get("canary") or ())
        return {name: plain(value) for name, value in grades.items() if value not in (None, "")}

    def logs(self) -> Iterator[tuple[str, str]]:
        """Yield the reasons of its grade, each text with its title: the log of the tests, and the error."""
        if self.row.get("test_log"):
            yield "log of the tests", self.row["test_log"]
        if self.row["error_type"] or self.row["error"]:
            yield ": ".join(filter(None, ("error", self.row["error_type"]))), self.row["error"] or ""


def find(run: Run, text: str) -> ShownRollout:
    """Return the rollout with this id, or part of an id; `BadInput` unless exactly one fits."""
    fitting = queries.rollout_ids(run, text)
    if len(fitting) > 1:
        some = ", ".join(queries.short_ids(run, fitting[:CANDIDATES]))
        more = len(fitting) - CANDIDATES
        raise BadInput("cli.several-rollouts-fit", rollouts=len(fitting), text=text, examples=some, more=more)
    if not fitting:
        ids = queries.rollout_ids(run)
        if not ids:
            raise BadInput("cli.no-rollouts", run=run.path)
        near = get_close_matches(text, ids, n=1) or ids[:1]
        raise BadInput("cli.no-rollout", run=run.path, text=text, rollouts=len(ids), example=near[0])
    rollout = read(run, fitting[0])
    assert rollout is not None  # noqa: S101 (its id was just found)
    return rollout


def read(run: Run, rollout_id: str, *, root: Path | None = None) -> ShownRollout | None:
    """Return a rollout or an item; None where the run has none of that id.

    root: the artifacts folder, which has teachers' actions and pairs. Without it there are no `steps`.
    """
    row, steps = queries.rollout(run, rollout_id)
    if row is None:
        return None
    rollout = of_row(row, steps := steps or item_steps(row))
    return rollout if root is None else replace(rollout, steps=_steps(root, run, steps))


def broken_rule(row: Row, steps: Sequence[Row]) -> str:
    """Return the rule of the protocol that a rollout broke first, and at which step, as far as its rows tell."""
    for step in steps:
        if step["parse_error"]:
            return Sentence("cli.malformed-action", step=step["step"] + 1, error=step["parse_error"])
    rules = {
        "submitted": "its actions are well-formed and it submitted; what is left is to run the tests before that",
        "answered": "its answer has not the form that the environment asks for",
    }
    ended = row.get("terminated_by") or "an error"
    return rules.get(ended, Sentence("cli.did-not-submit", ended=ended))


def exchange(run: Run, rollout_id: str, step: int) -> dict[str, Any] | None:
    """Return what the model was asked at a step, from 0, and what came back, as recorded; None without such a step."""
    row, steps = queries.rollout(run, rollout_id)
    steps = steps or (item_steps(row) if row else [])
    if row is None or not 0 <= step < len(steps):
        return None
    response = {name: value for name, value in steps[step].items() if value is not None}
    request = {"model": response.pop("model", None), "seed": response.pop("seed", None)}
    sampling, tools = orjson.loads(response.pop("sampling_json", "{}")), orjson.loads(row.get("tools_json") or "[]")
    del response["new_messages_json"]
    return {"request": {**request, **sampling, "tools": tools, "messages": states(steps)[step]}, "response": response}


def of_row(row: Row, steps: Sequence[Row] = ()) -> ShownRollout:
    """Return a rollout or an item from its row, and the rows of its steps where it has any."""
    steps = steps or item_steps(row)
    broken = {"broken_rule": broken_rule(row, steps)} if row.get("protocol_ok") is False else {}
    if steps:
        conversation = list(_of_steps(steps, row.get("submission")))
    else:  # of an evaluation, whose items may have a conversation alone
        messages: list[Message] = orjson.loads(row.get("transcript_json") or "[]")
        conversation = [ShownMessage(message["role"], message["content"]) for message in messages]
    scores = {"scores": words} if (words := _scores(row.get("extra_json"))) else {}
    return ShownRollout({**row, **broken, **scores, "outcome": queries.outcome(row)}, conversation)


def _scores(extra_json: str | None) -> str:
    """Return what each scorer of an imported rollout gave, with the answer that it read and its explanation.

    Empty where no score is kept.
    """
    scores = orjson.loads(extra_json or "{}").get("scores")
    entries = scores.items() if isinstance(scores, dict) else ()
    return "; ".join(_score(name, score) for name, score in entries if isinstance(score, dict))


def _score(name: str, score: dict[str, Any]) -> str:
    answer, reason = score.get("answer"), str(score.get("explanation") or "").strip()
    words = f"{name} {plain(score.get('value'))}{'' if answer is None else f' for the answer {answer}'}"
    return f"{words}: {shortened(reason, LONGEST_REASON)}" if reason not in ("", str(answer)) else words


def read_rows(run: Run) -> Iterator[tuple[Row, list[Row]]]:
    """Yield the row and the steps of every rollout and item of a run, finished or not."""
    for rollout in rollout_units(run.units()).values():
        yield rollout["rollout"], rollout["steps"]
    # An evaluation keeps each conversation as a text in its item.
    if run.manifest.stage == "evaluate":
        for unit in run.units():
            yield unit["item"], item_steps(unit["item"])


def _of_steps(steps: Sequence[Row], submission: str | None) -> Iterator[ShownMessage]:
    """Yield the messages of a rollout from its steps; of the last observation not the submitted patch."""
    before: Row | None = None
    for number, step in enumerate(steps, start=1):
        notes = _observation_notes(before) if before is not None else []
        for message, observed in _gained(step, before):
            yield ShownMessage(
                message["role"], message["content"], number - 1 if observed else None, notes if observed else []
            )
            notes = [] if observed else notes
        yield ShownMessage("assistant", step["action"], number, _action_notes(step))
        before = step
    last = steps[-1]
    if last["observation"] and last["observation"] != submission:
        yield ShownMessage("user", last["observation"], len(steps), _observation_notes(last))


def _gained(step: Row, before: Row | None) -> Iterator[tuple[Message, bool]]:
    """Yield the messages between two actions, each with whether the action before them led to it."""
    gained: list[Message] = orjson.loads(step["new_messages_json"])
    if before is not None and gained[:1] == [{"role": "assistant", "content": before["action"]}]:
        gained = gained[1:]
    for message in gained:
        yield message, before is not None and message["role"] in ("user", "tool") and message != SUMMARY_REQUEST


def _action_notes(step: Row) -> list[str]:
    """Return what a reader has to know about an action."""
    notes = []
    if step["truncated"]:
        limit = orjson.loads(step["sampling_json"] or "{}").get("max_tokens")
        notes.append(f"cut off at max_tokens{f' = {limit}' if limit else ''}")
    return [*notes, *([f"not well-formed: {step['parse_error']}"] if step["parse_error"] else [])]


def _observation_notes(step: Row) -> list[str]:
    """Return what a reader has to know about an observation, as far as the observation itself does not tell it."""
    notes = []
    if step["elided_chars"]:
        total = f" of {step['raw_chars']:,}" if step["raw_chars"] else ""
        notes.append(f"cut by the environment: {step['elided_chars']:,}{total} characters left out")
    if step["timed_out"]:
        notes.append("timed out")
    if step["returncode"] is not None and f"[exit {step['returncode']}" not in (step["observation"] or ""):
        notes.append(f"exit code {step['returncode']}")
    return notes


# What other runs know of its steps.


def _steps(root: Path, run: Run, steps: Sequence[Row]) -> list[ShownStep]:
    """Return steps with their tokens, and with what was made from their states."""
    states = [step["state_sha256"] for step in steps if step["state_sha256"]]
    answers, pairs = (_rows_by_state(root, run, kind, states) for kind in (TEACHER_ACTION, PAIR))
    tokenizer = find_tokenizer(run)
    shown_steps = []
    for before, step in zip([None, *steps], steps, strict=False):
        by_action: dict[str, list[Row]] = {}
        for answer in answers.get(step["state_sha256"], []):
            by_action.setdefault(answer["action"] or f"({answer['error_type']}: {answer['error']})", []).append(answer)
        shown_steps.append(
            ShownStep(
                row=step,
                new=[message for message, observed in _gained(step, before) if not observed],
                tokens=pieces(step, tokenizer),
                by_id=tokenizer is None,
                answers=sorted(by_action.items(), key=lambda item: -len(item[1])),
                pairs=pairs.get(step["state_sha256"], []),
            )
        )
    return shown_steps


def _rows_by_state(root: Path, run: Run, kind: Kind, states: Sequence[str]) -> dict[str, list[Row]]:
    """Return the rows about these states in the runs made from this one."""
    by_state: dict[str, list[Row]] = {}
    # Teachers' actions are in the runs made from this one, pairs in those made from these.
    children = readers_of(root, run)
    grandchildren = (run for child in children for run in readers_of(root, child))
    readers = {run.path: run for run in (*children, *grandchildren)}
    for reader in readers.values():
        if not reader.holds(kind) or reader.manifest.status != "complete":
            continue
        for row in queries.at_states(reader, kind, states):
            by_state.setdefault(row["state_sha256"], []).append(row)
    return by_state


def pieces(row: Row, tokenizer: "Tokenizer | None") -> list[TokenPiece]:
    """Return the tokens of a step's answer with log-probs, as ids without a tokenizer; empty without log-probs."""
    ids, logprobs = row.get("completion_token_ids"), row.get("logprobs")
    if not ids or not logprobs or len(ids) != len(logprobs):
        return []
    token_pieces, pending, total = list[TokenPiece](), list[int](), 0.0
    for number, (token, value) in enumerate(zip(ids, logprobs, strict=True), start=1):
        pending.append(token)
        total += value
        # A character may be cut into several tokens, which decode to U+FFFD until the last of them.
        text = tokenizer.decode(pending, skip_special_tokens=False) if tokenizer else f"{token} "
        if number == len(ids) or not text.endswith(UNFINISHED):
            # Level 0 is for what was nearly certain, 5 for what was nearly impossible.
            special = tokenizer is not None and bool(text) and not tokenizer.decode(pending, skip_special_tokens=True)
            token_pieces.append(TokenPiece(text, total, sum(total < edge for edge in LEVELS), special))
            pending, total = [], 0.0
    return token_pieces


def find_tokenizer(run: Run) -> "Tokenizer | None":
    """Return the tokenizer of the policy that played a run; None where it is not on this machine.

    It is looked for in a folder of the model's name, this run's checkpoint, the built-in models, and the hub's cache.
    """
    models = [str(about.get("model", "")) for about in run.manifest.models.values() if isinstance(about, dict)]
    name = next((model for model in models if model), "")
    checkpoints = [run.folder(CHECKPOINT)] if run.holds(CHECKPOINT) else []
    folders = [*([Path(name)] if name and ":" not in name else []), *checkpoints]
    if built_in := base.maker_of(name):
        maker, short = built_in
        with suppress(BadInput, UsageError):  # a run may name a model that there is no more
            folders += [] if maker.to_make(short) else [maker.ensure(short, lambda *progress: None)]
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
