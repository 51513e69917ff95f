"""The journal of a stage's finished units: an open file, and the sealed files that it becomes.

Memory holds the names of the units and the numbers of their lines; the units themselves are read from the files.
"""

import os
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import orjson

from stages.redaction import redacted_bytes
from stages.runs import store
from stages.runs.records import Row
from stages.runs.store import Spool

SHARD_BYTES = 32 * 1024 * 1024
"""Bytes after which the open file is sealed, whatever its lines: it is held in memory until then."""


class Journal:
    """Finished units, one line each, in files of `shard_size` lines: `000000.jsonl.gz`, ..., the last one open.

    A line of the open file ends with a check value, as a changed digit would be another result; gzip has its own.
    A line is durable once `append` returns. A unit written twice (a failure that was retried) counts with its last
    line. `look` is called with every record that exists at the start.
    """

    def __init__(self, folder: Path, shard_size: int = 64, look: Callable[[Row], None] = lambda record: None) -> None:
        self.folder, self.shard_size = folder, shard_size
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._sealed = sorted(folder.glob("*.jsonl.gz"))
        self._open_path = folder / f"{len(self._sealed):06d}.jsonl.open"
        self._starts = [0]
        """The number of each file's first line, counted from the first file on; the last entry is the open one's."""
        self._lines = self._recover()
        self._where: dict[str, int] = {}
        """The number of each unit's last line, in the order in which units were first written."""
        self._failed: set[str] = set()
        self._kept: tuple[int, list[bytes]] = (-1, [])
        """The number and lines of the sealed file that `get` read last."""
        for record in self._index():
            look(record)

    def _recover(self) -> list[bytes]:
        """Return the complete lines of the open file; cut off a torn last line, so that appending starts anew."""
        for stale in set(self.folder.glob("*.open")) - {self._open_path}:
            stale.unlink()  # its sealed twin was renamed into place just before the process died
        if not self._open_path.exists():
            return []
        lines = store.open_lines(self._open_path)
        os.truncate(self._open_path, self._open_path.read_bytes().rfind(b"\n") + 1)
        return lines

    def _index(self) -> Iterator[Row]:
        """Yield every record, after its line number was noted."""
        for path in self._sealed:
            number = self._starts[-1] - 1
            for number, record in enumerate(store.read_lines(path), self._starts[-1]):
                self._note(number, record["unit"], record.get("failed", False))
                yield record
            self._starts.append(number + 1)
        for number, line in enumerate(self._lines, self._starts[-1]):
            record = orjson.loads(line)
            self._note(number, record["unit"], record.get("failed", False))
            yield record

    def _note(self, number: int, unit: str, failed: bool) -> None:
        self._where[unit] = number
        (self._failed.add if failed else self._failed.discard)(unit)

    def __len__(self) -> int:
        """Return the number of units, finished or failed."""
        return len(self._where)

    def __contains__(self, unit: str) -> bool:
        """Return whether a unit exists, finished or failed."""
        return unit in self._where

    def finished(self, unit: str) -> bool:
        """Return whether a unit is done and did not fail."""
        return unit in self._where and unit not in self._failed

    def get(self, unit: str) -> Row | None:
        """Return the last record of a unit, failed or not; None when there is none."""
        with self._lock:
            number = self._where.get(unit)
            if number is None:
                return None
            shard = bisect_right(self._starts, number) - 1
            if shard == len(self._sealed):
                lines = self._lines
            else:
                if self._kept[0] != shard:
                    self._kept = shard, list(store.sealed_lines(self._sealed[shard]))
                lines = self._kept[1]
            found: Row = orjson.loads(lines[number - self._starts[shard]])
        return found

    def records(self) -> Iterator[Row]:
        """Yield the last record of every unit, in the order in which units were first written."""
        return self.read(list(self._where))

    def read(self, units: Iterable[str]) -> Iterator[Row]:
        """Yield the last record of each of these units that exists, in this order."""
        with self._lock:  # copies: a writer may seal the open file while the records are read
            numbers = array("q", (self._where[unit] for unit in units if unit in self._where))
            sealed = chain.from_iterable(map(store.sealed_lines, list(self._sealed)))
            lines = chain(sealed, list(self._lines))
        if all(a < b for a, b in pairwise(numbers)):
            return map(orjson.loads, _picked(lines, numbers))
        return self._spooled(lines, numbers)

    def _spooled(self, lines: Iterator[bytes], numbers: Sequence[int]) -> Iterator[Row]:
        """Yield records in an order that the files do not have."""
        # Sealed files are gzip, so that reading a line in the middle decompresses all before it: one pass copies the
        # wanted lines to a temporary file, from which they are read in any order.
        wanted = array("q", sorted(set(numbers)))
        with closing(Spool(self.folder)) as spool:
            places = array("q", map(spool.add, _picked(lines, wanted)))
            for number in numbers:
                yield orjson.loads(spool.line(places[bisect_left(wanted, number)]))

    def append(self, units: Sequence[tuple[str, Mapping[str, Any], bool]]) -> None:
        """Make units durable, each (name, payload, failed). Payloads have no keys `unit`, `failed` and `crc32`."""
        lines = [
            redacted_bytes(store.encode({"unit": unit, "failed": failed, **payload})) for unit, payload, failed in units
        ]
        # Durable before it is noted. Outside the lock, so that readers do not wait for an fsync; `RunWriter` lets only
        # one thread write.
        store.append_lines(self._open_path, [store.checked(line) for line in lines])
        with self._lock:
            for number, (unit, _, failed) in enumerate(units, self._starts[-1] + len(self._lines)):
                self._note(number, unit, failed)
            self._lines += lines
        if len(self._lines) >= self.shard_size or sum(map(len, self._lines)) >= SHARD_BYTES:
            self.seal()

    def seal(self) -> None:
        """Turn the open file into a sealed one; the next append begins a new open file."""
        if not self._lines:
            return
        opened = self._open_path
        sealed = opened.with_name(f"{len(self._sealed):06d}.jsonl.gz")
        store.seal_lines(sealed, self._lines)
        with self._lock:
            self._sealed.append(sealed)
            self._starts.append(self._starts[-1] + len(self._lines))
            self._open_path = self.folder / f"{len(self._sealed):06d}.jsonl.open"
            self._lines = []
        opened.unlink(missing_ok=True)  # last: a kill before leaves both files, and `_recover` deletes the open one


def _picked(lines: Iterator[bytes], numbers: Sequence[int]) -> Iterator[bytes]:
    """Yield the lines with these numbers, which are in ascending order."""
    wanted = iter(numbers)
    following = next(wanted, None)
    for number, line in enumerate(lines):
        if following is None:
            return
        if number == following:
            yield line
            following = next(wanted, None)
