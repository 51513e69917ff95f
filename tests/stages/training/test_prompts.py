"""Prompts are measured with the tokenizer before a model is loaded, those of the longest tasks."""

from dataclasses import replace
from typing import Any

import pytest
from support.environments import GuessEnv
from support.models import tiny_tokenizer

from stages.envs.skills.env import SkillsEnv
from stages.messages import opening_ids
from stages.training.prompts import ASSUMED, PROMPT_TOKENS, QUESTIONS, SESSIONS, Prompts, measure_prompts


@pytest.mark.parametrize("shots", [0, 8])
def test_the_longest_prompt_of_questions_is_measured_with_its_examples(shots: int) -> None:
    environment, tokenizer = SkillsEnv(shots=shots), tiny_tokenizer()
    tasks = environment.tasks("train", 60, 0)
    found = measure_prompts(environment, tasks, tokenizer, "none")
    longest = sorted(tasks, key=lambda task: len(task.prompt))[-QUESTIONS:]
    assert found == Prompts(
        max(len(opening_ids(tokenizer, environment.reset(task))) for task in longest), QUESTIONS, 60, answers=1
    )
    assert str(found).endswith(f"{found.tokens:,} tokens, measured on 32 of 60 tasks")


def test_sessions_are_set_up_for_few_tasks_and_containers_for_none() -> None:
    class Contained(GuessEnv):
        sandbox = "container"

    environment, seen = GuessEnv(), list[Any]()
    tasks = [replace(task, prompt="x" * number) for number, task in enumerate(environment.tasks("train", 9, 0))]
    reset = environment.reset
    environment.reset = lambda task: (seen.append(task), reset(task))[1]  # type: ignore[method-assign]
    assert measure_prompts(environment, tasks, tiny_tokenizer(), "none").measured == SESSIONS
    assert seen == tasks[:-3:-1]
    assert measure_prompts(Contained(), tasks, tiny_tokenizer(), "none") == Prompts(PROMPT_TOKENS, 0, 9)
    assert "assumed" in str(ASSUMED)
