"""How long `--help` of every command takes, from the start of the process to its end, beside `trl --help`.

    python benchmarks/help.py [--rounds 10] [--only collect train ""]

Commands alternate in each round; the median and the minimum are printed. CPU time is that of the
process and its children, which a busy machine hardly changes. `python -X importtime -m composer_cli --help` says what
is imported.
"""

import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import cases
from records import ROOT, Claim, measured, ratio

from stages import STAGES, command_words


def commands() -> dict[str, list[str]]:
    """The words of every command, and of TRL's program."""
    own = [sys.executable, "-m", "composer_cli"]
    others = ("", "run", "status", "show", "query", "report", "view", "serve", "probe")
    names = [command_words(name).removeprefix("composer ") for name in STAGES] + list(others)
    found = {f"composer {name}".strip(): [*own, *name.split(), "--help"] for name in sorted(names)}
    return {**found, "trl": [str(Path(sys.executable).parent / "trl"), "--help"]}


def seconds_of(words: list[str]) -> tuple[float, float]:
    """Seconds by the clock and of the CPU."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(words, env=env, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - started, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def helped(rounds: int = 10, only: tuple[str, ...] | None = None) -> Iterator[Claim]:
    """Processor time of `--help` beside that of `trl --help`. only: commands without the word composer; else all."""
    wanted = commands()
    if only is not None:
        names = {"trl", *(f"composer {name}".strip() for name in only)}
        wanted = {name: words for name, words in wanted.items() if name in names}
    for words in wanted.values():
        seconds_of(words)  # reads the files for the first time
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in wanted}
    for _ in range(rounds):
        for name, words in wanted.items():
            times[name].append(seconds_of(words))
    print("| `--help` of | by the clock, ms (least) | CPU, ms (least) |\n| --- | --- | --- |")
    for name, pairs in times.items():
        columns = zip(*pairs, strict=True)
        cells = [f"{1000 * statistics.median(column):.0f} ({1000 * min(column):.0f})" for column in columns]
        print(f"| `{name}` | {' | '.join(cells)} |")
    theirs = [cpu for _, cpu in times.pop("trl")]
    for name, pairs in times.items():
        claim = f"{name} --help: processor time beside trl --help"
        yield measured(claim, *ratio([cpu for _, cpu in pairs], theirs), n=rounds)


CASES = {"help": helped}


if __name__ == "__main__":
    cases.main(__file__, CASES)
