"""What `./dev demo` shows and how long it takes, from an empty folder of artifacts.

    python benchmarks/demo.py [--artifacts FOLDER]

FOLDER keeps the runs; without it they are deleted. The verdict is that of three seeds and 96 tasks, an exploratory
result: docs/experiments/teacher-pairs.md is the registered one.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cases
from pydantic import TypeAdapter
from records import ROOT, Claim, measured

from stages.evaluation.report import text_table
from stages.evaluation.verdict import EvalVerdict
from stages.runs import store

VERDICT = ROOT / "docs" / "experiments" / "demo.json"
"""`verdict.json` of the demo that the record is about, from which README prints the demo's result."""


def demo(artifacts: Path | None = None) -> Iterator[Claim]:
    """The duration of the demo and the differences that it finds. artifacts: a folder that keeps the runs."""
    with tempfile.TemporaryDirectory() as folder:
        root, begun = artifacts or Path(folder), time.monotonic()
        words = ["run", "--preset", "demo", "--clean", "--artifacts", str(root)]
        code = subprocess.run([sys.executable, "-m", "composer_cli", *words], cwd=ROOT).returncode
        minutes = (time.monotonic() - begun) / 60
        if code not in (0, 1, 3):  # the verdicts
            sys.exit(code)
        verdict: dict[str, Any] = store.read_json(root / "evaluate" / "latest" / "verdict.json")
    store.write_json(VERDICT, verdict)
    print(f"{verdict['decision']} after {minutes:.1f} minutes. {verdict['why']}")
    yield measured("the demo, from installed to its verdict", minutes, n=1, unit="minutes", goal="<= 6")
    for name, key in (("B - A", "gain"), ("B - C", "over_control")):
        if found := verdict[key]:
            num = found["num_tasks"]
            claim = f"the demo's {name}, {num} tasks of {found['num_units']} operations, {found['num_seeds']} seeds"
            between = (100 * found["low"], 100 * found["high"])
            yield measured(claim, 100 * found["estimate"], between, n=num, unit="points")


def session() -> str:
    """Return what the demo prints at its end, for README: arms, differences and decision, with `...` for the rest."""
    verdict = TypeAdapter(EvalVerdict).validate_python(store.read_json(VERDICT))
    lines = text_table(verdict).splitlines()
    arms = lines[: 1 + len(verdict.arms)]
    differences = [line for line in lines if line.startswith("pass@1, ")]
    decision = lines[lines.index(verdict.decision) :][:4]
    return "\n".join(["```", "$ ./dev demo", "...", *arms, "...", *differences, "...", *decision, "...", "```"])


CASES = {"demo": demo}


if __name__ == "__main__":
    cases.main(__file__, CASES)
