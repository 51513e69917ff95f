"""Peak memory of a process that trains all weights, whole (data parallel) or in shares (FSDP2), on two processes.

    python benchmarks/sharding.py [MODEL:LAYERS:DTYPE:SHARDING[:VOCABULARY] ...] [--processes 2]

A layer has the dimensions of MODEL (0.6B of Qwen3, 7B, 14B and 32B of Qwen2.5); there are fewer of them, and unless
asked otherwise the vocabulary is a tokenizer's of 17 characters, so that embeddings are next to nothing. Weights are
random. Two steps of GRPO with AdamW, two prompts a process of two samples each, activations recomputed, a group a
pass, on gloo. Peak: the largest resident memory (VmHWM, Linux) less what the process held before the model. `needed`
is the sum of `stages/training/memory.py` for weights, gradients and optimiser; its activations are for prompts of
1,024 tokens. The first process' peak may be that of writing checkpoints, for which it gathers whatever is in shares.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

import orjson

SHAPES = {  # hidden, intermediate, heads, heads of keys, width of a head
    "0.6B": (1024, 3072, 16, 8, 128),
    "7B": (3584, 18944, 28, 4, 128),
    "14B": (5120, 13824, 40, 8, 128),
    "32B": (5120, 27648, 40, 8, 128),
}
SPECS = ("0.6B:8:float32:none", "0.6B:8:float32:fsdp2", "7B:1:bfloat16:none", "7B:1:bfloat16:fsdp2")
STEP = {
    "steps": 2,
    "prompts_per_step": 4,
    "generations": 2,
    "micro_batch": 2,
    "threads": 1,
    "gradient_checkpointing": True,
}


def memory(field):
    """Bytes of this process: VmRSS now, VmHWM at most so far. Source: Linux, proc(5)."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(f"{field}:"))


def save(folder, name, layers, dtype, vocabulary):
    import torch
    from support.models import tiny_tokenizer
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, intermediate, heads, keys, width = SHAPES[name]
    tokenizer = tiny_tokenizer("abcdefghijkl\u0120")
    config = Qwen3Config(
        vocab_size=vocabulary or len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        head_dim=width,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        dtype=dtype,
    )
    torch.set_default_dtype(getattr(torch, dtype))
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def one(folder, sharding):
    """One of the processes; says its peak, and the first what the arithmetic gives."""
    from stages import train
    from stages.backends import ranks
    from stages.runs import runner
    from stages.training import sharded_trainer  # noqa: F401 - else it would be loaded after the model
    from stages.training.defaults import choose
    from stages.training.memory import needed

    config = train.Config(
        env={"name": "support.environments:GuessEnv"},
        policy={"model": str(folder / "model"), "max_tokens": 12},
        tasks=2,
        optimisation=STEP,
        adapter={"rank": 0},
        distribution={"sharding": sharding},
    )
    here = ranks.join()
    before = memory("VmRSS")
    if here.first:
        runner.execute("train", {}, config, root=folder, out=folder / "run")
    else:
        runner.follow("train", {}, config, root=folder)
    chosen = choose(config.policy, config.optimisation, config.adapter, None, config.distribution)
    sums = needed(chosen.shape, chosen._training(24))
    found = {
        "parameters": chosen.shape.parameters,
        "before": before,
        "peak": memory("VmHWM") - before,
        "needed": round(sums.weights + sums.gradients + sums.optimiser),
        "parts": [round(part) for part in (sums.weights, sums.gradients, sums.optimiser)],
    }
    (folder / f"{here.rank}.json").write_bytes(orjson.dumps(found))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("specs", nargs="*", default=SPECS)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--one", nargs=2, metavar=("FOLDER", "SHARDING"), help=argparse.SUPPRESS)
    parser.add_argument("--save", nargs=5, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.save:
        folder, name, layers, dtype, vocabulary = asked.save
        save(Path(folder) / "model", name, int(layers), dtype, int(vocabulary))
        return
    if asked.one:
        one(Path(asked.one[0]), asked.one[1])
        return
    here = [sys.executable, __file__]
    for spec in asked.specs:
        name, layers, dtype, sharding, *vocabulary = spec.split(":")
        with tempfile.TemporaryDirectory() as place:
            subprocess.run([*here, "--save", place, name, layers, dtype, *(vocabulary or "0")], check=True)
            count = ["-m", "torch.distributed.run", "--nproc-per-node", str(asked.processes), "--master-port", "29741"]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run([here[0], *count, here[1], "--one", place, sharding], env=environment, check=True)
            found = [orjson.loads((Path(place) / f"{rank}.json").read_bytes()) for rank in range(asked.processes)]
        peaks = [each["peak"] for each in found]
        print(orjson.dumps({"spec": spec, **found[0], "peak": max(peaks), "peaks": peaks}).decode(), flush=True)


if __name__ == "__main__":
    main()
