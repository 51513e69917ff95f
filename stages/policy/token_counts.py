"""The fewest tokens that a text can have: by its words, or by its model's own tokenizer where that is known here."""

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

LONGEST_TOKEN = 1024
"""Bytes of the longest token in any vocabulary we found: Claude 2's, 1,024 NUL characters. Others end at 128."""
LETTER = re.compile(r"[^\W\d_]")


def least_tokens(text: str) -> int:
    """Return a number of tokens that hardly a tokenizer of a server goes below.

    No token holds letters from both sides of a space, because tokenizers split text at spaces first. Held true by all
    909,000 tokens of OpenAI's r50k, p50k, cl100k and o200k, Mistral's v1 to v7 and Tekken, and Claude 2. English has
    1.3 tokens a word, code 2 to 3; text without spaces, such as Chinese, is bounded by its bytes only. SuperBPE (OLMo2)
    merges words, and may count fewer.
    """
    return max(
        sum(map(bool, map(LETTER.search, text.split()))),
        -(-len(text.encode("utf-8", "surrogatepass")) // LONGEST_TOKEN),
    )


@lru_cache(16)
def tokenizer(model: str) -> Any:
    """Return a function that counts tokens with a model's own tokenizer; None if that tokenizer is not available.

    It is known where the model's name is a folder, or a hub id whose tokenizer this machine has downloaded before, and
    where the library of tokenizers is installed. Nothing is downloaded for it. The first call imports what all take.
    """
    try:
        from huggingface_hub import try_to_load_from_cache
        from tokenizers import Tokenizer
    except ModuleNotFoundError:  # of the extra `train`, without which answers are read, too
        return None

    path: Any = Path(model) / "tokenizer.json"
    try:
        if not path.is_file():
            path = try_to_load_from_cache(model, "tokenizer.json")
    except ValueError:  # a name that no file or no repository can have
        return None
    if not isinstance(path, str | Path):
        return None
    try:
        loaded = Tokenizer.from_file(str(path))
    except Exception:  # tokenizers raises a bare Exception for a file that it cannot read
        return None
    loaded.no_truncation()
    loaded.no_padding()  # a file may be saved with a length to which every text is filled up

    @lru_cache(4096)  # a conversation's messages come again with each of its steps
    def count(text: str) -> int:
        # Less two and a twentieth: where text meets the template, a token may take in the end of a message; and a
        # sampled text may have fewer tokens than the tokenizer makes of it.
        tokens = len(loaded.encode(text.strip(), add_special_tokens=False).ids)
        return max(tokens - 2 - tokens // 20, least_tokens(text.strip()), 0)

    return count
