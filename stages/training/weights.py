"""The weights of the vLLM servers that a training samples from: which server, and how it follows the training.

Processes of one training share a server, or take several in turn. Of the processes on one server the first loads
weights, for all of them; on a CPU they also wait for each other with what that server cannot do while it serves
another process (`stages.policy.server`).

After every optimiser step `WeightSync` writes what was trained, an adapter or all weights, loads it on the server and
checks it: a server's word that it has loaded weights is not trusted, and the log-probs of a fixed text must agree on
both sides.
"""

import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from safetensors.torch import save_file
from torch import Tensor

from stages.backends.ranks import Ranks
from stages.errors import ComposerError, UsageError
from stages.messages import Message, opening_ids
from stages.policy.base import PolicyConfig
from stages.policy.local import resolve
from stages.policy.server import LOOPBACK
from stages.policy.serving import needs_exclusive_server
from stages.policy.vllm import VllmPolicy
from stages.runs.run import RunWriter
from stages.training.config import Config
from stages.training.distributed import Student
from stages.training.scoring import Tree, score, token_log_probs

Value = TypeVar("Value")


@dataclass(frozen=True)
class SharedServer:
    """How a process shares its server with other processes of the training; without arguments it is the only one.

    loads: whether it is the process that loads adapters there. turn: its number, of `turns`, in work that a server
    cannot do while it serves another process.
    """

    ranks: Ranks = field(default_factory=Ranks)
    loads: bool = True
    turn: int = 0
    turns: int = 1

    def in_turn(self, work: Callable[[], Value]) -> Value:
        """Do work that all processes do, those of one server after each other; all raise the error of any of them."""
        value, error = None, None
        for turn in range(self.turns):
            if turn == self.turn:
                try:
                    value = work()
                except ComposerError as raised:
                    error = raised
            errors = [other for other in self.ranks.gather(error) if other is not None]
        if errors:
            raise error or errors[0]
        return value  # type: ignore[return-value]  # this process has had its turn


def shared_server(policy: PolicyConfig, ranks: Ranks) -> SharedServer:
    """Return how this process shares its server, whose address is in `policy`."""
    if ranks.count == 1 or not policy.served:
        return SharedServer(ranks)
    parts = urlsplit(policy.base_url or "")
    server = (socket.gethostname() if parts.hostname in LOOPBACK else "", parts.netloc)
    servers = ranks.gather(server)
    before, alone = servers[: ranks.rank].count(server), needs_exclusive_server(policy)
    turns = max(ranks.gather(servers.count(server) if alone else 1))
    return SharedServer(ranks, loads=not before, turn=before if alone else 0, turns=turns)


TOLERANCE = {torch.float32: 1e-3}
HALF_TOLERANCE = 0.1
"""Mean difference in nats that rounding explains between two programs, in 16 bits and in float32."""
CHECKED = 64
"""Tokens of the fixed text that are scored."""


