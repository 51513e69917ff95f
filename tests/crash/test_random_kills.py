"""Every stage twice, and disturbed at random moments by signals and by its disk: equal ends, and little is paid twice.

COMPOSER_KILLS is the number of kills over all stages and the ways to run them (`test_ways_killed.py`) together, and
COMPOSER_CRASH_SEED the seed of their moments; `./dev crash 100` sets both.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from needs import needs
from probe_faults.loophole_world import PAIR_SOURCE
from support.command_line import repair
from support.data_juicer import stand_in
from support.disturbances import (
    FULL,
    PARTS,
    READ_ONLY,
    Outcome,
    Work,
    bought_twice,
    contents,
    cut_power,
    disturb,
    finish,
    folders,
    in_own_mounts,
    on_failing_disk,
    preload,
    row,
    shares,
)
from support.models import save_tiny
from support.sample_package import SHELF, write
from support.server import Reply, Server, answer, serving

from composer_stages import (
    STAGES,
    collect,
    curriculum,
    evaluate,
    export,
    extract_pairs,
    import_traces,
    replay_teachers,
    train,
)
from composer_stages.comparison.config import Config as Comparing
from composer_stages.policy.base import PolicyConfig
from composer_stages.probe import extract_vhack, replay, score, svd, teacher_pool, uat
from composer_stages.probe.extract_vhack import HackPairsConfig
from composer_stages.runs.run import Run
from composer_stages.runs.stage import load_stage
from tests.stages.probe.conftest import chain, models, planted, trained  # noqa: F401  (fixtures)
from tests.stages.probe.running import HINTED, PLANTED, carry_out, pool_config

HEAVY = ["composer_stages.training.report", "composer_stages.probe.checks.direction", "duckdb", "scipy.stats", "openai"]


def paid(root: Path) -> float:
    """What all runs below say that they paid, or possibly paid, in USD."""
    found = [json.loads(path.read_bytes()) for path in root.glob("*/*/2*/manifest.json")]
    return sum(run["cost_usd"] + run["possibly_usd"] for run in found)


def assert_outputs(found: dict[str, Any]) -> None:
    """Assert that there is something to compare besides the settings: rows, or files such as the charts of a plot."""
    assert any(not name.endswith("/config.json") for name in found)


def forget(root: Path) -> None:
    """Delete runs that have been compared."""
    shutil.rmtree(root, ignore_errors=True)


pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
KILLS = int(os.environ.get("COMPOSER_KILLS", len(PARTS)))
SHARES = dict(shares(PARTS, KILLS))
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
    preload(*HEAVY, *(entry.module for entry in STAGES.values()))
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
        if not folders(root):
            work.carry_out(root)
        return Run(folders(root)[0])

    def side(stage: str, reads: Sequence[Run] = (), **config: Any) -> Work:
        """The work of a side feature, which nothing here imports."""
        return Work(stage, load_stage(stage).config(**config), reads)

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

    def two_logs() -> Work:
        paths = [folder / "before.jsonl", folder / "after.jsonl"]
        for side, path in enumerate(paths):
            rows = ({"id": f"t-{i}", "score": int(i % 3 <= side), "category": f"c-{i % 4}"} for i in range(2000))
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return Work("compare", Comparing(paths=[str(path) for path in paths]))

    def choosing() -> Work:
        recipe = folder / "recipe.yaml"
        recipe.write_text("process: []\n")
        dj = {"recipe": str(recipe), "command": stand_in(folder / "elsewhere")}
        return side("normalize", [made(collected(), "collected")], dj=dj)

    def cut() -> Work:
        package = folder / "shelf-1.5"
        write(package, SHELF)
        return side("tasks", package=str(package), difficulty="easy", tasks=2)

    def trained_briefly() -> Work:
        size = {"steps": 6, "prompts_per_step": 2, "generations": 4, "save_every": 2, "threads": 1}
        return Work("train", train.Config(env=ENV, policy=tiny, tasks=4, optimisation=size))

    def pairs(**more: Any) -> extract_vhack.Config:
        return extract_vhack.Config(student=policies()["honest"], pairs=HackPairsConfig(source=PAIR_SOURCE), **more)

    def contrasted() -> list[Run]:
        v = carry_out(extract_vhack, runs("svd"), pairs(loss="grpo"), folder / "v")
        other = carry_out(score, [*runs("vanilla"), v], score.Config(placebos=4), folder / "score")
        return [*runs("score", "vanilla"), other]

    def probed(name: str, config: Callable[[], Any], *reads: str) -> Callable[[], Work]:
        return lambda: Work(name, config(), runs(*reads) if reads else [])

    def pool() -> teacher_pool.Config:
        return pool_config(policies()["loophole"], policies()["honest"], 20)

    def between() -> Work:
        env = PLANTED.model_copy(update={"options": HINTED})
        return side("probe-start", env=env, base=policies()["honest"], teacher=policies()["loophole"], max_steps=1)

    replayed = ("vanilla", "projected", "projected_random")
    return {
        "collect": collected,
        "replay-teachers": asked,
        "extract-pairs": lambda: Work("extract-pairs", extract_pairs.Config(), repaired()),
        "train": trained_briefly,
        "evaluate": compared,
        "import": imported,
        "compare": two_logs,
        "export": lambda: Work("export", export.Config(format="trl"), [made(collected(), "collected")]),
        "tasks": cut,
        "curriculum": lambda: Work("curriculum", curriculum.Config(), [made(collected(), "collected")]),
        "normalize": choosing,
        "frameworks": lambda: side("frameworks", env=ENV, policy=tiny, tasks=4, samples=2),
        "probe-svd": probed("probe-svd", lambda: svd.Config(model=policies()["honest"])),
        "probe-extract-vhack": probed("probe-extract-vhack", pairs, "svd"),
        "probe-teacher-pool": probed("probe-teacher-pool", pool),
        "probe-replay": probed("probe-replay", lambda: replay.Config(student=policies()["honest"]), "pool", "v", "svd"),
        "probe-score": probed("probe-score", score.Config, "vanilla", "v"),
        "probe-uat": probed("probe-uat", uat.Config, "pool", *replayed, "score", "v"),
        "probe-start": between,
        "probe-compare": lambda: side("probe-compare", contrasted(), resamples=300),
        "probe-watch": lambda: side("probe-watch", runs(of="trained"), placebos=40),
        "probe-plot": lambda: side("probe-plot", runs(*replayed, "score")),
    }


def test_no_stage_is_left_out(works: dict[str, Callable[[], Work]]) -> None:
    assert works.keys() >= STAGES.keys()


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
    first, second = (contents(tmp_path / str(number)) for number in range(2))
    assert_outputs(first)
    assert first == second
    forget(tmp_path)


@pytest.fixture(scope="module")
def undisturbed(
    works: dict[str, Callable[[], Work]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Work, float, dict[str, Any]]]:
    """A stage's work, the seconds that it takes, and what comes of it when nothing disturbs it; made once."""
    folder = tmp_path_factory.mktemp("undisturbed")

    @cache
    def made(stage: str) -> tuple[Work, float, dict[str, Any]]:
        work = works[stage]()
        lasts_s = finish(work, folder / stage)
        found = contents(folder / stage)
        assert_outputs(found)
        forget(folder / stage)
        return work, lasts_s, found

    return made


