"""Rollouts from a server in training: which weights they were sampled with, and how far behind they are."""

import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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
from stages.policy.serving import wants_no_other
from stages.policy.vllm import VllmPolicy
from stages.rollouts.agent_loop import Episode
from stages.runs.artifact import RunWriter
from stages.runs.records import Row
from stages.training.rollouts import Ahead, Rollouts
from stages.training.scoring import Tree, score, token_log_probs
from stages.training.settings import Adapter, Distribution, Optimisation

# ---- servers
# Which vLLM server each process of a training samples from: one for all, or several, which they take in turn.
#
# Of the processes on one server the first loads adapters, for all of them. On a CPU they also wait for each other with
# what that server does not do beside other work (`stages.policy.server`).

Value = TypeVar("Value")


@dataclass(frozen=True)
class Place:
    """A process among those of a training and those on its server; alone without arguments.

    loads: whether it is the one that loads adapters there. turn: when it does what must be done alone, of `turns`.
    """

    ranks: Ranks = field(default_factory=Ranks)
    loads: bool = True
    turn: int = 0
    turns: int = 1

    def in_turn(self, work: Callable[[], Value]) -> Value:
        """What all processes do, those on one server after each other; one's error is raised by all of them."""
        value, error = None, None
        for turn in range(self.turns):
            if turn == self.turn:
                try:
                    value = work()
                except ComposerError as raised:
                    error = raised
            errors = [heard for heard in self.ranks.gather(error) if heard is not None]
        if errors:
            raise error or errors[0]
        return value  # type: ignore[return-value]  # this process has had its turn


def address(policy: PolicyConfig, distribution: Distribution, max_staleness: int, ranks: Ranks) -> PolicyConfig:
    """The policy with the address of the server that this process samples from; `UsageError` where that cannot be."""
    if not policy.served:
        return policy
    _check(policy, distribution, max_staleness, ranks.count)
    if policy.base_url is None:
        return policy
    servers = (policy.base_url, *distribution.servers)
    return policy.model_copy(update={"base_url": servers[ranks.rank % len(servers)]})


def place(policy: PolicyConfig, ranks: Ranks) -> Place:
    """This process' place, where `policy` has the address of its server."""
    if ranks.count == 1 or not policy.served:
        return Place(ranks)
    parts = urlsplit(policy.base_url or "")
    server = (socket.gethostname() if parts.hostname in LOOPBACK else "", parts.netloc)
    servers = ranks.gather(server)
    before, alone = servers[: ranks.rank].count(server), wants_no_other(policy)
    turns = max(ranks.gather(servers.count(server) if alone else 1))
    return Place(ranks, loads=not before, turn=before if alone else 0, turns=turns)


def _check(policy: PolicyConfig, distribution: Distribution, max_staleness: int, count: int) -> None:
    servers = 1 + len(distribution.servers)
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
    if count > servers and max_staleness and wants_no_other(policy):
        raise UsageError(
            f"optimisation.max_staleness is {max_staleness}, but {count} processes share {servers} vLLM on a CPU, "
            "which dies of one's scoring beside another's rollouts. Take 0, or give each a server in "
            "distribution.servers."
        )


# ---- sync
# The adapter under training and its copy on a server: written after every step, loaded there, and checked by a score.
#
# A server that says it has loaded weights is not believed: the log-probs of a fixed text must agree on both sides. It
# stands where TRL keeps its own vLLM client (`GRPOTrainer.vllm_generation`), which calls `sync_weights` before
# rollouts.

TOLERANCE = {torch.float32: 1e-3}
HALF_TOLERANCE = 0.1
"""Mean difference in nats that rounding explains: two programs in 16 bits, and in float32."""
CHECKED = 64
"""Tokens of the fixed text that are scored."""


