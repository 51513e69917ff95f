"""What the tests of disturbances report to `./dev crash`."""

from collections.abc import Callable, Iterator

import pytest
from support.disturbances import Outcome


@pytest.fixture
def outcome(record_property: Callable[[str, object], None]) -> Iterator[Outcome]:
    """What a test disturbs: reported at its end, also where it fails."""
    found = Outcome()
    yield found
    record_property("disturbed", [found.part, dict(found.disturbed)])
