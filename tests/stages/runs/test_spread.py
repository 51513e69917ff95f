"""Units dealt to workers give the rows of a run in one process, and no question is asked twice."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_line import TEACHERS, repair
from support.dealt import ENV, PRICES, contents, letters, played, settings
from support.models import save_tiny
from support.server import serving

from stages import collect, evaluate, extract_pairs, replay_teachers
from stages.errors import ComposerError, Incomplete
from stages.policy import PolicyConfig
from stages.probe import teacher_pool
from stages.runs import ledger, runner, store
from stages.runs.artifact import Run
from stages.runs.records import PAIR
from stages.teachers.questions import TeacherConfig


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A model's last bits depend on the number of threads, here and in workers."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_servers_rollouts_are_those_of_one_process(tmp_path: Path) -> None:
    with serving(letters) as server:
        here = played(tmp_path / "here", settings(server.url))
        asked = len(server.requests)
        there = played(tmp_path / "there", settings(server.url), on="processes:2")
        assert len(server.requests) == 2 * asked
    assert contents(here) == contents(there)
    assert not (there / "scratch").exists()


@pytest.mark.usefixtures("one_thread")
def test_a_local_models_rollouts_are_those_of_one_process(tmp_path: Path, model: Path) -> None:
    config = collect.Config(env=ENV, policy={"model": str(model), "max_tokens": 8}, tasks=20, samples=2)
    here, there = played(tmp_path / "here", config), played(tmp_path / "there", config, on="processes:2")
    assert contents(here) == contents(there)


@pytest.mark.slow
def test_arms_are_compared_on_the_rows_of_one_process(tmp_path: Path) -> None:
    with serving(letters) as server:
        arm = PolicyConfig(model="scripted", base_url=server.url, max_tokens=8)
        config = evaluate.Config(
            env=ENV, tasks=8, policies={"A": arm, "B": arm.model_copy(update={"model": "other"})}, looks=2
        )
        runs = [
            runner.execute("evaluate", {}, config, root=tmp_path / (on or "here"), on=on).path
            for on in (None, "processes:2")
        ]
    assert contents(runs[0]) == contents(runs[1])
    assert store.read_json(runs[0] / "verdict.json") == store.read_json(runs[1] / "verdict.json")


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_local_arms_are_dealt_together_and_give_the_rows_of_one_process(tmp_path: Path, model: Path) -> None:
    """Workers do not wait for each other between arms: every arm's batches are dealt at once."""
    other = save_tiny(tmp_path / "other", seed=1)
    arms = {
        name: PolicyConfig(model=str(path), max_tokens=8) for name, path in (("A", model), ("B", other), ("C", model))
    }
    config, told = evaluate.Config(env=ENV, tasks=40, policies=arms), dict[str | None, list[str]]()
    runs = []
    for on in (None, "processes:2"):
        heard = told[on] = []
        runs.append(
            runner.execute(
                "evaluate",
                {},
                config,
                root=tmp_path / (on or "here"),
                on=on,
                listener=lambda what, done, total, heard=heard: heard.append(f"{what} {done}/{total}"),
            ).path
        )
    assert contents(runs[0]) == contents(runs[1])
    assert store.read_json(runs[0] / "verdict.json") == store.read_json(runs[1] / "verdict.json")
    assert Run(runs[0]).manifest.models == Run(runs[1]).manifest.models
    assert "rollouts of all arms 120/120" in told["processes:2"] and "rollouts of all arms 120/120" not in told[None]


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_local_teachers_answer_as_in_one_process_and_servers_are_asked_from_one(tmp_path: Path, model: Path) -> None:
    with serving(letters) as server:
        rollouts = {"rollouts": Run(played(tmp_path, settings(server.url)))}
        local = TeacherConfig(name="local", model=str(model), max_tokens=8)
        remote = TeacherConfig(name="remote", model="scripted", base_url=server.url, max_tokens=8, temperature=0.0)
        config, before = replay_teachers.Config(teachers=[local, remote], min_answered=0.0), len(server.requests)
        asked = []
        for on in (None, "processes:2"):
            runner.execute("replay-teachers", rollouts, config, root=tmp_path / (on or "here"), on=on)
            asked.append(len(server.requests) - before)
    (here,), (there,) = (list((tmp_path / on).glob("replay-teachers/2*")) for on in ("here", "processes:2"))
    assert contents(here) == contents(there)
    assert asked[1] == 2 * asked[0]


