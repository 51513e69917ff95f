"""Grading of functions that a model wrote: called in the sandbox, and judged outside of it by what they return.

`Grade`, the verdict on a rollout, is one of `composer_post_training.environments`.
"""

from composer_stages.sandbox import Answer as Answer, Answers as Answers, Call as Call, judge as judge, match as match
