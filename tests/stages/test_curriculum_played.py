"""Stages that take their tasks from a curriculum: collect and train play them in its order."""

import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.command_line import call, model
from support.curricula import ids, make, measured
from support.server import Reply, answer, serving

from stages import collect
from stages.envs.kata.env import KataEnv
from stages.errors import UsageError
from stages.runs import runner
from stages.runs.artifact import Run
from stages.runs.records import DIFFICULTY, ROLLOUT, TASK, TRAINING_REWARD
from stages.training.settings import Optimisation
from stages.training.setup import prompt_order

ENV = "support.environments:JudgedGuessEnv"


def collected(root: Path, url: str, **env: Any) -> Run:
    config = collect.Config(
        env={"name": ENV, **env}, policy={"model": "m", "base_url": url}, tasks=6, samples=8, max_steps=1
    )
    return Run(runner.execute("collect", {}, config, root=root / "artifacts").path)


def test_collect_plays_the_tasks_of_a_curriculum_in_its_order(tmp_path: Path) -> None:
    """The policy of the second run is asked about the tasks that the first one's rollouts put first."""

    def says(body: dict[str, Any], earlier: int) -> Reply:
        letter = body["messages"][-1]["content"][-1]
        return Reply(body=answer("b" if letter == "b" or body["seed"] % 4 == 0 else "a"))

    with serving(says) as server:
        first = collected(tmp_path, server.url)
        rates = make(tmp_path, first, min_rollouts=8, max_rate=0.99)
        ordered = ids(rates)
        rows = {row["task_id"]: row["rate"] for row in rates.rows(DIFFICULTY)}
        assert ordered and all(0 < rows[name] < 1 for name in ordered) and len(ordered) < 6
        assert [rows[name] for name in ordered] == sorted((rows[name] for name in ordered), reverse=True)
        again = collected(tmp_path, server.url, curriculum=str(rates.path))
    assert ids(again) == ordered and again.rows(TASK) == rates.rows(TASK)
    assert len(again.rows(ROLLOUT)) == 8 * len(ordered)


def test_a_curriculum_of_something_else_is_refused(tmp_path: Path) -> None:
    run = make(tmp_path, measured(tmp_path, {"half": [True, False] * 2}))
    config = collect.Config(env={"name": ENV, "curriculum": str(run.path)}, tasks=1)
    with pytest.raises(UsageError, match="holds tasks of e, and guess is to be played"):
        config.draw(config.opener(), 1)
    config = collect.Config(env={"name": ENV, "curriculum": str(run.path), "split": "eval"}, tasks=1)
    with pytest.raises(UsageError, match="no task of the split 'eval'"):
        config.draw(config.opener(), 1)


def test_training_keeps_the_order_of_a_curriculum() -> None:
    size = Optimisation(steps=3, prompts_per_step=2)
    assert prompt_order(4, size, seed=0, as_given=True) == [0, 1, 2, 3, 0, 1]
    assert sorted(prompt_order(4, size, seed=0)[:4]) == [0, 1, 2, 3]
    assert prompt_order(4, size, seed=0) != prompt_order(4, size, seed=0, as_given=True)


SOLVED = {"kata-train-0-00000": 1, "kata-train-0-00001": 4, "kata-train-0-00002": 3, "kata-train-0-00003": 2}
"""How many of four rollouts the scripted model solves."""


def solver() -> Callable[[dict[str, Any], int], Reply]:
    """A model that knows the answers to four tasks of kata, and gives them as often as `SOLVED` says."""
    tasks = {task.prompt: task for task in KataEnv().tasks("train", 4, 0)}
    asked, lock = Counter[str](), threading.Lock()

    def says(body: dict[str, Any], earlier: int) -> Reply:
        del earlier
        said = [message["content"] for message in body["messages"]]
        task = next(task for prompt, task in tasks.items() if prompt in "\n".join(said))
        if len([message for message in body["messages"] if message["role"] == "assistant"]):
            return Reply(body=answer("```bash\nsubmit\n```"))
        with lock:
            asked[task.task_id] += 1
            solves = asked[task.task_id] <= SOLVED[task.task_id]
        known = {tuple(given): wanted for given, wanted in [*task.data["visible"], *task.data["hidden"]]}
        source = f"def {task.data['function']}(*given):\n    return {known!r}[given]\n"
        command = f"cat > solution.py <<'END'\n{source}END" if solves else "ls"
        return Reply(body=answer(f"```bash\n{command}\n```"))

    return says


@pytest.mark.slow
def test_a_training_on_the_command_line_goes_through_a_curriculum_in_its_order(tmp_path: Path, tiny: Path) -> None:
    """Rollouts of kata, their difficulty, and two steps of two tasks each that are the curriculum's, in its order."""

    def composer(stage: str, *words: object) -> Run:
        done = call(tmp_path, stage, *words)
        assert done.returncode == 0, done.stderr
        return Run((tmp_path / stage / "latest").resolve())

    with serving(solver()) as server:
        played = composer(
            "collect", *model(server.url), "-s", "tasks=4", "-s", "samples=4", "-s", "policy.max_tokens=64"
        )
    rates = composer("curriculum", played.path, "--set", "max_rate=0.9")
    ordered = ["kata-train-0-00002", "kata-train-0-00003", "kata-train-0-00000"]
    assert ids(rates) == ordered, "the one that is always solved is left out, the others come easiest first"
    assert [row["num_solved"] for row in rates.rows(DIFFICULTY)] == list(SOLVED.values())
    size = ("steps=2", "prompts_per_step=2", "generations=2")
    words = [
        *(f"optimisation.{part}" for part in size),
        f"env.curriculum={rates.path}",
        "policy.max_tokens=8",
        "max_steps=2",
    ]
    trained = composer("train", "--policy", tiny, *(part for word in words for part in ("--set", word)))
    steps: dict[int, list[str]] = {}
    for row in trained.rows(TRAINING_REWARD):
        steps.setdefault(row["training_step"], []).append(row["task_id"])
    first, second, third = ordered
    assert [sorted(names) for names in steps.values()] == [sorted([first, second] * 2), sorted([third, first] * 2)]
    assert json.loads(trained.read_file("checkpoint.json"))["task_ids"] == ordered
