"""Rows of a file of instances: JSON, JSON Lines or Parquet."""

import codecs
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from composer_stages import json_text
from composer_stages.errors import BadInput

READABLE = (".json", ".jsonl", ".ndjson", ".json.gz", ".jsonl.gz", ".parquet")


def read_records(path: Path) -> Iterator[Any]:
    """Yield the records of a file: rows of Parquet, lines of JSON Lines, or elements (or values) of a JSON document."""
    if path.name.endswith(".parquet"):
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            yield from pq.read_table(path).to_pylist()
        except (pa.ArrowInvalid, OSError) as error:
            raise BadInput("swebench.parquet-not-readable", path=path, error=error) from None
        return
    data = path.read_bytes()
    try:
        text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise BadInput("swebench.file-damaged", path=path, error=error) from None
    text = text.removeprefix(codecs.BOM_UTF8)
    # By content, whatever the ending: a .json file may hold one row a line.
    try:
        document = _loads(text)
    except ValueError:
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    yield _loads(line)
                except ValueError as error:
                    raise BadInput("swebench.line-not-json", path=path, number=number, error=error) from None
        return
    if isinstance(document, dict) and document and all(isinstance(row, dict) for row in document.values()):
        yield from document.values()  # rows by their ids
    else:
        yield from document if isinstance(document, list) else [document]


def _loads(text: bytes) -> Any:
    json_text.require_shallow(text)
    return orjson.loads(text)
