"""A tokenizer of single letters, saved as a model's folder."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from composer_stages.policy.token_counts import tokenizer


def letter_tokenizer(folder: Path, **fields: Any) -> str:
    """Save the tokenizer in a folder, with these fields of its file replaced; return the folder as a model's name."""
    letters = {letter: i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz ")}
    made = Tokenizer(models.WordLevel({**letters, "?": 27}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps({**json.loads(made.to_str()), **fields}))
    tokenizer.cache_clear()
    return str(folder)
