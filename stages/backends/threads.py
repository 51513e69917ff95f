"""How many threads a process computes with."""

import os
import sys


def limit(count: int) -> None:
    """Let libraries compute with so many threads, those that are imported already and those that will be."""
    os.environ["OMP_NUM_THREADS"] = str(count)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(count)
