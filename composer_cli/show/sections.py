"""The section about a run: the blocks that answer the question of its stage.

A page of a run shows its section above its rows, a report is the sections of a chain. A stage without a line in
`SECTIONS` has its report.txt alone.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import orjson

from composer_cli.show.blocks import Blocks, Counts, Dialogue, Figure, Findings, Folded, Points, Section, Training
from composer_cli.show.facts import metric_rows
from composer_cli.show.rollout import ShownMessage, title_of
from composer_cli.show.verdicts import TAMPERED, compared_logs, evaluated, evaluation, examples
from composer_stages.data_files import load_toml
from composer_stages.layout import counted, p_value
from composer_stages.rollouts import collection_checks
from composer_stages.runs import queries
from composer_stages.runs.catalog import name
from composer_stages.runs.display import Column, Table
from composer_stages.runs.queries import PairFilter, RolloutFilter
from composer_stages.runs.run import Run
from composer_stages.teachers.config import TeacherConfig
from composer_stages.training.config import GRPO
from composer_stages.words import Sentence

EXAMPLES = 3
"""Preference pairs that are shown."""


def section(run: Run) -> Section | None:
    """Return the section about a run; None for a stage without one."""
    if run.manifest.stage not in SECTIONS:
        return None
    title, note, blocks = SECTIONS[run.manifest.stage]
    return Section(name(run.path), title, note, list(blocks(run)))


def findings(run: Run) -> Findings | None:
    """Return the decision about a run, for a terminal; None where it has none."""
    decide = {"evaluate": evaluated, **dict.fromkeys(GATED, checked)}.get(run.manifest.stage)
    return None if decide is None else decide(run)


# Rollouts.


def checked(run: Run) -> Findings | None:
    """Return the result of the collection checks; None for a run that has not ended."""
    summary = run.manifest.summary
    if not (checks := summary.get("collection_checks")):
        return None
    failed = summary.get("failed_checks", [])
    unrecorded = [name for name, (_, total, *_) in checks.items() if not total and name not in failed]
    missed = [f"{name}, {number} of {total}" for name, (number, total, *_) in checks.items() if name in failed]
    passed = len(checks.keys() - {*failed, *unrecorded})
    return Findings(
        collection_checks.title(len(checks), len(failed), unrecorded),
        lead=collection_checks.advice(failed).strip(),
        shown=[counted(passed, "other check")] if missed and passed else [],
        not_shown=missed,
        sides=("passed", "FAIL"),
    )


def _collection_checks(run: Run) -> Blocks:
    """Yield the collection checks, each with its counts."""
    if decision := checked(run):
        yield decision
    summary = run.manifest.summary
    failed = summary.get("failed_checks", [])
    checks = [
        {
            "check": name,
            "result": "FAIL" if name in failed else "ok" if total else "not recorded",
            "that pass": f"{passed:,} of {total:,}",
        }
        for name, (passed, total, *_) in summary.get("collection_checks", {}).items()
    ]
    if checks:
        columns = Column("check"), Column("result"), Column("that pass", unit="number")
        yield Folded(Table.of("All checks", checks, *columns))


def _collected(run: Run) -> Blocks:
    yield from _collection_checks(run)
    yield from examples(run, FIRST)


def _replayed(run: Run) -> Blocks:
    summary = run.manifest.summary
    if "verdict" in summary:
        yield Findings(summary["verdict"], lead=summary["why"])
    yield Table.of(
        "The teachers",
        summary.get("teachers", []),
        Column("teacher"),
        Column("answers", unit="count"),
        Column("failed", unit="count"),
        Column("tokens", lambda teacher: teacher["prompt_tokens"] + teacher["completion_tokens"], "count"),
        Column("USD", "cost_usd", "usd"),
        Column("USD a rollout", "usd_per_rollout", "usd"),
        Column("median latency", "p50_latency_s", "duration"),
        Column("p95", "p95_latency_s", "duration"),
        note=Sentence("cli.teacher-latency"),
    )
    for settings in run.manifest.config.get("teachers", []):
        prompt = {key: settings[key] for key in ("name", "model", "system", "examples") if key in settings}
        teacher = TeacherConfig.model_validate(prompt)
        if words := teacher.prompt_in_words():
            messages = [ShownMessage(message["role"], message["content"]) for message in teacher.own_prompt]
            yield Dialogue(f"The prompt of {teacher.name}", words, messages)


# Pairs.


def _extracted(run: Run) -> Blocks:
    summary, steps = run.manifest.summary, run.manifest.counts.get("planned", 0)
    if "pairs" in summary:
        pairs, density = counted(summary["pairs"], "pair"), summary["pairs_per_rollout"]
        lead = f"{pairs} from {counted(steps, 'step')}, {density:.2f} a rollout."
        yield Findings(summary["verdict"], lead=" ".join([lead, *_evidence_for_pairs(summary)]))
    for title, counts in (("Pairs kept, by rule", "rules"), ("Steps without a pair, by reason", "dropped")):
        if numbers := summary.get(counts):
            yield Counts(title, dict(sorted(numbers.items(), key=lambda item: -item[1])), steps)
    # One pair of every rule.
    first = queries.pairs(run, size=0)
    for rule, _ in (first.values["rule"] if first else [])[:EXAMPLES]:
        page = queries.pairs(run, PairFilter(rule=rule), size=1)
        for row in page.rows if page else ():
            sides = [ShownMessage(side, row[side]) for side in ("chosen", "rejected")]
            step = "" if row["step"] is None else f", step {row['step'] + 1}"
            yield Dialogue(title_of(rule), f"{row['task_id']}{step}", sides)


def _evidence_for_pairs(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield what supports the pairs of a run, in sentences."""
    continued, alignment = summary.get("continued"), summary.get("alignment")
    if continued and continued["difference"] is not None:
        yield Sentence(
            "cli.continuations-of-pairs",
            chosen=100 * continued["chosen"],
            rejected=100 * continued["rejected"],
            **{name: f"{100 * continued[name]:+z.0f}" for name in ("difference", "low", "high")},
        )
    elif alignment:
        right, by_chance = 100 * alignment["right"], 100 * alignment["by_chance"]
        yield Sentence("cli.alignment-of-pairs", right=right, by_chance=by_chance)
    agreement = summary.get("agreement") or summary.get("signal")
    if agreement and agreement.get("roles"):
        kappa, roles = agreement["kappa"], agreement["roles"]
        yield Sentence(
            "cli.agreement-of-teachers",
            kappa=kappa["kappa"],
            p_kappa=p_value(kappa["p_value"]),
            against_student=100 * roles["against_student"],
            against_teacher=100 * roles["against_teacher"],
            p_roles=p_value(roles["p_value"]),
        )


