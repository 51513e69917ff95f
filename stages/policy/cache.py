"""Answers that were paid for, kept by content: the same question with the same sampling is never bought twice."""

import sqlite3
import threading
from pathlib import Path
from typing import Any

import orjson

from stages.runs import store


class AnswerCache:
    """One SQLite file shared by all runs; safe for several threads and processes.

    A key is the digest of server, model, messages, sampling and seed; never of the API key or the time.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(path, check_same_thread=False, timeout=30, isolation_level=None)
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer BLOB NOT NULL)")

    def get(self, key: str) -> dict[str, Any] | None:
        """The answer under a key, or None."""
        with self._lock:
            row = self._connection.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        return orjson.loads(row[0]) if row else None

    def put(self, key: str, answer: dict[str, Any]) -> None:
        """Keep an answer; an earlier one under the key stays."""
        with self._lock:
            self._connection.execute("INSERT OR IGNORE INTO answers VALUES (?, ?)", (key, store.encode(answer)))
