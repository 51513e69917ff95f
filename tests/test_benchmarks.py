"""Benchmarks take their options from their cases, name what they lack, and keep what they measure in records."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from benchmarks import cases, crash, methods, records

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))
OWN = {
    *("composer_post_training", "composer_stages", "composer_cli"),
    *("support", "probe_faults", "parity", "needs", "forging"),
    *(path.stem for path in SCRIPTS),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COMPOSER_BENCHMARK_RESULTS", str(tmp_path))
    return tmp_path


def sleeping(sides: tuple[str, ...], rounds: int = 9, mix: float | None = None) -> Iterator[records.Claim]:
    """Sleep."""
    claim = f"time of {' and '.join(sides)}, mix {mix}"
    yield records.measured(claim, 0.56789, (0.5, 0.61), n=rounds, goal="<= 0.6")
    yield records.measured("files that were written", rounds, n=1, goal=">= 2, <= 3")


def test_a_case_is_run_with_its_parameters_as_options_and_replaces_its_claims(folder: Path) -> None:
    for words, code in ((["ours", "theirs", "--rounds", "3"], 0), (["ours", "--mix", "0.5", "--rounds", "4"], 1)):
        with pytest.raises(SystemExit) as ended:
            cases.main("/any/x.py", {"sleeping": sleeping}, words)
        assert ended.value.code == code, "a missed goal"
    first, files, second = records.read(folder / "x.json")
    assert (first.claim, first.value, first.n) == ("time of ours and theirs, mix None", 0.5679, 3)
    assert first.outcome == "not shown" and first.interval == (), "there is no interval of three rounds"
    assert (files.value, files.outcome) == (4, "missed"), "measured again"
    assert (second.claim, second.n) == ("time of ours, mix 0.5", 4)
    assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?", first.commit) and " cores, load " in first.machine


def test_of_a_test_that_failed_the_last_trial_broke() -> None:
    counted = crash.Trials()
    done = [("signals", {"KILL": 2, "TERM": 1}, "passed"), ("cuts", {"power cut": 4}, "failed"), ("none", {}, "passed")]
    for test, disturbed, end in done:
        held = SimpleNamespace(nodeid=f"tests/crash/test_x.py::{test}", failed=end == "failed", skipped=False)
        counted.pytest_runtest_logreport(SimpleNamespace(when="call", user_properties=[], **vars(held)))
        held.failed = False
        told = [("disturbed", ["train", disturbed])]
        counted.pytest_runtest_logreport(SimpleNamespace(when="teardown", user_properties=told, **vars(held)))
    case = SimpleNamespace(nodeid="tests/crash/test_stops.py::a[b]", when="call", user_properties=[])
    for skipped, failed in ((True, False), (False, False), (False, True)):
        counted.pytest_runtest_logreport(SimpleNamespace(**vars(case), skipped=skipped, failed=failed))
    assert counted.trials == {"train, signals": 3, "train, power cuts": 4, "any other signal": 2}
    assert +counted.broke == {"train, power cuts": 1, "any other signal": 1}


def test_the_tests_that_are_trials_exist() -> None:
    for name in (*crash.AT_RANDOM, *crash.TABLES):
        path, _, function = name.partition("::")
        assert f"def {function}" in (ROOT / path).read_text()


def test_without_a_name_the_cases_that_need_no_arguments_are_run(folder: Path) -> None:
    def free() -> Iterator[records.Claim]:
        yield records.measured("a number", 1, n=1)

    with pytest.raises(SystemExit):
        cases.main("/any/x.py", {"sleeping": sleeping, "free": free}, [])
    assert [claim.claim for claim in records.read(folder / "x.json")] == ["a number"]


def test_a_missing_peer_is_named_with_what_installs_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cases.needed("json", "no_such_peer", by="pip install it")
    assert ended.value.code == 2
    assert "no_such_peer" in (said := capsys.readouterr().err) and "pip install it" in said and "json" not in said


def imported(tree: ast.AST) -> set[str]:
    """The packages that a script imports, wherever it does."""
    froms = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    plain = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return {name.partition(".")[0] for name in froms | plain}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_peer_that_may_be_missing_is_asked_for(path: Path) -> None:
    tree = ast.parse(path.read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    dependencies = [*project["dependencies"], *project["optional-dependencies"]["train"]]
    installed = {re.split(r"[>=<;\[ ]", line)[0] for line in dependencies} | set(sys.stdlib_module_names)
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "attr", "") == "needed"]
    asked = {word.value for call in calls for word in call.args if isinstance(word, ast.Constant)}
    assert imported(tree) - installed - OWN - asked == set()


def test_every_record_is_of_a_benchmark() -> None:
    held = ROOT / "benchmarks" / "results"
    tables = set((held / "tables").iterdir())
    for path in {*held.iterdir(), *tables} - {held / "tables"}:
        assert path.suffix == ".json" and path.stem.partition("-")[0] in {script.stem for script in SCRIPTS}
        for claim in () if path in tables else records.read(path):
            low, high = claim.interval or (claim.value, claim.value)
            assert low <= claim.value <= high, claim


def test_records_are_of_commits_of_this_history_and_of_clean_trees() -> None:
    """Those that are not are named with what measuring them anew takes."""

    def git(*words: str) -> list[str]:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True).stdout.split()

    if git("rev-parse", "--is-shallow-repository") != ["false"]:
        pytest.skip("no checkout with its history")
    history = {commit[:7] for commit in git("rev-list", "HEAD")}
    other = {
        path.stem: claim.commit
        for path in (ROOT / "benchmarks" / "results").glob("*.json")
        for claim in records.read(path)
        if claim.commit not in history
    }
    assert other.keys() <= records.EARLIER.keys(), other


@pytest.mark.parametrize(
    ("value", "interval", "n", "goal", "outcome"),
    [
        (0.9, (0.8, 1.0), 9, "<= 1", "met"),
        (0.9, (0.8, 1.1), 9, "<= 1", "not shown"),
        (0.9, None, 1, "<= 1", "measured once"),
        (0.9, None, 8, "<= 1", "not shown"),
        (0.9, (0.8, 1.0), 3, "<= 1", "not shown"),
        (1.2, None, 1, "<= 1", "missed"),
        (0, None, 80, "= 0", "met"),
        (2, None, 80, "= 0", "missed"),
        (1.1, (1.05, 1.2), 9, ">= 1, <= 1.15", "not shown"),
        (1.1, None, 9, None, None),
    ],
)
def test_a_target_is_met_by_an_interval(
    value: float, interval: tuple[float, float] | None, n: int, goal: str | None, outcome: str | None
) -> None:
    assert records.measured("x", value, interval, n=n, goal=goal).outcome == outcome


def test_a_document_that_asks_for_a_withdrawn_claim_fails_to_build(folder: Path) -> None:
    def error(text: str) -> None:
        raise LookupError(text)

    printed: list[str] = []
    cog = SimpleNamespace(inFile="README.md", outl=printed.append, error=error)
    records.write("x", [records.measured("time of ours", 0.5, (0.4, 0.7), n=9, goal="<= 0.6")])
    records.show(cog, "x: time of ours => ours")
    assert printed[0].endswith("| ours | 0.5 [0.4, 0.7] | at most 0.6: **not shown** |")
    with pytest.raises(LookupError, match=r"README\.md asks for a claim"):
        records.show(cog, "x: a claim that was withdrawn")


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
def test_equivalence_of_replicas_is_claimed_falsely_in_five_per_cent() -> None:
    """A true difference just at the margin is called equivalent in at most 5 %, a small one nearly always."""
    program = (
        "import sys; sys.path.insert(0, 'benchmarks'); import diloco, numpy;"
        "random = numpy.random.default_rng(0);"
        "share = lambda true: numpy.mean([diloco.interval_and_margin(random.normal(true, 0.001, 8))[2] <= diloco.MARGIN"
        " for _ in range(1000)]);"
        "print(share(diloco.MARGIN), share(-diloco.MARGIN), share(0.0003))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    at_margin, below, small = map(float, done.stdout.split())
    assert abs(at_margin - 0.05) < 0.024 and abs(below - 0.05) < 0.024 and small > 0.95


APART = np.array(["-0+".index(sign) - 1 for sign in "0+-++0-0+0++00--000000+-0++-+0000+00000++00+-00000000++0000-"])
PACKAGES = {
    "pass or fail": (
        APART,
        {
            "evalconfidence": (0.15159, -0.0231, 0.289767),
            "errorbars": (0.054447, -0.003028, 0.269695),
            "paired t": (0.102918, -0.027723, 0.29439),
            "paired-eval": (0.150385, -0.016667, 0.283333),
        },
    ),
    "scores": (
        0.3 * APART + 0.1 * np.sin(np.arange(60)),
        {
            "evalconfidence": (0.095212, -0.007783, 0.094248),
            "errorbars": (0.067946, -0.00378, 0.090244),
            "paired t": (0.095212, -0.007783, 0.094248),
            "paired-eval": (0.09579, -0.006219, 0.093262),
        },
    ),
}
"""Of 60 differences in units of five: the packages' own p-values and intervals (the paired t is that of errorbars)."""


