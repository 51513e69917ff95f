"""extract-pairs: votes of teachers on real files in a real sandbox, continuations of pairs, and imported groups."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from needs import REAL, needs
from support.server import Reply, answer, serving
from support.transcripts import INSTANCE, action, assistant, call, document, imported, jsonl, prediction, tool, user

from composer_stages import collect, extract_pairs, replay_teachers
from composer_stages.envs.bash import fenced
from composer_stages.envs.kata.env import KataEnv
from composer_stages.envs.kata.tasks import OPERATIONS
from composer_stages.errors import BadInput, Incomplete, UsageError
from composer_stages.pairs.actions import canonical
from composer_stages.pairs.report import judge
from composer_stages.rollouts.trace import pairs_with_states
from composer_stages.runs import runner
from composer_stages.runs.catalog import assign_inputs
from composer_stages.runs.kinds import CONTINUATION, PAIR, ROLLOUT, TASK, TEACHER_ACTION
from composer_stages.runs.run import Inputs, Run, read_manifest, write_manifest
from tests.stages.envs.kata.playing import author_texts, edit

MOST = 12
"""Tasks, of eight operations."""
FEW = 8
"""Tasks of seven operations: six units are needed for a test."""
TWO = 2
HARD = ("ratio", "larger", "difference", "distance", "remainder", "xor")
"""The operations of seven of the tasks: six units, so that pairs on them alone can be judged."""
Actor = Callable[[list[dict[str, str]]], str]


def script(of_task: Callable[[Any], list[str]]) -> Actor:
    """An agent that does one thing after the other, whatever it sees, and its last one again."""
    tasks = {KataEnv().reset(task)[-1]["content"]: task for task in KataEnv().tasks("train", MOST, 0)}

    def act(messages: list[dict[str, str]]) -> str:
        texts = of_task(tasks[next(m["content"] for m in messages if m["role"] == "user")])
        return texts[min(sum(m["role"] == "assistant" for m in messages), len(texts) - 1)]

    return act


def author(*misconceived: str) -> Actor:
    """Look, edit, test, submit."""
    return script(lambda task: author_texts(task, misconceived))


def other_spelling(task: Any) -> list[str]:
    """The right edit behind a needless pair of brackets."""
    texts = author_texts(task)
    return [text.replace("return .*|return ", "return .*|return (").replace("|' solu", ")|' solu") for text in texts]


def shared_wrong(task: Any) -> list[str]:
    """The right edit, but for hard tasks another wrong one than the student's, and always the same."""
    texts = author_texts(task)
    if task.family.partition("/")[0] in HARD:
        texts[1] = fenced(edit("0"))
    return texts


def looks_again(task: Any) -> list[str]:
    """A second look after the test, before the submission."""
    texts = author_texts(task, HARD)
    return [*texts[:3], fenced("cat test_solution.py"), texts[3]]


NEVER = author(*(operation.name for operation in OPERATIONS))
ACTORS: dict[str, Actor] = {
    "right": author(),
    "spelled": script(other_spelling),
    "student": NEVER,
    "wrong": NEVER,
    "sometimes": author(*HARD),
    "shared": script(shared_wrong),
    "looks": script(looks_again),
    "mute": lambda messages: "I would rather not.",
}
VOTERS = ("right", "spelled", "wrong")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(lambda body, n: Reply(body=answer(ACTORS[body["model"]](body["messages"])))) as server:
        yield server.url


def answered(
    root: Path, url: str, student: str, teachers: tuple[str, ...], *, tasks: int = TWO, **policy: Any
) -> dict[str, Run]:
    """Rollouts and the teachers' answers; below one root equal ones are made once."""
    served = {"model": student, "base_url": url, "max_tokens": 99, **policy}
    config = collect.Config(policy=served, tasks=tasks, samples=1)
    rollouts = Run(runner.execute("collect", {}, config, root=root).path)
    about = {"base_url": url, "max_tokens": 99}
    table = [{"name": f"{name}-{i}", "model": name, **about} for i, name in enumerate(teachers)]
    asked = replay_teachers.Config(teachers=table)
    answers = Run(runner.execute("replay-teachers", {"rollouts": rollouts}, asked, root=root).path)
    return {"rollouts": rollouts, "teacher_actions": answers}


