"""Directions, placebos, metrics and projection: identities that hold exactly, and traps shown as traps."""

import math

import pytest
import torch
from probe_faults.loophole_world import tiny_qwen3

from composer_stages.errors import BadInput
from composer_stages.gradients.basis import Factors, Spectrum, coordinates, factorise, open_adapter, target_linears
from composer_stages.gradients.tensors import GradientStore, Layout
from composer_stages.probe.descent import project
from composer_stages.probe.direction import (
    Direction,
    PairGradients,
    check_coordinates,
    draw_families,
    extract,
    haar,
    load_direction,
    random_axes,
    randsign,
    save_direction,
)
from composer_stages.probe.metrics import chance, module_cosines, row_metrics, stacked_cosines

LAYOUT = Layout({"a": 12, "b": 20, "c": 8})
DRAW = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=DRAW)


@pytest.fixture(scope="module")
def pairs() -> PairGradients:
    shift = normal(LAYOUT.width)
    hack_tokens, clean_tokens = torch.tensor([10, 12, 9, 11, 10, 14]), torch.tensor([9, 12, 10, 13, 8, 10])
    hack, clean = normal(6, LAYOUT.width) + shift, normal(6, LAYOUT.width) - shift
    return PairGradients(LAYOUT, hack * hack_tokens[:, None], clean * clean_tokens[:, None], hack_tokens, clean_tokens)


@pytest.fixture(scope="module")
def direction(pairs: PairGradients) -> Direction:
    return extract(LAYOUT, pairs.differences("nll_mean"))


def test_the_mean_direction_is_the_mean_difference_of_mean_losses(pairs: PairGradients, direction: Direction) -> None:
    by_hand = sum(
        pairs.hack[j] / pairs.hack_tokens[j] - pairs.clean[j] / pairs.clean_tokens[j] for j in range(len(pairs))
    ) / len(pairs)
    assert torch.allclose(direction.mean, by_hand, atol=1e-6)
    assert torch.allclose(LAYOUT.norms(direction.unit), torch.ones(3), atol=1e-6)


def test_dr_grpo_weights_by_length(pairs: PairGradients) -> None:
    assert torch.allclose(pairs.differences("drgrpo_sum"), (pairs.hack - pairs.clean) / 28)


def test_cos_stack_is_the_true_cosine_of_the_concatenations(direction: Direction) -> None:
    rows = normal(7, LAYOUT.width)
    found = row_metrics(rows, direction)
    assert torch.allclose(found["cos_stack"], torch.cosine_similarity(rows, direction.unit[None], dim=-1), atol=1e-6)
    assert torch.allclose(found["cos_global"], torch.cosine_similarity(rows, direction.mean[None], dim=-1), atol=1e-6)
    assert torch.allclose(found["norm_weighted_cos"], found["cos_stack"] * math.sqrt(3))
    weights = LAYOUT.norms(rows) / rows.norm(dim=-1, keepdim=True)
    assert torch.allclose((weights * module_cosines(rows, direction)).sum(-1), found["norm_weighted_cos"], atol=1e-6)
    assert torch.allclose(found["energy"], found["hackfrac"] ** 2 + row_metrics(-rows, direction)["hackfrac"] ** 2)


def test_a_module_without_direction_leaves_m_and_the_norm(pairs: PairGradients) -> None:
    differences = pairs.differences("nll_mean").clone()
    differences[:, LAYOUT.slices["b"]] = 0
    direction, rows = extract(LAYOUT, differences), normal(2, LAYOUT.width)
    assert direction.modules == ("a", "c")
    changed = rows.clone()
    changed[:, LAYOUT.slices["b"]] *= 100
    assert torch.equal(row_metrics(rows, direction)["cos_stack"], row_metrics(changed, direction)["cos_stack"])
    assert not torch.equal(row_metrics(rows, direction)["grad_norm"], row_metrics(changed, direction)["grad_norm"])


def test_a_zero_gradient_has_no_cosine(direction: Direction) -> None:
    assert row_metrics(torch.zeros(1, LAYOUT.width), direction)["cos_stack"].isnan().all()


def test_rescoring_a_store_equals_scoring_rows(direction: Direction, tmp_path) -> None:
    store = GradientStore.create(tmp_path / "g", LAYOUT, 9, {"loss": "token_sum"})
    rows = normal(9, LAYOUT.width)
    store.put(0, rows[:4])
    store.put(4, rows[4:])
    store.file.flush()
    held = GradientStore(tmp_path / "g")
    assert torch.equal(held.rows, rows)
    found = stacked_cosines(held.rows, direction.unit[None], direction.inside, 3)[:, 0]
    assert torch.allclose(found, row_metrics(rows, direction)["cos_stack"], atol=1e-6)


def test_singular_axes_are_orthonormal_and_point_to_the_majority(pairs: PairGradients) -> None:
    found = extract(LAYOUT, pairs.differences("nll_mean"), "svd_k", k=3)
    for name, axes in found.axes.items():
        assert torch.allclose(axes @ axes.T, torch.eye(3), atol=1e-5)
        assert float((axes[0] @ found.means[name]) / found.means[name].norm()) > 0.8


