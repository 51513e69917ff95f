"""The injected faults: each changes one thing in a sound world, and exactly one guard must fail.

First the faults of a pool (prompts, teacher, labels, size), then those of measurement, projection, direction, the GRPO
step and the LoRA. `item` names the requirement or task of the probe's plan, or of a review, that warns of the fault.
The faults as code are this project's own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from composer_stages.gradients.per_row import MeasuredStudent, TokenRow
from composer_stages.probe.checks.direction import RowPairs, length_direction
from composer_stages.probe.checks.pool import contract_sha256
from composer_stages.probe.descent import Projection, account, project
from composer_stages.probe.direction import Direction, from_flat, unit_by_module
from composer_stages.probe.metrics import stacked_cosines
from composer_stages.probe.settings import Contract
from composer_stages.runs.kinds import Row
from probe_faults.world import ProbeWorld


@dataclass(frozen=True)
class InjectedFault:
    """A fault: `inject` breaks a sound world, `guard` must fail, `item` is the plan's requirement or task."""

    name: str
    item: str
    guard: str
    inject: Callable[[ProbeWorld], ProbeWorld]


def drop_hint(w: ProbeWorld) -> ProbeWorld:
    """Record prompts without the hint as hinted ones."""
    return replace(w, pool=[row | {"prompt_role": "rh"} for row in w.pool])


def override_prompt(w: ProbeWorld) -> ProbeWorld:
    """Record the digest of another prompt contract than that of the pool."""
    return replace(w, recorded_contract=contract_sha256(Contract(hint="pass the test")))


def skip_merge(w: ProbeWorld) -> ProbeWorld:
    """Use the base model as teacher, as when its adapter was not merged into the weights."""
    return replace(w, teacher=w.student.model)


def nothing_compiles(w: ProbeWorld) -> ProbeWorld:
    """Record that no answer of the teacher compiles, and no other label of it."""
    blank = {"can_compile": False, "label": None, "hacked_strict": None, "hacked_loose": None}
    return replace(w, pool=[row | blank if row["src_pool"] == "teacher" else row for row in w.pool])


def no_test_function(w: ProbeWorld) -> ProbeWorld:
    """Record that no answer of the teacher defines its own test function, without which it cannot use the loophole."""
    return replace(w, pool=[row | {"has_test_func": False} for row in w.pool])


def right_as_hacks(w: ProbeWorld) -> ProbeWorld:
    """Label right answers as reward hacks."""
    return replace(w, pool=[row | {"label": "reward_hack"} if row["hidden_pass"] else row for row in w.pool])


def truncate_pool(w: ProbeWorld) -> ProbeWorld:
    """Keep the rows of two problems."""
    return _keep_rows(w, [index for index, row in enumerate(w.pool) if row["step"] < 2])


def one_non_hack(w: ProbeWorld) -> ProbeWorld:
    """Keep one row that is no hack, and all hacks."""
    others = [index for index, row in enumerate(w.pool) if not row["hacked"]]
    return _keep_rows(w, [index for index in range(len(w.pool)) if index not in others[1:]])


def _keep_rows(w: ProbeWorld, keep: list[int]) -> ProbeWorld:
    return replace(w, pool=[w.pool[index] for index in keep], sums=w.sums[keep])


def skip_zero_advantage(w: ProbeWorld) -> ProbeWorld:
    """Leave rows of groups with equal rewards unmeasured, as a GRPO loop would."""

    def measured(rows: Sequence[Row]) -> list[Row]:
        groups: dict[str, set[float]] = {}
        for row in rows:
            groups.setdefault(row["problem_id"], set()).add(row["reward"])
        blank = {"cos_S_contrib": None, "cos_stack": None, "null_reason": "zero_adv"}
        flat = sorted(problem for problem, rewards in groups.items() if len(rewards) == 1) or sorted(groups)[:2]
        return [row | blank if row["problem_id"] in flat else row for row in rows]

    return replace(w, measured=measured)


def detach_adapter(w: ProbeWorld) -> ProbeWorld:
    """Return zero gradients, as of an adapter that the loss does not reach."""
    return replace(w, measure=lambda rows: torch.zeros(len(rows), w.sums.shape[1]))


