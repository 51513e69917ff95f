"""A Hugging Face model in this process: load it, render prompts for it, and return its answers as samples.

Token ids in, token ids out, with the log-probs of the sampled tokens; how they are drawn is in sampling.py.
"""

import copy
import math
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from composer_stages.backends import resources
from composer_stages.errors import UsageError
from composer_stages.messages import declares_tools, pin_settings, turn_form
from composer_stages.policy import adapters, base, model_checks, sampling
from composer_stages.policy.base import UNSTATED, PolicyConfig, Sample, Turn
from composer_stages.policy.model_facts import ModelFacts
from composer_stages.policy.tool_calls import FORMATS
from composer_stages.runs import hub
from composer_stages.runs.activity import Notice, activity
from composer_stages.runs.ledger import Budget
from composer_stages.runs.run import AnswerFolders, Listener
from composer_stages.words import Sentence


def load_tokenizer(source: str, config: PolicyConfig, revision: str | None = None) -> Any:
    """Load the tokenizer of a folder or hub id; its chat template is checked, and its settings are pinned.

    `BadInput` for an unknown model and for a tokenizer without a template that renders conversations.
    """
    with model_checks.translate_errors(config):
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
    tokenizer.clean_up_tokenization_spaces = False  # with which answers lose blanks: `ls .` was executed as `ls.`
    folded = model_checks.fit_template(config, tokenizer)
    unread = model_checks.unread_settings(config, tokenizer)
    pin_settings(tokenizer, config.chat_template_kwargs, config.template_date)
    model_checks.require_read_calls(config, tokenizer)
    notices = [Sentence("policy.no-system-messages", model=config.model)] if folded else []
    notices += [Sentence("policy.template-setting-unread", model=config.model, name=name) for name in unread]
    if config.tool_calls != "none" and not declares_tools(tokenizer):
        notices.append(Sentence("policy.no-tool-declarations", model=config.model))
    if model_checks.cuts_otherwise(source, tokenizer, revision):
        notices.append(Sentence("policy.other-tokens", model=config.model, tokenizer=type(tokenizer).__name__))
    form, eos = turn_form(tokenizer), tokenizer.eos_token
    if not form.end and form.closing.strip():  # behind nothing, the mark of the next role may end an answer (GLM)
        notices.append(Sentence("policy.no-end-token", model=config.model, closing=form.closing, eos=eos))
    for text in notices:
        with activity(Notice(text)):
            pass
    return tokenizer


def open_tokenizer(config: PolicyConfig, *, listener: Listener, revision: str | None = None) -> Any:
    """Load a model's tokenizer, of an adapter that of its base; a model that Composer makes is made first."""
    source = resolve(config, listener=listener, revision=revision)
    if base_and_revision := adapters.base_of(source, config):
        return open_tokenizer(base_and_revision[0], listener=listener, revision=base_and_revision[1])
    return load_tokenizer(source, config, revision)


logging.disable_progress_bar()  # our own progress line reports the loading
logging.set_verbosity_error()
# PEFT reads it, and TRL sets it.
warnings.filterwarnings("ignore", message=r"`(is_)?gradient_checkpointing\w*` is deprecated")