def extracted(root: Path, given: dict[str, Run] | Run, signal: int = 0, resume: bool = False, **more: Any) -> Run:
    """A run of extract-pairs over these inputs, with so many continuations of each action, and few pairs asked for."""
    max_cost = more.pop("max_cost", None)
    inputs = {"rollouts": given} if isinstance(given, Run) else given
    config = extract_pairs.Config(**{"signal": {"rollouts": signal}, "min_pairs_per_rollout": 0.0, **more})
    return Run(runner.execute("extract-pairs", inputs, config, root=root, resume=resume, max_cost=max_cost).path)


# The criterion

SHORT = {"pairs_per_rollout": 0.5, "rollouts": 100, "words": {"kl": 0.9, "shuffled_p95": 0.3, "p_value": 0.002}}
LIKE_RANDOM = {"kl": 0.2, "shuffled_p95": 0.3, "p_value": 0.3}


@pytest.mark.parametrize(
    ("change", "evidence", "verdict", "exit_code"),
    [
        ({"pairs_per_rollout": 5.0}, "DISAGREEMENT TRACKS FAILURE", "DISAGREEMENT TRACKS FAILURE", 0),
        ({"pairs_per_rollout": 5.0}, "SIGNAL", "SIGNAL", 0),
        ({"pairs_per_rollout": 5.0}, "UNDECIDED", "UNDECIDED", 3),
        ({"pairs_per_rollout": 5.0}, "TOO LITTLE DATA", "TOO LITTLE DATA", 3),
        ({"pairs_per_rollout": 4.99}, "SIGNAL", "FAIL", 1),
        ({"steps": 5000}, "SIGNAL", "FAIL", 1),
        ({"pairs_per_rollout": 5.0, "words": LIKE_RANDOM}, "SIGNAL", "FAIL", 1),
        ({"pairs_per_rollout": 5.0, "words": None}, "SIGNAL", "TOO LITTLE DATA", 3),
        ({"rollouts": 5}, "SIGNAL", "TOO LITTLE DATA", 3),
        ({}, "NO SIGNAL", "NO SIGNAL", 1),
    ],
)
def test_the_criterion_decides(change: dict[str, Any], evidence: str, verdict: str, exit_code: int) -> None:
    found = judge(Path(), {**SHORT, **change, "evidence": evidence}, extract_pairs.Config())
    assert (found.summary["verdict"], found.exit_code) == (verdict, exit_code)
    assert found.ok == {0: True if evidence == "SIGNAL" else None, 1: False, 3: None}[exit_code]
    assert "pairs a rollout (5 needed: min_pairs_per_rollout)" in found.line
    assert ("of random pairs 0.300" in found.line) == (change.get("words", LIKE_RANDOM) is not None)


# Votes of teachers


def edits(run: Run) -> list[dict[str, Any]]:
    return [row for row in run.rows(PAIR) if "sed" in row["chosen"]]


def test_equal_outcomes_are_equal_actions_whatever_their_spelling(artifacts: Path, url: str) -> None:
    given = answered(artifacts, url, "student", VOTERS)
    run = extracted(artifacts, given)
    rows = edits(run)
    assert len(rows) == TWO
    assert all(row["rule"] == "majority_over_student" and row["compared_by"] == "outcome" for row in rows)
    assert {(row["votes_chosen"], row["votes_rejected"], row["num_teachers"]) for row in rows} == {(2.0, 1.0, 3)}
    assert all(row["prompt_token_ids"] is None and row["messages_json"] for row in pairs_with_states(run))
    by_text = extracted(artifacts, given, compare="canonical")
    assert not [row for row in edits(by_text) if row["rule"] == "majority_over_student"]
    assert all(row["rejected_by"] != "student" for row in edits(by_text))


def test_equal_inputs_give_equal_rows(tmp_path: Path, artifacts: Path, url: str) -> None:
    given = answered(artifacts, url, "student", VOTERS)
    one, other = ((extracted(root, given).path / "pairs.parquet").read_bytes() for root in (artifacts, tmp_path))
    assert one == other


