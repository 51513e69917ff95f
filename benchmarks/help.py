"""How long `--help` of every command takes, from the start of the process to its end, beside `trl --help`.

    python benchmarks/help.py [--rounds 10] [--only collect train ""]

Medians and the least of the rounds, in turn, so that a busy machine is busy for all of them. CPU time is that of the
process and its children, which a busy machine hardly changes. `python -X importtime -m composer_cli --help` says what
is imported.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]
import records
from records import needed

needed("typer", "trl", by="python -m pip install -c constraints.txt -e .")

from stages import STAGES, command_words


def commands() -> dict[str, list[str]]:
    """The words of every command, and of TRL's program."""
    own = [sys.executable, "-m", "composer_cli"]
    others = ("", "run", "status", "show", "query", "report", "view", "serve", "probe")
    names = [command_words(name).removeprefix("composer ") for name in STAGES] + list(others)
    found = {f"composer {name}".strip(): [*own, *name.split(), "--help"] for name in sorted(names)}
    return {**found, "trl": [str(Path(sys.executable).parent / "trl"), "--help"]}


def measured(words: list[str]) -> tuple[float, float]:
    """Seconds by the clock and of the CPU."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(words, env=env, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - started, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", nargs="*", help="Commands without the word composer; all if left out.")
    given = parser.parse_args()
    rounds, wanted = given.rounds, commands()
    if given.only is not None:
        names = {"trl", *(f"composer {name}".strip() for name in given.only)}
        wanted = {name: words for name, words in wanted.items() if name in names}
    for words in wanted.values():
        measured(words)  # reads the files for the first time
    times = {name: [] for name in wanted}
    for _ in range(rounds):
        for name, words in wanted.items():
            times[name].append(measured(words))
    print("| `--help` of | by the clock, ms (least) | CPU, ms (least) |\n| --- | --- | --- |")
    claims = []
    for name, pairs in times.items():
        cells = [
            f"{1000 * statistics.median(column):.0f} ({1000 * min(column):.0f})" for column in zip(*pairs, strict=True)
        ]
        print(f"| `{name}` | {' | '.join(cells)} |")
        if name != "trl":
            processor = ([cpu for _, cpu in rounds_of] for rounds_of in (pairs, times["trl"]))
            claim = f"{name} --help: processor time beside trl --help"
            claims.append(records.measured(claim, *records.ratio(*processor), n=rounds))
    records.write(__file__, claims)


if __name__ == "__main__":
    main()
