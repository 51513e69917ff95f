"""Hostile rows: archives that lead out, explode or recurse; repositories with programs; tests that hang or flood."""

import gzip
import io
import json
import os
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stages.envs.bash import fenced
from stages.envs.repo import trees
from stages.envs.tasks.env import TasksEnv, fill
from stages.errors import BadInput

SUM = {"files": {}, "git": "", "commit": ""}


def unpacked(folder: Path, archive: Path) -> dict[str, str]:
    """The files of a task that starts from an archive."""
    target = folder / "target"
    target.mkdir()
    fill(target, {**SUM, "archive": archive.name, "folder": str(folder)})
    return {path: (target / path).read_text() for path in trees.walk(target)}


def tar(path: Path, *members: tuple[str, bytes | str], mode: str = "w:gz") -> Path:
    """An archive: bytes are a file's, a text is the target of a symbolic link."""
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                archive.addfile(info)
            else:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize("name", ["../out", "/tmp/out", "a/../../out", "d/" * 200 + "out"])
def test_no_member_leads_out(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match="cannot be unpacked"):
        unpacked(tmp_path, tar(tmp_path / "a.tar.gz", (name, b"x")))
    assert not (tmp_path / "out").exists() and not Path("/tmp/out").exists()
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(name, "x")
    (tmp_path / "target").rmdir()
    with pytest.raises(BadInput, match="cannot be unpacked"):
        unpacked(tmp_path, tmp_path / "a.zip")


def test_links_give_what_the_archive_holds_and_nothing_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    links = [("d/out", "/etc/passwd"), ("d/up", "../../secret"), ("d/self", "self"), ("d/b", "c"), ("d/c", "b")]
    found = unpacked(tmp_path, tar(tmp_path / "a.tar", ("d/a", b"1"), ("d/good", "a"), *links, mode="w"))
    assert found == {"a": "1", "good": "1"}


def test_no_file_is_written_through_a_link(tmp_path: Path) -> None:
    found = unpacked(tmp_path, tar(tmp_path / "a.tar", ("d/l", str(tmp_path)), ("d/l/evil", b"x"), mode="w"))
    assert found == {"l/evil": "x"} and not (tmp_path / "evil").exists()


def explode_zeros(path: Path) -> Path:
    return tar(path, ("a", b"\0" * 3_000_000))


def explode_links(path: Path) -> Path:
    return tar(path, ("a", b"1" * 300_000), *((f"l{n}", "a") for n in range(10)))


def explode_header(path: Path) -> Path:
    """A header that is as long as a file: it is read into memory."""
    info = tarfile.TarInfo("x" * 90)
    info.type, info.size = tarfile.XHDTYPE, 3_000_000
    with gzip.open(path, "wb") as file:
        file.write(info.tobuf(tarfile.USTAR_FORMAT) + b"\0" * 3_000_832)
    return path


def explode_zip(path: Path) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", "0" * 3_000_000)
    return path


EXPLODING: dict[str, Callable[[Path], Path]] = {
    "zeros.tar.gz": explode_zeros,
    "links.tar.gz": explode_links,
    "header.tar.gz": explode_header,
    "zeros.zip": explode_zip,
}


@pytest.mark.parametrize("name", EXPLODING)
def test_an_archive_that_explodes_is_refused_before_it_does(tmp_path: Path, name: str) -> None:
    archive, target = EXPLODING[name](tmp_path / name), tmp_path / "target"
    assert archive.stat().st_size < 30_000
    target.mkdir()
    with pytest.raises(BadInput, match=r"holds more than 1 MiB\. Give a smaller one"):
        trees.extract_archive(archive, target, trees.ArchiveLimits(num_bytes=1 << 20))
    assert sum(file.stat().st_size for file in target.rglob("*") if file.is_file()) <= 1 << 20


@pytest.mark.parametrize("content", [b"", "folder"])
def test_an_archive_of_countless_entries_is_refused(tmp_path: Path, content: bytes | str) -> None:
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        for number in range(80):
            info = tarfile.TarInfo(f"n{number}")
            info.type = tarfile.DIRTYPE if content else tarfile.REGTYPE
            archive.addfile(info)
    (target := tmp_path / "target").mkdir()
    with pytest.raises(BadInput, match="holds more than 50"):
        trees.extract_archive(tmp_path / "a.tar.gz", target, trees.ArchiveLimits(num_members=50))


def test_an_archive_in_an_archive_stays_one(tmp_path: Path) -> None:
    inner = tar(tmp_path / "inner.tar.gz", ("a", b"1")).read_bytes()
    target = tmp_path / "target"
    target.mkdir()
    tar(tmp_path / "a.tar.gz", ("d/inner.tar.gz", inner), ("d/b", b"2"))
    fill(target, {**SUM, "archive": "a.tar.gz", "folder": str(tmp_path)})
    assert (target / "inner.tar.gz").read_bytes() == inner


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"PK" + data[2:], lambda _: b""])
def test_a_damaged_archive_is_a_sentence(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    archive = tar(tmp_path / "a.tar.gz", ("a", os.urandom(5_000)))
    archive.write_bytes(damage(archive.read_bytes()))
    with pytest.raises(BadInput, match="cannot be unpacked"):
        unpacked(tmp_path, archive)


def test_no_program_of_a_repository_is_run(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.txt").write_text("1")
    (source / ".gitattributes").write_text("*.txt filter=evil\n")
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"]):
        subprocess.run(["git", *words], cwd=source, check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=source, check=True, capture_output=True, text=True).stdout
    for key in ("filter.evil.smudge", "core.fsmonitor", "core.pager", "tar.tar.command"):
        subprocess.run(["git", "config", key, f"touch {tmp_path}/ran; cat"], cwd=source, check=True)
    target = tmp_path / "target"
    target.mkdir()
    fill(target, {"files": {}, "archive": "", "git": "source", "commit": commit.strip(), "folder": str(tmp_path)})
    assert (target / "a.txt").read_text() == "1" and not (tmp_path / "ran").exists()


TESTS: dict[str, str] = {
    "floods the output": "yes | head -c 50000000; exit 0",
    "leaves processes that hold the output": "(sleep 300 &) ; sleep 300 & exit 1",
    "kills its supervisor": "kill -9 -1; kill -9 1; exit 1",
    "hangs and ignores signals": "trap '' TERM INT HUP; sleep 300",
    "fills the disk": "dd if=/dev/zero of=big bs=1M count=100000 status=none; exit 1",
}


@pytest.mark.parametrize("name", TESTS)
def test_a_hostile_test_ends_and_is_graded(tmp_path: Path, name: str) -> None:
    row: dict[str, Any] = {"id": "a", "prompt": "p", "test": TESTS[name], "timeout_s": 2.0, "split": "train"}
    (tmp_path / "my.jsonl").write_text(json.dumps(row) + "\n")
    env = TasksEnv(path=str(tmp_path / "my.jsonl"))
    try:
        env.reset(env.tasks("train", 1, 0)[0])
        env.step(fenced("submit"))
        grade = env.grade()
        # A flood is no failure; the others fail. None is an infrastructure failure, and nothing is left running.
        assert grade.reward == float(name == "floods the output"), grade
    finally:
        env.close()
