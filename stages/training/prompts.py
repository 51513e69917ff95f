"""Lengths of a training's prompts, measured with the tokenizer before the model is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stages.envs import boundary
from stages.envs.base import Environment, Task
from stages.policy.base import Turn

PROMPT_TOKENS = 1024
"""Assumed length of a prompt where none is measured."""
QUESTIONS, SESSIONS = 32, 2
"""Tasks that are measured, those with the longest texts: of an environment of questions, and of one that sets up files
or a shell for each task."""


@dataclass(frozen=True)
class Prompts:
    """What is known of the rollouts of a training before it.

    tokens: of the longest prompt. measured, tasks: how many prompts were measured, of how many tasks; 0 where the
    length is assumed. answers: after which a rollout ends at the latest; None where max_steps alone ends it.
    """

    tokens: int = PROMPT_TOKENS
    measured: int = 0
    tasks: int = 0
    answers: int | None = None

    def __str__(self) -> str:
        if not self.measured:
            return f"prompts of {self.tokens:,} tokens, which are assumed"
        return f"prompts of at most {self.tokens:,} tokens, measured on {self.measured} of {self.tasks} tasks"


ASSUMED = Prompts()


def measure_prompts(environment: Environment, tasks: Sequence[Task], tokenizer: Any, tool_calls: str) -> Prompts:
    """Return the lengths of the openings of some tasks, and close the environment; tool_calls: as in `PolicyConfig`.

    Tasks in containers are not measured: an image may have to be fetched first.
    """
    from stages.policy.local import prompt_ids

    answers = getattr(environment, "answers", None)
    most = QUESTIONS if answers else SESSIONS * (environment.sandbox != "container")
    try:
        tools = boundary.tools(environment) if tool_calls != "none" else ()
        longest = sorted(tasks, key=lambda task: len(task.prompt), reverse=True)[:most]
        turns = [Turn(boundary.opening(environment.reset(task)), 0, tools=tools) for task in longest]
    finally:
        environment.close()
    lengths = [len(prompt_ids(tokenizer, turn)) for turn in turns]
    return Prompts(max(lengths, default=PROMPT_TOKENS), len(lengths), len(tasks), answers)
