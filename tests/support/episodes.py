"""Commands of an agent that writes `initials` again, and the grade of its episode."""

from stages.envs.base import Grade
from stages.envs.bash import fenced
from stages.envs.feature_deletion.env import FeatureDeletionEnv, task
from stages.runs.records import Row

FILE = "shelf/words.py"
"""Where the stub stands."""
FILL = """\
python3 - <<'END'
text = open({file!r}).read()
open({file!r}, 'w').write(text.replace('raise NotImplementedError', {code!r}))
END"""


def body(code: str) -> str:
    """Put code in place of the stub."""
    return FILL.format(file=FILE, code=code)


def play(env: FeatureDeletionEnv, row: Row, *commands: str) -> Grade:
    """The grade after these commands."""
    env.reset(task(row))
    for command in commands:
        env.step(fenced(command))
    return env.grade()