# Training.


def training(run: Run) -> Training:
    """Return what a training has logged so far."""
    series: dict[str, Points] = {}
    for index, row in enumerate(metric_rows(run)):
        for metric, value in row.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
                series.setdefault(metric, []).append((float(row.get("step", index)), float(value)))
    config = run.manifest.config
    return Training(
        name(run.path),
        str(config.get("arm", "")),
        str(config.get("seed", "")),
        losses(config.get("weights", {})),
        run.manifest.status,
        series,
    )


def losses(weights: Mapping[str, float]) -> str:
    """Return what an arm learns from, its losses and their weights: "GRPO + 1 dpo + 2 sft"."""
    grpo = weights.get(GRPO, 1.0)
    channels = [f"{weight:g} {loss}" for loss, weight in weights.items() if weight and loss != GRPO]
    return " + ".join([*([] if not grpo else ["GRPO" if grpo == 1 else f"{grpo:g} GRPO"]), *channels])


def _trained(run: Run) -> Blocks:
    yield training(run)


# The gradient probe.

PROBE = load_toml(__package__, "probe.toml")
LEADS, FIGURES = PROBE["leads"], PROBE["figures"]
"""The first sentence on each verdict of the probe, and the titles of its figures."""


def _checks(run: Run, document: str) -> list[dict[str, Any]]:
    checks: list[dict[str, Any]] = orjson.loads(run.read_file(f"{document}.json") or b"[]")
    return checks


