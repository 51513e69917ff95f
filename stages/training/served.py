"""Rollouts from vLLM servers in training: which server, with which weights, and how many steps old these are.

Processes of one training share a server, or take several in turn. Of the processes on one server the first loads
adapters, for all of them; on a CPU they also wait for each other with what that server cannot do while it serves
another process (`stages.policy.server`).

After every optimiser step `AdapterSync` writes the adapter, loads it on the server and checks it: a server's word that
it has loaded weights is not trusted, and the log-probs of a fixed text must agree on both sides. `AdapterSync` is what
TRL has for its own vLLM client (`GRPOTrainer.vllm_generation`), whose `sync_weights` is called before rollouts.
"""

import copy
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch

from stages.backends.ranks import Ranks
from stages.errors import ComposerError, UsageError
from stages.messages import Message, opening_ids
from stages.policy import adapters
from stages.policy.base import PolicyConfig
from stages.policy.local import LocalPolicy
from stages.policy.server import LOOPBACK
from stages.policy.serving import needs_exclusive_server
from stages.policy.vllm import VllmPolicy
from stages.rollouts.agent_loop import Episode
from stages.runs.artifact import RunWriter
from stages.runs.records import Row
from stages.training.rollouts import Ahead, Rollouts
from stages.training.scoring import Tree, score, token_log_probs
from stages.training.settings import AdapterSettings, Distribution, Optimisation

Value = TypeVar("Value")


def check(policy: PolicyConfig, adapter: AdapterSettings, *, replicas: bool) -> None:
    """`UsageError` for a policy behind a server that cannot follow the training; replicas: whether it has some."""
    if not policy.served:
        return
    if replicas:
        raise UsageError(
            f"{policy.model!r} is sampled from a server, which follows one training, and replicas are several. "
            "Leave out diloco.store, or vllm:."
        )
    if not adapter.rank:
        raise UsageError(
            f"{policy.model!r} is sampled from a server, which follows the training by its adapter, and "
            "adapter.rank is 0. Set adapter.rank, or leave out vllm:."
        )
    if adapters.is_adapter(policy.source):
        raise UsageError(
            f"{policy.source} is an adapter, and a server cannot hold another one on top of it. "
            "Run `composer export merged` and start from the merged folder."
        )


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


def address(policy: PolicyConfig, distribution: Distribution, max_staleness: int, ranks: Ranks) -> PolicyConfig:
    """Return the policy with the address of the server that this process samples from.

    `UsageError` where the number of servers does not suit the number of processes.
    """
    if not policy.served:
        return policy
    servers, count = 1 + len(distribution.servers), ranks.count
    if count > 1 and policy.base_url is None:
        raise UsageError(
            f"{policy.model!r} has no address, and {count} processes would start a server each, on the same GPU or "
            "CPU. Start one or several with `composer serve`; give policy.base_url, and others in distribution.servers."
        )
    if servers > count:
        raise UsageError(
            f"{servers} servers were given to {count} processes, each of which samples from one. Leave "
            f"{servers - count} out of distribution.servers, or start more processes with torchrun."
        )
    if count > servers and max_staleness and needs_exclusive_server(policy):
        raise UsageError(
            f"optimisation.max_staleness is {max_staleness}, but {count} processes share {servers} vLLM on a CPU, "
            "which dies of one's scoring beside another's rollouts. Take 0, or give each a server in "
            "distribution.servers."
        )
    if policy.base_url is None:
        return policy
    urls = (policy.base_url, *distribution.servers)
    return policy.model_copy(update={"base_url": urls[ranks.rank % len(urls)]})


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


