"""Files of a run: sealed files, JSON documents, lines, and the journal of finished units.

A sealed file is written to a temporary name, flushed, fsynced and renamed, and its folder is fsynced: a file under its
final name is never torn, and survives a power cut. `publish_folder` does the same for a folder that a library has
filled, `seal_folder` for one that stays in its place. An open journal (`.jsonl.open`) may end in a torn line, which
counts as not written. API keys are redacted from all files (`composer_stages.redaction`). `Journal` holds a stage's
finished units: an open file, and the sealed files that it becomes; memory holds the names of the units and the numbers
of their lines. `Spool` keeps lines in a temporary file, `GroupCommit` turns many small durable writes into few.
"""

import asyncio
import gzip
import hashlib
import io
import json
import os
import re
import tempfile
import threading
import time
import unicodedata
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from difflib import get_close_matches
from functools import cache
from itertools import chain, islice, pairwise
from pathlib import Path
from shutil import copytree, ignore_patterns, rmtree
from typing import Any, BinaryIO, Generic, TypeVar

import orjson

from composer_stages import json_text
from composer_stages.errors import BadInput, UsageError
from composer_stages.redaction import redacted_bytes
from composer_stages.runs.kinds import Row
from composer_stages.words import Sentence

CTIME_MARGIN_S = 2.0
"""Age from which ctime proves that a file is unchanged: ctime has the resolution of the file system's clock tick."""
TORN = re.compile(r"\..+\.\d+\.tmp")


NAME_BYTES = 120
"""Most bytes of a name that comes from a text: file systems take 255, and others add a time and a digest to it."""


def folder_name(text: str) -> str:
    """Return a text of any origin (a model's name, a label) as the name of one file or folder.

    Letters and digits of all scripts, `.`, `_` and `-` stay, everything else becomes `-`. The name is never empty,
    hidden, an option, `..`, or longer than `NAME_BYTES`. Several texts may have one name: `FolderNames` tells them
    apart.
    """
    # NFC: file systems of macOS compare names in normal form, so that two spellings of one letter would be one file.
    name = re.sub(r"[^\w.-]+", "-", unicodedata.normalize("NFC", text)).strip("-.")
    return name.encode()[:NAME_BYTES].decode(errors="ignore").rstrip("-.") or "unnamed"


class FolderNames:
    """Unique names for the files of one folder, also where a file system ignores case."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def name(self, text: str) -> str:
        """Return the `folder_name` of a text, with a number behind it where an earlier call returned that name."""
        name, number = folder_name(text), 1
        while _without_case(name) in self._taken:
            number += 1
            name = f"{folder_name(text)}-{number}"
        self._taken.add(_without_case(name))
        return name


def _without_case(name: str) -> str:
    return unicodedata.normalize("NFKC", name.casefold())


def encode(value: Any) -> bytes:
    """Return canonical JSON: keys sorted, no spaces, UTF-8. Equal values give equal bytes."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)


def digest(value: Any) -> str:
    """Return the SHA-256 of a value's canonical JSON, in hex."""
    return hashlib.sha256(encode(value)).hexdigest()


