"""Check whether a model is available before anything is paid for: a server lists it, or its folder is complete."""

from pathlib import Path
from pkgutil import resolve_name

import orjson

from stages.errors import BadInput, InfrastructureError, UsageError
from stages.policy import KINDS, adapters, background, base, kind_of, require_source
from stages.policy.base import PolicyConfig, weights_identity
from stages.policy.client import CONNECT_S, Broken, Client, Response, Unreachable, classified, web_page

REFUSED = (401, 403)


def check(config: PolicyConfig, cache: Path) -> str:
    """Return a line about the model; raise what opening it would raise, but load no weights and pay for no answer.

    cache: folder of the models that are made on first use.
    """
    weights_identity(config)
    kind = kind_of(config)
    if kind == "endpoint":
        return _server(config)
    if config.served:
        held = check(config.in_process(), cache)  # the tokenizer is read in this process in any case
        if config.base_url is not None:
            _listed(config)
            return f"{held}; {config.base_url}, which is to sample from it, answers"
        from stages.policy import vllm

        return f"{held}; {vllm.require_interpreter(config)}, which is to serve it, is there"
    if kind == "scripted":
        return f"policy {config.model}: needs no model"
    if kind != "local":
        resolve_name(opener) if isinstance(opener := KINDS[kind], str) else None
        return f"model {config.model}: of the kind {kind!r}, which opens it itself"
    if base.is_embedded(config.model):
        maker, name = base.embedded(config.model)
        missing = maker.to_make(name, cache)
        return f"model {config.model}: {f'made on first use: {missing}' if missing else f'is there, in {cache}'}"
    return _weights(config, cache)


def _server(config: PolicyConfig) -> str:
    """Return a line about a model of a server; `BadInput` when the server lists models, and not this one."""
    response = _listed(config)
    try:
        names = [str(row["id"]) for row in orjson.loads(response.body)["data"]] if response.status == 200 else []
    except (orjson.JSONDecodeError, KeyError, TypeError):
        names = []  # servers need not have a list of models
    if names and config.model not in names:
        raise BadInput(
            f"{config.base_url} has no model {config.model!r}; it lists {len(names)}, for example {names[0]!r}. "
            "Give one of these."
        )
    lists = "lists the model" if names else f"answers, but lists no models (status {response.status})"
    return f"model {config.model}: {config.base_url} {lists}"


def _listed(config: PolicyConfig) -> Response:
    """Return the response to a request for the list of models, which is free and needs the key."""
    client = Client(str(config.base_url), config.key())
    try:
        response = background.run(client.ask("/models", None, CONNECT_S))
    except (Unreachable, Broken, TimeoutError) as error:
        raise InfrastructureError(
            f"{config.base_url} does not answer ({error or 'no answer in time'}). Start the server, or check base_url."
        ) from None
    if response.status < 500 and (hint := web_page(response.body, config.base_url)):
        raise UsageError(f"{config.base_url} was asked for its models, but this is a web page; {hint}")
    if 300 <= response.status < 400:
        raise classified(response, config, None)
    if response.status in REFUSED:
        where = config.api_key_env or "api_key_env"
        raise UsageError(f"{config.base_url} refuses the key (status {response.status}). Check {where}.")
    return response


def _weights(config: PolicyConfig, cache: Path) -> str:
    """Return a line about a folder or hub id: its tokenizer is read, of its weights only whether there are any."""
    require_source(config)
    from stages.policy.local import load_tokenizer, resolve

    source = resolve(config, cache=cache, listener=lambda what, done, total: None)
    if adapters.is_adapter(source):
        start, _ = adapters.base_of(Path(source), config)
        return f"{check(start, cache)}, with the adapter {config.model}"
    load_tokenizer(source, config)
    folder = Path(source)
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        raise BadInput(f"The model folder {config.model} holds no *.safetensors. Save the model's weights there.")
    return f"model {config.model}: {'its folder is whole' if folder.is_dir() else 'its tokenizer is there'}"
