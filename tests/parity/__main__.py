"""Runs golden files through the loss kernels: `python -m parity [FILES...]`.

Prints one line a file, then the totals; the exit is non-zero on any failure. A package that is missing, a file that
cannot be read and a kernel that raises are failures. A skip is for an upstream function that we do not claim, with the
reason.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from parity.check import GOLDEN, CaseResult, check_file


def main(arguments: Sequence[str]) -> int:
    """Print one line a file and the totals, sentences about failures and skips to stderr; 1 on any failure, else 0."""
    files = [Path(argument) for argument in arguments] or sorted(GOLDEN.glob("*.json"))
    results = [result for file in files for result in _report(file)]
    if not files:
        results = [CaseResult(str(GOLDEN), "failed", "there are no golden files")]
        print(f"{GOLDEN}: no golden files", file=sys.stderr)
    print(_totals(results))
    return int(any(result.status == "failed" for result in results))


def _report(file: Path) -> list[CaseResult]:
    results = check_file(file)
    print(f"{file.name}: {_totals(results)}", flush=True)
    for result in results:
        if result.reason:
            print(f"{file.name} {result.case} {result.status}: {result.reason}", file=sys.stderr)
    return results


def _totals(results: Sequence[CaseResult]) -> str:
    counts = [sum(result.status == status for result in results) for status in ("passed", "failed", "skipped")]
    return "{} passed, {} failed, {} skipped".format(*counts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
