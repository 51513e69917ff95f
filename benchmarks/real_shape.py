"""One LoRA step on the shape of Qwen3-0.6B in bfloat16, on a CPU: ours beside TRL's, time and peak memory.

    python benchmarks/real_shape.py [NAME ...] [--steps 2] [--threads 2] [--layers 28] [--budget TOKENS]

Weights are random. The rollouts, 128 tokens of prompt and 512 of answer, are given to both sides, so that a step is
scoring, loss, backward and optimiser; activations are recomputed. Each name is measured in a process of its own, whose
largest resident memory since it began is its peak (VmHWM, Linux).

`TRL` and `ours` are GRPO alone. `pairs` adds DPO, SimPO and SFT on 4 pairs of 128 + 64 tokens, `hints` SDPO on the
first 64 tokens of each rollout, `all` both of them, and TAID and EOPD on all rollouts towards a teacher of the same
shape, whose weights it also holds; `loaded` says what the process held before its first step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]
import records

PAIRS, HINT = 4, 32
ALONE = {"TRL": (), "ours": ()}
WITH = {
    "pairs": ("dpo", "simpo", "sft"),
    "hints": ("sdpo",),
    "all": ("dpo", "simpo", "sft", "sdpo", "taid", "eopd"),
}
SIDES: dict[str, tuple[str, ...]] = ALONE | WITH
WHAT = {
    "TRL": "TRL's GRPO",
    "ours": "GRPO",
    "pairs": "GRPO, DPO, SimPO and SFT",
    "hints": "GRPO and SDPO",
    "all": "GRPO, all six channels and a teacher",
}
MIB = 2**20


@dataclass(frozen=True)
class Rows:
    """The rollouts of a step. group: how many; prompt, answer, turn (a hinted one, or a side of a pair): tokens."""

    group: int = 8
    prompt: int = 128
    answer: int = 512
    turn: int = 64


ROWS = Rows()
THRESHOLD = os.environ.get("MALLOC_MMAP_THRESHOLD_")
"""Of glibc: the size from which a block is mapped by itself; a training sets it (stages/backends/resources.py)."""


def memory(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most so far. Source: Linux, proc(5)."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(f"{field}:"))


QWEN3 = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "14B": {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40},
}
"""Of the models' cards, of which the two small ones tie their embeddings to their heads; `tiny` is for a first look."""


def shape(size: str, layers: int | None = None) -> Any:
    """The configuration of a model of this size in bfloat16, with all of its layers or the first few."""
    from transformers import Qwen3Config

    tiny = size == "tiny"
    return Qwen3Config(
        vocab_size=512 if tiny else 151_936,
        head_dim=16 if tiny else 128,
        num_key_value_heads=2 if tiny else 8,
        max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=size in ("tiny", "0.6B", "4B"),
        dtype="bfloat16",
        architectures=["Qwen3ForCausalLM"],
        **QWEN3[size] | ({} if layers is None else {"num_hidden_layers": layers}),
    )


def new_model(seed: int, layers: int | None, size: str = "0.6B", device: str = "cpu", dtype: str = "bfloat16") -> Any:
    """Random weights of the true shape on a device; 0.6B has 596 million parameters in 28 layers.

    Those of `tiny` are equal on all devices: they are drawn on the CPU.
    """
    import torch
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device("cpu" if size == "tiny" else device):
            return Qwen3ForCausalLM(shape(size, layers)).to(device)
    finally:
        torch.set_default_dtype(before)


