"""Instances in SWE-bench's shape: read from JSON, JSON Lines, Parquet or the hub, and checked.

Two shapes are real. The classic one has twelve columns, and how its tests are run follows from repository and version.
The newer one (swebench 5) adds `image`, `eval_script`, `log_parser` and `eval_type`.
"""

import gzip
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from stages.errors import BadInput, UsageError
from stages.runs.records import Row

CLASSIC = (
    *("repo", "instance_id", "base_commit", "patch", "test_patch", "problem_statement", "hints_text", "created_at"),
    *("version", "FAIL_TO_PASS", "PASS_TO_PASS", "environment_setup_commit"),
)
NEWER = ("image", "eval_script", "log_parser", "eval_type")
LISTS = ("FAIL_TO_PASS", "PASS_TO_PASS")
OPTIONAL = frozenset({"hints_text", "created_at", "environment_setup_commit", "patch"})
"""Columns that nothing here depends on: rows of neighbouring data sets lack them."""
OPTIONAL_WITH_SCRIPT = OPTIONAL | {"version"}
READABLE = (".json", ".jsonl", ".ndjson", ".json.gz", ".jsonl.gz", ".parquet")
LITE = "SWE-bench/SWE-bench_Lite"


def load(path: Path) -> list[Row]:
    """The instances of a file; `BadInput` names a row that fits neither shape with its missing columns."""
    if not path.is_file():
        raise BadInput(f"There is no file of instances at {str(path)!r}. Give one of {', '.join(READABLE)}.")
    return checked(list(records(path)), str(path))


def checked(rows: Sequence[Any], where: str) -> list[Row]:
    """The rows, or a refusal that names the first that fits neither shape."""
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise BadInput(f"{where}, row {number}, is no instance but {str(row)[:60]!r}.")
        if lacking := missing_columns(row):
            name = row.get("instance_id", f"number {number}")
            raise BadInput(
                f"{where}, row {name}, fits no shape of SWE-bench: the classic one needs "
                f"{', '.join(lacking['classic'])}, the newer one {', '.join(lacking['newer'])}. "
                f"Get the rows from {LITE}, or add the columns."
            )
        if unread := next((name for name in LISTS if not is_list(row[name])), None):
            raise BadInput(
                f"{where}, row {row['instance_id']}: {unread} is no list of test names, nor one as JSON text, but "
                f"{str(row[unread])[:60]!r}."
            )
    return list(rows)


def is_list(value: Any) -> bool:
    """Whether a value is a list of names, or the JSON text of one."""
    try:
        value = orjson.loads(value) if isinstance(value, str) else value
    except orjson.JSONDecodeError:
        return False
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def missing_columns(row: Mapping[str, Any]) -> dict[str, list[str]]:
    """What a row lacks for each shape; nothing when it has one of them."""
    classic = [name for name in CLASSIC if row.get(name) is None and name not in OPTIONAL]
    newer = [name for name in (*CLASSIC, *NEWER) if row.get(name) is None and name not in OPTIONAL_WITH_SCRIPT]
    return {"classic": classic, "newer": newer} if classic and newer else {}


def is_newer(row: Mapping[str, Any]) -> bool:
    """Whether the row says by itself how its tests are run."""
    return all(row.get(name) for name in NEWER)


def records(path: Path) -> Iterator[Any]:
    """What a file holds: rows of a table, lines of JSON Lines, or elements (or values) of one JSON document."""
    if path.name.endswith(".parquet"):
        yield from _parquet(path)
        return
    data = path.read_bytes()
    text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    try:
        whole = orjson.loads(text)
    except orjson.JSONDecodeError:
        yield from _lines(text, path)
        return
    if isinstance(whole, dict) and "instance_id" not in whole:
        yield from whole.values()
    else:
        yield from whole if isinstance(whole, list) else [whole]


def _lines(text: bytes, path: Path) -> Iterator[Any]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise BadInput(f"{path}, line {number}, is not valid JSON ({error}).") from None


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        yield from pq.read_table(path).to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        raise BadInput(f"{path} cannot be read as Parquet ({error}).") from None


def from_hub(name: str, split: str) -> list[Row]:
    """The rows of a data set on the hub; `UsageError` says what to do without a connection."""
    from datasets import load_dataset

    try:
        return checked([dict(row) for row in load_dataset(name, split=split)], name)
    except BadInput:
        raise
    except Exception as error:  # The library lets out whatever its transport raises.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"The data set {name} cannot be fetched ({reason}). Without a connection give a file of instances: "
            "--set env.path=FILE (JSON, JSON Lines or Parquet); `--env swe-mini` brings its own, and "
            "`composer swe check` tells what else is lacking."
        ) from None


# ---- instance_index
# Instance rows for saved logs: those nearest to a log, those that were given, those beside the folder of logs.


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
        return sorted(path for path in folder.iterdir() if path.name.endswith(READABLE) and path.is_file())
    except OSError:
        return []


def _rows(paths: Iterable[Path], *, required: bool = False) -> dict[str, Row]:
    """Rows with lists of tests, the first of every id; a file that cannot be read is passed over, if not required."""
    by_id: dict[str, Row] = {}
    for path in paths:
        try:
            rows = list(records(path))
        except (BadInput, OSError, EOFError, zlib.error):
            if required:
                raise
            continue
        for row in rows:
            if isinstance(row, dict) and "instance_id" in row and all(is_list(row.get(name)) for name in LISTS):
                by_id.setdefault(str(row["instance_id"]), row)
    return by_id
