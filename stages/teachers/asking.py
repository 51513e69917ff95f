"""Ask all teachers: servers concurrently on the event loop, local models batch by batch in this thread meanwhile.

An answer is written to the run as soon as it arrives, so that a resumed run asks only for what is missing.

Servers are asked conversations in parallel, and the steps of each in order, because a step's prompt begins with that of
the step before, which the provider then has cached. A conversation is finished before another begins, so that its
cached prefix is used while it exists. There are no barriers: a slow answer delays only its own conversation.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from itertools import groupby
from threading import Event
from typing import Any, TypeVar

from composer_stages.policy import ask_all, background
from composer_stages.policy.base import FINAL, AsyncPolicy, Policy, Sample, Turn
from composer_stages.runs.kinds import Row
from composer_stages.runs.run import RunWriter
from composer_stages.runs.stage import work_through
from composer_stages.runs.store import GroupCommit
from composer_stages.stopping import Interrupted
from composer_stages.teachers.questions import QuestionsByTeacher, TeacherQuestion

Policies = Mapping[str, Policy]
PreparedQuestion = tuple[TeacherQuestion, Turn]
"""A question with its messages in memory, from here to the end of its rollout."""


AHEAD = 2
"""Conversations in progress per allowed request: while one waits for the disk, another can ask."""
Item = TypeVar("Item")
Chain = Sequence[Sequence[Item]]
"""One conversation as one policy is asked about it: the samples of each of its steps."""


def ask_teachers(by_teacher: QuestionsByTeacher, policies: Policies, out: RunWriter) -> None:
    """Ask all questions without an answer and write each answer as it arrives.

    Before its first question a server is probed for the request fields that it accepts, and the result is recorded.
    """

    def answer(batch: list[TeacherQuestion]) -> list[tuple[str, Row, bool]]:
        if requests.done():
            requests.result()  # raises the error of a server now, not after hours of local questions
        samples = ask_all(policy, [question.turn for question in batch])
        return [_unit(question, sample) for question, sample in zip(batch, samples, strict=True)]

    halted = Event()
    remote = {name: questions for name, questions in by_teacher.items() if isinstance(policies[name], AsyncPolicy)}
    requests = background.start(_ask_servers(remote, policies, out, halted))
    try:
        for name, questions in by_teacher.items():
            if name not in remote and questions:
                policy = policies[name]
                work_through(questions, lambda q: q.key, answer, policy=policy, out=out, noun=f"answers of {name}")
        requests.result()
    except Exception:
        halted.set()
        wait([requests])  # requests in flight are paid for, so their answers are awaited
        raise


async def _ask_servers(by_teacher: QuestionsByTeacher, policies: Policies, out: RunWriter, halted: Event) -> None:
    """Ask all questions without an answer, one chain per rollout and teacher."""
    missing = {name: sum(not out.finished(q.key) for q in questions) for name, questions in by_teacher.items()}
    await _probe({name: policies[name] for name, number in missing.items() if number}, out)

    def check() -> None:
        """Raise to stop: the run was asked to, or a local model's questions ended with an error."""
        out.raise_if_stopped()
        if halted.is_set():
            raise Interrupted

    servers: dict[str, Any] = dict(policies)
    total = sum(map(len, by_teacher.values()))
    done = total - sum(missing.values())
    written = GroupCommit[tuple[str, Row, bool]](out.write_all)  # one fsync for all answers that wait for one

    async def answered(prepared: PreparedQuestion, sample: Sample) -> None:
        nonlocal done
        await written(_unit(prepared[0], sample))
        done += 1
        out.progress("answers of servers", done, total)

    # A chain is one conversation in order: each prompt begins with the one before, which the provider then has cached.
    queues = [(servers[name], _chains(by_teacher[name], out)) for name, number in missing.items() if number]
    if queues:
        await ask_chains(queues, lambda prepared: prepared[1], answered, check)


async def ask_chains(
    queues: Sequence[tuple[AsyncPolicy, Iterator[Chain[Item]]]],
    turn: Callable[[Item], Turn],
    answered: Callable[[Item, Sample], Awaitable[None]],
    check: Callable[[], None],
) -> None:
    """Ask each policy every item of its chains; `check` raises to stop.

    A chain is taken from its iterator when a worker is free, so that the others need not be in memory. Of several
    samples of a step the first is asked first, so that the others find its prompt cached. After an error nothing
    more is asked, and requests in flight are awaited because they are paid for.
    """

    async def one(policy: AsyncPolicy, item: Item) -> None:
        check()
        await answered(item, await policy.ask(turn(item)))

    async def work(policy: AsyncPolicy, chains: Iterator[Chain[Item]]) -> None:
        for chain in chains:
            for first, *samples in chain:
                await one(policy, first)
                await background.gather(one(policy, item) for item in samples)

    try:
        await background.gather(
            work(policy, chains) for policy, chains in queues for _ in range(AHEAD * policy.batch_size)
        )
    finally:
        for policy, _ in queues:
            await policy.drain()


def probe_servers(by_teacher: QuestionsByTeacher, policies: Policies, out: RunWriter) -> None:
    """Probe the servers that workers will ask, and record which request fields they accept."""
    waiting = [name for name, questions in by_teacher.items() if not all(out.finished(q.key) for q in questions)]
    servers = {name: policies[name] for name in waiting if isinstance(policies[name], AsyncPolicy)}
    background.start(_probe(servers, out)).result()


async def _probe(policies: Mapping[str, Any], out: RunWriter) -> None:
    """Probe servers concurrently, and record in the manifest what was found."""
    try:
        await background.gather(policy.probe() for policy in policies.values())
    finally:
        for policy in policies.values():
            await policy.drain()
    for name, policy in policies.items():
        out.model(name, **policy.facts())


def _chains(questions: Iterable[TeacherQuestion], out: RunWriter) -> Iterator[Chain[PreparedQuestion]]:
    """Yield the unanswered questions of each rollout: its states in order, for each state all samples."""
    for _, rollout in groupby(questions, lambda question: question.state.rollout_id):
        missing = [question for question in rollout if not out.finished(question.key)]
        if missing:
            yield [[(q, q.turn) for q in samples] for _, samples in groupby(missing, lambda question: question.state)]


def _unit(question: TeacherQuestion, sample: Sample) -> tuple[str, Row, bool]:
    """Return an answer's journal record (key, record, failed); failed units are asked again by --resume."""
    return question.key, {"answer": question.row(sample)}, sample.error_type not in FINAL
