"""Real files of every format that is read: how many rollouts they hold, and what is known of them."""

from collections.abc import Callable

import pytest
from needs import REAL, needs
from support.transcripts import imported, read

from stages.formats.base import Trajectory

pytestmark = needs("real")
Found = list[Trajectory]


def steps(found: Found) -> int:
    return sum(len(one.turns) for one in found)


def resolved(found: Found) -> list[bool | None]:
    return [one.resolved for one in found]


def tasks(found: Found, env: str = "") -> int:
    return len({one.task_id for one in found if env in (one.env, "")})


def nemo_gym(found: Found) -> bool:
    passed = sum(one.reward == 1.0 for one in found if one.task_id == "astropy__astropy-12907")
    return passed == 10 and sum(bool(one.resolved) for one in found if one.extra["agent"] == "mini_swe_agent_2") == 1


def verifiers(found: Found) -> bool:
    failed = [one.env for one in found if one.error]
    played = [tasks(found, env) for env in ("math-python", "wordle", "continuation-quality")]
    return failed == ["gsm8k"] * 150 and played == [5, 5, 5]


REAL_FILES: dict[str, tuple[int, Callable[[Found], bool]]] = {
    "inspect": (22, lambda found: all(one.reward is not None for one in found)),
    "mini-swe-agent": (4, lambda found: resolved(found) == [True, True, None, None] and steps(found) == 51),
    "nemo-gym": (40, nemo_gym),
    "openhands": (
        11,
        lambda found: steps(found) == 154 and all(one.reward is not None for one in found if "Pronto" in one.env),
    ),
    # Six trajectories and one prediction.
    "swe-agent": (7, lambda found: {one.env for one in found} == {"swe-agent", "swe-bench"} and steps(found) == 58),
    "trl": (24, lambda found: tasks(found) == 4),
    "verifiers": (231, verifiers),
}


@pytest.mark.parametrize("folder", REAL_FILES)
def test_real_files(folder: str) -> None:
    number, known = REAL_FILES[folder]
    found, drops, _ = read(REAL / "trajectories" / folder)
    assert len(found) == number and not drops and known(found)


def test_real_verifiers_rows_without_a_completion_are_explained(tmp_path) -> None:
    said = (imported(tmp_path, REAL / "trajectories" / "verifiers").path / "report.txt").read_text()
    assert "150 rollouts have a reward and no completion (150 of 0)" in said


def test_real_runs_on_the_same_instances() -> None:
    found, drops, _ = read(REAL / "trajectories" / "same-instance", "mini-swe-agent")
    assert len(found) == tasks(found) == 18
    assert {drop.reason for drop in drops} == {"unknown_format"}  # of programs that are not read


def test_real_predictions_and_their_reports() -> None:
    found, drops, _ = read(REAL / "swe-patches")
    assert len(found) == 2003 and not drops and resolved(found).count(True) >= 54 + 54 + 57 + 74 + 80 + 79
