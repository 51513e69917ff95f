"""One replica: it counts inner steps, takes part in rounds, and catches up with the others.

    loop = OuterLoop(parameters, settings, store, rounds)
    loop.start()
    while not loop.finished:
        ...one step of the inner optimiser...
        loop.after_step()

The state of the inner optimiser stays with the replica and is kept over the rounds.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from composer_stages.diloco import arrays
from composer_stages.diloco.arrays import OF_MEAN, Arrays, Fragments, decode, encode, lost
from composer_stages.diloco.rounds import GlobalState, ObjectStore, RoundDeleted
from composer_stages.diloco.settings import Diloco
from composer_stages.errors import InfrastructureError

LOOK_S = 5.0
"""Seconds between two polls during inner steps: the others may have settled the round without this replica."""
PAUSES_S = (0.01, 2.0)
"""First and longest pause while waiting for others; each is half as long again as the one before."""


class Stopped(Exception):
    """A stop was requested while a replica waited for others."""


@dataclass(frozen=True)
class Round:
    """The result of a round. took_part: whether it has this replica's steps; norm: of the mean pseudo-gradient."""

    round: int
    replicas: tuple[int, ...]
    took_part: bool
    norm: float
    unreadable: tuple[int, ...]


class OuterLoop:
    """Synchronises `parameters` with the other replicas': the trained tensors, each once, and no others."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        settings: Diloco,
        store: ObjectStore,
        rounds: int,
        *,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """rounds: of the whole training. stop: called while waiting for others; True ends the wait with `Stopped`."""
        self._tensors, self._settings, self._store, self._stop = dict(parameters), settings, store, stop
        self._rounds, self._fragments = rounds, Fragments(arrays.shapes(parameters), settings.fragments)
        weights = arrays.copied(parameters)
        momentum = {name: np.zeros_like(array) for name, array in weights.items()}
        self.state = GlobalState(0, weights, momentum)
        self._steps = 0
        """Inner steps since the last round."""
        self._residual: Arrays = {}
        """The rounding error of the codec so far, by name; it is added to the next offer (error feedback)."""
        self._offered: Arrays = {}
        """The residual after the present offer; it replaces `_residual` once the offer counts."""
        self._looked = time.monotonic()
        self.history: list[Round] = []

    @property
    def finished(self) -> bool:
        """Return whether all rounds are done; the parameters are then the common result."""
        return self.state.round >= self._rounds

    def start(self, saved: Mapping[str, int] | None = None, residual: Arrays | None = None) -> Round | None:
        """Load the newest common weights; if `saved` is from their round, this replica's own inner steps are kept.

        Returns the round that was due when the replica was saved.
        """
        self.state = self._store.latest(self.state)
        while not self.finished and self._store.poll_round(self.state.round) is not None:
            self._advance(took_part=False)  # rounds that were settled since that state was stored
        self._residual = residual or {}
        if saved is None or saved["round"] != self.state.round or self.finished:
            arrays.put(self.state.weights, self._tensors)
            return None
        return self.after_step(saved["steps"])

    def saved(self) -> tuple[dict[str, int], Arrays]:
        """Return the state that `start` restores besides the parameters: the position, and the codec's residual."""
        return {"round": self.state.round, "steps": self._steps}, self._residual

    def after_step(self, steps: int = 1) -> Round | None:
        """Count inner steps, and take part in a round that is due; return its result. Raises `Stopped`."""
        self._steps += steps
        if self._steps >= self._settings.every:
            self.offer()
            return self.collect()
        if time.monotonic() - self._looked >= LOOK_S:
            self._looked = time.monotonic()
            if self._store.poll_round(self.state.round) is not None:
                return self._catch_up()
        return None

    def offer(self) -> None:
        """Publish this replica's pseudo-gradient of the round's fragment, plus the codec's residual."""
        local = arrays.copied({name: self._tensors[name] for name in self._fragments.round_shapes(self.state.round)})
        start, residual = self.state.weights, self._residual
        delta = {name: start[name] - array + residual.get(name, 0) for name, array in local.items()}
        data = encode(delta, self._settings.codec)
        self._offered = lost(delta, data, self._settings.codec)
        self._store.publish(self.state, data)

    def collect(self) -> Round:
        """Wait until the round is settled, and load its result. Raises `Stopped`."""
        if not self._wait(lambda: self._store.poll_round(self.state.round)):
            return self._catch_up()
        self._residual |= self._offered  # only now: an offer that does not count leaves the residual as it was
        about = self._fragments.round_shapes(self.state.round)
        result = self._advance(took_part=True)
        self._steps = 0
        # The other fragments keep this replica's inner steps, until their own round; the last round ends all of them.
        news = self.state.weights if self.finished else {name: self.state.weights[name] for name in about}
        arrays.put(news, self._tensors)
        return result

    def _catch_up(self) -> Round:
        """Load the result of rounds that other replicas settled; this replica's steps since its last round are lost."""
        while not self.finished and self._store.poll_round(self.state.round) is not None:
            self._advance(took_part=False)
        arrays.put(self.state.weights, self._tensors)
        self._steps = 0
        return self.history[-1]

    def _advance(self, took_part: bool) -> Round:
        """Take the outer step of the present round, or jump to the newest state when the round was deleted."""
        before, settings = self.state, self._settings
        try:
            reduced = self._wait(lambda: self._store.reduce(before.round))
        except RoundDeleted:
            self.state = self._store.latest(before)
            result = Round(before.round, (), False, 0.0, ())
        else:
            if reduced.base != before.digest:
                raise InfrastructureError("diloco.weights-differ", round=before.round)
            # Every replica takes the outer step itself, from the same mean: no weights have to be sent.
            mean = decode(reduced.mean, self._fragments.round_shapes(before.round), OF_MEAN[settings.codec])
            weights, momentum = arrays.nesterov(
                before.weights,
                before.momentum,
                mean,
                learning_rate=settings.outer_learning_rate,
                decay=settings.outer_momentum,
            )
            self.state = GlobalState(before.round + 1, {**before.weights, **weights}, {**before.momentum, **momentum})
            result = Round(before.round, reduced.replicas, took_part, arrays.norm(mean), reduced.unreadable)
        if self.finished:
            self._store.latest(self.state)  # stores the result for replicas that are behind
        self.history.append(result)
        self._looked = time.monotonic()
        return result

    def _wait(self, ask: Callable[[], Any]) -> Any:
        """Return the first answer of `ask` that is not None."""
        pause, longest = PAUSES_S
        deadline = time.monotonic() + self._settings.timeout_s
        while (answer := ask()) is None:
            if self._stop():
                raise Stopped
            if time.monotonic() > deadline:
                raise InfrastructureError(
                    "diloco.too-few-replicas",
                    least=self._settings.least,
                    round=self.state.round,
                    timeout_s=self._settings.timeout_s,
                )
            time.sleep(pause)
            pause = min(1.5 * pause, longest)
        return answer
