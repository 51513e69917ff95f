"""Workers, nodes and whoever started them are killed in the middle: the rows are those of a run that was left alone."""

import os
import signal
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from needs import needs
from support.command_line import PATHS, call, command, environment, settings
from support.ray_nodes import cluster
from support.server import Reply, Server, answer, serving

from composer_stages import collect
from composer_stages.runs import runner
from composer_stages.runs.run import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
AT_ONCE = 2
"""Rollouts of a worker."""
TASKS, ENV = 40, "support.environments:NumberedEnv"


def patient(body: dict[str, Any], earlier: int) -> Reply:
    """The same answer to the same question, after a while."""
    del earlier
    return Reply(body=answer("ab"[: 1 + len(str(body["messages"])) % 2]), delay_s=0.2)


def config(server: Server) -> collect.Config:
    policy = {"model": "scripted", "base_url": server.url, "max_tokens": 8, "temperature": 0.0}
    return collect.Config(env={"name": ENV}, policy=policy, in_flight={"rollouts": AT_ONCE}, tasks=TASKS, samples=1)


def content(run: Path) -> str:
    return Run(run).manifest.content


def asked_again(server: Server) -> int:
    """Questions beyond the first of their kind."""
    counts = Counter(str(body["messages"]) for body in server.requests)
    return counts.total() - len(counts)


@needs("ray")
def test_two_nodes_of_three_are_killed(tmp_path: Path) -> None:
    with serving(patient) as server:
        expected = content(runner.execute("collect", {}, config(server), root=tmp_path / "here").path)
        server.requests.clear()
        with cluster() as nodes:
            added = [nodes.add_node(num_cpus=2) for _ in range(3)]
            nodes.wait_for_nodes()

            def kill() -> None:
                for enough in (TASKS // 2, TASKS):
                    while len(server.requests) < enough:
                        time.sleep(0.01)
                    nodes.remove_node(added.pop(), allow_graceful=False)

            killer = threading.Thread(target=kill)
            killer.start()
            run = runner.execute("collect", {}, config(server), root=tmp_path / "there", on="ray").path
            killer.join()
        assert len(added) == 1
        assert content(run) == expected
        assert asked_again(server) <= 2 * 2 * AT_ONCE  # what two workers on each of two nodes had in flight


def test_workers_stop_when_their_driver_is_killed(tmp_path: Path) -> None:
    with serving(patient) as server:
        sizes = (f"tasks={TASKS}", "samples=1", f"in_flight.rollouts={AT_ONCE}")
        policy = (f"policy.base_url={server.url}", "policy.max_tokens=8", "policy.temperature=0.0")
        words = ["collect", "--env", ENV, "--policy", "scripted", *settings(*policy, *sizes)]
        paths = {"PYTHONPATH": PATHS}
        left, broken = tmp_path / "left", tmp_path / "broken"
        assert call(left, *words, **paths).returncode == 0
        server.requests.clear()
        process = subprocess.Popen(command(*words, "--on", "processes:2"), env=environment(broken, **paths))
        while len(server.requests) < TASKS:
            assert process.poll() is None
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        time.sleep(3)  # the workers notice, and end
        done = call(broken, *words, "--on", "processes:2", "--resume", **paths)
        assert done.returncode == 0, done.stderr
        (one,), (other,) = (list(root.glob("collect/2*")) for root in (left, broken))
        assert content(one) == content(other)
        assert asked_again(server) <= 2 * AT_ONCE
