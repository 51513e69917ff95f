"""Claude Code transcripts: one session a file of JSON Lines, as in `~/.claude/projects`.

Lines are a tree: each names the one before it. An answer of the model is cut into a line a content part, which share a
message id; an edited or repeated request makes a branch; a compaction begins a tree of its own; a sub-agent's lines are
marked as a side chain, or are in a file of their own. Every branch is a rollout, the last one first. An action that
several branches share is a step of one of them only, and context of the others.

The file holds no system prompt, no declarations of tools, nothing that hooks added, and no verdict.

The format has no specification. Read from the description of skillsynchq/txcript, `docs/formats/claude-code.md` at
1907ec4ce (checked there against sessions of the versions up to 2.1.227).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from composer_stages.formats.base import (
    Drop,
    ImportedTurn,
    NumberedRecord,
    Origin,
    Reader,
    Record,
    Trajectory,
    path_to_root,
    seconds,
)
from composer_stages.formats.messages import context, conversation, text, user_messages
from composer_stages.messages import Message
from composer_stages.rollouts import missing
from composer_stages.words import Sentence

NAME = "claude-code"
MISSING = frozenset({missing.OPENING, missing.PARSE})
SPOKEN = ("user", "assistant")
LONGEST = 200_000
"""Limit on lines of a session, and on answers of all its branches together."""
STOPS = {"end_turn": "stop", "stop_sequence": "stop", "tool_use": "tool_calls", "max_tokens": "length"}
LINKS = ("uuid", "parentUuid", "isSidechain")
KEPT = (*LINKS, "type", "sessionId", "agentId", "isApiErrorMessage", "timestamp", "costUSD")
SESSION = "claude_code_session"
SYNTHETIC = "<synthetic>"
"""The model's name in messages of the program itself."""


def recognises(record: Any) -> bool:
    """Whether a record is a line of a session, or the joined lines of one."""
    if not isinstance(record, dict):
        return False
    if record.get("type") in SPOKEN:
        return "uuid" in record and "sessionId" in record and isinstance(record.get("message"), dict)
    # A file may begin with bookkeeping: summaries have `leafUuid` and no `sessionId`, snapshots of files have neither.
    noted = isinstance(record.get("type"), str) and bool({"leafUuid", "sessionId"} & record.keys())
    return SESSION in record or noted or record.get("type") == "file-history-snapshot"


def join(
    records: Iterator[NumberedRecord | Drop], make_drop: Callable[[int, str, str], Drop], limit: int = LONGEST
) -> Iterator[NumberedRecord | Drop]:
    """Yield the lines of a file as one record, and a drop for every broken line."""
    lines: list[Record] = []
    first = 1
    for record in records:
        if isinstance(record, Drop):
            yield record
            continue
        number, line = record
        first = first if lines else number
        if problem := _problem(line):
            yield make_drop(number, "malformed_line", problem)
        elif len(lines) == limit:
            yield make_drop(number, "session_too_long", Sentence("formats.session-too-long", limit=limit))
            break
        elif isinstance(line.get("uuid"), str):
            # The tree needs links alone of bookkeeping, and of a message no second copy of its results.
            if line["type"] in SPOKEN:
                about = {
                    name: line[name] for name in ("cwd", "gitBranch", "version") if isinstance(line.get(name), str)
                }
                fields = {name: line[name] for name in KEPT if name in line}
                lines.append({**fields, "message": line["message"], "about": about})
            else:
                lines.append({**{name: line[name] for name in LINKS if name in line}, "type": "link"})
    yield first, {SESSION: lines}


def _problem(line: Any) -> str | None:
    """Return why a line cannot be part of a session, None if it can; bookkeeping of any shape can."""
    if not isinstance(line, dict) or not isinstance(line.get("type"), str):
        return Sentence("formats.line-without-type")
    if line["type"] not in SPOKEN:
        return None
    if not isinstance(line.get("uuid"), str):
        return Sentence("formats.line-uuid-not-text")
    message = line.get("message")
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, str) and not (isinstance(content, list) and all(isinstance(p, dict) for p in content)):
        return Sentence("formats.line-without-message")
    return None


@dataclass(eq=False)
class SessionAnswer:
    """One answer of the model: its lines in the order of the file, which share a message id.

    `message` and `is_side` are set when all lines are known.
    """

    key: str
    lines: list[Record] = field(default_factory=list)
    parent: "SessionAnswer | None" = None

    message: Record = field(default_factory=dict)
    """The last message, with the last value of each key that any line has: usage and stop reason are final."""
    is_side: bool = False
    """Whether a sub-agent gave the answer."""

    def __str__(self) -> str:
        return self.key


