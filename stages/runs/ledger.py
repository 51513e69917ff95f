"""The money of a run: an append-only ledger in its folder, and a limit that holds over all attempts.

`ledger.jsonl` has one JSON object a line, amounts in USD:

    {"call":7,"reserved":0.0121,"model":"coder"}   at most this, written before the call; null where no price is known
    {"call":7,"settled":0.0034}                    what it cost
    {"call":7,"settled":0.0034,"claimed":0.001}    the same, where the server's own bill was lower
    {"call":7,"possibly":0.0121}                   it ended without a bill (a time-out): perhaps it has to be paid

A call without a second line was cut off with the process. It counts as possibly paid, like one that ended without a
bill, so that spent + possibly paid is never less than what a provider may ask for, and never above the limit.

Each line ends with the CRC-32 of what comes before it (`"crc32":...`), as a changed digit would be another amount.
A line that is damaged, has an unknown key, a key twice, or an amount that nobody
can pay stops the run, with its number; the rest of a line that a kill cut off is dropped, because what it announced was
not begun.
"""

import asyncio
import math
import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from threading import Lock
from typing import Any

import orjson

from composer_stages.errors import BadInput, Incomplete, UsageError
from composer_stages.runs import store
from composer_stages.runs.store import GroupCommit
from composer_stages.words import Sentence

NAME = "ledger.jsonl"
ROUNDING = 1e-9
"""The relative amount by which a bill may exceed its reservation, through the rounding of floats."""
ABOUT = ("model", "shard", "teacher")
"""Keys that describe a call."""


@dataclass(frozen=True)
class Reservation:
    """Money held for one call: its number in the ledger, and its upper bound, None where no price is known."""

    call: int
    usd: float | None
    line: dict[str, Any]


class OpenCalls:
    """The reservations of calls under way, in USD, and their exact sum; None is an unknown price.

    The sum does not depend on the order in which calls came. It is kept, not made: a thousand calls may be under way.
    """

    def __init__(self) -> None:
        self.usd = Fraction()
        self.unpriced = 0
        self._calls: dict[int, float | None] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, call: int) -> bool:
        return call in self._calls

    def add(self, call: int, usd: float | None) -> None:
        """Add a call; one that is held already stays as it is."""
        if call not in self._calls:
            self._calls[call] = usd
            self.usd += Fraction(usd or 0.0)
            self.unpriced += usd is None

    def remove(self, call: int) -> None:
        """Remove a call; `KeyError` for one that is not held."""
        usd = self._calls.pop(call)
        self.usd -= Fraction(usd or 0.0)
        self.unpriced -= usd is None


