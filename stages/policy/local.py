"""A Hugging Face model in this process: token ids in, token ids out, with the log-probs of the sampled tokens.

Sampling is our own, because transformers' `generate` keeps [T, B, V] scores to return log-probs and draws all rows from
one random stream. Here a row's draws depend on its own seed alone, memory stays at [B, V], and a prompt that several
rows share is prefilled once.
"""

import math
import time
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from stages.errors import BadInput, UsageError
from stages.messages import following_ids, opening_ids, pin_settings
from stages.policy import adapters, base, dialect
from stages.policy.base import UNSTATED, PolicyConfig, Sample, Turn
from stages.policy.dialect import canonical
from stages.runs import hub, store
from stages.runs.activity import doing
from stages.runs.artifact import Listener
from stages.runs.ledger import Budget


@torch.inference_mode()
def sample_batch(
    model: Any,
    prompts: list[list[int]],
    *,
    seeds: list[int],
    max_tokens: int,
    temperature: float,
    end_ids: set[int],
    pad_id: int,
) -> list[tuple[list[int], list[float]]]:
    """Draw one completion per prompt: (token ids with the end token, natural log-probs after temperature).

    At temperature 0 the most likely token is taken and log-probs are those of the untempered distribution.
    """
    device = next(model.parameters()).device
    ids, mask, rows = _left_pad_distinct(prompts, pad_id, device)  # [U, P], [U, P], [B]
    # A generator per row, on the CPU in float64: a row's draws depend neither on the batch nor on the device.
    generators = [torch.Generator().manual_seed(seed % 2**63) for seed in seeds]
    drawn = [torch.rand(max_tokens, dtype=torch.float64, generator=generator) for generator in generators]
    uniforms = torch.stack(drawn).to(device)  # [B, max_tokens]
    ends = torch.tensor(sorted(end_ids), device=device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)  # padding on the left does not shift positions
    out = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1)
    cache, logits = out.past_key_values, out.logits[rows, -1]  # [B, V]
    # Equal prompts were computed once; from here on every row has its own copy in the cache.
    cache.batch_select_indices(rows)
    mask, positions = mask[rows], positions[rows, -1:]
    alive = torch.ones(len(prompts), dtype=torch.bool, device=device)
    tokens, logps = [], []
    for t in range(max_tokens):
        token, logp = draw(logits, uniforms[:, t], temperature)  # [B], [B]
        tokens.append(torch.where(alive, token, pad_id))
        logps.append(torch.where(alive, logp, math.nan))
        alive = alive & ~torch.isin(token, ends)
        if not alive.any() or t + 1 == max_tokens:
            break
        ids, positions = tokens[-1][:, None], positions + 1
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        logits = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        ).logits[:, -1]
    sampled, values = torch.stack(tokens, 1), torch.stack(logps, 1)  # [B, T]; NaN after the end token of a row
    lengths = (~values.isnan()).sum(-1).tolist()
    # Rounding can make the log-prob of a near-certain token slightly positive.
    return [
        (row[:n], [min(p, 0.0) for p in logp_row[:n]])
        for row, logp_row, n in zip(sampled.tolist(), values.tolist(), lengths, strict=True)
    ]


def draw(
    logits: Float[Tensor, "B V"], uniform: Float[Tensor, " B"], temperature: float
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """Draw one token per row by inverting the cumulative distribution at `uniform`; return it with its log-prob."""
    logp = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    if temperature == 0:
        token = logp.argmax(-1)
    else:
        # In float64: a float32 sum over a vocabulary of 150,000 drops rare tokens. Its last value, not 1, is the total.
        cumulative = logp.double().exp().cumsum(-1)
        target = uniform[:, None] * cumulative[:, -1:]
        token = torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
    return token, logp.gather(-1, token[:, None]).squeeze(-1)


def _left_pad_distinct(
    prompts: list[list[int]], pad_id: int, device: torch.device
) -> tuple[Int[Tensor, "U P"], Int[Tensor, "U P"], Int[Tensor, " B"]]:
    """Return the distinct prompts padded on the left, their mask, and the row of every prompt."""
    distinct = {tuple(prompt): None for prompt in prompts}
    order = {prompt: row for row, prompt in enumerate(distinct)}
    width = max(map(len, prompts))
    ids = [[pad_id] * (width - len(prompt)) + list(prompt) for prompt in distinct]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in distinct]
    rows = [order[tuple(prompt)] for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device), torch.tensor(rows, device=device)


