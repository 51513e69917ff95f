"""The adapters: a start that changes nothing, the stated formulas, and coordinates that cannot be mixed up."""

import pytest
import torch
from probe_faults.loophole_world import tiny_qwen3

from composer_stages.errors import BadInput, UsageError
from composer_stages.gradients.basis import (
    A_HALF,
    SUFFIXES,
    Factors,
    FoldedModel,
    Lora,
    ProbeAdapter,
    Spectrum,
    attached,
    check_spectrum,
    coordinates,
    load_spectrum,
    open_adapter,
    reconstruction_error,
    save_factors,
    target_linears,
)
from composer_stages.gradients.tensors import read_tensors, write_tensors

NAMES = ("antipasto_full", "antipasto_topr", "lora", "lora_frozenA")
IDS = torch.arange(2, 26).view(2, 12)


def opened(name: str, model, spectrum: Spectrum) -> ProbeAdapter:
    return open_adapter(name, model, spectrum, rank=4, seed=7)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("name", NAMES)
def test_an_untouched_adapter_leaves_the_logits_bit_for_bit(name: str, model, spectrum: Spectrum) -> None:
    adapter, base = opened(name, model, spectrum), logits(model)
    with attached(model, adapter):
        assert torch.equal(logits(model), base)
    folded = FoldedModel(model, adapter)
    assert torch.equal(logits(model), base)
    folded.restore()


@pytest.mark.parametrize("name", NAMES)
def test_the_change_run_as_a_product_and_folded_in_is_the_same_function(name: str, model, spectrum: Spectrum) -> None:
    adapter, base = opened(name, model, spectrum), logits(model)
    adapter.theta = adapter.theta + 0.1 * torch.randn(adapter.theta.shape, generator=torch.Generator().manual_seed(1))
    with attached(model, adapter):
        through_path = logits(model)
    folded = FoldedModel(model, adapter)
    through_weights = logits(model)
    folded.restore()
    assert torch.allclose(through_path, through_weights, atol=1e-4)
    assert not torch.allclose(through_path, base, atol=1e-2)
    assert torch.equal(logits(model), base)


def test_the_gradient_of_inputs_comes_from_the_factors_where_outputs_are_more(model, spectrum: Spectrum) -> None:
    """Against the weight that holds the change; everywhere else the weight is asked."""
    adapter = opened("antipasto_full", model, spectrum)
    adapter.theta = adapter.theta + 0.1 * torch.randn(adapter.theta.shape, generator=torch.Generator().manual_seed(1))
    found = {}
    for name, linear in target_linears(model).items():
        outputs, inputs = linear.weight.shape
        x, g = torch.randn(2, 5, inputs), torch.randn(2, 5, outputs)
        gradients, found[name] = adapter.row_gradients(name, x, g)
        factors = adapter.factors[name]
        by_hand = torch.einsum("bto,or,bti,ri->br", g, factors.U, x, factors.Vh)
        assert torch.allclose(gradients[name], by_hand, rtol=1e-4, atol=1e-4)
        if found[name] is not None:
            assert torch.allclose(found[name], g @ (linear.weight + adapter.delta(name)), rtol=1e-4, atol=1e-4)
    assert {name.rsplit(".", 1)[1] for name, given in found.items() if given is not None} == {"gate_proj", "up_proj"}
    x, g = torch.randn(2, 5, 32), torch.randn(2, 5, target_linears(model)["model.layers.0.mlp.up_proj"].out_features)
    assert opened("antipasto_topr", model, spectrum).row_gradients("model.layers.0.mlp.up_proj", x, g)[1] is None
    half = opened("antipasto_full", model, spectrum).to("cpu", torch.bfloat16)
    assert half.row_gradients("model.layers.0.mlp.up_proj", x, g)[1] is None


@pytest.mark.parametrize("name", ["antipasto_full", "antipasto_topr"])
def test_long_rows_give_what_short_ones_do(name: str, model, spectrum: Spectrum) -> None:
    """A row of 200 tokens, which goes the shorter way, against its pieces of four, which do not, added up."""
    adapter, module = opened(name, model, spectrum), "model.layers.0.mlp.up_proj"
    inputs, outputs = target_linears(model)[module].weight.T.shape
    x, g = torch.randn(2, 200, inputs), torch.randn(2, 200, outputs)
    pieces = [
        adapter.row_gradients(module, *part)[0][module] for part in zip(x.split(4, 1), g.split(4, 1), strict=True)
    ]
    found = adapter.row_gradients(module, x, g)[0][module]
    assert torch.allclose(found, torch.stack(pieces).sum(0), rtol=1e-4, atol=1e-3)


def test_the_gradient_of_a_fresh_loras_a_is_exactly_zero(model, spectrum: Spectrum) -> None:
    module = next(iter(target_linears(model)))
    found = opened("lora", model, spectrum).row_gradients(module, torch.randn(2, 5, 32), torch.randn(2, 5, 32))[0]
    assert torch.equal(found[module + A_HALF], torch.zeros_like(found[module + A_HALF]))
    assert found[module].norm() > 0


