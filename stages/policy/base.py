"""The interface of policies: the request (`Turn`), the answer (`Sample`), the protocol, and the settings.

A model is a Hugging Face folder, a hub id, a name such as `smollm2`, a GGUF file, a built-in model of an environment
such as `kata:student`, or a server's model. `PolicyConfig.identity` is what a run's fingerprint contains of it.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self, runtime_checkable
from urllib.parse import parse_qsl, urlsplit

from pydantic import Field, model_validator

from composer_stages import envs
from composer_stages.envs.base import Task
from composer_stages.errors import BadInput, UsageError
from composer_stages.messages import Message
from composer_stages.policy import gguf, named
from composer_stages.policy.prices import TablePrice, table_price
from composer_stages.policy.request_fields import LIMITS, find_unbounded
from composer_stages.policy.tool_calls import CallForm
from composer_stages.redaction import secret_in
from composer_stages.runs import store
from composer_stages.runs.kinds import NOOP, REFERENCE
from composer_stages.runs.ledger import Budget
from composer_stages.runs.run import AnswerFolders, Listener
from composer_stages.runs.settings import Option, Settings, basic_of
from composer_stages.words import Sentence, did_you_mean

EXAMPLE = "kata:student"


class ModelMaker(Protocol):
    """A module that makes a model's folder: of an environment's `models`, of named models, or of GGUF files."""

    def recipe_fingerprint(self, name: str, /) -> str:
        """Return the SHA-256 of what determines the model's weights."""
        ...

    def to_make(self, name: str, /) -> str:
        """Return what `ensure` would make, in words; empty if the model's folder exists."""
        ...

    def ensure(self, name: str, progress: Callable[[str, int, int], None], /) -> Path:
        """Return the model's folder, which is made if absent; `progress` gets (title, done, total)."""
        ...


def is_built_in(model: str) -> bool:
    """Return whether a model's name is `ENVIRONMENT:NAME` of an environment that has built-in models, all small."""
    environment, colon, _ = model.partition(":")
    entry = envs.ENVIRONMENTS.get(environment)
    return bool(colon and entry and entry.models)


class RealModels(ModelMaker, Protocol):
    """A maker of published models: the module `named` for names of a table, `gguf` for GGUF files."""

    def header(self, name: str, /) -> gguf.Header | None:
        """Return the header of a model's GGUF file; None for one without a file here."""
        ...

    def facts(self, name: str, /) -> dict[str, Any]:
        """Return the manifest's entry about the origin of a model."""
        ...


def real_models(model: str) -> RealModels | None:
    """Return the maker of a named model or of a GGUF file; None for other models."""
    if model in named.NAMED:
        return named
    return gguf if model.endswith(gguf.SUFFIX) and not Path(model).is_dir() else None


def maker_of(model: str) -> tuple[ModelMaker, str] | None:
    """Return the maker of a model's folder, and the model's name there; None for a model that nothing here makes.

    A name comes before a folder of that name. The maker raises `BadInput` for an unknown name.
    """
    if is_built_in(model):
        environment, _, name = model.partition(":")
        return envs.load_attachment(environment, "models"), name
    real = real_models(model)
    return (real, model) if real else None


def hub_id(model: str) -> tuple[str, str | None]:
    """Return a hub model's repository, and the commit if its name fixes one."""
    return (named.hub_revision(model) if model in named.NAMED else None) or (model, None)


EMBEDDED_TOKENS = 64
"""Longest answer of a built-in model in tokens, where none is given."""
UNSTATED = 32_768
"""Longest answer of a server that states no context, in tokens. It is sent: without a limit money has no bound."""
PATH_OF_CALL = re.compile(r"(/chat)?/(completions|messages|responses|models)/?(?=\?|$)")
SECRET_FIELD = re.compile(r"(?i)(^|[-_])(api-?key|key|token|secret|password|sig|signature|auth|code)$")
"""Names of fields of an address that hold a secret."""
VLLM = "vllm:"
"""Prefix of a model that is sampled from a vLLM server."""


