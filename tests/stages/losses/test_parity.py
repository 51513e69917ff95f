"""The parity runner: every golden case passes, and nothing wrong, missing or malformed ever does."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from parity.__main__ import main
from parity.check import GOLDEN, NOT_CLAIMED, Tolerance

FILES = sorted(GOLDEN.glob("*.json"))
ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
SHARED = ROOT.parent / "shared" / "golden"

SMALL = {
    "name": "small/forward_kl",
    "fn": "generalized_jsd_loss",
    "args": {"beta": 0, "temperature": 1.0, "reduction": "sum", "logits_are_probs": False, "top_k": None},
    "input_dtypes": {"student_logits": "float64", "teacher_logits": "float64", "labels": "none"},
    "inputs": {"student_logits": [[[0.0, 0.0]]], "teacher_logits": [[[0.0, "-40.0"]]], "labels": None},
    "expected": {"loss": 0.6931471805599453, "grad_wrt_student_logits": [[[-0.5, 0.5]]]},
}


def run(capsys: pytest.CaptureFixture[str], *files: Path) -> tuple[int, list[str], str]:
    """Exit code, lines of stdout, stderr."""
    code = main([str(file) for file in files])
    out, err = capsys.readouterr()
    return code, out.splitlines(), err


def written(folder: Path, *cases: Any) -> Path:
    file = folder / "cases.json"
    file.write_text(json.dumps({"cases": list(cases)}))
    return file


def changed(**changes: Any) -> dict[str, Any]:
    return SMALL | changes


def test_our_golden_files_are_there() -> None:
    assert len(FILES) == 13


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_recorded_case_passes(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    count = len(json.loads(file.read_text())["cases"])
    totals = f"{count} passed, 0 failed, 0 skipped"
    assert run(capsys, file) == (0, [f"{file.name}: {totals}", totals], "")


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared golden files are not beside this checkout")
def test_our_copies_are_the_shared_files() -> None:
    assert {file.name: file.read_bytes() for file in SHARED.glob("*.json")} == {f.name: f.read_bytes() for f in FILES}


def test_a_small_case_passes_and_the_last_line_is_the_totals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, written(tmp_path, SMALL))[1][-1] == "1 passed, 0 failed, 0 skipped"


@pytest.mark.parametrize(
    ("expected", "sentence"),
    [
        ({"loss": 0.693147181}, "loss is 0.69314718"),
        ({"loss": "NaN"}, "loss is"),
        ({"loss": "Infinity"}, "loss is"),
        ({"loss": None}, "None is recorded"),
        ({"loss": [0.6931471805599453]}, "loss is"),
        ({"grad_wrt_student_logits": [[[-0.5, 0.4999]]]}, "grad_wrt_student_logits[0][0][1] is 0.5"),
        ({"grad_wrt_student_logits": [[[-0.5]]]}, "has 2 entries where 1 are recorded"),
        ({"metrics": {"share": 0.5}}, "gives no 'share'"),
        ({"weights_after": [1.0]}, "gives no 'weights_after'"),
    ],
)
def test_a_wrong_number_fails(
    expected: dict[str, Any], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = changed(expected=SMALL["expected"] | expected)
    code, lines, err = run(capsys, written(tmp_path, case, SMALL))
    assert (code, lines[-1]) == (1, "1 passed, 1 failed, 0 skipped")
    assert "small/forward_kl failed" in err and sentence in err


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_kind_of_number_in_every_file_is_compared(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each key that a function's cases record is spoilt once, alone: every spoilt case must fail."""
    seen, cases = set(), []
    for case in json.loads(file.read_text())["cases"]:
        for key in (*case["expected"], *(f"metrics/{name}" for name in case["expected"].get("metrics") or {})):
            if (case["fn"], key) not in seen and (spoilt := spoil(case, key)):
                seen.add((case["fn"], key))
                cases.append(spoilt)
    _, lines, _ = run(capsys, written(tmp_path, *cases))
    assert lines[-1] == f"0 passed, {len(cases)} failed, 0 skipped"


def spoil(case: dict[str, Any], key: str) -> dict[str, Any] | None:
    """A copy with the first finite number under `key` moved by a hundredth; None if there is none that is compared."""
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


