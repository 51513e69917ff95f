"""Instance rows for saved logs: those nearest to a log, those that were given, those beside the folder of logs."""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from stages.envs.swe import instances
from stages.errors import BadInput
from stages.runs.records import Row


class InstanceIndex:
    """Instance rows by id. `folder` is where the logs begin, `given` are further files of rows."""

    def __init__(self, folder: Path, given: Sequence[Path]) -> None:
        self._folder, self._given = folder.resolve(), given
        self._by_folder: dict[Path, dict[str, Row]] = {}
        self._further: dict[str, Row] | None = None

    def near(self, instance: str, log_folder: Path) -> Row | None:
        """The row in the folder of a log, or in one above it up to where the logs begin."""
        for folder in (log_folder, *log_folder.parents):
            if not folder.is_relative_to(self._folder):
                return None
            if folder not in self._by_folder:
                self._by_folder[folder] = _rows(_tables(folder))
            if row := self._by_folder[folder].get(instance):
                return row
        return None

    def elsewhere(self, instance: str) -> Row | None:
        """The row in given files, or in files called after SWE-bench in the two folders above and the folders in those.

        `BadInput`, `OSError` or zlib.error where a given file cannot be read.
        """
        if self._further is None:
            self._further = {**_rows(self._beside()), **_rows(self._given, required=True)}
        return self._further.get(instance)

    def _beside(self) -> Iterator[Path]:
        for above in self._folder.parents[:2]:
            if above != above.parent:
                for folder in (above, *_folders(above)):
                    yield from (path for path in _tables(folder) if "swe" in path.name or "instances" in path.name)


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []


def _tables(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.name.endswith(instances.READABLE) and path.is_file())
    except OSError:
        return []


def _rows(paths: Iterable[Path], *, required: bool = False) -> dict[str, Row]:
    """Rows with lists of tests, the first of every id; a file that cannot be read is passed over, if not required."""
    by_id: dict[str, Row] = {}
    for path in paths:
        try:
            rows = list(instances.records(path))
        except (BadInput, OSError, EOFError, zlib.error):
            if required:
                raise
            continue
        for row in rows:
            if (
                isinstance(row, dict)
                and "instance_id" in row
                and all(instances.is_list(row.get(name)) for name in instances.LISTS)
            ):
                by_id.setdefault(str(row["instance_id"]), row)
    return by_id