def test_the_student_over_a_minority_names_who_agreed(artifacts: Path, url: str) -> None:
    rows = extracted(artifacts, answered(artifacts, url, "right", VOTERS)).rows(PAIR)
    assert {row["rule"] for row in rows} == {"student_over_minority"}
    assert all(row["chosen_by"] == ["student", "right-0", "spelled-1"] for row in rows)
    assert {row["rejected_by"] for row in rows} == {"wrong-2"} and {row["cost_usd"] for row in rows} == {None}


def test_everything_dropped_has_a_reason(artifacts: Path, url: str) -> None:
    run = extracted(artifacts, answered(artifacts, url, "right", ("right", "mute", "wrong")))
    dropped, counts = run.manifest.summary["dropped"], run.manifest.counts
    assert counts["planned"] == sum(dropped.values()) + len(run.rows(PAIR)) - dropped.get("duplicate", 0)
    assert dropped["no_majority"] == counts["dropped_no_majority"] == TWO


def test_a_majority_is_not_followed_against_a_rollout_that_passed(artifacts: Path, url: str) -> None:
    """Teachers that share a wrong edit outvoted a student that had solved its tasks."""
    given = answered(artifacts, url, "right", ("wrong", "wrong", "right"))
    kept, every = extracted(artifacts, given), extracted(artifacts, given, outcome="ignore")
    passed = {row["rollout_id"] for row in given["rollouts"].rows(ROLLOUT) if row["reward"] > 0}
    taught = [row for row in every.rows(PAIR) if row["rule"] == "majority_over_student"]
    assert len(passed) == len(taught) == TWO and {row["rollout_id"] for row in taught} == passed
    assert [row for row in every.rows(PAIR) if row not in taught] == kept.rows(PAIR)
    assert kept.manifest.summary["dropped"]["rejected_action_passed"] == TWO
    assert kept.manifest.counts["dropped_rejected_action_passed"] == TWO
    assert "rejected_action_passed" in (kept.path / "report.txt").read_text()
    # The verdict is on all votes: dropping those that outcomes contradict would leave those that they support.
    assert kept.manifest.summary["alignment"] == every.manifest.summary["alignment"]
    measured = extracted(artifacts, given, 1).manifest.summary["dropped"]
    assert measured == {"chosen_continuations_fail": TWO, "unanimous": 3 * TWO}, (
        "both actions were played, which decides"
    )
    # A failed student is corrected as before.
    corrected = extracted(artifacts, answered(artifacts, url, "student", VOTERS))
    assert "rejected_action_passed" not in corrected.manifest.summary["dropped"]


def test_answers_to_other_rollouts_are_refused(artifacts: Path, url: str) -> None:
    student, right = (answered(artifacts, url, name, VOTERS) for name in ("student", "right"))
    mixed = {"rollouts": right["rollouts"], "teacher_actions": student["teacher_actions"]}
    with pytest.raises(BadInput, match="answers the rollouts of"):
        extract_pairs.STAGE.plan(Inputs(mixed), extract_pairs.Config())


def test_truncated_answers_are_no_side_of_a_pair(tmp_path: Path) -> None:
    """Half a command of a teacher used to become the rejected side of a pair."""

    def cut(body: dict[str, Any], n: int) -> Reply:
        said = answer(ACTORS[body["model"]](body["messages"]))
        said["choices"][0]["finish_reason"] = "length" if body["model"] == "wrong" else "stop"
        return Reply(body=said)

    with serving(cut) as server:
        given = answered(tmp_path, server.url, "right", ("right", "right", "wrong"), tasks=1)
        assert extracted(tmp_path, given).rows(PAIR) == []


def test_a_kept_pair_has_a_price(tmp_path: Path) -> None:
    def reply(body: dict[str, Any], n: int) -> Reply:
        cost = 0.5 if body["model"] == "right" else 0.0
        return Reply(body=answer(ACTORS[body["model"]](body["messages"]), cost=cost))

    with serving(reply) as server:
        given = answered(tmp_path, server.url, "student", VOTERS, tasks=1)
        run = extracted(tmp_path, given)
    spent, rows = sum(row["cost_usd"] for row in given["teacher_actions"].rows(TEACHER_ACTION)), run.rows(PAIR)
    prices = run.manifest.summary["usd_per_pair"]
    assert spent > 0 and prices["all"] == prices["right-0"] == pytest.approx(spent / len(rows))
    assert prices["wrong-2"] == 0 and "USD a kept pair" in (run.path / "report.txt").read_text()
    assert sum(row["cost_usd"] for row in rows) <= spent
    for row in rows:
        assert row["chosen_by"] == ["right-0", "spelled-1"] and row["rejected_by"] == "student"
        assert row["served_models"] == ["right", "spelled"] and row["cost_usd"] == pytest.approx(0.5)


