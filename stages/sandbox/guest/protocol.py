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

LENGTH = struct.Struct("!I")
HEAD = struct.Struct("!i?BQI")
READY = b"ready"
REASONS = (None, "processes", "memory", "disk")


def pack_request(request: Any) -> bytes:
    """A request (built-in types only) as a frame."""
    body = marshal.dumps(request)
    return LENGTH.pack(len(body)) + body


def pack_head(returncode: int, timed_out: bool, killed_for: str | None, output_bytes: int, kept: int) -> bytes:
    """The head of a report on one finished job, `kept` bytes of output follow. `output_bytes`: before any elision."""
    return HEAD.pack(returncode, timed_out, REASONS.index(killed_for), output_bytes, kept)


def pack_reply(returncode: int, timed_out: bool, killed_for: str | None, output_bytes: int, output: bytes) -> bytes:
    """A whole report as a frame."""
    return pack_head(returncode, timed_out, killed_for, output_bytes, len(output)) + output


def pack_call(request: Any, content: Any) -> bytes:
    """A request and behind it what only its child reads; `size` in the request is the length of that."""
    body = marshal.dumps(content)
    return pack_request({**request, "size": len(body)}) + body


def read_request(channel: int) -> Any:
    """The next request from a descriptor; None at its end."""
    length = _read_exactly(channel, LENGTH.size)
    body = _read_exactly(channel, LENGTH.unpack(length)[0]) if length else None
    return marshal.loads(body) if body else None  # noqa: S302 (inside the sandbox, written by the host)


def read_into(channel: int, size: int) -> bytearray:
    """The next `size` bytes in a buffer that can be wiped: no other copy of them is made in this process."""
    body = bytearray(size)
    view = memoryview(body)
    while view:
        count = os.readv(channel, [view])
        if not count:
            raise EOFError("the channel ended")
        view = view[count:]
    return body


def unpack(body: bytearray) -> Any:
    """What `pack_call` packed behind a request."""
    return marshal.loads(body)  # noqa: S302 (inside the sandbox, written by the host)


def wipe(buffer: bytearray, used: int) -> None:
    """Overwrite the first bytes of a buffer; what is forked later finds nothing of them in its memory."""
    buffer[:used] = bytes(used)


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
