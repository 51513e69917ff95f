import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from needs import REAL, needs
from support.refusals import refused
from support.transcripts import jsonl

from composer_stages.envs.base import Split, Task
from composer_stages.envs.config import EnvStageConfig
from composer_stages.envs.gsm8k.env import Gsm8kEnv
from composer_stages.errors import BadInput, UsageError

ROOT = Path(__file__).parents[4]
ROWS = REAL / "gsm8k"
pytestmark = needs("math")


def write(path: Path, numbers: range) -> str:
    """Rows of our own: the sum of two numbers."""
    rows = ({"question": f"What is {n} + 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1:,}"} for n in numbers)
    return str(jsonl(path, *rows))


@pytest.fixture
def one_file(tmp_path: Path) -> Gsm8kEnv:
    return Gsm8kEnv(path=write(tmp_path / "rows.jsonl", range(990, 1090)))


def drawn(env: Gsm8kEnv, split: Split) -> list[Task]:
    """All tasks of a split."""
    return env.tasks(split, env.size(split), seed=0)


def test_one_file_is_split_by_question_in_an_order_of_the_seed(one_file: Gsm8kEnv, tmp_path: Path) -> None:
    train, held_out = drawn(one_file, "train"), drawn(one_file, "eval")
    assert len(train) + len(held_out) == 100 and 10 <= len(held_out) <= 30
    assert not {task.family for task in train} & {task.family for task in held_out}
    more = Gsm8kEnv(path=write(tmp_path / "more.jsonl", range(900, 1090)))
    assert {task.family for task in held_out} <= {task.family for task in drawn(more, "eval")}
    assert one_file.tasks("train", 5, seed=0) == train[:5] != one_file.tasks("train", 5, seed=4)


def test_two_files_are_two_splits_and_a_question_counts_once(tmp_path: Path) -> None:
    train, held_out = Path(write(tmp_path / "train.jsonl", range(5))), write(tmp_path / "eval.jsonl", range(5, 8))
    train.write_text(train.read_text() + train.read_text().replace("?", "? "))
    env = Gsm8kEnv(str(train), held_out)
    assert (len(drawn(env, "train")), len(drawn(env, "eval"))) == (5, 3)
    with pytest.raises(UsageError, match="holds 3 questions for eval, not 4"):
        env.tasks("eval", 4, seed=0)
    both = Gsm8kEnv(str(train), write(tmp_path / "both.jsonl", range(3, 8)))
    code = "envs.gsm8k.questions-in-both-files"
    refused(lambda: both.tasks("train", 1, seed=0), BadInput, code=code, num_questions=2)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"answer": None}, "give question (or prompt) and answer"),
        ({"prompt": "Why not?"}, "give question (or prompt) and answer"),
        ({"question": None, "Problem": "Why?", "ID": "1"}, "and answer; did you mean prompt by Problem?"),
        ({"answer": 3}, "not a text"),
        ({"question": ["Why?"]}, "not a text"),
        ({"answer": "3"}, "does not end with"),
        ({"answer": "#### ?"}, "does not end with"),
        ({"kind": "number"}, 'only "math"'),
        ({"question": "What is 0 + 1?"}, "another row"),
        ({"level": "Level 5"}, "no such field"),
        ({"solution": "3"}, "did you mean answer?"),
    ],
)
def test_a_row_that_cannot_be_used_is_refused(tmp_path: Path, row: dict, said: str) -> None:
    path = Path(write(tmp_path / "rows.jsonl", range(1)))
    path.write_text(path.read_text() + json.dumps({"question": "Why?", "answer": "#### 3", **row}) + "\n")
    code = "envs.gsm8k.row-not-usable"
    refused(lambda: Gsm8kEnv(str(path)).tasks("train", 1, 0), BadInput, said, code=code, number=2)


