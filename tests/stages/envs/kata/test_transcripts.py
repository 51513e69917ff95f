"""Transcripts say what the real environment says, and what they teach is who knows what."""

import pytest

from benchmarks.kata_models import END, RECIPES, Knowledge, encode, kata_tokenizer, knowledge_transcripts
from stages.envs.bash import parse_bash
from stages.envs.kata import tasks
from stages.envs.kata.env import KataEnv
from stages.envs.kata.tasks import OPERATIONS, expression
from stages.envs.kata.transcripts import edit_command

TEACHERS = ["teacher-a", "teacher-b", "teacher-c"]
NAMES = ["student", *TEACHERS]
EVERY = [operation.name for operation in OPERATIONS]


def test_the_real_environment_answers_as_written() -> None:
    environment = KataEnv()
    try:
        for transcript in knowledge_transcripts(24, 7, RECIPES["student"].knowledge):
            environment.reset(transcript.task)
            for turn in transcript.turns:
                seen = environment.step(turn.text)
                assert seen.content == (turn.answer or ""), turn.text
            assert seen.stop == "submitted"
    finally:
        environment.close()


def test_slips_of_every_kind_occur_and_are_not_taught() -> None:
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
def test_somebody_edits_as_they_know(name: str) -> None:
    knowledge = RECIPES[name].knowledge
    for transcript in knowledge_transcripts(60, 2, knowledge):
        task = transcript.task
        operation, modifier = tasks.parts(task.family)
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


def test_every_operation_is_known_to_most_teachers_and_a_majority_knows_more_than_anyone() -> None:
    wrong = {name: set(RECIPES[name].knowledge.misconceived) for name in TEACHERS}
    lost = {name for name in EVERY if sum(name in known for known in wrong.values()) > 1}
    assert all(len(lost) < len(known) for known in wrong.values())
    student = RECIPES["student"].knowledge
    assert all(len(known) < len(student.misconceived) + len(student.unsure) for known in wrong.values())
