"""Which trainings give large blocks back to the system as they are freed (`composer_stages.backends.resources`)."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.models import save_larger, save_tiny

from composer_stages.backends import resources

TESTS = Path(__file__).resolve().parents[2]
PROGRAM = """
import ctypes, sys
from pathlib import Path
from composer_stages import train
from composer_stages.runs import runner

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
        ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.mallinfo2.restype = Info
libc.free(libc.malloc(30_000_000))  # from here on glibc by itself takes such blocks from the heap
config = train.Config(
    env={"name": "support.environments:GuessEnv"}, policy={"model": sys.argv[1], "max_tokens": 4, "device": "cpu"},
    tasks=1, optimisation={"steps": 1, "prompts_per_step": 1, "generations": 2, "threads": 1},
)
runner.execute("train", {}, config, root=Path(sys.argv[2]))
before = libc.mallinfo2().hblks
libc.malloc(29_000_000)
print(libc.mallinfo2().hblks - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="this C library does not count its blocks")
@pytest.mark.parametrize("save", [save_tiny, save_larger])
def test_freed_memory_is_kept_where_memory_abounds(tmp_path: Path, save: Callable[[Path], Path]) -> None:
    """A block of 29 MB would be mapped by itself where blocks are given back."""
    model = save(tmp_path / "model")
    clean = {name: value for name, value in os.environ.items() if name != resources.VARIABLE}
    clean["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    words = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(model), str(tmp_path / "runs")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=clean | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) == 0
