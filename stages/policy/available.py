"""What can be known of a model without opening it: whether it is available, and its context.

Both are asked before anything is paid for. A model in this process or behind `vllm:` states its context in config.json,
a server in its list of models, which has no common field for it: vLLM and SGLang call it max_model_len, OpenRouter
context_length, Groq context_window.
"""

import re
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from urllib.parse import urlsplit

from composer_stages.errors import BadInput, InfrastructureError
from composer_stages.policy import KINDS, adapters, background, base, kind_of, require_source
from composer_stages.policy.base import UNSTATED, PolicyConfig, weights_identity
from composer_stages.policy.token_counts import tokenizer
from composer_stages.runs import hub, store
from composer_stages.words import Sentence

FIELDS = ("max_model_len", "context_length", "context_window", "max_context_length")
AGAIN_S = 60.0
"""Seconds for which a server that did not answer is not asked again: a plan asks for the bound of every question."""
_unanswered: dict[tuple[str, str | None], float] = {}
_stated: dict[tuple[str, str | None], int | None] = {}
"""Contexts by model and server, of models that could be asked for."""


def longest_answer(config: PolicyConfig) -> int:
    """Return the largest number of completion tokens of a request; the context if the request has no limit."""
    return max(config.limits(), default=0) or context_tokens(config) or UNSTATED


def tokenizer_is_here(config: PolicyConfig) -> bool:
    """Return whether the tokenizer of a model in this process is read without making or fetching anything."""
    if maker := base.real_models(config.model):
        return not maker.to_make(config.model)
    if config.folder.is_dir():
        if base_and_revision := adapters.base_of(config.folder, config):
            return tokenizer_is_here(base_and_revision[0])
        return (config.folder / "tokenizer_config.json").is_file()
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(config.model, "tokenizer_config.json"), str)


def notes(config: PolicyConfig) -> tuple[str, ...]:
    """Return for a plan what limits an answer where no setting does."""
    if config.limits():
        return ()
    return (Sentence("policy.answer-limited-by-context", context=longest_answer(config)),)


def context_tokens(config: PolicyConfig) -> int | None:
    """Return the tokens that prompt and answer may have together; None where that is not stated.

    A server is asked for its list of models, the hub for a config.json, each once a process. `BadInput` where a model
    is to come from a hub that does not answer.
    """
    at_server = config.base_url is not None and not config.served
    key = (config.source, config.base_url if at_server else None)
    if time.monotonic() - _unanswered.get(key, -AGAIN_S) < AGAIN_S:
        return None
    if key not in _stated:
        context = _read_server_context(config) if at_server else _read_model_context(config.in_process())
        if context is _UNKNOWN:
            _unanswered[key] = time.monotonic()
            return None
        _stated[key] = context
    return _stated[key]


_UNKNOWN: Any = object()
"""What a server states that does not answer; it may answer later."""


def _read_model_context(config: PolicyConfig) -> int | None:
    """Return the context by a model's config.json; that of its base for an adapter."""
    if base.is_built_in(config.model) or kind_of(config) != "local":
        return None
    real = base.real_models(config.model)
    if real and (header := real.header(config.model)):
        return header.number("context_length") or None
    folder = config.folder
    if base_and_revision := adapters.base_of(folder, config):
        return _read_model_context(base_and_revision[0])
    if not folder.is_dir():
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

        weights_identity(config)  # names a misspelt policy, which no hub need be asked for
        repo, commit = base.hub_id(config.model)
        source = Path(hub.source(repo, commit))
        try:
            folder = source if source.is_dir() else Path(hf_hub_download(repo, "config.json", revision=commit)).parent
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError):
            return None  # opening the model will name what is wrong with it
    try:
        shape = store.read_json(folder / "config.json")
    except (BadInput, OSError):
        return None
    return base.declared_context(shape.get("text_config") or shape) if isinstance(shape, dict) else None


def _read_server_context(config: PolicyConfig) -> Any:
    """Return the context by a server's list of models, or the shorter answer that it allows."""
    from composer_stages.policy.client import CallError, Client, RetryableError  # HTTP's libraries are slow to import

    try:
        listed = background.run(Client(config).models())
    except RetryableError:
        return _UNKNOWN
    except CallError:
        return None  # opening the model will name what is wrong
    row: dict[str, Any] = next((row for row in listed or [] if row["id"] == config.model), {})
    provider = row.get("top_provider")
    places = (row, provider if isinstance(provider, dict) else {})
    tokens = [*map(row.get, FIELDS), *(entry.get("max_completion_tokens") for entry in places)]
    return min((n for n in tokens if isinstance(n, int) and n > 0), default=None)


