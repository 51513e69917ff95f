"""Batched sampling from a causal language model, ids and log-probs captured as they are drawn.

`generate` of transformers would serve, but it keeps [T, B, V] scores to give log-probs back and draws all rows from one
random stream; here a row's draws depend on its own seed alone, memory stays at [B, V], and a prompt that several rows
share is prefilled once.
"""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor


@torch.inference_mode()
def sample_batch(
    model: Any,
    prompts: list[list[int]],
    *,
    seeds: list[int],
    max_tokens: int,
    temperature: float,
    end_ids: set[int],
    pad_id: int,
) -> list[tuple[list[int], list[float]]]:
    """Draw one completion a prompt: (token ids with the end token, natural log-probs after temperature).

    At temperature 0 the most likely token is taken and log-probs are those of the untempered distribution.
    """
    device = next(model.parameters()).device
    ids, mask, rows = _left_pad_distinct(prompts, pad_id, device)  # [U, P], [U, P], [B]
    uniforms = torch.stack([_uniforms(seed, max_tokens) for seed in seeds]).to(device)  # [B, max_tokens]
    ends = torch.tensor(sorted(end_ids), device=device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    out = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1)
    cache, logits = out.past_key_values, out.logits[rows, -1]  # [B, V]
    cache.batch_select_indices(rows)
    mask, positions = mask[rows], positions[rows, -1:]
    alive = torch.ones(len(prompts), dtype=torch.bool, device=device)
    tokens, logps = [], []
    for t in range(max_tokens):
        token, logp = draw(logits, uniforms[:, t], temperature)  # [B], [B]
        tokens.append(torch.where(alive, token, pad_id))
        logps.append(torch.where(alive, logp, math.nan))
        alive = alive & ~torch.isin(token, ends)
        if not alive.any() or t + 1 == max_tokens:
            break
        ids, positions = tokens[-1][:, None], positions + 1
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        logits = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        ).logits[:, -1]
    return _rows(torch.stack(tokens, 1), torch.stack(logps, 1))


def draw(
    logits: Float[Tensor, "B V"], uniform: Float[Tensor, " B"], temperature: float
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """A token a row by inverting the cumulative distribution at `uniform`, and its log-prob."""
    logp = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    if temperature == 0:
        token = logp.argmax(-1)
    else:
        cumulative = logp.double().exp().cumsum(-1)
        target = uniform[:, None] * cumulative[:, -1:]
        token = torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
    return token, logp.gather(-1, token[:, None]).squeeze(-1)


def _uniforms(seed: int, count: int) -> Float[Tensor, " count"]:
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed % 2**63))


def _left_pad_distinct(
    prompts: list[list[int]], pad_id: int, device: torch.device
) -> tuple[Int[Tensor, "U P"], Int[Tensor, "U P"], Int[Tensor, " B"]]:
    """The distinct prompts padded on the left, their mask, and for every prompt the row that holds it."""
    distinct = {tuple(prompt): None for prompt in prompts}
    order = {prompt: row for row, prompt in enumerate(distinct)}
    width = max(map(len, prompts))
    ids = [[pad_id] * (width - len(prompt)) + list(prompt) for prompt in distinct]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in distinct]
    rows = [order[tuple(prompt)] for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device), torch.tensor(rows, device=device)


def _rows(tokens: Int[Tensor, "B T"], logps: Float[Tensor, "B T"]) -> list[tuple[list[int], list[float]]]:
    lengths = (~logps.isnan()).sum(-1).tolist()
    return [
        (row[:n], [min(p, 0.0) for p in values[:n]])
        for row, values, n in zip(tokens.tolist(), logps.tolist(), lengths, strict=True)
    ]
