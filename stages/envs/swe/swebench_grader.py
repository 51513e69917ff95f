"""The grader of swebench, where the extra `swe` is installed, and the fall-back that needs nothing.

Release 4.1.0 grades classic rows (release 5 raises KeyError: 'image' on them), release 5 grades rows of the newer
shape. Both take a log; which one is there is found out by asking for the table that only the earlier one has.
"""

import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stages.envs.swe import logs, report
from stages.envs.swe.instances import is_newer
from stages.envs.swe.logs import Dialect
from stages.envs.swe.report import Report, lists_of

OURS = "composer"


def reader(row: Mapping[str, Any]) -> Dialect:
    """The reader that a row of the newer shape names, of swebench 5; else the one of its repository here."""
    try:
        from swebench.harness.log_parsers import PARSER_REGISTRY
    except ImportError:
        return logs.dialect(row["repo"])
    parser = PARSER_REGISTRY.get(row.get("log_parser"))
    return logs.dialect(row["repo"]) if parser is None else lambda log: parser(log, None)


def graded(row: Mapping[str, Any], log: str) -> tuple[Report, str]:
    """The report on a log of the harness in containers, and its grader: "swebench <release>" or "composer"."""
    ours = report.of_marked_log(log, lists_of(row), row["repo"])
    theirs = _by_swebench(row, log, ours)
    return theirs if theirs else (ours, OURS)


def _by_swebench(row: Mapping[str, Any], log: str, ours: Report) -> tuple[Report, str] | None:
    """None where swebench is not installed, has no use for the row, or breaks on a line of the log."""
    spec = _spec(row)
    if spec is None:
        return None
    from importlib.metadata import version

    from swebench.harness.grading import get_eval_report

    prediction = {"instance_id": row["instance_id"], "model_name_or_path": OURS, "model_patch": "given"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "test_output.txt"
        path.write_text(log, encoding="utf-8")
        with suppress(IndexError):
            theirs = get_eval_report(spec, prediction, str(path), include_tests_status=True)[row["instance_id"]]
            grader, status = f"swebench {version('swebench')}", theirs.get("tests_status")
            why = ours.why or (None if status else f"{grader} finds no result of any test")
            void = ours.void or (status is None and ours.tests_status is not None)  # ended, and nothing to be read
            return replace(ours, resolved=theirs["resolved"], tests_status=status, why=why, void=void), grader
    return None


def _spec(row: Mapping[str, Any]) -> Any:
    """What the installed release takes for this row; None when it has no use for its shape, or none is installed."""
    try:
        if is_newer(row):
            from swebench.harness.utils import make_test_spec

            return make_test_spec(dict(row))
        from swebench.harness.constants import MAP_REPO_VERSION_TO_SPECS
    except ImportError:
        return None
    if str(row.get("version")) not in MAP_REPO_VERSION_TO_SPECS.get(row["repo"], {}):
        return None
    lists = lists_of(row)
    return SimpleNamespace(
        instance_id=row["instance_id"],
        repo=row["repo"],
        version=str(row["version"]),
        FAIL_TO_PASS=list(lists.fail_to_pass),
        PASS_TO_PASS=list(lists.pass_to_pass),
    )
