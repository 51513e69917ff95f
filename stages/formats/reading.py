"""Detect the format of files and read their trajectories, completed and type-checked, and their dropped records.

`detect_formats` chooses a reader for every file, `read` yields the trajectories of one file. Every record is cleaned
first (`secrets.py`).
"""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from composer_stages.errors import BadInput
from composer_stages.formats import FORMATS, readers
from composer_stages.formats.base import INSTANCE, MALFORMED, Drop, Origin, Reader, Trajectory, family_of
from composer_stages.formats.files import Source
from composer_stages.formats.measurement import (
    ENDED_IN_ERROR,
    NO_SCORE,
    REWARD,
    UNCOUNTED,
    MeasuredLog,
    State,
    alone,
    as_settings,
    reason_of,
)
from composer_stages.formats.messages import first_question
from composer_stages.formats.reports import Sidecars
from composer_stages.formats.secrets import Redactions, clean
from composer_stages.json_text import TooDeep
from composer_stages.rollouts import missing
from composer_stages.runs import store
from composer_stages.words import Sentence

LOOK = 20
"""Records of a file that are examined to detect its format."""
PREVIEWS = 50
SHOWN = 12
"""Keys of a record that a drop lists."""
SETTINGS = frozenset({"config.json", "lock.json"})
"""The files that Harbor writes as a job or a trial begins."""
RECORDED = ("task_id", "env", "log", "measured", "reward", "resolved", "unscored", "terminated_by", "error")
COSTS = ("prompt_tokens", "completion_tokens", "cost_usd")
"""What the record of a trial says of its trajectory, and what it says where this does not."""
TRAJECTORY = TypeAdapter(Trajectory)


