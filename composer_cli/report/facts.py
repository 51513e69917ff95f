"""What there is to say about a chain of runs, as plain values: the page shows nothing that is not in here."""

import base64
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from composer_cli.settings import assignment, known, nested
from composer_cli.show import runs
from composer_cli.show.show import Transcript, of_run
from stages import STAGES, command_words, stage_order, stages_of
from stages.errors import BadInput
from stages.probe.checks.check import QUESTIONS
from stages.runs.artifact import Run
from stages.runs.records import PAIR
from stages.runs.stage import load_stage

# ---- compared
# What a report is about, for its first screen: model, environment, arms in words, date, command.

ComparedFacts = dict[str, Any]
EXAMPLES = 3
"""Pairs that are shown."""


def compared(chain: Sequence[Run]) -> ComparedFacts:
    """What was compared, from the manifests of a chain; what no run says is left out."""
    last = chain[-1]
    configs = [run.manifest.config for run in reversed(chain)]
    models = [config["policy"]["model"] for config in configs if isinstance(config.get("policy"), dict)]
    places = [config["env"] for config in configs if isinstance(config.get("env"), dict)]
    arms = {run.manifest.config["arm"]: arm(run) for run in chain if run.manifest.stage == "train"}
    facts = {
        "model": ", ".join(dict.fromkeys(models)),
        "environment": f"{places[0]['name']}, {places[0]['split']} tasks" if places else "",
        "arms": arms,
        "date": last.manifest.started_at[:10],
        "command": command(last),
    }
    return {name: fact for name, fact in facts.items() if fact}


def arm(run: Run) -> str:
    """An arm in words: `GRPO + 0.1 dpo + 1 sdpo, 12 steps`."""
    config = run.manifest.config
    weights = [f"{weight:g} {name}" for name, weight in config["weights"].items() if weight]
    steps = config.get("optimisation", {}).get("steps")
    return " + ".join(["GRPO", *weights]) + (f", {steps} steps" if steps else "")


def command(run: Run) -> str:
    """The words that ask for this run again: its inputs, and the settings that are not the defaults."""
    stage = run.manifest.stage
    if stage not in STAGES:
        return ""
    reads = [f"--from {runs.name(Path(ref.path))}" for refs in run.manifest.inputs.values() for ref in refs]
    changed = [f"-s {_said(key, value)}" for key, value in _changed(run).items()]
    return " ".join([command_words(stage), *dict.fromkeys(reads), *changed])


def _changed(run: Run) -> Mapping[str, Any]:
    """Settings by dotted key that differ from their defaults; a list is given whole."""
    config = load_stage(run.manifest.stage).config
    found: dict[str, Any] = {}
    for key, field in known(config):
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        parts = key.split(".")
        if "N" in parts:
            key, default = ".".join(parts[: parts.index("N")]), []
        value = _at(run.manifest.config, key)
        if value is not None and value != _plain(default):
            found[key] = value
    return found


def _at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _plain(value: Any) -> Any:
    """A default as the manifest would hold it."""
    return orjson.loads(orjson.dumps(value, default=lambda other: other.model_dump(mode="json")))


def _toml(value: Any) -> str:
    """A value as `--set` reads it."""
    if isinstance(value, dict):
        inside = (f"{orjson.dumps(name).decode()} = {_toml(one)}" for name, one in value.items() if one is not None)
        return f"{{ {', '.join(inside)} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return orjson.dumps(value).decode()


def _said(key: str, value: Any) -> str:
    """`KEY=VALUE`, a text without quotation marks where it is read as that text."""
    bare = f"{key}={value}"
    is_read = isinstance(value, str) and value.strip() and assignment(bare) == nested(key, value)
    return shlex.quote(bare if is_read else f"{key}={_toml(value)}")


def pairs(run: Run) -> list[ComparedFacts]:
    """The first few pairs of an extraction, one of every rule before a second of any."""
    names = ["rule", "task_id", "step", "chosen", "rejected", "votes_chosen", "votes_rejected"]
    by_rule: dict[str, list[ComparedFacts]] = {}
    for row in run.scan(PAIR).rows(names) if run.holds(PAIR) else ():
        if len(found := by_rule.setdefault(row["rule"], [])) < EXAMPLES:
            found.append(row)
    turns = [row for place in range(EXAMPLES) for of_rule in by_rule.values() for row in of_rule[place : place + 1]]
    return [{name: row[name] for name in names} for row in turns[:EXAMPLES]]


