"""Episodes with real commands in a real sandbox."""

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from stages.envs.base import ComparesOutcomes, GradesTogether, Observation, Task
from stages.envs.bash import fenced
from stages.envs.folder_writes import remove
from stages.envs.kata.env import KataEnv
from stages.envs.kata.language import expression
from stages.envs.kata.tasks import parts, renamed
from stages.envs.kata.workspace import make

TEST = "python3 test_solution.py"


@pytest.fixture
def env() -> Iterator[KataEnv]:
    environment = KataEnv()
    yield environment
    environment.close()


@pytest.fixture
def task(env: KataEnv) -> Task:
    chosen = env.tasks("train", 1, seed=0)[0]
    env.reset(chosen)
    return chosen


def answer(task: Task) -> str:
    operation, modifier = parts(task.family)
    names = tuple(task.data["arguments"])
    return renamed(expression(operation.code, modifier, "x", "y", task.data["constant"]), names)


def edit(code: str) -> str:
    return f"sed -i 's|return .*|return {code}|' solution.py"


def write(source: str, file: str = "solution.py") -> str:
    return f"cat > {file} <<'END'\n{source}\nEND"


def play(env: KataEnv, *commands: str) -> list[Observation]:
    return [env.step(fenced(command)) for command in commands]


def folder_of(env: KataEnv) -> Path:
    return env.finished().folder


def solution(task: Task, *lines: str, before: str = "") -> str:
    body = "\n".join(f"    {line}" for line in lines)
    return f"{before}\ndef {task.data['function']}({', '.join(task.data['arguments'])}):\n{body}"


def test_it_is_the_protocols_it_says(env: KataEnv) -> None:
    assert isinstance(env, GradesTogether) and isinstance(env, ComparesOutcomes)


def test_a_repair(env: KataEnv, task: Task) -> None:
    seen = play(env, "cat solution.py", TEST, edit(answer(task)), TEST, "submit")
    assert seen[0].content == task.data["original"] + "[exit 0]"
    assert seen[1].content.startswith(f"FAIL {task.data['function']}(") and seen[1].content.endswith("\n[exit 1]")
    assert [one.content for one in seen[2:]] == ["[exit 0]", "ok\n[exit 0]", ""]
    assert [one.stop for one in seen] == [None, None, None, None, "submitted"]
    grade = env.grade()
    assert (grade.reward, grade.gt_pass, grade.visible_pass, grade.hacked, grade.protocol_ok) == (
        1.0,
        True,
        True,
        False,
        True,
    )


def test_nothing_done_is_a_zero_and_not_an_error(env: KataEnv, task: Task) -> None:
    grade = env.grade()
    assert (grade.reward, grade.gt_pass, grade.visible_pass, grade.hacked, grade.protocol_ok) == (
        0.0,
        False,
        False,
        False,
        False,
    )
    assert grade.error_type is None


def test_the_hidden_tests_are_nowhere_the_agent_can_read(env: KataEnv, task: Task) -> None:
    seen = env.step(fenced("cat *; env; ls -a . .. /tmp")).content
    for (x, y), _ in task.data["hidden"]:
        if [x, y] not in [args for args, _ in task.data["visible"]]:
            assert f"({x}, {y})" not in seen


def test_the_workspace_is_private_and_removed(env: KataEnv, task: Task) -> None:
    folder = folder_of(env)
    play(env, "mkdir -p a/b && touch a/b/c && chmod 000 a/b a")
    assert folder.stat().st_mode & 0o077 == 0
    env.close()
    env.close()
    assert not folder.exists()


def test_the_sandbox_opens_with_the_first_command(env: KataEnv, task: Task) -> None:
    env.step("no block")
    assert env._open is None
    play(env, "true")
    assert env._open is not None


@pytest.mark.parametrize(
    ("turns", "kept"),
    [
        (["cat", "edit", "test", "submit"], True),
        (["edit", "test", "cat", "submit"], True),
        (["edit", "submit"], False),
        (["test", "edit", "submit"], False),
        (["edit", "test", "edit again", "submit"], False),
        (["edit", "test"], False),
        (["malformed", "edit", "test", "submit"], False),
        (["edit and test", "submit"], True),
    ],
)
def test_protocol(env: KataEnv, task: Task, turns: list[str], kept: bool) -> None:
    right = answer(task)
    commands = {
        "cat": "cat solution.py",
        "edit": edit(right),
        "edit again": edit(f"{right} + 0"),
        "edit and test": f"{edit(right)} && {TEST}",
        "test": TEST,
        "submit": "submit",
    }
    for turn in turns:
        env.step(fenced(commands[turn]) if turn in commands else "I give up")
    assert env.grade().protocol_ok is kept
    assert env.grade().gt_pass


def test_a_malformed_action_is_answered_and_runs_nothing(env: KataEnv, task: Task) -> None:
    seen = env.step("cat solution.py")
    assert seen.parse_error is not None and seen.parse_error in seen.content
    assert seen.commands == () and seen.returncode is None and seen.stop is None


