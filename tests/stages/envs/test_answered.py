"""An environment of questions with one right answer each."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.refusals import refused

from composer_stages.envs.answered import AnsweredEnv, Question
from composer_stages.envs.base import Split
from composer_stages.errors import BadInput


class Sums(AnsweredEnv):
    """Sums, of which a test changes a field."""

    name, source = "sums", "a schoolbook"

    def __init__(self, **changed: Any) -> None:
        self.changed = changed

    def questions(self, split: Split, count: int, seed: int) -> Sequence[Question]:
        return (replace(Question(str(n), f"{n} + {n} =", str(2 * n)), **self.changed) for n in range(count))  # type: ignore[return-value]


@pytest.mark.parametrize("answer", ["4", " 4\n"])
def test_blanks_around_a_right_answer_do_not_count(answer: str) -> None:
    """Those of the question's own answer did, so that every answer was wrong."""
    env = Sums(answer=answer)
    (task,) = env.tasks("train", 1, 0)
    env.reset(task)
    env.step("4")
    assert env.grade().reward == 1.0


@pytest.mark.parametrize("field", ["question_id", "text", "answer", "family"])
def test_a_field_that_is_no_text_is_refused(field: str) -> None:
    """An answer that is a number equals no text, so that every answer was wrong."""
    refused(
        lambda: Sums(**{field: 4}).tasks("train", 1, 0), BadInput, "is 4", code="envs.question-not-text", field=field
    )


def test_a_score_that_is_true_is_one() -> None:
    class Exact(Sums):
        def score(self, answer: str, question: Question) -> float:
            return answer == question.answer

    env = Exact()
    (task,) = env.tasks("train", 1, 0)
    env.reset(task)
    env.step("0")
    assert env.grade().reward == 1.0 and type(env.grade().reward) is float
