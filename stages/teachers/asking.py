"""Asks all teachers: servers side by side on a thread of their own, local models in turns beside them."""

from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from itertools import groupby
from threading import Event
from typing import Any

from stages.policy import Policy, Sample, background
from stages.policy.scheduler import Chain, follow
from stages.runs.artifact import Interrupted, Out
from stages.runs.plan import work_through
from stages.runs.records import Row
from stages.runs.together import Together
from stages.teachers.questions import Asked, Question

FINAL = (None, "rejected", "context", "no_text")
"""Outcomes that asking again would not change."""
Policies = Mapping[str, Policy]


def ask_all(asked: Asked, policies: Policies, out: Out, *, batch: bool = False) -> None:
    """Ask what is not answered yet; an answer is written as it comes.

    batch: servers that take batches are asked in batches, at their price. What a server takes is found out before its
    first question, and recorded.
    """
    halted = Event()
    servers = background.start(
        _ask_servers(
            {n: questions for n, questions in asked.items() if _is_server(policies[n])}, policies, out, halted, batch
        )
    )
    try:
        for name, questions in asked.items():
            if not _is_server(policies[name]) and questions:
                _ask_here(policies[name], questions, out, servers)
        servers.result()
    except Exception:
        halted.set()
        wait([servers])  # what is in flight is paid, so it is waited for
        raise


def _is_server(policy: Policy) -> bool:
    return hasattr(policy, "ask")


def _ask_here(policy: Policy, asked: list[Question], out: Out, servers: Future[None]) -> None:
    def answer(batch: list[Question]) -> list[tuple[str, Row, bool]]:
        if servers.done():
            servers.result()  # raises what went wrong there
        samples = policy.sample([question.turn for question in batch])
        return [_unit(question, sample) for question, sample in zip(batch, samples, strict=True)]

    work_through(asked, lambda q: q.key, answer, policy=policy, out=out, what=f"answers of {asked[0].teacher.name}")


async def _ask_servers(asked: Asked, policies: Policies, out: Out, halted: Event, batch: bool) -> None:
    """Ask what is not answered yet, one chain a rollout and teacher."""
    missing = {name: [q for q in questions if not out.finished(q.key)] for name, questions in asked.items()}
    await _probe({name: policies[name] for name, questions in missing.items() if questions}, out)

    def check() -> None:
        out.stop_here()
        if halted.is_set():
            raise Interrupted

    works: list[Coroutine[Any, Any, None]] = []
    if batch:
        from stages.teachers.batched import ask_batched  # openai, which is slow to import

        waiting = {name: q for name, q in asked.items() if q and not policies[name].config.served}
        servers: dict[str, Any] = dict(policies)
        works = [ask_batched(questions, servers[name], out, check, _unit) for name, questions in waiting.items()]
        missing = {name: questions for name, questions in missing.items() if name not in waiting}
    chains = [chain for name, questions in missing.items() for chain in _chains(policies[name], questions)]
    total = sum(map(len, asked.values()))
    done = total - sum(map(len, missing.values()))
    written = Together[tuple[str, Row, bool]](out.write_all)

    async def answered(question: Question, sample: Sample) -> None:
        nonlocal done
        await written(_unit(question, sample))
        done += 1
        out.progress("answers of servers", done, total)

    if chains:
        works.append(follow(chains, lambda question: question.turn, answered, check))
    await background.together(works)


async def _probe(policies: Mapping[str, Any], out: Out) -> None:
    try:
        await background.together(policy.probe() for policy in policies.values())
    finally:
        for policy in policies.values():
            await policy.drain()
    for name, policy in policies.items():
        out.model(name, **policy.facts())


def _chains(policy: Any, asked: Sequence[Question]) -> list[Chain[Question]]:
    """The questions of each rollout, its states in order, of each state all samples."""
    return [
        Chain(policy, [list(samples) for _, samples in groupby(rollout, lambda q: q.state)])
        for _, rollout in groupby(asked, lambda q: q.steps[0]["rollout_id"])
    ]


def _unit(question: Question, sample: Sample) -> tuple[str, Row, bool]:
    """A journal record. What asking again would not change counts as done; a failure is tried again on --resume."""
    return question.key, {"answer": question.row(sample)}, sample.error_type not in FINAL
