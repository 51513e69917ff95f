"""States of a run come one after the other: equal to those that are held in memory, and without its memory."""

import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from support.recorded_states import states_by_digest
from support.runs import written

from composer_stages import collect, replay_teachers
from composer_stages.errors import UsageError
from composer_stages.messages import OMITTED
from composer_stages.policy import KINDS
from composer_stages.policy.base import Sample
from composer_stages.rollouts.trace import digests_of_prefixes
from composer_stages.runs import runner, store
from composer_stages.runs.kinds import ROLLOUT, STEP, TEACHER_ACTION, Row
from composer_stages.runs.run import Run
from composer_stages.teachers.config import TeacherConfig
from composer_stages.teachers.questions import RecordedStates


class Repeats:
    """A free teacher of this process: says how long what it was shown is."""

    capture_level, batch_size = "text", 8

    def __init__(self, config: Any) -> None:
        self.config = config

    @classmethod
    def open(cls, config: Any, *, cache: Path, budget: Any, listener: Any) -> "Repeats":
        return cls(config)

    def sample(self, turns: list[Any]) -> list[Sample]:
        said = [sum(len(message["content"]) for message in turn.messages) for turn in turns]
        return [Sample(text=f"{number} characters", finish_reason="stop") for number in said]

    def facts(self) -> dict[str, Any]:
        return {"model": self.config.model}


def rollout(name: str, task: str, steps: int, length: int, history: str = "full") -> list[Row]:
    """Steps with observations of so many characters."""
    rng = random.Random(name)
    gains = [[{"role": "user", "content": f"Mend {task}."}]]
    for _ in range(steps - 1):
        shown = "".join(rng.choices("abcdefgh \n", k=length))
        gains.append([{"role": "assistant", "content": "ls"}, {"role": "user", "content": shown}])
    common = {"rollout_id": name, "task_id": task, "num_steps": steps, "action": "ls", "truncated": False}
    return [
        {**common, "step": i, "new_messages_json": store.encode(gain).decode(), "state_sha256": digest}
        | {"history": history}
        for i, (gain, digest) in enumerate(zip(gains, digests_of_prefixes(gains), strict=True))
    ]


def recorded_run(folder: Path, rollouts: list[list[Row]]) -> Run:
    ids = [{"rollout_id": steps[0]["rollout_id"], "task_id": steps[0]["task_id"]} for steps in rollouts]
    rows = [row for steps in rollouts for row in steps]
    return Run(written(folder, "collect/run", [(ROLLOUT, ids), (STEP, rows)]))


def test_states_equal_states_computed_in_memory(tmp_path: Path) -> None:
    """In the order of rollouts, which is not that of the table; with what was shown and done in each."""
    names = [("t2#10", "t2"), ("t2#2", "t2"), ("t10#0", "t10"), ("t1#0", "t1")]
    run = recorded_run(tmp_path, [rollout(name, task, 4, 30) for name, task in names])
    held = states_by_digest(run.rows(STEP))
    with RecordedStates(run, tmp_path / "scratch") as recorded:
        assert len(recorded.distinct) == len(held) == 3 + 4 * 3
        found = list(recorded.distinct)
        assert [state.digest for state in found] == list(held)
        assert [recorded.messages(state) for state in found] == [state.messages for state in held.values()]
        assert [state.num_steps for state in found] == [len(state.steps) for state in held.values()]
        for (digest, taken), state in zip(recorded.distinct.steps(), held.values(), strict=True):
            assert digest == state.steps[0]["state_sha256"]
            assert [(s["rollout_id"], s["step"]) for s in taken] == [(s["rollout_id"], s["step"]) for s in state.steps]


def test_conversations_are_read_on_demand_and_media_counted(tmp_path: Path) -> None:
    rows = [rollout(name, name, 3, 30) for name in ("b", "a")]
    seen = [{"role": "assistant", "content": "ls"}, {"role": "user", "content": f"{OMITTED}image_url]"}]
    rows[1][1]["new_messages_json"] = store.encode(seen).decode()
    with RecordedStates(recorded_run(tmp_path, rows), tmp_path / "scratch") as recorded:
        assert recorded.with_media() == 2
        recorded.keep({"a"})
        assert [len(recorded.messages(state)) for state in recorded.distinct] == [1, 3, 5] * 2


def test_a_teachers_options_change_the_opening(tmp_path: Path) -> None:
    """With the same question, and what followed the student's opening unchanged."""
    played = {"name": "skills", "options": {"families": "decide", "held_out": "questions", "shots": 1}}
    config = collect.Config(env=played, policy={"model": "noop"}, tasks=2, samples=1, max_steps=1, sandbox="none")
    run = Run(runner.execute("collect", {}, config, root=tmp_path).path)
    one, eight = (TeacherConfig(name=f"s{n}", model="m", opening={"shots": n} if n else {}) for n in (0, 8))
    with RecordedStates(run, tmp_path / "scratch") as recorded:
        for state in recorded.distinct:
            asked = recorded.messages(state)
            assert recorded.opened(one, state) == asked and len(asked) == 4
            shown = recorded.opened(eight, state)
            assert len(shown) == 2 + 2 * 8 and shown[:4] == [*asked[:3], shown[3]] and shown[-1] == asked[-1]
    del run.manifest.config["env"]
    with RecordedStates(run, tmp_path / "other") as recorded, pytest.raises(UsageError, match="Leave out opening"):
        recorded.opened(eight, next(iter(recorded.distinct)))


def replayed(root: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setitem(KINDS, "repeats", Repeats)
    config = replay_teachers.Config(teachers=[{"name": "one", "model": "repeats:it", "max_tokens": 8}])
    return Run(runner.execute("replay-teachers", {"rollouts": run}, config, root=root).path)


@pytest.mark.slow
def test_replaying_needs_less_memory_than_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """24 MB of text; what is asked about each of its 6,000 states is in memory for one rollout at a time."""
    run = recorded_run(tmp_path, [rollout(f"r{i:03d}", f"t{i:03d}", 50, 4000) for i in range(120)])
    replayed(tmp_path / "first", recorded_run(tmp_path / "small", [rollout("r", "t", 2, 10)]), monkeypatch)
    tracemalloc.start()
    answers = replayed(tmp_path, run, monkeypatch)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(answers.rows(TEACHER_ACTION)) == 6000
    assert peak < 16e6, f"{peak / 1e6:.1f} MB"
