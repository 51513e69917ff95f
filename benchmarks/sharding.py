"""Peak memory of a process that trains all weights, whole (data parallel) or in shares (FSDP2), on two processes.

    python benchmarks/sharding.py memory [--specs MODEL:LAYERS:DTYPE:SHARDING[:VOCABULARY] ...] [--processes 2]
    python benchmarks/sharding.py step [--spec 7B:1:bfloat16] [--seed 0]

A layer has the dimensions of MODEL (0.6B of Qwen3, 7B, 14B and 32B of Qwen2.5); there are fewer of them, and unless
asked otherwise the vocabulary is a tokenizer's of 17 characters, so that embeddings are next to nothing. Weights are
random. Two steps of GRPO with AdamW, two prompts a process of two samples each, activations recomputed, a group a
pass, on gloo. Peak: the largest resident memory (VmHWM, Linux) less what the process held before the model. `needed`
is the sum of `stages/training/plan.py` for weights, gradients, optimiser and what is gathered; its activations are for
prompts of 1,024 tokens. The first process' peak may be that of writing checkpoints, for which it gathers whatever is in
shares.

`step` takes one step of gradient descent whole in one process and in shares of two, from the same weights, and
tells how far apart loss, gradient norm and the movement of the weights are, beside what another cut of the same rows
into passes makes in one process, which is rounding alone. `other actions` counts rollouts that were sampled otherwise,
as 16 bits may have it; where it is not 0, another seed compares like with like.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import cases
import orjson
from records import Claim, measured

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


def save(folder, name, layers, dtype, vocabulary):
    """Write a model with random weights; in a process of its own, which ends with what it held."""
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
    Qwen3ForCausalLM(config).save_pretrained(f"{folder}/model")
    tokenizer.save_pretrained(f"{folder}/model")


def one(folder, sharding, name="run", more=None):
    """One of the processes; says its peak, and the first what the arithmetic gives. more: on top of `STEP`."""
    from stages import train
    from stages.backends import ranks
    from stages.runs import runner
    from stages.training import report  # noqa: F401 - else it would be loaded after the model
    from stages.training.plan import estimate_memory, resolve

    more = dict(more or {})
    config = train.Config(
        seed=more.pop("seed", 0),
        env={"name": "support.environments:GuessEnv"},
        policy={"model": str(folder / "model"), "max_tokens": 12},
        tasks=2,
        trl={"optim": more.pop("optim")} if "optim" in more else {},
        optimisation=STEP | more,
        adapter={"rank": 0},
        distribution={"sharding": sharding},
    )
    here = ranks.join()
    before = cases.memory("VmRSS")
    if here.first:
        runner.execute("train", {}, config, root=folder, out=folder / name)
    else:
        runner.execute_as_peer("train", {}, config, root=folder)
    chosen = resolve(config, here.count)
    sums = estimate_memory(replace(chosen, rollout_tokens=24))
    found = {
        "parameters": chosen.shape.parameters,
        "before": before,
        "peak": cases.memory("VmHWM") - before,
        "needed": round(sums.weights + sums.gradients + sums.optimiser + sums.gathered),
        "parts": [round(part) for part in (sums.weights, sums.gradients, sums.optimiser, sums.gathered)],
    }
    (folder / f"{here.rank}.json").write_bytes(orjson.dumps(found))


def trained(place, sharding, processes, name="run", more=None):
    """Train what lies in a folder, by torchrun."""
    count = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", "29741"]
    own = ["one-of-many", place, sharding, name, orjson.dumps(more or {}).decode()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *count, __file__, *own], env=environment, check=True)


def step(spec: str = SPECS[-1].rpartition(":")[0], seed: int = 0) -> Iterator[Claim]:
    """How far a step in shares of two processes, and in other passes, moves the weights from where one process does."""
    from stages.runs.kinds import STEP as STEPS
    from stages.runs.run import Run

    name, layers, dtype = spec.split(":")
    ways = {"whole": ("none", 1, 2), "in shares of two": ("fsdp2", 2, 2), "whole, other passes": ("none", 1, 4)}
    with tempfile.TemporaryDirectory() as place:
        cases.apart(save, place, name, int(layers), dtype, 0)
        first = None
        for number, (way, (sharding, processes, rows)) in enumerate(ways.items()):
            size = {"steps": 1, "learning_rate": 0.05, "micro_batch": rows, "optim": "sgd", "seed": seed}
            size["max_grad_norm"] = 1e9  # no clipping: the norm, summed in float32, is 3e-5 off
            trained(place, sharding, processes, str(number), size)
            run = Run(Path(place) / str(number))
            lines = (run.path / "metrics.jsonl").read_bytes().splitlines()
            told = {key: orjson.loads(lines[0])[key] for key in ("loss", "grad_norm")}
            told["way"], first = way, first or run
            if run is not first:
                said = [[row["action"] for row in each.rows(STEPS)] for each in (first, run)]
                told["other actions"] = sum(ours != theirs for ours, theirs in zip(*said, strict=True))
                told |= apart(Path(place) / "model", first, run)
            print(orjson.dumps({"spec": spec, **told}).decode(), flush=True)
            if run is not first:
                claim = f"one step of {spec}, {way}: distance of the movement of all weights from one process'"
                yield measured(claim, told["share"], n=1)


def apart(start, one, other):
    """How far a step moved the weights, and by how much two runs of it differ: Euclidean, and the largest weight."""
    import torch
    from safetensors import safe_open

    from stages.runs.kinds import CHECKPOINT

    files = [start / "model.safetensors", *(run.folder(CHECKPOINT) / "model.safetensors" for run in (one, other))]
    moved = differs = largest = 0.0
    opened = [safe_open(file, "pt") for file in files]
    for name in opened[0].keys():  # noqa: SIM118 - no dict
        before, ours, theirs = (file.get_tensor(name).float() for file in opened)
        moved += float(torch.sum((ours - before).double() ** 2))
        differs += float(torch.sum((theirs - ours).double() ** 2))
        largest = max(largest, float((theirs - ours).abs().max()))
    return {"moved": moved**0.5, "apart": differs**0.5, "share": (differs / moved) ** 0.5, "largest": largest}


def memory(specs: tuple[str, ...] = SPECS, processes: int = 2) -> Iterator[Claim]:
    """Peak memory of a training on several processes, and beside the estimate."""
    for spec in specs:
        name, layers, dtype, sharding, *vocabulary = spec.split(":")
        with tempfile.TemporaryDirectory() as place:
            cases.apart(save, place, name, int(layers), dtype, int(*vocabulary or "0"))
            trained(place, sharding, processes)
            found = [orjson.loads((Path(place) / f"{rank}.json").read_bytes()) for rank in range(processes)]
        peaks = [each["peak"] for each in found]
        print(orjson.dumps({"spec": spec, **found[0], "peak": max(peaks), "peaks": peaks}).decode(), flush=True)
        what = f"two steps of {spec}, {processes} processes"
        yield measured(f"{what}: peak memory", max(peaks) / 1e6, unit="MB", n=processes)
        yield measured(f"{what}: peak beside the estimate", max(peaks) / found[0]["needed"], n=processes)


CASES = {"memory": memory, "step": step}

if __name__ == "__main__":
    if sys.argv[1:2] == ["one-of-many"]:  # as torchrun starts it
        place, sharding, name, more = sys.argv[2:]
        one(Path(place), sharding, name, orjson.loads(more))
    else:
        cases.main(__file__, CASES)
