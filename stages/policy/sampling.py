"""Sampling with a Hugging Face model: prompts in, sampled ids and log-probs out, in batches that fit into memory.

We do not use transformers' `generate`: it keeps [T, B, V] scores to return log-probs, and draws all rows from one
random stream. Here a row's draws depend on its own seed only, and memory stays at [B, V]. From top to bottom: the loop
over tokens; prefill, once for equal prompts, shared beginnings and rows of the previous call; the rows of a batch with
a KV cache that is written in place; the decoding step as a CUDA graph; the number of rows that fit into memory.

A row does not depend on the other rows of its batch, up to rounding: equal seeds give equal tokens.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, takewhile
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from composer_stages.backends import resources
from composer_stages.errors import UsageError
from composer_stages.layout import counted
from composer_stages.policy import small_models, trials
from composer_stages.policy.base import NotFinite, PolicyConfig
from composer_stages.policy.kv_cache import Rows, can_replay, raise_if_stopped
from composer_stages.runs.activity import detail
from composer_stages.words import Sentence

IN_PLACE, BATCHED, ALONE = "in_place", "batched", "alone"
TOGETHER = (IN_PLACE, BATCHED)
"""Ways to sample, the fastest first: a batch in tables of our own, in the model's own cache, and one row by
`generate`."""
SHRINK = 0.75
"""Ended rows are dropped when at most this share of the batch still runs: each drop copies the running rows."""
GIB = 2**30
Drawn = tuple[list[int], list[float]]
"""Sampled token ids, the end token included, and their natural log-probs."""


@dataclass(frozen=True)
class DrawSettings:
    """How tokens are drawn, each row up to one of `end_ids`.

    Temperature 0 takes the most likely token, with log-probs of the untempered distribution. look_every: tokens between
    two checks for ended rows. fixed: whether decoding steps are a `FixedStep`; None chooses by the device.
    """

    temperature: float
    end_ids: set[int] = field(default_factory=set)
    pad_id: int = 0
    prefill_tokens: int = 8192
    look_every: int | None = None
    fixed: bool | None = None


@torch.inference_mode()
def sample_batch(
    model: Any,
    prompts: Sequence[list[int]],
    *,
    seeds: Sequence[int],
    max_tokens: int,
    context: float = math.inf,
    prefixes: "PrefixCache | None" = None,
    **settings: Any,
) -> list[Drawn]:
    """Draw one completion per prompt: (token ids with the end token, natural log-probs after temperature).

    context: tokens at which a row ends, its prompt included: learned positions end there. prefixes: the KV cache of the
    previous call, which prompts may continue, replaced by that of this call. settings: those of `DrawSettings`.

    A row is sampled in the fastest way that is right for its length (`try_sampling`), and where it outgrows that, it
    goes on in the next one.
    """
    draws = DrawSettings(**settings)
    # A generator per row, on the CPU in float64: a row's draws depend neither on the batch nor on the device.
    generators = [torch.Generator().manual_seed(seed % 2**63) for seed in seeds]
    uniforms = [
        torch.rand(max_tokens, dtype=torch.float64, generator=generator)[: int(min(max_tokens, context - len(prompt)))]
        for generator, prompt in zip(generators, prompts, strict=True)
    ]
    drawn: list[Drawn] = [([], []) for _ in prompts]
    ways = trials.outcome(model, try_sampling)
    for way in (*TOGETHER, ALONE):
        room = min(context, math.inf if way == ALONE else trials.longest(ways, way, model.config))
        while rows := [
            row
            for row, (ids, _) in enumerate(drawn)
            if len(ids) < min(len(uniforms[row]), room - len(prompts[row])) and draws.end_ids.isdisjoint(ids[-1:])
        ]:
            begun = [[*prompts[row], *drawn[row][0]] for row in rows]
            rest = [uniforms[row][len(drawn[row][0]) :] for row in rows]
            if way == ALONE:
                pairs = zip(begun, rest, strict=True)
                samples = [sample_alone(model, *pair, draws, cached=bool(ways.get(ALONE))) for pair in pairs]
            else:
                most = int(min(max(map(len, rest)), room - max(map(len, begun))))
                table = pad_sequence(rest, batch_first=True)[:, :most]
                cached_prefixes = prefixes if len(rows) == len(prompts) else None
                samples = _together(model, begun, table, draws, way == IN_PLACE, cached_prefixes)
            for row, own_uniforms, (ids, logps) in zip(rows, rest, samples, strict=True):
                drawn[row][0].extend(ids[: len(own_uniforms)])
                drawn[row][1].extend(logps[: len(own_uniforms)])
    return drawn


def _together(
    model: Any,
    prompts: Sequence[list[int]],
    uniforms: Float[Tensor, "B m"],
    draws: DrawSettings,
    in_place: bool,
    prefixes: "PrefixCache | None" = None,
) -> list[Drawn]:
    """Draw as many tokens for each prompt as there are `uniforms`, in one batch; in_place: in tables of our own."""
    device, max_tokens = next(model.parameters()).device, uniforms.shape[1]
    uniforms = uniforms.to(device)
    rows, logits = _prefilled(model, prompts, max_tokens, draws.pad_id, draws.prefill_tokens, prefixes, in_place)
    rows.fixed = in_place and (can_replay(model) if draws.fixed is None else draws.fixed)
    look = draws.look_every or (1 if device.type == "cpu" else 16)  # a GPU is waited for at each look, a CPU never
    completions: list[Drawn] = [([], []) for _ in prompts]
    ended, pending = [False] * len(prompts), list[Tensor]()
    for t in range(max_tokens):
        token, logp = draw(logits, uniforms[:, t], draws.temperature)  # [B], [B]
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
                            raise NotFinite("policy.log-probs-not-numbers")
                        completions[prompt][0].append(token_id)
                        # Rounding can make the log-prob of a near-certain token slightly positive.
                        completions[prompt][1].append(min(value, 0.0))
                        ended[prompt] = token_id in draws.end_ids
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


def sample_alone(
    model: Any, prompt: list[int], uniforms: Float[Tensor, " m"], draws: DrawSettings, *, cached: bool
) -> Drawn:
    """Draw one completion as transformers' `generate` computes it; cached: whether in its cache, or each pass anew."""
    drawn, device = _Drawing(uniforms, draws.temperature), next(model.parameters()).device
    ids = torch.tensor([prompt], device=device)
    if not cached:
        while len(drawn.ids) < len(uniforms) and draws.end_ids.isdisjoint(drawn.ids[-1:]):
            token = drawn(ids, model(input_ids=ids, use_cache=False).logits[:, -1]).argmax(-1, keepdim=True)
            ids = torch.cat([ids, token], 1)
        return drawn.ids, drawn.logps
    # In place of the model's own settings, which would fill in what is not set.
    settings = GenerationConfig(
        max_new_tokens=len(uniforms), eos_token_id=sorted(draws.end_ids) or None, pad_token_id=0
    )
    of_model, model.generation_config = model.generation_config, settings
    try:
        model.generate(ids, attention_mask=torch.ones_like(ids), logits_processor=LogitsProcessorList([drawn]))
    finally:
        model.generation_config = of_model
    return drawn.ids, drawn.logps


