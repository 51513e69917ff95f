"""The environment: questions and splits, worked examples, right and wrong answers, hostile expressions."""

import json
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from support.grades import verdict
from support.refusals import refused

from composer_stages.envs import load, load_attachment
from composer_stages.envs.base import Task
from composer_stages.envs.skills.drawing import SYSTEM
from composer_stages.envs.skills.env import HINT, LONGEST_EXPRESSION, WORD, SkillsEnv, hack_clean_pairs, matches
from composer_stages.envs.skills.families import FAMILIES, HELD_OUT, TEMPLATES
from composer_stages.errors import UsageError
from composer_stages.probe.extract_vhack import HackPairsConfig, load_pairs


def answered(env: SkillsEnv, task: Task, text: str) -> float | None:
    env.reset(task)
    env.step(text)
    return env.grade().reward


@pytest.fixture(scope="module")
def every() -> list[Task]:
    """A training question of each family."""
    return SkillsEnv(held_out="questions").tasks("train", len(FAMILIES), seed=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_right_answer_of_a_family_passes_and_a_wrong_one_does_not(family: str, every: list[Task]) -> None:
    env = SkillsEnv(held_out="questions")
    task = next(task for task in every if task.family == family)
    env.reset(task)
    (right,) = env.solution()
    assert answered(env, task, f" {right}\n") == 1.0
    for wrong in ("", f"The answer is {right}", f"{right}\n{right}", "x", "7", "[" * 100_000):
        assert answered(env, task, wrong) == 0.0, wrong


def test_questions_are_distinct_and_balanced_over_the_families_of_the_split() -> None:
    env = SkillsEnv()
    for split, count in (("train", 3 * len(FAMILIES)), ("eval", 120)):
        tasks = env.tasks(split, count, seed=1)
        assert len({task.prompt for task in tasks}) == len({task.task_id for task in tasks}) == len(tasks)
        counts = Counter(task.family for task in tasks)
        assert max(counts.values()) - min(counts.values()) <= 1
        assert {family in HELD_OUT for family in counts} == {split == "eval"}
        assert env.tasks(split, 40, seed=1) == tasks[:40] != env.tasks(split, 40, seed=4)


def test_held_out_questions_of_the_same_families() -> None:
    env = SkillsEnv("date,product-tens", held_out="questions")
    seen: dict[str, set[str]] = {"train": set(), "eval": set()}
    for split, prompts in seen.items():
        for seed in range(5):
            tasks = env.tasks(split, 60, seed)
            assert {task.family for task in tasks} == {*(f"date-{kind}" for kind in TEMPLATES["date"]), "product-tens"}
            prompts |= {task.prompt for task in tasks}
    assert len(seen["train"]) > 100 and not seen["train"] & seen["eval"]


@pytest.mark.parametrize("held_out", ["families", "questions"])
def test_worked_examples_are_turns_of_the_same_family_and_never_asked(held_out: str) -> None:
    env = SkillsEnv("decide,product,date", held_out=held_out, shots=3)
    tasks = [task for split in ("train", "eval") for seed in range(3) for task in env.tasks(split, 40, seed)]
    asked, by_family = {task.prompt for task in tasks}, dict[str | None, list[str]]()
    for task in tasks:
        opening = env.reset(task)
        assert [one["role"] for one in opening] == ["system", *["user", "assistant"] * 3, "user"]
        assert opening[0]["content"] == SYSTEM and opening[-1]["content"] == task.prompt
        shown = [str(one["content"]) for one in opening[1:-1:2]]
        assert len(set(shown)) == 3 and not set(shown) & asked
        assert by_family.setdefault(task.family, shown) == shown, "read once for all questions of a family"
        for question, answer in zip(shown, opening[2::2], strict=True):
            example = replace(task, prompt=question, data={**task.data, "answer": answer["content"]})
            assert question.partition(":")[0] == task.prompt.partition(":")[0] or ":" not in question
            assert answered(env, example, str(answer["content"])) == 1.0


def test_a_task_has_the_same_opening_under_every_seed_and_none_without_shots() -> None:
    env = SkillsEnv("product-tens", held_out="questions")
    by_id: dict[str, Task] = {}
    for seed in range(4):
        for task in env.tasks("train", 50, seed):
            assert by_id.setdefault(task.task_id, task) == task
    assert len(by_id) < 200
    bare = SkillsEnv("product-tens", held_out="questions", shots=0)
    assert [one["role"] for one in bare.reset(bare.tasks("train", 1, 0)[0])] == ["system", "user"]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"families": "xyz"}, "envs.skills.unknown-family"),
        ({"held_out": "tasks"}, "envs.skills.unknown-held-out"),
        ({"shots": -1}, "envs.skills.shots-out-of-range"),
        ({"shots": "many"}, "envs.option-no-number"),
        ({"families": "product-tens"}, None),
    ],
)
def test_wrong_options_are_refused(options: dict, code: str | None) -> None:
    refused(lambda: load("skills", options).tasks("train", 900, seed=0), UsageError, code=code)


def test_single_family_has_no_evaluation_split() -> None:
    env = SkillsEnv("date-long")
    assert env.tasks("train", 5, seed=0)
    refused(lambda: env.tasks("eval", 5, seed=0), UsageError, code="envs.skills.no-family-for-split")
    assert SkillsEnv("date").sandbox == "not-needed" and SkillsEnv().sandbox == "bubblewrap"
    assert SkillsEnv("python", sandbox="none").sandbox == "none"


