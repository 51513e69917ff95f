"""A real Ray cluster of three nodes on this machine: two of them are killed under the jobs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.jobs import Nap, nap
from support.ray_nodes import cluster, served

from stages.backends.engine import TRIES, RayEngine, find_engine
from stages.errors import InfrastructureError

pytestmark = pytest.mark.slow


@pytest.fixture
def nodes() -> Iterator[Any]:
    with cluster() as made:
        yield made


def test_jobs_outlive_the_nodes_that_they_are_on(nodes: Any, tmp_path: Path) -> None:
    added = [nodes.add_node(num_cpus=2) for _ in range(3)]
    nodes.wait_for_nodes()
    engine = RayEngine()
    assert engine.workers == 6
    done = []
    for _, (number, _) in engine.map(nap, [Nap(number, tmp_path, 0.5) for number in range(24)]):
        done.append(number)
        if len(done) in (4, 10):
            nodes.remove_node(added.pop(), allow_graceful=False)
    assert sorted(done) == list(range(24))


def test_a_job_that_kills_every_worker_is_given_up(nodes: Any, tmp_path: Path) -> None:
    nodes.add_node(num_cpus=1)
    nodes.wait_for_nodes()
    with pytest.raises(InfrastructureError, match="lost a job for good"):
        list(RayEngine().map(nap, [Nap(0, tmp_path, deaths=99)]))
    assert (tmp_path / "0").read_text() == "x" * TRIES


def test_a_cluster_is_reached_through_rays_own_client(tmp_path: Path) -> None:
    with served() as address:
        engine = find_engine(address)
        assert engine.workers == 2
        jobs = [Nap(number, tmp_path, 0.2) for number in range(6)]
        assert sorted(number for _, (number, _) in engine.map(nap, jobs)) == list(range(6))
        with pytest.raises(InfrastructureError, match="lost a job for good"):
            list(engine.map(nap, [Nap(9, tmp_path, deaths=99)]))
    with pytest.raises(InfrastructureError, match=f"The Ray cluster {address} cannot be reached"):
        find_engine(address)
