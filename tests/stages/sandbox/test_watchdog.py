"""The scan of a folder counts what is there."""

import os
import time
from pathlib import Path

from composer_stages.sandbox.guest.watchdog import INODE_BYTES, DiskQuota, scan, unlinked_files


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
