"""Questions to one server through its batch API: batches continue on the server and are found again on resume.

The order makes every step repeatable after a kill, and no batch is created twice: a batch is recorded with its
questions before it is created; money for all of them is reserved under its key; its id is recorded when the server
returns it; its end is recorded once all answers are durable and the bill is settled.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from stages.policy import Sample, background
from stages.policy.batches import Batches, ServerBatch, at_batch_price
from stages.policy.endpoint import EndpointPolicy
from stages.runs import store
from stages.runs.artifact import RunWriter
from stages.runs.ledger import Reservation
from stages.runs.records import Row
from stages.teachers.questions import TeacherQuestion

MAX_QUESTIONS = 10_000
"""Questions in a batch; OpenAI allows 50,000 and 200 MB."""
CHECK_S = 0.5
"""Seconds between two checks for a stop request."""
Written = Callable[[TeacherQuestion, Sample], tuple[str, Row, bool]]


async def ask_batched(
    questions: Sequence[TeacherQuestion],
    policy: EndpointPolicy,
    out: RunWriter,
    check: Callable[[], None],
    written: Written,
) -> None:
    """Answer every open question through batches; `written` makes an answer's journal record."""
    teacher = TeacherBatches(questions, policy, out, check, written)
    teacher.take_cached()
    await background.gather([teacher.complete(key) for key in [*teacher.open_batches(), *teacher.record_new()]])


class TeacherBatches:
    """One teacher's questions and its batches."""

    def __init__(
        self,
        questions: Sequence[TeacherQuestion],
        policy: EndpointPolicy,
        out: RunWriter,
        check: Callable[[], None],
        written: Written,
    ) -> None:
        self._questions = {question.key: question for question in questions}
        self._settings = questions[0].teacher
        self._policy, self._out, self._check, self._written = policy, out, check, written
        config = at_batch_price(policy.config, self._settings.batch_price)
        self._config, self._server = config, Batches(policy.client, config)

    def take_cached(self) -> None:
        """Write the answers that this or another run has paid for already."""
        kept = []
        for question in self._missing():
            request = self._policy.request(question.turn)
            if (found := self._policy.cache.get(self._policy.cache_key(request, question.turn.seed))) is not None:
                kept.append(self._written(question, Sample(**found)))
        self._out.write_all(kept)

    def open_batches(self) -> list[str]:
        """Return the keys of this teacher's batches that have not ended."""
        ours = self._questions.keys()
        return [k for k, unit in self._units().items() if unit["failed"] and ours >= set(unit["batch"]["questions"])]

    def record_new(self) -> list[str]:
        """Record new batches with all questions that no open batch holds; return their keys."""
        open_ones = {name for key in self.open_batches() for name in self._units()[key]["batch"]["questions"]}
        missing, keys = iter([q.key for q in self._missing() if q.key not in open_ones]), []
        while names := list(islice(missing, MAX_QUESTIONS)):
            key = store.digest([self._config.base_url, len(self._units()), names])[:24]
            self._record(key, names, None, ended=False)
            keys.append(key)
        return keys

    async def complete(self, key: str) -> None:
        """Create one batch or find it again, wait for its end, and write its answers."""
        names, batch_id = (self._units()[key]["batch"][name] for name in ("questions", "id"))
        requests = {name: self._policy.request(self._questions[name].turn) for name in names}
        bounds = {name: self._policy.bound(request) for name, request in requests.items()}
        reservation = self._policy.budget.take_up(batch=key)
        if batch_id is None:
            if reservation is None:
                usd = sum(self._config.cost(*bound) for bound in bounds.values()) if self._config.priced else None
                reservation = await self._policy.budget.room(usd, model=self._config.model, batch=key)
                await self._policy.budget.record(reservation)
            batch_id = await self._server.find_or_create(key, requests.items())
            self._record(key, names, batch_id, ended=False)
        batch = await self._ended(batch_id)
        if batch.refused is not None:
            await self._settle(reservation, 0.0)
            self._record(key, names, batch_id, ended=True)
            raise self._server.refused(batch)
        lines = await self._server.results(batch)
        samples = {name: self._server.sample(lines.get(name), bounds[name]) for name in names}
        self._store(requests, samples)
        await self._settle(reservation, sum(sample.cost_usd for sample in samples.values()))
        self._record(key, names, batch_id, ended=True)

    async def _ended(self, batch_id: str) -> ServerBatch:
        """Wait for the batch to end; a stop request leaves it running on the server."""
        while not (batch := await self._server.look(batch_id)).ended:
            waited = 0.0
            while waited < self._settings.batch_poll_s:
                self._check()
                pause = min(CHECK_S, self._settings.batch_poll_s - waited)
                await asyncio.sleep(pause)
                waited += pause
        return batch

    def _store(self, requests: Mapping[str, dict[str, Any]], samples: Mapping[str, Sample]) -> None:
        """Write the answers of a batch to the run, and those without an error to the shared cache."""
        bought = [
            (self._policy.cache_key(requests[name], self._questions[name].turn.seed), sample.as_dict())
            for name, sample in samples.items()
            if sample.error_type is None
        ]
        self._policy.cache.put_all(bought)
        fresh = [name for name in samples if not self._out.finished(name)]
        self._out.write_all(self._written(self._questions[name], samples[name]) for name in fresh)
        self._out.progress("answers of batches", len(self._questions) - len(self._missing()), len(self._questions))

    async def _settle(self, reservation: Reservation | None, usd: float) -> None:
        if reservation is not None:  # None: an attempt before a kill has settled the bill
            await self._policy.budget.settle(reservation, usd)

    def _missing(self) -> list[TeacherQuestion]:
        return [question for question in self._questions.values() if not self._out.finished(question.key)]

    def _units(self) -> dict[str, Row]:
        """Return this teacher's batch records by key, in the order of their creation."""
        batches = [record for record in self._out.journal.records() if "batch" in record]
        return {r["batch"]["key"]: r for r in batches if r["batch"]["teacher"] == self._settings.name}

    def _record(self, key: str, questions: Sequence[str], batch_id: str | None, *, ended: bool) -> None:
        record = {"key": key, "teacher": self._settings.name, "questions": list(questions), "id": batch_id}
        self._out.write(f"batch {key}", {"batch": record}, failed=not ended)
