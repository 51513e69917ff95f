"""compare: did B beat A? Two or more evaluation logs of any program, compared task by task.

Reads logs of every program that `import` reads, tables of ids and scores, and runs; writes the decision with its
intervals, the compared tasks, and one page. The exit code is that of `evaluate`: 0 better, 1 worse or no difference
of interest, 3 too few to say, 4 no comparison.
"""

from composer_stages.comparison.config import Config
from composer_stages.runs.stage import Stage, later

STAGE = Stage(
    name="compare",
    version=20,
    example="""\
>>> logs = composer.compare("before.jsonl", "after.jsonl", quiet=True)
>>> logs.decision, logs.difference
('better', 0.5)""",
    config=Config,
    **later("composer_stages.comparison.stage", "plan", "run", "finish"),
)
