"""The process that forks those of chains and documents: forked itself from this one, where all is imported already."""

import os
import select
import socket
import sys
import time
from importlib import import_module
from multiprocessing import connection, forkserver

IMPORTED = (
    *("torch", "transformers", "datasets", "trl", "pyarrow.parquet", "duckdb", "openai", "scipy.stats"),
    "composer_stages.train",
)
"""What a process that it forks finds imported."""
STOP_S = 5.0


def start() -> None:
    """Let multiprocessing use a fork of this process, taken before it has threads of its own."""
    # What multiprocessing starts by itself would import torch and TRL again: 4 s in each process of pytest-xdist.
    address, listening = connection.arbitrary_address("AF_UNIX"), socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen()
    ended, alive = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(alive)
        _serve(listening, ended)
    listening.close()
    os.close(ended)
    server = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, alive, pid


def stop() -> None:
    """End that process, so that its processor time, and that of what it forked, counts for this one's children."""
    server = forkserver._forkserver  # type: ignore[attr-defined]
    os.close(server._forkserver_alive_fd)
    pid, server._forkserver_pid, server._forkserver_alive_fd = server._forkserver_pid, None, None
    ends = time.monotonic() + STOP_S
    while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < ends:  # what a test left may keep it alive
        time.sleep(0.05)


def _serve(listening: socket.socket, ended: int) -> None:
    """Fork whenever asked, until the other process ends; what the selected tests did not import, at the first time."""
    try:
        sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__  # pytest's capture them
        if ended not in select.select([listening, ended], [], [])[0]:
            for name in IMPORTED:
                import_module(name)
            forkserver.main(listening.detach(), ended, [])
    finally:
        os._exit(0)