class _Drawing(LogitsProcessor):
    """Draws each token of a row in `generate`, which is left with this token alone."""

    def __init__(self, uniforms: Float[Tensor, " m"], temperature: float) -> None:
        self.ids, self.logps, self._uniforms, self._temperature = list[int](), list[float](), uniforms, temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        raise_if_stopped()
        token, logp = draw(scores, self._uniforms[None, len(self.ids)].to(scores.device), self._temperature)
        if logp.isnan():
            raise NotFinite("policy.log-probs-not-numbers")
        self.ids.append(int(token))
        self.logps.append(min(float(logp), 0.0))
        return torch.full_like(scores, -torch.inf).index_fill_(-1, token, 0.0)


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

    _rows: "Rows | None" = None
    _known: dict[tuple[int, ...], tuple[int, Int[Tensor, " n"]]] = field(default_factory=dict)
    """By a row's ids, its place among the rows and the columns of its tokens, which may be fewer than its ids."""

    def keep(self, rows: "Rows", prompts: Sequence[list[int]], completions: Sequence[list[int]]) -> None:
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

    def move(self, rows: "Rows", places: Int[Tensor, " u"], columns: Int[Tensor, "u c"]) -> None:
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
    in_place: bool,
) -> tuple["Rows", Float[Tensor, "B V"]]:
    """Prefill all prompts in passes of at most `most` tokens; return their rows and next-token logits.

    Equal prompts and shared beginnings are computed once. Columns of a row: those copied from a previous call or a
    shared beginning, then new tokens, each padded on the left, which does not shift positions; then room for the
    completion.
    """
    order = {prompt: number for number, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    rows = [None if prefixes is None or not in_place else prefixes.find(prompt) for prompt in order]
    lengths = [0 if row is None else len(row[1]) for row in rows]
    beginnings = [] if any(lengths) or not in_place else _beginnings(order, next(model.parameters()).device)
    if beginnings:
        begun = PrefixCache()
        begun.keep(
            _prefilled(model, beginnings, 0, pad_id, most, None, in_place)[0], beginnings, [[] for _ in beginnings]
        )
        if prefixes is not None:
            prefixes.clear()
        return _prefilled(model, prompts, max_tokens, pad_id, most, begun, in_place)
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
    batch = Rows(model, visible, visible.shape[1] + (0 if repeated else max_tokens), in_place)
    if prefixes is not None:
        prefixes.move(batch, places, columns)
    device = batch.visible.device
    ids, positions = ids.to(device), positions.to(device)
    step = max(1, most // len(order)) if in_place else width  # a cache of another kind may want a prompt at once
    for start in range(0, width, step):
        logits = batch.read(ids[:, start : start + step], positions[:, start : start + step])
    if in_place and not batch.complete:
        raise ValueError("some layers keep no keys and values")  # which a trial reads
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


# Which ways are right


def try_sampling(model: Any, switch: int) -> dict[str, Any]:
    """Return for which rows each way to sample gives the log-probs of the model's own pass of a row alone.

    Only until one is right for all. numbers: of keys and values that the whole model keeps for a token, 0 if unknown.
    """
    results: dict[str, Any] = {"numbers": _cached_numbers(model)}
    for way in TOGETHER:
        results[way], wrong = trials.try_lengths(model, partial(_differences, model, way == IN_PLACE), switch)
        if wrong:
            results[f"not_{way}"] = wrong
        if results[way] == "all":
            return results
    prompt, uniforms = [5, 6, 7, 8], _uniforms(switch + 6)
    wrong = trials.agrees(
        model, lambda: _difference(model, prompt, sample_alone(model, prompt, uniforms, DrawSettings(1.0), cached=True))
    )
    return results | {ALONE: not wrong} | ({"not_alone": wrong} if wrong else {})


def describe_ways(config: PolicyConfig, model: Any) -> Sentence | None:
    """Return which rows of a model are not sampled in the fastest way, and why; None where all are."""
    ways = trials.outcome(model, try_sampling)
    if ways.get(IN_PLACE) == "all":
        return None
    limits = {way: trials.longest(ways, way, model.config) for way in TOGETHER}
    reason = ways.get("unmade") or ways[f"not_{IN_PLACE}"]
    return Sentence(
        "policy.sampled-slowly",
        model=config.model,
        limits=limits,
        infinity=math.inf,
        cached=bool(ways.get(ALONE)),
        reason=reason,
    )


def _uniforms(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def _differences(model: Any, in_place: bool, switch: int) -> Tensor:
    """Return how log-probs of rows, sampled together, differ from those of rows alone.

    One row grows beyond `switch`, another begins there, two are equal, and one ends before the others; then all go on
    as the prompts of another call. Without a switch all rows stay below the shortest one.
    """
    prompts = [[5, 6, 7, 8], [9 + i % 40 for i in range(switch + 3)] if switch else [9, 10], [5, 6, 7, 8]]
    uniforms, prefixes = _uniforms(3, switch + 6 if switch else small_models.SWITCH - 6), PrefixCache()
    ended = _together(model, prompts, uniforms, DrawSettings(1.0), in_place)
    ends = {ended[0][0][2]}
    samples = _together(model, prompts, uniforms, DrawSettings(1.0, ends, fixed=False), in_place, prefixes)
    parts = [_difference(model, prompt, row) for prompt, row in zip(prompts, ended, strict=True)]
    for (ids, logps), (_, all_logps) in zip(samples, ended, strict=True):
        parts.append(torch.tensor(logps) - torch.tensor(all_logps[: len(ids)]))
    longer = [[*prompt, *ids, 11] for prompt, (ids, _) in zip(prompts, samples, strict=True)]
    again = _together(model, longer, uniforms[:, :1], DrawSettings(1.0, fixed=in_place), in_place, prefixes)
    return torch.cat([*parts, *(_difference(model, prompt, row) for prompt, row in zip(longer, again, strict=True))])


def _difference(model: Any, prompt: list[int], row: Drawn) -> Tensor:
    """Return the difference of a row's log-probs, where a switch is near and at both ends, from passes of it alone."""
    ids, logps = row
    near = (0, 1, small_models.SWITCH - 1)
    chosen = [
        i for i in range(len(ids)) if i in (0, 1, len(ids) - 1) or (len(prompt) + i) % small_models.SWITCH in near
    ]
    sampled = torch.tensor([logps[i] for i in chosen], dtype=torch.float64)
    return sampled - small_models.log_probs_alone(model, prompt, ids, chosen)


@torch.inference_mode()
def _cached_numbers(model: Any) -> int:
    """Return the numbers that the cache of the model whose small one this is keeps for each token."""
    try:
        tokens = small_models.SWITCH // 2
        cache = model(input_ids=torch.arange(4, 4 + tokens)[None], use_cache=True).past_key_values
        numbers = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers) // tokens
    except Exception:  # a cache of another kind
        return 0
    return numbers * model.division * model.layers_in_all // model.depth


# Memory


def row_bytes(model: Any, columns: int) -> int:
    """Return the memory of a row with this many tokens: KV cache and sampling distribution, in bytes."""
    numbers = trials.outcome(model, try_sampling).get("numbers", 0)
    # Logits, and log-probs, probabilities and their sums in float32 and float64.
    return int(numbers) * model.dtype.itemsize * columns + 32 * int(model.config.get_text_config().vocab_size)


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
