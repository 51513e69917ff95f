"""The money of a run: an append-only ledger in its folder, and a limit that holds over all attempts.

`ledger.jsonl` has one JSON object a line, amounts in USD:

    {"call":7,"reserved":0.0121,"teacher":"coder"}   at most this, written before the call; null where no price is known
    {"call":7,"settled":0.0034}                      what it cost
    {"call":7,"possibly":0.0121}                     it ended without a bill (a time-out): perhaps it has to be paid

A call without a second line was cut off with the process. It counts as possibly paid, like one that ended without a
bill, so that spent + possibly paid is never less than what a provider may ask for, and never above the limit.
"""

import asyncio
import math
import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import orjson

from stages.errors import BadInput, Incomplete
from stages.runs import store
from stages.runs.store import GroupCommit

NAME = "ledger.jsonl"
ROUNDING = 1e-9
"""By how much, in relation, a bill may exceed its reservation through the rounding of floats."""


@dataclass(frozen=True)
class Reservation:
    """Money held for one call: its number in the ledger, and its upper bound, None where no price is known."""

    call: int
    usd: float | None
    line: dict[str, Any]


class Budget:
    """What a run has spent, may have spent and has reserved; `limit` bounds their sum, None for no bound.

    A call goes `room` (wait for money), `record` (durable, then launch), and `settle` or `mark_unconfirmed`. The sums
    change once the line is durable. Without a path nothing is kept. Safe for several threads; the coroutines share one
    event loop.
    """

    def __init__(self, limit: float | None = None, path: Path | None = None) -> None:
        self.limit, self.path = limit, path
        self.spent, self.possibly = 0.0, 0.0
        self._open: dict[int, float | None] = {}
        self._left: dict[int, dict[str, Any]] = {}  # reservations that earlier attempts left open
        self._calls = 0
        self._lock = Lock()
        self._changed: Future[None] = Future()
        self._durable = GroupCommit(self.write)
        if path is not None and path.exists():
            self._read(path)

    @property
    def reserved(self) -> float:
        """The sum of the reservations of calls under way."""
        return math.fsum(usd or 0.0 for usd in list(self._open.values()))

    @property
    def left(self) -> float:
        """What is neither spent nor held; infinite where there is no limit."""
        return max((math.inf if self.limit is None else self.limit) - self.spent - self.possibly - self.reserved, 0.0)

    @property
    def used(self) -> bool:
        """Whether any call was recorded, in this or an earlier attempt."""
        return self._calls > 0

    def hold(self, usd: float | None, **about: Any) -> Reservation | None:
        """Set money aside in memory; None when it fits only after others have settled, `Incomplete` when never.

        Under a limit, calls of unknown price go one after another: no more than one bill comes as a surprise.
        """
        with self._lock:
            if self.limit is not None and usd is None and None in self._open.values():
                return None
            taken = self.spent + self.possibly + self.reserved
            if self.limit is not None and (taken >= self.limit if usd is None else taken + usd > self.limit):
                if self._open:
                    return None
                raise Incomplete(
                    f"The budget of {self.limit:g} USD is spent: {self.spent:.4f} paid, {self.possibly:.4f} possibly "
                    f"paid, and the next call may cost {usd or 0.0:.4f}. Finished work is saved. "
                    "Go on with --resume and a larger --max-cost."
                )
            self._calls += 1
            self._open[self._calls] = usd
            return Reservation(self._calls, usd, {"call": self._calls, "reserved": usd, **about})

    def take_up(self, **about: Any) -> Reservation | None:
        """Hold again what an earlier attempt left open for a call of this description; None where it left none.

        For work that goes on at the provider while nobody waits (a batch), and is billed once it has ended.
        """
        with self._lock:
            for call, line in self._left.items():
                if about.items() <= line.items():
                    del self._left[call]
                    self._open[call] = line["reserved"]
                    self.possibly = max(self.possibly - (line["reserved"] or 0.0), 0.0)
                    return Reservation(call, line["reserved"], line)
        return None

    def write(self, lines: Sequence[dict[str, Any]]) -> None:
        """Make lines durable, then count them."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            store.append_lines(self.path, [store.encode(line) for line in lines])
        with self._lock:
            for line in lines:
                self._count(line)
            done, self._changed = self._changed, Future()
        done.set_result(None)

    async def room(self, usd: float | None, **about: Any) -> Reservation:
        """Wait until an upper bound fits beside what others hold, and hold it; `Incomplete` when it can never fit."""
        while True:
            changed = self._changed
            if (reservation := self.hold(usd, **about)) is not None:
                return reservation
            await asyncio.shield(asyncio.wrap_future(changed))

    async def record(self, reservation: Reservation) -> None:
        """Make a reservation durable; only then may its call be launched."""
        await self._durable(reservation.line)

    async def settle(self, reservation: Reservation, usd: float) -> None:
        """Replace a reservation by the bill. `Incomplete` when there is a limit and the bill is above what was held."""
        await self._durable({"call": reservation.call, "settled": usd})
        bound = reservation.usd
        if self.limit is not None and bound is not None and usd > bound * (1 + ROUNDING):
            raise Incomplete(
                f"A call was billed {usd:.6f} USD, more than the {bound:.6f} USD that were reserved for it, so the "
                "limit cannot be kept. Correct the prices of that model, then go on with --resume."
            )

    async def mark_unconfirmed(self, reservation: Reservation) -> None:
        """A call ended without a bill: its whole reservation counts as possibly paid."""
        await self._durable({"call": reservation.call, "possibly": reservation.usd})

    def _count(self, line: dict[str, Any]) -> None:
        """Add a line to the sums; a reservation of an earlier attempt is opened by its line."""
        call = line["call"]
        if "reserved" in line:
            self._open.setdefault(call, line["reserved"])
            self._calls = max(self._calls, call)
            return
        self._open.pop(call, None)
        self.spent += line.get("settled") or 0.0
        self.possibly += line.get("possibly") or 0.0

    def _read(self, path: Path) -> None:
        """Count an earlier attempt's lines; what it left open is possibly paid. A torn last line is cut off."""
        whole = path.read_bytes().rpartition(b"\n")[0]
        os.truncate(path, len(whole) + 1 if whole else 0)
        for line in _lines(path, whole):
            self._count(line)
            if "reserved" in line:
                self._left[line["call"]] = line
            else:
                self._left.pop(line["call"], None)
        self.possibly += self.reserved
        self._open.clear()


def totals(folder: Path) -> tuple[float, float] | None:
    """USD spent and possibly paid by the ledger of a run folder, which is only read; None where there is none."""
    path = folder / NAME
    if not path.exists():
        return None
    budget = Budget()
    for line in _lines(path, path.read_bytes().rpartition(b"\n")[0]):
        budget._count(line)
    return budget.spent, budget.possibly + budget.reserved


def _lines(path: Path, whole: bytes) -> list[dict[str, Any]]:
    try:
        return [orjson.loads(line) for line in whole.split(b"\n") if line]
    except ValueError as error:
        raise BadInput(
            f"{path} holds a malformed line ({error}), so what was spent is not known. Restore it, or start anew with "
            "--clean."
        ) from None