@dataclass
class FileCount:
    """Counts of one file. `traces` = rollouts + the sum of `dropped`."""

    file: str
    format: str
    sha256: str
    records: int = 0
    traces: int = 0
    rollouts: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    redacted: Counter[str] = field(default_factory=Counter)
    previews: list[str] = field(default_factory=list)
    """Kind, line and surrounding text of the first `PREVIEWS` redactions."""
    missing: set[str] = field(default_factory=set)
    logs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What its logs are of, by their keys, which rollouts have in `extra_json`."""

    def record(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        counters = {"dropped": dict(self.dropped), "redacted": dict(self.redacted), "missing": sorted(self.missing)}
        return {**vars(self), **counters}


@dataclass(frozen=True)
class ReadTrajectory:
    """A trajectory, its record, and the name of its format. `redacted`: a secret was removed from the record."""

    trajectory: Trajectory
    origin: Origin
    format: str
    index: int
    """Its index among the trajectories of one record."""
    redacted: bool


def detect_formats(
    sources: list[Source], format_name: str, sidecars: Sidecars, *, brief: bool = False
) -> dict[Source, Reader | None]:
    """Return the reader of every file of trajectories, None if no format fits; add all other files to the sidecars.

    Of a trial's files in several formats, as agents write, those in the format of its record count; brief: the record
    alone. `BadInput` if no file holds trajectories.
    """
    candidates = readers(format_name)
    chosen: dict[Source, Reader | None] = {}
    descriptions: dict[Source, Reader] = {}
    for source in sources:
        # One after the other, since a record may be large.
        records = islice((r[1] for r in source.records() if not isinstance(r, Drop)), LOOK)
        # Record by record, since the first lines of a file may be no rollouts (a header, a summary, a broken line).
        fitting = next((i for record in records for i in candidates if not source.is_sidecar and fits(i, record)), None)
        is_useful = False
        if fitting is None or fitting.describes or fitting.judges:
            for item in source.records():
                if not isinstance(item, Drop):
                    with suppress(*MALFORMED):
                        is_useful |= sidecars.add(source, item[1])
        if fitting is not None and (fitting.describes or fitting.judges):
            descriptions[source] = fitting
        elif fitting is not None or not (is_useful or source.is_sidecar):
            chosen[source] = fitting
    trials = {s.path.parent: (s, r) for s, r in descriptions.items() if r.describes and not s.is_sidecar}
    trial_of = {source: next((f for f in source.path.parents if f in trials), None) for source in chosen}
    in_format = {s for s, r in chosen.items() if r and (trial := trial_of[s]) and r.name == trials[trial][1].name}
    documented = {trial_of[source] for source in in_format}
    foreign = Counter(
        trial for source, trial in trial_of.items() if trial and chosen[source] and trial not in documented
    )
    for source, trial in trial_of.items():
        if trial and (brief or (trial in documented and chosen[source] and source not in in_format)):
            del chosen[source]
        elif trial and foreign[trial] == 1 and chosen[source]:
            sidecars.recorded[source.path] = trials[trial]
    # What a killed job left is played again when it is resumed, and counts for nothing until then.
    jobs = {folder.parent for folder in trials}
    begun = {source.path.parent for source in sources if source.path.name in SETTINGS} - trials.keys()
    for source in [each for each, trial in trial_of.items() if trial is None]:
        if source.path.name in SETTINGS and jobs & {source.path.parent, source.path.parent.parent}:
            del chosen[source]
        elif any(folder.parent in jobs and folder in begun for folder in source.path.parents):
            chosen[source] = UNFINISHED
    detected = [(source.path, reader.name) for source, reader in chosen.items() if reader]
    # A trial's record is left out where a transcript has its verdict, which of several is not known.
    parted = {folder for folder, num in foreign.items() if num > 1 and not brief}
    above = {folder for path, _ in detected for folder in path.parents if folder not in parted}
    judges_alone = not detected and all(reader.judges for reader in descriptions.values())
    beside = {(path.parent, name) for path, name in detected}
    chosen |= {
        source: reader
        for source, reader in descriptions.items()
        if (judges_alone if reader.judges else source.path.parent not in above)
        and not beside & {(folder, reader.name) for folder in source.path.parents}
    }

    def instances(folder: Path | None) -> Iterator[str]:
        """Yield the tasks of all trajectories below a folder; of all with None."""
        # With empty sidecars and a count of its own: reading a file for its tasks must leave no verdict and no number.
        for source, reader in chosen.items():
            if reader is not None and (folder is None or source.path.is_relative_to(folder)):
                for item in read(source, reader, Sidecars(), FileCount("", "", "")):
                    if isinstance(item, ReadTrajectory):
                        yield item.trajectory.task_id

    sidecars.reports.settle(instances)
    if not chosen:
        raise BadInput("formats.only-descriptions")
    return chosen


def _unfinished(record: Any, origin: Origin) -> Iterator[Drop]:
    """Yield the drop of what a trial without a result left."""
    yield origin.make_drop("unfinished_trial", Sentence("formats.unfinished-trial"))


UNFINISHED = Reader("atif", lambda record: True, _unfinished)
"""The reader of a trial without a result beside finished ones."""


def fits(reader: Reader, record: Any) -> bool:
    """Whether a record has the layout of a reader; False if examining it fails."""
    try:
        return reader.recognises(record)
    except MALFORMED:
        return False


def read(
    source: Source, reader: Reader | None, sidecars: Sidecars, count: FileCount, *, brief: bool = False
) -> Iterator[ReadTrajectory | Drop]:
    """Yield all trajectories and drops of a file, and count them. Without a reader every record is dropped.

    brief: steps may be left out where scores stand elsewhere in the file.
    """
    records, recorded = source.records(brief=brief), sidecars.recorded.get(source.path)
    items: Iterator[Trajectory | Drop]
    if reader is not None and reader.join is not None:
        records = reader.join(records, source.make_drop)
    for record in records:
        count.records += 1
        line, value = (record.line, None) if isinstance(record, Drop) else record
        origin, secrets = Origin(source.path, source.label, source.sha256, line, sidecars), Redactions()
        if isinstance(record, Drop):
            items = iter([record])
        elif reader is None:
            names = [name for name, spec in FORMATS.items() if spec.detected]
            problem = Sentence("formats.unknown-format", record=_describe(value), formats=names)
            items = iter([origin.make_drop("unknown_format", problem)])
        else:
            items = _trajectories(reader, value, origin, secrets, recorded)
        for index, item in enumerate(items):
            count.traces += 1
            if isinstance(item, Drop):
                count.dropped[item.reason] += 1
                yield item
            else:
                recorded = None
                if item.log and item.log.key not in count.logs:
                    count.logs[item.log.key] = item.log.record()
                yield ReadTrajectory(item, origin, reader.name if reader else "", index, bool(secrets))
        count.redacted.update(secrets)
        previews = [f"line {origin.line}: {preview}" for _, preview in secrets.previews]
        count.previews += previews[: max(0, PREVIEWS - len(count.previews))]
    if recorded:  # the verdict of a transcript without a trajectory is not lost
        yield from read(*recorded, sidecars, count, brief=brief)


def _describe(record: Any) -> Sentence:
    """Describe a record of no known format by its type or keys."""
    if not isinstance(record, dict):
        return Sentence("formats.record-type", type=type(record).__name__)
    if "prompt" in record and ("test" in record or "tests" in record):
        return Sentence("formats.record-is-task")
    keys = sorted(map(str, record))
    return Sentence("formats.record-keys", keys=keys[:SHOWN], num_more=len(keys) - SHOWN)


def _trajectories(
    reader: Reader, record: Any, origin: Origin, secrets: Redactions, recorded: tuple[Source, Reader] | None
) -> Iterator[Trajectory | Drop]:
    """Clean a record and yield its trajectories, checked, the first with what is recorded of its trial."""
    try:
        # Before the reader runs, so that no field of a trajectory can hold a secret or a value that JSON cannot store.
        record = clean(record, secrets if origin.sidecars.redact else None)
        if not fits(reader, record):
            problem = Sentence("formats.foreign-record", format=reader.name, record=_describe(record))
            yield origin.make_drop("foreign_record", problem)
            return
        for trajectory in reader.trajectories(record, origin):
            if isinstance(trajectory, Drop):
                yield trajectory
                continue
            if recorded:
                trajectory, recorded = _with_verdict(trajectory, *recorded, origin), None
            yield check(completed(trajectory, origin, reader))
    except TooDeep as error:
        yield origin.make_drop("too_deep", str(error))
    except MALFORMED as error:
        yield origin.make_drop("malformed_record", f"{type(error).__name__}: {error}")


def _with_verdict(trajectory: Trajectory, source: Source, reader: Reader, origin: Origin) -> Trajectory:
    """Return the trajectory with task, model and verdict of its trial's record, and with the costs that it lacks."""
    record = next(item[1] for item in source.records() if not isinstance(item, Drop))
    of_trial = next(reader.trajectories(clean(record, Redactions() if origin.sidecars.redact else None), origin))
    if isinstance(of_trial, Drop):
        return trajectory
    lacking = {name: getattr(of_trial, name) for name in COSTS if getattr(trajectory, name) is None}
    verdict = {name: getattr(of_trial, name) for name in RECORDED}
    return replace(trajectory, model=of_trial.model or trajectory.model, **verdict, **lacking)


