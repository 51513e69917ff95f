"""The scan of a folder counts what is there."""

import os
import time
from dataclasses import replace
from pathlib import Path

from composer_stages.sandbox import Limits, View
from composer_stages.sandbox.bubblewrap import GUEST, LINKS, TESTBED, bwrap_command
from composer_stages.sandbox.guest.watchdog import INODE_BYTES, DiskQuota, scan, socket_bytes, unlinked_files
from composer_stages.sandbox.session import SupervisorSession
from composer_stages.sandbox.supervised import FIXED_ENV


def whole(folder: Path) -> int:
    return list(scan(str(folder), []))[-1]


def test_scan_counts_blocks_and_inodes_follows_no_link_and_counts_hard_links_once(tmp_path: Path) -> None:
    assert whole(tmp_path) == 0
    (tmp_path / "a").mkdir()
    (tmp_path / "a/file").write_bytes(b"x" * 100_000)
    blocks = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*"))
    assert whole(tmp_path) == blocks + 2 * INODE_BYTES
    (tmp_path / "up").symlink_to("/usr")
    os.link(tmp_path / "a/file", tmp_path / "again")
    assert whole(tmp_path) == blocks + 3 * INODE_BYTES


def test_a_folder_beyond_the_longest_path_is_reported(tmp_path: Path) -> None:
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(20):
        os.mkdir("d" * 250, dir_fd=here)
        here, above = os.open("d" * 250, os.O_RDONLY, dir_fd=here), here
        os.close(above)
    os.close(here)
    closed: list[str] = []
    list(scan(str(tmp_path), closed))
    assert len(closed) == 1


def test_deleted_open_files_are_found(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file:
        file.write(b"x" * 100_000)
        file.flush()
        assert os.fstat(file.fileno()).st_ino not in dict(unlinked_files(os.getpid(), []))
        (tmp_path / "file").unlink()
        assert dict(unlinked_files(os.getpid(), []))[os.fstat(file.fileno()).st_ino] >= 100_000


def test_a_folder_over_its_quota_may_shrink_but_not_grow(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"x" * 200_000)
    quota = DiskQuota(str(tmp_path), 100_000)
    quota.begin()
    assert not quota.end(broken=False)
    (tmp_path / "more").write_bytes(b"x")
    time.sleep(0.05)  # scans are rarer than they are long
    assert quota.end(broken=False)


def test_buffers_of_sockets_are_counted(tmp_path: Path) -> None:
    (tmp_path / "unix").write_text("Num\n0: 2 0 0 0001 03 7\n0: 2 0 0 0001 01 8\n")
    connected = socket_bytes(str(tmp_path))
    assert connected >= 2 * 65_536
    (tmp_path / "unix").write_text("Num\n0: 2 0 0 0002 01 7\n")
    assert socket_bytes(str(tmp_path)) == 10 * connected
    (tmp_path / "unix").unlink()
    (tmp_path / "tcp").write_text("sl\n0: 0100007F:1F90 0100007F:D2F0 01 00000010:00000100 00:0 0 0 0 0\n")
    assert socket_bytes(str(tmp_path)) == 0x110


def test_a_process_that_fills_sockets_is_ended_without_a_control_group(tmp_path: Path) -> None:
    limits = replace(Limits(), memory_mb=32)
    fill = "import socket, time\npairs = [socket.socketpair() for _ in range(100)]\ntime.sleep(20)"
    view, settings = View(), {"work": TESTBED, "env": FIXED_ENV, "counts_sockets": True}
    command = bwrap_command(tmp_path, limits, view, [str(LINKS / "python3"), "-sS", GUEST])
    session = SupervisorSession(command, FIXED_ENV, limits, settings)
    try:
        reply = session.ask({"kind": "command", "command": f"python3 -c '{fill}'".encode()}, 10.0)
        assert reply.killed_for == "memory"
    finally:
        session.close()
