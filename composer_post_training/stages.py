"""Stages: what one is, its settings, what it reads and writes, and the table of stages.

    [project.entry-points."composer.stages"]
    count-steps = "my_package.count_steps:ENTRY"  # ENTRY = StageEntry(__name__, "Count the steps.", "beside")

`composer_post_training.kinds` has the kinds of records that stages read and write.
"""

from composer_stages import STAGES as STAGES, StageEntry as StageEntry
from composer_stages.runs.run import Inputs as Inputs, Run as Run, RunWriter as RunWriter, Slot as Slot
from composer_stages.runs.settings import Settings as Settings, StageConfig as StageConfig
from composer_stages.runs.stage import Plan as Plan, Stage as Stage
