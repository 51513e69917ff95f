"""An OpenAI-compatible server as a policy: typed errors, bounded retries, a hard budget, answers cached by content.

The SDK's own retries are switched off: a retried request may be billed twice, so every launch is counted here, and a
server that answers 200 with an error inside (OpenRouter does) is caught as well.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tenacity

from stages.errors import Incomplete, UsageError
from stages.policy.base import PolicyConfig, Sample, Turn
from stages.policy.cache import AnswerCache
from stages.runs import store
from stages.runs.artifact import Budget, Listener

RETRYABLE = {408, 409, 425, 429, 500, 502, 503, 504, 529}
FATAL = {
    401: "the key was refused",
    402: "the account has no credit",
    403: "access is forbidden",
    404: "there is no such model or address",
}
MAX_WAIT_S = 120.0
CHARS_PER_TOKEN = 3.0  # for reservations only: rather too many tokens than too few


class Retryable(Exception):
    """Worth another launch; `wait_s` is what the server asked for, if it did."""

    def __init__(self, kind: str, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.kind, self.wait_s = kind, wait_s


class Rejected(Exception):
    """This one request can never succeed (too long, refused); others may."""


class EndpointPolicy:
    """Asks a server, several turns at once; text only, whatever else the server may offer.

    Raises `UsageError` without `base_url`, where the API key is missing, and for answers that no retry can mend (401,
    402, 403, 404); `Incomplete` where the budget is spent or the server asks for a wait of more than two minutes.
    """

    capture_level = "text"

    def __init__(self, config: PolicyConfig, *, budget: Budget, cache: Path) -> None:
        import openai

        if config.base_url is None:
            raise UsageError(f"The model {config.model!r} is to be asked of a server, but base_url is not set. Set it.")
        self.config, self._budget, self.batch_size = config, budget, config.concurrency
        self._client = openai.OpenAI(
            base_url=config.base_url, api_key=config.key(), max_retries=0, timeout=config.timeout_s
        )
        self._cache = AnswerCache(cache / "answers.sqlite")
        self._pool = ThreadPoolExecutor(config.concurrency)

    @classmethod
    def open(cls, config: PolicyConfig, *, cache: Path, budget: Budget, listener: Listener) -> "EndpointPolicy":
        """A client of the configured server; nothing is sent yet, and nothing is slow enough for the listener."""
        del listener
        return cls(config, budget=budget, cache=cache)

    def sample(self, turns: list[Turn]) -> list[Sample]:
        """One answer a turn, asked concurrently."""
        return list(self._pool.map(self._answer, turns))

    def facts(self) -> dict[str, Any]:
        """Server and model name; the key is not among them."""
        return {"model": self.config.model, "base_url": self.config.base_url}

    def _answer(self, turn: Turn) -> Sample:
        request = self._request(turn)
        key = store.digest({"base_url": self.config.base_url, **request})
        if (kept := self._cache.get(key)) is not None:
            return Sample(**kept)
        estimate = self._estimate(turn)
        self._budget.reserve(estimate)
        sample = Sample(error_type="unsettled")
        try:
            sample = self._launch(request)
        finally:
            self._budget.settle(estimate, sample.cost_usd)
        if sample.error_type is None:
            self._cache.put(key, {name: getattr(sample, name) for name in Sample.__dataclass_fields__})
        return sample

    def _request(self, turn: Turn) -> dict[str, Any]:
        return {
            "model": self.config.model,
            "messages": turn.messages,
            "temperature": self.config.temperature,
            "max_tokens": self.config.max_tokens,
            "seed": turn.seed % 2**31,
        }

    def _estimate(self, turn: Turn) -> float:
        characters = sum(len(message["content"]) for message in turn.messages)
        return self.config.cost(int(characters / CHARS_PER_TOKEN), self.config.max_tokens)

    def _launch(self, request: dict[str, Any]) -> Sample:
        """Launch until there is an answer or the attempts are used up; an error is then the answer."""
        started = time.monotonic()
        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self.config.max_attempts),
            wait=_wait,
            retry=tenacity.retry_if_exception_type(Retryable),
            reraise=True,
        )
        try:
            return retrying(self._once, request, started, retrying)
        except Retryable as error:
            attempts = retrying.statistics["attempt_number"]
            return Sample(error_type=error.kind, error=f"{error} (after {attempts} attempts)", attempts=attempts)
        except Rejected as error:
            return Sample(error_type="rejected", error=str(error), attempts=retrying.statistics["attempt_number"])

    def _once(self, request: dict[str, Any], started: float, retrying: tenacity.Retrying) -> Sample:
        import openai

        try:
            body = self._client.post("/chat/completions", cast_to=object, body=request)
        except openai.APITimeoutError:
            raise Retryable("timeout", f"no answer within {self.config.timeout_s:g} s") from None
        except openai.APIConnectionError as error:
            raise Retryable(
                "connection", f"{self.config.base_url} cannot be reached ({error.__cause__ or error})"
            ) from None
        except openai.APIStatusError as error:
            raise self._classified(
                error.status_code, error.message, error.response.headers.get("retry-after")
            ) from None
        except ValueError as error:
            raise Retryable("garbage", f"the server's answer is not JSON ({error})") from None
        return self._parse(body, time.monotonic() - started, retrying.statistics["attempt_number"])

    def _classified(self, status: int, message: str, retry_after: str | None) -> Exception:
        if status in FATAL:
            return UsageError(
                f"{self.config.base_url} answered {status} for {self.config.model!r}: "
                f"{FATAL[status]} ({message[:200]})."
            )
        if status in RETRYABLE:
            return Retryable(
                "rate_limit" if status == 429 else "server",
                f"the server answered {status}: {message[:200]}",
                _seconds(retry_after),
            )
        return Rejected(f"the server answered {status}: {message[:200]}")

    def _parse(self, body: Any, latency_s: float, attempts: int) -> Sample:
        """The answer in a 200 response; a body that holds an error or no choice is not an answer."""
        if not isinstance(body, dict):
            raise Retryable("garbage", f"the server answered something that is no JSON object: {str(body)[:80]!r}")
        if body.get("error"):
            raise self._classified(_code(body["error"]), str(body["error"])[:200], None)
        try:
            choice = body["choices"][0]
            text = choice["message"]["content"]
        except (KeyError, IndexError, TypeError):
            raise Retryable(
                "garbage", f"the server's answer has no choices[0].message.content: {str(body)[:80]!r}"
            ) from None
        if not isinstance(text, str) or choice.get("finish_reason") == "error":
            raise Retryable(
                "garbage", f"the server's answer has no text (finish_reason {choice.get('finish_reason')!r})"
            )
        usage = body.get("usage") or {}
        prompt, completion = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
        billed = usage.get("cost")
        return Sample(
            text=text,
            finish_reason=choice.get("finish_reason") or "stop",
            prompt_tokens=prompt,
            completion_tokens=completion,
            cost_usd=float(billed) if billed is not None else self.config.cost(prompt, completion),
            latency_s=latency_s,
            attempts=attempts,
        )


def _wait(state: tenacity.RetryCallState) -> float:
    """What the server asked for, up to two minutes (longer: give up now); else 0.5 s doubling to 8 s, with jitter."""
    error = state.outcome.exception() if state.outcome else None
    asked = getattr(error, "wait_s", None)
    if asked is not None and asked > MAX_WAIT_S:
        raise Incomplete(
            f"The server asks to wait {asked:g} s, longer than {MAX_WAIT_S:g} s. "
            "Finished work is saved; go on later with --resume."
        )
    if asked is not None:
        return asked
    return (tenacity.wait_exponential(multiplier=0.5, max=8.0) + tenacity.wait_random(0.0, 0.5))(state)


def _seconds(text: str | None) -> float | None:
    try:
        return max(float(text), 0.0) if text is not None else None
    except ValueError:
        return None


def _code(error: Any) -> int:
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else 500
