"""Hostile rows: archives that lead out, explode or recurse; repositories with programs; tests that hang or flood."""

import gzip
import os
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.archives import tar
from support.own_tasks import RowGrader
from support.sample_package import write

from composer_stages.envs.repo import trees
from composer_stages.envs.tasks.env import write_files
from composer_stages.errors import BadInput


def unpacked(folder: Path, archive: Path | None = None, **source: str) -> dict[str, bytes]:
    """The files of a task that starts from an archive or a repository of a folder."""
    (target := folder / "target").mkdir(exist_ok=True)
    write_files(
        target,
        {
            "files": {},
            "git": "",
            "commit": "",
            "archive": archive.name if archive else "",
            "folder": str(folder),
            **source,
        },
    )
    return {path: (target / path).read_bytes() for path in trees.walk(target)}


def zipped(path: Path, name: str, text: str) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, text)
    return path


@pytest.mark.parametrize("name", ["../out", "/tmp/out", "a/../../out", "d/" * 200 + "out"])
def test_no_member_leads_out(tmp_path: Path, name: str) -> None:
    for archive in (tar(tmp_path / "a.tar.gz", (name, b"x")), zipped(tmp_path / "a.zip", name, "x")):
        with pytest.raises(BadInput, match="cannot be unpacked"):
            unpacked(tmp_path, archive=archive)
    assert not (tmp_path / "out").exists() and not Path("/tmp/out").exists()


def test_links_give_what_the_archive_holds_and_nothing_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    links = [("d/out", "/etc/passwd"), ("d/up", "../../secret"), ("d/self", "self"), ("d/b", "c"), ("d/c", "b")]
    through = [("d/l", str(tmp_path)), ("d/l/evil", b"x")]
    inner = tar(tmp_path / "inner.tar.gz", ("a", b"1")).read_bytes()
    files = [("d/a", b"1"), ("d/good", "a"), ("d/inner.tar.gz", inner)]
    found = unpacked(tmp_path, archive=tar(tmp_path / "a.tar.gz", *files, *links, *through))
    assert found == {"a": b"1", "good": b"1", "l/evil": b"x", "inner.tar.gz": inner}, "an inner archive stays one"
    assert not (tmp_path / "evil").exists()


def long_header(path: Path) -> Path:
    """A header that is as long as a file: it is read into memory."""
    info = tarfile.TarInfo("x" * 90)
    info.type, info.size = tarfile.XHDTYPE, 3_000_000
    with gzip.open(path, "wb") as file:
        file.write(info.tobuf(tarfile.USTAR_FORMAT) + b"\0" * 3_000_832)
    return path


EXPLODING: dict[str, Callable[[Path], Path]] = {
    "zeros.tar.gz": lambda path: tar(path, ("a", bytes(3_000_000))),
    "links.tar.gz": lambda path: tar(path, ("a", b"1" * 300_000), *((f"l{n}", "a") for n in range(10))),
    "header.tar.gz": long_header,
    "zeros.zip": lambda path: zipped(path, "a", "0" * 3_000_000),
}


@pytest.mark.parametrize("name", EXPLODING)
def test_an_archive_that_explodes_is_refused_before_it_does(tmp_path: Path, name: str) -> None:
    archive = EXPLODING[name](tmp_path / name)
    assert archive.stat().st_size < 30_000
    (target := tmp_path / "target").mkdir()
    with pytest.raises(BadInput, match=r"holds more than 1 MiB\. Give a smaller one"):
        trees.extract_archive(archive, target, trees.ArchiveLimits(num_bytes=1 << 20))
    assert sum(file.stat().st_size for file in target.rglob("*") if file.is_file()) <= 1 << 20


@pytest.mark.parametrize("content", [b"", "/"], ids=["files", "folders"])
def test_an_archive_of_countless_entries_is_refused(tmp_path: Path, content: bytes | str) -> None:
    archive = tar(tmp_path / "a.tar.gz", *((f"n{number}", content) for number in range(80)))
    (target := tmp_path / "target").mkdir()
    with pytest.raises(BadInput, match="holds more than 50"):
        trees.extract_archive(archive, target, trees.ArchiveLimits(num_members=50))


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"PK" + data[2:], lambda _: b""])
def test_a_damaged_archive_is_a_sentence(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    archive = tar(tmp_path / "a.tar.gz", ("a", os.urandom(5_000)))
    archive.write_bytes(damage(archive.read_bytes()))
    with pytest.raises(BadInput, match="cannot be unpacked"):
        unpacked(tmp_path, archive=archive)


def test_no_program_of_a_repository_is_run(tmp_path: Path) -> None:
    source = write(tmp_path / "source", {"a.txt": "1", ".gitattributes": "*.txt filter=evil\n"})
    commit = trees.commit(source)
    for key in ("filter.evil.smudge", "core.fsmonitor", "core.pager", "tar.tar.command"):
        trees.git(source, "config", key, f"touch {tmp_path}/ran; cat")
    assert unpacked(tmp_path, git="source", commit=commit)["a.txt"] == b"1" and not (tmp_path / "ran").exists()


TESTS: dict[str, str] = {
    "floods the output": "yes | head -c 50000000; exit 0",
    "leaves processes that hold the output": "(sleep 300 &) ; sleep 300 & exit 1",
    "kills its supervisor": "kill -9 -1; kill -9 1; exit 1",
    "hangs and ignores signals": "trap '' TERM INT HUP; sleep 300",
    "fills the disk": "dd if=/dev/zero of=big bs=1M count=100000 status=none; exit 1",
}


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RowGrader]:
    rows = {name.replace(" ", "-"): {"test": test, "timeout_s": 2.0} for name, test in TESTS.items()}
    made = RowGrader(tmp_path_factory.mktemp("rows"), rows)
    yield made
    made.close()


