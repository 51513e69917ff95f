"""`composer show RUN --follow` and `--watch`: what happens inside runs, rollout by rollout or step by step."""

import re
import time
from collections.abc import Callable
from pathlib import Path

from composer_cli.show.facts import METRICS, metric_rows
from composer_stages.layout import LEFT, RIGHT, aligned, duration
from composer_stages.runs.display import cell
from composer_stages.runs.kinds import Row
from composer_stages.runs.run import Run
from composer_stages.words import Sentence

SHOWN = 30
"""Rollouts in one view: those whose present action has lasted longest."""
STEPS = 12
"""Training steps in one view: the newest."""
SEED = re.compile(r"(@\d{4})\d+$")
STALE_S = 10.0
"""After so many seconds without an update the process has ended, or plays no rollouts."""


def view(run: Run) -> str:
    """Return the status of a run, with its live rollouts or its last training steps, as text."""
    title = f"{run.path.name}: {run.manifest.status}"
    # The state is there while rollouts are played here, and for a moment after; a model in this process has none.
    if run.manifest.status != "complete" and (live := run.live()) is not None:
        return _rollouts(title, live)
    if rows := metric_rows(run, last=STEPS):
        names = [name for name in METRICS if any(name in row for row in rows)]
        cells = [[cell(row.get(name), "short") for name in ("step", *names)] for row in rows]
        return f"{title}\n{aligned(cells, ('step', *names), [RIGHT] * (1 + len(names)))}"
    if run.manifest.stage == "train":
        return Sentence("cli.no-step-yet", title=title)
    return Sentence("cli.no-live-rollouts", title=title)


def _rollouts(title: str, live: Row) -> str:
    """Return a table of the rollouts that are being played, the slowest first."""
    units, silence_s = live["units"], time.time() - live["at"]
    title += f", {live['done']} of {live['total']} finished, {len(units)} live"
    if silence_s > STALE_S:
        title += f", last heard of {duration(silence_s)} ago"
    slowest = sorted(units, key=lambda unit: (-unit["doing_s"], unit["rollout_id"]))[:SHOWN]
    # Of the long seeds of a training some digits are enough: any part of an id is found.
    ids = [SEED.sub(r"\1", unit["rollout_id"]) for unit in slowest]
    cells = [
        (rollout_id, unit["steps"], unit["doing"], duration(unit["doing_s"]), duration(unit["wall_s"]))
        for rollout_id, unit in zip(ids, slowest, strict=True)
    ]
    table = aligned(cells, ("rollout", "steps", "doing", "for", "in all"), (LEFT, RIGHT, LEFT, RIGHT, RIGHT))
    more = f"\nand {len(units) - SHOWN} more" if len(units) > SHOWN else ""
    return f"{title}\n{table}{more}"


def follow(folder: Path, show: Callable[[str], None], every_s: float = 1.0) -> None:
    """Show a view of a run every so often while it runs, and a last one when it has ended."""
    while True:
        run = Run(folder)
        show(view(run))
        if run.manifest.status != "running":
            return
        time.sleep(every_s)
