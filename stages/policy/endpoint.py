"""An OpenAI-compatible server as a policy: bounded retries, a hard budget, and caches of answers by content.

The retries are here and not in the client, because a request that is sent twice may be billed twice: money is reserved
durably before a request is sent, the body of its answer is durable before anything reads it and before that money is
released, and a call that ends without a bill counts as possibly paid. A response 200 with an error inside (OpenRouter
sends them) is an error too.

`HostLimit` finds out how many requests a server takes at once, `WaitReport` reports what is waited for while a server
is silent, `EndpointPolicy` uses both and the caches of answers. Its `probe` finds out which request fields a server
accepts.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import tenacity

from composer_stages import endings
from composer_stages.errors import ComposerError, Incomplete, UsageError
from composer_stages.layout import counted
from composer_stages.policy import available, faults
from composer_stages.policy.answer_cache import AnswerCache
from composer_stages.policy.base import PolicyConfig, Sample, Turn
from composer_stages.policy.bills import read_charge, told_cost
from composer_stages.policy.client import (
    CONNECT_S,
    FIRST_WAIT_S,
    JITTER_S,
    LONGEST_WAIT_S,
    MAX_WAIT_S,
    MESSAGES,
    NO_ANSWER,
    CallError,
    Client,
    FatalError,
    Forbidden,
    MissingModel,
    RefusedConnection,
    RefusedField,
    RejectedError,
    Response,
    RetryableError,
    WebPage,
    max_response_bytes,
    retrying,
)
from composer_stages.policy.faults import excerpt
from composer_stages.policy.origin import Origins, described
from composer_stages.policy.reading import OverlongAnswer, UnreadableAnswer, make_record, read_record, time_of
from composer_stages.policy.request_fields import LIMITS
from composer_stages.policy.requests import (
    EMPTY,
    QUESTION,
    CallBounds,
    Request,
    lacks_thoughts,
    max_tokens_field,
    probe_request,
    request_body,
    with_text,
)
from composer_stages.policy.token_counts import tokenizer
from composer_stages.policy.tool_calls import PROBED_FIELDS
from composer_stages.runs import store
from composer_stages.runs.activity import Notice
from composer_stages.runs.ledger import Budget, Reservation
from composer_stages.runs.run import AnswerFolders, Listener
from composer_stages.runs.store import GroupCommit
from composer_stages.stopping import Interrupted, stop_requested
from composer_stages.words import Sentence

START = 16
"""Requests in flight at first."""
FALL = 0.7
"""Factor of the limit after a push-back."""
PUSH_BACK_WINDOW_S = 1.0
"""Push-backs within this time count as one: they answer requests that were sent before the first of them."""


class HostLimit:
    """The limit of concurrent requests to one server, shared by all policies on that server.

    The limit grows by one with every answer until the server pushes back (429, 503, a time-out). From then on it falls
    by 30 % at most once a second and grows by one per round: additive increase, multiplicative decrease. A Retry-After
    holds for all requests to the server. Every `enter` ends in one `leave`.
    """

    def __init__(self) -> None:
        self.limit, self.in_flight = float(START), 0
        self.has_answered = False
        """Whether the server has answered anything, so that it will be back after a refused connection."""
        self._growing = True
        self._closed_until = 0.0
        self._fell_at = -PUSH_BACK_WINDOW_S
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Return when a request may be sent."""
        while True:
            wait_s = self._closed_until - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            elif self.in_flight < int(self.limit):
                self.in_flight += 1
                return
            else:
                turn = asyncio.get_running_loop().create_future()
                self._waiting.append(turn)
                try:
                    await turn
                except asyncio.CancelledError:
                    self._wake()  # this request may have been woken already: pass the place on
                    raise

    def leave(self, *, pushed_back: bool = False, wait_s: float | None = None) -> None:
        """Count a request as ended; `wait_s`: seconds that the server asked to wait."""
        now = time.monotonic()
        if pushed_back:
            self._growing = False
            if now - self._fell_at >= PUSH_BACK_WINDOW_S:
                self.limit, self._fell_at = max(self.limit * FALL, 1.0), now
            self._closed_until = max(self._closed_until, now + (wait_s or 0.0))
        elif self.in_flight >= int(self.limit):  # below the limit an answer is no evidence that the server takes more
            self.limit += 1.0 if self._growing else 1.0 / self.limit
        self.in_flight -= 1
        self._wake()

    def _wake(self) -> None:
        room = int(self.limit) - self.in_flight
        while self._waiting and room > 0:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                room -= 1


