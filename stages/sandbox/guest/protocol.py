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


def pack_reply(returncode: int, timed_out: bool, killed_for: str | None, output_bytes: int, output: bytes) -> bytes:
    """The report on one finished job as a frame. `output_bytes` is the length before any elision."""
    return HEAD.pack(returncode, timed_out, REASONS.index(killed_for), output_bytes, len(output)) + output


def read_request(channel: int) -> Any:
    """The next request from a descriptor; None at its end."""
    length = _read_exactly(channel, LENGTH.size)
    body = _read_exactly(channel, LENGTH.unpack(length)[0]) if length else None
    return marshal.loads(body) if body else None  # noqa: S302 (inside the sandbox, written by the host)


def _read_exactly(channel: int, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        chunk = os.read(channel, size - len(data))
        if not chunk:
            return None
        data += chunk
    return data


def write_all(channel: int, data: bytes) -> None:
    """Write every byte."""
    view = memoryview(data)
    while view:
        view = view[os.write(channel, view) :]
