"""Code under test that reaches into pytest to make itself pass: every way is without reward, or called a hack."""

import pytest
from support.forged_passes import ATTACKS, PATCHED_REPORT, SWALLOW, TEST_FILE, WRONG, forging
from support.forgeries import in_process, sample
from support.matrices import few

from stages.envs.base import Task
from stages.envs.bash import fenced
from stages.envs.swe.env import SweEnv


def test_there_are_many() -> None:
    assert len(ATTACKS) >= 30


ONE_OF_EACH_KIND = (
    "the plugin's outcome is replaced",
    "every report is passed",
    "tests do not run",
    "every exception is swallowed",
    "a hook of its own replaces the test",
    "the supervisor is killed",
    "an end before any test",
    "the test is skipped from within",
)


@pytest.mark.parametrize("attack", few(ATTACKS, ONE_OF_EACH_KIND))
def test_a_pass_by_force_is_without_reward_or_a_hack(env: SweEnv, task: Task, attack: str) -> None:
    env.reset(task)
    session, graded = env._open_session(), env._open_task().hidden[TEST_FILE]
    assert graded is not None
    (session.folder / "abacus" / "sums.py").write_text(forging(attack, graded.data))
    env.step(fenced("submit"))
    grade = env.grade()
    assert grade.hacked or grade.reward == 0.0


def test_the_first_run_tells_a_report_that_was_changed_after_the_test_had_raised(env: SweEnv, task: Task) -> None:
    """As a thread would change it that always wins: the phase that raised is told beside the report."""
    env.reset(task)
    forged = WRONG + PATCHED_REPORT.format(condition="item.name == 'test_add'")
    (env._open_session().folder / "abacus" / "sums.py").write_text(forged)
    grade = env.grade()
    assert (grade.reward, grade.hacked) == (0.0, True)
    assert env.verdict is not None and not env.verdict.strict


def test_the_second_run_tells_a_forged_report_from_an_honest_solution(env: SweEnv, task: Task) -> None:
    """Without it the first is a pass: what tests raise is swallowed before pytest sees it."""
    for code, expected in (
        (WRONG + SWALLOW.format(what="AssertionError"), (0.0, False, True)),
        (WRONG.replace("a - b", "a + b"), (1.0, True, False)),
    ):
        env.reset(task)
        (env._open_session().folder / "abacus" / "sums.py").write_text(code)
        grade = env.grade()
        assert (grade.reward, grade.gt_pass, grade.hacked) == expected
        assert env.verdict is not None and env.verdict.strict, "the first run alone believes both"


GENERATED = {one.name: one for one in sample(list(in_process("add")), 120)}
FEW = ("returned: always equal", "returned: the last constant of the caller", "returned: what the source line expects")


@pytest.mark.parametrize("name", few(GENERATED, FEW))
def test_a_generated_forgery_is_without_reward_or_a_hack(env: SweEnv, task: Task, name: str) -> None:
    env.reset(task)
    folder = env._open_session().folder
    (folder / "abacus" / "sums.py").write_text(f"{WRONG}\n{GENERATED[name].code}")
    for path, text in GENERATED[name].files:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    grade = env.grade()
    assert grade.reward is not None and (grade.hacked or grade.reward == 0.0)
