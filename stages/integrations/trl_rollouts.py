"""Rollouts through TRL without training: its data loader, rollout call, padding and advantages; no optimiser.

What TRL then holds for its loss comes along, so that what was recorded can be compared with what would be trained on.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback
from trl.trainer.grpo_trainer import GRPOTrainer

from stages.integrations.trl import RolloutFunction
from stages.policy.local import LocalPolicy, device
from stages.training.rollouts import environment_reward
from stages.training.settings import Optimisation
from stages.training.setup import trl_config

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func is announced as experimental on every start
MAX_PROMPTS = 8
"""Prompts in one batch, at most."""
Batch = list[dict[str, Any]]


def rollouts(
    policy: LocalPolicy,
    function: RolloutFunction,
    *,
    samples: int,
    folder: str,
    seed: int,
    skip: Callable[[Batch], bool],
) -> Iterator[dict[str, Any]]:
    """Let TRL play `samples` rollouts of every row of `function`, in batches; `skip` says which batches to leave out.

    Yields, a batch, the tensors that TRL would compute its loss from; `function.latest` then holds the batch's
    episodes.
    """
    trainer = _trainer(policy, function, samples, folder, seed)
    policy.model.train()  # else TRL counts the generations of an evaluation
    for batch in trainer.get_train_dataloader():
        if not skip(batch):
            with torch.no_grad():
                yield trainer._generate_and_score_completions(batch)


def _trainer(policy: LocalPolicy, function: RolloutFunction, samples: int, folder: str, seed: int) -> GRPOTrainer:
    prompts = together(len(function.rows))
    size = Optimisation(steps=len(function.rows) // prompts, prompts_per_step=prompts, generations=samples)
    args = trl_config(
        folder,
        size,
        seed=seed,
        temperature=policy.config.temperature,
        max_completion=policy.config.max_tokens,
        device=device(policy.config.device),
    )
    trainer = GRPOTrainer(
        model=policy.model,
        processing_class=policy.tokenizer,
        reward_funcs=environment_reward,
        rollout_func=function,  # type: ignore[arg-type]  # TRL hands over conversations, which its annotation omits
        args=args,
        train_dataset=Dataset.from_list(function.rows),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def together(prompts: int) -> int:
    """Prompts in a batch: the most that divide all, as TRL drops a batch that is not full."""
    return max(size for size in range(1, MAX_PROMPTS + 1) if prompts % size == 0)
