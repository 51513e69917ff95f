"""Every golden case, by the functions that channels call; and a wrong number is found in each kind of case."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from needs import REAL, needs

from parity.golden_case import GOLDEN, Tolerance, differences, recorded_cases
from parity.runners import RUNNERS, not_run

CASES = list(recorded_cases())
SHARED = REAL.parent / "golden"


@pytest.mark.parametrize("recorded", [case for _, case in CASES], ids=lambda case: case["name"])
def test_a_kernel_gives_upstreams_numbers_in_chunks_of_any_size(recorded: dict[str, Any]) -> None:
    if reason := not_run(recorded):
        pytest.skip(reason)
    found = {size: list(differences(recorded, RUNNERS[recorded["fn"]], size)) for size in (None, 2)}
    assert found == {None: [], 2: []}


def spoilt() -> Iterator[Any]:
    """Each key that a function's cases record, moved by a hundredth in one case."""
    seen = set()
    for file, case in CASES:
        for key in (*case["expected"], *(f"metrics/{name}" for name in case["expected"].get("metrics") or {})):
            kind = file, case["fn"], key
            if kind not in seen and not not_run(case) and (copy := moved(case, key)):
                seen.add(kind)
                yield pytest.param(copy, id=f"{file} {case['fn']} {key}")


def moved(case: dict[str, Any], key: str) -> dict[str, Any] | None:
    """A copy with the first finite number under `key` changed; None if there is none that is compared."""
    copy = json.loads(json.dumps(case))
    where, last = (copy["expected"]["metrics"], key.removeprefix("metrics/")) if "/" in key else (copy["expected"], key)
    if key == "metrics" or (key.startswith("grad_wrt_") and "NaN" in json.dumps(case["expected"]["loss"])):
        return None
    while isinstance(where[last], list) and where[last]:
        where, last = where[last], next((i for i, v in enumerate(where[last]) if isinstance(v, (int, float, list))), 0)
    if not isinstance(where[last], (int, float)):
        return None
    where[last] += 0.01 * max(1.0, abs(where[last]))
    return copy


@pytest.mark.parametrize("recorded", list(spoilt()))
def test_a_wrong_number_is_found(recorded: dict[str, Any]) -> None:
    assert list(differences(recorded, RUNNERS[recorded["fn"]]))


@pytest.mark.parametrize(
    ("got", "expected", "accepted"),
    [
        (1.0, 1.0, True),
        (1.0 + 1e-3, 1.0, False),
        (float("nan"), float("nan"), True),
        (0.0, float("nan"), False),
        (float("inf"), float("-inf"), False),
        (float("nan"), 1.0, False),
    ],
)
def test_numbers_are_equal_within_the_tolerance_and_nan_is_nan(got: float, expected: float, accepted: bool) -> None:
    assert Tolerance(1e-6, 1e-6).accepts(got, expected) is accepted


def test_a_gradient_may_be_zero_where_upstreams_is_nan() -> None:
    assert Tolerance(0, 0, zero_meets_nan=True).accepts(0.0, float("nan"))
    assert not Tolerance(0, 0, zero_meets_nan=True).accepts(0.1, float("nan"))


@needs("real")
def test_the_golden_files_are_the_shared_ones() -> None:
    own = {file.name: file.read_bytes() for file in GOLDEN.glob("*.json")}
    assert {file.name: file.read_bytes() for file in SHARED.glob("*.json")} == own
