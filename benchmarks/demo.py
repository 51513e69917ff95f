"""What `./dev demo` and `./dev demo kata` show and how long they take, from an empty folder of artifacts.

    python benchmarks/demo.py [smollm2|kata] [--artifacts FOLDER]

FOLDER keeps the runs; without it they are deleted. The verdicts are exploratory results of three seeds:
docs/experiments/teacher-pairs.md is a registered one.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import cases
from pydantic import TypeAdapter
from records import ROOT, Claim, measured

from composer_stages.evaluation.difference import Difference, Verdict
from composer_stages.evaluation.document import RECORDED, read_difference, read_differences
from composer_stages.evaluation.outcomes import PASSED, PRIMARY, ArmSummary
from composer_stages.evaluation.report import text_table
from composer_stages.evaluation.verdict import EvalVerdict
from composer_stages.evaluation.words import VerdictWords
from composer_stages.runs import store

VERDICT = ROOT / "docs" / "experiments" / "demo.json"
"""`verdict.json` of the demo that the record is about, from which README prints the result."""


def smollm2(artifacts: Path | None = None) -> Iterator[Claim]:
    """The duration of `./dev demo` and what the training of SmolLM2 gained. artifacts: a folder that keeps the runs."""
    verdict, minutes = _run("demo", artifacts)
    store.write_json(VERDICT, verdict)
    yield measured("the demo on SmolLM2-135M, from installed to its verdict", minutes, n=1, unit="minutes", goal="<= 8")
    for key, words in (("gain", "at temperature 1"), ("at_zero", "at temperature 0")):
        yield from _difference(verdict[key], f"the demo's gain over the start model {words}")


def kata(artifacts: Path | None = None) -> Iterator[Claim]:
    """The duration of `./dev demo kata` and the differences that it finds. artifacts: a folder that keeps the runs."""
    verdict, minutes = _run("demo-kata", artifacts)
    yield measured("the demo on kata, from installed to its verdict", minutes, n=1, unit="minutes", goal="<= 3")
    for name, key in (("B - A", "gain"), ("B - C", "over_control")):
        yield from _difference(verdict[key], f"the demo's {name} on kata, {PRIMARY[verdict['outcome']].rate}")


def _run(preset: str, artifacts: Path | None) -> tuple[dict[str, Any], float]:
    """Run a demo and return its verdict with the minutes that it took."""
    with tempfile.TemporaryDirectory() as folder:
        root, begun = artifacts or Path(folder), time.monotonic()
        words = ["run", "--preset", preset, "--clean", "--artifacts", str(root)]
        code = subprocess.run([sys.executable, "-m", "composer_cli", *words], cwd=ROOT).returncode
        minutes = (time.monotonic() - begun) / 60
        if code not in (0, 1, 3):  # the verdicts
            sys.exit(code)
        verdict: dict[str, Any] = store.read_json(root / "evaluate" / "latest" / "verdict.json")
    print(f"{verdict['decision']} after {minutes:.1f} minutes. {verdict['why']}")
    return verdict, minutes


def _difference(found: dict[str, Any] | None, claim: str) -> Iterator[Claim]:
    if found:
        num, between = found["num_tasks"], (100 * found["low"], 100 * found["high"])
        words = f"{claim}, {num} tasks of {found['num_units']} units, {found['num_seeds']} seeds"
        yield measured(words, 100 * found["estimate"], between, n=num, unit="points")


def session(command: str = "./dev demo", verdict: str = "demo", lines_of_decision: int | None = None) -> str:
    """Return what a command prints of a verdict, for documents: arms, differences and decision, `...` for the rest.

    verdict: a file in docs/experiments. lines_of_decision: None for all.
    """
    found, words = _kept(verdict)
    lines = text_table(found, words).splitlines()
    arms = lines[: 1 + len(found.arms)]
    differences = [line for line in lines if line.startswith("pass@1")]
    first = next(number for number, line in enumerate(lines) if line.startswith(found.decision))
    decision = lines[first:][:lines_of_decision]
    rest = ["..."] if lines_of_decision else []
    return "\n".join(["```", f"$ {command}", "...", *arms, "...", *differences, "...", *decision, *rest, "```"])


def gained(verdict: str) -> str:
    """Return the pass rates of a start and of its training with their differences, for a sentence. verdict: a file."""
    found, _ = _kept(verdict)
    rates, gain = {one.arm: 100 * (one.pass_rate or 0) for one in found.arms}, found.gain
    if gain is None:
        raise ValueError(f"{verdict} has no difference")
    rates_and_gain = (
        f"from {rates[found.baseline]:.1f} to {rates[found.treatment]:.1f} % of {gain.num_tasks} held-out problems, "
        f"{_points(gain)}"
    )
    return rates_and_gain + (f", and at temperature 0 {_points(found.at_zero)}" if found.at_zero else "")


def finding() -> str:
    """Return what the demo shows in a sentence, for README; `ValueError` where its record shows something else."""
    found, _ = _kept("demo")
    if found.gain is None or found.at_zero is None or found.gain.low <= 0 or found.at_zero.low > 0:
        raise ValueError(f"{VERDICT} is no longer a gain that temperature 0 does not show: write its sentence anew")
    return "So a gain of sampled answers is shown, and none at temperature 0, where the likeliest token is taken."


def _points(difference: Difference) -> str:
    low, high = (100 * bound for bound in (difference.low, difference.high))
    return f"{100 * difference.estimate:+.1f} points [{low:+z.1f}, {high:+z.1f}]"


def _kept(verdict: str) -> tuple[EvalVerdict, VerdictWords]:
    return read_verdict(store.read_json(VERDICT.with_stem(verdict)))


def read_verdict(document: Mapping[str, Any]) -> tuple[EvalVerdict, VerdictWords]:
    """Return a recorded verdict, without its parts and settings, and its words, from the content of its file."""

    def planned(name: str, baseline: str) -> Difference | None:
        names = {"rate": "", "treatment": document["treatment"], "baseline": baseline}
        return read_difference(document[name], **names) if document.get(name) else None

    baseline = document["baseline"]
    plain = {name: document[name] for name in RECORDED if name in document}
    verdict = EvalVerdict(
        **{**plain, "decision": Verdict(document["decision"]), "outcome": document.get("outcome", PASSED.name)},
        arms=TypeAdapter(tuple[ArmSummary, ...]).validate_python(document["arms"]),
        gain=planned("gain", baseline),
        worst=planned("worst", baseline),
        best=planned("best", baseline),
        at_zero=planned("at_zero", baseline),
        over_control=planned("over_control", str(document["control"])),
        comparisons=tuple(read_differences(document)),
        gain_by_seed=document.get("gain_by_seed") or {},
    )
    texts: dict[str, Any] = {name: document.get(name, "") for name in ("claim", "why", "estimand", "cut")}
    texts |= {name: tuple(document.get(name, ())) for name in ("collapsed", "shown", "not_shown")}
    return verdict, VerdictWords(**texts)


CASES = {"smollm2": smollm2, "kata": kata}


if __name__ == "__main__":
    cases.main(__file__, CASES)
