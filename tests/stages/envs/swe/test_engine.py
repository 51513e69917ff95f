"""Containers: the command lines, and the code around them with a program that stands in for an engine and runs here."""

import os
import stat
from pathlib import Path

import pytest

from composer_stages.envs.swe import engine
from composer_stages.envs.swe.engine import CondaContainer, image_name
from composer_stages.errors import InfrastructureError
from composer_stages.sandbox import Limits, containers
from composer_stages.sandbox.containers import Container

LIMITS = Limits(wall_s=5, memory_mb=512, processes=64, output_bytes=2048)
STAND_IN = """\
#!/bin/bash
# Understands as much of an engine's command line as is used here, and isolates nothing.
echo "$@" >> {log}
case "$1" in
  info) exit {info} ;;
  run) [[ "$*" == *missing-image* ]] && {{ echo "no such image" >&2; exit 125; }}; exit 0 ;;
  create) exit 0 ;;
  cp) mkdir -p "$3" && cp -r {image}/. "$3" ;;
  exec) shift
        while [ "$1" != timeout ] && [ "$1" != bash ]; do [ "$1" = --env ] && {{ export "$2"; shift; }}; shift; done
        [ "$*" = "bash -c kill -9 -1" ] && exit 0
        cd {work} && exec "$@" ;;
  rm) exit 0 ;;
esac
"""


def stand_in(folder: Path, info: int = 0, name: str = "docker") -> Path:
    """A program called docker; `work` below the folder stands for the mounted tree, `image` for the image's."""
    for part in ("work", "image"):
        (folder / part).mkdir(exist_ok=True)
    program = folder / name
    program.write_text(STAND_IN.format(log=folder / "log", info=info, image=folder / "image", work=folder / "work"))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def opened(folder: Path, image: str = "image", name: str = "docker") -> Container:
    program, plugin = str(stand_in(folder, name=name)), Path("/opt/plugin")
    return CondaContainer(program, image, folder / "work", LIMITS, (plugin,), {"GREETING": "hello"})


def test_a_container_has_no_network_no_capabilities_and_limits(tmp_path: Path) -> None:
    box = opened(tmp_path)
    line = (tmp_path / "log").read_text()
    for wanted in (
        *("--network none", "--cap-drop ALL", "--security-opt no-new-privileges"),
        *("--memory 512m --memory-swap 512m", "--pids-limit 64", f"--user {os.getuid()}:{os.getgid()}"),
        *(f"--volume {tmp_path}/work:/testbed", "--volume /opt/plugin:/opt/plugin:ro", f"--name {box.name}"),
    ):
        assert wanted in line
    assert "--privileged" not in line and "keep-id" not in line
    opened(tmp_path, name="podman")
    of_podman = (tmp_path / "log").read_text().splitlines()[-1]
    assert ("--userns keep-id" in of_podman) is (os.getuid() != 0), "podman refuses it as root"


def test_a_command_ends_in_time_inside_the_container(tmp_path: Path) -> None:
    with opened(tmp_path) as box:
        assert box.run("echo 'a b'; exit 3", 7.5, {"A": "1"}, user="nobody").output == "a b\n"
    given = f"exec --user nobody --env GREETING=hello --env A=1 --workdir /testbed {box.name} timeout -k 2 8 bash -c"
    assert given in (tmp_path / "log").read_text()


def test_the_official_image_or_the_rows_own() -> None:
    assert (
        image_name({"instance_id": "Django__django-11099"})
        == "docker.io/swebench/sweb.eval.x86_64.django_1776_django-11099:latest"
    )
    for column in ("image", "docker_image", "image_name"):
        assert image_name({"instance_id": "a__b-1", "image": None, column: "mine:1"}) == "mine:1"


def test_an_engine_that_does_not_answer_is_none(tmp_path: Path) -> None:
    containers.find_engine.cache_clear()
    assert containers.find_engine(str(tmp_path)) is None
    (tmp_path / "dead").mkdir()
    stand_in(tmp_path / "dead", info=1)
    assert containers.find_engine(str(tmp_path / "dead")) is None
    (tmp_path / "alive").mkdir()
    podman = stand_in(tmp_path / "alive", name="podman")
    assert containers.find_engine(f"{tmp_path}/alive:/usr/bin:/bin") == str(podman)
    containers.find_engine.cache_clear()


def test_commands_run_and_are_limited(tmp_path: Path) -> None:
    with opened(tmp_path) as sandbox:
        result = sandbox.run("echo $GREETING; pwd; exit 3")
        assert (result.output, result.returncode) == (f"hello\n{tmp_path}/work\n", 3)
        late = sandbox.run("echo before; sleep 9", wall_s=1.0)
        assert late.timed_out and late.returncode == 124 and late.output == "before\n"
        long = sandbox.run("seq 10000")
        assert long.output_bytes > 40_000 and len(long.output) < 2200 and "bytes left out" in long.output
    log = (tmp_path / "log").read_text()
    assert f"kill -9 -1\nrm --force {sandbox.name}" in log and log.count("kill -9 -1") == 3


def test_an_image_that_cannot_start_is_no_score(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match="docker run failed: no such image"):
        opened(tmp_path, "missing-image")


def test_the_tree_of_an_image_comes_without_history(tmp_path: Path) -> None:
    program = stand_in(tmp_path)
    for path in ("image/pkg/a.py", "image/.git/HEAD", "image/pkg/__pycache__/a.pyc"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("x")
    (tmp_path / "target").mkdir()
    engine.copy_testbed(str(program), "image", tmp_path / "target")
    assert [str(p.relative_to(tmp_path / "target")) for p in (tmp_path / "target").rglob("*") if p.is_file()] == [
        "pkg/a.py"
    ]
