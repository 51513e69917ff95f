"""What a small model of an architecture shows of the fast ways to compute: tried once, and kept.

A check holds each way against the model's own forward pass of one row alone. Its outcome is kept in the user's cache,
by the digest of the configuration, the versions of the libraries, and the code of the ways.
"""

import math
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import orjson
import torch

from composer_stages.errors import BadInput
from composer_stages.policy import kv_cache, small_models
from composer_stages.policy.gguf import user_cache
from composer_stages.runs import store
from composer_stages.runs.activity import activity
from composer_stages.stopping import Interrupted

AGREEING = 1e-4
"""Largest difference of log-probs in nats, and of gradients as a part of the largest one, in float32."""
MOST = 1e-3
"""What counts as rounding at most."""
NO_SHAPE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "id2label", "label2id")
Check = Callable[[Any, int], dict[str, Any]]
"""From a small model, and the longest length at which it switches (0 without any), to what it shows, as JSON."""
_known: dict[str, dict[str, Any]] = {}
_of_models: WeakKeyDictionary[Any, dict[Any, dict[str, Any]]] = WeakKeyDictionary()


def outcome(model: Any, check: Check) -> dict[str, Any]:
    """Return what a check shows of a loaded model's architecture."""
    attention, known = _attention(model.config), _of_models.setdefault(model, {})
    if (attention, check) not in known:
        known[attention, check] = outcome_of(model.config, check)
    return known[attention, check]


def _attention(config: Any) -> str | None:
    name = config.get_text_config()._attn_implementation
    return "sdpa" if name in kv_cache.SCALED_DOT_PRODUCT else name


def outcome_of(config: Any, check: Check) -> dict[str, Any]:
    """Return what a check shows of an architecture, or {"unmade": reason} where no small model of it is made."""
    shape = orjson.loads(config.to_json_string(use_diff=False))
    shape = {name: value for name, value in shape.items() if name not in NO_SHAPE}
    files = [module.__file__ or "" for module in (kv_cache, small_models, sys.modules[check.__module__])]
    code = [store.known_sha256(Path(file)) for file in (*files, __file__)]
    versions = [version(name) for name in ("torch", "transformers", "peft")]
    attention = _attention(config)
    digest = store.digest([check.__qualname__, type(config).__name__, shape, attention, versions, code])
    if digest not in _known:
        path = user_cache() / "architectures" / f"{digest}.json"
        try:
            _known[digest] = store.read_json(path)
        except (BadInput, OSError):
            _known[digest] = _tried(config, attention, check)
            with suppress(OSError):  # else it is one for this process alone
                store.write_json(path, _known[digest])
    return _known[digest]


def _tried(config: Any, attention: str | None, check: Check) -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # layers are too narrow for more
    try:
        # Whatever the caller is in the middle of: sampling without gradients, or a pass under autocast.
        with (
            activity("trying a small model of the architecture"),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            torch.random.fork_rng(devices=[]),
            warnings.catch_warnings(action="ignore"),
        ):
            return check(small_models.small_model(config, attention), small_models.longest_switch(config))
    except small_models.Unmade as error:
        return {"unmade": str(error)}
    finally:
        torch.set_num_threads(threads)


def longest(ways: Mapping[str, Any], way: str, config: Any) -> float:
    """Return the tokens of the longest rows that a way is right for: all, those before the first switch, or none.

    Rows behind the context of a dynamic rope are not tried: its frequencies depend on the length of the entire pass.
    """
    tried = {"all": math.inf, "before": small_models.first_switch(config)}.get(ways.get(way, ""), 0)
    return min(tried, small_models.dynamic_context(config) or math.inf)


def rounding(model: Any) -> float:
    """Return the difference that counts as rounding: `AGREEING`, or more where a recurrence magnifies its own.

    That is measured on a row that is too short to switch: all of it at once, and each token behind those before it.
    """
    ids = list(range(5, 5 + small_models.SWITCH))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    whole = logits[3:-1].log_softmax(-1).gather(-1, torch.tensor(ids[4:])[:, None])[:, 0]
    apart = small_models.log_probs_alone(model, ids[:4], ids[4:], range(len(ids) - 4))
    return min(max(AGREEING, 4 * float((whole - apart).abs().max())), MOST)


def agrees(compute: Callable[[], torch.Tensor], most: float = AGREEING) -> str:
    """Return "" where the differences that are computed vanish, else how large they are, or what was raised."""
    try:
        difference = float(compute().abs().max())
    except Interrupted:
        raise
    except Exception as error:  # a way that does not fit fails in the words of each architecture
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return "" if difference <= most else f"off by {difference:.2g}"


def try_lengths(compute: Callable[[int], torch.Tensor], switch: int, most: float = AGREEING) -> tuple[str | None, str]:
    """Return for which rows a way is right, "all", "before" the first switch or None, and what is wrong with others.

    compute: from the length that rows shall pass to the differences. most: that count as rounding.
    """
    if not (wrong := agrees(lambda: compute(switch), most)):
        return "all", ""
    return ("before" if switch and not agrees(lambda: compute(0), most) else None), wrong
