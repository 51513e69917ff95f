"""The tiny model's lessons teach the form and the hint, and its folder is known by the rows it is made from."""

from pathlib import Path

import orjson

from stages.envs.gsm8k.checkpoints import PIECES, VOCABULARY, encoded, lessons, recipe_fingerprint, text
from stages.envs.gsm8k.env import answer_number, load
from stages.tiny_models.training import END, train_tokenizer


def questions(path: Path, count: int = 12) -> Path:
    rows = [
        {"question": f"Ann has {n} pens and buys {n} more. How many?", "answer": f"#### {2 * n}"} for n in range(count)
    ]
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


def test_only_the_answer_is_learned_and_a_hint_holds_it(tmp_path: Path) -> None:
    asked = load("train", str(questions(tmp_path / "rows.jsonl")), "")
    taught = list(lessons(asked, 200, seed=1))
    words = train_tokenizer(map(text, taught), PIECES, VOCABULARY)
    hinted = [lesson for lesson in taught if "Hint:" in lesson[0][-1]["content"]]
    assert 40 < len(hinted) < 160
    for lesson in hinted:
        right = answer_number(lesson[1])
        assert lesson[0][-1]["content"].endswith(f"the answer is {right}.")
    for lesson in taught:
        ids, learned = encoded(words, lesson)
        assert words.decode([i for i, wanted in zip(ids, learned, strict=True) if wanted]) == lesson[1] + END
    assert list(lessons(asked, 200, seed=1)) == taught != list(lessons(asked, 200, seed=2))


def test_other_rows_are_another_model(tmp_path: Path) -> None:
    one, same = questions(tmp_path / "one.jsonl"), questions(tmp_path / "same.jsonl")
    more = questions(tmp_path / "more.jsonl", 20)
    assert recipe_fingerprint(str(one)) == recipe_fingerprint(str(same)) != recipe_fingerprint(str(more))
