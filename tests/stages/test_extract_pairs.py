"""extract-pairs on real files in a real sandbox: equal outcomes are equal actions, every drop has a reason."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.server import Reply, answer, serving

from stages import collect, extract_pairs, replay_teachers
from stages.envs.kata.env import KataEnv
from stages.envs.kata.recipes import Knowledge
from stages.envs.kata.tasks import OPERATIONS
from stages.errors import BadInput
from stages.rollouts.trace import pairs_with_states
from stages.runs import runner
from stages.runs.kinds import PAIR, TEACHER_ACTION
from stages.runs.run import Inputs, Run
from tests.stages.envs.kata.playing import author_texts

EVERYTHING = Knowledge()
NOTHING = Knowledge(misconceived=tuple(operation.name for operation in OPERATIONS))
Actor = Callable[[list[dict[str, str]]], str]


def actor(knowledge: Knowledge, spell: Callable[[str], str] = lambda text: text) -> Actor:
    """Somebody of this knowledge: looks, edits, tests, submits."""
    tasks = {KataEnv().reset(task)[-1]["content"]: task for task in KataEnv().tasks("train", 3, 0)}

    def act(messages: list[dict[str, str]]) -> str:
        task = tasks[next(m["content"] for m in messages if m["role"] == "user")]
        texts = author_texts(task, knowledge)
        done = sum(m["role"] == "assistant" for m in messages)
        return spell(texts[min(done, len(texts) - 1)])

    return act


def other_spelling(text: str) -> str:
    """The same edit behind a blank comment and a needless pair of brackets."""
    return text.replace("return .*|return ", "return .*|return (").replace("|' solution.py", ")|' solution.py")


ACTORS: dict[str, Actor] = {
    "student": actor(NOTHING),
    "right": actor(EVERYTHING),
    "spelled": actor(EVERYTHING, other_spelling),
    "wrong": actor(NOTHING),
    "mute": lambda messages: "I would rather not.",
}


@pytest.fixture
def url() -> Any:
    with serving(lambda body, n: Reply(body=answer(ACTORS[body["model"]](body["messages"])))) as server:
        yield server.url


def rollouts_of(root: Path, url: str, student: str) -> Run:
    config = collect.Config(policy={"model": student, "base_url": url, "max_tokens": 99}, tasks=3, samples=1)
    return Run(runner.execute("collect", {}, config, root=root).path)


def extracted(root: Path, url: str, student: str, teachers: list[str], **settings: Any) -> Run:
    rollouts = rollouts_of(root, url, student)
    table = [
        {"name": f"{name}-{i}", "model": name, "base_url": url, "max_tokens": 99} for i, name in enumerate(teachers)
    ]
    answers = Run(
        runner.execute(
            "replay-teachers", {"rollouts": rollouts}, replay_teachers.Config(teachers=table), root=root
        ).path
    )
    inputs = {"rollouts": rollouts, "teacher_actions": answers}
    return Run(runner.execute("extract-pairs", inputs, extract_pairs.Config(**settings), root=root).path)


def test_majority_over_student_across_spellings(tmp_path: Path, url: str) -> None:
    run = extracted(tmp_path, url, "student", ["right", "spelled", "wrong"])
    rows = [row for row in run.rows(PAIR) if "sed" in row["chosen"]]
    assert len(rows) == 3
    assert all(row["rule"] == "majority_over_student" and row["compared_by"] == "outcome" for row in rows)
    assert all(row["votes_chosen"] == 2 and row["votes_rejected"] == 1 for row in rows)
    assert all(row["prompt_token_ids"] is None and row["messages_json"] for row in pairs_with_states(run))


def test_text_alone_finds_no_majority_where_outcomes_do(tmp_path: Path, url: str) -> None:
    run = extracted(tmp_path, url, "student", ["right", "spelled", "wrong"], compare="canonical")
    assert all("sed" not in row["chosen"] or row["rejected_by"] != "student" for row in run.rows(PAIR))
    assert not [row for row in run.rows(PAIR) if row["rule"] == "majority_over_student" and "sed" in row["chosen"]]


def test_student_over_minority(tmp_path: Path, url: str) -> None:
    run = extracted(tmp_path, url, "right", ["right", "spelled", "wrong"])
    rows = run.rows(PAIR)
    assert {row["rule"] for row in rows} == {"student_over_minority"}
    assert {row["rejected_by"] for row in rows} == {"wrong-2"}


def test_everything_dropped_has_a_reason(tmp_path: Path, url: str) -> None:
    run = extracted(tmp_path, url, "right", ["right", "mute", "wrong"])
    dropped = run.manifest.summary["dropped"]
    counts = run.manifest.counts
    assert counts["planned"] == sum(dropped.values()) + len(run.rows(PAIR)) - dropped.get("duplicate", 0)
    assert dropped["no_majority"] == 3
    assert counts["dropped_no_majority"] == 3


def test_equal_rows_when_run_again(tmp_path: Path, url: str) -> None:
    run = extracted(tmp_path, url, "student", ["right", "right", "wrong"])
    before = (run.path / "pairs.parquet").read_bytes()
    inputs = {name: Run(Path(refs[0].path)) for name, refs in run.manifest.inputs.items()}
    again = runner.execute("extract-pairs", inputs, extract_pairs.Config(), root=tmp_path / "again")
    assert (again.path / "pairs.parquet").read_bytes() == before


def test_answers_to_other_rollouts_are_refused(tmp_path: Path, url: str) -> None:
    run = extracted(tmp_path, url, "student", ["right", "right", "wrong"])
    answers = Run(Path(run.manifest.inputs["teacher_actions"][0].path))
    others = rollouts_of(tmp_path, url, "right")
    with pytest.raises(BadInput, match="answers the rollouts of"):
        extract_pairs.plan(Inputs({"rollouts": others, "teacher_actions": answers}), extract_pairs.Config())


def test_answers_that_were_cut_off_or_malformed_are_no_side(tmp_path: Path, url: str) -> None:
    """Half a command of a teacher used to become the rejected side of a pair."""
    run = extracted(tmp_path, url, "right", ["right", "right", "mute"])
    assert run.rows(PAIR) == []

    def cut(body: dict[str, Any], n: int) -> Reply:
        said = answer(ACTORS["wrong" if body["model"] == "cut" else "right"](body["messages"]))
        said["choices"][0]["finish_reason"] = "length" if body["model"] == "cut" else "stop"
        return Reply(body=said)

    with serving(cut) as server:
        run = extracted(tmp_path / "cut", server.url, "right", ["right", "right", "cut"])
    assert run.rows(PAIR) == []


def test_samples_of_a_teacher_are_one_vote(tmp_path: Path, url: str) -> None:
    """Asked four times, one wrong teacher would outvote two others."""
    rollouts = rollouts_of(tmp_path, url, "student")
    table = [
        {"name": name, "model": name, "base_url": url, "max_tokens": 99, "temperature": 1.0}
        for name in ("right", "spelled", "wrong")
    ]
    config = replay_teachers.Config(teachers=table, samples=3)
    answers = Run(runner.execute("replay-teachers", {"rollouts": rollouts}, config, root=tmp_path).path)
    inputs = {"rollouts": rollouts, "teacher_actions": answers}
    run = Run(runner.execute("extract-pairs", inputs, extract_pairs.Config(), root=tmp_path).path)
    rows = [row for row in run.rows(PAIR) if "sed" in row["chosen"]]
    assert len(rows) == 3
    assert {(row["votes_chosen"], row["votes_rejected"], row["num_teachers"]) for row in rows} == {(2.0, 1.0, 3)}


def test_a_kept_pair_has_a_price(tmp_path: Path) -> None:
    def reply(body: dict[str, Any], n: int) -> Reply:
        dear = {"cost": 0.5} if body["model"] == "right" else {"cost": 0.0}
        return Reply(body=answer(ACTORS[body["model"]](body["messages"]), **dear))

    with serving(reply) as server:
        run = extracted(tmp_path, server.url, "student", ["right", "spelled", "wrong"])
    answers = Run(Path(run.manifest.inputs["teacher_actions"][0].path)).rows(TEACHER_ACTION)
    spent = sum(row["cost_usd"] for row in answers)
    assert spent > 0
    summary = run.manifest.summary
    assert summary["usd_per_pair"]["all"] == pytest.approx(spent / len(run.rows(PAIR)))
    assert (
        summary["usd_per_pair"]["right-0"] == summary["usd_per_pair"]["all"] and summary["usd_per_pair"]["wrong-2"] == 0
    )
    assert "USD a kept pair" in (run.path / "report.txt").read_text()
    assert sum(row["cost_usd"] for row in run.rows(PAIR)) <= spent
    for row in run.rows(PAIR):
        assert row["chosen_by"] == ["right-0", "spelled-1"] and row["rejected_by"] == "student"
        assert row["served_models"] == ["right", "spelled"] and row["cost_usd"] == pytest.approx(0.5)


def test_a_pair_for_the_student_names_who_agreed(tmp_path: Path, url: str) -> None:
    run = extracted(tmp_path, url, "right", ["right", "spelled", "wrong"])
    rows = run.rows(PAIR)
    assert rows and all(row["chosen_by"] == ["student", "right-0", "spelled-1"] for row in rows)
    assert {row["rejected_by"] for row in rows} == {"wrong-2"} and {row["cost_usd"] for row in rows} == {None}
