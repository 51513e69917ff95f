"""Gating on kata with teachers of unequal prices: nearly all pairs at less than half the cost."""

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.server import Reply, answer, serving

from composer_stages import collect, extract_pairs, replay_teachers
from composer_stages.envs.kata.env import KataEnv
from composer_stages.envs.kata.tasks import OPERATIONS
from composer_stages.pairs.actions import form
from composer_stages.pairs.evidence import passed_by_rollout
from composer_stages.pairs.states import in_random_share
from composer_stages.runs import runner, store
from composer_stages.runs.kinds import PAIR, ROLLOUT, TEACHER_ACTION
from composer_stages.runs.run import Run
from composer_stages.teachers.config import TeacherConfig
from composer_stages.teachers.questions import DistinctState, TeacherQuestion
from composer_stages.teachers.selection import ExpectedGains, SelectionState
from tests.stages.envs.kata.playing import author_texts

PRICES = {"plain": 1.0, "simple": 1.0, "dear": 10.0}
KNOWS = {"student": 0.5, "plain": 0.8, "simple": 0.8, "dear": 0.95}
"""How often each knows what a task is about."""


def players(number: int) -> Callable[[dict[str, Any], int], Reply]:
    """Each knows or misconceives a task, by its name and the task's; all look, test and submit alike."""
    tasks = {KataEnv().reset(task)[-1]["content"]: task for task in KataEnv().tasks("train", number, 0)}
    wrong = [operation.name for operation in OPERATIONS]

    def act(body: dict[str, Any], earlier: int) -> Reply:
        task = tasks[next(m["content"] for m in body["messages"] if m["role"] == "user")]
        knows = random.Random(f"{body['model']} {task.task_id}").random() < KNOWS[body["model"]]
        texts = author_texts(task, () if knows else wrong)
        done = sum(m["role"] == "assistant" for m in body["messages"])
        return Reply(body=answer(texts[min(done, len(texts) - 1)], cost=PRICES.get(body["model"], 0.0)))

    return act


@contextmanager
def played(root: Path, tasks: int) -> Iterator[Any]:
    with serving(players(tasks)) as server:
        policy = {"model": "student", "base_url": server.url, "max_tokens": 99}
        config = collect.Config(policy=policy, tasks=tasks, samples=1)
        yield root, server, Run(runner.execute("collect", {}, config, root=root).path)


@pytest.fixture(scope="module")
def world(artifacts: Path) -> Iterator[Any]:
    with played(artifacts / "large", 30) as found:
        yield found


@pytest.fixture(scope="module")
def small_world(artifacts: Path) -> Iterator[Any]:
    with played(artifacts / "small", 10) as found:
        yield found


ANSWERS: dict[str, Run] = {}


def selected(world: Any, name: str, **selection: Any) -> Run:
    """Answers under a selection; asked once for each name."""
    root, server, rollouts = world
    table = [
        {"name": n, "model": n, "base_url": server.url, "max_tokens": 99, "usd_per_mtok_in": p, "usd_per_mtok_out": p}
        for n, p in PRICES.items()
    ]
    config = replay_teachers.Config(teachers=table, selection=selection, max_usd_per_rollout=1e6)
    if name not in ANSWERS:
        done = runner.execute("replay-teachers", {"rollouts": rollouts}, config, root=root / name)
        ANSWERS[name] = Run(done.path)
    return ANSWERS[name]


def pairs_of(world: Any, answers: Run) -> Run:
    root, _, rollouts = world
    inputs, compared = {"rollouts": rollouts, "teacher_actions": answers}, extract_pairs.Config(compare="canonical")
    return Run(runner.execute("extract-pairs", inputs, compared, root=root).path)


def cost(answers: Run) -> float:
    return float(sum(row["cost_usd"] for row in answers.rows(TEACHER_ACTION)))


@pytest.mark.slow
def test_nearly_all_pairs_for_less_than_half_the_cost(world: Any) -> None:
    everybody, answers = selected(world, "full"), selected(world, "value", rule="value", usd_per_pair=50.0)
    full, found = pairs_of(world, everybody), pairs_of(world, answers)
    assert len(full.rows(PAIR)) > 15
    assert cost(answers) <= 0.5 * cost(everybody)
    ids, all_ids = ({row["pair_id"] for row in run.rows(PAIR)} for run in (found, full))
    assert len(ids & all_ids) >= 0.95 * len(all_ids)
    assert ids <= all_ids, "a majority is one of all teachers, asked or not"
    assert all(row["num_teachers"] == 3 for row in found.rows(PAIR))
    assert answers.manifest.counts["not_asked"] > 0 and "Not asked: " in (answers.path / "report.txt").read_text()
    for row in answers.rows(TEACHER_ACTION):
        assert row["error_type"] is None
    dear = {row["state_sha256"] for row in answers.rows(TEACHER_ACTION) if row["teacher"] == "dear"}
    everywhere = {row["state_sha256"] for row in answers.rows(TEACHER_ACTION)}
    assert {digest for digest in everywhere if in_random_share(digest, 0.1)} <= dear < everywhere


