"""Prices of models at known hosts, from the package `genai-prices` where it is installed (the extra `prices`).

The package tells hosts by their addresses and models by their names; what it does not know has no price. Its own
arithmetic counts, with its tiers by the length of a prompt. Prices of settings come before these.
"""

import functools
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

PACKAGE = "genai-prices"
COUNTED = {"input_mtok", "output_mtok", "cache_read_mtok", "cache_write_mtok"}
MEDIA = ("audio", "image", "video", "searches", "_1h_", "document")
"""Parts of the names of prices of what no request of ours asks for. A model with a price of any other kind has none."""


@dataclass(frozen=True)
class TablePrice:
    """The price of a model by a public table. source: the package with its version and the date of its newest price."""

    source: str
    model: str
    _price: Any

    def cost(self, prompt: int, completion: int, cached: int, written: int) -> float:
        """Return the price of a call in USD; counts that no call can have are taken as the nearest that one can."""
        from genai_prices import Usage

        cached = min(max(cached, 0), max(prompt, 0))
        written = min(max(written, 0), max(prompt, 0) - cached)
        counts = {"cache_read_tokens": cached, "cache_write_tokens": written, "output_tokens": max(completion, 0)}
        return float(self._price.calc_price(Usage(input_tokens=max(prompt, 0), **counts))["total_price"])


def _is_of(pattern: str, base_url: str) -> bool:
    """Return whether a provider's pattern, which the package only matches with the beginning, covers the whole host."""
    parts = urlsplit(base_url)
    host, has_path = f"https://{parts.hostname}", "/" in pattern.rpartition("//")[2]
    match = re.match(pattern, host + parts.path if has_path else host)
    if match is None:
        return False
    rest = host[match.end() :]
    # Moonshot's pattern ends before the last part of the name, which differs by country.
    return not rest or (pattern.endswith(r"\.") and "." not in rest)


@functools.cache
def table_price(base_url: str, model: str) -> TablePrice | None:
    """Return the price of a model at an address, as it is now; None where the package is absent or knows none."""
    if not base_url.startswith("https://"):  # as all that the package knows: others need not wait for its import
        return None
    try:
        from genai_prices import __version__
        from genai_prices.data_snapshot import get_snapshot
    except ModuleNotFoundError:
        return None
    snapshot, now = get_snapshot(), datetime.now(UTC)
    try:
        provider, provider_model = snapshot.find_provider_model(model, None, None, base_url)
    except LookupError:
        return None
    if not _is_of(provider.api_pattern, base_url):
        return None
    price = provider_model.get_prices(now)
    kinds = {name for name, value in vars(price).items() if value is not None}
    others = [name for name in kinds - COUNTED if not any(part in name for part in MEDIA)]
    if others or not {"input_mtok", "output_mtok"} <= kinds:
        return None
    dates = [
        start
        for provider in snapshot.providers
        for entry in provider.models
        if isinstance(entry.prices, list)
        for conditional in entry.prices
        if (start := getattr(conditional.constraint, "start_date", None)) is not None and start <= now.date()
    ]
    newest = f", its newest price of {max(dates)}" if dates else ""
    return TablePrice(f"{PACKAGE} {__version__}{newest}", provider_model.id, price)
