"""The lines of a Claude Code session as a tree of answers, walked without recursion however long or odd it is."""

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property

from stages.importers.base import Record

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
