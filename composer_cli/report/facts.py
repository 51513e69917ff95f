"""What there is to say about a chain of runs, as plain values: the page shows nothing that is not in here."""

from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from composer_cli.report import compared, probe
from composer_cli.report.examples import examples
from composer_cli.show import runs
from stages.runs.artifact import Run

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
        "compared": compared.compared(chain),
        "evaluations": [evaluation(run) for run in by_stage.get("evaluate", [])],
        "trainings": [training(run) for run in by_stage.get("train", [])],
        "collections": [collection(run) for run in by_stage.get("collect", [])],
        "replays": [replay(run) for run in by_stage.get("replay-teachers", [])],
        "extractions": [extraction(run) for run in by_stage.get("extract-pairs", [])],
        "probes": [probe.verdict(run) for run in by_stage.get("probe-uat", [])],
        "guards": [probe.guards(run) for run in chain if run.manifest.stage in probe.GUARDS],
        "figures": [figure for run in chain for figure in probe.figures(run)],
        "examples": examples(by_stage.get("evaluate", []) or by_stage.get("collect", [])),
        "runs": [facts(run) for run in chain],
        "cost_usd": sum(run.manifest.cost_usd for run in chain),
        "seconds": sum(run.manifest.seconds for run in chain),
    }


def evaluation(run: Run) -> Facts:
    """The verdict with every number behind it; differences as a list."""
    verdict: Facts = orjson.loads(run.beside("verdict.json") or b"{}")
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
    removal: Facts | None = orjson.loads(run.beside("projected.json") or b"null")
    return {"run": runs.name(run.path), **verdict, "arms": arms, "differences": differences, "projected": removal}


def training(run: Run) -> Facts:
    """One arm: its channels' weights and the course of what is drawn."""
    rows = [orjson.loads(line) for line in (run.beside("metrics.jsonl") or b"").splitlines()]
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
        "examples": compared.pairs(run),
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
