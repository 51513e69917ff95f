"""An environment of questions with one right answer each: a subclass gives the questions, and a score for an answer."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_stages.envs.base import Grade, Observation, Split, Task
from composer_stages.envs.task_table import TooManyTasks
from composer_stages.errors import BadInput
from composer_stages.messages import Message, answer_text
from composer_stages.terms import Ground, whole_reward


@dataclass(frozen=True)
class Question:
    """A question and its right answer. family: by default its id; data: what else a score needs, JSON-able.

    `data["shots"]`: worked examples, each a question and its answer, which come before the question.
    """

    question_id: str
    text: str
    answer: str
    family: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


class AnsweredEnv(ABC):
    """The methods of an environment of questions; a subclass gives `questions`, and `score` where texts may differ.

    Implements Environment, HasSolutions and HintsAnswers. `system`: the system message, none where it is empty.
    `source`: where the questions are from, for the error about too few of them.
    """

    name: str
    source: str
    sandbox = "not-needed"
    ground: Ground = "values"
    text_actions = True
    answers = 1
    system = ""
    _reward: float | None

    @abstractmethod
    def questions(self, split: Split, count: int, seed: int) -> Sequence[Question]:
        """Return at least `count` questions of a split, or all there are; a longer list starts with the shorter one."""

    def score(self, answer: str, question: Question) -> float:
        """Return 1 for a right answer, by default for an equal text."""
        return float(answer.strip() == question.answer.strip())

    def correction(self, answer: str, question: Question) -> str:
        """Return the message to the agent after a wrong answer."""
        del answer
        return f"The answer is {question.answer}."

    def answer_hint(self, task: Task) -> str:
        """Return a hint with the right answer, shown before the question is answered."""
        # Measured with SmolLM2-135M-Instruct: so written it helps on dates, while a correction there does not.
        return f"(Answer: {task.data['answer']})"

    def is_well_formed(self, answer: str) -> bool | None:
        """Return whether an answer has the form that the questions ask for; by default None: they ask for no form."""
        del answer
        return None

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        """Return the first `count` questions of a split under a seed."""
        questions = [*self.questions(split, count, seed)]
        if count > len(questions):
            raise TooManyTasks(
                "envs.too-many-questions", most=len(questions), source=self.source, split=split, count=count
            )
        for question in questions[:count]:
            for name in ("question_id", "text", "answer", "family"):
                if not isinstance(value := getattr(question, name), str):
                    raise BadInput("envs.question-not-text", name=self.name, question=question, field=name, value=value)
        return [
            Task(
                f"{self.name}-{question.question_id}",
                self.name,
                split,
                question.family or question.question_id,
                question.text,
                {"answer": question.answer, **question.data},
            )
            for question in questions[:count]
        ]

    def reset(self, task: Task) -> list[Message]:
        """Return the system message, the worked examples as turns, and the question."""
        further = {name: value for name, value in task.data.items() if name != "answer"}
        self._question = Question(task.task_id, task.prompt, task.data["answer"], task.family, further)
        self._answer, self._reward = "", None
        opening: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        for question, answer in further.get("shots", ()):
            opening += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return [*opening, {"role": "user", "content": task.prompt}]

    def step(self, text: str) -> Observation:
        """Record the answer and end the rollout; the observation of a wrong answer gives the right one."""
        answer = answer_text(text)
        self._answer, self._reward = answer, whole_reward(float(self.score(answer, self._question)))
        return Observation("" if self._reward >= 1 else self.correction(answer, self._question), stop="answered")

    def grade(self) -> Grade:
        """Grade the answer by its score, which is computed once an answer: it may execute something."""
        reward = whole_reward(float(self.score("", self._question))) if self._reward is None else self._reward
        return Grade(reward, hidden_pass=reward >= 1, protocol_ok=self.is_well_formed(self._answer))

    def solution(self) -> list[str]:
        """Return the right answer."""
        return [self._question.answer]

    def close(self) -> None:
        """Forget the answer; the environment holds no resources."""
        self._answer = ""
