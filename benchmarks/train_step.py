"""One optimiser step of ours beside TRL's, on the same model and batches; a step of all channels beside its parts.

    python benchmarks/train_step.py [beside-trl|composed] [--rounds 9]
    python benchmarks/train_step.py real-shape [--sides TRL ours all] [--steps 2] [--layers 28]
    python benchmarks/train_step.py real-model FOLDER [--steps 4]
    python benchmarks/train_step.py checkpoint [--layers 22]

The first two train a random Qwen3 of the size of the built-in student (0.45 M parameters, 512 tokens) on one thread;
times are medians of processor time. The third has the shape of Qwen3-0.6B in bfloat16 (`shapes.py`).
The fourth is a whole GRPO step of a pretrained model, such as SmolLM2-135M, whose answers end by themselves. The last
writes a checkpoint of 0.5 B random weights, and makes it durable.
"""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import cases
import shapes
import torch
from datasets import Dataset
from records import Claim, measured, ratio
from support.environments import GuessEnv
from support.models import tiny_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl import DPOConfig, DPOTrainer, GRPOTrainer

from composer_stages.backends import resources
from composer_stages.envs.kata.checkpoints import folder_of
from composer_stages.envs.skills.env import SkillsEnv
from composer_stages.policy.base import PolicyConfig
from composer_stages.policy.local import LocalPolicy, load_model
from composer_stages.runs import store
from composer_stages.training.channels import CHANNELS
from composer_stages.training.channels.pairs import PairSource, TokenPair
from composer_stages.training.channels.rollouts import own_rollout
from composer_stages.training.config import AdapterSettings, Config, Optimisation
from composer_stages.training.rollouts import LockStep, Schedule
from composer_stages.training.scoring import Tree
from composer_stages.training.step import Batch, Channels, ComposedTrainer
from composer_stages.training.trl_arguments import lora, trl_config

PAIRS, PROMPT, ANSWER, TOKENS, VOCABULARY = 16, 96, 24, 64, 512
SETTINGS = Optimisation(steps=10_000, prompts_per_step=8, generations=8)
Step = Callable[[], None]


def new_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config.from_pretrained(folder_of("student-served")))


def random_pairs() -> list[TokenPair]:
    stream = torch.Generator().manual_seed(1)

    def ids(low: int, high: int) -> list[int]:
        size = int(torch.randint(low, high, (1,), generator=stream))
        return torch.randint(260, VOCABULARY, (size,), generator=stream).tolist()

    return [
        TokenPair(
            str(i), Tree(ids(PROMPT - 24, PROMPT + 24), (ids(ANSWER - 12, ANSWER + 12), ids(ANSWER - 12, ANSWER + 12)))
        )
        for i in range(PAIRS)
    ]


def ours_dpo(pairs: list[TokenPair]) -> Step:
    model = new_model().train()
    source = PairSource(pairs, per_step=PAIRS, seed=0)
    source.cache_reference(model)
    channels = Channels(Config(weights={"dpo": 1.0}), [source])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5)

    def step() -> None:
        losses, _ = channels.losses(model, Batch({"pairs": source.rows([], 0)}))
        losses["dpo"].loss.backward()
        finish(model, optimizer)

    return step


