"""The rows of a batch in a model's KV cache, which is written in place, and the decoding step as a CUDA graph.

From top to bottom: layers whose tables are written in place; the rows, which are shrunk as they end and repeated for
equal prompts; the recorded decoding step; which models' caches can be written in place.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from composer_stages.backends.ranks import world_size
from composer_stages.stopping import Interrupted, stop_requested


def raise_if_stopped() -> None:
    """Raise `Interrupted` after a request to stop, unless other processes take part, which stop at the same step."""
    if stop_requested() and world_size() == 1:
        raise Interrupted


@dataclass
class Extent:
    """The used part of the KV cache: the first `rows` rows and the first `length` columns.

    window, column: during a `FixedStep`, the number of columns that are attended to, and the column that is written.
    """

    rows: int
    length: int
    capacity: int
    window: int = 0
    column: Int[Tensor, " 1"] | None = None


class Layer(CacheLayerMixin):
    """Keys and values of one layer, [B, G, capacity, D], written in place: nothing is copied as rows grow."""

    is_sliding = False

    def __init__(self, extent: Extent) -> None:
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
        raise_if_stopped()  # in each layer: a pass over long prompts takes minutes on a CPU
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


class Rows:
    """The rows of a batch in a model's KV cache. Ended rows move behind the running rows and get no tokens.

    prompt_mask: [B, P] on the host, False at padding; no later column is padding. visible: the same on the device,
    [B, capacity]. numbers: the prompt of the row at each index. ends: columns in use when a row was dropped.
    """

    def __init__(self, model: Any, mask: Bool[Tensor, "u p"], capacity: int, in_place: bool) -> None:
        self.model, self.prompt_mask, self.in_place = model, mask, in_place
        self.extent = Extent(len(mask), 0, capacity)
        self.numbers, self.ends = list(range(len(mask))), dict[int, int]()
        self.next = torch.empty(0)
        text = model.config.get_text_config()
        self._cache: Any = None
        if in_place:
            self._cache = Cache(layers=[Layer(self.extent) for _ in range(text.num_hidden_layers)])
        self._bias: Float[Tensor, "b 1 1 c"] | None = None
        self.fixed = False
        self._step: FixedStep | None = None
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
                self._step = FixedStep(self.model, self._cache, self.extent, self.visible)
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
        raise_if_stopped()
        logits, self._cache = _behind(self.model, self._cache, ids, positions, mask)
        self.extent.length += ids.shape[1]
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

    def copy_from(self, previous: "Rows", places: Int[Tensor, " u"], columns: Int[Tensor, "u c"]) -> None:
        """Begin with columns of previous rows, whose tables are freed layer by layer."""
        used = columns.shape[1]
        if used:
            for layer, origin in zip(self._cache.layers, previous._cache.layers, strict=True):
                layer.lazy_initialization(origin.keys, origin.values)
                for table, source in ((layer.keys, origin.keys), (layer.values, origin.values)):
                    table[:, :, :used] = source[places[:, None], :, columns].transpose(1, 2)
                origin.keys = origin.values = None
        self.extent.length = used


def _behind(model: Any, cache: Any, ids: Tensor, positions: Tensor, mask: Tensor) -> tuple[Tensor, Any]:
    """Return the logits behind the last token of each row, and the cache with all of them."""
    out = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return out.logits[:, -1], out.past_key_values


# A token on a GPU


WINDOW = 256
"""Columns by which the part of the tables grows that a `FixedStep` attends to."""


class FixedStep:
    """One decoding step of a fixed set of rows, recorded once as a CUDA graph and replayed.

    A model launches a thousand kernels or more per token, which takes the host 30 ms, and the replay on a GPU a tenth
    of that. Shapes are fixed: all columns of a window are attended to, empty ones with the bias -inf, and the index of
    the written column is a number on the device. The first token is computed without recording, so that nothing is
    loaded or tuned during the recording of the second. On a CPU nothing is recorded.

    visible: [b, capacity], the columns that are no padding.
    """

    def __init__(self, model: Any, cache: Any, extent: Extent, visible: Bool[Tensor, "b c"]) -> None:
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
            return _behind(self._model, self._cache, self._ids, self._positions, self._bias)[0]
        finally:
            extent.column = None


def can_replay(model: Any) -> bool:
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
