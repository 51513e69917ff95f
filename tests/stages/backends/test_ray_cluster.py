"""A real Ray cluster of three nodes on this machine: two of them are killed under the jobs."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from needs import needs
from support.jobs import Nap, nap, place
from support.ray_nodes import alone, cluster, served

from composer_stages.backends.engine import TRIES, RayEngine, find_engine
from composer_stages.errors import InfrastructureError, UsageError

pytestmark = pytest.mark.slow


@pytest.fixture
def nodes() -> Iterator[Any]:
    with cluster() as made:
        yield made


@needs("ray")
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


@needs("ray")
def test_a_handler_of_signals_stays() -> None:
    """Ray's handler of SIGTERM ends the process, so that a run would not save what it has in hand."""
    before = signal.getsignal(signal.SIGTERM)
    with alone() as address:
        RayEngine(address)
        assert signal.getsignal(signal.SIGTERM) is before


@needs("ray")
def test_a_job_that_kills_every_worker_is_given_up(nodes: Any, tmp_path: Path) -> None:
    nodes.add_node(num_cpus=1)
    nodes.wait_for_nodes()
    with pytest.raises(InfrastructureError, match="lost a job for good"):
        list(RayEngine().map(nap, [Nap(0, tmp_path, deaths=99)]))
    assert (tmp_path / "0").read_text() == "x" * TRIES


@needs("ray")
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


@needs("ray")
def test_tasks_have_a_gpu_each_of_those_that_the_cluster_has(nodes: Any, tmp_path: Path) -> None:
    """Logical GPUs: Ray counts them and names them to its tasks, and asks no driver."""
    nodes.add_node(num_cpus=8, num_gpus=3)
    nodes.add_node(num_cpus=8, num_gpus=5)
    nodes.wait_for_nodes()
    engine = RayEngine(gpus=1)
    assert engine.workers == 8 and engine.device == "8 of Ray's GPUs"
    done = [where for _, where in engine.map(place, [Nap(number, tmp_path, 1.0) for number in range(16)])]
    assert {gpu for gpu, _, _ in done} == {"0", "1", "2", "3", "4"}
    most = max(sum(began <= at < ended for _, began, ended in done) for _, at, _ in done)
    assert most <= 8
    assert RayEngine(gpus=2).workers == 3, "a task is on one node, and an odd one is left over on each"
    with pytest.raises(UsageError, match="6 GPUs, and no node"):
        RayEngine(gpus=6)
    assert RayEngine().workers == 16


@needs("ray")
def test_a_cluster_without_gpus_is_used_by_core(nodes: Any) -> None:
    nodes.add_node(num_cpus=2)
    nodes.wait_for_nodes()
    engine = RayEngine(gpus=1)
    assert engine.workers == 2 and engine.device == "cpu"
