"""Bytes with a digest in front, so that an object that is damaged or was written by half is known as one."""

import hashlib
from typing import Any

import orjson

from stages.runs import store


class Damaged(Exception):
    """An object is not what was written."""


def seal(header: dict[str, Any], payload: bytes) -> bytes:
    """SHA-256 of what follows (32 bytes), the header's length (4 bytes), the header as JSON, the payload."""
    told = store.encode(header)
    body = len(told).to_bytes(4, "little") + told + payload
    return hashlib.sha256(body).digest() + body


def unseal(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and payload; `Damaged` where they are not those that were sealed."""
    body = data[32:]
    if hashlib.sha256(body).digest() != data[:32]:
        raise Damaged(f"{len(data)} bytes with another digest than their own")
    end = 4 + int.from_bytes(body[:4], "little")
    return orjson.loads(body[4:end]), body[end:]
