"""Power cuts: after one, a folder holds what fsync had made durable, and of everything else any part.

support/power_cut.c, preloaded into the processes, sees every fsync, whoever calls it (Python, torch, safetensors,
SQLite). A cut ends them and writes the folder anew: a name counts once its folder was fsynced, bytes once their file
was. POSIX promises no more; most file systems keep more, which is tried as well.
"""

import ctypes
import os
import random
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir

PAGE = 4096
ROOT, DISK, AT = "COMPOSER_POWER_ROOT", "COMPOSER_POWER_DISK", "COMPOSER_POWER_AT"
"""Variables that power_cut.c reads."""
NAMES = ("lost", "reached", "any")
"""What becomes of names whose folder was not fsynced since: all are lost, all have reached the disk, or some."""
BYTES = ("lost", "zeros", "torn", "any")
"""What becomes of bytes that were not fsynced: the file is as it was, has its size and zeros, or ends somewhere."""
Entry = tuple[str, str]
"""The key and the type (d, f, l) of a file."""


def library() -> Path:
    """The compiled power_cut.c."""
    return compiled(Path(__file__).with_suffix(".c"))


def compiled(source: Path) -> Path:
    """The library of a file of C, compiled once."""
    target = Path(gettempdir()) / f"{source.stem}-{os.getuid()}-{source.stat().st_mtime_ns}.so"
    if not target.exists():
        made = target.with_suffix(f".{os.getpid()}")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", made, source, "-ldl"], check=True)
        made.replace(target)
    return target


class Disk:
    """What is durable of a folder, and what a power cut leaves of it."""

    def __init__(self, root: Path) -> None:
        self.root, self.kept = root, root.with_name(f"{root.name}.disk")
        self._library = ctypes.CDLL(str(library()))
        self.begin()

    def environment(self, at: int | None = None) -> dict[str, str]:
        """Variables of a process whose power is cut before its change number `at`, or from outside."""
        return {ROOT: str(self.root), DISK: str(self.kept), AT: str(at or "")}

    @property
    def changes(self) -> int:
        """How many changes there were since the last cut."""
        path = self.kept / "changes"
        return path.stat().st_size if path.exists() else 0

    def begin(self) -> None:
        """Let everything that there is be durable."""
        shutil.rmtree(self.kept, ignore_errors=True)
        self.kept.mkdir(parents=True)
        self.root.mkdir(exist_ok=True)
        for path in (self.root, *self.root.rglob("*")):
            if not path.is_symlink():
                file = os.open(path, os.O_RDONLY)
                assert self._library.power_keep(file, os.fsencode(self.kept)) == 0
                os.close(file)

    def cut(self, moment: random.Random) -> str:
        """Leave in the folder what a power cut may leave; return in words what became of the rest."""
        names, data = moment.choice(NAMES), moment.choice(BYTES)
        remains = Remains(self, moment, names, data)
        new = self.root.with_name(f"{self.root.name}.new")
        remains.write_folder(self.entry(self.root)[0], new)
        shutil.rmtree(self.root)
        new.rename(self.root)
        self.begin()
        return f"names {names}, bytes {data}: {', '.join(sorted(remains.changed)) or 'all was durable'}"

    def entry(self, path: Path) -> Entry:
        """The key and the type of a file."""
        found = ctypes.create_string_buffer(128)
        assert self._library.power_key(-100, os.fsencode(path), found, 128) == 0
        key, kind = found.value.decode().split(" ")
        return key, kind


@dataclass
class Remains:
    """What a power cut leaves. names, data: of `NAMES` and `BYTES`."""

    disk: Disk
    moment: random.Random
    names: str
    data: str

    def __post_init__(self) -> None:
        self.changed: set[str] = set()
        self._reached: dict[str, bool] = {}
        everything = [self.disk.root, *self.disk.root.rglob("*")]
        self._now = {self.disk.entry(path)[0]: path for path in everything}

    def write_folder(self, key: str, target: Path) -> None:
        """Write a folder with the names that it still has."""
        target.mkdir()
        listed, now = self.disk.kept / f"{key}.names", self._now.get(key)
        durable: dict[str, Entry] = {}
        for line in listed.read_text().splitlines() if listed.exists() else []:
            entry_key, kind, name = line.split(" ", 2)
            durable[name] = entry_key, kind
        present = {path.name: self.disk.entry(path) for path in now.iterdir()} if now else durable
        for name in sorted({*durable, *present}):
            if entry := self._entry(name, durable.get(name), present.get(name)):
                self._write(entry, target / name)

    def _entry(self, name: str, before: Entry | None, after: Entry | None) -> Entry | None:
        """What a name leads to: what it led to when its folder was fsynced, or what it leads to now."""
        if before == after:
            return before
        if after is not None and self._has_reached(after[0]):
            return after
        self.changed.add(name)
        # A rename that has reached the disk has taken the name away in the same moment.
        return None if before is None or self._has_reached(before[0]) else before

    def _has_reached(self, key: str) -> bool:
        some = self._reached.setdefault(key, self.moment.random() < 0.5)
        return {"lost": False, "reached": True, "any": some}[self.names]

    def _write(self, entry: Entry, target: Path) -> None:
        key, kind = entry
        if kind == "d":
            self.write_folder(key, target)
        elif kind == "l":
            if key in self._now:
                target.symlink_to(self._now[key].readlink())
        else:
            kept, now = self.disk.kept / f"{key}.data", self._now.get(key)
            durable = kept.read_bytes() if kept.exists() else b""
            found = now.read_bytes() if now else durable
            if found != durable:
                self.changed.add(target.name)
                found = self._bytes(durable, found)
            target.write_bytes(found)
            if now:
                shutil.copymode(now, target)

    def _bytes(self, durable: bytes, written: bytes) -> bytes:
        """Bytes of a file that was written to since its fsync: of each page those before or after."""
        how = self.moment.choice(BYTES[:-1]) if self.data == "any" else self.data
        if how == "lost":
            return durable
        pages = self.moment.randint(0, len(written) // PAGE)
        size = len(written) if how == "zeros" else max(pages * PAGE, min(len(durable), len(written)))
        return (written[: pages * PAGE] + durable[pages * PAGE :]).ljust(size, b"\0")[:size]
