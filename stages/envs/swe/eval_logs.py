"""Saved logs of SWE-bench's harnesses, with what lies beside them: patch, verdict of the harness, instance row.

Two layouts. Containers: `<instance>/test_output.txt` with `report.json` and `patch.diff` beside it (also SWE-smith's).
Early 2024: `<instance>.<model>.eval.log[.gz]`, with a `report.json` that lists the resolved instances of the whole run.
"""

import gzip
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from stages.envs.repo.grading import TestLists, TestsStatus
from stages.envs.swe.instances import LISTS, InstanceIndex
from stages.envs.swe.logs import OURS, VOID, lists_of, of_marked_log, of_plain_log, swebench_grader_graded
from stages.errors import BadInput
from stages.runs import store
from stages.runs.records import Row

OUTPUT = "test_output.txt"
BEFORE_GOLD = "test_output_pre_gold.txt"
RUN_LOG = "run_instance.log"
UNFINISHED = (RUN_LOG, "eval.sh")
PLAIN = re.compile(r"(?P<instance>.+?__.+?-\d+)\.(?P<model>.+)\.eval\.log(\.gz)?$")


@dataclass(frozen=True)
class EvalLog:
    """One log; None is what is not there. `file` is its path below the folder that was asked for.

    `harness_resolved` and `harness_tests` are the harness's verdict on it, and on every single test. `early`: of the
    harness of early 2024.
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
    """Why there is no log, or only a part of it."""

    @property
    def digest(self) -> str:
        """What the verdict depends on."""
        return store.digest(vars(self))


def find_logs(folder: Path, given: Sequence[Path] = ()) -> list[EvalLog]:
    """Every log below a folder, in order of their paths. `given` are further files of instance rows.

    `BadInput` where it is no folder or holds no logs.
    """
    if not folder.is_dir():
        raise BadInput(f"{str(folder)!r} is not a folder. Give the folder that holds the logs.")
    index = InstanceIndex(folder, given)
    logs = [_container(path, folder, index) for path in _containers(folder)]
    plain = ((path, PLAIN.match(path.name)) for path in sorted(folder.rglob("*.eval.log*")))
    logs += [_plain(path, match, folder, index) for path, match in plain if match]
    if not logs:
        raise BadInput(f"{folder} holds no logs: neither <instance>/{OUTPUT} nor <instance>.<model>.eval.log.")
    return logs


def _containers(folder: Path) -> list[Path]:
    """Folders of instances: those with a test output, and those whose run did not get so far."""
    marks = (OUTPUT, f"{OUTPUT}.gz", *UNFINISHED)
    return sorted({path.parent for mark in marks for path in folder.rglob(mark)})


def _container(place: Path, folder: Path, index: InstanceIndex) -> EvalLog:
    """One instance's folder."""
    whole = _json(place / "report.json")
    by_instance = len(whole) == 1 and isinstance(next(iter(whole.values())), dict)
    instance, report = next(iter(whole.items())) if by_instance else (place.resolve().name, whole)
    log, flaw = _text(place / OUTPUT)
    row = index.near(instance, place.resolve()) or _reported_row(report) or index.elsewhere(instance)
    return EvalLog(
        instance=instance,
        file=str(place.relative_to(folder) / OUTPUT),
        early=False,
        log=log,
        row=row and {**row, "instance_id": instance},
        model=report.get("model_name_or_path") or _model(place.resolve()),
        patch=_text(place / "patch.diff")[0],
        harness_resolved=report["resolved"] if isinstance(report.get("resolved"), bool) else None,
        harness_tests=report.get("tests_status") or None,
        before_gold=_text(place / BEFORE_GOLD)[0],
        flaw=flaw or (None if log is not None else _why_none(place)),
    )


def _model(place: Path) -> str | None:
    """The model by the folders: `run_evaluation/RUN/MODEL/INSTANCE`, or `MODEL/logs/INSTANCE`."""
    above = [folder.name for folder in place.parents]
    if above[2:3] == ["run_evaluation"]:
        return above[0].replace("__", "/")
    return above[1] if above[0] == "logs" and above[1] else None


