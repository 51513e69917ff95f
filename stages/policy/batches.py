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
from stages.policy.client import Broken, Client, Refused, Rejected, Response, Retryable, Unreachable, classified, read
from stages.runs import store

KEY = "composer"
"""Name of our key in a batch's metadata."""
ENDED = {"completed", "expired", "cancelled", "failed"}
Result = TypeVar("Result")


@dataclass(frozen=True)
class ServerBatch:
    """A batch on its server: its state, the files with answers and errors, and why it was refused."""

    batch_id: str
    status: str
    files: tuple[str, ...]
    refused: str | None


@dataclass(frozen=True)
class Batches:
    """The batches of one server; calls are tried again as `config.max_attempts` allows."""

    client: Client
    config: PolicyConfig
    """Its prices are those of answers in a batch."""

    async def find_or_create(self, key: str, requests: Iterable[tuple[str, dict[str, Any]]]) -> str:
        """Return the id of the batch with this key; requests, each with its own id, are sent only where there is none.

        `UsageError` where the server has no batches or does not take this one.
        """
        calls = (
            {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": request}
            for name, request in requests
        )
        lines = b"".join(store.encode(call) + b"\n" for call in calls)
        try:
            # Each attempt searches first: the one before may have made the batch and lost the connection afterwards.
            return await self._tried(lambda: self.client.find_or_create_batch(lines, {KEY: key}))
        except Rejected as error:
            raise self.not_taken(str(error)) from None

    async def look(self, batch_id: str) -> ServerBatch:
        """Return the state of a batch; `refused` has the reason where the server refused the requests as a whole."""
        record = await self._tried(lambda: self.client.batch(batch_id))
        # Both files are read: a batch that expired has the answers so far in one and the rest in the other.
        files = tuple(record[name] for name in ("output_file_id", "error_file_id") if record.get(name))
        if record["status"] == "failed":
            errors = ((record.get("errors") or {}).get("data") or [{}])[0]
            return ServerBatch(batch_id, "failed", files, str(errors.get("message") or errors or "no reason given"))
        return ServerBatch(batch_id, record["status"], files, None)

    async def results(self, batch: ServerBatch) -> dict[str, dict[str, Any]]:
        """Return the lines of a batch's files by the ids of requests; an unanswered request has none."""
        found: dict[str, dict[str, Any]] = {}
        for name in batch.files:
            content = await self._tried(lambda name=name: self.client.file(name))  # type: ignore[misc]
            # The order of lines is not that of the requests.
            found |= {line["custom_id"]: line for line in map(orjson.loads, content.splitlines()) if line}
        return found

    def sample(self, line: dict[str, Any] | None, bound: tuple[int, int]) -> Sample:
        """Return the answer in a line; None is a request that the batch ended without.

        What may have been billed counts as its upper bound. Latency is not known, and 0.
        """
        line = line or {}
        failed: Exception
        if response := line.get("response"):
            status, body = int(response["status_code"]), store.encode(response["body"])
            try:
                if status == 200:
                    return read(body, self.config, bound, latency_s=0.0, attempts=1)
                failed = classified(Response(status, {}, body), self.config, None)
            except (Rejected, Retryable, ComposerError) as error:
                failed = error
        else:
            message = (line.get("error") or {}).get("message") or "it ended before this one's turn"
            failed = Retryable("server", f"the batch has no answer: {message}")  # and bills nothing for it
        if isinstance(failed, Rejected):
            return Sample(error_type=failed.kind, error=str(failed), **failed.usage)
        if isinstance(failed, Retryable):
            billed = self.config.cost(*bound) if failed.billed_usd is None else failed.billed_usd
            return Sample(error_type=failed.kind, error=str(failed), cost_usd=billed)
        return Sample(error_type="server", error=str(failed))

    def not_taken(self, why: str) -> UsageError:
        """Return the error about a batch that the server does not take."""
        return UsageError(
            f"{self.config.base_url} does not take the batch of questions to {self.config.model!r}: {why}. "
            "Ask without --batch."
        )

    async def _tried(self, call: Callable[[], Awaitable[Result]]) -> Result:
        async for attempt in tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self.config.max_attempts),
            retry=tenacity.retry_if_exception_type(Retryable),
            wait=tenacity.wait_exponential(0.5, max=8.0),
            reraise=True,
        ):
            with attempt:
                try:
                    return await call()
                except Refused as error:
                    raise classified(error.response, self.config, None) from None
                except (Broken, Unreachable, TimeoutError) as error:
                    why = str(error) or "no answer in time"
                    raise Retryable("connection", f"{self.config.base_url} cannot be reached ({why})") from None
        raise AssertionError("tenacity ends with a result or an error")
