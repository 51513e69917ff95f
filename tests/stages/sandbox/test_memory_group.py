"""The kernel's own limit of a sandbox's memory: what it stops, what is said of it, and where a group can be made."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from stages.sandbox import Limits, View, memory_group, open_sandbox
from stages.sandbox.bubblewrap import LINKS, bwrap_command
from stages.sandbox.memory_group import HEADROOM_MB, MB, GroupParent, MemoryGroup, places
from stages.sandbox.session import SupervisorSession
from stages.sandbox.supervised import FIXED_ENV, GUEST, TESTBED
from tests.stages.sandbox.conftest import LOW
from tests.stages.sandbox.test_bombs import PAGE_TABLES

HELD = "import sys; held = bytearray(int(sys.argv[1]) << 20); print('held')"


@pytest.fixture
def place() -> GroupParent:
    found = memory_group.usable()
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


def test_the_kernel_ends_what_takes_more_than_the_group_may(group: MemoryGroup) -> None:
    assert python(group, HELD, "60") == 0 and group.killed() == 0
    assert python(group, HELD, "300") == -9 and group.killed() == 1
    assert peak(group) <= 128 * MB


def test_page_tables_count(group: MemoryGroup) -> None:
    """Hardly any resident memory, and no watchdog that could see it."""
    assert python(group, PAGE_TABLES) == -9 and group.killed() == 1
    assert peak(group) <= 128 * MB


def test_a_group_goes_with_its_sandbox_and_holds_all_of_it(place: GroupParent, work: Path) -> None:
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
        session = SupervisorSession(command, FIXED_ENV, limits, {"work": TESTBED, "env": FIXED_ENV}, group)
    try:
        yield session
    finally:
        session.close()


def test_what_the_kernel_ended_is_said_and_the_sandbox_goes_on(place: GroupParent, work: Path) -> None:
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
def test_without_a_group_the_supervisor_counts_processes_and_private_folders(work: Path, command: str) -> None:
    with session_of(work, LOW, None) as session:
        reply = session.ask({"kind": "command", "command": command.encode()}, 8.0)
        assert (reply.returncode, reply.killed_for) == (137, "memory"), reply


def test_a_group_of_a_host_that_was_killed_is_swept_away(place: GroupParent) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = place.folder / f"composer-{dead.pid}-0"
    left.mkdir()
    memory_group.usable.__wrapped__()
    assert not left.exists()


def machine(root: Path, own: str, **files: str) -> Path:
    """A root whose proc and sys say this; `files` are below sys/fs/cgroup, `__` for a slash."""
    named = {"proc/self/cgroup": own} | {f"sys/fs/cgroup/{k.replace('__', '/')}": v for k, v in files.items()}
    for name, text in named.items():
        path = root / name.replace("_procs", ".procs").replace("_control", ".subtree_control").replace("_max", ".max")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def found(root: Path) -> list[tuple[str, int]]:
    return [(str(place.folder.relative_to(root / "sys/fs/cgroup")), place.version) for place in places(root)]


def test_version_1_is_below_the_own_group(tmp_path: Path) -> None:
    root = machine(tmp_path, "9:name=systemd:/\n4:cpu,memory:/job/7\n0::/\n", memory__job__7__cgroup_procs="1\n")
    assert found(root) == [("memory/job/7", 1)]


def test_version_1_in_a_container_is_what_is_mounted(tmp_path: Path) -> None:
    assert found(machine(tmp_path, "4:memory:/docker/abc\n", memory__cgroup_procs="1\n")) == [("memory", 1)]


def test_version_2_is_the_nearest_group_that_deals_memory_out(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        "0::/user/app/run.scope\n",
        cgroup_control="cpu memory\n",
        user__cgroup_control="memory pids\n",
        user__app__cgroup_control="memory\n",
    )
    (root / "sys/fs/cgroup/user/app/run.scope").mkdir()
    (root / "sys/fs/cgroup/user/app/run.scope/cgroup.subtree_control").write_text("\n")
    (root / "sys/fs/cgroup/user/app/run.scope/memory.max").write_text("max\n")
    assert found(root) == [("user/app", 2), ("user", 2), (".", 2)]


def test_version_2_never_leaves_a_limit(tmp_path: Path) -> None:
    """Of a batch system, say, whose job would take more than it was given."""
    root = machine(tmp_path, "0::/slurm/job\n", slurm__job__memory_max="8589934592\n", slurm__cgroup_control="memory\n")
    assert found(root) == []


def test_without_control_groups_there_is_no_place(tmp_path: Path) -> None:
    assert found(tmp_path) == [] and found(machine(tmp_path, "0::/\n", cgroup_control="cpu\n")) == []


def test_version_2_is_told_by_its_own_files(tmp_path: Path) -> None:
    made = MemoryGroup(GroupParent(tmp_path, 2), 256)
    assert (made.folder / "memory.max").read_text() == str(256 * MB)
    assert (made.folder / "memory.swap.max").read_text() == "0"
    (made.folder / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 2\noom_kill 1\noom_group_kill 0\n")
    assert made.killed() == 1
    made.enter(7)
    assert (made.folder / "cgroup.procs").read_text() == "7"
