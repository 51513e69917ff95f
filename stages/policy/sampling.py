"""Sampling with a Hugging Face model: prompts in, sampled ids and log-probs out, in batches that fit into memory.

We do not use transformers' `generate`: it keeps [T, B, V] scores to return log-probs, and draws all rows from one
random stream. Here a row's draws depend on its own seed only, and memory stays at [B, V]. From top to bottom: the loop
over tokens; prefill, once for equal prompts, shared beginnings and rows of the previous call; the rows of a batch with
a KV cache that is written in place; the decoding step as a CUDA graph; the number of rows that fit into memory.

A row does not depend on the other rows of its batch, up to rounding: equal seeds give equal tokens.
"""

import inspect
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Any
from weakref import WeakSet

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from stages.backends import resources
from stages.backends.ranks import world_size
from stages.errors import UsageError
from stages.layout import counted
from stages.policy.base import NotFinite, PolicyConfig
from stages.runs.activity import detail
from stages.stopping import Interrupted, stop_requested

SHRINK = 0.75
"""Ended rows are dropped when at most this share of the batch still runs: each drop copies the running rows."""
GIB = 2**30
NO_NUMBERS = (
    "The model's log-probs are NaN: its weights are too large for their type, or no longer numbers. Take a checkpoint "
    "from before they were, or set policy.dtype=float32."
)
Drawn = tuple[list[int], list[float]]
"""Sampled token ids, the end token included, and their natural log-probs."""


@torch.inference_mode()
def sample_batch(
    model: Any,
    prompts: Sequence[list[int]],
    *,
    seeds: Sequence[int],
    max_tokens: int,
    temperature: float,
    end_ids: set[int],
    pad_id: int,
    prefill_tokens: int = 8192,
    prefixes: "PrefixCache | None" = None,
    look_every: int | None = None,
    fixed: bool | None = None,
) -> list[Drawn]:
    """Draw one completion per prompt: (token ids with the end token, natural log-probs after temperature).

    Temperature 0 takes the most likely token, with log-probs of the untempered distribution. prefixes: the KV cache of
    the previous call, which prompts may continue, replaced by that of this call. look_every: tokens between two checks
    for ended rows. fixed: whether decoding steps are a `_FixedStep`; None chooses by the device.
    """
    device = next(model.parameters()).device
    # A generator per row, on the CPU in float64: a row's draws depend neither on the batch nor on the device.
    generators = [torch.Generator().manual_seed(seed % 2**63) for seed in seeds]
    drawn = [torch.rand(max_tokens, dtype=torch.float64, generator=generator) for generator in generators]
    uniforms = torch.stack(drawn).to(device)  # [B, max_tokens]
    rows, logits = _prefilled(model, prompts, max_tokens, pad_id, prefill_tokens, prefixes)
    rows.fixed = rows.in_place and (_replays(model) if fixed is None else fixed)
    look = look_every or (1 if device.type == "cpu" else 16)  # a GPU is waited for at each look, a CPU never
    completions: list[Drawn] = [([], []) for _ in prompts]
    ended, pending = [False] * len(prompts), list[Tensor]()
    for t in range(max_tokens):
        token, logp = draw(logits, uniforms[:, t], temperature)  # [B], [B]
        pending.append(torch.stack([token.double(), logp.double()]))
        last = t + 1 == max_tokens
        if last or len(pending) == look:
            # Tokens and log-probs in one wait; float64 holds every id exactly.
            tokens, logps = torch.stack(pending, -1).tolist()
            pending.clear()
            running = rows.running
            for row, prompt in enumerate(running):
                for token_id, value in zip(map(int, tokens[row]), logps[row], strict=True):
                    if not ended[prompt]:
                        if math.isnan(value):
                            raise NotFinite(NO_NUMBERS)
                        completions[prompt][0].append(token_id)
                        # Rounding can make the log-prob of a near-certain token slightly positive.
                        completions[prompt][1].append(min(value, 0.0))
                        ended[prompt] = token_id in end_ids
            unfinished = [row for row, prompt in enumerate(running) if not ended[prompt]]
            if last or not unfinished:
                break
            detail(f"{sum(ended)} complete, {len(unfinished)} under way with {counted(t + 1, 'token')} each")
            if len(unfinished) <= SHRINK * len(running):
                rows.shrink(unfinished)
                index = torch.tensor(unfinished).to(device)
                token, uniforms = token.index_select(0, index), uniforms.index_select(0, index)
        logits = rows.step(token[:, None])
    if prefixes is not None:
        prefixes.keep(rows, prompts, [ids for ids, _ in completions])
    return completions


