"""Logs of any program as tables of items, one row a sample of a task.

`read` takes the files of a program that `import` knows, a table of ids and scores, or a run.
"""

import json
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from composer_stages import STAGES
from composer_stages.comparison.tables import (
    COSTS,
    EVERY_COLUMN,
    MEASURING,
    SHARED,
    Columns,
    ScoreTable,
    is_csv,
    read_table,
    unreadable,
)
from composer_stages.errors import BadInput, UsageError
from composer_stages.evaluation.outcomes import KEPT, PASSED, PRIMARY, num_apart, without_twins
from composer_stages.formats import files, reading, repeats
from composer_stages.formats.base import Drop, Reader, Trajectory
from composer_stages.formats.files import Source
from composer_stages.formats.measurement import (
    MEASURED,
    NO_SCORE,
    REWARD,
    UNCOUNTED,
    MeasuredLog,
    ScoreKind,
    State,
    as_settings,
    reason_of,
)
from composer_stages.formats.reading import FileCount, ReadTrajectory
from composer_stages.formats.repeats import StoredTables
from composer_stages.formats.reports import Sidecars
from composer_stages.formats.rows import usage
from composer_stages.rollouts.trace import collected_with, exports_of, inherited, require_unmixed
from composer_stages.runs import catalog, store
from composer_stages.runs.kinds import EVAL_ITEM, ORIGIN, ROLLOUT
from composer_stages.runs.run import Run
from composer_stages.runs.tables import with_column
from composer_stages.terms import SamplingUnit, sampling_unit_of
from composer_stages.words import Sentence

ITEM = pa.schema(
    [
        *((name, pa.string()) for name in ("model", "env", "task", "question")),
        ("seed", pa.int64()),
        ("score", pa.float64()),
        *((name, pa.string()) for name in ("reason", "family", "unit", "place", "pair_set", "state", "item")),
        ("log", pa.int64()),
        *((name, pa.float64()) for name in COSTS),
    ]
)
"""One sample. question: a digest of what was asked; score: the chosen one; reason: why there is none; place: where the
record is; pair_set: what the training of the model learnt from; state: null for scored; item: the source's name of the
task; log: its number in `logs`. What it cost is null where that is not recorded."""
NUMBERS = ("scores", "weights", "before")
"""What a sample has numbers of, by the names of its scores."""
PARTS = (*NUMBERS, "groups")
"""The fields of a `ReadLog` that hold a value for each of its items."""
ROLLOUT_PAGE, ID = "rollout/", "?id="
"""The address of a rollout for `composer view`: before the run's name, and before its id, which is not quoted here."""
PLAYED = ("temperature", "max_tokens", "tool_calls", "max_steps", "history")
"""Settings of a run of this program, and of its policy, by which rollouts are played differently."""
TABLES = (".parquet", ".jsonl", ".ndjson", ".json", ".gz")
JUDGES = "+"
"""Between the names of scores that several judges gave each sample."""
MOST_JUDGED = 0.5
"""The share of tasks that most judges scored from which their scores are paired by judge."""
MOST_REASONS = 3
DATE = re.compile(r"(20\d\d)-?(0[1-9]|1[0-2])-?([0-3]\d)(?!\d)")


