"""Backends that a run is logged to besides its own files: TensorBoard, Trackio, Weights & Biases, each an extra.

Training is logged by the callbacks of transformers, and this module sets the folders they write to. Other stages log
their running totals (`RunningTotals.figures`) as each unit is finished. Trackio keeps its own folder, so that
`trackio show` finds what it logged.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from composer_stages.errors import UsageError
from composer_stages.runs.run import RunWriter

PROJECT = "composer"
Log = Callable[[Mapping[str, float], int], None]
Backend = Literal["tensorboard", "trackio", "wandb"]
Backends = Annotated[
    tuple[Backend, ...],
    BeforeValidator(
        lambda value: (value,) if isinstance(value, str) else value,
        json_schema_input_type=Backend | tuple[Backend, ...],
    ),
]
"""A setting: one name or several, as TRL writes them."""


def check(backends: Sequence[str]) -> None:
    """`UsageError` for a backend that is not installed."""
    for name in backends:
        if find_spec(name) is None:
            raise UsageError("runs.reporter-missing", name=name)


@contextmanager
def backend_folders(backends: Sequence[str], folder: Path) -> Iterator[None]:
    """Let TensorBoard and W&B write below a run's folder, and no backend on stdout; nothing without backends."""
    if not backends:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    folders = {
        "TENSORBOARD_LOGGING_DIR": str(folder / "tensorboard"),
        "WANDB_DIR": str(folder),
        "WANDB_PROJECT": PROJECT,
        "WANDB_SILENT": "true",
    }
    added = {name: value for name, value in folders.items() if name not in os.environ}  # the user's own values win
    os.environ.update(added)
    try:
        with redirect_stdout(sys.stderr):  # stdout is the command's result, which --json lets programs parse
            yield
            if "wandb" in backends:  # transformers leaves its run open, and W&B its folder, until the process ends
                import wandb

                wandb.finish()
                wandb.teardown()
    finally:
        for name in added:
            del os.environ[name]


@contextmanager
def log_units(backends: Sequence[str], out: RunWriter, name: str) -> Iterator[None]:
    """Log the running totals after every unit; the step is the number of finished units.

    name: of the run in the backends. Figures have the stage's name in front: `collect/reward`.
    """
    check(backends)
    with backend_folders(backends, out.path / "logs"):
        opened = [_open(backend, name) for backend in backends]
        stage = out.manifest.stage

        def log_to_all(figures: Mapping[str, float], step: int) -> None:
            named = {f"{stage}/{key}": value for key, value in figures.items()}
            for log, _ in opened:
                log(named, step)

        if opened:
            out.follow = log_to_all
        try:
            yield
        finally:
            out.follow = None
            for _, close in opened:
                close()


def _open(backend: str, name: str) -> tuple[Log, Callable[[], Any]]:
    """Begin a run of this name in a backend; return what logs figures at a step, and what ends the run."""
    if backend == "wandb":
        import wandb

        run: Any = wandb.init(name=name)
        return lambda figures, step: run.log(dict(figures), step=step), run.finish
    if backend == "trackio":
        trackio: Any = import_module("trackio")  # by name, since the package has no types for mypy
        trackio.init(project=PROJECT, name=name)
        return lambda figures, step: trackio.log(dict(figures), step=step), trackio.finish
    from torch.utils.tensorboard import SummaryWriter

    # No name: TensorBoard names a run by its folder, which is this run's own.
    writer: Any = SummaryWriter(os.environ["TENSORBOARD_LOGGING_DIR"])

    def log(figures: Mapping[str, float], step: int) -> None:
        for key, value in figures.items():  # add_scalars() would open a writer, and so a folder, for each figure
            writer.add_scalar(key, value, step)

    return log, writer.close
