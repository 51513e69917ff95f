"""Batches under any order of answers, lost connections, kills and resumes: never above the limit, nothing made twice.

A kill is a process that stops at one of its durable writes, before or after it, and writes nothing from then on.
"""

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.batch_server import BatchServer, serving_batches
from support.server import Reply, answer

from stages.errors import Incomplete, UsageError
from stages.policy import Sample, background
from stages.policy.answers import AnswerCache
from stages.policy.endpoint import EndpointPolicy
from stages.runs.kinds import Row
from stages.runs.ledger import Budget, totals
from stages.runs.run import Interrupted, Manifest, RunWriter
from stages.teachers.batched import ask_batched
from stages.teachers.questions import DistinctState, TeacherConfig, TeacherQuestion

MEMORY = Path("/dev/shm")
"""Thousands of fsyncs, which a disk would take long for."""
PRICE = 0.5 * 2000 / 1e6
"""USD of an answer: a thousand tokens each way, at half of a USD a million."""
SOME, MANY = 10, 1_000
FAULTS = ("none", "lost", "expired", "rejected", "never", "refused")


class Killed(Exception):
    """The process is gone."""


class Life:
    """How many durable writes a process has left, and whether the last one still happens."""

    def __init__(self, writes: int | None, last_happens: bool) -> None:
        self.left, self.last_happens = writes, last_happens

    def write(self, effect: Callable[[], None]) -> None:
        if self.left is None:
            effect()
            return
        self.left -= 1
        if self.left > 0 or (self.left == 0 and self.last_happens):
            effect()
        if self.left <= 0:
            raise Killed


class MortalOut(RunWriter):
    """A run folder whose process may die."""

    life = Life(None, True)

    def write_all(self, units: Any) -> None:
        self.life.write(lambda: super(MortalOut, self).write_all(units))


class MortalBudget(Budget):
    """A ledger whose process may die."""

    life = Life(None, True)

    def write(self, lines: Sequence[dict[str, Any]]) -> None:
        self.life.write(lambda: super(MortalBudget, self).write(lines))


class ForgetfulBudget(MortalBudget):
    """One that keeps no reservations on disk."""

    def write(self, lines: Sequence[dict[str, Any]]) -> None:
        self.life.write(lambda: None)
        path, self.path = self.path, None
        Budget.write(self, lines)
        self.path = path
        Budget.write(Budget(None, path), [line for line in lines if "reserved" not in line])


class MortalCache(AnswerCache):
    """Paid answers whose keeper may die."""

    life = Life(None, True)

    def put_all(self, answers: Sequence[tuple[str, dict[str, Any]]]) -> None:
        self.life.write(lambda: super(MortalCache, self).put_all(answers))


def reply(body: dict[str, Any], number: int, fault: str) -> Reply | None:
    if fault == "expired" and number % 2:
        return None
    if fault == "rejected" and number % 2:
        return Reply(400, {"error": {"message": "too long"}})
    return Reply(body=answer(f"said {body['seed']}", 1000, 1000))


def question(teacher: TeacherConfig, number: int) -> TeacherQuestion:
    state = DistinctState(f"{number:064d}", "t", "r", number, 1)
    return TeacherQuestion(
        teacher, teacher.identity(), state, lambda s: [{"role": "user", "content": f"state {s.step}"}], 0, 0
    )


def unit(asked: TeacherQuestion, sample: Sample) -> tuple[str, Row, bool]:
    return asked.key, {"answer": {"error_type": sample.error_type}}, sample.error_type not in (None, "rejected")


