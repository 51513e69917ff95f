"""Lines in a temporary file, read back in any order: sealed files have no middle, and memory is too small."""

import tempfile
import threading
from pathlib import Path


class Spool:
    """Lines without line breaks, each found again by the place that `add` gave. The file ends with the process."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (closed by `close`)
        self._lock = threading.Lock()
        self._end = 0

    def __enter__(self) -> "Spool":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def add(self, line: bytes) -> int:
        """Keep one more line; all are added before any is read."""
        place = self._end
        self._end += self._file.write(line + b"\n")
        return place

    def line(self, place: int) -> bytes:
        """The line at a place; safe to call from several threads."""
        with self._lock:
            self._file.seek(place)
            return self._file.readline().removesuffix(b"\n")

    def close(self) -> None:
        """Delete the file."""
        self._file.close()
