"""Tables with an id and a score a row: CSV, JSON Lines, a JSON array or Parquet, each cell as it stands in its file.

An id is the text of its cell, to the character. Where ids repeat and a column tells them apart (`SPACES`), a task has
both as its id. All columns that may be the score are read, by name or path (`rubric.accuracy`); of a table with a row
for each metric, each metric is one. What is missing, doubled or unreadable is refused with its row or line.
"""

import csv
import io
import json
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import inf
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv
import pyarrow.json as pjson
import pyarrow.parquet as pq

from composer_stages import json_text
from composer_stages.data_files import load_toml
from composer_stages.errors import BadInput, UsageError
from composer_stages.formats import readers, reading
from composer_stages.formats.base import FIELDS, Drop
from composer_stages.formats.files import LFS, Source
from composer_stages.formats.measurement import ENDED_IN_ERROR, ScoreKind
from composer_stages.formats.reports import STATS, Sidecars
from composer_stages.runs import store
from composer_stages.words import Sentence

CSV = re.compile(r"\.(csv|tsv)(\.gz)?$", re.IGNORECASE)
DATA = load_toml(__package__, "columns.toml")
NAMES: dict[str, list[str]] = DATA["names"]
"""Columns by what they hold."""
COSTS: dict[str, list[str]] = DATA["costs"]
"""Columns of what a row cost, by those of items."""
SCORES = [*NAMES["verdicts"], *NAMES["scores"]]
COUNTED = frozenset(NAMES["verdicts"]) - {"score", "reward", "value"}
"""Columns of verdicts that may be numbers of successes."""
ROW, IDS_OF_ITEMS = "id", ("question_id", "example_id", "item_id")
"""The id that may be the number of a row alone, and those that name what was asked."""
OF_FAILURES = {"accuracy", "correct_count", "total_count"}
"""Keys of the first line of the Berkeley Function Calling Leaderboard's scores; the others are failures."""
SCORE_ROOTS = frozenset([*SCORES, *NAMES["groups"]])
"""Columns that are scores, or hold scores by their keys."""
BENCHMARKS, WITHIN = (
    [f"{word}{end}" for word in DATA["spaces"][name] for end in DATA["spaces"]["ends"]]
    for name in ("benchmark", "within")
)
"""Columns of what the tasks are of: of other benchmarks, and of other parts of one."""
SPACES = [*BENCHMARKS, *WITHIN, "type", *NAMES["families"]]
"""Columns that tell tasks apart whose ids are the same."""
OF_COSTS = frozenset(chain(*COSTS.values()))
KNOWN = frozenset(chain(SPACES, *NAMES.values(), OF_COSTS))
SHARED = re.compile(DATA["patterns"]["shared"], re.IGNORECASE | re.VERBOSE)
"""Columns whose values several tasks may share, which are then no independent evidence."""
NO_NAME: str = DATA["patterns"]["no_name"]
NO_ERROR: str = DATA["patterns"]["no_error"]
TOTAL: str = DATA["patterns"]["total"]
MEASURING = re.compile("|".join(DATA["patterns"]["measuring"]))
"""Settings by which two sides were asked or counted differently."""
REPEATS, RUNS = (re.compile(DATA["patterns"][name], re.IGNORECASE | re.VERBOSE) for name in ("repeats", "runs"))
"""Columns of repeats by their names, and those of runs, which are repeats where their values differ in a number."""
NUMBERS = r"\s|[0-9a-f]{8,}|\d"
FEWEST_TASKS, MOST_ALIKE = 5, 0.9
"""From how many tasks on a column is no repeats' by chance, and the share of them that have as many rows of a value."""
NULLS = pcsv.ConvertOptions().null_values
WORDS = {"true": "1", "True": "1", "TRUE": "1", "false": "0", "False": "0", "FALSE": "0"}
"""Truth values in CSV, which has no types."""
ROUNDED = r"^-?\d(?:\.\d+)?[eE]\+\d\d+$|^-?\d\.\d{6,}[eE]\d+$"
"""An integer that some program has held as a floating-point number, and with it its neighbours: Excel has 5 digits."""
UUID = "extension<arrow.uuid>"
CHATS, CHAT_SCORES = "messages", frozenset([*FIELDS["columns"]["verdict"], *FIELDS["columns"]["reward"]])
CHUNK = 1 << 16
DAMAGE = (EOFError, zlib.error, OSError, pa.ArrowException)


