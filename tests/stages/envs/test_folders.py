"""Folders that hold anything: however deep, long, large or closed they are, they are copied, read and deleted."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from composer_stages.envs import folders
from composer_stages.envs.folders import DEEPEST, UnwieldyTree, remove
from composer_stages.envs.repo import trees

NOBODY = 65534


def nest(root: Path, name: str, depth: int) -> None:
    """Folders within folders, deeper than any path can name."""
    here = os.open(root, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("file", os.O_CREAT, dir_fd=here))
    os.close(here)


@pytest.mark.parametrize(("name", "depth"), [("d", 1500), ("d" * 250, 40), ("d" * 250, 1200)])
def test_a_tree_too_deep_to_read_is_refused_and_removed(name: str, depth: int, tmp_path: Path) -> None:
    left = tmp_path / "left"
    left.mkdir()
    nest(left, name, depth)
    for read in (
        lambda: list(trees.walk(left)),
        lambda: trees.irregular_paths(left),
        lambda: trees.changes(tmp_path, left),
    ):
        with pytest.raises(UnwieldyTree, match=r"deep|longer"):
            read()
    (tmp_path / "copy").mkdir()
    with pytest.raises(UnwieldyTree):
        folders.copy(left, tmp_path / "copy")
    remove(left)
    assert not left.exists()


def test_the_deepest_tree_is_read_and_copied(tmp_path: Path) -> None:
    for name in ("left", "copy"):
        (tmp_path / name).mkdir()
    nest(tmp_path / "left", "d", DEEPEST - 1)
    folders.copy(tmp_path / "left", tmp_path / "copy")
    assert list(trees.walk(tmp_path / "copy")) == ["d/" * (DEEPEST - 1) + "file"]


def test_what_lies_in_the_way_goes_and_no_link_is_written_through(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder in (root / "test.py" / "deep", root / "pkg", outside):
        folder.mkdir(parents=True)
    (root / "pkg" / "a.py").write_text("x")
    (root / "tests").symlink_to(outside)
    (root / "file").write_text("x")
    new = trees.TreeFile(b"new")
    trees.apply({"pkg": new, "pkg/a.py": None, "test.py": new, "tests/t.py": new, "file/t.py": new}, root)
    assert {path: trees.read(root, path) for path in trees.walk(root)} == dict.fromkeys(
        ["pkg", "test.py", "file/t.py", "tests/t.py"], new
    )
    assert list(outside.iterdir()) == []
    (root / "link").symlink_to(outside)
    (outside / "kept").write_text("x")
    trees.apply({"link/kept": None}, root)
    assert (outside / "kept").exists() and trees.read(root, "link/kept") is None


def test_holes_stay_holes_and_count_as_what_they_would_be(tmp_path: Path) -> None:
    for name in ("left", "copy", "other"):
        (tmp_path / name).mkdir()
    for number in range(20):
        with open(tmp_path / "left" / str(number), "wb") as file:
            file.truncate(64 << 20)
            file.seek(32 << 20)
            file.write(b"data")
    folders.copy(tmp_path / "left", tmp_path / "copy")
    copied = [path.stat() for path in (tmp_path / "copy").iterdir()]
    assert {status.st_size for status in copied} == {64 << 20} and sum(one.st_blocks for one in copied) * 512 < 1 << 20
    assert (tmp_path / "copy" / "7").read_bytes() == (tmp_path / "left" / "7").read_bytes()
    with pytest.raises(UnwieldyTree, match="1280 MiB"):
        trees.changes(tmp_path / "other", tmp_path / "left")
    with pytest.raises(UnwieldyTree, match="1280 MiB"):
        folders.copy(tmp_path / "left", tmp_path / "other", most_bytes=1 << 30)
    assert list((tmp_path / "other").iterdir()) == []


def test_files_links_and_modes_are_copied(tmp_path: Path) -> None:
    left, copy = tmp_path / "left", tmp_path / "copy"
    (left / "sub").mkdir(parents=True)
    copy.mkdir()
    (left / "run").write_bytes(b"x" * 3_000_000)
    (left / "run").chmod(0o4755)
    (left / "empty").touch()
    (left / "sub" / "link").symlink_to("/etc/passwd")
    os.mkfifo(left / "pipe")
    (left / "sub").chmod(0o500)
    folders.copy(left, copy, lambda path, is_folder: path == "empty" and not is_folder)
    assert sorted(path.name for path in copy.rglob("*")) == ["link", "run", "sub"]
    assert os.readlink(copy / "sub" / "link") == "/etc/passwd"
    assert (copy / "run").read_bytes() == (left / "run").read_bytes()
    assert [path.stat().st_mode & 0o7777 for path in (copy / "run", copy / "sub")] == [0o755, 0o500]


def as_nobody(action: Callable[[], None]) -> int:
    """The exit status of a process of an ordinary user that carries out an action."""
    pid = os.fork()
    if pid == 0:
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            action()
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_an_ordinary_user_reads_copies_and_removes_what_was_closed(tmp_path: Path) -> None:
    for folder in [tmp_path, *tmp_path.parents]:
        if folder.stat().st_uid == os.getuid() and str(folder) not in ("/", "/tmp"):
            folder.chmod(0o777)

    def act() -> None:
        left, copy = tmp_path / "left", tmp_path / "copy"
        for folder in (left / "closed" / "inner", left / "no_search", left / "open", copy):
            folder.mkdir(parents=True)
        for path in ("closed/inner/a", "no_search/b", "open/c", "open/unreadable"):
            (left / path).write_text("x")
        (left / "open" / "unreadable").chmod(0)
        (left / "no_search").chmod(0o400)
        (left / "closed").chmod(0)
        left.chmod(0)
        assert set(trees.walk(left)) == {"open/c", "open/unreadable"}
        assert set(trees.changes(copy, left)) == {"open/c", "closed", "no_search"}
        left.chmod(0)
        folders.copy(left, copy)
        trees.apply({"closed/t.py": trees.TreeFile(b"x")}, copy)
        assert set(trees.walk(copy)) == {"open/c", "closed/t.py"}
        for folder in (left, copy):
            folder.chmod(0)
            remove(folder)
            assert not folder.exists()

    assert as_nobody(act) == 0