def ids(count: int, seed: int) -> list[int]:
    """Token ids that the tokenizer of the tests knows, too."""
    import torch

    return torch.randint(3, 250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def rollouts(rows: Rows) -> dict[str, list[Any]]:
    """One group, in the form that TRL wants of a rollout function."""
    return {
        "prompt_ids": [ids(rows.prompt, 0)] * rows.group,
        "completion_ids": [ids(rows.answer, 1 + i) for i in range(rows.group)],
        "logprobs": [[-12.0] * rows.answer] * rows.group,
        "env_mask": [[1] * rows.answer] * rows.group,
        "environment_reward": [float(i % 2) for i in range(rows.group)],
    }


class Given:
    """In the place of `stages.training.rollouts.Rollouts`: nothing is sampled, and every step has the same rollouts."""

    policy, corrected = None, False

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def take(self, step: int) -> tuple[list[Any], dict[str, float]]:
        """One group, of one turn each."""
        from stages.envs.base import Grade, Observation, Task
        from stages.policy.base import Sample
        from stages.rollouts.agent_loop import LiveRollout, Step

        given, played = rollouts(self._rows), []
        for i, (prompt, completion, logprobs, reward) in enumerate(
            zip(*(given[x] for x in ("prompt_ids", "completion_ids", "logprobs", "environment_reward")), strict=True)
        ):
            sample = Sample(prompt_ids=prompt, completion_ids=completion, logprobs=logprobs)
            turn = Step([], 1, "", sample, Observation(""), 0)
            task = Task("0", "shape", "train", "0", "a", {})
            played.append(LiveRollout(task, i, 0, steps=[turn], grade=Grade(reward=reward)))
        return played, {}

    def close(self) -> None:
        """Nothing is left."""


class Unwritten:
    """In the place of a run: what is written to it is lost."""

    def write(self, unit: str, record: dict[str, Any]) -> None:
        """Write nothing."""


def hack_pairs(rows: Rows) -> list[list[dict[str, Any]]]:
    """Two pairs of a hack and a clean answer, as a run of `composer probe extract-vhack` records them."""
    return [
        [
            {
                "prompt_ids": ids(rows.prompt, 400 + i),
                "completion_ids": ids(rows.turn, side + i),
                "own": [True] * rows.turn,
            }
            for side in (500, 600)
        ]
        for i in range(2)
    ]


def channel_rows(names: tuple[str, ...], rows: Rows = ROWS) -> Any:
    """The rows of the channels; those that no channel uses are left out."""
    from stages.training.channels import row_sources
    from stages.training.channels.hints import HintedTurn
    from stages.training.channels.pairs import TokenPair
    from stages.training.channels.rollouts import OwnRollout
    from stages.training.scoring import Tree
    from stages.training.step import Batch

    pairs = [
        TokenPair(str(i), Tree(ids(rows.prompt, 100 + i), (ids(rows.turn, 200 + i), ids(rows.turn, 300 + i))))
        for i in range(PAIRS)
    ]
    given, hint = rollouts(rows), ids(HINT, 2)
    sampled = list(zip(given["prompt_ids"], given["completion_ids"], strict=True))
    hinted = [
        HintedTurn(Tree(prompt, (answer[: rows.turn],)), Tree([*prompt, *hint], (answer[: rows.turn],)))
        for prompt, answer in sampled
    ]
    own = [OwnRollout(Tree(prompt, (answer,)), [1] * rows.answer, [-12.0] * rows.answer) for prompt, answer in sampled]
    every = {"pairs": pairs, "hinted": hinted, "rollouts": own}
    return Batch({kind.name: every[kind.name] for kind in row_sources(names)})


def channels(names: tuple[str, ...], rows: Any, model: Any, teacher: Any, num_steps: int) -> Any:
    """The channels of these names at weight 1, on rows of `channel_rows`; the model is their reference, too."""
    from stages.training.channels.hints import HintSource
    from stages.training.channels.pairs import PairSource
    from stages.training.channels.rollouts import RolloutSource
    from stages.training.config import Config, Hints
    from stages.training.step import Channels

    pairs = PairSource(list(rows.of("pairs")), per_step=PAIRS, seed=0)
    if pairs.pairs:
        pairs.cache_reference(model.eval())
    config = Config(
        weights=dict.fromkeys(names, 1.0),
        pairs={"per_step": PAIRS},
        teacher={"model": "teacher"},
        optimisation={"steps": num_steps},
    )
    return Channels(config, [pairs, HintSource(Hints(), None, None, lambda step, found: None), RolloutSource(teacher)])


def model_shape(size: str, layers: int | None) -> Any:
    """The shape of a model as the estimators of memory see it."""
    from stages.policy.base import PolicyConfig
    from stages.training import plan

    with tempfile.TemporaryDirectory() as folder:
        shape(size, layers).save_pretrained(folder)
        return plan.model_shape(PolicyConfig(model=folder))


def trainer(
    name: str,
    folder: str,
    steps: int,
    layers: int | None,
    budget: int | None,
    size: str = "0.6B",
    device: str = "cpu",
    *,
    rows: Rows = ROWS,
    dtype: str = "bfloat16",
    names: tuple[str, ...] | None = None,
    rank: int = 16,
    project: bool = False,
    ranks: Any = None,
    checkpointing: bool = True,
) -> Any:
    """TRL's trainer, or ours with the channels of this name (or with others), on the same arguments.

    rank: of the adapters; 0 trains all weights, as float32 masters under autocast. project: whether ours takes a
    direction out of its updates, which it finds first, from two pairs. ranks: the processes of a training of ours, over
    which all weights are in shares. checkpointing: whether activations are recomputed.
    """
    from datasets import Dataset
    from support.models import tiny_tokenizer
    from trl import GRPOTrainer

    from stages.backends import resources
    from stages.policy.base import PolicyConfig
    from stages.policy.local import LocalPolicy, checkpointed
    from stages.training import projection, trl_arguments
    from stages.training.config import AdapterSettings, Optimisation, Probe
    from stages.training.rollouts import environment_reward
    from stages.training.step import ComposedTrainer

    settings = Optimisation(
        steps=steps,
        prompts_per_step=1,
        generations=rows.group,
        learning_rate=1e-5,
        gradient_checkpointing=checkpointing,
        save_every=steps + 1,
    )
    model, tokenizer = new_model(0, layers, size, device, dtype if rank or ranks else "float32"), tiny_tokenizer()
    callbacks: list[Any] = []
    if project:
        with checkpointed(model):
            direction = projection.weight_direction(model, hack_pairs(rows))
        callbacks.append(projection.ProjectionCallback(direction, Probe(), 0, Unwritten()))  # type: ignore[arg-type]
    common = {
        "args": trl_arguments.trl_config(
            folder,
            settings,
            seed=0,
            temperature=1.0,
            max_completion=rows.answer,
            device=device,
            mixed=not rank,
        ),
        "peft_config": trl_arguments.lora(AdapterSettings(rank=rank), model),
        "callbacks": callbacks,
    }
    if name == "TRL":
        return GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=environment_reward,
            rollout_func=lambda prompts, trainer: rollouts(rows),
            train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "a"}]}] * steps),
            **common,
        )
    if device == "cpu":
        resources.set_mmap_threshold()  # as stages/train.py for models that are not small
    names, teacher = SIDES[name] if names is None else names, None
    if "taid" in names:
        teacher = new_model(1, layers, size, device, dtype).eval().requires_grad_(False)
    beside, make = channel_rows(names, rows), partial(ComposedTrainer)
    if ranks is not None:
        common["ranks"] = ranks
        if not rank:
            from stages.training.distributed import Sharded, ShardedTrainer

            sharded = Sharded(model, ranks, mixed=True)
            make = partial(ShardedTrainer, sharded=sharded)
    return make(
        policy=LocalPolicy(model, tokenizer, PolicyConfig(model="shape", max_tokens=rows.answer)),
        rollouts=Given(rows),
        record=lambda step, rollouts: None,
        channels=channels(names, beside, model, teacher, steps),
        rows=lambda rollouts, step: beside,
        gradient_cosine_every=0,
        max_tokens=budget,
        **common,
    )