@pytest.mark.parametrize(
    ("text", "reward", "said", "protocol_ok"),
    [
        (None, 0.0, "", False),
        ("2 + 1 = 3\n#### 3.0", 1.0, "", True),
        ("so it is 3", 1.0, "", False),
        ("#### 1,004", 0.0, "1004 is wrong; the answer is 3.", True),
        ("I give up", 0.0, "There is no answer; the answer is 3.", False),
    ],
)
def test_grade_and_correction_of_an_answer(
    tmp_path: Path, text: str | None, reward: float, said: str, protocol_ok: bool
) -> None:
    options = {"path": write(tmp_path / "rows.jsonl", range(2, 3)), "eval_path": write(tmp_path / "o.jsonl", range(1))}
    # An unknown sandbox would be refused by an environment that takes one.
    env = EnvStageConfig(env={"name": "gsm8k", "options": options}, sandbox="nowhere").opener()()
    system, question = env.reset(env.tasks("train", 1, seed=0)[0])
    assert system["role"] == "system" and question == {"role": "user", "content": "What is 2 + 1?"}
    if text is not None:
        seen = env.step(text)
        assert (seen.content, seen.stop) == (said, "answered")
    grade = env.grade()
    assert (env.sandbox, grade.reward, grade.error_type) == ("not-needed", reward, None)
    assert (grade.hidden_pass, grade.protocol_ok) == (reward == 1.0, protocol_ok)


def test_rows_of_mathematics_have_any_expression(tmp_path: Path) -> None:
    rows = [{"prompt": f"Expand {n}(x + 1).", "answer": f"{n}x + {n}", "kind": "math"} for n in range(2, 9)]
    env = Gsm8kEnv(path=str(jsonl(tmp_path / "rows.jsonl", *rows)))
    task = drawn(env, "train")[0]
    number = task.data["answer"][0]
    for text, reward in (
        (f"\\boxed{{{number}(1+x)}}", 1.0),
        (f"#### {number}x", 0.0),
        (f"It is ${number}+{number}x$.", 1.0),
    ):
        env.reset(task)
        env.step(text)
        assert env.grade().reward == reward, text
    assert env.solution() == [f"#### {task.data['answer']}"]


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("We have $x = 5$. Hence\n$$x + 2 = \\boxed{\n7}.$$", "7"),
        ("\\boxed{1} and \\boxed{2}", "1, 2"),
        ("$\\boxed{\\textbf{(B)}\\ 12}$", "\\textbf{(B)}\\ 12"),
        ("18 dollars", "18"),
        ("$x = 5$", "$x = 5$"),
    ],
)
def test_the_answer_of_a_solution_is_what_it_boxes(tmp_path: Path, solution: str, answer: str) -> None:
    row = {"question": "Why?", "answer": solution, "kind": "math"}
    env = Gsm8kEnv(path=str(jsonl(tmp_path / "rows.jsonl", row)), eval_path=write(tmp_path / "other.jsonl", range(1)))
    assert env.tasks("train", 1, seed=0)[0].data["answer"] == answer


@needs("real")
def test_rows_of_gsm8k() -> None:
    env = Gsm8kEnv(str(ROWS / "train-200.jsonl"), str(ROWS / "test-200.jsonl"))
    tasks = env.tasks("train", 200, seed=0)
    by_question = {task.prompt: task.data["answer"] for task in tasks}
    assert next(a for q, a in by_question.items() if q.startswith("Natalia sold clips to 48")) == "72"
    assert len(env.tasks("eval", 200, seed=0)) == len({task.family for task in tasks}) == 200


LOADS = """
import os
from composer_stages.envs.gsm8k.env import Gsm8kEnv
env = Gsm8kEnv()
try:
    env.tasks('train', 1, 0)
except Exception as error:
    print(type(error).__name__, error)
os.chdir('hub')
print(len(env.tasks('train', 5, 0)), sorted(task.data['answer'] for task in env.tasks('eval', 3, 0)))
"""


def test_rows_come_from_the_hub_without_a_path(tmp_path: Path) -> None:
    """Away from the network: `datasets` takes a folder of that name for the hub's repository, and really loads it."""
    place = tmp_path / "hub/openai/gsm8k/main"
    place.mkdir(parents=True)
    write(place / "train.jsonl", range(5))
    write(place / "test.jsonl", range(5, 8))
    (place.parent / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n"
        "  - {split: train, path: main/train.jsonl}\n  - {split: test, path: main/test.jsonl}\n---\n"
    )
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    words = [sys.executable, "-c", LOADS]
    ran = subprocess.run(words, cwd=tmp_path, env=variables, capture_output=True, text=True)
    first, last = (ran.stdout.splitlines() or [""])[0], ran.stdout.splitlines()[-1:]
    assert first.startswith("InfrastructureError openai/gsm8k cannot be downloaded from the hub ("), ran.stderr
    assert "--set env.options.path=FILE" in first and last == ["5 ['6', '7', '8']"], ran.stderr
