"""The environment `gsm8k`: answer a question with a number.

In order: the number in a text, questions from files of the user or from the hub, the environment.
"""

import random
import re
from decimal import Decimal
from pathlib import Path

from composer_stages.envs.answered import AnsweredEnv, Question
from composer_stages.envs.base import Split
from composer_stages.envs.task_table import hub_rows, is_held_out, read_rows
from composer_stages.errors import BadInput
from composer_stages.runs import store
from composer_stages.runs.kinds import Row
from composer_stages.words import Sentence

SYSTEM = "Solve the problem. End with a line #### and the answer as a number."
HUB_ID, HUB_CONFIG = "openai/gsm8k", "main"
HUB_SPLIT = {"train": "train", "eval": "test"}

NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)")
MARKED = re.compile(r"####(.*)")
BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
THOUSANDS = re.compile(r"(?<=[0-9])(?:,|\\,|\{,\})(?=[0-9]{3}(?![0-9]))")


def answer_number(text: str) -> Decimal | None:
    r"""Return the first number after the last `####`; if there is none, in the last `\boxed{}`; else the last number.

    $1,200.00 is 1200: currency signs, commas between thousands, a full stop behind the number and zeros behind the
    decimal point do not count, a percent sign neither. None where the text holds no number.
    """
    plain = _plain(text)
    for pattern in (MARKED, BOXED):
        if (places := pattern.findall(plain)) and (numbers := NUMBER.findall(places[-1])):
            return Decimal(numbers[0])
    numbers = NUMBER.findall(plain)
    return Decimal(numbers[-1]) if numbers else None


def is_marked(text: str) -> bool:
    r"""Return whether the text marks a number as its answer, behind `####` or in `\boxed{}`."""
    return any(NUMBER.search(answer) for pattern in (MARKED, BOXED) for answer in pattern.findall(_plain(text))[-1:])


def _plain(text: str) -> str:
    return THOUSANDS.sub("", text.replace("\\$", "").replace("$", "").replace("\N{MINUS SIGN}", "-"))


def load(split: Split, path: str, eval_path: str) -> list[Question]:
    """Return the questions of a split, each once, in the order of the source.

    With both paths each file is one split, and no question may be in both. A single file is split by a digest of the
    question: every fifth one, on average, is for evaluation, whatever else the file holds. Without a path they come
    from the hub (`hub_rows`). `BadInput` when a file cannot be read, a row lacks a field, or a question is in both.
    """
    if not path:
        part = HUB_SPLIT[split]
        remedy = Sentence("envs.gsm8k.how-to-name-file")
        return _questions(HUB_ID, hub_rows(HUB_ID, remedy, HUB_CONFIG, part)[part])
    train = _questions(path, read_rows(Path(path).expanduser()))
    if not eval_path:
        return [question for question in train if is_held_out(question.question_id) == (split == "eval")]
    held_out = _questions(eval_path, read_rows(Path(eval_path).expanduser()))
    if duplicates := {q.question_id for q in train} & {q.question_id for q in held_out}:
        raise BadInput(
            "envs.gsm8k.questions-in-both-files", num_questions=len(duplicates), path=path, eval_path=eval_path
        )
    return train if split == "train" else held_out


def _questions(source: str, rows: list[Row]) -> list[Question]:
    questions: dict[str, Question] = {}
    for number, row in enumerate(rows, 1):
        text, solution = row.get("question"), row.get("answer")
        if not isinstance(text, str) or not isinstance(solution, str):
            raise BadInput("envs.gsm8k.row-without-fields", source=source, number=number, fields=list(row))
        answer = answer_number(solution) if "####" in solution else None
        if answer is None:
            raise BadInput("envs.gsm8k.row-without-number", source=source, number=number, solution=solution[-40:])
        # By the question alone: a repeated one counts once, whatever its solution, and cannot be in two splits.
        question_id = store.digest(text.strip())[:12]
        questions[question_id] = Question(question_id, text, str(answer))
    return list(questions.values())


class Gsm8kEnv(AnsweredEnv):
    """Implements Environment, HasSolutions and HasSize.

    The reward is 1 when `answer_number` equals the recorded number, else 0.

    `path`: a file of JSON lines with `question` and `answer`, the latter ending with `#### <number>`; `eval_path`:
    another one for the split eval. Without `path` the rows are those of openai/gsm8k on the hub.
    """

    name, system = "gsm8k", SYSTEM

    def __init__(self, path: str = "", eval_path: str = "") -> None:
        self.path, self.eval_path, self.source = path, eval_path, path or HUB_ID

    def size(self, split: Split) -> int:
        """Return the number of questions of a split."""
        return len(load(split, self.path, self.eval_path))

    def questions(self, split: Split, count: int, seed: int) -> list[Question]:
        """Return all questions of a split in an order drawn from the seed; `load` defines the splits."""
        del count
        questions = load(split, self.path, self.eval_path)
        random.Random(f"{self.name}/{split}/{seed}").shuffle(questions)  # noqa: S311 - draws data, no secret
        return questions

    def score(self, answer: str, question: Question) -> float:
        """Return 1 for the right number; an answer without a number is wrong, not an error."""
        return float(answer_number(answer) == Decimal(question.answer))

    def correction(self, answer: str, question: Question) -> str:
        """Return which number was read, and the right one."""
        number = answer_number(answer)
        wrong = "There is no number" if number is None else f"{number} is wrong"
        return f"{wrong}; the answer is {question.answer}."

    def is_well_formed(self, answer: str) -> bool:
        """Return whether the answer marks a number."""
        return is_marked(answer)

    def solution(self) -> list[str]:
        """Return the recorded number, marked."""
        return [f"#### {self._question.answer}"]
