"""The stage `import`: its plan, its run, and the work of its workers, which read files ahead."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from composer_stages.data_files import load_template
from composer_stages.errors import BadInput
from composer_stages.formats import readers, reading, repeats, rows, swebench
from composer_stages.formats.base import RECORDED_REWARD, Drop, Reader
from composer_stages.formats.config import Config
from composer_stages.formats.files import Source
from composer_stages.formats.measurement import MEASURED
from composer_stages.formats.reading import FileCount, ReadTrajectory
from composer_stages.formats.repeats import StoredTables
from composer_stages.formats.reports import Sidecars
from composer_stages.formats.rows import ImportedPayload
from composer_stages.formats.swebench_logs import GradedLog
from composer_stages.layout import aligned, counted, escape_line, shortened
from composer_stages.rollouts import collection_checks, missing
from composer_stages.rollouts.collection_checks import Account
from composer_stages.rollouts.trace import exports_of, inherited
from composer_stages.runs import store
from composer_stages.runs.kinds import ORIGIN, ROLLOUT, STEP, TASK, Row
from composer_stages.runs.run import Inputs, RunWriter
from composer_stages.runs.stage import Plan
from composer_stages.words import Sentence

BATCH_CHARACTERS = 16 * 2**20
"""Characters after which a batch is written even if it has fewer units than BATCH."""
LONG = 120
"""Characters from which the equal actions of two rollouts are no coincidence."""
BATCH = 64
"""Units that are written in one step."""
SHOWN = 20
"""Files, and reasons for dropping, that the report lists; `sources.json` and `drops.json` have all."""


def plan(inputs: Inputs, config: Config) -> Plan:
    """Count the files to read."""
    del inputs
    return Plan(units=len(config.sources()), what="files")


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Read every file, then write the tables, the collection checks and the report."""
    del inputs
    sidecars = Sidecars(config.model, config.redact, config.score)
    sources, chosen = config.sources(), dict[Source, Reader | None]()
    if config.format == swebench.LOGS:
        (reader,) = readers(config.format)
        chosen = dict.fromkeys(sources, reader)
    else:
        detected = reading.detect_formats(list(sources), config.format, sidecars)
        # Predictions come last: a prediction that repeats a trajectory is a duplicate.
        last = swebench.PREDICTIONS
        chosen = dict(sorted(detected.items(), key=lambda pair: pair[1] is not None and pair[1].name == last))
        # Saved logs are read while they are graded, in this process.
        out.spread([[unit_of(source)] for source in chosen], "files", WorkerFiles(list(chosen.items()), sidecars))
    session = ImportSession(out, sidecars)
    for done, (source, reader_of_file) in enumerate(chosen.items()):
        out.progress("files", done, len(chosen))
        session.read(source, reader_of_file)
    out.progress("files", len(chosen), len(chosen))
    graded = [source.graded for source in chosen if isinstance(source, swebench.Log)]
    if graded:
        out.document("graded", [log.record() for log in graded])
    out.set_summary(reports=sidecars.reports.summary(), **inherited(exports_of(source.path for source in chosen)))
    _finish(session, config, out, graded)