def _why_none(place: Path) -> str:
    """Why there is no test output."""
    run = _text(place / RUN_LOG)[0] or ""
    ends = [mark for mark in (*VOID, "Error building image", "Timeout error") if mark in run]
    return f"no test output is stored{f', and {RUN_LOG} says {ends[0]!r}' if ends else ''}"


def _reported_row(report: Mapping[str, Any]) -> Row | None:
    """The lists that a report holds: what succeeded and what failed, or, after a validation, the names alone."""
    status = report.get("tests_status") or report
    return {name: _all_names(status[name]) for name in LISTS} if status.keys() >= set(LISTS) else None


def _all_names(value: Any) -> list[str]:
    return [*value.get("success", ()), *value.get("failure", ())] if isinstance(value, dict) else list(value)


def _plain(path: Path, match: re.Match[str], folder: Path, index: InstanceIndex) -> EvalLog:
    """One log of the early harness; `match` is that of its name."""
    instance = match["instance"]
    resolved = _json(path.parent / "report.json").get("resolved")
    log, flaw = _text(path)
    return EvalLog(
        instance=instance,
        file=str(path.relative_to(folder)),
        early=True,
        log=log,
        row=index.near(instance, path.parent.resolve()) or index.elsewhere(instance),
        model=match["model"],
        harness_resolved=instance in resolved if isinstance(resolved, list) else None,
        flaw=flaw,
    )


def _text(path: Path) -> tuple[str | None, str | None]:
    """A file as text, plain or gzip, and what is wrong with it; every kind of line end becomes one newline."""
    for candidate in (path, path.with_name(f"{path.name}.gz")):
        if candidate.is_file():
            data, flaw = _unpacked(candidate.read_bytes())
            text = data.decode(errors="replace")
            return text.replace("\r\n", "\n").replace("\r", "\n"), flaw
    return None, None


def _unpacked(data: bytes) -> tuple[bytes, str | None]:
    """The content, as far as a damaged archive gives it."""
    if data[:2] != b"\x1f\x8b":
        return data, None
    try:
        return gzip.decompress(data), None
    except (OSError, EOFError, zlib.error) as error:
        return b"".join(_pieces(data)), f"the archive is damaged ({error})"


def _pieces(data: bytes) -> Iterator[bytes]:
    stream = zlib.decompressobj(wbits=31)
    try:
        yield stream.decompress(data)
    except zlib.error:
        return


