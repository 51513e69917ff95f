"""Units dealt to workers give the rows of a run in one process, and no question is asked twice."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_line import TEACHERS, repair
from support.models import save_tiny
from support.server import Reply, answer, kept_in, serving

from composer_stages import collect, evaluate, extract_pairs, replay_teachers
from composer_stages.backends.engine import ProcessEngine
from composer_stages.errors import ComposerError, Incomplete, UsageError
from composer_stages.policy.base import PolicyConfig
from composer_stages.probe import teacher_pool
from composer_stages.runs import ledger, runner, spread, store
from composer_stages.runs.kinds import PAIR
from composer_stages.runs.run import Inputs, Manifest, Run, RunWriter
from composer_stages.runs.spread import Shard, ShardScheduler, ShardWriter
from composer_stages.stopping import Interrupted
from composer_stages.teachers.config import TeacherConfig

ENV = {"name": "support.environments:NumberedEnv"}
PRICES = {"usd_per_mtok_in": 100.0, "usd_per_mtok_out": 1000.0}
"""Of a scripted server, which asks for no money itself."""


def letters(body: dict[str, Any], earlier: int) -> Reply:
    """The same answer to the same question, whoever asks."""
    del earlier
    return Reply(body=answer("ab"[: 1 + len(str(body["messages"])) % 2]))


def settings(url: str, **more: Any) -> collect.Config:
    """Of twelve rollouts of six tasks."""
    policy = {"model": "scripted", "base_url": url, "max_tokens": 8, "temperature": 0.0, **more.pop("policy", {})}
    return collect.Config(env=ENV, policy=policy, tasks=6, samples=2, **more)


def contents(run: Path) -> dict[str, str]:
    """The digests of all tables of a run."""
    return {name: out["content_sha256"] for name, out in Run(run).manifest.outputs.items()}


def played(root: Path, config: collect.Config, **options: Any) -> Path:
    """The folder of a run of collect."""
    return runner.execute("collect", {}, config, root=root, **options).path


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A model's last bits depend on the number of threads, here and in workers."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


Case = tuple[str, dict[str, Run], Any]
"""A stage, its inputs and its settings."""


def rollouts(tmp_path: Path, tiny: Path, url: str) -> Case:
    return "collect", {}, settings(url)


def local_rollouts(tmp_path: Path, tiny: Path, url: str) -> Case:
    return "collect", {}, collect.Config(env=ENV, policy={"model": str(tiny), "max_tokens": 8}, tasks=20, samples=2)


def arms(tmp_path: Path, tiny: Path, url: str) -> Case:
    policies = {name: PolicyConfig(model=name, base_url=url, max_tokens=8) for name in "AB"}
    return "evaluate", {}, evaluate.Config(env=ENV, tasks=8, policies=policies, looks=2)


def local_arms(tmp_path: Path, tiny: Path, url: str) -> Case:
    """Workers do not wait for each other between arms: every arm's batches are dealt at once."""
    models = {"A": tiny, "B": save_tiny(tmp_path / "other", seed=1), "C": tiny}
    policies = {name: PolicyConfig(model=str(path), max_tokens=8) for name, path in models.items()}
    return "evaluate", {}, evaluate.Config(env=ENV, tasks=40, policies=policies)


def answers(tmp_path: Path, tiny: Path, url: str) -> Case:
    """A local teacher, and one on a server, which is asked from one process."""
    local = TeacherConfig(name="local", model=str(tiny), max_tokens=8)
    remote = TeacherConfig(name="remote", model="scripted", base_url=url, max_tokens=8, temperature=0.0)
    config = replay_teachers.Config(teachers=[local, remote], min_answered=0.0)
    return "replay-teachers", {"rollouts": Run(played(tmp_path, settings(url)))}, config


def votes(tmp_path: Path, tiny: Path, url: str) -> Case:
    with serving(repair) as server:
        policy = {"model": "scripted", "base_url": server.url, "max_tokens": 64}
        config = collect.Config(env={"name": "kata"}, policy=policy, tasks=3, samples=1)
        rollouts = Run(played(tmp_path, config))
        teachers = [TeacherConfig(name=name, **policy | {"model": model}) for name, model in TEACHERS.items()]
        asked = replay_teachers.Config(teachers=teachers)
        answers = Run(runner.execute("replay-teachers", {"rollouts": rollouts}, asked, root=tmp_path).path)
    return "extract-pairs", {"rollouts": rollouts, "teacher_actions": answers}, extract_pairs.Config()