def finish(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def trl_dpo(pairs: list[TokenPair], folder: str) -> Step:
    rows = [
        {"prompt_ids": p.tree.prompt, "chosen_ids": p.tree.branches[0], "rejected_ids": p.tree.branches[1]}
        for p in pairs
    ]
    tokenizer = tiny_tokenizer()
    text = {"prompt_ids": "prompt", "chosen_ids": "chosen", "rejected_ids": "rejected"}
    placeholder = Dataset.from_list([dict.fromkeys(text.values(), "a") for _ in rows])
    args = DPOConfig(
        output_dir=folder,
        per_device_train_batch_size=PAIRS,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        precompute_ref_log_probs=True,
        report_to=[],
        disable_tqdm=True,
        learning_rate=1e-5,
        max_length=None,
    )
    trainer = DPOTrainer(model=new_model(), args=args, train_dataset=placeholder, processing_class=tokenizer)
    examples = [{**row, "ref_chosen_logps": -100.0, "ref_rejected_logps": -100.0} for row in rows]
    batch = trainer.data_collator(examples)
    trainer.current_gradient_accumulation_steps = 1
    trainer.create_optimizer()
    trainer.model.train()

    def step() -> None:
        trainer.training_step(trainer.model, dict(batch), PAIRS)
        finish(trainer.model, trainer.optimizer)

    return step


class OneTurn(GuessEnv):
    """One answer a rollout, as in TRL's plain generation."""

    def __init__(self) -> None:
        super().__init__(turns=1)

    def reset(self, task: Any) -> list[dict[str, str]]:
        message, *_ = super().reset(task)
        return [{**message, "content": f"{task.task_id} {message['content']}".ljust(PROMPT - 30, "x")}]


def grpo_parts(folder: str) -> tuple[LocalPolicy, Any]:
    policy = LocalPolicy(new_model(), tiny_tokenizer(), PolicyConfig(model="tiny", max_tokens=TOKENS))
    args = trl_config(folder, SETTINGS, seed=0, temperature=1.0, max_completion=TOKENS, device="cpu")
    return policy, args


def tasks() -> list[Any]:
    return OneTurn().tasks("train", 8, 0)


def ours_grpo(
    folder: str,
    names: Sequence[str] = (),
    rows: Callable[[Any, int], Batch] = lambda rollouts, step: Batch(),
    sources: Sequence[Any] = (),
    shared: bool = False,
) -> Step:
    policy, args = grpo_parts(folder)
    config = Config(weights=dict.fromkeys(names, 1.0), hints={"top_k": None}, teacher={"model": "teacher"})
    channels = Channels(config, sources)
    trainer = ComposedTrainer(
        policy=policy,
        rollouts=LockStep(OneTurn, policy, Schedule(tasks(), groups=8, generations=8, seed=0), max_steps=1),
        record=lambda step, rollouts: None,
        channels=channels,
        rows=rows,
        gradient_cosine_every=0,
        shared_prompts=shared,
        args=args,
    )
    return stepper(trainer)


def trl_grpo(folder: str) -> Step:
    policy, args = grpo_parts(folder)
    data = Dataset.from_list([{"prompt": OneTurn().reset(task)} for task in tasks()])

    def reward(completions: list[Any], **columns: Any) -> list[float]:
        return [len(set(completion[0]["content"])) / 100 for completion in completions]

    trainer = GRPOTrainer(
        model=policy.model, processing_class=policy.tokenizer, reward_funcs=reward, args=args, train_dataset=data
    )
    return stepper(trainer)


def stepper(trainer: GRPOTrainer) -> Step:
    trainer.create_optimizer()
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    rows = [trainer.train_dataset[i] for i in range(8) for _ in range(8)]

    def step() -> None:
        trainer.training_step(trainer.model, [dict(row) for row in rows], 64)
        finish(trainer.model, trainer.optimizer)

    return step


def beside_trl(rounds: int = 9) -> Iterator[Claim]:
    """DPO's and GRPO's step beside those of TRL's DPOTrainer (with precomputed reference log-probs) and GRPOTrainer.

    A step of GRPO is generation, scoring, loss, backward, optimiser. `plain` keeps TRL's scoring, bit for bit, and
    differs in the sampling alone; `shared` also computes a prompt once for its samples (optimisation.shared_prompts).
    GRPOTrainer has loss_type dapo and keeps activations; use_liger_kernel needs a GPU, and
    use_transformers_continuous_batching takes 8 times as long on a CPU.
    """
    torch.set_num_threads(1)
    pairs = random_pairs()
    with tempfile.TemporaryDirectory() as folder:
        times = cases.in_turn(
            {
                "dpo ours": ours_dpo(pairs),
                "dpo TRL": trl_dpo(pairs, folder),
                "grpo plain": ours_grpo(folder),
                "grpo shared": ours_grpo(folder, shared=True),
                "grpo TRL": trl_grpo(folder),
            },
            rounds,
        )
    grpo = f"GRPO step, 8 prompts of {PROMPT} tokens x 8 samples of at most {TOKENS}"
    for what, theirs, ours, goal in (
        (f"DPO step, {PAIRS} pairs of {PROMPT} + {ANSWER} tokens", "dpo TRL", "dpo ours", ">= 2.2"),
        (f"{grpo}, scored as TRL does", "grpo TRL", "grpo plain", None),
        (f"{grpo}, prompts shared", "grpo TRL", "grpo shared", ">= 2.5"),
    ):
        claim = f"{what}: times as fast as TRL, by processor time"
        yield measured(claim, *ratio(times[theirs], times[ours]), n=rounds, goal=goal)


# --- all channels in one step


def rows_of(source: PairSource, names: Sequence[str]) -> Callable[[list[Any], int], Batch]:
    """The rows of all sources; a hinted turn is an answer again, behind a prompt with 16 tokens more."""

    def rows(rollouts: list[Any], step: int) -> Batch:
        samples = [rollout.steps[0].sample for rollout in rollouts[:16]]
        turns = [(sample.prompt_ids, sample.completion_ids) for sample in samples]
        own = [rollout for rollout in map(own_rollout, rollouts) if rollout is not None]
        return shapes.rows_by_source(names, source.rows([], 0), turns, [300] * 16, own)

    return rows


def composed(rounds: int = 9) -> Iterator[Claim]:
    """A step of GRPO with all channels, beside GRPO and what each channel adds to it.

    What a channel adds is a step of GRPO with it less a step of GRPO. TAID and EOPD learn from a teacher of the same
    size. 16 pairs, 16 hinted turns, 64 rollouts.
    """
    torch.set_num_threads(1)
    every = list(CHANNELS)
    source = PairSource(random_pairs(), per_step=PAIRS, seed=0)
    source.cache_reference(new_model())
    teacher = new_model().eval().requires_grad_(False)
    with tempfile.TemporaryDirectory() as folder:

        def step(*names: str) -> Step:
            return ours_grpo(folder, names, rows_of(source, names), shapes.sources(source, teacher), shared=True)

        times = cases.in_turn({"grpo": step(), **{name: step(name) for name in every}, "all": step(*every)}, rounds)
    rows = zip(times["grpo"], *(times[name] for name in every), strict=True)
    parts = [grpo + sum(with_one - grpo for with_one in others) for grpo, *others in rows]
    claim = f"GRPO with all {len(every)} channels in one step: processor time beside GRPO and what each channel adds"
    yield measured(claim, *ratio(times["all"], parts), n=rounds, goal="<= 0.8")


# --- a real model's shape

WHAT = {"ours": "GRPO", "all": "GRPO, all six channels and a teacher"}
MIB = 2**20
THRESHOLD = os.environ.get("MALLOC_MMAP_THRESHOLD_")
"""Of glibc: the size from which a block is mapped by itself; a training sets it (stages/backends/resources.py)."""


def real_shape(
    sides: tuple[str, ...] = ("TRL", *WHAT),
    steps: int = 2,
    threads: int = os.cpu_count() or 1,
    layers: int = 28,
    budget: int | None = None,
) -> Iterator[Claim]:
    """A LoRA step on the shape of Qwen3-0.6B on a CPU: processor time and peak memory beside TRL's GRPO.

    Rollouts have 128 tokens of prompt and 512 of answer; activations are recomputed. `all` adds all channels, on 4
    pairs of 128 + 64 tokens and the first 64 tokens of each rollout, and holds a teacher of the same shape. Each side
    has a process of its own. budget: optimisation.max_tokens_per_micro_batch.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in sides:
        one = found[name] = cases.apart(real_steps, name, steps, threads, layers, budget, OMP_NUM_THREADS=str(threads))
        clock, used = statistics.median(one["seconds"]), statistics.median(one["processor"])
        loaded, peak = (f"{one[which] / MIB:.0f} MiB" for which in ("loaded", "peak"))
        print(
            f"{name:<6}{clock:>8.1f} s a step, {used:.1f} s of processor time, loaded {loaded}, peak {peak}", flush=True
        )
        if name == "TRL" or "TRL" not in found:
            continue
        what = f"LoRA step of Qwen3-0.6B's shape, {layers} layers, {WHAT[name]}"
        what += "" if budget is None else f" in passes of {budget} tokens"
        what += f", MALLOC_MMAP_THRESHOLD_={THRESHOLD} for both" if THRESHOLD else ""
        theirs = found["TRL"]
        yield measured(f"{what}: peak memory beside TRL's GRPO", one["peak"] / theirs["peak"], n=1, goal="<= 1.1")
        longer = used / statistics.median(theirs["processor"])
        yield measured(f"{what}: processor time beside TRL's GRPO", longer, n=steps)


def real_steps(name: str, steps: int, threads: int, layers: int, budget: int | None) -> dict[str, Any]:
    """The steps of a side, as `timed` returns them."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        return timed(shapes.trainer(name, folder, steps, layers, budget))


def timed(made: GRPOTrainer) -> dict[str, Any]:
    """Train; seconds of each step, by the clock and of the processors, and bytes before the first one and at most."""
    from transformers import TrainerCallback

    seconds: list[float] = []
    processor: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **more: Any) -> None:
            self.started, self.used = time.perf_counter(), time.process_time()

        def on_step_end(self, *args: Any, **more: Any) -> None:
            seconds.append(time.perf_counter() - self.started)
            processor.append(time.process_time() - self.used)

    made.add_callback(Clock())
    loaded = cases.memory("VmRSS")
    made.train()
    return {"seconds": seconds, "processor": processor, "loaded": loaded, "peak": cases.memory("VmHWM")}


