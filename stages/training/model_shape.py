"""Facts of a training that are read before a model is loaded: the model's shape, and the lengths of the prompts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from composer_stages.envs import boundary
from composer_stages.envs.base import Environment, Task
from composer_stages.errors import BadInput
from composer_stages.policy import adapters, base, gguf, require_source
from composer_stages.policy.base import PolicyConfig, Turn
from composer_stages.rollouts.trace import pairs_with_states
from composer_stages.runs import hub
from composer_stages.runs.kinds import PAIR
from composer_stages.runs.run import Inputs
from composer_stages.training.config import Config
from composer_stages.words import Sentence

PROMPT_TOKENS = 1024
"""Assumed length of a prompt where none is measured."""
SIZES = ("num_hidden_layers", "hidden_size", "vocab_size")
"""Without which there is no estimate of memory."""
QUESTIONS, SESSIONS = 32, 2
"""Tasks that are measured, those with the longest texts: of an environment of questions, and of one that sets up files
or a shell for each task."""


@dataclass(frozen=True)
class Prompts:
    """What is known of the rows of a training before it.

    tokens: of the longest prompt. measured, tasks: how many prompts were measured, of how many tasks; 0 where the
    length is assumed. answers: after which a rollout ends at the latest; None where max_steps alone ends it. pair,
    longest_pair: tokens of a preference pair, its state and both actions, in the mean and of the longest one that was
    measured; 0 where pairs are not trained on or were not measured.
    """

    tokens: int = PROMPT_TOKENS
    measured: int = 0
    tasks: int = 0
    answers: int | None = None
    pair: float = 0.0
    longest_pair: int = 0

    def __str__(self) -> str:
        return Sentence("training.lengths-of-prompts", prompts=self)


ASSUMED = Prompts()


def measure_prompts(environment: Environment, tasks: Sequence[Task], tokenizer: Any, tool_calls: str) -> Prompts:
    """Return the lengths of the openings of some tasks, and close the environment; tool_calls: as in `PolicyConfig`.

    Tasks in containers are not measured: an image may have to be fetched first.
    """
    from composer_stages.policy.model_facts import prompt_ids

    answers = getattr(environment, "answers", None)
    most = QUESTIONS if answers else SESSIONS * (environment.sandbox != "container")
    try:
        tools = boundary.declared_tools(environment) if tool_calls != "none" else ()
        longest = sorted(tasks, key=lambda task: len(task.prompt), reverse=True)[:most]
        turns = [Turn(boundary.check_opening(environment.reset(task)), 0, tools=tools) for task in longest]
    finally:
        environment.close()
    lengths = [len(prompt_ids(tokenizer, turn)) for turn in turns]
    return Prompts(max(lengths, default=PROMPT_TOKENS), len(lengths), len(tasks), answers)


def measure_rows(
    inputs: Inputs, config: Config, environment: Environment, tasks: Sequence[Task], tokenizer: Any
) -> Prompts:
    """Return the lengths of the prompts of some tasks, and of some pairs where a channel trains on pairs."""
    prompts = measure_prompts(environment, tasks, tokenizer, config.policy.tool_calls)
    if not config.channels_that_need("pairs"):
        return prompts
    from composer_stages.training.channels.pairs import measure_pairs

    runs = inputs["pairs"]
    rows, number = chain.from_iterable(map(pairs_with_states, runs)), sum(len(run.scan(PAIR)) for run in runs)
    pair, longest = measure_pairs(rows, number, tokenizer, config.pairs.max_tokens)
    return replace(prompts, pair=pair, longest_pair=longest)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a causal LM. parameters: tied weights counted once. linears: (inputs, outputs) of those in its layers.

    kv: mean width of the keys of one layer; 0 where it keeps none. bytes: of one weight as it is loaded, 2 or 4. packs:
    whether packing.py can have each prompt computed once for its samples. eager_heads: of queries, where attention is
    eager and holds the scores of all pairs of tokens; else 0. pads: whether TRL's batches, padded on both sides, give
    the log-probs of rows alone. no_lora: why peft adapts no layer; empty where it does.
    """

    parameters: int
    linears: tuple[tuple[int, int], ...]
    layers: int
    hidden: int
    kv: int
    vocabulary: int
    bytes: int
    packs: bool = False
    eager_heads: int = 0
    pads: bool = True
    no_lora: str = ""


def model_shape(policy: PolicyConfig) -> ModelShape | None:
    """Return the shape of a local model or of an adapter's base; None where nothing that tells it is available.

    Read from the config.json, or from the header of a GGUF file. None, too, for models that environments bring along,
    which are small.
    """
    if base.is_built_in(policy.model):
        return None
    require_source(policy)
    real = base.real_models(policy.model)
    if real and (header := real.header(policy.model)):
        return _shape_of_file(header, policy)
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    from composer_stages.policy import model_checks, small_models, trials
    from composer_stages.policy.sampling import try_sampling
    from composer_stages.training.scoring import PACKED, PADDED, try_scoring

    source = str(Path(policy.model).expanduser())
    if base_and_revision := adapters.base_of(source, policy):
        return model_shape(base_and_revision[0])
    try:
        repo, commit = base.hub_id(policy.model)
        path = source if Path(source).is_dir() else hub.source(repo, commit)
        config = model_checks.read_shape(path, policy, commit)
        # Drawing weights that have no memory takes most of the time.
        with init_empty_weights(), no_init_weights(), model_checks.translate_errors(policy):
            model: Any = AutoModelForCausalLM.from_config(config)
    except (OSError, BadInput):
        return None  # opening the model will name what is wrong with it
    model.tie_weights()  # which a model without weights does not do by itself
    sizes = small_models.text_fields(config)
    if not all(type(sizes.get(name)) is int for name in SIZES):
        return None
    sampled, scored = trials.outcome(model, try_sampling), trials.outcome(model, try_scoring)
    loaded = getattr(config, "dtype", None) if policy.dtype == "auto" else getattr(torch, policy.dtype)
    return ModelShape(
        parameters=sum(p.numel() for p in model.parameters()),
        linears=tuple(adapters.linears(model).values()),
        layers=sizes["num_hidden_layers"],
        hidden=sizes["hidden_size"],
        kv=sampled.get("numbers", 0) // (2 * sizes["num_hidden_layers"]),
        vocabulary=sizes["vocab_size"],
        bytes=2 if loaded in (torch.bfloat16, torch.float16) else 4,
        packs=trials.longest(scored, PACKED, config) >= PROMPT_TOKENS,
        eager_heads=sizes.get("num_attention_heads") or 0
        if model.config.get_text_config()._attn_implementation == "eager"
        else 0,
        pads=scored.get(PADDED) == "all",
        no_lora=scored.get("lora", ""),
    )


def _shape_of_file(header: gguf.Header, policy: PolicyConfig) -> ModelShape:
    """Return the shape of a GGUF file's model, which is loaded in float32 where nothing else is set."""
    tensors = {tensor.name: tensor.shape for tensor in header.tensors}
    linears = [shape for name, shape in tensors.items() if name.startswith("blk.") and len(shape) == 2]
    return ModelShape(
        parameters=sum(map(math.prod, tensors.values())),
        linears=tuple((inputs, outputs) for outputs, inputs in linears),
        layers=header.number("block_count"),
        hidden=header.number("embedding_length"),
        kv=next((shape[0] for name, shape in tensors.items() if name.endswith(".attn_k.weight")), 0),
        vocabulary=tensors.get("token_embd.weight", (0,))[0],
        bytes=2 if policy.dtype in ("bfloat16", "float16") else 4,
        packs=header.architecture in gguf.WHOLE_ROWS,
    )