class LocalPolicy:
    """A policy on a model in this process, also on a model under training (`trainer.model`)."""

    capture_level, batch_size = "tokens", sys.maxsize
    """`sample` cuts any number of turns into batches that fit into memory."""

    def __init__(self, model: Any, tokenizer: Any, config: PolicyConfig) -> None:
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.context = base.declared_context(model.config.get_text_config().to_dict()) or math.inf
        self.model_facts = ModelFacts(config, tokenizer, model.generation_config, self.context)
        self._reused: tuple[sampling.PrefixCache, int] | None = None

    @classmethod
    def open(
        cls,
        config: PolicyConfig,
        *,
        listener: Listener,
        cache: AnswerFolders | None = None,
        budget: Budget | None = None,
    ) -> "LocalPolicy":
        """Load the configured model and its tokenizer; a local model costs no money, so nothing else is used."""
        del cache, budget
        if config.tool_calls == "native":
            raise UsageError("policy.native-calls-without-server", forms=[*FORMATS])
        resources.use_own_cores()
        # An adapter is not merged into its base, as in training: merged weights are rounded to the base's type.
        model, tokenizer = load_model(config, listener=listener, merged=False)
        sampling.check_cache(model, config)
        if slower := sampling.describe_ways(config, model):
            with activity(Notice(slower)):
                pass
        return cls(model.eval(), tokenizer, config)

    def sampling_at(self, temperature: float, max_tokens: int | None) -> "LocalPolicy":
        """Return a policy with these settings on the same model and the same KV cache."""
        policy = copy.copy(self)
        policy.config = self.config.model_copy(update={"temperature": temperature, "max_tokens": max_tokens})
        return policy

    @contextmanager
    def reusing_prefixes(self) -> Iterator[None]:
        """Keep the KV cache of a call for the next one inside the block, in which the weights must not change."""
        with adapter_merged(self.model):
            # Measured once: what is kept is not free, but it is given up for the next call.
            self._reused = sampling.PrefixCache(), sampling.row_budget(self.model, self.config)
            try:
                yield
            finally:
                self._reused = None

    def sample(self, turns: list[Turn]) -> list[Sample]:
        """Return the answers of turns, sampled together as far as memory allows."""
        return self.sample_ids([self.model_facts.render(turn) for turn in turns], [turn.seed for turn in turns])

    def sample_ids(self, rendered: Sequence[list[int] | Sample], seeds: Sequence[int]) -> list[Sample]:
        """Return the answers to prompts as token ids; a failed sample in a prompt's place is its answer."""
        # The model may be one under training: without dropout, and afterwards as it was.
        was_training = self.model.training
        self.model.eval()
        try:
            with adapter_merged(self.model):
                return self._sample(rendered, seeds)
        finally:
            self.model.train(was_training)

    def _sample(self, rendered: Sequence[list[int] | Sample], seeds: Sequence[int]) -> list[Sample]:
        started = time.monotonic()
        prompts = [ids for ids in rendered if isinstance(ids, list)]
        seeds = [seed for ids, seed in zip(rendered, seeds, strict=True) if isinstance(ids, list)]
        if not prompts:
            return [refused for refused in rendered if isinstance(refused, Sample)]
        prefixes, most = self._reused or (None, sampling.row_budget(self.model, self.config))
        max_tokens = self.config.max_tokens or self._room(prompts)
        batches = sampling.split_batches(self.model, prompts, max_tokens, most)
        if prefixes is not None and len(batches) > 1:
            prefixes.clear()  # what one batch leaves would take the memory of the next
            prefixes = None
        drawn: dict[int, sampling.Drawn] = {}
        for numbers in batches:
            completions = sampling.sample_batch(
                self.model,
                [prompts[number] for number in numbers],
                seeds=[seeds[number] for number in numbers],
                max_tokens=max_tokens,
                temperature=self.config.temperature,
                end_ids=self.model_facts.end_ids,
                pad_id=self.model_facts.pad_id,
                context=self.context,
                prefill_tokens=self.config.prefill_tokens,
                prefixes=prefixes,
            )
            drawn |= dict(zip(numbers, completions, strict=True))
        about = {
            "logprob_kind": "processed" if self.config.temperature else "raw",
            "latency_s": (time.monotonic() - started) / len(rendered),  # of an answer: its share of the batch
        }
        answers = (
            self.model_facts.read(prompt, ids, logprobs=logps, **about)
            for number, prompt in enumerate(prompts)
            for ids, logps in [drawn[number]]
        )
        return [next(answers) if isinstance(ids, list) else ids for ids in rendered]

    def _room(self, prompts: list[list[int]]) -> int:
        """Return the tokens that the context leaves for an answer after the longest prompt, at least one."""
        context = UNSTATED if self.context == math.inf else int(self.context)
        return max(context - max(map(len, prompts)), 1)

    def count_tokens(self, turn: Turn) -> int:
        """Return the number of tokens in a turn's prompt."""
        return self.model_facts.count_tokens(turn)

    def facts(self) -> dict[str, Any]:
        """Return model name, commit on the hub, digests of tokenizer and chat template, and number of parameters."""
        commit = adapters.commit_of(self.model)
        facts = self.model_facts.manifest() | {"parameters": sum(p.numel() for p in self.model.parameters())}
        return {**facts, "revision": commit} if commit else facts


def load_model(
    config: PolicyConfig, *, listener: Listener, merged: bool = True, empty: bool = False, revision: str | None = None
) -> tuple[Any, Any]:
    """Load a causal LM and its tokenizer onto the configured device; make a model that is made here first.

    merged: whether an adapter is added to its base's weights, in their type, or kept apart in float32. empty: give the
    model no weights, which another process has. Raises `BadInput` for an unknown model, one that is damaged
    (model_checks.py), or an adapter whose base has changed.
    """
    source = resolve(config, listener=listener, revision=revision)
    if base_and_revision := adapters.base_of(source, config):
        below, commit = base_and_revision
        base_model, tokenizer = load_model(below, listener=listener, empty=empty, revision=commit)
        if empty:
            return base_model, tokenizer
        adapted = adapters.add_adapter(base_model, source, config)
        model_checks.require_finite(config, adapted)
        # peft freezes the base's weights; training from a merged model trains them all. get_base_model keeps the
        # adapter's layers in place.
        return adapted.merge_and_unload().requires_grad_(True) if merged else adapted.get_base_model(), tokenizer
    tokenizer = check_folder(source, config, revision)
    with activity(f"loading {config.model}"):
        dtype = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
        if empty:
            return _opened(source, config, revision, dtype=dtype, device_map="meta")[0], tokenizer
        model = _opened(source, config, revision, dtype=dtype)[0].to(_usable(device(config.device)))
        model_checks.require_finite(config, model)
    # The template's end, too, where it is none of the model's (Qwen2.5, base): other programs stop at what is saved.
    settings = model.generation_config
    declared, ends = settings.eos_token_id, ModelFacts(config, tokenizer, settings, math.inf).end_ids
    if not ends <= {*(declared if isinstance(declared, list) else [declared])}:
        settings.eos_token_id = sorted(ends)
    return model, tokenizer


