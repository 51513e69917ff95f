"""Supervised training of a small model and of its tokenizer: a plain PyTorch loop, and byte-level BPE.

One thread and fixed seeds, so that two builds on one machine have equal bytes.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from jaxtyping import Float, Int
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from stages.tiny_models.folders import FitSchedule

PAD, UNKNOWN, START, END = "<|pad|>", "<|unk|>", "<|im_start|>", "<|im_end|>"
# ChatML. The template leaves old text alone, so a longer conversation always starts with the tokens of the shorter one.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALPHABET = sorted(set(pre_tokenizers.ByteLevel.alphabet()) & {*map(chr, range(33, 127)), "\u0120", "\u010a"})
"""Printable ASCII, the space and the newline, as byte-level BPE spells them; any other byte is <|unk|>."""

Encoded = tuple[list[int], list[bool]]
"""Token ids of an example, and the mask of those to be learned."""


@contextmanager
def reproducible(seed: int) -> Iterator[None]:
    """Use one thread, deterministic kernels and a private random stream; restore all of them afterwards."""
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)  # the order of a sum over threads depends on how many there are
    torch.use_deterministic_algorithms(True)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict)


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Return an untrained Qwen3 of two layers and about 0.45 million parameters."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        # ChatML has no token for the beginning of a text; a policy stops at the end of its message.
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config).float()


def load(folder: Path) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """Load a model and its tokenizer from their folder."""
    return Qwen3ForCausalLM.from_pretrained(folder), PreTrainedTokenizerFast.from_pretrained(folder)


def fit(
    model: Qwen3ForCausalLM,
    examples: Sequence[Encoded],
    schedule: FitSchedule,
    seed: int,
    progress: Callable[[int, int], None],
) -> None:
    """Train one pass over the examples, in batches of similar length and random order.

    Muon for the matrices of the blocks, AdamW for embeddings and norms: half the steps of AdamW alone. `progress` is
    called with (steps done, steps in all).
    """
    # match_rms_adamw scales Muon's updates to the size of AdamW's, so that one learning rate serves both.
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    rate, decay = schedule.learning_rate, schedule.weight_decay
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, rate, betas=(0.9, 0.95), weight_decay=decay),
    ]
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(
            optimizer, schedule.learning_rate, total_steps=schedule.steps, pct_start=schedule.warm_up
        )
        for optimizer in optimizers
    ]
    model.train()
    progress(0, schedule.steps)
    for step, batch in enumerate(_batches(examples, schedule, seed)):
        model.zero_grad()
        loss(model, *batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), schedule.max_norm)
        for optimizer in optimizers:
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        progress(step + 1, schedule.steps)
    model.eval()


def loss(
    model: Qwen3ForCausalLM, ids: Int[Tensor, "B T"], mask: Int[Tensor, "B T"], learned: Int[Tensor, "B T"]
) -> Float[Tensor, ""]:
    """Return the mean cross-entropy of the tokens to be learned; logits are computed only for these."""
    # Most tokens of a transcript are the environment's and not to be learned: no logits for them.
    hidden = model.model(input_ids=ids, attention_mask=mask).last_hidden_state  # [B, T, D]
    wanted = learned[:, 1:].bool()
    return cross_entropy(model.lm_head(hidden[:, :-1][wanted]), ids[:, 1:][wanted])


def _batches(examples: Sequence[Encoded], schedule: FitSchedule, seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    # Neighbours in length share a batch: less padding, at the price of batches that are drawn as a whole.
    by_length = sorted(examples, key=lambda example: len(example[0]))
    batches = [by_length[i : i + schedule.batch] for i in range(0, len(by_length), schedule.batch)]
    random.Random(seed).shuffle(batches)  # noqa: S311 - an order of training, no secret
    for batch in batches[: schedule.steps]:
        width = max(len(ids) for ids, _ in batch)
        yield (
            torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in batch]),
            torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in batch]),
            torch.tensor([learned + [False] * (width - len(learned)) for _, learned in batch]),
        )


def train_tokenizer(texts: Iterable[str], pieces: str, vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer of at most `vocabulary` tokens; no token crosses a match of the pattern `pieces`."""
    bpe = Tokenizer(models.BPE(unk_token=UNKNOWN))
    split = pre_tokenizers.Split(Regex(pieces), "isolated")
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.Sequence([split, spelled]), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, UNKNOWN, START, END],
        initial_alphabet=ALPHABET,
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,  # decoding must give back the text that was encoded, spaces included
    )