class Server(Settings):
    """How a vLLM server is started for a run, for a model `vllm:...` without base_url."""

    python: str = Field(default="", json_schema_extra={"affects_results": False})
    """Interpreter of the environment that holds vLLM; empty for the one that COMPOSER_VLLM names, else `.vllm`'s."""
    args: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")], bool | int | float | str] = Field(default={})
    """Further options of vLLM's server: {"tensor-parallel-size": 2, "gpu-memory-utilization": 0.4}. With
    {"enable-sleep-mode": true} it leaves the memory of a GPU to the training while a step trains."""

    @property
    def sleeps(self) -> bool:
        """Whether a training puts its own server to sleep while a step trains."""
        return bool(self.args.get("enable-sleep-mode"))


class PolicyConfig(Settings):
    """A model and how to sample from it: a folder, GGUF file, hub id or name; with `base_url`, a server's model."""

    text_sets: ClassVar[str | None] = "model"
    preflight: ClassVar[str | None] = "composer_stages.policy.preflight:check"

    model: str = Field(default="kata:student", min_length=1)
    """Hugging Face folder, hub id, GGUF file, `smollm2`, `qwen-coder` or `kata:NAME`; with `base_url`, the
    server's name for it. Without `base_url`, `vllm:` before it starts a vLLM server that samples it, token by
    token. `reference` plays each task's own solution, `noop` does nothing; neither asks a server."""
    base_url: str | None = None
    """Root of an OpenAI-compatible server, for example https://api.openai.com/v1; empty for none, where a file gives
    one."""
    server: Server = Server()
    api_key_env: str = ""
    """Name of the environment variable that holds the key; empty for a server that needs none."""
    usd_per_mtok_in: float | None = None
    """Price of a million input tokens of a server in USD; 0 where it is free. Without prices those of the package
    genai-prices count, if it is installed and knows model and host."""
    usd_per_mtok_cached_in: float | None = None
    """Price of a million input tokens that the server reports as cached; without it they cost as much as others."""
    usd_per_mtok_cache_write: float | None = None
    """Price of a million input tokens that the server writes to its cache; without it 1.25 times that of others."""
    usd_per_mtok_out: float | None = None
    """Price of a million output tokens in USD."""
    price: Literal["unknown"] | None = None
    """"unknown" lets a server without prices be asked under a limit of cost: a call at a time, by its own bills."""
    temperature: float = Field(default=1.0, ge=0.0)
    """0 is greedy. Nothing else shapes the distribution, so that log-probs are exact: no top_p, top_k or penalties."""
    max_tokens: int | None = Field(default=None, gt=0)
    """Longest answer in tokens; one that reaches it counts as truncated. Without it 64 for an environment's own model
    such as `kata:student`, 128 for smollm2, 512 for qwen-coder; for all others as long as the context has room for."""
    request: dict[str, Any] = Field(default_factory=dict)
    """Fields of a server's request to set otherwise, or with `false` to leave out: `request = { seed = false }`."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of a server's request, sent as they are: `extra_body = { provider = { only = ["x"] } }`."""
    chat_template_kwargs: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], bool | int | float | str] = Field(
        default={}
    )
    """Settings of the chat template, in every rendering: {"enable_thinking": false} for Qwen3 without thinking."""
    template_date: date | None = None
    """What chat templates that write the date of today (Llama 3.2's, GPT-OSS's) take for it: by default 2024-07-26."""
    tool_calls: CallForm = "none"
    """How tools are called: `native` where a server reads calls, else in which family's format answers are written."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Floating-point type of a local model's weights."""
    device: str = Field(default="auto", json_schema_extra={"affects_results": False})
    """auto takes a GPU when there is one."""
    lockstep: int = Field(default=32, gt=0)
    """Rollouts or questions that a model in this process works on together; another number moves results by rounding.
    Training plays all rollouts of a step together."""
    kv_cache_gib: float | None = Field(default=None, gt=0, json_schema_extra={"affects_results": False})
    """Memory for keys and values of a model in this process, in GiB: as many answers are sampled at once as fit. None
    takes 80 % of what the GPU has free, on a CPU half of the memory."""
    prefill_tokens: int = Field(default=8192, gt=0, json_schema_extra={"affects_results": False})
    """Tokens of prompts in one pass of a model in this process."""
    concurrency: int = Field(default=8, gt=0, json_schema_extra={"affects_results": False})
    """Requests in flight at once to a server."""
    timeout_s: float = Field(default=600.0, gt=0, json_schema_extra={"affects_results": False})
    """Wall time of one request; long, because a request that is given up may have been billed."""
    max_attempts: int = Field(default=6, gt=0, json_schema_extra={"affects_results": False})
    """Launches of one request, the first included."""

    @model_validator(mode="before")
    @classmethod
    def _limit_built_in(cls, values: Any) -> Any:
        # A file may give an address for all stages. TOML has no word for nothing: an empty one takes it back, and so
        # does a policy that needs no server.
        if isinstance(values, dict) and (values.get("base_url") == "" or values.get("model") in (REFERENCE, NOOP)):
            values = {**values, "base_url": None}
        # Small models that ramble would do so up to their context.
        if isinstance(values, dict) and values.get("max_tokens") is None:
            model = values.get("model", cls.model_fields["model"].default)
            local = isinstance(model, str) and (values.get("base_url") is None or model.startswith(VLLM))
            source = model.removeprefix(VLLM) if local else ""
            if entry := named.NAMED.get(source):
                return {**values, "max_tokens": entry.max_tokens}
            if is_built_in(source) or source in (REFERENCE, NOOP):
                return {**values, "max_tokens": EMBEDDED_TOKENS}
        return values

    @model_validator(mode="after")
    def _check(self) -> "PolicyConfig":
        prices = [value for name, value in self if name.startswith("usd_per_mtok")]
        if min(price or 0.0 for price in prices) < 0:
            raise ValueError(Sentence("policy.negative-price"))
        if self.served and not self.source:
            raise ValueError(Sentence("policy.prefix-without-model", vllm=VLLM))
        if odd := [name for name, value in self.chat_template_kwargs.items() if value in ("True", "False", "None")]:
            raise ValueError(Sentence("policy.word-of-python", name=odd[0], value=self.chat_template_kwargs[odd[0]]))
        if re.match(r"https?://", self.model):
            raise ValueError(Sentence("policy.model-is-address", model=self.model))
        if self.base_url is not None and not re.match(r"https?://[^/\s]+", self.base_url):
            raise ValueError(Sentence("policy.base-url-not-address", base_url=self.base_url))
        address_parts = urlsplit(self.base_url or "")
        secrets = [name for name, _ in parse_qsl(address_parts.query) if SECRET_FIELD.search(name)]
        if secrets or "@" in address_parts.netloc:  # addresses are in manifests, reports and exports
            raise ValueError(Sentence("policy.secret-in-address", field=secrets[0] if secrets else None))
        if (call := PATH_OF_CALL.search(self.base_url or "")) is not None:
            address = f"{self.base_url}".replace(call[0], "")
            raise ValueError(Sentence("policy.path-of-call", base_url=self.base_url, address=address))
        for name, fields in (("request", self.request), ("extra_body", self.extra_body)):
            if fault := find_unbounded(name, fields, max(self.limits(), default=0)):
                raise ValueError(fault)
        for name in LIMITS:
            if name in self.request and name in self.extra_body:
                raise ValueError(Sentence("policy.limit-given-twice", name=name))
        # Without a limit of the answer its price has no upper bound, so no reservation could be made for it.
        sent = {"max_tokens": self.max_tokens} | self.request | self.extra_body
        if all(sent.get(name, False) is False for name in LIMITS):
            raise ValueError(Sentence("policy.limit-left-out"))
        return self

    @property
    def priced(self) -> bool:
        """Return whether a call's price is known in advance: by the settings or a table, or as no server is paid."""
        has_prices = None not in (self.usd_per_mtok_in, self.usd_per_mtok_out)
        return self.base_url is None or has_prices or self.table is not None

    @property
    def table(self) -> TablePrice | None:
        """Return the price by a public table, where the settings say nothing of prices."""
        stated = self.price, self.usd_per_mtok_in, self.usd_per_mtok_out
        return None if self.base_url is None or stated != (None, None, None) else table_price(self.base_url, self.model)

    def limits(self) -> list[int]:
        """Return the configured limits of an answer in tokens; empty where only the context limits it."""
        sent = self.request | self.extra_body
        limits = (self.max_tokens, *(sent.get(name) for name in LIMITS))
        return [n for n in limits if isinstance(n, int) and not isinstance(n, bool)]

    @property
    def has_price(self) -> bool:
        """Return whether a call costs money by the prices given."""
        return bool(self.usd_per_mtok_in or self.usd_per_mtok_out or self.table)

    @property
    def source(self) -> str:
        """Return the model without the prefix `vllm:`: a folder, hub id or built-in model."""
        return self.model.removeprefix(VLLM)

    @property
    def loaded(self) -> str:
        """Return a key of the model and tokenizer that this process loads; policies with equal keys can share them."""
        return repr((self.source, self.dtype, self.device, self.chat_template_kwargs, self.template_date))

    @property
    def folder(self) -> Path:
        """Return the folder that the model is, if it is one."""
        return Path(self.source).expanduser()

    @property
    def scripted(self) -> bool:
        """Return whether actions come from no model; a folder named `reference` or `noop` is a model."""
        return self.model in (REFERENCE, NOOP) and not Path(self.model).is_dir()

    @property
    def served(self) -> bool:
        """Return whether the model is sampled from a vLLM server."""
        return self.model.startswith(VLLM)

    def uses_gpu(self) -> bool:
        """Return whether the model is loaded by the process that samples from it, or by a server that it starts."""
        return self.base_url is None and self.device != "cpu"

    def in_process(self) -> "PolicyConfig":
        """Return the settings of the same model loaded in this process."""
        return self.model_copy(update={"model": self.source, "base_url": None}) if self.served else self

    def with_model(self, folder: Path) -> Self:
        """Return the settings with the model in a folder, sampled from as before: here or from a vLLM server."""
        return self.model_copy(update={"model": f"{VLLM if self.served else ''}{folder}"})

    def identity(self) -> dict[str, Any]:
        """Return the settings that affect answers, with a digest of the local folder or of the built-in recipe."""
        return {**super().identity(), "weights": weights_identity(self)}

    def key(self) -> str:
        """Return the API key from the environment, redacted from now on; `UsageError` without one.

        "EMPTY" where no variable is configured: servers that need no key accept any.
        """
        if not self.api_key_env:
            return "EMPTY"
        if not re.fullmatch(r"[A-Za-z_]\w*", self.api_key_env):
            raise UsageError("policy.key-in-place-of-name")
        key = secret_in(self.api_key_env)
        if not key:
            raise UsageError(
                "policy.no-key",
                api_key_env=self.api_key_env,
                base_url=self.base_url,
                is_set=self.api_key_env in os.environ,
            )
        return key

    def cost(
        self, prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0, written_tokens: int = 0
    ) -> float:
        """Return the price of a call in USD; an unknown price is 0.

        Of the prompt, `cached_tokens` were read from the server's cache and `written_tokens` written to it.
        """
        if (table := self.table) is not None:
            return table.cost(prompt_tokens, completion_tokens, cached_tokens, written_tokens)
        new, out, write = self.usd_per_mtok_in or 0.0, self.usd_per_mtok_out or 0.0, self.usd_per_mtok_cache_write
        cached = new if self.usd_per_mtok_cached_in is None else self.usd_per_mtok_cached_in
        total = (prompt_tokens - cached_tokens - written_tokens) * new + completion_tokens * out
        return (total + cached_tokens * cached + written_tokens * (1.25 * new if write is None else write)) / 1e6