def test_a_low_pair_value_buys_no_expensive_answers(small_world: Any) -> None:
    rows = selected(small_world, "cheap", rule="value", usd_per_pair=1e-6).rows(TEACHER_ACTION)
    assert all(in_random_share(row["state_sha256"], 0.1) for row in rows if row["teacher"] == "dear")


@pytest.mark.slow
def test_disagreement_keeps_every_pair_over_the_student(world: Any) -> None:
    everybody, answers = selected(world, "full"), selected(world, "disagreement", rule="disagreement")
    kept, wanted = (
        {row["pair_id"] for row in pairs_of(world, run).rows(PAIR) if row["rule"] == "majority_over_student"}
        for run in (answers, everybody)
    )
    assert kept == wanted and cost(answers) < 0.5 * cost(everybody)


def test_only_states_of_failed_rollouts_are_asked(small_world: Any) -> None:
    passed = passed_by_rollout(small_world[2].rows(ROLLOUT))
    answers = selected(small_world, "failed", failed_only=True)
    found = pairs_of(small_world, answers)
    asked = {row["rollout_id"] for row in answers.rows(TEACHER_ACTION)}
    assert any(passed.values()) and asked and not any(passed[rollout] for rollout in asked)
    assert found.manifest.counts["dropped_not_asked"] > 0
    assert {row["rule"] for row in found.rows(PAIR)} >= {"majority_over_student"}


def state_of(number: int, student: str, **said: str) -> SelectionState:
    """One step of the student and what teachers said so far, by short words."""
    spelled = {name: [f"```bash\n{text}\n```"] for name, text in said.items()}
    step = {"rollout_id": "r", "step": 0, "truncated": False, "action": f"```bash\n{student}\n```"}
    state = DistinctState(f"{number:064d}", "t", "r", 0, 1)
    questions = {}
    for name in PRICES:
        teacher = TeacherConfig(name=name, model=name, base_url="http://localhost/v1", max_tokens=9)
        questions[name] = [TeacherQuestion(teacher, teacher.identity(), state, lambda _: [], 0, 0)]
    return SelectionState(questions, form, [step], spelled, {name: [1.0] for name in said})


def test_expected_gains_depend_on_the_agreeing_teachers() -> None:
    """Where all three differ it mostly brings nothing; where the student is with one of two, often a majority."""
    alone = [state_of(n, "s", plain="p", simple="q", dear="p" if n < 2 else "d") for n in range(10)]
    joined = [state_of(n, "p", plain="p", simple="q", dear="p" if n < 28 else "d") for n in range(20, 30)]
    gains = ExpectedGains([*alone, *joined], ["plain", "simple"], "dear")
    lonely, backed, other = (
        gains.expected(state_of(99, student, plain="p", simple="q")) for student in ("s", "p", "q")
    )
    assert lonely == pytest.approx(0.2, abs=0.1) and backed == pytest.approx(0.8, abs=0.1)
    assert lonely < other < backed, "where nothing like it was seen, what holds of all open states"


def test_a_teacher_of_unknown_price_is_asked_last(small_world: Any) -> None:
    root, server, rollouts = small_world
    prices = {"usd_per_mtok_in": 1.0, "usd_per_mtok_out": 1.0}
    table = [
        {"name": name, "model": name, "base_url": server.url, "max_tokens": 99, **({} if name == "dear" else prices)}
        for name in ("dear", "plain", "simple")
    ]
    config = replay_teachers.Config(teachers=table, selection={"rule": "disagreement"}, max_usd_per_rollout=1e6)
    done = runner.execute("replay-teachers", {"rollouts": rollouts}, config, root=root / "unknown")
    states = {name: set[str]() for name in PRICES}
    for row in Run(done.path).rows(TEACHER_ACTION):
        states[row["teacher"]].add(row["state_sha256"])
    assert states["dear"] < states["plain"] == states["simple"]
    explored = state_of(1, "s", plain="p", simple="q", dear="d")
    explored.costs["dear"] = []
    assert ExpectedGains([explored], ["plain", "simple"], "dear").price(explored, "dear") == math.inf


@pytest.mark.slow
def test_a_selection_is_reproducible(world: Any) -> None:
    first, second = (selected(world, name, rule="value", usd_per_pair=50.0) for name in ("value", "again"))
    keys = [[row["unit_id"] for row in run.rows(TEACHER_ACTION)] for run in (first, second)]
    assert keys[0] == keys[1] and store.digest(keys[0]) == store.digest(keys[1])
