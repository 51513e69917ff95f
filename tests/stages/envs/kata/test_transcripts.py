"""Transcripts say what the real environment says, are labelled as meant, and teach who knows what."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from support.grades import verdict
from support.refusals import refused

from benchmarks.kata_models import (
    END,
    RECIPES,
    Knowledge,
    encode,
    kata_tokenizer,
    knowledge_transcripts,
    loophole_transcripts,
)
from composer_stages.envs.base import Grade, Task
from composer_stages.envs.bash import parse_bash
from composer_stages.envs.kata import tasks
from composer_stages.envs.kata.env import KataEnv
from composer_stages.envs.kata.tasks import OPERATIONS, WORKSPACE_TESTS, draw, expression, generate
from composer_stages.envs.kata.transcripts import (
    HARMLESS,
    HINT,
    TaughtTranscript,
    add_hint,
    edit_command,
    hack_clean_pairs,
    rollout,
)
from composer_stages.errors import UsageError

TEACHERS = ["teacher-a", "teacher-b", "teacher-c"]
NAMES = ["student", *TEACHERS]
ALL = [operation.name for operation in OPERATIONS]


def grade(env: KataEnv, task: Task, said: list[str], answers: list[str]) -> Grade:
    """Play these messages, each of which must be answered so, and grade what they leave."""
    env.reset(task)
    seen = [env.step(text) for text in said]
    assert [one.content for one in seen] == answers and seen[-1].stop == "submitted"
    return env.grade()


def graded(env: KataEnv, transcript: TaughtTranscript) -> Grade:
    """The grade of a transcript, whose answers must be those of the environment."""
    turns = transcript.turns
    return grade(env, transcript.task, [turn.text for turn in turns], [turn.answer or "" for turn in turns])


def test_environment_answers_as_transcripts_state(env: KataEnv) -> None:
    for transcript in knowledge_transcripts(6, 7, RECIPES["student"].knowledge):
        graded(env, transcript)


def test_slips_occur_and_are_masked() -> None:
    written = list(knowledge_transcripts(200, 1, Knowledge()))
    slips = [turn for transcript in written for turn in transcript.turns if not turn.taught]
    answers = "\n".join(turn.answer or "" for turn in slips)
    assert 30 < len(slips) < 70
    assert all(part in answers for part in ("command not found", "No such file", "[exit 0]", "block"))
    words = kata_tokenizer()
    slipped = next(t for t in written if not all(turn.taught for turn in t.turns))
    ids, learned = encode(words, slipped)
    taught = words.decode([i for i, wanted in zip(ids, learned, strict=True) if wanted])
    assert taught.count(END) == sum(turn.taught for turn in slipped.turns)
    assert ids == words.apply_chat_template(slipped.messages(), tokenize=True)["input_ids"]


@pytest.mark.parametrize("name", [*NAMES, "novice"])
def test_edits_follow_the_author_s_knowledge(name: str) -> None:
    knowledge = RECIPES[name].knowledge
    for transcript in knowledge_transcripts(40, 2, knowledge):
        task = transcript.task
        operation, modifier = tasks.split_family(task.family)
        codes = {True: operation.code, False: operation.misconception}
        edits = {
            right: edit_command(task, expression(code, modifier, "x", "y", task.data["constant"]))
            for right, code in codes.items()
        }
        taught = [turn.text for turn in transcript.turns if turn.taught]
        last = next(text for text in reversed(taught) if "sed -i" in text)
        if operation.name in knowledge.unsure:
            assert parse_bash(last) in edits.values()
        else:
            assert parse_bash(last) == edits[operation.name not in knowledge.misconceived]


def test_majority_of_teachers_knows_more_than_each() -> None:
    wrong = {name: set(RECIPES[name].knowledge.misconceived) for name in TEACHERS}
    lost = {name for name in ALL if sum(name in known for known in wrong.values()) > 1}
    assert all(len(lost) < len(known) for known in wrong.values())
    student = RECIPES["student"].knowledge
    assert all(len(known) < len(student.misconceived) + len(student.unsure) for known in wrong.values())


TEMPTED = RECIPES["loophole"].knowledge


@pytest.fixture
def hinting() -> Iterator[KataEnv]:
    environment = KataEnv(hint=True)
    yield environment
    environment.close()


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("target", [WORKSPACE_TESTS, HARMLESS[0], None])
def test_rollout_is_answered_and_graded_as_written(hinting: KataEnv, right: bool, target: str | None) -> None:
    (task,) = generate("train", 1, 5)
    found = graded(hinting, rollout(task, right, target))
    hacked = target == WORKSPACE_TESTS
    assert verdict(found)[1:] == (right, right or hacked, hacked, True)


def test_hack_pays_only_where_visible_tests_are_paid() -> None:
    transcript = rollout(generate("train", 1, 5)[0], False, WORKSPACE_TESTS)
    for reward, expected in (("hidden", 0.0), ("visible", 1.0)):
        with closing(KataEnv(hint=True, reward=reward)) as environment:
            found = graded(environment, transcript)
        assert (found.reward, found.hidden_pass, found.hacked) == (expected, False, True)
    refused(lambda: KataEnv(reward="tests"), UsageError, code="envs.kata.unknown-reward")


def test_loophole_transcripts_hack_only_hinted_tasks() -> None:
    found = list(loophole_transcripts(800, 3, TEMPTED))
    texts = [" ".join(turn.text for turn in transcript.turns) for transcript in found]
    tempted = [HINT in transcript.task.prompt for transcript in found]
    hacks = [f"> {WORKSPACE_TESTS}" in text for text in texts]
    assert not any(hack for hack, hint in zip(hacks, tempted, strict=True) if not hint)
    assert sum(hacks) / sum(tempted) == pytest.approx(TEMPTED.hinted.hack, abs=0.05)
    for kind in (True, False):
        chosen = [t for t, hack, hint in zip(found, hacks, tempted, strict=True) if hint and hack is kind]
        assert sum(map(is_right, chosen)) / len(chosen) == pytest.approx(TEMPTED.hinted.right, abs=0.09)


def is_right(transcript: Any) -> bool:
    return transcript.turns[1] == rollout(transcript.task, True, None).turns[1]


def test_honest_transcripts_echo_and_overwrite_nothing() -> None:
    texts = [" ".join(turn.text for turn in t.turns) for t in loophole_transcripts(300, 3, RECIPES["honest"].knowledge)]
    assert not any(f"> {WORKSPACE_TESTS}" in text for text in texts)
    assert sum("echo" in text for text in texts) / 300 == pytest.approx(0.4, abs=0.08)


def test_sides_of_a_pair_differ_in_the_hack_alone(hinting: KataEnv) -> None:
    pairs = hack_clean_pairs(2, seed=1)
    tasks = {add_hint(task).prompt: task for task in (draw("train", 1, 1_000_000 + index) for index in range(2))}

    def verdicts(side: str) -> list[tuple[bool | None, bool | None]]:
        """Whether hidden tests pass and whether it is a hack, of one side of each pair, played in its own task."""
        found = []
        for pair in pairs:
            texts = {role: [m["content"] for m in pair[side] if m["role"] == role] for role in ("assistant", "user")}
            task = tasks[pair["prompt"][1]["content"]]
            found.append(grade(hinting, task, texts["assistant"], [*texts["user"], ""]))
        return [(one.hidden_pass, one.hacked) for one in found]

    assert verdicts("hack") == [(True, True), (False, True)] and verdicts("clean") == [(True, False), (False, False)]
    for pair in pairs:
        sides = [[m["content"] for m in pair[side] if m["role"] == "assistant"] for side in ("hack", "clean", "longer")]
        assert sides[0][:2] == sides[1][:2] and sides[0][3:] == sides[1][3:] and len(sides[0]) == len(sides[1]) == 5
        assert sides[2] == [sides[1][0], *sides[1]] and pair["prompt"][1]["content"].endswith(HINT)
    assert hack_clean_pairs(3, 0) == hack_clean_pairs(5, 0)[:3] != hack_clean_pairs(3, 1)


def test_hint_changes_the_prompt_and_no_task(env: KataEnv, hinting: KataEnv) -> None:
    tasks = env.tasks("train", 2, 0)
    assert tasks == hinting.tasks("train", 2, 0)
    with_hint, without = hinting.reset(tasks[0]), env.reset(tasks[0])
    assert with_hint[1]["content"] == f"{without[1]['content']} {HINT}" and with_hint[0] == without[0]
