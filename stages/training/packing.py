"""Packing: prompts and their branches as one row without padding.

`predicting` is what scoring calls. Linears, norms and activations run over the tokens of all rows as one row [1, N].
Attention cuts it into segments: a prompt, or a branch, which sees its prompt and itself. Segments of like length attend
together and are padded for that alone; where torch has flash attention for segments of any length (CUDA, in 16 bits),
nothing is padded. A prompt is computed once for all its branches, with recomputed activations, too.

It is a kind of attention that models of `transformers` can be set to (AttentionInterface) and that is `sdpa` except in
a pass that brings `packed`. Models whose layers do not all attend through `sdpa` to all earlier tokens cannot.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from composer_stages.gradients.per_row import by_length
from composer_stages.policy.kv_cache import SCALED_DOT_PRODUCT

try:
    from torch.nn.attention import varlen
except ImportError:  # before torch 2.10
    varlen = None  # type: ignore[assignment]
Family = tuple[list[int], Sequence[list[int]]]
"""A prompt and the branches behind it, as token ids."""
NAME = "composer_packed"
HALF = (torch.bfloat16, torch.float16)
AGREEING = 2.0**-5
"""Largest difference of two ways to attend in 16 bits, as a part of the largest value: some roundings of bfloat16."""
MAX_SCORES = 2**24
"""Attention scores of one call and head, padding included: the mask of branches has as many entries."""
ALIKE = 1.5
"""No segment is padded to more than this times its length."""
_UNFIT: WeakSet[Any] = WeakSet()
"""Decoders some of whose layers were seen not to attend through here."""


def on_device(parts: Sequence[Int[Tensor, "..."]], device: torch.device) -> list[Int[Tensor, "..."]]:
    """Copy tensors of integers from the host to a device, all at once: on a GPU each copy costs as much as a kernel.

    Indices are laid out on the host, where their sizes are known; on a device each size would be waited for.
    """
    flat = torch.cat([part.flatten() for part in parts])
    if device.type == "cuda":  # only from pinned memory does the host go on while it is copied
        flat = flat.pin_memory()
    pieces = flat.to(device, non_blocking=True).split([part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


class Segment(NamedTuple):
    """Tokens of the row that attend to themselves, causally, and to all of a prompt, which may be empty."""

    start: int
    length: int
    prompt: int
    prompt_length: int


class Block:
    """Segments that attend in one call, B with Q queries and K keys each, padded.

    Keys are those of the prompt, padded to `prompt` of them, and the segment's own. prompt_lengths: [B, 1, 1, 1] on the
    device, None where segments have no prompt and attention is causal.
    """

    def __init__(self, shape: tuple[int, int, int], prompt_lengths: Int[Tensor, "b 1 1 1"] | None) -> None:
        self.shape, self.prompt_lengths = shape, prompt_lengths
        self._bias: Float[Tensor, "b 1 q k"] | None = None

    def bias(self, dtype: torch.dtype) -> Float[Tensor, "b 1 q k"] | None:
        """Return what is added to attention's scores: 0 where a query sees a key, else -inf; None where it is causal.

        Kept for all layers: of a boolean mask torch makes this very table in each of them, and autograd keeps it.
        """
        if self.prompt_lengths is None:
            return None
        if self._bias is None or self._bias.dtype != dtype:
            (rows, queries, keys), device = self.shape, self.prompt_lengths.device
            prompt = keys - queries
            key, query = torch.arange(keys, device=device), torch.arange(queries, device=device)[:, None]
            seen = torch.where(key < prompt, key < self.prompt_lengths, key - prompt <= query)
            empty = torch.zeros(rows, 1, queries, keys, dtype=dtype, device=device)
            self._bias = empty.masked_fill_(seen.logical_not_(), float("-inf"))
        return self._bias


@dataclass(frozen=True)
class Padded:
    """Attention of one row by `sdpa`, block after block.

    queries, keys: indices in the row of those of all blocks, padded, one block after another. order: [N] where each
    token is among the blocks' results.
    """

    blocks: list[Block]
    queries: Int[Tensor, " q"]
    keys: Int[Tensor, " k"]
    order: Int[Tensor, " N"]

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Float[Tensor, "N h d"]:
        """Return the attended values of queries [1, H, N, D] over keys and values [1, G, N, D]."""
        # One gather for all blocks: its gradient is one sum, too, however many blocks a prompt is in.
        sizes = [(rows * of_queries, rows * of_keys) for rows, of_queries, of_keys in (b.shape for b in self.blocks)]
        of_queries, of_keys = map(list, zip(*sizes, strict=True))
        queries = _by_token(query).index_select(0, self.queries).split(of_queries)
        keys, values = (_by_token(states).index_select(0, self.keys).split(of_keys) for states in (key, value))
        parts = []
        for block, *of_block in zip(self.blocks, queries, keys, values, strict=True):
            q, k, v = (rows.unflatten(0, (block.shape[0], -1)).transpose(1, 2) for rows in of_block)
            attended, _ = sdpa_attention_forward(module, q, k, v, block.bias(query.dtype), **options)
            parts.append(attended.flatten(0, 1))
        return torch.cat(parts).index_select(0, self.order)


@dataclass(frozen=True)
class Ragged:
    """Attention of one row in one call of flash attention, without padding and without masks.

    keys: [K] indices in the row of the keys of one segment after another. query_bounds, key_bounds: [S + 1] int32,
    where segments begin, and where the last one ends. longest: queries and keys of a segment, at most. dtype: in which
    it is computed.
    """

    keys: Int[Tensor, " k"]
    query_bounds: Int[Tensor, " s"]
    key_bounds: Int[Tensor, " s"]
    longest: tuple[int, int]
    dtype: torch.dtype

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None = None, **options: Any
    ) -> Float[Tensor, "N h d"]:
        """Return the attended values of queries [1, H, N, D] over keys and values [1, G, N, D]."""
        # Under autocast queries and keys come in float32 from their norms.
        query, key, value = (_by_token(states).to(self.dtype) for states in (query, key, value))
        keys, values = (states.index_select(0, self.keys) for states in (key, value))
        # Causal with more keys than queries: the last query sees all keys, as a branch does behind its prompt.
        attended: Tensor = varlen.varlen_attn(  # type: ignore[assignment]  # its auxiliary outputs are not asked for
            query,
            keys,
            values,
            self.query_bounds,
            self.key_bounds,
            *self.longest,
            scale=scaling,
            window_size=(-1, 0),
            enable_gqa=True,
        )
        return attended


@dataclass
class Packed:
    """How one row attends, and how many layers did."""

    layout: Padded | Ragged
    layers: int = 0


def predicting(model: Any, families: Sequence[Family], max_tokens: int) -> Float[Tensor, "M H"] | None:
    """Return the hidden states that predict all branches' tokens, in order; None where the model cannot be packed.

    A pass takes at most `max_tokens` tokens, but a prompt with one branch is never cut.
    """
    decoder, states_of_passes = model.get_decoder(), []
    if decoder in _UNFIT or decoder.config._attn_implementation not in SCALED_DOT_PRODUCT:
        return None
    weight = next(model.parameters())
    device, dtype = weight.device, weight.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    # Flash attention neither drops weights nor takes values of another width than keys.
    plain = not getattr(config, "attention_dropout", 0) and not hasattr(config, "v_head_dim")
    width = config.to_dict().get("head_dim") or config.hidden_size // heads
    fast = plain and flash_agrees(device, dtype, heads, groups, width)
    lay_out = ragged if fast else padded
    if decoder.config._attn_implementation != NAME:  # setting it walks through all modules
        decoder.set_attn_implementation(NAME)
    for part in _passes(families, max_tokens):
        *lists, segments = laid_out(part)
        (ids, positions, predictors), layout = lay_out(segments, lists, device, dtype)
        packed = Packed(layout)
        states = decoder(
            input_ids=ids[None],
            position_ids=positions[None],
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),  # taken as it is, and not read
            use_cache=False,
            packed=packed,
        ).last_hidden_state
        if packed.layers != config.num_hidden_layers:
            _UNFIT.add(decoder)
            decoder.set_attn_implementation("sdpa")
            return None
        states_of_passes.append(states.squeeze(0).index_select(0, predictors))
    return torch.cat(states_of_passes)


def _passes(families: Sequence[Family], max_tokens: int) -> Iterator[list[Family]]:
    """Yield all branches in order, in passes; a prompt is in each pass that has branches of it."""
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


def laid_out(families: Sequence[Family]) -> tuple[list[int], list[int], list[int], list[Segment]]:
    """Return the row's token ids and positions, the indices that predict the branches' tokens, and its segments.

    Nothing is predicted from a branch's last token, so it is left out; a prompt with one branch is one segment.
    """
    ids, positions, segments, predictors = list[int](), list[int](), list[Segment](), list[int]()
    for prompt, branches in families:
        start, last = len(ids), len(ids) + len(prompt) - 1
        ids += prompt
        positions += range(len(prompt))
        for branch in branches:
            first = len(ids)
            ids += branch[:-1]
            positions += range(len(prompt), len(prompt) + len(branch) - 1)
            predictors += [last, *range(first, len(ids))][: len(branch)]  # a masked rollout has no token
            if len(branches) > 1 and len(branch) > 1:
                segments.append(Segment(first, len(branch) - 1, start, len(prompt)))
        segments.append(Segment(start, len(prompt) if len(branches) > 1 else len(ids) - start, start, 0))
    return ids, positions, predictors, segments


ExtraLists = Sequence[Sequence[int]]
"""Lists of integers that are copied to the device together with a layout."""


def ragged(
    segments: Sequence[Segment], extra_lists: ExtraLists, device: torch.device, dtype: torch.dtype
) -> tuple[list[Int[Tensor, " N"]], Ragged]:
    """Return the segments in the order of the row, of which they are all, and the copied lists."""
    segments = sorted(segments)
    keys = [
        position
        for segment in segments
        for position in (
            *range(segment.prompt, segment.prompt + segment.prompt_length),
            *range(segment.start, segment.start + segment.length),
        )
    ]
    seen = [segment.prompt_length + segment.length for segment in segments]
    ends = [[0, *accumulate(segment.length for segment in segments)], [0, *accumulate(seen)]]
    lists = [torch.tensor(values, dtype=torch.long) for values in (*extra_lists, keys, *ends)]
    *index_tensors, of_keys, query_bounds, key_bounds = on_device(lists, device)
    longest = (max(segment.length for segment in segments), max(seen))
    return index_tensors, Ragged(of_keys, query_bounds.int(), key_bounds.int(), longest, dtype)


def padded(
    segments: Sequence[Segment], extra_lists: ExtraLists, device: torch.device, dtype: torch.dtype
) -> tuple[list[Int[Tensor, " N"]], Padded]:
    """Return the segments in blocks of like length, branches separate from prompts, and the copied lists."""
    del dtype
    shapes, lengths = list[tuple[int, int, int]](), list[Tensor]()
    queries, keys, places = list[Tensor](), list[Tensor](), list[Tensor]()
    num_padded = 0
    for behind in (False, True):
        kind = [segment for segment in segments if bool(segment.prompt_length) == behind]
        lengths_of_kind = [segment.length + segment.prompt_length for segment in kind]
        for bucket in by_length(lengths_of_kind, MAX_SCORES, lambda length: length**2, ALIKE):
            table = torch.tensor([kind[index] for index in bucket])
            start, length, prompt, prompt_length = table[..., None].unbind(1)  # [B, 1] each
            positions = _positions(start, length)
            seen = torch.cat([_positions(prompt, prompt_length), positions], 1) if behind else positions
            real = (torch.arange(positions.shape[1]) < length).flatten().nonzero()[:, 0]
            shapes.append((len(bucket), positions.shape[1], seen.shape[1]))
            if behind:
                lengths.append(prompt_length[..., None, None])
            queries.append(positions.flatten())
            keys.append(seen.flatten())
            places.append(torch.stack([queries[-1][real], num_padded + real]))
            num_padded += positions.numel()
    tokens, results = torch.cat(places, 1)
    order = torch.empty_like(results).index_put_((tokens,), results)
    lists = [torch.tensor(values, dtype=torch.long) for values in extra_lists]
    *lists, query, key, order = on_device([*lengths, *lists, torch.cat(queries), torch.cat(keys), order], device)
    # Blocks without prompts come first, and have no lengths.
    prompts = [None] * (len(shapes) - len(lengths)) + lists[: len(lengths)]
    blocks = [Block(shape, prompt) for shape, prompt in zip(shapes, prompts, strict=True)]
    return lists[len(lengths) :], Padded(blocks, query, key, order)


def _positions(start: Int[Tensor, "b 1"], length: Int[Tensor, "b 1"]) -> Int[Tensor, "b t"]:
    """Return the indices of each segment's tokens; padding repeats the last, so that its zero gradients are spread."""
    return start + torch.minimum(torch.arange(int(length.max())), length - 1)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packed: Packed | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """`sdpa`, of a packed row by segments. query: [1, H, N, D]; key, value: [1, G, N, D]; returns [1, N, H, D]."""
    if packed is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    packed.layers += 1
    return packed.layout.attend(module, query, key, value, **options)[None], None