def pool(tmp_path: Path, tiny: Path, url: str) -> Case:
    sources = [{"name": "teacher", "policy": {"model": "kata:loophole"}, "options": {"hint": True}, "samples": 2}]
    return "probe-teacher-pool", {}, teacher_pool.Config(sources=sources, problems=24, max_problems=36)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("case", [rollouts, local_rollouts, arms, local_arms, answers, votes, pool])
def test_workers_give_the_tables_of_one_process_and_ask_no_more(
    tmp_path: Path, tiny: Path, case: Callable[[Path, Path, str], Case]
) -> None:
    runs, told, asked = [], list[list[str]](), list[int]()
    with serving(letters) as server:
        stage, inputs, config = case(tmp_path, tiny, server.url)
        for on in (None, "processes:2"):
            before, folder = len(server.requests), tmp_path / (on or "here")
            told.append([])

            def heard(what: str, done: int, total: int) -> None:
                told[-1].append(f"{what} {done}/{total}")

            with suppress(ComposerError):  # a small pool fails its checks
                runner.execute(stage, inputs, config, root=folder, out=folder / "run", on=on, listener=heard)
            runs.append(Run(folder / "run"))
            asked.append(len(server.requests) - before)
    one, other = runs
    assert contents(one.path) == contents(other.path) and contents(one.path)
    assert asked[0] == asked[1] and one.manifest.models == other.manifest.models
    assert one.read_file("verdict.json") == other.read_file("verdict.json")
    assert stage != "extract-pairs" or one.rows(PAIR)
    assert not (other.path / "scratch").exists()
    dealt = ["rollouts of all arms 120/120" in some for some in told]
    assert dealt == ([False, True] if case is local_arms else [False, False])


def replayed(root: Path, rollouts: Path, teachers: list[TeacherConfig], **options: Any) -> Path:
    config = replay_teachers.Config(teachers=teachers, min_answered=0.0, deal="teachers")
    return runner.execute("replay-teachers", {"rollouts": Run(rollouts)}, config, root=root, **options).path


@pytest.mark.slow
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


def test_what_workers_spend_is_never_above_the_limit(tmp_path: Path) -> None:
    with serving(letters) as server:
        config = settings(server.url, policy=PRICES)
        with pytest.raises(Incomplete, match=r"^The budget of 0\.08 USD is spent"):
            played(tmp_path, config, max_cost=0.08, on="processes:2")
        (run,) = tmp_path.glob("collect/2*")
        spent, possibly = ledger.totals(run) or (0.0, 0.0)
        price = config.policy.cost(10, 5)
        assert spent == pytest.approx(price * len(server.requests))
        assert 0 < spent + possibly <= 0.08
        played(tmp_path, config, resume=True, max_cost=1.0)
        assert len(server.requests) == len({str(body) for body in server.requests})  # nothing bought twice
        assert Run(run).manifest.cost_usd == pytest.approx(price * len(server.requests))


def test_what_fails_in_a_worker_fails_once(tmp_path: Path) -> None:
    config = settings("http://127.0.0.1:9/v1", policy={"max_attempts": 1})
    with pytest.raises(Incomplete, match="12 of 12 rollouts failed"):
        played(tmp_path, config, on="processes:2")
    (run,) = tmp_path.glob("collect/2*")
    assert len(list(Run(run).units())) == 12


@pytest.mark.slow
def test_what_stops_a_worker_stops_the_run(tmp_path: Path) -> None:
    with (
        serving(lambda body, earlier: Reply(402, {"error": {"message": "no credit"}})) as server,
        pytest.raises(ComposerError, match="no credit"),
    ):
        played(tmp_path, settings(server.url).model_copy(update={"tasks": 40}), on="processes:2")
    assert len(server.requests) <= 3 * 80 // 8  # three of the eight shards had begun at most, of eighty rollouts


def test_a_worker_that_dies_leaves_what_it_finished(tmp_path: Path) -> None:
    """The folder of a shard as a killed worker leaves it: one unit whole, one torn, one call without its bill."""
    with serving(letters) as server:
        config = settings(server.url, policy=PRICES)
        whole = played(tmp_path / "whole", config)
        units = {row["unit"]: row for row in Run(whole).units()}
        shard = Shard("collect", {}, config, frozenset(units), tmp_path / "shards" / "x", kept_in(tmp_path), lent=1.0)
        first, second = list(units)[:2]
        left = shard.folder / "earlier"
        (left / "steps").mkdir(parents=True)
        line = store.checked(store.encode({**units[first], "failed": False}))
        (left / "steps" / "000000.jsonl.open").write_bytes(line + b"\n" + line[:50])
        paid = ({"call": 1, "reserved": 0.25}, {"call": 1, "settled": 0.125}, {"call": 2, "reserved": 0.25})
        (left / ledger.NAME).write_bytes(b"".join(store.checked(store.encode(one)) + b"\n" for one in paid))
        out = ShardWriter(shard)
        assert out.finished(first) and not out.finished(second) and out.finished("of another shard")
        assert out.budget.limit == 0.625 and out.cache == kept_in(tmp_path), "answers outlive the shard's own folder"
        asked = len(server.requests)
        assert spread.work(shard) is None
        assert len(server.requests) - asked == 2 * (len(units) - 1)


