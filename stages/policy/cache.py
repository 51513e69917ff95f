"""Answers that were paid for, kept by content: the same question with the same sampling is never bought twice."""

import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from stages.redaction import redacted_bytes
from stages.runs import store


class AnswerCache:
    """One SQLite file shared by all runs; safe for several threads and processes.

    A key is the digest of server, model, messages, sampling and seed; never of the API key or the time. Reading has a
    connection of its own, so that it does not wait for a commit.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._locks = {"read": threading.Lock(), "write": threading.Lock()}
        self._writer = self._connect(path)
        self._writer.execute("PRAGMA journal_mode=WAL")
        self._writer.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer BLOB NOT NULL)")
        self._reader = self._connect(path)

    def _connect(self, path: Path) -> sqlite3.Connection:
        return sqlite3.connect(path, check_same_thread=False, timeout=30, isolation_level=None)

    def get(self, key: str) -> dict[str, Any] | None:
        """The answer under a key, or None."""
        with self._locks["read"]:
            row = self._reader.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        return orjson.loads(row[0]) if row else None

    def put_all(self, answers: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Keep answers, durably once this returns; an earlier one under a key stays."""
        with self._locks["write"]:
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                rows = [(key, redacted_bytes(store.encode(answer))) for key, answer in answers]
                self._writer.executemany("INSERT OR IGNORE INTO answers VALUES (?, ?)", rows)
            except BaseException:
                self._writer.execute("ROLLBACK")
                raise
            self._writer.execute("COMMIT")