# --- a pretrained model

LONGEST_ANSWER = 24
SIDES = {"ours": "", "TRL": "TRL's GRPOTrainer", "TRL, activations kept": "TRL's GRPOTrainer without recomputation"}


def real_model(model: str, steps: int = 4, threads: int = 1) -> Iterator[Claim]:
    """A GRPO step of a pretrained model on a CPU, LoRA of rank 16 in float32, beside TRL's GRPOTrainer.

    2 prompts of `skills` x 8 answers of at most 24 tokens, which end by themselves; the same prompts on all sides, but
    other draws. As `composer train` chooses, a prompt is computed once for its answers; TRL recomputes activations by
    default, and is measured without as well. Each side has a process of its own, and its first step is left out.
    model: a folder, hub id or built-in model.
    """
    found = {side: cases.apart(model_steps, side, model, steps, threads) for side in SIDES}
    name = model.rstrip("/").rpartition("/")[2]
    what = f"GRPO step of {name}, LoRA 16, float32, 2 prompts x 8 answers, {threads} thread{'s' * (threads != 1)}"
    ours = found.pop("ours")
    for unit, field in (("processor seconds", "processor"), ("seconds", "seconds")):
        yield measured(f"{what}: {unit}", statistics.median(ours[field][1:]), unit="s", n=steps - 1)
    for side, theirs in found.items():
        beside = f"{what}, beside {SIDES[side]}"
        yield measured(f"{beside}: processor time", *ratio(ours["processor"][1:], theirs["processor"][1:]), n=steps - 1)
        yield measured(f"{beside}: time", *ratio(ours["seconds"][1:], theirs["seconds"][1:]), n=steps - 1)
        yield measured(f"{beside}: peak memory", ours["peak"] / theirs["peak"], n=1)


