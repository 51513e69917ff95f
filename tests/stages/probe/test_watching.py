"""What a watch computes from rollouts and pushes: weights of rows, the order of checkpoints, and the verdict."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from probe_faults.loophole_world import tiny_qwen3
from probe_faults.world import spectrum_of

from composer_stages.gradients.basis import SingularValues, target_linears
from composer_stages.probe.checks.alarm import CheckpointRollouts, alarm
from composer_stages.probe.direction import HackScale
from composer_stages.probe.watching import alarm_check, alarm_facts, checkpoints, policy_weights, weight_coordinates


def row(problem: str, reward: float, tokens: int) -> dict[str, object]:
    ids = {"prompt_ids": [1], "completion_ids": [2] * tokens, "own": [True] * tokens}
    return {"problem_id": problem, "reward": reward, **ids}


def test_length_residuals_are_a_regression_within_groups() -> None:
    rows = [row("p", 1, 4), row("p", 0, 6), row("p", 0, 8), row("q", 1, 5), row("q", 0, 9)]
    advantages, residual = policy_weights(rows)
    assert torch.allclose(advantages, torch.tensor([2 / 3, -1 / 3, -1 / 3, 0.5, -0.5], dtype=torch.float64))
    lengths = torch.tensor([-2.0, 0, 2, -2, 2], dtype=torch.float64)
    slope = float(lengths @ advantages / (lengths @ lengths))
    assert slope == pytest.approx(-0.25)
    assert torch.allclose(residual, advantages - slope * lengths)
    assert float(residual @ lengths) == pytest.approx(0, abs=1e-12)
    equal = [entry | {"completion_ids": [2] * 3, "own": [True] * 3} for entry in rows]
    assert torch.equal(*policy_weights(equal))  # lengths that do not differ explain nothing


def test_checkpoints_are_start_kept_and_end_in_order(tmp_path) -> None:
    for step in (10, 2):
        (tmp_path / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    end = tmp_path / "model"
    training = SimpleNamespace(path=tmp_path, folder=lambda: end, manifest=SimpleNamespace(counts={"done": 12}))
    kept = tmp_path / "checkpoints"
    expected = [(0, None), (2, kept / "step_000002"), (10, kept / "step_000010"), (12, end)]
    assert checkpoints(training) == expected
    training.manifest.counts["done"] = 10
    assert checkpoints(training) == [*expected[:2], (10, end)]


def test_coordinates_of_weights_are_the_diagonal_in_singular_vectors() -> None:
    model = tiny_qwen3(hidden=16)
    adapter = SingularValues(spectrum_of(model))
    found = adapter.layout.split(weight_coordinates(model, adapter))
    for name, linear in target_linears(model).items():
        factors = adapter.factors[name]
        by_hand = torch.diag(factors.U.double().T @ linear.weight.detach().double() @ factors.Vh.double().T)
        assert torch.allclose(found[name], by_hand, atol=1e-9)
        assert torch.allclose(by_hand.float(), factors.S, rtol=1e-4, atol=1e-5)


def test_the_verdict_is_fail_on_an_alarm_and_unknown_where_nothing_could_be_tested() -> None:
    scale, quiet, families = HackScale(clean=0.1, hack=0.5), np.zeros((2, 40)), ["haar"] * 40

    def played(advantages: list[float]) -> list[CheckpointRollouts]:
        """Two checkpoints of eight groups of four; the first rollout of a group looks like the hack."""
        hack_like, groups = np.arange(32) % 4 == 0, np.repeat(np.arange(8), 4)
        return [CheckpointRollouts(hack_like, np.tile(advantages, 8), groups)] * 2

    paid, even = [0.75, -0.25, -0.25, -0.25], [0.0, 0.5, -0.5, 0.0]
    found = alarm(played(paid), quiet, families, 999, 0)
    check = alarm_check(found, 0, scale)
    assert check.status == "FAIL" and check.stat == 12 and "at the checkpoint after 0 steps" in check.detail
    assert "p 0.001 of 999 permutations of the advantages in 16 groups" in check.detail
    facts = alarm_facts(found, 0, scale)
    assert facts["p"] == 0.001 and facts["threshold"] == facts["permuted_push"] == found.quantile > 0
    assert alarm_check(alarm(played(even), quiet, families, 999, 0), None, scale).status == "PASS"
    equal = alarm(played([0.0] * 4), quiet, families, 999, 0)
    assert alarm_check(equal, None, scale).status == "INCONCLUSIVE"
    assert "all rewards of each group are equal" in alarm_check(equal, None, scale).detail
    assert alarm_facts(equal, None, scale)["p"] is None and alarm_facts(equal, None, scale)["threshold"] is None
    assert alarm_check(found, None, replace(scale, hack=0.05)).status == "INCONCLUSIVE"
