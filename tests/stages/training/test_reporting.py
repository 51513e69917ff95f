"""Backends besides metrics.jsonl: real ones write real files; what is not installed is refused before loading."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pytest

from stages import train
from stages.errors import UsageError
from stages.runs import runner
from stages.runs.artifact import Run
from stages.runs.inputs import Inputs

BACKENDS = get_args(get_args(train.Config.model_fields["report_to"].annotation)[0])
ABSENT = [name for name in BACKENDS if find_spec(name) is None]


def config(model: Path, *backends: str, **more: Any) -> train.Config:
    return train.Config(
        env={"name": "support.environments:GuessEnv"},
        policy={"model": str(model), "max_tokens": 20},
        tasks=2,
        optimisation={"steps": 2, "prompts_per_step": 2, "generations": 2},
        report_to=backends,
        **more,
    )


@pytest.mark.skipif(not ABSENT, reason="all backends are installed")
def test_a_backend_that_is_not_installed_is_refused_before_loading(tmp_path: Path, tiny: Path) -> None:
    settings = config(tiny, *ABSENT)
    for start in (train.plan, lambda inputs, settings: runner.execute("train", {}, settings, root=tmp_path)):
        with pytest.raises(UsageError, match=rf"report_to names {ABSENT[0]}.*pip install -e \.\[{ABSENT[0]}\]"):
            start(Inputs({}), settings)


def test_where_it_is_logged_changes_no_result() -> None:
    base = {"env": {"name": "kata"}}
    assert train.Config(**base, report_to="wandb") == train.Config(**base, report_to=["wandb"])
    assert train.Config(**base, report_to="wandb").identity() == train.Config(**base).identity()


def trained(root: Path, tiny: Path, backend: str) -> Run:
    run = Run(runner.execute("train", {}, config(tiny, backend), root=root).path)
    said = {"TENSORBOARD_LOGGING_DIR", "WANDB_DIR", "WANDB_PROJECT", "WANDB_SILENT"}
    assert not said & os.environ.keys(), "what is said to a backend is taken back"
    return run


def test_tensorboard(tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = trained(tmp_path, tiny, "tensorboard")
    found = accumulator.EventAccumulator(str(run.path / "logs" / "tensorboard")).Reload()
    assert {"train/reward", "train/loss", "train/grad_norm"} <= set(found.Tags()["scalars"])
    assert [event.step for event in found.Scalars("train/reward")] == [1, 2]
    assert capsys.readouterr().out == ""
    assert (run.beside("metrics.jsonl") or b"").count(b"\n") == 2


def test_wandb_offline(
    tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = trained(tmp_path, tiny, "wandb")
    (file,) = (run.path / "logs" / "wandb").glob("offline-run-*/*.wandb")
    assert b"reward" in file.read_bytes()
    assert capsys.readouterr().out == ""


def test_trackio(tmp_path: Path, tiny: Path) -> None:
    """In a process of its own: Trackio reads where it writes when it is imported."""
    pytest.importorskip("trackio")
    program = (
        "import sys; from pathlib import Path; from tests.stages.training.test_reporting import trained\n"
        "trained(Path(sys.argv[1]), Path(sys.argv[2]), 'trackio')"
    )
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}
    root = Path(__file__).parents[3]
    environment["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "tests"), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", program, str(tmp_path / "runs"), str(tiny)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert list((tmp_path / "trackio").glob("composer*"))
