"""Teachers with a prompt of their own: what is sent, that it is counted and paid for, and that others stay the same."""

from pathlib import Path
from typing import Any

import pytest
from support.server import Reply, answer, serving
from support.transcripts import imported, jsonl

from composer_cli.show.blocks import Dialogue
from composer_cli.show.sections import section
from composer_stages import replay_teachers
from composer_stages.errors import UsageError
from composer_stages.runs import runner
from composer_stages.runs.kinds import TEACHER_ACTION
from composer_stages.runs.run import Inputs, Run
from composer_stages.runs.stage import load_stage
from composer_stages.teachers.config import TeacherConfig
from composer_stages.teachers.questions import dependent_votes

SYSTEM, QUESTION = {"role": "system", "content": "Use bash."}, {"role": "user", "content": "Which boat?"}
SAID = {"role": "assistant", "content": "ls"}
EXAMPLES = [{"user": "1+1?", "assistant": "2"}, {"user": "2+2?", "assistant": "4"}]
SHOWN = [{"role": role, "content": text} for one in EXAMPLES for role, text in one.items()]
OWN = {"role": "system", "content": "Be right."}


@pytest.fixture(scope="module")
def rollouts(artifacts: Path) -> Run:
    conversation = [SYSTEM, QUESTION, SAID, {"role": "user", "content": "a"}, {**SAID, "content": "done"}]
    row = {"messages": conversation, "task_id": "boat", "reward": 1.0}
    return imported(artifacts, jsonl(artifacts / "rows.jsonl", row))


def config(url: str, **more: Any) -> replay_teachers.Config:
    one = {"name": "one", "model": "m", "base_url": url, "max_tokens": 8, "usd_per_mtok_in": 1, "usd_per_mtok_out": 1}
    return replay_teachers.Config(teachers=[{**one, **more}])


@pytest.mark.parametrize(
    ("own", "before"),
    [
        ({}, [SYSTEM]),
        ({"system": ""}, []),
        ({"examples": EXAMPLES}, [SYSTEM, *SHOWN]),
        ({"system": "Be right.", "examples": EXAMPLES}, [OWN, *SHOWN]),
    ],
)
def test_a_teacher_is_shown_its_own_prompt_before_the_conversation(
    tmp_path: Path, rollouts: Run, own: dict[str, Any], before: list[dict[str, str]]
) -> None:
    with serving(lambda body, earlier: Reply(body=answer("ls", cost=1e-6))) as server:
        asked = config(server.url, **own)
        run = Run(runner.execute("replay-teachers", {"rollouts": rollouts}, asked, root=tmp_path).path)
    sent = [body["messages"] for body in server.requests]
    assert sent == [[*before, QUESTION], [*before, QUESTION, SAID, {"role": "user", "content": "a"}]]
    assert len(run.rows(TEACHER_ACTION)) == 2
    # The report and the page say what it was shown.
    words = (run.path / "report.txt").read_text()
    assert ("in place of the student's" in words) == ("system" in own)
    assert ("2 worked examples" in words) == ("examples" in own)
    found = section(run)
    dialogues = [block for block in found.blocks if isinstance(block, Dialogue)] if found else []
    shown = [[one["content"] for one in before if one != SYSTEM]] if own else []
    assert [[m.content for m in one.messages] for one in dialogues] == shown


def test_another_teacher_prompt_is_another_question(tmp_path: Path, rollouts: Run) -> None:
    plan = load_stage("replay-teachers").plan
    inputs = Inputs({"rollouts": [rollouts]})
    with serving(lambda body, earlier: Reply(body=answer("ls", cost=1e-6))) as server:
        for own in ({}, {"examples": EXAMPLES}, {}):
            runner.execute("replay-teachers", {"rollouts": rollouts}, config(server.url, **own), root=tmp_path)
        assert len(server.requests) == 4, "two prompts, two states each; the first prompt again is in the cache"
        costs = [plan(inputs, config(server.url, **own)).max_cost_usd for own in ({}, {"examples": EXAMPLES * 20})]
        assert costs[1] > 1.5 * costs[0]


def test_a_teacher_without_a_prompt_keeps_its_identity() -> None:
    """Its questions' seeds and the cache of its paid answers hang on it."""
    plain = TeacherConfig(name="one", model="m", base_url="http://localhost/v1")
    assert not {"system", "examples", "opening"} & plain.identity().keys()
    prompted = plain.model_copy(update={"system": ""})
    assert prompted.identity() == {**plain.identity(), "system": ""}


def test_examples_are_read_from_a_file_of_tables(tmp_path: Path) -> None:
    path = tmp_path / "few.toml"
    path.write_text("".join(f'[[examples]]\nuser = "{e["user"]}"\nassistant = "{e["assistant"]}"\n' for e in EXAMPLES))
    (teacher,) = config("http://localhost/v1", examples=str(path)).teachers
    assert [one.model_dump() for one in teacher.examples] == EXAMPLES
    path.write_text('[[shots]]\nuser = "a"\n')
    with pytest.raises(UsageError, match=r"holds shots, but \[\[examples\]\]"):
        config("http://localhost/v1", examples=str(path))


def test_the_student_with_examples_is_reported_as_a_dependent_vote(tmp_path: Path, rollouts: Run) -> None:
    rollouts.manifest.stage = "collect"
    rollouts.manifest.config["policy"] = {"model": "m", "base_url": "http://localhost/v1"}
    few = TeacherConfig(name="few", model="m", base_url="http://localhost/v1", examples=EXAMPLES)
    (note,) = dependent_votes([few], rollouts)
    assert "with a prompt of its own" in note and "not independent" in note
