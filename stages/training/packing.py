"""Prompts and what follows them as one row without padding: only attention looks at them one by one.

Linears, norms and activations run over the tokens of all rows as one row [1, N]. Attention cuts it into segments: a
prompt, or a branch, which sees its prompt and itself. Segments of like length attend together and are padded for that
alone. A prompt is computed once for all its branches, with recomputed activations, too.

It is a kind of attention that models of `transformers` can be set to (AttentionInterface) and that is `sdpa` but for
a pass that brings `packed`. Models whose layers do not all attend through `sdpa` to all that lies before cannot.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "composer_packed"
MAX_SCORES = 2**24
"""Attention scores of one call and head, padding included: the mask of branches has as many entries."""
ALIKE = 1.5
"""No segment is padded to more than this times its length."""
LAYERS = {"full_attention", "sliding_attention"}
_UNFIT: WeakSet[Any] = WeakSet()
"""Decoders some of whose layers were seen not to attend through here."""
Item = TypeVar("Item")
Family = tuple[list[int], Sequence[list[int]]]
"""A prompt and the branches behind it, as token ids."""


class Segment(NamedTuple):
    """Tokens of the row that attend to themselves, causally, and to all of a prompt, which may be empty."""

    start: int
    length: int
    prompt: int
    prompt_length: int


@dataclass(frozen=True)
class Block:
    """Segments that attend in one call: the places of their queries [B, Q] and keys [B, K] in the row, padded.

    real: [n] which of the B * Q queries are no padding. mask: [B, 1, Q, K], None where attention is causal.
    """

    queries: Int[Tensor, "b q"]
    keys: Int[Tensor, "b k"]
    real: Int[Tensor, " n"]
    mask: Bool[Tensor, "b 1 q k"] | None


@dataclass
class Packed:
    """How one row attends. `order`: [N] where each token is among the blocks' results; `layers`: how many attended."""

    blocks: list[Block]
    order: Int[Tensor, " N"]
    layers: int = field(default=0, compare=False)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    packed: Packed | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """`sdpa`, but of a packed row by segments. query: [1, H, N, D]; key, value: [1, G, N, D]; answers [1, N, H, D]."""
    if packed is None:
        return sdpa_attention_forward(module, query, key, value, mask, **given)
    packed.layers += 1
    parts = []
    for block in packed.blocks:
        asking, asked, told = _picked(query, block.queries), _picked(key, block.keys), _picked(value, block.keys)
        seen, _ = sdpa_attention_forward(module, asking, asked, told, block.mask, **given)
        parts.append(seen.flatten(0, 1).index_select(0, block.real))
    return torch.cat(parts).index_select(0, packed.order)[None], None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)


def _picked(states: Float[Tensor, "1 h N d"], places: Int[Tensor, "b t"]) -> Float[Tensor, "b h t d"]:
    picked = states[0].transpose(0, 1).index_select(0, places.flatten())
    return picked.unflatten(0, places.shape).transpose(1, 2)


def predicting(model: Any, families: Sequence[Family], max_tokens: int) -> Float[Tensor, "M H"] | None:
    """The hidden states that predict all branches' tokens, in their order; None where the model cannot be packed.

    A pass takes at most `max_tokens` tokens, but a prompt with one branch is never cut.
    """
    longest = max(len(prompt) + len(branch) for prompt, branches in families for branch in branches)
    if not _fits(model, longest):
        return None
    decoder, device, found = model.get_decoder(), next(model.parameters()).device, []
    if decoder.config._attn_implementation != NAME:  # setting it walks through all modules
        decoder.set_attn_implementation(NAME)
    for part in _passes(families, max_tokens):
        ids, places, segments, wanted = _laid_out(part)
        packed = _packed(segments, len(ids), device)
        states = decoder(
            input_ids=torch.tensor([ids], device=device),
            position_ids=torch.tensor([places], device=device),
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),  # taken as it is, and not read
            use_cache=False,
            packed=packed,
        ).last_hidden_state
        if packed.layers != model.config.get_text_config().num_hidden_layers:
            _UNFIT.add(decoder)
            decoder.set_attn_implementation("sdpa")
            return None
        found.append(states[0].index_select(0, torch.tensor(wanted, device=device)))
    return torch.cat(found)


