"""A real Ray cluster of three nodes on this machine: two of them are killed under the jobs."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.jobs import Nap, nap

from stages.backends.engine import TRIES
from stages.backends.ray_cluster import RayCluster
from stages.errors import InfrastructureError

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head that does no jobs, so that nodes can be killed while this process stays connected to it."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    paths = os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parents[3])])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = paths
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    ray.init(made.address, log_to_driver=False)
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def test_jobs_outlive_the_nodes_that_they_are_on(cluster: Any, tmp_path: Path) -> None:
    nodes = [cluster.add_node(num_cpus=2) for _ in range(3)]
    cluster.wait_for_nodes()
    engine = RayCluster()
    assert engine.workers == 6
    done = []
    for _, (number, _) in engine.map(nap, [Nap(number, tmp_path, 0.5) for number in range(24)]):
        done.append(number)
        if len(done) in (4, 10):
            cluster.remove_node(nodes.pop(), allow_graceful=False)
    assert sorted(done) == list(range(24))


def test_a_job_that_kills_every_worker_is_given_up(cluster: Any, tmp_path: Path) -> None:
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    with pytest.raises(InfrastructureError, match="lost a job for good"):
        list(RayCluster().map(nap, [Nap(0, tmp_path, deaths=99)]))
    assert (tmp_path / "0").read_text() == "x" * TRIES
