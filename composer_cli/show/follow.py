"""`composer show RUN --follow` and `--watch`: what goes on inside runs, episode by episode or step by step."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import orjson
from tabulate import tabulate

from composer_cli.console import duration
from composer_cli.report.facts import METRICS
from stages.errors import BadInput
from stages.runs.artifact import Run
from stages.runs.records import Row

SHOWN = 30
"""Episodes in one view: those that are at what they do for longest."""
STEPS = 12
"""Training steps in one view: the newest."""
STALE_S = 10.0
"""After so long without a word the process is not there any more, or is not playing."""


def view(run: Run) -> str:
    """One look at a run: its status, and what its live episodes do or its last training steps gave."""
    told, title = run.live(), f"{run.path.name}: {run.manifest.status}"
    if told is not None:
        return _episodes(title, told)
    if logged := (run.read_file("metrics.jsonl") or b"").splitlines():
        return _steps(title, [orjson.loads(line) for line in logged[-STEPS:]])
    if run.manifest.stage == "train":
        return f"{title}\nNo training step is finished yet."
    return f"{title}\nThere are no live episodes: none is being played, or a model in its own process plays batches."


def _episodes(title: str, told: Row) -> str:
    units, silence_s = told["units"], time.time() - told["at"]
    title += f", {told['done']} of {told['total']} finished, {len(units)} live"
    if silence_s > STALE_S:
        title += f", last heard of {duration(silence_s)} ago"
    slowest = sorted(units, key=lambda unit: (-unit["doing_s"], unit["rollout_id"]))
    cells = [
        (unit["rollout_id"], unit["steps"], unit["doing"], duration(unit["doing_s"]), duration(unit["wall_s"]))
        for unit in slowest[:SHOWN]
    ]
    table = tabulate(cells, headers=("rollout", "steps", "doing", "for", "in all"), tablefmt="plain")
    more = f"\nand {len(units) - SHOWN} more" if len(units) > SHOWN else ""
    return f"{title}\n{table}{more}"


def _steps(title: str, rows: list[Row]) -> str:
    """The newest training steps, with those of the report's metrics that were logged."""
    names = [name for name in METRICS if any(name in row for row in rows)]
    cells = [[row.get("step"), *(row.get(name) for name in names)] for row in rows]
    headers = ("step", *names)
    return f"{title}\n{tabulate(cells, headers=headers, tablefmt='plain', floatfmt='.4g')}"


def follow(folder: Path, show: Callable[[str], None], every_s: float = 1.0) -> None:
    """Show a view of a run every so often, and a last one when it is no longer going on."""
    while True:
        run = Run(folder)
        show(view(run))
        if run.manifest.status != "running":
            return
        time.sleep(every_s)


class Views:
    """Views of several runs under way, looked at every so often by a thread."""

    def __init__(self, every_s: float = 1.0) -> None:
        self._every_s, self._over = every_s, threading.Event()
        self._places: dict[str, Callable[[], Path | None]] = {}
        self._texts: dict[str, str] = {}
        self._thread = threading.Thread(target=self._look, daemon=True)

    def look(self, title: str, place: Callable[[], Path | None]) -> None:
        """Look at this one too; `place` gives its folder, or None before there is one."""
        self._places[title] = place

    def away(self, title: str) -> None:
        """It has ended."""
        self._places.pop(title, None)
        self._texts.pop(title, None)

    def texts(self) -> list[str]:
        """The newest views, in the order in which the runs began."""
        return list(self._texts.values())

    def _look(self) -> None:
        while not self._over.wait(self._every_s):
            for title, place in list(self._places.items()):
                try:
                    folder = place()
                    text = view(Run(folder)) if folder else ""
                except (BadInput, OSError):  # the run is just being begun, or cleaned up
                    continue
                if text and title in self._places:
                    self._texts[title] = text

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