@pytest.mark.parametrize("kind", PACKAGES)
def test_other_methods_find_what_their_packages_do(kind: str) -> None:
    apart, packages = PACKAGES[kind]
    for name, numbers in packages.items():
        found = [float(each[0]) for each in methods.METHODS[name](apart[None], np.arange(60) // 5)]
        assert found == pytest.approx(numbers, abs=0.03 if name == "paired-eval" else 1e-6), "resamples of its own"


def test_methods_without_a_package_are_those_of_their_papers() -> None:
    wins, both, unit = (APART > 0).sum(), np.abs(APART).sum(), np.arange(60) // 5
    exact = stats.binomtest(int(wins), int(both)).pvalue
    found = {name: method(APART[None], unit) for name, method in methods.METHODS.items()}
    assert found["McNemar"].p[0] == pytest.approx(exact)
    assert found["McNemar mid-p"].p[0] == pytest.approx(exact - stats.binom.pmf(wins, both, 0.5))
    # Units of one size: CR2 is CR1, and its degrees of freedom are those of a t-test over units.
    sums = np.bincount(unit, APART)
    assert found["CR2"].p[0] == pytest.approx(stats.ttest_1samp(sums, 0).pvalue)
    assert found["cluster z"].p[0] == pytest.approx(2 * stats.norm.sf(sums.mean() / sums.std() * 12**0.5))
    assert (found["cluster bootstrap"].low, found["cluster bootstrap"].high) == pytest.approx((0.02, 0.26), abs=0.03)
