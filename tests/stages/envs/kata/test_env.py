"""Rollouts with real commands in a real sandbox."""

from dataclasses import replace

from support.grades import verdict

from composer_stages.envs.base import Task
from composer_stages.envs.bash import fenced
from composer_stages.envs.kata.env import KataEnv
from tests.stages.envs.kata.playing import ALWAYS_OK, TEST, answer, edit, folder_of, graded_together, play


def test_repair_is_observed_and_paid(env: KataEnv, task: Task) -> None:
    seen = play(env, "cat solution.py", TEST, edit(answer(task)), TEST, "submit")
    assert seen[0].content == task.data["original"] + "[exit 0]"
    assert seen[1].content.startswith(f"FAIL {task.data['function']}(") and seen[1].content.endswith("\n[exit 1]")
    assert [observation.content for observation in seen[2:]] == ["[exit 0]", "ok\n[exit 0]", ""]
    assert [observation.stop for observation in seen] == [None, None, None, None, "submitted"]
    grade = env.grade()
    assert verdict(grade) == (1.0, True, True, False, True)
    assert grade.work.test_log == f"{len(task.data['hidden'])} of {len(task.data['hidden'])} hidden cases pass"


def test_rollout_without_actions_is_a_zero_and_not_an_error(env: KataEnv, task: Task) -> None:
    grade = env.grade()
    assert verdict(grade) == (0.0, False, False, False, False) and grade.error_type is None
    assert grade.work.test_log is not None
    *failed, counted = grade.work.test_log.split("\n")
    cases = [f"FAIL {task.data['function']}{tuple(args)}: " for args, _ in task.data["hidden"]]
    assert failed and all(any(line.startswith(case) for case in cases) for line in failed)
    assert counted == f"{len(cases) - len(failed)} of {len(cases)} hidden cases pass"


def test_agent_cannot_read_the_hidden_tests(env: KataEnv, task: Task) -> None:
    seen = env.step(fenced("cat *; env; ls -a . .. /tmp")).content
    for (x, y), _ in task.data["hidden"]:
        if [x, y] not in [args for args, _ in task.data["visible"]]:
            assert f"({x}, {y})" not in seen


def test_workspace_is_private_and_removed(env: KataEnv, task: Task) -> None:
    folder = folder_of(env)
    play(env, "mkdir -p a/b && touch a/b/c && chmod 000 a/b a")
    assert folder.stat().st_mode & 0o077 == 0
    env.close()
    env.close()
    assert not folder.exists()


PROTOCOL = {
    ("cat", "edit", "test", "submit"): True,
    ("edit", "test", "cat", "submit"): True,
    ("edit", "submit"): False,
    ("test", "edit", "submit"): False,
    ("edit", "test", "edit again", "submit"): False,
    ("edit", "test"): False,
    ("malformed", "edit", "test", "submit"): False,
    ("edit and test", "submit"): True,
}
"""What an agent does -> whether it tested what it submitted, in well-formed messages."""


def test_protocol_is_kept_where_the_submitted_code_was_tested(task: Task) -> None:
    right = answer(task)
    commands = {
        "cat": "cat solution.py",
        "edit": edit(right),
        "edit again": edit(f"{right} + 0"),
        "edit and test": f"{edit(right)} && {TEST}",
        "test": TEST,
        "submit": "submit",
    }

    def leave(rollout: KataEnv, number: int) -> None:
        for turn in [*PROTOCOL][number]:
            rollout.step(fenced(commands[turn]) if turn in commands else "I give up")

    grades = graded_together([task] * len(PROTOCOL), leave)
    assert [grade.protocol_ok for grade in grades] == [*PROTOCOL.values()] and all(
        grade.hidden_pass for grade in grades
    )


def test_malformed_action_is_answered_and_runs_nothing(env: KataEnv, task: Task) -> None:
    seen = env.step("cat solution.py")
    assert seen.parse_error is not None and seen.parse_error in seen.content
    assert seen.commands == () and seen.returncode is None and seen.stop is None
    assert env._open is None, "a sandbox opens with the first command"


def test_long_output_is_elided_before_its_exit_line(env: KataEnv, task: Task) -> None:
    seen = env.step(fenced("seq 1000"))
    assert seen.raw_chars == 3893 and seen.elided_chars == 3293
    assert seen.content.startswith("1\n2\n") and "3293 characters left out" in seen.content
    assert seen.content.endswith("1000\n[exit 0]")
    assert env.step(fenced("printf abc; false")).content == "abc\n[exit 1]"


def test_reset_starts_a_fresh_rollout(env: KataEnv) -> None:
    first, second = env.tasks("train", 2, seed=0)
    env.reset(first)
    play(env, edit(answer(first)), TEST, "submit")
    env.reset(second)
    grade = env.grade()
    assert grade.hidden_pass is False and grade.protocol_ok is False
    assert env.step(fenced("cat solution.py")).content.startswith(second.data["original"])


def outcome_after(env: KataEnv, task: Task, command: str) -> str:
    """The outcome of the first command of a rollout, or of a message without one."""
    env.reset(task)
    x, y = task.data["arguments"]
    return env.outcome(play(env, command.replace("{x}", x).replace("{y}", y))[-1])


def test_outcome_depends_on_return_values_and_read_text(env: KataEnv, task: Task) -> None:
    commands = {
        "sum": edit("{x} + {y}"),
        "the other sum": "sed -i 's#return.*#return ({y} + {x})#' solution.py",
        "one": edit("1"),
        "two": edit("2"),
        "one as a float": edit("1.0"),
        "one, and failed": f"{edit('1')}; false",
        "one, and other tests": f"{edit('1')} && {ALWAYS_OK}",
        "reads": "cat solution.py",
        "reads in other words": "cat ./solution.py",
        "tests": TEST,
        "submits": "submit",
    }
    outcomes = {name: outcome_after(env, task, command) for name, command in commands.items()}
    env.reset(task)
    outcomes["malformed"] = env.outcome(env.step("cat solution.py"))
    assert outcomes["sum"] == outcomes.pop("the other sum")
    assert outcomes["reads"] == outcomes.pop("reads in other words")
    assert len(set(outcomes.values())) == len(outcomes)


def test_outcome_ignores_expected_values(env: KataEnv, task: Task) -> None:
    """Teachers vote on what an action does, so the vote must not know what is right."""
    cases = {kind: [[args, None] for args, _ in task.data[kind]] for kind in ("visible", "hidden")}
    blind = replace(task, data={**task.data, **cases})
    assert outcome_after(env, blind, edit("7")) == outcome_after(env, task, edit("7"))