def test_the_noise_floor_can_leave_a_module_without_axes(pairs: PairGradients) -> None:
    differences = pairs.differences("nll_mean").clone()
    differences[:, LAYOUT.slices["c"]] *= 1e-3
    assert "c" not in extract(LAYOUT, differences, "svd_k", k=2, noise_floor=0.4).modules


def test_placebos_keep_modules_and_norms_and_differ_from_v(pairs: PairGradients, direction: Direction) -> None:
    draws = [haar(direction, 5, 1), randsign(direction, 5, 1)]
    draws += draw_families(direction, pairs, "nll_mean", 5, -1).values()
    for units in draws:
        assert units.shape == (5, LAYOUT.width)
        assert torch.allclose(LAYOUT.norms(units), torch.ones(5, 3), atol=1e-5)
        assert (units @ direction.unit / 3).abs().max() < 0.95
    assert torch.equal(haar(direction, 5, 1), haar(direction, 5, 1))
    assert torch.equal(randsign(direction, 2, 3).abs(), direction.unit.abs().expand(2, -1))


def test_projection_removes_what_points_to_the_hack_and_nothing_else(direction: Direction) -> None:
    gradient = normal(LAYOUT.width)
    gradient[LAYOUT.slices["b"]] = -direction.unit[LAYOUT.slices["b"]]
    gradient[LAYOUT.slices["a"]] += 2 * direction.unit[LAYOUT.slices["a"]]
    out, account = project(gradient, direction)
    assert "a" in account.fired and "b" not in account.fired
    assert torch.equal(out[LAYOUT.slices["b"]], gradient[LAYOUT.slices["b"]])
    assert account.conservation_err < 1e-6 and account.residual < 1e-6 and account.removed_dot > 0
    assert account.cos_out < account.cos_in and account.grad_norm_out < account.grad_norm_in
    assert out.data_ptr() != gradient.data_ptr()


@pytest.mark.parametrize("mode", ["one_sided", "two_sided"])
@pytest.mark.parametrize("beta", [1.0, 0.5])
@pytest.mark.parametrize("k", [1, 3])
def test_energy_is_conserved_in_every_mode(pairs: PairGradients, mode: str, beta: float, k: int) -> None:
    direction = extract(LAYOUT, pairs.differences("nll_mean"), "svd_k", k=k)
    _, account = project(normal(LAYOUT.width), direction, mode, beta)
    assert account.conservation_err < 1e-6


def test_two_sided_removes_all_along_v_and_none_changes_nothing(direction: Direction) -> None:
    gradient = normal(LAYOUT.width)
    _, account = project(gradient, direction, "two_sided")
    assert account.energy_out < 1e-12 and account.frac_fired == 1.0
    assert torch.equal(project(gradient, direction, "none")[0], gradient)
    assert project(torch.zeros(LAYOUT.width), direction)[1].n_skipped == 3


def test_random_axes_have_vs_shape_and_another_direction(pairs: PairGradients) -> None:
    direction = extract(LAYOUT, pairs.differences("nll_mean"), "svd_k", k=2)
    other = random_axes(direction, 5)
    for name in direction.modules:
        assert torch.allclose(other.axes[name] @ other.axes[name].T, torch.eye(2), atol=1e-5)
        assert float(other.means[name].norm()) == pytest.approx(float(direction.means[name].norm()), rel=1e-5)
    assert abs(float(other.unit @ direction.unit) / 3) < 0.5


def test_chance_levels_are_those_of_isotropic_noise(direction: Direction) -> None:
    rows = normal(4, LAYOUT.width)
    units = haar(direction, 4000, 9)
    found = stacked_cosines(rows, units, direction.inside, 3)
    assert chance(rows, direction)["sd_cos_stack"] == pytest.approx(float(found.std()), rel=0.05)


def test_a_direction_survives_the_disk_and_is_refused_elsewhere(tmp_path) -> None:
    model = tiny_qwen3(hidden=16)
    spectrum = Spectrum({name: factorise(linear.weight) for name, linear in target_linears(model).items()})
    adapter = open_adapter("antipasto_full", model, spectrum, rank=4, seed=0)
    direction = extract(adapter.layout, normal(4, adapter.layout.width), "svd_k", k=2)
    save_direction(tmp_path / "v.safetensors", direction, {**coordinates(adapter), "loss_kind": "nll_mean"})
    read, facts = load_direction(tmp_path / "v.safetensors")
    check_coordinates(facts, coordinates(adapter))
    assert torch.equal(read.unit, direction.unit) and read.modules == direction.modules
    flipped = Spectrum({name: Factors(-f.U, f.S, -f.Vh) for name, f in spectrum.factors.items()})
    others = [
        open_adapter("antipasto_full", model, flipped, rank=4, seed=0),
        open_adapter("antipasto_topr", model, spectrum, rank=4, seed=0),
        open_adapter("lora", model, None, rank=4, seed=0),
    ]
    for other in others:
        with pytest.raises(BadInput, match="other coordinates"):
            check_coordinates(facts, coordinates(other))
