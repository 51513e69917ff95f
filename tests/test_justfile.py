"""The recipes that the probe is used by: they exist, and what they would run is what they say."""

import subprocess
import sys
from pathlib import Path

import pytest

from composer_cli import settings

ROOT = Path(__file__).parents[1]


def dry_run(*words: str) -> list[str]:
    """The commands that a recipe would run."""
    command = [str(Path(sys.executable).parent / "just"), "--dry-run", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line.removeprefix("OMP_NUM_THREADS=1 ") for line in done.stderr.splitlines() if line]


@pytest.mark.parametrize("name", ["uat", "smoke", "grpo", "lora", "contrastive"])
def test_the_chains_run_a_preset_that_is_shipped(name: str) -> None:
    assert dry_run(f"probe-{name}") == [f"composer run --preset probe-{name} --resume "]
    assert f"probe-{name}" in settings.preset_names()


def test_a_pool_has_as_many_problems_as_are_asked_for() -> None:
    assert dry_run("probe-teacher-pool", "12") == ["composer probe teacher-pool --resume --set problems=12 "]


@pytest.mark.parametrize("arm", ["vanilla", "projected"])
def test_a_replay_makes_what_it_needs_first_and_reads_the_newest_pool(arm: str) -> None:
    first, second, third = dry_run(f"probe-{arm}-replay", "9")
    assert first.startswith("composer probe svd ") and second.startswith("composer probe extract-vhack ")
    assert f"replay --arm {arm} " in third and "steps=9" in third and third.count("--from probe-") == 3


def test_the_selftest() -> None:
    assert dry_run("probe-selftest", "--seed", "1") == ["composer probe selftest --resume --seed 1"]
