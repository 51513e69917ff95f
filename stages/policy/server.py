"""A model server of this machine: a child process that is awaited, restarted when it dies, and ended with the run.

`start` runs vLLM with a model as a `ModelServer`, under a separate interpreter and with the options that we need. The
server never outlives this process: a small second process waits for the end of this one, of any cause, and then ends
the server's process group. `ScoringLock` keeps scoring requests from overlapping with sampling requests where vLLM
cannot take both.
"""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from composer_stages.backends import devices
from composer_stages.errors import InfrastructureError, UsageError
from composer_stages.policy import adapters, background
from composer_stages.policy.base import PolicyConfig, Server
from composer_stages.runs import store
from composer_stages.runs.run import Listener

MAX_RESTARTS = 3
START_S = 1800.0
"""Longest wait for a server to load its model, in seconds."""
REFUSED_S = 10.0
"""Longest time for which a starting server may answer with errors: what does not pass by then will not pass."""
POLL_S = 0.5
GRACE_S = 15.0
"""Seconds between SIGTERM and SIGKILL."""
TAIL = 5
"""Lines of the log that an error message shows."""
KEEPER = 'cat >/dev/null; kill -s TERM -- "-$0"; sleep "$1"; kill -s KILL -- "-$0"'
"""Waits until the kernel closes our end of the pipe, which happens when this process ends; $0 is a process group."""


