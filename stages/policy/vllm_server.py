"""How a vLLM server is started: the interpreter that has it, its options, and its surroundings."""

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from stages.errors import UsageError
from stages.policy import adapters
from stages.policy.config import PolicyConfig, Server
from stages.policy.local import device, resolve
from stages.policy.server import ModelServer
from stages.runs import store
from stages.runs.artifact import Listener

INTERPRETER = "COMPOSER_VLLM"
"""Environment variable that names the interpreter of the environment that holds vLLM."""
OWN = Path(__file__).parents[2] / ".vllm" / "bin" / "python"
"""Where `./dev vllm` puts it."""
NAME = "base"
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM takes for --max-lora-rank."""
CPU_CONTEXT = 8192
"""Longest context on a CPU unless asked otherwise: without chunked prefill a whole prompt is one batch."""
CPU_OPTIONS = {"enforce-eager": True, "no-enable-chunked-prefill": True, "max-num-batched-tokens": CPU_CONTEXT}
"""On a CPU a request with a seed ends vLLM 0.32 where prompts are cut into chunks."""
CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1"}
NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


def start(
    config: PolicyConfig,
    log: Path,
    *,
    cache: Path,
    rank: int,
    port: int = 0,
    listener: Listener,
    check: Callable[[], None],
) -> ModelServer:
    """A vLLM server with the configured model, or the base of the adapter that it is, once it answers.

    rank: of the largest adapter that it is to hold. check: called while waiting, to raise where nobody wants it any
    more. `UsageError` where there is no vLLM.
    """
    python = require_interpreter(config)
    below, revision = base_of(config)
    source = resolve(below, cache=cache, listener=listener)
    if adapters.is_adapter(source):
        raise UsageError(
            f"{source} is an adapter below another adapter, which vLLM cannot serve. "
            "Run `composer export merged` and take the merged folder."
        )
    on_cpu = device(config.device) == "cpu"
    options = _options(source, revision, below.dtype, max(rank, rank_of(config.source)), on_cpu) | config.server.args
    server = ModelServer(
        f"{config.source!r}",
        lambda port: [python, "-m", "vllm.entrypoints.openai.api_server", *_words({**options, "port": port})],
        _environment(on_cpu),
        log,
        port=port,
        listener=listener,
        check=check,
    )
    server.start()
    return server


def require_interpreter(config: PolicyConfig) -> str:
    """The interpreter that is to serve a model; `UsageError` where there is none."""
    python = interpreter(config.server)
    if python is None:
        raise UsageError(
            f"There is no vLLM here to serve {config.source!r}. Install it with `./dev vllm`, name its interpreter in "
            f"{INTERPRETER} or policy.server.python, or give the base_url of a server that runs."
        )
    return python


def interpreter(server: Server) -> str | None:
    """The interpreter that has vLLM: as configured, else as the variable names it, else what `./dev vllm` installed."""
    for named in (server.python, os.environ.get(INTERPRETER, "")):
        if named:
            if shutil.which(named) is None:
                raise UsageError(f"The interpreter {named}, which is to run vLLM, does not exist. Correct its path.")
            return named
    return str(OWN) if OWN.exists() else None


def base_of(config: PolicyConfig) -> tuple[PolicyConfig, str | None]:
    """What a server holds, the base of an adapter or the model itself, and the revision of one from the hub."""
    held = config.held_here()
    return adapters.base_of(Path(held.model), held) if adapters.is_adapter(held.model) else (held, None)


def rank_of(source: str) -> int:
    """The rank of the adapter that a folder holds; 0 for a whole model."""
    return int(store.read_json(Path(source) / adapters.CONFIG)["r"]) if adapters.is_adapter(source) else 0


def _options(source: str, revision: str | None, dtype: str, rank: int, on_cpu: bool) -> dict[str, Any]:
    options: dict[str, Any] = {
        "model": source,
        "served-model-name": NAME,
        "host": "127.0.0.1",
        "dtype": dtype,
        "enable-lora": True,
        "max-lora-rank": next((size for size in RANKS if size >= rank), rank),
        "logprobs-mode": "processed_logprobs",
        "generation-config": "vllm",
    }
    if revision is not None:
        options["revision"] = revision
    options |= CPU_OPTIONS if on_cpu else {}
    with suppress(OSError, ValueError):  # what cannot be read here is refused by vLLM, in its words
        shape = AutoConfig.from_pretrained(source, revision=revision).get_text_config()
        if dtype == "auto" and shape.dtype == torch.float32:
            options["dtype"] = "float32"  # vLLM takes auto for 16 bits where weights are in float32
        if on_cpu:
            options["max-model-len"] = min(shape.max_position_embeddings, CPU_CONTEXT)
    return options


def _words(options: Mapping[str, Any]) -> list[str]:
    """The options as words of a command line: true stands for itself, false leaves the option out."""
    words: list[str] = []
    for name, value in options.items():
        if value is not False:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


def _environment(on_cpu: bool) -> dict[str, str]:
    """Ours, without what points into our own environment; variables that are set already stay as they are."""
    inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    return (CPU_ENVIRONMENT if on_cpu else {}) | ENVIRONMENT | inherited
