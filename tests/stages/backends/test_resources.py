"""The memory that a block may take: what is beyond it is not given, and the limit before it comes back."""

import resource
import subprocess
import sys

import torch

from composer_stages.backends.resources import limited_memory, peak_memory

SPACE = 2**28


IN_A_FRESH_PROCESS = f"""
import resource
from composer_stages.backends.resources import limited_memory

before = resource.getrlimit(resource.RLIMIT_DATA)
with limited_memory({SPACE}):
    assert bytearray({SPACE // 2})
    try:
        bytearray({2 * SPACE})
    except MemoryError:
        print("not given")
assert bytearray({2 * SPACE}) and resource.getrlimit(resource.RLIMIT_DATA) == before
"""


def test_limited_memory_refuses_larger_allocations() -> None:
    """In a process of its own: memory that one has freed and kept is given whatever the limit."""
    done = subprocess.run([sys.executable, "-c", IN_A_FRESH_PROCESS], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("not given\n", 0), done.stderr


def test_a_lower_limit_stays() -> None:
    with limited_memory(SPACE):
        lower = resource.getrlimit(resource.RLIMIT_DATA)
        with limited_memory(2 * SPACE):
            assert resource.getrlimit(resource.RLIMIT_DATA) == lower


def test_the_peak_of_memory_is_in_bytes_and_holds_what_was_freed() -> None:
    before = peak_memory(torch.device("cpu"))
    filled = bytearray(b"x") * (before + 2**26)
    del filled
    assert before + 2**26 <= peak_memory(torch.device("cpu")) < 8 * before + 2**30