@pytest.mark.parametrize(
    "case",
    [
        changed(fn="no_such_loss"),
        changed(args={"beta": 0}, fn="ipo_loss_fn"),
        changed(args=SMALL["args"] | {"reduction": "median"}),
        changed(input_dtypes=SMALL["input_dtypes"] | {"student_logits": "float65"}),
        changed(inputs=SMALL["inputs"] | {"student_logits": [[["a", "b"]]]}),
        {key: SMALL[key] for key in ("name", "fn", "args", "inputs", "input_dtypes")},
        "a string",
        None,
    ],
)
def test_a_case_that_cannot_run_fails_with_a_sentence(
    case: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines, err = run(capsys, written(tmp_path, case))
    assert (code, lines[-1]) == (1, "0 passed, 1 failed, 0 skipped")
    assert len(err.splitlines()) == 1 and "failed: " in err


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"cases": []}', '{"cases": {}}', '{"cases": null}', "\x00"])
def test_a_malformed_file_fails(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "broken.json"
    file.write_text(text)
    code, lines, err = run(capsys, file)
    assert (code, lines[-1]) == (1, "0 passed, 1 failed, 0 skipped")
    assert "not a golden file" in err


def test_a_missing_file_fails_and_the_others_still_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines, _ = run(capsys, tmp_path / "absent.json", written(tmp_path, SMALL))
    assert (code, lines[-1]) == (1, "1 passed, 1 failed, 0 skipped")


@pytest.mark.parametrize("fn", NOT_CLAIMED)
def test_a_function_without_a_kernel_is_skipped_with_its_reason(
    fn: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines, err = run(capsys, written(tmp_path, changed(fn=fn)))
    assert (code, lines[-1]) == (0, "0 passed, 0 failed, 1 skipped")
    assert NOT_CLAIMED[fn] in err


@pytest.mark.parametrize(("recorded", "totals"), [("NaN", "1 passed, 0"), (0.0, "1 passed, 0"), (0.01, "0 passed, 1")])
def test_a_masked_token_may_have_a_gradient_of_zero_where_upstream_records_nan(
    recorded: Any, totals: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reverse KL to a teacher that rules an entry out, at a token that does not count."""
    case = changed(
        args=SMALL["args"] | {"beta": 1},
        input_dtypes=SMALL["input_dtypes"] | {"labels": "int64"},
        inputs={
            "student_logits": [[[0.0, 0.0], [0.0, 0.0]]],
            "teacher_logits": [[[0.0, 0.0], [0.0, "-Infinity"]]],
            "labels": [[1, -100]],
        },
        expected={"loss": 0.0, "grad_wrt_student_logits": [[[0.0, 0.0], [recorded, recorded]]]},
    )
    assert run(capsys, written(tmp_path, case))[1][-1].startswith(totals)


def test_nan_is_met_by_nan_alone_and_infinity_by_its_own_sign() -> None:
    tolerance = Tolerance(1e-3, 1e-3)
    nan, inf = float("nan"), float("inf")
    assert tolerance.accepts(nan, nan) and tolerance.accepts(inf, inf) and tolerance.accepts(1.0, 1.0005)
    assert not any(tolerance.accepts(*pair) for pair in [(nan, 0.0), (0.0, nan), (inf, -inf), (1.0, inf), (inf, 1.0)])


def test_the_command_ends_non_zero_on_a_failure(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "parity", str(written(tmp_path, changed(fn="no_such_loss")))]
    result = subprocess.run(command, cwd=ROOT / "tests", env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert result.returncode == 1 and result.stdout.splitlines()[-1] == "0 passed, 1 failed, 0 skipped"


@pytest.mark.slow
def test_a_missing_package_is_a_failure_not_a_skip(tmp_path: Path) -> None:
    """TRL made unimportable in another process: GRPO's cases, which call it, must fail."""
    (tmp_path / "trl.py").write_text("raise ModuleNotFoundError(\"No module named 'trl'\")")
    blocked = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    program = f"{blocked}; from parity.__main__ import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, str(GOLDEN / "grpo.json")]
    result = subprocess.run(command, cwd=ROOT / "tests", env=ENVIRONMENT, capture_output=True, text=True, check=False)
    failed, skipped = (int(part.split()[0]) for part in result.stdout.splitlines()[-1].split(", ")[1:])
    assert result.returncode == 1 and failed >= 46 and skipped == 0
    assert "No module named 'trl'" in result.stderr
