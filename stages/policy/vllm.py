"""A model behind a vLLM server: token ids in, token ids and log-probs out. Tools and template are rendered here.

Conversations are held as ids and never rebuilt from text, so that each prompt begins with the one before, which the
server then has in its prefix cache. `Completions` speaks the protocol, `VllmPolicy` is the policy.

Source: vLLM 0.32, `/v1/completions` with `return_token_ids` and `prompt_logprobs`, `/v1/load_lora_adapter`, and of its
development mode `/pause`, `/is_paused`, `/collective_rpc` with `reload_weights`, `/reset_prefix_cache`, `/resume`,
`/sleep` and `/wake_up`.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import orjson
from jaxtyping import Float
from transformers import GenerationConfig

from composer_stages import endings
from composer_stages.errors import ComposerError, InfrastructureError, UsageError
from composer_stages.policy import adapters, background, model_checks
from composer_stages.policy.base import PolicyConfig, Sample, Turn
from composer_stages.policy.client import (
    BODY_BYTES,
    Client,
    FatalError,
    RejectedError,
    RetryableError,
    max_response_bytes,
    retrying,
)
from composer_stages.policy.local import device, load_tokenizer, resolve
from composer_stages.policy.model_facts import ModelFacts
from composer_stages.policy.server import ModelServer, scoring_lock
from composer_stages.runs import store
from composer_stages.runs.ledger import Budget
from composer_stages.runs.run import AnswerFolders, Listener
from composer_stages.words import Sentence

UNSHAPED = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sampling without changes of the distribution: a server would else take defaults from generation_config.json."""
PROBED_AT = 2.0
"""Temperature of the probe: log-probs before and after this temperature differ clearly."""
RELOAD_S = 600.0
"""Longest wait for a server to read weights from disk, in seconds."""
Likeliest = Float[np.ndarray, "n two_k"]
"""At each of n places the ids of the k likeliest tokens, then their natural log-probs; float32."""
SAME = 1e-3
"""Nats up to which two log-probs count as equal; servers compute in 16 bits."""


@dataclass(frozen=True)
class ServerFacts:
    """Result of the probe. name: the server's model. logprob_kind: of sampled tokens, "processed" or "raw".

    seeds: whether requests carry their seed. context_tokens: prompt and answer together, at most.
    """

    name: str
    context_tokens: int
    logprob_kind: str
    seeds: bool
    version: str | None
    capture_level: str = "tokens"


@dataclass(frozen=True)
class Completion:
    """Sampled token ids, the end token included, and the natural log-prob of each."""

    ids: list[int]
    logprobs: list[float]
    attempts: int = 1