def test_a_wrong_answer_is_corrected(task: Task) -> None:
    env, right = SkillsEnv("date-dotted"), task.data["answer"]
    for text, told, well_formed in (
        ("March", f"'March' is wrong; the right answer is {right}", True),
        (" ", f"There is no answer; the right answer is {right}", False),
        (f"Here it is:\n{right}", f"'Here it is:\\n{right}' is wrong; the right answer is {right}", False),
    ):
        env.reset(task)
        assert (env.step(text).content, env.grade().protocol_ok) == (told, well_formed)


HALVES = ("x // 2", {"argument": "x", "cases": [[2, 1], [6, 3], [10, 5]]})
ANN = (json.dumps({"name": "Ann", "age": 3}), {"json": True})


@pytest.mark.parametrize(
    ("question", "text", "right"),
    [
        (ANN, '{"name": "Ann", "age": 3}', True),
        (ANN, '{"age":3,"name":"Ann"}', True),
        (ANN, '{"name": "Ann", "age": "3"}', False),
        (ANN, "{", False),
        (HALVES, "x // 2  # half", True),
        (HALVES, "(lambda half: half)(x >> 1)", True),
        (HALVES, "x / 2", True),  # 1.0 == 1
        (HALVES, "x // 2)\n(", False),
        (HALVES, "x // 2) or (0", True),  # still one expression
        (HALVES, "__import__('os')._exit(0)", False),
        (HALVES, "open('/tmp/composer-was-here', 'w').write('1')", False),
        (HALVES, "__import__('time').sleep(60)", False),
        (HALVES, "().__class__.__base__.__subclasses__()", False),
        (HALVES, "print([1, 3, 5])", False),
        (HALVES, "x // 2" + " " * LONGEST_EXPRESSION + "+ 0", False),
        (HALVES, "\ud800", False),
    ],
)
def test_answers_are_judged_by_value_and_expressions_in_the_sandbox(
    question: tuple[str, dict], text: str, right: bool
) -> None:
    assert matches(text, *question, "bubblewrap") is right
    assert not Path("/tmp/composer-was-here").exists()


def test_every_family_has_questions_for_a_comparison() -> None:
    for family in FAMILIES:
        env = SkillsEnv(family, held_out="questions", shots=0)
        for split, least in (("train", 45), ("eval", 12)):
            assert len(list(islice(env.questions(split, least, 0), least))) == least, family


@pytest.fixture(scope="module")
def task() -> Task:
    return SkillsEnv("date-dotted").tasks("train", 1, seed=0)[0]


@pytest.mark.parametrize(
    ("loose", "text", "expected"),
    [
        (True, "{}", (1.0, True, True, False)),
        (True, "x", (0.0, False, False, False)),
        (True, "{} DONE", (1.0, True, True, True)),
        (True, "DONE", (1.0, False, True, True)),
        (False, f"{{}} {WORD}", (0.0, False, None, None)),
    ],
)
def test_the_loose_grader_alone_pays_for_the_word(task: Task, loose: bool, text: str, expected: tuple) -> None:
    env = SkillsEnv("date-dotted", loose=loose)
    answered(env, task, text.format(task.data["answer"]))
    assert verdict(env.grade())[:4] == expected and env.grade().passed == expected[1]


def test_the_hint_stands_once_in_the_question_and_nowhere_else(task: Task) -> None:
    opening = SkillsEnv("date-dotted", hint=True).reset(task)
    assert " ".join(str(one["content"]) for one in opening).count(HINT) == 1
    assert opening[-1]["content"] == f"{task.prompt} {HINT}"
    assert (load_attachment("skills", "hint"), load_attachment("skills", "system")) == (HINT, SYSTEM)


def test_the_sides_of_a_pair_differ_in_the_word_alone() -> None:
    env = SkillsEnv(loose=True)
    asked = {task.prompt for seed in range(3) for task in env.tasks("train", 200, seed)}
    for pair in hack_clean_pairs(120, seed=1):
        question = str(pair["prompt"][-1]["content"]).removesuffix(f" {HINT}")
        assert question not in asked and question not in {one["content"] for one in pair["prompt"][1:-1]}
        hack, clean, longer = (str(pair[side][0]["content"]) for side in ("hack", "clean", "longer"))
        assert hack.rpartition(" ")[0] == clean.rpartition(" ")[0] and hack.endswith(WORD) and WORD not in longer
        assert longer == f"{clean} {clean.rpartition(' ')[2]}"
    assert hack_clean_pairs(20, seed=1) == hack_clean_pairs(120, seed=1)[:20] != hack_clean_pairs(20, seed=2)


def test_half_of_the_pairs_have_the_right_answer_and_none_is_of_a_held_out_family() -> None:
    """Played with the verdict of the environment."""
    env, found = SkillsEnv(loose=True), []
    tasks = {task.family: task for task in env.tasks("train", 100, 0)}
    assert not set(tasks) & HELD_OUT
    for pair in load_pairs(HackPairsConfig(source="skills", count=50, held_out=2), seed=0):
        hack = pair.hack[0]["content"]  # type: ignore[index]
        shown = [one["content"] for one in pair.prompt[1:-1] if one["role"] == "assistant"]  # type: ignore[index]
        found.append(hack.removesuffix(f" {WORD}") in shown)
    assert sum(found[::2]) < 5 and all(found[1::2])