def replayed(root: Path, rollouts: Path, teachers: list[TeacherConfig], **options: Any) -> Path:
    config = replay_teachers.Config(teachers=teachers, min_answered=0.0, deal="teachers")
    return runner.execute("replay-teachers", {"rollouts": Run(rollouts)}, config, root=root, **options).path


def test_teachers_behind_servers_are_dealt_to_workers(tmp_path: Path) -> None:
    """The same answers, every question and every call that probes a server asked once, and the money lent in slices."""
    with serving(letters) as server:
        rollouts = played(tmp_path, settings(server.url))
        remote = {"base_url": server.url, "max_tokens": 8, "temperature": 0.0, **PRICES}
        teachers = [TeacherConfig(name=x, model=f"scripted-{x}", **remote) for x in "abc"]
        counts, runs = [len(server.requests)], []
        for on in (None, "processes:2"):
            runs.append(replayed(tmp_path / (on or "here"), rollouts, teachers, on=on))
            counts.append(len(server.requests))
        assert contents(runs[0]) == contents(runs[1])
        assert counts[2] - counts[1] == counts[1] - counts[0]
        here, there = (Run(run).manifest for run in runs)
        assert here.cost_usd == pytest.approx(there.cost_usd) and here.models == there.models

        with pytest.raises(Incomplete, match="budget"):
            replayed(tmp_path / "poor", rollouts, teachers, on="processes:2", max_cost=0.12)
        (run,) = tmp_path.glob("poor/replay-teachers/2*")
        spent, possibly = ledger.totals(run) or (0.0, 0.0)
        assert 0.012 < spent + possibly <= 0.12


@pytest.mark.slow
def test_votes_by_outcome_are_those_of_one_process(tmp_path: Path) -> None:
    with serving(repair) as server:
        policy = {"model": "scripted", "base_url": server.url, "max_tokens": 64}
        config = collect.Config(env={"name": "kata"}, policy=policy, tasks=3, samples=1)
        rollouts = Run(runner.execute("collect", {}, config, root=tmp_path).path)
        teachers = [
            TeacherConfig(name=name, model=model, base_url=server.url, max_tokens=64)
            for name, model in TEACHERS.items()
        ]
        asked = replay_teachers.Config(teachers=teachers)
        answers = Run(runner.execute("replay-teachers", {"rollouts": rollouts}, asked, root=tmp_path).path)
    given, found = {"rollouts": rollouts, "teacher_actions": answers}, []
    for on in (None, "processes:2"):
        root = tmp_path / (on or "here")
        found.append(runner.execute("extract-pairs", given, extract_pairs.Config(), root=root, on=on).path)
    assert contents(found[0]) == contents(found[1])
    assert Run(found[0]).rows(PAIR)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("one_thread")
def test_a_pool_is_that_of_one_process(tmp_path: Path) -> None:
    sources = [{"name": "teacher", "policy": {"model": "kata:loophole"}, "options": {"hint": True}, "samples": 2}]
    config = teacher_pool.Config(sources=sources, problems=24, max_problems=36)
    found = []
    for on in (None, "processes:2"):
        run = tmp_path / (on or "here")
        with suppress(ComposerError):  # so small a pool fails its checks
            runner.execute("probe-teacher-pool", {}, config, root=tmp_path, out=run, on=on)
        found.append(contents(run))
    assert found[0] == found[1]
    assert found[0]