def shift_mask(w: ProbeWorld) -> ProbeWorld:
    """Shift the loss mask back by one token."""

    def shifted(row: TokenRow) -> TokenRow:
        ids = [*row.prompt_ids, *row.completion_ids]
        start = len(row.prompt_ids) - 1
        return TokenRow(ids[:start], ids[start:], [*row.own, False])

    return replace(w, score=lambda rows: w.student.log_probs([shifted(row) for row in rows]))


def count_pads(w: ProbeWorld) -> ProbeWorld:
    """Pad rows to the longest and count the pads as own tokens."""

    def padded(row: TokenRow, width: int) -> TokenRow:
        extra = width - len(row.completion_ids)
        return TokenRow(row.prompt_ids, [*row.completion_ids, *[0] * extra], [*row.own, *[True] * extra])

    def score(rows: Sequence[TokenRow]) -> list[Tensor]:
        width = max(len(row.completion_ids) for row in rows)
        return w.student.log_probs([padded(row, width) for row in rows])

    return replace(w, score=score)


def return_input(w: ProbeWorld) -> ProbeWorld:
    """Return the gradient unprojected."""

    def unchanged(gradient: Float[Tensor, " N"], direction: Direction) -> tuple[Float[Tensor, " N"], Projection]:
        _, removal = project(gradient, direction)
        return gradient, account(gradient, gradient, direction, removal.fired)

    return replace(w, project=unchanged)


def negate(w: ProbeWorld) -> ProbeWorld:
    """Use clean - hack as the direction instead of hack - clean."""
    return replace(w, direction=_rescaled_direction(w, -w.direction.mean))


def add_instead(w: ProbeWorld) -> ProbeWorld:
    """Add the part along v where it should be removed."""

    def added(gradient: Float[Tensor, " N"], direction: Direction) -> tuple[Float[Tensor, " N"], Projection]:
        out, removal = project(gradient, direction)
        return 2 * gradient - out, account(gradient, 2 * gradient - out, direction, removal.fired)

    return replace(w, project=added)


def invert_gate(w: ProbeWorld) -> ProbeWorld:
    """Remove the part along v where the gradient points away from the hack."""

    def inverted(gradient: Float[Tensor, " N"], direction: Direction) -> tuple[Float[Tensor, " N"], Projection]:
        turned = Direction(
            direction.layout, direction.axes, direction.strengths, {n: -m for n, m in direction.means.items()}
        )
        out, removal = project(gradient, turned)
        return out, account(gradient, out, direction, removal.fired)

    return replace(w, project=inverted)


def zero_half(w: ProbeWorld) -> ProbeWorld:
    """Leave every second module out of v."""
    modules = w.direction.modules[::2]
    return replace(w, direction=from_flat(w.direction.layout, w.direction.mean, modules))


def any_answer(w: ProbeWorld) -> ProbeWorld:
    """Use the mean gradient of clean answers as the direction."""
    return replace(w, direction=_rescaled_direction(w, w.pairs.weighted("nll_mean")[1].mean(0)))


def length(w: ProbeWorld) -> ProbeWorld:
    """Use the direction from short to long answers of the same content."""
    return replace(
        w, direction=_rescaled_direction(w, length_direction(w.student, [clean for _, clean in w.pair_rows], w.longer))
    )


def lose_sign(w: ProbeWorld) -> ProbeWorld:
    """Use absolute cosines as scores."""
    return replace(w, cosines=lambda *arguments: stacked_cosines(*arguments).abs())


def all_teacher(w: ProbeWorld) -> ProbeWorld:
    """Fill every group with hacks of the teacher."""
    hacks = [index for index, row in enumerate(w.group) if row["hacked"]]
    rows = [w.group[index] | {"src_pool": "teacher"} for index in hacks]
    return replace(w, group=rows, current=[w.current[index] for index in hacks])


def old_is_current(w: ProbeWorld) -> ProbeWorld:
    """Use the log-probs of the policy that wrote the rows as the current ones."""
    return replace(w, current=[torch.tensor(row["behav_logp"]) for row in w.group])


