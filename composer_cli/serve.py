"""`composer serve`: a server of a model or of a run's checkpoint, until Ctrl-C or SIGTERM.

Where vLLM is installed it serves; else this process does, by the policy that stages sample from (completions.py).
"""

import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from composer_cli.console import Console
from composer_cli.loopback import HOST, HOSTS, bound
from composer_cli.printing import print_json, print_text
from composer_stages.errors import BadInput, UsageError
from composer_stages.policy import adapters, base, require_source
from composer_stages.policy.base import VLLM, PolicyConfig
from composer_stages.policy.server import interpreter, start
from composer_stages.runs import catalog, settings
from composer_stages.runs.kinds import CHECKPOINT
from composer_stages.runs.run import Run
from composer_stages.runs.store import folder_name
from composer_stages.stopping import Interrupted, on_signals
from composer_stages.words import Sentence

POLL_S = 1.0
TOLD = ("api_key_env", "temperature", "max_tokens", "chat_template_kwargs", "tool_calls")
"""Settings of a policy that a stage needs to sample as the server was asked to."""


@dataclass(frozen=True)
class ServedModel:
    """The model's folder or hub id, and the folder for the server's log."""

    model: str
    logs: Path


def serve(
    text: str, port: int, words: Sequence[str], artifacts: Path, console: Console, as_json: bool, host: str = HOST
) -> int:
    """Serve until a signal, and return its exit code; a server that dies is started again, a few times.

    text: the model or run. words: settings of a policy. Prints the address, and a command that uses it, once it
    answers.
    """
    served = find_model(text, artifacts)
    layers = [{"model": f"{VLLM}{served.model}"}, *map(settings.assignment, words)]
    config = settings.build("serve", PolicyConfig, layers)
    try:
        require_source(config)
        if interpreter(config) is None:
            serve_in_process(config, port, host, console, as_json)
        elif host not in HOSTS or config.api_key_env:
            raise UsageError("cli.host-of-vllm")
        else:
            serve_with_vllm(config, served.logs, port, console, as_json)
    except (KeyboardInterrupt, Interrupted) as error:
        console.notify(Sentence("cli.server-ended", source=config.source))
        return 128 + int(getattr(error, "signal_number", 2))


def serve_with_vllm(config: PolicyConfig, logs: Path, port: int, console: Console, as_json: bool) -> NoReturn:
    """Start a vLLM server and keep it running until a signal, which is raised."""
    from composer_stages.training.plan import RANK  # the adapter rank of trainings on this server by default

    if port:  # what is taken is said now, and no other program's server is mistaken for this one
        bound(port).close()
    with console.watching() as watch:
        listener = watch.listener("serve")
        server = start(config, logs / "vllm.log", rank=RANK, port=port, listener=listener, check=lambda: None)
    try:
        about = {"url": server.url, "model": config.model, "program": "vllm", "pid": server.pid}
        announce({**about, "log": str(server.log)}, f"with vLLM. Its log is {server.log}", config, as_json)
        with on_signals():  # no stage drains here, so a signal is raised immediately
            while True:
                time.sleep(POLL_S)
                if not server.alive():
                    console.notify(Sentence("cli.server-died", title=server.title, log=server.log))
                    server.revive()
    finally:
        server.stop()


def serve_in_process(config: PolicyConfig, port: int, host: str, console: Console, as_json: bool) -> NoReturn:
    """Load a model and answer requests until a signal, which is raised."""
    if config.server.args:
        raise UsageError("cli.server-args-without-vllm", args=config.server.args)
    if host not in HOSTS and not config.api_key_env:
        raise UsageError("cli.host-without-key", host=host)
    local, key = config.in_process(), config.key() if config.api_key_env else None
    with bound(port, host) as listener:
        with console.watching() as watch:
            from composer_cli.completions import listening  # imports torch
            from composer_cli.sampler import Sampler
            from composer_stages.policy.local import LocalPolicy

            policy = LocalPolicy.open(local, listener=watch.listener("serve"))
        sampler = Sampler(policy)
        serving = listening(sampler, local.model, listener, key=key, host=host)
        with on_signals(), policy.reusing_prefixes(), serving as url:
            about = {"url": url, "model": local.model, "program": "composer", "pid": os.getpid()}
            announce(about, "in this process: answers are those that `composer collect` would sample", local, as_json)
            while True:
                sampler.sample_next(POLL_S)


def announce(about: dict[str, Any], program: str, config: PolicyConfig, as_json: bool) -> None:
    """Print where a server listens, and a command that samples from it."""
    if as_json:
        print_json(about)
    else:
        # The settings have a line of their own, since every stage takes them.
        print_text(
            f"{about['url']} serves {config.source} {program}.\n"
            f"composer collect \\\n  {shlex.join(client_words(about['url'], config))}"
        )
    sys.stdout.flush()


def client_words(url: str, config: PolicyConfig) -> list[str]:
    """Return the words of a command line with which a stage samples from a server as its configuration has it."""
    settings_told = {name: getattr(config, name) for name in TOLD}
    usual = PolicyConfig(model=config.model)
    settings_told = {name: value for name, value in settings_told.items() if value != getattr(usual, name)}
    if "tool_calls" in settings_told and not config.served:
        settings_told["tool_calls"] = "native"  # the server reads what the model writes
    policy = {"model": config.model, "base_url": url, **settings_told}
    return [word for name, value in policy.items() for word in ("--set", _word(f"policy.{name}", value))]


def _word(key: str, value: Any) -> str:
    """Return a setting as a word of a command line, without quotes where these can be left out."""
    plain = f"{key}={value}"
    return plain if settings.assignment(plain) == settings.nested(key, value) else settings.assignment_text(key, value)


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
