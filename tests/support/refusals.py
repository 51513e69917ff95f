"""How a refusal is asserted: by its type, its code, its values and remedies, or by what its text holds."""

from collections.abc import Callable
from typing import Any

import pytest

from composer_stages.errors import ComposerError
from composer_stages.words import Remedy


def refused(
    call: Callable[[], object],
    error: type[ComposerError],
    *names: str,
    code: str | None = None,
    remedy: Remedy | None = None,
    **values: Any,
) -> str:
    """Assert that the call raises this error, whose text holds each name; returns the text.

    code: its code. remedy: one of its remedies. values: some of its values.
    """
    with pytest.raises(error) as raised:
        call()
    text = str(raised.value)
    assert [name for name in names if name not in text] == [], text
    assert code is None or raised.value.code == code, (raised.value.code, text)
    assert remedy is None or remedy in raised.value.remedies, (raised.value.remedies, text)
    assert {name: raised.value.values.get(name) for name in values} == values, text
    return text
