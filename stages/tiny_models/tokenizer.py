"""The tokenizer of a small model: byte-level BPE trained on its texts, with a ChatML template.

The template leaves old text alone, so a longer conversation always starts with the tokens of the shorter one.
"""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, UNKNOWN, START, END = "<|pad|>", "<|unk|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALPHABET = sorted(set(pre_tokenizers.ByteLevel.alphabet()) & {*map(chr, range(33, 127)), "\u0120", "\u010a"})
"""Printable ASCII, the space and the newline, as byte-level BPE spells them; any other byte is <|unk|>."""


def trained(texts: Iterable[str], pieces: str, vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer of at most `vocabulary` tokens for texts like these; none crosses a match of the pattern `pieces`."""
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
        clean_up_tokenization_spaces=False,
    )
