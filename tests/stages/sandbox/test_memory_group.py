"""The kernel's own limit of a sandbox's memory: what it stops, what is said of it, and where a group can be made."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from composer_stages.sandbox import Limits, View, memory_group, open_sandbox
from composer_stages.sandbox.bubblewrap import LINKS, bwrap_command
from composer_stages.sandbox.memory_group import HEADROOM_MB, MB, GroupParent, MemoryGroup, group_parents
from composer_stages.sandbox.session import SupervisorSession
from composer_stages.sandbox.supervised import FIXED_ENV, GUEST, TESTBED
from tests.stages.sandbox.conftest import LOW, PROGRAMS

HELD = "import sys; held = bytearray(int(sys.argv[1]) << 20); print('held')"


@pytest.fixture
def place() -> GroupParent:
    found = memory_group.find_group_parent()
    if found is None:
        pytest.skip("no control group of memory can be made here")
    return found


@pytest.fixture
def group(place: GroupParent) -> Iterator[MemoryGroup]:
    made = MemoryGroup(place, 128)
    yield made
    made.close()


def python(group: MemoryGroup, *words: str) -> int:
    """The exit status of a program that begins once it is in the group."""
    waits = f"import sys; sys.stdin.read(); {words[0]}"
    begun = subprocess.Popen(
        [sys.executable, "-c", waits, *words[1:]], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    group.enter(begun.pid)
    begun.communicate()
    return begun.returncode


def peak(group: MemoryGroup) -> int:
    name = "memory.max_usage_in_bytes" if group.version == 1 else "memory.peak"
    return int((group.folder / name).read_text())


def test_kernel_kills_processes_beyond_the_limit(group: MemoryGroup) -> None:
    assert python(group, HELD, "60") == 0 and group.killed() == 0
    assert python(group, HELD, "300") == -9 and group.killed() == 1
    # Hardly any resident memory, and no watchdog that could see it.
    assert python(group, PROGRAMS["page_tables"]) == -9 and group.killed() == 2
    assert peak(group) <= 128 * MB


def test_group_is_removed_with_its_sandbox(place: GroupParent, work: Path) -> None:
    before = set(place.folder.glob(f"composer-{os.getpid()}-*"))  # sandboxes of fixtures in the same process
    box = open_sandbox("bubblewrap", work, limits=LOW)
    (mine,) = set(place.folder.glob(f"composer-{os.getpid()}-*")) - before
    inside = (mine / "cgroup.procs").read_text().split()
    assert len(inside) == 1, "the supervisor, and not bwrap, which waits for it outside"
    limit = "memory.limit_in_bytes" if place.version == 1 else "memory.max"
    assert int((mine / limit).read_text()) == (LOW.memory_mb + HEADROOM_MB) * MB
    box.close()
    assert not mine.exists()


@contextmanager
def session_of(work: Path, limits: Limits, group: MemoryGroup | None) -> Iterator[SupervisorSession]:
    """A supervisor in bubblewrap, with a group or without."""
    with bwrap_command(work, limits, View()) as (argv, descriptors):
        command = nullcontext(([*argv, "--", str(LINKS / "python3"), "-sS", GUEST], descriptors))
        session = SupervisorSession(
            command, FIXED_ENV, limits, {"work": TESTBED, "env": FIXED_ENV, "counts_sockets": False}, group
        )
    try:
        yield session
    finally:
        session.close()


def test_kill_by_the_kernel_is_reported_as_memory(place: GroupParent, work: Path) -> None:
    """A limit of the kernel's below the watchdog's, so that it is certainly the first."""
    group = MemoryGroup(place, 128)
    with session_of(work, Limits(memory_mb=512), group) as session:
        reply = session.ask({"kind": "command", "command": f'python3 -c "{HELD}" 300'.encode()}, 10.0)
        assert (reply.returncode, reply.killed_for, reply.timed_out) == (137, "memory", False), reply
        reply = session.ask({"kind": "command", "command": b"echo here"}, 10.0)
        assert (reply.returncode, reply.killed_for, reply.output) == (0, None, b"here\n")
    assert not group.folder.exists()


SLEEPING = "python3 -c 'x = bytes(1) * (90 << 20); import time; time.sleep(9)'"
FILLED = (
    "for f in /tmp /dev/shm /home/agent; do for i in $(seq 20); do head -c 7M /dev/zero > $f/$i || break; done; done"
)


@pytest.mark.parametrize(
    "command",
    [f"for i in 1 2 3 4; do {SLEEPING} & done; wait", f"({FILLED}) 2> /dev/null; {SLEEPING}"],
    ids=["several processes", "private folders and a process"],
)
def test_supervisor_limits_memory_without_a_group(work: Path, command: str) -> None:
    with session_of(work, LOW, None) as session:
        reply = session.ask({"kind": "command", "command": command.encode()}, 8.0)
        assert (reply.returncode, reply.killed_for) == (137, "memory"), reply


def test_groups_of_dead_hosts_are_removed(place: GroupParent) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = place.folder / f"composer-{dead.pid}-0"
    left.mkdir()
    memory_group.find_group_parent.__wrapped__()
    assert not left.exists()


MACHINES = tomllib.loads(Path(__file__).with_name("machines.toml").read_text())


@pytest.mark.parametrize("name", MACHINES)
def test_group_parents_by_version(tmp_path: Path, name: str) -> None:
    machine = MACHINES[name]
    assert list(group_parents(tmp_path)) == [], "without control groups there is no place"
    groups = tmp_path / "sys/fs/cgroup"
    files = {groups / path: text for path, text in machine["files"].items()}
    for path, text in {tmp_path / "proc/self/cgroup": machine["cgroup"], **files}.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    parents = [[str(parent.folder.relative_to(groups)), parent.version] for parent in group_parents(tmp_path)]
    assert parents == machine["parents"]


def test_group_writes_the_files_of_version_2(tmp_path: Path) -> None:
    made = MemoryGroup(GroupParent(tmp_path, 2), 256)
    assert (made.folder / "memory.max").read_text() == str(256 * MB)
    assert (made.folder / "memory.swap.max").read_text() == "0"
    (made.folder / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 2\noom_kill 1\noom_group_kill 0\n")
    assert made.killed() == 1
    made.enter(7)
    assert (made.folder / "cgroup.procs").read_text() == "7"