def completed(trajectory: Trajectory, origin: Origin, reader: Reader) -> Trajectory:
    """Fill in what follows from the other fields: environment, family, the verdict of a report, task, and error."""
    trajectory.env = trajectory.env or ("swe-bench" if INSTANCE.fullmatch(trajectory.task_id) else reader.name)
    if trajectory.judged and not trajectory.unscored and trajectory.reward is None and trajectory.resolved is None:
        # No report knows a task by a name that its reader made of the environment's.
        named = "" if trajectory.task_id.startswith(f"{trajectory.env}/") else trajectory.task_id
        verdict = origin.sidecars.verdict(origin.path, named or None, trajectory.model)
        if verdict is not None:
            trajectory.resolved, trajectory.model = verdict.resolved, trajectory.model or verdict.model
            trajectory.measured.state, trajectory.measured.reason = verdict.state, verdict.reason
            if trajectory.error and trajectory.turns and verdict.resolved is not None:
                # What was submitted was judged, whatever ended the agent.
                ended, trajectory.error = reason_of(trajectory.error), None
                trajectory.measured.state, trajectory.measured.reason = State.SCORED_WITH_ERROR, ended
    if trajectory.reward is None and trajectory.resolved is not None:
        trajectory.reward = float(trajectory.resolved)
    _measure(trajectory, origin, reader)
    trajectory.task_id = trajectory.task_id or f"{reader.name}/{store.digest(first_question(trajectory.opening))[:12]}"
    trajectory.family = trajectory.family or family_of(trajectory.task_id)
    if not (trajectory.turns or trajectory.error or missing.STEPS in reader.missing | trajectory.missing):
        trajectory.error = "no_actions", trajectory.terminated_by or Sentence("formats.no-action")
    trajectory.missing |= reader.missing
    return trajectory


def _measure(trajectory: Trajectory, origin: Origin, reader: Reader) -> None:
    """Fill in what was measured: the log where a reader knows no more of it, the reward, the state and its reason."""
    measured, error = trajectory.measured, trajectory.error
    if is_bare := trajectory.log is None:
        env, model = trajectory.env, trajectory.model
        settings = as_settings(trajectory.sampling)
        key = (env, model, *settings.items())
        trajectory.log = origin.log(key, lambda: MeasuredLog(reader.name, task=env, model=model, settings=settings))
    for name, value in measured.scores.items():
        if not isinstance(value, int | float | None) or isinstance(value, bool):
            raise TypeError(f"{name} is {value!r:.60}")
        measured.scores[name] = value if value is not None and isfinite(value) else None
    if not measured.scores and (is_bare or trajectory.reward is not None):
        measured.scores = {REWARD: trajectory.reward}
    elif measured.scores and measured.state not in UNCOUNTED:
        trajectory.reward = measured.scores.get(alone(trajectory.log, measured.scores, origin.sidecars.score) or "")
    question = trajectory.statement or first_question(trajectory.opening)
    if question and not measured.asked:
        measured.asked = store.digest(question.split())[:16]
    if measured.state is None:
        has_score = any(value is not None for value in measured.scores.values())
        measured.state = State.SCORED if has_score and not error else State.MISSING
    if measured.state == State.SCORED and re.match(ENDED_IN_ERROR, ended := trajectory.terminated_by or ""):
        measured.state, measured.reason = State.SCORED_WITH_ERROR, ended
    if measured.state in UNCOUNTED and not measured.reason:
        measured.reason = reason_of(error) if error else NO_SCORE


def check(trajectory: Trajectory) -> Trajectory:
    """Return the same trajectory if its fields have the types that rows need, since sources hold any JSON.

    The types are those of the dataclasses in `base.py`, checked strictly: no text for a number, no bool for a number.
    Raises `TypeError` that names the first field of a wrong type, and its value.
    """
    try:
        TRAJECTORY.validate_python(trajectory)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        raise TypeError(f"{name} is {first['input']!r:.60}") from None
    return trajectory