class World:
    """A provider and a run folder; `attempt` is one process."""

    def __init__(self, server: BatchServer, budget: type[MortalBudget] = MortalBudget) -> None:
        self.server, self.budget = server, budget
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
        prices = {"usd_per_mtok_in": 1.0, "usd_per_mtok_out": 1.0}
        self.teacher = TeacherConfig(
            name="t", model="m", base_url=server.url, max_tokens=2000, batch_poll_s=0.01, max_attempts=2, **prices
        )
        self.limit = 0.0

    def attempt(self, num: int, limit: float, writes: int | None, last_happens: bool, fault: str) -> bool:
        """Ask `num` questions under a limit, with so many durable writes to live; whether it ended by itself."""
        life, self.limit = Life(writes, last_happens), max(self.limit, limit)
        self.server.reply = lambda body, number: reply(body, number, fault)
        self.server.status = {"expired": "expired", "refused": "failed"}.get(fault, "completed")
        self.server.looks = 10**9 if fault == "never" else 1
        self.server.lose_next_creation = fault == "lost"
        record = Manifest(composer="0", stage="test", stage_version=1, fingerprint="0")
        out = MortalOut(self.folder / "run", record, cache=self.folder)
        out.budget = self.budget(limit, out.path / "ledger.jsonl")
        policy = EndpointPolicy(self.teacher, budget=out.budget, cache=self.folder)
        policy.cache = MortalCache(self.folder / "answers.sqlite")
        for mortal in (out, out.budget, policy.cache):
            mortal.life = life  # type: ignore[attr-defined]

        def check() -> None:
            raise Interrupted

        try:
            asked = [question(self.teacher, number) for number in range(num)]
            background.run(ask_batched(asked, policy, out, check, unit))
        except (Killed, Interrupted, Incomplete, UsageError):
            return False
        finally:
            life.left = 0
        return all(out.finished(each.key) for each in asked)

    def hold(self) -> None:
        """What the provider may ask for is known to the ledger and within the limit; nothing was made twice."""
        told = sum(totals(self.folder / "run") or (0.0, 0.0))
        answered: Counter[str] = Counter()
        for batch in self.server.batches.values():
            if name := batch.get("output_file_id"):
                answered.update(
                    line.split('"custom_id": "')[1][:24] for line in self.server.files[name].decode().splitlines()
                )
            elif batch["status"] == "in_progress":
                answered.update(line["custom_id"] for line in self.server.requests(batch["id"]))
        assert PRICE * sum(answered.values()) <= told * (1 + 1e-9)
        assert told <= self.limit * (1 + 1e-9)
        assert max(answered.values(), default=1) == 1, "no answer is bought twice"
        keys = [batch["metadata"]["composer"] for batch in self.server.batches.values()]
        assert len(keys) == len(set(keys)), "no batch is made twice"


ATTEMPTS = st.lists(
    st.tuples(
        st.sampled_from((0.0, 0.003, 0.006, 0.02)),
        st.integers(1, 9),
        st.booleans(),
        st.sampled_from(FAULTS),
    ),
    min_size=1,
    max_size=5,
)


def histories(number: int, budget: type[MortalBudget] = MortalBudget) -> None:
    with serving_batches(BatchServer(lambda body, number: None)) as server:

        @settings(
            max_examples=number,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=[HealthCheck.too_slow],
        )
        @given(st.integers(1, 4), ATTEMPTS)
        def hold(num: int, attempts: list[tuple[float, int, bool, str]]) -> None:
            server.files, server.batches, server.looked = {}, {}, {}
            world = World(server, budget)
            try:
                for attempt in attempts:
                    world.attempt(num, *attempt)
                    world.hold()
                ended = False
                for _ in range(2):  # the first brings what was left open to its end, be it expired or refused
                    ended = ended or world.attempt(num, 1.0, None, True, "none")
                    world.hold()
                assert ended
            finally:
                shutil.rmtree(world.folder)

        hold()


def test_no_history_of_batches_overspends_or_buys_twice() -> None:
    histories(SOME)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_none_of_a_thousand_histories_of_batches_does() -> None:
    histories(MANY)


def test_a_ledger_without_reservations_is_caught() -> None:
    """The model can fail: what was made before a kill is then forgotten."""
    with pytest.raises(AssertionError):
        histories(SOME, ForgetfulBudget)
