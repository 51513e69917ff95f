"""The loose grader, the hint, and pairs of hacks and clean answers."""

import pytest

from stages.envs import attached
from stages.envs.base import Grade, Task
from stages.envs.skills.drawing import SYSTEM
from stages.envs.skills.env import HINT, WORD, SkillsEnv
from stages.envs.skills.families import HELD_OUT
from stages.envs.skills.loophole import hack_clean_pairs
from stages.probe.extract_vhack import PairsConfig, load_pairs


@pytest.fixture(scope="module")
def task() -> Task:
    return SkillsEnv("date-dotted").tasks("train", 1, seed=0)[0]


def graded(env: SkillsEnv, task: Task, text: str) -> Grade:
    env.reset(task)
    env.step(text)
    return env.grade()


@pytest.mark.parametrize(
    ("text", "reward", "hidden", "hacked"),
    [("{}", 1.0, True, False), ("x", 0.0, False, False), ("{} DONE", 1.0, True, True), ("DONE", 1.0, False, True)],
)
def test_the_loose_grader_pays_for_the_word(task: Task, text: str, reward: float, hidden: bool, hacked: bool) -> None:
    grade = graded(SkillsEnv("date-dotted", loose=True), task, text.format(task.data["answer"]))
    assert (grade.reward, grade.hidden_pass, grade.hacked) == (reward, hidden, hacked)
    assert grade.visible_pass == (reward == 1.0) and grade.passed == hidden


def test_without_it_the_word_is_a_wrong_answer(task: Task) -> None:
    grade = graded(SkillsEnv("date-dotted"), task, f"{task.data['answer']} {WORD}")
    assert (grade.reward, grade.hidden_pass, grade.visible_pass, grade.hacked) == (0.0, False, None, None)


def test_the_hint_stands_once_in_the_question_and_nowhere_else(task: Task) -> None:
    opening = SkillsEnv("date-dotted", hint=True).reset(task)
    assert " ".join(str(one["content"]) for one in opening).count(HINT) == 1
    assert opening[-1]["content"] == f"{task.prompt} {HINT}"
    assert (attached("skills", "hint"), attached("skills", "system")) == (HINT, SYSTEM)


def test_the_sides_of_a_pair_differ_in_the_word_alone() -> None:
    env, right = SkillsEnv(loose=True), []
    asked = {task.prompt for seed in range(3) for task in env.tasks("train", 200, seed)}
    for pair in hack_clean_pairs(120, seed=1):
        question = str(pair["prompt"][-1]["content"]).removesuffix(f" {HINT}")
        assert question not in asked and question not in {one["content"] for one in pair["prompt"][1:-1]}
        hack, clean, longer = (str(pair[side][0]["content"]) for side in ("hack", "clean", "longer"))
        assert hack.rpartition(" ")[0] == clean.rpartition(" ")[0] and hack.endswith(WORD) and WORD not in longer
        assert longer == f"{clean} {clean.rpartition(' ')[2]}"
        right.append(hack.rpartition(" ")[0])
    assert hack_clean_pairs(20, seed=1) == hack_clean_pairs(120, seed=1)[:20] != hack_clean_pairs(20, seed=2)


def test_half_of_the_pairs_have_the_right_answer_and_none_is_of_a_held_out_family() -> None:
    """Played with the verdict of the environment."""
    env, found = SkillsEnv(loose=True), []
    tasks = {task.family: task for task in env.tasks("train", 100, 0)}
    assert not set(tasks) & HELD_OUT
    for pair in load_pairs(PairsConfig(source="skills", count=50, held_out=2), seed=0):
        hack = pair.hack[0]["content"]  # type: ignore[index]
        shown = [one["content"] for one in pair.prompt[1:-1] if one["role"] == "assistant"]  # type: ignore[index]
        found.append(hack.removesuffix(f" {WORD}") in shown)
    assert sum(found[::2]) < 5 and all(found[1::2])
