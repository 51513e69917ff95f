"""extract-pairs with signal.rollouts: pairs tested by their own actions, on real files in a real sandbox."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.server import Reply, answer, serving

from stages import collect, extract_pairs, replay_teachers
from stages.envs.bash import fenced
from stages.envs.kata.env import KataEnv
from stages.envs.kata.recipes import Knowledge
from stages.envs.kata.tasks import OPERATIONS
from stages.errors import BadInput, Incomplete, UsageError
from stages.runs import runner
from stages.runs.kinds import CONTINUATION, PAIR
from stages.runs.run import Inputs, Run, read_manifest, write_manifest
from tests.stages.envs.kata.playing import author_texts, edit

TASKS = 12
"""Of eight operations."""
FEW = 8
"""Of seven: six units are needed for a test."""
HARD = ("ratio", "larger", "difference", "distance", "remainder", "xor")
"""The operations of seven of the tasks: six units, so that pairs on them alone can be judged."""
ALL = tuple(operation.name for operation in OPERATIONS)
Actor = Callable[[list[dict[str, str]]], str]


def script(of_task: Callable[[Any], list[str]]) -> Actor:
    """An agent that does one thing after the other, whatever it sees, and its last one again."""
    tasks = {KataEnv().reset(task)[-1]["content"]: task for task in KataEnv().tasks("train", TASKS, 0)}

    def act(messages: list[dict[str, str]]) -> str:
        texts = of_task(tasks[next(m["content"] for m in messages if m["role"] == "user")])
        return texts[min(sum(m["role"] == "assistant" for m in messages), len(texts) - 1)]

    return act


def author(*misconceived: str) -> Actor:
    """Look, edit, test, submit."""
    return script(lambda task: author_texts(task, Knowledge(misconceived=misconceived)))


def shared_wrong(task: Any) -> list[str]:
    """The right edit, but for hard tasks another wrong one than the student's, and always the same."""
    texts = author_texts(task, Knowledge())
    if task.family.partition("/")[0] in HARD:
        texts[1] = fenced(edit("0"))
    return texts


def looks_again(task: Any) -> list[str]:
    """A second look after the test, before the submission."""
    texts = author_texts(task, Knowledge(misconceived=HARD))
    return [*texts[:3], fenced("cat test_solution.py"), texts[3]]


ACTORS: dict[str, Actor] = {
    "right": author(),
    "never": author(*ALL),
    "sometimes": author(*HARD),
    "shared": script(shared_wrong),
    "looks": script(looks_again),
}


@pytest.fixture
def url() -> Iterator[str]:
    with serving(lambda body, n: Reply(body=answer(ACTORS[body["model"]](body["messages"])))) as server:
        yield server.url


def inputs(
    root: Path, url: str, student: str, teachers: list[str], *, tasks: int = TASKS, **policy: Any
) -> dict[str, Run]:
    served = {"model": student, "base_url": url, "max_tokens": 99, **policy}
    config = collect.Config(policy=served, tasks=tasks, samples=1)
    rollouts = Run(runner.execute("collect", {}, config, root=root).path)
    table = [
        {"name": f"{name}-{i}", "model": name, "base_url": url, "max_tokens": 99} for i, name in enumerate(teachers)
    ]
    asked = replay_teachers.Config(teachers=table)
    answers = Run(runner.execute("replay-teachers", {"rollouts": rollouts}, asked, root=root).path)
    return {"rollouts": rollouts, "teacher_actions": answers}


def extracted(root: Path, given: dict[str, Run], rollouts: int, **more: Any) -> Run:
    config = extract_pairs.Config(signal={"rollouts": rollouts})
    return Run(runner.execute("extract-pairs", given, config, root=root, **more).path)


