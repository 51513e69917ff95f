"""Frames between host and supervisor, imported by both.

To the supervisor: a length, then marshal. Back: a fixed head, then raw output; the host unmarshals nothing that
comes out of a sandbox.
"""

from __future__ import annotations

import marshal
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# marshal, and not JSON or pickle: it takes bytes and tuples, and is built in, so that its import costs no start-up
# time.
LENGTH = struct.Struct("!I")
HEAD = struct.Struct("!i?BQI")
"""Of a report: exit status, time-out, index in REASONS, bytes of output before any elision, bytes that follow."""
READY = b"ready"
REASONS = (None, "processes", "memory", "disk")


def pack_request(request: dict[str, Any], content: Any = None) -> bytes:
    """Return the frame of a request (built-in types only), and behind it the `content`, where there is any.

    Only the request's child reads the content; `size` in the request is its length.
    """
    behind = b"" if content is None else marshal.dumps(content)
    body = marshal.dumps(request if content is None else {**request, "size": len(behind)})
    return LENGTH.pack(len(body)) + body + behind


def read_request(channel: int) -> Any:
    """Return the next request from a descriptor; None at its end."""
    length = _read_exactly(channel, LENGTH.size)
    body = _read_exactly(channel, LENGTH.unpack(length)[0]) if length else None
    return marshal.loads(body) if body else None  # noqa: S302 (inside the sandbox, written by the host)


def read_into(channel: int, size: int) -> bytearray:
    """Return the next `size` bytes in a buffer that can be wiped: no other copy of them is made in this process."""
    body = bytearray(size)
    view = memoryview(body)
    while view:
        count = os.readv(channel, [view])
        if not count:
            raise EOFError("the channel ended")
        view = view[count:]
    return body


def _read_exactly(channel: int, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        chunk = os.read(channel, size - len(data))
        if not chunk:
            return None
        data += chunk
    return data


def write_all(channel: int, data: bytes | memoryview) -> None:
    """Write every byte."""
    view = memoryview(data)
    while view:
        view = view[os.write(channel, view) :]