class Budget:
    """The money that a run has spent, may have spent and has reserved; `limit` bounds their sum, None for no bound.

    A call goes `room` (wait for money), `record` (durable, then launch), and `settle`. The sums change once the line is
    durable. Without a path nothing is kept. Safe for several threads; the coroutines share one event loop.
    """

    def __init__(self, limit: float | None = None, path: Path | None = None) -> None:
        if limit is not None and not (math.isfinite(limit) and limit >= 0):  # no comparison with NaN is ever true
            raise UsageError("runs.max-cost-invalid", limit=limit)
        self.limit, self.path = limit, path
        self.unpriced_limit = math.inf
        """What calls of unknown price may cost in all where there is no limit, as nobody has allowed more."""
        self.spent, self.possibly = 0.0, 0.0
        self.understated, self.understated_usd = 0, 0.0
        """Calls whose server billed less than they cost by our own count, and the difference."""
        self._open = OpenCalls()
        self._left: dict[int, dict[str, Any]] = {}  # reservations that earlier attempts left open
        self.calls, self.recorded = 0, 0
        """The highest number of a call in this and earlier attempts: given to a reservation, and made durable."""
        self._lock = Lock()
        self._changed: Future[None] = Future()
        self._durable = GroupCommit(self.write)
        if path is not None and path.exists():
            self._read(path)

    @property
    def reserved(self) -> float:
        """Return the sum of the reservations of calls under way."""
        return float(self._open.usd)

    @property
    def left(self) -> float:
        """Return the USD that are neither spent nor held; infinite without a limit."""
        return max((math.inf if self.limit is None else self.limit) - self.spent - self.possibly - self.reserved, 0.0)

    def hold(self, usd: float | None, **about: Any) -> Reservation | None:
        """Set money aside in memory; None when it fits only after others have settled, `Incomplete` when never."""
        with self._lock:
            # Under a limit, calls of unknown price run one at a time, so that at most one bill exceeds the limit.
            if self.limit is not None and usd is None and self._open.unpriced:
                return None
            committed = self.spent + self.possibly + self.reserved
            if self.limit is not None and (committed >= self.limit if usd is None else committed + usd > self.limit):
                if self._open:
                    return None  # a bill is usually below its upper bound, so that this call may fit later
                raise Incomplete(
                    "runs.budget-spent", limit=self.limit, spent=self.spent, possibly=self.possibly, bound=usd or 0.0
                )
            if usd is None and self.limit is None and self.spent >= self.unpriced_limit:
                raise Incomplete("runs.unpriced-limit-reached", limit=self.unpriced_limit, spent=self.spent)
            self.calls += 1
            self._open.add(self.calls, usd)
            return Reservation(self.calls, usd, {"call": self.calls, "reserved": usd, **about})

    def give_back(self, reservation: Reservation) -> None:
        """Release a reservation whose call is not launched and was not recorded."""
        with self._lock:
            self._open.remove(reservation.call)

    def take_up(self, **about: Any) -> Reservation | None:
        """Hold again what an earlier attempt left open for a call of this description; None where it left none.

        For work that continues after the process has ended (a shard) and is billed afterwards.
        """
        with self._lock:
            for call, line in self._left.items():
                if about.items() <= line.items():
                    del self._left[call]
                    self._open.add(call, line["reserved"])
                    # `_read` counted it as possibly paid. max(): the difference of two float sums may be below 0.
                    self.possibly = max(self.possibly - (line["reserved"] or 0.0), 0.0)
                    return Reservation(call, line["reserved"], line)
        return None

    def write(self, lines: Sequence[dict[str, Any]]) -> None:
        """Make lines durable, then count them."""
        for line in lines:
            if fault := _fault(line):  # counting it would make money from nothing
                raise ValueError(f"a ledger line that {fault}: {line}")
        if self.path is not None:
            store.make_folder(self.path.parent)
            store.append_lines(self.path, [store.checked(store.encode(line)) for line in lines])
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

    async def settle(self, reservation: Reservation, usd: float | None, claimed: float | None = None) -> None:
        """Replace a reservation by the bill; `Incomplete` when there is a limit and the bill exceeds the reservation.

        usd: None for a call that ended without a bill; its whole reservation then counts as possibly paid. claimed: the
        amount by the server's own bill, which is kept where it is lower.
        """
        if usd is None:
            await self._durable({"call": reservation.call, "possibly": reservation.usd})
            return
        lower = {} if claimed is None or claimed >= usd else {"claimed": max(claimed, 0.0)}
        await self._durable({"call": reservation.call, "settled": usd, **lower})
        if (error := self.exceeded(reservation, usd)) is not None:
            raise error

    def exceeded(self, reservation: Reservation, usd: float | None) -> Incomplete | None:
        """Return the error of a bill above its reservation, where there is a limit; None for other calls."""
        bound = reservation.usd
        if self.limit is None or bound is None or usd is None or usd <= bound * (1 + ROUNDING):
            return None
        return Incomplete("runs.bill-above-reservation", usd=usd, bound=bound)

    def add(self, budget: "Budget") -> None:
        """Add the sums of another ledger."""
        self.spent, self.possibly = self.spent + budget.spent, self.possibly + budget.possibly
        self.understated += budget.understated
        self.understated_usd += budget.understated_usd

    def _count(self, line: dict[str, Any]) -> None:
        """Add a line to the sums; a reservation of an earlier attempt is opened by its line."""
        call = line["call"]
        if "reserved" in line:
            self._open.add(call, line["reserved"])
            self.calls, self.recorded = max(self.calls, call), max(self.recorded, call)
            return
        if call in self._open:  # not of an earlier attempt
            self._open.remove(call)
        self.spent += line.get("settled") or 0.0
        self.possibly += line.get("possibly") or 0.0
        if "claimed" in line:
            self.understated += line.get("understated", 1)
            self.understated_usd += max(line["settled"] - line["claimed"], 0.0)

    def _read(self, path: Path) -> None:
        """Count an earlier attempt's lines; reservations that it left open are possibly paid."""
        lines, length, data = _lines(path)
        if length > len(data):
            store.append_lines(path, [b""])  # a kill came between a line and its line break
        else:
            os.truncate(path, length)
        for line in lines:
            self._count(line)
            if "reserved" in line:
                self._left[line["call"]] = line
            else:
                self._left.pop(line["call"], None)
        self.possibly += self.reserved
        self._open = OpenCalls()


