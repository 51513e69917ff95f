"""A Ray cluster on this machine, whose nodes a test can kill."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
INSTALLED = find_spec("ray") is not None
MISSING = (
    "NOT TESTED: Ray is not installed, so no worker ran on a cluster. `./dev extra ray` installs it (220 MB); "
    "then `./dev test -m ray`."
)


def needs_ray(test: Any) -> Any:
    """Mark a test `ray`, and skip it where Ray is absent."""
    return pytest.mark.ray(pytest.mark.skipif(not INSTALLED, reason=MISSING)(test))


@contextmanager
def cluster() -> Iterator[Any]:
    """One whose head does no jobs, so that nodes can be killed while this process stays connected to the head."""
    import ray

    with _started(num_cpus=0) as made:
        ray.init(made.address, log_to_driver=False)
        yield made


@contextmanager
def served() -> Iterator[str]:
    """The address that Ray's own client knows a cluster of two cores by, which this process is no part of."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with _started(num_cpus=2, ray_client_server_port=port):
        yield f"ray://127.0.0.1:{port}"


@contextmanager
def alone() -> Iterator[str]:
    """The address of a cluster of two cores, which this process is no part of."""
    with _started(num_cpus=2) as made:
        yield made.address


@contextmanager
def _started(**head: int) -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    made = Cluster(initialize_head=True, head_node_args={**head, "include_dashboard": False})
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