class Completions:
    """Requests to one vLLM server; a server started here is restarted when it dies, with its adapters.

    Temporary errors are retried a finite number of times. Raises `RetryableError` and `RejectedError` as
    `composer_stages.policy.client` has them, and `ComposerError` where no request can succeed.
    """

    def __init__(self, config: PolicyConfig, base_url: str, server: ModelServer | None = None) -> None:
        self._config = config.model_copy(update={"base_url": base_url})
        # Both kinds of time-out are repeated here, so connecting has the limit of the call.
        self._client, self._server = Client(self._config, connect_s=config.timeout_s), server
        self._lock_scoring = scoring_lock(base_url, device(config.device))
        self._adapters: dict[str, dict[str, str]] = {}
        self._weights: str | None = None
        """Where the weights are that the server was given; None while it has those that it was started with."""
        self._version: str | None = None
        self._listed: set[str] = set()
        self._seeds = 2**31
        """Number of different seeds that are sent."""
        self._restarts = server.restarts if server else 0
        """Those of the server after which it was given its adapters and weights again."""
        self._reviving: asyncio.Task[None] | None = None
        """The newest restart, which all requests await."""

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
        """Sample a completion of these token ids."""
        request = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "logprobs": 0,  # of the sampled token alone; without the field vLLM returns none
            "return_token_ids": True,
            "skip_special_tokens": False,
            "stop_token_ids": sorted(ends),
            **UNSHAPED,
            **({} if seed is None else {"seed": seed % self._seeds}),
        }
        async with self._lock_scoring.sampling() if self._lock_scoring else nullcontext():
            body, attempts = await self._ask("/completions", request)
        try:
            choice = body["choices"][0]
            ids = choice["token_ids"]
            logprobs = [min(float(logprob), 0.0) for logprob in choice["logprobs"]["token_logprobs"]]
        except (KeyError, IndexError, TypeError):
            ids = logprobs = None
        if ids is None or logprobs is None or len(ids) != len(logprobs) or choice["prompt_token_ids"] != list(prompt):
            raise UsageError("policy.no-token-ids", base_url=self._config.base_url, model=model)
        return Completion(ids, logprobs, attempts)

    async def score(self, model: str, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
        """Return the natural log-prob, before temperature, of each token of a given completion of a prompt."""
        entries = await self._prompt_logprobs(model, prompt, completion, 0)
        return [entry[token] for token, entry in zip(completion, entries, strict=True)]

    async def likeliest(
        self, model: str, prompt: Sequence[int], completion: Sequence[int], num: int, vocabulary: int
    ) -> Likeliest:
        """Return the `num` likeliest tokens at each place of a given completion, with their log-probs as in `score`.

        vocabulary: ids from there on are a head's padding. `UsageError` if the server returns fewer.
        """
        try:
            entries = await self._prompt_logprobs(model, prompt, completion, num)
        except RejectedError as error:
            if error.kind == "context":
                raise
            raise UsageError(
                "policy.likeliest-refused", base_url=self._config.base_url, num=num, error=str(error)
            ) from None
        # The given token is returned too, if it is less likely than the `num` likeliest.
        best = [
            sorted(((logprob, token) for token, logprob in entry.items() if token < vocabulary), reverse=True)[:num]
            for entry in entries
        ]
        if least := [len(row) for row in best if len(row) < num]:
            raise UsageError(
                "policy.likeliest-too-few",
                base_url=self._config.base_url,
                num=num,
                vocabulary=vocabulary,
                least=min(least),
            )
        return np.array([[*(token for _, token in row), *(logprob for logprob, _ in row)] for row in best], np.float32)

    async def _prompt_logprobs(
        self, model: str, prompt: Sequence[int], completion: Sequence[int], num: int
    ) -> list[dict[int, float]]:
        """Return log-probs by token at each place of a given completion: its own token's, and the `num` likeliest."""
        ids = [*prompt, *completion]
        request = {
            "model": model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": num,
            **UNSHAPED,
        }
        most = max(BODY_BYTES, max_response_bytes(len(ids) * (1 + num // 20)))
        async with self._lock_scoring.scoring() if self._lock_scoring else nullcontext():
            body, _ = await self._ask("/completions", request, most_bytes=most)
        try:
            entries = body["choices"][0]["prompt_logprobs"][len(prompt) :]
            logprobs = [{int(token): float(value["logprob"]) for token, value in entry.items()} for entry in entries]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            logprobs = []
        # A place without log-probs must not count as one without a difference.
        if len(logprobs) != len(completion) or any(
            t not in entry for t, entry in zip(completion, logprobs, strict=True)
        ):
            raise UsageError("policy.no-prompt-logprobs", base_url=self._config.base_url, model=model)
        return logprobs

    async def load(self, name: str, folder: Path) -> None:
        """Load an adapter into the server as a model of this name; the server must be able to read the folder.

        A name always refers to the same weights.
        """
        # Never with load_inplace: vLLM 0.32 then reads the adapter again for every batch, and keeps using prefixes that
        # it cached under the old weights.
        body = {"lora_name": name, "lora_path": str(folder.resolve())}
        try:
            if name not in self._listed:  # another run that shares the server has loaded it
                await self._repeated(lambda: self._load(body))
        except (FatalError, RejectedError) as error:
            raise UsageError(
                "policy.adapter-not-loaded", base_url=self._config.base_url, folder=folder, error=error
            ) from None
        self._adapters[name] = body

    async def _load(self, body: Mapping[str, str]) -> None:
        try:
            await self._client.ask("/load_lora_adapter", body)
        except RejectedError as error:
            if "has already been loaded" not in str(error):  # by a request whose answer was lost
                raise

    async def unload(self, name: str) -> None:
        """Remove an adapter from the server."""
        await self._repeated(lambda: self._client.ask("/unload_lora_adapter", {"lora_name": name}))
        del self._adapters[name]  # not before: a server that is started again meanwhile gets it once more

    async def replace_weights(self, source: str) -> None:
        """Replace all weights of the server by the weights of a folder or model name that it can read.

        Requests under way, of any process, stop meanwhile and sample their next tokens from the new weights.
        """
        root = self._root()
        try:
            try:
                await self._repeated(lambda: root.ask("/pause?mode=keep", {}))
                # All attempts in one pause: between two nothing may be sampled from weights that are half replaced.
                await self._repeated(lambda: self._replace_weights(root, source))
            finally:  # also where the answer to a pause was lost
                await self._repeated(lambda: root.ask("/resume", {}))
        except (FatalError, RejectedError) as error:
            raise UsageError(
                "policy.weights-not-loaded", base_url=self._config.base_url, source=source, error=error
            ) from None
        self._weights = source

    async def administer(self, path: str) -> None:
        """Send a request of vLLM's development mode; no other request may be in flight."""
        await self._repeated(lambda: self._root().ask(path, {}))

    def _root(self) -> Client:
        """Return a client of the server's root, above /v1."""
        url = (self._config.base_url or "").rstrip("/").removesuffix("/v1")
        return Client(self._config.model_copy(update={"base_url": url, "timeout_s": RELOAD_S}))

    async def _replace_weights(self, root: Client, source: str) -> None:
        await root.ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": source}})
        # Without this, prompts and what requests have sampled so far go on from keys and values of other weights.
        if b"true" not in (await root.ask("/reset_prefix_cache?reset_running_requests=true", {})).body:
            raise RetryableError("cache", Sentence("policy.prefixes-not-dropped"))

    async def probe(self, ends: set[int]) -> ServerFacts:
        """Find out the server's model, context and kind of log-probs; `UsageError` for an unsuitable server."""
        listed, _ = await self._repeated(self._client.models)
        self._listed = {model["id"] for model in listed or []}
        base = next((model for model in listed or [] if not model.get("parent")), None)
        if base is None or not base.get("max_model_len"):
            raise UsageError("policy.not-a-vllm-server", base_url=self._config.base_url)
        own = base.get("owned_by") == "composer"  # `composer serve` draws as the policy in process, seed for seed
        self._seeds = 2**63 if own else self._seeds
        root = self._root()

        async def find_going() -> None:
            # Outside of development mode there is no such address, and the server cannot be paused.
            paused = await root.get("/is_paused")
            if paused.status == 200 and paused.body.replace(b" ", b"") == b'{"is_paused":true}':
                raise RetryableError("paused", "it is paused")  # a training goes on with it after some seconds

        try:
            await self._repeated(find_going)
        except RetryableError as error:
            if error.kind != "paused":
                raise
            raise UsageError(
                "policy.server-paused", base_url=self._config.base_url, root_url=root.config.base_url
            ) from None
        # Any prompt will do; the ids that end an answer are in every vocabulary.
        name, prompt = base["id"], sorted(ends)
        sampled = await self.complete(
            name, prompt, max_tokens=16, temperature=PROBED_AT, seed=0 if self._server else None, ends=set()
        )
        # At temperature 2, log-probs after temperature differ from scores, which are before it. vLLM returns raw ones
        # unless it is started with --logprobs-mode processed_logprobs.
        before = await self.score(name, prompt, sampled.ids)
        raw = max(abs(a - b) for a, b in zip(before, sampled.logprobs, strict=True)) < SAME
        kind = "raw" if raw else "processed"
        return ServerFacts(name, int(base["max_model_len"]), kind, own or self._server is not None, self._version)

    async def _ask(self, path: str, body: Mapping[str, Any], *, most_bytes: int = BODY_BYTES) -> tuple[Any, int]:
        """Return the response as JSON and the number of launches."""

        async def launch() -> Any:
            raw = (await self._client.ask(path, body, most_bytes=most_bytes)).body
            try:
                read = orjson.loads(raw)
            except ValueError as error:
                raise RetryableError("garbage", Sentence("policy.answer-not-json", error=str(error))) from None
            self._version = read.get("system_fingerprint") or self._version
            words = [choice.get("finish_reason") or "" for choice in read.get("choices") or ()]
            if broken := [word for word in words if endings.ending_of(word) == endings.BROKEN]:
                raise RetryableError("garbage", Sentence("policy.answer-broken-off", finish=broken[0]))
            return read

        return await self._repeated(launch)

    async def _repeated(self, launch: Callable[[], Awaitable[Any]]) -> tuple[Any, int]:
        """Return the result of a launch, each time at a living server, and the number of launches."""

        async def revived() -> Any:
            await self._revive()
            return await launch()

        # No launch is billed, so one whose connection broke is repeated, too.
        launches = retrying(self._config)
        return await launches(revived), launches.statistics["attempt_number"]

    async def _revive(self) -> None:
        """Wait until the child server runs and has its adapters; concurrent requests share one restart."""
        if self._server is None:
            return
        if self._reviving is None or self._reviving.done():
            # Also while it is alive: it may not have its adapters yet.
            if self._server.alive() and self._restarts == self._server.restarts:
                return
            self._reviving = asyncio.create_task(self._restart(self._server))
            # Retrieve the exception, which asyncio would print: all who waited may be gone, and the next one restarts.
            self._reviving.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        # Shielded: a request may be broken off, but the thread that starts the server goes on.
        await asyncio.shield(self._reviving)

    async def _restart(self, server: ModelServer) -> None:
        await asyncio.to_thread(server.revive)
        for body in list(self._adapters.values()):
            try:
                await self._load(body)
            except (ComposerError, RejectedError) as error:
                raise UsageError("policy.adapter-lost", path=body["lora_path"], error=str(error)) from None
        if self._weights is not None:
            await self._replace_weights(self._root(), self._weights)
        self._restarts = server.restarts


Answer = TypeVar("Answer")
IN_FLIGHT = 256
"""Turns asked at once; the server batches as many as it has memory for."""


class VllmPolicy:
    """A policy on a vLLM server; a probe at the start detects the server's features.

    Raises `UsageError` for an unsuitable server, `InfrastructureError` for one that fails for good.
    """

    capture_level, batch_size = "tokens", IN_FLIGHT

    def __init__(
        self, config: PolicyConfig, tokenizer: Any, generation_config: Any, url: str, server: ModelServer | None = None
    ) -> None:
        self.config, self.tokenizer, self.server, self.url = config, tokenizer, server, url
        self._completions = Completions(config, url, server)
        self.model_facts = ModelFacts(config, tokenizer, generation_config, math.inf)
        self.server_facts = self._run(self._completions.probe(self.model_facts.end_ids))
        self.model_facts.context = self.server_facts.context_tokens
        self._sampled: tuple[str, int | None] = (self.server_facts.name, None)
        """The model that is sampled from, and the version of its weights: one value, as another thread replaces it."""
        self._in_flight = Counter[str]()

    @classmethod
    def open(cls, config: PolicyConfig, *, cache: AnswerFolders, budget: Budget, listener: Listener) -> "VllmPolicy":
        """Open the policy on the server at `base_url`; own hardware costs no money, so the budget is not used."""
        del cache, budget
        if config.base_url is None:
            raise UsageError("policy.server-not-started", model=config.model, source=config.source)
        return cls.connect(config, config.base_url, listener=listener)

    @classmethod
    def connect(
        cls, config: PolicyConfig, url: str, *, listener: Listener, server: ModelServer | None = None
    ) -> "VllmPolicy":
        """Open the policy on a server by its URL; an adapter is loaded into the server of its base."""
        source = resolve(config.in_process(), listener=listener)
        base_and_revision = adapters.base_of(source, config.in_process())
        below, revision = base_and_revision or (config.in_process(), None)
        model = resolve(below, listener=listener)
        tokenizer = load_tokenizer(model, config, revision)
        with model_checks.translate_errors(config):
            generation_config = GenerationConfig.from_pretrained(model, revision=revision or "main")
        policy = cls(config, tokenizer, generation_config, url, server)
        if base_and_revision:
            name = f"adapter-{store.folder_sha256(Path(source))[:12]}"
            policy.load(name, Path(source))
            policy.sample_from(name)
        return policy

    async def ask(self, turn: Turn) -> Sample:
        """Return one answer; its error, if any, is in the `Sample`."""
        prompt = self.model_facts.render(turn)
        if isinstance(prompt, Sample):
            return prompt
        # vLLM refuses a request whose max_tokens does not fit behind its prompt, so it gets what fits.
        room = self.server_facts.context_tokens - len(prompt)
        # An answer is of the weights at its beginning; those under training change meanwhile.
        started, (name, version) = time.monotonic(), self._sampled
        self._in_flight[name] += 1
        try:
            completion = await self._completions.complete(
                name,
                prompt,
                max_tokens=min(self.config.max_tokens or room, room),
                temperature=self.config.temperature,
                seed=turn.seed if self.server_facts.seeds else None,
                ends=self.model_facts.end_ids,
            )
        except (RetryableError, RejectedError) as error:
            return Sample(error_type=error.kind, error=str(error))
        finally:
            self._in_flight[name] -= 1
        return self.model_facts.read(
            prompt,
            completion.ids,
            logprobs=completion.logprobs,
            logprob_kind=self.server_facts.logprob_kind if self.config.temperature else "raw",
            latency_s=time.monotonic() - started,
            attempts=completion.attempts,
            policy_version=version,
        )

    async def probe(self) -> ServerFacts:
        """Return the result of the probe that opened the policy."""
        return self.server_facts

    async def drain(self) -> None:
        """Do not wait: requests to a vLLM server are not paid for."""

    def count_tokens(self, turn: Turn) -> int:
        """Return the number of tokens in a turn's prompt."""
        return self.model_facts.count_tokens(turn)

    def score(self, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
        """Return the natural log-prob, before temperature, of each token of a given action."""
        return self.score_all([(prompt, completion)])[0]

    def score_all(self, actions: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """Return `score` of each (prompt, action), asked concurrently."""
        return self._run(
            background.gather(
                self._completions.score(self._sampled[0], prompt, completion) for prompt, completion in actions
            )
        )

    def likeliest_all(self, actions: Sequence[tuple[Sequence[int], Sequence[int]]], num: int) -> list[Likeliest]:
        """Return the `num` likeliest tokens at each place of each (prompt, action), asked concurrently."""
        ask, model, vocabulary = self._completions.likeliest, self._sampled[0], len(self.tokenizer)
        return self._run(
            background.gather(ask(model, prompt, completion, num, vocabulary) for prompt, completion in actions)
        )

    def load(self, name: str, folder: Path) -> None:
        """Load an adapter into the server under this name."""
        self._run(self._completions.load(name, folder))

    def replace_weights(self, source: str) -> None:
        """Replace all weights of the server; an answer under way goes on with the new ones."""
        self._run(self._completions.replace_weights(source))

    def sleep(self, level: int) -> None:
        """Have the server free its GPU, of keys and values too: 1 moves the weights to main memory, 2 drops them."""
        self._run(self._completions.administer(f"/sleep?level={level}"))

    def wake(self) -> None:
        """Have the server take its memory again; after level 2 its weights are to be replaced before it is asked."""
        self._run(self._completions.administer("/wake_up"))

    def sample_from(self, name: str | None, version: int | None = None) -> None:
        """Sample from a loaded adapter from now on, or without one; `version` is written into every sample."""
        self._sampled = name or self.server_facts.name, version

    @property
    def version(self) -> int | None:
        """Return the version of the weights that the next answer is sampled from; None where none was named."""
        return self._sampled[1]

    def in_use(self) -> set[str]:
        """Return the names of the models that requests in flight sample from, and of the one of later requests."""

        async def names() -> set[str]:  # on the loop of the requests, where none is just being begun
            return {self._sampled[0], *(+self._in_flight)}

        return self._run(names())

    def unload(self, name: str) -> None:
        """Remove an adapter that is no longer sampled from."""
        self._run(self._completions.unload(name))

    def facts(self) -> dict[str, Any]:
        """Return model name, digests of tokenizer and chat template, and the probe's result."""
        return self.model_facts.manifest() | {"server": asdict(self.server_facts)}

    def _run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        try:
            return background.run(work)
        except (RetryableError, RejectedError) as error:
            raise InfrastructureError("policy.server-unusable", url=self.url, error=str(error)) from None
