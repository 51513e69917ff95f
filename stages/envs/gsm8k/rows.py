"""Questions with the number that answers them, from files of the user or from the hub."""

from dataclasses import dataclass
from pathlib import Path

from stages.envs.base import Split
from stages.envs.gsm8k.numbers import answer_number
from stages.envs.jsonl import read_rows
from stages.errors import BadInput
from stages.runs import store
from stages.runs.records import Row

HUB_ID, HUB_CONFIG = "openai/gsm8k", "main"
HUB_SPLIT = {"train": "train", "eval": "test"}
EVAL_SHARE = 5
"""Of a single file one question in so many is held out."""


@dataclass(frozen=True)
class Question:
    """One question. `answer` is the right number as text, `question_id` a digest of the question."""

    question_id: str
    text: str
    answer: str


def load(split: Split, path: str, eval_path: str) -> list[Question]:
    """The questions of a split, each once, in the order of the source.

    With both paths each file is one split, and no question may be in both. A single file is split by a digest of the
    question: every fifth one, on average, is for evaluation, whatever else the file holds. Without a path they come
    from the hub. `BadInput` when a file or the hub cannot be read, a row lacks a field, or a question is in both files.
    """
    if not path:
        return _hub(split)
    train = _read(path)
    if not eval_path:
        return [
            question for question in train if (int(question.question_id, 16) % EVAL_SHARE == 0) == (split == "eval")
        ]
    held_out = _read(eval_path)
    if both := {q.question_id for q in train} & {q.question_id for q in held_out}:
        raise BadInput(f"{len(both)} questions are in {path} and in {eval_path}. Leave them out of one of the files.")
    return train if split == "train" else held_out


def _read(path: str) -> list[Question]:
    return _questions(path, read_rows(Path(path).expanduser()))


def _questions(source: str, rows: list[Row]) -> list[Question]:
    questions = (_question(source, number, row) for number, row in enumerate(rows, 1))
    return list({question.question_id: question for question in questions}.values())


def _question(source: str, number: int, row: Row) -> Question:
    text, solution = row.get("question"), row.get("answer")
    if not isinstance(text, str) or not isinstance(solution, str):
        raise BadInput(f"{source}, row {number}, has no question and answer, but {', '.join(row) or 'nothing'}.")
    answer = answer_number(solution) if "####" in solution else None
    if answer is None:
        raise BadInput(f"{source}, row {number}: the answer does not end with '#### <number>', but {solution[-40:]!r}.")
    return Question(store.digest(text.strip())[:12], text, str(answer))


def _hub(split: Split) -> list[Question]:
    try:
        import datasets

        rows = datasets.load_dataset(HUB_ID, HUB_CONFIG, split=HUB_SPLIT[split])
    except Exception as error:  # whatever a download may raise: the libraries below have no common base
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BadInput(
            f"{HUB_ID} cannot be had from the hub ({first}). Name a file with --set env.options.path=FILE: JSON lines "
            "with question and answer, the answer ending with '#### <number>'."
        ) from None
    return _questions(HUB_ID, rows.to_list())
