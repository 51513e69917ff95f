"""Every stage twice, and killed by `kill -9` at random moments: equal ends, and little is paid twice.

COMPOSER_KILLS is the number of kills over all stages together; `./dev crash 100` sets it.
"""

import json
import multiprocessing
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from support.command_line import repair
from support.data_juicer import stand_in
from support.models import save_tiny
from support.server import Reply, Server, answer, serving
from support.shelf import SHELF, write

from stages import (
    STAGES,
    collect,
    curriculum,
    evaluate,
    export,
    extract_pairs,
    import_traces,
    make_tasks,
    normalize,
    replay_teachers,
    train,
)
from stages.compare_substrates import Config as Substrates
from stages.policy.base import PolicyConfig
from stages.probe import compare, extract_vhack, plot, replay, score, selftest, svd, teacher_pool, uat, watch
from stages.probe.extract_vhack import PairsConfig
from stages.runs import runner
from stages.runs.artifact import Run
from stages.runs.config import StageConfig
from stages.runs.stage import assign_inputs, load_stage
from tests.stages.probe.conftest import chain, models, planted, trained  # noqa: F401  (fixtures)
from tests.stages.probe.running import carry_out, pool_config
from tests.stages.probe.test_grpo import config as grpo_config

HEAVY = ["stages.training.report", "stages.probe.checks.validation", "duckdb", "scipy.stats", "openai"]
PATIENCE_S = 240
OTHER = {"manifest.json", "ledger.jsonl", ".lock"}
"""Files that say when and how often a run was begun, and in what order calls were paid for."""
TIMED = {"metrics.jsonl", "report.txt"}
"""Files that hold measured seconds where the stage measures some: compared but for those stages."""
TIMED_STEP = ".diag.json"
"""How the names of files end that say how long a step took."""
MEASURING = {"collect", "replay-teachers", "evaluate", "train", "substrates", "probe-replay"}


@dataclass(frozen=True)
class Work:
    """A stage with what it reads and its settings. in_flight: paid calls that may be on their way at once."""

    stage: str
    config: StageConfig
    reads: Sequence[Run] = ()
    in_flight: int = 0
    max_cost: float | None = None

    def carry_out(self, root: Path) -> None:
        """Begin or go on, to the end."""
        given = assign_inputs(load_stage(self.stage), self.reads)
        runner.execute(self.stage, given, self.config, root=root, resume=True, max_cost=self.max_cost)

    def start(self, root: Path) -> BaseProcess:
        """The same in a process, which has begun when this returns."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(HEAVY)
        before = self.attempts(root)
        process = context.Process(target=self.carry_out, args=(root,))
        process.start()
        deadline = time.monotonic() + PATIENCE_S
        while self.attempts(root) == before and process.is_alive():
            assert time.monotonic() < deadline, f"{self.stage} does not begin"
            time.sleep(0.002)
        return process

    def finish(self, root: Path) -> float:
        """Carry it out in a process and return how many seconds it took after its start."""
        process, began = self.start(root), time.monotonic()
        process.join(PATIENCE_S)
        assert process.exitcode == 0, f"{self.stage} ended with {process.exitcode}"
        return time.monotonic() - began

    def folder(self, root: Path) -> Path | None:
        """The folder of its run, if there is one yet."""
        return next((path.parent for path in root.glob(f"{self.stage}/2*/manifest.json")), None)

    def attempts(self, root: Path) -> int:
        """How often it was begun."""
        folder = self.folder(root)
        return 0 if folder is None else json.loads((folder / "manifest.json").read_bytes())["attempts"]

    def artifacts(self, root: Path) -> dict[str, Any]:
        """The content of all outputs, and the bytes of every other file that says no time."""
        folder = self.folder(root)
        assert folder is not None
        run = Run(folder)
        assert run.manifest.status == "complete" and not run.damage()
        left_out = OTHER | (TIMED if self.stage in MEASURING else set())
        files = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file() and path.suffix != ".parquet" and path.name not in left_out
            if not path.name.endswith(TIMED_STEP)
            if path.relative_to(folder).parts[0] not in ("steps", "logs")
        }
        return {"content": {name: out["content_sha256"] for name, out in run.manifest.outputs.items()}, **files}


def kill_at_random(work: Work, root: Path, kills: int, lasts_s: float, seed: int) -> list[int]:
    """Kill the work so many times, begun anew wherever it ends before, and end it; the kills of each of these runs.

    The runs lie in `root/0`, `root/1` and so on. lasts_s: how long it takes undisturbed.
    """
    moment, done = random.Random(seed), [0]
    while sum(done) < kills:
        at = root / str(len(done) - 1)
        process = work.start(at)
        process.join(moment.uniform(0, lasts_s))
        if process.exitcode is None:
            process.kill()
            process.join()
            done[-1] += 1
        else:
            assert process.exitcode == 0, f"{work.stage} ended with {process.exitcode}"
            assert len(done) < 10 * kills, f"{work.stage} always ends before it can be killed"
            done.append(0)
    if done[-1] or not (root / str(len(done) - 1)).exists():
        work.finish(root / str(len(done) - 1))
    return done


def paid(root: Path) -> float:
    """What all runs below say that they paid, or possibly paid, in USD."""
    found = [json.loads(path.read_bytes()) for path in root.glob("*/*/2*/manifest.json")]
    return sum(run["cost_usd"] + run["possibly_usd"] for run in found)


def forget(root: Path) -> None:
    """Delete runs that have been compared."""
    shutil.rmtree(root, ignore_errors=True)


pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
KILLS = int(os.environ.get("COMPOSER_KILLS", len(STAGES)))
IN_FLIGHT = 4
ENV = {"name": "support.environments:NumberedEnv"}
PRICES = {"usd_per_mtok_in": 0.0, "usd_per_mtok_out": 2000.0}
"""A cent a call of five tokens."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Repairs katas and says letters, after 20 ms each."""

    def reply(body: dict[str, Any], earlier: int) -> Reply:
        if "solution.py" in body["messages"][0]["content"]:
            return Reply(body=repair(body, earlier).body, delay_s=0.02)
        return Reply(body=answer(f"a{body['seed'] % 7}", cost=0.01), delay_s=0.02)

    with serving(reply) as found:
        yield found


