"""One import: files read one after the other into the journal of a run, counted, and filtered by Data-Juicer."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import orjson
from tabulate import tabulate

from stages.formats import data_juicer, reading, rows
from stages.formats.base import Drop, Importer
from stages.formats.data_juicer import JuicerConfig
from stages.formats.files import Source
from stages.formats.reading import FileCount, ReadTrajectory
from stages.formats.reports import Sidecars, stem
from stages.formats.rows import ImportedPayload
from stages.rollouts import gate
from stages.rollouts.gate import Account
from stages.rollouts.trace import conversation
from stages.runs import store
from stages.runs.artifact import RunWriter
from stages.runs.records import Row

# ---- duplicates
# Rollouts that several files hold: predictions beside their trajectories, and one table stored twice.
#
# The ids of such rollouts differ, since they come from their files. They are known by their place and what they say.

PREDICTIONS = "swebench-preds"


@dataclass(frozen=True)
class Known:
    """By what a rollout is recognised. said: digest of task, model, submission and actions; file: its name in rows."""

    rollout_id: str
    path: Path
    file: str
    line: int
    importer: str
    task_id: str
    model: str | None
    patch: str
    said: str
    effective: bool

    @classmethod
    def of(cls, item: ReadTrajectory) -> "Known":
        """Of a rollout that was read."""
        own = item.trajectory
        return cls(
            rows.rollout_id(item),
            item.origin.path,
            item.origin.file,
            item.origin.line,
            item.importer,
            own.task_id,
            own.model,
            (own.submission or "").strip(),
            store.digest([own.task_id, own.model, own.submission, [turn.action for turn in own.turns]]),
            bool(own.effective),
        )


class Seen:
    """The rollouts that were read so far; predictions are to be read last."""

    def __init__(self) -> None:
        self._by_task: dict[str, list[Known]] = defaultdict(list)
        self._tables: dict[tuple[Path, str, str], Path] = {}

    def before(self, item: Known) -> str | None:
        """What the rollout repeats, in words; None where it is new, and then it is remembered."""
        path, predicted = item.path, item.importer == PREDICTIONS
        other = self._tables.setdefault((path.parent, "" if predicted else stem(path), item.said), path)
        if other != path and (other.suffixes != path.suffixes or predicted):
            return f"{item.task_id} stands in {other.name} beside it too"
        if predicted and (taken := self._trajectory(item)) is not None:
            return f"{item.task_id} is what {taken.file} handed in"
        if not predicted:
            self._by_task[item.task_id].append(item)
        return None

    def _trajectory(self, prediction: Known) -> Known | None:
        """The trajectory at the end of which a prediction was made: in its folder or below, with the same patch.

        Where there is only one of the task and the models do not differ, the patch may.
        """
        near = [one for one in self._by_task[prediction.task_id] if one.path.is_relative_to(prediction.path.parent)]
        same = [one for one in near if one.patch == prediction.patch != ""]
        if not same and len(near) == 1 and near[0].model in (None, prediction.model):
            same = near
        return same[0] if same else None


# ---- dealt
# Files that workers read: what a worker leaves of each in the journal, and how an import takes it up.
#
# A trajectory or drop is a unit, and the file itself is one, written last; without that the file is read again.
# Whether a
# rollout was there before, and the how-manieth of its task it is, the import says, file after file.

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

    def leave(self, out: RunWriter) -> None:
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
    for item in reading.read(source, importer, sidecars, count):
        yield item if isinstance(item, Drop) else Read(Known.of(item), rows.payload(item, 0))


def leave(source: Source, importer: Importer | None, sidecars: Sidecars, out: RunWriter) -> None:
    """Read a file for the import that takes it up."""
    count, name = FileCount(source.label, importer.NAME if importer else "unknown", source.sha256), unit(source)
    batch: list[tuple[str, Row, bool]] = []
    number = 0
    for number, item in enumerate(read(source, importer, sidecars, count), 1):
        batch.append((f"{name}/{number}", _row(item), False))
        if len(batch) == BATCH:
            out.raise_if_stopped()
            out.write_all(batch)
            batch.clear()
    told = {"items": number, "count": _portable(count), "reports": sidecars.reports.used_for()}
    out.write_all([*batch, (name, told, False)])


def taken_up(source: Source, sidecars: Sidecars, count: FileCount, out: RunWriter) -> Iterator[Read | Drop] | None:
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


class ImportSession:
    """One import: reads file after file into the journal, and counts what was kept and what was dropped.

    `rollouts` lists the units in the order of the files, `effective` says of each whether it entered a training batch.
    """

    def __init__(self, out: RunWriter, sidecars: Sidecars) -> None:
        self.out, self.sidecars = out, sidecars
        self.counts: list[FileCount] = []
        self.drops: list[Drop] = []
        self.rollouts: list[str] = []
        self.effective: dict[str, bool] = {}
        self._seen = Seen()
        self._samples: Counter[tuple[str, str | None]] = Counter()
        self._statistics: dict[str, Row] = {}

    def read(self, source: Source, importer: Importer | None) -> None:
        """Write everything that a file holds, in batches, and count it."""
        count = FileCount(source.label, importer.NAME if importer else "unknown", source.sha256)
        self.counts.append(count)
        batch: list[tuple[str, ImportedPayload, bool]] = []
        for unit, payload in self._units(source, importer, count):
            batch.append((unit, payload, False))
            if len(batch) == BATCH:
                self._write(batch)
        self._write(batch)

    def _write(self, batch: list[tuple[str, ImportedPayload, bool]]) -> None:
        self.out.raise_if_stopped()
        self.out.write_all([unit for unit in batch if not self.out.finished(unit[0])])
        batch.clear()

    def _units(
        self, source: Source, importer: Importer | None, count: FileCount
    ) -> Iterator[tuple[str, ImportedPayload]]:
        items = taken_up(source, self.sidecars, count, self.out)
        for item in items or read(source, importer, self.sidecars, count):
            if isinstance(item, Drop):
                self.drops.append(item)
            elif (unit := item.known.rollout_id) in self.effective:
                self.effective[unit] |= item.known.effective
                self._drop(item.known, f"{unit} was there before", count)
            elif repeats := self._seen.before(item.known):
                self._drop(item.known, repeats, count)
            else:
                self.effective[unit] = item.known.effective
                self.rollouts.append(unit)
                count.rollouts += 1
                yield unit, self._payload(item, count)

    def _drop(self, known: Known, detail: str, count: FileCount) -> None:
        """A rollout that was read before; PRIME-RL writes those of a training batch a second time."""
        count.dropped["duplicate"] += 1
        self.drops.append(Drop(known.file, known.line, "duplicate", detail))

    def _payload(self, item: Read, count: FileCount) -> ImportedPayload:
        """With its number among the rollouts of its task and model."""
        key, payload = (item.known.task_id, item.known.model), item.payload
        for row in (payload["rollout"], *payload["steps"]):
            row["sample_idx"] = self._samples[key]
        self._samples[key] += 1
        count.missing |= set(payload["origin"]["missing"])
        return payload

    def units(self) -> Iterator[ImportedPayload]:
        """The journal's records of all rollouts, one after the other, in the order of the files; each can be kept."""
        for unit in self.out.journal.read(self.rollouts):
            task, rollout, steps, origin = (unit[name] for name in ("task", "rollout", "steps", "origin"))
            payload = ImportedPayload(task=task, rollout=rollout, steps=steps, origin=origin)
            yield _with_statistics(payload, self._statistics.get(rollout["rollout_id"]))

    def filter(self, config: JuicerConfig) -> None:
        """Leave only the rollouts that a Data-Juicer recipe keeps, with its statistics; the others drop by name.

        A rollout without steps has nothing to judge and stays.
        """
        self.out.progress("Data-Juicer", 0, 1)
        origins: dict[str, Row] = {}
        for unit in self.units():
            if unit["steps"]:
                origins[unit["rollout"]["rollout_id"]] = {name: unit["origin"][name] for name in ("file", "line")}
        conversations = (
            (unit["rollout"]["rollout_id"], conversation(unit["steps"])) for unit in self.units() if unit["steps"]
        )
        judged = data_juicer.judge(conversations, config, self.out.scratch("data-juicer"))
        kept = judged.kept
        counts = {count.file: count for count in self.counts}
        for name, origin in origins.items():
            if name not in kept:
                counts[origin["file"]].rollouts -= 1
                counts[origin["file"]].dropped["data_juicer"] += 1
                why = judged.dropped.get(name, "the recipe")
                self.drops.append(Drop(origin["file"], origin["line"], "data_juicer", f"{name}: dropped by {why}"))
        self.rollouts = [name for name in self.rollouts if name in kept or name not in origins]
        self._statistics = kept


