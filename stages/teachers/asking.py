"""Asks all teachers: servers side by side on a thread of their own, local models in turns beside them."""

from collections.abc import Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from itertools import groupby
from threading import Event
from typing import Any

from stages.policy import Policy, Sample, Turn, background
from stages.policy.background import Chain, ask_chains
from stages.runs.artifact import Interrupted, RunWriter
from stages.runs.records import Row
from stages.runs.stage import work_through
from stages.runs.store import GroupCommit
from stages.teachers.questions import Asked, Question, Questions

FINAL = (None, "rejected", "context", "no_text")
"""Outcomes that asking again would not change."""
Policies = Mapping[str, Policy]
Put = tuple[Question, Turn]
"""A question as it is asked: its messages are in memory from here to the end of its rollout."""


def ask_all(asked: Asked, policies: Policies, out: RunWriter, *, batch: bool = False) -> None:
    """Ask what is not answered yet; an answer is written as it comes.

    batch: servers that take batches are asked in batches, at their price. What a server takes is found out before its
    first question, and recorded.
    """
    halted = Event()
    theirs = {name: questions for name, questions in asked.items() if _is_server(policies[name])}
    servers = background.start(_ask_servers(theirs, policies, out, halted, batch))
    try:
        for name, questions in asked.items():
            if name not in theirs and questions:
                _ask_here(name, policies[name], questions, out, servers)
        servers.result()
    except Exception:
        halted.set()
        wait([servers])  # what is in flight is paid, so it is waited for
        raise


def _is_server(policy: Policy) -> bool:
    return hasattr(policy, "ask")


def _ask_here(
    name: str, policy: Policy, asked: Questions | list[Question], out: RunWriter, servers: Future[None]
) -> None:
    def answer(batch: list[Question]) -> list[tuple[str, Row, bool]]:
        if servers.done():
            servers.result()  # raises what went wrong there
        samples = policy.sample([question.turn for question in batch])
        return [_unit(question, sample) for question, sample in zip(batch, samples, strict=True)]

    work_through(asked, lambda q: q.key, answer, policy=policy, out=out, what=f"answers of {name}")


async def _ask_servers(asked: Asked, policies: Policies, out: RunWriter, halted: Event, batch: bool) -> None:
    """Ask what is not answered yet, one chain a rollout and teacher."""
    missing = {name: sum(not out.finished(q.key) for q in questions) for name, questions in asked.items()}
    await _probe({name: policies[name] for name, number in missing.items() if number}, out)

    def check() -> None:
        out.raise_if_stopped()
        if halted.is_set():
            raise Interrupted

    works: list[Coroutine[Any, Any, None]] = []
    servers: dict[str, Any] = dict(policies)
    total = sum(map(len, asked.values()))
    if batch:
        from stages.teachers.batched import ask_batched  # openai, which is slow to import

        waiting = {name: list(q) for name, q in asked.items() if len(q) and not policies[name].config.served}
        works = [ask_batched(questions, servers[name], out, check, _unit) for name, questions in waiting.items()]
        missing = {name: number for name, number in missing.items() if name not in waiting}
    done = total - sum(missing.values())
    written = GroupCommit[tuple[str, Row, bool]](out.write_all)

    async def answered(asked: Put, sample: Sample) -> None:
        nonlocal done
        await written(_unit(asked[0], sample))
        done += 1
        out.progress("answers of servers", done, total)

    queues = [(servers[name], _chains(asked[name], out)) for name, number in missing.items() if number]
    if queues:
        works.append(ask_chains(queues, lambda asked: asked[1], answered, check))
    await background.gather(works)


def probe_servers(asked: Asked, policies: Policies, out: RunWriter) -> None:
    """Find out what servers take that are still to be asked, and record it, where workers will ask them."""
    waiting = [name for name, questions in asked.items() if not all(out.finished(q.key) for q in questions)]
    background.start(_probe({name: policies[name] for name in waiting if _is_server(policies[name])}, out)).result()


async def _probe(policies: Mapping[str, Any], out: RunWriter) -> None:
    try:
        await background.gather(policy.probe() for policy in policies.values())
    finally:
        for policy in policies.values():
            await policy.drain()
    for name, policy in policies.items():
        out.model(name, **policy.facts())


def _chains(asked: Iterable[Question], out: RunWriter) -> Iterator[Chain[Put]]:
    """What is missing of each rollout, its states in order, of each state all samples."""
    for _, rollout in groupby(asked, lambda question: question.state.rollout_id):
        missing = [question for question in rollout if not out.finished(question.key)]
        if missing:
            yield [[(q, q.turn) for q in samples] for _, samples in groupby(missing, lambda question: question.state)]


def _unit(question: Question, sample: Sample) -> tuple[str, Row, bool]:
    """A journal record. What asking again would not change counts as done; a failure is tried again on --resume."""
    return question.key, {"answer": question.row(sample)}, sample.error_type not in FINAL