class WeightSync(ABC):
    """Keeps a server at the newest version of the weights, which is the number of optimiser steps done.

    folder: where versions are written. text: token ids whose log-probs are compared. student: the model under training.
    server: how this process shares its server; each process compares with its own.
    """

    def __init__(
        self,
        sampler: VllmPolicy,
        folder: Path,
        text: list[int],
        student: Student,
        *,
        tolerance: float | None = None,
        server: SharedServer | None = None,
    ) -> None:
        self.sampler, self.server = sampler, server or SharedServer()
        self._folder, self._student = folder, student
        self._tolerance = tolerance or TOLERANCE.get(student.dtype, HALF_TOLERANCE)
        cut = max(len(text) - CHECKED, 1)
        self._tree = Tree(text[:cut], (text[cut:],))

    @abstractmethod
    def _write(self, folder: Path) -> None:
        """Write what was trained; called in the first process alone."""

    @abstractmethod
    def _load(self, version: int, folder: Path) -> None:
        """Load it on this process' server, and sample from it; called in every process, `server.loads` in one each."""

    @abstractmethod
    def _forget(self, version: int, folder: Path) -> None:
        """Remove older versions that are no longer sampled from, in every process."""

    @abstractmethod
    def _scored(self) -> Any:
        """Return the model whose log-probs are compared."""

    @abstractmethod
    def end(self) -> None:
        """Leave the server, which others may continue to use, as it was."""

    def follow(self, step: int) -> dict[str, float]:
        """Write the weights that a step begins with, load them and compare; `ComposerError` where a server has others.

        Returns the difference that the comparison found, as a metric.
        """
        folder = self._folder / f"version-{step:06d}"

        def write() -> None:
            rmtree(folder, ignore_errors=True)
            self._write(folder)

        self.server.ranks.broadcast_from_rank0(write)
        self.server.in_turn(lambda: self._load(step, folder))
        # That a server confirms a load proves nothing.
        difference = self._compare(f"After step {step}", "Restart the server on the model that is trained.")
        self._forget(step, folder)
        return {"sampling/sync_difference": difference}

    @abstractmethod
    def check_unchanged(self, step: int) -> None:
        """`ComposerError` where the server's weights have changed since `follow`, in the rollouts of a step."""

    def _compare(self, when: str, remedy: str) -> float:
        """Compare log-probs of the fixed text, each process with its server; `ComposerError` where they differ."""
        own = self.server.in_turn(lambda: self._difference(self._scored()))
        # All processes learn all differences, so that all of them stop.
        found = self.server.ranks.gather((own, self.sampler.url))
        for difference, url in found:
            if not difference <= self._tolerance:  # so that NaN is refused, too
                raise ComposerError(
                    f"{when} the server at {url} samples from other weights than those under training: the log-probs "
                    f"of a fixed text differ by {difference:.3g} nats on average, and {self._tolerance:g} is allowed "
                    f"(optimisation.sync_tolerance). {remedy}"
                )
        return max(difference for difference, _ in found)

    @torch.no_grad()
    def _difference(self, model: Any) -> float:
        """Return the mean difference in nats between this process and its server."""
        was_training = model.training
        model.eval()
        with self._student.autocast():
            own = token_log_probs(model, score(model, [self._tree])).cpu().tolist()
        model.train(was_training)
        theirs = self.sampler.score(self._tree.prompt, self._tree.branches[0])
        return sum(abs(a - b) for a, b in zip(own, theirs, strict=True)) / len(own)