def visible_files(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the files below a folder, each with its name there, in order; without links and without hidden ones."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and not path.is_symlink() and not any(part.startswith(".") for part in name.parts):
            yield path, name


def in_sql(path: Path) -> str:
    """Return a path as a text in SQL, where views, table functions and settings take no parameters."""
    return "'" + str(path).replace("'", "''") + "'"


def file_sha256(path: Path | str) -> str:
    """Return the SHA-256 of a file's bytes, in hex."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(2**16):  # `hashlib.file_digest` fills a buffer of 256 KiB first; most files are small
            digest.update(block)
    return digest.hexdigest()


def folder_digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below a folder by its relative name, in hex.

    A process hashes an unchanged file once, because a model's files may be gigabytes.
    """
    return {
        str(path.relative_to(folder)): known_sha256(path)
        for path in sorted(p for p in folder.rglob("*") if p.is_file())
    }


def known_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hex; an unchanged file is read once in a process."""
    identity = stamp(path.stat())
    return file_sha256(path) if identity is None else _cached_sha256(path.absolute(), identity)


def stamp(status: os.stat_result) -> tuple[int, ...] | None:
    """Return what every change of a file changes; None for a file so young that a change might not show."""
    # ctime rather than mtime, which programs can set. A file that was changed within the last clock tick may keep its
    # ctime.
    is_young = time.time() - status.st_ctime < CTIME_MARGIN_S
    return None if is_young else (status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns)


def folder_sha256(folder: Path) -> str:
    """Return the SHA-256 over the relative names and digests of all files below a folder, in hex."""
    return digest_of_files(folder_digests(folder))


def digest_of_files(digests: Mapping[str, str]) -> str:
    """Return the SHA-256 over names and digests of files, in their order."""
    # A name may be no UTF-8.
    return digest([[os.fsencode(name).decode(errors="backslashreplace"), of_file] for name, of_file in digests.items()])


@cache
def _cached_sha256(path: Path, identity: tuple[int, ...]) -> str:
    del identity  # only a part of the cache key
    return file_sha256(path)


def sync(path: Path) -> None:
    """Make the bytes of a file durable, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Make all files and folders below a folder durable, and the names in it."""
    for path in (*folder.rglob("*"), folder):
        if not path.is_symlink():
            sync(path)


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, durably."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def publish_folder(temporary: Path, final: Path) -> None:
    """Give a folder its final name once everything in it is durable; an earlier folder of that name is deleted."""
    sync_tree(temporary)
    rmtree(final, ignore_errors=True)  # rename() replaces a folder only if it is empty
    temporary.rename(final)
    sync(final.parent)


SEAL = "composer.json"
"""The file that `seal_folder` writes last."""


def seal_folder(folder: Path, facts: Mapping[str, Any]) -> None:
    """Make a folder durable, and write `SEAL` into it: facts about the folder, and size and CRC-32 of all its files."""
    (folder / SEAL).unlink(missing_ok=True)
    # Read from memory while the disk still writes. Against damage alone, for which a CRC-32 is enough; it takes 1 s for
    # 3 GB, where a SHA-256 takes 2.7 s.
    with ThreadPoolExecutor(1) as reading:
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        files = reading.submit(lambda: {str(path.relative_to(folder)): _size_and_check(path) for path in paths})
        sync_tree(folder)
    write_json(folder / SEAL, {**facts, "crc32": files.result()})
    sync(folder.parent)


def _size_and_check(path: Path) -> list[int]:
    """Return the size of a file and the CRC-32 of its bytes."""
    size, check, buffer = 0, 0, memoryview(bytearray(2**20))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            size, check = size + count, zlib.crc32(buffer[:count], check)
    return [size, check]


def folder_damage(folder: Path) -> str | None:
    """Compare a sealed folder with its seal; return the first difference in words, None without one."""
    try:
        sealed = read_json(folder / SEAL)["crc32"]
    except (BadInput, KeyError, TypeError):
        return f"{SEAL} cannot be read"
    for name, expected in sealed.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if _size_and_check(path) != expected:
            return Sentence("runs.file-changed", name=name)
    return None


def link_folder(folder: Path, target: Path) -> None:
    """Hard-link all files of a folder but its seal into another folder of the same disk; nothing is copied."""
    copytree(folder, target, copy_function=os.link, ignore=ignore_patterns(SEAL), dirs_exist_ok=True)


def write_sealed(path: Path, data: bytes) -> None:
    """Write a file atomically: it exists complete or not at all. Devices and pipes are written to as they are."""
    if path.exists() and not path.is_file() and not path.is_dir():  # /dev/stdout, which a rename would replace
        with path.open("wb") as device:
            device.write(redacted_bytes(data))
        return
    with sealing(path) as file:
        file.write(redacted_bytes(data))


@contextmanager
def sealing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that appears under its name once the block ends, and not at all after an exception.

    The caller redacts API keys.
    """
    make_folder(path.parent)
    # In the same folder, since rename() is atomic only within a file system; the name matches TORN.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # before the rename: else a crash may leave the name without the bytes
        temporary.replace(path)
        sync(path.parent)  # else a power cut may take the name away again
    finally:
        temporary.unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Delete temporary files that a killed process left in a run's folder; `scratch` belongs to workers."""
    for path in folder.rglob(".*.tmp"):
        if TORN.fullmatch(path.name) and path.is_file() and path.relative_to(folder).parts[0] != "scratch":
            path.unlink(missing_ok=True)


def write_lines(file: BinaryIO, rows: Iterable[Row]) -> int:
    """Write rows as JSON lines; return their number."""
    number = 0
    for row in rows:
        file.write(redacted_bytes(encode(row)) + b"\n")
        number += 1
    return number


def write_json(path: Path, value: Any) -> None:
    """Write one JSON document, indented for people, keys sorted."""
    write_sealed(path, _document(value))


def _document(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE)


def parse_json(data: bytes) -> Any:
    """Return the value of a JSON text; `ValueError` also for great depth, and a key that occurs twice in an object.

    Parsers take the later value of such a key in silence, and a person who reads the text sees the earlier one.
    """
    json_text.require_shallow(data)
    value = orjson.loads(data)
    if _document(value) != data:  # what `write_json` wrote has every key once, and is compared in a tenth of the time
        json.loads(data, object_pairs_hook=_once)  # here nothing but the keys: orjson is stricter in all else
    return value


def _once(pairs: list[tuple[str, Any]]) -> None:
    seen = set[str]()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(Sentence("runs.key-twice", key=key))
        seen.add(key)


def require_text(path: Path) -> Path:
    """Return a path that is text; `UsageError` for one that is not UTF-8, which JSON and Parquet cannot hold."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        readable = os.fsencode(path).decode(errors="backslashreplace")
        raise UsageError("runs.path-not-utf8", shown=readable) from None
    return path


def nearest(path: Path) -> str:
    """Return " Did you mean 'study.toml'?" for a path that does not exist beside a file of a similar name, else ""."""
    try:
        beside = [] if path.exists() else [*path.parent.iterdir()]
    except OSError:
        return ""
    # By the stems: equal endings would make all short names similar. A file of another kind has to be more similar.
    same = {sibling.stem: sibling.name for sibling in beside if sibling.suffix == path.suffix}
    similar = {sibling.stem: sibling.name for sibling in beside if sibling.suffix != path.suffix}
    near = [same[stem] for stem in get_close_matches(path.stem, same, 1)]
    near += [similar[stem] for stem in get_close_matches(path.stem, similar, 1, 0.8)]
    return "".join(f" Did you mean {str(path.with_name(name))!r}?" for name in near[:1])


def read_json(path: Path) -> Any:
    """Read one JSON document; `BadInput` names the file when it is missing or malformed."""
    try:
        return parse_json(path.read_bytes())
    except FileNotFoundError:
        raise BadInput("runs.file-missing", path=path) from None
    except ValueError as error:
        if path.name == "manifest.json":
            raise BadInput("runs.manifest-invalid", path=path, error=error) from None
        raise BadInput("runs.json-invalid", path=path, error=error) from None


def seal_lines(path: Path, lines: Sequence[bytes]) -> None:
    """Write lines as `jsonl.gz`; equal lines give equal bytes (no name, no time in the gzip header)."""
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0, compresslevel=6) as file:
        file.writelines(redacted_bytes(line) + b"\n" for line in lines)
    write_sealed(path, buffer.getvalue())


def read_lines(path: Path) -> Iterator[Row]:
    """Yield the rows of a sealed `jsonl.gz`; `BadInput` with the line number when it is truncated or malformed."""
    for number, line in enumerate(sealed_lines(path), 1):
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise BadInput("runs.json-line-invalid", path=path, number=number, error=error) from None
        yield row


def sealed_lines(path: Path) -> Iterator[bytes]:
    """Yield the raw lines of a sealed `jsonl.gz`; `BadInput` with the line number when it is truncated."""
    number = 0
    try:
        with gzip.open(path, "rb") as file:
            for line in file:
                yield line.removesuffix(b"\n")
                number += 1
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise BadInput("runs.gzip-damaged", path=path, number=number, error=error) from None


def read_bytes(path: Path) -> bytes | None:
    """Return the bytes of a file; None when there is none."""
    return path.read_bytes() if path.is_file() else None


CHECK = b',"crc32":'


def checked(line: bytes) -> bytes:
    """Return a line of JSON with the CRC-32 of its bytes as the last key."""
    return line[:-1] + CHECK + str(zlib.crc32(line)).encode() + b"}"


def unchecked(line: bytes) -> bytes:
    """Return a line without its check value; `ValueError` where the line has none, or that of other bytes."""
    content, separator, check = line.rpartition(CHECK)
    if not separator:
        raise ValueError(Sentence("runs.no-check-value"))
    if check != str(zlib.crc32(content + b"}")).encode() + b"}":
        raise ValueError(Sentence("runs.check-value-differs"))
    return content + b"}"


def open_lines(path: Path) -> list[bytes]:
    """Return the lines of an open journal without their check values; none where there is no file.

    What follows the last line break is being written, or was torn by a kill, and is left out. `BadInput` with the
    number of a line that has changed since it was written, or is no unit.
    """
    lines = (read_bytes(path) or b"").split(b"\n")[:-1]
    complete = list[bytes]()
    for number, text in enumerate(lines, 1):
        try:
            complete.append(unchecked(text))
        except ValueError as error:
            raise BadInput("runs.journal-line-invalid", path=path, number=number, error=error) from None
    return complete


def read_units(folder: Path) -> Iterator[Row]:
    """Yield a journal's last record of every unit, in the order in which units were first written.

    Reads only, so that another process may still write the journal. Memory holds the names of the units, the open file,
    and the records of units that were written twice.
    """
    opened = [line for path in sorted(folder.glob("*.jsonl.open")) for line in open_lines(path)]
    sealed = sorted(folder.glob("*.jsonl.gz"))  # after the open one: what is sealed meanwhile is read twice, not lost

    def records() -> Iterator[Row]:
        for path in sealed:
            yield from read_lines(path)
        yield from map(orjson.loads, opened)

    # Two passes, since the first record of a unit gives its place and the last one its content.
    seen, again = set[str](), dict[str, Row]()
    for record in records():
        if record["unit"] in seen:
            again[record["unit"]] = record
        seen.add(record["unit"])
    for record in records():
        if record["unit"] in seen:
            seen.discard(record["unit"])
            yield again.pop(record["unit"], record)


def append_lines(path: Path, lines: Sequence[bytes]) -> None:
    """Append lines durably; on failure (a full disk) the file is cut back, so that no torn line stays in its middle."""
    with path.open("ab", buffering=0) as file:  # unbuffered: close() has nothing left to write after a truncation
        size = file.tell()
        buffer = memoryview(b"".join(line + b"\n" for line in lines))
        try:
            while buffer:
                buffer = buffer[file.write(buffer) :]  # a raw write may be partial, on a disk that is almost full
            os.fsync(file.fileno())
            if not size:
                sync(path.parent)
        except OSError:
            os.truncate(path, size)
            raise


class Spool:
    """Lines in a temporary file, read back in any order by the offset that `add` returned.

    Sealed files are gzip and cannot be read from the middle, and memory is too small for all lines.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (closed by `close`)
        self._lock = threading.Lock()
        self._end = 0

    def add(self, line: bytes) -> int:
        """Append a line and return its offset; all lines are added before any is read."""
        position = self._end
        self._end += self._file.write(line + b"\n")
        return position

    def line(self, position: int) -> bytes:
        """Return the line at an offset; safe to call from several threads."""
        with self._lock:
            self._file.seek(position)
            return self._file.readline().removesuffix(b"\n")

    def close(self) -> None:
        """Delete the file."""
        self._file.close()


Item = TypeVar("Item")


class GroupCommit(Generic[Item]):
    """Many small durable writes as few large ones: awaiting an instance with an item returns once the item is durable.

    An fsync takes milliseconds whatever its size, so that a thousand answers a second can only be written in groups.
    `write` gets the items in order, in another thread; items that arrive during a write form the next one. All
    callers share one event loop. An error of a write is raised to everyone whose item was in it; a caller that is
    cancelled leaves its item to be written.
    """

    def __init__(self, write: Callable[[list[Item]], None]) -> None:
        self._write = write
        self._waiting: list[tuple[Item, asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None

    async def __call__(self, item: Item) -> None:
        """Return once the item is durable."""
        durable = asyncio.get_running_loop().create_future()
        self._waiting.append((item, durable))
        # The first item starts the writer, which ends when none is waiting; until then it takes all that arrive.
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_all())
        await durable

    async def _write_all(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting, []
            error: Exception | None = None
            try:
                # In a thread, since fsync blocks; items that arrive meanwhile form the next group.
                await asyncio.to_thread(self._write, [item for item, _ in group])
            except Exception as raised:
                error = raised
            for _, durable in group:
                if not durable.done():  # done: its caller was cancelled
                    durable.set_result(None) if error is None else durable.set_exception(error)
        self._writer = None


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
        make_folder(folder)
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
            stale.unlink()  # its sealed copy was renamed into place just before the process died
        if not self._open_path.exists():
            return []
        lines = open_lines(self._open_path)
        os.truncate(self._open_path, self._open_path.read_bytes().rfind(b"\n") + 1)
        return lines

    def _index(self) -> Iterator[Row]:
        """Yield every record, after its line number was noted."""
        for path in self._sealed:
            number = self._starts[-1] - 1
            for number, record in enumerate(read_lines(path), self._starts[-1]):
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
                    self._kept = shard, list(sealed_lines(self._sealed[shard]))
                lines = self._kept[1]
            row: Row = orjson.loads(lines[number - self._starts[shard]])
        return row

    def records(self) -> Iterator[Row]:
        """Yield the last record of every unit, in the order in which units were first written."""
        return self.read(list(self._where))

    def read(self, units: Iterable[str]) -> Iterator[Row]:
        """Yield the last record of each of these units that exists, in this order."""
        with self._lock:  # copies: a writer may seal the open file while the records are read
            numbers = array("q", (self._where[unit] for unit in units if unit in self._where))
            sealed = chain.from_iterable(map(sealed_lines, list(self._sealed)))
            lines = chain(sealed, list(self._lines))
        if all(a < b for a, b in pairwise(numbers)):
            return map(orjson.loads, _picked(lines, numbers))
        return self._spooled(lines, numbers)

    def _spooled(self, lines: Iterator[bytes], numbers: Sequence[int]) -> Iterator[Row]:
        """Yield records in an order that the files do not have."""
        # Sealed files are gzip, so that reading a line in the middle decompresses all before it: one pass copies the
        # wanted lines to a temporary file, from which they are read in any order.
        ordered = array("q", sorted(set(numbers)))
        with closing(Spool(self.folder)) as spool:
            places = array("q", map(spool.add, _picked(lines, ordered)))
            for number in numbers:
                yield orjson.loads(spool.line(places[bisect_left(ordered, number)]))

    def append(self, units: Sequence[tuple[str, Mapping[str, Any], bool]]) -> None:
        """Make units durable, each (name, payload, failed). Payloads have no keys `unit`, `failed` and `crc32`."""
        lines = [redacted_bytes(encode({"unit": unit, "failed": failed, **payload})) for unit, payload, failed in units]
        # Durable before it is noted. Outside the lock, so that readers do not wait for an fsync; `RunWriter` lets only
        # one thread write.
        append_lines(self._open_path, [checked(line) for line in lines])
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
        seal_lines(sealed, self._lines)
        with self._lock:
            self._sealed.append(sealed)
            self._starts.append(self._starts[-1] + len(self._lines))
            self._open_path = self.folder / f"{len(self._sealed):06d}.jsonl.open"
            self._lines = []
        opened.unlink(missing_ok=True)  # last: a kill before leaves both files, and `_recover` deletes the open one


def _picked(lines: Iterator[bytes], numbers: Sequence[int]) -> Iterator[bytes]:
    """Yield the lines with these numbers, which are in ascending order."""
    at = 0
    for number in numbers:
        yield from islice(lines, number - at, number - at + 1)
        at = number + 1
