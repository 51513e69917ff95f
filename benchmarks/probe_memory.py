"""The probe at Qwen3-0.6B's true shape, random weights: time and peak memory of each part beside what was planned.

    python benchmarks/probe_memory.py [--adapter lora_frozenA] [--rank 32] [--rows 4] [--tokens 96] [--table]

One process, one thread: the model is made, adapted and folded; then a replay's step with sums alone and the turn of
the weights, both checkpointed. Peaks are of the resident set without mapped files (`RssAnon`), sampled every tenth of a
second, less what the process held before. `--table` prints what is planned for other sizes instead
(docs/probe-method.md).
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import records
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from stages.gradients.basis import open_adapter
from stages.gradients.per_row import MeasuredStudent, adapt
from stages.gradients.tokens import TokenRow
from stages.policy.base import PolicyConfig
from stages.policy.local import checkpointed
from stages.probe.direction import from_flat
from stages.probe.memory import MemoryInputs, needed
from stages.probe.metrics import stream, toward_hack, weight_direction
from stages.training.plan import GIB, ModelShape, model_shape

SHAPES = {
    "Qwen3-0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "Qwen3-4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
SIZES = (
    MemoryInputs("antipasto_full", 8, 8192, True, rows=16),
    MemoryInputs("antipasto_full", 8, 2048, False, rows=16),
    MemoryInputs("lora_frozenA", 32, 8192, True),
    MemoryInputs("lora", 32, 8192, True),
    MemoryInputs("lora", 32, 8192, True, rows=16),
)
"""What the table has a line for; 16 rows are a step's whole gradients, 0 sums alone."""


def config(name: str) -> Qwen3Config:
    """Of a model of this name."""
    own = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True}
    return Qwen3Config(**own, **SHAPES[name], dtype="bfloat16", architectures=["Qwen3ForCausalLM"])


def shape(name: str) -> ModelShape:
    """From the config.json alone."""
    with tempfile.TemporaryDirectory() as folder:
        config(name).save_pretrained(folder)
        found = model_shape(PolicyConfig(model=folder))
    assert found is not None
    return found


def table() -> list[str]:
    """Lines of docs/probe-method.md."""
    lines = []
    for name, own in SHAPES.items():
        for size in SIZES:
            need, rank = needed(shape(name), size), "all" if size.adapter == "antipasto_full" else size.rank
            parts = (need.weights, need.change, need.basis, need.gradients, need.activations, need.total)
            told = " | ".join(f"{part / GIB:.1f}" for part in parts)
            kind = f"{size.adapter} | {rank} | {size.rows} | {size.tokens}{'' if size.checkpointing else ', none'}"
            lines.append(f"| {own['hidden_size']} x {own['num_hidden_layers']} | {kind} | {told} |")
    return lines


def peak(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """What `work` gives, its wall seconds, and the largest anonymous resident set meanwhile in GiB."""
    largest, over = [_anonymous()], threading.Event()

    def sample() -> None:
        while not over.wait(0.1):
            largest.append(_anonymous())

    watcher = threading.Thread(target=sample)
    watcher.start()
    started = time.monotonic()
    found = work()
    seconds = time.monotonic() - started
    over.set()
    watcher.join()
    return found, seconds, max(largest) / GIB


def _anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def rows(count: int, tokens: int) -> list[TokenRow]:
    """Random rows, half of each its own."""
    half = tokens // 2
    ids = torch.randint(0, 151936, (count, tokens), generator=torch.Generator().manual_seed(0)).tolist()
    return [TokenRow(line[:half], line[half:], [True] * (tokens - half)) for line in ids]


def made(adapter: Any, rank: int) -> MeasuredStudent:
    """The model with random weights in bfloat16, adapted and moved a little."""
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen3ForCausalLM(config("Qwen3-0.6B")).eval()
    torch.set_default_dtype(torch.float32)
    student = adapt(model, None, open_adapter(adapter, model, None, rank, 0))
    student.move_to(1e-4 * torch.randn(student.adapter.layout.width))
    return student


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", choices=["lora", "lora_frozenA"], default="lora_frozenA")
    for name, default in (("rank", 32), ("rows", 4), ("tokens", 96)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print("\n".join(table()))
        return
    torch.set_num_threads(1)
    before = _anonymous() / GIB
    measuring = MemoryInputs(options.adapter, options.rank, options.rows * options.tokens, True)
    planned = needed(shape("Qwen3-0.6B"), measuring)
    student, seconds, most = peak(lambda: made(options.adapter, options.rank))
    print(json.dumps({"part": "made and folded", "s": round(seconds, 1), "GiB": round(most - before, 2)}), flush=True)
    highest = most - before
    some, layout = rows(options.rows, options.tokens), student.adapter.layout
    direction = from_flat(layout, torch.randn(layout.width), student.adapter.probed)
    with tempfile.TemporaryDirectory() as folder, checkpointed(student.model):
        student.max_tokens = options.rows * options.tokens
        parts: dict[str, Callable[[], Any]] = {
            "a step's sums": lambda: stream(student, some, direction, [1.0] * len(some)),
            "turn of the weights": lambda: toward_hack(
                student,
                weight_direction(student, [(some[0], some[1])], Path(folder) / "weights.bin"),
                torch.zeros(layout.width),
            ),
        }
        for name, work in parts.items():
            _, seconds, most = peak(work)
            told = {"part": name, "s": round(seconds, 1), "GiB": round(most - before, 2)}
            highest = max(highest, most - before)
            print(json.dumps(told), flush=True)
    print(json.dumps({"planned GiB": round(planned.total / GIB, 2), "sum": str(planned)}))
    what = (
        f"Qwen3-0.6B's shape, {options.adapter} of rank {options.rank}, {options.rows} rows of {options.tokens} tokens"
    )
    share = highest * GIB / planned.total
    records.write(__file__, [records.measured(f"{what}: peak memory beside the estimate", share, n=1, goal="<= 1")])


if __name__ == "__main__":
    main()
