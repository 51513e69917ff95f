"""Claude Code transcripts: one session a file of JSON Lines, as it lies under `~/.claude/projects`.

Lines are a tree: each names the one before it. An answer of the model is cut into a line a content part, which share a
message id; an edited or repeated request makes a branch; a compaction begins a tree of its own; a sub-agent's lines are
marked as a side chain, or lie in a file of their own. Every branch is a rollout, the last one first. An action that
several branches share is a step of one of them only, and context of the others.

The system prompt, the tools' declarations and what hooks added are not in the file, and nothing says whether the work
was good.

The format has no specification. Read from the description of skillsynchq/txcript, `docs/formats/claude-code.md` at
1907ec4ce (checked there against sessions of the versions up to 2.1.227).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from operator import not_
from typing import Any

from stages.formats.base import Drop, ImportedTurn, Numbered, Origin, Reader, Record, Trajectory, seconds
from stages.formats.messages import message, spoken, text
from stages.messages import Message, write
from stages.rollouts import missing
from stages.runs import store

# ---- claude_code_tree
# The lines of a Claude Code session as a tree of answers, walked without recursion however long or odd it is.

SYNTHETIC = "<synthetic>"
"""The model's name in messages that the program wrote itself."""


@dataclass
class Answer:
    """One answer of the model: its lines in the order of the file, which share a message id."""

    key: str
    lines: list[Record] = field(default_factory=list)
    parent: "Answer | None" = None

    @cached_property
    def message(self) -> Record:
        """The last line's message, whose usage and stop reason are the final ones, wherever one of them has these."""
        last: Record = {}
        for line in self.lines:
            last = {**last, **{name: value for name, value in line["message"].items() if value is not None}}
        return last

    @property
    def session(self) -> str:
        """The session, and the sub-agent where its lines name it."""
        line = self.lines[-1]
        name = str(line.get("sessionId") or "session")
        return f"{name}/{line['agentId']}" if line.get("agentId") else name

    @property
    def side(self) -> bool:
        """Whether a sub-agent gave it."""
        return bool(self.lines[-1].get("isSidechain"))

    def calls(self) -> set[str]:
        """The ids of its tool calls."""
        contents = [line["message"]["content"] for line in self.lines]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        return {str(part.get("id")) for part in parts if part.get("type") == "tool_use"}


class Session:
    """Answers and what the user, tools and the program said between them. The first line of a uuid counts.

    Raises `ValueError` where a line is its own ancestor.
    """

    def __init__(self, lines: list[Record]) -> None:
        self._lines: dict[str, Record] = {}
        for line in lines:
            self._lines.setdefault(line["uuid"], line)
        self._parents = {uuid: self._parent(line) for uuid, line in self._lines.items()}
        self._order = {uuid: number for number, uuid in enumerate(self._lines)}
        self._answers: dict[str, Answer] = {}
        self._answer_of: dict[str, Answer] = {}
        for uuid, line in self._lines.items():
            if line["type"] == "assistant" and not _is_synthetic(line):
                key = str(line["message"].get("id") or uuid)
                answer = self._answer_of[uuid] = self._answers.setdefault(key, Answer(key))
                answer.lines.append(line)
        self._nearest = self._nearest_answers()
        for answer in self._answers.values():
            answer.parent = self._before(answer)
        self._inputs: dict[str | None, list[Record]] = defaultdict(list)
        self._failures: dict[str, Record] = {}
        for uuid, line in self._lines.items():
            near = self._nearest[uuid]
            if near is not None and line.get("isApiErrorMessage"):
                self._failures[near.key] = line
            if line["type"] == "user":
                self._inputs[near.key if near else None].append(line)

    def _parent(self, line: Record) -> str | None:
        """The line before; None where there is none, or where a sub-agent's conversation begins."""
        parent = line.get("parentUuid")
        before = self._lines.get(parent) if isinstance(parent, str) else None
        return None if before is None or (line.get("isSidechain") and not before.get("isSidechain")) else parent

    def _nearest_answers(self) -> dict[str, Answer | None]:
        """For every line the answer that it belongs to or comes after."""
        found: dict[str, Answer | None] = {}
        for start in self._lines:
            walked: dict[str, None] = {}
            at: str | None = start
            while at is not None and at not in found and at not in self._answer_of:
                if at in walked:
                    raise ValueError(f"the line {at} is its own ancestor")
                walked[at] = None
                at = self._parents[at]
            near = None if at is None else self._answer_of.get(at) or found.get(at)
            found.update(dict.fromkeys(walked, near))
            if start in self._answer_of:
                found[start] = self._answer_of[start]
        return found

    def _before(self, answer: Answer) -> Answer | None:
        """The answer before another one; the lines of one answer follow each other, or results of parallel calls."""
        for line in answer.lines:
            near = self._nearest.get(self._parents[line["uuid"]] or "")
            if near is not None and near is not answer:
                return near
        return None

    def leaves(self) -> list[Answer]:
        """The last answers of all branches: the main conversation's first, the latest first."""
        inner = {answer.parent.key for answer in self._answers.values() if answer.parent}
        ends = [answer for answer in self._answers.values() if answer.key not in inner]
        return sorted(ends, key=lambda answer: (answer.side, -self._order[answer.lines[-1]["uuid"]]))

    def path(self, leaf: Answer) -> list[Answer]:
        """The answers from the beginning to a leaf."""
        steps: dict[str, Answer] = {}
        at: Answer | None = leaf
        while at is not None:
            if at.key in steps:
                raise ValueError(f"the answer {at.key} is its own ancestor")
            steps[at.key], at = at, at.parent
        return list(steps.values())[::-1]

    def before(self, first: Answer) -> list[Record]:
        """What was said to the model before its first answer."""
        return [line for line in self._ancestors(first) if line["type"] == "user"]

    def after(self, answer: Answer, following: Answer | None) -> list[Record]:
        """What came between an answer and the next one of its branch, the results of parallel calls in their order.

        With nothing following everything that came after it. Results of calls lie beside the branch.
        """
        came = self._inputs[answer.key]
        if following is None:
            return came
        there = {line["uuid"] for line in self._ancestors(following)}
        calls = answer.calls()
        return [line for line in came if line["uuid"] in there or ((results := _results(line)) and results <= calls)]

    def _ancestors(self, answer: Answer) -> list[Record]:
        """The lines between the answer before and this one, the oldest first."""
        found: dict[str, Record] = {}
        for line in answer.lines:
            at = self._parents[line["uuid"]]
            while at is not None and at not in self._answer_of and at not in found:
                found[at] = self._lines[at]
                at = self._parents[at]
        return sorted(found.values(), key=lambda line: self._order[line["uuid"]])

    def failure_after(self, answer: Answer) -> Record | None:
        """The program's note of a failed request right after an answer; where that is the last, it ended the branch."""
        return self._failures.get(answer.key)


