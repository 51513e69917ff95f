"""Rounds over torchft's own lighthouse, replicas in processes of their own, one of them killed and started again."""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.replicas import PROCESSES, over_lighthouse

from stages.diloco.settings import Diloco
from stages.errors import UsageError

needs_torchft = pytest.mark.skipif(find_spec("torchft") is None, reason="torchft is not installed: pip install torchft")
ROUNDS = 14


@pytest.fixture
def lighthouse() -> Iterator[str]:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer("[::]:0", 2, join_timeout_ms=3000, quorum_tick_ms=50, heartbeat_timeout_ms=1500)
    yield f"lighthouse://localhost:{server.address().rpartition(':')[2]}"
    server.shutdown()


def started(url: str, folder: Path, number: int, chosen: Diloco, **script: Any) -> Any:
    told = (url, str(folder / f"{number}.json"), number, ROUNDS, script, chosen.model_dump_json())
    process = PROCESSES.Process(target=over_lighthouse, args=told)
    process.start()
    return process


@needs_torchft
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_that_is_killed_comes_back_with_the_bytes_of_the_others(lighthouse: str, tmp_path: Path) -> None:
    """Replica 1 dies just after its offer of round 3, and is started again."""
    chosen = Diloco(replicas=3, inner_steps=5, quorum=2, grace_s=10, timeout_s=150)
    back = str(tmp_path / "back")
    steady = [started(lighthouse, tmp_path, number, chosen, hold={9: back}) for number in (0, 2)]
    killed = started(lighthouse, tmp_path, 1, chosen, die_in=3)
    killed.join(120)
    assert killed.exitcode == -9
    again = started(lighthouse, tmp_path, 1, chosen, say=back)
    for process in (*steady, again):
        process.join(150)
        assert process.exitcode == 0
    ends = [json.loads((tmp_path / f"{number}.json").read_text()) for number in range(3)]
    assert len({digest for digest, _ in ends}) == 1
    assert ends[0][1] == ends[2][1] == list(range(ROUNDS)), "the others held every round"
    assert set(range(10, ROUNDS)) <= set(ends[1][1]) and min(ends[1][1]) > 3


@pytest.mark.skipif(find_spec("torchft") is not None, reason="torchft is installed")
def test_without_torchft_the_way_out_is_named() -> None:
    from stages.diloco.arrays import Fragments
    from stages.diloco.lighthouse import Lighthouse

    with pytest.raises(UsageError, match="pip install torchft"):
        Lighthouse("lighthouse://localhost:1", Diloco(), 0, fragments=Fragments({}, 1), rounds=1)
