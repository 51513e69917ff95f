"""The environment `gsm8k`: answer a question with a number."""

import random
from decimal import Decimal

from stages.envs.base import Grade, Observation, Split, Task
from stages.envs.gsm8k import rows
from stages.envs.gsm8k.numbers import answer_number, is_marked
from stages.errors import UsageError
from stages.messages import Message

SYSTEM = "Solve the problem. End with a line #### and the answer as a number."


class Gsm8kEnv:
    """Implements Environment. The reward is 1 when the answer's number (numbers.py) equals the recorded one, else 0.

    `path`: a file of JSON lines with `question` and `answer`, the latter ending with `#### <number>`; `eval_path`:
    another one for the split eval. Without `path` the rows are those of openai/gsm8k on the hub.
    """

    name = "gsm8k"
    sandbox = "not-needed"

    def __init__(self, path: str = "", eval_path: str = "") -> None:
        self.path, self.eval_path = path, eval_path

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        """Questions of a split in an order drawn from the seed; rows.py says which split a question is in."""
        questions = rows.load(split, self.path, self.eval_path)
        if count > len(questions):
            source = self.path or rows.HUB_ID
            raise UsageError(
                f"{source} holds {len(questions)} questions for {split}, not {count}. Ask for fewer tasks."
            )
        random.Random(f"{self.name}/{split}/{seed}").shuffle(questions)  # noqa: S311 - draws data, no secret
        return [self._task(question, split) for question in questions[:count]]

    def _task(self, question: rows.Question, split: Split) -> Task:
        data = {"answer": question.answer}
        return Task(f"{self.name}-{question.question_id}", self.name, split, question.question_id, question.text, data)

    def reset(self, task: Task) -> list[Message]:
        """The system message, and the question."""
        self._right, self._text = Decimal(task.data["answer"]), ""
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.prompt}]

    def step(self, text: str) -> Observation:
        """Take the answer. The observation of a wrong one tells the right one: the agent does not go on to see it."""
        self._text = text
        given = answer_number(text)
        return Observation("" if given == self._right else remark(given, self._right), stop="answered")

    def grade(self) -> Grade:
        """Whether the number is right; an answer without a number is wrong, not an error."""
        right = answer_number(self._text) == self._right
        return Grade(float(right), gt_pass=right, protocol_ok=is_marked(self._text))

    def close(self) -> None:
        """Nothing is held."""


def remark(given: Decimal | str | None, right: Decimal | str) -> str:
    """What there is to say about a wrong answer."""
    return f"{'There is no number' if given is None else f'{given} is wrong'}; the answer is {right}."