def test_teachers_that_know_more_give_signal(tmp_path: Path, url: str) -> None:
    run = extracted(tmp_path, inputs(tmp_path, url, "never", ["right", "right", "never"], tasks=FEW), 2)
    pairs, rows = run.rows(PAIR), run.rows(CONTINUATION)
    found = run.manifest.summary
    assert found["verdict"] == "SIGNAL" and run.manifest.outcome.ok is True and run.manifest.outcome.exit_code == 0
    assert found["continued"]["chosen"] == 1.0 and found["continued"]["rejected"] == 0.0
    assert found["continued"]["low"] > 0 and found["continued"]["p_value"] < 0.05
    # All rollouts fail, so the heuristic about rollouts cannot tell anything, and is not the verdict.
    assert found["disagreement"] == "TOO LITTLE DATA" and len(pairs) == found["continued"]["tested"] == FEW
    assert len(rows) == 2 * 2 * FEW == run.manifest.counts["continuations"]
    passed = {(row["state_sha256"], row["action"], row["sample_idx"]): row["passed"] for row in rows}
    for pair in pairs:
        assert [passed[pair["state_sha256"], pair["chosen"], sample] for sample in range(2)] == [True, True]
        assert [passed[pair["state_sha256"], pair["rejected"], sample] for sample in range(2)] == [False, False]
    seeds = {(row["state_sha256"], row["sample_idx"]): set[int]() for row in rows}
    for row in rows:
        seeds[row["state_sha256"], row["sample_idx"]].add(row["seed"])
    assert all(len(both) == 1 for both in seeds.values()), "both sides are continued with the same seed"
    transcript = json.loads(rows[0]["transcript_json"])
    assert [message["role"] for message in transcript] == ["assistant", "user"] * 2 + ["assistant"]
    assert transcript[0]["content"] == rows[0]["action"] and rows[0]["num_steps"] == 3
    report = (run.path / "report.txt").read_text()
    assert "\nSIGNAL: the chosen action passes in 100.0%, the rejected one in 0.0%" in report
    assert "original criterion: FAIL, 1.00 pairs a trace (5 needed)" in report and "it does not decide: " in report


@pytest.mark.slow
def test_teachers_that_share_a_wrong_answer_give_none(tmp_path: Path, url: str) -> None:
    """By the rule that every other action in a failed rollout is right, these pairs were SIGNAL."""
    given = inputs(tmp_path, url, "sometimes", ["shared", "shared", "shared"])
    played, heuristic = extracted(tmp_path, given, 1), extracted(tmp_path, given, 0)
    assert heuristic.manifest.summary["verdict"] == "DISAGREEMENT TRACKS FAILURE"
    assert heuristic.manifest.summary["alignment"]["right"] == 1.0 and heuristic.manifest.outcome.ok is None
    assert len(heuristic.rows(PAIR)) > 0 and "SIGNAL:" not in (heuristic.path / "report.txt").read_text()
    found = played.manifest.summary
    assert found["disagreement"] == "DISAGREEMENT TRACKS FAILURE"
    assert found["verdict"] in ("UNDECIDED", "NO SIGNAL") and found["continued"]["units"] == len(HARD)
    assert (found["continued"]["difference"], found["continued"]["not_tested"]) == (0.0, {})
    # No continuation of a chosen action passes, so no pair is left, and the report counts them.
    assert played.rows(PAIR) == []
    assert found["dropped"]["chosen_continuations_fail"] == len(heuristic.rows(PAIR))
    assert "chosen_continuations_fail" in (played.path / "report.txt").read_text()


@pytest.mark.slow
def test_an_action_that_ends_the_episode_and_fails_is_not_chosen(tmp_path: Path, url: str) -> None:
    """After the same test teachers submit and the student looks again: only a right solution is worth submitting."""
    given = inputs(tmp_path, url, "looks", ["sometimes"] * 3, tasks=FEW)
    run = extracted(tmp_path, given, 0)
    failed = sum(task.family.partition("/")[0] in HARD for task in KataEnv().tasks("train", FEW, 0))
    assert 0 < failed < FEW
    assert run.manifest.counts["dropped_chosen_ends_in_failure"] == failed
    pairs = run.rows(PAIR)
    assert len(pairs) == FEW - failed and {pair["chosen"] for pair in pairs} == {fenced("submit")}
    # The environment grades a final action once, and no policy has to be asked about it.
    played = extracted(tmp_path, given, 3)
    ended = [row for row in played.rows(CONTINUATION) if row["action"] == fenced("submit")]
    assert len(ended) == len(pairs) and all(row["passed"] and row["num_steps"] == 1 for row in ended)
    assert len(played.rows(CONTINUATION)) == len(pairs) * (1 + 3)
    text = extract_pairs.Config(compare="canonical")
    by_text = Run(runner.execute("extract-pairs", given, text, root=tmp_path).path)
    assert len(by_text.rows(PAIR)) == FEW, "nothing is run, so nothing is known"


