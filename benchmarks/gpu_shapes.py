"""Training, sampling and the probe at Qwen3's shapes on a rehearsed GPU: predicted beside tracked memory, and launches.

    python benchmarks/gpu_shapes.py [CASE ...]

The GPU is that of tests/gpu/rehearsal.py: tensors have shapes and no numbers, and every operation is counted. Steps
are LoRA of rank 16 in bfloat16, or all weights as float32 masters under autocast, with activations recomputed unless
they are said to be kept; where a direction is taken out, the peak is that of finding it, too. A case takes one to three
minutes of a core; without names all are run. tests/gpu/test_rehearsal.py holds the ratios to the same bounds.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SCENARIOS = Path(__file__).parents[1] / "tests" / "gpu" / "scenarios.py"
LONG = "prompt=1024, answer=2048"


def sampled(size: str) -> str:
    """The call of scenarios.py for a batch of answers."""
    return f'sampling("{size}", None, rows=32, prompt=1024, tokens=32)'


CASES = {
    "GRPO 0.6B": ("Qwen3-0.6B, GRPO step of 8 x (128 + 512) tokens", 'step("ours", "0.6B", None)'),
    "GRPO 0.6B, long": ("Qwen3-0.6B, GRPO step of 8 x (1,024 + 2,048) tokens", f'step("ours", "0.6B", None, {LONG})'),
    "GRPO 4B": ("Qwen3-4B, GRPO step of 8 x (128 + 512) tokens", 'step("ours", "4B", None)'),
    "GRPO 8B": ("Qwen3-8B, GRPO step of 8 x (128 + 512) tokens", 'step("ours", "8B", None)'),
    "GRPO 8B, long": ("Qwen3-8B, GRPO step of 8 x (1,024 + 2,048) tokens", f'step("ours", "8B", None, {LONG})'),
    "GRPO 0.6B, kept": (
        "Qwen3-0.6B, GRPO step of 8 x (128 + 512) tokens, activations kept",
        'step("ours", "0.6B", None, checkpointing=False)',
    ),
    "GRPO 8B, kept": (
        "Qwen3-8B, GRPO step of 8 x (128 + 512) tokens, activations kept",
        'step("ours", "8B", None, checkpointing=False)',
    ),
    "GRPO 14B": ("Qwen3-14B, GRPO step of 8 x (128 + 512) tokens", 'step("ours", "14B", None)'),
    "six 14B": (
        "Qwen3-14B, GRPO step of 8 x 640 tokens on one of six processes",
        'step("ours", "14B", None, processes=6)',
    ),
    "all 0.6B": ("Qwen3-0.6B, step of all channels with a teacher of 0.6B", 'step("all", "0.6B", None)'),
    "all 4B": ("Qwen3-4B, step of all channels with a teacher of 4B", 'step("all", "4B", None)'),
    "all 8B": ("Qwen3-8B, step of all channels with a teacher of 8B", 'step("all", "8B", None)'),
    "all 14B": ("Qwen3-14B, step of all channels with a teacher of 14B", 'step("all", "14B", None)'),
    "weights 0.6B": (
        "Qwen3-0.6B, GRPO step of all weights, 8 x (128 + 512) tokens",
        'step("ours", "0.6B", None, rank=0)',
    ),
    "weights 4B": ("Qwen3-4B, GRPO step of all weights, 8 x 640 tokens", 'step("ours", "4B", None, rank=0)'),
    "weights 8B": ("Qwen3-8B, GRPO step of all weights, 8 x 640 tokens", 'step("ours", "8B", None, rank=0)'),
    "projected 0.6B": (
        "Qwen3-0.6B, GRPO step that a direction is taken out of",
        'step("ours", "0.6B", None, project=True)',
    ),
    "projected 8B": ("Qwen3-8B, GRPO step that a direction is taken out of", 'step("ours", "8B", None, project=True)'),
    "sampling 0.6B": ("Qwen3-0.6B, sampling of 32 x (1,024 + 32) tokens", sampled("0.6B")),
    "sampling 4B": ("Qwen3-4B, sampling of 32 x (1,024 + 32) tokens", sampled("4B")),
    "sampling 8B": ("Qwen3-8B, sampling of 32 x (1,024 + 32) tokens", sampled("8B")),
    "sampling 14B": ("Qwen3-14B, sampling of 32 x (1,024 + 32) tokens", sampled("14B")),
    "probe 0.6B": ("Qwen3-0.6B, gradients of 4 x 256 tokens", 'probe("lora", "0.6B", None)'),
    "probe 4B": ("Qwen3-4B, gradients of 4 x 256 tokens", 'probe("lora", "4B", None)'),
    "probe 8B": ("Qwen3-8B, gradients of 4 x 2,048 tokens", 'probe("lora", "8B", None, tokens=2048)'),
    "probe 14B": ("Qwen3-14B, gradients of 4 x 256 tokens", 'probe("lora", "14B", None)'),
}
"""What is rehearsed, and the call of scenarios.py."""
TRLS = 'step("TRL", "8B", None)'


def rehearse(*calls: str, timeout_s: float | None = None) -> dict[str, Any]:
    """Return what each of these scenarios asked of the device, found in a process of their own; its error otherwise."""
    done = subprocess.run(
        [sys.executable, str(SCENARIOS), *calls],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=timeout_s,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    import records

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*CASES, []], metavar="CASE", help=", ".join(CASES))
    for name in parser.parse_args().names or CASES:
        what, call = CASES[name]
        found = rehearse(call)[call]
        gib = found["peak"] / 2**30
        ratio = found["predicted"] / found["peak"]
        print(f"{what}: {gib:.2f} GiB tracked, {ratio:.3f} of it predicted, {found['launches']:,} launches", flush=True)
        claims = [
            records.measured(f"{what}: tracked peak memory", gib, n=1, unit="GiB"),
            records.measured(f"{what}: predicted beside tracked memory, at least", ratio, n=1, goal=">= 1"),
            records.measured(f"{what}: predicted beside tracked memory, at most", ratio, n=1, goal="<= 1.15"),
            records.measured(f"{what}: launches", found["launches"], n=1),
        ]
        if name == "GRPO 8B":
            beside = found["launches"] / rehearse(TRLS)[TRLS]["launches"]
            claims.append(records.measured(f"{what}: launches beside TRL's step", beside, n=1, goal="<= 1.5"))
        records.write(__file__, claims)


if __name__ == "__main__":
    main()