def model_steps(side: str, model: str, steps: int, threads: int) -> dict[str, Any]:
    """The steps of a side, as `timed` returns them, on the tasks of `skills` in their order."""
    torch.set_num_threads(threads)
    config = PolicyConfig(model=model, dtype="float32", device="cpu", max_tokens=LONGEST_ANSWER)
    loaded, tokenizer = load_model(config, listener=lambda *_: None)
    tasks = SkillsEnv().tasks("train", 2 * steps, 0)
    settings = Optimisation(
        steps=steps,
        prompts_per_step=2,
        generations=8,
        learning_rate=1e-5,
        gradient_checkpointing=side == "TRL",
        save_every=steps + 1,
    )
    with tempfile.TemporaryDirectory() as folder:
        args = trl_config(folder, settings, seed=0, temperature=1.0, max_completion=LONGEST_ANSWER, device="cpu")
        adapter = lora(AdapterSettings(rank=16), loaded)
        if side != "ours":

            def reward(completions: list[Any], **columns: Any) -> list[float]:
                return [float(len(completion[0]["content"]) % 2) for completion in completions]

            data = Dataset.from_list([{"prompt": SkillsEnv().reset(task)} for task in tasks])
            return timed(
                GRPOTrainer(
                    model=loaded,
                    processing_class=tokenizer,
                    reward_funcs=reward,
                    args=args,
                    train_dataset=data,
                    peft_config=adapter,
                )
            )
        resources.choose_allocation(keep=True)  # as `composer train` does where memory abounds
        policy = LocalPolicy(loaded, tokenizer, config)
        return timed(
            ComposedTrainer(
                policy=policy,
                rollouts=LockStep(SkillsEnv, policy, Schedule(tasks, groups=2, generations=8, seed=0), max_steps=1),
                record=lambda step, rollouts: None,
                channels=Channels(Config(), []),
                rows=lambda rollouts, step: Batch(),
                shared_prompts=True,
                args=args,
                peft_config=adapter,
            )
        )


