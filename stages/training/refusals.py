"""Refusals: why a plan cannot be trained, and what to set instead, before a model is loaded."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from stages.policy import adapters
from stages.policy.serving import needs_exclusive_server
from stages.training.channels import CHANNELS

if TYPE_CHECKING:
    from stages.training.plan import TrainPlan

PER_PASS = ("entropy_coef", "use_adaptive_entropy")
"""Fields of TRL's that add a mean over the tokens of each pass (TRL 1.16, trainer/grpo_trainer.py `_compute_loss`)."""
STEPPED_BY_SHARES = ("adamw_torch", "adamw_torch_fused", "sgd")
"""Optimisers that were measured to take the same step from shares (tests/stages/training/test_processes.py)."""


def refusals(plan: "TrainPlan") -> Iterator[str]:
    """Yield why a plan cannot be trained, and what to set, as far as the settings and config.json of the model show.

    The validators of `Config` refuse what one table of settings alone shows; `stages.training.weights` refuses what
    only a server shows.
    """
    yield from _input_refusals(plan)
    yield from _process_refusals(plan)
    yield from _shard_refusals(plan)
    yield from _server_refusals(plan)


def _input_refusals(plan: "TrainPlan") -> Iterator[str]:
    """Yield what is wrong between the model, the runs that are given, and the losses that are to be learned from."""
    config, weights = plan.config, plan.config.weights.active()
    on_pairs = [name for name, channel in CHANNELS.items() if "pairs" in channel.needs]
    needing = [name for name in on_pairs if name in weights]
    if needing and not plan.pairs:
        yield (
            f"weights.{needing[0]} is {weights[needing[0]]:g}, but no pairs were given. "
            "Run `composer extract-pairs` first, then add `--from extract-pairs`."
        )
    if plan.pairs and not needing:
        *names, last = [f"weights.{name}" for name in on_pairs]
        yield f"Pairs were given, but no channel uses them. Set {', '.join(names)} or {last}, or leave the pairs out."
    if plan.direction and config.adapter.dora:
        yield (
            "A direction is taken out of W0 + BA, but adapter.dora also trains the magnitudes of its columns. "
            "Set adapter.dora=false."
        )
    if config.optimisation.stop_on_collapse and config.diloco.store is not None:
        yield "optimisation.stop_on_collapse would end one of several replicas. Leave it out, or diloco.store."
    if config.optimisation.beta and not config.adapter.rank and adapters.is_adapter(config.policy.model):
        # TRL would load the adapter's base as the reference of the KL penalty.
        yield (
            f"optimisation.beta needs a reference, and {config.policy.model} is an adapter, which lies in no folder of "
            "its own once merged. Set adapter.rank, or run `composer export model` and start from the merged folder."
        )


def _process_refusals(plan: "TrainPlan") -> Iterator[str]:
    """Yield why several processes would take another step than one, or cannot share the rollouts of a step."""
    size, trl, count = plan.config.optimisation, plan.config.trl, plan.processes
    if count == 1:
        return
    if plan.config.diloco.store is not None:
        yield (
            f"diloco.store was given to {count} processes of one training, but a replica is one process. "
            "Leave out torchrun, or diloco.store."
        )
    if size.loss_type == "bnpo":
        yield (
            f'optimisation.loss_type is "bnpo", a mean over the tokens of each pass: {count} processes would take '
            'another step than one. Take "dapo", whose mean is over the tokens of the whole step.'
        )
    if per_pass := [name for name in PER_PASS if trl.get(name)]:
        yield (
            f"trl.{per_pass[0]} adds a mean over the tokens of each pass: {count} processes would take another step "
            "than one. Leave it out, or train in one process."
        )
    if size.prompts_per_step % count:
        yield (
            f"optimisation.prompts_per_step is {size.prompts_per_step}, and {count} processes cannot share that "
            f"without splitting a group. Take a multiple of {count}."
        )
    rollouts = max(size.prompts_per_step // count, 1) * size.generations
    if size.micro_batch and rollouts % min(size.micro_batch, rollouts):
        yield (
            f"optimisation.micro_batch is {size.micro_batch}, but each of {count} processes has {rollouts} rollouts a "
            f"step. Take a divisor of {rollouts}."
        )


def _shard_refusals(plan: "TrainPlan") -> Iterator[str]:
    """Yield what needs all weights or all gradients in one place, where several processes share them."""
    config = plan.config
    if plan.processes == 1 or config.distribution.sharding == "none":
        return
    rank, optimiser = config.adapter.rank, config.trl.get("optim", STEPPED_BY_SHARES[0])
    copied = not rank and "sdpo" in config.weights.active() and config.hints.teacher != "current"
    needing = {
        "adapter.dora, which reads whole weights; take false": config.adapter.dora,
        "adapter.kind=singular-values, whose weights are frozen and not cut; take lora": plan.spectral,
        "probe.measure, which compares whole gradients; take false": bool(plan.direction) and config.probe.measure,
        f"hints.teacher={config.hints.teacher}, which copies all weights; take current": copied,
        "optimisation.gradient_cosine_every, which compares whole gradients; take 0": bool(
            config.optimisation.gradient_cosine_every
        ),
        f"trl.optim={optimiser}; take {', '.join(STEPPED_BY_SHARES)}": not rank and optimiser not in STEPPED_BY_SHARES,
    }
    for option, is_set in needing.items():
        if is_set:
            yield f"distribution.sharding=fsdp2 does not go with {option}."


def _server_refusals(plan: "TrainPlan") -> Iterator[str]:
    """Yield why a policy behind servers cannot follow the training, or the processes cannot share these servers."""
    policy, staleness = plan.config.policy, plan.config.optimisation.max_staleness
    servers, count = 1 + len(plan.config.distribution.servers), plan.processes
    if not policy.served:
        return
    if plan.spectral:
        yield (
            f"{policy.model!r} is sampled from a server, which gets an adapter or all weights, and "
            "adapter.kind=singular-values trains neither. Leave out vllm:, or take adapter.kind=lora."
        )
    if plan.config.diloco.store is not None:
        yield (
            f"{policy.model!r} is sampled from a server, which follows one training, and replicas are several. "
            "Leave out diloco.store, or vllm:."
        )
    if policy.server.sleeps and policy.base_url is None and staleness:
        yield (
            f"optimisation.max_staleness is {staleness}, and policy.server.args.enable-sleep-mode has the server sleep "
            "while a step trains, when it would play the next rollouts. Set the first to 0, or leave the second out."
        )
    if adapters.is_adapter(policy.source):
        yield (
            f"{policy.source} is an adapter, and a server cannot hold another one on top of it. "
            "Run `composer export model` and start from the merged folder."
        )
    if count > 1 and policy.base_url is None:
        yield (
            f"{policy.model!r} has no address, and {count} processes would start a server each, on the same GPU or "
            "CPU. Start one or several with `composer serve`; give policy.base_url, and others in distribution.servers."
        )
    if servers > count:
        yield (
            f"{servers} servers were given to {count} processes, each of which samples from one. Leave "
            f"{servers - count} out of distribution.servers, or start more processes with torchrun."
        )
    if count > servers and staleness and needs_exclusive_server(policy):
        yield (
            f"optimisation.max_staleness is {staleness}, but {count} processes share {servers} vLLM on a CPU, "
            "which crashes when it scores for one process while it samples for another. Take 0, or give each a server "
            "in distribution.servers."
        )
