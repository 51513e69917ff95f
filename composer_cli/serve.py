"""`composer serve`: a server of a model or of what a run trained, until somebody ends it."""

import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from composer_cli import settings
from composer_cli.console import Console, announcing_interrupts
from composer_cli.printing import print_json, print_text
from composer_cli.show import runs
from stages.errors import BadInput, UsageError
from stages.policy import adapters, base
from stages.policy.base import VLLM, PolicyConfig
from stages.policy.server import ModelServer
from stages.runs.artifact import Listener, Run
from stages.runs.records import CHECKPOINT

POLL_S = 1.0
NEEDED = ("fastapi", "uvicorn")
"""What `transformers serve` needs beside transformers."""


@dataclass(frozen=True)
class Served:
    """What is served: the model's place, and the folder for the server's log."""

    model: str
    logs: Path


def served(text: str, artifacts: Path) -> Served:
    """A model folder, an embedded model or a hub id as it is; a run, by folder or name, as its checkpoint."""
    if base.is_embedded(text) or (Path(text) / "config.json").is_file() or adapters.is_adapter(text):
        return Served(text, artifacts / "serve" / Path(text).name.replace(":", "-"))
    try:
        run = Run(runs.find(artifacts, text))
    except BadInput:
        if Path(text).is_dir() or text.count("/") != 1:
            raise
        return Served(text, artifacts / "serve" / text.replace("/", "-"))
    return Served(str(run.folder(CHECKPOINT)), run.path / "logs")


def configured(model: str, words: Sequence[str]) -> PolicyConfig:
    """The model with the settings of a policy that were typed."""
    layers = [{"model": f"{VLLM}{model}"}, *map(settings.assignment, words)]
    return settings.build("serve", PolicyConfig, layers)


def server_of(
    config: PolicyConfig, logs: Path, artifacts: Path, port: int, listener: Listener
) -> tuple[str, ModelServer]:
    """Which program serves, and its server, once that answers: vLLM where there is one, else transformers.

    `UsageError` where there is neither.
    """
    from stages.policy import vllm
    from stages.training.plan import RANK  # what trainings on this server take unless told otherwise

    if vllm.interpreter(config.server) is not None:
        made = vllm.start(
            config,
            logs / "vllm.log",
            cache=artifacts / "models",
            rank=RANK,
            port=port,
            listener=listener,
            check=lambda: None,
        )
        return "vllm", made
    return "transformers", _by_transformers(config.source, logs, artifacts, port, listener)


def _by_transformers(model: str, logs: Path, artifacts: Path, port: int, listener: Listener) -> ModelServer:
    if not all(map(importlib.util.find_spec, NEEDED)):
        raise UsageError(
            "There is neither vLLM nor transformers' own server here. Install one: `./dev vllm`, or "
            "`pip install 'transformers[serving]'`."
        )
    if adapters.is_adapter(model):
        raise UsageError(
            f"{model} is an adapter, which transformers' server does not load. Run `composer export merged` and serve "
            "the merged folder, or install vLLM with `./dev vllm`."
        )
    from stages.policy.local import resolve

    place = resolve(PolicyConfig(model=model), cache=artifacts / "models", listener=listener)
    words = [sys.executable, "-m", "transformers.cli.transformers", "serve", place, "--host", "127.0.0.1", "--port"]
    log = logs / "transformers.log"
    made = ModelServer(f"{model!r}", lambda port: [*words, str(port)], os.environ, log, port=port, listener=listener)
    made.start()
    return made


def until_ended(server: ModelServer, console: Console) -> None:
    """Return never; a server that dies is started again, a few times. A signal is raised at once."""
    with announcing_interrupts(console.tell):
        while True:
            time.sleep(POLL_S)
            if not server.alive():
                console.tell(f"The server of {server.title} died; it is started again. Its log is {server.log}.")
                server.revive()


def announce(program: str, config: PolicyConfig, server: ModelServer, as_json: bool) -> None:
    """Say where the server is and how stages ask it."""
    model = config.model if program == "vllm" else config.source
    if as_json:
        told = {"url": server.url, "model": model, "program": program, "pid": server.pid, "log": str(server.log)}
        print_json(told)
    else:
        print_text(
            f"{server.url} serves {config.source} with {program}. Its log is {server.log}.\n"
            f"  --set policy.model={model} --set policy.base_url={server.url}"
        )
    sys.stdout.flush()