def _by_token(states: Float[Tensor, "1 h N d"]) -> Float[Tensor, "N h d"]:
    # squeeze, not [0]: the gradient of an index is a table of zeros and a copy into it.
    return states.squeeze(0).transpose(0, 1)


@lru_cache
def flash_agrees(device: torch.device, dtype: torch.dtype, heads: int, groups: int, width: int) -> bool:
    """Return whether torch's variable-length attention runs on a device, with the values and gradients of `sdpa`.

    It is tried on three short segments: which devices, types and widths of a head its kernels take depends on torch's
    release and the GPU. heads: of queries. groups: of keys and values.
    """
    if dtype not in HALF or varlen is None:
        return False
    segments = [Segment(0, 5, 0, 0), Segment(5, 3, 0, 5), Segment(8, 4, 8, 0)]
    results = []
    with torch.inference_mode(False), torch.enable_grad():
        generator = torch.Generator().manual_seed(0)
        numbers = [torch.randn(1, count, 12, width, generator=generator).to(dtype) for count in (heads, groups, groups)]
        for lay_out in (padded, ragged):
            states = [tensor.to(device, copy=True).requires_grad_() for tensor in numbers]
            options = {"dropout": 0.0, "scaling": width**-0.5}
            module = SimpleNamespace(training=False, is_causal=True, num_key_value_groups=heads // groups)
            try:
                attended = lay_out(segments, (), device, dtype)[1].attend(module, *states, **options)
                attended.float().square().sum().backward()
            except (RuntimeError, TypeError):  # no kernel for this device, type or width; torch 2.10's other arguments
                return False
            results.append(
                torch.cat(
                    [
                        tensor.flatten().float()
                        for tensor in (attended, *[each.grad for each in states])
                        if tensor is not None
                    ]
                )
            )
    by_blocks, at_once = results
    return bool((by_blocks - at_once).abs().max() <= AGREEING * by_blocks.abs().max())


# cuDNN's attention, torch's first choice on Hopper in 16 bits, gives NaN as a query's gradient where the score of a key
# that is masked is far above all that the query sees (Qwen2.5's keys reach 220): in some eight of 200 steps of
# Qwen2.5-Coder-0.5B with torch 2.11 on an H200. On the same tensors torch's other kernels gave numbers.
torch.backends.cuda.enable_cudnn_sdp(False)
AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
SCALED_DOT_PRODUCT.add(NAME)