def test_frozen_a_has_orthonormal_rows_and_is_not_trained(model, spectrum: Spectrum) -> None:
    adapter = opened("lora_frozenA", model, spectrum)
    for a in adapter.initial.values():
        assert torch.allclose(a @ a.T, torch.eye(4), atol=1e-5)
    assert not any(name.endswith(A_HALF) for name in adapter.layout.names)


def test_frozen_a_is_one_basis_however_a_processor_rounds_it() -> None:
    """Two threads divide the work otherwise than one, as another processor does."""
    linears, threads, made = {"wide": torch.nn.Linear(2048, 8)}, torch.get_num_threads(), []
    for number in (1, 2):
        torch.set_num_threads(number)
        made.append(Lora(linears, 64, freeze_a=True, seed=3))
    torch.set_num_threads(threads)
    assert coordinates(made[0]) == coordinates(made[1]), "a direction of one is taken by the other"
    torch.testing.assert_close(made[0].initial["wide"], made[1].initial["wide"], rtol=0, atol=1e-6)
    # Signs, too, are those of Gram-Schmidt on what was drawn, and no choice of a library.
    triangular = made[0].initial["wide"] @ Lora(linears, 64, freeze_a=False, seed=3).initial["wide"].T
    torch.testing.assert_close(triangular, triangular.triu(), rtol=0, atol=1e-6)
    assert triangular.diagonal().min() > 0.1


def test_top_r_keeps_the_rest_of_the_weight(model, spectrum: Spectrum) -> None:
    full, top = opened("antipasto_full", model, spectrum), opened("antipasto_topr", model, spectrum)
    assert top.layout.width == 4 * len(target_linears(model))
    module = top.layout.names[0]
    x, g = torch.randn(1, 3, 32), torch.randn(1, 3, 32)
    assert torch.allclose(
        top.row_gradients(module, x, g)[0][module], full.row_gradients(module, x, g)[0][module][:, :4], atol=1e-4
    )


def test_the_seven_projections_of_every_layer_are_wrapped_and_nothing_else(model) -> None:
    names = list(target_linears(model))
    assert len(names) == 2 * len(SUFFIXES) == model.config.num_hidden_layers * 7
    assert "lm_head" not in names


def test_a_missing_or_unknown_linear_is_refused() -> None:
    lacking = tiny_qwen3()
    lacking.model.layers[0].mlp.up_proj = torch.nn.Identity()
    with pytest.raises(UsageError, match="13 of the 14"):
        target_linears(lacking)
    strange = tiny_qwen3()
    strange.model.layers[0].in_proj_qkvz = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match="in_proj_qkvz"):
        target_linears(strange)


def test_factors_give_the_weight_back(model, spectrum: Spectrum) -> None:
    for name, linear in target_linears(model).items():
        assert reconstruction_error(linear.weight, spectrum.factors[name]) < 1e-5
    check_spectrum(model, spectrum)


def test_a_decomposition_that_is_missing_or_of_another_model_is_refused(model, spectrum: Spectrum) -> None:
    with pytest.raises(BadInput, match="not of this model's weights"):
        check_spectrum(tiny_qwen3(seed=1), spectrum)
    with pytest.raises(BadInput, match="another model"):
        open_adapter("antipasto_full", tiny_qwen3(hidden=16), spectrum, rank=4, seed=0)
    with pytest.raises(UsageError, match="composer probe svd"):
        open_adapter("antipasto_topr", model, None, rank=4, seed=0)


def test_coordinates_tell_every_basis_apart(model, spectrum: Spectrum) -> None:
    swapped = {name: Factors(-f.U, f.S, -f.Vh) for name, f in spectrum.factors.items()}
    variants = [
        *(opened(name, model, spectrum) for name in NAMES),
        open_adapter("antipasto_full", model, Spectrum(swapped), rank=4, seed=7),
        open_adapter("antipasto_topr", model, spectrum, rank=5, seed=7),
        open_adapter("lora", model, None, rank=4, seed=8),
    ]
    found = [tuple(coordinates(adapter).items()) for adapter in variants]
    assert len(set(found)) == len(found)


def test_factors_survive_the_disk_and_damage_is_seen(tmp_path, spectrum: Spectrum) -> None:
    for index, (name, factors) in enumerate(spectrum.factors.items()):
        save_factors(tmp_path / f"{index:04d}.safetensors", name, factors)
    read = load_spectrum(tmp_path)
    assert read.sha256 == spectrum.sha256 and list(read.factors) == list(spectrum.factors)
    tensors, metadata = read_tensors(tmp_path / "0000.safetensors")
    write_tensors(tmp_path / "0000.safetensors", {**tensors, "S": tensors["S"] * 1.001}, metadata)
    with pytest.raises(BadInput, match="does not hold the decomposition"):
        load_spectrum(tmp_path)
