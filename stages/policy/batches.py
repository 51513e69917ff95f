"""A server's batches: many requests in one file, answered within a day, often at half the price, as OpenAI has them.

A file of requests is uploaded, a batch is made of it, and when that has ended its files of answers and of errors are
read. Making one is not idempotent, so every batch has a key of ours in its metadata, and one that is there is found
instead of made again.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
import tenacity

from stages.errors import Incomplete, UsageError
from stages.policy.base import PolicyConfig, Sample
from stages.policy.billing import Asked
from stages.policy.client import (
    Broken,
    Client,
    Failed,
    Refused,
    Rejected,
    Response,
    Retryable,
    Unreachable,
    classified,
    most_bytes,
    read,
)
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
        files = tuple(str(record[name]) for name in ("output_file_id", "error_file_id") if record.get(name))
        status = str(record.get("status"))
        if status == "failed":
            listed = _object(record.get("errors")).get("data")
            first = _object(listed[0]) if isinstance(listed, list) and listed else {}
            return ServerBatch(batch_id, status, files, str(first.get("message") or first or "no reason given"))
        return ServerBatch(batch_id, status, files, None)

    async def results(self, batch: ServerBatch, asked: Mapping[str, Asked]) -> dict[str, dict[str, Any]]:
        """Return the lines of a batch's files by the ids of the requests `asked`; an unanswered request has none."""
        found: dict[str, dict[str, Any]] = {}
        most = sum(most_bytes(one.completion_tokens) for one in asked.values())
        for name in batch.files:
            content = await self._tried(lambda name=name: self.client.file(name, most))  # type: ignore[misc]
            # The order of lines is not that of the requests.
            for text in content.splitlines():
                with suppress(ValueError):  # a line that cannot be read answers nothing
                    line = _object(orjson.loads(text))
                    found |= {name: line for name in [str(line.get("custom_id"))] if name in asked}
        return found

    def sample(self, line: dict[str, Any] | None, asked: Asked) -> Sample:
        """Return the answer in a line; None is a request that the batch ended without.

        What may have been billed counts as its upper bound. Latency is not known, and 0. Raises `Overlong`.
        """
        line = line or {}
        failed: Failed
        response = line.get("response")
        if response and isinstance(response, dict):
            status, body = response.get("status_code"), store.encode(response.get("body"))
            try:
                if type(status) is not int:
                    raise Retryable("garbage", f"the batch has no status for it: {status!r:.40}", billed_usd=None)
                if status == 200:
                    return read(body, self.config, asked, latency_s=0.0, attempts=1)
                failed = classified(Response(status, {}, body), self.config, None)
            except Failed as error:
                failed = error
        else:
            message = _object(line.get("error")).get("message") or "it ended before this one's turn"
            failed = Retryable("server", f"the batch has no answer: {message}")  # and bills nothing for it
        if isinstance(failed, Rejected) and failed.usage:
            return Sample(error_type=failed.kind, error=str(failed), **failed.usage)
        kind = failed.kind if isinstance(failed, Rejected | Retryable) else "server"
        usd = asked.usd(self.config) if failed.billed_usd is None else failed.billed_usd
        return Sample(error_type=kind, error=str(failed), cost_usd=usd, claimed_usd=failed.claimed_usd)

    def not_taken(self, why: str) -> UsageError:
        """Return the error about a batch that the server does not take."""
        return UsageError(
            f"{self.config.base_url} does not take the batch of questions to {self.config.model!r}: {why}. "
            "Ask without --batch."
        )

    async def _tried(self, call: Callable[[], Awaitable[Result]]) -> Result:
        async def once() -> Result:
            try:
                return await call()
            except Refused as error:
                raise classified(error.response, self.config, None) from None
            except (Broken, Unreachable, TimeoutError) as error:
                why = str(error) or "no answer in time"
                raise Retryable("connection", f"{self.config.base_url} cannot be reached ({why})") from None

        launches = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self.config.max_attempts),
            retry=tenacity.retry_if_exception_type(Retryable),
            wait=tenacity.wait_exponential(0.5, max=8.0),
            reraise=True,
        )
        try:
            return await launches(once)
        except Retryable as error:
            raise Incomplete(
                f"The batch of questions to {self.config.model!r} is not finished, because {error}. The server goes on "
                "with it; take it up with --resume."
            ) from None


def _object(value: Any) -> dict[str, Any]:
    """Return a JSON object, empty for anything else."""
    return value if isinstance(value, dict) else {}
