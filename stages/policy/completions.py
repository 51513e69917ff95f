"""What is asked of a vLLM server: completions of token ids, log-probs of given tokens, and adapters by name.

Source: vLLM 0.32, `/v1/completions` with `return_token_ids` and `prompt_logprobs`, `/v1/load_lora_adapter`.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
import tenacity

from stages.errors import ComposerError, UsageError
from stages.policy import alone, answers
from stages.policy.answers import Rejected, Retryable
from stages.policy.client import Broken, Client, Unreachable
from stages.policy.config import PolicyConfig
from stages.policy.local import device
from stages.policy.server import ModelServer

BACKOFF = tenacity.wait_exponential(0.5, max=8.0) + tenacity.wait_random(0.0, 0.5)
UNSHAPED = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""A server takes other defaults from a model's generation_config.json, and log-probs are then of another policy."""
PROBED_AT = 2.0
"""Temperature of the probing call: far enough from 1 to tell log-probs before it from those after it."""
SAME = 1e-3
"""Nats up to which two log-probs count as equal, in a server that computes in 16 bits as well."""


@dataclass(frozen=True)
class Found:
    """What a server says and does. name: its model. logprob_kind: of sampled tokens, "processed" or "raw".

    seeds: whether requests carry their seed. context_tokens: prompt and answer together, at most.
    """

    name: str
    context_tokens: int
    logprob_kind: str
    seeds: bool
    version: str | None
    capture_level: str = "tokens"

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


@dataclass(frozen=True)
class Completion:
    """Sampled token ids, the end token included, and the natural log-prob of each."""

    ids: list[int]
    logprobs: list[float]
    attempts: int = 1


