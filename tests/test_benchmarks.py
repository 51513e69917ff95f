"""Benchmarks say in one sentence what they lack, and keep what they measure in records, checked as they are read."""

import ast
import gzip
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import ValidationError

from benchmarks import records

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OWN = {"stages", "composer_cli", "support", "probe_faults", "parity", "forging", *(path.stem for path in SCRIPTS)}
SKIPPED_AND_NAMED = {"replay.py": {"aiohttp", "distilabel"}}
"""Peers that a script leaves out, and says so, instead of ending."""
BLOCKED = """
import runpy, sys
sys.path.insert(0, {folder!r})
sys.modules[{module!r}] = None
sys.argv = {argv!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def imported(tree: ast.Module) -> set[str]:
    """The packages that a script imports, wherever it does."""
    nodes = list(ast.walk(tree))
    froms = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {name.partition(".")[0] for name in froms | plain}


def asked_for(tree: ast.Module) -> set[str]:
    """The packages that a script names in a call of `needed`."""
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "needed"]
    return {a.value for call in calls for a in call.args if isinstance(a, ast.Constant)}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_peer_that_may_be_missing_is_asked_for(path: Path) -> None:
    tree = ast.parse(path.read_text())
    installed = {re.split(r"[>=<;\[ ]", line)[0] for line in PROJECT["dependencies"]} | set(sys.stdlib_module_names)
    asked = asked_for(tree) | SKIPPED_AND_NAMED.get(path.name, set())
    if path.name == "probe_contenders.py":  # probe.py asks for it
        asked |= asked_for(ast.parse((ROOT / "benchmarks" / "probe.py").read_text()))
    assert imported(tree) - installed - OWN - asked == set()


@pytest.mark.parametrize(
    ("script", "module", "words", "way_out"),
    [
        ("probe.py", "opacus", [], "-e '.[bench]'"),
        ("rollouts_inspect.py", "inspect_ai", [], "pip install inspect_ai openai"),
        ("sandbox.py", "minisweagent", ["rollouts"], "mini-swe-agent"),
        ("workers.py", "ray", [], "-e '.[ray]'"),
        ("feature_deletion.py", "pytest_cov", ["x"], "-e '.[feature-deletion]'"),
    ],
)
def test_a_missing_peer_is_one_sentence(script: str, module: str, words: list[str], way_out: str) -> None:
    path = str(ROOT / "benchmarks" / script)
    code = BLOCKED.format(folder=str(ROOT / "benchmarks"), module=module, argv=[path, *words])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert f"needs {module}, which is not installed" in line and way_out in line


# --- records


def programs() -> list[Path]:
    """The benchmarks that are started by themselves; rollouts.py starts rollouts_inspect.py and records its figures."""
    started = [path for path in SCRIPTS if '__name__ == "__main__"' in path.read_text()]
    return [path for path in started if path.name != "rollouts_inspect.py"]


@pytest.mark.parametrize("path", programs(), ids=lambda path: path.name)
def test_every_benchmark_writes_its_record(path: Path) -> None:
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert "records.write" in [ast.unparse(call) for call in calls]


def test_every_record_is_that_of_a_benchmark_and_can_be_read() -> None:
    names = {path.stem for path in programs()}
    files = sorted((ROOT / "benchmarks" / "results").iterdir())
    assert files and {path.suffix for path in files} == {".json"}
    for path in files:
        claims = records.read(path)
        assert claims and (path.stem in names or all(claim.kind == "registered" for claim in claims)), path


@pytest.mark.parametrize(
    "change",
    [
        {"interval": [0.6, 0.7]},  # does not hold the value
        {"met": False},  # the entire interval meets the goal
        {"interval": [0.4, 0.8]},  # and now it does not
        {"kind": "registered"},  # without its registration
        {"value": float("nan")},
        {"values": 1},
    ],
)
def test_a_claim_that_contradicts_itself_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    claim = {"claim": "time of ours beside theirs", "value": 0.5, "unit": "", "interval": [0.4, 0.7], "n": 9}
    claim |= {"date": "2026-11-22", "commit": "0123abc", "machine": "a CPU", "command": "python benchmarks/x.py"}
    claim |= {"kind": "exploratory", "registration": None, "goal": "<= 0.7", "met": True}
    path = tmp_path / "x.json"
    path.write_text(json.dumps([claim]))
    assert records.read(path)[0].met
    path.write_text(json.dumps([{**claim, **change}]))
    with pytest.raises(ValidationError):
        records.read(path)


def test_a_document_that_asks_for_a_withdrawn_claim_fails_to_build() -> None:
    class Cog:
        inFile = "README.md"  # noqa: N815 - cog's name
        printed: ClassVar[list[str]] = []

        def outl(self, text: str) -> None:
            self.printed.append(text)

        def error(self, text: str) -> None:
            raise LookupError(text)

    records.show(Cog(), "help: " + records.read(ROOT / "benchmarks" / "results" / "help.json")[0].claim)
    assert len(Cog.printed) == 2
    with pytest.raises(LookupError, match=r"README\.md asks for a claim .* does not hold"):
        records.show(Cog(), "help: a claim that nobody made")


def test_what_is_measured_again_replaces_its_claim_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPOSER_BENCHMARK_RESULTS", str(tmp_path / "results"))
    command = ["benchmarks/x.py", "/somewhere/of/mine/rows.jsonl", "--rounds", "3"]
    first = records.measured("time of ours beside theirs", 0.56789, (0.5, 0.61), n=3, goal="<= 0.6")
    records.write("/any/x.py", [first, records.measured("files that were written", 12, n=1, goal="= 12")])
    records.write(
        "/any/x.py",
        [records.measured("time of ours beside theirs", 0.4, (0.3, 0.5), n=9, goal="<= 0.6", command=command)],
    )
    again, files = records.read(tmp_path / "results" / "x.json")
    assert (first.value, first.met) == (0.5679, False), "the interval reaches beyond the goal"
    assert (again.value, again.n, again.met, files.value, files.met) == (0.4, 9, True, 12, True)
    assert again.command == "python benchmarks/x.py rows.jsonl --rounds 3" and again.kind == "exploratory"
    assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?", again.commit) and " cores, load " in again.machine


def test_a_ratio_has_an_interval_of_rounds_drawn_together() -> None:
    theirs = [1.0, 8.0, 2.0, 4.0, 3.0, 1.5, 2.5]
    value, (low, high) = records.ratio([2 * seconds for seconds in theirs], theirs)
    assert value == low == high == 2, "what slows both sides of a round is no spread of the ratio"
    value, (low, high) = records.ratio([1.0, 1.1, 0.9, 1.2, 1.0], [2.0, 2.0, 2.1, 1.9, 2.2])
    assert 0.4 < low < value == 0.5 < high < 0.7


@pytest.mark.slow
def test_benchmarks_use_what_the_program_has() -> None:
    """They are run seldom, so a renamed or removed part of the program would go unseen: mypy sees it."""
    words = [sys.executable, "-m", "mypy", "--check-untyped-defs", "--allow-untyped-defs", "--ignore-missing-imports"]
    words += ["--explicit-package-bases", "--follow-imports", "silent", *map(str, SCRIPTS)]
    env = {**os.environ, "MYPYPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT / "benchmarks")])}
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=env)
    assert "Found " in done.stdout or done.returncode == 0, f"{done.stdout}{done.stderr}"
    foreign = ("does not explicitly export", '"Parameter" has no attribute "grad_sample"')  # the latter is opacus'
    of_names = [line for line in done.stdout.splitlines() if line.endswith(("[attr-defined]", "[call-arg]"))]
    assert [line for line in of_names if not any(words in line for words in foreign)] == []


@pytest.mark.slow
def test_gating_serves_recorded_rollouts_again(tmp_path: Path) -> None:
    """Two cheap models agree against the student in all questions but the last, where the dear one joins the first."""
    queries = {"student": "cccc", "cheap": "aaab", "other": "aaac", "dear": "aaab"}
    for model, said in queries.items():
        rows = []
        for number, query in enumerate(said):
            call = {"function": {"name": "search", "arguments": json.dumps({"query": query})}}
            done = [{"role": "assistant", "content": "", "tool_calls": [json.dumps(call)]}]
            asked = [{"role": "user", "content": f"question {number}"}]
            rows.append({"prompt": asked, "completion": done, "reward": 0.0})
        (tmp_path / f"{model}.results.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    prices = [word for name, usd in (("cheap", 1), ("other", 1), ("dear", 8)) for word in ("--prices", f"{name}={usd}")]
    words = [str(ROOT / "benchmarks" / "gating.py"), str(tmp_path), "--student", "student", *prices, "--usd-per-pair"]
    env = {**os.environ, "COMPOSER_BENCHMARK_RESULTS": str(tmp_path / "results")}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    gate, _ = records.read(tmp_path / "results" / "gating.json")
    assert (gate.value, gate.n, gate.met) == (0.4, 4, True)
    assert gate.command.startswith("python benchmarks/gating.py ") and str(tmp_path) not in gate.command
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if "|" in line]
    told = {cell[0]: cell[1:] for cell in cells}
    assert told["everybody"] == ["40", "1.000", "4", "1.000"]
    assert told["disagreement"] == ["16", "0.400", "4", "1.000"]
    assert told["known pairs"][-1] == "0.4"


@pytest.mark.slow
def test_equivalence_of_replicas_is_claimed_falsely_in_five_per_cent() -> None:
    """A true difference just at the margin is called equivalent in at most 5 %, a small one nearly always."""
    program = (
        "import sys; sys.path.insert(0, 'benchmarks'); import diloco, numpy;"
        "random = numpy.random.default_rng(0);"
        "share = lambda true: numpy.mean([diloco.equivalence(random.normal(true, 0.001, 8))[2] <= diloco.MARGIN"
        " for _ in range(1000)]);"
        "print(share(diloco.MARGIN), share(-diloco.MARGIN), share(0.0003))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    at_margin, below, small = map(float, done.stdout.split())
    assert abs(at_margin - 0.05) < 0.024 and abs(below - 0.05) < 0.024 and small > 0.95
