"""The parity kernels' divergence over a vocabulary, which no channel uses, beside TRL's: time, peak memory, agreement.

    python benchmarks/losses.py [--rounds 7] [--vocabulary 32000]

`logits`: jsd.generalized_jsd beside TRL's GKDTrainer.generalized_jsd_loss, from logits [4, 512, v].
`hidden`: hidden.hidden_divergence beside TRL's _chunked_divergence_loss, from hidden states [4, 512, 896] and heads
[v, 896].

A run is the loss and its gradient. Times: one thread, one process, the contenders in turn, the first round dropped,
medians. Memory: a fresh process for each contender, inputs resident, warmed up on small ones; by how much the peak
resident set (CPU: VmHWM after a reset; GPU: max_memory_allocated) rises during one run. Everything that the run
allocates counts, the gradient that it returns included. A GPU, if there is one, is used, with a vocabulary of 151,936.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import records
import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]
from parity.kernels.hidden_divergence import hidden_divergence
from parity.kernels.jsd import generalized_jsd

from stages.losses.hidden import Head

BATCH, TOKENS, WIDTH = 4, 512, 896
BETAS = (0.0, 0.5, 1.0)
INPUTS = {"logits": "divergence from logits", "hidden": f"divergence from hidden states of width {WIDTH}"}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MEBIBYTE = 2**20

Tensors = tuple[Tensor, ...]


def ours_from_logits(beta: float, student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    return generalized_jsd(student, teacher, labels, beta=beta, min_divisor=1)


def trl_from_logits(beta: float, student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    from trl.experimental.gkd import GKDTrainer

    return GKDTrainer.generalized_jsd_loss(student, teacher, labels, beta=beta)


def ours_from_hidden(
    beta: float, student: Tensor, head: Tensor, teacher: Tensor, teacher_head: Tensor, mask: Tensor
) -> Tensor:
    return hidden_divergence(student, teacher, Head(head), Head(teacher_head), mask, beta=beta).loss


def trl_from_hidden(
    beta: float, student: Tensor, head: Tensor, teacher: Tensor, teacher_head: Tensor, mask: Tensor
) -> Tensor:
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    return _chunked_divergence_loss(student, teacher, head, teacher_head, mask, beta)[0]


@dataclass(frozen=True)
class Comparison:
    """inputs: (tokens, vocabulary) -> tensors, of which the first num_trained get a gradient."""

    ours: Callable[..., Tensor]
    trl: Callable[..., Tensor]
    inputs: Callable[[int, int], Tensors]
    num_trained: int


def logits_inputs(tokens: int, vocabulary: int) -> Tensors:
    shape = (BATCH, tokens, vocabulary)
    labels = torch.zeros(BATCH, tokens, dtype=torch.long, device=DEVICE)
    return torch.randn(shape, device=DEVICE), torch.randn(shape, device=DEVICE), labels


def hidden_inputs(tokens: int, vocabulary: int) -> Tensors:
    states, head = (BATCH, tokens, WIDTH), (vocabulary, WIDTH)
    student, teacher = (torch.randn(states, device=DEVICE) for _ in range(2))
    weight, other = (torch.randn(head, device=DEVICE) / WIDTH**0.5 for _ in range(2))
    return student, weight, teacher, other, torch.ones(BATCH, tokens, device=DEVICE)


COMPARISONS = {
    "logits": Comparison(ours_from_logits, trl_from_logits, logits_inputs, 1),
    "hidden": Comparison(ours_from_hidden, trl_from_hidden, hidden_inputs, 2),
}


def run(loss: Callable[..., Tensor], comparison: Comparison, beta: float, tensors: Tensors) -> Tensors:
    """Loss and gradients."""
    trained = [tensor.detach().requires_grad_() for tensor in tensors[: comparison.num_trained]]
    value = loss(beta, *trained, *tensors[comparison.num_trained :])
    value.backward()
    return value.detach(), *(tensor.grad for tensor in trained)


def timed(action: Callable[[], object]) -> float:
    """Seconds."""
    _finish()
    start = time.perf_counter()
    action()
    _finish()
    return time.perf_counter() - start


def _finish() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def times_in_turn(comparison: Comparison, beta: float, tensors: Tensors, rounds: int) -> list[tuple[float, ...]]:
    """Ours and TRL's in turn; seconds of each round."""
    contenders = (comparison.ours, comparison.trl)
    times = [[timed(lambda c=c: run(c, comparison, beta, tensors)) for c in contenders] for _ in range(rounds + 1)]
    return list(zip(*times[1:], strict=True))


