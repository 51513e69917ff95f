"""A server's batches: many requests in one file, answered within a day, often at half the price, as OpenAI has them.

A file of requests is uploaded, a batch is made of it, and when that has ended its files of answers and of errors are
read. Making one is not idempotent, so every batch has a key of ours in its metadata, and one that is there is found
instead of made again.
"""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
import tenacity

from stages.errors import ComposerError, UsageError
from stages.policy.base import PolicyConfig, Sample
from stages.policy.client import Broken, Client, Refused, Rejected, Response, Retryable, classified, read
from stages.runs import store

KEY = "composer"
ENDED = {"completed", "expired", "cancelled", "failed"}
Result = TypeVar("Result")


@dataclass(frozen=True)
class ServerBatch:
    """A batch as its server tells it: its state, the files with answers and errors, and why it was refused."""

    batch_id: str
    status: str
    files: tuple[str, ...]
    refused: str | None

    @property
    def ended(self) -> bool:
        """Whether nothing more comes of it."""
        return self.status in ENDED


class Batches:
    """The batches of one server; calls are tried again as `config.max_attempts` allows."""

    def __init__(self, client: Client, config: PolicyConfig) -> None:
        self._client, self._config = client, config

    async def find_or_create(self, key: str, requests: Iterable[tuple[str, dict[str, Any]]]) -> str:
        """The id of the batch with this key; requests, each with an id of its own, are sent only where there is none.

        `UsageError` where the server has no batches or does not take this one.
        """
        lines = b"".join(_line(name, request) + b"\n" for name, request in requests)

        async def once() -> str:
            found = await self._client.find_batch({KEY: key})
            return found or await self._client.create_batch(lines, {KEY: key})

        try:
            return await self._tried(once)
        except Rejected as error:
            raise self._not_taken(str(error)) from None

    async def look(self, batch_id: str) -> ServerBatch:
        """How it stands; `UsageError` where the server refused the requests as a whole."""
        told = await self._tried(lambda: self._client.batch(batch_id))
        files = tuple(told[name] for name in ("output_file_id", "error_file_id") if told.get(name))
        if told["status"] == "failed":
            errors = ((told.get("errors") or {}).get("data") or [{}])[0]
            return ServerBatch(batch_id, "failed", files, str(errors.get("message") or errors or "no reason given"))
        return ServerBatch(batch_id, told["status"], files, None)

    def refused(self, batch: ServerBatch) -> UsageError:
        """The sentence about a batch that failed as a whole."""
        return self._not_taken(batch.refused or "no reason given")

    async def results(self, batch: ServerBatch) -> dict[str, dict[str, Any]]:
        """The lines of its files by the ids of requests; what was not answered is not among them."""
        found: dict[str, dict[str, Any]] = {}
        for name in batch.files:
            content = await self._tried(lambda name=name: self._client.file(name))  # type: ignore[misc]
            found |= {line["custom_id"]: line for line in map(orjson.loads, content.splitlines()) if line}
        return found

    def sample(self, line: dict[str, Any] | None, bound: tuple[int, int]) -> Sample:
        """The answer in a line; None is a request that the batch ended without.

        What may have been billed counts as its upper bound. Latency is not known, and 0.
        """
        try:
            status, body = _answered(line or {})
            if status != 200:
                failed: Exception = classified(Response(status, {}, body), self._config, None)
            else:
                return read(body, self._config, bound, latency_s=0.0, attempts=1)
        except (Rejected, Retryable, ComposerError) as error:
            failed = error
        return self._failed(failed, bound)

    def _failed(self, error: Exception, bound: tuple[int, int]) -> Sample:
        if isinstance(error, Rejected):
            return Sample(error_type=error.kind, error=str(error), **error.told)
        if isinstance(error, Retryable):
            billed = self._config.cost(*bound) if error.billed_usd is None else error.billed_usd
            return Sample(error_type=error.kind, error=str(error), cost_usd=billed)
        return Sample(error_type="server", error=str(error))

    def _not_taken(self, why: str) -> UsageError:
        return UsageError(
            f"{self._config.base_url} does not take the batch of questions to {self._config.model!r}: {why}. "
            "Ask without --batch."
        )

    async def _tried(self, call: Callable[[], Awaitable[Result]]) -> Result:
        async for attempt in tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self._config.max_attempts),
            retry=tenacity.retry_if_exception_type(Retryable),
            wait=tenacity.wait_exponential(0.5, max=8.0),
            reraise=True,
        ):
            with attempt:
                try:
                    return await call()
                except Refused as error:
                    raise classified(error.response, self._config, None) from None
                except Broken as error:
                    raise Retryable("connection", f"{self._config.base_url} cannot be reached ({error})") from None
        raise AssertionError("tenacity ends with a result or an error")


def at_batch_price(config: PolicyConfig, share: float) -> PolicyConfig:
    """The same settings with prices that are a share of what single answers cost."""
    names = ("usd_per_mtok_in", "usd_per_mtok_cached_in", "usd_per_mtok_out")
    prices = {name: price * share for name in names if (price := getattr(config, name)) is not None}
    return config.model_copy(update=prices)


def _answered(line: dict[str, Any]) -> tuple[int, bytes]:
    """Status and body in a line of a batch's files; `Retryable` where it has none."""
    response = line.get("response")
    if not response:
        message = (line.get("error") or {}).get("message") or "it ended before this one's turn"
        raise Retryable("server", f"the batch has no answer: {message}")
    return int(response["status_code"]), store.encode(response["body"])


def _line(name: str, request: dict[str, Any]) -> bytes:
    return store.encode({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": request})