def work(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Read a worker's files."""
    del inputs, config
    files_of_worker: WorkerFiles = out.shared_value
    for source, reader in files_of_worker.files:
        if not out.finished(unit_of(source)):
            read_into_journal(source, reader, files_of_worker.sidecars, out)


# Reading: rollouts of a file, perhaps read ahead by a worker


@dataclass(frozen=True)
class RolloutIdentity:
    """The fields that identify a rollout.

    acted: digest of task, model, submission, actions; content: digest of the whole record; length: characters of the
    actions; attempt: the evaluation's sample and epoch, where the source gives it no id; file: its name in rows.
    """

    rollout_id: str
    path: Path
    file: str
    line: int
    importer: str
    task_id: str
    model: str | None
    patch: str
    acted: str
    content: str
    length: int
    attempt: str | None
    effective: bool

    @classmethod
    def of(cls, item: ReadTrajectory) -> "RolloutIdentity":
        """Return the fields of a rollout that was read."""
        trajectory = item.trajectory
        return cls(
            repeats.rollout_id(item),
            item.origin.path,
            item.origin.file,
            item.origin.line,
            item.format,
            trajectory.task_id,
            trajectory.model,
            (trajectory.submission or "").strip(),
            repeats.acted(trajectory),
            store.digest(
                {
                    **asdict(trajectory),
                    "missing": sorted(trajectory.missing),
                    "log": None,
                    "measured": trajectory.measured.scores,
                }
            ),
            sum(len(turn.action) for turn in trajectory.turns),
            None if trajectory.own_id else trajectory.measured.attempt,
            bool(trajectory.effective),
        )


@dataclass(frozen=True)
class ReadRollout:
    """One rollout of a file. payload: its journal record, as the first of its task."""

    identity: RolloutIdentity
    payload: ImportedPayload


@dataclass(frozen=True)
class WorkerFiles:
    """The files of an import with their readers, and the sidecars, which all workers need."""

    files: Sequence[tuple[Source, Reader | None]]
    sidecars: Sidecars


def unit_of(source: Source) -> str:
    """Return the unit of a file."""
    return f"file/{store.digest([source.label, source.sha256])[:16]}"


def read_rollouts(
    source: Source, reader: Reader | None, sidecars: Sidecars, count: FileCount, out: RunWriter
) -> Iterator[ReadRollout | Drop]:
    """Yield and count all rollouts and drops of a file, from the units of a worker if one has read the file."""
    name = unit_of(source)
    # The unit of the file is written last: without it the worker was stopped, and its other units are ignored.
    file_unit = out.journal.get(name) if out.journal.finished(name) else None
    if file_unit is None:
        for item in reading.read(source, reader, sidecars, count):
            yield item if isinstance(item, Drop) else ReadRollout(RolloutIdentity.of(item), rows.payload(item, 0))
        return
    for field, value in file_unit["count"].items():
        setattr(count, field, type(getattr(count, field))(value))
    # The report on verdicts counts which instances each report judged, also those judged in workers.
    sidecars.reports.add_usage(file_unit["reports"])
    for row in out.journal.read([f"{name}/{number}" for number in range(1, file_unit["items"] + 1)]):
        if "drop" in row:
            yield Drop(**row["drop"])
        else:
            yield ReadRollout(
                RolloutIdentity(**{**row["identity"], "path": Path(row["identity"]["path"])}), row["read"]
            )


def read_into_journal(source: Source, reader: Reader | None, sidecars: Sidecars, out: RunWriter) -> None:
    """Read a file into the journal of a worker."""
    count, name = FileCount(source.label, reader.name if reader else "unknown", source.sha256), unit_of(source)
    batch: list[tuple[str, Row, bool]] = []
    number = 0
    for number, item in enumerate(read_rollouts(source, reader, sidecars, count, out), 1):
        row: Row = (
            {"drop": asdict(item)}
            if isinstance(item, Drop)
            else {"identity": {**asdict(item.identity), "path": str(item.identity.path)}, "read": item.payload}
        )
        batch.append((f"{name}/{number}", row, False))
        if len(batch) == BATCH:
            out.raise_if_stopped()
            out.write_all(batch)
            batch.clear()
    file_unit = {"items": number, "count": count.record(), "reports": sidecars.reports.usage()}
    out.write_all([*batch, (name, file_unit, False)])


class ImportSession:
    """One import: reads file after file into the journal, and counts imported and dropped rollouts.

    `rollouts`: the units in the order of the files. `effective`: whether a rollout entered a training batch, by unit.
    """

    def __init__(self, out: RunWriter, sidecars: Sidecars) -> None:
        self.out, self.sidecars = out, sidecars
        self.counts: list[FileCount] = []
        self.drops: list[Drop] = []
        self.rollouts: list[str] = []
        self.failures: list[str] = []
        """The errors of rollouts that failed before a model's first answer."""
        self.effective: dict[str, bool] = {}
        self._acted: dict[str, str] = {}
        self._by_task: dict[str, list[RolloutIdentity]] = defaultdict(list)
        self._tables = StoredTables()
        self._attempts: dict[tuple[str, str], Path] = {}
        self._contents: dict[str, tuple[RolloutIdentity, str]] = {}
        """The first rollout of each content, and the digest of its file."""
        self.repeated = 0
        """Number of rollouts that are imported although an earlier one has the same content."""
        self._samples: Counter[tuple[str, str | None]] = Counter()

    def read(self, source: Source, reader: Reader | None) -> None:
        """Write all rollouts of a file in batches, and count them."""
        count = FileCount(source.label, reader.name if reader else "unknown", source.sha256)
        self.counts.append(count)
        units, is_last = self._units(source, reader, count), False
        while not is_last:
            batch, size = list[tuple[str, ImportedPayload]](), 0
            for unit, payload in units:
                batch.append((unit, payload))
                size += sum(
                    len(row["observation"] or "") + len(row["new_messages_json"] or "") for row in payload["steps"]
                )
                if len(batch) == BATCH or size > BATCH_CHARACTERS:
                    break
            else:
                is_last = True
            self.out.raise_if_stopped()
            # The ids of rollouts are the same in every attempt, and an earlier one may have written this unit.
            self.out.write_all([(unit, payload, False) for unit, payload in batch if not self.out.finished(unit)])

    def _units(self, source: Source, reader: Reader | None, count: FileCount) -> Iterator[tuple[str, ImportedPayload]]:
        """Yield the units of a file's new rollouts, numbered among those of the same task and model."""
        for item in read_rollouts(source, reader, self.sidecars, count, self.out):
            if isinstance(item, Drop):
                self.drops.append(item)
                continue
            identity, payload, unit = item.identity, item.payload, item.identity.rollout_id
            # PRIME-RL writes the rollouts of a training batch a second time, to `effective/`, with the ids of `all/`.
            if unit in self.effective and self._acted[unit] != identity.acted:
                # Ids that two collections of one environment give alike, or two files of other programs.
                unit = f"{unit}~{identity.acted[:8]}"
                for row in (payload["rollout"], *payload["steps"], payload["origin"]):
                    row["rollout_id"] = unit
            if unit in self.effective:
                self.effective[unit] |= identity.effective
                repeats: str | None = Sentence("formats.repeated-id", rollout_id=unit)
            else:
                repeats = self._copy_of(identity, source) or self._duplicate_of(identity)
            if repeats:
                count.dropped["duplicate"] += 1
                self.drops.append(Drop(identity.file, identity.line, "duplicate", repeats))
                continue
            self.effective[unit], self._acted[unit] = identity.effective, identity.acted
            self.rollouts.append(unit)
            if not payload["steps"] and missing.STEPS not in payload["origin"]["missing"]:
                self.failures.append(f"{identity.file}, line {identity.line}: {payload['rollout']['error']}")
            count.rollouts += 1
            count.missing |= set(payload["origin"]["missing"])
            key = identity.task_id, identity.model
            for row in (payload["rollout"], *payload["steps"]):
                row["sample_idx"] = self._samples[key]
            self._samples[key] += 1
            yield unit, payload

    def _copy_of(self, item: RolloutIdentity, source: Source) -> str | None:
        """Return which record this one copies; None if it is new, or may be equal by coincidence."""
        first, file = self._contents.setdefault(item.content, (item, source.sha256))
        if (first.file, first.line) == (item.file, item.line):  # several rollouts of one record, or the first one
            return None
        # Two samples of a task may be the same short answer. Long texts, times and token counts are equal only at
        # temperature 0, where the second sample adds no information. Patches are often equal: of those only a repeated
        # line or a copied file is a copy.
        is_patch = item.importer in (swebench.PREDICTIONS, swebench.LOGS)
        is_same_file = first.path == item.path
        is_copied_file = file == source.sha256 and not is_same_file and not is_patch
        if is_copied_file or (is_same_file if is_patch else item.length >= LONG):
            return Sentence("formats.copied-record", file=first.file, line=first.line)
        self.repeated += item.length > 0
        return None

    def _duplicate_of(self, item: RolloutIdentity) -> str | None:
        """Return which rollout this one repeats; record it and return None if it is new. Predictions are read last."""
        path, predicted = item.path, item.importer == swebench.PREDICTIONS
        # Older logs of Inspect give samples no id: a retry holds finished ones, the same actions at the same attempt.
        if item.attempt and (first := self._attempts.setdefault((item.attempt, item.acted), path)) != path:
            return Sentence("formats.duplicate-task", task_id=item.task_id, file=first.name)
        if earlier := self._tables.find_copy(path, item.acted, predicted=predicted):
            return Sentence("formats.duplicate-task", task_id=item.task_id, file=earlier.name)
        if not predicted:
            self._by_task[item.task_id].append(item)
            return None
        # A prediction comes from a trajectory in its folder or below, with the same patch. If there is only one of the
        # task and the models do not differ, the patch may.
        near = [rollout for rollout in self._by_task[item.task_id] if rollout.path.is_relative_to(path.parent)]
        same = [rollout for rollout in near if rollout.patch == item.patch != ""]
        if not same and len(near) == 1 and near[0].model in (None, item.model):
            same = near
        return Sentence("formats.copied-submission", task_id=item.task_id, file=same[0].file) if same else None

    def units(self) -> Iterator[ImportedPayload]:
        """Yield the journal's records of all rollouts in the order of the files."""
        for unit in self.out.journal.read(self.rollouts):
            yield ImportedPayload(
                task=unit["task"], rollout=unit["rollout"], steps=unit["steps"], origin=unit["origin"]
            )


# The tables and the report


def _finish(session: ImportSession, config: Config, out: RunWriter, graded: list[GradedLog]) -> None:
    """Write the tables in the order of the files, and the report with every file's counts and the collection checks."""
    if not session.rollouts:
        first = vars(session.drops[0]) if session.drops else None
        raise BadInput(
            "formats.nothing-imported",
            num_files=len(session.counts),
            first=first,
            path=config.paths[0],
            format=config.format,
        )
    if len(session.failures) == len(session.rollouts):
        raise BadInput("formats.all-failed", num_rollouts=len(session.rollouts), failure=session.failures[0])
    tasks: dict[str, Row] = {}
    checks, account, models = collection_checks.CollectionChecks(), Account(), set[str | None]()
    remarks: list[str] = []
    withheld, scores, unchosen = Counter[str](), dict[str, None](), 0

    def rollouts() -> Iterator[Row]:
        nonlocal unchosen
        for unit in session.units():
            task = tasks.setdefault(unit["task"]["task_id"], unit["task"])
            prompts = (task["prompt"], unit["task"]["prompt"])
            # The shortest wording of a task has the least of a harness's instructions around it.
            task["prompt"] = min(prompts, key=lambda prompt: (prompt is None, len(prompt or "")))
            account.add(unit["rollout"], len(unit["steps"]))
            checks.add(unit["rollout"], unit["steps"], unit["origin"]["missing"])
            models.add(unit["rollout"]["model"])
            extra = orjson.loads(unit["origin"]["extra_json"])
            recorded, named = extra.get(RECORDED_REWARD), extra[MEASURED]["scores"]
            scores.update(dict.fromkeys(named))
            is_scored = unit["rollout"]["error_type"] is None and sum(value is not None for value in named.values()) > 1
            unchosen += is_scored and unit["rollout"]["reward"] is None
            withheld.update([] if recorded is None else [f"{recorded:g}"])
            yield unit["rollout"]

    def origins() -> Iterator[Row]:
        # Whether a rollout entered a batch is known where any file of batches was read.
        any_batch = any(session.effective.values())
        for origin in (unit["origin"] for unit in session.units()):
            is_known = origin["effective"] is not None and any_batch
            yield {**origin, "effective": session.effective[origin["rollout_id"]] if is_known else None}

    out.table(ROLLOUT, rollouts())
    if config.score and config.score not in scores:
        raise BadInput("formats.no-such-score", score=config.score, scores=[*scores])
    if unchosen:
        remarks.append(Sentence("formats.score-not-chosen", num_rollouts=unchosen, scores=[*scores]))
    out.table(TASK, tasks.values())
    out.table(STEP, (step for unit in session.units() for step in unit["steps"]))
    out.table(ORIGIN, origins())
    about = f"{counted(len(tasks), 'task')}, {counted(len(models), 'model')}"
    if withheld:
        rewards = ", ".join(f"{number} of {reward}" for reward, number in sorted(withheld.items()))
        number = withheld.total()
        remarks += [
            Sentence("formats.rewards-without-completion", num_rollouts=number, rewards=rewards),
            Sentence("formats.reward-kept-in-origins", key=RECORDED_REWARD),
        ]
    if session.repeated:
        remarks.append(Sentence("formats.alike-rollouts-kept", num_rollouts=session.repeated))
    out.set_summary(models=sorted(filter(None, models)))
    _report(session, account, about, checks.checks(account.rollouts), remarks, graded, out)


def _report(
    session: ImportSession,
    account: Account,
    about: str,
    checks: list[collection_checks.CollectionCheck],
    remarks: list[str],
    graded: list[GradedLog],
    out: RunWriter,
) -> None:
    """Write the result of an import: `report.txt`, `sources.json`, `drops.json`, and totals in the manifest.

    `account` are the rollouts, `about` their numbers of tasks and models; `graded` are saved logs. `report.txt` shows
    the first `SHOWN` files and drops; the two documents have all.
    """
    counts, drops = session.counts, session.drops
    out.document("sources", [count.record() for count in counts])
    out.document("drops", [vars(drop) for drop in drops])
    dropped, redacted = Counter[str](), Counter[str]()
    for count in counts:
        dropped += count.dropped
        redacted += count.redacted
    traces = sum(count.traces for count in counts)
    out.count(traces=traces, rollouts=account.rollouts, failed=account.failed, steps=account.steps)
    out.count(**{f"dropped_{reason}": number for reason, number in sorted(dropped.items())})
    out.manifest.tokens.update(prompt=account.prompt_tokens, completion=account.completion_tokens)
    out.set_summary(
        files=len(counts),
        formats=dict(Counter(count.format for count in counts)),
        mean_reward=account.rewards.value,
        dropped=dict(dropped),
        redacted=dict(redacted),
        **collection_checks.summary(checks),
    )
    by_format: dict[str, list[FileCount]] = defaultdict(list)
    for count in counts:
        by_format[count.format].append(count)
    alike: dict[tuple[str, str], list[Drop]] = defaultdict(list)
    for drop in drops:
        alike[drop.file, drop.reason].append(drop)
    kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(redacted.items()))
    report = load_template(__package__, "import_report.jinja").render(
        imported=Sentence("formats.imported", account=account, about=about, num_files=len(counts)),
        balance=Sentence("formats.balance", account=account, num_traces=traces, num_dropped=dropped.total()),
        remarks=remarks,
        graded=graded,
        graders=sorted(Counter(log.grader or "none" for log in graded).items()),
        reports=session.sidecars.reports,
        files=aligned(_file_cells(by_format, len(counts)), ("files", "records", "traces", "rollouts", "dropped", "")),
        dropped=aligned(sorted(dropped.items())),
        alike=list(alike.values()),
        redacted=kinds and Sentence("formats.redacted", kinds=kinds),
        # The text around the first redactions is shown so that a mistake is seen.
        previews=[f"{count.file}, {preview}" for count in counts for preview in count.previews],
        num_redacted=redacted.total(),
        missing=aligned(_missing_cells(by_format)),
        checks=collection_checks.table(checks),
        most=SHOWN,
        escape_line=escape_line,
        shortened=shortened,
    )
    out.write_file("report.txt", report)


def _file_cells(by_format: Mapping[str, list[FileCount]], num_files: int) -> Iterator[tuple[int | str, ...]]:
    """Yield what was read and dropped, a row each format, and one a file where there are few."""
    for name, of_format in by_format.items():
        files = [(f"- {count.file}", [count]) for count in of_format if num_files <= SHOWN]
        for label, group in [(name, of_format), *files]:
            numbers = (sum(getattr(count, column) for count in group) for column in ("records", "traces", "rollouts"))
            yield len(group), *numbers, sum(count.dropped.total() for count in group), label


def _missing_cells(by_format: Mapping[str, list[FileCount]]) -> Iterator[tuple[str, str]]:
    """Yield what files of a format do not record, at least in some of their rollouts."""
    for name, group in by_format.items():
        if facts := set[str]().union(*(count.missing for count in group)):
            yield name, ", ".join(sorted(facts))
