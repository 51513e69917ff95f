"""Logs of any program as tables of items, one row a sample of a task.

`read` takes the files of a program that `import` knows, a table of ids and scores, or a run.
"""

import json
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv
import pyarrow.json as pjson
import pyarrow.parquet as pq

from composer_stages import json_text
from composer_stages.comparison.direction import ScoreMetric
from composer_stages.errors import BadInput, UsageError
from composer_stages.evaluation.outcomes import KEPT, PASSED, PRIMARY, num_apart, without_twins
from composer_stages.formats import files, readers, reading, repeats
from composer_stages.formats.base import HIGHER_IS_BETTER, METRIC, Drop, Reader, Trajectory
from composer_stages.formats.files import Source
from composer_stages.formats.messages import first_question
from composer_stages.formats.reading import FileCount, ReadTrajectory
from composer_stages.formats.repeats import StoredTables
from composer_stages.formats.reports import Sidecars
from composer_stages.formats.swebench import PREDICTIONS
from composer_stages.layout import shortened
from composer_stages.runs import catalog, store
from composer_stages.runs.kinds import EVAL_ITEM, ORIGIN, ROLLOUT
from composer_stages.runs.run import Run
from composer_stages.terms import SamplingUnit, sampling_unit_of
from composer_stages.words import Sentence

ITEM = pa.schema(
    [
        *((name, pa.string()) for name in ("model", "env", "task", "question")),
        ("seed", pa.int64()),
        ("score", pa.float64()),
        *((name, pa.string()) for name in ("reason", "family", "unit", "place", "pair_set")),
    ]
)
"""One sample. question: a digest of what was asked; reason: why there is no score; place: where the record is;
pair_set: what the training of the model learnt from."""
NO_SCORE, CANCELLED = "no score", "cancelled"
ROLLOUT_PAGE, ID = "rollout/", "?id="
"""The address of a rollout for `composer view`: before the run's name, and before its id, which is not quoted here."""
TABLES = (".csv", ".tsv", ".parquet", ".jsonl", ".ndjson", ".json")
IDS = (
    "task_id",
    "instance_id",
    "id",
    "item_id",
    "example_id",
    "question_id",
    "sample_id",
    "doc_id",
    "task",
    "question",
)
SCORES = ("score", "reward", "passed", "correct", "is_correct", "resolved", "success", "acc", "exact_match", "value")
MODELS = ("model", "model_name", "model_id")
FAMILIES = ("family", "category", "subject", "topic", "repo", "repository")
METRICS = ("metric", "metric_name")
"""Names of columns in tables of scores, the first that is there."""
DATE = re.compile(r"(20\d\d)-?(0[1-9]|1[0-2])-?([0-3]\d)(?!\d)")


