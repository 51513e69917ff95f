"""Find foreign files, and read them record by record.

A record is a line of JSON Lines, an element of a JSON array of objects, a whole JSON document, a row of Parquet, or a
sample of an Inspect archive together with the archive's header. A bad record is dropped with its line number, the rest
is kept.
"""

import gzip
import json
import re
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from composer_stages import json_text
from composer_stages.errors import BadInput
from composer_stages.formats import FORMATS
from composer_stages.formats.base import FIELDS, Drop, NumberedRecord
from composer_stages.formats.reports import FileLocation, stem
from composer_stages.runs import store
from composer_stages.runs.run import Run
from composer_stages.words import Sentence, did_you_mean

READABLE = (".json", ".jsonl", ".ndjson", ".traj", ".eval", ".parquet", ".gz")
OF_A_RUN: list[str] = FIELDS["sidecars"]["of_a_run"]
"""Patterns of reports below the folder of a run."""
BESIDE: list[str] = FIELDS["sidecars"]["beside"] + OF_A_RUN
SUPERSEDED: dict[str, str] = FIELDS["superseded"]
"""Patterns of files by the file beside them that counts in their place."""
DETAILS = "details"
"""LightEval's folder of details, beside that of results."""
PARTS = {"role", "prompt_token_ids", "kind"}
"""Keys of the parts of one record: of messages, of captured calls, of OpenHands' events."""
MOST_BYTES = 64 * 2**20
"""Most unpacked bytes of one record: a line, a JSON document, a sample of an archive, a row. As Python objects it takes
several times as much."""
MOST_UNPACKED = 64 * 2**30
"""Limit on unpacked bytes of one compressed file, read record by record: it bounds time, not memory."""
LOOK_LINES = 10_000
"""Lines of a broken document that are examined for JSON Lines."""
BATCH_BYTES = 2 * MOST_BYTES
"""Limit on bytes of a column in a batch of rows."""
Loads = Callable[[bytes], Any]
LFS = b"version https://git-lfs.github.com/spec/"
UNREAD = {
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "Zstandard",
    b"7z\xbc\xaf": "7-Zip",
    b"SQLite format 3": "SQLite",
    b"ARROW1": "Arrow",
}
"""Kinds of files that are not read, by how they begin."""
HEADERS = ("header.json", "_journal/start.json")
"""Members of an Inspect archive that hold its header, the first that is there."""
SUMMARIES, JOURNAL = "summaries.json", "_journal/summaries/"
UPDATES = "_journal/config_updates/"
"""Changes of settings while an evaluation ran, one a member; a log that was written anew has them in its header."""
SHARDS, RECOVERED = ".shards", "-recovered"
"""The ending of the folder that holds the parts of a log, each in a folder; and of a log made whole after a crash."""
SHORTENED = "(content truncated)"
"""The end of an input that a summary does not hold in full."""
PART = re.compile(r"(?P<sample>samples/.+_epoch_\d+)/(?P<part>sample|metadata|skeleton|\w+(?=/))(?:/\w+)?\.json")
ZSTD = 93
"""The compression method of recent Inspect archives, which zipfile itself knows only from Python 3.14 on."""
DAMAGE = (
    zipfile.BadZipFile,
    OSError,
    ValueError,
    KeyError,
    AttributeError,
    RuntimeError,
    zlib.error,
    EOFError,
    pa.ArrowException,
)
"""Errors of a damaged archive; RuntimeError: encrypted, or packed in an unknown way."""


