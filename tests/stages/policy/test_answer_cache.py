"""The cache of paid answers: a changed byte never becomes another answer, and costs no more than the answers it hit."""

import errno
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from composer_stages.errors import UsageError
from composer_stages.policy.answer_cache import AnswerCache
from composer_stages.runs import store

ANSWERS = {
    store.digest(number): b'{"attempts":1}\n' + f"answer {number} ".encode() + b"word " * (number * 7 % 300)
    for number in range(60)
}


def filled(folder: Path) -> Path:
    """A cache with all answers in one file, as a run leaves it."""
    cache = AnswerCache(folder / "answers.sqlite")
    cache.put_all(list(ANSWERS.items()))
    close(cache)
    return folder / "answers.sqlite"


def close(cache: AnswerCache) -> None:
    for file in cache._files:
        file._reader.close()
        file._writer.close()


def asked_again(path: Path) -> list[str]:
    """The keys whose answer is gone after damage; every other one is right, and all are there once bought again."""
    cache = AnswerCache(path)
    found = {key: cache.get(key) for key in ANSWERS}
    gone = [key for key, answer in found.items() if answer is None]
    assert all(answer in (None, ANSWERS[key]) for key, answer in found.items())
    cache.put_all([(key, ANSWERS[key]) for key in gone])
    # Writing into a damaged index can make SQLite lose other answers of that page: those are bought again, too.
    later_gone = [key for key in ANSWERS if cache.get(key) is None]
    cache.put_all([(key, ANSWERS[key]) for key in later_gone])
    gone += later_gone
    assert all(cache.get(key) for key in ANSWERS)
    close(cache)
    later = AnswerCache(path)
    assert all(later.get(key) == ANSWERS[key] for key in ANSWERS)
    close(later)
    return gone


def flips(tmp_path: Path, number: int, seed: int) -> list[int]:
    """The number of answers that each changed byte has cost."""
    whole, rng = filled(tmp_path).read_bytes(), random.Random(seed)
    lost = []
    for _ in range(number):
        folder = tmp_path / "changed"
        folder.mkdir()
        changed = bytearray(whole)
        changed[rng.randrange(len(whole))] ^= rng.randrange(1, 256)
        (folder / "answers.sqlite").write_bytes(changed)
        lost.append(len(asked_again(folder / "answers.sqlite")))
        shutil.rmtree(folder)
    return lost


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("number", "seed"), [(20, 0), pytest.param(2000, 1, marks=pytest.mark.slow)])
def test_a_changed_byte_is_never_another_answer(tmp_path: Path, number: int, seed: int) -> None:
    """Of 200 changed bytes 54 gave another answer at commit 46e634e, and 44 a raw exception."""
    lost = flips(tmp_path, number, seed)
    assert sum(lost) <= number * len(ANSWERS) / 10 and max(lost) <= len(ANSWERS)


def flipped(offset: int, mask: int) -> Callable[[bytes], bytes]:
    """One changed byte of the header, which says how to read all others: page size, versions, encoding, tables."""
    return lambda whole: whole[:offset] + bytes([whole[offset] ^ mask]) + whole[offset + 1 :]


def cut(size: int) -> Callable[[bytes], bytes]:
    return lambda whole: whole[:size]


HEADER = (0, 15, 16, 18, 19, 20, 21, 28, 44, 47, 56, 92, 96, 100, 103, 105, 108)
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    **{f"byte {offset} ^ {mask}": flipped(offset, mask) for offset in HEADER for mask in (0x01, 0xFF)},
    **{f"cut at {size}": cut(size) for size in (0, 1, 99, 100, 4095, 4096, 5000, 20_000, -4096, -1)},
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_to_the_file_is_survived(tmp_path: Path, name: str) -> None:
    path = filled(tmp_path)
    path.write_bytes(DAMAGE[name](path.read_bytes()))
    asked_again(path)