def _usable(name: str) -> torch.device:
    """Return a device that tensors can be on; `UsageError` for another."""
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UsageError("policy.no-device", name=name, error=str(error).partition("\n")[0]) from None


def check_folder(source: str, config: PolicyConfig, revision: str | None = None) -> Any:
    """Check the tensors of a folder or hub id against its configuration; return the tokenizer, load no weights."""
    tokenizer = load_tokenizer(source, config, revision)
    model_checks.read_shape(source, config, revision)
    empty, loading_info = _opened(source, config, revision, device_map="meta", ignore_mismatched_sizes=True)
    model_checks.require_complete(config, loading_info)
    model_checks.require_embedded(config, tokenizer, empty)
    return tokenizer


def _opened(source: str, config: PolicyConfig, revision: str | None, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Return a causal LM and transformers' loading info about its tensors; FP8 weights become their numbers."""
    with model_checks.translate_errors(config):
        shape: Any = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
        quantised = getattr(shape, "quantization_config", None)
        if is_fp8 := isinstance(quantised, dict) and quantised.get("quant_method") == "fp8":
            quantised["dequantize"] = True  # as transformers does by itself where a machine cannot multiply them
            options["config"] = shape
        opened: Any = AutoModelForCausalLM.from_pretrained(
            source,
            revision=revision,
            use_safetensors=True,  # a pickle can run code while it is read
            trust_remote_code=False,  # without it transformers asks on the terminal whether to run a model's code
            output_loading_info=True,
            **options,
        )
    if is_fp8 and hasattr(opened[0], "_weight_conversions"):
        # Else transformers 5.23 quantises what it saves, without saying so in config.json (transformers#44983).
        del opened[0]._weight_conversions
    model_checks.make_writable(opened[0])
    return opened[0], opened[1]


@contextmanager
def adapter_merged(model: Any) -> Iterator[None]:
    """Merge LoRA into its base's float32 weights inside the block; afterwards restore the original tensors.

    A merged Linear takes one product per token instead of three. Memory: a second copy of the adapted weights. Layers
    with other types, in which sums would be rounded, with several adapters or a bias of the adapter are not merged.
    """
    originals: list[tuple[Any, torch.Tensor]] = []
    try:
        for layer in _mergeable(model):
            base, [adapter] = layer.get_base_layer(), layer.active_adapters
            originals.append((layer, base.weight.data))
            with torch.no_grad():
                if layer.lora_variant:  # of DoRA, which makes a new tensor
                    layer.merge()
                else:  # as `merge` does, which writes into the old one, and takes twice the time
                    up, down = layer.lora_B[adapter].weight, layer.lora_A[adapter].weight
                    base.weight.data = torch.addmm(base.weight, up, down, alpha=layer.scaling[adapter])
                    layer.merged_adapters.append(adapter)
        yield
    finally:
        for layer, weight in originals:
            layer.get_base_layer().weight.data = weight
            layer.merged_adapters.clear()


def _mergeable(model: Any) -> list[Any]:
    """Return the Linears with an adapter that float32 weights can take in, none of which has been merged yet."""
    if not getattr(model, "peft_config", None):
        return []
    from peft.tuners import lora
    from peft.tuners.lora.variants import DoraLinearVariant

    return [
        module
        for module in model.modules()
        if isinstance(module, lora.Linear)
        and not (module.merged or module.disable_adapters)
        and isinstance(module.get_base_layer(), torch.nn.Linear)
        and {parameter.dtype for parameter in module.parameters()} == {torch.float32}
        and len(module.active_adapters) == 1
        and not any(module.lora_bias.values())
        and all(isinstance(variant, DoraLinearVariant) for variant in module.lora_variant.values())
    ]


@contextmanager
def checkpointed(model: Any, enabled: bool = True) -> Iterator[None]:
    """Checkpoint activations where that is wanted: keep one per layer, and recompute the rest in the backward pass."""
    if not enabled:
        yield
        return
    # Non-reentrant, under which each module is called once again, and so are its hooks.
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # transformers checkpoints in training mode only (`GradientCheckpointingLayer`, 5.x); Qwen3 has no dropout by
    # default, so that nothing else changes.
    was_training = model.training
    model.train()
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()
        model.train(was_training)


def resolve(config: PolicyConfig, *, listener: Listener, revision: str | None = None) -> str:
    """Return the argument of `from_pretrained`: a folder or a hub id.

    For an id, `BadInput` where the hub does not answer and has not been asked for this model before.
    """
    if maker := base.maker_of(config.model):
        return str(maker[0].ensure(maker[1], listener))
    return str(config.folder) if config.folder.is_dir() else hub.source(config.model, revision)


def device(name: str) -> str:
    """Return a torch device name; `auto` is cuda if a GPU is available, else cpu."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