@dataclass(frozen=True)
class Columns:
    """What a user says of a table's columns, empty where nothing is said."""

    unit: str = ""
    ids: tuple[str, ...] = ()
    scores: tuple[str, ...] = ()
    outer: tuple[str, ...] = ()
    """Columns that tell equal ids of another side apart."""
    counted: tuple[tuple[str, str, str], ...] = ()
    """Scores that are shares of a column on another side: both names, and that side's."""
    every: bool = False
    """Whether columns of which nothing is known are read."""

    def reads(self, name: str) -> bool:
        """Return whether a column of the file is read, by its name."""
        named = {*self.ids, *self.outer, *self.scores, self.unit} - {""}
        return (
            self.every
            or name in KNOWN
            or name in named
            or SHARED.fullmatch(name) is not None
            or any(path.startswith(f"{name}.") or name.startswith(f"{path}.") for path in named)
        )

    def choose(self, path: str, names: Sequence[str]) -> list[str]:
        """Return the columns to read of a file; `BadInput` where it lacks an id or a score, or has one twice."""
        chosen = list(filter(self.reads, names))
        if self.every:
            return [name for name in chosen if names.count(name) == 1]
        if twice := next((name for name in chosen if names.count(name) > 1), None):
            raise BadInput("comparison.column-twice", path=path, column=twice)
        has_id, has_score = self.ids or {*NAMES["ids"]} & {*names}, self.scores or SCORE_ROOTS & {*names}
        if not (has_id and has_score):
            ids, scores = () if has_id else NAMES["ids"], () if has_score else SCORES
            plain = {name.strip().casefold(): name for name in names}
            near = {
                noun: next((plain[name] for name in words if name in plain), "")
                for noun, words in (("id", NAMES["ids"]), ("score", SCORES))
            }
            raise BadInput("comparison.no-table", label=path, ids=ids, scores=scores, columns=names, near=near)
        return chosen


EVERY_COLUMN = Columns()


@dataclass(frozen=True)
class ScoreTable:
    """The rows of a table: their texts by what they are in an item, and their scores by kind.

    id_columns: of the task's id, which is that of the last one within the others. numbered: ids are numbers beside
    questions, which then tell what the tasks are. groups: columns whose values tasks may share. judges: who
    scored each row, null where that is not recorded. weights: columns of weights that differ. counts: scores that are
    shares of a column by their names, which were numbers of successes or points. settings: what all rows say alike of
    how they were measured.
    """

    texts: Mapping[str, pa.ChunkedArray | pa.Array]
    scores: Mapping[str, pa.ChunkedArray]
    kinds: tuple[ScoreKind, ...]
    id_columns: tuple[str, ...]
    numbered: bool
    groups: Mapping[str, pa.ChunkedArray | pa.Array]
    judges: pa.ChunkedArray | pa.Array
    weights: tuple[str, ...]
    counts: Mapping[str, str]
    settings: Mapping[str, str]

    def __len__(self) -> int:
        return len(self.texts["task"])


def is_csv(name: str) -> bool:
    """Return whether a file of this name is CSV or TSV, or packed so."""
    return bool(CSV.search(name))


def read_table(path: str, source: Source, columns: Columns) -> ScoreTable | None:
    """Return the scores of a file that is of no program; None for one of a program.

    `BadInput` for what no score can be read from, `UsageError` for a named column that it lacks.
    """
    table = _load(path, source, columns)
    if table is None:
        return None
    if not len(table):
        raise BadInput("comparison.no-row", path=path)
    table = _unnested(table, columns)
    names = table.column_names
    for name in (*columns.ids, *columns.outer):
        if name not in names:
            outer = name if name in columns.outer else ""
            raise UsageError("comparison.no-id-column", path=path, column=name, columns=names, outer=outer)
    if columns.unit and columns.unit not in names:
        raise UsageError("comparison.no-unit-column", label=path, column=columns.unit, columns=names)
    try:
        texts = {name: _text(table[name]) for name in names if name not in SCORES}
    except pa.ArrowInvalid as error:
        raise BadInput("comparison.not-text", path=path, line=0, encoding="utf-8", problem=str(error)) from None

    def first(options: Sequence[str], *but: str) -> Any:
        name = next((name for name in options if name in texts and name not in but), None)
        return pa.nulls(len(table), pa.string()) if name is None else texts[name]

    named = [name for name in NAMES["metrics"] if name in texts and name not in columns.ids]
    named = [name for name in named if not pc.all(_is_empty(texts[name])).as_py()] or _measures(texts, columns.ids)
    metrics = _together(path, named, texts)
    id_columns = columns.ids or _id_columns(texts, first(NAMES["models"]), metrics, columns.outer)
    tasks = _together(path, id_columns, texts)
    rounded = pc.index(pc.match_substring_regex(tasks, ROUNDED), True).as_py()
    if rounded >= 0:
        raise BadInput(
            "comparison.rounded-id", path=path, column=id_columns[-1], id=tasks[rounded].as_py(), row=rounded + 1
        )
    model = first(NAMES["models"])
    samples = _codes(model, tasks, *(() if metrics is None else (metrics,)))
    if int(samples.max()) + 1 < len(table):
        _require_repeats(path, source, columns, id_columns, samples)
    shared = [
        name
        for name in texts
        if (SHARED.fullmatch(name) or name in {*NAMES["questions"], *IDS_OF_ITEMS}) and name not in id_columns
    ]
    shared += id_columns[-1:] if id_columns[1:] else []
    cells = {
        **{name: texts[name] for name in shared},
        **{name: _costs(table, names, is_csv(source.path.name)) for name, names in COSTS.items()},
        "judge": first(NAMES["judges"]),
        "model": pc.if_else(_is_empty(model), None, model),
        "env": _benchmark(first(["benchmark", "dataset"], *id_columns)),
        "reason": _errors(texts, first(())),
        "task": tasks,
        "family": first(NAMES["families"], *id_columns),
        "unit": texts[columns.unit] if columns.unit else first(()),
    }
    asked_in = next((name for name in NAMES["questions"] if name in texts), None)
    numbered = False
    if asked_in:
        cells["question"] = _questions(texts, asked_in, tasks)
        if not columns.ids:
            numbered = asked_in != id_columns[-1] and bool(
                pc.all(pc.match_substring_regex(texts[id_columns[-1]], r"^\d+$")).as_py()
            )
            _require_one_question(path, id_columns, cells, texts[asked_in])
    else:
        cells["question"] = first(())
    scores = _scores(path, table, columns, id_columns, is_csv(source.path.name))
    if not scores:
        raise BadInput(
            "comparison.no-table",
            label=path,
            ids=(),
            scores=SCORES,
            columns=names,
            near=dict.fromkeys(("id", "score"), ""),
        )
    counts = _counts(path, table, scores, columns, is_csv(source.path.name))
    kinds = tuple(ScoreKind(name, "" if name in NAMES["verdicts"] else name) for name in scores)
    if metrics is not None:
        cells, scores, kinds = _by_metric(cells, scores, metrics)
    groups = {name: cells[name] for name in shared}
    weights = tuple(name for name in NAMES["weights"] if name in texts and pc.count_distinct(texts[name]).as_py() > 1)
    said = [name for name in (*SPACES, *NAMES["settings"]) if name in texts and name not in id_columns]
    stated = {name: pc.unique(texts[name]) for name in said}
    settings = {name: str(values[0]) for name, values in stated.items() if len(values) == 1 and values[0].is_valid}
    return ScoreTable(cells, scores, kinds, id_columns, numbered, groups, cells["judge"], weights, counts, settings)


