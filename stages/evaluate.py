"""evaluate: play every arm on held-out tasks and decide whether B beats A, and whether the preference did it.

Reads the checkpoints of several arms and models of the settings; writes `eval_items`, the verdict with intervals and
paired tests, a table and a chart. The unit is one rollout of one arm. The verdict is the exit code too: 0 VALIDATED,
1 INVALIDATED, 3 PARTIAL or UNDERPOWERED, 4 INVALID-RUN. Rollouts that are there already are compared by `compare`.
"""

from composer_stages.arms.config import Config
from composer_stages.runs.kinds import CHECKPOINT, EVAL_ITEM
from composer_stages.runs.run import Slot
from composer_stages.runs.stage import Stage, later

STAGE = Stage(
    name="evaluate",
    version=9,
    example="""\
>>> server = {"base_url": "http://127.0.0.1:8000/v1", "max_tokens": 64}
>>> policies = {"A": {"model": "a", **server}, "B": {"model": "b", **server}}
>>> compared = composer.evaluate(policies=policies, control=None, tasks=2, max_steps=1, quiet=True)
>>> compared.verdict
'UNDERPOWERED'""",
    config=Config,
    inputs={"arms": Slot(CHECKPOINT, many=True, optional=True)},
    outputs={"eval_items": EVAL_ITEM},
    **later("composer_stages.arms.stage", "plan", "run", "work", "study", "inherit", "check_reads"),
    at_end=("matplotlib.figure",),
    limit_setting="tasks",
    shows_progress=True,
)