@dataclass(frozen=True)
class ReadLog:
    """The items of one side, and what is known about how they were made.

    scores: every score of the rows of `items` by its name, of which `scored_by` makes one the score; NaN or null where
    a row lacks it. weights: of the scores that are aggregated by weight. before: scores that a person has changed, as
    they were scored. groups: columns whose values tasks may share. logs: what was measured. notes: sentences about what
    was left out. sampling: what its tasks were drawn by, None for tasks alone. chosen: the name of the score.
    """

    label: str
    items: pa.Table
    programs: tuple[str, ...]
    date: str = ""
    scores: Mapping[str, pa.ChunkedArray] = field(default_factory=dict)
    weights: Mapping[str, pa.ChunkedArray] = field(default_factory=dict)
    before: Mapping[str, pa.ChunkedArray] = field(default_factory=dict)
    groups: Mapping[str, pa.ChunkedArray] = field(default_factory=dict)
    logs: tuple[MeasuredLog, ...] = ()
    notes: tuple[str, ...] = ()
    sampling: SamplingUnit | None = None
    name: str = ""
    chosen: str = ""
    prompts: frozenset[str] = frozenset()
    """Digests of system prompts."""
    id_columns: tuple[str, ...] = ()
    """Of a table: that of the id, after those that tell equal ids apart."""
    counts: Mapping[str, str] = field(default_factory=dict)
    """Scores of a table that are shares of a column, by their names."""
    numbered: bool = False
    """Whether ids are numbers beside questions, which then tell what the tasks are."""
    digests: tuple[str, ...] = ()
    """Of the files that were given, whose names do not count."""
    copy_of: int | None = None
    """The number of an earlier side with the same content."""
    judges: tuple[str, ...] = ()
    """Who scored each sample, where several did: their numbers are the seeds of the items."""
    lineage: frozenset[str] = frozenset()
    """Digests of what holds these rollouts: runs, and files of other programs."""
    selected_by: frozenset[str] = frozenset()
    """Digests of what holds the rollouts that selected the tasks of these."""

    @property
    def models(self) -> list[str]:
        """Return the models that the log names."""
        return sorted(pc.unique(self.items["model"]).drop_null().to_pylist())

    @property
    def num_tasks(self) -> int:
        """Return the number of tasks."""
        return int(pc.count_distinct(self.items["task"]).as_py())

    def of_model(self, model: str) -> "ReadLog":
        """Return the items of one model."""
        return replace(self.kept(pc.fill_null(pc.equal(self.items["model"], model), False)), name=model)

    def kept(self, rows: pa.ChunkedArray) -> "ReadLog":
        """Return the log with some of its rows, by a mask."""
        columns: dict[str, Any] = {
            part: {name: column.filter(rows) for name, column in getattr(self, part).items()} for part in PARTS
        }
        return replace(self, items=self.items.filter(rows), **columns)

    def counted(self, name: str) -> pa.ChunkedArray:
        """Return one of the scores, null where its sample has no verdict."""
        states = pa.array([state.value for state in UNCOUNTED])
        uncounted = pc.fill_null(pc.is_in(self.items["state"], states), False)
        values = self.scores.get(name)
        return pc.if_else(uncounted, None, pa.nulls(len(self.items), pa.float64()) if values is None else values)

    @property
    def scored(self) -> list[str]:
        """Return the names of the scores that any sample has."""
        return [name for name in self.scores if pc.count(self.counted(name)).as_py()]

    def kinds(self, name: str) -> frozenset[ScoreKind]:
        """Return what a score is in each of the logs that have it; of several judges' scores, what each is."""
        kinds = set[ScoreKind]()
        for each in [name] if name in self.scores else name.split(JUDGES):
            at = pc.unique(self.items["log"].filter(pc.is_valid(self.counted(each)))).drop_null().to_pylist()
            kinds.update(self.logs[number].kind(each) for number in at)
        return frozenset(kinds)

    @property
    def settings(self) -> dict[str, frozenset[str]]:
        """Return every value that occurs in the logs of each setting by which logs may be made differently."""
        values: dict[str, set[str]] = {"system prompt": {*self.prompts}, "judge": {*self.judges}}
        values["filter"] = {kind.filter for kind in self.kinds(self.chosen)} - {""}
        for log in self.logs:
            for name, value in {"environment": log.task, "task version": log.task_version, **log.settings}.items():
                values.setdefault(name, set()).update([value] if value else [])
        return {name: frozenset(of_name) for name, of_name in values.items() if of_name}

    def scored_by(self, name: str) -> "ReadLog":
        """Return the log with one of its scores as the score; what measures other things alone is left out."""
        if name not in self.scores:
            self = replace(self, scores={**self.scores, name: pa.nulls(len(self.items), pa.float64())})
        has_it, has_any = pc.is_valid(self.scores[name]), None
        for values in self.scores.values():
            valid = pc.is_valid(values)
            has_any = valid if has_any is None else pc.or_(has_any, valid)
        of_log = self.items["log"]
        with_it = pc.unique(of_log.filter(has_it))
        by_another = pc.and_(pc.is_in(of_log, pc.unique(of_log.filter(has_any))), pc.invert(pc.is_in(of_log, with_it)))
        log, notes = self, self.notes
        if len(with_it) and (num := pc.sum(by_another).as_py()):
            log = self.kept(pc.invert(by_another))
            notes = (*notes, Sentence("comparison.other-scores-left-out", samples=num, score=name))
        items, score = log.items, log.counted(name)
        reason = pc.if_else(pc.is_valid(score), None, pc.fill_null(items["reason"], NO_SCORE))
        for column, values in (("score", score), ("reason", reason)):
            items = with_column(items, column, values)
        return replace(log, items=items, notes=notes, chosen=name)

    def judged_by(self, names: Sequence[str]) -> "ReadLog":
        """Return the log with several of its scores as those of as many judges, each sample once for each of them."""
        parts = [self.scored_by(name) for name in names]
        numbers = [pa.array(np.full(len(part.items), number)) for number, part in enumerate(parts)]
        items = [with_column(part.items, "seed", number) for part, number in zip(parts, numbers, strict=True)]

        def together(part: str) -> dict[str, pa.ChunkedArray]:
            columns = [getattr(each, part) for each in parts]
            return {name: pa.chunked_array([each[name] for each in columns]) for name in columns[0]}

        columns: dict[str, Any] = {part: together(part) for part in PARTS}

        return replace(
            parts[0], items=pa.concat_tables(items), **columns, chosen=JUDGES.join(names), judges=tuple(names)
        )


