"""A check: a statistic, a threshold, and one of four statuses; too little data is never a pass.

`write_checks` ends every stage that judges: it writes the checks as JSON and as a table, and sets the verdict as the
run's outcome.

A check is a function that returns a `Finding`, declared with its name, question and threshold by `check`. The probe's
own checks have these in `checks.toml` (`declared`).
"""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from inspect import unwrap
from typing import Any, Literal, ParamSpec

from composer_stages.data_files import load_toml
from composer_stages.runs.kinds import Row
from composer_stages.runs.run import RunWriter

Status = Literal["PASS", "NEGATIVE", "FAIL", "INCONCLUSIVE"]
"""NEGATIVE: the measurement is sound, and refutes the claim of the check (R6's clean negative)."""
Severity = Literal["deciding", "report"]
EXIT_CODES: dict[Status, int] = {"PASS": 0, "NEGATIVE": 1, "FAIL": 1, "INCONCLUSIVE": 3}
"""Exit codes of the command by verdict: 0 only for PASS, so that a script cannot take a refuted claim for a proven one.
"""
WIDTH = 118
ABOUT = "(placebos: 95th percentile of the statistic over random directions)"


@dataclass(frozen=True)
class Check:
    """The result of one check: `deciding` checks decide the verdict, `report` checks are only reported.

    `plan_item` is the requirement or task of the plan behind the check, `stat` the statistic in the unit of `threshold`
    (None if undefined), `placebo_q95` the 95th percentile of the statistic over placebo directions, `evidence_path`
    the run that was judged, below the folder of artifacts (empty: the run of the check), `asks` the question that the
    check answers.
    """

    name: str
    plan_item: str
    status: Status
    stat: float | None
    threshold: str
    detail: str
    severity: Severity = "deciding"
    placebo_q95: float | None = None
    evidence_path: str = ""
    asks: str = ""

    @property
    def passed(self) -> bool | None:
        """Whether the check passed; None if it is inconclusive."""
        return None if self.status == "INCONCLUSIVE" else self.status == "PASS"

    def row(self) -> Row:
        """Return the `probe_check/1` row of this check."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"check": columns.pop("name"), **columns, "passed": self.passed}

    @classmethod
    def of_row(cls, row: Row) -> "Check":
        """Return the check of a `probe_check/1` row."""
        columns = {name: value for name, value in row.items() if name not in ("check", "passed")}
        return cls(name=row["check"], **columns)

    def as_json(self) -> Row:
        """Return the check as in `uat.json`, where `pass` is true, false or null."""
        row = self.row()
        return {("pass" if name == "passed" else name): value for name, value in row.items()}


@dataclass(frozen=True)
class Finding:
    """The finding of a check: whether its criterion holds (None: too little data), the statistic, and a sentence.

    `refuted`: the measurement is sound, and refutes the claim of the check. `severity` overrides the declared one.
    """

    holds: bool | None
    stat: float | None
    detail: str
    placebo_q95: float | None = None
    refuted: bool = False
    severity: Severity | None = None


@dataclass(frozen=True)
class Declaration:
    """The declaration of a check: its question, the requirement or task of the plan behind it, and its threshold."""

    name: str
    asks: str
    item: str
    needs: str
    severity: Severity = "deciding"

    def result(self, finding: Finding) -> Check:
        """Return the result of this check."""
        status = "INCONCLUSIVE" if finding.holds is None else pass_or_fail(finding.holds)
        return Check(
            self.name,
            self.item,
            "NEGATIVE" if finding.refuted else status,
            finding.stat,
            self.needs,
            finding.detail,
            finding.severity or self.severity,
            finding.placebo_q95,
            asks=self.asks,
        )


CHECKS: dict[str, Declaration] = {}
"""Every declared check by its name; docs/probe-method.md is a page of it."""
Parameters = ParamSpec("Parameters")


def check(
    name: str, *, asks: str, item: str, needs: str, severity: Severity = "deciding"
) -> Callable[[Callable[Parameters, Finding]], Callable[Parameters, Check]]:
    """Declare a function that returns a finding as a check; its callers receive the `Check`."""
    if name in CHECKS:
        raise ValueError(f"two checks are called {name}")
    declaration = CHECKS[name] = Declaration(name, asks, item, needs, severity)

    def decorate(find: Callable[Parameters, Finding]) -> Callable[Parameters, Check]:
        @wraps(find)
        def judge(*args: Parameters.args, **options: Parameters.kwargs) -> Check:
            return declaration.result(find(*args, **options))

        return judge

    return decorate


OWN_CHECKS = load_toml(__package__, "checks.toml")


def declared(name: str) -> Callable[[Callable[Parameters, Finding]], Callable[Parameters, Check]]:
    """Declare a function as the check of this name in `checks.toml`."""

    def decorate(find: Callable[Parameters, Finding]) -> Callable[Parameters, Check]:
        declaration = dict(OWN_CHECKS[name])
        declaration["needs"] = declaration["needs"].format_map(unwrap(find).__globals__)
        return check(name, **declaration)(find)

    return decorate


def failing(conditions: Mapping[str, bool]) -> list[str]:
    """Return the names of the conditions that hold, each of which is a fault."""
    return [name for name, holds in conditions.items() if holds]


def pass_or_fail(holds: bool) -> Status:
    """Return PASS when the criterion holds, else FAIL."""
    return "PASS" if holds else "FAIL"


def verdict(checks: Sequence[Check]) -> Status:
    """Return the first of FAIL, NEGATIVE and INCONCLUSIVE of a deciding check, else PASS; INCONCLUSIVE without any."""
    # FAIL and NEGATIVE weigh more than missing data: a fault remains with more rows.
    statuses = {check.status for check in checks if check.severity == "deciding"}
    order: tuple[Status, ...] = ("FAIL", "NEGATIVE", "INCONCLUSIVE", "PASS")
    return next((status for status in order if status in statuses), "INCONCLUSIVE")


def table(checks: Sequence[Check]) -> str:
    """Format the checks as text: deciding and reported checks, the threshold and detail of each, and the verdict."""
    deciding = [check for check in checks if check.severity == "deciding"]
    reported = [check for check in checks if check.severity != "deciding"]
    width = max(13, *(len(check.name) + 1 for check in checks)) if checks else 13
    lines = [f"{'status':<13}{'check':<{width}}{'statistic':>10}{'placebos':>10}  {ABOUT}"]
    for index, check in enumerate((*deciding, *reported)):
        if index == len(deciding):
            lines += ["", "Reported because the plan asked for it; decides nothing:"]
        stat, placebo = (f"{x:.3g}" if x is not None else "-" for x in (check.stat, check.placebo_q95))
        question = check.asks or check.threshold
        lines.append(f"{check.status:<13}{check.name:<{width}}{stat:>10}{placebo:>10}  {question}")
    details = [
        textwrap.fill(
            f"needs {check.threshold}: {check.detail}",
            WIDTH,
            initial_indent=f"{check.name:<{width}}",
            subsequent_indent=" " * width,
        )
        for check in (*deciding, *reported)
    ]
    return "\n".join([*lines, "", *details, "", f"Verdict: {verdict(checks)}"])


def write_checks(out: RunWriter, checks: Sequence[Check], document: str, heading: str = "", /, **summary: Any) -> None:
    """Write the checks as a JSON document and as `report.txt`, and set verdict and `summary` as the run's outcome.

    `heading` is the text above the table of checks, with its line ends.
    """
    status = verdict(checks)
    out.document(document, [check.as_json() for check in checks])
    out.write_file("report.txt", f"{heading}{table(checks)}\n")
    out.set_summary(ok=status == "PASS", verdict=status, exit_code=EXIT_CODES[status], **summary)