class ModelServer:
    """One server on a free port of this machine; `command` makes its arguments from the port.

    check: called while waiting, and raises to give up. Methods raise `InfrastructureError` if the server does not
    answer.
    """

    def __init__(
        self,
        title: str,
        command: Callable[[int], Sequence[str]],
        environment: Mapping[str, str],
        log: Path,
        *,
        port: int = 0,
        listener: Listener,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.title, self.log, self.restarts = title, log, 0
        self._logged = 0
        """Bytes of the log that are of earlier starts."""
        self._command, self._environment, self._listener, self._check = command, environment, listener, check
        if not port:
            # Another program may take the port before the server binds it; then `start` reports the server's log.
            with socket.socket() as listening:
                listening.bind(("127.0.0.1", 0))
                port = int(listening.getsockname()[1])
        self._port, self.url = port, f"http://127.0.0.1:{port}/v1"  # root of the OpenAI-compatible server
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: subprocess.Popen[bytes] | None = None

    def alive(self) -> bool:
        """Return whether the server's process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Return the id of the server's process, which leads its own process group; 0 before the start."""
        return self._process.pid if self._process else 0

    def start(self) -> None:
        """Start the server and return when it answers."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._logged = os.fstat(log).st_size
        try:
            # A new session: Ctrl-C in the terminal reaches this process alone, which then ends the whole group.
            self._process = subprocess.Popen(
                list(self._command(self._port)),
                env=dict(self._environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        finally:
            os.close(log)
        self._keeper = subprocess.Popen(
            ["sh", "-c", KEEPER, str(self._process.pid), f"{GRACE_S:g}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def revive(self) -> None:
        """Restart a server that died, at most MAX_RESTARTS times."""
        if self.alive():
            return
        if self.restarts >= MAX_RESTARTS:
            raise InfrastructureError(
                "policy.server-died-too-often",
                title=self.title,
                number=MAX_RESTARTS + 1,
                log=self.log,
                tail=self._tail(),
            )
        self.restarts += 1
        self.stop()
        self.start()

    def stop(self) -> None:
        """End the server and all processes of its group."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)
            deadline = time.monotonic() + GRACE_S
            while time.monotonic() < deadline:
                self._process.poll()  # a dead leader that was not waited for would count as a member of its group
                try:
                    os.killpg(self._process.pid, 0)
                except (ProcessLookupError, PermissionError):
                    break
                time.sleep(0.05)
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._keeper is not None and self._keeper.stdin is not None:
            self._keeper.kill()
            self._keeper.stdin.close()
            self._keeper.wait()
        self._process = self._keeper = None

    def _wait(self) -> None:
        from composer_stages.policy.client import (  # HTTP's libraries are slow to import
            NO_ANSWER,
            CallError,
            Client,
            RetryableError,
        )

        client, started = Client(PolicyConfig(model=self.title, base_url=self.url)), time.monotonic()
        silent_at = started
        while True:
            error = "it has no list of models"
            try:
                listed = background.run(client.models()) is not None
            except CallError as failed:
                listed, error = False, str(failed)
                # No answer is the usual one of a server that still loads its model.
                if isinstance(failed, RetryableError) and failed.kind in NO_ANSWER:
                    silent_at = time.monotonic()
            self._check()
            if not self.alive():  # what answered, if anything did, is another program's
                raise InfrastructureError(
                    "policy.server-ended-early", title=self.title, log=self.log, tail=self._tail()
                )
            if listed:
                return
            waited = time.monotonic() - started
            if time.monotonic() - silent_at > REFUSED_S:
                raise InfrastructureError(
                    "policy.server-without-models",
                    title=self.title,
                    refused_s=REFUSED_S,
                    error=str(error),
                    log=self.log,
                    tail=self._tail(),
                )
            if waited > START_S:
                raise InfrastructureError("policy.server-not-ready", title=self.title, start_s=START_S, log=self.log)
            self._listener(f"s of waiting for the server of {self.title}", int(waited), int(START_S))
            time.sleep(POLL_S)

    def _tail(self) -> str:
        lines = (store.read_bytes(self.log) or b"")[self._logged :].decode(errors="replace").splitlines()
        return " / ".join(line.strip() for line in lines[-TAIL:] if line.strip()) or "(empty)"


INTERPRETER = "COMPOSER_VLLM"
"""Environment variable with the path of the interpreter that can import vLLM."""
OWN = Path(__file__).parents[2] / ".vllm" / "bin" / "python"
"""The interpreter that `./dev vllm` installs, with the build for CPUs or for CUDA."""
NAME = "base"
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM takes for --max-lora-rank."""
CPU_CONTEXT = 8192
"""Longest context on a CPU unless asked otherwise: without chunked prefill a whole prompt is one batch."""
CPU_OPTIONS = {"enforce-eager": True, "no-enable-chunked-prefill": True, "max-num-batched-tokens": CPU_CONTEXT}
"""On a CPU a request with a seed ends vLLM 0.32 where prompts are cut into chunks."""
UTILISATION = 0.92
"""Part of a GPU that a server takes without --gpu-memory-utilization (vLLM, vllm/config/cache.py)."""
CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1"}
REPLACEABLE = {"VLLM_SERVER_DEV_MODE": "1"}
"""Opens the addresses of sleep and of replacing weights; anyone who reaches the server can then ask for either."""
NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


def start(
    config: PolicyConfig,
    log: Path,
    *,
    rank: int,
    loras: int = 1,
    port: int = 0,
    replaceable: bool = False,
    listener: Listener,
    check: Callable[[], None],
) -> ModelServer:
    """Start a vLLM server with the configured model, or with the base of an adapter, and return when it answers.

    rank: largest rank of its adapters. loras: adapters that it samples from at once. replaceable: whether all its
    weights will be replaced. check: called while waiting, and raises to give up. `UsageError` where vLLM is not
    installed.
    """
    from composer_stages.policy.local import resolve  # torch is slow to import

    python = require_interpreter(config)
    below, revision = base_of(config)
    source = resolve(below, listener=listener)
    if adapters.is_adapter(source):
        raise UsageError("policy.adapter-on-adapter", source=source)
    # Without the variables that point into our own environment; those that the user has set go before ours.
    inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    on_cpu = not runs_on_gpu(config)
    options = _options(source, revision, below.dtype, max(rank, rank_of(config.source)), on_cpu)
    options |= {"max-loras": loras} | config.server.args
    server = ModelServer(
        f"{config.source!r}",
        # As a module: the command `vllm` of the package vllm-cpu fails, because it looks for metadata of `vllm`.
        lambda port: [python, "-m", "vllm.entrypoints.openai.api_server", *_command_words({**options, "port": port})],
        (CPU_ENVIRONMENT if on_cpu else {})
        | ENVIRONMENT
        | (REPLACEABLE if replaceable or config.server.sleeps else {})
        | inherited,
        log,
        port=port,
        listener=listener,
        check=check,
    )
    server.start()
    return server


def require_interpreter(config: PolicyConfig) -> str:
    """Return the interpreter that can import vLLM; `UsageError` without one."""
    python = interpreter(config)
    if python is None:
        raise UsageError("policy.no-vllm", source=config.source, interpreter=INTERPRETER)
    return python


def interpreter(config: PolicyConfig) -> str | None:
    """Return the interpreter with vLLM: from the settings, the environment variable, or `./dev vllm`; else None."""
    for named in (config.server.python, os.environ.get(INTERPRETER, "")):
        if named:
            if shutil.which(named) is None:
                raise UsageError("policy.no-vllm-interpreter", path=named)
            return named
    return own_interpreter(OWN, on_gpu=runs_on_gpu(config))


def runs_on_gpu(config: PolicyConfig) -> bool:
    """Return whether a server that is started here runs on a GPU, by its own build of torch."""
    from composer_stages.policy.local import device

    return config.device != "cpu" and (devices.has_nvidia() or device(config.device) != "cpu")


def own_interpreter(python: Path, *, on_gpu: bool) -> str | None:
    """Return the interpreter that `./dev vllm` installed, None without; `UsageError` for a build that does not fit."""
    if not python.exists():
        return None
    for_cpus = any(python.parents[1].glob("lib/python*/site-packages/vllm_cpu-*.dist-info"))
    if for_cpus == on_gpu:
        raise UsageError(
            "policy.vllm-build-for-other-device",
            folder=python.parents[1],
            for_cpus=for_cpus,
            on_gpu=on_gpu,
            interpreter=INTERPRETER,
        )
    return str(python)


def memory_utilisation(server: Server) -> float:
    """Return the part of a GPU's memory that a server with these options takes."""
    return float(server.args.get("gpu-memory-utilization", UTILISATION))


def cpu_cache_bytes() -> int:
    """Return the memory of a server's KV cache on a CPU."""
    name = "VLLM_CPU_KVCACHE_SPACE"
    return int(float(os.environ.get(name, CPU_ENVIRONMENT[name])) * 2**30)


def base_of(config: PolicyConfig) -> tuple[PolicyConfig, str | None]:
    """Return the settings of the model that a server must hold (an adapter's base), and its hub revision."""
    local = config.in_process()
    return adapters.base_of(local.model, local) or (local, None)


def rank_of(source: str) -> int:
    """Return the rank of an adapter's folder; 0 for other models."""
    return int(store.read_json(Path(source) / adapters.CONFIG)["r"]) if adapters.is_adapter(source) else 0


def _options(source: str, revision: str | None, dtype: str, rank: int, on_cpu: bool) -> dict[str, Any]:
    from transformers import AutoConfig

    options: dict[str, Any] = {
        "model": source,
        "served-model-name": NAME,
        "host": "127.0.0.1",
        "dtype": dtype,
        "enable-lora": True,
        "max-lora-rank": next((size for size in RANKS if size >= rank), rank),
        "logprobs-mode": "processed_logprobs",  # after temperature, as the trainer computes them
        "generation-config": "vllm",  # vLLM's neutral sampling; the model's file may set top_p, top_k or penalties
    }
    if revision is not None:
        options["revision"] = revision
    options |= CPU_OPTIONS if on_cpu else {}
    with suppress(OSError, ValueError):  # vLLM itself reports a model that cannot be read
        shape = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False).get_text_config()
        if dtype == "auto" and str(shape.dtype) == "torch.float32":
            options["dtype"] = "float32"  # vLLM takes auto for 16 bits where weights are in float32
        if on_cpu:
            options["max-model-len"] = min(getattr(shape, "max_position_embeddings", CPU_CONTEXT), CPU_CONTEXT)
    return options


