"""In what order and how many at a time teachers are asked: chains side by side, a first sample before the others."""

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.recorded_states import states_by_digest
from support.replaying import endpoint, replay
from support.server import Reply, answer, serving

from stages import replay_teachers
from stages.runs import runner, store
from stages.runs.artifact import Run
from stages.runs.records import STEP, TEACHER_ACTION
from stages.teachers.questions import RecordedStates, questions


def test_teachers_are_asked_side_by_side_and_steps_in_order(tmp_path: Path, collected: Callable[..., Run]) -> None:
    rollouts = collected(tasks=4)
    inside, most, order = [0], [0], list[tuple[str, str]]()

    def reply(body: dict[str, Any], n: int) -> Reply:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        order.append((body["model"], store.digest(body["messages"])))
        time.sleep(0.05)
        inside[0] -= 1
        return Reply(body=answer("x"))

    with serving(reply) as server:
        replay(tmp_path, rollouts, [endpoint("one", server.url), endpoint("two", server.url)])
    assert most[0] > 4, "the chains of both teachers run at once"
    paths: dict[str, list[str]] = {}
    for state in states_by_digest(rollouts.rows(STEP)).values():
        paths.setdefault(state.steps[0]["rollout_id"], []).append(store.digest(state.messages))
    assert max(map(len, paths.values())) > 1
    for model in ("one", "two"):
        asked = [state for name, state in order if name == model]
        for path in paths.values():
            assert [asked.index(state) for state in path] == sorted(asked.index(state) for state in path)


def test_one_slow_answer_holds_up_its_own_chain_alone(tmp_path: Path, collected: Callable[..., Run]) -> None:
    """In batches with barriers, everybody waited for the slowest."""
    finished, began = list[float](), list[float]()

    def reply(body: dict[str, Any], n: int) -> Reply:
        began.append(time.monotonic())
        time.sleep(1.5 if n == 0 else 0.0)
        finished.append(time.monotonic() - began[0])
        return Reply(body=answer("x"))

    rollouts = collected(tasks=4)
    with serving(reply) as server:
        replay(tmp_path, rollouts, [endpoint("one", server.url, concurrency=2)])
    slow = rollouts.rows(STEP)[0]["rollout_id"]
    chain = sum(s.steps[0]["rollout_id"] == slow for s in states_by_digest(rollouts.rows(STEP)).values())
    assert sum(at < 1.5 for at in finished) >= len(finished) - chain - 1


def test_samples_of_a_state_follow_its_first(tmp_path: Path, collected: Callable[..., Run]) -> None:
    answered: list[str] = []
    early: list[str] = []

    def reply(body: dict[str, Any], n: int) -> Reply:
        state = store.digest(body["messages"])
        if state in answered:
            early.append(state)
        time.sleep(0.02)
        answered.append(state)
        return Reply(body=answer(f"{n}"))

    with serving(reply) as server:
        config = replay_teachers.Config(teachers=[endpoint("one", server.url, temperature=1.0)], samples=3)
        run = Run(runner.execute("replay-teachers", {"rollouts": collected()}, config, root=tmp_path).path)
    assert len(early) == 2 * len(set(answered)), "the first is answered, and its prompt cached, before the others"
    assert len(run.rows(TEACHER_ACTION)) == 3 * len(set(answered))


def test_a_local_teacher_is_hashed_once_however_many_questions(
    tmp_path: Path, tiny: Path, collected: Callable[..., Run]
) -> None:
    rollouts, opened = collected(tasks=6), [0]
    own = shutil.copytree(tiny, tmp_path / "own")  # which nobody has hashed before
    listening = [True]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if listening and event == "open" and str(arguments[0]).endswith("model.safetensors"):
            opened[0] += 1

    sys.addaudithook(hook)
    config = replay_teachers.Config(teachers=[{"name": "local", "model": str(own), "max_tokens": 8}])
    with RecordedStates(rollouts, tmp_path) as recorded:
        asked = questions(recorded, config.teachers, samples=1, seed=0)
        assert len(list(asked["local"])) == len(list(asked["local"])) == len(asked["local"]) > 5
    listening.clear()
    assert opened[0] == 1


def test_a_local_teacher_works_beside_a_server(tmp_path: Path, tiny: Path, collected: Callable[..., Run]) -> None:
    with serving(lambda body, n: Reply(body=answer("x"))) as server:
        run = replay(
            tmp_path,
            collected(),
            [{"name": "local", "model": str(tiny), "max_tokens": 8}, endpoint("far", server.url)],
        )
    rows = run.rows(TEACHER_ACTION)
    assert {row["teacher"] for row in rows} == {"local", "far"} and all(row["error_type"] is None for row in rows)
