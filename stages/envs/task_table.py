"""Tasks and rows that the user names by path: the task table of a run in its order, and files of JSON lines.

Also shared by environments whose tasks are the user's own: how rows are divided into train and eval, and the error for
those that cannot be used.
"""

import gzip
import json
import math
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from composer_stages import json_text
from composer_stages.data_files import load_toml
from composer_stages.envs.base import Split, Task
from composer_stages.errors import BadInput, InfrastructureError, UsageError
from composer_stages.runs import hub, store
from composer_stages.runs.kinds import TASK, Row
from composer_stages.runs.run import Run
from composer_stages.words import Sentence

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = ("task_id", "env", "split", "family", "prompt")


def read_task(row: Mapping[str, Any]) -> Task:
    """Return the task of a `task/1` row."""
    return Task(**{name: row[name] for name in COLUMNS}, data=orjson.loads(row["data_json"]))


def read_tasks(folder: str, env: str, split: Split, count: int) -> list[Task]:
    """Return at most `count` tasks of a split from a run, in its order; raise UsageError for another environment's."""
    run = Run(Path(folder).expanduser())
    chosen = [read_task(row) for row in run.scan(TASK).rows() if row["split"] == split][:count]
    if not chosen:
        raise UsageError("envs.no-task-of-split-in-run", folder=folder, split=split)
    if environments := sorted({task.env for task in chosen} - {env}):
        raise UsageError("envs.other-environment", folder=folder, other=environments[0], env=env)
    return chosen


def selected_by(values: Iterable[Any]) -> list[str]:
    """Return the digests of the rollouts that selected the tasks of those of these values that are paths of runs."""
    paths = (Path(value).expanduser() for value in values if isinstance(value, str) and value)
    runs = (Run(path) for path in paths if (path / "manifest.json").is_file())
    return sorted({digest for run in runs for digest in run.manifest.summary.get("selected_by", ())})


def identity(folder: str) -> str:
    """Return a digest of a run's tasks, independent of the run's path."""
    run = Run(Path(folder).expanduser())
    return store.digest([output["content_sha256"] for name, output in run.manifest.outputs.items() if name == "tasks"])


def read_rows(path: Path, *, measured: bool = True) -> list[Row]:
    """Read a file of JSON objects, one a line, or a Parquet file.

    A file named *.gz is unpacked. The tokens NaN, Infinity and -Infinity, which are no JSON but which Python and others
    write, are the numbers that they say, or None where the rows are measured: such a number is unknown. Raises BadInput
    with the file, and the line where there is one.
    """
    if path.suffix == ".parquet":
        return list(read_parquet(path).to_pylist())
    lines = numbered_lines(path)
    return [parse_line(line, f"{path}, line {number}: ", measured=measured) for number, line in lines]


def read_parquet(path: Path) -> "pa.Table":
    """Read a Parquet file; BadInput where it is none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with path.open("rb") as file:
            return pq.read_table(file)
    except pa.ArrowException as error:
        raise BadInput("envs.parquet-not-readable", path=path, error=error) from None
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> BadInput:
    reason = error.strerror or error
    return BadInput("envs.file-unreadable", path=path, reason=reason, nearest=store.nearest(path))


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file that are not blank with their numbers; BadInput where it cannot be read."""
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8-sig")
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise BadInput("envs.file-damaged", path=path, error=error) from None
    except OSError as error:
        raise _unreadable(path, error) from None
    # split and not splitlines, which also cuts at U+2028 and its like, and these are legal inside a JSON string.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    # One that is nested too deeply is no array of rows: who reads the line says so.
    first = lines[0][1].strip() if lines else ""
    if first == "{" or (first[:1] == "[" and json_text.depth(first) <= json_text.MOST_LEVELS):
        raise BadInput("envs.file-is-one-document", path=path)
    yield from lines


