"""Rollouts of SWE-bench in real containers: rootless podman, and an image that is built here from scratch."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from needs import needs
from support import container_image

from composer_stages.envs.repo import runner
from composer_stages.envs.swe import engine
from composer_stages.envs.swe.instances import check_out
from composer_stages.sandbox import Limits, containers
from tests.stages.envs.swe.test_env_containers import (  # noqa: F401 - it is played once more, with `image` below
    test_both_shapes_are_unresolved_without_the_fix_and_resolved_with_it,
)

pytestmark = [pytest.mark.slow, needs("podman")]


@pytest.fixture(scope="module")
def built(repos: Path, row: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The tag of an image: the base commit at /testbed, with history that nobody may see, and a Python with pytest."""
    context, tag = tmp_path_factory.mktemp("image"), f"localhost/composer-abacus:{os.getpid()}"
    container_image.fill(context / "root", runner.distribution_paths(runner.RUNNER))
    testbed = context / "root" / "testbed"
    (testbed / ".git").mkdir(parents=True)
    (testbed / ".git" / "answer").touch()
    check_out(repos / "acme__abacus.git", row["base_commit"], testbed)
    (context / "Containerfile").write_text(container_image.FILE)
    container_image.build(context, tag)
    yield tag
    subprocess.run(["podman", "rmi", "--force", tag], capture_output=True)


@pytest.fixture
def image(built: str, put_docker: Callable[..., Path]) -> str:
    """The image, with podman as the engine also where both are installed."""
    put_docker("#!/bin/sh\nexit 1\n")
    return built


def test_a_container_is_fenced_and_outlives_what_its_commands_leave_behind(image: str, tmp_path: Path) -> None:
    program = containers.find_engine() or ""
    with engine.CondaContainer(program, image, tmp_path, Limits(wall_s=20), (), {"SAID": "yes"}) as box:
        first = box.run("sleep 7654 & echo $SAID; id -u; touch mine; cat /proc/self/status; ls /sys/class/net")
        assert first.returncode == 0, first.output
        assert (
            first.output.split()[:2] == ["yes", str(os.getuid())] and (tmp_path / "mine").stat().st_uid == os.getuid()
        )
        assert "CapEff:\t0000000000000000" in first.output and "NoNewPrivs:\t1" in first.output
        assert first.output.splitlines()[-1] == "lo"
        processes = "for p in /proc/[0-9]*; do cat $p/cmdline; echo; done 2>/dev/null"
        second = box.run(processes)
        assert second.returncode == 0 and "7654" not in second.output, second.output
        started = time.monotonic()
        cut = box.run("sleep 60", wall_s=2)
        assert cut.timed_out and time.monotonic() - started < 15
        assert box.run("cat mine; touch /bin/new").returncode != 0  # the image belongs to another user
        assert box.run("echo still here").output == "still here\n"
    told = subprocess.run([program, "ps", "--all", "--quiet", "--filter", f"name={box.name}"], capture_output=True)
    assert told.stdout == b""
