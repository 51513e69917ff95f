"""Worlds and students with bfloat16 weights, and the error of a change of theta in such weights.

The reference is the same rounded model with its weights stored in float32, so that only the arithmetic differs. The
comparison and its bounds are this project's own.

Shapes: n rows or columns of an orthonormal matrix, N trained numbers.
"""

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from composer_stages.gradients.basis import Factors, Lora, SingularValues, Spectrum, target_linears
from composer_stages.gradients.per_row import MeasuredStudent, adapt
from composer_stages.probe.checks import direction, gradients
from composer_stages.probe.direction import extract, unit_by_module
from composer_stages.probe.rows import as_tokens
from composer_stages.probe.settings import DescentConfig
from probe_faults.world import LORA_RANK, ProbeWorld, gradients_of, spectrum_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HALF = torch.bfloat16


def halved(world: ProbeWorld, seed: int) -> ProbeWorld:
    """Return the world of the same rows under students with bfloat16 weights, everything measured again."""
    plain, on_lora = (copy.deepcopy(model) for model in (world.student.model, world.lora.model))
    adapter = SingularValues(spectrum_of(plain)).to("cpu", HALF)
    lora = Lora(target_linears(on_lora), LORA_RANK, freeze_a=False, seed=seed).to("cpu", HALF)
    student = adapt(plain.to(HALF), world.tokenizer, adapter)  # type: ignore[arg-type]
    lora_student = adapt(on_lora.to(HALF), world.tokenizer, lora)  # type: ignore[arg-type]
    pairs, lora_pairs = (gradients_of(some, world.pair_rows) for some in (student, lora_student))
    return replace(
        world,
        teacher=copy.deepcopy(world.teacher).to(HALF),  # type: ignore[arg-type]
        student=student,
        measure=lambda tokens: student.gradients(tokens)[0],
        score=student.log_probs,
        sums=student.gradients([as_tokens(row) for row in world.pool])[0],
        pairs=pairs,
        direction=extract(pairs.layout, pairs.differences("nll_mean")),
        lora=lora_student,
        lora_sums=lora_pairs.hack,
        lora_direction=extract(lora_pairs.layout, lora_pairs.differences("nll_mean")),
    )


def change_error(student: MeasuredStudent) -> float:
    """Return the largest relative error of the weights' change, for steps of Adam, the canary and the polarity oracle.

    Of the worst Linear and step, ||applied - intended|| / ||intended|| in Frobenius norms. The student must hold its
    clean weights.
    """
    layout = student.adapter.layout
    noise = torch.randn(layout.width, generator=torch.Generator().manual_seed(0))
    unit, scale = unit_by_module(layout, noise, layout.names), student.weight_scale()
    adam, canary = DescentConfig().learning_rate * noise.sign(), gradients.STEP / 2 * scale * unit
    return max(_change_error(student, step) for step in (adam, canary, direction.STEP * scale * unit))


@torch.no_grad()
def _change_error(student: MeasuredStudent, step: Float[Tensor, " N"]) -> float:
    """Return the error of the worst Linear; the intended change is computed from the factors before rounding."""
    linears, start = target_linears(student.model), student.adapter.theta.clone()
    clean = {name: linear.weight.detach().clone().float() for name, linear in linears.items()}
    exact = SingularValues(_flat_spectrum(student.model))
    exact.theta = step
    student.move_to(start + step)
    errors = []
    for name, linear in linears.items():
        intended = exact.delta(name)
        errors.append(float((linear.weight.float() - clean[name] - intended).norm() / intended.norm()))
    student.move_to(start)
    return max(errors)


def wide_student(width: int) -> MeasuredStudent:
    """Return a one-layer bfloat16 student with random weights of standard deviation .02 and flat singular axes."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=8,
        hidden_size=width,
        intermediate_size=16,
        num_hidden_layers=1,
        head_dim=16,
        num_attention_heads=width // 16,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    adapter = SingularValues(_flat_spectrum(model)).to("cpu", HALF)
    return adapt(model.to(HALF).eval(), None, adapter)  # type: ignore[arg-type]


def _flat_spectrum(model: "PreTrainedModel") -> Spectrum:
    """Return orthonormal axes for every adapted Linear, not its own: rounding does not depend on which they are."""
    factors = {}
    for name, linear in target_linears(model).items():
        outputs, inputs = linear.weight.shape
        rank = min(outputs, inputs)
        factors[name] = Factors(_orthonormal(outputs)[:, :rank], torch.ones(rank), _orthonormal(inputs)[:rank])
    return Spectrum(factors)


def _orthonormal(n: int) -> Float[Tensor, "n n"]:
    """Return a Hadamard matrix of the largest power of two in n, times a random rotation: entries of one size."""
    from scipy.linalg import hadamard

    power = n & -n
    rest = torch.linalg.qr(torch.randn(n // power, n // power, generator=torch.Generator().manual_seed(n)))[0]
    return torch.kron(torch.tensor(hadamard(power), dtype=torch.float32) / power**0.5, rest.contiguous())
