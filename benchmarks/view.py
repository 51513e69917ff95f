"""`composer view` in a headless Chromium: milliseconds to the first byte, the first paint and the load of a page.

    python benchmarks/view.py RUN [--rollouts 1000 100000] [--rounds 7] [--pictures FOLDER]

RUN is the folder of a small collection, which is multiplied to as many rollouts as are asked for, below a temporary
artifacts folder. Medians and the least of the rounds; the first of each page, which reads its files for the first time,
is dropped. `--pictures` saves every page, light, dark and on a phone.
"""

import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import cases
from needs import NEEDS
from records import Claim, measured
from support.browser import browsing
from support.view_site import multiplied, rollout_path, serving_view

from stages.runs import queries
from stages.runs.run import Run

LOOKS = {"light": {}, "dark": {"dark": True}, "phone": {"width": 390, "height": 844}}


def pages_of(run: str, rollout_id: str) -> dict[str, str]:
    """The pages that are measured."""
    copy = rollout_id.rpartition("-")[2]
    return {
        "runs": "",
        "first page of rollouts": f"run/{run}",
        "hacked ones": f"run/{run}?hacked=on",
        "a text": f"run/{run}?text=copy-{copy}",
        "by reward": f"run/{run}?order=reward",
        "a rollout": rollout_path(run, rollout_id),
    }


def pages(
    run: Path, rollouts: tuple[int, ...] = (1_000, 100_000), rounds: int = 7, pictures: Path | None = None
) -> Iterator[Claim]:
    """The load of each page of a run that is multiplied to so many rollouts. pictures: a folder for screenshots."""
    if NEEDS["chromium"].found() is None:
        sys.exit("benchmarks/view.py needs a Chromium. Type: apt install chromium")
    print("| rollouts | page | first byte, ms (least) | paint (least) | load (least) |")
    print("| --- | --- | --- | --- | --- |")
    for number in rollouts:
        with tempfile.TemporaryDirectory() as folder:
            yield from _pages(Path(folder), run, number, rounds, pictures)


def _pages(folder: Path, source: Path, number: int, rounds: int, pictures: Path | None) -> Iterator[Claim]:
    run = multiplied(source.resolve(), folder / "artifacts", number)
    (found,) = queries.page(Run(run), queries.RolloutFilter(), number * 9 // 10, 1).rows
    with serving_view(folder / "artifacts") as site, browsing(folder) as tab:
        for name, path in pages_of(f"collect/{run.name}", found["id"]).items():
            times = []
            for _ in range(rounds + 1):
                tab.open(site.url + path)
                times.append(tab.timing())
            shown = [[t[key] for t in times[1:]] for key in ("first_byte", "paint", "load")]
            cells = " | ".join(f"{statistics.median(ms):.0f} ({min(ms):.0f})" for ms in shown)
            print(f"| {number:,} | {name} | {cells} |", flush=True)
            claim, loads = f"composer view, {number:,} rollouts, {name}: load of the page", shown[-1]
            yield measured(claim, statistics.median(loads), unit="ms", n=len(loads), goal="<= 1000")
            for look, settings in LOOKS.items() if pictures else ():
                tab.look(**settings)
                tab.open(site.url + path)
                tab.picture(pictures / f"{number}-{name.replace(' ', '-')}-{look}.png")
            tab.look()


CASES = {"pages": pages}


if __name__ == "__main__":
    cases.main(__file__, CASES)