@pytest.fixture(scope="module")
def works(
    server: Server, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Callable[[], Work]]:
    """Every stage with settings at which it takes a moment; inputs are made when they are first needed."""
    folder = tmp_path_factory.mktemp("inputs")
    tiny = {"model": str(save_tiny(folder / "tiny")), "max_tokens": 20}

    def policies() -> dict[str, PolicyConfig]:
        found: dict[str, PolicyConfig] = request.getfixturevalue("models")
        return found

    def runs(*names: str, of: str = "chain") -> list[Run]:
        held = request.getfixturevalue(of)
        return [held[name] for name in names or held]

    def served(name: str) -> dict[str, Any]:
        return {"model": name, "base_url": server.url, "max_tokens": 64, "concurrency": IN_FLIGHT, **PRICES}

    def teachers(**names: str) -> list[dict[str, Any]]:
        return [{"name": name, **served(model)} for name, model in names.items()]

    def made(work: Work, name: str) -> Run:
        root = folder / name
        if work.folder(root) is None:
            work.carry_out(root)
        return Run(work.folder(root) or root)

    def collected() -> Work:
        return Work("collect", collect.Config(env=ENV, policy=served("m"), tasks=12, samples=4), (), IN_FLIGHT, 100)

    def asked() -> Work:
        table = teachers(t="m", u="n")
        reads = [made(collected(), "collected")]
        return Work("replay-teachers", replay_teachers.Config(teachers=table), reads, 2 * IN_FLIGHT, 100)

    def repaired() -> tuple[Run, Run]:
        rollouts = made(Work("collect", collect.Config(policy=served("scripted"), tasks=8, samples=1)), "repaired")
        table = teachers(first="scripted", second="other", third="other")
        return rollouts, made(Work("replay-teachers", replay_teachers.Config(teachers=table), [rollouts]), "re-asked")

    def compared() -> Work:
        arms = {name: served(model) for name, model in (("A", "other"), ("B", "scripted"))}
        config = evaluate.Config(env=ENV, policies=arms, tasks=14, samples=2, control=None, with_start=False, looks=2)
        return Work("evaluate", config, (), IN_FLIGHT, 100)

    def imported() -> Work:
        path = folder / "chats.jsonl"
        said = [{"role": "user", "content": "Mend it."}, {"role": "assistant", "content": "Mended. " * 200}] * 6
        rows = (
            {"messages": said, "task_id": f"t-{i % 50}", "resolved": i % 3 == 0, "run_id": str(i)} for i in range(400)
        )
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return Work("import", import_traces.Config(paths=[str(path)], model="m"))

    def choosing() -> Work:
        recipe = folder / "recipe.yaml"
        recipe.write_text("process: []\n")
        dj = {"recipe": str(recipe), "command": stand_in(folder / "elsewhere")}
        return Work("normalize", normalize.Config(dj=dj), [made(collected(), "collected")])

    def cut() -> Work:
        package = folder / "shelf-1.5"
        write(package, SHELF)
        return Work("tasks", make_tasks.Config(package=str(package), difficulty="easy", tasks=2))

    def trained_briefly() -> Work:
        size = {"steps": 6, "prompts_per_step": 2, "generations": 4, "save_every": 2, "threads": 1}
        return Work("train", train.Config(env=ENV, policy=tiny, tasks=4, optimisation=size))

    def pairs(**more: Any) -> extract_vhack.Config:
        return extract_vhack.Config(student=policies()["honest"], pairs=PairsConfig(source="planted"), **more)

    def contrasted() -> list[Run]:
        v = carry_out(extract_vhack, runs("svd"), pairs(loss="grpo"), folder / "v")
        other = carry_out(score, [*runs("vanilla"), v], score.Config(placebos=4), folder / "score")
        return [*runs("score", "vanilla"), other]

    def probed(name: str, config: Callable[[], Any], *reads: str) -> Callable[[], Work]:
        return lambda: Work(name, config(), runs(*reads) if reads else [])

    def pool() -> teacher_pool.Config:
        return pool_config(policies()["loophole"], policies()["honest"], 20)

    replayed = ("vanilla", "projected", "projected_random")
    return {
        "collect": collected,
        "replay-teachers": asked,
        "extract-pairs": lambda: Work("extract-pairs", extract_pairs.Config(), repaired()),
        "train": trained_briefly,
        "evaluate": compared,
        "import": imported,
        "export": lambda: Work("export", export.Config(format="trl"), [made(collected(), "collected")]),
        "tasks": cut,
        "curriculum": lambda: Work("curriculum", curriculum.Config(), [made(collected(), "collected")]),
        "normalize": choosing,
        "substrates": lambda: Work("substrates", Substrates(env=ENV, policy=tiny, tasks=4, samples=2)),
        "probe-svd": probed("probe-svd", lambda: svd.Config(model=policies()["honest"])),
        "probe-extract-vhack": probed("probe-extract-vhack", pairs, "svd"),
        "probe-teacher-pool": probed("probe-teacher-pool", pool),
        "probe-replay": probed("probe-replay", lambda: replay.Config(student=policies()["honest"]), "pool", "v", "svd"),
        "probe-score": probed("probe-score", score.Config, "vanilla", "v"),
        "probe-uat": probed("probe-uat", uat.Config, "pool", *replayed, "score", "v"),
        "probe-grpo": probed("probe-grpo", lambda: grpo_config(policies()), "v", "svd"),
        "probe-compare": lambda: Work("probe-compare", compare.Config(resamples=300), contrasted()),
        "probe-watch": lambda: Work("probe-watch", watch.Config(placebos=40), runs(of="trained")),
        "probe-plot": probed("probe-plot", plot.Config, *replayed, "score"),
        "probe-selftest": probed("probe-selftest", selftest.Config),
    }


