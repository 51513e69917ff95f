"""Saved logs of SWE-bench's harnesses: find them with patch, harness verdict and instance row; grade them again.

Two layouts. Containers: `<instance>/test_output.txt` with `report.json` and `patch.diff` in the same folder (also
SWE-smith's). Early 2024: `<instance>.<model>.eval.log[.gz]`, with a `report.json` that lists the resolved instances of
the run. `find_logs` reads both; `grade_log` grades one log and compares the verdict with its harness's, for every
single test where the harness reported it.
"""

import gzip
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from composer_stages.errors import BadInput
from composer_stages.runs import store
from composer_stages.runs.kinds import Row
from composer_stages.swebench.lists import LISTS, TestLists, TestsStatus, is_name_list, lists_of
from composer_stages.swebench.logs import VOID, grade_container_log, grade_early_log
from composer_stages.swebench.rows import READABLE, read_records
from composer_stages.words import Sentence

OUTPUT = "test_output.txt"
BEFORE_GOLD = "test_output_pre_gold.txt"
RUN_LOG = "run_instance.log"
UNFINISHED = (RUN_LOG, "eval.sh")
EARLY_LOG = re.compile(r"(?P<instance>.+?__.+?-\d+)\.(?P<model>.+)\.eval\.log(\.gz)?$")
OURS = "composer"
HARNESS = "its harness"
"""The grader of a log that cannot be graded here: the harness's verdict is used and not compared."""
VALIDATION = "the validation of an instance, not of a patch: its lists were checked against both logs"
NO_ROW = "no row of the instance is known, so which tests count is not: name a file of instances after the folder"

OF_GRADE = ("resolved", "agrees", "tests_agree", "problem", "grader", "tests_status")
"""Fields of a record that are those of the grade."""


@dataclass(frozen=True)
class EvalLog:
    """One log; None for what does not exist. `file` is its path below the folder that was searched.

    `harness_resolved` and `harness_tests` are the harness's verdict on it, and on every single test. `early`: of the
    harness of early 2024. `flaw`: why there is no log, or only a part of it.
    """

    instance: str
    file: str
    early: bool
    log: str | None
    row: Row | None
    model: str | None = None
    patch: str | None = None
    harness_resolved: bool | None = None
    harness_tests: TestsStatus | None = None
    before_gold: str | None = None
    flaw: str | None = None

    @property
    def digest(self) -> str:
        """The digest of everything that the verdict depends on."""
        return store.digest(vars(self))


@dataclass(frozen=True)
class GradedLog:
    """One log with its grade. `resolved` is None where the log is incomplete and no harness left a verdict.

    `tests_agree`: the same status of every single test. `grader` is OURS, HARNESS, or None.
    """

    eval_log: EvalLog
    resolved: bool | None
    tests_status: TestsStatus | None = None
    tests_agree: bool | None = None
    problem: str | None = None
    grader: str | None = None

    @property
    def agrees(self) -> bool | None:
        """Whether our verdict is the harness's; None if one of the two is missing or ours is taken from it."""
        harness_verdict = self.eval_log.harness_resolved
        compared = self.resolved is not None and harness_verdict is not None and self.grader != HARNESS
        return self.resolved == harness_verdict if compared else None

    def record(self) -> Row:
        """Return all fields without the log. `said` is the harness's verdict."""
        return {
            "instance_id": self.eval_log.instance,
            "said": self.eval_log.harness_resolved,
            **{name: getattr(self.eval_log, name) for name in ("file", "model", "patch")},
            **{name: getattr(self, name) for name in OF_GRADE},
        }


def find_logs(folder: Path, instance_paths: Sequence[Path] = ()) -> list[EvalLog]:
    """Return every log below a folder, in order of their paths. `instance_paths` are further files of instance rows.

    `BadInput` if it is not a folder or holds no logs.
    """
    if not folder.is_dir():
        raise BadInput("formats.logs-folder-missing", folder=str(folder))
    index = InstanceIndex(folder, instance_paths)
    marks = (OUTPUT, f"{OUTPUT}.gz", *UNFINISHED)  # the last of runs that did not get as far as a test output
    places = sorted({path.parent for mark in marks for path in folder.rglob(mark)})
    logs = [_container_log(path, folder, index) for path in places]
    for path in sorted(folder.rglob("*.eval.log*")):
        if match := EARLY_LOG.match(path.name):
            instance, resolved = match["instance"], _read_json(path.parent / "report.json").get("resolved")
            log, flaw = _read_text(path)
            logs.append(
                EvalLog(
                    instance=instance,
                    file=str(path.relative_to(folder)),
                    early=True,
                    log=log,
                    row=index.near(instance, path.parent.resolve()) or index.elsewhere(instance),
                    model=match["model"],
                    harness_resolved=instance in resolved if isinstance(resolved, list) else None,
                    flaw=flaw,
                )
            )
    if not logs:
        raise BadInput("formats.no-logs", folder=str(folder), output=OUTPUT)
    return logs