def test_continuations_are_saved_one_by_one_and_billed_once(tmp_path: Path) -> None:
    asked: list[str] = []
    broken = {"after": 10**6}

    def reply(body: dict[str, Any], n: int) -> Reply:
        if body["model"] == "never":
            asked.append(body["messages"][-1]["content"])
            if len(asked) > broken["after"]:
                return Reply(status=429, body={"error": {"message": "broken"}}, headers={"Retry-After": "0"})
        return Reply(body=answer(ACTORS[body["model"]](body["messages"]), prompt_tokens=450, completion_tokens=50))

    with serving(reply) as server:
        # An answer costs .15 USD, and its tokens are not known before: more is reserved for it.
        prices = {"usd_per_mtok_in": 300.0, "usd_per_mtok_out": 300.0, "max_attempts": 1}
        given = inputs(tmp_path, server.url, "never", ["right"] * 3, tasks=FEW, **prices)
        before, broken["after"] = len(asked), len(asked) + 20
        with pytest.raises(Incomplete, match="continuations failed"):
            extracted(tmp_path, given, 1)
        (folder,) = [path.parent for path in (tmp_path / "extract-pairs").glob("*/manifest.json")]
        stopped = read_manifest(folder)
        assert stopped.status == "incomplete" and stopped.cost_usd == pytest.approx(20 * 0.15)
        assert 0 < stopped.counts["continuations_failed"] < stopped.counts["continuations"] == 2 * FEW
        broken["after"] = 10**6
        resumed = extracted(tmp_path, given, 1, resume=True)
        assert resumed.manifest.counts["continuations_failed"] == 0
        assert resumed.manifest.summary["verdict"] == "SIGNAL"
        # Two requests for each continuation, and none that was answered is asked again.
        assert resumed.manifest.cost_usd == pytest.approx(2 * 2 * FEW * 0.15) and before == FEW * 4
        # All first answers cost 4.80 USD, which may be bought before any second one, and all of both 9.60 USD.
        with pytest.raises(Incomplete) as ended:
            extracted(tmp_path / "limited", given, 2, max_cost=8.0)
        (limited,) = [path.parent for path in (tmp_path / "limited" / "extract-pairs").glob("*/manifest.json")]
        stopped = read_manifest(limited)
        assert 0 < stopped.cost_usd + stopped.possibly_usd <= 8.0, str(ended.value)
        assert 0 < sum("continuation" in unit for unit in Run(limited).units()) < 2 * 2 * FEW


def test_a_greedy_policy_is_continued_once(tmp_path: Path, url: str) -> None:
    run = extracted(tmp_path, inputs(tmp_path, url, "never", ["right"] * 3, tasks=2, temperature=0.0), 5)
    assert len(run.rows(CONTINUATION)) == 2 * 2
    assert run.manifest.summary["verdict"] == "TOO LITTLE DATA" and run.manifest.outcome.exit_code == 0


def test_what_cannot_be_continued_is_refused_before_any_work(tmp_path: Path, url: str) -> None:
    given = inputs(tmp_path, url, "never", ["right"] * 3, tasks=2)
    config = extract_pairs.Config(signal={"rollouts": 1})
    plan = extract_pairs.plan(Inputs({name: [run] for name, run in given.items()}), config)
    assert plan.max_completion_tokens > 0 and "continuations" in plan.notes[0]
    manifest = given["rollouts"].manifest
    changed = manifest.model_copy(update={"identity": {"policy": {"weights": "others"}}})
    write_manifest(given["rollouts"].path, changed)
    with pytest.raises(BadInput, match="has changed since"):
        extract_pairs.plan(Inputs({**given, "rollouts": [Run(given["rollouts"].path)]}), config)
    elsewhere = manifest.model_copy(update={"stage": "import"})
    write_manifest(given["rollouts"].path, elsewhere)
    imported = Inputs({"rollouts": [Run(given["rollouts"].path)]})
    with pytest.raises(UsageError, match=r"composer collect.*import"):
        extract_pairs.plan(imported, config)
