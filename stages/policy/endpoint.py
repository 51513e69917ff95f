"""An OpenAI-compatible server as a policy: typed errors, bounded retries, a hard budget, answers cached by content.

Every launch is counted here, because a request that is sent twice may be billed twice: money is reserved for it,
durably, before it is sent; its answer is durable before that money is released; and a call that ends without a bill
counts as possibly paid. A server that answers 200 with an error inside (OpenRouter does) is caught as well.
"""

import asyncio
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
import tenacity

from stages.errors import ComposerError, Incomplete, UsageError
from stages.policy import background, client, dialect
from stages.policy.base import PolicyConfig, Sample, Turn, prompt_bound
from stages.policy.client import Broken, Client, Rejected, Response, Retryable, Unreachable
from stages.redaction import redacted_bytes
from stages.runs import store
from stages.runs.artifact import Interrupted, Listener
from stages.runs.ledger import Budget, Reservation
from stages.runs.store import GroupCommit

# ---- hosts
# How many requests a server gets at once: found out, and shared by all policies that ask the same server.
#
# The number starts low and grows with every answer until the server pushes back (429, 503, a time-out); from then
# on it
# falls by 30 % at most once a second and grows by one a round: additive increase, multiplicative decrease. A wait that
# the server asks for holds for everyone who asks it.

START = 16
"""Requests in flight before anything is known of a server."""
FALL = 0.7
PATIENCE_S = 1.0
"""Push-backs within this time count as one: they answer requests that were sent before the first of them."""


class Host:
    """One server's door. `enter` waits for the server's own pace; every `enter` ends in one `leave`."""

    def __init__(self) -> None:
        self.limit, self.in_flight = float(START), 0
        self._growing = True
        self._closed_until = 0.0
        self._fell_at = -PATIENCE_S
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
                    self._wake()  # it may have been this one's turn
                    raise

    def leave(self, *, pushed_back: bool = False, wait_s: float | None = None) -> None:
        """A request has ended; `wait_s` is what the server asked for."""
        now = time.monotonic()
        if pushed_back:
            self._growing = False
            if now - self._fell_at >= PATIENCE_S:
                self.limit, self._fell_at = max(self.limit * FALL, 1.0), now
            self._closed_until = max(self._closed_until, now + (wait_s or 0.0))
        elif self.in_flight >= int(self.limit):  # an idle door tells nothing about what the server can take
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


HOSTS: dict[tuple[str, str], Host] = {}


def host_of(base_url: str) -> Host:
    """The door of the server behind a URL; one for all of the process."""
    parts = urlsplit(base_url)
    return HOSTS.setdefault((parts.scheme, parts.netloc), Host())


# ---- patience
# Says what is waited for, and since when, while a server is silent.
#
# A listener counts what is finished; of a server that says nothing there is nothing to count. So while the oldest
# request
# is older than `QUIET_S`, the listener hears of it as progress of 0 in 0 units: something that is waited for.

QUIET_S = 10.0


