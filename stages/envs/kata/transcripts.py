"""Transcripts of training tasks, written as if an author with a given knowledge had worked on them.

Nothing is executed: what the files, the shell and the tests would say is known beforehand (a test plays transcripts in
the real environment and compares). Some hold a slip, so that models learn to recover; the slip itself is not taught.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from stages.envs.base import Task
from stages.envs.bash import SUBMIT, ActionError, fenced, parse_bash
from stages.envs.kata import tasks
from stages.envs.kata.language import expression
from stages.envs.kata.recipes import Knowledge
from stages.envs.kata.workspace import SOLUTION, TESTS
from stages.messages import Message

LOOK, TEST = f"cat {SOLUTION}", f"python3 {TESTS}"
SLIP_RATE = 0.25
UNKNOWN_COMMANDS = ("fix", "caat", "sedd", "pyton3")


@dataclass(frozen=True)
class TaughtTurn:
    """An assistant message and what came back, None after the last; a slip is not to be learned."""

    text: str
    answer: str | None
    taught: bool = True


@dataclass(frozen=True)
class TaughtTranscript:
    """One episode."""

    task: Task
    turns: tuple[TaughtTurn, ...]

    def messages(self) -> list[Message]:
        """The whole conversation."""
        messages = tasks.opening(self.task)
        for turn in self.turns:
            messages.append({"role": "assistant", "content": turn.text})
            if turn.answer is not None:
                messages.append({"role": "user", "content": turn.answer})
        return messages


def write(count: int, seed: int, knowledge: Knowledge) -> Iterator[TaughtTranscript]:
    """The first `count` transcripts of an author who has this knowledge."""
    for index, task in enumerate(tasks.generate("train", count, seed)):
        rng = random.Random(f"transcript/{seed}/{index}")  # noqa: S311 - draws data, no secret
        yield transcribe(task, knowledge, rng)


def transcribe(task: Task, knowledge: Knowledge, rng: random.Random) -> TaughtTranscript:
    """Look, edit, test, submit, with a slip in a quarter of all transcripts."""
    belief = _belief(task, knowledge, rng)
    look = TaughtTurn(fenced(LOOK), f"{task.data['original']}[exit 0]")
    edit = TaughtTurn(fenced(edit_command(task, belief)), "[exit 0]")
    test = TaughtTurn(fenced(TEST), verdict(task, belief))
    turns = [look, edit, test, TaughtTurn(fenced(SUBMIT), None)]
    if rng.random() < SLIP_RATE:
        turns = rng.choice((_with_wrong_edit, _with_unknown_command, _with_missing_file, _with_malformed))(
            task, turns, rng
        )
    return TaughtTranscript(task, tuple(turns))


def edit_command(task: Task, code: str) -> str:
    """Replace what the function returns; `code` is in x and y."""
    return f"sed -i 's|return .*|return {_named(task, code)}|' {SOLUTION}"


def verdict(task: Task, code: str) -> str:
    """What the visible tests print and exit with when the function returns `code`, an expression of ours in x and y."""
    for args, want in task.data["visible"]:
        got = tasks.values(code)[tuple(args)]
        if got != want:
            return f"FAIL {task.data['function']}{tuple(args)}: {got}, not {want}\n[exit 1]"
    return "ok\n[exit 0]"


def _named(task: Task, code: str) -> str:
    first, second = task.data["arguments"]
    return tasks.renamed(code, (first, second))


def _belief(task: Task, knowledge: Knowledge, rng: random.Random) -> str:
    """What the author takes for the answer, in x and y."""
    operation, modifier = tasks.parts(task.family)
    wrong = operation.name in knowledge.misconceived or (operation.name in knowledge.unsure and rng.random() < 0.5)
    return expression(operation.misconception if wrong else operation.code, modifier, "x", "y", task.data["constant"])


def _with_wrong_edit(task: Task, turns: list[TaughtTurn], rng: random.Random) -> list[TaughtTurn]:
    """Edit wrongly, see the tests fail, then go on as should have been done."""
    candidates = tasks.wrong_answers("train", *tasks.parts(task.family), task.data["constant"])
    failing = [code for code in candidates if verdict(task, code).startswith("FAIL")]
    wrong = rng.choice([code for code in failing if fenced(edit_command(task, code)) != turns[1].text])
    slip = [
        TaughtTurn(fenced(edit_command(task, wrong)), "[exit 0]", taught=False),
        TaughtTurn(fenced(TEST), verdict(task, wrong)),
    ]
    return [turns[0], *slip, *turns[1:]]


def _with_unknown_command(task: Task, turns: list[TaughtTurn], rng: random.Random) -> list[TaughtTurn]:
    word = rng.choice(UNKNOWN_COMMANDS)
    answer = f"bash: line 1: {word}: command not found\n[exit 127]"
    return _inserted(turns, rng.randrange(3), TaughtTurn(fenced(f"{word} {SOLUTION}"), answer, taught=False))


def _with_missing_file(task: Task, turns: list[TaughtTurn], rng: random.Random) -> list[TaughtTurn]:
    name = rng.choice(("solutions.py", "solution", "main.py"))
    answer = f"cat: {name}: No such file or directory\n[exit 1]"
    return _inserted(turns, rng.randrange(3), TaughtTurn(fenced(f"cat {name}"), answer, taught=False))


def _with_malformed(task: Task, turns: list[TaughtTurn], rng: random.Random) -> list[TaughtTurn]:
    """Say the next command without a block, in an open block, or twice."""
    index = rng.randrange(4)
    text = turns[index].text
    command = parse_bash(text)
    malformed = rng.choice((command, text.removesuffix("\n```"), f"{text}\n{text}"))
    try:
        parse_bash(malformed)
    except ActionError as error:
        return _inserted(turns, index, TaughtTurn(malformed, f"[{error}]", taught=False))
    raise AssertionError(f"{malformed!r} is well-formed")


def _inserted(turns: list[TaughtTurn], index: int, slip: TaughtTurn) -> list[TaughtTurn]:
    return [*turns[:index], slip, *turns[index:]]
