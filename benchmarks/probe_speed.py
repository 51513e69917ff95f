"""Our per-sample cosines beside other ways to get them: time, peak memory, and whether they agree.

    python benchmarks/probe_speed.py [--rows 16] [--tokens 96] [--hidden 128] [--layers 4] [--rounds 15]

All contenders get every row's cosine of its dS gradient with one direction, on one model and the same rows. `loop`: one
backward pass a row. `opacus`: its hooks on a module that multiplies by dS, with a per-sample rule written for it (its
generic rule is slower). `vmap`: torch.func.vmap of grad, with two attention implementations. `plain` is one ordinary
backward pass with the same adapter and gives only the batch's gradient; `plain frozen` leaves the adapter out and goes
back to the embeddings, `plain weights` trains every weight of the base instead. All compute logits for completion
tokens and no others.

Times: one thread, one process, contenders in turn, the first round dropped, medians of CPU time, which other programs
on the machine disturb least. Memory: a fresh process a contender, warmed up on two rows; the rise of the peak resident
set during one run. `rescoring`: 64 Haar placebos on 1,000 rows that lie in a store, as a new process reads them.
"""

import os

os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")  # freed tensors leave the resident set at once

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import cases
import torch
from probe_faults.loophole_world import tiny_qwen3
from records import Claim, measured, ratio
from torch import Tensor, nn
from torch.func import grad, vmap

from stages.gradients.basis import Factors, SingularValues, Spectrum, factorise, replaced_forwards, target_linears
from stages.gradients.per_row import DotSink, TokenBatch, TokenRow, collate, own_log_probs, per_sample_gradients
from stages.gradients.tensors import GradientStore
from stages.probe.direction import from_flat, haar
from stages.probe.metrics import stacked_cosines

MEBIBYTE = 2**20
COMPARED = (
    ("times as fast as a backward pass a row", "loop", "ours", ">= 1.6"),
    ("times as fast as Opacus", "opacus", "ours", ">= 1.15"),
    ("times as fast as torch.func's vmap", "vmap", "ours", None),
    ("time beside one plain backward pass with the adapter", "ours", "plain", "<= 1.15"),
    ("time beside one plain backward pass without adapter", "ours", "plain frozen", "<= 1.25"),
)
"""Claim, the contender above and the one below the fraction, goal."""
VOCAB = 512


@dataclass(frozen=True)
class Size:
    """Of the rows, and of the model."""

    rows: int
    tokens: int
    hidden: int
    layers: int


class Setting:
    """One model, one direction, one batch; everything drawn from a seed."""

    def __init__(self, size: Size, rows: int) -> None:
        self.model = tiny_qwen3(layers=size.layers, hidden=size.hidden, vocab=VOCAB).requires_grad_(False)
        factors = {name: factorise(linear.weight) for name, linear in target_linears(self.model).items()}
        self.adapter = SingularValues(Spectrum(factors))
        self.unit = torch.randn(self.adapter.layout.width, generator=torch.Generator().manual_seed(1))
        self.unit /= self.unit.norm()
        ids = torch.randint(2, VOCAB, (rows, size.tokens), generator=torch.Generator().manual_seed(2)).tolist()
        half = size.tokens // 2
        self.rows = [TokenRow(row[:half], row[half:], [True] * (size.tokens - half)) for row in ids]
        self.batch = collate(self.rows)

    def cosines(self, gradients: Tensor) -> Tensor:
        return gradients @ self.unit / gradients.norm(dim=-1)


def ours(s: Setting) -> Callable[[], Tensor]:
    def run() -> Tensor:
        sink = DotSink(s.adapter.layout, s.unit[None])
        per_sample_gradients(s.model, s.adapter, s.batch, sink)
        return sink.dots[:, 0] / sink.squares.sqrt()

    return run


def loop(s: Setting) -> Callable[[], Tensor]:
    batches = [collate([row]) for row in s.rows]

    def run() -> Tensor:
        with as_path(s) as leaves:
            return s.cosines(torch.stack([_backward(s, batch, leaves) for batch in batches]))

    return run


@contextmanager
def as_path(s: Setting) -> Iterator[dict[str, Tensor]]:
    """Run U diag(dS) Vh x as a path of its own while open; yields dS by module as leaves that require grad."""
    leaves = {n: part.detach().clone().requires_grad_() for n, part in s.adapter.layout.split(s.adapter.theta).items()}

    def forward(name: str, linear: nn.Linear, x: Tensor) -> Tensor:
        factors = s.adapter.factors[name]
        changed = nn.functional.linear(nn.functional.linear(x, factors.Vh) * leaves[name], factors.U)
        return nn.functional.linear(x, linear.weight, linear.bias) + changed

    with replaced_forwards(s.model, forward):
        yield leaves


def _backward(s: Setting, batch: TokenBatch, leaves: dict[str, Tensor]) -> Tensor:
    for leaf in leaves.values():
        leaf.grad = None
    own_log_probs(s.model, batch).sum().neg().backward()
    return torch.cat([leaf.grad for leaf in leaves.values()])


def plain(s: Setting) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with as_path(s) as leaves:
            return _backward(s, s.batch, leaves)

    return run


def plain_base(s: Setting, trained: bool) -> Callable[[], Tensor]:
    s.model.requires_grad_(trained)

    def run() -> Tensor:
        s.model.zero_grad()
        own_log_probs(s.model, s.batch).sum().neg().backward()
        return torch.zeros(0)

    return run