def _probed(run: Run) -> Blocks:
    """Yield the verdict of the probe and all its checks, those that decide first."""
    status = run.manifest.summary.get("verdict")
    if status is None:
        return
    checks = _checks(run, "uat")
    missed = [check["check"] for check in checks if check["severity"] == "deciding" and check["status"] != "PASS"]
    unmet = f" Not passed: {', '.join(missed)}." if missed else ""
    yield Findings(f"Gradient probe: {status}", lead=f"{LEADS[status]}{unmet}")
    for title, severity in (
        ("Checks that decide", "deciding"),
        ("Reported because the plan asked for it; decides nothing", "report"),
    ):
        yield Table.of(
            title,
            [check for check in checks if check["severity"] == severity],
            Column("check"),
            Column("result", "status"),
            Column("statistic", "stat", "short"),
            Column("random", "placebo_q95", "short"),
            Column("asked", lambda check: check["asks"] or check["threshold"]),
            Column("needed", "threshold"),
            Column("found", "detail"),
        )


def _guarded(document: str) -> Callable[[Run], Blocks]:
    """Return the blocks of a stage that guards its own work by checks, which it keeps in this document."""

    def blocks(run: Run) -> Blocks:
        if "verdict" in run.manifest.summary:
            checks = [check for check in _checks(run, document) if check["severity"] == "deciding"]
            passed = [check["check"] for check in checks if check["status"] == "PASS"]
            about = filter(None, (run.manifest.stage.removeprefix("probe-"), run.manifest.summary.get("arm")))
            yield Findings(
                f"{' '.join(about)}: {run.manifest.summary['verdict']}",
                shown=[", ".join(passed)] if passed else [],
                not_shown=[
                    f"{check['check']} needs {check['threshold']}: {check['detail']}"
                    for check in checks
                    if check["status"] != "PASS"
                ],
                sides=("passed", "not passed"),
            )
        yield from _figures(run)

    return blocks


def _figures(run: Run) -> Blocks:
    for figure in run.manifest.summary.get("figures", []):
        csv = (run.read_file(f"{figure}.csv") or b"").decode()
        yield Figure(name(run.path), figure, FIGURES.get(figure, title_of(figure)), csv)


FIRST = [TAMPERED, (RolloutFilter(reward="passed"), "passed"), (RolloutFilter(reward="failed"), "failed")]
"""Which rollouts of a collection are shown, and why."""
GATED = ("collect", "import", "normalize")
"""Stages whose rollouts pass the collection checks."""
CLEAN = ("Are the rollouts clean?", "", _collected)
TRUSTED = ("Can the probe be trusted?", "What a stage checked of its own work before anything was concluded.")
SECTIONS: dict[str, tuple[str, str, Callable[[Run], Blocks]]] = {
    "evaluate": (
        "Does it help?",
        "pass@1 on held-out tasks, with 95 % intervals over what is drawn independently: the environment's sampling "
        "units, or tasks within units that are fixed.",
        evaluation,
    ),
    "compare": ("Which is better?", "", compared_logs),
    "probe-uat": (
        "Does the gradient tell hacks?",
        "Beside each statistic is the 95th percentile of the same over random directions.",
        _probed,
    ),
    "probe-compare": ("What did the comparison show?", "", _guarded("compare")),
    "probe-extract-vhack": (*TRUSTED, _guarded("validation")),
    "probe-teacher-pool": (*TRUSTED, _guarded("checks")),
    "probe-replay": (*TRUSTED, _guarded("checks")),
    "probe-watch": (*TRUSTED, _guarded("checks")),
    "probe-plot": ("What the probe measured", "", _figures),
    "train": ("How training went", "", _trained),
    **dict.fromkeys(GATED, CLEAN),
    "replay-teachers": ("Are the teachers affordable?", "", _replayed),
    "extract-pairs": ("Do the pairs prefer what passes?", "", _extracted),
}
"""The question of each stage, a note on its answer, and its blocks, in the order of a report."""
