"""A model behind a vLLM server: token ids in, token ids and log-probs out; tools and template are rendered here.

Conversations are held as ids and never rebuilt from text, so that each prompt begins with the one before, which the
server then has in its cache.
"""

import copy
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from transformers import GenerationConfig

from stages.errors import InfrastructureError, UsageError
from stages.policy import adapters, background
from stages.policy.answers import Rejected, Retryable
from stages.policy.base import Sample, Turn
from stages.policy.completions import Completions, Found
from stages.policy.config import PolicyConfig
from stages.policy.local import resolve
from stages.policy.server import ModelServer
from stages.policy.token_text import end_ids, load_tokenizer, not_loaded, prompt_ids, token_sample, tokenizer_facts
from stages.runs import store
from stages.runs.artifact import Listener
from stages.runs.ledger import Budget

Answer = TypeVar("Answer")
IN_FLIGHT = 256
"""Turns asked at once; a server batches what it has room for."""


class VllmPolicy:
    """Samples from a vLLM server. What that server does is found out by a probing call, and stands in `facts`.

    Raises `UsageError` where the server will not do, `InfrastructureError` where it breaks for good.
    """

    capture_level, batch_size = "tokens", IN_FLIGHT

    def __init__(
        self,
        config: PolicyConfig,
        tokenizer: Any,
        ends: set[int],
        url: str,
        server: ModelServer | None = None,
    ) -> None:
        self.config, self.tokenizer, self.server, self.url = config, tokenizer, server, url
        self.version: int | None = None
        self._ends = ends
        self._completions = Completions(config, url, server)
        self.found = self._asked(self._completions.probe(ends))
        self._name = self.found.name

    @classmethod
    def open(cls, config: PolicyConfig, *, cache: Path, budget: Budget, listener: Listener) -> "VllmPolicy":
        """Ask the server at `base_url`; our own hardware costs no money, so the budget is left alone."""
        del budget
        if config.base_url is None:
            raise UsageError(
                f"No server is started here for {config.model!r}. Start one with "
                f"`composer serve {config.source}` and give its address as base_url."
            )
        return cls.connect(config, config.base_url, cache=cache, listener=listener)

    @classmethod
    def connect(
        cls, config: PolicyConfig, url: str, *, cache: Path, listener: Listener, server: ModelServer | None = None
    ) -> "VllmPolicy":
        """The policy at an address; for the folder of an adapter the server holds the base and gets the adapter."""
        source = resolve(config.held_here(), cache=cache, listener=listener)
        folder = Path(source) if adapters.is_adapter(source) else None
        below, revision = adapters.base_of(folder, config.held_here()) if folder else (config.held_here(), None)
        model = resolve(below, cache=cache, listener=listener)
        tokenizer = load_tokenizer(model, config, revision)
        try:
            ends = end_ids(GenerationConfig.from_pretrained(model, revision=revision or "main"), tokenizer)
        except (OSError, ValueError) as error:
            raise not_loaded(config, error) from None
        policy = cls(config, tokenizer, ends, url, server)
        if folder is not None:
            name = f"adapter-{store.folder_sha256(folder)[:12]}"
            policy.load(name, folder)
            policy.take(name)
        return policy

    def sample(self, turns: list[Turn]) -> list[Sample]:
        """One answer a turn, asked concurrently; an error of one answer is in its `Sample`."""
        asked = [(prompt_ids(self.tokenizer, turn), turn.seed) for turn in turns]
        return background.run(background.together(self._answered(prompt, seed) for prompt, seed in asked))

    async def ask(self, turn: Turn) -> Sample:
        """One answer; its error, if any, is in the `Sample`."""
        return await self._answered(prompt_ids(self.tokenizer, turn), turn.seed)

    async def probe(self) -> Found:
        """What was found out when the policy was opened, for those who ask a server before their first question."""
        return self.found

    async def drain(self) -> None:
        """Nothing that is in flight was paid for, so nothing is waited for."""

    def count_tokens(self, turn: Turn) -> int:
        """The length of a turn's prompt."""
        return len(prompt_ids(self.tokenizer, turn))

    def score(self, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
        """Natural log-prob, before temperature, of each token of a given action behind its prompt."""
        return self.score_all([(prompt, completion)])[0]

    def score_all(self, actions: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """`score` of each prompt and action, asked concurrently."""
        return self._asked(
            background.together(self._completions.score(self._name, prompt, given) for prompt, given in actions)
        )

    def load(self, name: str, folder: Path) -> None:
        """Let the server hold an adapter of its model under this name."""
        self._asked(self._completions.load(name, folder))

    def take(self, name: str, version: int | None = None) -> None:
        """Sample from an adapter that the server holds from now on; `version` is written into every sample."""
        self._name, self.version = name, version

    def unload(self, name: str) -> None:
        """Let the server forget an adapter that nobody samples from any more."""
        self._asked(self._completions.unload(name))

    def as_it_is(self) -> Self:
        """The policy with the adapter that is loaded now, whatever is loaded later."""
        return copy.copy(self)

    def facts(self) -> dict[str, Any]:
        """Model name, digests of its tokenizer and chat template, and what the server does."""
        return tokenizer_facts(self.config, self.tokenizer) | {"server": self.found.as_dict()}

    async def _answered(self, prompt: list[int], seed: int) -> Sample:
        room = self.found.context_tokens - len(prompt)
        if room <= 0:
            return Sample(
                error_type="context",
                error=f"the prompt has {len(prompt)} tokens, and the server takes {self.found.context_tokens} in all",
            )
        started = time.monotonic()
        try:
            got = await self._completions.complete(
                self._name,
                prompt,
                max_tokens=min(self.config.max_tokens, room),
                temperature=self.config.temperature,
                seed=seed if self.found.seeds else None,
                ends=self._ends,
            )
        except (Retryable, Rejected) as error:
            return Sample(error_type=error.kind, error=str(error))
        return token_sample(
            self.tokenizer,
            self._ends,
            prompt,
            got.ids,
            self.config.tool_calls,
            logprobs=got.logprobs,
            logprob_kind=self.found.logprob_kind if self.config.temperature else "raw",
            latency_s=time.monotonic() - started,
            attempts=got.attempts,
            policy_version=self.version,
        )

    def _asked(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        try:
            return background.run(work)
        except (Retryable, Rejected) as error:
            raise InfrastructureError(f"The server at {self.url} cannot be used: {error}.") from None
