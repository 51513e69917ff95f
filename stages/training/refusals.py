"""Refusals: why a plan cannot be trained, and what to set instead, before a model is loaded."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from composer_stages.errors import UsageError
from composer_stages.policy import adapters
from composer_stages.policy.serving import needs_exclusive_server
from composer_stages.training.channels import CHANNELS

if TYPE_CHECKING:
    from composer_stages.training.plan import TrainPlan

PER_PASS = ("entropy_coef", "use_adaptive_entropy")
"""Fields of TRL's that add a mean over the tokens of each pass (TRL 1.16, trainer/grpo_trainer.py `_compute_loss`)."""
STEPPED_BY_SHARES = ("adamw_torch", "adamw_torch_fused", "sgd")
"""Optimisers that were measured to take the same step from shares (tests/stages/training/test_processes.py)."""


def refusals(plan: "TrainPlan") -> Iterator[UsageError]:
    """Yield why a plan cannot be trained, and what to set, as far as the settings and config.json of the model show.

    The validators of `Config` refuse what one table of settings alone shows; `composer_stages.training.weights` refuses
    what only a server shows.
    """
    yield from _input_refusals(plan)
    yield from _process_refusals(plan)
    yield from _shard_refusals(plan)
    yield from _server_refusals(plan)


def _input_refusals(plan: "TrainPlan") -> Iterator[UsageError]:
    """Yield what is wrong between the model, the runs that are given, and the losses that are to be learned from."""
    config, needing = plan.config, plan.config.channels_that_need("pairs")
    if needing and not plan.pairs:
        yield UsageError("training.no-pairs", channel=needing[0], weight=config.weights.active()[needing[0]])
    if plan.pairs and not needing:
        on_pairs = [f"weights.{name}" for name, channel in CHANNELS.items() if "pairs" in channel.needs]
        yield UsageError("training.pairs-unused", settings=on_pairs)
    if plan.shape is not None and config.adapter.rank and not config.adapter.targets and plan.shape.no_lora:
        yield UsageError("training.no-lora", model=config.policy.model, reason=plan.shape.no_lora)
    if plan.shape is not None and not plan.shape.pads and config.optimisation.shared_prompts is False:
        yield UsageError("training.rows-not-padded", model=config.policy.model)
    channels = bool(config.weights.active())
    if config.trl.get("cast_lm_head_to_fp32") and (channels or config.optimisation.shared_prompts is not False):
        yield UsageError("training.head-of-trl", channels=channels)
    if channels and (config.adapter.dropout or config.trl.get("disable_dropout") is False):
        yield UsageError("training.dropout-of-channels", channel=min(config.weights.active()))
    if plan.direction and config.adapter.dora:
        yield UsageError("training.direction-and-dora")
    if config.optimisation.stop_on_collapse and config.diloco.store is not None:
        yield UsageError("training.collapse-in-replica")
    if config.optimisation.beta and not config.adapter.rank and adapters.is_adapter(config.policy.model):
        # TRL would load the adapter's base as the reference of the KL penalty.
        yield UsageError("training.reference-of-adapter", model=config.policy.model)


def mean_of_a_pass(trl: Mapping[str, Any]) -> str | None:
    """Return the first field of `PER_PASS` that is set; None for none."""
    return next((name for name in PER_PASS if trl.get(name)), None)


def of_a_pass(trl: Mapping[str, Any]) -> str | None:
    """Return which field of TRL's acts on the tokens of each pass alone, and so by how a micro-batch is cut."""
    return mean_of_a_pass(trl) or ("top_entropy_quantile" if trl.get("top_entropy_quantile", 1.0) != 1.0 else None)


def _process_refusals(plan: "TrainPlan") -> Iterator[UsageError]:
    """Yield why several processes would take another step than one, or cannot share the rollouts of a step."""
    size, trl, count = plan.config.optimisation, plan.config.trl, plan.processes
    rollouts = max(size.prompts_per_step // count, 1) * size.generations
    if size.micro_batch and rollouts % min(size.micro_batch, rollouts):
        yield UsageError("training.micro-batch-not-divided", micro_batch=size.micro_batch, rollouts=rollouts)
    if size.max_tokens_per_micro_batch and (field := of_a_pass(trl)):
        yield UsageError("training.mean-per-part", field=field, cut="optimisation.max_tokens_per_micro_batch")
    if count == 1:
        return
    if plan.config.diloco.store is not None:
        yield UsageError("training.replica-of-processes", count=count)
    if size.loss_type == "bnpo":
        yield UsageError("training.bnpo-of-processes", count=count)
    if field := mean_of_a_pass(trl):
        yield UsageError("training.mean-per-pass", field=field, count=count)
    if size.prompts_per_step % count:
        yield UsageError("training.prompts-not-shared", prompts_per_step=size.prompts_per_step, count=count)


def _shard_refusals(plan: "TrainPlan") -> Iterator[UsageError]:
    """Yield what needs all weights or all gradients in one place, where several processes share them."""
    config = plan.config
    if plan.processes == 1 or config.distribution.sharding == "none":
        return
    rank, optimiser = config.adapter.rank, config.trl.get("optim", STEPPED_BY_SHARES[0])
    copied = not rank and config.channels_that_need("hints") and config.hints.teacher != "current"
    if config.adapter.dora:
        yield UsageError("training.shares-of-dora")
    if plan.spectral:
        yield UsageError("training.shares-of-singular-values")
    if plan.direction and config.probe.measure:
        yield UsageError("training.shares-of-measured-gradients")
    if copied:
        yield UsageError("training.shares-of-hint-teacher", teacher=config.hints.teacher)
    if config.optimisation.gradient_cosine_every:
        yield UsageError("training.shares-of-cosines")
    if not rank and optimiser not in STEPPED_BY_SHARES:
        yield UsageError("training.shares-of-optimiser", optimiser=optimiser, known=STEPPED_BY_SHARES)


def _server_refusals(plan: "TrainPlan") -> Iterator[UsageError]:
    """Yield why a policy behind servers cannot follow the training, or the processes cannot share these servers."""
    policy, staleness = plan.config.policy, plan.config.optimisation.max_staleness
    servers, count = 1 + len(plan.config.distribution.servers), plan.processes
    if not policy.served:
        return
    if plan.spectral:
        yield UsageError("training.server-of-singular-values", model=policy.model)
    if plan.config.diloco.store is not None:
        yield UsageError("training.server-of-replicas", model=policy.model)
    if policy.server.sleeps and policy.base_url is None and staleness:
        yield UsageError("training.sleep-and-staleness", staleness=staleness)
    if adapters.is_adapter(policy.source):
        yield UsageError("training.server-on-adapter", source=policy.source)
    if count > 1 and policy.base_url is None:
        yield UsageError("training.no-server-address", model=policy.model, count=count)
    if servers > count:
        yield UsageError("training.too-many-servers", servers=servers, count=count)
    if count > servers and staleness and needs_exclusive_server(policy):
        yield UsageError("training.shared-server-stale", staleness=staleness, count=count, servers=servers)