# Files.


def _load(path: str, source: Source, columns: Columns) -> pa.Table | None:
    """Return the columns of a file that are read; None for a file of a program, and for one that is no table."""
    if is_csv(source.path.name):
        return _load_csv(path, source, columns)
    with source.unpacked() as file:
        is_parquet = file.read(4) == b"PAR1"
    first, damage, records = None, list[Drop](), source.records()
    for item in records:
        if not isinstance(item, Drop):
            first = item[1]
            break
        damage.append(item)
    if first is None and damage:
        raise unreadable(path, damage[0])
    if not isinstance(first, dict):
        return None
    formats = {reader.name for reader in readers("auto") if reading.fits(reader, first)}
    # A table may hold chats beside scores that a set of chats has no name for.
    if formats and not (formats == {CHATS} and SCORE_ROOTS & first.keys() and not CHAT_SCORES & first.keys()):
        return None
    if first.keys() == OF_FAILURES:
        raise BadInput("comparison.failures-alone", path=path)
    if not is_parquet:
        has_id = columns.ids or any(isinstance(first.get(name), str | int | float) for name in NAMES["ids"])
        if (not has_id or STATS in first) and next(records, None) is None:
            if Sidecars().add(source, first):
                raise BadInput("comparison.numbers-of-runs", path=path, keys=[*first])
            raise BadInput("comparison.one-object", path=path, keys=[*first])
        return _load_json(path, source, columns)
    try:
        rows = pq.ParquetFile(source.path, pre_buffer=False)
        table = rows.read(columns.choose(path, rows.schema_arrow.names))
        table.validate(full=True)
    except DAMAGE as error:
        raise BadInput("comparison.unreadable", path=path, problem=str(error)) from None
    return table


def unreadable(path: str, damage: Drop) -> BadInput:
    """Return the refusal of a file with a record that cannot be read at all."""
    at = {"path": path, "line": damage.line}
    match damage.reason:
        case "not_utf8":
            return BadInput("comparison.not-text", **at, encoding="utf-8", problem=damage.detail)
        case "not_json" | "too_deep":
            return BadInput("comparison.line-no-json", **at, detail=damage.detail)
        case "unread_kind":
            return BadInput("comparison.unread-kind", path=path, problem=damage.detail)
        case _:
            return BadInput("comparison.unreadable", path=path, problem=damage.detail)