def _fits(model: Any, longest: int) -> bool:
    """Whether every token of rows that are so long attends, through `sdpa`, to all that lies before it."""
    decoder, config = model.get_decoder(), model.config.get_text_config()
    if decoder in _UNFIT or decoder.config._attn_implementation not in ("sdpa", NAME):
        return False
    kinds = set(getattr(config, "layer_types", None) or LAYERS)  # a window is for all layers where none is named
    window = getattr(config, "sliding_window", None) if "sliding_attention" in kinds else None
    taken = inspect.signature(decoder.forward).parameters
    accepts = "position_ids" in taken and any(one.kind is one.VAR_KEYWORD for one in taken.values())
    stateful = getattr(model, "_is_stateful", False)
    return accepts and not stateful and kinds <= LAYERS and (window is None or longest <= window)


def _passes(families: Sequence[Family], max_tokens: int) -> Iterator[list[Family]]:
    """All branches in order, in passes; a prompt comes in each pass that has branches of it."""
    part: list[tuple[list[int], list[list[int]]]] = []
    tokens = 0
    for prompt, branches in families:
        new = True
        for branch in branches:
            needed = len(branch) + len(prompt) * new
            if part and tokens + needed > max_tokens:
                yield list(part)
                part, tokens, new = [], 0, True
                needed = len(branch) + len(prompt)
            if new:
                part.append((prompt, []))
            part[-1][1].append(branch)
            tokens, new = tokens + needed, False
    if part:
        yield list(part)


def _laid_out(families: Sequence[Family]) -> tuple[list[int], list[int], list[Segment], list[int]]:
    """The row's token ids and positions, its segments, and the places that predict the branches' tokens.

    Nothing is predicted from a branch's last token, so it is left out; a prompt with one branch is one segment.
    """
    ids, positions, segments, wanted = list[int](), list[int](), list[Segment](), list[int]()
    for prompt, branches in families:
        start, last = len(ids), len(ids) + len(prompt) - 1
        ids += prompt
        positions += range(len(prompt))
        for branch in branches:
            first = len(ids)
            ids += branch[:-1]
            positions += range(len(prompt), len(prompt) + len(branch) - 1)
            wanted += [last, *range(first, len(ids))]
            if len(branches) > 1 and len(branch) > 1:
                segments.append(Segment(first, len(branch) - 1, start, len(prompt)))
        segments.append(Segment(start, len(prompt) if len(branches) > 1 else len(ids) - start, start, 0))
    return ids, positions, segments, wanted


def _packed(segments: Sequence[Segment], num_tokens: int, device: Any) -> Packed:
    """The segments in blocks of like length, those behind a prompt apart from the others."""
    blocks, placed = [], []
    for behind in (False, True):
        those = [one for one in segments if bool(one.prompt_length) == behind]
        for group in alike(those, lambda one: one.length + one.prompt_length, lambda length: length**2, MAX_SCORES):
            block = _block(group, device)
            blocks.append(block)
            placed.append(block.queries.flatten()[block.real])
    order = torch.empty(num_tokens, dtype=torch.long, device=device)
    order[torch.cat(placed)] = torch.arange(num_tokens, device=device)
    return Packed(blocks, order)


def _block(segments: Sequence[Segment], device: Any) -> Block:
    start, length, prompt, prompt_length = torch.tensor(segments, device=device)[..., None].unbind(1)  # [B, 1] each
    queries = _places(start, length)
    real = (torch.arange(queries.shape[1], device=device) < length).flatten().nonzero()[:, 0]
    if not segments[0].prompt_length:
        return Block(queries, queries, real, None)
    before = _places(prompt, prompt_length)
    in_prompt = (torch.arange(before.shape[1], device=device) < prompt_length)[:, None, None]  # [B, 1, 1, P]
    causal = torch.ones(queries.shape[1], queries.shape[1], dtype=torch.bool, device=device).tril()
    shape = (len(segments), 1, queries.shape[1], -1)
    mask = torch.cat([in_prompt.expand(shape), causal.expand(shape)], -1)
    return Block(queries, torch.cat([before, queries], 1), real, mask)


def _places(start: Int[Tensor, "b 1"], length: Int[Tensor, "b 1"]) -> Int[Tensor, "b t"]:
    """The places of each segment's tokens; padding repeats the last, so that the zeros of its gradient are spread."""
    return start + torch.minimum(torch.arange(int(length.max()), device=start.device), length - 1)


def alike(
    items: Sequence[Item], length: Callable[[Item], int], cost: Callable[[int], int], most: int
) -> list[list[Item]]:
    """Items of like length together; `cost` is that of one item padded to such a length, `most` that of all of them."""
    groups: list[list[Item]] = []
    for item in sorted(items, key=length):  # the next item is the longest of its group
        fits = bool(groups) and length(item) <= ALIKE * length(groups[-1][0])
        if fits and cost(length(item)) * (len(groups[-1]) + 1) <= most:
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups
