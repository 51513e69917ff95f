"""Fifty rows of one's own, from the file to a verdict: check, collect, teachers, pairs, two arms, evaluate.

    COMPOSER_ALL_ROWS=1 python -m pytest -s -m slow tests/composer_cli/test_fifty_rows.py

takes all fifty, and prints the seconds of each command; without, a few rows stand for them.
"""

import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.models import save_tiny
from support.server import Reply, answer, serving

from stages.envs import task_table
from stages.envs.bash import fenced
from stages.envs.repo.session import write_script
from stages.envs.tasks import rows
from stages.envs.tasks.env import texts
from stages.runs.kinds import EVAL_ITEM, PAIR, ROLLOUT, TASK
from stages.runs.run import Run

ROWS = Path(__file__).parents[2] / "examples" / "tasks.jsonl"
ENV = ["--env", "tasks", "-s", f"env.path={ROWS}", "-s", "max_steps=2"]
POLICY = ["-s", "policy.max_tokens=24", "-s", "policy.temperature=1.0"]
ALL = bool(os.environ.get("COMPOSER_ALL_ROWS"))
CHECKED, TRAIN, EVAL = ((), 40, 10) if ALL else (("-n", "1"), 4, 4)
"""The limit of the check, a split; and how many rows are collected and evaluated."""
SMALL = ["-s", "optimisation.steps=2", "-s", "optimisation.prompts_per_step=2", "-s", "optimisation.generations=2"]


def solving(asked: dict[str, Any], earlier: int) -> Reply:
    """A teacher that knows the rows by their prompts: it writes the solution, then submits. `wrong` only looks."""
    del earlier
    first = next(message["content"] for message in asked["messages"] if message["role"] == "user")
    row = next(row for row in rows.load(str(ROWS)) if row["prompt"] == first)
    turn = sum(message["role"] == "assistant" for message in asked["messages"])
    script = "ls" if asked["model"] == "wrong" else write_script(texts(row["solution"]))
    return Reply(body=answer(fenced("submit" if turn else script)))


def ending(model: Path) -> None:
    """Let a third of the tokens end an answer: an answer that was cut gives no pair."""
    path = model / "generation_config.json"
    config = json.loads(path.read_text())
    config["eos_token_id"] = [config["eos_token_id"], *range(100, 190)]  # bytes that are no ASCII
    path.write_text(json.dumps(config))


def test_the_rows_are_fifty_in_ten_families() -> None:
    loaded = rows.load(str(ROWS))
    assert len(loaded) == 50 and set(Counter(row["family"] for row in loaded).values()) == {5}
    parts = task_table.split_rows(loaded, 0, 0.25)
    assert [len(parts[name]) for name in ("train", "eval")] == [40, 10]
    assert all(row["solution"] and (row["hidden"] or row["files"]) for row in loaded)


@pytest.mark.slow
@pytest.mark.timeout(5400 if ALL else 600)
def test_from_rows_to_a_verdict(composer, tmp_path):
    def run(*words: object, codes: tuple[int, ...] = (0,)) -> str:
        started, used = time.monotonic(), sum(os.times()[:4])
        done = composer(*words)
        print(f"{words[0]}: {time.monotonic() - started:.0f} s, {sum(os.times()[:4]) - used:.0f} s of processors")
        assert done.returncode in codes, (words, done.stdout[-2000:], done.stderr[-3000:])
        return str(done.stdout)

    checked = json.loads(run("tasks", "check", ROWS, *CHECKED, "-s", "repeats=1", "--json", codes=(0, 4)))
    print(checked["counts"], [(one["task_id"], one["reason"]) for one in checked["tasks"] if one["verdict"] != "ok"])
    assert sum(checked["counts"].values()) == (50 if ALL else 2)
    assert set(checked["counts"]) == {"ok"}
    model = save_tiny(tmp_path / "model", characters=None)
    ending(model)
    # The collection checks fail (1): a random model writes no action. What it wrote is kept, and teachers are asked all
    # the same.
    run("collect", *ENV, "--policy", model, *POLICY, "-n", TRAIN, "-s", "samples=2", codes=(0, 1))
    artifacts = tmp_path / "artifacts"
    collected = Run(artifacts / "collect" / "latest")
    drawn = [json.loads(row["data_json"])["divided_by"] for row in collected.rows(TASK)]
    assert drawn == [{"split_seed": 0, "eval_share": 0.25}] * len(drawn), "recorded, though neither was given"
    assert len(collected.rows(TASK)) == TRAIN
    assert [row["reward"] for row in collected.rows(ROLLOUT)] == [0.0] * 2 * TRAIN
    with serving(solving) as server:
        tables = [
            f'[[teachers]]\nname = "{name}"\nmodel = "{name}"\nbase_url = "{server.url}"\nmax_tokens = 2048\n'
            for name in ("one", "two", "wrong")
        ]
        (tmp_path / "teachers.toml").write_text("\n".join(tables))
        run("replay-teachers", "--teachers", tmp_path / "teachers.toml", codes=(0, 1))
    run("extract-pairs", codes=(0, 1, 3))
    pairs = Run(artifacts / "extract-pairs" / "latest").rows(PAIR)
    first = [pair["chosen"] for pair in pairs if pair["step"] == 0]
    assert first and all("base64 -d" in chosen for chosen in first)
    assert {pair["chosen"] for pair in pairs if pair["step"] == 1} <= {fenced("submit")}
    arms = {"A": [], "B": ["-s", "weights.dpo=1", "-s", "weights.sft=1", "--from", "extract-pairs"]}
    for arm, more in arms.items():
        run("train", *ENV, "--policy", model, *POLICY, *SMALL, "-s", f"tasks={TRAIN}", "--arm", arm, *more)
    given = [word for run_ in sorted((artifacts / "train").glob("2*")) for word in ("--from", run_)]
    run("evaluate", *ENV, *given, "-n", EVAL, codes=(0, 1, 3))
    evaluated = Run(artifacts / "evaluate" / "latest")
    assert evaluated.manifest.status == "complete" and evaluated.manifest.summary["verdict"]
    print(len(pairs), "pairs;", evaluated.manifest.summary["verdict"], evaluated.manifest.summary.get("why", ""))
    held_out = {row["task_id"] for row in evaluated.rows(EVAL_ITEM)}
    assert len(held_out) == EVAL and not held_out & {row["task_id"] for row in collected.rows(TASK)}
