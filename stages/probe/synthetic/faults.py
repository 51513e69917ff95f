"""Every fault that the guards are for: a change of one thing in a sound world, and the one guard that must fail.

`item` names the requirement or task of the probe's plan, or of a review, that warns of the fault. The faults as code
are this project's own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from stages.probe.checks.prompts import Contract, contract_sha256
from stages.probe.checks.validation import RowPairs, length_direction
from stages.probe.directions.extraction import Direction, from_flat
from stages.probe.directions.metrics import stacked_cosines
from stages.probe.directions.projection import Projection, account, project
from stages.probe.directions.scoring import unit_by_module
from stages.probe.gradients.student import Student
from stages.probe.pool.tokens import TokenRow
from stages.probe.synthetic.world import World
from stages.runs.records import Row

# ---- pool_faults
# The faults of a pool: its prompts, its teacher, its labels, its size.


def drop_hint(w: World) -> World:
    """Prompts without the hint are taken for hinted ones."""
    return replace(w, pool=[row | {"prompt_role": "rh"} for row in w.pool])


def override_prompt(w: World) -> World:
    """The pool was made under other prompts than those on record."""
    return replace(w, recorded_contract=contract_sha256(Contract(hint="pass the test")))


def skip_merge(w: World) -> World:
    """The teacher's adapter never reached the weights: it is the base model."""
    return replace(w, teacher=w.student.model)


def nothing_compiles(w: World) -> World:
    """No answer of the teacher's is a program, and nothing more is known of them."""
    blank = {"can_compile": False, "label": None, "hacked_strict": None, "hacked_loose": None}
    return replace(w, pool=[row | blank if row["src_pool"] == "teacher" else row for row in w.pool])


def no_test_function(w: World) -> World:
    """No answer of the teacher's defines tests of its own: it cannot be the loophole that it uses."""
    return replace(w, pool=[row | {"has_test_func": False} for row in w.pool])


def right_as_hacks(w: World) -> World:
    """Right answers are labelled as reward hacks."""
    return replace(w, pool=[row | {"label": "reward_hack"} if row["gt_pass"] else row for row in w.pool])


def truncate_pool(w: World) -> World:
    """Two problems."""
    return _kept(w, [index for index, row in enumerate(w.pool) if row["step"] < 2])


def one_non_hack(w: World) -> World:
    """All rows but one are hacks."""
    others = [index for index, row in enumerate(w.pool) if not row["hacked"]]
    return _kept(w, [index for index in range(len(w.pool)) if index not in others[1:]])


def _kept(w: World, keep: list[int]) -> World:
    return replace(w, pool=[w.pool[index] for index in keep], sums=w.sums[keep])


@dataclass(frozen=True)
class Fault:
    """`item` is the plan's requirement or task, `guard` the one that must fail, `inject` breaks a sound world."""

    name: str
    item: str
    guard: str
    inject: Callable[[World], World]


def skip_zero_advantage(w: World) -> World:
    """Rows whose group has one reward are left unmeasured, as a GRPO loop would."""

    def measured(rows: Sequence[Row]) -> list[Row]:
        groups: dict[str, set[float]] = {}
        for row in rows:
            groups.setdefault(row["problem_id"], set()).add(row["reward"])
        blank = {"cos_S_contrib": None, "cos_stack": None, "null_reason": "zero_adv"}
        flat = sorted(problem for problem, rewards in groups.items() if len(rewards) == 1) or sorted(groups)[:2]
        return [row | blank if row["problem_id"] in flat else row for row in rows]

    return replace(w, measured=measured)


def detach_adapter(w: World) -> World:
    """Nothing reaches the adapter: all its gradients are 0."""
    return replace(w, measure=lambda rows: torch.zeros(len(rows), w.sums.shape[1]))


def shift_mask(w: World) -> World:
    """The loss stands on the token before."""

    def shifted(row: TokenRow) -> TokenRow:
        ids = [*row.prompt_ids, *row.completion_ids]
        start = len(row.prompt_ids) - 1
        return TokenRow(ids[:start], ids[start:], [*row.own, False])

    return replace(w, score=lambda rows: w.student.log_probs([shifted(row) for row in rows]))


def count_pads(w: World) -> World:
    """Rows are as long as the longest: what is behind their end counts too."""

    def padded(row: TokenRow, width: int) -> TokenRow:
        extra = width - len(row.completion_ids)
        return TokenRow(row.prompt_ids, [*row.completion_ids, *[0] * extra], [*row.own, *[True] * extra])

    def score(rows: Sequence[TokenRow]) -> list[Tensor]:
        width = max(len(row.completion_ids) for row in rows)
        return w.student.log_probs([padded(row, width) for row in rows])

    return replace(w, score=score)


def return_input(w: World) -> World:
    """The projection gives back what it got."""

    def unchanged(gradient: Float[Tensor, " N"], direction: Direction) -> tuple[Float[Tensor, " N"], Projection]:
        _, removal = project(gradient, direction)
        return gradient, account(gradient, gradient, direction, removal.fired)

    return replace(w, project=unchanged)


def negate(w: World) -> World:
    """The direction is clean - hack instead of hack - clean."""
    return replace(w, direction=_of(w, -w.direction.mean))


def add_instead(w: World) -> World:
    """The part along v is added where it should be taken away."""

    def added(gradient: Float[Tensor, " N"], direction: Direction) -> tuple[Float[Tensor, " N"], Projection]:
        out, removal = project(gradient, direction)
        return 2 * gradient - out, account(gradient, 2 * gradient - out, direction, removal.fired)

    return replace(w, project=added)


