"""`composer serve`: a server of a model or of a run's checkpoint, until Ctrl-C or SIGTERM."""

import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from composer_cli.console import Console
from composer_cli.printing import print_json, print_text
from stages.errors import BadInput, UsageError
from stages.policy import adapters, base, require_source
from stages.policy.base import VLLM, PolicyConfig
from stages.policy.server import ModelServer, interpreter, start
from stages.runs import catalog, settings
from stages.runs.kinds import CHECKPOINT
from stages.runs.run import Listener, Run
from stages.runs.store import folder_name
from stages.stopping import Interrupted, on_signals

POLL_S = 1.0
NEEDED = ("fastapi", "uvicorn")
"""Packages that `transformers serve` needs besides transformers."""


@dataclass(frozen=True)
class ServedModel:
    """The model's folder or hub id, and the folder for the server's log."""

    model: str
    logs: Path


def serve(text: str, port: int, words: Sequence[str], artifacts: Path, console: Console, as_json: bool) -> int:
    """Serve until a signal, and return its exit code; a server that dies is started again, a few times.

    text: the model or run. words: settings of a policy. Prints the address and how stages use it once it answers.
    """
    served = find_model(text, artifacts)
    layers = [{"model": f"{VLLM}{served.model}"}, *map(settings.assignment, words)]
    config = settings.build("serve", PolicyConfig, layers)
    try:
        with console.watching() as watch:
            program, server = start_server(config, served.logs, port, watch.listener("serve"))
        try:
            model = config.model if program == "vllm" else config.source
            if as_json:
                about = {"url": server.url, "model": model, "program": program, "pid": server.pid}
                print_json({**about, "log": str(server.log)})
            else:
                print_text(
                    f"{server.url} serves {config.source} with {program}. Its log is {server.log}.\n"
                    f"  --set policy.model={model} --set policy.base_url={server.url}"
                )
            sys.stdout.flush()
            with on_signals():  # no stage drains here, so a signal is raised immediately
                while True:
                    time.sleep(POLL_S)
                    if not server.alive():
                        console.notify(
                            f"The server of {server.title} died; it is started again. Its log is {server.log}."
                        )
                        server.revive()
        finally:
            server.stop()
    except (KeyboardInterrupt, Interrupted) as error:
        console.notify(f"The server of {config.source} has ended.")
        return 128 + int(getattr(error, "signal_number", 2))


def find_model(text: str, artifacts: Path) -> ServedModel:
    """Return a model folder, a built-in model or a hub id as it is; for a run, by folder or name, its checkpoint."""
    if base.maker_of(text) or (Path(text) / "config.json").is_file() or adapters.is_adapter(text):
        return ServedModel(text, artifacts / "serve" / folder_name(Path(text).name))
    try:
        run = Run(catalog.find(artifacts, text))
    except BadInput:
        if Path(text).is_dir() or text.count("/") != 1 or text.startswith((".", "/", "~")):  # no hub id
            raise
        return ServedModel(text, artifacts / "serve" / folder_name(text))
    return ServedModel(str(run.folder(CHECKPOINT)), run.path / "logs")


def start_server(config: PolicyConfig, logs: Path, port: int, listener: Listener) -> tuple[str, ModelServer]:
    """Start a server and return its program and itself, once it answers: vLLM where installed, else transformers.

    Raises `UsageError` where neither is installed, or transformers cannot serve the model.
    """
    require_source(config)
    if interpreter(config) is not None:
        from stages.training.plan import RANK  # the adapter rank of trainings on this server by default

        log = logs / "vllm.log"
        return "vllm", start(config, log, rank=RANK, port=port, listener=listener, check=lambda: None)
    if not all(map(importlib.util.find_spec, NEEDED)):
        raise UsageError(
            "There is neither vLLM nor transformers' own server here. Install one: `./dev vllm`, or "
            "`pip install 'transformers[serving]'`."
        )
    model = config.source
    if adapters.is_adapter(model):
        raise UsageError(
            f"{model} is an adapter, which transformers' server does not load. Run `composer export model` and serve "
            "the merged folder, or install vLLM with `./dev vllm`."
        )
    from stages.policy.local import resolve

    folder = resolve(PolicyConfig(model=model), listener=listener)
    words = [sys.executable, "-m", "transformers.cli.transformers", "serve", folder, "--host", "127.0.0.1", "--port"]
    log = logs / "transformers.log"
    server = ModelServer(f"{model!r}", lambda port: [*words, str(port)], os.environ, log, port=port, listener=listener)
    server.start()
    return "transformers", server
