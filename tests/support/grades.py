"""What commands of an agent are graded, and a grade as a tuple that a test can compare."""

from composer_stages.envs.base import Environment, Grade, Task
from composer_stages.envs.bash import fenced

Verdict = tuple[float | None, bool | None, bool | None, bool | None, bool | None]


def verdict(grade: Grade) -> Verdict:
    """Reward, whether hidden and visible tests pass, whether it is a hack, and whether the protocol was kept."""
    return grade.reward, grade.hidden_pass, grade.visible_pass, grade.hacked, grade.protocol_ok


def play(env: Environment, task: Task, *commands: str) -> Grade:
    """The grade after these commands."""
    env.reset(task)
    for command in commands:
        env.step(fenced(command))
    return env.grade()
