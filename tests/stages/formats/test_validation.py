"""Fields of trajectories are checked strictly, except for what is kept as JSON text."""

from typing import Any

import pytest

from stages.formats.base import ImportedTurn, Trajectory
from stages.formats.reading import check


def trajectory(**fields: Any) -> Trajectory:
    opening = [{"role": "user", "content": "q"}]
    return Trajectory(
        **{"task_id": "t", "env": "e", "opening": opening, "turns": [ImportedTurn("a")], "missing": set(), **fields}
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"reward": 1, "cost_usd": 0.5, "seed": 3, "resolved": True, "error": ("kind", "words")},
        {"sampling": "text", "task_data": [1], "tools": "text", "extra": None},
        {"turns": [ImportedTurn("a", commands=[], prompt_ids=[1], completion_ids=[2], logprobs=[-1, -0.5])]},
    ],
)
def test_a_fitting_trajectory_comes_back_unconverted(fields: dict[str, Any]) -> None:
    given = trajectory(**fields)
    assert check(given) is given and (given.reward is None or type(given.reward) is int)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reward": "high"}, "reward is 'high'"),
        ({"reward": True}, "reward is True"),
        ({"seed": 1.0}, "seed is 1.0"),
        ({"resolved": 1}, "resolved is 1"),
        ({"model": 3}, "model is 3"),
        ({"task_id": None}, "task_id is None"),
        ({"opening": [{"role": 1, "content": "q"}]}, "opening.0.role is 1"),
        ({"turns": [ImportedTurn("a", logprobs=[-1.0, "x"])]}, "turns.0.logprobs.1 is 'x'"),  # type: ignore[list-item]
        ({"turns": [ImportedTurn("a", prompt_ids=(1,))]}, "turns.0.prompt_ids is (1,)"),  # type: ignore[arg-type]
    ],
)
def test_the_first_field_of_a_wrong_type_is_named_with_its_value(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError) as refused:
        check(trajectory(**fields))
    assert str(refused.value) == message