def parse_line(line: str, prefix: str = "", *, measured: bool = False) -> Row:
    """Return the JSON object of a line; `BadInput` gives the place and the reason where it is not one.

    measured: NaN and infinities are None.
    """
    try:
        # json and not orjson, which refuses these tokens, and makes floats of large integers.
        constant = (lambda _: None) if measured else None
        row = json_text.loads(line, parse_constant=constant, parse_float=_float, object_pairs_hook=_object)
    except json.JSONDecodeError as error:  # its own line is that within the text, which is always the first
        written = "comma" if line.rstrip().endswith("},") else "python" if PYTHON.search(line) else ""
        reason, column = error.msg.removesuffix(" at"), error.colno  # "Unterminated string starting at"
        raise BadInput("envs.line-not-json-at", prefix=prefix, reason=reason, column=column, written=written) from None
    except json_text.TooDeep as error:
        raise BadInput("envs.line-too-deep", prefix=prefix, error=error) from None
    except ValueError as error:
        raise BadInput("envs.line-not-json", prefix=prefix, error=error) from None
    if not isinstance(row, dict):
        raise BadInput("envs.line-not-an-object", prefix=prefix, text=line.strip()[:40])
    return row


def _float(text: str) -> float:
    """Return a number with a decimal point or an exponent; ValueError for one that no float holds."""
    number = float(text)
    if math.isinf(number) or (number == 0 and re.match(r"-?[0.]*[1-9]", text)):
        raise ValueError(Sentence("envs.number-not-held", text=text[:40], number=number))
    return number


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; ValueError where a field stands in it twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError(
            Sentence("envs.field-twice", field=next(n for n, _ in pairs if [k for k, _ in pairs].count(n) > 1))
        )
    return fields


def hub_rows(dataset: str, remedy: str, config: str | None = None, parts: Sequence[str] = ()) -> dict[str, list[Row]]:
    """Load the rows of a data set of the hub, or of a folder of its files, by split.

    config: the configuration of the data set, its default one where it is None. parts: splits, of which the first that
    it has is loaded alone. Raises InfrastructureError where the hub does not answer, and BadInput where it has no such
    data set, both with the remedy, or none of the splits.
    """
    import datasets  # optional, and slow to import

    try:
        with hub.offline_if_unreachable():
            loaded = datasets.load_dataset(dataset, config)
    except Exception as error:  # any error of a download: the libraries below have no common base class
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        reason = hub.unreachable()
        kind = InfrastructureError if reason else BadInput
        raise kind(Sentence("envs.download-failed", dataset=dataset, reason=reason or first, remedy=remedy)) from None
    chosen = next(([name] for name in parts if name in loaded), [] if parts else [*loaded])
    if not chosen:
        raise BadInput("envs.no-split", dataset=dataset, parts=parts, splits=[*loaded])
    return {str(name): loaded[name].to_list() for name in chosen}


HUB_SPLITS: dict[str, Split] = {"train": "train", "test": "eval", "validation": "eval"}
"""Split of a data set of the hub -> ours."""
HELD_OUT = 5
"""One in this many rows of a single file is held out."""


def is_held_out(digest: str) -> bool:
    """Return whether the digest of a row puts it into the evaluation split, for a source without splits.

    Every fifth one is, on average, whatever else the file holds.
    """
    return int(digest[:12], 16) % HELD_OUT == 0


PYTHON = re.compile(r"^\s*\{\s*'|[:,\[]\s*(?:None|True|False)\b")
"""What a line has that is a dictionary of Python and no JSON."""
MEANT = load_toml(__package__, "fields.toml")


def meant_field(field: str, fields: Collection[str]) -> list[str]:
    """Return the field that an unknown one may stand for, in a list, by what other programs call it or its spelling."""
    named = [name for name in MEANT.get(field, ()) if name in fields]
    return named[:1] or get_close_matches(field, fields, 1)


