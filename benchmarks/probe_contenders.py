"""The contenders of `probe.py`: ways to get every row's cosine of its dS gradient with one direction, and plain passes.

`loop`: one backward pass a row. `opacus`: its hooks on a module that multiplies by dS, with a per-sample rule written
for it (its generic rule is slower). `vmap`: torch.func.vmap of grad, with two attention implementations. `plain` is one
ordinary backward pass with the same adapter and gives only the batch's gradient; `plain frozen` leaves the adapter out
and goes back to the embeddings, `plain weights` trains every weight of the base instead. All compute logits where a
completion token stands and nowhere else.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from probe_faults.loophole_world import tiny_qwen3
from torch import Tensor, nn
from torch.func import grad, vmap

from stages.gradients.basis import Factors, SingularValues, Spectrum, factorise, replaced_forwards, target_linears
from stages.gradients.per_row import DotSink, own_log_probs, per_sample_gradients
from stages.gradients.tokens import TokenBatch, TokenRow, collate

VOCAB = 512


class Setting:
    """One model, one direction, one batch; everything drawn from a seed."""

    def __init__(self, options: argparse.Namespace, rows: int) -> None:
        self.model = tiny_qwen3(layers=options.layers, hidden=options.hidden, vocab=VOCAB).requires_grad_(False)
        factors = {name: factorise(linear.weight) for name, linear in target_linears(self.model).items()}
        self.adapter = SingularValues(Spectrum(factors))
        self.unit = torch.randn(self.adapter.layout.width, generator=torch.Generator().manual_seed(1))
        self.unit /= self.unit.norm()
        ids = torch.randint(2, VOCAB, (rows, options.tokens), generator=torch.Generator().manual_seed(2)).tolist()
        half = options.tokens // 2
        self.rows = [TokenRow(row[:half], row[half:], [True] * (options.tokens - half)) for row in ids]
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
