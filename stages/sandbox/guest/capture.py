"""Keeps of a stream of bytes what a limit allows and counts the rest."""

from __future__ import annotations

import mmap
import os

NOTICE_BYTES = 64
CHUNK_BYTES = 1 << 16


class Capture:
    """Head and tail, at most `limit` bytes, of everything that was added."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self._tail_room = limit - limit // 2
        self._head = bytearray()
        self._tail = bytearray()

    def take(self, descriptor: int) -> bool:
        """Add what a pipe holds now; False at its end, `BlockingIOError` when it holds nothing."""
        chunk = os.read(descriptor, CHUNK_BYTES)
        self.add(chunk)
        return bool(chunk)

    def add(self, chunk: bytes) -> None:
        """Take the next bytes of the stream."""
        self.total += len(chunk)
        room = self.limit // 2 - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[room:]
        # Cut only at twice the room or so: cutting at every chunk would move the tail again for each few bytes.
        if len(self._tail) > self.limit:
            del self._tail[: -self._tail_room]

    def kept(self) -> bytes:
        """Return everything, or head, a notice of what was left out, and tail."""
        if self.total <= self.limit:
            return bytes(self._head + self._tail)
        head = self._head[:-NOTICE_BYTES]
        tail = self._tail[-self._tail_room :]
        notice = f"\n[... {self.total - len(head) - len(tail)} bytes left out ...]\n"
        return bytes(head + notice.encode() + tail)

    def wipe(self) -> None:
        """Do nothing: what a command of the agent writes is for the agent."""


class WipedCapture:
    """The first `limit` bytes of a stream, in one buffer, of which nothing is left in this process after `wipe`."""

    def __init__(self, limit: int) -> None:
        self.total = 0
        # Pages that nothing is written to cost nothing: zeroing 16 MiB took most of a call's time. Private, or every
        # fork would share it.
        self._buffer = mmap.mmap(-1, limit, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._overflow = bytearray(CHUNK_BYTES)

    def take(self, descriptor: int) -> bool:
        """Add what a pipe holds now; False at its end, `BlockingIOError` when it holds nothing."""
        room = memoryview(self._buffer)[self.total :]
        # Into a buffer of our own: os.read would leave a copy in memory that is freed and not wiped. What is beyond the
        # limit is read all the same, so that the candidate does not block on a full pipe.
        count = os.readv(descriptor, [room if room else self._overflow])
        self.total += count
        return count > 0

    def kept(self) -> memoryview:
        """Return a view of what was kept, and no copy, which would not be wiped."""
        return memoryview(self._buffer)[: self.total]

    def wipe(self) -> None:
        """Overwrite everything."""
        self._buffer.close()  # the kernel gives its pages to nobody as they are
        self._overflow[:] = bytes(CHUNK_BYTES)
