"""Whether a model can be had, before anything is paid for: a server knows it, or a folder holds it whole."""

from pathlib import Path
from pkgutil import resolve_name

import orjson

from stages.errors import BadInput, InfrastructureError, UsageError
from stages.policy import KINDS, adapters, background, base, kind_of
from stages.policy.base import PolicyConfig, weights_identity
from stages.policy.client import Broken, Client, Response, Unreachable

REFUSED = (401, 403)


def check(config: PolicyConfig) -> str:
    """One line about the model; raises what opening it would raise, without loading weights or paying for an answer."""
    weights_identity(config)
    kind = kind_of(config)
    if kind == "endpoint":
        return _server(config)
    if config.served:
        return _served(config)
    if kind != "local":
        resolve_name(opener) if isinstance(opener := KINDS[kind], str) else None
        return f"model {config.model}: of the kind {kind!r}, which opens it itself"
    if base.is_embedded(config.model):
        return f"model {config.model}: made on first use"
    return _weights(config)


def _served(config: PolicyConfig) -> str:
    """Its tokenizer is read here, too; the server answers, or there is a vLLM to start."""
    held = check(config.in_process())
    if config.base_url is not None:
        _listed(config)
        return f"{held}; {config.base_url}, which is to sample from it, answers"
    from stages.policy import vllm

    return f"{held}; {vllm.require_interpreter(config)}, which is to serve it, is there"


def _server(config: PolicyConfig) -> str:
    response = _listed(config)
    names = _names(response)
    if names and config.model not in names:
        raise UsageError(
            f"{config.base_url} has no model {config.model!r}; it lists {len(names)}, for example {names[0]!r}. "
            "Give one of these."
        )
    lists = "lists the model" if names else f"answers, but lists no models (status {response.status})"
    return f"model {config.model}: {config.base_url} {lists}"


def _listed(config: PolicyConfig) -> Response:
    client = Client(str(config.base_url), config.key())
    try:
        response = background.run(client.models())
    except (Unreachable, Broken, TimeoutError) as error:
        raise InfrastructureError(
            f"{config.base_url} does not answer ({error or 'no answer in time'}). Start the server, or check base_url."
        ) from None
    if response.status in REFUSED:
        where = config.api_key_env or "api_key_env"
        raise UsageError(f"{config.base_url} refuses the key (status {response.status}). Check {where}.")
    return response


def _names(response: Response) -> list[str]:
    """The ids in a list of models; none where there is no such list."""
    try:
        return [str(row["id"]) for row in orjson.loads(response.body)["data"]] if response.status == 200 else []
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return []


def _weights(config: PolicyConfig) -> str:
    """Its tokenizer is read, as loading would read it first; of weights only that there are some."""
    from stages.policy.local import load_tokenizer, resolve

    source = resolve(config, cache=Path(), listener=lambda what, done, total: None)
    if adapters.is_adapter(source):
        start, _ = adapters.base_of(Path(source), config)
        return f"{check(start)}, with the adapter {config.model}"
    load_tokenizer(source, config)
    folder = Path(source)
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        raise BadInput(f"The model folder {config.model} holds no *.safetensors. Save the model's weights there.")
    return f"model {config.model}: {'its folder is whole' if folder.is_dir() else 'its tokenizer is there'}"