def _raise_if_stopped() -> None:
    """Raise `Interrupted` after a request to stop, unless other processes take part, which stop at the same step."""
    if stop_requested() and world_size() == 1:
        raise Interrupted


def draw(
    logits: Float[Tensor, "B V"], uniform: Float[Tensor, " B"], temperature: float
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """Draw one token per row by inverting the cumulative distribution at `uniform`; return it with its log-prob."""
    logp = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    if temperature == 0:
        token = logp.argmax(-1)
    else:
        # In float64: a float32 sum over a vocabulary of 150,000 drops rare tokens. Its last value, not 1, is the total.
        cumulative = logp.double().exp().cumsum(-1)
        target = uniform[:, None] * cumulative[:, -1:]
        token = torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
    return token, logp.gather(-1, token[:, None]).squeeze(-1)


# Prompts


@dataclass
class PrefixCache:
    """The KV cache of one call of `sample_batch`, for the prompts of the next call, which continue it.

    It must not outlive a change of the weights. Its memory is freed while the next call copies it.
    """

    _rows: "_Rows | None" = None
    _known: dict[tuple[int, ...], tuple[int, Int[Tensor, " n"]]] = field(default_factory=dict)
    """By a row's ids, its place among the rows and the columns of its tokens, which may be fewer than its ids."""

    def keep(self, rows: "_Rows", prompts: Sequence[list[int]], completions: Sequence[list[int]]) -> None:
        """Keep the rows of a call; rows of a model whose cache is not written in place are dropped."""
        self.clear()
        if not rows.in_place:
            return
        rows.forget_step()
        self._rows, width = rows, rows.prompt_mask.shape[1]
        for row, number in enumerate(rows.numbers):
            # A row that ended before others was fed tokens behind its end, and the last token of all was never fed.
            fed = min(len(completions[number]), rows.ends.get(number, rows.extent.length) - width)
            columns = torch.cat([rows.prompt_mask[number].nonzero()[:, 0], torch.arange(width, width + fed)])
            self._known[*prompts[number], *completions[number]] = row, columns

    def find(self, prompt: Sequence[int]) -> tuple[int, Int[Tensor, " n"]] | None:
        """Return place and columns of the longest row that a prompt continues by at least a token."""
        for length in sorted({len(ids) for ids in self._known if len(ids) < len(prompt)}, reverse=True):
            if (row := self._known.get(tuple(prompt[:length]))) is not None:
                return row
        return None

    def move(self, rows: "_Rows", places: Int[Tensor, " u"], columns: Int[Tensor, "u c"]) -> None:
        """Copy columns of the kept rows to the beginning of new rows, layer by layer, and free the kept rows."""
        if self._rows is not None:
            device = self._rows.visible.device
            rows.copy_from(self._rows, places.to(device), columns.to(device))
        self.clear()

    def clear(self) -> None:
        """Drop all rows."""
        self._rows = None
        self._known.clear()


def _prefilled(
    model: Any,
    prompts: Sequence[list[int]],
    max_tokens: int,
    pad_id: int,
    most: int,
    prefixes: PrefixCache | None,
) -> tuple["_Rows", Float[Tensor, "B V"]]:
    """Prefill all prompts in passes of at most `most` tokens; return their rows and next-token logits.

    Equal prompts and shared beginnings are computed once. Columns of a row: those copied from a previous call or a
    shared beginning, then new tokens, each padded on the left, which does not shift positions; then room for the
    completion.
    """
    order = {prompt: number for number, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    in_place = _fits(model, max(map(len, prompts)) + max_tokens)
    rows = [None if prefixes is None or not in_place else prefixes.find(prompt) for prompt in order]
    lengths = [0 if row is None else len(row[1]) for row in rows]
    beginnings = [] if any(lengths) or not in_place else _beginnings(order, next(model.parameters()).device)
    if beginnings:
        begun = PrefixCache()
        begun.keep(_prefilled(model, beginnings, 0, pad_id, most, None)[0], beginnings, [[] for _ in beginnings])
        if prefixes is not None:
            prefixes.clear()
        return _prefilled(model, prompts, max_tokens, pad_id, most, begun)
    prefix = max(lengths)
    width = max(len(prompt) - start for prompt, start in zip(order, lengths, strict=True))
    ids = torch.full((len(order), width), pad_id)
    positions = torch.zeros_like(ids)
    visible = torch.zeros((len(order), prefix + width), dtype=torch.bool)
    columns, places = torch.zeros((len(order), prefix), dtype=torch.long), torch.zeros(len(order), dtype=torch.long)
    for number, (prompt, row, start) in enumerate(zip(order, rows, lengths, strict=True)):
        new = len(prompt) - start
        ids[number, width - new :] = torch.tensor(prompt[start:])
        positions[number, width - new :] = torch.arange(start, len(prompt))
        visible[number, prefix + width - new :] = True
        if row is not None:
            places[number], columns[number, prefix - start :] = row
            visible[number, prefix - start : prefix] = True
    repeated = len(order) < len(prompts)
    batch = _Rows(model, visible, visible.shape[1] + (0 if repeated else max_tokens), in_place)
    if prefixes is not None:
        prefixes.move(batch, places, columns)
    device = batch.visible.device
    ids, positions = ids.to(device), positions.to(device)
    step = max(1, most // len(order)) if in_place else width  # a cache of another kind may want a prompt at once
    for start in range(0, width, step):
        logits = batch.read(ids[:, start : start + step], positions[:, start : start + step])
    if in_place and not batch.complete:
        _UNFIT.add(model)
        return _prefilled(model, prompts, max_tokens, pad_id, most, None)
    batch.next = positions[:, -1:] + 1
    if repeated:
        numbers = torch.tensor([order[tuple(prompt)] for prompt in prompts])
        batch.repeat(numbers, visible.shape[1] + max_tokens)
        logits = logits.index_select(0, numbers.to(device))
    return batch, logits


def _beginnings(prompts: Iterable[tuple[int, ...]], device: torch.device) -> list[list[int]]:
    """Return the beginnings that groups of distinct prompts share; empty if prefilling them first saves no time.

    The beginning of a prompt that shares nothing is all of it but the last token, since a pass is as long as its
    longest row.
    """
    ordered = sorted(prompts)
    shared = [
        sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt[:-1], following[:-1], strict=False)))
        for prompt, following in pairwise(ordered)
    ]
    # One more pass reads all weights; a CPU computes about a dozen tokens in that time, a GPU hundreds.
    least = 64 if device.type == "cpu" else 2048
    fewest, best = len(ordered) * max(map(len, ordered)) - least, list[list[int]]()
    for together in sorted(set(shared)):  # tokens that neighbours share at least
        beginnings, longest = list[list[int]](), 0
        for length, group in _runs(ordered, shared, together):
            beginnings.append(list(group[0][:length]))
            longest = max(longest, *(len(prompt) - length for prompt in group))
        tokens = len(beginnings) * max(map(len, beginnings)) + len(ordered) * longest
        if tokens <= fewest:
            fewest, best = tokens, beginnings
    return best


