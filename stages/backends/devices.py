"""The GPUs of this machine that work can be placed on, by the names that CUDA_VISIBLE_DEVICES gives them.

A process that loads a model takes one GPU unless its preset asks for more (`gpus = N`). Processes that run at the same
time get different ones, each through CUDA_VISIBLE_DEVICES, and wait while all are taken; a process that is started
alone takes the first. Names are those of the variable as it was given: numbers, UUIDs, MIG ids.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from composer_stages.errors import ComposerError, UsageError
from composer_stages.words import Sentence

VISIBLE = "CUDA_VISIBLE_DEVICES"
COUNT = "COMPOSER_GPUS"
"""Environment variable with the number of GPUs to assume instead of those that torch finds, to rehearse placement."""
NVIDIA = (Path("/dev/nvidiactl"), Path("/usr/lib/wsl/lib/libcuda.so.1"))
"""Files of NVIDIA's driver, the second under WSL. A container without GPUs lacks them, where /proc/driver/nvidia would
be its host's."""
DRIVERS = (*NVIDIA, Path("/dev/kfd"))
"""With that of AMD's driver."""

CUDA_DRIVER = 580
"""Oldest major version of NVIDIA's driver that runs programs built for CUDA 13 (CUDA 13 release notes, minor version
compatibility)."""


def visible(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the names of the GPUs that this process may use; none without a driver, or with a torch built for CPUs."""
    setting = environment.get(VISIBLE)
    if setting is not None and not _names(setting):
        return ()
    count = _count(environment)
    return tuple(map(str, range(count))) if setting is None else _names(setting)[:count]


def _names(setting: str) -> tuple[str, ...]:
    """Return the names before the first that ends the list: CUDA ignores what follows an invalid one, such as -1."""
    names: list[str] = []
    for name in map(str.strip, setting.split(",")):
        if not name or name.startswith("-"):
            break
        names.append(name)
    return tuple(names)


def _count(environment: Mapping[str, str]) -> int:
    if assumed := environment.get(COUNT, "").strip():
        if not assumed.isdigit():
            raise UsageError("backends.gpu-count-invalid", variable=COUNT, assumed=assumed)
        return int(assumed)
    if not any(path.exists() for path in DRIVERS):
        return 0  # importing torch takes seconds
    import torch

    # Counted through NVML, without a CUDA context, which would take memory of the first GPU. It heeds the variable.
    return torch.cuda.device_count()


def has_nvidia(environment: Mapping[str, str] = os.environ, driver: Sequence[Path] = NVIDIA) -> bool:
    """Return whether a program with its own CUDA finds a GPU on this machine, independently of our build of torch."""
    return any(path.exists() for path in driver) and bool(_names(environment.get(VISIBLE, "0")))


def check_cuda_driver(environment: Mapping[str, str] = os.environ) -> str:
    """Return in words whether NVIDIA's driver runs builds for CUDA 13; `UsageError` for one that is too old."""
    smi = shutil.which("nvidia-smi", path=os.pathsep.join([environment.get("PATH", ""), "/usr/lib/wsl/lib"]))
    command = [str(smi), "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True).stdout if smi else ""
    version = next(iter(answer.split()), "")
    if not version[:1].isdigit():  # also what nvidia-smi writes where no driver answers
        return Sentence("backends.driver-unknown", cuda_driver=CUDA_DRIVER)
    if int(version.partition(".")[0]) < CUDA_DRIVER:
        raise UsageError("backends.driver-too-old", version=version, cuda_driver=CUDA_DRIVER)
    return Sentence("backends.driver-fits", version=version)


def used(gpus: int, names: Sequence[str] | None = None) -> str:
    """Return the device of a process on the first `gpus` of these GPUs (default: all visible), in words."""
    gpu_names = (visible() if names is None else names)[:gpus] if gpus else ()
    if not gpu_names:
        return "cpu"
    return f"{'GPU ' if gpu_names[0].isdigit() else ''}{', '.join(gpu_names)}"  # UUIDs begin with GPU- or MIG-


def restricted(names: Sequence[str]) -> dict[str, str]:
    """Return the environment variables that restrict a process to these GPUs."""
    return {VISIBLE: ",".join(names)}


@dataclass
class Pool:
    """A pool of GPUs for processes; without GPUs `take` returns none and always succeeds."""

    names: Sequence[str] = field(default_factory=visible)

    def __post_init__(self) -> None:
        self._free = list(self.names)

    def needs(self, gpus: int) -> int:
        """Return the number of GPUs that a process takes: 0 on a machine without GPUs."""
        return gpus if self.names else 0

    def take(self, gpus: int) -> tuple[str, ...] | None:
        """Take GPUs in order; None while too few are free."""
        count = self.needs(gpus)
        if len(self._free) < count:
            return None
        gpu_names, self._free = tuple(self._free[:count]), self._free[count:]
        return gpu_names

    def give_back(self, gpu_names: Sequence[str]) -> None:
        """Return GPUs whose process has ended."""
        self._free = sorted([*self._free, *gpu_names], key=list(self.names).index)

    def check(self, process: str, gpus: int) -> None:
        """`UsageError` for a process that would wait for ever for more GPUs than there are."""
        if self.needs(gpus) > len(self.names):
            raise UsageError(
                "backends.too-few-gpus", process=process, gpus=gpus, names=list(self.names), variable=VISIBLE
            )


if __name__ == "__main__":
    try:
        print(check_cuda_driver())
    except ComposerError as error:
        sys.exit(str(error))