def content(path: str) -> list[Any]:
    """Return what identifies the content of a log; `BadInput` where there is none."""
    folder = Path(path).expanduser()
    if run := find_run(folder):
        return [[folder.name, run.manifest.content]]
    return [[source.label, source.sha256] for source in find_sources(path)]


def find_run(folder: Path) -> Run | None:
    """Return the run that a folder, the folder of a stage or a pattern means; None for the files of other programs.

    `BadInput` for several runs, for a comparison, and for the name of a run.
    """
    places = [folder] if folder.exists() else [*map(Path, glob(str(folder)))]
    if len(places) == 1 and places[0].name in STAGES and places[0].is_dir():
        places = [*places, *places[0].iterdir()]
    runs = [run for place in sorted(places) if not (place.is_symlink() and place != folder) and (run := _run(place))]
    if len(runs) > 1 or (runs and len(places) > 1 and not folder.exists()):  # or one that a pattern has beside others
        raise BadInput("comparison.several-runs", path=folder, runs=[run.path.name for run in runs])
    if not runs and not places and folder.parts[0] in STAGES:
        raise BadInput("comparison.name-of-run", path=folder)
    if not runs:
        return None
    (run,) = runs
    if run.manifest.stage == "compare":  # whose table of tasks would be read as one of scores, those of side B
        raise BadInput("comparison.run-of-compare", path=folder)
    return run if run.holds(EVAL_ITEM) or run.holds(ROLLOUT) else None


def _run(folder: Path) -> Run | None:
    """Return the run of a folder; None where this program has written none there."""
    if (folder / "manifest.json").is_file():
        with suppress(BadInput):
            run = Run(folder)
            run.manifest  # noqa: B018 (reads it)
            return run
    return None


def find_sources(path: str) -> list[Source]:
    """Return the files of a log, those beside them included."""
    file = Path(path).expanduser()
    inside = files.visible(file) if file.is_dir() else []
    tables = sorted(each for each in inside if is_csv(each.name))
    if tables and not any(each.suffix in files.READABLE for each in {*inside}.difference(tables)):
        if len(tables) > 1:
            raise BadInput("comparison.several-tables", path=path, tables=[each.name for each in tables])
        file = tables[0]
    if file.is_file() and is_csv(file.name):
        file_path = file.resolve()
        return [
            Source(file_path, f"{file_path.parent.name}/{file_path.name}", store.file_sha256(file_path), root=file_path)
        ]
    return files.find([path], also=(".csv", ".tsv"))


def read(path: str, columns: Columns = EVERY_COLUMN) -> ReadLog:
    """Return the items of a log; columns: what the user says of those of a table, and the units of its tasks."""
    log_path = Path(path).expanduser()
    if run := find_run(log_path):
        log = read_run(run, log_path.name, columns.unit)
        return _derived(log, [run], (run.manifest.content,))
    sources = find_sources(path)
    alone = len(sources) == 1 or (log_path.is_file() and (is_csv(path) or log_path.suffix in TABLES))
    table = read_table(path if log_path.is_file() else str(sources[0].path), sources[0], columns) if alone else None
    log = read_program(path, sources, columns.unit) if table is None else read_scores(table, sources[0])
    logs = [source for source in sources if not source.is_sidecar]
    return _derived(log, exports_of(source.path for source in logs), sorted(source.sha256 for source in logs))


def _derived(log: ReadLog, runs: Sequence[Run], digests: Sequence[str]) -> ReadLog:
    """Return a log with its digests, and with those of what its rollouts, which these runs hold, come from."""
    origins = inherited(runs)
    lineage, selected_by = (frozenset(origins.get(name, ())) for name in ("rollouts_of", "selected_by"))
    return replace(log, digests=tuple(digests), lineage=lineage | {*digests}, selected_by=selected_by)


# A program's files.


