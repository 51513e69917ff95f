"""Questions to one server in batches, which go on while nobody waits and are found again on resume.

A batch is written down before it is made, with the questions that it holds; money for all of them is reserved under its
key; its id follows once the server told it; and its end, once all answers are durable and the bill is settled. Whatever
of that a kill leaves undone, a resumed run does, and no batch is made twice.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from stages.policy import Sample, background
from stages.policy.batches import Batch, Batches, at_batch_price
from stages.policy.endpoint import EndpointPolicy
from stages.runs import store
from stages.runs.artifact import RunWriter
from stages.runs.ledger import Reservation
from stages.runs.records import Row
from stages.teachers.questions import Question

MOST = 10_000
"""Questions in a batch; OpenAI allows 50,000 and 200 MB."""
LOOK_S = 0.5
"""How often a wish to stop is looked for."""
Written = Callable[[Question, Sample], tuple[str, Row, bool]]


async def ask_batched(
    questions: Sequence[Question], policy: EndpointPolicy, out: RunWriter, check: Callable[[], None], written: Written
) -> None:
    """Have every question answered that is not; `written` makes the journal record of an answer."""
    teacher = Teacher(questions, policy, out, check, written)
    teacher.take_what_is_kept()
    await background.gather([teacher.follow(key) for key in [*teacher.left_open(), *teacher.new()]])


class Teacher:
    """One teacher's questions and batches."""

    def __init__(
        self,
        questions: Sequence[Question],
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

    def take_what_is_kept(self) -> None:
        """Answers that were paid for in this or another run."""
        kept = []
        for question in self._missing():
            request = self._policy.request(question.turn)
            if (found := self._policy.cache.get(self._policy.cache_key(request, question.turn.seed))) is not None:
                kept.append(self._written(question, Sample(**found)))
        self._out.write_all(kept)

    def left_open(self) -> list[str]:
        """The keys of batches of these questions that did not come to their end."""
        ours = self._questions.keys()
        return [k for k, unit in self._units().items() if unit["failed"] and ours >= set(unit["batch"]["questions"])]

    def new(self) -> list[str]:
        """The keys of new batches, written down, with all questions that no open one holds."""
        open_ones = {name for key in self.left_open() for name in self._units()[key]["batch"]["questions"]}
        missing, keys = iter([q.key for q in self._missing() if q.key not in open_ones]), []
        while names := list(islice(missing, MOST)):
            key = store.digest([self._config.base_url, len(self._units()), names])[:24]
            self._note(key, names, None, ended=False)
            keys.append(key)
        return keys

    async def follow(self, key: str) -> None:
        """Bring one batch to its end."""
        names, batch_id = (self._units()[key]["batch"][name] for name in ("questions", "id"))
        requests = {name: self._policy.request(self._questions[name].turn) for name in names}
        bounds = {name: self._policy.bound(request) for name, request in requests.items()}
        reservation = self._policy.budget.take_up(batch=key)
        if batch_id is None:
            reservation = reservation or await self._reserve(key, bounds)
            batch_id = await self._server.find_or_create(key, requests.items())
            self._note(key, names, batch_id, ended=False)
        batch = await self._ended(batch_id)
        if batch.refused is not None:
            await self._settle(reservation, 0.0)
            self._note(key, names, batch_id, ended=True)
            raise self._server.refused(batch)
        lines = await self._server.results(batch)
        samples = {name: self._server.sample(lines.get(name), bounds[name]) for name in names}
        self._keep(requests, samples)
        await self._settle(reservation, sum(sample.cost_usd for sample in samples.values()))
        self._note(key, names, batch_id, ended=True)

    async def _reserve(self, key: str, bounds: Mapping[str, tuple[int, int]]) -> Reservation:
        usd = sum(self._config.cost(*bound) for bound in bounds.values()) if self._config.priced else None
        reservation = await self._policy.budget.room(usd, model=self._config.model, batch=key)
        await self._policy.budget.record(reservation)
        return reservation

    async def _ended(self, batch_id: str) -> Batch:
        """Wait for the end; a wish to stop leaves the batch to itself."""
        while not (batch := await self._server.look(batch_id)).ended:
            waited = 0.0
            while waited < self._settings.batch_poll_s:
                self._check()
                pause = min(LOOK_S, self._settings.batch_poll_s - waited)
                await asyncio.sleep(pause)
                waited += pause
        return batch

    def _keep(self, requests: Mapping[str, dict[str, Any]], samples: Mapping[str, Sample]) -> None:
        """Make answers durable, those that are whole for other runs, too."""
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
        """Without a reservation the bill was settled before a kill."""
        if reservation is not None:
            await self._policy.budget.settle(reservation, usd)

    def _missing(self) -> list[Question]:
        return [question for question in self._questions.values() if not self._out.finished(question.key)]

    def _units(self) -> dict[str, Row]:
        """This teacher's batches by their keys, in the order in which they were made."""
        batches = [record for record in self._out.records() if "batch" in record]
        return {r["batch"]["key"]: r for r in batches if r["batch"]["teacher"] == self._settings.name}

    def _note(self, key: str, questions: Sequence[str], batch_id: str | None, *, ended: bool) -> None:
        told = {"key": key, "teacher": self._settings.name, "questions": list(questions), "id": batch_id}
        self._out.write(f"batch {key}", {"batch": told}, failed=not ended)