# ---- examples
# The few transcripts worth reading first: where two arms part, a hack if there is one, a success and a failure.

Example = dict[str, Any]


def examples(runs: Sequence[Run]) -> list[Example]:
    """Examples from the last run that played rollouts, each with the reason why it is shown."""
    if not runs:
        return []
    found, verdict = of_run(runs[-1]), orjson.loads(runs[-1].read_file("verdict.json") or b"{}")
    chosen = _where_they_part(found, verdict) if verdict else []
    hacked = next((t for t in found if t.outcome.get("hacked")), None)
    chosen += [_example(hacked, "visible tests passed because they were tampered with")] if hacked else []
    return chosen or _one_of_each(found)


def _where_they_part(found: Iterable[Transcript], verdict: dict[str, Any]) -> list[Example]:
    """The first task that only the treatment passed, and the first that only the baseline did, both sides of each."""
    by_arm: dict[str, dict[str, Transcript]] = {}
    for transcript in found:
        by_arm.setdefault(transcript.outcome["arm"], {})[_task(transcript)] = transcript
    one, other = verdict["treatment"], verdict["baseline"]
    chosen = []
    for winner, loser in ((one, other), (other, one)):
        wins, losses = by_arm.get(winner, {}), by_arm.get(loser, {})
        parted = (key for key in wins if key in losses and _passed(wins[key]) and _passed(losses[key]) is False)
        if (key := next(parted, None)) is not None:
            chosen += [
                _example(wins[key], f"{winner} passed where {loser} failed"),
                _example(losses[key], f"{loser} failed where {winner} passed"),
            ]
    return chosen


def _task(transcript: Transcript) -> str:
    """The rollout without its arm and training seed: what pairs it with its counterpart."""
    return transcript.rollout_id.split("/", 2)[-1]


def _passed(transcript: Transcript) -> bool | None:
    outcome = transcript.outcome
    if "passed" in outcome:
        return bool(outcome["passed"])
    return None if outcome.get("reward") is None else outcome["reward"] >= 1.0


def _one_of_each(found: Sequence[Transcript]) -> list[Example]:
    passed = next((t for t in found if _passed(t)), None)
    failed = next((t for t in found if _passed(t) is False), None)
    chosen = [_example(passed, "passed")] if passed else []
    return chosen + ([_example(failed, "failed")] if failed else [])


def _example(transcript: Transcript, why: str) -> Example:
    return {
        "why": why,
        "rollout_id": transcript.rollout_id,
        "outcome": transcript.outcome,
        "messages": transcript.messages,
    }


# ---- probe
# What the gradient probe found: verdicts with every check, failed checks of its earlier stages, and its figures.

ProbeFacts = dict[str, Any]

GUARDS = {
    "probe-extract-vhack": "validation",
    "probe-teacher-pool": "checks",
    "probe-replay": "checks",
    "probe-grpo": "checks",
    "probe-compare": "compare",
    "probe-watch": "checks",
    "probe-selftest": "selftest",
}
"""The document in which a stage keeps what it checked of itself."""
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


def verdict(run: Run) -> ProbeFacts:
    """One uat: the verdict and all checks, those that decide first."""
    checks = _checks(run, "uat")
    status = run.manifest.summary["verdict"]
    return {
        "run": runs.name(run.path),
        "verdict": status,
        "why": LEADS[status],
        "missed": [check["check"] for check in checks if check["severity"] == "gate" and check["status"] != "PASS"],
        "checks": sorted(checks, key=lambda check: check["severity"] != "gate"),
    }


