"""What a small model of an architecture shows of the fast ways to compute: tried once, and kept.

A check holds each way against the model's own forward pass of one row alone, in float32, and in float64 where that
differs. Its outcome is kept in the user's cache,
by the digest of the configuration, the versions of the libraries, and the code of the ways.
"""

import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import orjson
import torch
from torch.overrides import TorchFunctionMode

from composer_stages.errors import BadInput
from composer_stages.policy import kv_cache, small_models
from composer_stages.policy.gguf import user_cache
from composer_stages.runs import store
from composer_stages.runs.activity import activity
from composer_stages.stopping import Interrupted

AGREEING = 1e-4
"""Largest difference of log-probs in nats, and of gradients as a part of the largest one."""
ROUNDING = 0.1
"""What rounding may come to in float32 where a recurrence magnifies it, or it decides between experts."""
NO_SHAPE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "id2label", "label2id")
Check = Callable[[Any, int], dict[str, Any]]
"""From a small model, and the longest length at which it switches (0 without any), to what it shows, as JSON."""
_known: dict[str, dict[str, Any]] = {}
_of_models: WeakKeyDictionary[Any, dict[Any, dict[str, Any]]] = WeakKeyDictionary()


def outcome(model: Any, check: Check) -> dict[str, Any]:
    """Return what a check shows of a loaded model's architecture."""
    kind, outcomes = attention(model.config), _of_models.setdefault(model, {})
    if (kind, check) not in outcomes:
        outcomes[kind, check] = outcome_of(model.config, check)
    return outcomes[kind, check]


def attention(config: Any) -> str | None:
    """Return transformers' name of the kind of attention of a model; `sdpa` for our own kinds of it."""
    name = config.get_text_config()._attn_implementation
    return "sdpa" if name in kv_cache.SCALED_DOT_PRODUCT else name


def outcome_of(config: Any, check: Check) -> dict[str, Any]:
    """Return what a check shows of an architecture, or {"unmade": reason} where no small model of it is made."""
    shape = orjson.loads(config.to_json_string(use_diff=False))
    shape = {name: value for name, value in shape.items() if name not in NO_SHAPE}
    files = [module.__file__ or "" for module in (kv_cache, small_models, sys.modules[check.__module__])]
    code = [store.known_sha256(Path(file)) for file in (*files, __file__)]
    versions = [version(name) for name in ("torch", "transformers", "peft")]
    digest = store.digest([check.__qualname__, type(config).__name__, shape, attention(config), versions, code])
    if digest not in _known:
        path = user_cache() / "architectures" / f"{digest}.json"
        try:
            _known[digest] = store.read_json(path)
        except (BadInput, OSError):
            _known[digest] = _tried(config, check)
            with suppress(OSError):  # else it is one for this process alone
                store.write_json(path, _known[digest])
    return _known[digest]


def _tried(config: Any, check: Check) -> dict[str, Any]:
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
            return check(small_models.small_model(config, attention(config)), small_models.longest_switch(config))
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


class _Float64(TorchFunctionMode):
    """Computes in float64 what a model's code asks to be computed in float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        wide = [torch.float64 if each is torch.float32 else each for each in args]
        named = {key: torch.float64 if each is torch.float32 else each for key, each in (kwargs or {}).items()}
        return func(*wide, **named)


@contextmanager
def float64(model: Any) -> Iterator[None]:
    """Compute a float32 model in float64 inside the block."""
    experts = model.config._experts_implementation
    model.set_experts_implementation("eager")  # the others multiply no float64
    try:
        model.double()
        with _Float64():
            yield
    finally:
        model.float().set_experts_implementation(experts)


def agrees(model: Any, compute: Callable[[], torch.Tensor]) -> str:
    """Return "" where the differences that are computed vanish, else how large they are, or what was raised.

    Differences of float32 that may be `ROUNDING` are computed again in float64.
    """
    try:
        difference = float(compute().abs().max())
        if AGREEING < difference < ROUNDING:
            with suppress(RuntimeError, TypeError, ValueError), float64(model):
                difference = float(compute().abs().max())
    except Interrupted:
        raise
    except Exception as error:  # a way that does not fit fails in the words of each architecture
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return "" if difference <= AGREEING else f"off by {difference:.2g}"


def try_lengths(model: Any, compute: Callable[[int], torch.Tensor], switch: int) -> tuple[str | None, str]:
    """Return for which rows a way is right, "all", "before" the first switch or None, and what is wrong with others.

    compute: from the length that rows shall pass to the differences.
    """
    if not (wrong := agrees(model, lambda: compute(switch))):
        return "all", ""
    return ("before" if switch and not agrees(model, lambda: compute(0)) else None), wrong