Undisturbed = Callable[[str], tuple[Work, float, dict[str, Any]]]


@pytest.mark.parametrize("stage", STAGES)
def test_killed_at_random(
    stage: str, undisturbed: Undisturbed, server: Server, outcome: Outcome, tmp_path: Path
) -> None:
    signals = SHARES[stage]
    if not signals:
        pytest.skip(f"COMPOSER_KILLS={KILLS} leaves no kill for {stage}")
    work, lasts_s, expected = undisturbed(stage)
    before = len(server.requests)
    outcome.part = stage
    disturb(outcome, work, tmp_path, signals, lasts_s, seed=list(STAGES).index(stage))
    for root in outcome.roots:
        assert contents(root) == expected
    told(work, server.requests[before:], outcome, tmp_path, lasts_s)


def told(work: Work, requests: Sequence[dict[str, Any]], outcome: Outcome, root: Path, lasts_s: float) -> None:
    """Assert that only calls in flight were asked again, and that all are accounted for; print a line."""
    twice = bought_twice(work, requests, outcome)
    assert twice <= outcome.in_flight
    if work.max_cost is not None:
        assert 0.01 * len(requests) - 1e-9 <= paid(root) <= len(outcome.roots) * work.max_cost, "no call is forgotten"
    print(row(outcome, lasts_s, twice if work.in_flight else None))
    forget(root)


@needs("compiler")
@pytest.mark.parametrize("stage", STAGES)
def test_power_cuts(stage: str, undisturbed: Undisturbed, server: Server, outcome: Outcome, tmp_path: Path) -> None:
    """Six times as many in `train` and `evaluate`, which write the most into their scratch folders and journals."""
    cuts = len(SHARES[stage]) * (6 if stage in ("train", "evaluate") else 1)
    if not cuts:
        pytest.skip(f"COMPOSER_KILLS={KILLS} leaves no power cut for {stage}")
    work, lasts_s, expected = undisturbed(stage)
    before = len(server.requests)
    outcome.part = stage
    cut_power(outcome, work, tmp_path, cuts, list(STAGES).index(stage), expected)
    told(work, server.requests[before:], outcome, tmp_path, lasts_s)


@pytest.mark.parametrize("stage", STAGES)
def test_a_disk_that_fails(stage: str, undisturbed: Undisturbed, outcome: Outcome, tmp_path: Path) -> None:
    """Full or read-only from a random moment on: one sentence, exit code 1, and the run goes on once it is mended."""
    if not SHARES[stage]:
        pytest.skip(f"COMPOSER_KILLS={KILLS} leaves nothing for {stage}")
    work, lasts_s, expected = undisturbed(stage)
    faults = [(FULL, READ_ONLY)[n % 2] for n in range(max(2, len(SHARES[stage])))]
    outcome.part = stage
    disturbed, found = in_own_mounts(on_failing_disk, work, tmp_path, faults, lasts_s, list(STAGES).index(stage))
    outcome.disturbed, outcome.roots = disturbed, [tmp_path] * len(found)
    assert found and all(one == expected for one in found)
    print(row(outcome, lasts_s))
    forget(tmp_path)
