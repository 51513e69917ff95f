"""This checkout on a GPU: correctness, speed, memory, vLLM and the probe, each part a few minutes.

    ./dev gpu [correctness|speed|sampling|memory|vllm|probe ...] [--size 8B ...] [--layers N] [--device cuda]
    ./dev gpu wheels [--python-version 3.12]

Meant for a machine that has torch with a GPU and no network. `wheels`, on a machine with a network, collects what else
is needed into `.whl` (about 40 MB); the other parts install it from there into a temporary folder. The interpreter is
PYTHON, by default python3. Every model has random weights of a real shape.

correctness: every channel's loss and its gradient, a whole step, packed and unpacked log-probs, and sampling: on the
    GPU beside the CPU, in float32 without TF32.
speed: GRPO's step with LoRA of rank 16, alone and with all channels, beside TRL's on the same tokens: tokens a second,
    peak memory, share of the machine's own rate of matrix products; the five slowest operations.
sampling: sampled tokens a second with 8, 64 and 256 rows, the share of that time in which the GPU computes, and the
    five slowest operations on either side.
memory: the peak of a step, and of sampling, beside what is predicted.
vllm: the tests marked vllm, where `./dev vllm` has been run.
probe: gradients of single samples along a direction: time, and peak memory beside what is predicted.
rehearsed: memory beside what is predicted, and launches, of training, sampling and the probe on a GPU of shapes alone
    (rehearsal.py): tensors have shapes and no numbers, and every operation is counted. Needs no GPU and takes one to
    three minutes of a core for each --case, all by default; it is run where it is named.

Numbers are kept in benchmarks/results/gpu-PART.json, each as it is found. A case that ends with an error is shown and
counted as a missed goal, and the next one is measured.
"""

import argparse
import gc
import importlib
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]
import records

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
WHEELS = ROOT / ".whl"
# fmt: off
CARRIED = (
    "accelerate", "annotated-types", "anyio", "datasets", "dill", "filelock", "h11", "httpcore2", "httpx2",
    "huggingface_hub", "jaxtyping", "jinja2", "jiter", "multiprocess", "openai", "orjson", "peft", "pydantic",
    "pydantic_core", "safetensors", "sniffio", "tenacity", "tokenizers", "transformers", "trl", "truststore",
    "typing-inspection", "typing_extensions", "xxhash",
)
# fmt: on
"""Packages that a machine with torch may lack, in the versions of constraints.txt."""
IMPORTED = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "datasets",
    "pydantic",
    "orjson",
    "tenacity",
    "openai",
)
Case = Callable[[], Iterable[Any]]
"""What is measured apart from the others: it yields claims."""
HEADS = ((14, 2, 64), (16, 8, 128), (32, 8, 128))
"""Heads of queries, heads of keys and their width, of Qwen2.5-0.5B, Qwen3-0.6B and Qwen3-8B."""
GIB = 2**30
SMALL = 48 * GIB
"""A GPU with less memory is not given the largest size by default."""


@dataclass(frozen=True)
class Asked:
    """What a part is run with. device: of torch; `cpu` tries the script out. rounds: measured after two of warm-up."""

    device: str = "cuda"
    sizes: tuple[str, ...] = ()
    layers: int | None = None
    rounds: int = 3
    rows: int = 8
    prompt: int = 1024
    answer: int = 1024
    cases: tuple[str, ...] = ()

    def name(self, size: str) -> str:
        """Return the words of a claim for a size."""
        return f"Qwen3-{size}" + (f", {self.layers} layers" if self.layers else "")


# The device


def wait(asked: Asked) -> None:
    """Wait until the device has done its work."""
    import torch

    if asked.device.startswith("cuda"):
        torch.cuda.synchronize(asked.device)


def peak(asked: Asked) -> int:
    """Return the most bytes that tensors on the device took since `fresh`; 0 where that is not counted."""
    import torch

    return torch.cuda.max_memory_allocated(asked.device) if asked.device.startswith("cuda") else 0


@contextmanager
def fresh(asked: Asked) -> Iterator[None]:
    """Free what earlier measurements left, and count memory from here."""
    import torch

    gc.collect()
    if asked.device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(asked.device)
    yield
    gc.collect()


def timed(asked: Asked, do: Callable[[], Any], warm_up: int = 2) -> list[float]:
    """Return the seconds of each round, after some of warm-up."""
    found = []
    for _ in range(asked.rounds + warm_up):
        wait(asked)
        started = time.perf_counter()
        do()
        wait(asked)
        found.append(time.perf_counter() - started)
    return found[warm_up:]


# Correctness


def difference(ours: Any, reference: Any) -> float:
    """Return the norm of a difference beside that of the reference."""
    import torch

    one, other = (torch.as_tensor(x).detach().double().cpu().flatten() for x in (ours, reference))
    return float((one - other).norm() / other.norm().clamp_min(1e-30))