def _runs(
    ordered: Sequence[tuple[int, ...]], shared: Sequence[int], together: int
) -> Iterator[tuple[int, Sequence[tuple[int, ...]]]]:
    """Yield groups of neighbours that share at least `together` tokens, with the length that the group shares."""
    start = 0
    for end in range(1, len(ordered) + 1):
        if end == len(ordered) or shared[end - 1] < together:
            yield min(shared[start : end - 1], default=len(ordered[start]) - 1), ordered[start:end]
            start = end


# Rows and their keys and values


@dataclass
class _Extent:
    """The used part of the KV cache: the first `rows` rows and the first `length` columns.

    window, column: during a `_FixedStep`, the number of columns that are attended to, and the column that is written.
    """

    rows: int
    length: int
    capacity: int
    window: int = 0
    column: Int[Tensor, " 1"] | None = None


class _Layer(CacheLayerMixin):
    """Keys and values of one layer, [B, G, capacity, D], written in place: nothing is copied as rows grow."""

    is_sliding = False

    def __init__(self, extent: _Extent) -> None:
        super().__init__()
        self.extent = extent  # not the rows, which hold this layer: a cycle would keep a GPU's memory until collected

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the tables, like the first keys and values."""
        self.keys, self.values = (
            states.new_empty(self.extent.rows, states.shape[1], self.extent.capacity, states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write behind the columns in use, and return these and the new ones."""
        del args, kwargs
        _raise_if_stopped()  # in each layer: a pass over long prompts takes minutes on a CPU
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = (
            self._written(table, states) for table, states in ((self.keys, key_states), (self.values, value_states))
        )
        return keys, values

    def _written(self, table: Any, states: Tensor) -> Tensor:
        if self.extent.column is not None:
            window: Tensor = table[: self.extent.rows, :, : self.extent.window]
            return window.index_copy_(2, self.extent.column, states)
        start, end = self.extent.length, self.extent.length + states.shape[2]
        table = table[: self.extent.rows, :, :end]
        table[:, :, start:] = states
        written: Tensor = table
        return written

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys and where they begin."""
        return self.extent.length + query_length, 0

    def get_seq_length(self) -> int:
        """Return the columns in use."""
        return self.extent.length

    def get_max_length(self) -> int:
        """Return the columns there are."""
        return self.extent.capacity


class _Rows:
    """The rows of a batch in a model's KV cache. Ended rows move behind the running rows and get no tokens.

    prompt_mask: [B, P] on the host, False at padding; no later column is padding. visible: the same on the device,
    [B, capacity]. numbers: the prompt of the row at each index. ends: columns in use when a row was dropped.
    """

    def __init__(self, model: Any, mask: Bool[Tensor, "u p"], capacity: int, in_place: bool) -> None:
        self.model, self.prompt_mask, self.in_place = model, mask, in_place
        self.extent = _Extent(len(mask), 0, capacity)
        self.numbers, self.ends = list(range(len(mask))), dict[int, int]()
        self.next = torch.empty(0)
        text = model.config.get_text_config()
        self._cache: Any = None
        if in_place:
            self._cache = Cache(layers=[_Layer(self.extent) for _ in range(text.num_hidden_layers)])
        self._bias: Float[Tensor, "b 1 1 c"] | None = None
        self.fixed = False
        self._step: _FixedStep | None = None
        self._extend_mask(capacity)

    def _extend_mask(self, capacity: int) -> None:
        padded = torch.ones(len(self.prompt_mask), capacity, dtype=torch.bool)
        padded[:, : self.prompt_mask.shape[1]] = self.prompt_mask
        self.visible = padded.to(next(self.model.parameters()).device)

    @property
    def running(self) -> list[int]:
        """Return the numbers of the rows that are fed, by place."""
        return self.numbers[: self.extent.rows]

    @property
    def complete(self) -> bool:
        """Whether every layer has written its keys and values in place."""
        return all(layer.is_initialized for layer in self._cache.layers)

    def read(self, ids: Int[Tensor, "b t"], positions: Int[Tensor, "b t"]) -> Float[Tensor, "b v"]:
        """Read tokens, padding among them, and return the logits behind the last."""
        start, end = self.extent.length, self.extent.length + ids.shape[1]
        if not self.in_place:
            return self._pass(ids, positions, self.visible[:, :end].long())
        keys = torch.arange(end, device=ids.device)
        queries = keys[start:, None]
        # Padding sees itself: a query that sees nothing gives NaN, which would spread from its keys and values.
        seen = (keys <= queries) & self.visible[:, None, None, :end] | (keys == queries)  # [b, 1, t, end]
        return self._pass(ids, positions, seen)

    def step(self, ids: Int[Tensor, "b 1"]) -> Float[Tensor, "b v"]:
        """Read one token of each running row, and return the logits behind it."""
        end = self.extent.length + 1
        if self.fixed:
            if self._step is None or end > self._step.window:
                self._step = None  # its memory is the next one's
                self._step = _FixedStep(self.model, self._cache, self.extent, self.visible)
            logits = self._step(ids, self.next)
            self.next = self.next + 1
            return logits
        if self.in_place:
            if self._bias is None:  # in the type of the scores: of a boolean mask each layer would make this table
                empty = torch.zeros(self.visible.shape, dtype=self._cache.layers[0].keys.dtype, device=ids.device)
                self._bias = empty.masked_fill_(~self.visible, float("-inf"))[:, None, None]
            mask: Tensor = self._bias[: self.extent.rows, ..., :end]
        else:
            mask = self.visible[:, :end].long()
        logits = self._pass(ids, self.next, mask)
        self.next = self.next + 1
        return logits

    def _pass(self, ids: Tensor, positions: Tensor, mask: Tensor) -> Float[Tensor, "b v"]:
        _raise_if_stopped()
        out = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache = out.past_key_values
        self.extent.length += ids.shape[1]
        logits: Tensor = out.logits[:, -1]
        return logits

    def forget_step(self) -> None:
        """Free the decoding step, whose rows change or end."""
        self._step = None

    def shrink(self, unfinished: list[int]) -> None:
        """Keep only these rows running; with a cache in place, ended rows stay behind them."""
        self.forget_step()
        extent, gone = self.extent, [row for row in range(self.extent.rows) if row not in set(unfinished)]
        self.ends |= {self.numbers[row]: extent.length for row in gone}
        self.numbers[: extent.rows] = [self.numbers[row] for row in (*unfinished, *gone)]
        index = torch.tensor(unfinished).to(self.visible.device)
        self.next, self.visible = self.next.index_select(0, index), self.visible.index_select(0, index)
        if self.in_place:
            order = torch.tensor([*unfinished, *gone]).to(self.visible.device)
            for layer in self._cache.layers:
                for table in (layer.keys, layer.values):
                    used = table[: extent.rows, :, : extent.length]
                    used.copy_(used.index_select(0, order))
            if self._bias is not None:
                self._bias = self._bias.index_select(0, index)
        else:
            self._cache.batch_select_indices(index)
        extent.rows = len(unfinished)

    def repeat(self, numbers: Int[Tensor, " B"], capacity: int) -> None:
        """Replace the rows by copies of the rows with these numbers, with this capacity of columns."""
        index = numbers.to(self.visible.device)
        if self.in_place:
            used = self.extent.length
            for layer in self._cache.layers:
                for name in ("keys", "values"):
                    table = getattr(layer, name)
                    larger = table.new_empty(len(numbers), table.shape[1], capacity, table.shape[3])
                    larger[:, :, :used] = table[:, :, :used].index_select(0, index)
                    setattr(layer, name, larger)
        else:
            self._cache.batch_select_indices(index)
        self.prompt_mask, self.numbers = self.prompt_mask[numbers], list(range(len(numbers)))
        self.extent.rows, self.extent.capacity = len(numbers), capacity
        self.next = self.next.index_select(0, index)
        self._extend_mask(capacity)

    def copy_from(self, previous: "_Rows", places: Int[Tensor, " u"], columns: Int[Tensor, "u c"]) -> None:
        """Begin with columns of previous rows, whose tables are freed layer by layer."""
        used = columns.shape[1]
        if used:
            for layer, origin in zip(self._cache.layers, previous._cache.layers, strict=True):
                layer.lazy_initialization(origin.keys, origin.values)
                for table, source in ((layer.keys, origin.keys), (layer.values, origin.values)):
                    table[:, :, :used] = source[places[:, None], :, columns].transpose(1, 2)
                origin.keys = origin.values = None
        self.extent.length = used


# A token on a GPU


WINDOW = 256
"""Columns by which the part of the tables grows that a `_FixedStep` attends to."""


class _FixedStep:
    """One decoding step of a fixed set of rows, recorded once as a CUDA graph and replayed.

    A model launches a thousand kernels or more per token, which takes the host 30 ms, and the replay on a GPU a tenth
    of that. Shapes are fixed: all columns of a window are attended to, empty ones with the bias -inf, and the index of
    the written column is a number on the device. The first token is computed without recording, so that nothing is
    loaded or tuned during the recording of the second. On a CPU nothing is recorded.

    visible: [b, capacity], the columns that are no padding.
    """

    def __init__(self, model: Any, cache: Any, extent: _Extent, visible: Bool[Tensor, "b c"]) -> None:
        self._model, self._cache, self._extent = model, cache, extent
        self.window = min(extent.capacity, (extent.length // WINDOW + 1) * WINDOW)
        device = visible.device
        self._ids = torch.zeros(len(visible), 1, dtype=torch.long, device=device)
        self._positions, self._column = self._ids.clone(), torch.zeros(1, dtype=torch.long, device=device)
        seen = visible[:, None, None, : self.window] & (torch.arange(self.window, device=device) < extent.length)
        empty = torch.zeros(seen.shape, dtype=cache.layers[0].keys.dtype, device=device)
        self._bias = empty.masked_fill_(~seen, float("-inf"))
        for layer in cache.layers:
            for table in (layer.keys, layer.values):
                table[: extent.rows, :, extent.length : self.window] = 0  # 0 times what memory held may be NaN
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: Tensor | None = None

    def __call__(self, ids: Int[Tensor, "b 1"], positions: Int[Tensor, "b 1"]) -> Float[Tensor, "b v"]:
        """Return the logits behind a token of each row, which are overwritten by the next call."""
        column = self._extent.length
        self._ids.copy_(ids)
        self._positions.copy_(positions)
        self._column.fill_(column)
        self._bias[..., column] = 0
        if self._graph is None and self._logits is not None and ids.is_cuda:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._logits = self._read()
        if self._graph is None:
            self._logits = self._read()
        else:
            self._graph.replay()
        self._extent.length = column + 1
        logits: Tensor = self._logits  # type: ignore[assignment]
        return logits

    def _read(self) -> Float[Tensor, "b v"]:
        extent = self._extent
        extent.window, extent.column = self.window, self._column
        try:
            out = self._model(
                input_ids=self._ids,
                attention_mask=self._bias,
                position_ids=self._positions,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
        finally:
            extent.column = None
        logits: Tensor = out.logits[:, -1]
        return logits


def _replays(model: Any) -> bool:
    """Whether the kernels of a token can be recorded: on a GPU, and no number of them is looked at on the host.

    The host looks where rotary embeddings grow with the row, where experts are chosen, and where weights are in shares.
    """
    text = model.config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    looks = rope.get("rope_type") in ("dynamic", "longrope") or any("expert" in name for name in text.to_dict())
    fixed = getattr(model, "_can_compile_fullgraph", False) and not looks
    return fixed and all(type(p) in (torch.nn.Parameter, Tensor) and p.is_cuda for p in model.parameters())


SCALED_DOT_PRODUCT = {"sdpa"}
"""Attention that takes a mask as it is, by transformers' names; stages/training/scoring.py adds its own."""
LAYERS = {"full_attention", "sliding_attention"}
_UNFIT: WeakSet[Any] = WeakSet()
"""Models some of whose layers were seen not to write keys and values in place."""