def _is_synthetic(line: Record) -> bool:
    return bool(line.get("isApiErrorMessage")) or line["message"].get("model") == SYNTHETIC


def _results(line: Record) -> set[str]:
    """The calls whose results a line holds."""
    content = line["message"]["content"]
    parts = content if isinstance(content, list) else []
    return {str(p.get("tool_use_id")) for p in parts if isinstance(p, dict) and p.get("type") == "tool_result"}


NAME = "claude-code"
MISSING = frozenset({missing.REWARD, missing.OPENING, missing.PARSE, missing.ELISION, missing.CALL_IDS})
SPOKEN = ("user", "assistant")
LONGEST = 200_000
"""Lines that one session may have."""
STOPS = {"end_turn": "stop", "stop_sequence": "stop", "tool_use": "tool_calls", "max_tokens": "length"}
LINKS = ("uuid", "parentUuid", "isSidechain")
KEPT = (*LINKS, "type", "sessionId", "agentId", "isApiErrorMessage", "timestamp", "costUSD")
SESSION = "claude_code_session"


def recognises(record: Any) -> bool:
    """A line of a session, or the lines of one together."""
    if not isinstance(record, dict):
        return False
    if record.get("type") in SPOKEN:
        return "uuid" in record and "sessionId" in record and isinstance(record.get("message"), dict)
    noted = isinstance(record.get("type"), str) and bool({"leafUuid", "sessionId"} & record.keys())
    return SESSION in record or noted or record.get("type") == "file-history-snapshot"


def join(records: Iterator[Numbered | Drop], drop: Callable[[int, str, str], Drop]) -> Iterator[Numbered | Drop]:
    """The lines of a file as one record; lines that are broken are dropped one by one."""
    lines: list[Record] = []
    first = 1
    for record in records:
        if isinstance(record, Drop):
            yield record
            continue
        number, line = record
        first = first if lines else number
        if problem := _problem(line):
            yield drop(number, "malformed_line", problem)
        elif len(lines) == LONGEST:
            yield drop(number, "session_too_long", f"a session of more than {LONGEST} lines; the rest is left out")
            break
        elif isinstance(line.get("uuid"), str):
            lines.append(_kept(line))
    yield first, {SESSION: lines}


def _problem(line: Any) -> str | None:
    """Why a line cannot be part of a session. Bookkeeping of any shape can."""
    if not isinstance(line, dict) or not isinstance(line.get("type"), str):
        return "not an object with a type"
    if line["type"] not in SPOKEN:
        return None
    if not isinstance(line.get("uuid"), str):
        return "its uuid is no text"
    said = line.get("message")
    content = said.get("content") if isinstance(said, dict) else None
    if not isinstance(content, str) and not (isinstance(content, list) and all(isinstance(p, dict) for p in content)):
        return "it holds no message with content"
    return None