def both(asked: Asked, do: Callable[[Any, str], dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a function gives for the same random model in float32 on the device, and on the CPU."""
    import torch
    from shapes import new_model

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    models = ((new_model(0, None, "tiny", device, "float32"), device) for device in (asked.device, "cpu"))
    ours, reference = (do(model, device) for model, device in models)
    return ours, reference


def _few() -> Any:
    """Return the rows on which devices are compared."""
    from shapes import Rows

    return Rows(group=4, prompt=48, answer=96)


def losses(model: Any, device: str) -> dict[str, Any]:
    """Return every channel's loss and its gradient."""
    import shapes
    import torch

    names = shapes.SIDES["all"]
    rows = shapes.channel_rows(names, _few())
    teacher = shapes.new_model(1, None, "tiny", device, "float32").eval().requires_grad_(False)
    channels = shapes.channels(names, rows, model, teacher, 2)
    parameters, found = list(model.parameters()), dict[str, Any]()
    for name, loss in channels.losses(model, rows)[0].items():
        gradients = torch.autograd.grad(loss.loss, parameters, retain_graph=True, allow_unused=True)
        found[f"loss of {name}"] = loss.loss
        found[f"gradient of {name}"] = torch.cat([g.flatten() for g in gradients if g is not None])
    return found


def step(model: Any, device: str) -> dict[str, Any]:
    """Return the log-probs of packed and of separate rows, and how a step with all channels changes the weights."""
    import shapes
    import torch

    from composer_stages.training.scoring import Tree, score, token_log_probs

    trees = [Tree(shapes.ids(40, 1), tuple(shapes.ids(20 + 9 * i, 2 + i) for i in range(4)))]
    with torch.no_grad():
        packed = token_log_probs(model, score(model, trees))
        model.set_attn_implementation("eager")
        separate = token_log_probs(model, score(model, trees))
    with tempfile.TemporaryDirectory() as folder:
        trainer = shapes.trainer("all", folder, 1, None, None, "tiny", device, rows=_few(), dtype="float32")
        trained = [p for p in trainer.model.parameters() if p.requires_grad]
        torch.manual_seed(1)
        for p in trained:  # an adapter begins at 0, where most gradients are 0, too; drawn on the CPU
            p.data.copy_(torch.randn(p.shape) / 50)
        before, gradients = [p.detach().clone() for p in trained], list[Any]()
        trainer.add_callback(_gradients_into(gradients, trained))
        trainer.train()
        change = torch.cat([(p.detach() - b).flatten() for p, b in zip(trained, before, strict=True)])
    return {
        "log-probs of packed rows": packed,
        "log-probs of separate rows": separate,
        "gradient of a step with all channels": torch.cat([g.flatten() for g in gradients]),
        "change of a step with all channels": change,
    }


def _gradients_into(found: list[Any], trained: Sequence[Any]) -> Any:
    from transformers import TrainerCallback

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, **given: Any) -> None:
            found.extend(p.grad.detach().clone() for p in trained)

    return Look()


def sampled(model: Any, device: str) -> dict[str, Any]:
    """Return sampled ids and their log-probs, of two turns."""
    from shapes import ids

    from composer_stages.policy.sampling import PrefixCache, sample_batch

    del device
    prompts, prefixes, found = [ids(20 + i % 3, i % 3) for i in range(8)], PrefixCache(), list[Any]()
    for turn in range(2):
        seeds = [10 * turn + i for i in range(8)]
        settings: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "end_ids": {5, 9}, "pad_id": 0}
        found += sample_batch(model.eval(), prompts, seeds=seeds, prefixes=prefixes, **settings)
        prompts = [[*p, *drawn, 7] for p, (drawn, _) in zip(prompts, found[-8:], strict=True)]
    return {"tokens": [drawn for drawn, _ in found], "log-probs of samples": [x for _, logps in found for x in logps]}


def attention(asked: Asked) -> Iterator[Any]:
    """Yield whether packed rows attend by flash attention, and how exactly, in bfloat16, beside rows of their own."""
    import shapes
    import torch

    from composer_stages.training.packing import flash_agrees
    from composer_stages.training.scoring import Tree, score

    trees = [Tree(shapes.ids(40, 1), tuple(shapes.ids(20 + 9 * i, 2 + i) for i in range(4)))]
    exact = shapes.new_model(0, None, "tiny", "cpu", "float32")
    model = shapes.new_model(0, None, "tiny", asked.device, "bfloat16")
    with torch.no_grad():
        truth, packed = score(exact, trees).hidden, score(model, trees).hidden
        model.set_attn_implementation("eager")
        separate = score(model, trees).hidden
    config = model.config
    taken = flash_agrees(
        model.device, model.dtype, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    )
    beside = difference(packed, truth) / difference(separate, truth)
    yield records.measured("packed rows attend by flash attention (1), or by blocks (0)", float(taken), n=1)
    yield _small("packed rows in bfloat16: error beside that of separate rows", beside, 1.2)


