"""What the gradient probe found: verdicts with every check, failed checks of its earlier stages, and its figures."""

import base64
from collections.abc import Sequence
from typing import Any

import orjson

from composer_cli.show import runs
from stages.probe.checks.check import QUESTIONS
from stages.runs.artifact import Run

Facts = dict[str, Any]

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


def verdict(run: Run) -> Facts:
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


def guards(run: Run) -> Facts:
    """What another stage of the probe checked of itself."""
    checks = [check for check in _checks(run, GUARDS[run.manifest.stage]) if check["severity"] == "gate"]
    return {
        "run": runs.name(run.path),
        "title": " ".join(filter(None, (run.manifest.stage.removeprefix("probe-"), run.manifest.summary.get("arm")))),
        "verdict": run.manifest.summary["verdict"],
        "passed": [check["check"] for check in checks if check["status"] == "PASS"],
        "missed": [check for check in checks if check["status"] != "PASS"],
    }


def _checks(run: Run, document: str) -> list[Facts]:
    found: list[Facts] = orjson.loads(run.beside(f"{document}.json") or b"[]")
    return [{**check, "question": QUESTIONS.get(check["check"], check["threshold"])} for check in found]


def figures(run: Run) -> list[Facts]:
    """The figures that a stage drew, each with the numbers that it was drawn from."""
    return [
        {"run": runs.name(run.path), "name": name, "title": FIGURES[name], "csv": _text(run, f"{name}.csv")}
        for name in run.manifest.summary.get("figures", [])
    ]


def _text(run: Run, name: str) -> str:
    return (run.beside(name) or b"").decode()


def images(chain: Sequence[Run]) -> dict[tuple[str, str], str]:
    """The figures themselves, base64, by run and name: on the page, not in its twin, which has their numbers."""
    return {
        (runs.name(run.path), name): base64.b64encode(run.beside(f"{name}.png") or b"").decode()
        for run in chain
        for name in run.manifest.summary.get("figures", [])
    }