def _container_log(log_folder: Path, folder: Path, index: "InstanceIndex") -> EvalLog:
    """Read one instance's folder."""
    document = _read_json(log_folder / "report.json")
    # SWE-bench's report is {instance: report}; in others it is the document itself, and the folder names the instance.
    by_instance = len(document) == 1 and isinstance(next(iter(document.values())), dict)
    instance, report = next(iter(document.items())) if by_instance else (log_folder.resolve().name, document)
    log, flaw = _read_text(log_folder / OUTPUT)
    row = index.near(instance, log_folder.resolve()) or _reported_lists(report) or index.elsewhere(instance)
    if log is None and not flaw:
        run = _read_text(log_folder / RUN_LOG)[0] or ""
        ends = [mark for mark in (*VOID, "Error building image", "Timeout error") if mark in run]
        flaw = f"no test output is stored{f', and {RUN_LOG} says {ends[0]!r}' if ends else ''}"
    # The model by the folders: `run_evaluation/RUN/MODEL/INSTANCE`, or `MODEL/logs/INSTANCE`.
    above = [parent.name for parent in log_folder.resolve().parents]
    if above[2:3] == ["run_evaluation"]:
        model: str | None = above[0].replace("__", "/")
    else:
        model = above[1] if above[0] == "logs" and above[1] else None
    return EvalLog(
        instance=instance,
        file=str(log_folder.relative_to(folder) / OUTPUT),
        early=False,
        log=log,
        row=row and {**row, "instance_id": instance},
        model=report.get("model_name_or_path") or model,
        patch=_read_text(log_folder / "patch.diff")[0],
        harness_resolved=report["resolved"] if isinstance(report.get("resolved"), bool) else None,
        harness_tests=report.get("tests_status") or None,
        before_gold=_read_text(log_folder / BEFORE_GOLD)[0],
        flaw=flaw or None,
    )


def _reported_lists(report: Mapping[str, Any]) -> Row | None:
    """Return the lists that a report holds: tests that succeeded and failed, or, after a validation, only names."""
    status = report.get("tests_status") or report
    if not status.keys() >= set(LISTS):
        return None
    lists: Row = {}
    for group in LISTS:
        value = status[group]
        by_verdict = isinstance(value, dict)
        lists[group] = [*value.get("success", ()), *value.get("failure", ())] if by_verdict else list(value)
    return lists


def _read_text(path: Path) -> tuple[str | None, str | None]:
    """Return a file's text, plain or gzip, and its flaw; every kind of line end becomes one newline.

    A damaged archive is read as far as it can be unpacked.
    """
    for candidate in (path, path.with_name(f"{path.name}.gz")):
        if candidate.is_file():
            data, flaw = candidate.read_bytes(), None
            if data[:2] == b"\x1f\x8b":
                # gzip.decompress returns nothing of a truncated archive, decompressobj what there is of it.
                try:
                    data = gzip.decompress(data)
                except (OSError, EOFError, zlib.error) as error:
                    flaw = Sentence("formats.archive-damaged", error=str(error))
                    try:
                        data = zlib.decompressobj(wbits=31).decompress(data)
                    except zlib.error:
                        data = b""
            return data.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n"), flaw
    return None, None