class Patience:
    """The requests of one policy that are in flight, by the time at which they were sent."""

    def __init__(self, whom: str, listener: Listener | None, quiet_s: float) -> None:
        self._whom, self._listener, self._quiet_s = whom, listener, quiet_s
        self._sent: dict[object, tuple[float, datetime]] = {}
        self._watching: asyncio.Task[None] | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count a request as in flight until the block ends."""
        name = object()
        self._sent[name] = time.monotonic(), datetime.now().astimezone()
        if self._listener is not None and self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            del self._sent[name]

    async def _watch(self) -> None:
        while self._sent:
            await asyncio.sleep(self._quiet_s)
            sent, since = min(self._sent.values(), default=(time.monotonic(), None))
            if since is not None and time.monotonic() - sent >= self._quiet_s and self._listener is not None:
                count = f"{len(self._sent)} answer{'s' if len(self._sent) > 1 else ''}"
                with suppress(Interrupted):  # the stage itself hears of that when it next reports
                    self._listener(f"waiting for {count} of {self._whom}, the oldest since {since:%H:%M:%S}", 0, 0)
        self._watching = None


# ---- cache
# Answers that were paid for, kept by content: the same question with the same sampling is never bought twice.


class AnswerCache:
    """One SQLite file shared by all runs; safe for several threads and processes.

    A key is the digest of server, model, messages, sampling and seed; never of the API key or the time. Reading has a
    connection of its own, so that it does not wait for a commit.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._locks = {"read": threading.Lock(), "write": threading.Lock()}
        self._writer = self._connect(path)
        self._writer.execute("PRAGMA journal_mode=WAL")
        self._writer.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer BLOB NOT NULL)")
        self._reader = self._connect(path)

    def _connect(self, path: Path) -> sqlite3.Connection:
        return sqlite3.connect(path, check_same_thread=False, timeout=30, isolation_level=None)

    def get(self, key: str) -> dict[str, Any] | None:
        """The answer under a key, or None."""
        with self._locks["read"]:
            row = self._reader.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        return orjson.loads(row[0]) if row else None

    def put_all(self, answers: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Keep answers, durably once this returns; an earlier one under a key stays."""
        with self._locks["write"]:
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                rows = [(key, redacted_bytes(store.encode(answer))) for key, answer in answers]
                self._writer.executemany("INSERT OR IGNORE INTO answers VALUES (?, ?)", rows)
            except BaseException:
                self._writer.execute("ROLLBACK")
                raise
            self._writer.execute("COMMIT")


MAX_WAIT_S = 120.0
BACKOFF = tenacity.wait_exponential(0.5, max=8.0) + tenacity.wait_random(0.0, 0.5)
Request = dict[str, Any]


class EndpointPolicy:
    """Asks a server, many turns at once; answers are text and tool calls, whatever else the server may offer.

    Raises `UsageError` without `base_url`, where the API key is missing, where money is limited and the price unknown,
    and for answers that no retry can mend (401, 402, 403, 404); `Incomplete` where the budget is spent or the server
    asks for a wait of more than two minutes.
    """

    capture_level = "text"

    def __init__(
        self,
        config: PolicyConfig,
        *,
        budget: Budget,
        cache: Path,
        listener: Listener | None = None,
        quiet_s: float = QUIET_S,
    ) -> None:
        if config.base_url is None:
            raise UsageError(f"The model {config.model!r} is to be asked of a server, but base_url is not set. Set it.")
        if budget.limit is not None and not config.priced and config.price != "unknown":
            raise UsageError(
                f"--max-cost is given, but what {config.model!r} of {config.base_url} costs is not. Give "
                'usd_per_mtok_in and usd_per_mtok_out (0 where it is free), or write price = "unknown".'
            )
        self.config, self.budget, self.batch_size = config, budget, config.concurrency
        self.client = Client(config.base_url, config.key())
        self._host, self._slots = host_of(config.base_url), asyncio.Semaphore(config.concurrency)
        self.cache = AnswerCache(cache / "answers.sqlite")
        self._keep = GroupCommit(self.cache.put_all)
        self._in_flight: set[asyncio.Task[Sample]] = set()
        self._patience = Patience(f"{config.model} at {config.base_url}", listener, quiet_s)
        self._accepted: client.Accepted | None = None

    @classmethod
    def open(cls, config: PolicyConfig, *, cache: Path, budget: Budget, listener: Listener) -> "EndpointPolicy":
        """A client of the configured server; nothing is sent yet. The listener hears of answers that take long."""
        return cls(config, budget=budget, cache=cache, listener=listener)

    def sample(self, turns: list[Turn]) -> list[Sample]:
        """One answer a turn, asked concurrently. After an error, what is in flight is still waited for and kept."""
        return background.run(self._sample(turns))

    async def _sample(self, turns: list[Turn]) -> list[Sample]:
        try:
            return await background.together(self.ask(turn) for turn in turns)
        finally:
            await self.drain()

    def facts(self) -> dict[str, Any]:
        """Server and model name, and what a probing call found; the key is not among them."""
        found = {"accepts": self._accepted.as_dict()} if self._accepted else {}
        return {"model": self.config.model, "base_url": self.config.base_url, **found}

    async def probe(self) -> client.Accepted:
        """Find out what the server takes, once, and leave out of all requests what it does not."""
        if self._accepted is None:
            self._accepted = await client.probe(self, self.request(Turn([], 0), plain=True))
        return self._accepted

    async def ask(self, turn: Turn) -> Sample:
        """One answer, from the cache or the server, launched until it is there or the attempts are used up.

        When this is cancelled, a request that is in flight goes on: `drain` waits for it, and its answer is kept.
        """
        return await self.send(self.request(turn), turn.seed)

    def cache_key(self, request: Request, seed: int) -> str:
        """What an answer is kept under; `seed` tells samples apart where the request has none."""
        unsent = {} if "seed" in request else {"sample": seed}
        return store.digest({"base_url": self.config.base_url, **request, **unsent})

    async def send(self, request: Request, seed: int) -> Sample:
        """The same for a request as it is."""
        key = self.cache_key(request, seed)
        if (kept := self.cache.get(key)) is not None:
            return Sample(**kept)
        attempt = 0
        try:
            async for launch in tenacity.AsyncRetrying(
                stop=tenacity.stop_after_attempt(self.config.max_attempts),
                retry=tenacity.retry_if_exception_type(Retryable),
                wait=_pause,
                reraise=True,
            ):
                with launch:
                    attempt = launch.retry_state.attempt_number
                    return await self._launched(key, request, attempt)
        except Rejected as error:
            return Sample(error_type=error.kind, error=str(error), attempts=attempt, **error.told)
        except Retryable as error:
            return Sample(error_type=error.kind, error=f"{error} (after {attempt} attempts)", attempts=attempt)
        raise AssertionError("tenacity ends with a result or an error")

    async def drain(self) -> None:
        """Wait for the requests in flight, whoever asked for them, so that no answer that is paid for is lost."""
        while self._in_flight:
            await asyncio.gather(*self._in_flight, return_exceptions=True)

    def request(self, turn: Turn, *, plain: bool = False) -> Request:
        """What is sent for a turn, as the settings shape it; `plain`: without what a server may not take."""
        refused = dict.fromkeys(client.EXTRAS if plain else self._accepted.refused if self._accepted else [], False)
        settings = self.config.request | refused
        tools = [] if settings.get("tools") is False else dialect.declared(turn.tools)
        ours = {
            "model": self.config.model,
            "messages": dialect.conversation(turn.messages, with_tools=bool(tools)),
            **({"tools": tools} if tools else {}),
            "temperature": self.config.temperature,
            "max_tokens": self.config.max_tokens,
            "seed": turn.seed % 2**31,
            **({"chat_template_kwargs": self.config.chat_template_kwargs} if self.config.chat_template_kwargs else {}),
        }
        wanted = {name: value for name, value in (ours | settings).items() if value is not False}
        return wanted | self.config.extra_body

    def bound(self, request: Request) -> tuple[int, int]:
        """At most so many prompt and completion tokens has a request."""
        return prompt_bound(len(store.encode(request))), self.config.longest_answer()

    async def _launched(self, key: str, request: Request, attempt: int) -> Sample:
        """Wait for a place and for money, then launch in a task that outlives its caller."""
        bound = self.bound(request)
        usd = self.config.cost(*bound) if self.config.priced else None
        await self._slots.acquire()
        try:
            await self._host.enter()
            try:
                reservation = await self.budget.room(usd, model=self.config.model)
            except BaseException:
                self._host.leave()
                raise
        except BaseException:
            self._slots.release()
            raise
        task = asyncio.create_task(self._launch(key, request, bound, reservation, attempt))
        self._in_flight.add(task)
        task.add_done_callback(self._landed)
        return await asyncio.shield(task)

    def _landed(self, task: "asyncio.Task[Sample]") -> None:
        self._in_flight.discard(task)
        if not task.cancelled():
            task.exception()  # looked at: whoever asked may be gone, and what failed stands in the ledger

    async def _launch(
        self, key: str, request: Request, bound: tuple[int, int], reservation: Reservation, attempt: int
    ) -> Sample:
        """Send once; keep the answer, then release the money that it did not cost."""
        try:
            response, latency_s = await self._send(request, reservation)
            sample = client.read(response.body, self.config, bound, latency_s=latency_s, attempts=attempt)
        except (Retryable, Rejected) as error:
            if error.billed_usd is None:
                await self.budget.mark_unconfirmed(reservation)
            else:
                await self.budget.settle(reservation, error.billed_usd)
            raise
        except ComposerError:
            await self.budget.settle(reservation, 0.0)
            raise
        await self._keep((key, sample.as_dict()))
        await self.budget.settle(reservation, sample.cost_usd)
        return sample

    async def _send(self, request: Request, reservation: Reservation) -> tuple[Response, float]:
        """A response with status 200 and its seconds; anything else is raised. Ends the stay at the host's door."""
        pushed_back, wait_s = False, None
        try:
            await self.budget.record(reservation)
            started = time.monotonic()
            with self._patience.waiting():
                response = await self.client.post(request, self.config.timeout_s)
            if response.status != 200:
                wait_s = client.seconds(response.headers.get("retry-after"))
                pushed_back = response.status in client.PUSHES_BACK
                raise client.classified(response, self.config, wait_s)
            return response, time.monotonic() - started
        except TimeoutError:
            pushed_back = True
            raise Retryable("timeout", f"no answer within {self.config.timeout_s:g} s", billed_usd=None) from None
        except Unreachable as error:
            raise Retryable("connection", f"{self.config.base_url} cannot be reached ({error})") from None
        except Broken as error:
            raise Retryable(
                "connection", f"{self.config.base_url} closed the connection ({error})", billed_usd=None
            ) from None
        finally:
            self._host.leave(pushed_back=pushed_back, wait_s=wait_s if (wait_s or 0.0) <= MAX_WAIT_S else None)
            self._slots.release()


def _pause(state: tenacity.RetryCallState) -> float:
    """Seconds before the next launch: as the server asked, up to two minutes (longer: give up); else 0.5 s to 8 s."""
    error = state.outcome.exception() if state.outcome else None
    if not isinstance(error, Retryable) or error.wait_s is None:
        return BACKOFF(state)
    if error.wait_s > MAX_WAIT_S:
        raise Incomplete(
            f"The server asks to wait {error.wait_s:g} s, longer than {MAX_WAIT_S:g} s. "
            "Finished work is saved; go on later with --resume."
        )
    return error.wait_s