HOSTS: dict[tuple[str, str], HostLimit] = {}


def host_limit(base_url: str) -> HostLimit:
    """Return the limit of the server behind a URL, one per process and server."""
    parts = urlsplit(base_url)
    return HOSTS.setdefault((parts.scheme, parts.netloc), HostLimit())


QUIET_S = 10.0


@dataclass
class WaitReport:
    """The requests in flight of one policy, reported while a server is silent.

    A progress listener counts finished units, and a silent server finishes none. While the oldest request is older than
    `QUIET_S`, the listener gets a line about it as progress of 0 in 0 units.
    """

    source: str
    """Model and server, for the line."""
    listener: Listener | None
    quiet_s: float
    _sent: dict[object, tuple[float, datetime]] = field(default_factory=dict)
    """For each request the monotonic time since when it is in flight, and the time of day."""
    _watching: asyncio.Task[None] | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count a request as in flight until the block ends."""
        name = object()
        self._sent[name] = time.monotonic(), datetime.now().astimezone()
        if self.listener is not None and self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            del self._sent[name]

    async def _watch(self) -> None:
        while self._sent:
            await asyncio.sleep(self.quiet_s)
            sent, since = min(self._sent.values(), default=(time.monotonic(), None))
            if since is not None and time.monotonic() - sent >= self.quiet_s and self.listener is not None:
                number, clock = len(self._sent), f"{since:%H:%M:%S}"
                line = Sentence("policy.waiting-for-answers", number=number, source=self.source, since=clock)
                with suppress(Interrupted):  # the stage gets the same interrupt at its next report
                    self.listener(line, 0, 0)
        self._watching = None


@dataclass(frozen=True)
class Accepted:
    """Which request fields a server accepts; None where that is unknown. `error`: its answer to a plain question."""

    seed: bool | None = None
    tools: bool | None = None
    logprobs: bool | None = None
    capture_level: str | None = None
    error: str | None = None


def _retrieve(ended: asyncio.Task[Any]) -> None:
    """Retrieve the exception of a task, which asyncio would print."""
    if not ended.cancelled():
        ended.exception()


REFUSALS = 3
"""Refused connections after which a server that has never answered is given up, within 3 s."""


class EndpointPolicy:
    """A policy on an OpenAI-compatible server, which answers with text and tool calls.

    Raises `UsageError` without `base_url`, where the API key is missing or refused, where money is limited and the
    price unknown, and for redirects; `BadInput` for what the server lacks (404); `InfrastructureError` where the
    account is empty (402) or no server answers; `Incomplete` where the budget is spent, the server asks for a wait of
    more than two minutes, or an answer that costs money is longer than `max_tokens`.

    Answers that cost money are cached for all runs, free answers for this run only: a free server may have another
    model under the same name tomorrow, and a new request costs nothing.
    """

    capture_level = "text"

    def __init__(
        self,
        config: PolicyConfig,
        *,
        budget: Budget,
        cache: AnswerFolders,
        listener: Listener | None = None,
        quiet_s: float = QUIET_S,
    ) -> None:
        if config.base_url is None:
            raise UsageError("policy.no-base-url", model=config.model)
        if budget.limit is not None and not config.priced and config.price != "unknown":
            raise UsageError("policy.price-unknown-under-limit", model=config.model, base_url=config.base_url)
        self.config, self.budget, self.batch_size = config, budget, config.concurrency
        self.client = Client(config)
        self._host, self._slots = host_limit(config.base_url), asyncio.Semaphore(config.concurrency)
        self._caches = [
            AnswerCache(folder / "answers.sqlite", lambda report: listener(report, 0, 0) if listener else None)
            for folder in (cache.run, cache.shared)
        ]
        """Of this run, and of all runs for what costs money."""
        self.origins = Origins(str(config.base_url), cache.run)
        self._fresh = cache.fresh
        self._description: asyncio.Task[None] | None = None
        self._store, self._store_shared = (GroupCommit(cache.put_all) for cache in self._caches)
        if config.has_price:
            tokenizer(config.model)  # what its bills are checked with is imported before the first of them
        self._in_flight: set[asyncio.Task[Sample]] = set()
        self._sharing: list[asyncio.Task[None]] = []
        """Answers that are kept for all runs once it is known whose they are, which no caller waits for."""
        self._waits = WaitReport(f"{config.model} at {config.base_url}", listener, quiet_s)
        self._accepted: Accepted | None = None
        self._max_tokens = max_tokens_field(config)
        self.longest = available.longest_answer(config)
        """Tokens of the longest answer to a request without a limit; asked for here, as it may take a request."""
        self._answered = self._answers = False
        """Whether the server has answered at all, and since it last forbade an input."""
        self._deciding = asyncio.Lock()
        self._undecided: asyncio.Event | None = None
        """While it is asked whether the server forbids an input or everything, other requests wait for the event."""
        self._refused: dict[str, str | None] = {}
        """Fields of requests that the server refuses, with the field that takes their place, if one does."""
        self._cut_prompts = 0
        """Answers to prompts of which the server counted fewer tokens than they have."""
        self._has_reported = False
        """Whether the first failure was reported, and `_told`: what else was."""
        self._told = set[str]()
        self._halted: ComposerError | None = None
        """The error after which nothing more is asked."""

    @classmethod
    def open(
        cls, config: PolicyConfig, *, cache: AnswerFolders, budget: Budget, listener: Listener
    ) -> "EndpointPolicy":
        """Make a client of the configured server; no request is paid for yet. The listener gets slow answers."""
        return cls(config, budget=budget, cache=cache, listener=listener)

    def facts(self) -> dict[str, Any]:
        """Return server and model name, the result of the probe, and damage in the cache; never the key."""
        facts: dict[str, Any] = {"accepts": asdict(self._accepted)} if self._accepted else {}
        damaged = sum(cache.damaged for cache in self._caches)
        facts |= {"damaged_in_cache": damaged} if damaged else {}
        facts |= {"refused_fields": sorted(self._refused)} if self._refused else {}
        facts |= {"prices": self.config.table.source} if self.config.table else {}
        facts |= {"cut_prompts": self._cut_prompts} if self._cut_prompts else {}
        facts |= self.origins.facts()
        return {"model": self.config.model, "base_url": self.config.base_url, **facts}

    async def probe(self) -> Accepted:
        """Find out once which of `PROBED_FIELDS` the server accepts; later requests omit all other fields.

        One call has all of them; after a rejection one call per field. The calls are paid from the run's budget like
        every other; a rejection counts as possibly paid.
        """
        if self._accepted is not None:
            return self._accepted
        plain, fields = probe_request(self.config, self._max_tokens)
        answered = (None, "no_text", "unknown_ending")  # error types of requests whose fields were accepted
        sample = await self.send(plain | fields, 0)
        all_fields = True if sample.error_type in answered else None
        accepted: dict[str, bool | None] = {name: name not in self._refused and all_fields for name in fields}
        if sample.error_type == "rejected":
            remaining = {name: value for name, value in fields.items() if name not in self._refused}
            alone = {name: await self.send(plain | {name: value}, 0) for name, value in remaining.items()}
            accepted = {name: name in alone and alone[name].error_type in answered for name in fields}
            # Perhaps none of the fields is at fault, but the model's name or the settings: ask without any.
            refused = None if any(accepted.values()) else await self.send(plain, 0)
            if refused is not None and refused.error_type is not None:
                self._accepted = Accepted(error=refused.error)
                return self._accepted
            sample = alone.get("logprobs", sample)
        if None in accepted.values():
            self._accepted = Accepted(error=sample.error)
        else:
            level = "logprobs" if sample.logprobs else "text"
            self._accepted = Accepted(accepted.get("seed"), accepted.get("tools"), accepted.get("logprobs"), level)
        return self._accepted

    async def ask(self, turn: Turn) -> Sample:
        """Return one answer from the cache or the server, with up to `max_attempts` launches.

        When this is cancelled, a request in flight continues: `drain` waits for it, and its answer is stored.
        """
        try:
            return await self.send(self.request(turn), turn.seed)
        except RefusedField:  # the request has to be made anew, with thoughts
            return await self.send(self.request(turn), turn.seed)

    def request(self, turn: Turn) -> Request:
        """Return the body of the request for a turn, without the fields that the server was found not to accept."""
        refused = [name for name in PROBED_FIELDS if getattr(self._accepted, name, None) is False]
        return request_body(self.config, self._max_tokens, turn, refused, thoughts=faults.REASONING in self._refused)

    async def send(self, request: Request, seed: int) -> Sample:
        """Return the answer to a request that is sent unchanged; see `ask`."""
        # Without a seed in the key all samples of a state would be the answer to the first of them.
        unsent = {} if "seed" in request else {"sample": seed}
        key = store.digest({"base_url": self.config.base_url, **request, **unsent})
        attempt = 0
        try:
            if self.config.has_price or request.get("messages") == QUESTION:
                self._begin_to_describe()
            if (cached := await self._kept(key, request)) is not None:
                return cached
            async for launch in retrying(self.config, stop=self._is_last, before_sleep=self._report_first_failure):
                with launch:
                    attempt = launch.retry_state.attempt_number
                    return await self._launch_when_free(key, request, attempt)
        except RefusedField as error:
            if error.kind == faults.REASONING:
                raise
            if self._halted is error.permanent:
                raise self._halted from None
            return await self.send(request, seed)
        except RejectedError as error:
            if isinstance(error, Forbidden) and not await self._answers_others(request):
                raise error.permanent from None
            if error.kind == endings.MALFORMED:
                return Sample(error.text, finish_reason=error.kind, error=str(error), attempts=attempt, **error.usage)
            return Sample(error_type=error.kind, error=str(error), attempts=attempt, **error.usage)
        except UnreadableAnswer as error:
            message = Sentence("policy.answer-kept-unread", error=str(error))
            return Sample(error_type="unreadable", error=message, attempts=attempt)
        except RetryableError as error:
            if isinstance(error, RefusedConnection) and attempt >= REFUSALS and not self._host.has_answered:
                raise error.permanent from None
            why = f"{error} (after {counted(attempt, 'attempt')})"
            return Sample(error_type=error.kind, error=why, attempts=attempt)
        raise AssertionError("tenacity ends with a result or an error")

    def _as_taken(self, request: Request) -> Request:
        """Return a request with what the server takes in the place of the fields that it was found to refuse."""
        request = with_text(request) if MESSAGES in self._refused else request
        accepted = {name: value for name, value in request.items() if name not in self._refused or name == MESSAGES}
        others = [(alias, request[name]) for name, alias in self._refused.items() if alias and name in request]
        return accepted | dict(others)

    def _leave_out(self, error: RefusedField, request: Request) -> None:
        """Send requests without a field from now on, and say so once; halt where that would change the answers.

        A limit of the answer goes into the field that has the other name. A temperature is only left out where it is
        1, which servers take by default.
        """
        field, limits = error.kind, {LIMITS[0]: LIMITS[1], LIMITS[1]: LIMITS[0]}
        if field in self._refused:
            return  # by another request that was in flight
        if field == MESSAGES:
            self._refused[field] = None
            self._tell(Sentence("policy.empty-messages-filled", source=self._waits.source, text=EMPTY))
            return
        if field == faults.REASONING:
            self._refused[field] = None
            self._tell(Sentence("policy.thoughts-sent-back", source=self._waits.source))
            return
        alias = limits.get(field)
        value_refused = not faults.WORDS[faults.UNKNOWN_FIELD].search(str(error))
        if value_refused or alias in self._refused or (field == "temperature" and request.get(field) != 1):
            self._halted = self._halted or error.permanent
            return
        self._refused[field] = alias
        self._tell(Sentence("policy.field-left-out", source=self._waits.source, field=field, other=alias))

    async def _answers_others(self, request: Request) -> bool:
        """Return whether the server answers another request than the one that it forbade: a plain question."""
        if request.get("messages") == QUESTION:
            return False
        async with self._deciding:
            if self._undecided is None:
                return True
            try:
                await self._greet()
            except Forbidden as error:
                self._halted = self._halted or error.permanent
                return False
            except CallError:
                pass
            finally:
                self._undecided.set()
                self._undecided = None
            return True

    async def _is_of_address(self, error: WebPage | MissingModel, request: Request) -> bool:
        """Return whether a page or a 404 is the answer to all requests: the server answers no plain question either.

        From a server that answers, a page is a gateway's, which will be back, or a firewall's for one input.
        """
        if not self._answered and isinstance(error, WebPage) and request.get("messages") != QUESTION:
            async with self._deciding:
                with suppress(CallError, ComposerError):
                    await self._greet()
        return not self._answered

    async def _kept(self, key: str, request: Request) -> Sample | None:
        """Return the cached answer of a request; None if no cache has one, or a body that is no answer."""
        for cache in self._caches:
            keys = [key] if cache is not self._caches[-1] else await self._bought(cache, key, request)
            for full_key in keys:
                if (entry := cache.get(full_key)) is None:
                    continue
                try:
                    sample = self._read(cache, full_key, entry, CallBounds.of_request(request, self.longest))
                except OverlongAnswer as error:
                    sample = error.sample
                except UnreadableAnswer:
                    raise
                except CallError:  # it was to be asked again, and the process was killed
                    continue
                if cache is self._caches[-1] and (at := time_of(entry)) < self.origins.since:
                    self.origins.count(at)
                return sample
        return None

    async def _bought(self, cache: AnswerCache, key: str, request: Request) -> list[str]:
        """Return the keys of bought answers to a request that the server would give now, by their origin."""
        keys = cache.keys(key)
        if not keys or self._fresh:
            return []
        await self._describe()
        async with self._deciding:
            if not self.origins.known and request.get("messages") != QUESTION:
                try:
                    await self._greet()
                except Forbidden as error:
                    raise error.permanent from None
                except CallError:
                    return []  # the request itself will tell
        return [full for full in keys if full.rpartition(":")[2] in self.origins.known]

    def _begin_to_describe(self) -> asyncio.Task[None]:
        """Return the task that asks once what the server tells of its model, beside the first requests."""

        async def describe() -> None:
            with suppress(CallError, Incomplete):
                async for launch in retrying(self.config, stop=tenacity.stop_after_attempt(REFUSALS)):
                    with launch:
                        self.origins.described = await described(self.client, self.config.model)

        if self._description is None:
            self._description = asyncio.create_task(describe())
            self._description.add_done_callback(_retrieve)  # an error that the first request has, too
        return self._description

    async def _describe(self) -> None:
        """Return when it is known what the server tells, before an answer is kept under its origin or reused."""
        await asyncio.shield(self._begin_to_describe())

    async def _greet(self) -> Sample:
        """Return the answer to a plain question of few tokens: who answers, and whether anything is answered."""
        plain, _ = probe_request(self.config, self._max_tokens)
        return await self._launch_when_free(store.digest([plain, time.time()]), plain, 1)

    def _read(self, cache: AnswerCache, key: str, entry: bytes, bounds: CallBounds) -> Sample:
        """Return the answer in a record of a cache; raise as `read_record` does."""
        try:
            return read_record(entry, self.config, bounds)
        except UnreadableAnswer as error:
            why = Sentence("policy.unread-answer-in-cache", error=str(error), key=key[:12], cache_path=cache.path)
            raise UnreadableAnswer("unreadable", why, billed_usd=error.billed_usd) from error.__cause__
        except CallError:
            cache.replace(key)
            raise

    def _is_last(self, state: tenacity.RetryCallState) -> bool:
        """Return whether a launch that failed was the last: a server that never answered is not waited for as long."""
        error = state.outcome.exception() if state.outcome else None
        given_up = isinstance(error, RefusedConnection) and not self._host.has_answered
        return state.attempt_number >= (
            min(REFUSALS, self.config.max_attempts) if given_up else self.config.max_attempts
        )

    def _report_first_failure(self, state: tenacity.RetryCallState) -> None:
        """Report the first failure to the listener immediately, unless the server only asks to go slower."""
        error = state.outcome.exception() if state.outcome else None
        if self._has_reported or self._waits.listener is None:
            return
        if not isinstance(error, RetryableError) or error.kind == "rate_limit":
            return
        self._has_reported = True
        most, connect_s = self.config.max_attempts, CONNECT_S
        if isinstance(error, RefusedConnection) and not self._host.has_answered:
            most, connect_s = min(most, REFUSALS), 0.0
        waits_s = sum(min(FIRST_WAIT_S * 2**n, LONGEST_WAIT_S) + JITTER_S for n in range(most - 1))
        is_bounded = error.kind == "connection" and error.wait_s is None
        bound_s = math.ceil(waits_s + most * connect_s) if is_bounded else 0
        source = self.config.model if str(self.config.base_url) in str(error) else self._waits.source
        notice = Sentence("policy.retrying", source=source, error=str(error), most=most, bound_s=bound_s)
        with suppress(Interrupted):  # the stage gets the same interrupt at its next report
            self._waits.listener(Notice(notice), 0, 0)

    def _tell(self, sentence: Sentence) -> None:
        """Tell the listener once what was noticed of the server: the first sentence of each code, of fields of each."""
        about = f"{sentence.code} {sentence.filled.get('field')}"
        if about not in self._told and self._waits.listener is not None:
            self._told.add(about)
            with suppress(Interrupted):  # as above
                self._waits.listener(Notice(sentence), 0, 0)

    async def drain(self) -> None:
        """Wait for all requests in flight and for what is to be kept, so that no paid answer is lost."""
        while self._in_flight:
            await asyncio.gather(*self._in_flight, return_exceptions=True)
        await asyncio.gather(*self._sharing)
        if (facts := self.origins.facts()).get("reused"):
            days = facts["reused_from"]
            number, source = facts["reused"], self._waits.source
            self._tell(Sentence("policy.answers-reused", source=source, number=number, days=days))

    async def _launch_when_free(self, key: str, request: Request, attempt: int) -> Sample:
        """Wait for a free slot and a reservation, then launch in a task that outlives its caller."""
        bounds = CallBounds.of_request(request, self.longest)
        usd = bounds.max_usd(self.config) if self.config.priced else None
        await self._slots.acquire()
        while self._undecided is not None and request.get("messages") != QUESTION:
            self._slots.release()
            await self._undecided.wait()
            await self._slots.acquire()
        if faults.REASONING in self._refused and lacks_thoughts(request):  # learnt while this one waited
            self._slots.release()
            raise RefusedField(faults.REASONING, "")
        try:
            await self._host.enter()
            try:
                reservation = await self._room(usd)
            except BaseException:
                self._host.leave()
                raise
        except BaseException:
            self._slots.release()
            raise
        # A request that was sent may be billed, so it is not cancelled with its caller; `drain` waits for it.
        task = asyncio.create_task(self._launch(key, self._as_taken(request), bounds, reservation, attempt))
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)
        task.add_done_callback(_retrieve)  # the caller may be gone, and the ledger records the failure
        return await asyncio.shield(task)

    async def _room(self, usd: float | None) -> Reservation:
        """Wait for money for a call, unless nothing more is to be asked: also after a request to stop."""
        reservation = await self.budget.room(usd, model=self.config.model)
        halted = Interrupted() if stop_requested() else self._halted
        if halted is not None:
            self.budget.give_back(reservation)
            raise halted
        return reservation

    async def _launch(
        self, key: str, request: Request, bounds: CallBounds, reservation: Reservation, attempt: int
    ) -> Sample:
        """Send the request once, store the body, read it, then release the rest of the reservation."""
        # The order matters for a kill between two lines: the reservation is on disk before the request is sent, and the
        # answer before it is read and money is released, so that nothing is paid without an entry and no answer is
        # bought twice, whatever it does to its reader.
        overlong: Incomplete | None = None
        try:
            key, entry = await self._send(key, request, bounds, reservation, attempt)
            sample = self._read(self._caches[":" in key], key, entry, bounds)  # before the next `await`: see `_halted`
        except OverlongAnswer as error:
            sample, unknown = error.sample, self.budget.limit is not None and not self.config.priced
            if self.config.has_price or sample.cost_usd or unknown:  # unknown, but limited
                # Before the next `await`, so that calls that wait for a slot are not launched.
                self._halted = overlong = Incomplete(
                    "policy.overlong-answer-paid", base_url=self.config.base_url, error=error
                )
            else:
                self._tell(Sentence("policy.overlong-answers-kept", source=self._waits.source, error=error))
        except CallError as error:
            # Before the next `await`, so that calls that wait for a slot learn of it.
            if isinstance(error, FatalError) and not isinstance(error, MissingModel):
                self._halted = self._halted or error
            elif isinstance(error, RefusedField):
                self._leave_out(error, request)
            elif isinstance(error, Forbidden) and request.get("messages") != QUESTION:
                if not self._answers and self._undecided is None:
                    self._undecided = asyncio.Event()
                self._answers = False  # an answer is evidence for one refusal: a key may be withdrawn
            self._halted = self._halted or self.budget.exceeded(reservation, error.billed_usd)
            if isinstance(error, UnreadableAnswer) and error.billed_usd:
                await self._share(key, entry)
            # Without a bill the server may have done the work: the bound counts as possibly spent.
            await self.budget.settle(reservation, error.billed_usd, error.claimed_usd)
            if isinstance(error, (WebPage, MissingModel)) and await self._is_of_address(error, request):
                raise await self.client.explained(error) from None
            raise
        self._answered = self._answers = True
        if sample.prompt_read is not None:
            source, read = self._waits.source, sample.prompt_read
            self._tell(Sentence("policy.prompt-cut", source=source, read=read))
            self._cut_prompts += 1
        if sample.completion_tokens == bounds.completion_tokens and sample.finish_reason not in endings.NOT_WHOLE:
            limit, word = sample.completion_tokens, sample.finish_reason
            self._tell(Sentence("policy.stopped-at-limit", source=self._waits.source, limit=limit, word=word))
        if sample.finish_reason == endings.MALFORMED:
            self._tell(Sentence("policy.call-not-read", source=self._waits.source, text=excerpt(sample.text, 80)))
        elif sample.reasoning and not sample.text and sample.finish_reason not in endings.NOT_WHOLE:
            self._tell(
                Sentence("policy.answer-of-thoughts", source=self._waits.source, text=excerpt(sample.reasoning, 80))
            )
        if self.budget.limit is not None and not sample.price_known and not self._halted:
            self._halted = Incomplete("policy.no-bill-under-limit", limit=self.budget.limit, source=self._waits.source)
        # Before the next `await`, as above: writing takes time, in which others would be launched.
        self._halted = self._halted or self.budget.exceeded(reservation, sample.cost_usd)
        if sample.cost_usd:
            await self._share(key, entry)
        if request.get("messages") == QUESTION:
            await self._describe()
            self.origins.see(self.origins.of(entry.partition(b"\n")[2]))
        await self.budget.settle(reservation, sample.cost_usd, sample.claimed_usd)
        if overlong is not None:
            raise overlong
        return sample

    async def _share(self, key: str, entry: bytes) -> None:
        """Keep an answer that cost money for all runs, unless it is kept; soon, if it is still asked whose it is."""

        async def keep() -> None:
            await self._describe()
            await self._store_shared((self._origin_key(key, entry.partition(b"\n")[2]), entry))

        if ":" in key:
            return
        if self._begin_to_describe().done():
            await keep()
        else:
            self._sharing.append(asyncio.create_task(keep()))

    async def _send(
        self, key: str, request: Request, bounds: CallBounds, reservation: Reservation, attempt: int
    ) -> tuple[str, bytes]:
        """Return key and record of a response with status 200, which is durable; release host limit and slot."""
        pushed_back, wait_s = False, None
        try:
            await self.budget.record(reservation)
            most, started = max_response_bytes(bounds.completion_tokens), time.monotonic()
            with self._waits.waiting():
                response = await self.client.ask(
                    "/chat/completions", request, most_bytes=most, charged=partial(self._charge, bounds)
                )
            self._host.has_answered = True
            latency_s = time.monotonic() - started
            body, told_usd = response.body, told_cost(response.headers)
            entry = make_record(body, at=time.time(), told_usd=told_usd, latency_s=latency_s, attempts=attempt)
            if self.config.has_price and self._begin_to_describe().done() and not self._fresh:
                key = self._origin_key(key, body)
                await self._store_shared((key, entry))
            else:  # durable at once, for this run: whose it is, or whether it costs money, may not be known yet
                await self._store((key, entry))
        except RetryableError as error:
            self._host.has_answered |= error.kind not in NO_ANSWER
            pushed_back, wait_s = error.pushes_back, error.wait_s
            raise
        except CallError:
            self._host.has_answered = True
            raise
        finally:
            # A longer wait ends the run (`retrying`), so the host is not closed to others for it.
            self._host.leave(pushed_back=pushed_back, wait_s=wait_s if (wait_s or 0.0) <= MAX_WAIT_S else None)
            self._slots.release()
        return key, entry

    def _charge(self, bounds: CallBounds, response: Response, free: bool) -> float | None:
        """Return what a call without an answer cost, as in `error_of`."""
        told_usd = told_cost(response.headers)
        return read_charge(response.body, free, bounds=bounds, config=self.config, told_usd=told_usd)

    def _origin_key(self, key: str, body: bytes) -> str:
        """Return the key of a bought answer, which holds its origin."""
        origin = self.origins.of(body)
        self.origins.see(origin)
        if self._fresh:
            self._caches[-1].replace(f"{key}:{origin}")
        return f"{key}:{origin}"
