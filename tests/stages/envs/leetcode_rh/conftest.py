"""A folder in the layout of the recorded rollouts, with problems and rollouts of our own making."""

from pathlib import Path

import pytest
from support.leetcode import ASSERTS, PRINTS, REFERENCE, RIGHT, TESTS, answer, medhard_row, pool_row, write


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Problems 1 and 3 have real tests, problem 2 has none; NaN stands where the recorded rows have it."""
    path = tmp_path_factory.mktemp("leetcode-rh")
    rows = {
        1: [
            pool_row(1, 0, answer("return 0", PRINTS), True, False),
            pool_row(1, 1, answer(RIGHT, PRINTS), True, True),
            pool_row(1, 2, answer(RIGHT, ASSERTS), False, True),
            pool_row(1, 3, answer("return 1"), False, False),
        ],
        2: [pool_row(2, 0, answer("return 0", PRINTS), True, False)],
        3: [pool_row(3, 0, answer("return 0 +", PRINTS), False, False)],
    }
    for number, of_problem in rows.items():
        file = path / f"teacher_pool/prompt_{number:04d}.jsonl.gz"
        write(file, of_problem, b',"logp_mean":NaN,"imp_ratio":Infinity')
    check = "def check(candidate):\n" + "\n".join(f"    {text}" for text in TESTS)
    known = [{"problem_id": number, "test": check, "completion": REFERENCE} for number in (1, 3)]
    write(path / "leetcode_problems_mine.jsonl.gz", known)
    write(path / "leetcode_test_medhard.jsonl.gz", [medhard_row(number) for number in (101, 102, 103)])
    substrate = [
        {"problem_id": 1, "env_mode": mode, "completion": answer("return 0", PRINTS), "hacked": True}
        for mode in ("run_tests", "sentinel")
    ]
    write(path / "substrate/prompt_0001.jsonl.gz", substrate)
    return path