def families(seed: int) -> list[tuple[list[int], list[list[int]]]]:
    """Return prompts with branches of random lengths, as a step of GRPO has them."""
    drawn = random.Random(seed)
    return [
        ([0] * drawn.randint(1, 300), [[0] * drawn.randint(1, 200) for _ in range(drawn.randint(1, 8))])
        for _ in range(drawn.randint(1, 6))
    ]


def large_scores(asked: Asked) -> Iterator[Any]:
    """Yield in how many layouts attention's gradients in bfloat16 are those of float32, with scores of some thousands.

    Kernels that mask a key's weight, and not its score, give NaN: the weight of a key that is not seen overflows.
    """
    import torch

    from composer_stages.training.packing import AGREEING, flash_agrees, laid_out, padded, ragged

    device = torch.device(asked.device, 0 if asked.device == "cuda" else None)
    layouts = 1 if asked.device == "cpu" else 20
    for heads, groups, width in HEADS:
        lay_out = ragged if flash_agrees(device, torch.bfloat16, heads, groups, width) else padded
        given = {"dropout": 0.0, "scaling": width**-0.5}
        module = SimpleNamespace(training=False, is_causal=True, num_key_value_groups=heads // groups)
        agree = 0
        for seed in range(layouts):
            ids, *_, segments = laid_out(families(seed))
            made = torch.Generator().manual_seed(seed)
            drawn = [torch.randn(1, n, len(ids), width, generator=made) for n in (heads, groups, groups)]
            numbers = [(one * size).bfloat16() for one, size in zip(drawn, (8, 200, 1), strict=True)]
            weight = torch.randn(len(ids), heads, width, generator=made).to(device)
            found = []
            for way, dtype in ((lay_out, torch.bfloat16), (padded, torch.float32)):
                states = [one.to(device, dtype).requires_grad_() for one in numbers]
                attended = way(segments, (), device, dtype)[1].attend(module, *states, **given)
                found.append([one.float() for one in torch.autograd.grad((attended.float() * weight).sum(), states)])
            agree += all(
                bool((one - exact).abs().max() <= AGREEING * exact.abs().max())
                for one, exact in zip(*found, strict=True)
            )
        shape = f"{heads} and {groups} heads of {width}"
        claim = f"layouts of rows in which attention's gradients agree with float32, scores of thousands, {shape}"
        yield records.measured(claim, agree, n=layouts, goal=f">= {layouts}")


def compared(asked: Asked, do: Callable[[Any, str], dict[str, Any]]) -> Iterator[Any]:
    """Yield how far the device's numbers are from the CPU's."""
    ours, reference = both(asked, do)
    for name, value in reference.items():
        # Adam divides by each gradient's own size, so a difference of tiny ones is a difference of their steps.
        most = 0.02 if name.startswith("change") else 1e-3
        yield _small(f"{name}: relative difference from the CPU", difference(ours[name], value), most)


def sampled_alike(asked: Asked) -> Iterator[Any]:
    """Yield how many answers are those of the CPU, and how far their log-probs are from the CPU's."""
    ours, reference = both(asked, sampled)
    same = [a == b for a, b in zip(ours["tokens"], reference["tokens"], strict=True)]
    yield records.measured("answers sampled as on the CPU, of two turns", sum(same), n=len(same), goal=">= 15")
    if all(same):
        name = "log-probs of samples"
        yield _small(f"{name}: relative difference from the CPU", difference(ours[name], reference[name]), 1e-3)


def correctness(asked: Asked, losses: Callable[[Any, str], dict[str, Any]] = losses) -> Iterator[Case]:
    """Yield the comparisons with the CPU. losses: of a model on a device, by name."""
    yield partial(attention, asked)
    yield partial(large_scores, asked)
    yield partial(compared, asked, losses)
    yield partial(compared, asked, step)
    yield partial(sampled_alike, asked)


def _small(claim: str, value: float, most: float) -> Any:
    return records.measured(claim, value, n=1, goal=f"<= {most}")


# Speed


def matmul_rate(asked: Asked) -> float:
    """Return the floating-point operations a second of a large product in bfloat16 on this device."""
    import torch

    side = 8192 if asked.device.startswith("cuda") else 256
    one = torch.randn(side, side, dtype=torch.bfloat16, device=asked.device)
    return float(2 * side**3 / statistics.median(timed(asked, lambda: one @ one)))


def train(asked: Asked, size: str, name: str) -> tuple[list[float], int, list[str]]:
    """Return the seconds of each step, the peak memory, and the five slowest operations of the last step."""
    import shapes
    import torch
    from transformers import TrainerCallback

    seconds, slowest = list[float](), list[str]()
    on_gpu = asked.device.startswith("cuda")

    class Clock(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, *more: Any, **given: Any) -> None:
            self.profile = None
            if state.global_step == asked.rounds + 2:  # one more step, as a profile takes time
                activity = torch.profiler.ProfilerActivity
                self.profile = torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU])
                self.profile.__enter__()
            wait(asked)
            self.started = time.perf_counter()

        def on_step_end(self, *args: Any, **given: Any) -> None:
            wait(asked)
            seconds.append(time.perf_counter() - self.started)
            if self.profile is not None:
                self.profile.__exit__(None, None, None)
                slowest.extend(_slowest(self.profile.key_averages(), on_gpu))

    rows = shapes.Rows(asked.rows, asked.prompt, asked.answer, turn=min(64, asked.answer))
    with fresh(asked), tempfile.TemporaryDirectory() as folder:
        trainer = shapes.trainer(name, folder, asked.rounds + 3, asked.layers, None, size, asked.device, rows=rows)
        trainer.add_callback(Clock())
        trainer.train()
        most = peak(asked)
        del trainer
    return seconds[2:-1], most, slowest