# Continuations: pairs tested by their own actions


def test_teachers_that_know_more_give_signal(artifacts: Path, url: str) -> None:
    run = extracted(artifacts, answered(artifacts, url, "student", ("right", "right", "wrong"), tasks=FEW), 1)
    pairs, rows = run.rows(PAIR), run.rows(CONTINUATION)
    found = run.manifest.summary
    assert found["evidence"] == "SIGNAL"
    assert found["continued"]["chosen"] == 1.0 and found["continued"]["rejected"] == 0.0
    assert found["continued"]["low"] > 0 and found["continued"]["p_value"] < 0.05
    # All rollouts fail, so the heuristic about rollouts cannot tell anything, and is not the verdict.
    assert found["disagreement"] == "TOO LITTLE DATA" and len(pairs) == found["continued"]["tested"] == FEW
    assert len(rows) == 2 * FEW == run.manifest.counts["continuations"]
    passed = {(row["state_sha256"], row["action"]): row["passed"] for row in rows}
    for pair in pairs:
        assert [passed[pair["state_sha256"], pair[side]] for side in ("chosen", "rejected")] == [True, False]
    assert len({(row["state_sha256"], row["seed"]) for row in rows}) == FEW, "both sides go on with the same seed"
    transcript = json.loads(rows[0]["transcript_json"])
    assert [message["role"] for message in transcript] == ["assistant", "user"] * 2 + ["assistant"]
    assert transcript[0]["content"] == rows[0]["action"] and rows[0]["num_steps"] == 3
    report = (run.path / "report.txt").read_text()
    said = ("\nSIGNAL: ", "criterion: FAIL, 1.00 pairs a rollout (0 needed", "p = 0.150")
    assert all(words in report for words in said)


@pytest.mark.slow
def test_teachers_that_share_a_wrong_answer_give_none(artifacts: Path, url: str) -> None:
    """By the rule that every other action in a failed rollout is right, these pairs were SIGNAL."""
    given = answered(artifacts, url, "sometimes", ("shared", "shared", "shared"), tasks=MOST)
    played, heuristic = extracted(artifacts, given, 1), extracted(artifacts, given)
    assert heuristic.manifest.summary["verdict"] == "DISAGREEMENT TRACKS FAILURE"
    assert heuristic.manifest.summary["alignment"]["right"] == 1.0 and heuristic.manifest.outcome.ok is None
    assert len(heuristic.rows(PAIR)) > 0 and "SIGNAL:" not in (heuristic.path / "report.txt").read_text()
    found = played.manifest.summary
    assert found["disagreement"] == "DISAGREEMENT TRACKS FAILURE"
    assert found["evidence"] in ("UNDECIDED", "NO SIGNAL") and found["continued"]["units"] == len(HARD)
    assert (found["continued"]["difference"], found["continued"]["not_tested"]) == (0.0, {})
    # No continuation of a chosen action passes, so no pair is left, and the report counts them.
    assert played.rows(PAIR) == []
    assert found["dropped"]["chosen_continuations_fail"] == len(heuristic.rows(PAIR))
    assert "chosen_continuations_fail" in (played.path / "report.txt").read_text()


@pytest.mark.slow
def test_an_action_that_ends_the_rollout_and_fails_is_not_chosen(artifacts: Path, url: str) -> None:
    """After the same test teachers submit and the student looks again: only a right solution is worth submitting."""
    given = answered(artifacts, url, "looks", ("sometimes",) * 3, tasks=FEW)
    run = extracted(artifacts, given, outcome="ignore")  # the second look did no harm where the solution is right
    failed = sum(task.family.partition("/")[0] in HARD for task in KataEnv().tasks("train", FEW, 0))
    assert 0 < failed < FEW
    assert run.manifest.counts["dropped_chosen_ends_in_failure"] == failed
    pairs = run.rows(PAIR)
    assert len(pairs) == FEW - failed and {pair["chosen"] for pair in pairs} == {fenced("submit")}
    # The environment grades a final action once, and no policy has to be asked about it.
    played = extracted(artifacts, given, 3)
    ended = [row for row in played.rows(CONTINUATION) if row["action"] == fenced("submit")]
    assert len(ended) == len(pairs) and all(row["passed"] and row["num_steps"] == 1 for row in ended)
    assert len(played.rows(CONTINUATION)) == len(pairs) * (1 + 3)
    by_text = extracted(artifacts, given, compare="canonical", outcome="ignore")
    assert len(by_text.rows(PAIR)) == FEW, "nothing is run or known"


