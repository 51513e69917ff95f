"""The section about a run: the blocks that answer the question of its stage.

A page of a run shows its section above its rows, a report is the sections of a chain. A stage without a line in
`SECTIONS` has its report.txt alone.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

import orjson

from composer_cli.show import rollout
from composer_cli.show.blocks import (
    Block,
    Counts,
    Dialogue,
    Figure,
    Findings,
    Folded,
    Interval,
    Intervals,
    Link,
    Points,
    Section,
    Training,
)
from composer_cli.show.facts import metric_rows
from composer_cli.show.rollout import ShownMessage, title_of
from stages.data_files import load_toml
from stages.evaluation.outcomes import PASSED, PRIMARY
from stages.layout import counted, p_value
from stages.rollouts import collection_checks
from stages.runs import queries
from stages.runs.catalog import name
from stages.runs.display import Column, Table, cell, points
from stages.runs.kinds import EVAL_ITEM, Row
from stages.runs.queries import PairFilter, RolloutFilter, Side, TaskFilter
from stages.runs.run import Run
from stages.teachers.config import TeacherConfig
from stages.training.config import GRPO
from stages.words import Sentence

EXAMPLES = 3
"""Preference pairs that are shown."""
Blocks = Iterator[Block]
ENDS = "low", "high"
P_VALUE, P_HOLM = Column("p", "p_value", "p"), Column("p after Holm", "p_holm", "p")
TASKS = Column("tasks", "num_tasks", "count")


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
        collection_checks.title(len(checks), len(failed), len(unrecorded)),
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
    yield from _examples(run, FIRST)


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


# Evaluation.


def read_verdict(run: Run) -> dict[str, Any]:
    """Return the verdict of an evaluation as its file holds it; empty where there is none."""
    verdict: dict[str, Any] = orjson.loads(run.read_file("verdict.json") or b"{}")
    return verdict if "decision" in verdict else {}


def evaluated(run: Run) -> Findings | None:
    """Return the decision of an evaluation, with what it shows and does not show; None where it has none."""
    if not (verdict := read_verdict(run)):
        return None
    lacking = [] if "comparisons" in verdict else [f"Differences: {describe_earlier_verdict(run)}"]
    return Findings(
        ": ".join(filter(None, (verdict["decision"], verdict.get("claim")))),
        shown=verdict["shown"],
        not_shown=[*verdict["not_shown"], *lacking],
        note=" ".join(filter(None, (verdict["why"], verdict.get("estimand")))),
        links=_tasks_that_differ(run, verdict),
    )


def describe_earlier_verdict(run: Run) -> str:
    """Return, in sentences, where the differences of a verdict without `comparisons` are, and what judges again."""
    return Sentence("cli.earlier-verdict", run=name(run.path))


def arms(run: Run) -> list[str]:
    """Return the arms of an evaluation, in order of their names; empty for other runs."""
    return sorted({role.rpartition("/")[0] for role in run.manifest.models}) if run.holds(EVAL_ITEM) else []


def _compare(run: Run, **filters: str) -> str:
    return f"compare/{name(run.path)}?{urlencode(filters)}"


def _tasks_that_differ(run: Run, verdict: Mapping[str, Any]) -> list[Link]:
    """Return links to the tasks on which baseline and treatment differ, and to the comparison with the control."""
    compared, baseline, treatment = arms(run), verdict.get("baseline"), verdict.get("treatment")
    if baseline not in compared or treatment not in compared:
        return []
    tasks = queries.tasks(run, baseline, treatment, size=0)
    differing: tuple[tuple[Side, str, int], ...] = (
        ("first", f"{treatment} failed, {baseline} passed", tasks.first_more),
        ("second", f"{treatment} passed, {baseline} failed", tasks.second_more),
    )
    links = [
        Link(f"{words}: {counted(number, 'task')}", _compare(run, a=baseline, b=treatment, side=side))
        for side, words, number in differing
    ]
    if verdict.get("over_control"):
        control = verdict["control"]
        links.append(Link(f"{control} and {treatment}, task by task", _compare(run, a=control, b=treatment)))
    return links


def _evaluation(run: Run) -> Blocks:
    verdict = read_verdict(run)
    if not verdict:
        return
    if decision := evaluated(run):
        yield decision
    yield from _differences(verdict)
    yield from _arms(verdict)
    yield from _parts(run, verdict)
    yield from _compared_examples(run, verdict)


def _differences(verdict: Mapping[str, Any]) -> Blocks:
    """Yield the paired differences, drawn and as numbers."""
    differences = [
        {
            "of": comparison["rate"],
            "arm": comparison["arm"],
            "title": f"{comparison['rate']}, {comparison['arm']} \u2212 {comparison['other']}",
            "p_holm": comparison.get("p_holm"),
        }
        | comparison["difference"]
        for comparison in verdict.get("comparisons", ())
    ]
    for rate in dict.fromkeys(difference["of"] for difference in differences):
        compared = [difference for difference in differences if difference["of"] == rate]
        rows = [_interval(gain["title"], gain["arm"], gain, "estimate") for gain in compared]
        decides = rate == differences[0]["of"]
        title = "Differences between arms, paired by task" if decides else ""
        yield Intervals(title, rows, _power(verdict, differences[0]) if decides else "", difference=True)
    yield Table.of(
        "",
        differences,
        Column("difference", "title"),
        Column("points", "estimate", "points"),
        Column("95 % interval", ENDS, "interval"),
        P_VALUE,
        P_HOLM,
        Column("up / down", lambda gain: f"{gain['wins']} / {gain['losses']}", "number"),
        Column("80 % power from", "mde", "size"),
        note=differences[0]["method"] if differences else "",
    )


def _interval(label: str, arm: str, measured: Mapping[str, Any], estimate: str) -> Interval:
    return Interval(label, arm, measured[estimate], measured["low"], measured["high"], measured.get("p_value"))


def _power(verdict: Mapping[str, Any], gain: Mapping[str, Any]) -> str:
    """Return how much was measured, and which differences would show."""
    shows = ""
    if gain["too_few"]:
        shows = " Too few units to show anything."
    elif gain["mde"] is not None:
        shows = f" Differences from {cell(gain['mde'], 'size')} points on show with 80 % power."
    units = f"{gain['num_units']} sampling units ({gain['unit']}), {counted(gain['num_seeds'], 'training seed')}"
    elsewhere = f" In other units: {cell(tuple(gain['elsewhere']), 'interval')}." if gain["elsewhere"] else ""
    lost = ""
    if verdict["num_lost"] and verdict["worst"]:
        ends = f"{points(verdict['worst']['low'])} to {points(verdict['best']['high'])}"
        lost = f" Whatever the {counted(verdict['num_lost'], 'lost rollout')} would have been: {ends}."
    return f"{counted(gain['num_tasks'], 'task')} in {units}.{shows}{elsewhere}{lost}"


def _arms(verdict: Mapping[str, Any]) -> Blocks:
    """Yield the arms: pass rates drawn, and everything as numbers."""
    records = sorted(verdict["arms"], key=lambda arm: (arm["arm"] != "start", arm["arm"]))
    primary = PRIMARY[verdict.get("outcome", PASSED.name)]
    if measured := [arm for arm in records if arm[primary.field] is not None]:
        title = f"{primary.rate} of the arms"
        yield Intervals(title, [_interval(arm["arm"], arm["arm"], arm, primary.field) for arm in measured])
    k = max((arm["k"] for arm in records), default=1)
    yield Table.of(
        "The arms",
        records,
        Column("arm"),
        Column(primary.rate, primary.field, "percent"),
        Column("95 % interval", ENDS, "percents"),
        *([] if primary is PASSED else [Column(PASSED.rate, PASSED.field, "percent")]),
        *([Column(f"pass@{k}", "pass_at_k", "percent")] if k > 1 else []),
        Column("hidden tests pass", "hidden_pass_rate", "percent"),
        Column("visible tests pass", "visible_pass_rate", "percent"),
        Column("passes by values", lambda arm: _share_of_passes(arm, "values"), "percent"),
        Column("passes by report", lambda arm: _share_of_passes(arm, "report"), "percent"),
        Column("hacked", "hacked_rate", "percent"),
        Column("suspect", "suspect_rate", "percent"),
        Column("keeps the protocol", "protocol_rate", "percent"),
        TASKS,
        Column("rollouts", "num_items", "count"),
        Column("errors", lambda arm: sum(arm["errors"].values()), "count"),
        Column("USD a rollout", lambda arm: arm["cost_usd"] or None, "short"),
        Column("tokens a rollout", "sampled_tokens", "count"),
    )
    differences = verdict["differences"]
    trained = [arm["arm"] for arm in records if any(arm["arm"] in setting["values"] for setting in differences)]
    yield Table.of(
        "What differs between the arms",
        differences,
        Column("setting", lambda setting: f"{setting['setting']}{'' if setting['channel'] else ' (no channel)'}"),
        *(Column(arm, _by_name("values", arm, "\u2013"), "number") for arm in trained),
    )


def _by_name(field: str, name: str, missing: Any = None) -> Callable[[Mapping[str, Any]], Any]:
    """Return a function that reads the value of this name in a field of a record that holds values by name."""
    return lambda record: record[field].get(name, missing)


def _share_of_passes(arm: Mapping[str, Any], ground: str) -> float | None:
    passes = arm.get("passes", {})
    return passes.get(ground, 0) / sum(passes.values()) if passes.keys() - {""} else None


def _parts(run: Run, verdict: Mapping[str, Any]) -> Blocks:
    """Yield the families with the rates of the arms, and the gains in other parts that the verdict tested."""
    baseline, treatment = verdict["baseline"], verdict["treatment"]
    tested = {part["name"]: part for part in verdict["subsets"] if part["kind"] == "family"}
    arms_in_order = sorted((arm["arm"] for arm in verdict["arms"]), key=lambda arm: (arm != "start", arm))

    def link(row: Row) -> Link:
        return Link(row["family"], _compare(run, a=baseline, b=treatment, family=row["family"]))

    def gain(row: Row) -> float | None:
        if part := tested.get(row["family"]):
            return float(part["estimate"])
        rates = row["rates"].get(treatment), row["rates"].get(baseline)
        return None if None in rates else rates[0] - rates[1]

    yield Table.of(
        "By family",
        queries.families(run),
        Column("family", link),
        Column(f"{treatment} \u2212 {baseline}", gain, "gain"),
        *(Column(arm, _by_name("rates", arm), "percent") for arm in arms_in_order),
        TASKS,
        Column("p after Holm", lambda row: tested.get(row["family"], {}).get("p_holm"), "p"),
    )
    yield Table.of(
        "In other parts",
        [part for part in verdict["subsets"] if part["kind"] != "family"],
        Column("part", "kind"),
        Column("name"),
        Column("points", "estimate", "gain"),
        TASKS,
        P_VALUE,
        P_HOLM,
    )


# A comparison of logs.


def _logs_compared(run: Run) -> Blocks:
    """Yield the decision, the differences and the sides; what differs between single tasks is in the tables below."""
    comparison: dict[str, Any] = orjson.loads(run.read_file("comparison.json") or b"{}")
    if not comparison:
        return
    yield Findings(run.manifest.summary["why"])
    names = {side["letter"]: f"{side['letter']} ({side['name']})" for side in comparison["sides"]}
    lower_is_better = comparison.get("lower_is_better", False)  # not in runs of earlier versions
    rate = "rate" if lower_is_better else "pass rate"
    gains = [{**gain, "of": f"{names[gain['letter']]} \u2212 A"} for gain in comparison["differences"]]
    if comparison["binary"]:  # scores have no axis in points
        yield Intervals(
            "Differences from A", [_interval(gain["of"], gain["letter"], gain, "estimate") for gain in gains], "", True
        )
        sides = [_interval(names[side["letter"]], side["letter"], side, "mean") for side in comparison["sides"]]
        yield Intervals(f"{rate.capitalize()}s", sides)
    if comparison["binary"]:
        estimate = [Column("points", "estimate", "points"), Column("interval", ENDS, "interval")]
        mean = [Column(rate, "mean", "percent"), Column("95 % interval", ENDS, "percents")]
    else:
        ends = [Column("from", "low", "short"), Column("to", "high", "short")]
        estimate = [Column("score", "estimate", "short"), *ends]
        mean = [Column("mean score", "mean", "short"), *ends]
    higher, lower = ("losses", "wins") if lower_is_better else ("wins", "losses")
    yield Table.of(
        "Differences",
        gains,
        Column("difference", "of"),
        Column("decision"),
        *estimate,
        P_HOLM,
        TASKS,
        Column("higher", higher, "count"),
        Column("lower", lower, "count"),
        Column("the same", lambda gain: gain["num_tasks"] - gain["wins"] - gain["losses"], "count"),
    )
    yield Table.of(
        "The sides",
        comparison["sides"],
        Column("side", "letter"),
        Column("name"),
        *mean,
        TASKS,
        Column("samples"),
        Column("date"),
        Column("program", lambda side: ", ".join(side["programs"])),
        Column("model", lambda side: ", ".join(side["models"])),
        Column("log"),
        Column("notes", lambda side: ", ".join(side["notes"])),
    )


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


# The few rollouts worth reading first.


def _examples(run: Run, filters: Sequence[tuple[RolloutFilter, str]]) -> Blocks:
    """Yield the first rollout of each filter, with the reason why it is shown."""
    for fitting, why in filters:
        page = queries.page(run, fitting, size=1)
        for row in page.rows if page else ():
            yield from _example(run, row["id"], why)


def _example(run: Run, rollout_id: str, why: str) -> Blocks:
    if example := rollout.read(run, rollout_id):
        yield Dialogue(f"{why[0].upper()}{why[1:]}", rollout_id, example.messages)


def _compared_examples(run: Run, verdict: Mapping[str, Any]) -> Blocks:
    """Yield the first task that only the treatment passed and the first that only the baseline did, both arms of each.

    Also a rollout that tampered with its tests, if there is one.
    """
    baseline, treatment = verdict["baseline"], verdict["treatment"]
    sides: tuple[tuple[Side, str, str], ...] = (("second", treatment, baseline), ("first", baseline, treatment))
    for side, winner, loser in sides:
        for task in queries.tasks(run, baseline, treatment, TaskFilter(side), size=1).rows:
            passed, failed = (queries.of_task(run, task["task_id"], arm) for arm in (winner, loser))
            if rows := find_contrasting(passed, failed):
                yield from _example(run, rows[0]["item_id"], f"{winner} passed where {loser} failed")
                yield from _example(run, rows[1]["item_id"], f"{loser} failed where {winner} passed")
    yield from _examples(run, [TAMPERED])


def find_contrasting(passed: Sequence[Row], failed: Sequence[Row]) -> tuple[Row, Row] | None:
    """Return one of the first rollouts that passed and one of the second that failed; None without both.

    They are of one training seed and one sample where there are such.
    """
    won, lost = [row for row in passed if row["passed"]], [row for row in failed if row["passed"] is False]
    keys = ("train_seed", "sample_idx")
    alike = ((winner, loser) for winner in won for loser in lost if all(winner[key] == loser[key] for key in keys))
    return next(alike, (won[0], lost[0]) if won and lost else None)


TAMPERED = (RolloutFilter(hacked=True), "visible tests passed because they were tampered with")
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
        _evaluation,
    ),
    "compare": ("Which is better?", "", _logs_compared),
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
