"""How long something took, from the timestamps that foreign records hold."""

from datetime import datetime
from typing import Any


def seconds(begin: Any, end: Any) -> float | None:
    """Seconds between two ISO 8601 timestamps; None where either is none, or they do not follow each other."""
    try:
        passed = (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds()
    except (TypeError, ValueError):
        return None
    return passed if passed >= 0 else None