def test_no_stage_is_left_out(works: dict[str, Callable[[], Work]]) -> None:
    assert works.keys() == STAGES.keys()


@pytest.fixture(scope="module")
def two_processes() -> Iterator[list[ProcessPoolExecutor]]:
    """Two in which sets and dicts of strings come in different orders."""
    with pytest.MonkeyPatch.context() as patch:
        started = []
        for seed in ("1", "2"):
            patch.setenv("PYTHONHASHSEED", seed)
            started.append(ProcessPoolExecutor(1, get_context("spawn")))
            started[-1].submit(hash, "begun").result()
    assert len({one.submit(hash, "abc").result() for one in started}) == 2
    yield started
    for one in started:
        one.shutdown()


@pytest.mark.parametrize("stage", STAGES)
def test_twice_gives_equal_content(
    stage: str, works: dict[str, Callable[[], Work]], two_processes: list[ProcessPoolExecutor], tmp_path: Path
) -> None:
    work = works[stage]()
    for number, process in enumerate(two_processes):
        process.submit(work.carry_out, tmp_path / str(number)).result(1500)
    first, second = (work.artifacts(tmp_path / str(number)) for number in range(2))
    assert first["content"] or len(first) > 1, "there is something to compare"
    assert first == second
    forget(tmp_path)


@pytest.mark.parametrize("stage", STAGES)
def test_killed_at_random(stage: str, works: dict[str, Callable[[], Work]], server: Server, tmp_path: Path) -> None:
    place = list(STAGES).index(stage)
    kills = KILLS // len(STAGES) + (place < KILLS % len(STAGES))
    if not kills:
        pytest.skip(f"COMPOSER_KILLS={KILLS} leaves no kill for {stage}")
    work = works[stage]()
    lasts_s = work.finish(tmp_path / "whole")
    expected = work.artifacts(tmp_path / "whole")
    assert expected["content"] or len(expected) > 1, "there is something to compare"
    before = len(server.requests)
    done = kill_at_random(work, tmp_path / "killed", kills, lasts_s, seed=place)
    for number in range(len(done)):
        if (tmp_path / "killed" / str(number)).exists():
            assert work.artifacts(tmp_path / "killed" / str(number)) == expected
    asked = Counter(json.dumps([r["model"], r["messages"], r.get("seed")]) for r in server.requests[before:])
    runs = sum((tmp_path / "killed" / str(number)).exists() for number in range(len(done)))
    twice = sum(asked.values()) - runs * len(asked)
    assert twice <= kills * work.in_flight, "only what was in flight when the process died may be asked again"
    if work.max_cost is not None:
        told = paid(tmp_path / "killed")
        assert 0.01 * sum(asked.values()) - 1e-9 <= told <= runs * work.max_cost, "no call is forgotten"
    print(f"{stage}: {kills} kills over {runs} runs of {lasts_s:.1f} s, {twice} of {len(asked)} calls repeated")
    forget(tmp_path)
