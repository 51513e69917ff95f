"""What chains on every executor are tried with: a model server whose answers can be held back."""

from collections.abc import Iterator

import pytest
from support.server import Server, serving

from tests.composer_cli.executors.submitting import Held


@pytest.fixture
def held() -> Held:
    return Held()


@pytest.fixture
def model(held: Held) -> Iterator[Server]:
    with serving(held) as server:
        yield server
