"""Kills, power cuts, failing disks, stops, broken models and misbehaving servers: trials, and how many broke.

    python benchmarks/crash.py --kills 100          # over all stages, a chain, workers; also what tests hold besides
    python benchmarks/crash.py --kills 216 --only train or evaluate

A trial is a disturbance at a random moment after which the work is continued to its end, or a case of a table in the
tests. It broke where the end is not that of undisturbed work, a call was bought again that was not in flight, or the
sentence or exit code is another. The work is that of `tests/`, where each of these is also a test.
"""

import os
import random
from collections import Counter
from collections.abc import Iterator

import cases

cases.needed("pytest", by=cases.EXTRA.format("dev"))
import pytest
from records import ROOT, Claim, measured
from support.disturbances import FULL, POWER, READ_ONLY

from composer_stages.layout import aligned

KINDS = {POWER: "power cuts", FULL: "failing disks", READ_ONLY: "failing disks"}
"""What a disturbance is called here; all others are signals."""
TABLES = {
    "tests/crash/test_stops.py::test_calls_in_flight": "a signal while calls are in flight",
    "tests/crash/test_stops.py": "any other signal",
    "tests/crash/test_paid_calls.py": "a thousand paid calls",
    "tests/stages/policy/test_model_checks.py::test_a_broken_folder_is_refused_by_name": "a broken model folder",
    "tests/stages/policy/test_reading.py": "a server's answer",
    "tests/stages/policy/test_faults.py": "a server's answer",
}
"""Tests of which each case is a trial, and what is disturbed in them."""
AT_RANDOM = ("tests/crash/test_random_kills.py", "tests/crash/test_ways_killed.py")


class Trials:
    """Counts trials by what is disturbed, as pytest reports them: of a test that failed, the last one broke."""

    def __init__(self) -> None:
        self.trials, self.broke, self._failed = Counter[str](), Counter[str](), set[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count at the end of a test, where it says what it disturbed."""
        if report.failed:
            self._failed.add(report.nodeid)
        what = next((what for tests, what in TABLES.items() if report.nodeid.startswith(tests)), "")
        if report.when == "call" and not report.skipped and what:
            self._count(what, 1, report.nodeid)
        if report.when == "teardown":
            part, disturbed = dict(report.user_properties).get("disturbed", ("", {}))
            found = Counter[str]()
            for name, number in disturbed.items():
                found[KINDS.get(name, "signals")] += number
            for kind, number in found.items():
                self._count(f"{part}, {kind}", number, report.nodeid)

    def _count(self, what: str, number: int, test: str) -> None:
        self.trials[what] += number
        self.broke[what] += test in self._failed


def trials(kills: int = 100, only: tuple[str, ...] = (), seed: int = random.randrange(2**20)) -> Iterator[Claim]:
    """Trials of everything, or of the tests that an expression of pytest's -k selects. kills: signals in all."""
    print(f"seed {seed}", flush=True)
    os.environ |= {"COMPOSER_KILLS": str(kills), "COMPOSER_CRASH_SEED": str(seed), "OMP_NUM_THREADS": "1"}
    found = Trials()
    words = ["-q", "-s", "-p", "no:cacheprovider", *(str(ROOT / name) for name in (*AT_RANDOM, *TABLES))]
    code = pytest.main([*words, "-k", " ".join(only)], plugins=[found])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(code)
    rows = [(what, str(n), str(n - found.broke[what]), str(found.broke[what])) for what, n in found.trials.items()]
    print("\n" + aligned([("disturbed", "trials", "held", "broke"), *rows]), flush=True)
    for what, number in found.trials.items():
        yield measured(f"{what}: trials that broke", found.broke[what], n=number)
    if found.broke.total():
        raise SystemExit(1)


CASES = {"trials": trials}


if __name__ == "__main__":
    cases.main(__file__, CASES)
