"""The environment `gsm8k`: answer a question with a number, or one of your own with an expression.

In order: questions from files of the user or from the hub, the environment.
"""

import random
from pathlib import Path

from composer_stages.envs.answered import AnsweredEnv, Question
from composer_stages.envs.base import Split
from composer_stages.envs.gsm8k import answers
from composer_stages.envs.task_table import hub_rows, is_held_out, meant_field, no_such_field, read_rows
from composer_stages.errors import BadInput
from composer_stages.runs import store
from composer_stages.runs.kinds import Row
from composer_stages.words import Sentence

SYSTEM = "Solve the problem. End with a line #### and the answer as a number."
HUB_ID, HUB_CONFIG = "openai/gsm8k", "main"
HUB_SPLIT = {"train": "train", "eval": "test"}


def load(split: Split, path: str, eval_path: str) -> list[Question]:
    """Return the questions of a split, each once, in the order of the source.

    With both paths each file is one split, and no question may be in both. A single file is split by a digest of the
    question: every fifth one, on average, is for evaluation, whatever else the file holds. Without a path they come
    from the hub (`hub_rows`). `BadInput` when a file cannot be read, a row lacks a field, or a question is in both.
    """
    if not path:
        part = HUB_SPLIT[split]
        remedy = Sentence("envs.gsm8k.how-to-name-file")
        return _questions(HUB_ID, hub_rows(HUB_ID, remedy, HUB_CONFIG, [part])[part])
    train = _questions(path, read_rows(Path(path).expanduser()))
    if not eval_path:
        return [question for question in train if is_held_out(question.question_id) == (split == "eval")]
    held_out = _questions(eval_path, read_rows(Path(eval_path).expanduser()))
    if duplicates := {q.question_id for q in train} & {q.question_id for q in held_out}:
        raise BadInput(
            "envs.gsm8k.questions-in-both-files", num_questions=len(duplicates), path=path, eval_path=eval_path
        )
    return train if split == "train" else held_out


FIELDS = ("question", "prompt", "answer", "kind")
"""Fields of a row: one of the first two, an answer, and "math" as the kind of one of any expression."""


def _questions(source: str, rows: list[Row]) -> list[Question]:
    questions: dict[str, Question] = {}
    for number, row in enumerate(rows, 1):
        try:
            _add(questions, {name: value for name, value in row.items() if value is not None})
        except ValueError as reason:
            raise BadInput("envs.gsm8k.row-not-usable", source=source, number=number, reason=reason) from None
    return list(questions.values())


def _add(questions: dict[str, Question], row: Row) -> None:
    """Add the question of a row, which counts once; ValueError with the reason where it cannot be used."""
    others = [name for name in row if name not in FIELDS]
    near = {name: meant_field(name.lower(), FIELDS) for name in others if len(name) > 2}
    meant = {name: fields[0] for name, fields in near.items() if fields and fields[0] not in row}
    if ("question" in row) == ("prompt" in row) or "answer" not in row:
        raise ValueError(Sentence("envs.gsm8k.without-fields", fields=list(row), meant=meant))
    if others:
        raise ValueError(no_such_field(others[0], FIELDS))
    texts = {name: value for name, value in row.items() if name != "kind"}
    if wrong := [name for name, value in texts.items() if not isinstance(value, str)]:
        raise ValueError(Sentence("envs.gsm8k.not-a-text", name=wrong[0], value=row[wrong[0]]))
    if row.get("kind", "math") != "math":
        raise ValueError(Sentence("envs.gsm8k.unknown-kind", kind=row["kind"]))
    # Of mathematics of the user's own the whole answer counts, unless it marks one.
    _, mark, answer = row["answer"].rpartition("####")
    answer = answers.boxed(answer)
    number = answers.number_of(answer)
    answer = number or answer.strip()
    if not answer or not ("kind" in row or (mark and number)):
        raise ValueError(Sentence("envs.gsm8k.without-number", solution=row["answer"][-40:]))
    text = row["question" if "question" in row else "prompt"]
    # By the question alone, so that a repeated one is not in two splits.
    first = questions.setdefault(question_id := store.digest(text.strip())[:12], Question(question_id, text, answer))
    if first.answer != answer:
        raise ValueError(Sentence("envs.gsm8k.other-answer", first=first.answer))


class Gsm8kEnv(AnsweredEnv):
    """Implements Environment, HasSolutions and HasSize.

    The reward is 1 when the final answer (answers.py) equals the recorded one, which math-verify decides, else 0.

    `path`: a file of JSON lines or Parquet with `question` and `answer`, the latter ending with `#### <number>`, or,
    with `kind` "math", being any expression; `eval_path`: another one for the split eval. Without `path` the rows are
    those of openai/gsm8k on the hub.
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
        answers.require_math_verify()
        questions = load(split, self.path, self.eval_path)
        random.Random(f"{self.name}/{split}/{seed}").shuffle(questions)  # noqa: S311 - draws data, no secret
        return questions

    def score(self, answer: str, question: Question) -> float:
        """Return 1 for the right answer; a text without one is wrong, not an error."""
        return float(answers.is_right(answer, question.answer))

    def correction(self, answer: str, question: Question) -> str:
        """Return what was read as the answer, and the right one."""
        read = answers.final_answers(answer, is_number=bool(answers.number_of(question.answer)))
        wrong = f"{' or '.join(read)} is wrong" if read else "There is no answer"
        return f"{wrong}; the answer is {question.answer}."

    def is_well_formed(self, answer: str) -> bool:
        """Return whether the answer marks a number."""
        return answers.is_marked(answer)

    def solution(self) -> list[str]:
        """Return the recorded number, marked."""
        return [f"#### {self._question.answer}"]