def _with_statistics(unit: ImportedPayload, statistics: Row | None) -> ImportedPayload:
    if statistics is None:
        return unit
    extra = {**orjson.loads(unit["origin"]["extra_json"]), "data_juicer": statistics}
    return {**unit, "origin": {**unit["origin"], "extra_json": store.encode(extra).decode()}}


# ---- import_report
# What an import did, file by file: records in, rollouts out, dropped, redacted, and what the source cannot tell.

SHOWN = 20
"""Files, and reasons for dropping, that the report lists; `sources.json` and `drops.json` have all."""


def report(
    counts: list[FileCount],
    drops: list[Drop],
    told: Account,
    about: str,
    checks: list[gate.GateCheck],
    remarks: list[str],
    out: RunWriter,
) -> None:
    """Write what came of an import: `report.txt`, `sources.json`, `drops.json`, and totals in the manifest.

    `told` are the rollouts, `about` how many tasks and models they are of; `remarks` are a format's own lines for
    `report.txt`, which shows the first `SHOWN` files and drops; the two documents have all.
    """
    out.document("sources", [_source(count) for count in counts])
    out.document("drops", [vars(drop) for drop in drops])
    dropped, redacted = _sum(c.dropped for c in counts), _sum(c.redacted for c in counts)
    traces = sum(count.traces for count in counts)
    out.count(traces=traces, rollouts=told.rollouts, failed=told.failed, steps=told.steps)
    out.count(**{f"dropped_{reason}": number for reason, number in sorted(dropped.items())})
    out.manifest.tokens.update(prompt=told.prompt_tokens, completion=told.completion_tokens)
    out.set_summary(
        files=len(counts),
        formats=dict(Counter(count.format for count in counts)),
        mean_reward=told.rewards.value,
        dropped=dict(dropped),
        redacted=dict(redacted),
        gate_ok=all(check.ok for check in checks),
        gate={check.name: [check.total - check.failed, check.total, check.unrecorded] for check in checks},
    )
    lines = [
        f"{told.rollouts} rollouts ({told.failed} failed), {told.steps} steps, {about}, from {len(counts)} files",
        f"{traces} traces in = {told.rollouts} rollouts out + {dropped.total()} dropped; "
        f"{told.rewards.number} rollouts scored",
        *remarks,
        *_files(counts),
        *_drops(drops, dropped),
        *_secrets(redacted, counts),
        *_missing(counts),
        "",
        gate.table(checks),
    ]
    out.text("report.txt", "\n".join(lines) + "\n")


