"""A Ray cluster on this machine, whose nodes a test can kill."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
NO_JOB = (b"ray::IDLE", b"ray::DashboardAgent", b"ray::RuntimeEnvAgent")


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


def jobs() -> list[int]:
    """The ids of the processes that work on a job, on the nodes that this process has started."""
    found, waiting = list[int](), [os.getpid()]
    for process in waiting:
        with suppress(OSError):  # it has just ended
            for task in Path(f"/proc/{process}/task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
            # Ray names a worker by what it does.
            name = Path(f"/proc/{process}/cmdline").read_bytes()
            found += [process] if name.startswith(b"ray::") and not name.startswith(NO_JOB) else []
    return found


LEAN = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
"""Without processes that only people need. The others take 12 s of CPU to start with Ray 2.60."""
ON_A_LOADED_MACHINE = {
    "RAY_worker_niceness": "0",
    "RAY_agent_register_timeout_ms": "600000",
    "RAY_worker_register_timeout_seconds": "600",
}
"""Ray's workers run at a niceness of 15, so that beside other work they get next to nothing: at a load of 15 on two
cores they had 2 s of CPU in 5 minutes. Ray's own processes are late there, too, and a raylet that misses one of them
ends itself, and every job with it."""


@contextmanager
def _started(**head: int) -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            **ON_A_LOADED_MACHINE,
            "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
        }.items():
            patch.setenv(name, value)
        made = Cluster(initialize_head=True, head_node_args={**head, **LEAN})
        try:
            yield made
        finally:
            ray.shutdown()
            made.shutdown()