def read(folder: Path) -> Budget | None:
    """Return the sums of the ledger of a run folder, which is not changed; None without a ledger."""
    path = folder / NAME
    if not path.exists():
        return None
    budget = Budget()
    for line in _lines(path)[0]:
        budget._count(line)
    budget.possibly += budget.reserved
    budget._open = OpenCalls()
    return budget


def totals(folder: Path) -> tuple[float, float] | None:
    """Return USD spent and possibly paid by the ledger of a run folder; None without a ledger."""
    budget = read(folder)
    return None if budget is None else (budget.spent, budget.possibly)


def damage(folder: Path) -> str | None:
    """Return which line of a run folder's ledger is damaged, and how; None for none."""
    try:
        read(folder)
    except BadInput as error:  # `Run.damage` names the folder, and says itself what to do
        return str(error).removeprefix(f"{folder}{os.sep}").partition(", so what was spent")[0]
    return None


def _lines(path: Path) -> tuple[list[dict[str, Any]], int, bytes]:
    """Return a ledger's lines, the bytes that they take with their line breaks, and the file's bytes.

    `BadInput` with the number of a line that is no line of a ledger. What a kill left of a last line is not counted.
    """
    data = path.read_bytes()
    *texts, tail = data.split(b"\n")
    length = len(data) - len(tail)
    # Without its line break a last line may be complete, or its line break was changed into another byte.
    if _is_object(tail):
        texts, length = [*texts, tail], len(data) + 1
    elif _is_object(tail[:-1]):
        raise _damaged(path, len(texts) + 1, Sentence("runs.no-line-break"))
    entries = []
    for number, text in enumerate(texts, 1):
        if not text:
            continue
        try:
            line = store.parse_json(text)
        except (ValueError, RecursionError) as error:
            raise _damaged(path, number, f"is malformed ({error})") from None
        if fault := _check_fault(text) or _fault(line):
            raise _damaged(path, number, fault)
        del line["crc32"]
        entries.append(line)
    return entries, length, data


def _is_object(text: bytes) -> bool:
    try:
        return isinstance(orjson.loads(text), dict)
    except ValueError:
        return False


def _damaged(path: Path, number: int, fault: str) -> BadInput:
    return BadInput("runs.ledger-line-damaged", path=path, number=number, fault=fault)


def _check_fault(text: bytes) -> str | None:
    """Return what is wrong with the check value of a line as it was read, None for nothing."""
    try:
        store.unchecked(text)
    except ValueError as error:
        return str(error)
    return None


def _fault(line: dict[str, Any]) -> str | None:
    """Return what is wrong with a line, None for nothing."""
    kinds = [name for name in ("reserved", "settled", "possibly") if name in line]
    if kinds not in (["reserved"], ["settled"], ["possibly"], ["settled", "possibly"]):
        return f"has {' and '.join(kinds) or 'none of reserved, settled and possibly'}"
    allowed = {"call", "crc32", *kinds, *(ABOUT if kinds == ["reserved"] else ())}
    allowed |= {"claimed", "understated"} if "settled" in kinds else set()
    if unknown := sorted(line.keys() - allowed):
        return Sentence("runs.unknown-key", unknown=unknown[0])
    if not _is_count(line.get("call")):
        return f"has the call {line.get('call')!r}"
    if "understated" in line and not _is_count(line["understated"]):
        return f"has understated {line['understated']!r}"
    for name in (*kinds, "claimed"):
        unknown_price = line.get(name) is None and name in ("reserved", "possibly")
        if name in line and not unknown_price and not _is_amount(line[name]):
            return Sentence("runs.no-amount", name=name, line=line[name])
    return None


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_amount(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0
