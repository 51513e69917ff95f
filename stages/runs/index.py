"""The facts of all runs below an artifacts folder, for lists: a manifest is read once, as long as it does not change.

The index is a cache, in memory and in the file `NAME` of the artifacts folder. An entry holds for the one manifest that
it was read from, which `store.stamp` tells from all others, so that manifests stay the only source. A file that is
damaged or has other fields counts as absent. It is replaced whole, so several processes may write it, and the last
one stays; where it cannot be written, the next process reads the manifests again.
"""

import hashlib
import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from composer_stages.errors import BadInput
from composer_stages.runs import store
from composer_stages.runs.catalog import manifests, references
from composer_stages.runs.run import Manifest, Run, RunFacts, read_manifest

NAME = ".runs.json"
SETTINGS = ("arm", "seed", "env", "policy")
"""The settings that an entry keeps of `config`."""


class Entry(BaseModel):
    """A run in the index."""

    model_config = ConfigDict(extra="forbid")
    stamp: tuple[int, ...] | None
    """Of the manifest; None where the entry is not kept: the manifest is young, or the run in progress."""
    facts: RunFacts
    content: str
    tables: list[str]
    """The names of the Parquet files."""
    files: list[str]
    """The names of the files that the manifest has digests of."""
    intact: str = ""
    """`_stat_digest` of these files when they were last found undamaged; empty: not known."""
    damage: str = Field(default="", exclude=True)
    """The first damaged file in words; empty without one, and where files were not compared."""

    @classmethod
    def of(cls, record: Manifest, stamp: tuple[int, ...] | None = None) -> "Entry":
        """Return the entry of a manifest."""
        facts: dict[str, Any] = {name: getattr(record, name) for name in RunFacts.model_fields}
        facts["config"] = {name: record.config[name] for name in SETTINGS if name in record.config}
        return cls(
            stamp=None if record.status == "running" else stamp,  # the money of a run in progress is in its ledger
            facts=RunFacts.model_construct(**facts),
            content=record.content,
            tables=[out["file"] for out in record.outputs.values() if out["file"].endswith(".parquet")],
            files=list(record.files),
        )


def read(root: Path, *, check: bool = False) -> dict[str, Entry | BadInput]:
    """Return the entry of each run by `stage/folder`, or why its manifest cannot be read, as `catalog.folders` orders.

    check: compare the files of complete runs with the manifests, as `Run.damage("sizes")` does. Files that were found
    undamaged are not read again until they change.
    """
    return _index(root.resolve()).read(check)


def entries(root: Path) -> dict[Path, Entry]:
    """Return the entries of all runs whose manifests can be read, by their absolute folders, in the same order."""
    root = store.require_text(root.resolve())
    return {root / name: entry for name, entry in read(root).items() if isinstance(entry, Entry)}


def of(runs: Iterable[Run]) -> dict[Path, Entry]:
    """Return the entries of these runs, as `entries` does."""
    return {run.path: Entry.of(run.manifest) for run in runs}


def readers_of(root: Path, run: Run) -> list[Run]:
    """Return the runs that read this one, oldest first."""
    # By fingerprint and name, not by path: artifacts folders are moved and copied.
    identity = (run.manifest.fingerprint, run.path.name)
    return [
        Run(folder)
        for folder, entry in entries(root).items()
        if identity in {(ref.fingerprint, Path(ref.path).name) for ref in references(entry.facts)}
    ]


class _Index:
    """The entries of one artifacts folder; threads may share it."""

    def __init__(self, root: Path) -> None:
        self._root, self._lock = root, threading.Lock()
        self._kept = _load(root / NAME)

    def read(self, check: bool) -> dict[str, Entry | BadInput]:
        with self._lock:
            current, cached = dict[str, Entry | BadInput](), dict[str, Entry]()
            for name, status in manifests(self._root):
                try:
                    entry = self._entry(name, store.stamp(status), check)
                except BadInput as error:
                    current[name] = error
                    continue
                current[name] = entry
                if entry.stamp:
                    cached[name] = entry.model_copy(update={"damage": ""}) if entry.damage else entry
            if cached != self._kept:
                self._kept = cached
                _save(self._root / NAME, cached)
            return current

    def _entry(self, name: str, stamp: tuple[int, ...] | None, check: bool) -> Entry:
        record, entry = None, self._kept.get(name)
        if entry is None or entry.stamp != stamp:
            record = read_manifest(self._root / name)
            entry = Entry.of(record, stamp)
        if check and entry.facts.status == "complete":
            intact = _stat_digest(f"{self._root}/{name}", entry.files)
            if not intact or intact != entry.intact:
                damage = Run(self._root / name, record).damage("sizes") or ""
                entry = entry.model_copy(update={"damage": damage, "intact": "" if damage else intact})
        return entry


@cache
def _index(root: Path) -> _Index:
    return _Index(root)


ENTRIES = TypeAdapter(dict[str, Entry])


def _load(path: Path) -> dict[str, Entry]:
    with suppress(OSError, ValidationError):  # none there, or its content damaged
        head, _, body = path.read_bytes().partition(b"\n")
        return ENTRIES.validate_json(body) if head == _head(body) else {}
    return {}


def _save(path: Path, entries: dict[str, Entry]) -> None:
    body = ENTRIES.dump_json(entries)
    with suppress(OSError):  # a read-only folder, or a full disk: only time is lost
        store.write_sealed(path, _head(body) + b"\n" + body)


def _head(body: bytes) -> bytes:
    return f"{schema()} {hashlib.sha256(body).hexdigest()}".encode()


@cache
def schema() -> str:
    """Return a digest of the fields of an entry: an index that was written with others counts as absent."""
    return store.digest(Entry.model_json_schema())


def _stat_digest(folder: str, names: Sequence[str]) -> str:
    """Return a digest of what stat says of files; empty where one is missing, or too young for a change to show."""
    try:
        # Not by `Path`, which takes longer than stat: 2,000 runs have some 30,000 files.
        stamps = [store.stamp(os.stat(f"{folder}/{name}")) for name in names]
    except OSError:
        return ""
    return "" if None in stamps else hashlib.sha256(orjson.dumps(stamps)).hexdigest()