def test_a_file_that_is_no_database_is_replaced(tmp_path: Path) -> None:
    path = filled(tmp_path)
    path.write_bytes(b"no database " * 1000)
    assert len(asked_again(path)) == len(ANSWERS)
    assert {one.name for one in tmp_path.glob("*.sqlite")} == {"answers.sqlite", "answers-2.sqlite"}


@pytest.mark.parametrize("columns", ["answer", "answer, sha256"])
def test_swapped_records_count_as_damaged(tmp_path: Path, columns: str) -> None:
    path, (one, two, *_) = filled(tmp_path), ANSWERS
    with sqlite3.connect(path) as file:
        rows = {k: file.execute(f"SELECT {columns} FROM answers WHERE key = ?", (k,)).fetchone() for k in (one, two)}
        names = ", ".join(f"{name} = ?" for name in columns.split(", "))
        for key, other in ((one, two), (two, one)):
            file.execute(f"UPDATE answers SET {names} WHERE key = ?", (*rows[other], key))
    file.close()
    told: list[str] = []
    cache = AnswerCache(path, told.append)
    assert [cache.get(key) for key in (one, two)] == [None, None] and cache.damaged == len(told) == 2
    assert f"the answer {one[:12]} in it has changed since it was kept, so it is asked for again" in told[0]
    close(cache)
    assert sorted(asked_again(path)) == sorted([one, two])


@pytest.mark.parametrize("value", ["text", 5, 1.5, b"", b"{}", b"null", b"[1]", b'{"text":"x"}', b"\xff"])
def test_an_answer_of_another_sqlite_type_counts_as_damaged(tmp_path: Path, value: Any) -> None:
    path, key = filled(tmp_path), next(iter(ANSWERS))
    with sqlite3.connect(path) as file:
        file.execute("UPDATE answers SET answer = ? WHERE key = ?", (value, key))
    file.close()
    assert asked_again(path) == [key]


def test_two_processes_share_a_cache(tmp_path: Path) -> None:
    one, two = (AnswerCache(tmp_path / "answers.sqlite") for _ in range(2))
    key, answer = next(iter(ANSWERS.items()))
    one.put_all([(key, answer)])
    two.put_all([(key, b"bought at the same time")])
    assert one.get(key) == two.get(key) == answer
    close(one)
    close(two)


def test_a_full_disk_does_not_count_as_damage(tmp_path: Path) -> None:
    cache = AnswerCache(tmp_path / "answers.sqlite")
    pages = cache._files[0]._writer.execute("PRAGMA page_count").fetchone()[0]
    cache._files[0]._writer.execute(f"PRAGMA max_page_count = {pages}")  # SQLite's own way to run out of room
    with pytest.raises(sqlite3.OperationalError, match="full"):
        cache.put_all(list(ANSWERS.items()))
    assert len(cache._files) == 1 and cache.get(next(iter(ANSWERS))) is None
    close(cache)


def test_a_path_that_sqlite_does_not_open_is_named_with_its_length(tmp_path: Path) -> None:
    """It was told as a full disk."""
    path = tmp_path.joinpath(*["x" * 200] * 3, "answers.sqlite")
    with pytest.raises(UsageError, match=f"has {len(str(path))} bytes"):
        AnswerCache(path)


OPENED = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from support.limits import open_files_limit
from composer_stages.policy.answer_cache import AnswerCache
from composer_stages.runs import runner
for free in (1, 2):
    try:
        with runner.disk_failures_as_such(Path(sys.argv[1])), open_files_limit(free):
            AnswerCache(Path(sys.argv[1]) / "answers.sqlite")
    except OSError as error:
        print(error.errno, error.filename)
"""
"""In a process of its own, in which nothing else closes a file meanwhile."""


def test_too_many_open_files_are_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    words = [sys.executable, "-c", OPENED, str(tmp_path), str(Path(__file__).parents[2])]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.stdout.split() == [str(errno.EMFILE), str(tmp_path / "answers.sqlite")] * 2, done.stderr
