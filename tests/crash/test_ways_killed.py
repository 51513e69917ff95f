"""A chain of stages, workers in processes and on Ray, and two processes that want one run, disturbed at random moments.

The artifacts are those of a run that was left alone, and only calls in flight at a kill are bought again.
"""

import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from needs import needs
from support.chains import entry
from support.disturbances import (
    ENDS_S,
    PARTS,
    Command,
    Launch,
    Outcome,
    Work,
    bought_twice,
    contents,
    cut_power,
    disturb,
    finish,
    folders,
    preload,
    row,
    shares,
    two_at_once,
    workers,
)
from support.engine import interpreter, running
from support.models import save_tiny
from support.ray_nodes import alone, jobs
from support.server import Reply, Server, answer, serving

from composer_stages import collect, train
from composer_stages.runs import store
from composer_stages.runs.kinds import TRAINING_REWARD
from composer_stages.runs.run import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
SHARES = dict(shares(PARTS, int(os.environ.get("COMPOSER_KILLS", len(PARTS)))))
IN_FLIGHT = 2
TASKS, SAMPLES = 16, 2
ENV = "support.environments:NumberedEnv"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The same letters for the same question, after 50 ms."""

    def reply(body: dict[str, Any], earlier: int) -> Reply:
        return Reply(body=answer(f"a{body['seed'] % 7}", cost=0.01), delay_s=0.05)

    preload("composer_stages.collect", "pyarrow.parquet", "openai")
    with serving(reply) as found:
        yield found


def served(server: Server) -> dict[str, Any]:
    prices = {"usd_per_mtok_in": 0.0, "usd_per_mtok_out": 2000.0}
    return {"model": "m", "base_url": server.url, "max_tokens": 64, "concurrency": IN_FLIGHT, **prices}


def collecting(server: Server, on: str | None = None, workers: int = 1, **environment: str) -> Work:
    config = collect.Config(
        env={"name": ENV}, policy=served(server), tasks=TASKS, samples=SAMPLES, in_flight={"rollouts": IN_FLIGHT}
    )
    return Work("collect", config, (), workers * IN_FLIGHT, None, on, environment)


def check(work: Launch, server: Server, outcome: Outcome, whole: tuple[float, Any]) -> None:
    """Compare every completed run with the undisturbed one, count what was bought twice, and print a line."""
    lasts_s, expected = whole
    for root in outcome.roots:
        assert contents(root) == expected
    print(row(outcome, lasts_s, bought_twice(work, server.requests, outcome)))


def whole(work: Launch, server: Server, place: Path) -> tuple[float, dict[str, Any]]:
    """Carry the work out undisturbed; return how long it took, and what came of it."""
    lasts_s = finish(work, place / "whole")
    server.requests.clear()
    return lasts_s, contents(place / "whole")


def as_table(values: dict[str, Any]) -> str:
    """An inline table of TOML."""
    return "{ " + ", ".join(f"{name} = {json.dumps(value)}" for name, value in values.items()) + " }"


def chain_of(server: Server, place: Path) -> Command:
    """A preset of two stages that follow one another, and three that run at the same time."""
    # Fewer samples are too few for a curriculum.
    sizes = (f'env = {{ name = "{ENV}" }}', f"policy = {as_table(served(server))}", "tasks = 6", "samples = 4")
    teacher = f"teachers = [{as_table({'name': 't', **served(server), 'model': 'n'})}]"
    stages = [
        entry("collect", "first", *sizes),
        entry("replay-teachers", "asked", teacher, reads=("first",)),
        entry("curriculum", "ordered", reads=("first",), parallel="end"),
        entry("export", "exported", 'format = "trl"', reads=("first",), parallel="end"),
        entry("collect", "second", *sizes, "seed = 1", parallel="end"),
    ]
    path = place / "chain.toml"
    path.write_text("\n".join(stages))
    return Command(["run", "--preset", str(path), "--quiet"], 2 * IN_FLIGHT)


@pytest.mark.parametrize(("part", "max_staleness"), [("train on a server", 0), ("train with a queue", 1)])
def test_a_training_on_a_server(part: str, max_staleness: int, outcome: Outcome, tmp_path: Path) -> None:
    """Nothing is trained on twice, and what has ended is not played again; without staleness the ends are equal."""
    outcome.part, model = part, save_tiny(tmp_path / "model")
    size = {"steps": 6, "prompts_per_step": 2, "generations": 4, "save_every": 2, "threads": 1, "learning_rate": 3e-2}
    with running(model) as engine:
        policy = {"model": f"vllm:{model}", "max_tokens": 12, "device": "cpu"}
        policy["server"] = {"python": str(interpreter(engine, tmp_path / "python"))}
        size["max_staleness"] = max_staleness
        config = train.Config(env={"name": ENV}, policy=policy, tasks=4, adapter={"rank": 4}, optimisation=size)
        work = Work("train", config)
        lasts_s, expected = finish(work, tmp_path / "whole"), contents(tmp_path / "whole")
        disturb(outcome, work, tmp_path / "killed", SHARES[part], lasts_s, seed=1 + max_staleness)
    for root in outcome.roots:
        if not max_staleness:
            assert contents(root) == expected
        (folder,) = folders(root)
        trained = [row["rollout_id"] for row in Run(folder).rows(TRAINING_REWARD)]
        assert len(trained) == len(set(trained)) == 6 * 2 * 4
        ended = Counter(line["unit"] for path in (folder / "steps").iterdir() for line in store.read_lines(path))
        assert {ended[rollout_id] for rollout_id in trained} == {1}, "recorded once, so not played again"
    print(row(outcome, lasts_s))


def test_a_chain(server: Server, outcome: Outcome, tmp_path: Path) -> None:
    outcome.part, work = "composer run", chain_of(server, tmp_path)
    undisturbed = whole(work, server, tmp_path)
    disturb(outcome, work, tmp_path / "killed", SHARES[outcome.part], undisturbed[0], 1, settle=settled)
    check(work, server, outcome, undisturbed)


@needs("compiler")
def test_power_cuts_of_a_chain(server: Server, outcome: Outcome, tmp_path: Path) -> None:
    outcome.part, work = "composer run", chain_of(server, tmp_path)
    undisturbed = whole(work, server, tmp_path)
    cuts = max(2, 2 * len(SHARES[outcome.part]))
    cut_power(outcome, work, tmp_path / "cut", cuts, 1, undisturbed[1], undisturbed[0])
    check(work, server, outcome, undisturbed)


def settled(root: Path) -> None:
    """Wait until what a killed process had started has ended: entries of a chain, workers."""
    del root
    time.sleep(ENDS_S)


@pytest.mark.parametrize("part", ["processes:2", "a worker of processes:2"])
def test_processes(part: str, server: Server, outcome: Outcome, tmp_path: Path) -> None:
    outcome.part = part
    work = collecting(server, "processes:2", workers=2)
    undisturbed = whole(work, server, tmp_path)
    assert undisturbed[1] == contents_here(server, tmp_path)
    chosen = {"choose": workers} if part.startswith("a worker") else {}
    disturb(outcome, work, tmp_path / "killed", SHARES[part], undisturbed[0], 2, settle=settled, **chosen)
    check(work, server, outcome, undisturbed)


def contents_here(server: Server, place: Path) -> dict[str, Any]:
    """What comes of the same collection in one process."""
    finish(collecting(server), place / "here")
    server.requests.clear()
    return contents(place / "here")


def ray_worker(process: BaseProcess, moment: random.Random) -> int | None:
    """The id of a worker of Ray that is at work; None where none is. This process has started its node."""
    del process
    found = jobs()
    return moment.choice(found) if found else None


@needs("ray")
@pytest.mark.parametrize("part", ["ray", "a worker of ray"])
def test_ray(part: str, server: Server, outcome: Outcome, tmp_path: Path) -> None:
    outcome.part = part
    with alone() as address:
        work = collecting(server, "ray", workers=2, RAY_ADDRESS=address)
        undisturbed = whole(work, server, tmp_path)
        assert undisturbed[1] == contents_here(server, tmp_path)
        chosen = {"choose": ray_worker} if part.startswith("a worker") else {}
        disturb(outcome, work, tmp_path / "killed", SHARES[part], undisturbed[0], 3, settle=settled, **chosen)
    check(work, server, outcome, undisturbed)


def test_two_processes_share_one_run_folder(server: Server, outcome: Outcome, tmp_path: Path) -> None:
    outcome.part, work = "two processes at one run", collecting(server)
    undisturbed = whole(work, server, tmp_path)
    two_at_once(outcome, work, tmp_path / "killed", SHARES[outcome.part], undisturbed[0], 4)
    check(work, server, outcome, undisturbed)