def _slowest(events: Iterable[Any], on_gpu: bool) -> list[str]:
    def took(event: Any) -> float:
        return float(event.self_device_time_total if on_gpu else event.self_cpu_time_total)

    most = sorted(events, key=took, reverse=True)[:5]
    return [f"{took(event) / 1e3:.1f} ms in {event.count} x {event.key[:70]}" for event in most]


def speed(asked: Asked) -> Iterator[Case]:
    """Yield the measurements of a step of each size beside TRL's."""
    rate = matmul_rate(asked)
    print(f"matrix products in bfloat16: {rate / 1e12:.1f} TFLOP/s")
    for size in asked.sizes:
        yield partial(_speed, asked, size, rate)


def _speed(asked: Asked, size: str, rate: float) -> Iterator[Any]:
    import shapes

    tokens = asked.rows * (asked.prompt + asked.answer)
    what = f"{asked.name(size)}, LoRA step of {asked.rows} x ({asked.prompt} + {asked.answer}) tokens"
    labels = {"TRL": "TRL", "ours": "ours", "all": "ours with all channels and a teacher"}
    theirs: list[float] = []
    for name, label in labels.items():
        seconds, most, slowest = train(asked, size, name)
        middle = statistics.median(seconds)
        # Forward, and backward through frozen weights; what is recomputed is no use of the machine.
        used = 4 * shapes.model_shape(size, asked.layers).parameters * tokens / middle / rate
        took = f"{middle:.2f} s, {tokens / middle:,.0f} tokens/s"
        print(f"{what}, {label}: {took}, {most / GIB:.1f} GiB, MFU {used:.2f}")
        print(*[f"    {line}" for line in slowest], sep="\n")
        yield records.measured(f"{what}, {label}: tokens a second", tokens / middle, n=len(seconds))
        yield records.measured(f"{what}, {label}: share of the rate of matrix products", used, n=len(seconds))
        if name == "TRL":
            theirs = seconds
        if name == "ours":
            goal = "<= 1.05" if asked.device.startswith("cuda") else None
            ratio = records.ratio(seconds, theirs)
            yield records.measured(f"{what}: time beside TRL's", *ratio, n=len(seconds), goal=goal)


# Sampling


def sample(asked: Asked, model: Any, most: int = 256) -> int:
    """Sample one answer of full length for each row of one prompt; return the number of tokens."""
    from shapes import ids

    from composer_stages.policy.sampling import sample_batch

    tokens = min(asked.answer, most)
    prompts = [ids(asked.prompt, 0)] * asked.rows
    seeds = list(range(asked.rows))
    sample_batch(model, prompts, seeds=seeds, max_tokens=tokens, temperature=1.0, end_ids={-1}, pad_id=0)
    return tokens * asked.rows


def sampling(asked: Asked) -> Iterator[Case]:
    """Yield the measurements of sampling with each size and number of rows."""
    for size in asked.sizes:
        for rows in (8, 64, 256) if asked.device.startswith("cuda") else (asked.rows,):
            yield partial(_sampling, replace(asked, rows=rows), size)


