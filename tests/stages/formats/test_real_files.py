"""Real files of every format that is read: how many rollouts they hold, and what is known of them."""

from collections.abc import Callable

import pytest
from needs import REAL, needs
from support.transcripts import imported, read

from composer_stages.formats.base import Trajectory

pytestmark = needs("real")
Found = list[Trajectory]


def steps(rollouts: Found) -> int:
    return sum(len(rollout.turns) for rollout in rollouts)


def resolved(rollouts: Found) -> list[bool | None]:
    return [rollout.resolved for rollout in rollouts]


def tasks(rollouts: Found, env: str = "") -> int:
    return len({rollout.task_id for rollout in rollouts if env in (rollout.env, "")})


def nemo_gym(rollouts: Found) -> bool:
    passed = sum(rollout.reward == 1.0 for rollout in rollouts if rollout.task_id == "astropy__astropy-12907")
    return (
        passed == 10
        and sum(bool(rollout.resolved) for rollout in rollouts if rollout.extra["agent"] == "mini_swe_agent_2") == 1
    )


def verifiers(rollouts: Found) -> bool:
    failed = [rollout.env for rollout in rollouts if rollout.error]
    counts = [tasks(rollouts, env) for env in ("math-python", "wordle", "continuation-quality")]
    return failed == ["gsm8k"] * 150 and counts == [5, 5, 5]


REAL_FILES: dict[str, tuple[int, Callable[[Found], bool]]] = {
    "inspect": (22, lambda rollouts: all(rollout.reward is not None for rollout in rollouts)),
    "mini-swe-agent": (4, lambda rollouts: resolved(rollouts) == [True, True, None, None] and steps(rollouts) == 51),
    "nemo-gym": (40, nemo_gym),
    "openhands": (
        11,
        lambda rollouts: (
            steps(rollouts) == 154
            and all(rollout.reward is not None for rollout in rollouts if "Pronto" in rollout.env)
        ),
    ),
    # Six trajectories and one prediction.
    "swe-agent": (
        7,
        lambda rollouts: {rollout.env for rollout in rollouts} == {"swe-agent", "swe-bench"} and steps(rollouts) == 58,
    ),
    "trl": (24, lambda rollouts: tasks(rollouts) == 4),
    "verifiers": (231, verifiers),
}


@pytest.mark.parametrize("folder", REAL_FILES)
def test_real_files(folder: str) -> None:
    number, recorded = REAL_FILES[folder]
    rollouts, drops, _ = read(REAL / "trajectories" / folder)
    assert len(rollouts) == number and not drops and recorded(rollouts)


def test_real_verifiers_rows_without_a_completion_are_reported(tmp_path) -> None:
    text = (imported(tmp_path, REAL / "trajectories" / "verifiers").path / "report.txt").read_text()
    assert "150 rollouts have a reward and no completion (150 of 0)" in text


def test_real_runs_on_the_same_instances() -> None:
    rollouts, drops, _ = read(REAL / "trajectories" / "same-instance", "mini-swe-agent")
    assert len(rollouts) == tasks(rollouts) == 18
    assert {drop.reason for drop in drops} == {"unknown_format"}  # of programs that are not read


def test_real_predictions_and_their_reports() -> None:
    rollouts, drops, _ = read(REAL / "swe-patches")
    assert len(rollouts) == 2003 and not drops and resolved(rollouts).count(True) >= 54 + 54 + 57 + 74 + 80 + 79
