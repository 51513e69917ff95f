"""What is taken out of an update of adapters, held against dense projections of the weights that they make."""

import pytest
import torch
from torch import Tensor, nn

from composer_stages.training.trained import TrainedAdapter, TrainedWeight

ROWS, COLUMNS, SCALING = 7, 5, 1.7


def unit(seed: int = 9) -> Tensor:
    drawn = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))
    return drawn / drawn.norm()


class Adapted:
    """An adapter and the optimiser's step on it, of a size that shows second-order terms."""

    def __init__(self, rank: int, *, fresh: bool = False, step: float = 0.1) -> None:
        random = torch.Generator().manual_seed(rank)
        self.a, self.b = (torch.randn(*size, generator=random) for size in ((rank, COLUMNS), (ROWS, rank)))
        if fresh:
            self.b.zero_()
        self.linear = TrainedAdapter(self.a, self.b, SCALING)
        self.linear.remember()
        self.before = self.weight()
        self.a += step * torch.randn(rank, COLUMNS, generator=random)
        self.b += step * torch.randn(ROWS, rank, generator=random)

    def weight(self) -> Tensor:
        return SCALING * self.b.double() @ self.a.double()

    def descent(self) -> Tensor:
        return self.before - self.weight()


def facing(adapted: Adapted, v: Tensor) -> Tensor:
    """The direction, turned so that the update points along it."""
    return v if float((adapted.descent() * v).sum()) > 0 else -v


@pytest.mark.parametrize("rank", [1, 2, 5])
@pytest.mark.parametrize("fresh", [False, True])
def test_the_effective_update_is_measured_without_making_it(rank: int, fresh: bool) -> None:
    adapted, v = Adapted(rank, fresh=fresh), unit()
    along, square = adapted.linear.moved(v)
    assert float(along) == pytest.approx(float((adapted.descent() * v).sum()), rel=1e-4, abs=1e-6)
    assert float(square) == pytest.approx(float(adapted.descent().square().sum()), rel=1e-4)


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_slopes_are_those_of_the_weight(rank: int) -> None:
    adapted, v = Adapted(rank), unit()
    a, b = (each.double().requires_grad_() for each in (adapted.a, adapted.b))
    expected = torch.autograd.grad((SCALING * b @ a * v.double()).sum(), [a, b])
    for ours, theirs in zip(adapted.linear.slopes(v), expected, strict=True):
        assert torch.allclose(ours.double(), theirs, atol=1e-5)


@pytest.mark.parametrize("fresh", [False, True])
def test_a_full_rank_loses_what_a_weight_loses(fresh: bool) -> None:
    """Where A is invertible, the update after removal is that of a weight that is trained itself."""
    adapted = Adapted(COLUMNS, fresh=fresh, step=0.01)
    v = facing(adapted, unit())
    whole = nn.Parameter(adapted.before.float(), requires_grad=False)
    weight = TrainedWeight(whole)
    weight.remember()
    whole.copy_(adapted.weight())
    along = weight.moved(v)[0]
    weight.remove(v, along)
    size = adapted.linear.remove(v, adapted.linear.moved(v)[0])
    assert float(size) == pytest.approx(1, rel=1e-4)
    assert torch.allclose(adapted.weight().float(), whole, atol=1e-4 * float(along))


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("sign", [1, -1], ids=["toward", "away"])
def test_projection_removes_the_direction_by_the_least_change(rank: int, fresh: bool, sign: int) -> None:
    adapted = Adapted(rank, fresh=fresh, step=0.001)
    v, a, b = sign * facing(adapted, unit()), adapted.a.double().clone(), adapted.b.double().clone()
    along, started = float(adapted.linear.moved(v)[0]), adapted.weight()
    adapted.linear.remove(v, torch.tensor(along))
    assert abs(float((adapted.descent() * v).sum())) < 1e-5 * abs(along) + 1e-7
    # The part of v in what changes of A and B can do to the weight, X A + B Y, by least squares.
    basis = [torch.outer(row, a[i]) for i in range(rank) for row in torch.eye(ROWS).double()]
    basis += [torch.outer(b[:, i], column) for i in range(rank) for column in torch.eye(COLUMNS).double()]
    columns = torch.stack([each.flatten() for each in basis], dim=1)
    tangent = (columns @ torch.linalg.pinv(columns) @ v.double().flatten()).reshape(ROWS, COLUMNS)
    expected = along * tangent / tangent.square().sum()
    assert torch.allclose(adapted.weight() - started, expected, atol=0.05 * float(expected.norm()))


def test_updates_away_from_the_direction_are_unchanged() -> None:
    adapted = Adapted(2)
    v = -facing(adapted, unit())
    a, b = adapted.a.clone(), adapted.b.clone()
    adapted.linear.remove(v, adapted.linear.moved(v)[0].clamp_min(0))
    assert torch.equal(adapted.a, a) and torch.equal(adapted.b, b)
