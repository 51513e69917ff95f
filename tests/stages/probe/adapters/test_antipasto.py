"""AntiPaSTO's adapter: the rotation, its bound and its inverse, its start, which Linears and which dimensions."""

import math

import pytest
import torch

from stages.probe.adapters.antipasto import LIMIT, TURN, RotatedAntipasto, pick_dims, rotation, skew
from stages.probe.adapters.attach import ProbeAdapter, target_linears
from stages.probe.adapters.choose import load_start, open_adapter, save_start
from stages.probe.adapters.spectrum import Spectrum

MODULE = "model.layers.0.self_attn.o_proj"


def test_a_plane_turns_by_what_the_cayley_transform_says_and_less_than_sixty_degrees() -> None:
    for entry in (0.1, 1.0, 50.0):
        r = rotation(skew(torch.tensor([entry], dtype=torch.float64), 2))
        angle = 2 * math.atan(LIMIT * math.tanh(entry / LIMIT) / 2)
        expected = [[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]]
        assert torch.allclose(r, torch.tensor(expected, dtype=torch.float64), atol=1e-12)
        assert angle <= math.pi / 3 + 1e-12


def test_a_rotation_is_orthogonal_turned_back_by_minus_alpha_and_nothing_at_zero() -> None:
    skewed = skew(torch.randn(15, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), 6)
    unit = torch.eye(6, dtype=torch.float64)
    assert torch.equal(skewed, -skewed.T)
    assert torch.allclose(rotation(skewed) @ rotation(skewed).T, unit, atol=1e-12)
    assert torch.allclose(rotation(skewed, -1.0) @ rotation(skewed), unit, atol=1e-12)
    assert torch.equal(rotation(skewed, 0.0), unit)


def test_the_weight_is_the_residual_and_changed_singular_values_on_turned_directions(model, spectrum: Spectrum) -> None:
    """W_res + U diag(S + dS) (V R)', as the paper writes it, from its own pieces."""
    adapter = RotatedAntipasto(spectrum, 4, seed=3)
    factors, values = adapter.factors[MODULE], adapter.layout.split(adapter.theta)
    weight = target_linears(model)[MODULE].weight.detach()
    residual = weight - factors.U @ torch.diag(factors.S) @ factors.Vh
    turned = factors.Vh.T @ rotation(skew(values[MODULE + TURN], 4))
    expected = residual + factors.U @ torch.diag(factors.S + values[MODULE]) @ turned.T
    assert torch.allclose(weight + adapter.delta(MODULE), expected, atol=1e-5)
    assert not adapter.delta(MODULE, torch.zeros_like(adapter.theta)).any()


def test_it_starts_near_the_model_and_adapts_what_writes_to_the_residual_stream(model, spectrum: Spectrum) -> None:
    adapter = RotatedAntipasto(spectrum, 16, seed=0)
    values = adapter.layout.split(adapter.theta)
    changes = torch.cat([part for name, part in values.items() if not name.endswith(TURN)])
    turns = torch.cat([part for name, part in values.items() if name.endswith(TURN)])
    assert float(changes.mean()) == pytest.approx(4e-4, rel=0.3) and float(changes.std()) == pytest.approx(
        4e-4, rel=0.3
    )
    assert float(turns.std()) == pytest.approx(2 * 2**0.5 * 3e-3, rel=0.2) and len(values[MODULE + TURN]) == 120
    assert {name.rsplit(".", 1)[1] for name in adapter.factors} == {"o_proj", "down_proj"}
    assert not adapter.delta("model.layers.0.self_attn.q_proj").any()
    assert (
        adapter.row_gradients("model.layers.0.self_attn.q_proj", torch.randn(1, 2, 32), torch.randn(1, 2, 32))[0] == {}
    )


def test_dimensions_are_a_third_of_each_ranking_filled_up_by_the_largest() -> None:
    clean, hack, turned = torch.tensor([9.0, 8, 0, 0, 0, 1, 0]), torch.tensor([9.0, 0, 7, 0, 0, 0, 0]), torch.zeros(7)
    turned[4], turned[5] = 3.0, 0.5
    assert pick_dims([clean, hack, turned], 3) == [0, 1, 4]  # 0 leads two rankings, so the next of any is taken
    assert pick_dims([clean, hack, turned], 6) == [0, 1, 2, 3, 4, 5]
    assert pick_dims([clean, hack, turned], 99) == list(range(7))


@pytest.mark.parametrize("name", ["antipasto_paper", "lora_warmup"])
def test_a_start_survives_the_disk_and_is_part_of_the_coordinates(
    name: str, model, spectrum: Spectrum, tmp_path
) -> None:
    fresh: ProbeAdapter = open_adapter(name, model, spectrum, rank=4, seed=1)
    if isinstance(fresh, RotatedAntipasto):
        fresh = RotatedAntipasto(spectrum, 4, seed=1, dims={n: [1, 3, 5, 6] for n in fresh.factors})
    else:
        fresh.begin_at(fresh.theta + 0.5)
    save_start(tmp_path, fresh)
    again = open_adapter(name, model, spectrum, rank=4, seed=1, start=load_start(tmp_path))
    assert torch.equal(again.theta, fresh.theta) and again.basis_sha256 == fresh.basis_sha256
    assert torch.equal(again.delta(MODULE), fresh.delta(MODULE))
    assert again.basis_sha256 != open_adapter(name, model, spectrum, rank=4, seed=1).basis_sha256
