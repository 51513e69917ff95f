"""How a refusal is asserted: by its type, and by the value and the remedy in its text."""

from collections.abc import Callable

import pytest

from stages.errors import ComposerError


def refused(call: Callable[[], object], error: type[ComposerError], *names: str) -> str:
    """Assert that the call raises this error and that its text holds each name; returns the text."""
    with pytest.raises(error) as found:
        call()
    text = str(found.value)
    assert [name for name in names if name not in text] == [], text
    return text
