"""Environments: what one is and exchanges, questions with one right answer, the names after `--env`.

    class Capitals(AnsweredEnv):  # `questions` is all that it needs
        ...

    register("capitals", Registered("my_package.capitals:Capitals"))

Those that ship with Composer are here by their classes, such as `KataEnv`, and as `composer_post_training.environments:
KataEnv` where an import path is asked for. A failure of the infrastructure is `composer_post_training.
InfrastructureError`.
"""

from typing import TYPE_CHECKING

from composer_post_training.deferred import deferred
from stages.envs import ENVIRONMENTS, Registered, load, register
from stages.envs.base import (
    ComparesOutcomes,
    Environment,
    Grade,
    GradesTogether,
    HackPair,
    HasSize,
    HasSolutions,
    HintsAnswers,
    LeavesOut,
    Observation,
    ReportsFaults,
    Split,
    TakesCalls,
    Task,
    TurnFault,
    Work,
)
from stages.messages import Message
from stages.terms import Ground, SamplingUnit

__all__ = [
    "ENVIRONMENTS",
    "ActionError",
    "AnsweredEnv",
    "CodeEnv",
    "ComparesOutcomes",
    "Environment",
    "FeatureDeletionEnv",
    "Grade",
    "GradesTogether",
    "Ground",
    "Gsm8kEnv",
    "HackPair",
    "HarborEnv",
    "HasSize",
    "HasSolutions",
    "HintsAnswers",
    "KataEnv",
    "LeavesOut",
    "LeetcodeRhEnv",
    "Message",
    "Observation",
    "Question",
    "ReasoningGymEnv",
    "Registered",
    "ReportsFaults",
    "SamplingUnit",
    "ShellEnvironment",
    "SkillsEnv",
    "Split",
    "SweEnv",
    "SweMiniEnv",
    "TakesCalls",
    "Task",
    "TasksEnv",
    "TooManyTasks",
    "TurnFault",
    "Work",
    "fenced",
    "load",
    "parse_bash",
    "register",
]

if TYPE_CHECKING:
    from stages.envs.answered import AnsweredEnv, Question
    from stages.envs.bash import ActionError, ShellEnvironment, fenced, parse_bash
    from stages.envs.code.env import CodeEnv
    from stages.envs.feature_deletion.env import FeatureDeletionEnv
    from stages.envs.gsm8k.env import Gsm8kEnv
    from stages.envs.harbor.env import HarborEnv
    from stages.envs.kata.env import KataEnv
    from stages.envs.leetcode_rh.env import LeetcodeRhEnv
    from stages.envs.skills.env import SkillsEnv
    from stages.envs.skills.reasoning_gym import ReasoningGymEnv
    from stages.envs.swe.env import SweEnv
    from stages.envs.swe.mini import SweMiniEnv
    from stages.envs.task_table import TooManyTasks
    from stages.envs.tasks.env import TasksEnv
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