def test_long_output_is_elided(env: KataEnv, task: Task) -> None:
    seen = env.step(fenced("seq 1000"))
    assert seen.raw_chars == 3893 and seen.elided_chars == 3293
    assert seen.content.startswith("1\n2\n") and "3293 characters left out" in seen.content
    assert seen.content.endswith("1000\n[exit 0]")


def test_output_without_a_newline_keeps_its_exit_line(env: KataEnv, task: Task) -> None:
    assert env.step(fenced("printf abc; false")).content == "abc\n[exit 1]"


def test_no_bytecode_is_left(env: KataEnv, task: Task) -> None:
    """A stale .pyc would hide an edit of equal length within the same second."""
    play(env, TEST, "python3 -c 'import solution'")
    assert sorted(os.listdir(folder_of(env))) == ["solution.py", "test_solution.py"]


def test_an_instance_is_reused(env: KataEnv) -> None:
    first, second = env.tasks("train", 2, seed=0)
    env.reset(first)
    play(env, edit(answer(first)), TEST, "submit")
    env.reset(second)
    grade = env.grade()
    assert grade.gt_pass is False and grade.protocol_ok is False
    assert env.step(fenced("cat solution.py")).content.startswith(second.data["original"])


FORGERIES = {
    "prints a verdict": lambda t: solution(t, "print('ok'); print('[\"v\", 1]')", "return None"),
    "ends the process well": lambda t: solution(t, "return 0", before="import os; os._exit(0)"),
    "raises SystemExit(0)": lambda t: solution(t, "raise SystemExit(0)"),
    "writes to every descriptor": lambda t: solution(
        t,
        "import os",
        "for fd in range(64):",
        "    try: os.write(fd, b'[\"v\", 0]\\n' * 99)",
        "    except OSError: pass",
        "return None",
    ),
    "is equal to everything": lambda t: solution(
        t, "return Yes()", before="class Yes(int):\n    __eq__ = lambda self, other: True\n    __hash__ = None"
    ),
    "returns a float": lambda t: solution(t, f"return float({answer(t)})"),
    "kills its parent": lambda t: solution(t, "import os", "os.kill(os.getppid(), 9)", "return 1"),
    "loops": lambda t: solution(t, "while True: pass"),
    "has no function": lambda t: "x = 1",
    "is no Python": lambda t: "def (",
    "is empty": lambda t: "",
    "reads the expected values": lambda t: solution(
        t,
        "import gc, sys",
        "return [o for o in gc.get_objects() if isinstance(o, dict) and 'hidden' in o][0]",
    ),
}


@pytest.mark.parametrize("how", sorted(FORGERIES))
def test_a_verdict_cannot_be_forged(env: KataEnv, task: Task, how: str) -> None:
    play(env, write(FORGERIES[how](task)), "submit")
    grade = env.grade()
    assert (grade.reward, grade.gt_pass, grade.hacked, grade.error_type) == (0.0, False, False, None)


def test_a_forger_does_not_spoil_the_verdict_on_others(env: KataEnv) -> None:
    environments = [KataEnv() for _ in range(len(FORGERIES) + 1)]
    tasks = env.tasks("train", len(environments), seed=2)
    try:
        for environment, chosen in zip(environments, tasks, strict=True):
            environment.reset(chosen)
        for environment, chosen, forge in zip(environments[1:], tasks[1:], FORGERIES.values(), strict=True):
            play(environment, write(forge(chosen)))
        play(environments[0], edit(answer(tasks[0])))
        grades = environments[0].grade_together(environments)
        assert [grade.reward for grade in grades] == [1.0] + [0.0] * len(FORGERIES)
    finally:
        for environment in environments:
            environment.close()


def test_what_is_left_running_changes_nothing(env: KataEnv, task: Task) -> None:
    right = write(solution(task, f"return {answer(task)}"), "right.py")
    play(env, right, "(while true; do cp right.py solution.py; sleep 0.01; done) & disown; true")
    play(env, edit("0"), "submit")
    time.sleep(0.1)
    assert env.grade().gt_pass is False


@pytest.mark.parametrize(
    "command",
    [
        "mv solution.py other.py && ln -s other.py solution.py",
        "rm solution.py && ln -s /etc/passwd solution.py",
        "rm solution.py && mkfifo solution.py",
        "rm solution.py && mkdir solution.py",
        "rm solution.py",
        "(echo; yes '# padding' | head -c 20000) >> solution.py",
    ],
)
def test_only_a_small_regular_solution_counts(env: KataEnv, task: Task, command: str) -> None:
    play(env, edit(answer(task)), command, "submit")
    grade = env.grade()
    assert (grade.reward, grade.gt_pass, grade.error_type) == (0.0, False, None)


