"""SWE-bench: predictions, read and written, and saved test logs of its harnesses, which are graded again.

A prediction is a rollout without steps: the submitted patch, and the verdict on it by a report in the same folder. A
file holds one patch a line, or an object of them by instance. The writer makes a folder a model with `all_preds.jsonl`
and, where the rollouts were judged, `report.json`. A file may hold an instance once, so a model's further rollouts of
an instance go into folders of their own. Of a rollout that a limit ended, the patch is its changes until then.

A report of a run without its predictions, of SWE-bench or Multi-SWE-bench, is an item for each instance that it lists.

`composer import swe-logs FOLDER [ROWS]` returns a rollout without steps for every log that has a verdict. The lists of
tests come from instance rows near the logs, else from the harness's report, else from rows in a file that the user
names, else from files named after SWE-bench next to the folder.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from composer_stages.errors import BadInput
from composer_stages.formats import swebench_logs
from composer_stages.formats.base import (
    WITHOUT_TRANSCRIPT,
    Drop,
    NumberedRecord,
    Origin,
    Reader,
    Record,
    Trajectory,
    has_keys,
)
from composer_stages.formats.files import Loads, Source
from composer_stages.formats.measurement import REWARD, Aggregate, MeasuredLog, Reported, ScoreKind
from composer_stages.formats.reports import BROKEN, FileLocation, is_of_pro, parse_report, stem
from composer_stages.formats.swebench_logs import EvalLog, GradedLog
from composer_stages.formats.transcripts import ExportedTranscript, File, Writer, json_lines, small_file
from composer_stages.runs.store import FolderNames
from composer_stages.terms import SWE_BENCH

PREDICTIONS, LOGS = "swebench-preds", "swe-logs"
LOST = ("everything but submissions and the verdicts on them",)
UNNAMED = ("report", "results", "eval_results", "final_report", "per_instance_details")
"""Names of reports that name no model."""
VERSION = re.compile(r"\d{1,2}(?:-[a-z]\w*)*")
"""What stands behind the dot of a model's name: 1, 5-preview."""
OF_SB_CLI = re.compile(r"swe-bench[\w-]*?__(?:dev|test)__.+")
"""A report that sb-cli names after data set, split and run."""
CUT = re.compile(r"^\[\d+ characters left out\]$", re.MULTILINE)
"""What a rollout's submission has in the middle where it was longer than is kept; no program applies it."""
VERDICTS = {"resolved_ids": True, "unresolved_ids": False}
"""Keys of a written report."""


def is_prediction(record: Any) -> bool:
    """Whether a record is a patch with its instance, or an object of such records."""
    if not isinstance(record, dict) or not record:
        return False
    # NeMo Gym's rollouts hold a patch and an instance too, beside the request.
    if "model_patch" in record and "instance_id" in record:
        return "responses_create_params" not in record
    return all(isinstance(value, dict) and "model_patch" in value for value in record.values())


def predicted_trajectories(record: Record, origin: Origin) -> Iterator[Trajectory]:
    """Yield one rollout a prediction."""
    # SWE-agent and mini-swe-agent write `preds.json`, one object by instance; SWE-bench's own form is JSON Lines.
    if "model_patch" not in record:
        for instance, prediction in record.items():
            yield from predicted_trajectories({"instance_id": instance, **prediction}, origin)
        return
    instance, model = str(record["instance_id"]), record.get("model_name_or_path")
    yield Trajectory(
        task_id=instance,
        env="swe-bench",
        model=model,
        log=origin.log(model, lambda: _log(model, origin.sidecars.reports.num_resolved(origin.path))),
        statement=origin.sidecars.statements.get(instance),
        submission=record["model_patch"] or None,
        resolved=record["resolved"] if isinstance(record.get("resolved"), bool) else None,
    )


def _log(model: str | None, total: tuple[int, int | None] | None) -> MeasuredLog:
    """Return what predictions and the report on them are of."""
    kind = ScoreKind(REWARD, scale=(0.0, 1.0))
    reported = [Reported(REWARD, "resolved", total[0], Aggregate.SUM, count=total[1])] if total else []
    return MeasuredLog(SWE_BENCH, task=SWE_BENCH, model=model, kinds=(kind,), reported=tuple(reported))


def is_report(record: Any) -> bool:
    """Whether a record is the report of a run, resolved instances beside lists of others, or of single instances."""
    if not isinstance(record, dict) or not record or "results" in record:
        return False
    if any(isinstance(record.get(name), list) for name in ("resolved_ids", "success_ids")):
        lists = ("unresolved_ids", "submitted_ids", "completed_ids", "error_ids")
        return any(isinstance(record.get(name), list) for name in lists)
    is_one = isinstance(record.get("resolved"), bool) and "patch_exists" in record and "instance_id" not in record
    return (
        is_one
        or is_of_pro(record)
        or all(isinstance(each, dict) and isinstance(each.get("resolved"), bool) for each in record.values())
    )


