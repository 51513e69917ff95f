"""The policies of a stage with their servers: a vLLM server is started for a model `vllm:...` without base_url."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager

from composer_stages.errors import UsageError
from composer_stages.policy import open_policy
from composer_stages.policy.base import Policy, PolicyConfig, weights_identity
from composer_stages.policy.server import ModelServer, base_of, rank_of, scoring_lock, start
from composer_stages.runs import store
from composer_stages.runs.run import RunWriter


def needs_exclusive_server(config: PolicyConfig) -> bool:
    """Return whether a stage that samples from this policy must not run in parallel with another one that does.

    A server that the stage starts may take all of a GPU; a vLLM server on a CPU crashes when one stage scores while
    another samples (`composer_stages.policy.server.ScoringLock`).
    """
    if not config.served or config.base_url is None:
        return config.served
    from composer_stages.policy.local import device

    return scoring_lock(config.base_url, device(config.device)) is not None


class Serving(AbstractContextManager["Serving"]):
    """Context manager that opens a stage's policies and ends the servers it started.

    One server runs at a time, since it may take all of a GPU; models with one base, such as the arms of an evaluation,
    share it. policies: all policies that will be opened, whose adapters the server must have room for. rank: rank of
    the adapter under training, 0 for a training of all weights, None without a training. loras: concurrent versions of
    that adapter; vLLM delays requests for a further version until requests for the first have ended. rollout_usd: what
    one rollout may cost, which is what all may cost where no price is known and nothing else limits the run.
    """

    def __init__(
        self,
        out: RunWriter,
        policies: Sequence[PolicyConfig],
        *,
        rank: int | None = None,
        loras: int = 1,
        rollout_usd: float | None = None,
    ) -> None:
        if all(config.price is None for config in policies):
            out.budget.unpriced_limit = rollout_usd or math.inf
        self._out, self._policies = out, [config for config in policies if config.served]
        self._rank, self._loras = rank, loras
        self._server: ModelServer | None = None
        self._serves = ""

    def __exit__(self, *error: object) -> None:
        if self._server is not None:
            self._server.stop()

    def open(self, config: PolicyConfig) -> Policy:
        """Open the policy, on a server started here where the model needs one and has no address."""
        if not config.served or config.base_url is not None:
            return open_policy(config, cache=self._out.cache, budget=self._out.budget, listener=self._out.progress)
        from composer_stages.policy.vllm import VllmPolicy  # imports torch

        out = self._out
        if out.worker:
            raise UsageError("policy.worker-without-server", model=config.model)
        below, _ = base_of(config)
        serves = store.digest([below.model, weights_identity(below), config.server.args])
        if self._server is None or self._serves != serves:
            if self._server is not None:
                self._server.stop()
            # Forget the old server before the new one starts: an error on the way must not leave its name behind.
            self._server, self._serves = None, serves
            # The rank is fixed at the start of a server, so it is the largest of all adapters that will be opened.
            rank = max([self._rank or 0, *(rank_of(config.source) for config in self._policies)])
            log = out.path / "logs" / "vllm.log"
            self._server = start(
                config,
                log,
                rank=rank,
                loras=self._loras,
                replaceable=self._rank == 0,
                listener=out.progress,
                check=out.raise_if_stopped,
            )
        return VllmPolicy.connect(config, self._server.url, listener=out.progress, server=self._server)
