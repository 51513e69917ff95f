"""Our per-sample cosines beside Opacus's and beside plain backward passes: time, and whether they agree.

    python benchmarks/probe_speed.py [--rows 16] [--tokens 96] [--hidden 128] [--layers 4] [--rounds 15]

All get every row's cosine of its dS gradient with one direction, on one model and the same rows. `loop`: one backward
pass a row, which tells whether they agree. `opacus`: its hooks on a module that multiplies by dS, with a per-sample
rule written for it (its generic rule is slower). `plain frozen` is one ordinary backward pass to the embeddings without
the adapter, and gives no cosines. All compute logits for completion tokens and no others.

One thread, one process, contenders in turn, the first round dropped, medians of CPU time, which other programs on the
machine disturb least.
"""

import os

os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")  # freed tensors leave the resident set at once

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import cases
import torch
from probe_faults.loophole_world import tiny_qwen3
from records import Claim, measured, ratio
from torch import Tensor, nn

from composer_stages.gradients.basis import (
    Factors,
    SingularValues,
    Spectrum,
    factorise,
    replaced_forwards,
    target_linears,
)
from composer_stages.gradients.per_row import DotSink, TokenRow, collate, own_log_probs, per_sample_gradients

VOCAB = 512


class Setting:
    """One model, one direction, one batch; everything drawn from a seed."""

    def __init__(self, rows: int, tokens: int, hidden: int, layers: int) -> None:
        self.model = tiny_qwen3(layers=layers, hidden=hidden, vocab=VOCAB).requires_grad_(False)
        factors = {name: factorise(linear.weight) for name, linear in target_linears(self.model).items()}
        self.adapter = SingularValues(Spectrum(factors))
        self.unit = torch.randn(self.adapter.layout.width, generator=torch.Generator().manual_seed(1))
        self.unit /= self.unit.norm()
        ids = torch.randint(2, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(2)).tolist()
        half = tokens // 2
        self.rows = [TokenRow(row[:half], row[half:], [True] * (tokens - half)) for row in ids]
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
        found = []
        with as_path(s) as leaves:
            for batch in batches:
                for leaf in leaves.values():
                    leaf.grad = None
                own_log_probs(s.model, batch).sum().neg().backward()
                found.append(torch.cat([leaf.grad for leaf in leaves.values()]))
        return s.cosines(torch.stack(found))

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


def plain_frozen(s: Setting) -> Callable[[], Tensor]:
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


CONTENDERS: dict[str, Callable[[Setting], Callable[[], Tensor]]] = {
    "ours": ours,
    "loop": loop,
    "opacus": opacus,
    "plain frozen": plain_frozen,
}


def cosines(rows: int = 16, tokens: int = 96, hidden: int = 128, layers: int = 4, rounds: int = 15) -> Iterator[Claim]:
    """The time of every contender; those that give cosines must give the same."""
    cases.needed("opacus")
    torch.set_num_threads(1)
    runs = {name: make(Setting(rows, tokens, hidden, layers)) for name, make in CONTENDERS.items()}
    expected = runs["loop"]()
    assert all(torch.allclose(runs[name](), expected, atol=1e-5) for name in ("ours", "opacus"))
    times = cases.in_turn(runs, rounds, warm_up=1)
    what = f"per-sample cosines, {rows} rows of {tokens} tokens, {layers} layers"
    for claim, over, under, goal in (
        ("times as fast as Opacus", "opacus", "ours", ">= 1.15"),
        ("time beside one plain backward pass without adapter", "ours", "plain frozen", "<= 1.25"),
    ):
        yield measured(f"{what}: {claim}", *ratio(times[over], times[under]), n=rounds, goal=goal)


CASES = {"cosines": cosines}

if __name__ == "__main__":
    cases.main(__file__, CASES)
