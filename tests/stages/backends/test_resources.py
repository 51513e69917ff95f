"""The memory that a block may take: what is beyond it is not given, and the limit before it comes back."""

import resource

import pytest

from stages.backends.resources import limited_memory

SPACE = 2**28


def test_more_memory_than_a_block_may_take_is_not_given() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with limited_memory(SPACE):
        assert bytearray(SPACE // 2)
        with pytest.raises(MemoryError):
            bytearray(2 * SPACE)
    assert bytearray(2 * SPACE) and resource.getrlimit(resource.RLIMIT_DATA) == before


def test_a_lower_limit_stays() -> None:
    with limited_memory(SPACE):
        lower = resource.getrlimit(resource.RLIMIT_DATA)
        with limited_memory(2 * SPACE):
            assert resource.getrlimit(resource.RLIMIT_DATA) == lower
