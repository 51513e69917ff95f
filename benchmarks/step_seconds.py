"""Seconds of a training step and of sampling on one H200 by arithmetic, beside those that were measured there.

    python benchmarks/step_seconds.py

Prints the table of docs/recipes/gpu.md. It rests on the records of `./dev gpu` and on two numbers of the machine: the
rate of matrix products that these records measured, and the bandwidth that NVIDIA states for its memory.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]
import records
from shapes import QWEN3

SIZES = ("0.6B", "8B", "32B")
BANDWIDTH = 4.8e12
"""Bytes a second of an H200's memory, by NVIDIA's data sheet."""
STEP = "Qwen3-{size}, LoRA step of 8 x (1024 + 1024) tokens, ours: {what}"
SAMPLED = "Qwen3-{size}, {rows} answers behind 256 tokens: sampled tokens a second"
TOKENS, ANSWER, PROMPT = 8 * 2048, 1024, 256
VOCABULARY, HEAD, KV_HEADS = 151_936, 128, 8


def parameters(size: str) -> int:
    """Return the parameters of a Qwen3, of which the small one ties its embeddings to its head."""
    shape = QWEN3[size]
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    attention = 2 * hidden * HEAD * (heads + KV_HEADS) + 2 * HEAD
    layer = attention + 3 * hidden * shape["intermediate_size"] + 2 * hidden
    tables = 1 if size == "0.6B" else 2
    return tables * VOCABULARY * hidden + shape["num_hidden_layers"] * layer + hidden


def training_s(size: str, rate: float) -> float:
    """Return seconds of a step with LoRA: two operations a parameter and token forward, and two backward."""
    return 4 * parameters(size) * TOKENS / rate


def sampling_s(size: str, rows: int) -> float:
    """Return seconds in which all rows get ANSWER tokens, each of which reads all weights, and the keys and values."""
    cached = QWEN3[size]["num_hidden_layers"] * 2 * KV_HEADS * HEAD * 2  # bytes of a token
    return ANSWER * (2 * parameters(size) + rows * cached * (PROMPT + ANSWER / 2)) / BANDWIDTH


def table() -> str:
    """Return the table with the assumptions above as numbers, and what the records hold; an en dash: not run."""
    measured = {c.claim: c.value for name in ("gpu-speed", "gpu-sampling") for c in records.read(folder(name))}
    share = measured[STEP.format(size="8B", what="share of the rate of matrix products")]
    rate = 4 * parameters("8B") * measured[STEP.format(size="8B", what="tokens a second")] / share
    tokens = [measured.get(STEP.format(size=size, what="tokens a second")) for size in SIZES]
    rows: dict[str, list[float | None]] = {
        "a step with LoRA on 8 x (1024 + 1024) tokens at the full rate": [training_s(size, rate) for size in SIZES],
        f"the same at {share:.0%} of it, as measured with 8B": [training_s(size, rate) / share for size in SIZES],
        "**measured**": [each and TOKENS / each for each in tokens],
    }
    for number in (8, 256):
        sampled = [measured.get(SAMPLED.format(size=size, rows=number)) for size in SIZES]
        what = f"1,024 tokens for each of {number} answers"
        rows[f"{what} at the full bandwidth"] = [sampling_s(size, number) for size in SIZES]
        rows[f"**the same {number} at the measured rate**"] = [each and ANSWER * number / each for each in sampled]
    head = f"seconds at {rate / 1e12:.0f} TFLOP/s and {BANDWIDTH / 1e12:g} TB/s"
    lines = [f"| {head} | {' | '.join(f'Qwen3-{size}' for size in SIZES)} |", f"| --- |{' --- |' * len(SIZES)}"]
    for what, seconds in rows.items():
        lines.append(f"| {what} | {' | '.join(f'{each:.2g}' if each else 'not run' for each in seconds)} |")
    return "\n".join(lines)


def folder(name: str) -> Path:
    """Return the file of a record."""
    return records.folder() / f"{name}.json"


if __name__ == "__main__":
    print(table())
