"""A cache of answers as they arrived: SQLite files in which no damaged answer is taken for another one.

Each answer is kept with a SHA-256 over its key and its bytes, so that a changed byte, a truncated file or two records
that changed places are noticed: that answer counts as missing and is asked for again. SQLite has no checksums. A
file that SQLite can no longer write is left as it is, and later answers go to `answers-2.sqlite`; both are read.
"""

import errno
import hashlib
import os
import resource
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from composer_stages.errors import UsageError
from composer_stages.redaction import redacted_bytes
from composer_stages.runs import store
from composer_stages.words import Sentence

NO_DAMAGE = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_INTERRUPT,
    sqlite3.SQLITE_IOERR,
}
"""SQLite's errors about the machine; those about the file are many, as every byte of it may change."""
SHORT_READ = sqlite3.SQLITE_IOERR_SHORT_READ
"""A file that ends too early, which SQLite counts among the errors of the machine."""
FAILURES = (sqlite3.Error, UnicodeDecodeError)
"""What a statement raises; the last where SQLite's sentence quotes bytes of a damaged file that are not UTF-8."""
MOST_PATH_BYTES = 490
"""SQLite takes 512, with the names of the files that it makes beside its own."""
FILES = 4
"""The files that SQLite opens at once: the database, its log, the log's index, the folder."""
Report = Callable[[str], None]
Value = TypeVar("Value")


class AnswerCache:
    """Answers by content; safe for several threads and processes.

    A key is the digest of server, model, messages, sampling and seed; never of the API key or the time. path: the first
    file. report: gets a sentence about damage that was found.
    """

    def __init__(self, path: Path, report: Report = lambda text: None) -> None:
        if (length := len(os.fsencode(path.absolute()))) > MOST_PATH_BYTES:
            raise UsageError("policy.cache-path-too-long", path=path, length=length)
        store.make_folder(path.parent)
        self.damaged = 0
        """Answers that were found damaged."""
        self.path, self._report = path, report
        self._bad_keys: set[str] = set()
        """Keys whose answer is damaged or none, so that the next one replaces it."""
        self._files: list[_File] = []
        numbers = [1]
        for file in path.parent.glob(f"{path.stem}-*{path.suffix}"):
            word = file.stem.removeprefix(f"{path.stem}-")
            numbers += [int(word)] if word.isdecimal() else []
        self._last = max(numbers)
        for number in sorted(numbers):
            self._open(number)
        if not self._files or self._files[-1].number < self._last:
            self._begin_another()

    def get(self, key: str) -> bytes | None:
        """Return the answer of a key; None if the cache has none, or a damaged one."""
        for file in reversed(self._files):
            if (row := self._read(file, file.get, key)) is None:
                continue
            if _is_whole(key, *row):
                return bytes(row[0])
            self._report_damage(key, Sentence("policy.cached-answer-changed", path=file.path, key=key[:12]))
        return None

    def keys(self, begin: str) -> list[str]:
        """Return the keys that continue this one behind a colon; damage to where they stand hides them."""
        keys: list[str] = []
        for file in self._files:
            keys += self._read(file, file.keys, begin) or []
        return keys

    def _read(self, file: "_File", read: Callable[[str], Value], key: str) -> Value | None:
        """Return what `read` gives for a key; None, with a report, where the file is damaged there."""
        try:
            return read(key)
        except FAILURES as error:
            _require_damage(error, file.path)
            self._report_damage(key, Sentence("policy.cached-answer-unreadable", path=file.path, error=str(error)))
            return None

    def replace(self, key: str) -> None:
        """Let the next answer of a key replace the stored answer, as for a damaged one."""
        self._bad_keys.add(key)

    def put_all(self, answers: Sequence[tuple[str, bytes]]) -> None:
        """Store answers durably before returning; an answer that a key already has stays, unless it is damaged."""
        rows = [(key, redacted_bytes(answer)) for key, answer in answers]
        file, why = self._files[-1], "an answer that was written there cannot be read"
        try:
            # To write into a damaged file may lose more of it: an index that is split again, for example.
            if (damage := file.find_damage()) is not None:
                why = damage
            else:
                file.put(rows, self._bad_keys)
                # A damaged index may hold a key without its row: SQLite then ignores what is inserted.
                if all((row := file.get(key)) is not None and _is_whole(key, *row) for key, _ in rows):
                    return
        except FAILURES as error:
            _require_damage(error, file.path)
            why = str(error)
        self._report(Sentence("policy.cache-file-replaced", path=file.path, why=why))
        self._begin_another()
        self._files[-1].put(rows, self._bad_keys)

    def _open(self, number: int) -> None:
        path = self.path if number == 1 else self.path.with_stem(f"{self.path.stem}-{number}")
        try:
            self._files.append(_File(path, number))
        except FAILURES as error:
            _require_damage(error, path)
            self._report(Sentence("policy.cache-file-damaged", path=path, error=str(error)))

    def _begin_another(self) -> None:
        self._last += 1
        self._open(self._last)

    def _report_damage(self, key: str, report: Sentence) -> None:
        if key not in self._bad_keys:
            self._bad_keys.add(key)
            self.damaged += 1
            self._report(report)


