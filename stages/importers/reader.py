"""Which format a file has, and everything in it: trajectories with secrets removed, and dropped records by reason."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from stages.errors import BadInput
from stages.importers import FORMATS, load
from stages.importers.base import Drop, Importer, JoiningImporter, Origin, Trajectory
from stages.importers.files import Source
from stages.importers.redaction import Redactions, clean
from stages.importers.reports import Place
from stages.importers.sidecars import Sidecars
from stages.importers.validation import check

LOOK = 20
"""Records of a file that are looked at to tell its format."""
PREVIEWS = 50
SHOWN = 12
"""Keys of a record that a refusal lists."""
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError)


@dataclass
class FileCount:
    """What one file held. `traces` = rollouts + the sum of what was dropped."""

    file: str
    format: str
    sha256: str
    records: int = 0
    traces: int = 0
    rollouts: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    redacted: Counter[str] = field(default_factory=Counter)
    previews: list[str] = field(default_factory=list)
    """Of what was redacted: kind, line, and what stood around it, for the first `PREVIEWS`."""
    missing: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class ReadTrajectory:
    """A trajectory, where it stood and who read it. `redacted` says that a secret was taken out of its record."""

    trajectory: Trajectory
    origin: Origin
    importer: str
    index: int
    """Its place among the trajectories of one record."""
    redacted: bool


def sort(sources: list[Source], wanted: str, sidecars: Sidecars) -> dict[Source, Importer | None]:
    """The importer of every file of trajectories, None where no format fits; other useful files fill the sidecars."""
    importers = load(wanted)
    chosen: dict[Source, Importer | None] = {}
    for source in sources:
        records = list(islice((r[1] for r in source.records() if not isinstance(r, Drop)), LOOK))
        fitting = next((i for record in records for i in importers if not source.beside and _fits(i, record)), None)
        if fitting is not None or (not _beside(source, sidecars) and not source.beside):
            chosen[source] = fitting
    sidecars.reports.settle(lambda folder: _instances(chosen, folder))
    if not any(chosen.values()) and not chosen:
        raise BadInput("There is nothing to import: the files only describe or judge trajectories that are not here.")
    return chosen


def _instances(chosen: Mapping[Source, Importer | None], folder: Path | None) -> Iterator[str]:
    """The tasks of all trajectories below a folder, or of all."""
    for source, importer in chosen.items():
        if importer is not None and (folder is None or source.path.is_relative_to(folder)):
            for item in read(source, importer, Sidecars(), FileCount("", "", "")):
                if isinstance(item, ReadTrajectory):
                    yield item.trajectory.task_id


def _fits(importer: Importer, record: Any) -> bool:
    """Whether a record is of a format; one that is too odd to be asked is not."""
    try:
        return importer.recognises(record)
    except MALFORMED:
        return False


def _beside(source: Source, sidecars: Sidecars) -> bool:
    """Whether a file says something about others; all its records are taken in."""
    taken = [_takes(sidecars, source, record[1]) for record in source.records() if not isinstance(record, Drop)]
    return any(taken)


def _takes(sidecars: Sidecars, source: Source, record: Any) -> bool:
    try:
        return sidecars.add(Place(source.path, source.label, source.root), record)
    except MALFORMED:
        return False


def read(
    source: Source, importer: Importer | None, sidecars: Sidecars, count: FileCount
) -> Iterator[ReadTrajectory | Drop]:
    """Everything a file holds, counted. The records of a file of no known format are dropped."""
    if importer is None:
        yield from _unknown(source, count)
        return
    records = source.records()
    if isinstance(importer, JoiningImporter):
        records = importer.join(records, source.drop)
    for record in records:
        count.records += 1
        if isinstance(record, Drop):
            _count(record, count)
            yield record
            continue
        secrets = Redactions()
        place = Origin(source.path, source.label, source.sha256, record[0], sidecars)
        for index, trajectory in enumerate(_trajectories(importer, record[1], place, secrets)):
            _count(trajectory, count)
            yield (
                trajectory
                if isinstance(trajectory, Drop)
                else ReadTrajectory(trajectory, place, importer.NAME, index, bool(secrets))
            )
        count.redacted.update(secrets)
        shown = [f"line {place.line}: {preview}" for _, preview in secrets.previews]
        count.previews += shown[: max(0, PREVIEWS - len(count.previews))]


def _unknown(source: Source, count: FileCount) -> Iterator[Drop]:
    """Every record of a file of no known format, dropped, with the reason where it cannot even be read."""
    for record in source.records():
        count.records += 1
        if not isinstance(record, Drop):
            why = f"{_keys(record[1])}; that is none of {', '.join(FORMATS)}"
            record = source.drop(record[0], "unknown_format", why)
        _count(record, count)
        yield record


def _keys(value: Any) -> str:
    """What a record that nobody knows looks like."""
    if not isinstance(value, dict):
        return f"it is of the type {type(value).__name__}"
    more = f" and {len(value) - SHOWN} more" if len(value) > SHOWN else ""
    return f"its keys are {', '.join(sorted(map(str, value))[:SHOWN])}{more}"


def _trajectories(importer: Importer, value: Any, origin: Origin, secrets: Redactions) -> Iterator[Trajectory | Drop]:
    """What one record holds, its secrets taken out first."""
    try:
        value = clean(value, secrets if origin.sidecars.redact else None)
        if not _fits(importer, value):
            yield origin.drop("foreign_record", f"not of the format {importer.NAME}; {_keys(value)}")
            return
        for trajectory in importer.trajectories(value, origin):
            yield trajectory if isinstance(trajectory, Drop) else check(trajectory)
    except MALFORMED as error:
        yield origin.drop("malformed_record", f"{type(error).__name__}: {error}")


def _count(trace: Trajectory | Drop, count: FileCount) -> None:
    count.traces += 1
    if isinstance(trace, Drop):
        count.dropped[trace.reason] += 1
