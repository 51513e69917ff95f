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

from stages.errors import UsageError
from stages.runs.artifact import RunWriter

PROJECT = "composer"
Log = Callable[[Mapping[str, float], int], None]
Backends = Annotated[
    tuple[Literal["tensorboard", "trackio", "wandb"], ...],
    BeforeValidator(lambda given: (given,) if isinstance(given, str) else given),
]
"""A setting: one name or several, as TRL writes them."""


def check(backends: Sequence[str]) -> None:
    """`UsageError` for a backend that is not installed."""
    for name in backends:
        if find_spec(name) is None:
            raise UsageError(
                f"report_to names {name}, which is not installed. "
                f"Install the extra, `pip install -e .[{name}]`, or leave it out: the run's own files hold as much."
            )


@contextmanager
def backend_folders(backends: Sequence[str], folder: Path) -> Iterator[None]:
    """Let TensorBoard and W&B write below a run's folder, and no backend on stdout; nothing without backends."""
    if not backends:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {
        "TENSORBOARD_LOGGING_DIR": str(folder / "tensorboard"),
        "WANDB_DIR": str(folder),
        "WANDB_PROJECT": PROJECT,
        "WANDB_SILENT": "true",
    }
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        with redirect_stdout(sys.stderr):
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
    """Log what a run has come to, after every unit; the step is the number of finished units.

    name: of the run in the backends. Figures stand under the name of the stage: `collect/reward`.
    """
    check(backends)
    with backend_folders(backends, out.path / "logs"):
        opened = [OPEN[backend](name) for backend in backends]
        stage = out.manifest.stage

        def log(figures: Mapping[str, float], step: int) -> None:
            named = {f"{stage}/{key}": value for key, value in figures.items()}
            for write, _ in opened:
                write(named, step)

        if opened:
            out.follow(log)
        try:
            yield
        finally:
            out.follow(None)
            for _, close in opened:
                close()


def _tensorboard(name: str) -> tuple[Log, Callable[[], Any]]:
    del name  # the folder is the run's own
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(os.environ["TENSORBOARD_LOGGING_DIR"])

    def log(figures: Mapping[str, float], step: int) -> None:
        for key, value in figures.items():
            writer.add_scalar(key, value, step)

    return log, writer.close


def _wandb(name: str) -> tuple[Log, Callable[[], Any]]:
    import wandb

    run: Any = wandb.init(name=name)
    return lambda figures, step: run.log(dict(figures), step=step), run.finish


def _trackio(name: str) -> tuple[Log, Callable[[], Any]]:
    backend: Any = import_module("trackio")  # which carries no types
    backend.init(project=PROJECT, name=name)
    return lambda figures, step: backend.log(dict(figures), step=step), backend.finish


OPEN: Mapping[str, Callable[[str], tuple[Log, Callable[[], Any]]]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
}