def _sampling(asked: Asked, size: str) -> Iterator[Any]:
    import torch
    from shapes import new_model

    on_gpu = asked.device.startswith("cuda")
    with fresh(asked):
        model = new_model(0, asked.layers, size, asked.device).eval()
        seconds = timed(asked, lambda: sample(asked, model, 64), warm_up=1)
        tokens = asked.rows * min(asked.answer, 64)
        what = f"{asked.name(size)}, {asked.rows} answers behind {asked.prompt} tokens"
        print(f"{what}: {tokens / statistics.median(seconds):,.0f} tokens/s")
        claim = f"{what}: sampled tokens a second"
        yield records.measured(claim, tokens / statistics.median(seconds), n=len(seconds))
        kinds = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[kinds.CPU, *([kinds.CUDA] if on_gpu else [])]) as profile:
            sample(asked, model, 8)
            wait(asked)
        events = profile.key_averages()
        print(*[f"    {line}" for side in {on_gpu, False} for line in _slowest(events, side)], sep="\n")
        if on_gpu:
            started = time.perf_counter()
            sample(asked, model, 8)
            wait(asked)
            took = time.perf_counter() - started
            busy = sum(event.self_device_time_total for event in events) / 1e6
            yield records.measured(f"{what}: share of the time in which the GPU computes", busy / took, n=1)


# Memory


def memory(asked: Asked) -> Iterator[Case]:
    """Yield the comparisons of predicted with measured peaks, of a step and of sampling."""
    for size in asked.sizes:
        yield partial(_memory_of_step, asked, size)
        yield partial(_memory_of_sampling, asked, size)


def _memory_of_step(asked: Asked, size: str) -> list[Any]:
    _, most, _ = train(replace(asked, rounds=1), size, "ours")
    what = f"{asked.name(size)}, LoRA step of {asked.rows} x ({asked.prompt} + {asked.answer}) tokens"
    return _predicted(what, predicted(asked, size).total, most)


def _memory_of_sampling(asked: Asked, size: str) -> list[Any]:
    import torch
    from shapes import new_model

    from composer_stages.policy.sampling import row_bytes

    with fresh(asked), torch.no_grad():
        model = new_model(0, asked.layers, size, asked.device).eval()
        weights = sum(p.nbytes for p in model.parameters())
        sample(asked, model)
        rows = asked.rows * row_bytes(model, asked.prompt + min(asked.answer, 256))
        return _predicted(f"{asked.name(size)}, sampling {asked.rows} rows", weights + rows, peak(asked))


def predicted(
    asked: Asked,
    size: str,
    *,
    teacher: bool = False,
    rank: int = 16,
    direction: int = 0,
    processes: int = 1,
    shares: bool = False,
    checkpointing: bool = True,
) -> Any:
    """Return the `MemoryEstimate` of a step.

    teacher: whether one of the same size is held besides. rank: of the adapters; 0 trains all weights. direction:
    tokens of the longest row of the direction that is taken out of the updates. processes: each has the rows. shares:
    whether weights are in shares over them, and a server samples. checkpointing: whether activations are recomputed.
    """
    from shapes import shape

    from composer_stages import train as stage
    from composer_stages.training.memory import estimate_memory
    from composer_stages.training.model_shape import Prompts
    from composer_stages.training.plan import resolve

    with tempfile.TemporaryDirectory() as folder:
        shape(size, asked.layers).save_pretrained(folder)
        optimisation = {"prompts_per_step": processes, "generations": asked.rows, "micro_batch": asked.rows}
        policy = {"model": folder, "device": asked.device}
        if shares:
            policy |= {"model": f"vllm:{folder}", "base_url": "http://127.0.0.1:8000/v1"}
        size_of = stage.Config(
            policy=policy,
            optimisation={**optimisation, "gradient_checkpointing": checkpointing, "shared_prompts": False},
            adapter={"rank": rank},
            distribution={"sharding": "fsdp2" if shares else "none"},
        )
        rows = {"prompts": Prompts(asked.prompt), "rollout_tokens": asked.answer}
        resolved = replace(resolve(size_of, processes, direction=direction), **rows)
        held = resolved.shape.parameters * resolved.shape.bytes if teacher and resolved.shape else 0
        return estimate_memory(replace(resolved, teacher_bytes=held))


def _predicted(what: str, sum_: float, most: int) -> list[Any]:
    if not most:
        print(f"{what}: {sum_ / GIB:.2f} GiB predicted; this device does not count")
        return []
    print(f"{what}: {sum_ / GIB:.2f} GiB predicted, {most / GIB:.2f} measured")
    claim = f"{what}: predicted beside measured peak memory"
    return [records.measured(claim, sum_ / most, n=1, goal=">= 1, <= 1.15")]


# vLLM


def vllm(asked: Asked) -> Iterator[Case]:
    """Yield the tests with a real server, where one is installed."""
    del asked
    if not (ROOT / ".vllm" / "bin" / "python").exists() and not os.environ.get("COMPOSER_VLLM"):
        print(
            "vllm: it is not installed here. Run `./dev vllm` on a machine with a network, or name it in COMPOSER_VLLM."
        )
    else:
        yield _vllm