BasicPolicy = Annotated[
    PolicyConfig, basic_of("model", "base_url", "api_key_env", "temperature", "max_tokens"), Option("MODEL")
]
"""The policy that a stage samples from, of whose settings the short help lists some."""


def weights_identity(config: PolicyConfig) -> str:
    """Return the identity of a model's weights: digest of a recipe or of a folder; a constant for hub and server.

    A folder may have the prefix of a registered kind: `vllm:./model`. Raises `BadInput` for a path without
    folder, a file, an unknown built-in model, and a misspelt policy without a model.
    """
    if config.base_url is not None and not config.served:
        return "endpoint"
    if config.scripted:
        return "scripted"
    if maker := maker_of(config.source):
        return maker[0].recipe_fingerprint(maker[1])
    for path in (config.model, config.model.partition(":")[2]):
        if path and Path(path).is_dir():
            return store.folder_sha256(Path(path))
    if Path(config.source).is_file():
        raise BadInput("policy.model-is-file", source=config.source, example=EXAMPLE)
    if config.source.startswith(("/", "./", "../", "~")):
        raise BadInput("policy.no-model-folder", source=config.source, example=EXAMPLE)
    if meant := did_you_mean(config.source, (REFERENCE, NOOP, *named.NAMED), cutoff=0.8):
        raise BadInput("policy.no-model", source=config.source, meant=meant)
    return "hub"


