"""Checks of a direction before its use: consistent over pairs, and of the right sign by finite differences.

Thresholds: docs/probe-method.md. Shapes: P pairs, N numbers, D draws.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from composer_stages.evaluation.inference import one_sided_p
from composer_stages.gradients.per_row import MeasuredStudent, TokenRow, TotalSink, mean_weights
from composer_stages.probe.checks.check import Check, Finding, declared
from composer_stages.probe.direction import (
    FLOOR,
    Direction,
    LossKind,
    PairGradients,
    extract,
    generic_gradient,
    unit_by_module,
)
from composer_stages.probe.statistics import Rate
from composer_stages.words import Sentence

SPLITS, SIGNAL_DRAWS = 20, 999
MIN_SIGNAL_PROBLEMS, MAX_SIGNAL_P = 8, 0.01
MAX_LENGTH_COSINE = 0.5
MAX_COSINE = 0.5
"""With the generic gradient."""
STEP = 1e-3
"""The polarity oracle's step, as a share of the weights' typical singular value."""
RowPairs = Sequence[tuple[TokenRow, TokenRow]]


def validate(
    student: MeasuredStudent,
    direction: Direction,
    pairs: PairGradients,
    held_out: RowPairs,
    loss: LossKind,
    seed: int,
    problems: Sequence[str] | None = None,
) -> list[Check]:
    """Run V1 to V6 and the signal check of T7, without V4, which needs further gradients (`length_cosine`).

    problems: the problem of each pair, for V1 and the signal check.
    """
    differences = pairs.differences(loss)
    return [
        leave_one_out(direction, differences, problems),
        polarity(student, direction, held_out),
        split_half(direction, differences, seed),
        lengths_match(pairs),
        well_formed(direction),
        pair_signal(direction, differences, seed, problems),
    ]


@declared("V5")
def lengths_match(pairs: PairGradients) -> Finding:
    """Check V5: both sides have as many own tokens, within 10 %."""
    ratio = float((pairs.hack_tokens / pairs.clean_tokens).mean())
    matched = abs(ratio - 1) <= 0.1
    return Finding(matched, ratio, "length_matched" if matched else Sentence("probe.checks.lengths-differ"))


@declared("V6")
def well_formed(direction: Direction) -> Finding:
    """Check V6: a finite mean and orthonormal axes."""
    errors = [float((a @ a.T - torch.eye(len(a))).abs().max()) for a in direction.axes.values()]
    finite = bool(direction.modules) and bool(torch.isfinite(direction.mean).all())
    worst = max(errors, default=float("nan"))
    detail = f"{len(direction.modules)} of {len(direction.layout.names)} modules have a direction"
    return Finding(finite and worst <= 1e-5, worst, detail)


@declared("V1")
def leave_one_out(
    direction: Direction, differences: Float[Tensor, "P N"], problems: Sequence[str] | None = None
) -> Finding:
    """Check V1: each pair's difference has a positive part along the direction of all the others.

    By the one-sided 95 % bounds of the share of pairs, clustered by problem [P]; None for distinct ones.
    """
    total, count = differences.sum(0), len(differences)
    if count < 2:
        return Finding(None, None, Sentence("probe.checks.one-pair"))
    # The sum less a pair's own difference points along the mean of the others.
    signs = [float(d @ unit_by_module(direction.layout, total - d, direction.modules)) > 0 for d in differences]
    accuracy = Rate.of(signs, problems or range(count))
    detail = Sentence("probe.checks.left-out", count=count, low=accuracy.low, high=accuracy.high)
    return Finding(accuracy.reaches(0.8), accuracy.value, detail)


@declared("V2")
def polarity(student: MeasuredStudent, direction: Direction, held_out: RowPairs) -> Finding:
    """Check V2, the polarity oracle: a small step against v makes held-out hacks relatively more likely.

    The step is a finite difference, eps times the weights' typical singular value. It needs no gradient, so it detects
    any inverted sign.
    """
    start = student.adapter.theta.clone()
    gaps = []
    # v is the gradient of NLL(hack) - NLL(clean), so a step against it lowers that difference.
    for theta in (start, start - STEP * student.weight_scale() * direction.unit.to(start)):
        student.move_to(theta)
        hack, clean = (
            torch.stack([-logps.mean() for logps in student.log_probs([pair[side] for pair in held_out])])
            for side in (0, 1)
        )
        gaps.append(hack - clean)
    student.move_to(start)
    change = gaps[1] - gaps[0]
    fell, stat = change < 0, float(change.mean())
    detail = Sentence("probe.checks.polarity", stat=stat, fell=int(fell.sum()), pairs=len(held_out))
    return Finding(stat < 0 and bool(fell.float().mean() > 0.5), stat, detail)


@declared("V3")
def split_half(direction: Direction, differences: Float[Tensor, "P N"], seed: int) -> Finding:
    """Check V3: halves of the pairs agree on the direction, more than halves of sign-flipped differences do."""
    if len(differences) < 4:
        return Finding(None, None, Sentence("probe.checks.few-pairs"))
    generator = torch.Generator().manual_seed(seed)
    # The placebo keeps the pairs' norms and flips the signs of whole pairs, which leaves no common direction.
    flips = torch.randint(0, 2, (SPLITS * 3, len(differences), 1), generator=generator) * 2 - 1
    cosines = [_halves(direction, differences, generator) for _ in range(SPLITS)]
    placebo = [_halves(direction, differences * flip, generator) for flip in flips]
    stat, q95 = sum(cosines) / SPLITS, float(torch.tensor(placebo).quantile(0.95))
    return Finding(stat > q95, stat, Sentence("probe.checks.splits", splits=SPLITS, pairs=len(differences)), q95)


def _halves(direction: Direction, differences: Float[Tensor, "P N"], generator: torch.Generator) -> float:
    order = torch.randperm(len(differences), generator=generator)
    half = len(differences) // 2
    first, second = (
        unit_by_module(direction.layout, differences[part].mean(0), direction.modules)
        for part in (order[:half], order[half:])
    )
    return float(first @ second) / len(direction.modules)


@declared("V4")
def length_cosine(
    student: MeasuredStudent, direction: Direction, short: Sequence[TokenRow], long: Sequence[TokenRow] | None
) -> Finding:
    """Check V4: v is not the direction from a short to a long answer of the same content.

    Without longer answers the short ones are cut in half instead, which is mostly the negated generic gradient of any
    answer.
    """
    # At least up to the first own token: a row without own tokens is an error.
    halves = [row.first(max(len(row.completion_ids) // 2, list(row.own).index(True) + 1)) for row in short]
    length = length_direction(student, halves, short) if long is None else length_direction(student, short, long)
    stat = float(unit_by_module(direction.layout, length, direction.modules) @ direction.unit) / len(direction.modules)
    detail = "against " + ("clean answers cut in half" if long is None else "longer answers of the same content")
    return Finding(abs(stat) < MAX_LENGTH_COSINE, stat, detail)


def length_direction(
    student: MeasuredStudent, short: Sequence[TokenRow], long: Sequence[TokenRow]
) -> Float[Tensor, " N"]:
    """Return the mean NLL gradient of the longer answers minus that of the shorter ones."""
    means = []
    for rows in (long, short):
        total = TotalSink(student.adapter.layout, mean_weights(rows, range(len(rows))), student.device)
        student.stream(rows, total.batch_sink)
        means.append(total.total.cpu())
    return means[0] - means[1]


@declared("signal")
def pair_signal(
    direction: Direction, differences: Float[Tensor, "P N"], seed: int, problems: Sequence[str] | None = None
) -> Finding:
    """Check T7: the mean signal to noise over modules is above that of differences without a common direction.

    The null flips the signs of differences at random, jointly within a problem. problems [P]: the problem of each pair;
    None for distinct ones. p <= .01 needs eight problems. A bootstrap over pairs shows the stability of v.
    """
    names = list(problems) if problems is not None else [str(index) for index in range(len(differences))]
    few = len(set(names)) < MIN_SIGNAL_PROBLEMS
    index_of = {name: index for index, name in enumerate(dict.fromkeys(names))}
    coins = torch.randint(0, 2, (SIGNAL_DRAWS, len(index_of)), generator=torch.Generator().manual_seed(seed)) * 2.0 - 1
    flips = torch.cat([torch.ones(1, len(names)), coins[:, [index_of[name] for name in names]]])  # the first: no flip
    ratios = signal_ratios(direction, differences, flips)
    stat = None if few else float(ratios[0])
    p = one_sided_p(ratios[1:], ratios[0])  # a draw that flips all signs has the very same ratio
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, len(differences), (100, len(differences)), generator=generator)
    low = float(_resampled_cosines(direction, differences, drawn).quantile(0.05))
    detail = f"p {p:.2g}; {len(differences)} pairs on {len(set(names))} problems; bootstrap cos q05 {low:.2f}"
    q95 = None if few else float(ratios[1:].quantile(0.95))
    if few:
        detail += f"; {MIN_SIGNAL_PROBLEMS} problems are needed to tell signal from noise"
    return Finding(None if few else p <= MAX_SIGNAL_P, stat, detail, q95)


def _resampled_cosines(
    direction: Direction, differences: Float[Tensor, "P N"], drawn: Int[Tensor, "D P"]
) -> Float[Tensor, " D"]:
    """Return the mean over modules of the cosine of v with the mean difference of the pairs drawn."""
    shares = torch.stack([torch.bincount(d, minlength=len(differences)) for d in drawn]) / len(differences)
    total = torch.zeros(len(drawn))
    for name in direction.modules:
        means, v = shares @ differences[:, direction.layout.slices[name]], direction.means[name]
        total += means @ (v / v.norm()) / means.norm(dim=-1).clamp(min=FLOOR)
    return total / len(direction.modules)


def signal_ratios(
    direction: Direction, differences: Float[Tensor, "P N"], flips: Float[Tensor, "D P"]
) -> Float[Tensor, " D"]:
    """Return the mean over modules of `signal_to_noise` of differences with these signs, by inner products of pairs."""
    count, total = len(differences), torch.zeros(len(flips), dtype=torch.float64)
    for name in direction.modules:
        part = differences[:, direction.layout.slices[name]].double()
        # Inner products [P, P] are enough for means and spreads under any signs: no draw needs a vector of N numbers.
        gram = part @ part.T
        square = ((flips.double() @ gram) * flips).sum(-1) / count**2  # |mean|^2
        spread = (gram.trace() - count * square).clamp(min=0) / (count * max(count - 1, 1))
        total += (square / spread.clamp(min=1e-30)).sqrt()
    return total / len(direction.modules)


@declared("R7-oracle")
def recombined(pairs: PairGradients, autograd: Float[Tensor, "P N"]) -> Finding:
    """Check that Dr.GRPO pair gradients by autograd equal the recombined NLL gradients.

    Dr.GRPO as in arXiv 2503.20783: token sums over a constant length, advantages not divided by their spread.
    """
    expected = pairs.differences("drgrpo_sum")
    error = float((autograd - expected).abs().max() / expected.abs().max())
    return Finding(error <= 1e-4, error, Sentence("probe.checks.recombined"))


@declared("R7-NLL")
def other_than_nll(pairs: PairGradients) -> Finding:
    """Check that the directions of both losses differ, unless all lengths are equal."""
    # With equal lengths both losses are the same up to a factor, so that equality is no fault.
    nll, grpo = (extract(pairs.layout, pairs.differences(kind)) for kind in ("nll_mean", "drgrpo_sum"))
    parts = zip(pairs.layout.split(nll.unit).values(), pairs.layout.split(grpo.unit).values(), strict=True)
    gaps = torch.tensor([1 - float(a @ b) for a, b in parts])
    share = float((gaps > 1e-4).float().mean())
    matched = bool((pairs.hack_tokens == pairs.clean_tokens).all()) and len(set(pairs.hack_tokens.tolist())) == 1
    detail = Sentence("probe.checks.losses-differ", gap=float(gaps.max()))
    if matched:
        detail = Sentence("probe.checks.lengths-equal")
    return Finding(matched or share >= 0.5, share, detail)


@declared("generic")
def not_generic(direction: Direction, pairs: PairGradients, loss: LossKind) -> Finding:
    """Check that v is not the direction in which any answer pulls, the mean gradient of clean answers."""
    cosine = float(generic_gradient(direction, pairs, loss) @ direction.unit) / len(direction.modules)
    return Finding(abs(cosine) <= MAX_COSINE, cosine, Sentence("probe.checks.generic-direction"))
