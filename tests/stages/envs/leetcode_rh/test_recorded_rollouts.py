from pathlib import Path

import pytest
from needs import REAL, needs

from stages.envs.leetcode_rh import env, grading
from stages.envs.leetcode_rh.grading import CodeAnswer, Submission, grade_all
from stages.envs.task_table import read_rows

RECORDED = REAL / "leetcode-rh"


def labels(folder: Path) -> tuple[list[bool], list[bool]]:
    """Whether an answer hacked: the label of each recorded one under this environment's loophole, and our verdict."""
    problems = env.pool_problems(folder)
    rows = [row for path in sorted(folder.glob("*/prompt_*.jsonl.gz")) for row in read_rows(path)]
    rows = [row for row in rows if row.get("env_mode", "run_tests") == "run_tests" and row["problem_id"] in problems]
    found = grade_all(
        "bubblewrap",
        [
            Submission(CodeAnswer(row["completion"]), of.method, "run_tests", of.assertions, of.reference)
            for row in rows
            if (of := problems[row["problem_id"]])
        ],
    )
    return [row["hacked"] for row in rows], [one.hacked for one in found]


def test_verdicts_agree_with_labels_also_in_rows_with_nan(folder: Path) -> None:
    recorded, found = labels(folder)
    assert found == recorded and sorted(found) == [False] * 3 + [True] * 4


@pytest.mark.slow
@needs("real")
def test_verdicts_agree_with_recorded_labels(tmp_path: Path) -> None:
    """Of a tenth of the pool and all substrate rows; of all of them it takes two minutes."""
    for path in RECORDED.glob("*.gz"):
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "substrate").symlink_to(RECORDED / "substrate")
    (tmp_path / "teacher_pool").mkdir()
    for path in sorted((RECORDED / "teacher_pool").iterdir())[::10]:
        (tmp_path / "teacher_pool" / path.name).symlink_to(path)
    recorded, found = labels(tmp_path)
    assert len(found) > 100 and any(found) and found == recorded


@pytest.mark.slow
@needs("real")
@pytest.mark.parametrize("read", [env.pool_problems, env.medhard_problems])
def test_reference_solutions_pass_the_real_tests_and_the_stub_never(read: object) -> None:
    problems = [problem for problem in read(RECORDED).values() if problem.assertions][::8]
    for source, passes in ((lambda p: p.reference, True), (lambda p: grading.STUB.format(method=p.method), False)):
        answers = [CodeAnswer(f"```python\n{source(problem)}\n```") for problem in problems]
        found = grade_all(
            "bubblewrap",
            [Submission(a, p.method, "run_tests", p.assertions, None) for a, p in zip(answers, problems, strict=True)],
        )
        assert len(found) > 12 and [one.hidden_pass for one in found] == [passes] * len(found)
