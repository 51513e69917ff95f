"""Per-sample gradients against separate backward passes: pads, prompts, masks, checkpoints."""

import pytest
import torch
from probe_faults.loophole_world import tiny_qwen3

from composer_stages.gradients.basis import FoldedModel, ProbeAdapter, Spectrum, factorise, open_adapter, target_linears
from composer_stages.gradients.per_row import (
    DotSink,
    TokenRow,
    collate,
    own_log_probs,
    per_sample_gradients,
    reference_gradient,
)
from composer_stages.policy.local import checkpointed

NAMES = ("antipasto_full", "antipasto_topr", "lora", "lora_frozenA")


def drawn_rows(count: int = 5, seed: int = 0, observations: bool = True) -> list[TokenRow]:
    """Ragged rows; in some, tokens in the middle of the completion are not the policy's own."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(count):
        plen, clen = (int(torch.randint(3, 9, (), generator=draw)) for _ in range(2))
        ids = torch.randint(2, 64, (plen + clen,), generator=draw).tolist()
        own = [not (observations and index % 2 and 0 < t < 3) for t in range(clen)]
        rows.append(TokenRow(ids[:plen], ids[plen:], own))
    return rows


def opened(name: str, model, moved: float) -> ProbeAdapter:
    spectrum = Spectrum({key: factorise(linear.weight) for key, linear in target_linears(model).items()})
    adapter = open_adapter(name, model, spectrum, rank=4, seed=1)
    adapter.theta = adapter.theta + moved * torch.randn(adapter.theta.shape, generator=torch.Generator().manual_seed(2))
    return adapter


def gradients(model, adapter: ProbeAdapter, rows: list[TokenRow], **padding: int) -> torch.Tensor:
    parts, folded = {}, FoldedModel(model, adapter)
    per_sample_gradients(model, adapter, collate(rows, **padding), parts.__setitem__)
    folded.restore()
    return torch.cat([parts[name] for name in adapter.layout.names], dim=-1)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("moved", [0.0, 0.05])
@pytest.mark.parametrize("name", NAMES)
def test_one_backward_gives_what_separate_backwards_give(name: str, moved: float) -> None:
    model, rows = tiny_qwen3(), drawn_rows()
    adapter = opened(name, model, moved)
    expected = torch.stack([reference_gradient(model, adapter, row) for row in rows])
    assert relative(gradients(model, adapter, rows), expected) <= 1e-5


def test_float64_is_exact_to_the_last_digits() -> None:
    model, rows = tiny_qwen3(dtype=torch.float64), drawn_rows()
    adapter = opened("antipasto_full", model, 0.0)
    adapter.theta = adapter.theta.double()
    expected = torch.stack([reference_gradient(model, adapter, row) for row in rows])
    assert relative(gradients(model, adapter, rows), expected) <= 1e-14


def test_more_pads_and_other_pad_ids_change_nothing() -> None:
    model, rows = tiny_qwen3(), drawn_rows()
    adapter = opened("antipasto_full", model, 0.05)
    plain = gradients(model, adapter, rows)
    assert relative(gradients(model, adapter, rows, extra_pads=9), plain) <= 1e-5
    assert relative(gradients(model, adapter, rows, extra_pads=9, pad_id=33), plain) <= 1e-5


def test_gradient_checkpointing_calls_the_tap_once_a_module_and_changes_nothing() -> None:
    model, rows = tiny_qwen3(), drawn_rows()
    adapter = opened("antipasto_full", model, 0.0)
    plain, calls, parts = gradients(model, adapter, rows), [], {}

    def counting(name: str, contribution: torch.Tensor) -> None:
        calls.append(name)
        parts[name] = contribution

    with checkpointed(model):
        per_sample_gradients(model, adapter, collate(rows), counting)
    assert sorted(calls) == sorted(adapter.layout.names)
    assert relative(adapter.layout.join(parts), plain) <= 1e-5
    assert not model.training and not model.is_gradient_checkpointing


def test_dots_are_the_rows_reduced() -> None:
    model, rows = tiny_qwen3(), drawn_rows()
    adapter = opened("antipasto_full", model, 0.0)
    whole = gradients(model, adapter, rows)
    directions = torch.randn(3, adapter.layout.width)
    dots = DotSink(adapter.layout, directions)
    per_sample_gradients(model, adapter, collate(rows), dots)
    assert torch.allclose(dots.dots, whole @ directions.T, rtol=1e-4, atol=1e-3)
    assert torch.allclose(dots.squares, whole.square().sum(-1), rtol=1e-4)


def test_log_probs_are_those_of_the_whole_model_at_the_right_positions() -> None:
    model, rows = tiny_qwen3(), drawn_rows()
    batch = collate(rows)
    with torch.no_grad():
        found = own_log_probs(model, batch)
        for index, row in enumerate(rows):
            ids = [*row.prompt_ids, *row.completion_ids]
            logp = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
            for t, token in enumerate(row.completion_ids, start=len(row.prompt_ids)):
                expected = float(logp[t - 1, token]) if row.own[t - len(row.prompt_ids)] else 0.0
                assert float(found[index, t]) == pytest.approx(expected, abs=1e-5)


def test_gradients_do_not_reach_the_models_weights() -> None:
    model = tiny_qwen3()
    gradients(model, opened("antipasto_full", model, 0.0), drawn_rows())
    assert all(p.grad is None for p in model.parameters())