def test_continuations_are_saved_one_by_one_and_billed_once(tmp_path: Path) -> None:
    asked: list[str] = []
    broken = {"after": 10**6}

    def reply(body: dict[str, Any], n: int) -> Reply:
        if body["model"] == "student":
            asked.append(body["messages"][-1]["content"])
            if len(asked) > broken["after"]:
                return Reply(status=429, body={"error": {"message": "broken"}}, headers={"Retry-After": "0"})
        return Reply(body=answer(ACTORS[body["model"]](body["messages"]), prompt_tokens=450, completion_tokens=50))

    with serving(reply) as server:
        # An answer costs .15 USD, and its tokens are not known before: more is reserved for it.
        prices = {"usd_per_mtok_in": 300.0, "usd_per_mtok_out": 300.0, "max_attempts": 1}
        given = answered(tmp_path, server.url, "student", ("right",) * 3, **prices)
        before, broken["after"] = len(asked), len(asked) + 5
        with pytest.raises(Incomplete, match="continuations failed"):
            extracted(tmp_path, given, 1)
        (folder,) = [path.parent for path in (tmp_path / "extract-pairs").glob("*/manifest.json")]
        stopped = read_manifest(folder)
        assert stopped.status == "incomplete" and stopped.cost_usd == pytest.approx(5 * 0.15)
        assert 0 < stopped.counts["continuations_failed"] < stopped.counts["continuations"] == 2 * TWO
        broken["after"] = 10**6
        resumed = extracted(tmp_path, given, 1, resume=True)
        assert resumed.manifest.counts["continuations_failed"] == 0
        # Two requests for each continuation, and none that was answered is asked again.
        assert resumed.manifest.cost_usd == pytest.approx(2 * 2 * TWO * 0.15) and before == TWO * 4
        # All first answers cost 1.20 USD, which may be bought before any second one, and all of both 2.40 USD.
        with pytest.raises(Incomplete) as ended:
            extracted(tmp_path / "limited", given, 2, max_cost=2.0)
        (limited,) = [path.parent for path in (tmp_path / "limited" / "extract-pairs").glob("*/manifest.json")]
        stopped = read_manifest(limited)
        assert 0 < stopped.cost_usd + stopped.possibly_usd <= 2.0, str(ended.value)
        assert 0 < sum("continuation" in unit for unit in Run(limited).units()) < 2 * 2 * TWO


def test_a_greedy_policy_is_continued_once(artifacts: Path, url: str) -> None:
    run = extracted(artifacts, answered(artifacts, url, "student", ("right",) * 3, tasks=1, temperature=0.0), 5)
    assert len(run.rows(CONTINUATION)) == 2
    assert run.manifest.summary["verdict"] == "TOO LITTLE DATA" and run.manifest.outcome.exit_code == 3


def test_rollouts_that_cannot_be_continued_are_refused_in_the_plan(tmp_path: Path, url: str) -> None:
    given = answered(tmp_path, url, "student", ("right",), tasks=1)
    config = extract_pairs.Config(signal={"rollouts": 1})
    plan = extract_pairs.STAGE.plan(Inputs({name: [run] for name, run in given.items()}), config)
    assert plan.max_completion_tokens > 0 and "continuations" in plan.notes[0]
    path, manifest = given["rollouts"].path, given["rollouts"].manifest
    write_manifest(path, manifest.model_copy(update={"identity": {"policy": {"weights": "others"}}}))
    with pytest.raises(BadInput, match="has changed since"):
        extract_pairs.STAGE.plan(Inputs({**given, "rollouts": [Run(path)]}), config)
    write_manifest(path, manifest.model_copy(update={"stage": "import"}))
    with pytest.raises(UsageError, match=r"composer collect.*import"):
        extract_pairs.STAGE.plan(Inputs({"rollouts": [Run(path)]}), config)