def load_tokenizer(source: str, config: PolicyConfig, revision: str | None = None) -> Any:
    """Load the tokenizer of a folder or hub id, with the chat template's settings pinned.

    `BadInput` for an unknown model and for a tokenizer without a template.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision)
    except (OSError, ValueError) as error:
        raise not_loaded(config, error) from None
    if tokenizer.chat_template is None:
        raise BadInput(
            f"The tokenizer of {config.model!r} has no chat template, so messages cannot be rendered. "
            "Use an instruction-tuned model."
        )
    pin_settings(tokenizer, config.chat_template_kwargs)
    return tokenizer


def not_loaded(config: PolicyConfig, error: Exception) -> BadInput:
    """Return the error for a model that transformers cannot load."""
    first = str(error).strip().splitlines()[0]
    return BadInput(
        f"The model {config.model!r} cannot be loaded ({first}). "
        f"Give a Hugging Face folder, a reachable hub id, or {base.EXAMPLE}."
    )


def prompt_ids(tokenizer: Any, turn: Turn) -> list[int]:
    """Return a turn's prompt ids: the sampled ids so far, with only the new messages rendered."""
    if turn.held_ids is None:
        return opening_ids(tokenizer, turn.messages, dialect.declared(turn.tools))
    last = max(i for i, message in enumerate(turn.messages) if message["role"] == "assistant")
    return turn.held_ids + following_ids(tokenizer, turn.messages[last + 1 :])


def end_ids(generation_config: Any, tokenizer: Any) -> set[int]:
    """Return the token ids that end an answer: those of the generation config, and the tokenizer's own."""
    declared = generation_config.eos_token_id
    more = declared if isinstance(declared, list) else [declared]
    return {i for i in (*more, tokenizer.eos_token_id) if i is not None}


def token_sample(
    tokenizer: Any, ends: set[int], prompt: list[int], ids: list[int], tool_calls: str, **more: Any
) -> Sample:
    """Return the sample of these ids, its tool calls read in the format `tool_calls`; `more`: further fields."""
    ended = bool(ids) and ids[-1] in ends
    return Sample(
        text=canonical(tool_calls, tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False)),
        finish_reason="stop" if ended else "length",
        prompt_ids=prompt,
        completion_ids=ids,
        prompt_tokens=len(prompt),
        completion_tokens=len(ids),
        **more,
    )


def tokenizer_facts(config: PolicyConfig, tokenizer: Any) -> dict[str, Any]:
    """Return the manifest's entry of a model that we render for: its name, digests of tokenizer and template."""
    return {
        "model": config.model,
        "tokenizer_sha256": store.digest(sorted(tokenizer.get_vocab().items())),
        "chat_template_sha256": store.digest(tokenizer.chat_template),
    }


logging.disable_progress_bar()  # our own progress line reports the loading
logging.set_verbosity_error()


