"""Trajectories of several arms from one seed, and a student between base and teacher."""

from typing import Any

import pytest
import torch

from stages.errors import BadInput
from stages.policy.base import PolicyConfig
from stages.probe import grpo
from stages.probe.trajectories import find_alpha, interpolate_weights
from stages.runs import store
from stages.runs.run import Run
from tests.stages.probe.running import HINTED, PLAIN, PLANTED, carry_out


def test_alpha_is_bisected_and_a_teacher_that_never_hacks_is_refused() -> None:
    alpha, rate = find_alpha(lambda place: place**2)
    assert 0.3 <= rate <= 0.6 and rate == alpha**2
    with pytest.raises(BadInput, match="No mixture"):
        find_alpha(lambda place: 0.0)


@pytest.fixture(scope="module")
def arms(
    chain: dict[str, Run], models: dict[str, PolicyConfig], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Run]:
    """Two steps of one seed in three arms."""
    size = {"alpha": 0.75, "seeds": [3], "steps": 2, "problems": 6, "samples": 4, "eval_problems": 0}
    given = {"env": PLANTED, "options": HINTED, "plain_options": PLAIN, "student": models["honest"]}
    folder = tmp_path_factory.mktemp("arms")
    return {
        arm: carry_out(
            grpo,
            [chain["v"], chain["svd"]],
            grpo.Config(arm=arm, teacher=models["loophole"], **given, **size),
            folder / arm,
        )
        for arm in ("vanilla", "projected", "two_sided")
    }


def step_of(run: Run, number: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The diagnostics and the rows of a step of the seed."""
    folder = run.path / "seed3"
    return store.read_json(folder / f"step_{number:03d}.diag.json"), list(
        store.read_lines(folder / f"step_{number:03d}.jsonl.gz")
    )


def test_arms_sample_the_same_first_groups_and_only_projection_changes_the_step(arms: dict[str, Run]) -> None:
    first = {arm: step_of(run, 0) for arm, run in arms.items()}
    columns = ("row_uid", "completion_ids", "advantage", "cos_stack", "behav_logp")
    plain = [[row[name] for name in columns] for row in first["vanilla"][1]]
    for account, rows in first.values():
        assert [[row[name] for name in columns] for row in rows] == plain
        assert account["cos_in"] == first["vanilla"][0]["cos_in"] and account["delta_norm"] > 0
    assert first["vanilla"][0]["change"] == 0 < first["projected"][0]["change"] <= first["two_sided"][0]["change"]
    assert abs(first["two_sided"][0]["cos_upd_out"]) < 1e-5 and first["projected"][0]["cos_upd_out"] < 1e-5
    assert abs(first["vanilla"][0]["cos_upd_out"]) > 1e-3
    second = [[row["cos_stack"] for row in step_of(run, 1)[1]] for run in arms.values()]
    assert second[0] != second[1] and second[0] != second[2]


def test_groups_hold_whole_problems_whose_advantages_cancel(arms: dict[str, Run]) -> None:
    for number in (0, 1):
        account, rows = step_of(arms["vanilla"], number)
        groups: dict[str, list[float]] = {}
        for row in rows:
            groups.setdefault(row["problem_id"], []).append(row["advantage"])
        assert account["groups"] == len(groups) == 6 and {len(some) for some in groups.values()} == {4}
        assert all(sum(some) == pytest.approx(0, abs=1e-9) for some in groups.values())
        assert account["reward_mean"] == pytest.approx(sum(row["reward"] for row in rows) / len(rows))
        assert account["zero_variance_groups"] == sum(not any(some) for some in groups.values())
        assert all(row["step"] == number and row["arm"] == "vanilla" for row in rows)
    problems = [{row["problem_id"] for row in step_of(arms["vanilla"], number)[1]} for number in (0, 1)]
    assert not problems[0] & problems[1]  # the next problems of the seed's order


def test_between_two_models_lies_their_weighted_mean() -> None:
    ends = [torch.nn.Linear(3, 2) for _ in range(2)]
    base, teacher = ({name: part.detach().clone() for name, part in end.named_parameters()} for end in ends)
    model = torch.nn.Linear(3, 2)
    for alpha in (0.0, 0.25, 1.0):
        interpolate_weights(model, base, teacher, alpha)
        for name, part in model.named_parameters():
            assert torch.allclose(part, (1 - alpha) * base[name] + alpha * teacher[name], atol=1e-7)
    interpolate_weights(model, base, teacher, 0.0)
    assert all(torch.equal(part, base[name]) for name, part in model.named_parameters())
    assert all(part.data_ptr() != base[name].data_ptr() for name, part in model.named_parameters())
