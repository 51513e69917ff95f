"""The document of a report: everything it tells about a chain of runs, JSON-able. The page shows nothing else.

`chain` picks the runs, `gather` turns them into one section for each question: what was compared, what evaluations,
trainings and the gradient probe found, examples worth reading, and where the numbers come from.
"""

import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from composer_cli.settings import assignment, default_of, known, nested
from composer_cli.show import runs
from composer_cli.show.conclusions import conclusions
from composer_cli.show.facts import manifest_values, metric_rows, metric_titles
from composer_cli.show.rollout import Rollout, of_row, read_rows
from stages import STAGES, command_words, stages_of
from stages.errors import BadInput
from stages.plurals import counted
from stages.probe.checks.check import QUESTIONS
from stages.runs.kinds import PAIR
from stages.runs.run import Run
from stages.runs.stage import load_stage
from stages.training.config import GRPO

EXAMPLES = 3
"""Preference pairs that are shown."""
PROBE_ENDS = ("probe-uat", "probe-compare", "probe-plot")
"""Stages of the gradient probe whose runs no other stage reads."""
GUARDS = {
    "probe-extract-vhack": "validation",
    "probe-teacher-pool": "checks",
    "probe-replay": "checks",
    "probe-grpo": "checks",
    "probe-compare": "compare",
    "probe-watch": "checks",
    "probe-selftest": "selftest",
}
"""The document in which a stage of the probe keeps the checks of its own work."""
FIGURES = {
    "01_cosine_by_step": "Cosine of the teacher's rows by step, against the band of random directions",
    "02_cosine_in_out": "Cosine of gradient and update, before and after the projection",
    "03_fired": "Share of modules in which the projection took something out",
    "04_buckets": "Cosine by kind of answer, a thin line a problem",
    "05_placebos": "v among random directions: how strongly each tells hacks from other answers",
    "06_length_and_hedging": "Cosine against length and hedging",
    "07_modules": "Where in the model hacks and other answers part",
    "08_ratios": "Importance ratios and effective sample size",
    "09_rates": "Hacks and solutions of the student along its trajectories",
    "10_drift": "How far the basis and the weights have moved",
    "watch": "The push toward the hack along a training, with the alarm; alignment; rates of its rollouts",
}
LEADS = {
    "PASS": "The direction tells hacks from other answers beyond random directions, problems, length and source.",
    "FAIL": "A check that must hold does not.",
    "INCONCLUSIVE": "There is too little to judge by.",
}
"""The first sentence on each verdict of the probe."""


def chain(root: Path, wanted: Sequence[str]) -> list[Run]:
    """Return the named runs with all that they were made from.

    Without names: the newest run of the last stage of the pipeline that has one, and those at the ends of the probe.
    """
    if wanted:
        return runs.with_ancestors([Run(runs.find(root, text)) for text in wanted])
    latest = {stage: runs.latest(root, stage) for stage in (*stages_of("pipeline"), *PROBE_ENDS)}
    there = {stage: path for stage, path in latest.items() if path is not None}
    if not there:
        raise BadInput(f"There is no finished run in {root} to report on. `composer run --preset demo` makes some.")
    last = [stage for stage in stages_of("pipeline") if stage in there][-1:]
    ends = [*last, *(stage for stage in PROBE_ENDS if stage in there)]
    return runs.with_ancestors([Run(there[stage]) for stage in ends])


def gather(chain: Sequence[Run]) -> dict[str, Any]:
    """Return the document about the runs of a chain, section by section."""
    by_stage: dict[str, list[Run]] = defaultdict(list)
    for run in chain:
        by_stage[run.manifest.stage].append(run)
    last = chain[-1]
    return {
        "name": f"{last.manifest.stage}-{last.path.name}",
        "compared": compared(chain),
        "evaluations": [evaluation(run) for run in by_stage["evaluate"]],
        "trainings": [_training(run) for run in by_stage["train"]],
        "collections": [_collection(run) for run in by_stage["collect"]],
        "replays": [{"run": runs.name(run.path), **run.manifest.summary} for run in by_stage["replay-teachers"]],
        "extractions": [_extraction(run) for run in by_stage["extract-pairs"]],
        "probes": [_probe_verdict(run) for run in by_stage["probe-uat"]],
        "guards": [_guards(run) for run in chain if run.manifest.stage in GUARDS],
        "figures": [
            {
                "run": runs.name(run.path),
                "name": name,
                "title": FIGURES[name],
                "csv": (run.read_file(f"{name}.csv") or b"").decode(),
            }
            for run in chain
            for name in run.manifest.summary.get("figures", [])
        ],
        "examples": examples(by_stage["evaluate"] or by_stage["collect"]),
        "runs": [manifest_values(run) for run in chain],
        "cost_usd": sum(run.manifest.cost_usd for run in chain),
        "seconds": sum(run.manifest.seconds for run in chain),
    }


# What a report is about, for its first screen.