class AdapterSync(WeightSync):
    """Loads an adapter under a new name for each version, and unloads those that no request samples from."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self._held: list[tuple[str, Path]] = []
        self._run = self.server.ranks.broadcast_from_rank0(lambda: secrets.token_hex(4))
        """Several runs, or attempts at one, may share a server, where a name must never stand for two adapters."""

    def _write(self, folder: Path) -> None:
        self._student.save_adapter(folder)

    def _load(self, version: int, folder: Path) -> None:
        # A new name for each version: vLLM would read an adapter that is loaded in place again for every batch.
        name = f"{self._run}-version-{version}"
        if self.server.loads:
            self.sampler.load(name, folder)
        self.sampler.sample_from(name, version)
        self._held = [*(held for held in self._held if held[0] != name), (name, folder)]

    def check_unchanged(self, step: int) -> None:
        """Compare nothing: a name is never given to a second adapter."""

    def _scored(self) -> Any:
        # peft puts the adapter into the base's Linears, so the base scores with it.
        return self._student.model.get_base_model()

    def _forget(self, version: int, folder: Path) -> None:
        self._unload(self.server.ranks.gather(self.sampler.in_use()))

    def end(self) -> None:
        """Unload all that this training loaded."""
        with suppress(ComposerError):  # a broken server has nothing to unload, and must not hide why training ended
            self._unload([])

    def _unload(self, used: Sequence[set[str]]) -> None:
        """Unload all versions but those in use, by their names in each process."""
        held, self._held = self._held, []
        for name, folder in held:
            if any(name in names for names in used):
                self._held.append((name, folder))
                continue
            if self.server.loads:
                self.sampler.unload(name)
            if self.server.ranks.first:
                rmtree(folder, ignore_errors=True)


class WholeSync(WeightSync):
    """Replaces all weights of the server, which holds one version at a time.

    start: the weights that the server was started with, which it gets back at the end. file_bytes: size from which on
    a file ends, so that no second copy of the model is needed at once.
    """

    def __init__(self, *args: Any, start: str, file_bytes: int = 4 * 2**30, **given: Any) -> None:
        super().__init__(*args, **given)
        self._start, self._file_bytes = start, file_bytes
        self._before: Path | None = None
        self._replaced = False

    def _write(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        # Between `gather` and `scatter` the parameters of a model in shares are whole. Tied ones come once, as a
        # checkpoint has them.
        part, size, number = dict[str, Tensor](), 0, 0
        named = list(self._student.model.named_parameters())
        for name, parameter in named:
            part[name] = parameter.detach().to("cpu", self._student.dtype)
            size += part[name].nbytes
            if size >= self._file_bytes or name == named[-1][0]:
                save_file(part, folder / f"model-{number:05d}.safetensors", {"format": "pt"})
                part, size, number = {}, 0, number + 1

    def _load(self, version: int, folder: Path) -> None:
        self._replaced = True
        if self.server.loads:
            self.sampler.replace_weights(str(folder.resolve()))
        self.sampler.sample_from(None, version)

    def check_unchanged(self, step: int) -> None:
        """`ComposerError` where another run has replaced the weights while the rollouts of a step were played."""
        # Not before all have played: a server on a CPU must not score for one while it samples for another.
        self.server.ranks.gather(None)
        self._compare(f"While step {step} was played,", "Give each training of all weights servers of its own.")

    def _scored(self) -> Any:
        return self._student.model

    def _forget(self, version: int, folder: Path) -> None:
        # The newest stays: a server that is started again after its death gets it back.
        if self._before not in (None, folder) and self.server.ranks.first:
            rmtree(self._before, ignore_errors=True)
        self._before = folder

    def end(self) -> None:
        """Give the server back the weights that it had."""
        with suppress(ComposerError):  # a broken server has none, and must not hide why training ended
            if self.server.loads and self._replaced and self.sampler.server is None:
                self.sampler.replace_weights(self._start)


def weight_sync(
    sampler: VllmPolicy, student: Student, opening: list[Message], config: Config, out: RunWriter, server: SharedServer
) -> WeightSync:
    """Return what keeps the server of `sampler` at the weights of `student`; they are compared on this opening.

    `UsageError` where the server's log-probs are not those of the sampling distribution, or where it cannot follow.
    """
    if sampler.found.logprob_kind == "raw" and sampler.config.temperature != 1:
        raise UsageError(
            f"The server gives log-probs before temperature, and policy.temperature is {sampler.config.temperature:g}. "
            "Start it with --logprobs-mode processed_logprobs, or take temperature 1."
        )
    settings = config.optimisation
    folder = server.ranks.broadcast_from_rank0(lambda: out.scratch("versions"))
    policy = student.policy
    text = opening_ids(policy.tokenizer, opening)
    shared: dict[str, Any] = {"tolerance": settings.sync_tolerance, "server": server}
    if config.adapter.rank:
        return AdapterSync(sampler, folder, text, student, **shared)
    if policy.model.config.tie_word_embeddings and needs_exclusive_server(sampler.config):
        raise UsageError(
            f"{policy.config.model!r} has one table for embeddings and output head, and vLLM on a CPU keeps the "
            "head that it was started with when all weights are replaced. Set adapter.rank, or leave out vllm:."
        )
    start = resolve(policy.config, cache=out.cache, listener=out.progress)
    return WholeSync(sampler, folder, text, student, start=str(start), **shared)