def _vllm() -> Iterator[Any]:
    started = time.perf_counter()
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "vllm", "tests"]
    done = subprocess.run(words, cwd=ROOT, timeout=460)
    yield records.measured("tests with a real vLLM server: exit code", done.returncode, n=1, goal="= 0")
    took = time.perf_counter() - started
    yield records.measured("tests with a real vLLM server: seconds", took, n=1, unit="s", goal="<= 360")


# The probe


def probe(asked: Asked) -> Iterator[Case]:
    """Yield the measurements of the gradients of single samples, summed along a direction."""
    for size in asked.sizes:
        yield partial(_probe, asked, size)


def _probe(asked: Asked, size: str) -> Iterator[Any]:
    import torch
    from shapes import ids, model_shape, new_model

    from composer_stages.gradients.basis import open_adapter
    from composer_stages.gradients.per_row import TokenRow, adapt
    from composer_stages.policy.local import checkpointed
    from composer_stages.probe.direction import from_flat
    from composer_stages.probe.memory import MemoryInputs, needed
    from composer_stages.probe.metrics import stream

    half = asked.prompt // 2
    with fresh(asked):
        model = new_model(0, asked.layers, size, asked.device).eval()
        student = adapt(model, None, open_adapter("lora", model, None, 32, 0))
        rows = [TokenRow(ids(half, i), ids(half, 50 + i), [True] * half) for i in range(asked.rows)]
        student.max_tokens = asked.rows * 2 * half
        width = student.adapter.layout.width
        direction = from_flat(student.adapter.layout, torch.ones(width), student.adapter.probed)
        with checkpointed(student.model):
            seconds = timed(asked, lambda: stream(student, rows, direction, [1.0] * len(rows)), warm_up=1)
        most = peak(asked)
    tokens = asked.rows * 2 * half
    measuring = MemoryInputs("lora", 32, tokens, True, rows=0)
    what = f"{asked.name(size)}, gradients of {asked.rows} rows of {2 * half} tokens"
    yield from _predicted(what, needed(model_shape(size, asked.layers), measuring).total, most)
    print(f"{what}: {statistics.median(seconds):.2f} s")
    yield records.measured(f"{what}: tokens a second", tokens / statistics.median(seconds), n=len(seconds))


def probe_table() -> list[str]:
    """Return the lines of docs/probe-method.md with the memory that the probe is predicted to take."""
    from shapes import QWEN3, model_shape

    from composer_stages.probe.memory import MemoryInputs, needed

    lines = []
    for size in ("0.6B", "4B"):
        for asked in (
            MemoryInputs("antipasto_full", 8, 8192, True, rows=16),  # 16 rows are a step's whole gradients, 0 sums
            MemoryInputs("antipasto_full", 8, 2048, False, rows=16),
            MemoryInputs("lora_frozenA", 32, 8192, True),
            MemoryInputs("lora", 32, 8192, True),
            MemoryInputs("lora", 32, 8192, True, rows=16),
        ):
            need, rank = needed(model_shape(size, None), asked), "all" if asked.adapter == "antipasto_full" else 32
            parts = (need.weights, need.change, need.basis, need.gradients, need.activations, need.total)
            what = f"{QWEN3[size]['hidden_size']} x {QWEN3[size]['num_hidden_layers']} | {asked.adapter} | {rank}"
            rows = f"{asked.rows} | {asked.tokens}{'' if asked.checkpointing else ', none'}"
            lines.append(f"| {what} | {rows} | {' | '.join(f'{part / GIB:.1f}' for part in parts)} |")
    return lines


# A rehearsed GPU


