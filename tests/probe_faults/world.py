"""A small, sound run of everything that the guards read: pool, gradients, direction, projection, GRPO step, LoRA.

A fault is a world with one field replaced (`dataclasses.replace`), so each field is something that can go wrong on its
own.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from composer_stages.gradients.basis import Lora, SingularValues, Spectrum, factorise, target_linears
from composer_stages.gradients.per_row import MeasuredStudent, TokenRow, adapt
from composer_stages.policy.base import PolicyConfig
from composer_stages.policy.local import LocalPolicy
from composer_stages.probe.checks.direction import RowPairs
from composer_stages.probe.checks.gradients import RowGradients, RowLogProbs
from composer_stages.probe.checks.pool import contract_sha256
from composer_stages.probe.descent import Projection, project
from composer_stages.probe.direction import Direction, PairGradients, extract, grpo_differences
from composer_stages.probe.metrics import stacked_cosines
from composer_stages.probe.rows import as_tokens, token_row
from composer_stages.probe.settings import Contract
from composer_stages.probe.sources import answers
from composer_stages.runs.kinds import Row
from probe_faults.loophole_world import HINT, PlantedEnv, hack_clean_pairs, mix, tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBLEMS, PAIRS, HELD_OUT, LORA_RANK = 60, 16, 4, 4
Cosines = Callable[[Float[Tensor, "R N"], Float[Tensor, "P N"], Float[Tensor, " N"], int], Float[Tensor, "R P"]]
Projector = Callable[[Float[Tensor, " N"], Direction], tuple[Float[Tensor, " N"], Projection]]


@dataclass(frozen=True)
class ProbeWorld:
    """What the guards read: R pool rows, P pairs, N trained numbers.

    `sums` [R, N] are the pool rows' token-sum gradients; `group` holds the rows of one GRPO step with the log-probs of
    the policies that wrote them, `current` those of the student.
    """

    tokenizer: Any
    contract: Contract
    recorded_contract: str
    pool: Sequence[Row]
    teacher: "PreTrainedModel"
    student: MeasuredStudent
    measure: RowGradients
    score: RowLogProbs
    measured: Callable[[Sequence[Row]], Sequence[Row]]
    sums: Float[Tensor, "R N"]
    pairs: PairGradients
    pair_rows: RowPairs
    longer: Sequence[TokenRow]
    held_out: RowPairs
    direction: Direction
    project: Projector
    cosines: Cosines
    group: Sequence[Row]
    current: Sequence[Float[Tensor, " own"]]
    grpo: Callable[[MeasuredStudent, RowPairs], Float[Tensor, "P N"]]
    lora: MeasuredStudent
    lora_sums: Float[Tensor, "P N"]
    lora_direction: Direction
    lora_learning_rate: float


def build_world(base: "PreTrainedModel", teacher: "PreTrainedModel", seed: int) -> ProbeWorld:
    """Return a world in which every guard passes, of the two policies of the loophole world."""
    words, between = tokenizer(), copy.deepcopy(base)
    student = adapt(base, words, SingularValues(spectrum_of(base)))
    pool = _pool(base, teacher, words, seed)
    items = hack_clean_pairs(PAIRS + HELD_OUT, seed)
    rows = [tuple(token_row(words, item["prompt"], item[side]) for side in ("hack", "clean")) for item in items]
    pairs = gradients_of(student, rows[:PAIRS])
    group, current = _group(between, base, teacher, words, seed)
    lora = adapt(copy.deepcopy(base), words, Lora(target_linears(base), LORA_RANK, freeze_a=False, seed=seed))
    lora_pairs = gradients_of(lora, rows[:PAIRS])
    contract = Contract(hint=HINT)
    return ProbeWorld(
        tokenizer=words,
        contract=contract,
        recorded_contract=contract_sha256(contract),
        pool=pool,
        teacher=teacher,
        student=student,
        measure=lambda tokens: student.gradients(tokens)[0],
        score=student.log_probs,
        measured=lambda rows: rows,
        sums=student.gradients([as_tokens(row) for row in pool])[0],
        pairs=pairs,
        pair_rows=rows[:PAIRS],
        longer=[token_row(words, item["prompt"], item["longer"]) for item in items[:PAIRS]],
        held_out=rows[PAIRS:],
        direction=extract(pairs.layout, pairs.differences("nll_mean")),
        project=project,
        cosines=stacked_cosines,
        group=group,
        current=current,
        grpo=grpo_differences,
        lora=lora,
        lora_sums=lora_pairs.hack,
        lora_direction=extract(lora_pairs.layout, lora_pairs.differences("nll_mean")),
        lora_learning_rate=1e-3,
    )


def spectrum_of(model: "PreTrainedModel") -> Spectrum:
    """Return the singular value decomposition of the adapted Linears of a model in memory."""
    return Spectrum({name: factorise(linear.weight) for name, linear in target_linears(model).items()})


def gradients_of(student: MeasuredStudent, pairs: RowPairs) -> PairGradients:
    """Return the token-sum gradients of (hack, clean) pairs."""
    flat, _ = student.gradients([side for pair in pairs for side in pair])
    tokens = torch.tensor([[side.num_own for side in pair] for pair in pairs])
    return PairGradients(student.adapter.layout, flat[0::2], flat[1::2], tokens[:, 0], tokens[:, 1])


def _policy(model: "PreTrainedModel", words: Any, name: str) -> LocalPolicy:
    return LocalPolicy(model, words, PolicyConfig(model=name, max_tokens=16))


def _pool(base: "PreTrainedModel", teacher: "PreTrainedModel", words: Any, seed: int) -> list[Row]:
    """Sample the pool: teacher and base with the hint, and the teacher without it, on the same problems."""
    tasks = PlantedEnv().tasks("train", PROBLEMS, seed)
    sources = (("teacher", teacher, True, 8), ("teacher_nohint", teacher, False, 3), ("base", base, True, 3))
    rows = []
    for name, model, hint, samples in sources:
        written = answers(partial(PlantedEnv, hint), _policy(model, words, name), tasks, samples, seed, name, 1)
        rows += [row | {"prompt_role": "rh" if hint else "plain"} for row in written]
    places = {task.task_id: index for index, task in enumerate(tasks)}
    return [row | {"step": places[row["problem_id"]]} for row in rows]


def _group(
    between: "PreTrainedModel", base: "PreTrainedModel", teacher: "PreTrainedModel", words: Any, seed: int
) -> tuple[list[Row], list[Float[Tensor, " own"]]]:
    """Return the rows of a GRPO step, half of them of another policy, and their log-probs under a nearby student."""
    tasks = PlantedEnv().tasks("train", 8, seed + 1)
    rows = []
    for source, place in (("teacher", 0.9), ("student", 0.8)):
        mix(between, base, teacher, place)
        rows += answers(PlantedEnv, _policy(between, words, source), tasks, 4, seed, source, 1)
    mix(between, base, teacher, 0.82)
    student = adapt(between, words, SingularValues(spectrum_of(between)))
    return rows, student.log_probs([as_tokens(row) for row in rows])