def _json(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one where there is none, or where it is torn."""
    try:
        value = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return value if isinstance(value, dict) else {}


# ---- regrading
# Saved logs graded again, and compared with the verdict of their harness, to the single test where it has one.

HARNESS = "its harness"
"""The grader of a log that cannot be graded here: its verdict is taken over and compared with nothing."""
VALIDATION = "the validation of an instance, not of a patch: its lists were checked against both logs"
NO_ROW = "no row of the instance is known, so which tests count is not: name a file of instances after the folder"
PLACES = [(group, verdict) for group in LISTS for verdict in ("success", "failure")]


@dataclass(frozen=True)
class GradedLog:
    """One log. `resolved` is the verdict; None where the log is incomplete and no harness says more.

    `tests_agree`: the same status of every single test. `grader` is "composer", the release of swebench that graded,
    HARNESS, or None.
    """

    eval_log: EvalLog
    resolved: bool | None
    tests_status: TestsStatus | None = None
    tests_agree: bool | None = None
    problem: str | None = None
    grader: str | None = None

    @property
    def agrees(self) -> bool | None:
        """Whether our verdict is the harness's; None where one of the two is missing or ours is taken from it."""
        theirs = self.eval_log.harness_resolved
        compared = self.resolved is not None and theirs is not None and self.grader != HARNESS
        return self.resolved == theirs if compared else None

    def record(self) -> Row:
        """Everything that is known of it, without the log. `said` is the harness's verdict."""
        return {
            "instance_id": self.eval_log.instance,
            "file": self.eval_log.file,
            "model": self.eval_log.model,
            "patch": self.eval_log.patch,
            "said": self.eval_log.harness_resolved,
            "resolved": self.resolved,
            "agrees": self.agrees,
            "tests_agree": self.tests_agree,
            "problem": self.problem,
            "grader": self.grader,
            "tests_status": self.tests_status,
        }


def grade(folder: Path, given: Sequence[Path] = ()) -> list[GradedLog]:
    """Every log below a folder, in order of their paths. `given` are further files of instance rows."""
    return [grade_log(log) for log in find_logs(folder, given)]


def grade_log(eval_log: EvalLog) -> GradedLog:
    """One log graded, and compared where its harness left a verdict."""
    if eval_log.log is None or eval_log.flaw:
        return _taken_over(eval_log, f"incomplete: {eval_log.flaw}")
    if eval_log.row is None:
        return _taken_over(eval_log, NO_ROW)
    lists, repo = lists_of(eval_log.row), str(eval_log.row.get("repo") or repository(eval_log.instance))
    if eval_log.before_gold is not None:
        valid = _validated(eval_log.log, eval_log.before_gold, lists, repo)
        return GradedLog(eval_log, None, tests_agree=valid, problem=VALIDATION, grader=OURS)
    if eval_log.early:
        report, grader = of_plain_log(eval_log.log, lists, repo), OURS
    else:
        report, grader = swebench_grader_graded({**eval_log.row, "repo": repo}, eval_log.log)
    if report.tests_status is None and not report.void and (eval_log.harness_resolved is None or eval_log.early):
        return _taken_over(eval_log, f"incomplete: {report.why}")
    ours, theirs = report.tests_status, eval_log.harness_tests
    agree = _same(ours, theirs) if ours and theirs else None
    return GradedLog(eval_log, report.resolved, report.tests_status, agree, report.why, grader)


def _taken_over(eval_log: EvalLog, problem: str) -> GradedLog:
    """What cannot be graded gets the verdict of its harness, where there is one."""
    verdict = eval_log.harness_resolved
    return GradedLog(eval_log, verdict, problem=problem, grader=None if verdict is None else HARNESS)


def repository(instance: str) -> str:
    """`owner/name` by the id of an instance, else the id."""
    owner, double, rest = instance.partition("__")
    return f"{owner}/{rest.rpartition('-')[0]}" if double and "-" in rest else instance


def _validated(broken: str, original: str, lists: TestLists, repo: str) -> bool:
    """Whether the logs with a bug and without it give the lists of the instance."""
    failing, passing = (of_marked_log(log, lists, repo).tests_status for log in (broken, original))
    return (
        failing is not None
        and passing is not None
        and not failing["FAIL_TO_PASS"]["success"]
        and not any(passing[group]["failure"] for group in passing)
        and not failing["PASS_TO_PASS"]["failure"]
    )


def _same(ours: TestsStatus, theirs: Mapping[str, Mapping[str, Sequence[str]]]) -> bool:
    """Whether two reports put every test in the same place."""
    return all(set(ours[group][verdict]) == set(theirs.get(group, {}).get(verdict, ())) for group, verdict in PLACES)


def agreement_report(logs: Sequence[GradedLog]) -> list[str]:
    """The agreement in words: counts, then every log that disagrees or could not be graded."""
    counts = Counter({True: "agree", False: "disagree", None: "not compared"}[log.agrees] for log in logs)
    verdicts, tests = Counter(log.resolved for log in logs), Counter(log.tests_agree for log in logs)
    graders = Counter(log.grader or "nobody" for log in logs)
    lines = [
        f"{len(logs)} logs: {verdicts[True]} resolved, {verdicts[False]} not, {verdicts[None]} without a verdict",
        f"graded by {', '.join(f'{name} ({number})' for name, number in sorted(graders.items()))}",
        f"verdicts beside the harness's: {', '.join(f'{number} {word}' for word, number in sorted(counts.items()))}",
        f"every single test: {tests[True]} logs agree, {tests[False]} do not, {tests[None]} were not compared",
    ]
    lines += [
        f"  disagrees: {log.eval_log.file}: {log.resolved} here, {log.eval_log.harness_resolved} there"
        for log in logs
        if log.agrees is False
    ]
    lines += [f"  tests differ: {log.eval_log.file}" for log in logs if log.tests_agree is False]
    return lines + [f"  {log.eval_log.instance}: {log.problem} ({log.eval_log.file})" for log in logs if log.problem]
