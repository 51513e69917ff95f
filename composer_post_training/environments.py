"""Environments: what one is and exchanges, questions with one right answer, the names after `--env`.

    class Capitals(AnsweredEnv):  # `questions` is all that it needs
        ...

    [project.entry-points."composer.environments"]  # in pyproject.toml of the package
    capitals = "my_package.capitals:Capitals"

Those that ship with Composer are here by their classes, such as `KataEnv`, and as `composer_post_training.environments:
KataEnv` where an import path is asked for. A failure of the infrastructure is `composer_post_training.
InfrastructureError`.
"""

from typing import TYPE_CHECKING

from composer_post_training.deferred import deferred
from stages.envs import ENVIRONMENTS as ENVIRONMENTS, Registered as Registered, load as load, register as register
from stages.envs.base import (
    ComparesOutcomes as ComparesOutcomes,
    Environment as Environment,
    Grade as Grade,
    GradesTogether as GradesTogether,
    HackPair as HackPair,
    HasSize as HasSize,
    HasSolutions as HasSolutions,
    HintsAnswers as HintsAnswers,
    LeavesOut as LeavesOut,
    Observation as Observation,
    ReportsFaults as ReportsFaults,
    Split as Split,
    TakesCalls as TakesCalls,
    Task as Task,
    TurnFault as TurnFault,
    Work as Work,
)
from stages.messages import Message as Message
from stages.terms import Ground as Ground, SamplingUnit as SamplingUnit

if TYPE_CHECKING:
    from stages.envs.answered import AnsweredEnv as AnsweredEnv, Question as Question
    from stages.envs.bash import (
        ActionError as ActionError,
        ShellEnvironment as ShellEnvironment,
        fenced as fenced,
        parse_bash as parse_bash,
    )
    from stages.envs.code.env import CodeEnv as CodeEnv
    from stages.envs.feature_deletion.env import FeatureDeletionEnv as FeatureDeletionEnv
    from stages.envs.gsm8k.env import Gsm8kEnv as Gsm8kEnv
    from stages.envs.harbor.env import HarborEnv as HarborEnv
    from stages.envs.kata.env import KataEnv as KataEnv
    from stages.envs.leetcode_rh.env import LeetcodeRhEnv as LeetcodeRhEnv
    from stages.envs.skills.env import SkillsEnv as SkillsEnv
    from stages.envs.skills.reasoning_gym import ReasoningGymEnv as ReasoningGymEnv
    from stages.envs.swe.env import SweEnv as SweEnv
    from stages.envs.swe.mini import SweMiniEnv as SweMiniEnv
    from stages.envs.task_table import TooManyTasks as TooManyTasks
    from stages.envs.tasks.env import TasksEnv as TasksEnv
else:
    __getattr__ = deferred(
        __name__,
        {
            "stages.envs.answered": ("AnsweredEnv", "Question"),
            "stages.envs.bash": ("ActionError", "ShellEnvironment", "fenced", "parse_bash"),
            "stages.envs.code.env": ("CodeEnv",),
            "stages.envs.feature_deletion.env": ("FeatureDeletionEnv",),
            "stages.envs.gsm8k.env": ("Gsm8kEnv",),
            "stages.envs.harbor.env": ("HarborEnv",),
            "stages.envs.kata.env": ("KataEnv",),
            "stages.envs.leetcode_rh.env": ("LeetcodeRhEnv",),
            "stages.envs.skills.env": ("SkillsEnv",),
            "stages.envs.skills.reasoning_gym": ("ReasoningGymEnv",),
            "stages.envs.swe.env": ("SweEnv",),
            "stages.envs.swe.mini": ("SweMiniEnv",),
            "stages.envs.task_table": ("TooManyTasks",),
            "stages.envs.tasks.env": ("TasksEnv",),
        },
    )
