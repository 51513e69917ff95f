"""Paid calls and kills at every 50th: only calls in flight are bought twice, and a limit outlives its process."""

import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from support.disturbances import WRITTEN, Work, contents, finish, folders, launch, open_calls, preload, said_of
from support.loopback import Handler, listening
from support.server import answer

from composer_stages import collect
from composer_stages.runs import ledger
from composer_stages.runs.run import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
EVERY, IN_FLIGHT = 50, 8
TASKS, SAMPLES, TURNS = 100, 5, 2
CALLS = TASKS * SAMPLES * TURNS
USD = 0.01
FAULTS = {429: 5, 503: 3, 500: 12, "cut": 6, "garbage": 4}
"""What happens to so many of a hundred calls instead of an answer. Of a call that was refused with 429 or 503 nothing
is billed; of the others all the work was done, and it is."""
IN_A_ROW = 3
"""Most faults in a row of one call, so that none fails for good."""


@dataclass
class Bill:
    """What a server has received, and what it asks for: calls that it answered well, and those that it billed."""

    url: str = ""
    faulty: bool = True
    received: int = 0
    answered: Counter[str] = field(default_factory=Counter)
    billed_faults: int = 0
    faults: int = 0
    in_a_row: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    due: threading.Event = field(default_factory=threading.Event)
    """Set at every 50th call."""

    @property
    def usd(self) -> float:
        """What has to be paid."""
        return USD * (self.answered.total() + self.billed_faults)

    def receive(self, key: str) -> Any:
        """Count a call; return its fault, None for an answer."""
        with self.lock:
            self.received += 1
            if self.received % EVERY == 0:
                self.due.set()
            fate = random.Random(f"{key} {self.received}").uniform(0, 100)
            for fault, share in FAULTS.items():
                fate -= share
                if self.faulty and fate < 0 and self.in_a_row[key] < IN_A_ROW:
                    self.in_a_row[key] += 1
                    self.faults += 1
                    self.billed_faults += fault not in (429, 503)
                    return fault
            self.answered[key] += 1
            return None


@contextmanager
def billing() -> Iterator[Bill]:
    """A server that answers most calls."""
    bill = Bill()

    class Asked(Handler):
        def post(self) -> None:
            body = json.loads(self.body())
            fault = bill.receive(json.dumps([body["messages"], body["seed"]]))
            threading.Event().wait(0.01)
            if fault == "cut":
                self.close_connection = True
                self.connection.close()
            elif fault == "garbage":
                self.send(200, b"{", {})
            elif fault is not None:
                self.send(fault, {"error": {"message": "not now"}}, {"Retry-After": "0.01"})
            else:
                self.send(200, answer(f"a{body['seed'] % 7}", cost=USD))

        def get(self) -> None:
            self.send(404, {})

    with listening(Asked) as url:
        bill.url = f"{url}/v1"
        yield bill


def work_for(bill: Bill) -> Work:
    prices = {"usd_per_mtok_in": 0.0, "usd_per_mtok_out": 2000.0}
    policy = {"model": "m", "base_url": bill.url, "max_tokens": 5, "concurrency": IN_FLIGHT, "max_attempts": 8}
    size = {"in_flight": {"rollouts": IN_FLIGHT}, "tasks": TASKS, "samples": SAMPLES}
    config = collect.Config(env={"name": "support.environments:NumberedEnv"}, policy={**policy, **prices}, **size)
    return Work("collect", config, (), IN_FLIGHT, max_cost=10 * USD * CALLS)


def test_a_thousand_paid_calls_are_paid_once(tmp_path: Path) -> None:
    preload("composer_stages.collect", "pyarrow.parquet", "openai")
    with billing() as bill:
        bill.faulty = False
        finish(work_for(bill), tmp_path / "whole")
        assert bill.answered.total() == len(bill.answered) == CALLS
        expected = contents(tmp_path / "whole")
        (bill.received, bill.faulty), root = (0, True), tmp_path / "killed"
        bill.answered.clear()
        kills = in_flight = 0
        while True:
            bill.due.clear()
            process = launch(work_for(bill), root)
            while not bill.due.wait(0.005) and process.is_alive():
                pass
            process.kill()
            process.join()
            if process.exitcode == 0:
                break
            assert process.exitcode == -9, (tmp_path / "killed.said").read_text()
            kills += 1
            in_flight = open_calls(root)
    assert contents(root) == expected
    twice = bill.answered.total() - len(bill.answered)
    spent, possibly = ledger.totals(folders(root)[0]) or (0.0, 0.0)
    manifest = Run(folders(root)[0]).manifest
    assert len(bill.answered) == CALLS and kills >= CALLS // EVERY
    assert 0.2 < bill.faults / bill.received < 0.4
    assert twice <= in_flight and twice <= kills * WRITTEN * IN_FLIGHT
    # Every answer is in the ledger with its price but for those in flight at a kill, which are possibly paid.
    assert USD * (bill.answered.total() - in_flight) - 1e-9 <= spent <= USD * bill.answered.total() + 1e-9
    assert bill.usd - 1e-9 <= spent + possibly <= USD * (bill.answered.total() + bill.billed_faults + in_flight) + 1e-9
    assert (manifest.cost_usd, manifest.possibly_usd) == pytest.approx((spent, possibly))
    print(
        f"{bill.received} calls, {bill.faults} faults, {kills} kills with {in_flight} calls in flight: {twice} bought "
        f"twice; the server bills {bill.usd:.2f} USD, the ledger has {spent:.2f} paid and {possibly:.2f} possibly paid"
    )


def test_a_limit_outlives_the_process(tmp_path: Path) -> None:
    """Killed twice and resumed under the same limit, a run pays no more than that, and says what it paid."""
    preload("composer_stages.collect", "pyarrow.parquet", "openai")
    limit, root = 2.4 * EVERY * USD, tmp_path / "killed"
    with billing() as bill:
        bill.faulty = False
        work = replace(work_for(bill), max_cost=limit)
        for _ in range(2):
            bill.due.clear()
            process = launch(work, root)
            assert bill.due.wait(120)
            process.kill()
            process.join()
            assert process.exitcode == -9 and Run(folders(root)[0]).manifest.status == "running"
        process = launch(work, root)
        process.join(120)
        assert process.exitcode == 3, said_of(root).read_text()
    found = Run(folders(root)[0]).manifest
    assert 2 * EVERY < bill.received <= 2.4 * EVERY and found.attempts == 3
    assert USD * bill.received - 1e-9 <= found.cost_usd + found.possibly_usd <= limit + 1e-9
