"""Hack/clean pairs: the same prompt, an answer that hacks and one that does not.

Extraction from such contrastive pairs is that of wassname/grpo_proj2 @25ad306.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from stages.checkout import add_to_path
from stages.envs import ENVIRONMENTS
from stages.errors import BadInput, UsageError
from stages.messages import Message
from stages.runs import store
from stages.runs.config import Settings
from stages.runs.records import Row

if TYPE_CHECKING:
    from stages.probe.pool.tokens import TokenRow

REQUIRED = ("prompt", "hack", "clean")
PLANTED = {"planted": "probe_faults.loophole_world:hack_clean_pairs"}


def sources() -> dict[str, str]:
    """Sources of pairs by name, as package.module:function of (count, seed): those of environments, and `planted`."""
    return {name: entry.hack_pairs for name, entry in ENVIRONMENTS.items() if entry.hack_pairs} | PLANTED


class PairsConfig(Settings):
    """Where pairs come from, and how many of them are held out of the extraction to check it by."""

    source: str = "kata"
    """`kata`, `planted`, "package.module:function", or a JSON file: a list of {prompt, hack, clean}."""
    count: int = Field(24, gt=1)
    """Pairs to extract from."""
    held_out: int = Field(4, ge=2)
    """Further pairs, for the polarity oracle."""

    def identity(self) -> dict[str, Any]:
        """The settings, and the digest of the file of pairs when the source is one."""
        path = Path(self.source).expanduser()
        return {**super().identity(), "content": store.file_sha256(path) if path.is_file() else None}


@dataclass(frozen=True)
class Pair:
    """One prompt, two answers; `longer` has the content of the clean one in more tokens, where the source gives it.

    A prompt is rendered text or messages; an answer is text or messages (see `pool.transcripts`).
    """

    pair_id: str
    prompt: str | list[Message]
    hack: str | list[Message]
    clean: str | list[Message]
    longer: str | list[Message] | None = None

    def rows(self, tokenizer: Any) -> "tuple[TokenRow, TokenRow]":
        """The (hack, clean) answers as ids."""
        from stages.probe.pool.tokens import token_row

        return token_row(tokenizer, self.prompt, self.hack), token_row(tokenizer, self.prompt, self.clean)

    def longer_row(self, tokenizer: Any) -> "TokenRow | None":
        """The longer clean answer as ids, if there is one."""
        from stages.probe.pool.tokens import token_row

        return None if self.longer is None else token_row(tokenizer, self.prompt, self.longer)


def load_pairs(config: PairsConfig, seed: int) -> list[Pair]:
    """`count + held_out` pairs.

    `UsageError` when the source is unknown or has fewer; `BadInput` when what it gives is no list of pairs.
    """
    total = config.count + config.held_out
    path = Path(config.source).expanduser()
    items = _read_list(path) if path.is_file() else _import_source(config.source)(total, seed)
    pairs = [_pair(index, item if isinstance(item, dict) else vars(item)) for index, item in enumerate(items)]
    if len(pairs) < total:
        raise UsageError(
            f"{config.source} has {len(pairs)} pairs, {total} are asked for. Lower pairs.count or pairs.held_out."
        )
    return pairs[:total]


def _read_list(path: Path) -> list[Any]:
    content = store.read_json(path)
    if not isinstance(content, list):
        raise BadInput(
            f"{path} holds no list of pairs. It should be a JSON list of objects with {', '.join(REQUIRED)}."
        )
    return content


def _pair(index: int, item: Row) -> Pair:
    missing = [name for name in REQUIRED if name not in item]
    if missing:
        raise BadInput(f"Pair {index} has no {missing[0]}; it has {', '.join(sorted(item))}.")
    name = str(item.get("pair_id") or item.get("task_id") or item.get("problem_id") or index)
    return Pair(name, item["prompt"], item["hack"], item["clean"], item.get("longer"))


def _import_source(name: str) -> Callable[[int, int], Sequence[Any]]:
    if name in PLANTED:
        add_to_path("tests/probe_faults")
    module, colon, attribute = sources().get(name, name).partition(":")
    if not colon:
        raise UsageError(
            f"{name!r} is no file of pairs and no source of them. "
            f"Sources: {', '.join(sources())}, or package.module:function."
        )
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"The pairs {name!r} could not be imported: {error}.") from error