class AdapterSync:
    """Keeps a server's copy of an adapter at the newest version, which is the number of optimiser steps done.

    base: the record that is written next to the adapter. text: token ids whose log-probs are compared. keep: older
    versions that are still sampled from. server: how this process shares its
    server; each process compares with its own.
    """

    def __init__(
        self,
        sampler: VllmPolicy,
        base: adapters.AdapterBase,
        folder: Path,
        text: list[int],
        *,
        tolerance: float | None = None,
        keep: int = 0,
        server: SharedServer | None = None,
    ) -> None:
        self.sampler, self.differences, self.server = sampler, dict[int, float](), server or SharedServer()
        self._base, self._folder, self._keep, self._tolerance = base, folder, keep, tolerance
        cut = max(len(text) - CHECKED, 1)
        self._tree = Tree(text[:cut], (text[cut:],))
        self._held: list[tuple[str, Path]] = []
        self._run = self.server.ranks.broadcast_from_rank0(lambda: secrets.token_hex(4))
        """Several runs, or attempts at one, may share a server, where a name must never stand for two adapters."""
        self.trained: Callable[[], tuple[Any, int]] | None = None
        """Gives the model under training, and its version; set before the first rollouts."""

    def sync_weights(self) -> None:
        """Write the adapter, load it under a new name and compare; `ComposerError` where a server has another."""
        if self.trained is None:
            raise RuntimeError("trained is not set")
        model, version = self.trained()
        folder, name = self._folder / f"version-{version:06d}", f"{self._run}-version-{version}"

        def write() -> None:
            rmtree(folder, ignore_errors=True)
            adapters.save_adapter(model, self._base, folder)

        # A new name for each version: vLLM would read an adapter that is loaded in place again for every batch.
        self.server.ranks.broadcast_from_rank0(write)
        self.server.in_turn(lambda: self.sampler.load(name, folder) if self.server.loads else None)
        self.sampler.take(name, version)
        self._held = [*(held for held in self._held if held[0] != name), (name, folder)]
        # That a server confirms a load proves nothing, so the log-probs of a fixed text are compared, each process with
        # its own server; all processes learn all differences, so that all of them stop.
        own = self.server.in_turn(lambda: self._difference(model))
        allowed = self._tolerance or TOLERANCE.get(model.get_base_model().dtype, HALF_TOLERANCE)
        found = self.server.ranks.gather((own, self.sampler.url))
        for difference, url in found:
            if not difference <= allowed:  # so that NaN is refused, too
                raise ComposerError(
                    f"After step {version} the server at {url} samples from other weights than those under training: "
                    f"the log-probs of a fixed text differ by {difference:.3g} nats on average, and {allowed:g} is "
                    "allowed (optimisation.sync_tolerance). Restart the server on the model that is trained."
                )
        self.differences[version] = max(difference for difference, _ in found)
        self._unload(self._keep + 1)

    @torch.no_grad()
    def _difference(self, model: Any) -> float:
        """Return the mean difference in nats between this process and its server."""
        plain = model.get_base_model()  # peft puts the adapter into the base's Linears, so the base scores with it
        was_training = plain.training
        plain.eval()
        own = token_log_probs(plain, score(plain, [self._tree])).cpu().tolist()
        plain.train(was_training)
        theirs = self.sampler.score(self._tree.prompt, self._tree.branches[0])
        return sum(abs(a - b) for a, b in zip(own, theirs, strict=True)) / len(own)

    def end(self) -> None:
        """Unload all that this training loaded, from a server that others may continue to use."""
        with suppress(ComposerError):  # a broken server has nothing to unload, and must not hide why training ended
            self._unload(0)

    def _unload(self, left: int) -> None:
        """Unload the oldest versions, which are no longer sampled from, until `left` are left."""
        while len(self._held) > left:
            name, folder = self._held.pop(0)
            if self.server.loads:
                self.sampler.unload(name)
            if self.server.ranks.first:
                rmtree(folder, ignore_errors=True)


@dataclass(eq=False)
class ServedRollouts:
    """Plays on the server that `sync` keeps at the newest weights, at most `max_staleness` steps ahead of them.

    What was sampled with older weights is corrected by TRL's truncated importance sampling, and counted here.
    """

    rollouts: Rollouts
    sync: AdapterSync
    max_staleness: int
    _ahead: Ahead | None = field(default=None, init=False)

    def begin(self, trained: Callable[[], tuple[Any, int]], rows_of: Callable[[int], list[Row] | None]) -> None:
        """Follow a model under training; rows_of: the rows of a coming step, None after the last."""
        self.sync.trained = trained
        number = self.rollouts.number_samples
        self._ahead = Ahead(
            self.rollouts.play_rows,
            # Numbered when it is asked for, in the trainer's thread: all processes take part in numbering.
            lambda step: None if (rows := rows_of(step)) is None else number(rows),
            partial(copy.copy, self.sync.sampler),  # a copy keeps sampling from the adapter of its time
            self.max_staleness,
        )

    def play(self, rows: list[Row], step: int) -> tuple[dict[str, list[Any]], dict[str, float]]:
        """Return the rollouts of a step as TRL's columns, and their metrics."""
        if self._ahead is None:
            raise RuntimeError("begin was not called")
        episodes = self._ahead.take(self.rollouts.number_samples(rows), step)
        columns = self.rollouts.trl_columns(episodes, self.sync.sampler, step)
        metrics = staleness(episodes, step, self.sync.server.ranks)
        return columns, metrics | {"sampling/sync_difference": self.sync.differences.get(step, 0.0)}

    def end(self) -> None:
        """Begin no further step, and unload the adapters."""
        if self._ahead is not None:
            self._ahead.close()
        self.sync.end()


def staleness(own: Sequence[Episode], step: int, ranks: Ranks) -> dict[str, float]:
    """Return how many optimiser steps old the weights of the rollouts were: the mean, and the number of older ones."""
    mine = [e.steps[0].sample.policy_version for e in own if e.steps]
    versions = [version for theirs in ranks.gather(mine) for version in theirs]
    behind = [step - version for version in versions if version is not None]
    return {
        "sampling/staleness": sum(behind) / max(len(behind), 1),
        "sampling/stale_rollouts": float(sum(steps > 0 for steps in behind)),
    }


def rollouts(
    played: Rollouts,
    sampler: VllmPolicy,
    policy: LocalPolicy,
    opening: list[Message],
    settings: Optimisation,
    out: RunWriter,
    server: SharedServer,
) -> ServedRollouts:
    """Return rollouts from the server of `sampler` in the training of `policy`; weights are compared on this opening.

    `UsageError` where the server's log-probs are not those of the sampling distribution.
    """
    if sampler.found.logprob_kind == "raw" and sampler.config.temperature != 1:
        raise UsageError(
            f"The server gives log-probs before temperature, and policy.temperature is {sampler.config.temperature:g}. "
            "Start it with --logprobs-mode processed_logprobs, or take temperature 1."
        )
    sync = AdapterSync(
        sampler,
        adapters.describe_base(policy.config, policy.model),
        server.ranks.broadcast_from_rank0(lambda: out.scratch("versions")),
        opening_ids(policy.tokenizer, opening),
        tolerance=settings.sync_tolerance,
        keep=settings.max_staleness,
        server=server,
    )
    return ServedRollouts(played, sync, settings.max_staleness)
