"""`composer view` in a headless Chromium: milliseconds to the first byte, the first paint and the load of a page.

    python benchmarks/view.py RUN [--rollouts 1000 100000] [--rounds 7] [--pictures FOLDER]

RUN is the folder of a small collection, which is multiplied to as many rollouts as are asked for, below a temporary
artifacts folder. Medians and the least of the rounds; the first of each page, which reads its files for the first time,
is dropped. `--pictures` saves every page, light, dark and on a phone.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]
import records
from records import needed

needed("starlette", "uvicorn", by="python -m pip install -c constraints.txt -e .")

from needs import NEEDS
from support.browser import browsing
from support.view_site import multiplied, rollout_path, serving_view

from stages.runs import queries
from stages.runs.run import Run

QUANTITIES = {"light": {}, "dark": {"dark": True}, "phone": {"width": 390, "height": 844}}


def pages(run: str, rollout_id: str) -> dict[str, str]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--rollouts", type=int, nargs="*", default=[1_000, 100_000])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pictures", type=Path)
    given = parser.parse_args()
    if NEEDS["chromium"].found() is None:
        sys.exit("benchmarks/view.py needs a Chromium. Type: apt install chromium")
    print(
        "| rollouts | page | first byte, ms (least) | paint (least) | load (least) |\n| --- | --- | --- | --- | --- |"
    )
    for number in given.rollouts:
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder), given, number)


def measure(folder: Path, given: argparse.Namespace, number: int) -> None:
    run = multiplied(given.run.resolve(), folder / "artifacts", number)
    (found,) = queries.page(Run(run), queries.RolloutFilter(), number * 9 // 10, 1).rows
    rollout_id = found["id"]
    with serving_view(folder / "artifacts") as site, browsing(folder) as tab:
        for name, path in pages(f"collect/{run.name}", rollout_id).items():
            times = []
            for _ in range(given.rounds + 1):
                tab.open(site.url + path)
                times.append(tab.timing())
            shown = [[t[key] for t in times[1:]] for key in ("first_byte", "paint", "load")]
            cells = " | ".join(f"{statistics.median(ms):.0f} ({min(ms):.0f})" for ms in shown)
            print(f"| {number:,} | {name} | {cells} |", flush=True)
            claim, loads = f"composer view, {number:,} rollouts, {name}: load of the page", shown[-1]
            load = records.measured(claim, statistics.median(loads), unit="ms", n=len(loads), goal="<= 1000")
            records.write(__file__, [load])
            for look, settings in QUANTITIES.items() if given.pictures else ():
                tab.look(**settings)
                tab.open(site.url + path)
                tab.picture(given.pictures / f"{number}-{name.replace(' ', '-')}-{look}.png")
            tab.look()


if __name__ == "__main__":
    main()