# Imported groups: no teachers needed, pairs in every state that several rollouts share


def completions(folder: Path, model: str, *rows: tuple[str, list[dict[str, Any]], float]) -> None:
    """A model's file of verifiers: question, what was said, reward."""
    made = [{"prompt": [user(q)], "answer": "x", "completion": said, "reward": reward} for q, said, reward in rows]
    jsonl(folder / f"{model}.results.jsonl", *made)
    document(folder / f"{model}.metadata.json", {"env": "wiki", "model": model})


@pytest.fixture
def boat(artifacts: Path) -> Run:
    """Three models search for the boat and are right; a fourth answers at once and is wrong."""
    for number, name in enumerate("abc"):
        calls = [json.dumps(call("search", '{"query": "boat"}', f"call_{number}"))]
        said = [assistant("", tool_calls=calls), tool("a ship"), assistant(f"Hollow ship, says {name}.")]
        completions(artifacts / "boat", name, ("What?", said, 1.0))
    completions(artifacts / "boat", "d", ("What?", [assistant("A bird.")], 0.0))
    return imported(artifacts, artifacts / "boat")


def test_a_group_of_models_needs_no_teachers(artifacts: Path, boat: Run) -> None:
    run = extracted(artifacts, boat)
    pairs, counts = run.rows(PAIR), run.manifest.counts
    assert [(p["rule"], p["rejected"], p["num_teachers"]) for p in pairs] == [("student_over_minority", "A bird.", 3)]
    assert counts["planned"] == 7 and counts["dropped_duplicate"] == 3  # each student says the same
    assert counts["dropped_too_few_rollouts"] == 1  # one rollout was wrong, which may be luck
    assert "Rewards decide between no two actions: fewer than 7 rollouts" in (run.path / "report.txt").read_text()
    (said,) = (json.loads(p["messages_json"]) for p in pairs_with_states(run))
    assert {p["chosen"] for p in pairs} == {action("", ("search", '{"query": "boat"}'))} and said == [user("What?")]
    assert run.manifest.summary["verdict"] == "TOO LITTLE DATA" and run.manifest.outcome.exit_code == 3
    report = (run.path / "report.txt").read_text()
    assert "1 task, 4 models, 2 of 2 states shared" in report and "\nTOO LITTLE DATA: " in report


def one_differs(root: Path, wrong_where_it_differs: bool) -> Run:
    """Twelve questions. The model d differs from three others in six, and is wrong in these or in the other six."""
    for name in "abcd":
        rows = []
        for number in range(12):
            differs = name == "d" and number % 2 == 0
            wrong = name == "d" and differs == wrong_where_it_differs
            said = [assistant(f"No. {number}." if differs else f"Number {number}.")]
            rows.append((f"What is {number}?", said, 0.0 if wrong else 1.0))
        completions(root / "in", name, *rows)
    return imported(root, root / "in")


@pytest.mark.parametrize(
    ("wrong_where_it_differs", "verdict", "right", "exit_code"),
    [(True, "DISAGREEMENT TRACKS FAILURE", 1.0, 0), (False, "DISAGREEMENT NOT SHOWN TO TRACK FAILURE", 0.0, 3)],
)
def test_groups_get_the_verdict_that_votes_and_rewards_allow(
    tmp_path: Path, wrong_where_it_differs: bool, verdict: str, right: float, exit_code: int
) -> None:
    run = extracted(tmp_path, one_differs(tmp_path, wrong_where_it_differs), student="d")
    found = run.manifest.summary
    assert (found["verdict"], run.manifest.outcome.exit_code) == (verdict, exit_code)
    assert (found["alignment"]["pairs"], found["alignment"]["right"]) == (6, right)
    report = (run.path / "report.txt").read_text()
    assert f"\n{verdict}: " in report and "cannot be continued" in report and "\ncriterion: PASS" in report


@pytest.mark.parametrize(("density", "verdict"), [(0.1, "SIGNAL"), (0.09, "FAIL")])
def test_rollouts_of_one_step_need_a_pair_in_ten(density: float, verdict: str) -> None:
    one_step = {**SHORT, "pairs_per_rollout": density, "steps": 100, "evidence": "SIGNAL"}
    assert judge(Path(), one_step, extract_pairs.Config()).summary["verdict"] == verdict