IDLE = "idle"
"""`Sample.finish_reason` of a policy that ends the rollout on purpose without an action."""


@dataclass(frozen=True)
class Turn:
    """A request for one answer: the conversation and, where this policy sampled its answers, the token ids so far.

    held_ids: prompt and completions up to the last assistant message, as sampled, or None to render from the messages.
    seed: for this answer only. tools: declarations of the tools that the model may call, by the source or the
    environment (see `composer_stages.envs.base.TakesCalls`); servers get them. solution: the next action of the task's
    own solution, only for the policy `reference`. task: that of a rollout under way.
    """

    messages: list[Message]
    seed: int
    held_ids: list[int] | None = None
    tools: Sequence[Any] = ()
    solution: str | None = None
    task: Task | None = None


@dataclass(frozen=True)
class Sample:
    """One answer of a policy. Token fields are None where the server does not return them.

    prompt_ids, completion_ids: token ids in the model's vocabulary, the end token included. logprobs: natural log, one
    a completion token, under `logprob_kind` ("processed": after temperature; "raw": before). A failed call has
    `error_type` and no text. reasoning: the model's reasoning, where its server separates it. usage_by: source of the
    token counts, "server" or "bound" (an upper bound). price_known: False where `cost_usd` is 0 because no price is
    known. claimed_usd: the cost by the server's own bill, where that is below `cost_usd`. served_model, provider,
    system_fingerprint: from the server's response. prompt_read: the tokens that a server counted of a prompt that has
    more. finish_reason: the server's word, one of `endings.NOT_WHOLE` where
    the answer is not whole, or `IDLE`. With `MALFORMED`, `error` is what the server said of the call.
    """

    text: str = ""
    reasoning: str | None = None
    finish_reason: str = "stop"
    prompt_ids: list[int] | None = None
    completion_ids: list[int] | None = None
    logprobs: list[float] | None = None
    logprob_kind: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float = 0.0
    claimed_usd: float | None = None
    price_known: bool = True
    usage_by: str = "server"
    served_model: str | None = None
    provider: str | None = None
    system_fingerprint: str | None = None
    prompt_read: int | None = None
    latency_s: float = 0.0
    attempts: int = 1
    error_type: str | None = None
    error: str | None = None
    policy_version: int | None = None
    """Optimiser steps that the weights had taken, where a server samples from a model under training."""
    teacher: "tuple[str, PolicyConfig] | None" = None
    """Name and settings of the teacher that answered in the policy's place (`composer_stages.teachers.mixing`)."""