def read_program(path: str, sources: Sequence[Source], unit: str) -> ReadLog:
    """Return the items of the files of a program that `import` reads."""
    sidecars = Sidecars(redact=False)  # no text is kept
    detected = reading.detect_formats(list(sources), "auto", sidecars, brief=True)
    drops, programs, prompts = Counter[str](), dict[str, None](), set[str]()
    samples, logs = LoggedSamples(path, drops, alone=len(detected) == 1), list[MeasuredLog]()
    numbers, columns = dict[str, int](), dict[str, None]()
    # A folder may hold trajectories and the predictions that were made of them, which are the same attempts.
    readers = [reader for reader in detected.values() if reader]
    has_rollouts = not all(reader.submits for reader in readers)
    unknown = [source.label for source, reader in detected.items() if readers and reader is None]
    for source, reader in detected.items():
        if reader is None and readers:
            first = next(source.records(), None)
            if isinstance(first, Drop) and first.is_damage:
                raise unreadable(source.label, first)
            continue
        if reader and reader.submits and has_rollouts:
            continue
        for number, record in enumerate(_trajectories(source, reader, sidecars, drops, not unit)):
            trajectory = record.trajectory
            if number == 0:
                programs[record.format] = None
                if trajectory.opening and trajectory.opening[0]["role"] == "system":
                    prompts.add(store.digest(trajectory.opening[0]["content"])[:8])
            if trajectory.log and numbers.setdefault(trajectory.log.key, len(logs)) == len(logs):
                logs.append(trajectory.log)
            samples.add(record, _item(record, unit, numbers))
            columns |= dict.fromkeys(_columns_of(trajectory)) if unit else {}
    counting = samples.counting()
    rows = {name: [sample.row.get(name) for sample in counting] for name in ITEM.names}
    scores, weights, before = (_columns([sample.row for sample in counting], kind) for kind in NUMBERS)
    broken = Counter(sample.status for sample in counting if sample.status is not None)
    if not rows["task"]:
        tables = [source.path.name for source in detected if not readers and _is_table(path, source)]
        if tables:
            raise BadInput("comparison.several-tables", path=path, tables=tables)
        raise BadInput("comparison.no-sample", path=path, drops=(+drops).most_common(3))
    if unit and not any(rows["unit"]):
        raise UsageError("comparison.no-unit-column", label=path, column=unit, columns=[*columns])
    notes = [*_dropped(+drops)]
    notes += [Sentence("comparison.unknown-files", files=len(unknown), first=unknown[0])] if unknown else []
    notes += [Sentence("comparison.broken-log", status=status, samples=num) for status, num in broken.items()]
    counted = {*rows["log"]}
    notes += _mixed_settings([log for number, log in enumerate(logs) if number in counted])
    notes += _errors_counted(rows["state"], rows["reason"])
    return ReadLog(
        _label(path, [source for source in sources if not source.is_sidecar]),
        pa.table(rows, schema=ITEM),
        tuple(programs),
        _date(" ".join(source.label for source in detected)),
        scores,
        weights,
        before,
        _columns([sample.row for sample in counting], "groups", pa.string()),
        tuple(logs),
        tuple(notes),
        choose_unit({*map(str, rows["env"])}, {*rows["family"]}),
        prompts=frozenset(prompts),
    )


def _errors_counted(states: Sequence[str | None], reasons: Sequence[str | None]) -> list[Sentence]:
    """Return a note of the samples that ended in an error and that their program counts, with the commonest errors."""
    ended = Counter(why for state, why in zip(states, reasons, strict=True) if state == State.SCORED_WITH_ERROR)
    named = [str(why) for why, _ in ended.most_common(MOST_REASONS)] + ["..."] * (len(ended) > MOST_REASONS)
    return [Sentence("comparison.errors-counted", samples=ended.total(), reason=", ".join(named))] if ended else []


def _is_table(path: str, source: Source) -> bool:
    first = next((item[1] for item in source.records() if not isinstance(item, Drop)), None)
    with suppress(BadInput):
        return isinstance(first, dict) and bool(EVERY_COLUMN.choose(path, [*first]))
    return False


def _mixed_settings(logs: Sequence[MeasuredLog]) -> list[Sentence]:
    """Return a note of each setting in which logs of one task and one model differ in how they measured."""
    values: dict[tuple[str, str | None, str], dict[str, None]] = {}
    for log in logs:
        for name, value in {"task version": log.task_version, **log.settings}.items():
            if value and (MEASURING.fullmatch(name) or name == "agent"):
                values.setdefault((log.task, log.model, name), {})[value] = None
    return [
        Sentence("comparison.mixed-settings", task=task or "One task", name=name, values=[*of_name])
        for (task, _, name), of_name in values.items()
        if len(of_name) > 1
    ]