def measured(name: str, steps: int, threads: int, layers: int, budget: int | None = None) -> dict[str, Any]:
    """Seconds of each step, by the clock and of the processors, and bytes before the first one and at most."""
    import torch
    from transformers import TrainerCallback

    seconds: list[float] = []
    processor: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **more: Any) -> None:
            self.started, self.used = time.perf_counter(), time.process_time()

        def on_step_end(self, *args: Any, **more: Any) -> None:
            seconds.append(time.perf_counter() - self.started)
            processor.append(time.process_time() - self.used)

    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        made = trainer(name, folder, steps, layers, budget)
        made.add_callback(Clock())
        loaded = memory("VmRSS")
        made.train()
    return {"seconds": seconds, "processor": processor, "loaded": loaded, "peak": memory("VmHWM")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*SIDES, []], help="all of them, if none is named")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--layers", type=int, default=28, help="fewer for a look that takes less time")
    parser.add_argument("--budget", type=int, help="ours: optimisation.max_tokens_per_micro_batch")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.here:
        print(json.dumps(measured(asked.names[0], asked.steps, asked.threads, asked.layers, asked.budget)))
        return
    found = {}
    for name in asked.names or SIDES:
        words = [sys.executable, __file__, name, "--here", f"--steps={asked.steps}", f"--threads={asked.threads}"]
        words += [f"--layers={asked.layers}", *([] if asked.budget is None else [f"--budget={asked.budget}"])]
        environment = {**os.environ, "OMP_NUM_THREADS": str(asked.threads)}
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=environment)
        found[name] = json.loads(done.stdout.splitlines()[-1])
        one = found[name]
        clock, used = statistics.median(one["seconds"]), statistics.median(one["processor"])
        loaded, peak = (f"{one[which] / MIB:.0f} MiB" for which in ("loaded", "peak"))
        print(
            f"{name:<6}{clock:>8.1f} s a step, {used:.1f} s of processor time, loaded {loaded}, peak {peak}", flush=True
        )
        if "TRL" in found:
            longer = statistics.median(one["processor"]) / statistics.median(found["TRL"]["processor"])
            peak = one["peak"] / found["TRL"]["peak"]
            print(f"      {longer:.2f} times TRL's processor time, {peak:.2f} times its peak")
            what = f"LoRA step of Qwen3-0.6B's shape, {asked.layers} layers, {WHAT[name]}"
            what += "" if asked.budget is None else f" in passes of {asked.budget} tokens"
            what += f", MALLOC_MMAP_THRESHOLD_={THRESHOLD} for both" if THRESHOLD else ""
            claims = [
                records.measured(f"{what}: peak memory beside TRL's GRPO", peak, n=1, goal="<= 1.1"),
                records.measured(f"{what}: processor time beside TRL's GRPO", longer, n=asked.steps),
            ]
            records.write(__file__, claims if name != "TRL" else [])


if __name__ == "__main__":
    main()