class ClaudeSession:
    """The answers of a session as a tree, and the messages of user, tools and program between them.

    `leaves` are the last answers of all branches: the main conversation's first, the latest first. Of lines with one
    uuid the first counts. All walks are loops, not recursion, since sessions are long. `failures` are
    the program's notes of failed requests by the answer before; after the last answer, the note ended the branch.

    Raises `ValueError` if a line is its own ancestor.
    """

    def __init__(self, lines: list[Record]) -> None:
        self._lines: dict[str, Record] = {}
        for line in lines:
            self._lines.setdefault(line["uuid"], line)
        # The line before; None if there is none, or where a sub-agent's conversation begins.
        self._parents: dict[str, str | None] = {}
        for uuid, line in self._lines.items():
            parent = line.get("parentUuid")
            before = self._lines.get(parent) if isinstance(parent, str) else None
            # `parentUuid` is null at the beginning and after a compaction, and may name a line of another file.
            begins = before is None or (line.get("isSidechain") and not before.get("isSidechain"))
            self._parents[uuid] = None if begins else parent
        self._order = order = {uuid: number for number, uuid in enumerate(self._lines)}
        self._answers: dict[str, SessionAnswer] = {}
        self._answer_of: dict[str, SessionAnswer] = {}
        for uuid, line in self._lines.items():
            is_synthetic = line.get("isApiErrorMessage") or line.get("message", {}).get("model") == SYNTHETIC
            if line["type"] == "assistant" and not is_synthetic:
                key = str(line["message"].get("id") or uuid)
                answer = self._answer_of[uuid] = self._answers.setdefault(key, SessionAnswer(key))
                answer.lines.append(line)
        nearest = self._nearest_answers()
        for answer in self._answers.values():
            # The lines of one answer follow each other, or results of parallel calls.
            before_lines = (nearest.get(self._parents[line["uuid"]] or "") for line in answer.lines)
            answer.parent = next((near for near in before_lines if near is not None and near is not answer), None)
            # A line is written while the answer streams: its stop reason may be null and its usage too low until the
            # last line.
            for line in answer.lines:
                values = {name: value for name, value in line["message"].items() if value is not None}
                answer.message = {**answer.message, **values}
            answer.is_side = bool(answer.lines[-1].get("isSidechain"))
        inner = {answer.parent.key for answer in self._answers.values() if answer.parent}
        ends = [answer for answer in self._answers.values() if answer.key not in inner]
        self.leaves = sorted(ends, key=lambda answer: (answer.is_side, -order[answer.lines[-1]["uuid"]]))
        self._inputs: dict[str | None, list[Record]] = defaultdict(list)
        self.failures: dict[str, Record] = {}
        for uuid, line in self._lines.items():
            near = nearest[uuid]
            if near is not None and line.get("isApiErrorMessage"):
                self.failures[near.key] = line
            if line["type"] == "user":
                self._inputs[near.key if near else None].append(line)

    def _nearest_answers(self) -> dict[str, SessionAnswer | None]:
        """Return the answer that each line belongs to or follows."""
        nearest: dict[str, SessionAnswer | None] = {}
        for start in self._lines:
            walked: dict[str, None] = {}
            at: str | None = start
            while at is not None and at not in nearest and at not in self._answer_of:
                if at in walked:
                    raise ValueError(Sentence("formats.own-ancestor", node=f"the line {at}"))
                walked[at] = None
                at = self._parents[at]
            near = None if at is None else self._answer_of.get(at) or nearest.get(at)
            nearest.update(dict.fromkeys(walked, near))
            if start in self._answer_of:
                nearest[start] = self._answer_of[start]
        return nearest

    def path(self, leaf: SessionAnswer) -> list[SessionAnswer]:
        """Return the answers from the root to a leaf."""
        return path_to_root(leaf, lambda answer: answer.parent, "the answer")[::-1]

    def lines_before(self, answer: SessionAnswer) -> list[Record]:
        """Return the lines between the answer before and this one, the oldest first."""
        between: dict[str, Record] = {}
        for line in answer.lines:
            at = self._parents[line["uuid"]]
            while at is not None and at not in self._answer_of and at not in between:
                between[at] = self._lines[at]
                at = self._parents[at]
        return sorted(between.values(), key=lambda line: self._order[line["uuid"]])

    def inputs_after(self, answer: SessionAnswer, following: SessionAnswer | None) -> list[Record]:
        """Return the user's lines between an answer and the next one of its branch, in their order.

        Without a next one, all lines after the answer. Results of parallel calls are beside the branch in the tree and
        belong to it by the ids of the calls.
        """
        inputs = self._inputs[answer.key]
        if following is None:
            return inputs
        on_branch = {line["uuid"] for line in self.lines_before(following)}
        contents = [line["message"]["content"] for line in answer.lines]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        calls = {str(part.get("id")) for part in parts if part.get("type") == "tool_use"}
        selected = []
        for line in inputs:
            content = line["message"]["content"]
            answered = {
                str(part.get("tool_use_id"))
                for part in (content if isinstance(content, list) else [])
                if isinstance(part, dict) and part.get("type") == "tool_result"
            }
            if line["uuid"] in on_branch or (answered and answered <= calls):
                selected.append(line)
        return selected