def guards(run: Run) -> ProbeFacts:
    """What another stage of the probe checked of itself."""
    checks = [check for check in _checks(run, GUARDS[run.manifest.stage]) if check["severity"] == "gate"]
    return {
        "run": runs.name(run.path),
        "title": " ".join(filter(None, (run.manifest.stage.removeprefix("probe-"), run.manifest.summary.get("arm")))),
        "verdict": run.manifest.summary["verdict"],
        "passed": [check["check"] for check in checks if check["status"] == "PASS"],
        "missed": [check for check in checks if check["status"] != "PASS"],
    }


def _checks(run: Run, document: str) -> list[ProbeFacts]:
    found: list[ProbeFacts] = orjson.loads(run.read_file(f"{document}.json") or b"[]")
    return [{**check, "question": QUESTIONS.get(check["check"], check["threshold"])} for check in found]


def figures(run: Run) -> list[ProbeFacts]:
    """The figures that a stage drew, each with the numbers that it was drawn from."""
    return [
        {"run": runs.name(run.path), "name": name, "title": FIGURES[name], "csv": _text(run, f"{name}.csv")}
        for name in run.manifest.summary.get("figures", [])
    ]


def _text(run: Run, name: str) -> str:
    return (run.read_file(name) or b"").decode()


def images(chain: Sequence[Run]) -> dict[tuple[str, str], str]:
    """The figures themselves, base64, by run and name: on the page, not in its twin, which has their numbers."""
    return {
        (runs.name(run.path), name): base64.b64encode(run.read_file(f"{name}.png") or b"").decode()
        for run in chain
        for name in run.manifest.summary.get("figures", [])
    }


Facts = dict[str, Any]

METRICS = {
    "reward": "reward",
    "loss": "loss, all channels",
    "kl": "KL from the reference, nats",
    "entropy": "entropy, nats",
    "completions/mean_length": "length of a rollout, tokens",
    "grad_norm": "gradient norm",
    "dpo/loss": "DPO loss",
    "dpo/accuracy": "DPO accuracy",
    "simpo/loss": "SimPO loss",
    "sft/loss": "imitation loss",
    "sdpo/loss": "self-distillation loss",
    "taid/loss": "TAID loss",
    "eopd/loss": "entropy-aware distillation loss",
}
"""What is drawn of training, in this order, with its title; losses of other channels follow."""


def titles(names: Iterable[str]) -> dict[str, str]:
    """Titles of what was logged and is drawn, in the order of drawing."""
    others = {name: name.replace("/", " ") for name in sorted(names) if name.endswith("/loss") and name not in METRICS}
    there = set(names)
    return {name: title for name, title in {**METRICS, **others}.items() if name in there}


def gather(chain: Sequence[Run]) -> Facts:
    """Everything about the runs of a chain, by what they answer."""
    by_stage = {
        stage: [run for run in chain if run.manifest.stage == stage] for stage in {r.manifest.stage for r in chain}
    }
    last = chain[-1]
    return {
        "name": f"{last.manifest.stage}-{last.path.name}",
        "compared": compared(chain),
        "evaluations": [evaluation(run) for run in by_stage.get("evaluate", [])],
        "trainings": [training(run) for run in by_stage.get("train", [])],
        "collections": [collection(run) for run in by_stage.get("collect", [])],
        "replays": [replay(run) for run in by_stage.get("replay-teachers", [])],
        "extractions": [extraction(run) for run in by_stage.get("extract-pairs", [])],
        "probes": [verdict(run) for run in by_stage.get("probe-uat", [])],
        "guards": [guards(run) for run in chain if run.manifest.stage in GUARDS],
        "figures": [figure for run in chain for figure in figures(run)],
        "examples": examples(by_stage.get("evaluate", []) or by_stage.get("collect", [])),
        "runs": [facts(run) for run in chain],
        "cost_usd": sum(run.manifest.cost_usd for run in chain),
        "seconds": sum(run.manifest.seconds for run in chain),
    }


