"""Our per-sample cosines beside other ways to get them: time, peak memory, and whether they agree.

    python benchmarks/probe.py [--rows 16] [--tokens 96] [--hidden 128] [--layers 4] [--rounds 15]

All run on one model and the same rows; `probe_contenders` says what each does.

Times: one thread, one process, contenders in turn, the first round dropped, medians of CPU time, which other programs
on the machine disturb least. Memory: a fresh process a contender, warmed up on two rows; the rise of the peak resident
set during one run. `rescoring`: 64 Haar placebos on 1,000 rows that lie in a store, as a new process reads them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")  # freed tensors leave the resident set at once

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]
import records
from records import needed

needed("opacus")

import torch
from probe_contenders import CONTENDERS, EXACT, Setting

from stages.gradients.tensors import GradientStore
from stages.probe.direction import from_flat, haar
from stages.probe.metrics import stacked_cosines

MEBIBYTE = 2**20
COMPARED = (
    ("times as fast as a backward pass a row", "loop", "ours", ">= 1.6"),
    ("times as fast as Opacus", "opacus", "ours", ">= 1.15"),
    ("times as fast as torch.func's vmap", "vmap", "ours", None),
    ("time beside one plain backward pass with the adapter", "ours", "plain", "<= 1.15"),
    ("time beside one plain backward pass without adapter", "ours", "plain frozen", "<= 1.25"),
)
"""Claim, the contender above and the one below the fraction, goal."""


def measure_times(options: argparse.Namespace) -> dict[str, list[float]]:
    """CPU seconds of each contender in every round; asserts that those that give cosines give the same."""
    runs = {name: make(Setting(options, options.rows)) for name, make in CONTENDERS.items()}
    expected = runs["loop"]()
    for name in EXACT:
        assert torch.allclose(runs[name](), expected, atol=1e-5), name
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.rounds + 1):
        for name, run in runs.items():
            started = time.process_time()
            run()
            seconds[name].append(time.process_time() - started)
    return {name: times[1:] for name, times in seconds.items()}


def measure_memory(options: argparse.Namespace) -> dict[str, float]:
    """Rise of the peak resident set in MiB during one run, each contender in a process of its own."""
    arguments = [f"--{key}={getattr(options, key)}" for key in ("rows", "tokens", "hidden", "layers")]
    return {
        name: float(
            subprocess.check_output(
                [sys.executable, __file__, *arguments, f"--peak-of={name}"], stderr=subprocess.DEVNULL
            )
        )
        for name in CONTENDERS
    }


def peak(options: argparse.Namespace) -> float:
    make = CONTENDERS[options.peak_of]
    make(Setting(options, 2))()
    run = make(Setting(options, options.rows))
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    run()
    return (_resident("VmHWM") - before) / MEBIBYTE


def _resident(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def rescoring(options: argparse.Namespace) -> dict[str, float]:
    """Wall seconds for 64 placebos on 1,000 stored rows of this model, from opening the store to the scores."""
    layout = Setting(options, 1).adapter.layout
    with tempfile.TemporaryDirectory() as folder:
        GradientStore.create(Path(folder), layout, 1000, {}).put(0, torch.randn(1000, layout.width))
        started = time.monotonic()
        direction = from_flat(layout, torch.ones(layout.width), layout.names)
        stored = GradientStore(Path(folder))
        stacked_cosines(stored.rows, haar(direction, 64, 0), direction.inside, len(direction.modules))
        return {"rows": 1000, "placebos": 64, "numbers": layout.width, "seconds": time.monotonic() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rows", 16), ("tokens", 96), ("hidden", 128), ("layers", 4), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--peak-of", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak_of:
        print(peak(options))
        return
    times, memory = measure_times(options), measure_memory(options)
    seconds = {name: statistics.median(values) for name, values in times.items()}
    for name in CONTENDERS:
        row = {"contender": name, "ms": round(1000 * seconds[name], 1), "MiB": round(memory[name], 1)}
        ratios = {
            "time / ours": round(seconds[name] / seconds["ours"], 2),
            "memory / ours": round(memory[name] / memory["ours"], 2),
        }
        print(json.dumps(row | ratios))
    print(json.dumps({"rescoring": rescoring(options)}))
    what = f"per-sample cosines, {options.rows} rows of {options.tokens} tokens, {options.layers} layers"
    claims = [
        records.measured(f"{what}: {claim}", *records.ratio(times[over], times[under]), n=options.rounds, goal=goal)
        for claim, over, under, goal in COMPARED
    ]
    share = memory["ours"] / memory["opacus"]
    claims.append(records.measured(f"{what}: peak memory beside Opacus", share, n=1))
    records.write(__file__, claims)


if __name__ == "__main__":
    main()
