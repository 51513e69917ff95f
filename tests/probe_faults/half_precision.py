"""Checks of bfloat16 weights: verdicts and cosines equal to float32, and changes of theta that reach the weights.

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

from probe_faults.guard_checks import check_guards
from probe_faults.world import LORA_RANK, ProbeWorld, build_world, gradients_of, spectrum_of
from stages.gradients.basis import Factors, Lora, SingularValues, Spectrum, target_linears
from stages.gradients.per_row import MeasuredStudent, adapt
from stages.probe.checks import direction, gradients
from stages.probe.checks.check import Check, pass_or_fail
from stages.probe.direction import extract, unit_by_module
from stages.probe.metrics import row_metrics
from stages.probe.rows import as_tokens
from stages.probe.settings import DescentConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HALF = torch.bfloat16
MAX_COSINE_GAP, MAX_CHANGE_ERROR = 0.01, 0.01
WIDTHS = (128, 2560)
"""Hidden sizes of the models on which changes of theta are checked; 2,560 is the width of Qwen3-4B."""


def half_precision_checks(base: "PreTrainedModel", teacher: "PreTrainedModel", seed: int) -> list[Check]:
    """Check guards, cosines and changes of theta with bfloat16 weights."""
    rounded = [copy.deepcopy(model).to(HALF).float() for model in (base, teacher)]  # type: ignore[arg-type]
    wide = build_world(rounded[0], rounded[1], seed)
    narrow = halved(wide, seed)
    return [same_verdicts(wide, narrow), same_cosines(wide, narrow), *(change_arrives(wide_student(n)) for n in WIDTHS)]


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


def same_verdicts(wide: ProbeWorld, narrow: ProbeWorld) -> Check:
    """Check that every guard has the same verdict with bfloat16 as with float32 weights."""
    shown = [{name: check and check.status for name, check in check_guards(world).items()} for world in (wide, narrow)]
    differ = [f"{name} {shown[0][name]} -> {shown[1][name]}" for name in shown[0] if shown[0][name] != shown[1][name]]
    detail = "; ".join(differ) or f"{len(shown[0])} guards"
    return Check("bf16-verdicts", "T2", pass_or_fail(not differ), float(len(differ)), "as in float32", detail)


def same_cosines(wide: ProbeWorld, narrow: ProbeWorld) -> Check:
    """Check every row's cosine with v, each measured with the v of its own precision."""
    cosines = [row_metrics(world.sums.float(), world.direction)["cos_stack"] for world in (wide, narrow)]
    gap = float((cosines[0] - cosines[1]).abs().max())
    detail = f"the largest of {len(cosines[0])} rows; mean |cos| {float(cosines[0].abs().mean()):.2f}"
    return Check(
        "bf16-cosines", "T2", pass_or_fail(gap <= MAX_COSINE_GAP), gap, f"within {MAX_COSINE_GAP} of float32", detail
    )


def change_arrives(student: MeasuredStudent) -> Check:
    """Check that weights change by what theta implies, for a step of Adam, the canary and the polarity oracle.

    The statistic is ||applied - intended|| / ||intended|| in Frobenius norms, the worst Linear and step. The student
    must hold its clean weights.
    """
    generator = torch.Generator().manual_seed(0)
    layout = student.adapter.layout
    noise = torch.randn(layout.width, generator=generator)
    unit, scale = unit_by_module(layout, noise, layout.names), student.weight_scale()
    steps = {
        "Adam": DescentConfig().learning_rate * noise.sign(),
        "canary": gradients.STEP / 2 * scale * unit,
        "polarity": direction.STEP * scale * unit,
    }
    worst = {name: _change_error(student, step) for name, step in steps.items()}
    error, width = max(worst.values()), student.model.config.hidden_size
    detail = f"width {width}: " + ", ".join(f"{name} {value:.2g}" for name, value in worst.items())
    threshold = f"change off by <= {MAX_CHANGE_ERROR:.0%}"
    return Check(f"bf16-{width}", "T2", pass_or_fail(error <= MAX_CHANGE_ERROR), error, threshold, detail)


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
