"""The context of a model, which limits an answer where no `max_tokens` does.

A model in this process or behind `vllm:` states its context in config.json, a server in its list of models. The list
has no common field for it: vLLM and SGLang call it max_model_len, OpenRouter context_length, Groq context_window.
"""

import time
from pathlib import Path
from typing import Any

import orjson

from stages.errors import BadInput
from stages.policy import adapters, background, base
from stages.policy.base import UNSTATED, PolicyConfig
from stages.runs import hub, store

FIELDS = ("max_model_len", "context_length", "context_window", "max_context_length")
AGAIN_S = 60.0
"""Seconds for which a server that did not answer is not asked again: a plan asks for the bound of every question."""
_asked_in_vain: dict[tuple[str, str | None], float] = {}
_stated: dict[tuple[str, str | None], int | None] = {}
"""Contexts by model and server, of models that could be asked for."""


def longest_answer(config: PolicyConfig) -> int:
    """Return the largest number of completion tokens that a request allows; the context where it has no limit."""
    return max(config.limits(), default=0) or context_tokens(config) or UNSTATED


def notes(config: PolicyConfig) -> tuple[str, ...]:
    """Return for a plan what limits an answer where no setting does."""
    if config.limits():
        return ()
    return (f"an answer at most what a context of {longest_answer(config):,} tokens leaves",)


def context_tokens(config: PolicyConfig) -> int | None:
    """Return the tokens that prompt and answer may have together; None where that is not stated.

    A server is asked for its list of models, the hub for a config.json, each once a process. `BadInput` where a model
    is to come from a hub that does not answer.
    """
    at_server = config.base_url is not None and not config.served
    key = (config.source, config.base_url if at_server else None)
    if time.monotonic() - _asked_in_vain.get(key, -AGAIN_S) < AGAIN_S:
        return None
    if key not in _stated:
        found = _of_server(config) if at_server else _of_model(config.in_process())
        if found is _UNKNOWN:
            _asked_in_vain[key] = time.monotonic()
            return None
        _stated[key] = found
    return _stated[key]


_UNKNOWN: Any = object()
"""What a server states that does not answer; it may answer later."""


def _of_model(config: PolicyConfig) -> int | None:
    """Return the context by a model's config.json; that of its base for an adapter."""
    if base.is_embedded(config.model) or config.scripted:
        return None
    folder = config.folder
    if adapters.is_adapter(str(folder)):
        return _of_model(adapters.base_of(folder, config)[0])
    if not folder.is_dir():
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

        held = Path(hub.source(config.model))
        try:
            folder = held if held.is_dir() else Path(hf_hub_download(config.model, "config.json")).parent
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError):
            return None  # opening the model will name what is wrong with it
    try:
        shape = store.read_json(folder / "config.json")
    except (BadInput, OSError):
        return None
    found = (shape.get("text_config") or shape).get("max_position_embeddings") if isinstance(shape, dict) else None
    return found if isinstance(found, int) and found > 0 else None


def _of_server(config: PolicyConfig) -> Any:
    """Return the context by a server's list of models, or the shorter answer that it allows."""
    from stages.policy.client import CONNECT_S, Broken, Client, Unreachable  # openai's client is slow to import

    client = Client(str(config.base_url), config.key())
    try:
        response = background.run(client.ask("/models", None, CONNECT_S))
    except (Unreachable, Broken, TimeoutError):
        return _UNKNOWN
    try:
        listed = orjson.loads(response.body)["data"] if response.status == 200 else []
        row: dict[str, Any] = next((row for row in listed if row["id"] == config.model), {})
        places = (row, row.get("top_provider") or {})
        tokens = [*map(row.get, FIELDS), *(place.get("max_completion_tokens") for place in places)]
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return None
    return min((n for n in tokens if isinstance(n, int) and n > 0), default=None)