def _columns(
    rows: Sequence[Mapping[str, Any]], kind: str, dtype: pa.DataType | None = None
) -> dict[str, pa.ChunkedArray]:
    """Return what is of one kind in all rows by its names, a column each; numbers where no other type is given."""
    values = [row.get(kind) or {} for row in rows]
    names = dict.fromkeys(name for row in values for name in row)
    return {name: pa.array([row.get(name) for row in values], dtype or pa.float64()) for name in names}


@dataclass
class LoggedSample:
    """One sample: its row, its file, and the status of its log where no log that holds it was finished."""

    row: dict[str, Any]
    path: Path
    status: str | None


class LoggedSamples:
    """The samples of a log, each once, however many of its files hold it.

    Files repeat samples by the rules of `import`. Of one sample a score counts where a file has none, and it broke off
    with its log where no finished one holds it. What failed and was played again is the attempt that has a score, or
    else the last.
    """

    def __init__(self, path: str, drops: Counter[str], alone: bool) -> None:
        self.path, self.drops, self.alone = path, drops, alone
        self.samples: list[LoggedSample] = []
        self._known: dict[Hashable, LoggedSample] = {}
        self._attempts: list[str | None] = []
        self._tables = StoredTables()

    def add(self, record: ReadTrajectory, row: dict[str, Any]) -> None:
        """Add a sample, unless it is there; `BadInput` where it is there with another score."""
        trajectory, path = record.trajectory, record.origin.path
        acted = "" if self.alone else repeats.acted(trajectory)  # by which one file repeats another
        keys: list[Hashable] = [(trajectory.task_id, repeats.rollout_id(record))]
        earlier = self._known.get(keys[0])
        if trajectory.own_id is None and trajectory.measured.attempt is not None and not self.alone:
            # Older logs give samples no id: a retry holds a finished one as the same actions at the same attempt.
            keys.append((trajectory.measured.attempt, acted))
            alike = self._known.get(keys[1])
            earlier = earlier or (alike if alike and alike.path != path else None)
        if earlier:
            self._repeat(earlier, row, record)
        elif not self.alone and self._tables.find_copy(path, acted):
            self.drops["duplicate"] += 1
        else:
            self.samples.append(sample := LoggedSample(row, path, _status(trajectory)))
            self._known |= {key: sample for key in keys if key not in self._known}
            self._attempts.append(trajectory.measured.attempt)

    def _repeat(self, earlier: LoggedSample, row: dict[str, Any], record: ReadTrajectory) -> None:
        trajectory, verdicts = record.trajectory, (_verdict(earlier.row), _verdict(row))
        both = [(first, verdicts[1].get(name)) for name, first in verdicts[0].items()]
        scores = next(((first, second) for first, second in both if second is not None and first != second), None)
        if scores:
            raise BadInput(
                "comparison.sample-with-two-scores",
                path=self.path,
                task=trajectory.task_id,
                id=trajectory.own_id,
                score=scores[0],
                place=earlier.row["place"],
                other_score=scores[1],
                other_place=row["place"],
                same_file=earlier.path == record.origin.path,
            )
        self.drops["duplicate"] += 1
        if not verdicts[0]:
            earlier.row = row
        if _status(trajectory) is None:
            earlier.status = None

    def counting(self) -> list[LoggedSample]:
        """Return the samples without attempts that failed and were played again in another file."""
        verdicts = [bool(_verdict(sample.row)) for sample in self.samples]
        again = replayed(self._attempts, verdicts, [sample.path for sample in self.samples])
        self.drops["failed and played again"] += len(again)
        return [sample for number, sample in enumerate(self.samples) if number not in again]


def replayed(attempts: Sequence[str | None], verdicts: Sequence[bool], files: Sequence[Hashable]) -> set[int]:
    """Return the numbers of samples that failed and were played again in another file.

    Of the samples of one attempt counts that with a verdict, or else the last.
    """
    numbers = dict[str, list[int]]()
    for number, attempt in enumerate(attempts):
        if attempt is not None:
            numbers.setdefault(attempt, []).append(number)
    return {
        number
        for of_attempt in numbers.values()
        for number in of_attempt
        if not verdicts[number]
        and any(files[rival] != files[number] and (verdicts[rival] or rival > number) for rival in of_attempt)
    }


