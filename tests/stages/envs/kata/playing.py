"""Commands of agents in `kata`, as its tests play them."""

from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from composer_stages.envs.base import Grade, Observation, Task
from composer_stages.envs.bash import SUBMIT, fenced
from composer_stages.envs.kata import transcripts
from composer_stages.envs.kata.env import KataEnv
from composer_stages.envs.kata.tasks import expression, rename_arguments, split_family

TEST = "python3 test_solution.py"
ALWAYS_OK = "echo 'print(\"ok\")' > test_solution.py"


def answer(task: Task) -> str:
    """The right expression of a task."""
    return rename_arguments(transcripts.right_code(task), tuple(task.data["arguments"]))


def edit(code: str) -> str:
    """A command that replaces the expression."""
    return f"sed -i 's|return .*|return {code}|' solution.py"


def write(source: str, file: str = "solution.py") -> str:
    """A command that writes a file."""
    return f"cat > {file} <<'END'\n{source}\nEND"


def play(env: KataEnv, *commands: str) -> list[Observation]:
    """Carry out commands one after the other."""
    return [env.step(fenced(command)) for command in commands]


def folder_of(env: KataEnv) -> Path:
    """The folder of a rollout's files."""
    return env.workspace()


def solution(task: Task, *lines: str, before: str = "") -> str:
    """A solution of these lines."""
    body = "\n".join(f"    {line}" for line in lines)
    return f"{before}\ndef {task.data['function']}({', '.join(task.data['arguments'])}):\n{body}"


def author_texts(task: Task, misconceived: Container[str] = ()) -> list[str]:
    """The messages of an author with misconceptions of these operations alone: look, edit, test, submit."""
    operation, modifier = split_family(task.family)
    belief = operation.misconception if operation.name in misconceived else operation.code
    code = expression(belief, modifier, "x", "y", task.data["constant"])
    commands = (transcripts.LOOK, transcripts.edit_command(task, code), transcripts.TEST, SUBMIT)
    return [fenced(command) for command in commands]


def graded_together(tasks: Sequence[Task], leave: Callable[[KataEnv, int], object]) -> list[Grade]:
    """The grades of what `leave` leaves in a rollout of each task, all graded at once."""
    with ExitStack() as opened:
        rollouts = [opened.enter_context(closing(KataEnv())) for _ in tasks]
        for number, (rollout, task) in enumerate(zip(rollouts, tasks, strict=True)):
            rollout.reset(task)
            leave(rollout, number)
        return rollouts[0].grade_together(rollouts)
