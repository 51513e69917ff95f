"""Workers that fail, die or are stopped: nothing is lost, nothing is paid twice, and never more than is allowed."""

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.dealt import PRICES, contents, letters, played, settings
from support.server import Reply, serving

from stages import collect
from stages.backends.engine import ProcessEngine
from stages.errors import ComposerError, Incomplete, UsageError
from stages.runs import ledger, spread, store
from stages.runs.artifact import Inputs, Interrupted, Manifest, Run, RunWriter
from stages.runs.spread import Shard, ShardWriter, Spread


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
        played(tmp_path, config, resume=True, max_cost=1.0, on="processes:2")
        assert len(server.requests) == len({str(body) for body in server.requests})  # nothing bought twice
        assert Run(run).manifest.cost_usd == pytest.approx(price * len(server.requests))


def test_what_fails_in_a_worker_fails_once(tmp_path: Path) -> None:
    config = settings("http://127.0.0.1:9/v1", policy={"max_attempts": 1})
    with pytest.raises(Incomplete, match="12 of 12 rollouts failed"):
        played(tmp_path, config, on="processes:2")
    (run,) = tmp_path.glob("collect/2*")
    assert len(list(Run(run).units())) == 12


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
        shard = Shard("collect", {}, config, frozenset(units), tmp_path / "shards" / "x", tmp_path / "models", lent=1.0)
        first, second = list(units)[:2]
        left = shard.folder / "earlier"
        (left / "steps").mkdir(parents=True)
        line = store.encode({**units[first], "failed": False})
        (left / "steps" / "000000.jsonl.open").write_bytes(line + b"\n" + line[:50])
        (left / ledger.NAME).write_bytes(
            b'{"call":1,"reserved":0.25}\n{"call":1,"settled":0.125}\n{"call":2,"reserved":0.25}\n'
        )
        out = ShardWriter(shard)
        assert out.finished(first) and not out.finished(second) and out.finished("of another shard")
        assert out.budget.limit == 0.625
        asked = len(server.requests)
        assert spread.work(shard) is None
        assert len(server.requests) - asked == 2 * (len(units) - 1)


class Forgetful(ProcessEngine):
    """A worker's last words are lost with it, and the run is told to stop."""

    def map(self, function: Any, jobs: Any) -> Any:
        for job, done in super().map(function, jobs):
            del job, done
            raise KeyboardInterrupt


@pytest.mark.parametrize("engine_of_the_next", [ProcessEngine(1), None], ids=["by workers", "without workers"])
def test_an_attempt_that_was_killed_is_taken_over(tmp_path: Path, engine_of_the_next: ProcessEngine | None) -> None:
    with serving(letters) as server:
        config = settings(server.url, policy=PRICES)
        expected = contents(played(tmp_path / "whole", config))
        asked = len(server.requests)
        folder = tmp_path / "run"
        record = Manifest(composer="", stage="collect", stage_version=2, fingerprint="")

        def attempt(engine: ProcessEngine | None) -> RunWriter:
            dealt = Spread(engine, "collect", Inputs(), config)
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


def test_workers_stop_between_units_when_the_run_is_asked_to(tmp_path: Path) -> None:
    seen = threading.Event()

    def slow(body: dict[str, Any], earlier: int) -> Reply:
        seen.set()
        return Reply(body=letters(body, earlier).body, delay_s=0.4)

    with serving(slow) as server:
        config = settings(server.url, policy={"concurrency": 1}, in_flight={"episodes": 1})
        record = Manifest(composer="", stage="collect", stage_version=2, fingerprint="")
        dealt = Spread(ProcessEngine(2), "collect", Inputs(), config)
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
