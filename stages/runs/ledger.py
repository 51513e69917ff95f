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
"""The relative amount by which a bill may exceed its reservation, through the rounding of floats."""


@dataclass(frozen=True)
class Reservation:
    """Money held for one call: its number in the ledger, and its upper bound, None where no price is known."""

    call: int
    usd: float | None
    line: dict[str, Any]


class Budget:
    """The money that a run has spent, may have spent and has reserved; `limit` bounds their sum, None for no bound.

    A call goes `room` (wait for money), `record` (durable, then launch), and `settle`. The sums change once the line is
    durable. Without a path nothing is kept. Safe for several threads; the coroutines share one event loop.
    """

    def __init__(self, limit: float | None = None, path: Path | None = None) -> None:
        self.limit, self.path = limit, path
        self.spent, self.possibly = 0.0, 0.0
        self._open: dict[int, float | None] = {}
        self._left: dict[int, dict[str, Any]] = {}  # reservations that earlier attempts left open
        self.calls = 0  # recorded in this and earlier attempts
        self._lock = Lock()
        self._changed: Future[None] = Future()
        self._durable = GroupCommit(self.write)
        if path is not None and path.exists():
            self._read(path)

    @property
    def reserved(self) -> float:
        """Return the sum of the reservations of calls under way."""
        # fsum() is exact, so that the sum does not depend on the order in which calls came; list() takes a copy, as
        # another thread may add a call meanwhile.
        return math.fsum(usd or 0.0 for usd in list(self._open.values()))

    @property
    def left(self) -> float:
        """Return the USD that are neither spent nor held; infinite without a limit."""
        return max((math.inf if self.limit is None else self.limit) - self.spent - self.possibly - self.reserved, 0.0)

    def hold(self, usd: float | None, **about: Any) -> Reservation | None:
        """Set money aside in memory; None when it fits only after others have settled, `Incomplete` when never."""
        with self._lock:
            # Under a limit, calls of unknown price run one at a time, so that at most one bill exceeds the limit.
            if self.limit is not None and usd is None and None in self._open.values():
                return None
            taken = self.spent + self.possibly + self.reserved
            if self.limit is not None and (taken >= self.limit if usd is None else taken + usd > self.limit):
                if self._open:
                    return None  # a bill is usually below its upper bound, so that this call may fit later
                raise Incomplete(
                    f"The budget of {self.limit:g} USD is spent: {self.spent:.4f} paid, {self.possibly:.4f} possibly "
                    f"paid, and the next call may cost {usd or 0.0:.4f}. Finished work is saved. "
                    "Go on with --resume and a larger --max-cost."
                )
            self.calls += 1
            self._open[self.calls] = usd
            return Reservation(self.calls, usd, {"call": self.calls, "reserved": usd, **about})

    def take_up(self, **about: Any) -> Reservation | None:
        """Hold again what an earlier attempt left open for a call of this description; None where it left none.

        For work that continues after the process has ended (a batch at a provider, a shard) and is billed afterwards.
        """
        with self._lock:
            for call, line in self._left.items():
                if about.items() <= line.items():
                    del self._left[call]
                    self._open[call] = line["reserved"]
                    # `_read` counted it as possibly paid. max(): the difference of two float sums may be below 0.
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
        done.set_result(None)  # outside the lock: it runs callbacks

    async def room(self, usd: float | None, **about: Any) -> Reservation:
        """Wait until an upper bound fits into the limit, and hold it; `Incomplete` when it can never fit."""
        while True:
            changed = self._changed  # before `hold`: a call that settles in between must not be missed
            if (reservation := self.hold(usd, **about)) is not None:
                return reservation
            await asyncio.shield(asyncio.wrap_future(changed))  # shield: all waiters share this future

    async def record(self, reservation: Reservation) -> None:
        """Make a reservation durable; only then may its call be launched."""
        await self._durable(reservation.line)

    async def settle(self, reservation: Reservation, usd: float | None) -> None:
        """Replace a reservation by the bill; `Incomplete` when there is a limit and the bill exceeds the reservation.

        usd: None for a call that ended without a bill; its whole reservation then counts as possibly paid.
        """
        bound = reservation.usd
        if usd is None:
            await self._durable({"call": reservation.call, "possibly": bound})
            return
        await self._durable({"call": reservation.call, "settled": usd})
        if self.limit is not None and bound is not None and usd > bound * (1 + ROUNDING):
            raise Incomplete(
                f"A call was billed {usd:.6f} USD, more than the {bound:.6f} USD that were reserved for it, so the "
                "limit cannot be kept. Correct the prices of that model, then go on with --resume."
            )

    def _count(self, line: dict[str, Any]) -> None:
        """Add a line to the sums; a reservation of an earlier attempt is opened by its line."""
        call = line["call"]
        if "reserved" in line:
            self._open.setdefault(call, line["reserved"])
            self.calls = max(self.calls, call)
            return
        self._open.pop(call, None)
        self.spent += line.get("settled") or 0.0
        self.possibly += line.get("possibly") or 0.0

    def _read(self, path: Path) -> None:
        """Count an earlier attempt's lines; reservations that it left open are possibly paid."""
        # A torn last line is cut off: its writer did not return, so that no call was launched for it.
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
    """Return USD spent and possibly paid by the ledger of a run folder, which is only read; None without a ledger."""
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