def _load_csv(path: str, source: Source, columns: Columns) -> pa.Table:
    """Return the read columns of CSV or TSV as text; `BadInput` with the line of what is no row of the table."""
    csv.field_size_limit(sys.maxsize)
    delimiter = "\t" if ".tsv" in source.path.name.lower() else ","
    line, parts = 0, list[pa.Table]()
    try:
        with source.unpacked() as file:
            head = file.read(len(LFS))
        if head == LFS:
            raise BadInput("comparison.unreadable", path=path, problem=Sentence("formats.lfs-pointer"))
        encoding = json.detect_encoding(head[:4])
        if (table := _load_plain_csv(path, source, columns, delimiter)) is not None:
            return table
        with source.unpacked() as file, io.TextIOWrapper(file, encoding, newline="") as text:
            rows = csv.reader(text, delimiter=delimiter, strict=True)
            names = next((row for row in rows if row), [])
            if len(names) == 1 and re.search(r"[;\t|]", names[0]):
                raise BadInput("comparison.other-separator", path=path, head=names[0], row=next(rows, []))
            chosen = columns.choose(path, names) if names else []
            numbers = [names.index(name) for name in chosen]
            cells: list[list[str]] = [[] for _ in chosen]
            line, width = rows.line_num, len(names)
            for row in rows:
                if len(row) == width:
                    for column, number in zip(cells, numbers, strict=True):
                        column.append(row[number])
                    if len(cells[0]) == CHUNK:
                        parts.append(_of_texts(chosen, cells))
                        cells = [[] for _ in chosen]
                elif row:
                    raise BadInput(
                        "comparison.other-columns", path=path, line=line + 1, row=row, number=len(row), columns=names
                    )
                line = rows.line_num
    except UnicodeDecodeError as error:
        with source.unpacked() as file:  # text is decoded ahead of its rows
            line = next((at for at, text in enumerate(file, 1) if text != text.decode(errors="ignore").encode()), 0)
        line = line if encoding.startswith("utf-8") else 0
        raise BadInput("comparison.not-text", path=path, line=line, encoding=encoding, problem=error.reason) from None
    except csv.Error as error:
        raise BadInput("comparison.bad-csv", path=path, line=line + 1, problem=str(error)) from None
    except DAMAGE as error:
        raise BadInput("comparison.unreadable", path=path, problem=str(error)) from None
    return pa.concat_tables([*parts, _of_texts(chosen, cells)])


def _load_plain_csv(path: str, source: Source, columns: Columns, delimiter: str) -> pa.Table | None:
    """Return the read columns of CSV whose quotes are all around fields; None for any other.

    Arrow reads these alike, and faster.
    """
    with source.unpacked() as file:
        text = file.read()
    first = text.partition(b"\n")[0].removesuffix(b"\r")
    if not first.isascii() or re.search(rb"[\0\r]", first) or delimiter.encode() not in first or first.count(b'"') % 2:
        return None
    characters = np.frombuffer(b"\n%b\n" % text, np.uint8)
    quotes, ends = np.flatnonzero(characters == ord('"')), np.frombuffer(b"\r\n" + delimiter.encode(), np.uint8)
    if len(quotes) % 2 or not np.isin(characters[np.r_[quotes[::2] - 1, quotes[1::2] + 1]], ends).all():
        return None
    names = next(csv.reader([first.decode()], delimiter=delimiter))
    chosen = columns.choose(path, names)
    numbers = [f"{names.index(name)}" for name in chosen]
    with suppress(pa.ArrowInvalid):  # of which the other reader names the line
        table = pcsv.read_csv(
            pa.BufferReader(text),
            pcsv.ReadOptions(column_names=[f"{number}" for number in range(len(names))], skip_rows_after_names=1),
            pcsv.ParseOptions(delimiter=delimiter, newlines_in_values=b'"' in text),
            pcsv.ConvertOptions(include_columns=numbers, column_types=dict.fromkeys(numbers, pa.string())),
        )
        return table.rename_columns(chosen)
    return None


def _of_texts(names: Sequence[str], cells: Sequence[Sequence[str | None]]) -> pa.Table:
    try:
        return pa.table([pa.array(column, pa.string()) for column in cells], names=list(names))
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair, which no file can keep
        return _of_texts([*_kept(names)], [[*_kept(column)] for column in cells])


def _kept(texts: Iterable[Any]) -> Iterator[Any]:
    return (text and text.encode(errors="backslashreplace").decode() for text in texts)


def _load_json(path: str, source: Source, columns: Columns) -> pa.Table:
    """Return the read columns of JSON Lines or of an array of objects, as text where Arrow would change an id."""
    # What Arrow cannot read, or unpack, is read once more by lines, which names the line that is at fault.
    with suppress(pa.ArrowInvalid, OSError):
        with pa.input_stream(str(source.path)) as stream:
            text = stream.read()
        # Arrow's reader takes any depth, until the stack of the process is full and it ends.
        if json_text.depth(text) <= json_text.MOST_LEVELS:
            table = pjson.read_json(pa.BufferReader(text), pjson.ReadOptions(block_size=16 << 20))
            table = table.select(columns.choose(path, table.column_names))
            table.validate(full=True)  # Arrow reads bytes that are no UTF-8 as text
            if not any(_is_changed(field, columns) for field in table.schema):
                return table
    cells, texts, names, num = dict[str, list[str | None]](), dict[str, set[int]](), dict[str, None](), 0
    for item in source.records(EXACT):
        if isinstance(item, Drop):
            raise unreadable(path, item)
        line, record = item
        if not isinstance(record, dict):
            raise BadInput("comparison.line-no-object", path=path, line=line)
        names |= dict.fromkeys(record)
        for name in filter(columns.reads, record):
            for leaf, value in _leaves(name, record[name], columns):
                if isinstance(value, Twice):
                    raise BadInput("comparison.column-twice", path=f"{path}:{line}", column=leaf)
                column = cells.setdefault(leaf, [])
                column += [None] * (num - len(column)) + [_as_text(value)]
                if isinstance(value, str) and not isinstance(value, Number):
                    texts.setdefault(leaf, set()).add(num)
        num += 1
    for name in {*NAMES["ids"], *columns.ids} & cells.keys():
        as_text = {cells[name][row] for row in texts.get(name, ())}
        for row, id_text in enumerate(cells[name] if as_text else ()):
            if id_text in as_text and row not in texts[name]:
                raise BadInput("comparison.id-as-number-and-text", path=path, row=row + 1, column=name, id=id_text)
    columns.choose(path, list(names))
    return _of_texts([*cells], [column + [None] * (num - len(column)) for column in cells.values()])