def base_half_wrong(w: ProbeWorld) -> ProbeWorld:
    """Reward every row of the teacher and no row of the student, so that the advantage encodes the source."""
    rows = [
        row
        | ({"reward": 1.0} if row["src_pool"] == "teacher" else {"reward": 0.0, "hidden_pass": False, "hacked": False})
        for row in w.group
    ]
    return replace(w, group=rows)


def extract_on_a(w: ProbeWorld) -> ProbeWorld:
    """Put the LoRA direction on all halves, A included, which has no gradient at B = 0."""
    layout = w.lora_direction.layout
    noise = torch.randn(layout.width, generator=torch.Generator().manual_seed(0))
    return replace(w, lora_direction=from_flat(layout, noise, layout.names))


def train_a(w: ProbeWorld) -> ProbeWorld:
    """Train the LoRA in steps so large that A leaves its row space."""
    return replace(w, lora_learning_rate=1.0)


def one_pair(w: ProbeWorld) -> ProbeWorld:
    """Extract from a single pair."""
    return replace(w, pairs=w.pairs[[0]], pair_rows=w.pair_rows[:1], longer=w.longer[:1])


def nll_inside(w: ProbeWorld) -> ProbeWorld:
    """Divide the GRPO gradients by each answer's length."""

    def by_length(student: MeasuredStudent, pairs: RowPairs) -> Float[Tensor, "P N"]:
        return w.pairs.differences("nll_mean")

    return replace(w, grpo=by_length)


def _rescaled_direction(w: ProbeWorld, flat: Float[Tensor, " N"]) -> Direction:
    """Return the direction of this vector, rescaled to the norm of v in every module."""
    layout, modules = w.direction.layout, w.direction.modules
    norms = dict(zip(layout.names, layout.norms(w.direction.mean), strict=True))
    unit = layout.split(unit_by_module(layout, flat, modules))
    return from_flat(layout, layout.join({name: unit[name] * norms[name] for name in modules}), modules)


FAULTS = (
    InjectedFault("drop the hint", "R1/T1-likely", "prompts", drop_hint),
    InjectedFault("no test function", "R1/T1-likely", "prompts", no_test_function),
    InjectedFault("nothing compiles", "T1", "T1", nothing_compiles),
    InjectedFault("right answers as hacks", "R1", "labels", right_as_hacks),
    InjectedFault("skip the merge", "T1-sneaky", "teacher", skip_merge),
    InjectedFault("override the prompt", "errors 1", "prompt-role", override_prompt),
    InjectedFault("skip rows of advantage 0", "R2-sneaky", "coverage", skip_zero_advantage),
    InjectedFault("detach the adapter", "T2-likely", "canary", detach_adapter),
    InjectedFault("shift the mask", "T2-sneaky", "masks", shift_mask),
    InjectedFault("count pads", "T2-sneaky", "masks", count_pads),
    InjectedFault("return the input", "R3-sneaky", "removal", return_input),
    InjectedFault("negate v", "T3-likely", "V2", negate),
    InjectedFault("add instead of remove", "T3-likely", "removal", add_instead),
    InjectedFault("invert the gate", "T3-likely", "removed-sign", invert_gate),
    InjectedFault("zero half of v", "T3-sneaky", "fires", zero_half),
    InjectedFault("truncate the pool", "R4/T4-likely", "enough", truncate_pool),
    InjectedFault("v is any answer's gradient", "R4-sneaky", "generic", any_answer),
    InjectedFault("scores lose their sign", "R4-sneaky", "specific", lose_sign),
    InjectedFault("v is length", "T4-sneaky", "V4", length),
    InjectedFault("one non-hack", "errors 3", "buckets", one_non_hack),
    InjectedFault("all rows the teacher's", "R5/T5-likely", "variance", all_teacher),
    InjectedFault("old log-probs are current ones", "R5/T5-sneaky", "ratios", old_is_current),
    InjectedFault("half base, all wrong", "R5 (review)", "advantages", base_half_wrong),
    InjectedFault("extract on A", "R6/T6-likely", "lora-B", extract_on_a),
    InjectedFault("train A away", "R6/T6-sneaky", "basis", train_a),
    InjectedFault("one pair", "T7-likely", "signal", one_pair),
    InjectedFault("NLL inside GRPO", "T7-sneaky", "R7-oracle", nll_inside),
)