SCENARIOS = ROOT / "benchmarks" / "scenarios.py"
SIZES = ("0.6B", "4B", "8B", "14B")
REHEARSED = {
    **{
        name.format(size): (f"Qwen3-{size}, {what.format(size)}", call.format(size))
        for name, what, call, sizes in (
            ("GRPO {}", "GRPO step of 8 x (128 + 512) tokens", 'step("ours", "{}", None)', SIZES),
            (
                "GRPO {}, long",
                "GRPO step of 8 x (1,024 + 2,048) tokens",
                'step("ours", "{}", None, prompt=1024, answer=2048)',
                ("0.6B", "8B"),
            ),
            (
                "GRPO {}, kept",
                "GRPO step of 8 x (128 + 512) tokens, activations kept",
                'step("ours", "{}", None, checkpointing=False)',
                ("0.6B", "8B"),
            ),
            ("all {}", "step of all channels with a teacher of {}", 'step("all", "{}", None)', SIZES),
            (
                "weights {}",
                "GRPO step of all weights, 8 x (128 + 512) tokens",
                'step("ours", "{}", None, rank=0)',
                SIZES[:3],
            ),
            (
                "projected {}",
                "GRPO step that a direction is taken out of",
                'step("ours", "{}", None, project=True)',
                ("0.6B", "8B"),
            ),
            (
                "sampling {}",
                "sampling of 32 x (1,024 + 32) tokens",
                'sampling("{}", None, rows=32, prompt=1024, tokens=32)',
                SIZES,
            ),
            ("probe {}", "gradients of 4 x 256 tokens", 'probe("lora", "{}", None)', ("0.6B", "4B", "14B")),
        )
        for size in sizes
    },
    "GRPO Gemma-2": (
        "Gemma-2-2B, GRPO step of 2 x (1,024 + 3,072) tokens, all scores of eager attention",
        'step("ours", "Gemma-2-2B", None, prompt=1024, answer=3072, group=2)',
    ),
    "GRPO Gemma-2, kept": (
        "Gemma-2-2B of 4 layers, GRPO step of 2 x (512 + 1,536) tokens, activations kept",
        'step("ours", "Gemma-2-2B", 4, prompt=512, answer=1536, group=2, checkpointing=False)',
    ),
    "six 14B": (
        "Qwen3-14B, GRPO step of 8 x 640 tokens on one of six processes",
        'step("ours", "14B", None, processes=6)',
    ),
    **{
        f"shares {size} of {count}, {rank}": (
            f"4 layers of Qwen3-{size}, GRPO step of 8 x 640 tokens, {what} in shares of {count}",
            f'step("ours", "{size}", 4, rank={rank}, processes={count}, shares=True)',
        )
        for size in ("8B", "32B")
        for count in (2, 8)
        for rank, what in ((0, "all weights"), (16, "an adapter's base"))
    },
    "probe 0.6B, lora_frozenA": (
        "Qwen3-0.6B, gradients of 4 x 256 tokens by lora_frozenA",
        'probe("lora_frozenA", "0.6B", None)',
    ),
    "probe 8B": ("Qwen3-8B, gradients of 4 x 2,048 tokens", 'probe("lora", "8B", None, tokens=2048)'),
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


def rehearsed(asked: Asked) -> Iterator[Case]:
    """Yield the rehearsals of memory, predicted beside tracked, and launches, that are asked for."""
    for name in asked.cases or REHEARSED:
        yield partial(_rehearsed, name)


def _rehearsed(name: str) -> Iterator[Any]:
    what, call = REHEARSED[name]
    found = rehearse(call)[call]
    gib, ratio = found["peak"] / GIB, found["predicted"] / found["peak"]
    print(f"{what}: {gib:.2f} GiB tracked, {ratio:.3f} of it predicted, {found['launches']:,} launches", flush=True)
    yield records.measured(f"{what}: tracked peak memory", gib, n=1, unit="GiB")
    yield records.measured(f"{what}: predicted beside tracked memory", ratio, n=1, goal=">= 1, <= 1.15")
    if "held" in found:  # a server that sleeps while a step trains has the rest between steps
        ratio = found["held_predicted"] / found["held"]
        print(f"{what}: {found['held'] / GIB:.2f} GiB between steps, {ratio:.3f} of it predicted")
        yield records.measured(f"{what}: predicted beside tracked memory between steps", ratio, n=1, goal=">= 0.99")
    yield records.measured(f"{what}: launches", found["launches"], n=1)
    if name == "GRPO 8B":
        beside = found["launches"] / rehearse(TRLS)[TRLS]["launches"]
        yield records.measured(f"{what}: launches beside TRL's step", beside, n=1, goal="<= 1.5")


PARTS: dict[str, Callable[..., Iterator[Case]]] = {
    "correctness": correctness,
    "speed": speed,
    "sampling": sampling,
    "memory": memory,
    "vllm": vllm,
    "probe": probe,
    "rehearsed": rehearsed,
}
USUAL = {
    "speed": ("0.6B", "4B", "8B"),
    "sampling": ("0.6B", "8B"),
    "memory": ("0.6B", "4B", "8B"),
    "probe": ("0.6B", "4B"),
}


# What is missing on the machine


def wheels(version: str) -> int:
    """Download what a machine with torch alone may lack into `.whl`, for Linux on x86-64; return an exit code."""
    pinned = dict(
        line.strip().split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )
    names = {name.lower().replace("_", "-"): number.strip("=").split(";")[0].strip() for name, number in pinned.items()}
    wanted = [f"{n}=={names[n.replace('_', '-')]}" for n in CARRIED if n.replace("_", "-") in names]
    systems = [f"--platform=manylinux{name}_x86_64" for name in ("_2_28", "_2_27", "_2_17", "2014", "1")]
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(WHEELS),
    ]
    done = subprocess.run([*pip, f"--python-version={version}", "--implementation=cp", *systems, *wanted])
    if done.returncode == 0:
        held = list(WHEELS.glob("*.whl"))
        print(f"{len(held)} wheels, {sum(path.stat().st_size for path in held) / 1e6:.0f} MB, are in {WHEELS.name}.")
    return done.returncode


