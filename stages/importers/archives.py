"""Inspect's `.eval` archives: zip files, some with Zstandard, of a header and one JSON document a sample."""

import json
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

HEADERS = ("header.json", "_journal/start.json")
ZSTD = 93
"""The compression method of recent archives, which zipfile itself knows only from Python 3.14 on."""
DAMAGE = (zipfile.BadZipFile, OSError, ValueError, KeyError, zlib.error, EOFError, pa.ArrowException)


def samples(path: Path) -> Iterator[tuple[Any, str]]:
    """Every sample as a log with that one sample, or None and what is wrong with it."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            header: Any = next((json.loads(member(archive, name)) for name in HEADERS if name in names), {})
            for name in sorted(name for name in names if name.startswith("samples/")):
                yield _sample(archive, name, header)
    except DAMAGE as error:
        yield None, str(error)


def _sample(archive: zipfile.ZipFile, name: str, header: Any) -> tuple[Any, str]:
    try:
        return {**header, "samples": [json.loads(member(archive, name))]}, ""
    except DAMAGE as error:
        return None, f"{name}: {error}"


def member(archive: zipfile.ZipFile, name: str) -> bytes:
    """The bytes of a member."""
    info = archive.getinfo(name)
    if info.compress_type != ZSTD:
        return archive.read(name)
    with open(str(archive.filename), "rb") as file:
        file.seek(info.header_offset)
        header = file.read(30)
        file.seek(int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little"), 1)
        return pa.input_stream(pa.py_buffer(file.read(info.compress_size)), compression="zstd").read()
