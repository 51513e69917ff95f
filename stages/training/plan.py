"""A training's configuration, resolved once: `resolve` returns an immutable `TrainPlan`, or the first refusal.

The settings that are left open are chosen by the size of the model, which is read from config.json alone. A model below
`SMALL` parameters, such as those that environments bring along, is trained whole in one pass. For others these are the
usual choices: LoRA at a rate by size (`ADAPTER_RATES`), each prompt computed once for its samples, where packing.py
can, activations recomputed, and one group a pass, or as much of it as `PASS_TOKENS` hold. memory.py then replaces the
last two by the fastest that fit into the memory there is.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from composer_stages.policy import available, base
from composer_stages.policy.base import PolicyConfig
from composer_stages.runs import reporting
from composer_stages.training.config import Config, Optimisation
from composer_stages.training.model_shape import ASSUMED, PROMPT_TOKENS, ModelShape, Prompts, model_shape
from composer_stages.training.refusals import refusals

SMALL = 10_000_000
SMALL_RATE = 2e-4
ADAPTER_RATE = 1e-5
ADAPTER_RATES = ((300_000_000, 4e-4), (1_000_000_000, 1e-4))
"""Of LoRA below so many parameters: 4e-4 taught SmolLM2-135M in 20 steps of 2 x 8 rollouts; Qwen2.5-Coder-0.5B lost
its reward at 3e-4 in seven steps, and was stable at 1e-4 with 4 x 8. Of larger models nothing was tried here: they get
`ADAPTER_RATE`, ten times TRL's rate for whole models."""
WHOLE_RATE = 1e-6
"""TRL's default for GRPO."""
SINGULAR_VALUES_RATE = 2e-2
"""Of models of any size: the change of a singular value is measured in the units of the weights' norm."""
RANK = 16
"""Of adapters, where nothing else is set."""
PASS_TOKENS = 32_768
"""Tokens of a pass that is not given: with LoRA and activations recomputed, an 8 B model then takes 36 GiB."""

NOTHING_SET = Optimisation()


@dataclass(frozen=True)
class TrainPlan:
    """A training's configuration with nothing left open, and what its memory depends on.

    config: its optimisation and adapter are filled in. shape: of the model; None for a small built-in model, or where
    it is not known yet. small: whether the model is trained whole in one pass by default. rollout_tokens: of the
    longest rollout after the prompt. processes: each holds the whole model, and its share of a step's rollouts.
    teacher_bytes: of the models to distil from in this process, without those whose size is not known yet.
    direction: tokens of the longest row that a direction is found from, which is taken out of the training; 0 without
    one. pairs: whether a run of them is given. prompts: their lengths. memory_gib, smallest: the memory
    that `choose_passes` chose by, and whether it took the smallest passes. requested: the optimisation as the user set
    it.
    """

    config: Config
    shape: ModelShape | None
    small: bool
    rollout_tokens: int
    processes: int = 1
    teacher_bytes: int = 0
    direction: int = 0
    pairs: bool = False
    prompts: Prompts = ASSUMED
    memory_gib: float | None = None
    smallest: bool = False
    requested: Optimisation = NOTHING_SET

    @cached_property
    def device(self) -> str:
        """Return the device that the model is trained on, by the hardware of this process."""
        from composer_stages.policy.local import device

        return device(self.config.policy.device)

    @property
    def sharded(self) -> bool:
        """Whether weights are spread over the processes, with masters, gradients and moments where all are trained."""
        return self.config.distribution.sharding == "fsdp2" and self.processes > 1

    @property
    def max_completion(self) -> int:
        """Return the tokens of TRL's longest completion, by the settings alone: a loss divides by them."""
        return longest_rollout(self.config, self.config.max_steps)

    @property
    def spectral(self) -> bool:
        """Whether a change of the singular values is trained beside frozen weights."""
        return self.config.adapter.kind == "singular-values"

    def sampled_by(self, rank: int) -> PolicyConfig:
        """Return the policy that a process samples from, with the address of its server: servers are taken in turn."""
        policy = self.config.policy
        if policy.base_url is None:
            return policy
        urls = (policy.base_url, *self.config.distribution.servers)
        return policy.model_copy(update={"base_url": urls[rank % len(urls)]})

    def changed(self, **settings: Mapping[str, Any]) -> "TrainPlan":
        """Return the plan with other values in some tables of the configuration: `changed(adapter={"rank": 8})`."""
        tables = {name: getattr(self.config, name).model_copy(update=dict(new)) for name, new in settings.items()}
        return replace(self, config=self.config.model_copy(update=tables))

    def passes(self) -> dict[str, Any]:
        """Return the settings that `choose_passes` chooses, by name."""
        size = self.config.optimisation
        return {"micro_batch": size.micro_batch, "gradient_checkpointing": size.gradient_checkpointing}

    def facts(self) -> dict[str, Any]:
        """Return the settings that were chosen, by name, as the run's manifest keeps them."""
        size = self.config.optimisation
        return {
            "adapter_rank": self.config.adapter.rank,
            "learning_rate": size.learning_rate,
            **self.passes(),
            "shared_prompts": size.shared_prompts,
        }