def missing(imported: Sequence[str]) -> list[str]:
    """Return the packages that cannot be imported, in a fresh look at the path."""
    importlib.invalidate_caches()
    return [name for name in imported if importlib.util.find_spec(name) is None]


def provide(imported: Sequence[str] = IMPORTED, wheels: Path = WHEELS) -> str | None:
    """Install the wheels where packages are missing; return in a sentence what is still missing."""
    if not missing(imported):
        return None
    if held := sorted(wheels.glob("*.whl")):
        folder = tempfile.mkdtemp(prefix="composer-gpu-")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run([*pip, "--target", folder, *map(str, held)], check=True)
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    if left := missing(imported):
        return (
            f"{sys.executable} lacks {', '.join(left)}. Run `./dev gpu wheels` on a machine with a network, and bring "
            f"the folder {wheels.name} here, or name another interpreter: PYTHON=... ./dev gpu."
        )
    return None


def device_of(name: str) -> str | None:
    """Return in a sentence why a device cannot be used; None where it can."""
    import torch

    if name.startswith("cuda") and not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} finds no GPU. Take a machine with one, or try the script out with --device cpu."
        )
    return None


def run(part: str, asked: Asked, **replaced: Any) -> int:
    """Run one part in this process and keep its numbers; return how many goals were missed.

    replaced: arguments of the part that replace its defaults.
    """
    sizes = asked.sizes or USUAL.get(part, ())
    if part in USUAL and not asked.sizes and asked.device.startswith("cuda"):
        import torch

        if torch.cuda.get_device_properties(asked.device).total_memory < SMALL:
            sizes = sizes[:-1]
    started, num, missed = time.perf_counter(), 0, 0
    for case in PARTS[part](replace(asked, sizes=tuple(sizes)), **replaced):
        try:
            for claim in case():
                records.write(f"gpu-{part}", [claim])
                num += 1
                if claim.outcome == "missed":
                    missed += 1
                    print(f"missed: {claim.claim}: {claim} ({claim.goal})")
        except Exception:  # time on a GPU may be short: one error must not cost the numbers of the other cases
            traceback.print_exc()
            missed += 1
            print(f"missed: a case of {part} ended with this error", flush=True)
    print(f"{part}: {num} numbers in {time.perf_counter() - started:.0f} s", flush=True)
    return missed


def main() -> int:
    """Run the parts that are named, all by default, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; or wheels")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--size", action="append", default=[], help="tiny, 0.6B, 4B, 8B or 14B, of speed, sampling, memory, probe"
    )
    parser.add_argument("--layers", type=int, help="fewer, for a look that takes less time")
    parser.add_argument("--rounds", type=int, default=Asked.rounds)
    parser.add_argument("--rows", type=int, default=Asked.rows)
    parser.add_argument("--prompt", type=int, default=Asked.prompt)
    parser.add_argument("--answer", type=int, default=Asked.answer)
    parser.add_argument("--case", action="append", default=[], help=f"of rehearsed: {', '.join(REHEARSED)}")
    parser.add_argument("--python-version", default="3.12", help="of the machine that `wheels` are for")
    given = parser.parse_args()
    if given.parts == ["wheels"]:
        return wheels(given.python_version)
    if unknown := [part for part in given.parts if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}, and wheels")
    if unknown := [case for case in given.case if case not in REHEARSED]:
        parser.error(f"there is no case {unknown[0]!r}; there are {', '.join(REHEARSED)}")
    if (why := provide()) or (given.parts != ["rehearsed"] and (why := device_of(given.device))):
        print(why, file=sys.stderr)
        return 2
    parts = given.parts or [part for part in PARTS if part != "rehearsed"]
    if len(parts) > 1:  # memory is measured in a process that holds nothing else
        options = [word for word in sys.argv[1:] if word not in PARTS]
        codes = {p: subprocess.run([sys.executable, __file__, p, *options]).returncode for p in parts}
        print(json.dumps(codes))
        return max(codes.values())
    sizes, cases = tuple(given.size), tuple(given.case)
    asked = Asked(given.device, sizes, given.layers, given.rounds, given.rows, given.prompt, given.answer, cases)
    return int(run(parts[0], asked) > 0)


if __name__ == "__main__":
    sys.exit(main())