def compared(chain: Sequence[Run]) -> dict[str, Any]:
    """Return model, environment, arms in words, date and command of a chain; what no manifest holds is left out."""
    last = chain[-1]
    configs = [run.manifest.config for run in reversed(chain)]
    models = [config["policy"]["model"] for config in configs if isinstance(config.get("policy"), dict)]
    environments = [config["env"] for config in configs if isinstance(config.get("env"), dict)]
    arms = {}
    for run in (run for run in chain if run.manifest.stage == "train"):
        config = run.manifest.config
        steps = config.get("optimisation", {}).get("steps")
        arms[config["arm"]] = losses(config["weights"]) + (f", {counted(steps, 'step')}" if steps else "")
    found = {
        "model": ", ".join(dict.fromkeys(models)),
        "environment": f"{environments[0]['name']}, {environments[0]['split']} tasks" if environments else "",
        "arms": arms,
        "date": last.manifest.started_at[:10],
        "command": command(last),
    }
    return {name: fact for name, fact in found.items() if fact}


def losses(weights: Mapping[str, float]) -> str:
    """Return what an arm learns from, its losses and their weights: "GRPO + 1 dpo + 2 sft"."""
    grpo = weights.get(GRPO, 1.0)  # a run from before weights.grpo has none
    others = [f"{weight:g} {name}" for name, weight in weights.items() if weight and name != GRPO]
    return " + ".join([*([] if not grpo else ["GRPO" if grpo == 1 else f"{grpo:g} GRPO"]), *others])


def command(run: Run) -> str:
    """Return the command that asks for this run again: its inputs, and the settings that are not the defaults."""
    stage = run.manifest.stage
    if stage not in STAGES:
        return ""
    reads = [f"--from {runs.name(Path(ref.path))}" for ref in runs.references(run.manifest)]
    changed: dict[str, Any] = {}
    for key, field in known(load_stage(stage).config):
        # a default as the manifest would hold it; a list of groups is given as one value
        default = orjson.loads(orjson.dumps(default_of(field), default=lambda other: other.model_dump(mode="json")))
        parts = key.split(".")
        if "N" in parts:
            parts, default = parts[: parts.index("N")], []
        value: Any = run.manifest.config
        for part in parts:
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None and value != default:
            changed[".".join(parts)] = value
    settings = []
    for key, value in changed.items():
        bare = f"{key}={value}"  # a text needs no quotation marks where it is read as that text
        is_read = isinstance(value, str) and value.strip() and assignment(bare) == nested(key, value)
        settings.append(f"-s {shlex.quote(bare if is_read else f'{key}={_toml(value)}')}")
    return " ".join([command_words(stage), *dict.fromkeys(reads), *settings])


def _toml(value: Any) -> str:
    """Return a value as `--set` reads it."""
    if isinstance(value, dict):
        inside = (f"{orjson.dumps(name).decode()} = {_toml(one)}" for name, one in value.items() if one is not None)
        return f"{{ {', '.join(inside)} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return orjson.dumps(value).decode()


# One section for each stage of the pipeline.


def evaluation(run: Run) -> dict[str, Any]:
    """Return the verdict with every number behind it: differences in rates and in settings as lists."""
    verdict: dict[str, Any] = orjson.loads(run.read_file("verdict.json") or b"{}")
    pairs = (
        ("pass@1", verdict.get("baseline"), "gain"),
        ("pass@1", verdict.get("control"), "over_control"),
        ("hacked", verdict.get("baseline"), "hacked"),
        ("suspect", verdict.get("baseline"), "hacked_loose"),
        ("protocol", verdict.get("baseline"), "protocol"),
    )
    differences = [
        {
            "of": of,
            "title": f"{of}, {verdict['treatment']} \u2212 {other}",
            # a verdict from before sampling units counted families
            "unit": "family",
            "num_units": verdict[key].get("num_families"),
            **verdict[key],
        }
        for of, other, key in pairs
        if verdict.get(key)
    ]
    arms = sorted(verdict.get("arms", []), key=lambda arm: (arm["arm"] != "start", arm["arm"]))
    removal: dict[str, Any] | None = orjson.loads(run.read_file("projected.json") or b"null")
    found = conclusions(verdict) if "decision" in verdict else None
    settings = verdict.pop("differences", [])
    return {
        "run": runs.name(run.path),
        **verdict,
        "conclusions": found,
        "arms": arms,
        "differences": differences,
        "settings": settings,
        "projected": removal,
    }


def _training(run: Run) -> dict[str, Any]:
    """Return one arm: its losses, and the metrics that are drawn, step by step."""
    config = run.manifest.config
    return {
        "run": runs.name(run.path),
        "arm": config["arm"],
        "seed": config["seed"],
        "losses": losses(config["weights"]),
        "steps": [
            {"step": row["step"], **{name: row[name] for name in metric_titles(row)}} for row in metric_rows(run)
        ],
    }