def _fits(model: Any, longest: int) -> bool:
    """Whether the keys and values of rows of up to `longest` tokens can be written in place, as all attend to all."""
    return (
        model not in _UNFIT
        and model.config.get_text_config()._attn_implementation in SCALED_DOT_PRODUCT
        and sees_all(model, longest)
    )


def sees_all(model: Any, longest: int) -> bool:
    """Return whether, by the configuration, every token of rows up to `longest` attends to all earlier tokens."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or LAYERS)  # a window is for all layers where none is named
    window = getattr(config, "sliding_window", None) if "sliding_attention" in kinds else None
    parameters = inspect.signature(model.get_decoder().forward).parameters
    accepts = "position_ids" in parameters and any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    stateful = getattr(model, "_is_stateful", False)
    return accepts and not stateful and kinds <= LAYERS and (window is None or longest <= window)


# Memory


def kv_width(config: Any) -> int:
    """Return the width of a layer's keys, which is that of its values, by the configuration of a text model."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(heads * width)


def row_bytes(model: Any, columns: int) -> int:
    """Return the memory of a row with this many tokens: KV cache and sampling distribution, in bytes."""
    text = model.config.get_text_config()
    # Logits, and log-probs, probabilities and their sums in float32 and float64.
    return 2 * text.num_hidden_layers * kv_width(text) * model.dtype.itemsize * columns + 32 * text.vocab_size


