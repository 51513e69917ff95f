"""replay-teachers: ask every teacher what it would have done in every recorded state, and report what that costs.

Reads rollouts and a teacher table, writes `teacher_actions`. The unit is one answer: a distinct state, a teacher, a
sample index. Equal states of several rollouts are asked once. Servers are asked concurrently, the steps of each rollout
in order; local models are asked meanwhile, batch by batch.
"""

from composer_stages.runs.kinds import STEP, TEACHER_ACTION
from composer_stages.runs.run import Slot
from composer_stages.runs.stage import Stage, later
from composer_stages.teachers.config import Config

STAGE = Stage(
    name="replay-teachers",
    version=5,
    example="""\
>>> coder = {"name": "coder", "model": "qwen/qwen3-coder", "base_url": "http://127.0.0.1:8000/v1", "max_tokens": 64}
>>> answers = composer.replay_teachers(rollouts, teachers=[coder], quiet=True)
>>> len(answers.scan("teacher_actions")) == len(rollouts.scan("steps"))
True""",
    config=Config,
    inputs={"rollouts": Slot(STEP)},
    outputs={"teacher_actions": TEACHER_ACTION},
    **later("composer_stages.teachers.stage", "plan", "run", "work", "check_reads"),
    **later("composer_stages.teachers.spending", "judge"),
)