class _File:
    """One SQLite file, with separate connections for reading and writing: reading does not wait for a commit."""

    def __init__(self, path: Path, number: int) -> None:
        self.path, self.number, self._checked = path, number, not path.exists()
        # A connection may be used by any thread, but by one at a time.
        self._locks = {"read": threading.Lock(), "write": threading.Lock()}
        # timeout: seconds that a write waits for one of another process. isolation_level None: transactions begin where
        # they are written below, not before the first statement.
        connect = partial(sqlite3.connect, path, check_same_thread=False, timeout=30, isolation_level=None)
        self._writer: sqlite3.Connection = connect()
        self._reader: sqlite3.Connection = connect()
        self._reader.text_factory = bytes  # a changed type may make text of an answer, and not in UTF-8
        try:
            self._writer.execute("PRAGMA journal_mode=WAL")  # readers do not wait for a writer
            self._writer.execute(
                "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer BLOB NOT NULL, sha256 BLOB)"
            )
        except BaseException:
            self._writer.close()
            self._reader.close()
            raise

    def get(self, key: str) -> tuple[Any, Any] | None:
        """Return the answer's bytes and digest under a key, as the file has them."""
        with self._locks["read"]:
            row = self._reader.execute("SELECT answer, sha256 FROM answers WHERE key = ?", (key,)).fetchone()
        return tuple(row) if row else None

    def find_damage(self) -> str | None:
        """Return what SQLite finds wrong with the file as an earlier process left it, read once; None for nothing."""
        if not self._checked:
            with self._locks["write"]:
                ((damage, *_),) = self._writer.execute("PRAGMA integrity_check(1)").fetchall()
            self._checked = damage == "ok"
            return None if self._checked else str(damage)
        return None

    def keys(self, begin: str) -> list[str]:
        """Return the keys that continue this one behind a colon."""
        with self._locks["read"]:
            query = "SELECT CAST(key AS TEXT) FROM answers WHERE key > ? AND key < ?"
            rows = self._reader.execute(query, (f"{begin}:", f"{begin};")).fetchall()
        return [key.decode(errors="replace") for (key,) in rows if isinstance(key, bytes)]

    def put(self, rows: Sequence[tuple[str, bytes]], bad_keys: set[str]) -> None:
        """Store rows; rows of `bad_keys` replace stored rows, and their keys are removed from the set."""
        with self._locks["write"]:
            new = [row for row in rows if row[0] not in bad_keys]
            mended = [row for row in rows if row[0] in bad_keys]
            with _transaction(self._writer):
                for way, some in (("IGNORE", new), ("REPLACE", mended)):
                    checked = [(key, answer, _digest(key, answer)) for key, answer in some]
                    insert = f"INSERT OR {way} INTO answers VALUES (?, ?, ?)"  # noqa: S608 (our own words)
                    self._writer.executemany(insert, checked)
            bad_keys.difference_update(key for key, _ in mended)


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """A transaction that is rolled back on an error; it begins with the lock for writing, where `timeout` applies."""
    connection.execute("BEGIN IMMEDIATE")  # upgrading a lock for reading fails at once
    try:
        yield
    except BaseException:
        if connection.in_transaction:  # SQLite itself ends some that failed
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _digest(key: str, answer: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\n" + answer).digest()


def _is_whole(key: str, answer: Any, sha256: Any) -> bool:
    """Return whether the digest is that of these bytes under this key."""
    return isinstance(answer, bytes) and sha256 == _digest(key, answer)


def _require_damage(error: Exception, path: Path) -> None:
    """Raise SQLite's error about the machine, or EMFILE if too many files are open, which SQLite does not report."""
    if _is_damage(error, path):
        return
    try:
        opened = len(os.listdir("/proc/self/fd"))
    except OSError as failure:
        raise OSError(failure.errno, failure.strerror, str(path)) from None
    if opened + FILES > resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path)) from None
    raise error


def _is_damage(error: Exception, path: Path) -> bool:
    """Return whether SQLite's error is about the bytes of this file, and not about the machine."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is None or code == SHORT_READ:  # without one: Python could not convert what came
        return True
    if code & 0xFF == sqlite3.SQLITE_READONLY:  # a byte of the header may say so, too
        return os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)
    return code & 0xFF not in NO_DAMAGE