class Forgetful(ProcessEngine):
    """A worker's last words are lost with it, and the run is told to stop."""

    def map(self, function: Any, jobs: Any, waiting: Any) -> Any:
        for job, done in super().map(function, jobs, waiting):
            del job, done
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("engine_of_the_next", [ProcessEngine(1), None], ids=["by workers", "without workers"])
def test_an_attempt_that_was_killed_is_taken_over(tmp_path: Path, engine_of_the_next: ProcessEngine | None) -> None:
    with serving(letters) as server:
        config = settings(server.url, policy=PRICES)
        expected = contents(played(tmp_path / "whole", config))
        asked = len(server.requests)
        folder = tmp_path / "run"
        record = Manifest(composer="", stage="collect", stage_version=2, fingerprint="")

        def attempt(engine: ProcessEngine | None) -> RunWriter:
            dealt = ShardScheduler(engine, "collect", Inputs(), config)
            out = RunWriter(folder, record, cache=tmp_path / "models", max_cost=1.0, spread=dealt)
            collect.run(Inputs(), config, out)
            return out

        with pytest.raises(KeyboardInterrupt):
            attempt(Forgetful(1))
        assert list((folder / "scratch" / "shards").iterdir())
        out = attempt(engine_of_the_next)
        assert {name: told["content_sha256"] for name, told in out.manifest.outputs.items()} == expected
        assert len(server.requests) == 2 * asked
        assert out.budget.spent == pytest.approx(config.policy.cost(10, 5) * asked)
        assert out.budget.possibly == 0


class OneByOne:
    """Does jobs in this process, and waits for each once more when it is done."""

    workers, device = 1, "cpu"

    def map(self, function: Any, jobs: Any, waiting: Any) -> Any:
        for job in jobs:
            done = function(job)
            waiting()
            yield job, done

    def close(self) -> None:
        """Nothing to release."""


def test_what_a_worker_has_finished_is_told_before_its_shard_ends(tmp_path: Path) -> None:
    told = list[tuple[int, int]]()
    with serving(letters) as server:
        config = settings(server.url)
        record = Manifest(composer="", stage="collect", stage_version=2, fingerprint="")
        dealt = ShardScheduler(OneByOne(), "collect", Inputs(), config)
        listens = {"listener": lambda what, done, total: told.append((done, total))}
        collect.run(Inputs(), config, RunWriter(tmp_path / "run", record, cache=tmp_path, spread=dealt, **listens))
    assert [one for one in told if one[1]][:4] == [(3, 12), (6, 12), (9, 12), (12, 12)]


def test_workers_stop_between_units_when_the_run_is_asked_to(tmp_path: Path) -> None:
    seen = threading.Event()

    def slow(body: dict[str, Any], earlier: int) -> Reply:
        seen.set()
        return Reply(body=letters(body, earlier).body, delay_s=0.4 * (earlier < 12))

    with serving(slow) as server:
        config = settings(server.url, policy={"concurrency": 1}, in_flight={"rollouts": 1})
        record = Manifest(composer="", stage="collect", stage_version=2, fingerprint="")
        dealt = ShardScheduler(ProcessEngine(1), "collect", Inputs(), config)
        out = RunWriter(tmp_path / "run", record, cache=tmp_path / "models", spread=dealt)
        threading.Thread(target=lambda: (seen.wait(60), time.sleep(1), out.stop.set()), daemon=True).start()
        with pytest.raises(Interrupted):
            collect.run(Inputs(), config, out)
        assert 0 < len(server.requests) < 24
        answered = Counter(str(body) for body in server.requests)
        out.stop.clear()
        collect.run(Inputs(), config, out)
        assert Counter(str(body) for body in server.requests).total() - answered.total() <= 24 - answered.total() + 2


def test_an_unknown_engine_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no engine 'nowhere'"):
        played(tmp_path, settings("http://127.0.0.1:9/v1"), on="nowhere")
    assert not list(tmp_path.glob("collect/2*"))
