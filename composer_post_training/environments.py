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
from composer_stages.envs import (
    ENVIRONMENTS as ENVIRONMENTS,
    Registered as Registered,
    load as load,
    register as register,
)
from composer_stages.envs.base import (
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
    TellsGrounds as TellsGrounds,
    TurnFault as TurnFault,
    Work as Work,
)
from composer_stages.messages import Message as Message, answer_text as answer_text
from composer_stages.terms import Ground as Ground, SamplingUnit as SamplingUnit

if TYPE_CHECKING:
    from composer_stages.envs.answered import AnsweredEnv as AnsweredEnv, Question as Question
    from composer_stages.envs.bash import (
        ActionError as ActionError,
        ShellEnvironment as ShellEnvironment,
        fenced as fenced,
        parse_bash as parse_bash,
    )
    from composer_stages.envs.task_table import TooManyTasks as TooManyTasks

    # isort: split
    # [[[cog
    # from docs import stubs
    # cog.outl(stubs.shipped_environments())
    # ]]]
    from composer_stages.envs.code.env import CodeEnv as CodeEnv
    from composer_stages.envs.feature_deletion.env import FeatureDeletionEnv as FeatureDeletionEnv
    from composer_stages.envs.gsm8k.env import Gsm8kEnv as Gsm8kEnv
    from composer_stages.envs.harbor.env import HarborEnv as HarborEnv
    from composer_stages.envs.kata.env import KataEnv as KataEnv
    from composer_stages.envs.leetcode_rh.env import LeetcodeRhEnv as LeetcodeRhEnv
    from composer_stages.envs.skills.env import SkillsEnv as SkillsEnv
    from composer_stages.envs.skills.reasoning_gym import ReasoningGymEnv as ReasoningGymEnv
    from composer_stages.envs.swe.env import SweEnv as SweEnv
    from composer_stages.envs.swe.mini import SweMiniEnv as SweMiniEnv
    from composer_stages.envs.tasks.env import TasksEnv as TasksEnv
    # [[[end]]]
else:
    _shipped = (entry.environment for name, entry in ENVIRONMENTS.items() if ENVIRONMENTS.ships(name))
    __getattr__ = deferred(
        __name__,
        {
            "composer_stages.envs.answered": ("AnsweredEnv", "Question"),
            "composer_stages.envs.bash": ("ActionError", "ShellEnvironment", "fenced", "parse_bash"),
            "composer_stages.envs.task_table": ("TooManyTasks",),
            **{target.partition(":")[0]: [target.partition(":")[2]] for target in _shipped},
        },
    )