def trajectories(record: Record, origin: Origin, limit: int = LONGEST) -> Iterator[Trajectory | Drop]:
    """Yield one rollout a branch; a drop for each branch after so many answers."""
    session = ClaudeSession(record[SESSION])
    leaves = session.leaves
    if not leaves:
        yield origin.make_drop("no_actions", Sentence("formats.session-without-answer"))
    main = next((leaf.key for leaf in leaves if not leaf.is_side), None)
    yielded: set[str] = set()
    walked = 0
    for leaf in leaves:
        if walked > limit:
            yield origin.make_drop("too_many_branches", Sentence("formats.too-many-branches", limit=limit))
            continue
        path = session.path(leaf)
        walked += len(path)
        yield _rollout(session, path, yielded, is_main=leaf.key == main)
        yielded |= {answer.key for answer in path}


def _rollout(session: ClaudeSession, path: list[SessionAnswer], yielded: set[str], *, is_main: bool) -> Trajectory:
    lines = [line for line in session.lines_before(path[0]) if line["type"] == "user"]
    opening = conversation(item for line in lines for item in user_messages(line["message"]["content"]))
    turns: list[ImportedTurn] = []
    for answer, following in zip(path, [*path[1:], None], strict=True):
        inputs = session.inputs_after(answer, following)
        turn = _turn(answer, [item for line in inputs for item in user_messages(line["message"]["content"])])
        if answer.key in yielded:
            messages: list[Message] = [{"role": "assistant", "content": turn.action}, *turn.observed]
            context(opening, turns).extend(messages)
        else:
            turns.append(turn)
    last, new = path[-1], [answer for answer in path if answer.key not in yielded]
    last_line = last.lines[-1]
    name = str(last_line.get("sessionId") or "session")
    name = f"{name}/{last_line['agentId']}" if last_line.get("agentId") else name
    # A user may switch the model within a session (`/model`), so only the answers that are steps here count.
    models = [answer.message.get("model") for answer in new]
    failure = session.failures.get(last.key)
    return Trajectory(
        opening=opening,
        turns=turns,
        judged=is_main,
        own_id=name if is_main else f"{name}/{last.key}",
        model=next((model for model in models if isinstance(model, str)), None),
        error=("api_error", text(failure["message"]["content"])) if failure else None,
        wall_s=seconds(new[0].lines[0].get("timestamp"), last_line.get("timestamp")),
        extra={
            "agent": f"{NAME} {last_line['about'].get('version', '')}".strip(),
            "sidechain": last.is_side,
            "models": sorted({model for model in models if isinstance(model, str)}),
            **last_line["about"],
        },
    )


def _turn(answer: SessionAnswer, observed: list[Record]) -> ImportedTurn:
    """Return an answer, whose parts are on several lines, as one action. Cached tokens count as prompt tokens."""
    parts: list[Record] = []
    for line in answer.lines:
        content = line["message"]["content"]
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    usage = answer.message.get("usage") or {}
    # Anthropic's `input_tokens` counts only what was neither read from the cache nor written to it.
    sent = [usage.get(k) for k in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")]
    inputs = [part["input"] for part in parts if part.get("name") == "Bash" and isinstance(part.get("input"), dict)]
    stop = answer.message.get("stop_reason")
    action, *observed_messages = conversation([{"role": "assistant", "content": parts}, *observed])
    return ImportedTurn(
        action["content"],
        observed_messages,
        commands=[entry["command"] for entry in inputs if "command" in entry] or None,
        finish_reason=STOPS.get(stop, stop) if stop else None,
        prompt_tokens=None if sent[0] is None else sum(part or 0 for part in sent),
        completion_tokens=usage.get("output_tokens"),
        cost_usd=answer.lines[-1].get("costUSD"),
    )


READERS = (Reader(NAME, recognises, trajectories, MISSING, join),)