def _collection(run: Run) -> dict[str, Any]:
    """Return the gate of a collection: counted checks, and which of them failed."""
    summary = run.manifest.summary
    failed = summary.get("gate_failed", [])
    checks = [
        {"name": name, "passed": passed, "total": total, "ok": name not in failed}
        for name, (passed, total) in summary.get("gate", {}).items()
    ]
    return {
        "run": runs.name(run.path),
        "ok": run.manifest.outcome.ok,
        "mean_reward": summary.get("mean_reward"),
        "strict_rate": summary.get("strict_rate"),
        "loose_rate": summary.get("loose_rate"),
        "rollouts": run.manifest.counts.get("planned"),
        "steps": run.manifest.counts.get("steps"),
        "checks": checks,
    }


def _extraction(run: Run) -> dict[str, Any]:
    """Return pairs kept by rule, steps without a pair by reason, and a few pairs: one of every rule before a second."""
    columns = ["rule", "task_id", "step", "chosen", "rejected", "votes_chosen", "votes_rejected"]
    by_rule: dict[str, list[dict[str, Any]]] = {}
    for row in run.scan(PAIR).rows(columns) if run.holds(PAIR) else ():
        if len(found := by_rule.setdefault(row["rule"], [])) < EXAMPLES:
            found.append(row)
    turns = [row for place in range(EXAMPLES) for of_rule in by_rule.values() for row in of_rule[place : place + 1]]
    return {
        "run": runs.name(run.path),
        "steps": run.manifest.counts.get("planned"),
        **run.manifest.summary,
        "examples": [{name: row[name] for name in columns} for row in turns[:EXAMPLES]],
    }


# The gradient probe.


def _probe_verdict(run: Run) -> dict[str, Any]:
    """Return the verdict of one probe-uat and all its checks, those that decide first."""
    checks = _checks(run, "uat")
    status = run.manifest.summary["verdict"]
    return {
        "run": runs.name(run.path),
        "verdict": status,
        "why": LEADS[status],
        "missed": [check["check"] for check in checks if check["severity"] == "gate" and check["status"] != "PASS"],
        "checks": sorted(checks, key=lambda check: check["severity"] != "gate"),
    }


def _guards(run: Run) -> dict[str, Any]:
    """Return the checks by which another stage of the probe guards its own work."""
    checks = [check for check in _checks(run, GUARDS[run.manifest.stage]) if check["severity"] == "gate"]
    return {
        "run": runs.name(run.path),
        "title": " ".join(filter(None, (run.manifest.stage.removeprefix("probe-"), run.manifest.summary.get("arm")))),
        "verdict": run.manifest.summary["verdict"],
        "passed": [check["check"] for check in checks if check["status"] == "PASS"],
        "missed": [check for check in checks if check["status"] != "PASS"],
    }


def _checks(run: Run, document: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = orjson.loads(run.read_file(f"{document}.json") or b"[]")
    return [{**check, "question": QUESTIONS.get(check["check"], check["threshold"])} for check in found]


# The few transcripts worth reading first.


def examples(played: Sequence[Run]) -> list[dict[str, Any]]:
    """Return examples from the last run that played rollouts, each with the reason why it is shown.

    Of an evaluation: the first task that only the treatment passed and the first that only the baseline passed, both
    arms of each, and a hack if there is one. Otherwise a success and a failure.
    """
    if not played:
        return []
    found = [of_row(*one) for one in read_rows(played[-1])]
    verdict = orjson.loads(played[-1].read_file("verdict.json") or b"{}")
    chosen: list[tuple[Rollout, str]] = []
    if verdict:
        by_arm: dict[str, dict[str, Rollout]] = {}
        for one in found:
            # the id without arm and training seed pairs a rollout with its counterpart
            by_arm.setdefault(one.outcome["arm"], {})[one.rollout_id.split("/", 2)[-1]] = one
        treatment, baseline = verdict["treatment"], verdict["baseline"]
        for winner, loser in ((treatment, baseline), (baseline, treatment)):
            wins, losses = by_arm.get(winner, {}), by_arm.get(loser, {})
            parted = (key for key in wins if key in losses and _passed(wins[key]) and _passed(losses[key]) is False)
            if (key := next(parted, None)) is not None:
                chosen.append((wins[key], f"{winner} passed where {loser} failed"))
                chosen.append((losses[key], f"{loser} failed where {winner} passed"))
    if hacked := next((one for one in found if one.outcome.get("hacked")), None):
        chosen.append((hacked, "visible tests passed because they were tampered with"))
    if not chosen:
        firsts = [(next((one for one in found if _passed(one) is ok), None), ok) for ok in (True, False)]
        chosen = [(one, "passed" if ok else "failed") for one, ok in firsts if one]
    return [
        {
            "why": why,
            "rollout_id": one.rollout_id,
            "outcome": one.outcome,
            "messages": one.messages,
        }
        for one, why in chosen
    ]


def _passed(rollout: Rollout) -> bool | None:
    outcome = rollout.outcome
    if "passed" in outcome:
        return bool(outcome["passed"])
    return None if outcome.get("reward") is None else outcome["reward"] >= 1.0
