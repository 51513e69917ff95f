"""Every benchmark says in one sentence what it lacks, before it measures anything."""

import ast
import gzip
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OWN = {"stages", "composer_cli", "support", "probe_faults", "parity", *(path.stem for path in SCRIPTS)}
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


def test_the_bench_extra_has_what_is_asked_for_by_default() -> None:
    names = {re.split(r"[>=<]", line)[0] for line in PROJECT["optional-dependencies"]["bench"]}
    assert {"opacus", "aiohttp"} <= names


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
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if "|" in line]
    told = {cell[0]: cell[1:] for cell in cells}
    assert told["everybody"] == ["40", "1.000", "4", "1.000"]
    assert told["disagreement"] == ["16", "0.400", "4", "1.000"]
    assert told["known pairs"][-1] == "0.4"