def check(config: PolicyConfig) -> str:
    """Return a line about the model; raise what opening it would raise, but load no weights and pay for no answer."""
    weights_identity(config)
    kind = kind_of(config)
    if kind == "endpoint":
        return _describe_listed(config)
    if config.served:
        line = check(config.in_process())  # the tokenizer is read in this process in any case
        if config.base_url is not None:
            _fetch_models(config)
            return Sentence("policy.model-behind-server", model=line, base_url=config.base_url)
        from composer_stages.policy.server import require_interpreter

        return Sentence("policy.model-to-serve", model=line, interpreter=require_interpreter(config))
    if kind == "scripted":
        return Sentence("policy.policy-without-model", model=config.model)
    if kind != "local":
        resolve_name(opener) if isinstance(opener := KINDS[kind], str) else None
        return Sentence("policy.model-of-own-kind", model=config.model, kind=kind)
    if maker := base.maker_of(config.model):
        return Sentence("policy.model-built-in", model=config.model, missing=maker[0].to_make(maker[1]))
    return _describe_weights(config)


def _describe_listed(config: PolicyConfig) -> str:
    """Return a line about a model of a server; `BadInput` when the server lists models, and not this one."""
    names = [row["id"] for row in _fetch_models(config) or []]
    if config.has_price:
        tokenizer(config.model)  # imports what its bills will be checked with
    is_azure = AZURE.search(urlsplit(config.base_url or "").hostname or "")  # lists models, and takes deployments
    if names and not is_azure and not any(_is_listed(alias, names) for alias in _aliases(config.model)):
        raise BadInput(
            "policy.model-not-listed", base_url=config.base_url, model=config.model, number=len(names), listed=names[0]
        )
    prices = config.table.source if config.table else None
    return Sentence(
        "policy.model-at-server", model=config.model, base_url=config.base_url, listed=bool(names), prices=prices
    )


AZURE = re.compile(r"\.azure\.com$")
VERSION = r"(:latest|[-@]\d{4,8}|-\d{4}-\d\d-\d\d)"
"""What a list has behind the name by which the newest version is asked for: Ollama's tag, or a date."""


def _is_listed(name: str, listed: Sequence[str]) -> bool:
    """Return whether a list has a name, a version of it, or a pattern of LiteLLM's for it."""
    version = re.compile(re.escape(name) + VERSION)
    return name in listed or any(fnmatchcase(name, each) or version.fullmatch(each) for each in listed)


def _aliases(model: str) -> set[str]:
    """Return the names under which a server may list a model: without variant or deployment, as Gemini's, LiteLLM's."""
    plain = model.partition("@")[0].partition(":")[0] or model
    parts = (plain, model.partition("#")[0], model.removeprefix("models/"), model.partition("/")[2])
    return {model, f"models/{model}", *filter(None, parts)}


def _fetch_models(config: PolicyConfig) -> list[dict[str, Any]] | None:
    """Return a server's list of models, None without a list; `InfrastructureError` if the server does not answer."""
    from composer_stages.policy.client import NO_ANSWER, Client, RetryableError

    try:
        return background.run(Client(config).models())
    except RetryableError as error:
        if error.kind not in NO_ANSWER:
            return None  # an error of its list says nothing about its models
        raise InfrastructureError("policy.server-not-available", error=str(error)) from None


def _describe_weights(config: PolicyConfig) -> str:
    """Return a line about a folder or hub id: its weights are not read, and of a hub id not fetched."""
    require_source(config)
    from composer_stages.policy.local import check_folder, load_tokenizer, resolve

    source = resolve(config, listener=lambda title, done, total: None)
    if base_and_revision := adapters.base_of(source, config):
        return Sentence("policy.adapter-available", base=check(base_and_revision[0]), model=config.model)
    folder = Path(source)
    if not folder.is_dir():
        load_tokenizer(source, config)
        return Sentence("policy.model-on-hub", model=config.model)
    if not any(folder.glob("*.safetensors")):
        raise BadInput("policy.no-safetensors", model=config.model)
    check_folder(source, config)
    return Sentence("policy.model-complete", model=config.model)