class Number(str):
    """The text of a number in JSON."""


class Twice(str):
    """The name of a key that an object has twice."""


def _exact(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        record |= {name: Twice(name) for name in record if names.count(name) > 1}
    return record


EXACT = partial(json.loads, object_pairs_hook=_exact, parse_int=Number, parse_float=Number)


def _is_changed(field: pa.Field, columns: Columns) -> bool:
    """Return whether Arrow reads a JSON column as another thing than its text: times, and ids as doubles."""
    is_score = field.name in SCORE_ROOTS or field.name in columns.scores
    if pa.types.is_nested(field.type):
        return True
    return pa.types.is_temporal(field.type) or (pa.types.is_floating(field.type) and not is_score)


def _unnested(table: pa.Table, columns: Columns) -> pa.Table:
    """Return a table with a column of text for each value within its nested ones."""
    for name in [field.name for field in table.schema if pa.types.is_nested(field.type)]:
        cells = dict[str, list[str | None]]()
        for row, nested in enumerate(table[name].to_pylist()):
            for leaf, value in _leaves(name, nested, columns):
                cells.setdefault(leaf, [None] * len(table))[row] = _as_text(value)
        table = table.drop_columns([name])
        for leaf, column in cells.items():
            table = table.append_column(leaf, pa.array(column, pa.string()))
    return table


def _leaves(name: str, value: Any, columns: Columns) -> Iterator[tuple[str, Any]]:
    """Yield the values within a value by their paths; of what is no score or id, the whole value."""
    root = name.partition(".")[0]
    is_apart = root in SCORE_ROOTS or any(path.startswith(f"{root}.") for path in (*columns.ids, *columns.scores))
    if not is_apart or not isinstance(value, dict | list):
        yield name, value
        return
    for key, inner in value.items() if isinstance(value, dict) else _named(value):
        yield from _leaves(f"{name}.{key}", inner, columns)


def _named(values: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the values of a list with the names that they hold, which may come in any order; with numbers without."""
    words = [*NAMES["metrics"], *NAMES["measures"]]
    names = [
        next((each[word] for word in words if isinstance(each.get(word), str)), None)
        if isinstance(each, dict)
        else None
        for each in values
    ]
    is_named = None not in names and len({*names}) == len(names)
    yield from zip(names if is_named else range(len(values)), values, strict=True)


def _as_text(value: Any) -> str | None:
    if isinstance(value, dict | list):
        return json.dumps(value, sort_keys=True, default=str)
    return None if value is None else str(int(value) if isinstance(value, bool) else value)


def _text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if str(column.type) == UUID:
        return pa.chunked_array([pa.array([value and str(value) for value in column.to_pylist()], pa.string())])
    return pc.cast(column, pa.string())


# Ids.


def _is_empty(column: Any) -> Any:
    return pc.fill_null(pc.equal(pc.utf8_trim_whitespace(column), ""), True)


def _together(path: str, names: Sequence[str], texts: Mapping[str, Any]) -> Any:
    """Return the text of several columns, with the names of the outer ones before the last; None for no column.

    `BadInput` with the row in which one of them is empty.
    """
    for name in names:
        if (row := pc.index(_is_empty(texts[name]), True).as_py()) >= 0:
            raise BadInput("comparison.empty-id", path=path, column=name, row=row + 1)
    # So that no two pairs have one text.
    outer = [pc.replace_substring_regex(texts[name], r"([/\\])", r"\\\1") for name in names[:-1]]
    return pc.binary_join_element_wise(*outer, texts[names[-1]], "/") if names else None


def _id_columns(texts: Mapping[str, Any], model: Any, metrics: Any, outer: Sequence[str]) -> tuple[str, ...]:
    """Return the column of ids, after those that tell equal ids apart."""
    name = next(name for name in NAMES["ids"] if name in texts)
    if name == ROW and any(_counts_rows(texts[ROW], first) for first in (0, 1)):
        name = next((each for each in IDS_OF_ITEMS if each in texts and _num(texts[each]) == len(model)), ROW)
    if name == "task":  # there are more numbers than tasks where they number the tasks of each, no samples
        counting = [each for each in NAMES["numbers"] if each in texts and _num(texts[each]) > _num(texts[name])]
        name = next(iter(counting), name)
    rows = pa.table({"model": model, "metric": pa.nulls(len(model)) if metrics is None else metrics})
    within = [name, *outer]

    def num_distinct(names: Sequence[str]) -> int:
        keyed = rows
        for number, column in enumerate(names):
            keyed = keyed.append_column(f"{number}", texts[column])
        return len(keyed.group_by(keyed.column_names).aggregate([]))

    spaces = [*SPACES, *(NAMES["context"] if name in NAMES["questions"] else ())]
    spaces = [space for space in spaces if space in texts and space not in within]
    num = num_distinct(within) if spaces else len(model)
    for space in spaces:
        if num == len(model) or _names_repeats(texts[space]):
            continue
        if (more := num_distinct([*within, space])) > num:
            within, num = [*within, space], more
    return *within[1:], name


def _names_repeats(column: Any) -> bool:
    """Return whether all values of a column are one word of repeats or runs and a number: `seed0`, `seed1`."""
    values = pc.unique(column).drop_null()
    words = pc.unique(pc.replace_substring_regex(values, r"[\s_-]*\d+$", ""))
    word = words[0].as_py() if len(words) == 1 < len(values) else ""
    return bool(REPEATS.search(word) or RUNS.search(word))


def _counts_rows(column: Any, first: int) -> bool:
    numbers = pa.array(range(first, first + len(column))).cast(pa.string())
    return bool(pc.all(pc.fill_null(pc.equal(column, numbers), False)).as_py())


def _num(column: Any) -> int:
    return int(pc.count_distinct(column, "all").as_py())


def _measures(texts: Mapping[str, Any], ids: Sequence[str]) -> list[str]:
    """Return the column that has several values for each task, the same for most: what was measured."""
    id_name = ids[-1] if ids else next(name for name in NAMES["ids"] if name in texts)
    num_tasks = _num(texts[id_name])
    for name in NAMES["measures"]:
        if name in texts and name not in ids:
            pairs = pa.table([texts[id_name], texts[name]], ["task", name]).group_by(["task", name]).aggregate([])
            values = pc.unique(pairs[name])
            are_names = not pc.any(pc.match_substring_regex(values, NO_NAME)).as_py()
            if are_names and len(pairs) > num_tasks and len(pairs) >= len(values) * num_tasks / 2:
                return [name]
    return []


def _benchmark(names: Any) -> Any:
    """Return the benchmark of each row, null where there is one alone or rows have names of their own."""
    return names if 2 <= pc.count_distinct(names).as_py() <= len(names) / 2 else pc.if_else(True, None, names)


def _questions(texts: Mapping[str, Any], name: str, tasks: Any) -> pa.Array:
    """Return a digest of what each row asks, with what is beside a question that several tasks share."""
    question = texts[name]
    pairs = pa.table({"question": question, "task": tasks}).group_by(["question", "task"]).aggregate([])
    counts = pairs.group_by("question").aggregate([([], "count_all")])
    shared = counts["question"].filter(pc.greater(counts["count_all"], 1))
    if beside := [context for context in NAMES["context"] if context in texts and len(shared)]:
        more = pc.binary_join_element_wise(
            question, *(pc.fill_null(texts[context], "") for context in beside), "\n", null_handling="skip"
        )
        question = pc.if_else(pc.is_in(question, value_set=shared), more, question)
    coded = pc.dictionary_encode(question)
    coded = coded.combine_chunks() if isinstance(coded, pa.ChunkedArray) else coded
    digests = [text and store.digest(text.split())[:16] for text in coded.dictionary.to_pylist()]
    return pa.array([digest or None for digest in digests], pa.string()).take(coded.indices)


def _require_one_question(path: str, id_columns: Sequence[str], cells: Mapping[str, Any], question: Any) -> None:
    """Raise `BadInput` where an id stands beside several questions."""
    rows = pa.table({"task": cells["task"], "question": cells["question"]})
    several = rows.group_by("task").aggregate([("question", "count_distinct")])
    several = several.filter(pc.greater(several["question_count_distinct"], 1))
    if len(several):
        task = several["task"][0]
        first = pc.index(rows["task"], task).as_py()
        of_task = pc.and_(pc.equal(rows["task"], task), pc.not_equal(rows["question"], rows["question"][first]))
        second = pc.index(of_task, True).as_py()
        raise BadInput(
            "comparison.id-of-several-questions",
            path=path,
            column=id_columns[-1],
            id=task.as_py(),
            rows=[first + 1, second + 1],
            questions=[question[first].as_py()[:60], question[second].as_py()[:60]],
        )


def _require_repeats(path: str, source: Source, columns: Columns, id_columns: Sequence[str], tasks: Any) -> None:
    """Raise `BadInput` where most tasks have a row of each value of a column of which nothing is known.

    tasks: a number for each row. Repeats differ in numbers, in a column of such a name, and in how they went, which is
    not the same for most tasks.
    """
    num_tasks = int(tasks.max()) + 1
    table = _load(path, source, replace(columns, every=True)) if num_tasks >= FEWEST_TASKS else None
    if table is None:
        return
    for name in table.column_names:
        known = KNOWN - {*NAMES["settings"], *NAMES["models"]}
        if name in id_columns or name in columns.scores or (name in known and name not in SPACES):
            continue
        try:
            column = _unnested(table.select([name]), columns)[name]
            texts = _text(column)
        except pa.ArrowException:  # bytes
            continue
        if name in SPACES and not _names_repeats(texts):
            continue
        values = pc.unique(texts)
        bare = pc.unique(pc.replace_substring_regex(pc.fill_null(values, ""), NUMBERS, ""))
        of_repeats = REPEATS.search(name) or (RUNS.search(name) and len(bare) == 1)
        if of_repeats or (len(bare) == 1 and bare[0].as_py() == "" and name not in NAMES["settings"]):
            continue
        num = len(values)
        pairs, counts = np.unique(tasks * num + _coded(texts), return_counts=True)
        of_value, usual = pairs % num, np.zeros(num, dtype=np.int64)
        np.maximum.at(usual, of_value, counts)
        if (
            len(pairs) >= 1.5 * num_tasks
            and np.bincount(of_value, minlength=num).min() >= num_tasks / 2
            and np.mean(counts == usual[of_value]) >= MOST_ALIKE
        ):
            raise BadInput(
                "comparison.rows-of-what", path=path, ids=[*id_columns], column=name, values=values.to_pylist()
            )


# Scores.


def _scores(
    path: str, table: pa.Table, columns: Columns, id_columns: Sequence[str], is_csv: bool
) -> dict[str, pa.ChunkedArray]:
    """Return every column that may be the score, by its name or path."""
    scores, others = dict[str, pa.ChunkedArray](), [*columns.scores]
    for name in table.column_names:
        root = name.partition(".")[0]
        if name in id_columns or not (root in SCORE_ROOTS or name in columns.scores):
            continue
        try:
            scores[name] = _numbers(table[name], is_csv)
            if name in OF_COSTS:
                scores[name] = _known_costs(scores[name])
        except pa.ArrowException:
            # Of the keys of an object, texts are explanations; and a column counts only where no other was named.
            if name not in others and (others or "." in name):
                continue
            row, value = next(
                (at, cell) for at, cell in enumerate(table[name].to_pylist(), 1) if not _is_score(cell, is_csv)
            )
            raise BadInput("comparison.bad-score", path=path, column=name, score=value, row=row) from None
    return scores


def _counts(
    path: str, table: pa.Table, scores: dict[str, pa.ChunkedArray], columns: Columns, is_csv: bool
) -> dict[str, str]:
    """Make numbers of successes or points shares of how many there may be; returns that column by their names.

    What another side counts is counted here, too: a model that never passes two of five tests has no number above 1.
    `BadInput` where it cannot be.
    """
    counts = dict[str, str]()
    for name in sorted({*NAMES["verdicts"]} & scores.keys()):
        # A score beside a number of samples is their mean, and a verdict beside a highest score is true or false.
        totals_of = NAMES["totals"] if name in COUNTED else [*NAMES["maxima"], NAMES["totals"][0]]
        for total in (each for each in totals_of if each in table.column_names):
            with suppress(pa.ArrowException):
                values, totals = scores[name], _numbers(table[total], is_csv)
                is_part = pc.all(pc.fill_null(pc.less_equal(values, totals), pc.is_null(values))).as_py()
                is_whole = pc.all(pc.equal(values, pc.floor(values))).as_py()
                highest, most = ((pc.max(numbers).as_py() or 0) for numbers in (values, totals))
                # A fraction of at most 1 is a share already.
                is_count = (
                    most > 1 and (highest > 1 or is_whole) if total in NAMES["maxima"] else highest > 1 and is_whole
                )
                if is_part and is_count and not _is_truth(table[name]):
                    scores[name] = pc.if_else(pc.greater(totals, 0), pc.divide(values, totals), None)
                    counts[name] = total
                    break
    # A total that this table has comes before one that it lacks.
    for name, total, other in sorted(columns.counted, key=lambda each: each[1] not in table.column_names):
        if name not in scores or name in counts:
            continue
        values, lacks = scores[name], total not in table.column_names
        if lacks and total in NAMES["totals"] and pc.all(pc.is_in(values.drop_null(), pa.array([0.0, 1.0]))).as_py():
            continue  # one success or failure a row
        totals, is_part = values, False
        if not lacks and not _is_truth(table[name]):
            with suppress(pa.ArrowException):
                totals = _numbers(table[total], is_csv)
                is_part = pc.all(pc.fill_null(pc.less_equal(values, totals), pc.is_null(values))).as_py()
        if not is_part:
            raise BadInput(
                "comparison.points-of-another-kind", path=path, other=other, score=name, total=total, lacks=lacks
            )
        scores[name] = pc.if_else(pc.greater(totals, 0), pc.divide(values, totals), None)
        counts[name] = total
    return counts


def _is_truth(column: pa.ChunkedArray) -> bool:
    if pa.types.is_string(column.type):
        return bool(pc.any(pc.is_in(column, value_set=pa.array([*WORDS]))).as_py())
    return pa.types.is_boolean(column.type)


def _numbers(column: pa.ChunkedArray, is_csv: bool) -> pa.ChunkedArray:
    with suppress(pa.ArrowInvalid):  # as most are
        values = pc.cast(column, pa.float64())
        return pc.if_else(pc.is_finite(values), values, None)
    if not (pa.types.is_primitive(column.type) or pa.types.is_decimal(column.type)):
        column = pc.utf8_trim_whitespace(_text(column))
        column = pc.if_else(pc.is_in(column, value_set=pa.array(NULLS)), None, column)
        if is_csv:
            number = pc.index_in(column, value_set=pa.array([*WORDS]))
            column = pc.coalesce(pa.array([*WORDS.values()]).take(number.combine_chunks()), column)
    values = pc.cast(column, pa.float64())
    return pc.if_else(pc.is_finite(values), values, None)


def _errors(texts: Mapping[str, Any], none: Any) -> Any:
    """Return what ended the sample of each row, where that is an error; none: null in every row."""
    says = pc.match_substring_regex

    def held(kind: str) -> list[str]:
        return [name for name in NAMES[kind] if name in texts]

    named = [pc.if_else(says(texts[name], NO_ERROR), None, texts[name]) for name in held("errors")]
    named += [pc.if_else(says(texts[name], "(?i)^(?:true|1)$"), name, None) for name in held("flags")]
    named += [pc.if_else(says(texts[name], ENDED_IN_ERROR), texts[name], None) for name in held("statuses")]
    return pc.coalesce(*named, none)


def _costs(table: pa.Table, names: Sequence[str], is_csv: bool) -> Any:
    """Return the cost in the first of these columns that has one: rows of several servers have different columns."""
    costs = pa.nulls(len(table), pa.float64())
    for name in names:
        with suppress(KeyError, pa.ArrowException):
            costs = pc.coalesce(costs, _known_costs(_numbers(table[name], is_csv)))
    return costs


def _known_costs(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return numbers with null for what is no cost: less than 0, and 0 where all are, as programs without prices write.

    Otherwise a side without a price would be the cheapest.
    """
    least = 0 if (pc.max(values).as_py() or 0) > 0 else inf
    return pc.if_else(pc.greater_equal(values, least), values, None)


def _is_score(value: Any, is_csv: bool) -> bool:
    try:
        _numbers(pa.chunked_array([pa.array([value])]), is_csv)
    except pa.ArrowException:
        return False
    return True


def _by_metric(
    cells: Mapping[str, Any], scores: Mapping[str, Any], metrics: Any
) -> tuple[dict[str, Any], dict[str, Any], tuple[ScoreKind, ...]]:
    """Return a table of which each row is of one metric with a row for each sample and a score for each metric.

    The samples of a task have no names here: the first row of one metric and the first of another are one sample.
    """
    names = pc.unique(metrics).to_pylist()
    samples = _codes(cells["model"], cells["task"], _numbers_within(_codes(cells["model"], cells["task"], metrics)))
    first_rows = np.unique(samples, return_index=True)[1]
    wide, kinds = dict[str, Any](), list[ScoreKind]()
    for metric in names:
        of_metric = pc.equal(metrics, metric).to_numpy(zero_copy_only=False)
        for name, values in scores.items():
            column = np.full(len(first_rows), np.nan)
            column[samples[of_metric]] = values.to_numpy()[of_metric]
            kinds.append(ScoreKind(metric if len(scores) == 1 else f"{metric}.{name}", metric))
            wide[kinds[-1].name] = pa.chunked_array([pa.array(column, from_pandas=True)])
    return {name: column.take(pa.array(first_rows)) for name, column in cells.items()}, wide, tuple(kinds)


def _codes(*columns: Any) -> Any:
    """Return a number for each row, from 0 on, that rows share which agree in all columns."""
    codes = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        _, numbers = (
            np.unique(column, return_inverse=True) if isinstance(column, np.ndarray) else (None, _coded(column))
        )
        codes = codes * (int(numbers.max()) + 1) + numbers
    return np.unique(codes, return_inverse=True)[1]


def _coded(column: Any) -> Any:
    coded = pa.chunked_array([column] if isinstance(column, pa.Array) else column.chunks).combine_chunks()
    return pc.fill_null(pc.dictionary_encode(coded, null_encoding="encode").indices, 0).to_numpy()


def _numbers_within(codes: Any) -> Any:
    """Return the number of each row among those of its code, from 0 on."""
    order = np.argsort(codes, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(codes[order]) != 0])
    numbers = np.empty(len(codes), dtype=np.int64)
    numbers[order] = np.arange(len(codes)) - np.repeat(starts, np.diff(np.r_[starts, len(codes)]))
    return numbers
