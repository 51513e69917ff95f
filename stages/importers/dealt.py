"""Files that workers read: what a worker leaves of each in the journal, and how an import takes it up.

A trajectory or drop is a unit, and the file itself is one, written last; without that the file is read again. Whether a
rollout was there before, and the how-manieth of its task it is, the import says, file after file.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from stages.importers import reader, rows
from stages.importers.base import Drop, Importer
from stages.importers.duplicates import Known
from stages.importers.files import Source
from stages.importers.reader import FileCount
from stages.importers.rows import ImportedPayload
from stages.importers.sidecars import Sidecars
from stages.runs import store
from stages.runs.artifact import Out
from stages.runs.records import Row

BATCH = 64
"""Units that are made durable in one step."""


@dataclass(frozen=True)
class Dealt:
    """What all workers of an import need: its files with the modules that read them, and what lies beside the files."""

    files: Sequence[tuple[Source, str | None]]
    sidecars: Sidecars

    @classmethod
    def of(cls, chosen: Mapping[Source, Importer | None], sidecars: Sidecars) -> "Dealt":
        """With modules by name, since they cannot be pickled."""
        return cls([(source, importer.__name__ if importer else None) for source, importer in chosen.items()], sidecars)

    def leave(self, out: Out) -> None:
        """Read the files of a worker for the import that takes them up."""
        for source, name in self.files:
            if not out.finished(unit(source)):
                importer: Any = import_module(name) if name else None
                leave(source, importer, self.sidecars, out)


@dataclass(frozen=True)
class Read:
    """One rollout of a file. known: by what it is recognised; payload: its journal record, as the first of its task."""

    known: Known
    payload: ImportedPayload


def unit(source: Source) -> str:
    """The unit of a file."""
    return f"file/{store.digest([source.label, source.sha256])[:16]}"


def read(source: Source, importer: Importer | None, sidecars: Sidecars, count: FileCount) -> Iterator[Read | Drop]:
    """Everything a file holds, counted, in this process."""
    for item in reader.read(source, importer, sidecars, count):
        yield item if isinstance(item, Drop) else Read(Known.of(item), rows.payload(item, 0))


def leave(source: Source, importer: Importer | None, sidecars: Sidecars, out: Out) -> None:
    """Read a file for the import that takes it up."""
    count, name = FileCount(source.label, importer.NAME if importer else "unknown", source.sha256), unit(source)
    batch: list[tuple[str, Row, bool]] = []
    number = 0
    for number, item in enumerate(read(source, importer, sidecars, count), 1):
        batch.append((f"{name}/{number}", _row(item), False))
        if len(batch) == BATCH:
            out.stop_here()
            out.write_all(batch)
            batch.clear()
    told = {"items": number, "count": _portable(count), "reports": sidecars.reports.used_for()}
    out.write_all([*batch, (name, told, False)])


def taken_up(source: Source, sidecars: Sidecars, count: FileCount, out: Out) -> Iterator[Read | Drop] | None:
    """The same as `read`, from what a worker left; None where none has read the whole file."""
    if not out.journal.finished(unit(source)) or (told := out.journal.get(unit(source))) is None:
        return None
    for field, value in told["count"].items():
        made = type(getattr(count, field))
        setattr(count, field, made(value))
    sidecars.reports.were_used_for(told["reports"])
    names = [f"{unit(source)}/{number}" for number in range(1, told["items"] + 1)]
    return map(_item, out.journal.read(names))


def _portable(count: FileCount) -> Row:
    made: dict[str, Any] = asdict(count)
    return {**made, "missing": sorted(count.missing), "dropped": dict(count.dropped), "redacted": dict(count.redacted)}


def _row(item: Read | Drop) -> Row:
    if isinstance(item, Drop):
        return {"drop": asdict(item)}
    return {"known": {**asdict(item.known), "path": str(item.known.path)}, "read": item.payload}


def _item(row: Row) -> Read | Drop:
    if "drop" in row:
        return Drop(**row["drop"])
    return Read(Known(**{**row["known"], "path": Path(row["known"]["path"])}), row["read"])
