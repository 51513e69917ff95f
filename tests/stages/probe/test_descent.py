"""The optimiser step with its projections: what it removes, where it does nothing, and that it resumes bit for bit."""

from pathlib import Path

import pytest
import torch

from composer_stages.gradients.tensors import Layout
from composer_stages.probe.descent import Descent
from composer_stages.probe.direction import Direction, extract
from composer_stages.probe.settings import DescentConfig, ProjectionMode

LAYOUT = Layout({"a": 12, "b": 20, "c": 8})
STEPS = 6


@pytest.fixture(scope="module")
def direction() -> Direction:
    return extract(LAYOUT, torch.randn(6, LAYOUT.width, generator=torch.Generator().manual_seed(0)) + 1)


@pytest.fixture(scope="module")
def gradients(direction: Direction) -> torch.Tensor:
    """Gradients that all point toward the hack in every module, so that one-sided projection fires everywhere."""
    noise = torch.randn(STEPS, LAYOUT.width, generator=torch.Generator().manual_seed(1)) / 10
    return noise + direction.unit


def taken(
    direction: Direction, gradients: torch.Tensor, mode: ProjectionMode, **settings: object
) -> tuple[torch.Tensor, list[dict[str, object]]]:
    """Theta after every step [STEPS, N], and the accounts of the steps."""
    descent = Descent(torch.zeros(LAYOUT.width), DescentConfig(**settings), mode, direction)
    thetas, accounts = [], []
    for gradient in gradients:
        accounts.append(descent.step(gradient))
        thetas.append(descent.theta.detach().clone())
    return torch.stack(thetas), accounts


def along(direction: Direction, thetas: torch.Tensor) -> torch.Tensor:
    """The part of each theta along v, by module."""
    return LAYOUT.sums(thetas * direction.unit)


def test_a_plain_step_of_gradient_descent_is_the_clipped_gradient_times_the_rate(
    direction: Direction, gradients: torch.Tensor
) -> None:
    thetas, accounts = taken(direction, gradients[:1], "none", optimiser="sgd", learning_rate=0.5, clip=0.1)
    assert torch.allclose(thetas[0], -0.5 * 0.1 * gradients[0] / gradients[0].norm(), atol=1e-7)
    assert accounts[0]["change"] == 0 and accounts[0]["frac_fired"] == 0 and accounts[0]["kept_bits"]
    assert accounts[0]["cos_in"] == accounts[0]["cos_out"] > 0.5 and not accounts[0]["shares_memory"]


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
@pytest.mark.parametrize("mode", ["one_sided", "two_sided"])
def test_nothing_moves_along_v_where_gradient_and_update_are_projected(
    mode: ProjectionMode, optimiser: str, direction: Direction, gradients: torch.Tensor
) -> None:
    plain, _ = taken(direction, gradients, "none", optimiser=optimiser)
    assert bool((along(direction, plain[-1:]) < -1e-3).all())  # every module moves toward the hack
    kept, accounts = taken(direction, gradients, mode, optimiser=optimiser)
    assert float(along(direction, kept).min()) > -1e-6
    if mode == "two_sided":
        assert float(along(direction, kept).abs().max()) < 1e-6
    assert all(account["residual"] < 1e-5 and account["conservation_err"] < 1e-6 for account in accounts)
    assert all(account["frac_fired"] == 1 and account["removed_dot"] > 1 for account in accounts)
    assert float((kept[-1] - plain[-1]).norm()) > 1e-3


def test_only_projecting_the_update_removes_v_from_adam_steps(direction: Direction, gradients: torch.Tensor) -> None:
    found = {
        where: taken(direction, gradients, "two_sided", project_on=where, optimiser="adam")
        for where in ("grad", "update", "both")
    }
    parts = {where: float(along(direction, thetas).abs().max()) for where, (thetas, _) in found.items()}
    assert parts["grad"] > 1e-4 and parts["update"] < 1e-6 and parts["both"] < 1e-6
    for where, (_, accounts) in found.items():
        assert all((abs(account["cos_out"]) < 1e-5) == (where != "update") for account in accounts)
        assert (max(abs(account["cos_upd_out"]) for account in accounts) < 1e-4) == (where != "grad")
        assert {account["projects_update"] for account in accounts} == {where != "grad"}
    assert not torch.equal(found["update"][0], found["both"][0])


def test_one_sided_projection_of_gradients_away_from_the_hack_is_plain_descent(
    direction: Direction, gradients: torch.Tensor
) -> None:
    plain, _ = taken(direction, -gradients, "none", optimiser="sgd")
    kept, accounts = taken(direction, -gradients, "one_sided", optimiser="sgd")
    assert torch.equal(kept, plain)
    assert all(account["frac_fired"] == account["frac_fired_upd"] == account["change"] == 0 for account in accounts)


def test_beta_removes_a_share_of_the_part_along_v(direction: Direction, gradients: torch.Tensor) -> None:
    settings = {"optimiser": "sgd", "project_on": "grad", "clip": 1e9}
    plain, _ = taken(direction, gradients[:1], "none", **settings)
    half, _ = taken(direction, gradients[:1], "two_sided", beta=0.5, **settings)
    assert torch.allclose(along(direction, half), along(direction, plain) / 2, rtol=1e-4)


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_a_saved_descent_goes_on_bit_for_bit(
    optimiser: str, direction: Direction, gradients: torch.Tensor, tmp_path: Path
) -> None:
    config = DescentConfig(optimiser=optimiser)
    whole, _ = taken(direction, gradients, "one_sided", optimiser=optimiser)
    first = Descent(torch.zeros(LAYOUT.width), config, "one_sided", direction)
    for gradient in gradients[:3]:
        first.step(gradient)
    first.save(tmp_path / "state.safetensors")
    again = Descent(torch.zeros(LAYOUT.width), config, "one_sided", direction)
    again.load(tmp_path / "state.safetensors")
    for gradient in gradients[3:]:
        again.step(gradient)
    assert torch.equal(again.theta, whole[-1])
