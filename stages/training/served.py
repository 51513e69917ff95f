"""Rollouts from a server in training: which weights they were sampled with, and how far behind they are."""

from collections.abc import Callable, Sequence
from typing import Any

from stages.backends.ranks import Ranks
from stages.errors import UsageError
from stages.messages import Message, opening_ids
from stages.policy import adapters
from stages.policy.base import PolicyConfig
from stages.policy.local import LocalPolicy
from stages.policy.vllm import VllmPolicy
from stages.rollouts.episode import Episode
from stages.runs.artifact import Out
from stages.runs.records import Row
from stages.training.ahead import Ahead
from stages.training.rollouts import Rollouts
from stages.training.servers import Place
from stages.training.settings import Adapter, Optimisation
from stages.training.sync import AdapterSync


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
    out: Out,
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
        place.ranks.of_first(lambda: out.scratch("versions")),
        opening_ids(policy.tokenizer, opening),
        tolerance=settings.sync_tolerance,
        keep=settings.max_staleness,
        place=place,
    )
    return ServedRollouts(played, sync, settings.max_staleness)