@pytest.mark.parametrize("name", TESTS)
def test_a_hostile_test_ends_and_is_graded(graded: RowGrader, name: str) -> None:
    # A flood is no failure; the others fail. None is an infrastructure failure, and nothing is left running.
    assert graded(name.replace(" ", "-"), {}).reward == float(name == "floods the output")


def test_links_to_folders_give_their_files(tmp_path: Path) -> None:
    """They were left out without a word; so were links in a zip file, which held the name of a file in its place."""
    files = [("p/src/a.py", b"1"), ("p/b", b"2"), ("p/lib", "src"), ("p/far", "lib"), ("p/top", "."), ("p/c", "b")]
    found = unpacked(tmp_path, archive=tar(tmp_path / "a.tar.gz", *files))
    assert found == {"src/a.py": b"1", "lib/a.py": b"1", "far/a.py": b"1", "b": b"2", "c": b"2"}
    with zipfile.ZipFile(path := tmp_path / "b.zip", "w") as archive:
        for name, text, mode in (("run.sh", "#!", 0o100755), ("a", "1", 0o100644), ("link", "run.sh", 0o120777)):
            entry = zipfile.ZipInfo(name)
            entry.external_attr = mode << 16
            archive.writestr(entry, text)
    (target := tmp_path / "zip").mkdir()
    trees.extract_archive(path, target)
    modes = {file.name: (file.read_text(), file.stat().st_mode & 0o777) for file in target.iterdir()}
    assert modes == {"run.sh": ("#!", 0o755), "a": ("1", 0o644), "link": ("#!", 0o755)}


def test_links_that_multiply_are_refused(tmp_path: Path) -> None:
    """Each folder links twice to the one before: ten of them hold a thousand files."""
    links = [(f"d{n}/{side}", f"../d{n - 1}") for n in range(1, 11) for side in "ab"]
    archive = tar(tmp_path / "a.tar.gz", ("d0/f", b"1"), *links)
    (target := tmp_path / "target").mkdir()
    with pytest.raises(BadInput, match="holds more than 50"):
        trees.extract_archive(archive, target, trees.ArchiveLimits(num_members=50))


def test_a_commit_is_as_git_checks_it_out(tmp_path: Path) -> None:
    """`git archive` leaves out what is marked so, fills in lines, and its only folder was taken for the top."""
    attributes = "tests export-ignore\n*.txt export-subst\n"
    source = write(
        tmp_path / "a:source", {"p/tests/a.py": "1", "p/b.txt": "$Format:%H$", "p/.gitattributes": attributes}
    )
    (source / "p" / "link").symlink_to("tests")
    found = unpacked(tmp_path, git="a:source", commit=trees.commit(source))
    assert found == {"p/tests/a.py": b"1", "p/b.txt": b"$Format:%H$", "p/.gitattributes": attributes.encode()}
    assert os.readlink(tmp_path / "target" / "p" / "link") == "tests"


@pytest.mark.parametrize("address", [False, True])
def test_a_commit_of_a_further_working_tree_or_of_a_later_push_is_found(
    tmp_path: Path, address: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    source = write(tmp_path / "source", {"a": "1"})
    place, first = f"file://{source}" if address else "tree", trees.commit(source)
    trees.git(source, "worktree", "add", "--quiet", "--detach", str(tmp_path / "tree"))
    assert unpacked(tmp_path, git=place, commit=first) == {"a": b"1"}
    (source / "a").write_text("2")
    trees.git(source, "commit", "--quiet", "--all", "-m", "Next")
    later = trees.git(source, "rev-parse", "HEAD").strip()
    assert unpacked(tmp_path, git=place, commit=later) == {"a": b"2"}