def test_a_finished_run_is_judged_again_by_the_limits_of_each_call(tmp_path: Path) -> None:
    given = one_differs(tmp_path, wrong_where_it_differs=True)
    run = extracted(tmp_path, given)
    assert run.manifest.summary["verdict"] == "DISAGREEMENT TRACKS FAILURE"
    failed = extracted(tmp_path, given, min_pairs_per_rollout=5.0)
    assert failed.path == run.path and failed.manifest.attempts == 1 and failed.damage("bytes") is None
    assert (failed.manifest.summary["verdict"], failed.manifest.outcome.exit_code) == ("FAIL", 1)
    report = (failed.path / "report.txt").read_text()
    assert report.count("\ncriterion: ") == 1 and "pairs a rollout (5 needed" in report and "(0 needed" not in report
    again = extracted(tmp_path, given)
    assert again.manifest.outcome == run.manifest.outcome and again.manifest.files == run.manifest.files
    manifest = read_manifest(run.path)
    del manifest.files["report-lines.json"]
    write_manifest(run.path, manifest)
    (run.path / "report-lines.json").unlink()  # as runs of earlier versions
    assert (extracted(tmp_path, given, min_pairs_per_rollout=5.0).path / "report.txt").read_text() == report


def test_groups_refuse_continuations_and_unknown_students(
    tmp_path: Path, artifacts: Path, boat: Run, collected: Any
) -> None:
    with pytest.raises(UsageError, match=r"signal\.rollouts .*composer collect"):
        extracted(tmp_path, boat, 2)
    with pytest.raises(UsageError, match="a, b, c, d"):
        extracted(tmp_path, boat, student="e")
    assert extracted(tmp_path, boat, student="d").rows(PAIR)[0]["rejected_by"] in ("student", "d")
    assert assign_inputs(extract_pairs.STAGE, [boat]) == {"rollouts": [boat]}
    with pytest.raises(BadInput, match="teacher actions"):
        assign_inputs(extract_pairs.STAGE, [collected()])