def _sum(counters: Iterable[Counter[str]]) -> Counter[str]:
    return sum(counters, Counter())


def _source(count: FileCount) -> Row:
    counters = {"dropped": dict(count.dropped), "redacted": dict(count.redacted), "missing": sorted(count.missing)}
    return {**vars(count), **counters}


def _files(counts: list[FileCount]) -> list[str]:
    """One line a format, and one a file where there are few."""
    by_format: dict[str, list[FileCount]] = defaultdict(list)
    for count in counts:
        by_format[count.format].append(count)
    lines = []
    for name, group in by_format.items():
        lines.append(_cells(name, group))
        lines += [_cells(f"- {count.file}", [count]) for count in group if len(counts) <= SHOWN]
    return ["", tabulate(lines, ("files", "records", "traces", "rollouts", "dropped", ""), tablefmt="plain")]


def _cells(name: str, group: list[FileCount]) -> tuple[int, int, int, int, int, str]:
    records, traces = sum(count.records for count in group), sum(count.traces for count in group)
    rollouts, dropped = sum(count.rollouts for count in group), sum(count.dropped.total() for count in group)
    return len(group), records, traces, rollouts, dropped, name


def _drops(drops: list[Drop], dropped: Counter[str]) -> list[str]:
    """How many for which reason, and the first of each file and reason."""
    if not drops:
        return []
    alike: dict[tuple[str, str], list[Drop]] = defaultdict(list)
    for drop in drops:
        alike[drop.file, drop.reason].append(drop)
    lines = ["", "dropped", tabulate(sorted(dropped.items()), tablefmt="plain")]
    lines += [_first(group) for group in list(alike.values())[:SHOWN]]
    return lines + ([f"  ... and more of {len(alike) - SHOWN} files in drops.json"] if len(alike) > SHOWN else [])


def _first(group: list[Drop]) -> str:
    drop, others = group[0], f" (and {len(group) - 1} more)" if len(group) > 1 else ""
    return f"  {drop.file}, line {drop.line}{others}: {drop.reason}: {drop.detail[:160]}"


def _secrets(redacted: Counter[str], counts: list[FileCount]) -> list[str]:
    """How many of which kind, and what stood around the first of them, so that a mistake is seen."""
    if not redacted:
        return ["", "redacted: nothing"]
    kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(redacted.items()))
    previews = [f"  {count.file}, {preview}" for count in counts for preview in count.previews]
    lines = [
        "",
        f"redacted: {kinds} (`--set redact=false` leaves all texts as they are)",
        *map(_one_line, previews[:SHOWN]),
    ]
    return lines + ([f"  ... and more in sources.json, of {redacted.total()} in all"] if len(previews) > SHOWN else [])


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n")


def _missing(counts: list[FileCount]) -> list[str]:
    """What the files of each format cannot tell, at least in some of their rollouts."""
    by_format: dict[str, set[str]] = defaultdict(set)
    for count in counts:
        by_format[count.format] |= count.missing
    lines = [(name, ", ".join(sorted(facts))) for name, facts in by_format.items() if facts]
    return ["", "not recorded (null in the tables)", *([tabulate(lines, tablefmt="plain")] if lines else [])]
