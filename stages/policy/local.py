"""A Hugging Face model in this process: token-in, token-out, with the log-probs of what was really sampled."""

import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from stages.errors import UsageError
from stages.policy import adapters, embedded
from stages.policy.base import Sample, Turn
from stages.policy.config import PolicyConfig
from stages.policy.sampling import sample_batch
from stages.policy.token_text import (
    end_ids,
    load_tokenizer,
    not_loaded,
    prompt_ids,
    token_sample,
    tokenizer_facts,
)
from stages.runs.artifact import Listener
from stages.runs.ledger import Budget

logging.disable_progress_bar()  # our own progress says what is being loaded
logging.set_verbosity_error()


class LocalPolicy:
    """Samples from a model that is held here; also wraps a model under training (`trainer.model`)."""

    capture_level = "tokens"

    def __init__(self, model: Any, tokenizer: Any, config: PolicyConfig, *, batch_size: int = 64) -> None:
        self.model, self.tokenizer, self.config, self.batch_size = model, tokenizer, config, batch_size
        self._end_ids = end_ids(model.generation_config, tokenizer)

    @classmethod
    def load(cls, config: PolicyConfig, *, cache: Path, listener: Listener) -> "LocalPolicy":
        """Load the configured model and its tokenizer; an adapter stays beside its base, as it was trained."""
        model, tokenizer = load_model(config, cache=cache, listener=listener, merged=False)
        return cls(model.eval(), tokenizer, config)

    @classmethod
    def open(cls, config: PolicyConfig, *, cache: Path, budget: Budget, listener: Listener) -> "LocalPolicy":
        """`load`; a local model costs no money, so the budget is left alone."""
        del budget
        if config.tool_calls == "native":
            raise UsageError(
                "policy.tool_calls is native, but no server reads the calls of a model in this process. "
                "Give the family whose format it writes: qwen3, llama3, mistral, deepseek or gpt-oss."
            )
        return cls.load(config, cache=cache, listener=listener)

    def sample(self, turns: list[Turn]) -> list[Sample]:
        """Answer a batch of turns in one generation."""
        started = time.monotonic()
        prompts = [prompt_ids(self.tokenizer, turn) for turn in turns]
        was_training = self.model.training
        self.model.eval()
        drawn = sample_batch(
            self.model,
            prompts,
            seeds=[turn.seed for turn in turns],
            max_tokens=self.config.max_tokens,
            temperature=self.config.temperature,
            end_ids=self._end_ids,
            pad_id=pad_id(self.tokenizer),
        )
        self.model.train(was_training)
        latency = (time.monotonic() - started) / len(turns)
        return [self._sample(prompt, ids, logps, latency) for prompt, (ids, logps) in zip(prompts, drawn, strict=True)]

    def count_tokens(self, turn: Turn) -> int:
        """The length of a turn's prompt."""
        return len(prompt_ids(self.tokenizer, turn))

    def _sample(self, prompt: list[int], ids: list[int], logps: list[float], latency: float) -> Sample:
        kind = "processed" if self.config.temperature else "raw"
        more = {"logprobs": logps, "logprob_kind": kind, "latency_s": latency}
        return token_sample(self.tokenizer, self._end_ids, prompt, ids, self.config.tool_calls, **more)

    def facts(self) -> dict[str, Any]:
        """Model name with digests of its tokenizer and chat template."""
        return tokenizer_facts(self.config, self.tokenizer) | {
            "parameters": sum(p.numel() for p in self.model.parameters())
        }


def load_model(
    config: PolicyConfig, *, cache: Path, listener: Listener, merged: bool = True, revision: str | None = None
) -> tuple[Any, Any]:
    """A causal LM and its tokenizer, on the configured device; embedded models are built first.

    merged: whether an adapter is added to its base's weights, in their type, or left beside them in float32. Raises
    `BadInput` where there is no such model, its tokenizer has no chat template, or an adapter's base has changed.
    """
    source = resolve(config, cache=cache, listener=listener)
    if adapters.is_adapter(source):
        return _on_its_base(Path(source), config, cache=cache, listener=listener, merged=merged)
    tokenizer = load_tokenizer(source, config, revision)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            source,
            dtype="auto" if config.dtype == "auto" else getattr(torch, config.dtype),
            revision=revision,
            use_safetensors=True,
        )
    except (OSError, ValueError) as error:
        raise not_loaded(config, error) from None
    return model.to(device(config.device)), tokenizer


def _on_its_base(
    folder: Path, config: PolicyConfig, *, cache: Path, listener: Listener, merged: bool
) -> tuple[Any, Any]:
    from peft import PeftModel

    start, revision = adapters.base_of(folder, config)
    base, tokenizer = load_model(start, cache=cache, listener=listener, revision=revision)
    adapted = PeftModel.from_pretrained(base, folder)
    return adapted.merge_and_unload().requires_grad_(True) if merged else adapted.get_base_model(), tokenizer


def resolve(config: PolicyConfig, *, cache: Path, listener: Listener) -> str:
    """What `from_pretrained` is called with: a folder, or a hub id."""
    if embedded.is_embedded(config.model):
        return str(embedded.folder(config.model, cache, listener))
    return str(Path(config.model).expanduser()) if Path(config.model).expanduser().is_dir() else config.model


def device(name: str) -> str:
    """`auto` is a GPU when there is one."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def pad_id(tokenizer: Any) -> int:
    """The padding token, else the end token; padded positions are masked either way."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
