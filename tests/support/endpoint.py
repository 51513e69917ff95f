"""An endpoint policy as its tests open it, and questions to it."""

from pathlib import Path
from typing import Any

from stages.policy.base import PolicyConfig, Turn
from stages.policy.endpoint import EndpointPolicy
from stages.runs.ledger import Budget


def open_at(url: str, cache: Path, budget: Budget | None = None, **settings: Any) -> EndpointPolicy:
    """A policy at this address with prices, 1 and 2 USD a million tokens in and out."""
    config = PolicyConfig(model="big", base_url=url, **{"usd_per_mtok_in": 1.0, "usd_per_mtok_out": 2.0, **settings})
    return EndpointPolicy(config, budget=budget or Budget(), cache=cache)


def turns(*texts: str) -> list[Turn]:
    """A question of each text."""
    return [Turn([{"role": "user", "content": text}], seed=i) for i, text in enumerate(texts)]
