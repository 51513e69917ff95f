"""Backends that training is logged to besides metrics.jsonl: TensorBoard, Trackio, Weights & Biases, each an extra.

The callbacks are those of transformers; here is said where they write. Trackio keeps its own folder, so that
`trackio show` finds what it logged.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from pathlib import Path

from stages.errors import UsageError

PROJECT = "composer"


def check(backends: Sequence[str]) -> None:
    """`UsageError` for a backend that is not installed."""
    for name in backends:
        if find_spec(name) is None:
            raise UsageError(
                f"report_to names {name}, which is not installed. "
                f"Install the extra, `pip install -e .[{name}]`, or leave it out: metrics.jsonl is always written."
            )


@contextmanager
def writing(backends: Sequence[str], folder: Path) -> Iterator[None]:
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
            if "wandb" in backends:  # transformers leaves its run open until the process ends
                import wandb

                wandb.finish()
    finally:
        for name in added:
            del os.environ[name]