def test_submissions_of_one_task_are_compared_by_the_verdict(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    for name, patch, resolved in (("one", "P", True), ("two", "Q", False)):
        jsonl(folder / name / "all_preds.jsonl", prediction(INSTANCE, patch, name))
        document(folder / name / "report.json", {"resolved": [INSTANCE] if resolved else [], "applied": [INSTANCE]})
    wordless = extracted(tmp_path, imported(tmp_path, folder))
    assert wordless.rows(PAIR) == [] and wordless.manifest.counts["dropped_task_without_words"] == 1
    task = {"instance_id": INSTANCE, "problem_statement": "It breaks.", "base_commit": "c"}
    jsonl(folder / "lite.jsonl", task)
    (pair,) = pairs_with_states(extracted(tmp_path, imported(tmp_path, folder)))
    columns = ("rule", "chosen", "rejected", "rejected_by", "family")
    assert [pair[name] for name in columns] == ["better_submission", "P", "Q", "two", "owner/repo"]
    assert json.loads(pair["messages_json"]) == [user("It breaks.")]


@needs("real")
def test_real_wiki_search_gives_pairs(tmp_path: Path) -> None:
    rollouts = imported(tmp_path, REAL / "trajectories" / "wiki-search")
    assert (len(rollouts.rows(ROLLOUT)), len(rollouts.rows(TASK))) == (480, 60)
    assert len({row["model"] for row in rollouts.rows(ROLLOUT)}) == 9 and not rollouts.manifest.summary["dropped"]
    run = extracted(tmp_path, rollouts)
    pairs = run.rows(PAIR)
    assert len(pairs) >= 20 and all(p["chosen"] != p["rejected"] for p in pairs)
    assert {p["rule"] for p in pairs} == {"majority_over_student", "student_over_minority"}
    # Up to nine rollouts a question: rewards tell nothing about a step.
    assert run.manifest.counts["dropped_too_few_rollouts"] >= 100
    sides = [{(p["state_sha256"], canonical(p[side])) for p in pairs} for side in ("chosen", "rejected")]
    assert not sides[0] & sides[1]


@needs("real")
def test_real_submissions_to_one_instance_give_pairs(tmp_path: Path) -> None:
    rollouts = imported(tmp_path, REAL / "trajectories" / "nemo-gym")
    pairs = extracted(tmp_path, rollouts).rows(PAIR)
    resolved = {r["task_id"] for r in rollouts.rows(ROLLOUT) if r["hidden_pass"]}
    assert len(pairs) >= 40 and {p["task_id"] for p in pairs} <= resolved
    assert {p["rule"] for p in pairs} == {"better_submission"}


def test_texts_are_actions_in_environments_with_text_actions(tmp_path: Path) -> None:
    """Programs with one behaviour are one action; a program that differs by its blanks alone may be another."""
    said = {"m": "def add(a, b):\n    return a", "t": "def add(a, b):\n  return b + a"}
    said["u"] = "def add(a, b): return a+b"
    row = {"prompt": "Add.", "tests": ["assert add(1, 2) == 3", "assert add(2, 3) == 5"]}
    train, held_out = (jsonl(tmp_path / name, {**row, "prompt": f"Add {name}."}) for name in ("t.jsonl", "e.jsonl"))
    env = {"name": "code", "path": str(train), "eval_path": str(held_out)}
    with serving(lambda body, number: Reply(body=answer(f"```python\n{said[body['model']]}\n```"))) as server:
        at = {"base_url": server.url, "max_tokens": 64}
        config = collect.Config(policy={"model": "m", **at}, env=env, tasks=1, samples=1)
        rollouts = Run(runner.execute("collect", {}, config, root=tmp_path).path)
        asked = replay_teachers.Config(teachers=[{"name": name, "model": name, **at} for name in "tu"])
        answers = Run(runner.execute("replay-teachers", {"rollouts": rollouts}, asked, root=tmp_path).path)
    given = {"rollouts": rollouts, "teacher_actions": answers}
    path = runner.execute("extract-pairs", given, extract_pairs.Config(), root=tmp_path).path
    (pair,) = Run(path).rows(PAIR)
    assert said["t"] in pair["chosen"] and said["m"] in pair["rejected"] and pair["votes_chosen"] == 2


@pytest.mark.parametrize("env", [None, "code"])
def test_answers_that_agree_are_a_majority_and_empty_ones_are_none(tmp_path: Path, env: str | None) -> None:
    """In imported rollouts too, whose environment is not known; with a selection, the dearest teacher is spared."""
    said = {"m": "No.", "t": "Yes.", "u": "Yes.", "v": "Yes.", "x": "", "y": ""}
    with serving(lambda body, number: Reply(body=answer(said[body["model"]]))) as server:
        at = {"base_url": server.url, "max_tokens": 64, "usd_per_mtok_in": 1.0}
        if env is None:
            row = {"messages": [user("Is it?"), assistant("No.")], "task_id": "t", "reward": 0}
            rollouts = imported(tmp_path, jsonl(tmp_path / "chat.jsonl", row))
        else:
            files = [
                jsonl(tmp_path / f"{name}.jsonl", {"prompt": name, "tests": ["assert f(1) == 2", "assert f(2) == 3"]})
                for name in ("t", "e")
            ]
            options = {"name": env, "path": str(files[0]), "eval_path": str(files[1])}
            config = collect.Config(policy={"model": "m", **at}, env=options, tasks=1, samples=1)
            rollouts = Run(runner.execute("collect", {}, config, root=tmp_path).path)
        found = []
        for names in ("tuv", "xyt"):
            teachers = [{"name": n, "model": n, **at, "usd_per_mtok_out": float(n == "v")} for n in names]
            select = {"rule": "disagreement", "explore": 1e-9}
            asked = replay_teachers.Config(teachers=teachers, selection=select)
            answers = Run(runner.execute("replay-teachers", {"rollouts": rollouts}, asked, root=tmp_path).path)
            found.append(extracted(tmp_path, {"rollouts": rollouts, "teacher_actions": answers}, compare="canonical"))
            assert [row["teacher"] for row in answers.rows(TEACHER_ACTION)] == list(names.removesuffix("v"))
    (pair,), empty = found[0].rows(PAIR), found[1].rows(PAIR)
    assert (pair["chosen"], pair["rejected"], pair["votes_chosen"]) == ("Yes.", "No.", 2.0) and empty == []
