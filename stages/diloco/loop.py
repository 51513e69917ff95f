"""One replica: inner steps counted, rounds taken part in, others caught up with.

    loop = OuterLoop(parameters, settings, transport, rounds)
    loop.start()
    while not loop.finished:
        ...one step of the inner optimiser...
        loop.after_step()

The inner optimiser's own state stays here and goes on over the rounds.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stages.diloco import arrays
from stages.diloco import arrays as outer
from stages.diloco.arrays import OF_MEAN, Arrays, Fragments, decode, encode, lost
from stages.diloco.settings import Diloco
from stages.diloco.transport import GlobalState, Reduced, RoundDeleted, Transport
from stages.errors import InfrastructureError

LOOK_S = 5.0
"""Seconds between looks at whether the others went on without this replica."""
PAUSES_S = (0.01, 2.0)
"""First and longest pause while waiting for others; each is half as long again as the one before."""


class Stopped(Exception):
    """Asked to stop while waiting for others."""


@dataclass(frozen=True)
class Round:
    """What came of a round. took_part: whether this replica's steps are in it; norm: of the mean pseudo-gradient."""

    round: int
    replicas: tuple[int, ...]
    took_part: bool
    norm: float
    unreadable: tuple[int, ...]


class OuterLoop:
    """Keeps `parameters` in step with the other replicas', each tensor once: those that are trained, no others."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        settings: Diloco,
        transport: Transport,
        rounds: int,
        *,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """rounds: in all. stop: asked while waiting for others."""
        self._tensors, self._settings, self._transport, self._stop = dict(parameters), settings, transport, stop
        self._rounds, self._fragments = rounds, Fragments(arrays.shapes(parameters), settings.fragments)
        weights = arrays.copied(parameters)
        self.state = GlobalState(0, weights, outer.zeros(weights))
        self._steps = 0
        """Inner steps since the last round."""
        self._residual: Arrays = {}
        """What the codec has lost so far, by name."""
        self._offered: Arrays = {}
        """What the residual becomes when the offer counts."""
        self._looked = time.monotonic()
        self.history: list[Round] = []

    @property
    def finished(self) -> bool:
        """Whether all rounds are done; the parameters are then the common result."""
        return self.state.round >= self._rounds

    def start(self, saved: Mapping[str, int] | None = None, residual: Arrays | None = None) -> Round | None:
        """Take over the newest common weights; if `saved` is from their round, this replica's own steps stay on top.

        Returns the round that was due when the replica was saved.
        """
        self.state = self._transport.latest(self.state)
        self._follow()
        self._residual = residual or {}
        if saved is None or saved["round"] != self.state.round or self.finished:
            arrays.put(self.state.weights, self._tensors)
            return None
        self._steps = saved["steps"]
        return self._meet()

    def saved(self) -> tuple[dict[str, int], Arrays]:
        """What `start` needs after a restart, beside the parameters: the place, and the codec's residual."""
        return {"round": self.state.round, "steps": self._steps}, self._residual

    def after_step(self) -> Round | None:
        """Count an inner step, and hold a round when it is due: what came of it. Raises `Stopped`."""
        self._steps += 1
        return self._meet()

    def _meet(self) -> Round | None:
        if self._steps >= self._settings.every:
            self.offer()
            return self.collect()
        if time.monotonic() - self._looked >= LOOK_S:
            self._looked = time.monotonic()
            if self._transport.commit(self.state.round) is not None:
                return self._catch_up()
        return None

    def offer(self) -> None:
        """Publish this replica's pseudo-gradient of the round's fragment, with what the codec lost earlier."""
        own = arrays.copied({name: self._tensors[name] for name in self._fragments.of(self.state.round)})
        gradient = outer.pseudo_gradient(self.state.weights, own)
        wanted = {name: array + self._residual.get(name, 0) for name, array in gradient.items()}
        data = encode(wanted, self._settings.codec)
        self._offered = lost(wanted, data, self._settings.codec)
        self._transport.publish(self.state, data)

    def collect(self) -> Round:
        """Wait until the round is settled, and take over what came of it. Raises `Stopped`."""
        if not self._wait(lambda: self._transport.commit(self.state.round)):
            return self._catch_up()
        self._residual |= self._offered
        about = self._fragments.of(self.state.round)
        held = self._advance(took_part=True)
        self._steps = 0
        news = self.state.weights if self.finished else {name: self.state.weights[name] for name in about}
        arrays.put(news, self._tensors)
        return held

    def _catch_up(self) -> Round:
        """Take over what the others did meanwhile; this replica's steps since the last round are lost."""
        self._follow()
        arrays.put(self.state.weights, self._tensors)
        self._steps = 0
        return self.history[-1]

    def _follow(self) -> None:
        while not self.finished and self._transport.commit(self.state.round) is not None:
            self._advance(took_part=False)

    def _advance(self, took_part: bool) -> Round:
        """The outer step of the present round, or a jump to the newest state where the round is gone."""
        place = self.state.round
        try:
            reduced = self._wait(lambda: self._transport.reduce(place))
        except RoundDeleted:
            self.state = self._transport.latest(self.state)
            held = Round(place, (), False, 0.0, ())
        else:
            held = self._step(reduced, took_part)
        if self.finished:
            self._transport.latest(self.state)
        self.history.append(held)
        self._looked = time.monotonic()
        return held

    def _step(self, reduced: Reduced, took_part: bool) -> Round:
        settings, before = self._settings, self.state
        if reduced.base != before.digest:
            raise InfrastructureError(
                f"The weights before round {before.round} are not those of the other replicas: this machine computes "
                "otherwise, or its memory is damaged. Leave it out."
            )
        mean = decode(reduced.mean, self._fragments.of(before.round), OF_MEAN[settings.codec])
        weights, momentum = outer.nesterov(
            before.weights,
            before.momentum,
            mean,
            learning_rate=settings.outer_learning_rate,
            decay=settings.outer_momentum,
        )
        self.state = GlobalState(before.round + 1, {**before.weights, **weights}, {**before.momentum, **momentum})
        return Round(before.round, reduced.replicas, took_part, outer.norm(mean), reduced.unreadable)

    def _wait(self, ask: Callable[[], Any]) -> Any:
        """What `ask` says once it is not None."""
        pause, longest = PAUSES_S
        deadline = time.monotonic() + self._settings.timeout_s
        while (said := ask()) is None:
            if self._stop():
                raise Stopped
            if time.monotonic() > deadline:
                raise InfrastructureError(
                    f"Fewer than {self._settings.least} replicas came to round {self.state.round} within "
                    f"{self._settings.timeout_s:g} s. Start more and --resume, or set diloco.quorum."
                )
            time.sleep(pause)
            pause = min(1.5 * pause, longest)
        return said
