"""Backends besides metrics.jsonl: real ones write real files; what is not installed is refused before loading."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pytest
from needs import needs

from composer_stages import collect, evaluate, train
from composer_stages.errors import UsageError
from composer_stages.runs import runner
from composer_stages.runs.run import Inputs, Manifest, Run, RunWriter
from composer_stages.runs.settings import StageConfig
from composer_stages.runs.stage import load_stage

BACKENDS = get_args(get_args(train.Config.model_fields["report_to"].annotation)[0])
ABSENT = [name for name in BACKENDS if find_spec(name) is None]


ENV = {"name": "support.environments:GuessEnv"}


def config(model: Path, *backends: str) -> train.Config:
    policy = {"model": str(model), "max_tokens": 20}
    size = {"steps": 2, "prompts_per_step": 2, "generations": 2}
    return train.Config(env=ENV, policy=policy, tasks=2, optimisation=size, report_to=backends)


def collecting(model: Path, *backends: str) -> collect.Config:
    policy = {"model": str(model), "max_tokens": 20}
    return collect.Config(env=ENV, policy=policy, tasks=2, samples=2, report_to=backends)


def evaluating(model: Path, *backends: str) -> evaluate.Config:
    policies = {name: {"model": str(model), "max_tokens": 20} for name in "AB"}
    return evaluate.Config(env=ENV, policies=policies, tasks=2, control=None, with_start=False, report_to=backends)


@pytest.mark.skipif(not ABSENT, reason="all backends are installed")
@pytest.mark.parametrize(("stage", "make"), [("train", config), ("collect", collecting), ("evaluate", evaluating)])
def test_a_backend_that_is_not_installed_is_refused_before_loading(
    tmp_path: Path, tiny: Path, stage: str, make: Callable[..., StageConfig]
) -> None:
    settings = make(tiny, *ABSENT)
    for start in (load_stage(stage).plan, lambda _, settings: runner.execute(stage, {}, settings, root=tmp_path)):
        with pytest.raises(
            UsageError, match=rf"report_to names {ABSENT[0]}.*pip install 'composer-post-training\[{ABSENT[0]}\]'"
        ):
            start(Inputs({}), settings)


@pytest.mark.parametrize("stage", [train, collect, evaluate])
def test_where_it_is_logged_changes_no_result(stage: Any) -> None:
    base = {"env": {"name": "kata"}}
    assert stage.Config(**base, report_to="wandb") == stage.Config(**base, report_to=["wandb"])
    assert stage.Config(**base, report_to="wandb").identity() == stage.Config(**base).identity()


def test_what_follows_a_run_hears_of_every_unit_once_and_no_more_after_it(tmp_path: Path) -> None:
    out = RunWriter(tmp_path, Manifest(composer="", stage="collect", stage_version=1, fingerprint=""), cache=tmp_path)
    heard: list[tuple[dict[str, float], int]] = []
    out.follow = lambda figures, step: heard.append((dict(figures), step))
    for number, reward in enumerate((1.0, 0.0)):
        out.write(f"u{number}", {"rollout": {"reward": reward, "completion_tokens": 7}})
    out.follow = None
    out.write("u2", {"rollout": {"reward": 0.0}})
    figures_by_step = [(figures["reward"], figures["sampled_tokens"], step) for figures, step in heard]
    assert figures_by_step == [(1, 7, 1), (0.5, 14, 2)]


def made(stage: str, settings: StageConfig, root: Path) -> Run:
    run = Run(runner.execute(stage, {}, settings, root=root).path)
    said = {"TENSORBOARD_LOGGING_DIR", "WANDB_DIR", "WANDB_PROJECT", "WANDB_SILENT"}
    assert not said & os.environ.keys(), "what is said to a backend is taken back"
    return run


@needs("tensorboard")
@pytest.mark.parametrize(
    ("stage", "make", "tags", "last"),
    [
        ("collect", collecting, {"collect/sampled_tokens", "collect/reward", "collect/tokens_per_second"}, 4),
        ("evaluate", evaluating, {"evaluate/sampled_tokens", "evaluate/passed/A", "evaluate/passed/B"}, 4),
        ("train", config, {"train/reward", "train/loss", "train/grad_norm"}, 2),
    ],
)
def test_tensorboard(
    tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str], stage: str, make: Any, tags: set[str], last: int
) -> None:
    from tensorboard.backend.event_processing import event_accumulator as accumulator

    run = made(stage, make(tiny, "tensorboard"), tmp_path)
    found = accumulator.EventAccumulator(str(run.path / "logs" / "tensorboard")).Reload()
    assert tags <= set(found.Tags()["scalars"]) and capsys.readouterr().out == ""
    assert {found.Scalars(tag)[-1].step for tag in tags} == {last}


@needs("wandb")
@pytest.mark.parametrize(("stage", "make"), [("train", config), ("collect", collecting), ("evaluate", evaluating)])
def test_wandb_offline(
    tmp_path: Path,
    tiny: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    make: Any,
) -> None:
    import_module("transformers.integrations")  # which prints a line when it is first imported offline
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = made(stage, make(tiny, "wandb"), tmp_path)
    (file,) = (run.path / "logs" / "wandb").glob("offline-run-*/*.wandb")
    assert (b"evaluate/passed/B" if stage == "evaluate" else b"reward") in file.read_bytes()
    assert capsys.readouterr().out == ""


@needs("trackio")
@pytest.mark.parametrize(("stage", "make"), [("train", "config"), ("collect", "collecting")])
def test_trackio(tmp_path: Path, tiny: Path, stage: str, make: str) -> None:
    """In a process of its own: Trackio reads where it writes when it is imported."""
    program = (
        f"import sys; from pathlib import Path; from tests.stages.runs.test_reporting import made, {make}\n"
        f"made({stage!r}, {make}(Path(sys.argv[2]), 'trackio'), Path(sys.argv[1]))"
    )
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}
    root = Path(__file__).parents[3]
    environment["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "tests"), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", program, str(tmp_path / "runs"), str(tiny)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert list((tmp_path / "trackio").glob("composer*"))