def _read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object; an empty one where the file is missing or damaged."""
    try:
        value = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return value if isinstance(value, dict) else {}


class InstanceIndex:
    """Instance rows by id. `folder` is the top of the logs, `instance_paths` are further files of rows."""

    def __init__(self, folder: Path, instance_paths: Sequence[Path]) -> None:
        self._folder, self._instance_paths = folder.resolve(), instance_paths
        self._by_folder: dict[Path, dict[str, Row]] = {}
        self._further: dict[str, Row] | None = None

    def near(self, instance: str, log_folder: Path) -> Row | None:
        """Return the row in the folder of a log, or in one above it up to the top of the logs."""
        for folder in (log_folder, *log_folder.parents):
            if not folder.is_relative_to(self._folder):
                return None
            if folder not in self._by_folder:
                self._by_folder[folder] = _rows_by_id(_tables(folder))
            if row := self._by_folder[folder].get(instance):
                return row
        return None

    def elsewhere(self, instance: str) -> Row | None:
        """Return the row in `instance_paths`, or in files named after SWE-bench in or just below the two folders above.

        `BadInput`, `OSError` or zlib.error if one of `instance_paths` cannot be read.
        """
        if self._further is None:
            tables: list[Path] = []
            for above in self._folder.parents[:2]:
                # Not the root of the file system, whose folders are not the user's data.
                if above == above.parent:
                    continue
                with suppress(OSError):
                    folders = [above, *sorted(path for path in above.iterdir() if path.is_dir())]
                    paths = (path for folder in folders for path in _tables(folder))
                    # By name, since any table in a neighbouring folder would be read in full.
                    tables += (path for path in paths if "swe" in path.name or "instances" in path.name)
            self._further = {**_rows_by_id(tables), **_rows_by_id(self._instance_paths, required=True)}
        return self._further.get(instance)


def _tables(folder: Path) -> list[Path]:
    """Return the files of a folder that may hold instance rows, none where the folder cannot be read."""
    try:
        return sorted(path for path in folder.iterdir() if path.name.endswith(READABLE) and path.is_file())
    except OSError:
        return []


def _rows_by_id(paths: Iterable[Path], *, required: bool = False) -> dict[str, Row]:
    """Return rows with lists of tests, the first of every id; unreadable files are skipped unless `required`."""
    by_id: dict[str, Row] = {}
    for path in paths:
        try:
            rows = list(read_records(path))
        except (BadInput, OSError, EOFError, zlib.error):
            if required:
                raise
            continue
        for row in rows:
            if isinstance(row, dict) and "instance_id" in row and all(is_name_list(row.get(name)) for name in LISTS):
                by_id.setdefault(str(row["instance_id"]), row)
    return by_id


def grade_log(eval_log: EvalLog) -> GradedLog:
    """Grade one log, and compare the grade with its harness's verdict where there is one."""

    def harness_verdict(problem: str) -> GradedLog:
        verdict = eval_log.harness_resolved
        return GradedLog(eval_log, verdict, problem=problem, grader=None if verdict is None else HARNESS)

    if eval_log.log is None or eval_log.flaw:
        return harness_verdict(f"incomplete: {eval_log.flaw}")
    if eval_log.row is None:
        return harness_verdict(NO_ROW)
    # A row without `repo`: the ids of SWE-bench are owner__name-number.
    owner, double, number = eval_log.instance.partition("__")
    by_id = f"{owner}/{number.rpartition('-')[0]}" if double and "-" in number else eval_log.instance
    lists, repo = lists_of(eval_log.row), str(eval_log.row.get("repo") or by_id)
    if eval_log.before_gold is not None:
        valid = _is_valid_instance(eval_log.log, eval_log.before_gold, lists, repo)
        return GradedLog(eval_log, None, tests_agree=valid, problem=VALIDATION, grader=OURS)
    grade = (grade_early_log if eval_log.early else grade_container_log)(eval_log.log, lists, repo)
    # A log that breaks off has no results: what its harness concluded is taken over, and not compared with itself.
    if grade.tests_status is None and not grade.void and (eval_log.harness_resolved is None or eval_log.early):
        return harness_verdict(f"incomplete: {grade.why}")
    agree = None
    if grade.tests_status and eval_log.harness_tests:
        agree = all(
            set(grade.tests_status[group][verdict]) == set(eval_log.harness_tests.get(group, {}).get(verdict, ()))
            for group in LISTS
            for verdict in ("success", "failure")
        )
    return GradedLog(eval_log, grade.resolved, grade.tests_status, agree, grade.why, OURS)


def _is_valid_instance(broken: str, original: str, lists: TestLists, repo: str) -> bool:
    """Return whether the logs with a bug and without it give the lists of the instance."""
    failing, passing = (grade_container_log(log, lists, repo).tests_status for log in (broken, original))
    return (
        failing is not None
        and passing is not None
        and not failing["FAIL_TO_PASS"]["success"]
        and not any(passing[group]["failure"] for group in passing)
        and not failing["PASS_TO_PASS"]["failure"]
    )