def _command_words(options: Mapping[str, Any]) -> list[str]:
    """Return the options as words of a command line: true is a flag without a value, false leaves the option out."""
    words: list[str] = []
    for name, value in options.items():
        if value is not False:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ScoringLock:
    """A lock of one server: sampling requests overlap, a scoring request is exclusive.

    On a CPU, vLLM 0.32 with adapters enabled crashes when a request for prompt log-probs is batched with any other:
    `punica_cpu.add_lora_logits` counts one row per request where there is one per token.
    """

    def __init__(self) -> None:
        self._turn, self._idle, self._under_way = asyncio.Lock(), asyncio.Event(), 0
        self._idle.set()

    @asynccontextmanager
    async def sampling(self) -> AsyncIterator[None]:
        """Hold the server together with other sampling requests."""
        # Taking `_turn` first keeps sampling requests from overtaking a scoring request that waits for `_idle`.
        async with self._turn:
            self._under_way += 1
            self._idle.clear()
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    @asynccontextmanager
    async def scoring(self) -> AsyncIterator[None]:
        """Hold the server exclusively."""
        async with self._turn:
            await self._idle.wait()
            yield


SCORING_LOCKS: dict[str, ScoringLock] = {}


def scoring_lock(base_url: str, device: str) -> ScoringLock | None:
    """Return the lock of a server, shared in this process; None for a server that needs no lock.

    device: where models run on this machine.
    """
    parts = urlsplit(base_url)
    # What a server on another machine runs on is not known; one with a GPU must not be slowed down.
    if device != "cpu" or parts.hostname not in LOOPBACK:
        return None
    return SCORING_LOCKS.setdefault(parts.netloc, ScoringLock())