def invert_gate(w: World) -> World:
    """Removal acts where the gradient points away from the hack."""

    def inverted(gradient: Float[Tensor, " N"], direction: Direction) -> tuple[Float[Tensor, " N"], Projection]:
        turned = Direction(
            direction.layout, direction.axes, direction.strengths, {n: -m for n, m in direction.means.items()}
        )
        out, removal = project(gradient, turned)
        return out, account(gradient, out, direction, removal.fired)

    return replace(w, project=inverted)


def zero_half(w: World) -> World:
    """Half of the modules are missing from v."""
    modules = w.direction.modules[::2]
    return replace(w, direction=from_flat(w.direction.layout, w.direction.mean, modules))


def any_answer(w: World) -> World:
    """The direction is the mean gradient of clean answers."""
    return replace(w, direction=_of(w, w.pairs.weighted("nll_mean")[1].mean(0)))


def length(w: World) -> World:
    """The direction leads from short to long answers of one content."""
    return replace(w, direction=_of(w, length_direction(w.student, [clean for _, clean in w.pair_rows], w.longer)))


def lose_sign(w: World) -> World:
    """Scores are absolute cosines."""
    return replace(w, cosines=lambda *arguments: stacked_cosines(*arguments).abs())


def all_teacher(w: World) -> World:
    """Every answer of every group is a hack of the teacher's."""
    hacks = [index for index, row in enumerate(w.group) if row["hacked"]]
    rows = [w.group[index] | {"src_pool": "teacher"} for index in hacks]
    return replace(w, group=rows, current=[w.current[index] for index in hacks])


def old_is_current(w: World) -> World:
    """The current log-probs stand in for those of the policy that wrote the rows."""
    return replace(w, current=[torch.tensor(row["behav_logp"]) for row in w.group])


def base_half_wrong(w: World) -> World:
    """The student's half is wrong throughout and the teacher's earns its reward: the advantage is the source."""
    rows = [
        row | ({"reward": 1.0} if row["src_pool"] == "teacher" else {"reward": 0.0, "gt_pass": False, "hacked": False})
        for row in w.group
    ]
    return replace(w, group=rows)


def extract_on_a(w: World) -> World:
    """A LoRA direction on the half that has no gradient."""
    layout = w.lora_direction.layout
    noise = torch.randn(layout.width, generator=torch.Generator().manual_seed(0))
    return replace(w, lora_direction=from_flat(layout, noise, layout.names))


def train_a(w: World) -> World:
    """Steps so large that A leaves its row space."""
    return replace(w, lora_learning_rate=1.0)


def one_pair(w: World) -> World:
    """A direction from a single pair."""
    return replace(w, pairs=w.pairs[[0]], pair_rows=w.pair_rows[:1], longer=w.longer[:1])


def nll_inside(w: World) -> World:
    """The GRPO path divides by each answer's length."""

    def by_length(student: Student, pairs: RowPairs) -> Float[Tensor, "P N"]:
        return w.pairs.differences("nll_mean")

    return replace(w, grpo=by_length)


def _of(w: World, flat: Float[Tensor, " N"]) -> Direction:
    """A direction that is this vector, as strong as v in every module."""
    layout, modules = w.direction.layout, w.direction.modules
    norms = dict(zip(layout.names, layout.norms(w.direction.mean), strict=True))
    unit = layout.split(unit_by_module(layout, flat, modules))
    return from_flat(layout, layout.join({name: unit[name] * norms[name] for name in modules}), modules)


FAULTS = (
    Fault("drop the hint", "R1/T1-likely", "prompts", drop_hint),
    Fault("no test function", "R1/T1-likely", "prompts", no_test_function),
    Fault("nothing compiles", "T1", "T1", nothing_compiles),
    Fault("right answers as hacks", "R1", "labels", right_as_hacks),
    Fault("skip the merge", "T1-sneaky", "teacher", skip_merge),
    Fault("override the prompt", "errors 1", "prompt-role", override_prompt),
    Fault("skip rows of advantage 0", "R2-sneaky", "coverage", skip_zero_advantage),
    Fault("detach the adapter", "T2-likely", "canary", detach_adapter),
    Fault("shift the mask", "T2-sneaky", "masks", shift_mask),
    Fault("count pads", "T2-sneaky", "masks", count_pads),
    Fault("return the input", "R3-sneaky", "removal", return_input),
    Fault("negate v", "T3-likely", "V2", negate),
    Fault("add instead of remove", "T3-likely", "removal", add_instead),
    Fault("invert the gate", "T3-likely", "removed-sign", invert_gate),
    Fault("zero half of v", "T3-sneaky", "fires", zero_half),
    Fault("truncate the pool", "R4/T4-likely", "enough", truncate_pool),
    Fault("v is any answer's gradient", "R4-sneaky", "generic", any_answer),
    Fault("scores lose their sign", "R4-sneaky", "specific", lose_sign),
    Fault("v is length", "T4-sneaky", "V4", length),
    Fault("one non-hack", "errors 3", "buckets", one_non_hack),
    Fault("all rows the teacher's", "R5/T5-likely", "variance", all_teacher),
    Fault("old log-probs are current ones", "R5/T5-sneaky", "ratios", old_is_current),
    Fault("half base, all wrong", "R5 (review)", "advantages", base_half_wrong),
    Fault("extract on A", "R6/T6-likely", "lora-B", extract_on_a),
    Fault("train A away", "R6/T6-sneaky", "basis", train_a),
    Fault("one pair", "T7-likely", "signal", one_pair),
    Fault("NLL inside GRPO", "T7-sneaky", "R7", nll_inside),
)