class Scale(nn.Module):
    """Multiplies by dS: the only trained module, so the only one that Opacus hooks."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class WithScale(nn.Module):
    """W x + U diag(dS) Vh x out of ordinary modules."""

    def __init__(self, linear: nn.Linear, factors: Factors) -> None:
        super().__init__()
        self.base, self.down, self.scale, self.up = linear, _fixed(factors.Vh), Scale(len(factors.S)), _fixed(factors.U)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.scale(self.down(x)))


def _fixed(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def opacus(s: Setting) -> Callable[[], Tensor]:
    from opacus import GradSampleModule
    from opacus.grad_sample.utils import register_grad_sampler

    register_grad_sampler(Scale)(lambda layer, inputs, backprops: {layer.weight: (inputs[0] * backprops).sum(1)})
    for name, linear in target_linears(s.model).items():
        parent, _, child = name.rpartition(".")
        setattr(s.model.get_submodule(parent), child, WithScale(linear, s.adapter.factors[name]))
    wrapped = GradSampleModule(s.model, loss_reduction="sum", strict=False)
    scales = [m.weight for m in s.model.modules() if isinstance(m, Scale)]

    def run() -> Tensor:
        wrapped.zero_grad()
        own_log_probs(s.model, s.batch).sum().neg().backward()
        return s.cosines(torch.cat([weight.grad_sample for weight in scales], dim=-1))

    return run


def vmapped(s: Setting, attention: str) -> Callable[[], Tensor]:
    """Rows of equal length without an attention mask, whose construction calls .item(), which vmap forbids."""
    s.model.set_attn_implementation(attention)
    start = len(s.rows[0].prompt_ids)

    def run() -> Tensor:
        with as_path(s) as leaves:
            fixed = {name: leaf.detach() for name, leaf in leaves.items()}

            def loss(values: dict[str, Tensor], ids: Tensor) -> Tensor:
                leaves.update(values)
                hidden = s.model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state
                logits = s.model.get_output_embeddings()(hidden[0, start - 1 : -1])
                return nn.functional.cross_entropy(logits, ids[start:], reduction="sum")

            gradients = vmap(grad(loss), in_dims=(None, 0))(fixed, s.batch.ids)
        return s.cosines(torch.cat(list(gradients.values()), dim=-1))

    return run


CONTENDERS: dict[str, Callable[[Setting], Callable[[], Tensor]]] = {
    "ours": ours,
    "loop": loop,
    "opacus": opacus,
    "vmap": lambda s: vmapped(s, "sdpa"),
    "vmap eager": lambda s: vmapped(s, "eager"),
    "plain": plain,
    "plain frozen": lambda s: plain_base(s, trained=False),
    "plain weights": lambda s: plain_base(s, trained=True),
}
EXACT = ("ours", "loop", "opacus", "vmap", "vmap eager")


# --- the measurement


def measure_times(size: Size, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each contender in every round; asserts that those that give cosines give the same."""
    runs = {name: make(Setting(size, size.rows)) for name, make in CONTENDERS.items()}
    expected = runs["loop"]()
    for name in EXACT:
        assert torch.allclose(runs[name](), expected, atol=1e-5), name
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            started = time.process_time()
            run()
            seconds[name].append(time.process_time() - started)
    return {name: times[1:] for name, times in seconds.items()}


def peak(name: str, size: dict[str, int]) -> float:
    """Rise of the peak resident set in MiB during one run, in a process of its own."""
    torch.set_num_threads(1)
    make, of = CONTENDERS[name], Size(**size)
    make(Setting(of, 2))()
    run = make(Setting(of, of.rows))
    Path("/proc/self/clear_refs").write_text("5")
    before = cases.memory("VmRSS")
    run()
    return (cases.memory("VmHWM") - before) / MEBIBYTE


def rescoring(size: Size) -> dict[str, float]:
    """Wall seconds for 64 placebos on 1,000 stored rows of this model, from opening the store to the scores."""
    layout = Setting(size, 1).adapter.layout
    with tempfile.TemporaryDirectory() as folder:
        GradientStore.create(Path(folder), layout, 1000, {}).put(0, torch.randn(1000, layout.width))
        started = time.monotonic()
        direction = from_flat(layout, torch.ones(layout.width), layout.names)
        stored = GradientStore(Path(folder))
        stacked_cosines(stored.rows, haar(direction, 64, 0), direction.inside, len(direction.modules))
        return {"rows": 1000, "placebos": 64, "numbers": layout.width, "seconds": time.monotonic() - started}


def cosines(rows: int = 16, tokens: int = 96, hidden: int = 128, layers: int = 4, rounds: int = 15) -> Iterator[Claim]:
    """Time and peak memory of every contender, and what rescoring takes."""
    cases.needed("opacus")
    torch.set_num_threads(1)
    size = Size(rows, tokens, hidden, layers)
    times = measure_times(size, rounds)
    memory = {name: cases.apart(peak, name, asdict(size)) for name in CONTENDERS}
    for name, values in times.items():
        row = {"contender": name, "ms": round(1000 * statistics.median(values), 1), "MiB": round(memory[name], 1)}
        print(json.dumps(row), flush=True)
    print(json.dumps({"rescoring": rescoring(size)}))
    what = f"per-sample cosines, {rows} rows of {tokens} tokens, {layers} layers"
    for claim, over, under, goal in COMPARED:
        yield measured(f"{what}: {claim}", *ratio(times[over], times[under]), n=rounds, goal=goal)
    yield measured(f"{what}: peak memory beside Opacus", memory["ours"] / memory["opacus"], n=1)


CASES = {"cosines": cosines}

if __name__ == "__main__":
    cases.main(__file__, CASES)