FINAL = (None, "rejected", "context", "no_text", "malformed", "unknown_ending")
"""Values of `error_type` that asking again would not change."""


class NotFinite(BadInput):
    """Weights of a model, or log-probs that it gives, are NaN or infinite."""


class Policy(Protocol):
    """A model that answers turns, as a `BatchPolicy` or an `AsyncPolicy`; `composer_stages.policy.ask_all` asks either.

    capture_level: "tokens" where samples carry token ids and log-probs, "text" where they cannot. batch_size: how many
    turns are asked at once.
    """

    config: PolicyConfig
    capture_level: str
    batch_size: int

    def facts(self) -> dict[str, Any]:
        """Return the manifest's entry: model, digests of weights, tokenizer and chat template."""
        ...


@runtime_checkable
class BatchPolicy(Protocol):
    """A policy whose results depend on the batch by rounding: a model in this process."""

    def sample(self, turns: list[Turn]) -> list[Sample]:
        """Return one answer per turn, in order; the error of one is in its `Sample`, an error of all is raised."""
        ...


@runtime_checkable
class AsyncPolicy(Protocol):
    """A policy that answers turns independently of each other; at most `batch_size` requests are in flight."""

    batch_size: int

    async def ask(self, turn: Turn) -> Sample:
        """Return one answer."""
        ...

    async def drain(self) -> None:
        """Wait for the requests in flight."""
        ...


