"""Cases of one kind: a few run always, the others where all tests run."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def few(cases: Iterable[Any], kept: Collection[str], name: Callable[[Any], str] = str) -> list[Any]:
    """Return the cases as parameters, marked slow except those with a kept name; every kept name must exist."""
    named = {name(case): case for case in cases}
    assert set(kept) <= named.keys(), f"no such cases: {set(kept) - named.keys()}"
    return [pytest.param(case, id=key, marks=() if key in kept else pytest.mark.slow) for key, case in named.items()]
