"""Keeps the head and the tail of a stream of bytes and counts the rest."""

NOTICE_BYTES = 64


class Capture:
    """At most `limit` bytes of everything that was added."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self._head = bytearray()
        self._tail = bytearray()

    def add(self, chunk: bytes) -> None:
        """Take the next bytes of the stream."""
        self.total += len(chunk)
        room = self.limit // 2 - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[room:]
        if len(self._tail) > self.limit:
            del self._tail[: -self._tail_room]

    @property
    def _tail_room(self) -> int:
        return self.limit - self.limit // 2

    def kept(self) -> bytes:
        """Everything, or head, a notice of what was left out, and tail."""
        if self.total <= self.limit:
            return bytes(self._head + self._tail)
        head = self._head[:-NOTICE_BYTES]
        tail = self._tail[-self._tail_room :]
        notice = f"\n[... {self.total - len(head) - len(tail)} bytes left out ...]\n"
        return bytes(head + notice.encode() + tail)
