"""What `compare` does: read the logs, compare every side with the first, and write the result."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from composer_stages.comparison import report
from composer_stages.comparison.config import Config
from composer_stages.comparison.decision import LogComparison, compare
from composer_stages.comparison.gate import MetricResult, all_pass, judge
from composer_stages.comparison.sides import read_sides
from composer_stages.comparison.words import SENTENCES
from composer_stages.errors import UsageError
from composer_stages.evaluation.difference import Decision
from composer_stages.runs import store
from composer_stages.runs.run import Inputs, Run, RunWriter
from composer_stages.runs.stage import Plan

EXIT_CODES = {
    Decision.BETTER: 0,
    Decision.BETTER_BY_LESS: 3,
    Decision.WORSE: 1,
    Decision.NO_GAIN: 1,
    Decision.NO_DIFFERENCE: 1,
    Decision.UNDECIDED: 3,
}
WRITTEN = {"html": "comparison.html", "markdown": "comparison.md"}
MARKS = {
    "html": b'<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">\n<title>',
    "markdown": b"<details><summary>report</summary>",
}
"""What is in every page and every summary."""
SHOWN_CODES = {True: 0, False: 1, None: 3}
TASKS = "tasks.parquet"


def plan(inputs: Inputs, config: Config) -> Plan:
    """Return the number of logs to read."""
    del inputs
    require_free_targets(config)
    return Plan(units=len(config.paths), what="logs")


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Read the logs, compare them, and write the result."""
    del inputs
    sides = read_sides(config.logs, config.columns)
    if config.policy:
        results = judge(sides, config)
        comparison, tasks = results[0].comparison, results[0].tasks
    else:
        results, (comparison, tasks) = [], compare(sides, config)
    content = document(comparison, results)
    out.set_summary(**summarize(comparison, content, results))
    out.count(planned=len(sides), done=len(sides))
    out.document("comparison", content)
    out.write_export(TASKS, partial(_write, tasks))
    most = sys.maxsize if config.flips else report.FLIPS
    flips = report.flips(tasks, results, most, places=config.flips)
    out.write_file("report.txt", f"{report.text(comparison, results)}{flips}\n")
    out.write_file("comparison.html", report.page(comparison, tasks, results))
    out.write_file("comparison.md", report.markdown(comparison, tasks, results))


def document(comparison: LogComparison, results: Sequence[MetricResult] = ()) -> dict[str, Any]:
    """Return a comparison as `comparison.json` holds it, and what was shown of each metric of a policy."""
    fields = {name: value for name, value in asdict(comparison).items() if name != "pairings"}
    rows = zip(comparison.differences, comparison.pairings, strict=True)
    names = ("estimate", "low", "high", "p_holm", "alpha", "num_tasks", "num_units", "wins", "losses", "not_worse")
    differences = [
        {
            **{name: getattr(difference, name) for name in names},
            "needed": difference.needed and difference.needed._asdict(),
            "letter": difference.treatment,
            "baseline": difference.baseline,
            "decision": difference.decision.value,
            "p": difference.p_value,
            "missing": difference.missing.by_side,
            **{name: getattr(difference.missing, name) for name in ("counted_as", "worst", "best", "holds")},
            "too_few": SENTENCES.text("too_few", difference) if difference.too_few else "",
            **asdict(pairing),
            "matched": SENTENCES.text("match", pairing.matched),
            "settings": [SENTENCES.text("setting", setting) for setting in pairing.settings],
        }
        for difference, pairing in rows
        if difference.missing
    ]
    policy = [
        {**result.metric.model_dump(), "passes": result.passes, **document(result.comparison)["differences"][0]}
        for result in results
    ]
    return {**fields, "differences": differences, "policy": policy}


def summarize(
    comparison: LogComparison, content: dict[str, Any], results: Sequence[MetricResult] = ()
) -> dict[str, Any]:
    """Return the most important numbers for the manifest. content: of `comparison.json`."""
    first = comparison.differences[0]
    passes = [result.passes for result in results]
    passed = all_pass(passes or [each.not_worse for each in comparison.differences if each.baseline == "A"])
    large = ("categories", "benchmarks")
    return {
        "exit_code": SHOWN_CODES[passed] if results or comparison.not_worse else EXIT_CODES[first.decision],
        "verdict": first.decision.value,
        "by": report.describe_size(comparison, first),
        "why": SENTENCES.text("gate", results) if results else report.describe_decision(comparison, first),
        "lower_is_better": comparison.lower_is_better,
        **{
            key: [{name: value for name, value in row.items() if name not in large} for row in content[key]]
            for key in ("differences", "policy")
        },
    }


def _write(table: pa.Table, file: BinaryIO) -> int:
    pq.write_table(table, file)
    return len(table)


def finish(run: Run, config: Config) -> None:
    """Write the page and the summary where files are named for them."""
    for option, path in config.targets().items():
        store.write_sealed(path, run.read_file(WRITTEN[option]) or b"")


def require_free_targets(config: Config) -> None:
    """Raise `UsageError` where what is to be written would replace a log, the policy, or a file of something else."""
    targets = {option: path.resolve() for option, path in config.targets().items()}
    if len({*targets.values()}) < len(targets):
        raise UsageError("comparison.one-file-twice", path=config.html)
    for option, target in targets.items():
        for path in (*config.logs, *filter(None, [config.policy])):
            if Path(path).expanduser().resolve() == target:
                raise UsageError("comparison.target-is-read", name=option, path=path)
        if target.is_dir() or ((held := store.read_bytes(target)) and MARKS[option] not in held):
            raise UsageError("comparison.target-of-another", name=option, path=target)