def _trajectories(
    source: Source, reader: Reader | None, sidecars: Sidecars, drops: Counter[str], brief: bool
) -> Iterator[ReadTrajectory]:
    for item in reading.read(source, reader, sidecars, FileCount("", "", ""), brief=brief):
        if not isinstance(item, Drop):
            yield item
        elif item.is_damage:  # a log that was cut off counts other tasks than its program did
            raise unreadable(item.file, item)
        else:
            drops[item.reason] += 1


def _status(trajectory: Trajectory) -> str | None:
    return trajectory.log.status if trajectory.log else None


def _verdict(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the scores of a sample that count."""
    counts = row["state"] not in UNCOUNTED
    return {name: value for name, value in row["scores"].items() if value is not None} if counts else {}


def _item(record: ReadTrajectory, unit: str, logs: Mapping[str, int]) -> dict[str, Any]:
    trajectory, measured = record.trajectory, record.trajectory.measured
    family = trajectory.family if trajectory.family and trajectory.family != trajectory.task_id else None
    return {
        "model": trajectory.model or record.origin.sidecars.model,
        "env": trajectory.env,
        "task": trajectory.task_id,
        "question": measured.asked or None,
        "item": measured.item or None,
        "seed": 0,
        **{name: getattr(measured, name) for name in NUMBERS},
        "groups": {
            name: str(value)
            for name, value in _noted(trajectory).items()
            if (SHARED.fullmatch(name) or name == "question") and isinstance(value, str | int)
        },
        **usage(trajectory),
        "reason": measured.reason or None,
        "family": family,
        "unit": _columns_of(trajectory).get(unit) if unit else None,
        "place": f"{record.origin.file}:{record.origin.line}",
        "state": measured.state,
        "log": logs.get(trajectory.log.key) if trajectory.log else None,
    }


def _noted(trajectory: Trajectory) -> dict[str, Any]:
    """Return what a record holds by its names: in its task, in what a program noted of it, or beside its score."""
    data, question = trajectory.task_data, trajectory.measured.asked
    tables = (trajectory.extra, data.get("info"), data.get("metadata"), data, {"question": question or None})
    present = (table for table in tables if isinstance(table, Mapping))
    return {name: value for table in present for name, value in table.items() if value is not None}


def _columns_of(trajectory: Trajectory) -> dict[str, str]:
    """Return what a record's task can be resampled by; the family has the names that programs give it."""
    family = dict.fromkeys(("family", "category", "repository") if trajectory.family else (), trajectory.family)
    values = (_noted(trajectory) | family).items()
    return {name: str(value) for name, value in values if not isinstance(value, Mapping)}


def _date(text: str) -> str:
    date = DATE.search(text)
    return "-".join(date.groups()) if date else ""


def _dropped(drops: Mapping[str, int]) -> tuple[Sentence, ...]:
    return tuple(Sentence("comparison.dropped-records", records=num, reason=reason) for reason, num in drops.items())


def _label(path: str, sources: Sequence[Source]) -> str:
    return sources[0].label if len(sources) == 1 else path


# Runs of this program.


def read_run(run: Run, label: str, unit: str) -> ReadLog:
    """Return the items of an evaluation, whose arms are its models, or of rollouts."""
    table, manifest = require_unmixed(run).scan(EVAL_ITEM if run.holds(EVAL_ITEM) else ROLLOUT), run.manifest
    if unit and unit not in table.columns:
        raise UsageError("comparison.no-unit-column", label=label, column=unit, columns=table.columns)
    unit_columns = [unit] if unit else []
    if run.holds(EVAL_ITEM):
        columns = ["arm", "train_seed", "pair_set", "task_id", "family", "unit", "passed", "error_type", "item_id"]
        columns += ["protocol_ok", "cost_usd", "sampled_tokens"]
        rows = without_twins(all_rows := table.arrow(list(dict.fromkeys([*columns, *unit_columns]))))
        verdict = json.loads(run.read_file("verdict.json") or "{}")
        cells = {"model": rows["arm"], "seed": rows["train_seed"], "score": rows["passed"]}
        cells |= {"place": rows["item_id"], "pair_set": rows["pair_set"], "completion_tokens": rows["sampled_tokens"]}
        units, env = rows["unit"], pa.array([(manifest.config.get("env") or {}).get("name")] * len(rows), pa.string())
    else:
        columns = ["model", "env", "task_id", "family", "reward", "error_type", "rollout_id"]
        columns += ["cost_usd", "prompt_tokens", "completion_tokens"]
        rows = without_twins(all_rows := table.arrow(list(dict.fromkeys([*columns, *unit_columns]))))
        cells = {"model": rows["model"], "seed": pa.array(np.zeros(len(rows), dtype=np.int64)), "score": rows["reward"]}
        cells |= {"place": rows["rollout_id"], "pair_set": pa.nulls(len(rows), pa.string())}
        units, env = None, rows["env"]
    units = rows[unit] if unit else units
    twins = len(all_rows) - len(rows)
    measured = _measured_rows(run, rows, pc.cast(cells.pop("score"), pa.float64()), f"composer {manifest.stage}")
    columns_of_items = {
        **dict.fromkeys(COSTS, pa.nulls(len(rows), pa.float64())),
        **{name: rows[name] for name in COSTS if name in rows.column_names},
        **cells,
        "env": env,
        "task": rows["task_id"],
        "score": pa.nulls(len(rows), pa.float64()),
        **{name: measured.items[name] for name in ("question", "reason", "state", "item", "log")},
        "family": pc.if_else(pc.equal(rows["family"], rows["task_id"]), None, rows["family"]),
        "unit": pa.nulls(len(rows), pa.string()) if units is None else pc.cast(units, pa.string()),
    }
    names = frozenset(pc.unique(env).drop_null().to_pylist())
    sampling = choose_unit(names, {*pc.unique(rows["family"]).to_pylist()} if run.holds(ORIGIN) else None)
    if sampling and manifest.config.get("units", "auto") != "auto":
        sampling = replace(sampling, fixed=manifest.config["units"] == "fixed")
    notes: tuple[str, ...] = tuple(_errors_counted(*(measured.items[n].to_pylist() for n in ("state", "reason"))))
    if twins:
        notes = (Sentence("comparison.impossible-tasks", samples=twins),)
    if manifest.stage == "import":
        # As of the files themselves: what was cut off has other tasks, and what was left out is told.
        for drop in (Drop(**each) for each in json.loads(run.read_file("drops.json") or "[]")):
            if drop.is_damage:
                raise unreadable(f"{label}: {drop.file}", drop)
        notes += _dropped(manifest.summary.get("dropped", {}))
    if run.holds(EVAL_ITEM) and (broke := num_apart(rows, KEPT)):
        notes += (Sentence("comparison.broken-protocol", passes=broke),)
        if (recorded := PRIMARY[verdict.get("outcome", PASSED.name)]) is not PASSED:
            notes += (Sentence("comparison.another-verdict", passes=recorded.passes),)
    columns_of_items["place"] = pc.binary_join_element_wise(
        f"{ROLLOUT_PAGE}{catalog.name(run.path)}", columns_of_items["place"], ID
    )
    items = pa.table(columns_of_items).select(ITEM.names).cast(ITEM)
    read_log = replace(measured, label=label, items=items, date=_date(label), notes=notes, sampling=sampling)
    counts = measured.items["counts"] if "counts" in measured.items.column_names else None
    return read_log if counts is None else read_log.kept(counts)


def _measured_rows(run: Run, rows: pa.Table, reward: pa.ChunkedArray, program: str) -> ReadLog:
    """Return what was measured of a run's rows: of imported rollouts what their logs say, of others the one score."""
    failed = pc.is_valid(rows["error_type"])
    if not (run.holds(ORIGIN) and run.holds(ROLLOUT)):
        cells = {"reason": rows["error_type"], "state": pc.if_else(failed, State.MISSING.value, None)}
        cells |= dict.fromkeys(("item", "question"), pa.nulls(len(rows), pa.string()))
        cells["log"] = pa.array(np.zeros(len(rows), dtype=np.int64))
        env = (collected_with(run).get("env") or {}).get("name") or ""
        log = MeasuredLog(program, task=env, settings=_played_by(run))
        return ReadLog("", pa.table(cells), (program,), scores={REWARD: reward}, logs=(log,))
    origins = run.scan(ORIGIN).arrow(["rollout_id", "extra_json", "file"])
    origins = origins.take(pc.index_in(rows["rollout_id"], origins["rollout_id"]))
    extras = origins["extra_json"].to_pylist()
    measured = [json.loads(extra or "{}").get(MEASURED) or {} for extra in extras]
    files = json.loads(run.read_file("sources.json") or "[]")
    logs = {key: MeasuredLog.of(log) for file in files for key, log in file.get("logs", {}).items()}
    at = {key: number for number, key in enumerate(logs)}
    cells = {
        "reason": pc.coalesce(pa.array([sample.get("reason") for sample in measured], pa.string()), rows["error_type"]),
        "state": pa.array([sample.get("state") for sample in measured], pa.string()),
        "item": pa.array([sample.get("item") for sample in measured], pa.string()),
        "question": pa.array([sample.get("asked") for sample in measured], pa.string()),
        "log": pa.array([at.get(sample.get("log")) for sample in measured], pa.int64()),
    }
    scores, weights, before = (_columns(measured, kind) for kind in NUMBERS)
    verdicts = [bool(_verdict({"state": None, "scores": {}, **sample})) for sample in measured]
    again = replayed([sample.get("attempt") for sample in measured], verdicts, origins["file"].to_pylist())
    cells["counts"] = pa.array([number not in again for number in range(len(rows))])
    return ReadLog(
        "",
        pa.table(cells),
        (program,),
        scores=scores or {REWARD: reward},
        weights=weights,
        before=before,
        logs=tuple(logs.values()),
    )


def _played_by(run: Run) -> dict[str, str]:
    """Return the settings of a run that change outcomes, but for the model, and the digest of its environment."""
    identity = {"policy": {}, "env": {}, **run.manifest.identity}
    env, policy = identity["env"] or {}, identity["policy"] or {}
    options = env.get("options") or {}
    digests = {key: value for key, value in env.items() if key.endswith("_sha256")}
    # The same files may lie in another folder: the digest tells others.
    values = {key: Path(each).name if digests and isinstance(each, str) else each for key, each in options.items()}
    named = ", ".join(f"{key}={value}" for key, value in sorted(values.items())) or ("defaults" if env else None)
    digest = store.digest(digests)[:8] if digests else None
    identity_fields = {name: {**policy, **identity}.get(name) for name in PLAYED}
    return as_settings({"environment options": named, "environment version": digest, **identity_fields})


def choose_unit(environments: AbstractSet[str], foreign: AbstractSet[str | None] | None) -> SamplingUnit | None:
    """Return what the tasks of an environment are drawn by; None for tasks alone.

    foreign: the families that another program gives its tasks, of which one alone is the name of its benchmark; None
    for tasks of an environment here, whose families are drawn where it declares nothing else.
    """
    declared = sampling_unit_of(next(iter(environments))) if len(environments) == 1 else SamplingUnit()
    return declared if foreign is None or (declared != SamplingUnit() and len(foreign) > 1) else None


# Tables of scores.


def read_scores(table: ScoreTable, source: Source) -> ReadLog:
    """Return the items of a table with an id and a score a row."""
    number = pa.array(np.zeros(len(table), dtype=np.int64))
    judges = pc.unique(table.judges).drop_null().to_pylist()
    if len(judges) > 1:
        rows = pa.table({"task": table.texts["task"], "model": table.texts["model"], "judge": table.judges})
        num_T = rows.group_by(["task", "model"]).aggregate([("judge", "count_distinct")])["judge_count_distinct"]
        # Of many annotators each task has some, and on another side others: these scores are samples of it.
        judges = judges if np.mean(num_T.to_numpy() > len(judges) / 2) >= MOST_JUDGED else []
    seeds = {judge: int(store.digest(judge)[:12], 16) for judge in judges if len(judges) > 1}
    seed = pa.array([seeds.get(judge, 0) for judge in table.judges.to_pylist()], pa.int64()) if seeds else number
    nothing = {name: pa.nulls(len(table), ITEM.field(name).type) for name in ITEM.names}
    is_scored = reduce(pc.or_, map(pc.is_valid, table.scores.values()))
    ended = pc.and_(pc.is_valid(table.texts["reason"]), is_scored)
    cells = {**table.texts, "state": pc.if_else(ended, State.SCORED_WITH_ERROR.value, None)}
    if pc.any(pc.is_valid(cells["reason"])).as_py():
        reasons = (text and reason_of(("error", text)) for text in cells["reason"].to_pylist())
        cells["reason"] = pa.array(reasons, pa.string())
    items = pa.table({**nothing, **cells, "seed": seed, "log": number}).select(ITEM.names).cast(ITEM)
    logs = (MeasuredLog("table", kinds=table.kinds, settings=table.settings),)
    return ReadLog(
        source.label,
        items,
        ("table",),
        _date(source.label),
        table.scores,
        groups=table.groups,
        logs=logs,
        id_columns=table.id_columns,
        counts=table.counts,
        numbered=table.numbered,
        judges=tuple(sorted(judges)),
        notes=(
            *_errors_counted(*(items.filter(ended)[name].to_pylist() for name in ("state", "reason"))),
            *(Sentence("comparison.weights-left-out", column=name) for name in table.weights),
            *(Sentence("comparison.counts", score=name, total=total) for name, total in table.counts.items()),
        ),
    )
