"""`composer show RUN --follow`: the episodes of a run that is going on, until it ends."""

import time
from collections.abc import Callable
from pathlib import Path

from tabulate import tabulate

from composer_cli.console import duration
from stages.runs.artifact import Run

SHOWN = 30
"""Episodes in one view: those that are at what they do for longest."""
STALE_S = 10.0
"""After so long without a word the process is not there any more, or is not playing."""


def view(run: Run) -> str:
    """One look at a run: its status, and what its live episodes do."""
    told = run.live()
    title = f"{run.path.name}: {run.manifest.status}"
    if told is None:
        return (
            f"{title}\nThere are no live episodes: none is being played, or a model in its own process plays batches."
        )
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


def follow(folder: Path, show: Callable[[str], None], every_s: float = 1.0) -> None:
    """Show a view of a run every so often, and a last one when it is no longer going on."""
    while True:
        run = Run(folder)
        show(view(run))
        if run.manifest.status != "running":
            return
        time.sleep(every_s)