def resolve(config: Config, processes: int, inputs: Container[str] = (), direction: int = 0) -> TrainPlan:
    """Fill in what the settings leave open and check them; `UsageError` for what cannot be trained.

    Reads the models' config.json, and asks the hub for it where need be. processes: that share the training. inputs:
    "pairs" where a run of them is given. direction: tokens of the longest row of the direction that is taken out.
    """
    reporting.check(config.report_to)
    policy, size, rank = config.policy, config.optimisation, config.adapter.rank
    shape = model_shape(policy.in_process())
    small = base.is_built_in(policy.source) or (shape is not None and shape.parameters < SMALL)
    spectral = config.adapter.kind == "singular-values"
    if rank is None:
        # A server gets an adapter sooner than all weights.
        rank = 0 if spectral or (small and not policy.served) else RANK
    # Of LoRA by the model's size, and as for large models where that is not known yet.
    of_size = (rate for below, rate in ADAPTER_RATES if shape and shape.parameters < below)
    usual_rate = next(of_size, ADAPTER_RATE) if rank else WHOLE_RATE
    rate = SINGULAR_VALUES_RATE if spectral else SMALL_RATE if small else usual_rate
    rollouts = size.prompts_per_step * size.generations
    loaded = {teacher.loaded: teacher for teacher in config.teachers() if not teacher.served}
    teachers = [model_shape(teacher) for teacher in loaded.values()]
    teacher_bytes = sum(teacher.parameters * teacher.bytes for teacher in teachers if teacher is not None)
    rollout_tokens = longest_rollout(config, config.max_steps)
    length = PROMPT_TOKENS + rollout_tokens
    plan = TrainPlan(
        config,
        shape,
        small,
        rollout_tokens,
        processes,
        teacher_bytes,
        direction,
        pairs="pairs" in inputs,
        requested=size,
    ).changed(
        optimisation={
            "learning_rate": rate if size.learning_rate is None else size.learning_rate,
            "micro_batch": size.micro_batch or (rollouts if small else rows_per_pass(size.generations, length)),
            "gradient_checkpointing": not small if size.gradient_checkpointing is None else size.gradient_checkpointing,
        },
        adapter={"rank": rank},
    )
    if size.shared_prompts is None:
        # Of shares, gradients stay whole in a pass that goes through a layer more than once (`estimate_memory`).
        packs = shape is not None and shape.packs and not small and not (plan.sharded and not rank)
        # TRL's pass pads rows on both sides, which not all architectures can tell from tokens.
        plan = plan.changed(optimisation={"shared_prompts": packs or (shape is not None and not shape.pads)})
    if (refusal := next(refusals(plan), None)) is not None:
        raise refusal
    return plan


def longest_rollout(config: Config, answers: int) -> int:
    """Return the tokens of the longest rollout of so many answers, without its prompt."""
    policy = config.policy
    # Without a limit of its own, prompt, answers and observations together stay within the context.
    return answers * policy.max_tokens if policy.max_tokens else available.longest_answer(policy)


def rows_per_pass(rollouts: int, length: int) -> int:
    """Return the most of so many rollouts, a divisor of their number, that make up a pass if each has this length."""
    return max(n for n in divisors(rollouts) if n == 1 or n * length <= PASS_TOKENS)


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, in order."""
    return [n for n in range(1, number + 1) if number % n == 0]