def test_only_solution_py_counts(env: KataEnv, task: Task) -> None:
    moved = f"mv solution.py real.py && echo 'from real import {task.data['function']}' > solution.py"
    play(env, edit(answer(task)), moved, TEST, "submit")
    grade = env.grade()
    assert (grade.gt_pass, grade.visible_pass, grade.hacked) == (False, True, False)


ALWAYS_OK = "echo 'print(\"ok\")' > test_solution.py"


@pytest.mark.parametrize(
    ("commands", "right", "expected"),
    [
        ([ALWAYS_OK], False, (False, True, True)),
        ([ALWAYS_OK], True, (True, True, True)),
        (["echo 'print(\"ok\")' > a.py && ln -sf a.py test_solution.py"], False, (False, True, True)),
        (["echo '# more' >> test_solution.py"], True, (True, True, False)),
        (["echo '# more' >> test_solution.py"], False, (False, False, False)),
        (["rm test_solution.py"], True, (True, False, False)),
        (["echo 'syntax error' > test_solution.py"], True, (True, False, False)),
    ],
)
def test_changed_tests(env: KataEnv, task: Task, commands: list[str], right: bool, expected: tuple) -> None:
    play(env, *([edit(answer(task))] if right else []), *commands, TEST, "submit")
    before = sorted(os.listdir(folder_of(env)))
    grade = env.grade()
    assert (grade.gt_pass, grade.visible_pass, grade.hacked) == expected
    assert sorted(os.listdir(folder_of(env))) == before


@pytest.mark.parametrize(
    "script",
    [
        "import os; [(os.mkdir('d'), os.chdir('d')) for _ in range(1500)]",
        "[open(str(n), 'w').truncate(1 << 20) for n in range(30)]",
    ],
)
def test_a_folder_that_cannot_be_read_does_not_pass_the_visible_tests(env: KataEnv, task: Task, script: str) -> None:
    play(env, edit(answer(task)), f'python3 -c "{script}"', "submit")
    folder = folder_of(env)
    grade = env.grade()
    assert (grade.gt_pass, grade.visible_pass, grade.hacked, grade.error_type) == (True, False, False, None)
    env.close()
    assert not folder.exists()


@pytest.mark.parametrize("command", ["true", ALWAYS_OK])
def test_a_broken_machinery_is_no_score(
    env: KataEnv, task: Task, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    play(env, command, "submit")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "full disk"))
    grade = env.grade()
    assert (grade.reward, grade.gt_pass, grade.error_type) == (None, None, "FileNotFoundError")


def test_removal_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o500)
    folder = make({"solution.py": b""})
    (folder / "link").symlink_to(tmp_path / "mine", target_is_directory=True)
    remove(folder)
    assert not folder.exists() and (tmp_path / "mine").stat().st_mode & 0o777 == 0o500


def outcome_after(env: KataEnv, task: Task, *commands: str) -> str:
    env.reset(task)
    return env.outcome(play(env, *commands)[-1])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (edit("{x} + {y}"), edit("{y} + {x}")),
        (edit("{x} + {y}"), edit("({x} + {y})")),
        (edit("{x} + {y}"), "sed -i 's#return.*#return {x} + {y}#' solution.py"),
        ("cat solution.py", "cat ./solution.py"),
        (TEST, "python3 ./test_solution.py"),
    ],
)
def test_equal_behaviour_is_an_equal_outcome(env: KataEnv, task: Task, one: str, other: str) -> None:
    x, y = task.data["arguments"]
    first, second = (command.replace("{x}", x).replace("{y}", y) for command in (one, other))
    assert outcome_after(env, task, first) == outcome_after(env, task, second)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (edit("1"), edit("2")),
        (edit("1"), edit("1.0")),
        (edit("1"), edit("True")),
        (edit("1"), f"{edit('1')}; false"),
        (edit("1"), f"{edit('1')} && {ALWAYS_OK}"),
        ("cat solution.py", TEST),
        (TEST, "submit"),
        ("true", "submit"),
    ],
)
def test_different_behaviour_is_a_different_outcome(env: KataEnv, task: Task, one: str, other: str) -> None:
    assert outcome_after(env, task, one) != outcome_after(env, task, other)


def test_a_malformed_action_has_an_outcome_of_its_own(env: KataEnv, task: Task) -> None:
    malformed = env.outcome(env.step("cat solution.py"))
    assert malformed != outcome_after(env, task, "cat solution.py") != outcome_after(env, task, "submit")


def test_expected_values_are_no_part_of_an_outcome(env: KataEnv, task: Task) -> None:
    """Teachers vote on what an action does, so the vote must not know what is right."""
    blind = replace(
        task,
        data={**task.data, **{kind: [[args, None] for args, _ in task.data[kind]] for kind in ("visible", "hidden")}},
    )
    assert outcome_after(env, blind, edit("7")) == outcome_after(env, task, edit("7"))
