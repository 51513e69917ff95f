"""Limits hold for all processes of a command together, and nothing of it is left afterwards."""

import subprocess
from pathlib import Path

import pytest

from composer_stages.sandbox import Limits, Sandbox, open_sandbox
from tests.stages.sandbox.conftest import PROGRAMS, count_processes, python

WRITE = "head -c 7M /dev/zero"


@pytest.mark.parametrize(
    "bomb",
    [
        ":(){ :|:& };:; sleep 60",
        "bomb(){ bomb|bomb& }; bomb; sleep 60",
        python("import os\nwhile True: os.fork()"),
        python(PROGRAMS["threads"]),
    ],
    ids=["a nameless function", "a function", "forks of Python", "threads"],
)
def test_a_fork_bomb_is_ended(box: Sandbox, bomb: str, mark: str) -> None:
    result = box.run(f"mark={mark}; {bomb}")
    assert (result.returncode, result.killed_for) == (137, "processes") and result.duration_s < 5
    assert count_processes(mark) == 0
    assert box.run("echo alive").output == "alive\n"


ONE_OF_SIX = "python3 -c 'x = b\"x\" * (90 << 20); import time; time.sleep(9)'"


@pytest.mark.parametrize(
    ("command", "ended"),
    [
        ("python3 -c 'x = bytearray(1 << 30)'", (1, None)),  # by a MemoryError
        # A table of 4 KiB for every 2 MiB that are looked into: a GiB in all, and hardly any resident memory.
        (python(PROGRAMS["page_tables"]), (137, "memory")),
        (f"for i in 1 2 3 4 5 6; do {ONE_OF_SIX} & done; wait", (137, "memory")),
        (python(PROGRAMS["shared_memory"]), (137, "memory")),
        (python(PROGRAMS["copy_on_write"]), (0, None)),  # what forks share counts once
    ],
    ids=["one process", "page tables", "several processes", "a shared mapping", "forks"],
)
def test_memory_of_all_processes_has_a_limit(box: Sandbox, command: str, ended: tuple[int, str | None]) -> None:
    result = box.run(command)
    assert (result.returncode, result.killed_for) == ended, result.output
    assert ("MemoryError" in result.output) == (ended[0] == 1)


def test_memory_behind_descriptors_is_refused(box: Sandbox) -> None:
    result = box.run("python3 -c 'import os; os.memfd_create(\"x\")'; ipcmk -M 1000000")
    assert "PermissionError" in result.output and "Operation not permitted" in result.output


@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm", "/home/agent"])
def test_private_memory_folders_have_a_size(box: Sandbox, folder: str) -> None:
    result = box.run(f"for i in $(seq 60); do {WRITE} > {folder}/$i || break; done; du -sm {folder}")
    assert "No space left" in result.output and int(result.output.split()[-2]) <= 128


def test_one_file_and_the_cpu_seconds_of_a_process_have_a_limit(work: Path) -> None:
    with open_sandbox("bubblewrap", work, limits=Limits(cpu_s=1, file_mb=8, disk_mb=4)) as sandbox:
        assert sandbox.run("while :; do :; done").returncode == 128 + 24  # SIGXCPU
        assert sandbox.run("head -c 100M /dev/zero > /tmp/big").returncode == 128 + 25  # SIGXFSZ
        assert sandbox.run("stat -c %s /tmp/big").output == f"{8 << 20}\n"
        assert sandbox.run("split -b 100 -a 6 <(head -c 5M /dev/zero)").killed_for == "disk", "also in small files"


@pytest.mark.parametrize(
    "command",
    [
        f"for i in $(seq 99); do {WRITE} > f$i; done; sleep 60",
        f"mkdir -p a/b; cd a/b; for i in $(seq 99); do {WRITE} > .f$i; done",
        f"mkdir -m 300 dark; for i in $(seq 99); do {WRITE} > dark/$i; done; sleep 60",
        f"python3 -c '{PROGRAMS['deleted_files']}'",
    ],
    ids=["large files", "hidden files", "a folder that cannot be listed", "deleted files"],
)
def test_disk_bomb_in_many_files(box: Sandbox, work: Path, command: str) -> None:
    result = box.run(command)
    assert (result.returncode, result.killed_for) == (137, "disk")
    subprocess.run(["chmod", "-R", "u+rwX", work], check=True)
    used = int(subprocess.run(["du", "-sm", work], capture_output=True, text=True).stdout.split()[0])
    assert used < 99 * 7 - 100  # stopped while it was writing


def test_an_over_full_folder_can_be_cleaned_up(box: Sandbox) -> None:
    assert box.run(f"for i in $(seq 9); do {WRITE} > f$i; done").killed_for == "disk"
    assert box.run("sleep 0.3; rm f*; sleep 0.2; ls").output == ""
    assert box.run(f"{WRITE} > f").killed_for is None


def test_endless_output_is_counted_not_kept(box: Sandbox) -> None:
    result = box.run("yes", wall_s=0.4)
    assert result.timed_out and result.output_bytes > 1 << 20 and len(result.output) <= 8192


@pytest.mark.parametrize("name", PROGRAMS["orphans"])
def test_orphans_end_with_the_time_out(either: Sandbox, name: str, mark: str) -> None:
    result = either.run(PROGRAMS["orphans"][name].replace("MARK", mark), wall_s=0.3)
    assert (result.returncode, result.timed_out) == (124, True)
    assert count_processes(mark) == 0
