"""The blocks about an evaluation or a comparison of logs: verdict, differences, arms, parts, rollouts to read first."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

import orjson

from composer_cli.show import rollout
from composer_cli.show.blocks import Blocks, Dialogue, Findings, Interval, Intervals, Link
from composer_stages.evaluation.outcomes import PASSED, PRIMARY
from composer_stages.layout import counted
from composer_stages.runs import queries
from composer_stages.runs.catalog import name
from composer_stages.runs.display import Column, Table, cell, points
from composer_stages.runs.kinds import EVAL_ITEM, Row
from composer_stages.runs.queries import RolloutFilter, Side, TaskFilter
from composer_stages.runs.run import Run
from composer_stages.words import Sentence

ENDS = "low", "high"
P_VALUE, P_HOLM = Column("p", "p_value", "p"), Column("p after Holm", "p_holm", "p")
TASKS = Column("tasks", "num_tasks", "count")
TAMPERED = (RolloutFilter(hacked=True), "visible tests passed because they were tampered with")


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


def evaluation(run: Run) -> Blocks:
    """Yield the verdict of an evaluation, its differences, arms and families, and examples."""
    verdict = read_verdict(run)
    if not verdict:
        return
    if decision := evaluated(run):
        yield decision
    yield from _differences(verdict)
    yield from _arms(verdict)
    yield from _parts(run, verdict)
    yield from comparedexamples(run, verdict)


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


def compared_logs(run: Run) -> Blocks:
    """Yield the decision, the differences and the sides; what differs between single tasks is in the tables below."""
    comparison: dict[str, Any] = orjson.loads(run.read_file("comparison.json") or b"{}")
    if not comparison:
        return
    yield Findings(run.manifest.summary["why"])
    names = {side["letter"]: f"{side['letter']} ({side['name']})" for side in comparison["sides"]}
    lower_is_better = comparison.get("lower_is_better", False)  # not in runs of earlier versions
    rate = "rate" if lower_is_better else "pass rate"
    gains = [
        {**gain, "of": f"{names[gain['letter']]} \u2212 {gain.get('baseline', 'A')}"}
        for gain in comparison["differences"]
    ]
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


# The few rollouts worth reading first.


def examples(run: Run, filters: Sequence[tuple[RolloutFilter, str]]) -> Blocks:
    """Yield the first rollout of each filter, with the reason why it is shown."""
    for fitting, why in filters:
        page = queries.page(run, fitting, size=1)
        for row in page.rows if page else ():
            yield from _example(run, row["id"], why)


def _example(run: Run, rollout_id: str, why: str) -> Blocks:
    if example := rollout.read(run, rollout_id):
        yield Dialogue(f"{why[0].upper()}{why[1:]}", rollout_id, example.messages)


def comparedexamples(run: Run, verdict: Mapping[str, Any]) -> Blocks:
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
    yield from examples(run, [TAMPERED])


def find_contrasting(passed: Sequence[Row], failed: Sequence[Row]) -> tuple[Row, Row] | None:
    """Return one of the first rollouts that passed and one of the second that failed; None without both.

    They are of one training seed and one sample where there are such.
    """
    won, lost = [row for row in passed if row["passed"]], [row for row in failed if row["passed"] is False]
    keys = ("train_seed", "sample_idx")
    alike = ((winner, loser) for winner in won for loser in lost if all(winner[key] == loser[key] for key in keys))
    return next(alike, (won[0], lost[0]) if won and lost else None)
