"""Questions to one server through its batch API: batches continue on the server and are found again on resume.

The order makes every step repeatable after a kill, and no batch is created twice: a batch is recorded with its
questions before it is created; money for all of them is reserved under its key; its id is recorded when the server
returns it; its end is recorded once all answers are durable and the bill is settled.
"""

import asyncio
from collections.abc import Callable, Sequence
from itertools import islice

from stages.policy import Sample, background
from stages.policy.batches import ENDED, Batches, ServerBatch
from stages.policy.billing import Asked
from stages.policy.client import Overlong
from stages.policy.endpoint import EndpointPolicy, unlimited
from stages.runs import store
from stages.runs.kinds import Row
from stages.runs.run import RunWriter
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
    """Answer every open question of one teacher through batches; `written` makes an answer's journal record."""
    await TeacherBatches(questions, policy, out, check, written).answer_all()


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
        names = ("usd_per_mtok_in", "usd_per_mtok_cached_in", "usd_per_mtok_out")
        single = {name: price for name in names if (price := getattr(policy.config, name)) is not None}
        prices = {name: price * self._settings.batch_price for name, price in single.items()}
        self._config = policy.config.model_copy(update=prices)
        self._server = Batches(policy.client, self._config)

    async def answer_all(self) -> None:
        """Answer from the cache, then complete the open batches and new ones with all other questions."""
        # 1. Answers that this or another run has paid for already.
        kept = []
        for question in self._missing():
            request = self._policy.request(question.turn)
            if (found := self._policy.cache.get(self._policy.cache_key(request, question.turn.seed))) is not None:
                kept.append(self._written(question, Sample(**found)))
        self._out.write_all(kept)
        # 2. Batches of an earlier attempt that have not ended. A batch of other questions, of which some are not asked
        # now, is left alone: its answers could not be written.
        ours, units = self._questions.keys(), self._units()
        keys = [key for key, unit in units.items() if unit["failed"] and ours >= set(unit["batch"]["questions"])]
        held = {name for key in keys for name in units[key]["batch"]["questions"]}
        # 3. New batches, recorded before anything is sent. The number of batches so far makes a key unique: a question
        # that failed in one batch is asked again in another.
        missing = iter([q.key for q in self._missing() if q.key not in held])
        while names := list(islice(missing, MAX_QUESTIONS)):
            key = store.digest([self._config.base_url, len(self._units()), names])[:24]
            self._record(key, names, None, ended=False)
            keys.append(key)
        await background.gather([self.complete(key) for key in keys])

    async def complete(self, key: str) -> None:
        """Create one batch or find it again, wait for its end, and write its answers."""
        names, batch_id = (self._units()[key]["batch"][name] for name in ("questions", "id"))
        requests = {name: self._policy.request(self._questions[name].turn) for name in names}
        asked = {name: Asked.of(request, self._policy.longest) for name, request in requests.items()}
        # Money that an earlier attempt reserved under this key; None before the reservation and after the settlement.
        reservation = self._policy.budget.take_up(batch=key)
        if batch_id is None:
            # No id was recorded: the batch may not exist, or a kill came between its creation and the record.
            if reservation is None:
                usd = sum(one.usd(self._config) for one in asked.values()) if self._config.priced else None
                reservation = await self._policy.budget.room(usd, model=self._config.model, batch=key)
                await self._policy.budget.record(reservation)
            batch_id = await self._server.find_or_create(key, requests.items())
            self._record(key, names, batch_id, ended=False)
        batch = await self._ended(batch_id)
        if batch.refused is not None:
            if reservation is not None:
                # Free where the server refused the requests as a whole; with files it has done some of them.
                await self._policy.budget.settle(reservation, None if batch.files else 0.0)
            self._record(key, names, batch_id, ended=True)
            raise self._server.not_taken(batch.refused)
        lines = await self._server.results(batch, asked)
        samples: dict[str, Sample] = {}
        overlong: Overlong | None = None
        for name in names:
            try:
                samples[name] = self._server.sample(lines.get(name), asked[name])
            except Overlong as error:
                samples[name], overlong = error.sample, error
        # Answers first, the bill next, the end of the batch last: after a kill in between, the next attempt reads the
        # same files again and repeats only what is idempotent. Errors are not cached: another run may ask again.
        bought = [
            (self._policy.cache_key(requests[name], self._questions[name].turn.seed), vars(sample))
            for name, sample in samples.items()
            if sample.error_type is None
        ]
        self._policy.cache.put_all(bought)
        fresh = [name for name in samples if not self._out.finished(name)]
        self._out.write_all(self._written(self._questions[name], samples[name]) for name in fresh)
        self._out.progress("answers of batches", len(self._questions) - len(self._missing()), len(self._questions))
        if reservation is not None:  # None: an attempt before a kill has settled the bill
            claims = [s.cost_usd if s.claimed_usd is None else s.claimed_usd for s in samples.values()]
            paid = sum(sample.cost_usd for sample in samples.values())
            await self._policy.budget.settle(reservation, paid, sum(claims))
        self._record(key, names, batch_id, ended=True)
        if overlong is not None:
            raise unlimited(self._config, overlong)

    async def _ended(self, batch_id: str) -> ServerBatch:
        """Wait for the batch to end; a stop request leaves it running on the server."""
        while (batch := await self._server.look(batch_id)).status not in ENDED:
            waited = 0.0
            while waited < self._settings.batch_poll_s:
                self._check()
                pause = min(CHECK_S, self._settings.batch_poll_s - waited)
                await asyncio.sleep(pause)
                waited += pause
        return batch

    def _missing(self) -> list[TeacherQuestion]:
        return [question for question in self._questions.values() if not self._out.finished(question.key)]

    def _units(self) -> dict[str, Row]:
        """Return this teacher's batch records by key, in the order of their creation."""
        batches = [record for record in self._out.journal.records() if "batch" in record]
        return {r["batch"]["key"]: r for r in batches if r["batch"]["teacher"] == self._settings.name}

    def _record(self, key: str, questions: Sequence[str], batch_id: str | None, *, ended: bool) -> None:
        record = {"key": key, "teacher": self._settings.name, "questions": list(questions), "id": batch_id}
        self._out.write(f"batch {key}", {"batch": record}, failed=not ended)