def evaluation(run: Run) -> Facts:
    """The verdict with every number behind it; differences as a list."""
    verdict: Facts = orjson.loads(run.read_file("verdict.json") or b"{}")
    pairs = (
        ("pass@1", verdict.get("baseline"), "gain"),
        ("pass@1", verdict.get("control"), "over_control"),
        ("hacked", verdict.get("baseline"), "hacked"),
        ("hacked loosely", verdict.get("baseline"), "hacked_loose"),
        ("protocol", verdict.get("baseline"), "protocol"),
    )
    differences = [
        {"of": of, "title": f"{of}, {verdict['treatment']} \u2212 {other}", **verdict[key]}
        for of, other, key in pairs
        if verdict.get(key)
    ]
    arms = sorted(verdict.get("arms", []), key=lambda arm: (arm["arm"] != "start", arm["arm"]))
    removal: Facts | None = orjson.loads(run.read_file("projected.json") or b"null")
    return {"run": runs.name(run.path), **verdict, "arms": arms, "differences": differences, "projected": removal}


def training(run: Run) -> Facts:
    """One arm: its channels' weights and the course of what is drawn."""
    rows = [orjson.loads(line) for line in (run.read_file("metrics.jsonl") or b"").splitlines()]
    config = run.manifest.config
    return {
        "run": runs.name(run.path),
        "arm": config["arm"],
        "seed": config["seed"],
        "weights": {name: weight for name, weight in config["weights"].items() if weight},
        "steps": [{"step": row["step"], **{name: row[name] for name in titles(row)}} for row in rows],
    }


def collection(run: Run) -> Facts:
    """The gate: counted checks, and which of them failed."""
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


def replay(run: Run) -> Facts:
    """What teachers cost."""
    return {"run": runs.name(run.path), **run.manifest.summary}


def extraction(run: Run) -> Facts:
    """Pairs kept by rule, and steps without a pair by reason."""
    return {
        "run": runs.name(run.path),
        "steps": run.manifest.counts.get("planned"),
        **run.manifest.summary,
        "examples": pairs(run),
    }


def facts(run: Run) -> Facts:
    """What the manifest keeps of a run."""
    m = run.manifest
    return {
        "run": runs.name(run.path),
        "stage": m.stage,
        "status": m.status,
        "began": m.started_at,
        "attempts": m.attempts,
        "seconds": m.seconds,
        "cost_usd": m.cost_usd,
        "seed": m.config.get("seed"),
        "counts": m.counts,
        "tokens": m.tokens,
        "models": m.models,
        "packages": m.packages,
        "python": m.python,
        "code": m.code,
        "fingerprint": m.fingerprint,
        "config": m.config,
    }


# ---- lineage
# Which runs belong together: a run, and everything it was made from.

PROBE_ENDS = ("probe-uat", "probe-compare", "probe-plot")
"""Stages of the probe that nothing else reads."""


def chain(root: Path, wanted: Sequence[str]) -> list[Run]:
    """The runs that are named, or the newest of the last stage that has one, and of the probe, with all before them."""
    ends = [Run(runs.find(root, text)) for text in wanted] or _newest(root)
    found: dict[Path, Run] = {}
    for end in ends:
        _add_ancestors(end, found)
    return sorted(found.values(), key=lambda run: (stage_order(run.manifest.stage), run.path.name))


def _newest(root: Path) -> list[Run]:
    """The last stage of the pipeline that has a run, and what the probe found and drew."""
    latest = {stage: runs.latest(root, stage) for stage in (*stages_of("pipeline"), *PROBE_ENDS)}
    there = {stage: path for stage, path in latest.items() if path is not None}
    if not there:
        raise BadInput(f"There is no finished run in {root} to report on. `composer run --preset demo` makes some.")
    last = [stage for stage in stages_of("pipeline") if stage in there][-1:]
    return [Run(there[stage]) for stage in [*last, *(stage for stage in PROBE_ENDS if stage in there)]]


def _add_ancestors(run: Run, found: dict[Path, Run]) -> None:
    """Inputs that were deleted are left out: the manifest that names them says so."""
    if run.path in found:
        return
    if run.manifest.status == "complete" and (damage := run.damage()):
        raise BadInput(f"{run.path}: {damage}. Rerun that stage, or restore the file.")
    found[run.path] = run
    for ref in (ref for refs in run.manifest.inputs.values() for ref in refs):
        if (Path(ref.path) / "manifest.json").is_file():
            _add_ancestors(Run(Path(ref.path)), found)