@dataclass(frozen=True)
class Source(FileLocation):
    """One foreign file.

    `is_sidecar`: it is not below a path of the user and is read only as a description or report of other files.
    """

    sha256: str
    is_sidecar: bool = field(default=False, kw_only=True, compare=False)

    def records(self, loads: Loads = json.loads, *, brief: bool = False) -> Iterator[NumberedRecord | Drop]:
        """Yield every record with its line number (from 1), or a drop if it cannot be read.

        loads: reads JSON text. brief: samples of an archive after the first may be its summaries of them.
        """
        with self.path.open("rb") as file:
            head = file.read(64)
        # By content, not by name: data sets store JSON Lines as `.json` and gzip without `.gz`.
        if head.startswith(LFS):
            yield self.make_drop(1, "git_lfs_pointer", Sentence("formats.lfs-pointer"))
        elif kind := next((kind for begin, kind in UNREAD.items() if head.startswith(begin)), None):
            yield self.make_drop(1, "unread_kind", Sentence("formats.unread-kind", kind=kind))
        elif head.startswith(b"PAR1"):
            number = 0
            try:
                # With pre_buffer, pyarrow would hold the file in memory by its end.
                file = pq.ParquetFile(self.path, pre_buffer=False)
                for group in range(file.num_row_groups):
                    if (size := _longest_chunk(file, group)) > MOST_BYTES * 16:
                        problem = Sentence("formats.row-group-too-large", group=group, size=size >> 20)
                        yield self._too_large(number + 1, problem)
                        return
                    # No value is longer than its column. A dictionary may hold one long value for all rows, so that
                    # few bytes become many in a batch.
                    rows_at_once = max(1, min(1024, BATCH_BYTES // max(size, 1)))
                    for batch in file.iter_batches(rows_at_once, row_groups=[group]):
                        for row in self._rows(batch, number):
                            number += 1
                            yield row
            except (pa.ArrowException, OSError) as error:
                yield self.make_drop(number + 1, "damaged_file", str(error))
        elif head.startswith(b"PK\x03\x04"):
            yield from self._archive_samples(brief)
        else:
            yield from self._json_records(loads)

    def _rows(self, batch: pa.RecordBatch, before: int) -> Iterator[NumberedRecord | Drop]:
        """Yield the rows of a batch with their numbers, and a drop for a row with text that is not UTF-8."""
        try:
            yield from enumerate(batch.to_pylist(), before + 1)
        except UnicodeDecodeError:  # a column of text is not checked when it is read
            for at in range(len(batch)):
                try:
                    yield before + at + 1, batch.slice(at, 1).to_pylist()[0]
                except UnicodeDecodeError as error:
                    yield self.make_drop(before + at + 1, "not_utf8", error.reason)

    def _too_large(self, line: int, problem: str) -> Drop:
        sentence = Sentence("formats.too-large", problem=problem, limit=MOST_BYTES >> 20)
        return self.make_drop(line, "too_large", sentence)

    def make_drop(self, line: int, reason: str, detail: str) -> Drop:
        """Return the drop of the record at a line of this file, with the name of the reason and the details."""
        return Drop(self.label, line, reason, detail)

    def _archive_samples(self, brief: bool) -> Iterator[NumberedRecord | Drop]:
        """Yield every sample of an Inspect archive as a log with that one sample, or with its summary.

        An archive is a zip file, some with Zstandard, of a header, one JSON document a sample or a folder of its parts,
        and summaries of all samples.
        """
        number = 0
        try:
            with zipfile.ZipFile(self.path) as archive:
                # Without `header.json` the evaluation is still running or was killed: only its start is recorded.
                names = {*archive.namelist()}
                if not {*HEADERS} & names:
                    yield self.make_drop(1, "unread_kind", Sentence("formats.unread-kind", kind="zip"))
                    return
                header = _header(archive, names)
                # Each sample has the header: what grows with their number would be read in its square.
                header.get("eval", {}).get("dataset", {}).pop("sample_ids", None)
                header.get("eval", {}).pop("shards", None)
                unpacked = sum(info.file_size for info in archive.infolist())
                if unpacked > MOST_UNPACKED:
                    limit = MOST_UNPACKED >> 30
                    yield self._too_large(
                        1, Sentence("formats.archive-too-large", unpacked=unpacked >> 30, limit=limit)
                    )
                    return
                parts = _parts_of_samples(names)
                # A summary does not say that its sample was invalidated.
                summaries = _summaries(archive, names) if brief and not header.get("invalidated") else {}
                for name, within in sorted(parts.items()):
                    number += 1
                    # The first in full: it says how the samples were made.
                    if number > 1 and name in summaries:
                        yield number, {**header, "summaries": [summaries[name]]}
                        continue
                    # A sample may be damaged (a wrong checksum) in an archive whose directory is intact.
                    try:
                        sample = _joined(archive, name, within) if within else _value(_member(archive, f"{name}.json"))
                    except DAMAGE as error:
                        yield self.make_drop(number, "damaged_record", f"{name}.json: {error}")
                    else:
                        yield number, {**header, "samples": [sample]}
        except DAMAGE as error:
            yield self.make_drop(number + 1, "damaged_record", str(error))

    def _json_records(self, loads: Loads) -> Iterator[NumberedRecord | Drop]:
        """Yield the lines of JSON Lines, the elements of an array of objects, or the one document.

        A broken document is one dropped record, unless any of its lines is an object: then it is JSON Lines whose
        first line is broken.
        """
        damage: list[Drop] = []
        lines = self.lines(damage)
        head = list(islice(lines, 2))
        json_lines: Iterable[tuple[int, bytes]] = []
        why = ("not_json", "")
        # JSON Lines are read one by one, since files of rollouts outgrow the memory; a document has to be read as one.
        if len(head) == 2 and isinstance(_parse(head[0][1], loads)[0], dict | list):
            json_lines = chain(head, lines)
        else:
            collected, size = head, sum(len(line) for _, line in head)
            for numbered in lines if size <= MOST_BYTES else ():
                collected.append(numbered)
                if (size := size + len(numbered[1])) > MOST_BYTES:
                    break
            is_complete = size <= MOST_BYTES
            value, number, why = (
                _parse(b"".join(line for _, line in collected), loads) if is_complete else (None, 1, why)
            )
            # An array is a table of records unless it is one record: a list of messages or of captured calls.
            is_table = isinstance(value, list) and all(
                isinstance(item, dict) and not PARTS & item.keys() for item in value
            )
            if value is not None:
                yield from enumerate(value, 1) if is_table else [(1, value)]
            elif any(isinstance(_parse(line, loads)[0], dict) for _, line in collected[:LOOK_LINES]):
                json_lines = chain(collected, lines)
            elif not is_complete:
                yield self._too_large(1, Sentence("formats.document-too-large"))
            elif collected and not damage:
                yield self.make_drop(number, *why)
        for number, line in json_lines:
            value, _, why = _parse(line, loads)
            yield (number, value) if value is not None else self.make_drop(number, *why)
        # Last, so that the records before the damage keep their lines.
        yield from damage

    def unpacked(self) -> BinaryIO:
        """Open the file to read its bytes, unpacked."""
        with self.path.open("rb") as file:
            is_packed = file.read(2) == b"\x1f\x8b"
        return gzip.open(self.path) if is_packed else self.path.open("rb")  # type: ignore[return-value]

    def lines(self, damage: list[Drop]) -> Iterator[tuple[int, bytes]]:
        """Yield the non-blank lines of a text file, plain or gzip; add a drop if reading stops early."""
        number = 0
        try:
            unpacked = 0
            with self.unpacked() as file:
                while line := file.readline(MOST_BYTES + 1):
                    number, unpacked = number + 1, unpacked + len(line)
                    if len(line) > MOST_BYTES:
                        damage.append(self._too_large(number, Sentence("formats.line-too-long")))
                        # The rest of the line is read and left out; the lines after it are read.
                        while (more := file.readline(1 << 20)) and not more.endswith(b"\n"):
                            unpacked += len(more)
                            if unpacked > MOST_UNPACKED:
                                break
                    elif line.strip():
                        yield number, line
                    if unpacked > MOST_UNPACKED:
                        problem = Sentence("formats.file-unpacks-too-large", limit=MOST_UNPACKED >> 30)
                        damage.append(self._too_large(number, problem))
                        return
        except (EOFError, gzip.BadGzipFile, zlib.error, OSError) as error:
            damage.append(self.make_drop(number + 1, "damaged_file", str(error)))


def _longest_chunk(file: pq.ParquetFile, group: int) -> int:
    """Return the unpacked size of the largest column of a row group, an upper bound on the size of a value."""
    about = file.metadata.row_group(group)
    return max((about.column(at).total_uncompressed_size for at in range(about.num_columns)), default=0)


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    """Return the bytes of a member of an archive; `ValueError` for one that is too large."""
    info = archive.getinfo(name)
    if info.file_size > MOST_BYTES:
        raise ValueError(Sentence("formats.member-too-large", mib=info.file_size >> 20, limit=MOST_BYTES >> 20))
    if info.compress_type != ZSTD:
        return archive.read(name)
    with open(str(archive.filename), "rb") as file:
        # A local header: 30 bytes, of which 26-27 and 28-29 are the lengths of the name and the extra field behind it.
        file.seek(info.header_offset)
        header = file.read(30)
        file.seek(int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little"), 1)
        stream = pa.input_stream(pa.py_buffer(file.read(info.compress_size)), compression="zstd")
        content: bytes = stream.read(MOST_BYTES + 1)  # the directory may state another size than the stream has
        if len(content) > MOST_BYTES:
            raise ValueError(Sentence("formats.member-unpacks-too-large", limit=MOST_BYTES >> 20))
        return content


def _header(archive: zipfile.ZipFile, names: Collection[str]) -> Any:
    """Return the header of an archive, with the changes of settings that its journal alone has."""
    header: Any = next((_value(_member(archive, name)) for name in HEADERS if name in names), {})
    updates = sorted((name for name in names if name.startswith(UPDATES)), key=lambda name: (len(name), name))
    if updates and not header.get("config_updates"):
        header["config_updates"] = [_value(_member(archive, name)) for name in updates]
    return header


def _parts_of_samples(names: Iterable[str]) -> dict[str, dict[str, list[str]]]:
    """Return the samples of an archive by the name of their document without its ending, with those of its parts.

    A sample in parts has its chunks of messages, events and attachments in order; one in one document has none.
    """
    parts: dict[str, dict[str, list[str]]] = {}
    folders = {name.removesuffix("/sample.json") for name in names if name.endswith("/sample.json")}
    for name in sorted((name for name in names if name.startswith("samples/")), key=lambda name: (len(name), name)):
        match = PART.fullmatch(name)
        if match and match["sample"] in folders:
            parts.setdefault(match["sample"], {}).setdefault(match["part"], []).append(name)
        else:
            parts.setdefault(name.removesuffix(".json"), {})
    return parts


def _joined(archive: zipfile.ZipFile, name: str, parts: dict[str, list[str]]) -> dict[str, Any]:
    """Return a sample whose messages, events and attachments are in chunks as one document."""
    chunks = {kind: parts.get(kind, []) for kind in ("messages", "events", "attachments")}
    if (size := sum(archive.getinfo(part).file_size for part in chain(*chunks.values()))) > MOST_BYTES:
        raise ValueError(Sentence("formats.member-too-large", mib=size >> 20, limit=MOST_BYTES >> 20))
    sample: dict[str, Any] = _value(_member(archive, f"{name}/sample.json"))
    # Beside chunks of events are lists and counts about them.
    pool, events, attachments = (
        [item for part in kind if part[:-5].rpartition("/")[2].isdigit() for item in _value(_member(archive, part))]
        for kind in chunks.values()
    )
    sample["messages"] = [pool[at] for start, end in sample.get("message_refs") or () for at in range(start, end)]
    sample |= {"events": events, "attachments": {str(at): text for at, text in enumerate(attachments)}}
    if f"{name}/metadata.json" in parts.get("metadata", ()):
        sample["metadata"] = _value(_member(archive, f"{name}/metadata.json"))
    return sample


def _summaries(archive: zipfile.ZipFile, names: Collection[str]) -> dict[str, Any]:
    """Return the summaries of samples that say all that a comparison needs, by the name of the sample's document.

    What Inspect has shortened, an input that is no text, and our own samples, whose metadata name their task, are read
    in full.
    """
    journal = sorted((name for name in names if name.startswith(JOURNAL)), key=lambda name: (len(name), name))
    summaries: dict[str, Any] = {}
    for name in [SUMMARIES] if SUMMARIES in names else journal:
        with suppress(*DAMAGE, TypeError):
            for summary in _value(_member(archive, name)):
                question, about = summary.get("input"), summary.get("metadata") or {}
                document = f"samples/{summary.get('id')}_epoch_{summary.get('epoch')}"
                # A later summary replaces that of the same sample.
                summaries.pop(document, None)
                if (
                    isinstance(question, str)
                    and not question.endswith(SHORTENED)
                    and summary.get("uuid")
                    and "composer" not in about
                ):
                    summaries[document] = summary
    return summaries


def _value(text: bytes, loads: Loads = json.loads) -> Any:
    """Return the value of a JSON text; `ValueError` if it is invalid, or too deep for the parser."""
    try:
        # Not measured beforehand, which would take as long again: what the parser can take, `clean` measures.
        return loads(text)
    except RecursionError:
        json_text.require_shallow(text)
        raise


def _parse(text: bytes, loads: Loads) -> tuple[Any, int, tuple[str, str]]:
    """Return the value of a JSON text; for an invalid text or null None, the line of the error, reason and detail."""
    try:
        return _value(text, loads), 1, ("not_json", Sentence("formats.null-record"))
    except json.JSONDecodeError as error:
        excerpt = error.doc.split("\n")[error.lineno - 1][:40].strip()
        problem = Sentence("formats.invalid-json", message=error.msg, column=error.colno, excerpt=excerpt)
        return None, error.lineno, ("not_json", problem)
    except json_text.TooDeep as error:
        return None, 1, ("too_deep", str(error))
    except UnicodeDecodeError as error:
        return None, 1, ("not_utf8", error.reason)
    except (ValueError, RecursionError) as error:
        return None, 1, ("not_json", str(error))


def find(patterns: list[str], also: Sequence[str] = ()) -> list[Source]:
    """Return the readable files that paths, folders and patterns name, in a fixed order, then their sidecars.

    Raises `BadInput` that names the missing path. also: other endings of files that the caller reads itself.
    """
    named: dict[Path, Source] = {}
    beside: dict[Path, Source] = {}
    for pattern in patterns:
        matches = _matching(Path(pattern).expanduser())
        if not matches:
            path = Path(pattern).expanduser()
            is_word = not path.suffix and path.parent == Path() and not path.exists()
            nearest = (did_you_mean(pattern, FORMATS) if is_word else "") or store.nearest(path)
            formats = [*FORMATS] if is_word and len(patterns) > 1 else []
            about = {"exists": path.exists(), "endings": [*READABLE, *also], "nearest": nearest, "formats": formats}
            raise BadInput("formats.folder-without-files", pattern=pattern, **about)
        for source in matches:
            (beside if source.is_sidecar else named).setdefault(source.path, source)
    sources = [*named.values(), *(source for path, source in beside.items() if path not in named)]
    return [replace(source, sha256=store.file_sha256(source.path)) for source in sources]


def _matching(path: Path) -> list[Source]:
    """Return the files that one path, folder or pattern names, and their sidecars, without digests."""
    if path.is_file():
        file, folder = path.resolve(), path.resolve().parent
        names = [name.format(stem=stem(file)) for name in BESIDE]
        sources = [Source(file, f"{folder.name}/{file.name}", "", root=file)]
        return [*sources, *_sidecars(folder, names), *_sidecars(folder.parent, OF_A_RUN), *_lighteval_results(folder)]
    if path.is_dir():
        folder = path.resolve()
        inside = sorted(p for p in visible(path) if p.suffix in READABLE and p.suffixes[-2:] != [".tar", ".gz"])
        inside = _without_superseded(_without_merged(_foreign_files(inside)))
        sources = [Source(p.resolve(), f"{folder.name}/{p.relative_to(path)}", "", root=folder) for p in inside]
        return [*sources, *_sidecars(folder.parent, OF_A_RUN), *_lighteval_results(folder)] if sources else []
    if any(character in path.name for character in "*?["):
        return [source for match in sorted(path.parent.glob(path.name)) for source in _matching(match)]
    return []


def visible(folder: Path) -> list[Path]:
    """Return the files below a folder without hidden ones: copies of editors (`.ipynb_checkpoints`), macOS' `._x`."""
    inside = (path for path in folder.rglob("*") if not re.search(r"(^|/)\.", path.relative_to(folder).as_posix()))
    return [path for path in inside if path.is_file()]


def _without_superseded(files: Sequence[Path]) -> list[Path]:
    """Leave out files of which their program wrote another one in the same folder that holds what counts of them."""
    names = {*files}
    return [
        path
        for path in files
        if not any(fnmatch(path.name, old) and path.with_name(new) in names for old, new in SUPERSEDED.items())
    ]


def _foreign_files(files: Sequence[Path]) -> list[Path]:
    """Remove the files by which Composer describes a run: of a run folder only exported files are foreign."""
    exported: dict[Path, set[Path]] = {}
    for path in files:
        if path.name == "manifest.json":
            with suppress(BadInput):  # a manifest of another program
                outputs = Run(path.parent).manifest.outputs.values()
                foreign = [out["file"] for out in outputs if out["kind"].startswith("foreign/")]
                exported[path.parent] = {path.parent / name for name in foreign}
    # A run folder may be inside another one: the nearest counts.
    runs = {path: next((folder for folder in path.parents if folder in exported), None) for path in files}
    return [path for path, run in runs.items() if run is None or path in exported[run]]


def _without_merged(files: Sequence[Path]) -> list[Path]:
    """Leave out what another file of an Inspect log holds too, of logs that were merged from parts.

    The merged log lists the newest file of each part and its size. Where these are as they were, it holds all; where
    one was written since, the parts hold all, unless some of those that it lists are no longer there.
    """
    sets: dict[Path, dict[Path, list[Path]]] = {}
    for path in files:
        if path.suffix == ".eval" and path.parent.parent.suffix == SHARDS:
            sets.setdefault(path.parent.parent, {}).setdefault(path.parent, []).append(path)
    left_out = set[Path]()
    for folder, parts in sets.items():
        base = folder.with_suffix("").name
        for merged in (folder.with_name(f"{base}.eval"), folder.with_name(f"{base}{RECOVERED}.eval")):
            listed = _listed_parts(merged) if merged in files else {}
            newest = {part: max(paths, key=_attempt) for part, paths in parts.items()}
            newer = {part for part, path in newest.items() if listed.get(path) != path.stat().st_size}
            left_out |= {path for part, paths in parts.items() if part not in newer for path in paths}
            if newer and {path.parent for path in listed} <= {*parts} and listed:
                left_out = left_out - {path for paths in parts.values() for path in paths} | {merged}
    return [path for path in files if path not in left_out]


def _attempt(path: Path) -> tuple[str, bool]:
    """Return a key that orders the files of a part by the time in their names, one made whole last."""
    return path.name.partition("_")[0], path.stem.endswith(RECOVERED)


def _listed_parts(merged: Path) -> dict[Path, int]:
    """Return the files that a log was merged from, with their sizes; none where it does not say."""
    with suppress(*DAMAGE, TypeError), zipfile.ZipFile(merged) as archive:
        ledger = _header(archive, {*archive.namelist()})["eval"]["shards"]["ledger"]
        folder = merged.with_name(merged.stem.removesuffix(RECOVERED) + SHARDS)
        return {folder / part["shard"] / part["log"]: part["size"] for part in ledger}
    return {}


def _lighteval_results(folder: Path) -> list[Source]:
    """Return LightEval's results of the details in or below a folder, which are in another branch of its tree."""
    parts = folder.parts
    if DETAILS not in parts:
        return []
    at = parts.index(DETAILS)
    return _sidecars(Path(*parts[:at], "results", *parts[at + 1 : at + 3]), ["**/results_*.json"])


def _sidecars(folder: Path, names: Sequence[str]) -> list[Source]:
    """Return the files of a folder with these names or patterns, as sidecars."""
    paths = [path for name in names for path in sorted(folder.glob(name)) if path.is_file()]
    return [
        Source(path, f"{folder.name}/{path.relative_to(folder)}", "", root=folder, is_sidecar=True) for path in paths
    ]
