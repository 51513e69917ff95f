"""Answers of the kinds that people report in public, with the reward that is right; read where they lie beside us."""

import json
from pathlib import Path

import pytest
from needs import REAL, needs
from support.transcripts import jsonl

from composer_stages.envs.code.env import CodeEnv
from composer_stages.envs.gsm8k.env import Gsm8kEnv

ANSWERS = REAL.parent / "cases" / "environments" / "answers.jsonl"


@needs("math")
@pytest.mark.slow
def test_given_answers_get_the_reward_that_is_right(tmp_path: Path) -> None:
    if not ANSWERS.exists():
        pytest.skip(f"needs {ANSWERS}")
    wrong = []
    for number, case in enumerate(map(json.loads, ANSWERS.read_text().splitlines())):
        if case["env"] not in ("code", "gsm8k"):
            continue
        path = str(jsonl(tmp_path / f"{number}.jsonl", case["row"]))
        env = CodeEnv(path=path) if case["env"] == "code" else Gsm8kEnv(path=path)
        [task] = [task for split in ("train", "eval") for task in env.tasks(split, env.size(split), 0)]  # type: ignore[arg-type]
        env.reset(task)
        env.step(case["answer"])
        if (reward := env.grade().reward) != case["right"]:
            wrong.append((case["case"], reward))
    assert wrong == []