# --- a checkpoint to resume from


def checkpoint(layers: int = 22, rounds: int = 3) -> Iterator[Claim]:
    """Seconds to write a checkpoint, to make it durable with its seal, and to check it when a training resumes.

    The shape of Qwen3-0.6B with fewer layers: 22 are 0.5 B parameters. Random weights, and Adam's moments of those that
    are trained.
    """
    for what, rank in (("LoRA of rank 16", 16), ("all weights", 0)):
        found = cases.apart(saved, rank, layers, rounds)
        about = f"checkpoint of {found['parameters'] / 1e9:.2f} B parameters, {what}, {found['bytes'] / 1e9:.2f} GB"
        for doing in ("written", "durable and sealed", "checked"):
            yield measured(f"{about}: {doing}", statistics.median(found[doing]), n=rounds, unit="s")


def saved(rank: int, layers: int, rounds: int) -> dict[str, Any]:
    """Seconds of each round, the size of a checkpoint, and the number of parameters."""
    found: dict[str, Any] = {"written": [], "durable and sealed": [], "checked": []}
    with tempfile.TemporaryDirectory() as folder:
        made, path = shapes.trainer("ours", folder, 1, layers, None, rank=rank), Path(folder) / "checkpoint-0"
        made.create_optimizer_and_scheduler(1)
        for weight in (weight for group in made.optimizer.param_groups for weight in group["params"]):
            moments = {name: torch.rand_like(weight) for name in ("exp_avg", "exp_avg_sq")}
            made.optimizer.state[weight] = {"step": torch.tensor(1.0), **moments}
        for _ in range(rounds):
            clock = [time.perf_counter()]
            for work in (
                partial(made._save_checkpoint, made.model, None),
                partial(store.seal_folder, path, {"step": 0}),
                partial(store.folder_damage, path),
            ):
                assert work() is None
                clock.append(time.perf_counter())
            for doing, (begun, ended) in zip(
                ("written", "durable and sealed", "checked"), pairwise(clock), strict=True
            ):
                found[doing].append(ended - begun)
            found["bytes"] = sum(file.stat().st_size for file in path.rglob("*"))
            shutil.rmtree(path)
    return {**found, "parameters": sum(weight.numel() for weight in made.model.base_model.parameters())}


CASES = {
    "beside-trl": beside_trl,
    "composed": composed,
    "real-shape": real_shape,
    "real-model": real_model,
    "checkpoint": checkpoint,
}

if __name__ == "__main__":
    cases.main(__file__, CASES)