class LocalPolicy:
    """A policy on a model in this process, also on a model under training (`trainer.model`)."""

    capture_level = "tokens"

    def __init__(self, model: Any, tokenizer: Any, config: PolicyConfig, *, batch_size: int = 64) -> None:
        self.model, self.tokenizer, self.config, self.batch_size = model, tokenizer, config, batch_size
        self._end_ids = end_ids(model.generation_config, tokenizer)

    @classmethod
    def open(
        cls, config: PolicyConfig, *, cache: Path, listener: Listener, budget: Budget | None = None
    ) -> "LocalPolicy":
        """Load the configured model and its tokenizer; a local model costs no money, so the budget is not used."""
        del budget
        if config.tool_calls == "native":
            raise UsageError(
                "policy.tool_calls is native, but no server reads the calls of a model in this process. "
                "Give the family whose format it writes: qwen3, llama3, mistral, deepseek or gpt-oss."
            )
        # An adapter is not merged into its base, as in training: merged weights are rounded to the base's type.
        model, tokenizer = load_model(config, cache=cache, listener=listener, merged=False)
        return cls(model.eval(), tokenizer, config)

    def sample(self, turns: list[Turn]) -> list[Sample]:
        """Return the answers of a batch of turns, sampled together."""
        started = time.monotonic()
        prompts = [prompt_ids(self.tokenizer, turn) for turn in turns]
        # The model may be one under training: without dropout, and afterwards as it was.
        was_training = self.model.training
        self.model.eval()
        drawn = sample_batch(
            self.model,
            prompts,
            seeds=[turn.seed for turn in turns],
            max_tokens=self.config.max_tokens or self._room(prompts),
            temperature=self.config.temperature,
            end_ids=self._end_ids,
            pad_id=pad_id(self.tokenizer),
        )
        self.model.train(was_training)
        about = {
            "logprob_kind": "processed" if self.config.temperature else "raw",
            "latency_s": (time.monotonic() - started) / len(turns),  # of an answer: its share of the batch
        }
        return [
            token_sample(self.tokenizer, self._end_ids, prompt, ids, self.config.tool_calls, logprobs=logps, **about)
            for prompt, (ids, logps) in zip(prompts, drawn, strict=True)
        ]

    def _room(self, prompts: list[list[int]]) -> int:
        """Return the tokens that the context leaves behind the longest prompt, at least one."""
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or UNSTATED
        return max(int(context) - max(map(len, prompts)), 1)

    def count_tokens(self, turn: Turn) -> int:
        """Return the number of tokens in a turn's prompt."""
        return len(prompt_ids(self.tokenizer, turn))

    def facts(self) -> dict[str, Any]:
        """Return model name, digests of tokenizer and chat template, and the number of parameters."""
        return tokenizer_facts(self.config, self.tokenizer) | {
            "parameters": sum(p.numel() for p in self.model.parameters())
        }


def load_model(
    config: PolicyConfig, *, cache: Path, listener: Listener, merged: bool = True, revision: str | None = None
) -> tuple[Any, Any]:
    """Load a causal LM and its tokenizer onto the configured device; train an embedded model first.

    merged: whether an adapter is added to its base's weights, in their type, or kept apart in float32. Raises
    `BadInput` for an unknown model, a tokenizer without a chat template, or an adapter whose base has changed.
    """
    source = resolve(config, cache=cache, listener=listener, revision=revision)
    if adapters.is_adapter(source):
        from peft import PeftModel

        below, commit = adapters.base_of(Path(source), config)
        base_model, tokenizer = load_model(below, cache=cache, listener=listener, revision=commit)
        adapted = PeftModel.from_pretrained(base_model, source)
        # peft freezes the base's weights; training from a merged model trains them all. get_base_model keeps the
        # adapter's layers in place.
        return adapted.merge_and_unload().requires_grad_(True) if merged else adapted.get_base_model(), tokenizer
    tokenizer = load_tokenizer(source, config, revision)
    try:
        with doing(f"loading {config.model}"):
            model: Any = AutoModelForCausalLM.from_pretrained(
                source,
                dtype="auto" if config.dtype == "auto" else getattr(torch, config.dtype),
                revision=revision,
                use_safetensors=True,  # a pickle can run code while it is read
            )
    except (OSError, ValueError) as error:
        raise not_loaded(config, error) from None
    return model.to(device(config.device)), tokenizer


def resolve(config: PolicyConfig, *, cache: Path, listener: Listener, revision: str | None = None) -> str:
    """Return the argument of `from_pretrained`: a folder or a hub id.

    For an id, `BadInput` where the hub does not answer and has not been asked for this model before.
    """
    if base.is_embedded(config.model):
        maker, name = base.embedded(config.model)
        return str(maker.ensure(name, cache, listener))
    return str(config.folder) if config.folder.is_dir() else hub.source(config.model, revision)


def device(name: str) -> str:
    """Return a device name; `auto` is a GPU when there is one."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def pad_id(tokenizer: Any) -> int:
    """Return the padding token, else the end token; padded positions are masked either way."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
