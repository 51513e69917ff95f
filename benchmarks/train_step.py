"""One optimiser step of ours beside TRL's: same model and batches, one thread, in turn, medians of processor time.

    python benchmarks/train_step.py [--rounds 9]

`benchmarks/composed_step.py` compares our composed step with its parts, `benchmarks/real_shape.py` a real model's size.

`dpo`: our DPO channel beside TRL's DPOTrainer with precomputed reference log-probs, 16 pairs of 96 + 24 tokens.
`grpo`: our trainer with no channel beside TRL's GRPOTrainer, 8 prompts of 96 tokens x 8 samples of at most 64 tokens; a
step is generation, scoring, loss, backward, optimiser. `plain` keeps TRL's scoring, bit for bit, and differs in the
sampling alone; `shared` also computes a prompt once for its samples (optimisation.shared_prompts).

The model is a random Qwen3 of the size of the embedded student (0.45 M parameters, 512 tokens).
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

import records
import torch
from datasets import Dataset
from support.environments import GuessEnv
from support.models import tiny_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl import DPOConfig, DPOTrainer, GRPOTrainer

from stages.policy.base import PolicyConfig
from stages.policy.local import LocalPolicy
from stages.training.channels.pairs import PairSource, TokenPair
from stages.training.config import Config, Optimisation
from stages.training.rollouts import LockStep, Schedule
from stages.training.scoring import Tree
from stages.training.step import Batch, Channels, ComposedTrainer
from stages.training.trl_arguments import trl_config

PAIRS, PROMPT, ANSWER, TOKENS, VOCABULARY = 16, 96, 24, 64, 512
SETTINGS = Optimisation(steps=10_000, prompts_per_step=8, generations=8)
Step = Callable[[], None]


def new_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
        )
    )


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


def measure(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds of processor time of each in every round, run in turn; the first two rounds are warm-up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 2):
        for name, step in steps.items():
            started = time.process_time()
            step()
            if number >= 2:
                times[name].append(time.process_time() - started)
    return times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    pairs = random_pairs()
    with tempfile.TemporaryDirectory() as folder:
        times = measure(
            {
                "dpo ours": ours_dpo(pairs),
                "dpo TRL": trl_dpo(pairs, folder),
                "grpo plain": ours_grpo(folder),
                "grpo shared": ours_grpo(folder, shared=True),
                "grpo TRL": trl_grpo(folder),
            },
            rounds,
        )
    for name, seconds in times.items():
        print(f"{name:<14}{1000 * statistics.median(seconds):>9.1f} ms")
    grpo = f"GRPO step, 8 prompts of {PROMPT} tokens x 8 samples of at most {TOKENS}"
    found = [
        (f"DPO step, {PAIRS} pairs of {PROMPT} + {ANSWER} tokens", "dpo TRL", "dpo ours", ">= 2.2"),
        (f"{grpo}, scored as TRL does", "grpo TRL", "grpo plain", None),
        (f"{grpo}, prompts shared", "grpo TRL", "grpo shared", ">= 2.5"),
    ]
    claims = []
    for what, theirs, ours, goal in found:
        claim = f"{what}: times as fast as TRL, by processor time"
        claims.append(records.measured(claim, *records.ratio(times[theirs], times[ours]), n=rounds, goal=goal))
        print(f"{claim}: {claims[-1].value:.2f}")
    records.write(__file__, claims)


if __name__ == "__main__":
    main()
