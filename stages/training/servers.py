"""Which vLLM server each process of a training samples from: one for all, or several, which they take in turn.

Of the processes on one server the first loads adapters, for all of them. On a CPU they also wait for each other with
what that server does not do beside other work (`stages.policy.alone`).
"""

import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import urlsplit

from stages.backends.ranks import Ranks
from stages.errors import ComposerError, UsageError
from stages.policy.alone import LOOPBACK
from stages.policy.config import PolicyConfig
from stages.policy.serving import wants_no_other
from stages.training.settings import Distribution

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
