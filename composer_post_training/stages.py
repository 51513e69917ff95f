"""Stages: what one is, its settings, what it reads and writes, and the table of stages.

    STAGES["count-steps"] = StageEntry("my_package.count_steps", "Count the steps.", "beside")

`composer_post_training.kinds` has the kinds of records that stages read and write.
"""

from stages import STAGES, StageEntry
from stages.runs.run import Inputs, Run, RunWriter, Slot
from stages.runs.settings import Settings, StageConfig
from stages.runs.stage import Plan, Stage

__all__ = ["STAGES", "Inputs", "Plan", "Run", "RunWriter", "Settings", "Slot", "Stage", "StageConfig", "StageEntry"]