class Completions:
    """Asks one vLLM server; a server of ours is brought back when it dies, with the adapters that it held.

    Retries what may pass, a finite number of times. Raises `Retryable` and `Rejected` as `stages.policy.answers` has
    them, and `ComposerError` where no request can succeed.
    """

    def __init__(self, config: PolicyConfig, base_url: str, server: ModelServer | None = None) -> None:
        self._config = config.model_copy(update={"base_url": base_url})
        self._client, self._server = Client(base_url, config.key()), server
        self._door = alone.door(base_url, device(config.device))
        self._adapters: dict[str, Path] = {}
        self._version: str | None = None
        self._listed: set[str] = set()
        self._lock = asyncio.Lock()

    async def complete(
        self,
        model: str,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        seed: int | None,
        ends: set[int],
    ) -> Completion:
        """Sample an answer to these token ids."""
        asked = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
            "stop_token_ids": sorted(ends),
            **UNSHAPED,
            **({} if seed is None else {"seed": seed % 2**31}),
        }
        async with self._door.sampling():
            body, attempts = await self._ask("/completions", asked)
        try:
            choice = body["choices"][0]
            ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        except (KeyError, IndexError, TypeError):
            ids = logprobs = None
        if ids is None or logprobs is None or len(ids) != len(logprobs) or choice["prompt_token_ids"] != list(prompt):
            raise UsageError(
                f"{self._config.base_url} does not answer with the token ids and log-probs of {model!r}. "
                "A model vllm:... needs vLLM 0.12 or newer; leave out vllm: to sample text."
            )
        return Completion(ids, [min(logprob, 0.0) for logprob in logprobs], attempts)

    async def score(self, model: str, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
        """Natural log-prob, before temperature, of each token of a completion that is given behind its prompt."""
        ids = [*prompt, *completion]
        asked = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, **UNSHAPED}
        async with self._door.scoring():
            body, _ = await self._ask("/completions", asked)
        entries = body["choices"][0]["prompt_logprobs"][len(prompt) :]
        return [entry[str(token)]["logprob"] for token, entry in zip(completion, entries, strict=True)]

    async def load(self, name: str, folder: Path) -> None:
        """Let the server read an adapter, which is then a model of this name; the folder must be one that it sees.

        Each name stands for the same weights for ever: vLLM 0.32 that is told to load one in place reads it again for
        every batch, and goes on with the prefixes that it has cached for the old ones.
        """
        try:
            if name not in self._listed:
                await self._load(name, folder)
        except (UsageError, Rejected) as error:
            raise UsageError(
                f"The server at {self._config.base_url} does not load the adapter {folder}: {error} It needs "
                "--enable-lora, --max-lora-rank of the rank or more, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1."
            ) from None
        self._adapters[name] = folder

    async def unload(self, name: str) -> None:
        """Let the server forget an adapter."""
        del self._adapters[name]
        await self._ask("/unload_lora_adapter", {"lora_name": name}, plain=True)

    async def probe(self, ends: set[int]) -> Found:
        """Find out by calls what the server serves and what its log-probs mean; `UsageError` where it will not do."""
        listed, _ = await self._ask("/models", None)
        self._listed = {model["id"] for model in listed["data"]}
        base = next((model for model in listed["data"] if not model.get("parent")), None)
        if base is None or not base.get("max_model_len"):
            raise UsageError(f"{self._config.base_url} names no model with a context length, as vLLM does. Is it one?")
        name, prompt = base["id"], sorted(ends)
        sampled = await self.complete(
            name, prompt, max_tokens=16, temperature=PROBED_AT, seed=0 if self._server else None, ends=set()
        )
        before = await self.score(name, prompt, sampled.ids)
        raw = max(abs(a - b) for a, b in zip(before, sampled.logprobs, strict=True)) < SAME
        kind = "raw" if raw else "processed"
        return Found(name, int(base["max_model_len"]), kind, self._server is not None, self._version)

    async def _ask(self, path: str, body: Mapping[str, Any] | None, *, plain: bool = False) -> tuple[Any, int]:
        """The answer as JSON, or None where it is `plain` text, and the launches that it took."""

        async def launch() -> Any:
            await self._revived()
            raw = await self._once(path, body)
            return None if plain else self._json(raw)

        launches = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self._config.max_attempts),
            retry=tenacity.retry_if_exception_type(Retryable),
            wait=BACKOFF,
            reraise=True,
        )
        return await launches(launch), launches.statistics["attempt_number"]

    async def _once(self, path: str, body: Mapping[str, Any] | None) -> bytes:
        url = self._config.base_url
        try:
            response = await self._client.ask(path, body, self._config.timeout_s)
        except TimeoutError:
            raise Retryable("timeout", f"no answer within {self._config.timeout_s:g} s") from None
        except Unreachable as error:
            raise Retryable("connection", f"{url} cannot be reached ({error})") from None
        except Broken as error:
            raise Retryable("connection", f"{url} closed the connection ({error})") from None
        if response.status != 200:
            raise answers.classified(response, self._config, None)
        return response.body

    def _json(self, raw: bytes) -> Any:
        try:
            body = orjson.loads(raw)
        except ValueError as error:
            raise Retryable("garbage", f"the server's answer is not JSON ({error})") from None
        self._version = body.get("system_fingerprint") or self._version
        return body

    async def _load(self, name: str, folder: Path) -> None:
        await self._ask("/load_lora_adapter", _adapter(name, folder), plain=True)

    async def _revived(self) -> None:
        """Start a server of ours that died, once for all who ask, and give it back its adapters."""
        if self._server is None or self._server.alive():
            return
        async with self._lock:
            if self._server.alive():
                return
            await asyncio.to_thread(self._server.revive)
            for name, folder in self._adapters.items():
                try:
                    await self._once("/load_lora_adapter", _adapter(name, folder))
                except ComposerError as error:
                    raise UsageError(
                        f"The server was started again, but without its adapter {folder}: {error}"
                    ) from None


def _adapter(name: str, folder: Path) -> dict[str, str]:
    return {"lora_name": name, "lora_path": str(folder.resolve())}
