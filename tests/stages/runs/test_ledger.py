"""The ledger: no order of calls, time-outs, crashes and resumes spends more than the limit, or forgets a cent."""

import asyncio
import itertools
import math
import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, Phase, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from composer_stages.errors import BadInput, Incomplete
from composer_stages.runs import store
from composer_stages.runs.ledger import NAME, Budget, OpenCalls, Reservation, totals
from composer_stages.runs.store import GroupCommit

MEMORY = Path("/dev/shm")
"""Thousands of fsyncs, which a disk would take an hour for."""
HISTORIES = 10_000
SOME = 100


def is_cut(line: bytes) -> bool:
    """Whether these bytes may be the beginning of a line: a whole JSON document is none that was ever written."""
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return True
    return False


class Ledger(RuleBasedStateMachine):
    """A run and its provider: what the provider will really ask for is known to this model alone."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
        self.billed = 0.0
        self.held: dict[int, Reservation] = {}  # held in memory, not launched
        self.launched: dict[int, tuple[Reservation, float]] = {}  # with what the provider bills in the end

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @initialize(limit=st.floats(0.0, 10.0))
    def start(self, limit: float) -> None:
        self.limit = limit
        self.budget = Budget(limit, self.folder / NAME)

    @rule(usd=st.floats(0.0, 6.0))
    def hold(self, usd: float) -> None:
        try:
            reservation = self.budget.hold(usd, teacher="t")
        except Incomplete:
            assert not self.held
            assert not self.launched
            return
        if reservation is not None:
            self.held[reservation.call] = reservation

    @precondition(lambda self: self.held)
    @rule(data=st.data(), share=st.floats(0.0, 1.0))
    def launch(self, data: st.DataObject, share: float) -> None:
        reservation = self.held.pop(data.draw(st.sampled_from(sorted(self.held))))
        self.budget.write([reservation.line])
        bill = (reservation.usd or 0.0) * share
        self.launched[reservation.call] = (reservation, bill)
        self.billed += bill

    @precondition(lambda self: self.launched)
    @rule(data=st.data(), answered=st.booleans())
    def end(self, data: st.DataObject, answered: bool) -> None:
        """An answer with its bill, or a time-out: the provider bills it all the same."""
        reservation, bill = self.launched.pop(data.draw(st.sampled_from(sorted(self.launched))))
        ending = {"settled": bill} if answered else {"possibly": reservation.usd}
        self.budget.write([{"call": reservation.call, **ending}])

    @rule(torn=st.binary(max_size=20).filter(is_cut), limit=st.floats(0.0, 10.0))
    def crash_and_resume(self, torn: bytes, limit: float) -> None:
        """The process dies, perhaps in the middle of a line; the next attempt may have a smaller or a larger limit."""
        with (self.folder / NAME).open("ab") as file:
            file.write(torn.replace(b"\n", b""))
        self.held, self.launched = {}, {}
        self.limit = max(self.limit, limit)  # a smaller one than was spent buys nothing more, as the next test shows
        self.budget = Budget(limit, self.folder / NAME)

    @invariant()
    def nothing_is_overspent_or_forgotten(self) -> None:
        if not hasattr(self, "budget"):
            return
        told = self.budget.spent + self.budget.possibly + self.budget.reserved
        assert told <= self.limit * (1 + 1e-9)
        assert self.billed <= told * (1 + 1e-9)
        kept = totals(self.folder) or (0.0, 0.0)
        assert sum(kept) == pytest.approx(told - sum(r.usd or 0.0 for r in self.held.values()))


def histories(number: int, machine: type[Ledger] = Ledger) -> None:
    size = settings(max_examples=number, stateful_step_count=12, deadline=None, database=None, derandomize=True)
    accepted = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    chosen = settings(size, phases=[Phase.generate], suppress_health_check=accepted)
    run_state_machine_as_test(machine, settings=chosen)


def test_no_history_overspends() -> None:
    histories(SOME)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_none_of_ten_thousand_histories_overspends() -> None:
    histories(HISTORIES)


def test_a_ledger_that_forgot_possibly_paid_calls_is_caught() -> None:
    """The model can fail: a budget that takes a time-out for free is found at once."""

    class Forgetful(Budget):
        def write(self, lines: Any) -> None:
            super().write([{**line, "possibly": 0.0} if "possibly" in line else line for line in lines])

    class Careless(Ledger):
        def start(self, limit: float) -> None:
            self.limit, self.budget = limit, Forgetful(limit, self.folder / NAME)

        start = initialize(limit=st.floats(0.0, 10.0))(start)

    with pytest.raises(AssertionError):
        histories(5 * SOME, Careless)


def test_a_smaller_limit_buys_nothing_more(tmp_path: Path) -> None:
    first = Budget(5.0, tmp_path / NAME)
    held = first.hold(3.0)
    assert held is not None
    first.write([held.line, {"call": held.call, "settled": 3.0}])
    with pytest.raises(Incomplete, match=r"budget of 2 USD is spent: 3\.0000 paid"):
        Budget(2.0, tmp_path / NAME).hold(0.0001)


def test_what_a_killed_process_left_open_is_possibly_paid(tmp_path: Path) -> None:
    first = Budget(5.0, tmp_path / NAME)
    one, two = first.hold(2.0), first.hold(1.0)
    assert one is not None
    assert two is not None
    first.write([one.line, two.line, {"call": two.call, "settled": 0.25}])
    again = Budget(5.0, tmp_path / NAME)
    assert (again.spent, again.possibly, again.reserved) == (0.25, 2.0, 0.0)
    assert totals(tmp_path) == (0.25, 2.0)
    assert again.hold(1.0).call == 3  # type: ignore[union-attr] - numbers go on, so that no call is settled twice


def test_a_bill_above_its_reservation_is_counted_and_stops(tmp_path: Path) -> None:
    async def one_call() -> None:
        reservation = await budget.room(0.1)
        await budget.record(reservation)
        await budget.settle(reservation, 0.3)

    budget = Budget(1.0, tmp_path / NAME)
    with pytest.raises(Incomplete, match=r"billed 0\.300000 USD, more than the 0\.100000 USD"):
        asyncio.run(one_call())
    assert budget.spent == Budget(1.0, tmp_path / NAME).spent == 0.3


def test_a_call_waits_for_money_that_others_hold() -> None:
    order: list[str] = []

    async def caller(name: str, budget: Budget) -> None:
        reservation = await budget.room(0.6)
        order.append(f"{name} launched")
        await asyncio.sleep(0.02)
        order.append(f"{name} settled")
        await budget.settle(reservation, 0.2)

    async def both() -> None:
        budget = Budget(1.0)
        await asyncio.gather(caller("one", budget), caller("two", budget))

    asyncio.run(both())
    assert order == ["one launched", "one settled", "two launched", "two settled"]


def test_a_malformed_line_is_named(tmp_path: Path) -> None:
    lines = [store.checked(b'{"call":1,"reserved":1.0}'), b"nonsense", store.checked(b'{"call":1,"settled":1.0}')]
    (tmp_path / NAME).write_bytes(b"\n".join([*lines, b""]))
    with pytest.raises(BadInput, match="line 2, is malformed"):
        Budget(1.0, tmp_path / NAME)


def test_a_key_that_occurs_twice_is_damage(tmp_path: Path) -> None:
    """A parser takes the later amount. A check value is easily computed anew: it finds damage, and no lie."""
    lines = [store.checked(b'{"call":2,"reserved":1.0}'), store.checked(b'{"call":1,"reserved":1.0,"reserved":0.0}')]
    (tmp_path / NAME).write_bytes(b"\n".join([*lines, b""]))
    for read in (lambda: Budget(1.0, tmp_path / NAME), lambda: totals(tmp_path)):
        with pytest.raises(BadInput, match=r"line 2, is malformed \(the key 'reserved' occurs twice\)"):
            read()


def test_lines_are_readable_without_the_program(tmp_path: Path) -> None:
    budget = Budget(None, tmp_path / NAME)
    held = budget.hold(0.5, teacher="coder")
    assert held is not None
    budget.write([held.line, {"call": held.call, "settled": 0.125}])
    lines = [orjson.loads(line) for line in (tmp_path / NAME).read_bytes().splitlines()]
    assert all(isinstance(line.pop("crc32"), int) for line in lines)
    assert lines == [{"call": 1, "reserved": 0.5, "teacher": "coder"}, {"call": 1, "settled": 0.125}]


def test_what_comes_during_a_write_goes_together_in_the_next() -> None:
    groups: list[list[int]] = []

    async def all_at_once() -> None:
        together = GroupCommit[int](groups.append)
        await asyncio.gather(*(together(i) for i in range(100)))

    asyncio.run(all_at_once())
    assert list(itertools.chain(*groups)) == list(range(100))
    assert len(groups) <= 3


def test_an_error_of_a_write_reaches_everyone_in_it() -> None:
    def full(items: list[int]) -> None:
        raise OSError(os.strerror(28))

    async def two() -> list[BaseException | None]:
        together = GroupCommit[int](full)
        return await asyncio.gather(together(1), together(2), return_exceptions=True)

    assert [type(error) for error in asyncio.run(two())] == [OSError, OSError]


def test_the_sum_of_open_calls_is_exact_in_any_order() -> None:
    """As fsum() of them, after thousands of calls, where a running sum of floats would be off."""
    draw, opened, held = random.Random(0), OpenCalls(), dict[int, float | None]()
    for call in range(3_000):
        usd = draw.choice([None, draw.random() * 10.0 ** draw.randint(-9, 3)])
        held[call] = usd
        opened.add(call, usd)
        opened.add(call, 5.0)
        if len(held) > 200:
            ended = draw.choice(list(held))
            del held[ended]
            opened.remove(ended)
            with pytest.raises(KeyError):
                opened.remove(ended)
        assert float(opened.usd) == math.fsum(usd or 0.0 for usd in held.values())
        assert len(opened) == len(held) and opened.unpriced == sum(usd is None for usd in held.values())


def test_what_an_attempt_left_open_is_held_again(tmp_path: Path) -> None:
    budget = Budget(10.0, tmp_path / NAME)
    for shard, usd in (("a", 4.0), ("b", 5.0)):
        held = budget.hold(usd, shard=shard)
        assert held is not None
        budget.write([held.line])
    again = Budget(10.0, tmp_path / NAME)
    assert (again.possibly, again.reserved) == (9.0, 0.0) and again.take_up(shard="c") is None
    taken = again.take_up(shard="a")
    assert taken is not None and (again.possibly, again.reserved) == (5.0, 4.0) and again.take_up(shard="a") is None
    again.write([{"call": taken.call, "settled": 1.0}])
    assert totals(tmp_path) == (1.0, 5.0)


def test_a_reservation_that_is_given_back_is_free_again() -> None:
    budget = Budget(1.0)
    held = budget.hold(0.6)
    assert held is not None and budget.hold(0.6) is None
    budget.give_back(held)
    assert budget.left == 1.0 and budget.hold(0.6) is not None


@pytest.mark.parametrize(("claimed", "understated"), [(None, 0.0), (0.5, 0.25), (0.75, 0.0), (1.0, 0.0), (-1.0, 0.75)])
def test_a_bill_of_the_server_is_kept_where_it_is_lower(
    tmp_path: Path, claimed: float | None, understated: float
) -> None:
    budget = Budget(None, tmp_path / NAME)

    async def one_call() -> None:
        reservation = await budget.room(1.0)
        await budget.record(reservation)
        await budget.settle(reservation, 0.75, claimed)

    asyncio.run(one_call())
    for sums in (budget, Budget(None, tmp_path / NAME)):
        assert (sums.spent, sums.understated, sums.understated_usd) == (0.75, int(understated > 0), understated)


def test_a_whole_file_is_read_as_it_is_and_a_last_line_gets_its_line_break(tmp_path: Path) -> None:
    path, line = tmp_path / NAME, store.checked(b'{"call":1,"reserved":1.0}')
    for left in (line + b"\n", line):
        path.write_bytes(left)
        assert Budget(None, path).possibly == 1.0 and path.read_bytes() == line + b"\n"
