"""Limits of memory, tokens of a pass and checkpointing, change results by no more than rounding."""

import copy
from pathlib import Path

import pytest
import torch
from probe_faults.loophole_world import tokenizer
from probe_faults.world import spectrum_of
from torch import nn

from composer_stages.errors import BadInput
from composer_stages.gradients.basis import SingularValues, target_linears
from composer_stages.gradients.per_row import adapt, collate, own_log_probs
from composer_stages.policy.base import PolicyConfig
from composer_stages.probe import score
from composer_stages.probe.direction import V_HACK_FILE, load_direction, pair_rows
from composer_stages.probe.metrics import toward_hack, weight_direction
from composer_stages.runs.kinds import PROBE_ROW, PROBE_SCORE, VECTORS
from composer_stages.runs.run import Run
from tests.stages.probe.running import carry_out, extracted, replayed

Models, Chain = dict[str, PolicyConfig], dict[str, Run]
SPARE = {"max_tokens": 32, "checkpointing": True}


def test_a_direction_is_the_same(chain: Chain, models: Models, tmp_path: Path) -> None:
    spare = extracted(models["honest"], [chain["svd"]], tmp_path / "v", **SPARE)
    found, expected = (load_direction(run.folder(VECTORS) / V_HACK_FILE)[0] for run in (spare, chain["v"]))
    assert torch.allclose(found.unit, expected.unit, atol=1e-4)
    assert spare.manifest.summary["verdict"] == chain["v"].manifest.summary["verdict"]


def test_a_direction_of_weights_is_the_same(planted: dict[str, nn.Module], chain: Chain, tmp_path: Path) -> None:
    model = copy.deepcopy(planted["honest"])
    student = adapt(model, tokenizer(), SingularValues(spectrum_of(model)))
    pairs = pair_rows(chain["v"].folder(VECTORS))
    whole = weight_direction(student, pairs, tmp_path / "whole.bin")
    student.max_tokens = 32
    for name, part in weight_direction(student, pairs, tmp_path / "parts.bin").items():
        assert torch.allclose(part, whole[name], atol=1e-5 * float(whole[name].abs().max()) + 1e-7)


def test_toward_hack_is_the_cosine_over_all_weights(
    planted: dict[str, nn.Module], chain: Chain, tmp_path: Path
) -> None:
    """Against autograd's gradient of all weights, and their change, side by side in memory."""
    model = copy.deepcopy(planted["honest"])
    student = adapt(model, tokenizer(), SingularValues(spectrum_of(model)))
    pairs = pair_rows(chain["v"].folder(VECTORS))[:3]
    direction = weight_direction(student, pairs, tmp_path / "weights.bin")
    start = student.adapter.theta
    assert toward_hack(student, direction, start) is None
    weights = {name: linear.weight.requires_grad_() for name, linear in target_linears(model).items()}
    for sign, rows in ((1, [hack for hack, _ in pairs]), (-1, [clean for _, clean in pairs])):
        for row in rows:
            (-sign * own_log_probs(model, collate([row])).sum() / row.num_own).backward()
    expected = torch.cat([weight.grad.flatten() for weight in weights.values()])
    assert torch.allclose(torch.cat([part.flatten() for part in direction.values()]), expected, atol=1e-5)
    student.move_to(1e-2 * torch.randn(student.adapter.layout.width))
    change = torch.cat([student.adapter.delta(name).flatten() for name in direction])
    cosine = float(torch.cosine_similarity(-change, expected, dim=0))
    assert toward_hack(student, direction, start) == pytest.approx(cosine, abs=1e-5)


@pytest.mark.parametrize("adapter", ["lora", pytest.param("antipasto_full", marks=pytest.mark.slow)])
def test_sums_alone_give_the_rows_and_the_steps_of_kept_gradients(
    adapter: str, chain: Chain, models: Models, tmp_path: Path
) -> None:
    """No gradient is stored; what a step takes and says differs by rounding."""
    given = [chain["svd"]] if adapter == "antipasto_full" else []
    v = extracted(models["honest"], given, tmp_path / "v", count=8, adapter=adapter, rank=4)
    runs = {
        keep: replayed(models, [chain["pool"], v, *given], tmp_path / keep, arm="projected", steps=3, keep=keep)
        for keep in ("rows", "sums")
    }
    assert (runs["sums"].folder(VECTORS) / "gradients.bin").stat().st_size == 0
    for kept, summed in zip(*(run.rows(PROBE_ROW) for run in runs.values()), strict=True):
        for name in ("cos_stack", "cos_global", "cos_first128", "hackfrac", "energy", "mean_cos_post"):
            assert summed[name] == pytest.approx(kept[name], abs=2e-3), name
        assert summed["grad_norm_contrib"] == pytest.approx(kept["grad_norm_contrib"], rel=2e-2)
    scored = carry_out(score, [runs["sums"], v], score.Config(), tmp_path / "score")
    found = {row["row_uid"]: row["cos_stack"] for row in scored.rows(PROBE_SCORE)}
    assert found == {row["row_uid"]: row["cos_stack"] for row in runs["sums"].rows(PROBE_ROW)}
    if adapter == "antipasto_full":
        other = extracted(models["honest"], given, tmp_path / "other", count=6)
        with pytest.raises(BadInput, match="measured with another direction"):
            carry_out(score, [runs["sums"], other], score.Config(), tmp_path / "no-score")


def test_logits_of_a_few_tokens_at_a_time_give_the_same_gradients(planted: dict[str, nn.Module], chain: Chain) -> None:
    model = copy.deepcopy(planted["honest"])
    batch = collate([side for pair in pair_rows(chain["v"].folder(VECTORS))[:4] for side in pair])
    weight = model.get_output_embeddings().weight.requires_grad_()
    found = own_log_probs(model, batch, max_logits=5 * model.config.vocab_size)
    hidden = model.base_model(input_ids=batch.ids, attention_mask=batch.attention).last_hidden_state
    logits = model.get_output_embeddings()(hidden[:, :-1]).log_softmax(-1)
    expected = logits.gather(-1, batch.ids[:, 1:, None])[..., 0][batch.mask[:, 1:]]
    assert int(batch.mask.sum()) > 15 and torch.allclose(found[batch.mask], expected, atol=1e-5)
    gradients = [torch.autograd.grad(logps.sum(), weight)[0] for logps in (found, expected)]
    assert torch.allclose(*gradients, atol=1e-4)