@runtime_checkable
class PlaysSolutions(Protocol):
    """A policy that may play the tasks' own solutions; `Turn.solution` is given to it then."""

    plays_solutions: bool


@runtime_checkable
class CountsTokens(Protocol):
    """A policy that can count prompt tokens with its model's tokenizer."""

    def count_tokens(self, turn: Turn) -> int:
        """Return the number of tokens in a turn's prompt."""
        ...


@runtime_checkable
class ReusesPrefixes(Protocol):
    """A policy that computes the beginning of a conversation once for all of its turns."""

    def reusing_prefixes(self) -> AbstractContextManager[None]:
        """Keep the KV cache of a call for the next call; the weights must not change inside the block."""
        ...


class PolicyKind(Protocol):
    """A class of policies, as `composer_stages.policy.KINDS` lists them."""

    def open(self, config: PolicyConfig, *, cache: AnswerFolders, budget: Budget, listener: Listener) -> Policy:
        """Open the configured policy (a classmethod). `config.model` is as the user wrote it."""
        ...


def declared_context(shape: Mapping[str, Any]) -> int | None:
    """Return the positions that a model takes by its config.json, with what its rope scaling adds; None for no number.

    Source: `_get_and_verify_max_len` of vllm-project/vllm. YaRN reaches its factor times the original positions, which
    model cards tell to add without changing `max_position_embeddings`. A dynamic rope adds nothing: behind these
    positions its frequencies depend on the other rows of a pass.
    """
    most = shape.get("max_position_embeddings")
    if not isinstance(most, int) or isinstance(most, bool) or most <= 0:
        return None
    rope = shape.get("rope_parameters") or shape.get("rope_scaling") or {}
    kinds = [rope] if "rope_type" in rope or "type" in rope else [each for each in rope.values() if each]
    reached = [most]
    for each in (each for each in kinds if isinstance(each, Mapping)):
        kind, factor = each.get("rope_type") or each.get("type"), each.get("factor") or 1
        original = each.get("original_max_position_embeddings") or 0
        reached.append(int(most * factor) if kind == "linear" else int(original * factor) if kind == "yarn" else most)
    return max(reached)
