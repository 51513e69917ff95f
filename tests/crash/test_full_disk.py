"""A full disk: one sentence, exit code 1, everything finished kept, and the run goes on once there is room."""

import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
from support.command_line import PATHS, environment
from support.disturbances import Disk, in_own_mounts, preload
from support.models import save_tiny

from composer_stages.sandbox.bubblewrap import find_bwrap

pytestmark = pytest.mark.slow


def collect_on(size: int, keep: Path, model: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run collect with its artifacts on a small file system of its own, and copy them to `keep` afterwards."""
    command = (
        f"cp -r {keep}/. /mnt/ && {sys.executable} -m composer_cli collect --env support.environments:GuessEnv "
        f"--policy {model} -s policy.max_tokens=60 -s tasks=40 -s samples=8 -q --artifacts /mnt {' '.join(words)}; "
        f"code=$?; cp -r /mnt/. {keep}/; exit $code"
    )
    wrap = [find_bwrap(), "--dev-bind", "/", "/", "--size", str(size), "--tmpfs", "/mnt", "bash", "-c", command]
    return subprocess.run(wrap, env=environment(keep, PYTHONPATH=PATHS), capture_output=True, text=True, timeout=120)


def test_nothing_is_lost_when_the_disk_is_full(tmp_path: Path) -> None:
    model, keep = save_tiny(tmp_path / "model"), tmp_path / "keep"
    keep.mkdir()
    full = collect_on(190_000, keep, model)
    assert full.returncode == 5, full.stderr
    assert "The disk is full" in full.stderr and "--resume" in full.stderr
    assert "Traceback" not in full.stderr
    journal = next(keep.glob("collect/2*/steps/*.open"))
    done = journal.read_bytes()
    record = orjson.loads(next(keep.glob("collect/2*/manifest.json")).read_bytes())
    assert record["status"] == "failed" and "The disk is full" in record["reason"]
    assert done.count(b"\n") >= 32 and done.endswith(b"\n")
    resumed = collect_on(100_000_000, keep, model, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "320 rollouts" in resumed.stdout


def put_gradients(folder: Path) -> None:
    """Write a matrix of 4 MiB, as `probe replay` does."""
    import torch

    from composer_stages.gradients.tensors import GradientStore, Layout

    GradientStore.create(folder, Layout({"a": 2**18}), 4, {}).put(0, torch.ones(4, 2**18))


def accumulate_weights(folder: Path) -> None:
    """Sum the gradients of weights of 2 MiB, as `probe replay` does for the drift."""
    from probe_faults.half_precision import wide_student

    from composer_stages.gradients.per_row import TokenRow
    from composer_stages.probe.metrics import weight_direction

    pair = tuple(TokenRow([1, 2], [word, 4], [True, True]) for word in (3, 5))
    weight_direction(wide_student(512), [pair], folder / "weights.bin")


def errno_on_a_small_disk(place: Path, write: Callable[[Path], None]) -> int | None:
    """Return the error number of a write on a disk of 1 MiB, None where it does not fail."""
    disk = Disk(place, 2**20)
    try:
        write(disk.folder)
    except OSError as error:
        return error.errno
    return None


@pytest.mark.parametrize("write", [put_gradients, accumulate_weights])
def test_matrices_mapped_into_memory_on_a_full_disk(write: Callable[[Path], None], tmp_path: Path) -> None:
    """An error as of any write, where a mapping alone would end the process with SIGBUS."""
    preload("composer_stages.gradients.per_row", "transformers", "scipy.linalg")
    assert in_own_mounts(errno_on_a_small_disk, tmp_path / "disk", write) == errno.ENOSPC