def row_budget(model: Any, config: PolicyConfig) -> int:
    """Return the bytes for rows: `policy.kv_cache_gib`, else 80 % of a GPU's free memory or half of the RAM."""
    if config.kv_cache_gib is not None:
        return int(config.kv_cache_gib * GIB)
    free = resources.gpu_free(next(model.parameters()).device)
    return int(0.8 * free) if free else resources.available("cpu") // 2


def split_batches(model: Any, prompts: Sequence[list[int]], max_tokens: int, most: int) -> list[list[int]]:
    """Return the numbers of prompts in batches of at most `most` bytes, at least one prompt in each.

    In their order where one batch holds all; else the longest prompts come first, as a batch is padded to its longest.
    """
    numbers = list(range(len(prompts)))
    batches: list[list[int]] = []
    for number in sorted(numbers, key=lambda index: -len(prompts[index])):
        if batches:
            row = row_bytes(model, len(prompts[batches[-1][0]]) + max_tokens)
            if row * (len(batches[-1]) + 1) <= most:
                batches[-1].append(number)
                continue
        batches.append([number])
    return batches if len(batches) > 1 else [numbers]


SHORTEST = 1024
"""Tokens of a prompt that a model must have room for besides an answer; what prompts need is known as they come."""


def check_cache(model: Any, config: PolicyConfig) -> None:
    """`UsageError` where not one answer of `policy.max_tokens` tokens fits into the memory for keys and values."""
    most = row_budget(model, config)
    needed = row_bytes(model, SHORTEST + (config.max_tokens or 1))  # without a limit an answer has what is left
    if needed > most:
        raise UsageError(
            "policy.answer-beyond-memory",
            max_tokens=config.max_tokens,
            prompt_tokens=SHORTEST,
            needed=needed / GIB,
            limited=config.kv_cache_gib is not None,
            most=most / GIB,
        )