def report_trajectories(record: Record, origin: Origin) -> Iterator[Trajectory]:
    """Yield an item for each instance that a report lists."""
    if (report := parse_report(FileLocation(origin.path, origin.file, root=origin.path), record)) is None:
        return
    # MODEL.RUN.json, where both may have dots: a run seldom does. In MODEL.json the last part is of the model.
    above = [folder.name for folder in origin.path.parents]
    before, _, last = (named := stem(origin.path)).rpartition(".")
    named = named if not before or VERSION.fullmatch(last) else before
    if above[3:4] == ["run_evaluation"]:  # RUN/MODEL/INSTANCE/report.json
        named = above[1]
    model = None if named in UNNAMED or OF_SB_CLI.fullmatch(named) else named.replace("__", "/")
    log = origin.log("", lambda: _log(model, report.total))
    for instance in sorted({*report.verdicts, *report.unjudged}):
        about = record[instance] if isinstance(record.get(instance), dict) else {}
        trajectory = Trajectory(
            task_id=instance, env=SWE_BENCH, model=model, log=log, unscored=True, cost_usd=about.get("cost")
        )
        if instance in report.unjudged:
            trajectory.measured.state, trajectory.measured.reason = report.unjudged[instance]
        else:
            trajectory.resolved = report.verdicts[instance]
            if instance in report.errors:
                trajectory.measured.state, trajectory.measured.reason = BROKEN
        yield trajectory


class Prediction(NamedTuple):
    """The submission of one rollout, and whether the hidden tests pass on it (None if unknown)."""

    task_id: str
    patch: str
    passed: bool | None


def prediction_files(transcripts: Iterable[ExportedTranscript], dropped: Counter[str]) -> Iterable[File]:
    """Return one folder for every model and sample, of the rollouts with a submission."""
    runs: dict[tuple[str, int], list[Prediction]] = defaultdict(list)
    seen: Counter[tuple[str, str]] = Counter()
    for transcript in transcripts:
        rollout = transcript.rollout
        model, task = rollout["model"] or "unknown", rollout["task_id"]
        if transcript.submission is None:
            dropped["no_submission"] += 1
            continue
        if CUT.search(transcript.submission):
            dropped["submission_too_long"] += 1
            continue
        # The harness takes one prediction an instance from a file, so the second of a model goes to a second run.
        runs[model, seen[model, task]].append(Prediction(task, transcript.submission, rollout["hidden_pass"]))
        seen[model, task] += 1
    names = FolderNames()
    for (model, sample), members in runs.items():
        name = names.name(f"{model}.{sample + 1}" if sample else model)
        lines = [{"instance_id": m.task_id, "model_name_or_path": model, "model_patch": m.patch} for m in members]
        yield json_lines(f"{name}/all_preds.jsonl", lines)
        judged = {m.task_id: m.passed for m in members if m.passed is not None}
        if judged:
            report = {key: [i for i, passed in judged.items() if passed is is_it] for key, is_it in VERDICTS.items()}
            yield small_file(f"{name}/report.json", orjson.dumps(report, option=orjson.OPT_INDENT_2), len(judged))


@dataclass(frozen=True)
class Log(Source):
    """A saved log as a file to import. Its digest is that of everything its verdict depends on."""

    eval_log: EvalLog = field(compare=False)

    @cached_property
    def graded(self) -> GradedLog:
        """The verdict on the log, computed at the first access."""
        return swebench_logs.grade_log(self.eval_log)

    def records(self, loads: Loads = json.loads, *, brief: bool = False) -> Iterator[NumberedRecord | Drop]:
        """Yield the graded log as one record."""
        del loads, brief
        yield 1, self.graded.record()


def find_logs(paths: Sequence[str]) -> list[Log]:
    """Return the logs below folders; files among the paths are rows of instances."""
    expanded = [Path(path).expanduser() for path in paths]
    rows, folders = [path for path in expanded if path.is_file()], [path for path in expanded if not path.is_file()]
    if not folders:
        raise BadInput("formats.logs-path-is-file", path=paths[0])
    return [
        Log((folder / log.file).resolve(), f"{folder.resolve().name}/{log.file}", log.digest, log)
        for folder in folders
        for log in swebench_logs.find_logs(folder, rows)
    ]


def is_graded(record: Any) -> bool:
    """Whether a record is that of a graded log."""
    return has_keys(record, "instance_id resolved grader tests_status")


def log_trajectories(record: Record, origin: Origin) -> Iterator[Trajectory | Drop]:
    """Yield one rollout without steps, or a drop that names the instance."""
    instance, resolved = record["instance_id"], record["resolved"]
    if resolved is None:
        reason = "validation_log" if record["problem"] == swebench_logs.VALIDATION else "ungraded_log"
        yield origin.make_drop(reason, f"{instance}: {record['problem']}")
        return
    yield Trajectory(
        task_id=instance,
        env="swe-bench",
        model=record["model"],
        resolved=resolved,
        submission=record["patch"] or None,
        extra={name: record[name] for name in ("said", "agrees", "tests_agree", "problem", "grader", "tests_status")},
    )


READERS = (
    Reader(PREDICTIONS, is_prediction, predicted_trajectories, WITHOUT_TRANSCRIPT, submits=True),
    Reader(LOGS, is_graded, log_trajectories, WITHOUT_TRANSCRIPT),
    Reader(PREDICTIONS, is_report, report_trajectories, WITHOUT_TRANSCRIPT, judges=True, submits=True),
)
WRITER = Writer(LOST, prediction_files)