@dataclass(frozen=True)
class ReadLog:
    """The items of one side, and what is known about how they were made.

    facts: by what it is, every value that occurs in the log. notes: sentences about what was left out. sampling: what
    its tasks were drawn by, None for tasks alone. metrics: those that its scores are of, where it names them.
    """

    label: str
    items: pa.Table
    programs: tuple[str, ...]
    date: str = ""
    facts: Mapping[str, frozenset[str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    sampling: SamplingUnit | None = None
    metrics: frozenset[ScoreMetric] = frozenset()
    name: str = ""
    digests: tuple[str, ...] = ()
    """Of the files that were given, whose names do not count."""

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
        return replace(self, items=self.items.filter(pc.equal(self.items["model"], model)), name=model)


def content(path: str) -> list[Any]:
    """Return what identifies the content of a log; `BadInput` where there is none."""
    folder = Path(path).expanduser()
    if run := find_run(folder):
        return [[folder.name, run.manifest.content]]
    return [[source.label, source.sha256] for source in find_sources(path)]


def find_run(folder: Path) -> Run | None:
    """Return the run whose folder this is; None for the files of other programs."""
    if (folder / "manifest.json").is_file():
        with suppress(BadInput):
            run = Run(folder)
            run.manifest  # noqa: B018 (reads it)
            if run.holds(EVAL_ITEM) or run.holds(ROLLOUT):
                return run
    return None


def find_sources(path: str) -> list[Source]:
    """Return the files of a log, those beside them included."""
    file = Path(path).expanduser()
    if file.is_file() and file.suffix in (".csv", ".tsv"):
        file_path = file.resolve()
        return [
            Source(file_path, f"{file_path.parent.name}/{file_path.name}", store.file_sha256(file_path), root=file_path)
        ]
    return files.find([path], also=(".csv", ".tsv"))


def read(path: str, unit: str = "") -> ReadLog:
    """Return the items of a log; unit: a column whose values are the units that tasks are resampled in."""
    log_path = Path(path).expanduser()
    if run := find_run(log_path):
        return replace(read_run(run, log_path.name, unit), digests=(run.manifest.content,))
    sources = find_sources(path)
    alone = len(sources) == 1 or (log_path.is_file() and log_path.suffix in TABLES)
    table = read_plain_table(path, sources[0]) if alone else None
    log = read_program(path, sources, unit) if table is None else read_scores(path, table, sources[0], unit)
    return replace(log, digests=tuple(sorted(source.sha256 for source in sources if not source.is_sidecar)))


# A program's files.


def read_program(path: str, sources: Sequence[Source], unit: str) -> ReadLog:
    """Return the items of the files of a program that `import` reads."""
    sidecars = Sidecars(redact=False)  # no text is kept
    detected = reading.detect_formats(list(sources), "auto", sidecars)
    facts: dict[str, set[str]] = {}
    drops, programs = Counter[str](), dict[str, None]()
    samples, metrics = LoggedSamples(path, drops, alone=len(detected) == 1), set[ScoreMetric]()
    # A folder may hold trajectories and the predictions that were made of them, which are the same attempts.
    reader_names = {reader.name for reader in detected.values() if reader}
    only = reader_names - {PREDICTIONS}
    unknown = [source.label for source, reader in detected.items() if reader_names and reader is None]
    for source, reader in detected.items():
        if (reader is None and reader_names) or (reader is not None and only and reader.name == PREDICTIONS):
            continue
        for number, record in enumerate(_trajectories(source, reader, sidecars, drops)):
            trajectory = record.trajectory
            if number == 0:
                programs[record.format] = None
                for fact, value in _facts(trajectory).items():
                    facts.setdefault(fact, set()).add(value)
            item = _item(record, unit)
            samples.add(record, item)
            if item["score"] is not None:
                metrics.update(_metric(trajectory.extra))
    counting = samples.counting()
    rows = {name: [sample.row[name] for sample in counting] for name in ITEM.names}
    broken = Counter(sample.status for sample in counting if sample.status is not None)
    if not rows["task"]:
        first = next((item[1] for item in next(iter(detected)).records() if not isinstance(item, Drop)), None)
        if isinstance(first, dict) and not reader_names:
            _id_and_score([*first], path)
        raise BadInput("comparison.no-sample", path=path, drops=drops.most_common(3))
    if unit and not any(rows["unit"]):
        raise UsageError("comparison.no-unit", path=path, column=unit)
    notes = [Sentence("comparison.dropped-records", records=num, reason=reason) for reason, num in (+drops).items()]
    notes += [Sentence("comparison.unknown-files", files=len(unknown), first=unknown[0])] if unknown else []
    notes += [Sentence("comparison.broken-log", status=status, samples=num) for status, num in broken.items()]
    return ReadLog(
        _label(path, [source for source in sources if not source.is_sidecar]),
        pa.table(rows, schema=ITEM),
        tuple(programs),
        _date(" ".join(source.label for source in detected)),
        {name: frozenset(values) for name, values in facts.items()},
        tuple(notes),
        choose_unit(set(rows["env"]), set(rows["family"])),
        frozenset(metrics),
    )


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
        self._attempts: dict[str, list[LoggedSample]] = {}
        self._tables = StoredTables()

    def add(self, record: ReadTrajectory, row: dict[str, Any]) -> None:
        """Add a sample, unless it is there; `BadInput` where it is there with another score."""
        trajectory, path = record.trajectory, record.origin.path
        acted = "" if self.alone else repeats.acted(trajectory)  # by which one file repeats another
        keys: list[Hashable] = [(trajectory.task_id, repeats.rollout_id(record))]
        earlier = self._known.get(keys[0])
        if trajectory.own_id is None and trajectory.attempt_at is not None and not self.alone:
            # Older logs give samples no id: a retry holds a finished one as the same actions at the same attempt.
            keys.append((trajectory.attempt_at, acted))
            alike = self._known.get(keys[1])
            earlier = earlier or (alike if alike and alike.path != path else None)
        if earlier:
            self._repeat(earlier, row, record)
        elif not self.alone and self._tables.find_copy(path, acted):
            self.drops["duplicate"] += 1
        else:
            self.samples.append(sample := LoggedSample(row, path, trajectory.log_status))
            self._known |= {key: sample for key in keys if key not in self._known}
            if trajectory.attempt_at is not None:
                self._attempts.setdefault(trajectory.attempt_at, []).append(sample)

    def _repeat(self, earlier: LoggedSample, row: dict[str, Any], record: ReadTrajectory) -> None:
        trajectory, scores = record.trajectory, (earlier.row["score"], row["score"])
        if None not in scores and scores[0] != scores[1]:
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
        if scores[0] is None:
            earlier.row = row
        if trajectory.log_status is None:
            earlier.status = None

    def counting(self) -> list[LoggedSample]:
        """Return the samples without attempts that failed and were played again in another file."""
        again = {
            id(attempt)
            for attempts in self._attempts.values()
            for number, attempt in enumerate(attempts)
            if attempt.row["score"] is None
            and any(
                later_attempt.path != attempt.path and (later_attempt.row["score"] is not None or later > number)
                for later, later_attempt in enumerate(attempts)
            )
        }
        self.drops["failed and played again"] += len(again)
        return [sample for sample in self.samples if id(sample) not in again]


def _trajectories(
    source: Source, reader: Reader | None, sidecars: Sidecars, drops: Counter[str]
) -> Iterator[ReadTrajectory]:
    for item in reading.read(source, reader, sidecars, FileCount("", "", "")):
        if isinstance(item, Drop):
            drops[item.reason] += 1
        else:
            yield item


def _item(record: ReadTrajectory, unit: str) -> dict[str, Any]:
    trajectory = record.trajectory
    question = trajectory.statement or first_question(trajectory.opening)
    score = None if trajectory.error else trajectory.reward
    reason = trajectory.error[0] if trajectory.error else None if score is not None else NO_SCORE
    if trajectory.error and trajectory.error[0] == "error":
        reason = shortened(_in_words(trajectory.error[1]), 120) or "error"
    family = trajectory.family if trajectory.family and trajectory.family != trajectory.task_id else None
    return {
        "model": trajectory.model or record.origin.sidecars.model,
        "env": trajectory.env,
        "task": trajectory.task_id,
        "question": store.digest(question.split())[:16] if question else None,
        "seed": 0,
        "score": score,
        "reason": reason,
        "family": family,
        "unit": _column(trajectory, unit) if unit else None,
        "place": f"{record.origin.file}:{record.origin.line}",
        "pair_set": None,
    }


def _metric(extra: Mapping[str, Any]) -> list[ScoreMetric]:
    """Return the metric that a record names as that of its score, none where it names none."""
    return [ScoreMetric(str(extra[METRIC]), extra.get(HIGHER_IS_BETTER))] if extra.get(METRIC) else []


def _in_words(error: str) -> str:
    r"""Return an error on one line, without the quotes of a `repr`: `RuntimeError("it\'s gone")` has them."""
    if error.startswith("CancelledError"):
        return CANCELLED  # what it says is the address of an object
    quoted = re.match(r"""([\w.]+)\((['"])(.*)\2,?\)$""", error.strip(), re.DOTALL)
    text = f"{quoted[1]}: {quoted[3]}" if quoted else error
    return " ".join(text.replace("\\n", " ").replace("\\'", "'").replace('\\"', '"').split())


def _column(trajectory: Trajectory, name: str) -> str | None:
    """Return what a record holds under this name: in its task, in what a program noted of it, or beside its score."""
    if name in ("family", "category", "repository") and trajectory.family:
        return trajectory.family
    for table in (
        trajectory.task_data,
        trajectory.task_data.get("metadata"),
        trajectory.task_data.get("info"),
        trajectory.extra,
    ):
        if isinstance(table, Mapping) and table.get(name) is not None:
            return str(table[name])
    return None


def _facts(trajectory: Trajectory) -> dict[str, str]:
    """Return how a rollout was made, in what two logs may differ."""
    facts = {"environment": trajectory.env}
    facts |= {name: str(value) for name, value in (trajectory.sampling or {}).items() if value is not None}
    if trajectory.opening and trajectory.opening[0]["role"] == "system":
        facts["system prompt"] = store.digest(trajectory.opening[0]["content"])[:8]
    return facts


def _date(text: str) -> str:
    date = DATE.search(text)
    return "-".join(date.groups()) if date else ""


def _label(path: str, sources: Sequence[Source]) -> str:
    return sources[0].label if len(sources) == 1 else path


# Runs of this program.


def read_run(run: Run, label: str, unit: str) -> ReadLog:
    """Return the items of an evaluation, whose arms are its models, or of rollouts."""
    table, manifest = run.scan(EVAL_ITEM if run.holds(EVAL_ITEM) else ROLLOUT), run.manifest
    if unit:
        _require_column(table.columns, unit, label)
    unit_columns = [unit] if unit else []
    if run.holds(EVAL_ITEM):
        columns = ["arm", "train_seed", "pair_set", "task_id", "family", "unit", "passed", "error_type", "item_id"]
        columns += ["protocol_ok"]
        rows = without_twins(all_rows := table.arrow(list(dict.fromkeys([*columns, *unit_columns]))))
        verdict = json.loads(run.read_file("verdict.json") or "{}")
        cells = {"model": rows["arm"], "seed": rows["train_seed"], "score": rows["passed"]}
        cells |= {"place": rows["item_id"], "pair_set": rows["pair_set"]}
        units, env = rows["unit"], pa.array([(manifest.config.get("env") or {}).get("name")] * len(rows), pa.string())
    else:
        columns = ["model", "env", "task_id", "family", "reward", "error_type", "rollout_id"]
        rows = without_twins(all_rows := table.arrow(list(dict.fromkeys([*columns, *unit_columns]))))
        cells = {
            "model": rows["model"],
            "seed": pa.array(np.zeros(len(rows), dtype=np.int64)),
            "score": rows["reward"],
        }
        cells |= {"place": rows["rollout_id"], "pair_set": pa.nulls(len(rows), pa.string())}
        units, env = None, rows["env"]
    units = rows[unit] if unit else units
    twins = len(all_rows) - len(rows)
    score = pc.if_else(pc.is_valid(rows["error_type"]), None, pc.cast(cells["score"], pa.float64()))
    columns_of_items = {
        **cells,
        "env": env,
        "task": rows["task_id"],
        "question": pa.nulls(len(rows), pa.string()),
        "score": score,
        "reason": pc.if_else(pc.is_valid(score), None, pc.fill_null(rows["error_type"], NO_SCORE)),
        "family": pc.if_else(pc.equal(rows["family"], rows["task_id"]), None, rows["family"]),
        "unit": pa.nulls(len(rows), pa.string()) if units is None else pc.cast(units, pa.string()),
    }
    names = frozenset(pc.unique(env).drop_null().to_pylist())
    sampling = choose_unit(names, {*pc.unique(rows["family"]).to_pylist()} if run.holds(ORIGIN) else None)
    if sampling and manifest.config.get("units", "auto") != "auto":
        sampling = replace(sampling, fixed=manifest.config["units"] == "fixed")
    notes: tuple[str, ...] = ()
    if twins:
        notes = (Sentence("comparison.impossible-tasks", samples=twins),)
    if run.holds(EVAL_ITEM) and (broke := num_apart(rows, KEPT)):
        notes += (Sentence("comparison.broken-protocol", passes=broke),)
        if (recorded := PRIMARY[verdict.get("outcome", PASSED.name)]) is not PASSED:
            notes += (Sentence("comparison.another-verdict", passes=recorded.passes),)
    columns_of_items["place"] = pc.binary_join_element_wise(
        f"{ROLLOUT_PAGE}{catalog.name(run.path)}", columns_of_items["place"], ID
    )
    items = pa.table(columns_of_items).select(ITEM.names).cast(ITEM)
    facts = {"environment": names}
    program, metrics = (f"composer {manifest.stage}",), read_metrics(run)
    return ReadLog(label, items, program, _date(label), facts, notes, sampling, metrics)


def read_metrics(run: Run) -> frozenset[ScoreMetric]:
    """Return the metrics that imported rollouts have their rewards of; none for a run of another stage."""
    if not (run.holds(ORIGIN) and run.holds(ROLLOUT)):
        return frozenset()
    rollouts, origins = run.scan(ROLLOUT).arrow(["rollout_id", "reward"]), run.scan(ORIGIN)
    scored = rollouts["rollout_id"].filter(pc.is_valid(rollouts["reward"]))
    rows = origins.arrow(["rollout_id", "extra_json"])
    extras = rows["extra_json"].filter(pc.is_in(rows["rollout_id"], scored.combine_chunks()))
    return frozenset(metric for extra in pc.unique(extras).to_pylist() for metric in _metric(json.loads(extra or "{}")))


def choose_unit(environments: AbstractSet[str], foreign: AbstractSet[str | None] | None) -> SamplingUnit | None:
    """Return what the tasks of an environment are drawn by; None for tasks alone.

    foreign: the families that another program gives its tasks, of which one alone is the name of its benchmark; None
    for tasks of an environment here, whose families are drawn where it declares nothing else.
    """
    declared = sampling_unit_of(next(iter(environments))) if len(environments) == 1 else SamplingUnit()
    return declared if foreign is None or (declared != SamplingUnit() and len(foreign) > 1) else None


def _require_column(columns: Sequence[str], unit: str, label: str) -> None:
    if unit not in columns:
        raise UsageError("comparison.no-unit-column", label=label, column=unit, columns=columns)


# Tables of scores.


def read_plain_table(path: str, source: Source) -> pa.Table | None:
    """Return a file as a table where it has an id and a score a row, and is of no program; else None.

    `BadInput` where a line of such a file is no JSON.
    """
    with suppress(pa.ArrowException, ValueError, OSError):
        if source.path.suffix in (".csv", ".tsv"):
            options = pcsv.ParseOptions(delimiter="\t" if source.path.suffix == ".tsv" else ",")
            return pcsv.read_csv(source.path, parse_options=options)
        first = next((item[1] for item in source.records() if not isinstance(item, Drop)), None)
        if not isinstance(first, dict) or any(reading.fits(reader, first) for reader in readers("auto")):
            return None
        plain = [name for name, value in first.items() if not isinstance(value, (dict, list))]
        if not (set(plain).intersection(IDS) and set(plain).intersection(SCORES)):
            return None
        if source.path.suffix == ".parquet":
            return pq.read_table(source.path, columns=plain)
        # What Arrow cannot read, or unpack, is read once more by lines, which names the line that is at fault.
        with suppress(pa.ArrowInvalid, OSError):
            with pa.input_stream(str(source.path)) as stream:
                text = stream.read()
            # Arrow's reader takes any depth, until the stack of the process is full and it ends.
            if json_text.depth(text) <= json_text.MOST_LEVELS:
                return pjson.read_json(pa.BufferReader(text), pjson.ReadOptions(block_size=16 << 20))
        rows = list[dict[str, Any]]()
        for item in source.records():
            if isinstance(item, Drop):
                raise BadInput("comparison.line-no-json", path=path, line=item.line, detail=item.detail)
            if not isinstance(item[1], dict):
                raise BadInput("comparison.line-no-object", path=path, line=item[0])
            rows.append(item[1])
        # Values of a column are of several types, such as numbers and words.
        return pa.table({name: pa.array([_as_text(row.get(name)) for row in rows], pa.string()) for name in plain})
    return None


def _as_text(value: Any) -> str | None:
    return None if value is None else str(int(value) if isinstance(value, bool) else value)


def read_scores(path: str, table: pa.Table, source: Source, unit: str) -> ReadLog:
    """Return the items of a table with an id and a score a row."""
    if not len(table):
        raise BadInput("comparison.no-row", path=path)
    names = table.column_names
    task, score = _id_and_score(names, path)
    column = table[score]
    if pa.types.is_string(column.type):
        column = pc.if_else(pc.equal(column, ""), None, column)
    try:
        values = pc.cast(column, pa.float64())
    except pa.ArrowException:
        row, value = next((at, cell) for at, cell in enumerate(column.to_pylist(), 1) if not _is_score(cell))
        raise BadInput("comparison.bad-score", path=path, column=score, score=value, row=row) from None
    values = pc.if_else(pc.is_finite(values), values, None)
    nothing = pa.nulls(len(table), pa.string())
    if unit:
        _require_column(names, unit, path)

    def text(candidates: Sequence[str]) -> Any:
        name = next((name for name in candidates if name in names and name != task), None)
        return nothing if name is None else pc.cast(table[name], pa.string())

    cells = {
        "model": text(MODELS),
        "env": nothing,
        "task": pc.cast(table[task], pa.string()),
        "question": nothing,
        "seed": pa.array(np.zeros(len(table), dtype=np.int64)),
        "score": values,
        "reason": pc.if_else(pc.is_valid(values), None, NO_SCORE),
        "family": text(FAMILIES),
        "unit": pc.cast(table[unit], pa.string()) if unit else nothing,
        "place": nothing,
        "pair_set": nothing,
    }
    items, metric = pa.table(cells).cast(ITEM), text(METRICS)
    named = pc.unique(pc.if_else(pc.is_valid(values), metric, None)).drop_null().to_pylist()
    metrics = frozenset(ScoreMetric(name, None) for name in named)
    return ReadLog(source.label, items, ("table",), _date(source.label), metrics=metrics)


def _id_and_score(names: Sequence[str], label: str) -> tuple[str, str]:
    """Return the columns of the id and of the score; `BadInput` where one is missing."""
    task, score = (next((name for name in options if name in names), None) for options in (IDS, SCORES))
    if task is None or score is None:
        ids, scores = IDS if task is None else (), SCORES if score is None else ()
        raise BadInput("comparison.no-table", label=label, ids=ids, scores=scores, columns=names)
    return task, score


def _is_score(value: Any) -> bool:
    try:
        pa.scalar(value).cast(pa.float64())
    except pa.ArrowException:
        return False
    return True