class AdapterSync:
    """Keeps a server's copy of an adapter at the newest version, which is the number of optimiser steps done.

    base: the record that is written beside the adapter. text: token ids whose log-probs are compared. keep: older
    versions that are still sampled from. place: this process among several, each of which compares with its server.
    """

    def __init__(
        self,
        sampler: VllmPolicy,
        base: adapters.Base,
        folder: Path,
        text: list[int],
        *,
        tolerance: float | None = None,
        keep: int = 0,
        place: Place | None = None,
    ) -> None:
        self.sampler, self.differences, self.place = sampler, dict[int, float](), place or Place()
        self._base, self._folder, self._keep, self._tolerance = base, folder, keep, tolerance
        cut = max(len(text) - CHECKED, 1)
        self._tree = Tree(text[:cut], (text[cut:],))
        self._held: list[tuple[str, Path]] = []
        self._run = self.place.ranks.broadcast_from_rank0(lambda: secrets.token_hex(4))
        """Several runs, or attempts at one, may share a server, where a name must never stand for two adapters."""
        self._trained: Callable[[], tuple[Any, int]] | None = None

    def follow(self, trained: Callable[[], tuple[Any, int]]) -> None:
        """From now on the adapter is that of this model, at this version."""
        self._trained = trained

    def sync_weights(self) -> None:
        """Write the adapter, load it under a new name and compare; `ComposerError` where a server has another."""
        if self._trained is None:
            raise RuntimeError("follow was not called")
        model, version = self._trained()
        folder, name = self._folder / f"version-{version:06d}", f"{self._run}-version-{version}"
        self.place.ranks.broadcast_from_rank0(lambda: self._write(model, folder))
        self.place.in_turn(lambda: self.sampler.load(name, folder) if self.place.loads else None)
        self.sampler.take(name, version)
        self._held = [*(held for held in self._held if held[0] != name), (name, folder)]
        self.differences[version] = self._checked(model, version)
        self._forget(self._keep + 1)

    def _write(self, model: Any, folder: Path) -> None:
        rmtree(folder, ignore_errors=True)
        adapters.save(model, self._base, folder)

    def _checked(self, model: Any, version: int) -> float:
        """The largest of all processes' differences, if all of them are small enough."""
        own = self.place.in_turn(lambda: self._difference(model))
        allowed = self._tolerance or TOLERANCE.get(model.get_base_model().dtype, HALF_TOLERANCE)
        found = self.place.ranks.gather((own, self.sampler.url))
        for difference, url in found:
            if not difference <= allowed:
                raise ComposerError(
                    f"After step {version} the server at {url} samples from other weights than those under training: "
                    f"the log-probs of a fixed text differ by {difference:.3g} nats on average, and {allowed:g} is "
                    "allowed (optimisation.sync_tolerance). Restart the server on the model that is trained."
                )
        return max(difference for difference, _ in found)

    @torch.no_grad()
    def _difference(self, model: Any) -> float:
        """The mean difference in nats between this process and its server."""
        plain = model.get_base_model()
        was_training = plain.training
        plain.eval()
        own = token_log_probs(plain, score(plain, [self._tree])).cpu().tolist()
        plain.train(was_training)
        theirs = self.sampler.score(self._tree.prompt, self._tree.branches[0])
        return sum(abs(a - b) for a, b in zip(own, theirs, strict=True)) / len(own)

    def end(self) -> None:
        """Let a server that others go on with forget all that this training loaded."""
        with suppress(ComposerError):  # one that is broken has nothing to forget, and must not hide why
            self._forget(0)

    def _forget(self, left: int) -> None:
        """Let the server forget versions that nobody samples from any more."""
        while len(self._held) > left:
            name, folder = self._held.pop(0)
            if self.place.loads:
                self.sampler.unload(name)
            if self.place.ranks.first:
                rmtree(folder, ignore_errors=True)


def check(policy: PolicyConfig, adapter: Adapter, *, replicas: bool) -> None:
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


class ServedRollouts:
    """Plays on the server that `sync` keeps at the newest weights, at most `max_staleness` steps ahead of them.

    What was sampled with older weights is corrected by TRL's truncated importance sampling, and counted here.
    """

    def __init__(self, rollouts: Rollouts, sync: AdapterSync, max_staleness: int) -> None:
        self.sync, self._rollouts, self._max_staleness = sync, rollouts, max_staleness
        self._ahead: Ahead | None = None

    def begin(self, trained: Callable[[], tuple[Any, int]], rows_of: Callable[[int], list[Row] | None]) -> None:
        """Follow a model under training; rows_of: the rows of a coming step, None behind the last."""

        def numbered(step: int) -> list[Row] | None:
            rows = rows_of(step)
            return None if rows is None else self._rollouts.numbered(rows)

        self.sync.follow(trained)
        self._ahead = Ahead(self._rollouts.played, numbered, self.sync.sampler.as_it_is, self._max_staleness)

    def play(self, rows: list[Row], step: int) -> tuple[dict[str, list[Any]], dict[str, float]]:
        """The rollouts of a step in the form TRL wants, and their metrics."""
        if self._ahead is None:
            raise RuntimeError("begin was not called")
        episodes = self._ahead.take(self._rollouts.numbered(rows), step)
        columns = self._rollouts.handed_over(episodes, self.sync.sampler, step)
        found = staleness(episodes, step, self.sync.place.ranks)
        return columns, found | {"sampling/sync_difference": self.sync.differences.get(step, 0.0)}

    def end(self) -> None:
        """Play no further."""
        if self._ahead is not None:
            self._ahead.close()
        self.sync.end()


def staleness(own: Sequence[Episode], step: int, ranks: Ranks) -> dict[str, float]:
    """How many optimiser steps the weights behind each rollout were behind: the mean, and how many were at all."""
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
    place: Place,
) -> ServedRollouts:
    """Rollouts from the server behind `sampler` in the training of `policy`; weights are compared on this opening.

    `UsageError` where the server's log-probs are not those of the sampling.
    """
    if sampler.found.logprob_kind == "raw" and sampler.config.temperature != 1:
        raise UsageError(
            f"The server gives log-probs before temperature, and policy.temperature is {sampler.config.temperature:g}. "
            "Start it with --logprobs-mode processed_logprobs, or take temperature 1."
        )
    sync = AdapterSync(
        sampler,
        adapters.describe(policy.config, policy.model),
        place.ranks.broadcast_from_rank0(lambda: out.scratch("versions")),
        opening_ids(policy.tokenizer, opening),
        tolerance=settings.sync_tolerance,
        keep=settings.max_staleness,
        place=place,
    )
    return ServedRollouts(played, sync, settings.max_staleness)
