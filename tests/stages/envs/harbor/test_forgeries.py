"""The generated forgeries of the other environments against a Harbor task, by how the task is graded."""

from pathlib import Path

import pytest
from support import harbor_containers
from support.harbor_forgeries import FORGED, MODES, ON_MACHINE, every_family, grade_forgery, opened, table

FEW = ("returned: a skip", "an integer for a float, and an end")
NULL_IN_CONTAINERS: dict[str, set[str]] = {"shared": {"other programs"}, "separate": set()}
"""What leaves the verifier without its shell, and so without a reward. Bubblewrap shows programs for reading alone."""


def test_there_are_many() -> None:
    assert len(FORGED) >= 300


@pytest.mark.parametrize("mode", ["exported", "separate, asked"])
@pytest.mark.parametrize("name", [*FEW[:1], pytest.param(FEW[1], marks=pytest.mark.slow)])
def test_a_forgery_is_not_paid(tmp_path: Path, mode: str, name: str) -> None:
    with opened(mode, tmp_path) as (env, task):
        grade = grade_forgery(env, task, next(one for one in FORGED if one.name == name))
    assert grade.reward == 0.0, grade.error


@pytest.mark.slow
def test_what_each_mode_protects_from(tmp_path: Path) -> None:
    found = {mode: table(mode, every_family(), tmp_path / mode) for mode in MODES}
    wrong = {mode: each.total["wrong"] for mode, each in found.items()}
    assert wrong["separate, asked"] == 0, str(found["separate, asked"])
    assert found["shared"].rows[ON_MACHINE]["wrong"] == found["separate"].rows[ON_MACHINE]["wrong"] == 0
    # Code that the tests import is in their process, wherever that is.
    assert wrong["shared"] > 0 and wrong["separate"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["shared", "separate"])
def test_what_an_agent_does_to_its_container_is_not_paid(tmp_path: Path, mode: str) -> None:
    with harbor_containers.podman(tmp_path) as missing:
        if missing:
            pytest.skip(missing)
        with opened(mode, tmp_path, "podman") as (env, task):
            machine = [forgery for forgery in FORGED if forgery.family == ON_MACHINE]
            grades = {forgery.name: grade_forgery(env, task, forgery) for forgery in machine}
    paid = {name for name, grade in grades.items() if grade.reward and not grade.hacked}
    null = {name for name, grade in grades.items() if grade.reward is None}
    assert len(grades) == 6 and not paid and null == NULL_IN_CONTAINERS[mode], grades