def no_such_field(field: str, fields: Collection[str], near: Sequence[str] = ()) -> Sentence:
    """Return what is said of a field that rows do not have. near: fields that may be meant, where no table knows it."""
    return Sentence("envs.no-such-field", field=field, near=" or ".join(meant_field(field, fields) or near))


MOST_REPORTED = 20
"""Tasks that cannot be used and are named; the number of all is given."""


class TooManyTasks(UsageError):
    """A split has fewer tasks than were requested.

    most: how many there are.
    """

    def __init__(self, code: str, *, most: int = 0, **values: Any) -> None:  # unpickling sets `most` afterwards
        super().__init__(code, most=most, **values)
        self.most = most


def draw_rows(path: str, splits: Mapping[Split, Sequence[Row]], split: Split, count: int, seed: int) -> list[Row]:
    """Return the first `count` rows of a split in an order drawn from the seed.

    `TooManyTasks`, with how many may be asked for, where there are not as many.
    """
    most = len(splits[split])
    if count <= most:
        return order_rows(splits[split], seed)[:count]
    sizes = [f"{len(rows)} for {name}" for name, rows in splits.items() if name != split]
    divisions = (row[DIVIDED_BY]["eval_share"] for rows in splits.values() for row in rows if DIVIDED_BY in row)
    raise TooManyTasks(
        "envs.too-many-tasks",
        most=most,
        path=path,
        split=split,
        count=count,
        sizes=sizes,
        eval_share=next(divisions, None),
    )


def order_rows(rows: Sequence[Row], seed: int, key: str = "id") -> list[Row]:
    """Return the rows in an order drawn from the seed. key: the column that identifies a row."""
    # By digest, so that a longer list starts with the shorter one and another order of rows changes nothing.
    return sorted(rows, key=lambda row: store.digest([seed, row[key]]))


DIVIDED_BY = "divided_by"
"""The key of a row, and of its task's data, that holds how train and eval were drawn; absent where the rows say."""


def check_eval_share(eval_share: float) -> None:
    """Raise UsageError for a share of held-out families below 0, or from 1 on."""
    if not 0 <= eval_share < 1:
        raise UsageError("envs.eval-share-out-of-range", eval_share=eval_share)


def split_rows(rows: Sequence[Row], seed: int, eval_share: float) -> dict[Split, list[Row]]:
    """Return the rows of each split: by their field `split`, or by family where no row has one.

    By family: the families in an order drawn from the seed, and of these the first `eval_share`, at least one unless
    it is 0, for eval; such rows have both numbers as `DIVIDED_BY`. A family alone is for training. UsageError where
    rows with and without a split are mixed, or a family is in both.
    """
    named_splits = [row["split"] for row in rows if row["split"] is not None]
    if named_splits and len(named_splits) < len(rows):
        raise UsageError("envs.some-have-splits", num_with_split=len(named_splits), num_tasks=len(rows))
    families = list(dict.fromkeys(family_of(row) for row in rows))
    if named_splits:
        parts: dict[Split, list[Row]] = {"train": [], "eval": []}
        for row in rows:
            parts["train" if row["split"] == "train" else "eval"].append(row)
        if both := sorted({family_of(row) for row in parts["train"]} & {family_of(row) for row in parts["eval"]}):
            raise UsageError("envs.family-in-both-splits", family=both[0])
        return parts
    ordered = sorted(families, key=lambda family: store.digest([seed, family]))
    most = min(max(1, round(eval_share * len(ordered))), len(ordered) - 1) if eval_share else 0
    held_out = set(ordered[:most])
    # In each task's data, and so in the runs: the options of a run hold only those that were given.
    marked = [{**row, DIVIDED_BY: {"split_seed": seed, "eval_share": eval_share}} for row in rows]
    return {
        "train": [row for row in marked if family_of(row) not in held_out],
        "eval": [row for row in marked if family_of(row) in held_out],
    }


def family_of(row: Mapping[str, Any]) -> str:
    """Return a task's family; a task without one is its own."""
    return str(row["family"] or row["id"])
