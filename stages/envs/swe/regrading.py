"""Saved logs graded again, and compared with the verdict of their harness, to the single test where it has one."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stages.envs.repo.grading import Lists, TestsStatus
from stages.envs.swe import eval_logs, swebench_grader
from stages.envs.swe.eval_logs import EvalLog
from stages.envs.swe.instances import LISTS
from stages.envs.swe.report import lists_of, of_marked_log, of_plain_log
from stages.runs.records import Row

HARNESS = "its harness"
"""The grader of a log that cannot be graded here: its verdict is taken over and compared with nothing."""
VALIDATION = "the validation of an instance, not of a patch: its lists were checked against both logs"
NO_ROW = "no row of the instance is known, so which tests count is not: name a file of instances after the folder"
PLACES = [(group, verdict) for group in LISTS for verdict in ("success", "failure")]


@dataclass(frozen=True)
class Graded:
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


def grade(folder: Path, given: Sequence[Path] = ()) -> list[Graded]:
    """Every log below a folder, in order of their paths. `given` are further files of instance rows."""
    return [graded(log) for log in eval_logs.find(folder, given)]


def graded(eval_log: EvalLog) -> Graded:
    """One log graded, and compared where its harness left a verdict."""
    if eval_log.log is None or eval_log.flaw:
        return _taken_over(eval_log, f"incomplete: {eval_log.flaw}")
    if eval_log.row is None:
        return _taken_over(eval_log, NO_ROW)
    lists, repo = lists_of(eval_log.row), str(eval_log.row.get("repo") or repository(eval_log.instance))
    if eval_log.before_gold is not None:
        valid = _validated(eval_log.log, eval_log.before_gold, lists, repo)
        return Graded(eval_log, None, tests_agree=valid, problem=VALIDATION, grader=swebench_grader.OURS)
    if eval_log.early:
        report, grader = of_plain_log(eval_log.log, lists, repo), swebench_grader.OURS
    else:
        report, grader = swebench_grader.graded({**eval_log.row, "repo": repo}, eval_log.log)
    if report.tests_status is None and not report.void and (eval_log.harness_resolved is None or eval_log.early):
        return _taken_over(eval_log, f"incomplete: {report.why}")
    ours, theirs = report.tests_status, eval_log.harness_tests
    agree = _same(ours, theirs) if ours and theirs else None
    return Graded(eval_log, report.resolved, report.tests_status, agree, report.why, grader)


def _taken_over(eval_log: EvalLog, problem: str) -> Graded:
    """What cannot be graded gets the verdict of its harness, where there is one."""
    verdict = eval_log.harness_resolved
    return Graded(eval_log, verdict, problem=problem, grader=None if verdict is None else HARNESS)


def repository(instance: str) -> str:
    """`owner/name` by the id of an instance, else the id."""
    owner, double, rest = instance.partition("__")
    return f"{owner}/{rest.rpartition('-')[0]}" if double and "-" in rest else instance


def _validated(broken: str, original: str, lists: Lists, repo: str) -> bool:
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


def account(logs: Sequence[Graded]) -> list[str]:
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
