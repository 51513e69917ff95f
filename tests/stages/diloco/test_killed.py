"""Replicas in processes of their own: killed with -9 and started again, or slow, they end with the same bytes."""

import json
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from support.replicas import PROCESSES, main

from composer_stages.diloco.settings import Diloco
from composer_stages.runs.bucket import open_bucket

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROUNDS = 16


@pytest.fixture
def url(tmp_path: Path) -> str:
    open_bucket(f"file://{tmp_path}/run").write("run.json", b"{}")
    return f"file://{tmp_path}/run"


def started(url: str, number: int, chosen: Diloco, **script: Any) -> BaseProcess:
    process = PROCESSES.Process(target=main, args=(url, number, ROUNDS, script, chosen.model_dump_json()))
    process.start()
    return process


def ended(url: str, process: BaseProcess, number: int) -> tuple[str, list[int]]:
    """Digest of the weights, and the rounds that it took part in."""
    process.join(120)
    assert process.exitcode == 0
    digest, took_part = json.loads(open_bucket(url).read(f"end/{number}") or b"")
    return digest, took_part


def test_a_killed_and_a_slow_replica_end_with_the_same_bytes(url: str):
    """Replica 1 dies just after its offer of round 3 and is started again; replica 3 sleeps from round 2 to 5."""
    chosen = Diloco(replicas=4, inner_steps=5, quorum=2, grace_s=6.0, timeout_s=150)
    steady = {number: started(url, number, chosen, hold={9: "back"}) for number in (0, 2)}
    slow = started(url, 3, chosen, hold={2: "r/000005/commit.json", 9: "back"})
    killed = started(url, 1, chosen, die_in=3)
    killed.join(120)
    assert killed.exitcode == -9
    again = started(url, 1, chosen, say="back")
    ends = {number: ended(url, one, number) for number, one in {**steady, 1: again, 3: slow}.items()}
    assert len({digest for digest, _ in ends.values()}) == 1
    assert ends[0][1] == ends[2][1] == list(range(ROUNDS)), "the others held every round"
    assert set(range(10, ROUNDS)) <= set(ends[1][1]) and min(ends[1][1]) > 3
    assert not {2, 3, 4, 5} & set(ends[3][1]) and set(range(10, ROUNDS)) <= set(ends[3][1])