def largest_difference(comparison: Comparison, beta: float, tensors: Tensors) -> float:
    """Of loss and gradients, relative to the largest value of each."""
    pairs = zip(*(run(loss, comparison, beta, tensors) for loss in (comparison.ours, comparison.trl)), strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def peak_rise(comparison: Comparison, who: str, beta: float, vocabulary: int) -> int:
    """Bytes by which one run raises the peak above the resident inputs; for a fresh process."""
    loss = getattr(comparison, who)
    run(loss, comparison, beta, comparison.inputs(2, 64))
    tensors = comparison.inputs(TOKENS, vocabulary)
    before = _reset_peak()
    run(loss, comparison, beta, tensors)
    return _peak() - before


def _reset_peak() -> int:
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return torch.cuda.max_memory_allocated() if DEVICE == "cuda" else _status("VmHWM")


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def peak_in_fresh_process(name: str, who: str, beta: float, vocabulary: int) -> int:
    command = [sys.executable, __file__, "--peak", name, who, str(beta), "--vocabulary", str(vocabulary)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def compare(name: str, beta: float, vocabulary: int, rounds: int) -> None:
    """One line, and three claims: times, peaks, their ratios to TRL's, and the largest relative difference."""
    peaks = [peak_in_fresh_process(name, who, beta, vocabulary) / MEBIBYTE for who in ("ours", "trl")]
    comparison = COMPARISONS[name]
    tensors = comparison.inputs(TOKENS, vocabulary)
    rounds_of = times_in_turn(comparison, beta, tensors, rounds)
    times = [statistics.median(seconds) for seconds in rounds_of]
    difference = largest_difference(comparison, beta, tensors)
    print(
        f"{name} v={vocabulary} beta={beta}: "
        f"time {times[0]:.2f} s, TRL {times[1]:.2f} s, ratio {times[0] / times[1]:.2f}; "
        f"peak rise {peaks[0]:.0f} MiB, TRL {peaks[1]:.0f} MiB, ratio {peaks[0] / peaks[1]:.2f}; "
        f"difference {difference:.1e}",
        flush=True,
    )
    what = f"{INPUTS[name]}, {BATCH} x {TOKENS} tokens, vocabulary {vocabulary:,}, beta {beta:g}: "
    claims = [
        records.measured(f"{what}time beside TRL's", *records.ratio(*rounds_of), n=rounds, goal="<= 1"),
        records.measured(f"{what}peak memory beside TRL's", peaks[0] / peaks[1], n=1, goal="<= 0.25"),
        records.measured(f"{what}largest relative difference to TRL's", difference, n=1, goal="<= 0.00001"),
    ]
    records.write(__file__, claims)


def main() -> None:
    parser = argparse.ArgumentParser(description="Our divergence beside TRL's")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--vocabulary", type=int, default=151_936 if DEVICE == "cuda" else 32_000)
    parser.add_argument(
        "--peak", nargs=3, metavar=("COMPARISON", "WHO", "BETA"), help="one memory measurement, in bytes"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if arguments.peak:
        name, who, beta = arguments.peak
        print(peak_rise(COMPARISONS[name], who, float(beta), arguments.vocabulary))
        return
    for name in COMPARISONS:
        for beta in BETAS:
            compare(name, beta, arguments.vocabulary, arguments.rounds)


if __name__ == "__main__":
    main()