def _kept(line: Record) -> Record:
    """What the tree needs: links alone of bookkeeping, and of a message no second copy of its results."""
    if line["type"] in SPOKEN:
        about = {name: line[name] for name in ("cwd", "gitBranch", "version") if isinstance(line.get(name), str)}
        return {**{name: line[name] for name in KEPT if name in line}, "message": line["message"], "about": about}
    return {**{name: line[name] for name in LINKS if name in line}, "type": "link"}


def trajectories(record: Record, origin: Origin) -> Iterator[Trajectory | Drop]:
    """One rollout a branch."""
    session = Session(record[SESSION])
    leaves = session.leaves()
    if not leaves:
        yield origin.drop("no_actions", "the session holds no answer of a model")
    main = next((leaf.key for leaf in leaves if not leaf.side), None)
    taken: set[str] = set()
    walked = 0
    for leaf in leaves:
        if walked > LONGEST:
            yield origin.drop("too_many_branches", f"the branches together have more than {LONGEST} answers")
            continue
        path = session.path(leaf)
        walked += len(path)
        new = [answer for answer in path if answer.key not in taken]
        yield _rollout(session, path, taken, is_main=leaf.key == main)
        taken |= {answer.key for answer in new}


def _rollout(session: Session, path: list[Answer], taken: set[str], *, is_main: bool) -> Trajectory:
    opening: list[Message] = [item for line in session.before(path[0]) for item in _input(line["message"]["content"])]
    asked = next((item["content"] for item in opening if item["role"] == "user"), "")
    turns: list[ImportedTurn] = []
    for answer, following in zip(path, [*path[1:], None], strict=True):
        came = [m for line in session.after(answer, following) for m in _input(line["message"]["content"])]
        if answer.key in taken:
            said = {"role": "assistant", "content": _turn(answer).action}
            (turns[-1].observed if turns else opening).extend([said, *came])
        else:
            turns.append(_turn(answer, came))
    last, new = path[-1], [answer for answer in path if answer.key not in taken]
    name, models = last.session, [answer.message.get("model") for answer in new]
    failed = session.failure_after(last)
    return Trajectory(
        task_id=f"{NAME}/{store.digest(asked)[:12]}",
        env=NAME,
        opening=opening,
        turns=turns,
        missing=set(MISSING) | (set() if any(turn.finish_reason for turn in turns) else {missing.FINISH}),
        own_id=name if is_main else f"{name}/{last.key}",
        model=next((model for model in models if isinstance(model, str)), None),
        error=("api_error", text(failed["message"]["content"])) if failed else None,
        wall_s=seconds(new[0].lines[0].get("timestamp"), last.lines[-1].get("timestamp")),
        extra={
            "agent": f"{NAME} {last.lines[-1]['about'].get('version', '')}".strip(),
            "sidechain": last.side,
            "models": sorted({model for model in models if isinstance(model, str)}),
            **last.lines[-1]["about"],
        },
    )


def _input(content: Any) -> Iterator[Message]:
    """What a line of the user says: the results of calls, then everything else."""
    parts = content if isinstance(content, list) else [content]
    results = [isinstance(part, dict) and part.get("type") == "tool_result" for part in parts]
    for part in compress(parts, results):
        yield {"role": "tool", "content": text(part.get("content"))}
    if rest := list(compress(parts, map(not_, results))):
        yield message({"role": "user", "content": rest})


def _turn(answer: Answer, came: list[Message] | None = None) -> ImportedTurn:
    """An answer whose parts stand on several lines, as one action. Cached tokens count as tokens of the prompt."""
    parts = [part for line in answer.lines for part in _parts(line["message"]["content"])]
    said = spoken({"role": "assistant", "content": parts})
    usage = answer.message.get("usage") or {}
    sent = [usage.get(k) for k in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")]
    asked = [part["input"] for part in parts if part.get("name") == "Bash" and isinstance(part.get("input"), dict)]
    commands = [given["command"] for given in asked if "command" in given]
    stop = answer.message.get("stop_reason")
    return ImportedTurn(
        write(said),
        came or [],
        commands=commands or None,
        finish_reason=STOPS.get(stop, stop) if stop else None,
        prompt_tokens=None if sent[0] is None else sum(part or 0 for part in sent),
        completion_tokens=usage.get("output_tokens"),
        cost_usd=answer.lines[-1].get("costUSD"),
    )


def _parts(content: Any) -> list[Record]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


READERS = (Reader(NAME, MISSING, recognises, trajectories, join),)
